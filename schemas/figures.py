"""Finds the figures that settings name in the results of evaluations."""

from collections.abc import Mapping

from penstock.schemas.config import RunConfig, named_figures, split_figure
from penstock.schemas.metrics import REWARD, figures_of, pass_key


def figure_in(name: str, figures: Mapping[str, float], environments: Mapping[str, Mapping[str, float]]) -> float | None:
    """Returns the evaluation's figure that `checkpoint.best` names, or None. environments: figures by environment."""
    environment, key = split_figure(name)
    return (environments.get(environment, {}) if environment else figures).get(key)


def missing_figures(
    config: RunConfig, figures: Mapping[str, float], environments: Mapping[str, Mapping[str, float]]
) -> dict[str, str]:
    """Returns the problem by setting, `field = value`, for each setting whose figure an evaluation lacks. An evaluation
    without answers shows no problem.

    figures, environments: of `held_out_figures`, over all prompts and by environment.
    """
    found = {}
    for setting, environment, figure in named_figures(config):
        measured = environments.get(environment, {}) if environment else figures
        is_solved = "solved.figure" in setting
        wanted = {pass_key(k) for k in config.held_out[environment].pass_at} if is_solved else {figure}
        if "completion_tokens" in measured and not measured.keys() >= wanted:
            is_best = setting.startswith("checkpoint.best")
            place = f"environments/{environment}/" if is_best and environment else ""
            known = [place + name for name in figures_of(measured) if is_best or name.startswith(REWARD)]
            of, effect = (
                f" of {environment}" if environment else "",
                ", so that there is no pass@k" if is_solved else "",
            )
            found[setting + of] = f"held-out answers have no such figure{effect}; expected {' or '.join(known)}"
    return found
