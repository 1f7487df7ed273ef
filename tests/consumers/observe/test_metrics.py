"""The trainer's /metrics, from lines as the trainer writes them."""

import json
import math
import shutil
import subprocess
import time
import urllib.request
from collections import Counter
from pathlib import Path

import pytest
import torch
from prometheus_client import generate_latest

from padded_batches import mismatch_sums
from penstock.consumers.observe.metrics import TrainerMetrics
from penstock.consumers.stream.ledger import Ledger
from penstock.schemas.attrition import UNKNOWN
from penstock.schemas.config import EnvironmentConfig, MetricsConfig, ModelConfig, RunConfig
from penstock.schemas.metrics import (
    LAG_LABELS,
    TRAINER_GAUGES,
    TRAINER_GAUGES_BY_LAG,
    prometheus_name,
)
from wire_examples import group, group_of_lengths

PROMTOOL = shutil.which("promtool")


def diagnostics(lags: list[int], *, advantage: float = 1.0) -> dict[str, float]:
    """Returns the diagnostics of two rows, of the first lag and of the others, with a token of each."""
    lag = torch.tensor(lags)
    train = -torch.linspace(0.5, 1.5, len(lags))
    return mismatch_sums(
        train,
        train + 0.1 * (lag + 1),
        torch.ones_like(lag, dtype=torch.bool),
        (torch.arange(len(lags)) > 0).long(),
        weights=torch.ones_like(train),
        corrected_mask=lag > 4,
        lag=lag,
        threshold=2.0,
        advantages=torch.full_like(train, advantage),
    ).metrics()


def line(**fields: object) -> dict:
    return {
        "update": 1,
        "policy_version": 1,
        "time_s": 1e9,
        "reward": 0.5,
        "loss": 0.25,
        "lag_histogram": {"0": 3, "2": 4},
        "num_tokens_trained": 6,
        "num_tokens_masked_lag": 1,
        "num_tokens_rejected": 2,
        "num_optimizer_steps": 4,
        "steps_skipped": {},
        "environments": {},
        "fill_skipped_groups": 2,
        "fill_skipped_tokens": 40,
        "credit": 12,
        "num_groups_trained": 1,
        "num_groups_skipped": 0,
        "queue_depth": 3,
        "skipped_reason": None,
        "group_s": {"queue": 0.2, "sample": 0.3},
        "wait_s": 0.1,
        "step_s": 0.2,
        "phase_s": {"forward": 0.1},
        "publish_s": 0.3,
    } | fields


@pytest.fixture
def metrics() -> TrainerMetrics:
    return TrainerMetrics()


def test_every_number_of_the_diagnostics_has_its_gauge_and_reaches_it(metrics: TrainerMetrics) -> None:
    found = diagnostics([0, 0, 1, 2, 5, 9])
    found |= diagnostics([0, 0, 1, 2, 5, 9], advantage=-1.0)
    metrics.record(line(**found))
    value = metrics.registry.get_sample_value
    for key, number in found.items():
        name, _, label = key.partition("/lag_")
        if label:
            assert value(f"{prometheus_name(name)}_by_lag", {"lag": label}) == number, key
        else:
            assert value(TRAINER_GAUGES[key].name) == number, key
    by_lag = {key.partition("/lag_")[0] for key in found if "/lag_" in key}
    assert by_lag == set(TRAINER_GAUGES_BY_LAG)
    assert {key.partition("/lag_")[2] for key in found if "/lag_" in key} == set(LAG_LABELS)
    assert value("penstock_objective", {"name": "reward"}) is None


def test_a_number_that_a_batch_has_not_is_not_that_of_the_batch_before(metrics: TrainerMetrics) -> None:
    """A bucket without a token has no sample, a number of the whole batch is NaN, a part of the reward is gone, and so
    is what only the objective reports."""
    value = metrics.registry.get_sample_value
    assert math.isnan(value("penstock_ess_fraction"))
    parts = {"reward/exact": 0.25, "reward/form": 0.75}
    metrics.record(line(**diagnostics([0, 5]), **parts, dual_clipped_frac=0.125, policy_clipped_frac=0.5))
    assert value("penstock_ess_fraction") < 1
    assert value("penstock_objective", {"name": "dual_clipped_frac"}) == 0.125
    assert generate_latest(metrics.registry).decode().count("penstock_objective{") == 1
    metrics.record(line(**diagnostics([1, 5]), **{"reward/exact": 0.5}))
    for name in TRAINER_GAUGES_BY_LAG.keys() - {"rejected_frac_negative"}:
        gauge = f"{prometheus_name(name)}_by_lag"
        assert value(gauge, {"lag": "0"}) is None and value(gauge, {"lag": "1"}) is not None, name
    assert value("penstock_objective", {"name": "dual_clipped_frac"}) is None
    assert value("penstock_reward_part", {"part": "exact"}) == 0.5
    assert value("penstock_reward_part", {"part": "form"}) is None
    metrics.record(line(loss=None))
    for key in ("ess_fraction", "rollout_correction/kl", "loss", "mismatch_lag0"):
        assert math.isnan(value(TRAINER_GAUGES[key].name)), key
    assert value("penstock_reward") == 0.5


