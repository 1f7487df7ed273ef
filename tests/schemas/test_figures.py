"""Settings that name a figure which evaluations do not have."""

import copy
from pathlib import Path

from penstock.consumers.checkpoints.state import CheckpointState
from penstock.consumers.learning.held_out import HeldOutAnswers, held_out_figures
from penstock.consumers.observe.metrics import TrainerMetrics
from penstock.consumers.observe.run_log import RunLog
from penstock.consumers.stream.evaluation import EvaluationResult
from penstock.consumers.stream.ledger import Ledger
from penstock.consumers.stream.run_progress import RunProgress
from penstock.schemas.config import config_of
from penstock.schemas.figures import missing_figures

DOCUMENT = {
    "name": "test",
    "model": {"path": "m"},
    "environments": [{"name": "math", "path": "a:B"}, {"name": "sums", "path": "a:B"}],
    "evaluation": {"num_samples": 2, "temperature": 1.0},
}
PARTS = {"math": "exact", "sums": "digits"}


def missing(overrides: dict[str, object], *, answered: bool = True) -> dict[str, str]:
    config = config_of(copy.deepcopy(DOCUMENT), Path("run.toml"), overrides)
    prompts = [
        HeldOutAnswers(name, [{"reward": 1.0, f"reward/{part}": 1.0}] * 2 if answered else ())
        for name, part in PARTS.items()
    ]
    by_environment = {each.environment: held_out_figures([each], config.held_out) for each in prompts}
    return missing_figures(config, held_out_figures(prompts, config.held_out), by_environment)


def test_each_setting_is_named_with_its_value_and_the_figures_it_may_have():
    none = "held-out answers have no such figure"
    assert missing({"evaluation.goal": {"figure": "reward/exat", "value": 1}}) == {
        "evaluation.goal.figure = 'reward/exat'": f"{none}; expected reward or reward/digits or reward/exact"
    }
    assert missing({"checkpoint.best": "environments/math/reward/exat"}) == {
        "checkpoint.best = 'environments/math/reward/exat' of math": f"{none}; expected environments/math/reward or "
        "environments/math/reward/exact or environments/math/pass@2"
    }
    assert missing({"evaluation.solved": {"figure": "reward/exact"}}) == {
        "evaluation.solved.figure = 'reward/exact' of sums": f"{none}, so that there is no pass@k; expected reward or "
        "reward/digits"
    }


def test_figures_that_are_there_are_no_matter_and_without_answers_nothing_is_known():
    right = {"evaluation.goal": {"figure": "reward/exact", "value": 1}, "checkpoint.best": "environments/sums/pass@2"}
    assert missing(right) == {}
    wrong = {"evaluation.goal": {"figure": "reward/exat", "value": 1}, "checkpoint.best": "reward/exat"}
    assert len(missing(wrong)) == 2
    assert missing(wrong, answered=False) == {}


def test_the_trainer_tells_each_of_them_once(tmp_path, caplog):
    config = config_of(copy.deepcopy(DOCUMENT), Path("run.toml"), {"checkpoint.best": "reward/exat"})
    run_log = RunLog(config, tmp_path, TrainerMetrics(), Ledger(), RunProgress(0, CheckpointState(policy_version=-1)))
    for version, answers in enumerate([(), [{"reward": 1.0}] * 2, [{"reward": 1.0}] * 2]):
        figures = held_out_figures([HeldOutAnswers("math", answers)], config.held_out)
        run_log.evaluation(EvaluationResult(version, version, figures, 1, 0, {"math": figures}))
    run_log.close()
    (told,) = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert told.startswith("checkpoint.best = 'reward/exat': held-out answers have no such figure; expected reward or")
