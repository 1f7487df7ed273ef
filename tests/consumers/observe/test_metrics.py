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
    TRAINER_GAUGES_BY_ENVIRONMENT,
    TRAINER_GAUGES_BY_LAG,
    Metric,
    TrainerMetric,
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


def test_the_seeds_names_are_kept_with_an_underscore_for_the_slash() -> None:
    seeds = {key: metric.name for key, metric in TRAINER_GAUGES.items() if key.startswith("rollout_correction/")}
    assert len(seeds) == 16
    assert seeds["rollout_correction/kl"] == "penstock_rollout_correction_kl"
    assert all(name == "penstock_" + key.replace("/", "_") for key, name in seeds.items())


def test_a_bucket_without_a_token_leaves_no_sample_of_the_batch_before(metrics: TrainerMetrics) -> None:
    metrics.record(line(**diagnostics([0, 5])))
    metrics.record(line(**diagnostics([1, 5])))
    value = metrics.registry.get_sample_value
    for name in TRAINER_GAUGES_BY_LAG.keys() - {"masked_frac_negative"}:
        gauge = f"{prometheus_name(name)}_by_lag"
        assert value(gauge, {"lag": "0"}) is None
        assert value(gauge, {"lag": "1"}) is not None
        assert value(gauge, {"lag": "4-7"}) is not None


def test_a_number_that_a_batch_has_not_is_nan_and_not_that_of_the_batch_before(metrics: TrainerMetrics) -> None:
    value = metrics.registry.get_sample_value
    assert math.isnan(value("penstock_ess_fraction"))
    metrics.record(line(**diagnostics([0, 5])))
    assert value("penstock_ess_fraction") < 1
    assert value("penstock_mismatch_lag0_nats") > 0
    metrics.record(line(loss=None))
    for key in ("ess_fraction", "rollout_correction/kl", "loss", "mismatch_lag0"):
        assert math.isnan(value(TRAINER_GAUGES[key].name)), key
    assert value("penstock_reward") == 0.5


def test_the_parts_of_the_reward_are_served_by_name_while_batches_have_them(metrics: TrainerMetrics) -> None:
    value = metrics.registry.get_sample_value
    metrics.record(line(**{"reward/exact": 0.25, "reward/form": 0.75, "truncated_frac": 0.5, "reward_std": 0.1}))
    metrics.evaluate({"reward": 0.5, "reward/exact": 0.375}, {"main": {"reward": 0.5}})
    metrics.record(line(**{"reward/exact": 0.5}))
    assert value("penstock_reward_part", {"part": "exact"}) == 0.5
    assert value("penstock_reward_part", {"part": "form"}) is None
    assert value("penstock_objective", {"name": "reward/exact"}) is None
    assert value("penstock_evaluation_reward") == 0.5
    assert value("penstock_evaluation_reward_part", {"part": "exact"}) == 0.375


def test_rewards_and_groups_are_served_by_environment(metrics: TrainerMetrics) -> None:
    value = metrics.registry.get_sample_value
    own = {"reward": 0.25, "completion_tokens": 7.0, "num_groups_trained": 3, "num_groups_skipped": 1}
    own |= {"lag_mean": 1.5, "ess_fraction": 0.9, "chi2": 0.1}
    metrics.record(line(environments={"sums": own, "words": own | {"reward": 1.0}}))
    metrics.record(line(environments={"sums": own}))
    assert value("penstock_environment_reward", {"environment": "sums"}) == 0.25
    assert value("penstock_environment_ess_fraction", {"environment": "sums"}) == 0.9
    assert value("penstock_environment_lag_mean", {"environment": "sums"}) == 1.5
    assert value("penstock_environment_chi2", {"environment": "words"}) is None, "not that of a batch before"
    assert value("penstock_environment_reward", {"environment": "words"}) is None, "not that of a batch before"
    assert value("penstock_environment_completion_tokens", {"environment": "sums"}) == 7
    assert value("penstock_environment_groups_total", {"environment": "sums", "outcome": "trained"}) == 6
    assert value("penstock_environment_groups_total", {"environment": "words", "outcome": "skipped"}) == 1
    metrics.record(line(environments={"words": {"num_groups_trained": 0, "num_groups_skipped": 4}}))
    assert value("penstock_environment_reward", {"environment": "words"}) is None, "no group of it in the batch"
    assert value("penstock_environment_groups_total", {"environment": "words", "outcome": "skipped"}) == 5
    metrics.evaluate({"reward": 0.5}, {"sums": {"reward": 0.5}})
    assert value("penstock_environment_evaluation_reward", {"environment": "sums"}) == 0.5


def test_what_else_an_evaluation_measured_is_served_by_environment_and_figure(metrics: TrainerMetrics) -> None:
    def value(figure: str) -> float | None:
        labels = {"environment": "sums", "figure": figure}
        return metrics.registry.get_sample_value("penstock_evaluation_figure", labels)

    own = {"reward": 0.5, "reward/exact": 0.25, "pass@8": 0.75, "pass@8_se": 0.125, "reward_se": 0.0625}
    metrics.evaluate(own, {"sums": own})
    assert (value("pass@8"), value("pass@8_se"), value("reward_se")) == (0.75, 0.125, 0.0625)
    assert value("reward") is None and value("reward/exact") is None, "they have metrics of their own"
    metrics.evaluate({"reward": 0.0}, {"sums": {"reward": 0.0}})
    assert value("pass@8") is None, "not that of an evaluation before"