def test_figures_of_batches_and_evaluations_are_served_by_environment_and_those_before_are_gone(
    metrics: TrainerMetrics,
) -> None:
    value = metrics.registry.get_sample_value
    own = {"reward": 0.25, "completion_tokens": 7.0, "num_groups_trained": 3, "num_groups_skipped": 1}
    own |= {"lag_mean": 1.5, "ess_fraction": 0.9, "chi2": 0.1}
    metrics.record(line(environments={"sums": own, "words": own | {"reward": 1.0}}))
    metrics.record(line(environments={"sums": own}))
    for key in ("reward", "completion_tokens", "lag_mean", "ess_fraction", "chi2"):
        assert value(f"penstock_environment_{key}", {"environment": "sums"}) == own[key], key
        assert value(f"penstock_environment_{key}", {"environment": "words"}) is None, "not that of a batch before"
    assert value("penstock_environment_groups_total", {"environment": "sums", "outcome": "trained"}) == 6
    assert value("penstock_environment_groups_total", {"environment": "words", "outcome": "skipped"}) == 1
    evaluated = {"reward": 0.5, "reward/exact": 0.25, "pass@8": 0.75, "reward_se": 0.0625}
    metrics.evaluate(evaluated, {"sums": evaluated})
    assert value("penstock_evaluation_reward") == value(
        "penstock_environment_evaluation_reward", {"environment": "sums"}
    )
    assert value("penstock_evaluation_reward_part", {"part": "exact"}) == 0.25
    figures = {"pass@8": 0.75, "reward_se": 0.0625, "reward": None, "reward/exact": None}  # those have their own
    for figure, expected in figures.items():
        labels = {"environment": "sums", "figure": figure}
        assert value("penstock_evaluation_figure", labels) == expected, figure
    metrics.evaluate({"reward": 0.0}, {"sums": {"reward": 0.0}})
    assert value("penstock_evaluation_figure", {"environment": "sums", "figure": "pass@8"}) is None


def test_counters_add_up_over_batches_and_are_there_from_the_start(metrics: TrainerMetrics) -> None:
    value = metrics.registry.get_sample_value
    for name, labels in (
        ("penstock_groups_settled_total", {"outcome": "dead"}),
        ("penstock_steps_skipped_total", {"reason": "loss is not finite"}),
        ("penstock_step_seconds_count", {"phase": "wait"}),
    ):
        assert value(name, labels) == 0, name
    metrics.record(line(steps_skipped={"loss is not finite": 2, "nothing left to train": 1}))
    metrics.record(line(steps_skipped={"loss is not finite": 1}, credit=18))
    for name, labels, expected in (
        ("penstock_optimizer_steps_total", {}, 8),
        ("penstock_steps_skipped_total", {"reason": "loss is not finite"}, 3),
        ("penstock_tokens_trained_total", {}, 2 * (6 - 2)),
        ("penstock_tokens_masked_total", {"reason": "correction"}, 4),
        ("penstock_tokens_masked_total", {"reason": "lag"}, 2),
        ("penstock_updates_total", {}, 2),
        ("penstock_token_lag_steps_sum", {}, 16),
        ("penstock_token_lag_steps_bucket", {"le": "1.0"}, 6),
        ("penstock_fill_skipped_groups_total", {}, 4),
        ("penstock_fill_skipped_tokens_total", {}, 80),
        ("penstock_credit_groups", {}, 18),
    ):
        assert value(name, labels) == expected, name


