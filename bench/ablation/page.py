"""The ablation's tables as markdown."""

import math
from collections.abc import Callable, Sequence
from statistics import fmean

from bench.ablation.distances import MEASURES, STANDS_OUT, Measure, distance
from bench.ablation.plan import AblationPlan, Arm
from bench.ablation.results import LAST_UPDATES, AblationResult, of_arm
from bench.experiments.page import table

MOST_TIMES = 1000
"""Larger multiples are shown as such: the reference may hardly move."""
NOT_RUN = "not run"


def render(plan: AblationPlan, results: Sequence[AblationResult]) -> str:
    """Returns the tables of an ablation; arms without a result say so."""
    return "\n".join(
        [_provenance(results), _distances(plan, results), _findings(plan, results), _levels(plan, results)]
    )


def _provenance(results: Sequence[AblationResult]) -> str:
    dates = sorted(result.date[:10] for result in results)
    packages = ", ".join(f"{name} {version}" for name, version in sorted(results[0].packages.items()))
    devices = " and ".join(sorted({result.settings["device"] for result in results}))
    day = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
    return f"{len(results)} runs on {devices} ({results[0].processor}), {day}; {packages}.\n"


def _distances(plan: AblationPlan, results: Sequence[AblationResult]) -> str:
    rows = [["arm", "seeds", *(f"`{m.name}`, {m.unit}" for m in MEASURES)]]
    for arm in plan.arms:
        found = of_arm(results, arm.name)
        values = (
            [_distance(plan, results, arm, measure) for measure in MEASURES] if found else [NOT_RUN] * len(MEASURES)
        )
        rows.append([_label(arm), str(len(found)) if found else "0", *values])
    return (
        "**Distance to the reference's trajectory**: mean over updates of the gap between the smoothed curves, the "
        "reference's being the mean of its *other* seeds; in brackets the least and the largest over seeds, then the "
        "multiple of what the reference's seeds are apart. **Bold**: two seeds of the arm or more, every one farther "
        f"away than any of the reference's own, and {STANDS_OUT:g} times as far or more.\n\n{table(rows)}"
    )


def _distance(plan: AblationPlan, results: Sequence[AblationResult], arm: Arm, measure: Measure) -> str:
    found = distance(results, arm.name, plan.reference, measure.curve)

    def short(value: float) -> str:
        return f"{value * measure.factor:.{measure.digits}f}"

    text = short(found.mean)
    if len(found.of_seeds) > 1:
        text += f" ({short(min(found.of_seeds))} to {short(max(found.of_seeds))})"
    if arm.name == plan.reference or not found.of_reference:
        return text
    text += f", {found.ratio:.1f}x" if found.ratio < MOST_TIMES else f", > {MOST_TIMES:,}x"
    return f"**{text}**" if found.stands_out else text


def _findings(plan: AblationPlan, results: Sequence[AblationResult]) -> str:
    if len(of_arm(results, plan.reference)) < 2:
        return "The reference has one seed: there is nothing to hold a distance against.\n"
    lines = []
    for arm in plan.arms:
        if arm.name == plan.reference or not of_arm(results, arm.name):
            continue
        out = [m.name for m in MEASURES if distance(results, arm.name, plan.reference, m.curve).stands_out]
        seen = (
            "lies beyond the reference's seeds in " + ", ".join(f"`{name}`" for name in out)
            if out
            else ("cannot be told from another seed of the reference")
        )
        lines.append(f"- *{arm.label}* {seen}.")
    return "\n".join(lines) + "\n"


def _levels(plan: AblationPlan, results: Sequence[AblationResult]) -> str:
    """Returns the levels of the curves, to read with their distances."""
    columns: list[tuple[str, Callable[[AblationResult], float], str]] = [
        (
            "`clamp_log_ratio_new_old_indicator`",
            lambda r: 100 * r.overall("clamp_log_ratio_new_old_indicator"),
            "{:.1f} %",
        ),
        ("`policy_clipped_frac`", lambda r: 100 * r.overall("policy_clipped_frac"), "{:.1f} %"),
        ("`kl_new_old`", lambda r: r.overall("kl_new_old"), "{:.2e}"),
        ("gap at lag 0, nats", lambda r: r.overall("mismatch_lag0"), "{:.2e}"),
        ("updates that have one", lambda r: float(r.num_with("mismatch_lag0")), "{:.0f}"),
        ("(policy ratio - 1) x 10⁴", lambda r: float(r.ratio_deviation.mean()), "{:+.1f}"),
        ("`entropy` at the end", lambda r: r.at_the_end("entropy"), "{:.3f}"),
        ("`reward`, all updates", lambda r: 100 * r.overall("reward"), "{:.1f} %"),
        ("`reward` at the end", lambda r: 100 * r.at_the_end("reward"), "{:.1f} %"),
        ("accuracy at the end", lambda r: 100 * r.last_accuracy, "{:.1f} %"),
        ("lag of the engines", lambda r: r.mean_engine_lag, "{:.2f}"),
        ("lag of the tokens", lambda r: r.overall("token_lag"), "{:.2f}"),
    ]
    rows = [["arm", *(title for title, _, _ in columns)]]
    for arm in plan.arms:
        found = of_arm(results, arm.name)
        values = [_spread([value(result) for result in found], shape) for _, value, shape in columns] if found else None
        rows.append([arm.label, *(values or [NOT_RUN] * len(columns))])
    return (
        f"**Levels**: means over all updates, or over the last {LAST_UPDATES} (at the end); of several seeds their "
        f"mean, and in brackets the least and the largest.\n\n{table(rows)}"
    )


def _spread(values: Sequence[float], shape: str) -> str:
    if any(math.isnan(value) for value in values):
        return "no such token"
    mean = shape.format(fmean(values))
    if len(values) == 1:
        return mean
    return f"{mean} ({shape.format(min(values))} to {shape.format(max(values))})"


def _label(arm: Arm) -> str:
    return f"{arm.label}: {arm.note}" if arm.note else arm.label