def test_what_filling_batches_costs_is_counted(metrics: TrainerMetrics) -> None:
    value = metrics.registry.get_sample_value
    metrics.record(line())
    metrics.record(line(credit=18))
    assert value("penstock_fill_skipped_groups_total") == 4
    assert value("penstock_fill_skipped_tokens_total") == 80
    assert value("penstock_credit_groups") == 18


def test_what_only_the_objective_reports_is_served_under_its_name_while_it_is_reported(
    metrics: TrainerMetrics,
) -> None:
    value = metrics.registry.get_sample_value
    metrics.record(line(**diagnostics([0, 5]), dual_clipped_frac=0.125, policy_clipped_frac=0.5))
    assert value("penstock_objective", {"name": "dual_clipped_frac"}) == 0.125
    served = generate_latest(metrics.registry).decode()
    assert served.count("penstock_objective{") == 1
    metrics.record(line())
    assert value("penstock_objective", {"name": "dual_clipped_frac"}) is None


def test_counters_add_up_over_batches(metrics: TrainerMetrics) -> None:
    metrics.record(line(steps_skipped={"loss is not finite": 2, "nothing left to train": 1}))
    metrics.record(line(steps_skipped={"loss is not finite": 1}))
    value = metrics.registry.get_sample_value
    assert value("penstock_optimizer_steps_total") == 8
    assert value("penstock_steps_skipped_total", {"reason": "loss is not finite"}) == 3
    assert value("penstock_steps_skipped_total", {"reason": "nothing left to train"}) == 1
    assert value("penstock_tokens_trained_total") == 2 * (6 - 2)
    assert value("penstock_tokens_masked_total", {"reason": "correction"}) == 4
    assert value("penstock_tokens_masked_total", {"reason": "lag"}) == 2
    assert value("penstock_updates_total") == 2
    assert value("penstock_token_lag_steps_sum") == 16
    assert value("penstock_token_lag_steps_bucket", {"le": "1.0"}) == 6


def test_labels_of_the_process_are_on_every_sample_beside_its_own() -> None:
    metrics = TrainerMetrics(run="demo")
    metrics.record(line(**diagnostics([0, 5])))
    value = metrics.registry.get_sample_value
    assert value("penstock_reward", {"run": "demo"}) == 0.5
    assert value("penstock_tokens_masked_total", {"run": "demo", "reason": "lag"}) == 1
    samples = [sample for family in metrics.registry.collect() for sample in family.samples]
    assert {sample.labels["run"] for sample in samples} == {"demo"}


def test_a_counter_is_there_from_the_start_for_each_value_known_beforehand(metrics: TrainerMetrics) -> None:
    value = metrics.registry.get_sample_value
    for outcome in ("trained", "skipped", "dead"):
        assert value("penstock_groups_settled_total", {"outcome": outcome}) == 0
    assert value("penstock_steps_skipped_total", {"reason": "loss is not finite"}) == 0
    assert value("penstock_step_seconds_count", {"phase": "wait"}) == 0


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


def test_the_time_of_the_last_update_is_at_first_that_of_the_start(metrics: TrainerMetrics, model_folder: Path) -> None:
    value = metrics.registry.get_sample_value
    before_s = time.time()
    metrics.begin(config_of(model_folder), Ledger())
    assert before_s <= value("penstock_last_update_timestamp_seconds") <= time.time()
    assert (value("penstock_lag_bound_steps"), value("penstock_credit_groups")) == (1, 8)
    metrics.record(line(time_s=1e9))
    assert value("penstock_last_update_timestamp_seconds") == 1e9


def test_a_trainer_that_ends_takes_its_address_away_and_leaves_its_successors(
    metrics: TrainerMetrics, tmp_path: Path
) -> None:
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


def test_every_metric_of_the_trainer_is_served(metrics: TrainerMetrics, tmp_path: Path) -> None:
    port = metrics.serve(MetricsConfig(port=0), tmp_path)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as reply:
        text = reply.read().decode()
    declared = [value for value in vars(TrainerMetric).values() if isinstance(value, Metric)]
    by_label = (*TRAINER_GAUGES_BY_LAG.values(), *TRAINER_GAUGES_BY_ENVIRONMENT.values())
    for metric in (*declared, *TRAINER_GAUGES.values(), *by_label):
        assert f"# HELP {metric.name} " in text, metric.name


@pytest.mark.skipif(PROMTOOL is None, reason="needs promtool")
@pytest.mark.parametrize("lags", [[], [0, 1, 3, 5, 9]])
def test_promtool_has_nothing_to_say_about_the_metrics(metrics: TrainerMetrics, lags: list[int]) -> None:
    if lags:
        metrics.record(line(**diagnostics(lags), steps_skipped={"loss is not finite": 1}, dual_clipped_frac=0.1))
    assert PROMTOOL is not None
    result = subprocess.run(
        [PROMTOOL, "check", "metrics"], input=generate_latest(metrics.registry), capture_output=True, timeout=30
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, b"", b"")