def test_what_became_of_rollouts_is_what_the_ledger_says_counted_from_the_start_of_this_trainer(
    metrics: TrainerMetrics, model_folder: Path
) -> None:
    ledger = Ledger()
    ledger.attrition.add("sums", "trained", group_of_lengths(4, 9, reward=1.0), 2, [4, 0])
    before = ledger.attrition.copied()
    metrics.begin(config_of(model_folder), ledger)
    assert sum(served(metrics, "penstock_rollouts_total").values()) == 0
    assert served(metrics, "penstock_rollouts_scored") == {("trained", "sums"): 2}
    ledger.attrition.add("sums", "trained", group_of_lengths(4, 90, reward=-2.5), 2, [0, 30])
    ledger.attrition.add("essays", "trained", group_of_lengths(7, reward=0.5), 2)
    ledger.attrition.add("sums", "dead", None, 2)
    ledger.attrition.add("essays", "stale", group(), 2)
    for _ in range(2):
        metrics.count_groups(ledger)
    ends, masked, tokens, scored, reward = (Counter() for _ in range(5))
    for environment, outcomes in ledger.attrition.since(before).items():
        for outcome, by_length in outcomes.items():
            for length, counts in by_length.items():
                masked[outcome, environment] += counts.num_tokens_masked
                tokens[outcome,] += counts.num_tokens
                ends[outcome, environment, UNKNOWN] += counts.num if length == UNKNOWN else 0
                for reason, num in counts.finish_reasons.items():
                    ends[outcome, environment, reason] += num
    for environment, outcome, _, counts in ledger.attrition.counts():
        scored[outcome, environment] += counts.num_scored
        reward[outcome, environment] += counts.reward_sum
    assert {reason for *_, reason in +ends} == {"stop", "length", "unknown"} and reward["trained", "sums"] < 0
    assert +Counter(served(metrics, "penstock_rollouts_total")) == +ends
    assert +Counter(served(metrics, "penstock_rollout_tokens_masked_total")) == +masked
    assert +Counter(served(metrics, "penstock_rollout_tokens_sum")) == +tokens
    assert served(metrics, "penstock_rollouts_scored") == scored
    assert served(metrics, "penstock_rollouts_reward") == reward


def served(metrics: TrainerMetrics, name: str) -> dict[tuple[str, ...], float]:
    """The values of a sample by its labels."""
    samples = (sample for family in metrics.registry.collect() for sample in family.samples)
    return {tuple(sample.labels.values()): sample.value for sample in samples if sample.name == name}


def config_of(model_folder: Path) -> RunConfig:
    return RunConfig(
        name="demo",
        model=ModelConfig(path=str(model_folder)),
        environment=EnvironmentConfig(path="a:B"),
        groups_per_batch=4,
        max_lag=1,
    )


def test_a_trainer_serves_from_its_start_and_takes_its_address_away_and_leaves_its_successors(
    metrics: TrainerMetrics, model_folder: Path, tmp_path: Path
) -> None:
    value, before_s = metrics.registry.get_sample_value, time.time()
    metrics.begin(config_of(model_folder), Ledger())
    assert before_s <= value("penstock_last_update_timestamp_seconds") <= time.time()
    assert (value("penstock_lag_bound_steps"), value("penstock_credit_groups")) == (1, 8)
    metrics.record(line(time_s=1e9))
    assert value("penstock_last_update_timestamp_seconds") == 1e9
    port, file = metrics.serve(MetricsConfig(port=0), tmp_path), tmp_path / "metrics" / "trainer.json"
    assert json.loads(file.read_text())[0]["targets"] == [f"127.0.0.1:{port}"]
    metrics.close()
    assert not file.exists()
    with pytest.raises(OSError):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60)
    predecessor = TrainerMetrics()
    predecessor.serve(MetricsConfig(port=0), tmp_path)
    file.write_text("of the successor")
    predecessor.close()
    assert file.read_text() == "of the successor"


@pytest.mark.skipif(PROMTOOL is None, reason="needs promtool")
def test_promtool_has_nothing_to_say_about_the_metrics_which_have_the_labels_of_the_process(tmp_path: Path) -> None:
    metrics = TrainerMetrics(run="demo")
    for lags in ([], [0, 1, 3, 5, 9]):
        if lags:
            metrics.record(line(**diagnostics(lags), steps_skipped={"loss is not finite": 1}, dual_clipped_frac=0.1))
        assert PROMTOOL is not None
        result = subprocess.run(
            [PROMTOOL, "check", "metrics"], input=generate_latest(metrics.registry), capture_output=True, timeout=30
        )
        assert (result.returncode, result.stdout, result.stderr) == (0, b"", b"")
    assert metrics.registry.get_sample_value("penstock_reward", {"run": "demo"}) == 0.5
    samples = [sample for family in metrics.registry.collect() for sample in family.samples]
    assert {sample.labels["run"] for sample in samples} == {"demo"}
