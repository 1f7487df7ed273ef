"""A real Prometheus scrapes a real run: every query of every panel and every recording rule returns data."""

import json
from pathlib import Path

import pytest
import yaml

from monitored_run import EXPORTER, GROUPS_PER_BATCH, MonitoredRun
from penstock.deploy.prometheus.command import RULES
from penstock.schemas.metrics import TRAINER_GAUGES, Metric, ProducerMetric, TrainerMetric
from prometheus_server import needs_prometheus

pytestmark = [pytest.mark.vllm, pytest.mark.redis, pytest.mark.slow, pytest.mark.timeout(900), needs_prometheus]

ROOT = Path(__file__).parents[2]
RUN = "live"
CREDIT = 3 * GROUPS_PER_BATCH
"""The run's credit: its `max_lag` is 2."""
MOMENT_S = 60
RATE_INTERVAL = "20s"
"""The shortest `$__rate_interval` of Grafana with the provisioned data source."""
NO_DATA_IN_A_SHORT_RUN = {"penstock:chi2:median_hour_before": "it begins five minutes ago, and the run is shorter"}
"""A recording rule without a panel; tested with promtool (tests/deploy/prometheus/without_data_in_a_short_run.yml)."""
NOT_IN_THIS_RUN = {
    "penstock_teacher_kl_nats": "it has no teacher",
    "penstock_producer_quarantined": "no producer leaves the band",
    "penstock_published_movement": "its policy is not rounded",
    "penstock_loss_scale": "its body is not float16",
    "penstock_lost_by_length_frac": "of whole windows of 256 groups, and the run is shorter",
}
"""Metrics of panels without data in this run."""
DASHBOARDS = {
    file.name: json.loads(file.read_text()) for file in (ROOT / "deploy" / "grafana" / "dashboards").glob("*.json")
}


def rules(kind: str) -> list[str]:
    files = [yaml.safe_load(file.read_text()) for file in RULES.glob("*.yml")]
    found = [rule for file in files for group in file["groups"] for rule in group["rules"]]
    return sorted({rule[kind] for rule in found if kind in rule})


def test_every_query_of_a_panel_and_every_recording_rule_returns_data(ended_run: MonitoredRun) -> None:
    for name, dashboard in DASHBOARDS.items():
        for panel in dashboard["panels"]:
            for expr in (target["expr"] for target in panel.get("targets", ())):
                if "redis_" in expr and not EXPORTER:
                    continue
                found = ended_run.over(expr.replace("$run", RUN).replace("$__rate_interval", RATE_INTERVAL))
                assert bool(found) != any(gone in expr for gone in NOT_IN_THIS_RUN), (name, panel["title"], expr)
    for name in set(rules("record")) - NO_DATA_IN_A_SHORT_RUN.keys():
        assert {labels["run"] for labels, _ in ended_run.over(name)} == {RUN}, name
    ((_, bottlenecks),) = ended_run.over("sum(penstock:bottleneck)")
    assert set(bottlenecks) == {1.0}, "exactly one part at any time"


def test_a_cut_connection_is_counted_by_trainer_and_producers_and_shown(ended_run: MonitoredRun) -> None:
    shown = {legend: values for legend, values in shown_by("Failed commands", ended_run).items() if max(values) > 0}
    assert "trainer: ConnectionError" in shown and "producers: connection" in shown
    # At most one each (plus what `increase` extrapolates), and none from before.
    assert min(shown["producers: connection"]) == 0
    most = {legend: max(values) for legend, values in shown.items()}
    assert all(value <= 1.1 * ended_run.num_cut for value in most.values()), (most, ended_run.num_cut)


def shown_by(title: str, ended_run: MonitoredRun) -> dict[str, list[float]]:
    """Returns the lines of a panel of the dashboard Flow by their legends."""
    (panel,) = (panel for panel in DASHBOARDS["flow.json"]["panels"] if panel["title"] == title)
    found = {}
    for target in panel["targets"]:
        for labels, values in ended_run.over(
            target["expr"].replace("$run", RUN).replace("$__rate_interval", RATE_INTERVAL)
        ):
            legend = target["legendFormat"]
            for label, value in labels.items():
                legend = legend.replace(f"{{{{{label}}}}}", value)
            found[legend] = values
    return found


def test_the_places_of_the_groups_add_up_to_the_credit(ended_run: MonitoredRun) -> None:
    places = shown_by("Groups by place", ended_run)
    assert places.keys() == {"prompts queued", "in producers", "ready to train", "free credit"}
    assert all(min(values) >= 0 for values in places.values())
    assert max(places["in producers"]) > 0 and max(places["ready to train"]) > 0
    together = [sum(values) for values in zip(*(values[-20:] for values in places.values()), strict=True)]
    assert set(together) == {CREDIT}


@pytest.mark.skipif(not EXPORTER, reason="needs prometheus-redis-exporter on PATH (the Debian package of that name)")
def test_the_memory_of_a_runs_own_redis_is_watched_by_the_exporter_that_the_command_names(
    ended_run: MonitoredRun,
) -> None:
    ((_, shares),) = ended_run.over("redis_memory_used_bytes / redis_memory_max_bytes")
    assert 0 < min(shares) <= max(shares) < 0.85
    (line,) = shown_by("Memory, of the limit", ended_run).values()
    assert line == shares


def test_no_alert_fires_nor_is_pending_for_long_in_a_healthy_run(ended_run: MonitoredRun) -> None:
    assert ended_run.over('ALERTS{alertstate="firing"}') == []
    # A short time pending is normal: a producer that loads new weights is behind.
    pending = {labels["alertname"]: max(values) for labels, values in ended_run.over("time() - ALERTS_FOR_STATE")}
    pending.pop("PenstockNoTrainer", None)  # with few cores the trainer boots last
    # Its range is longer than this run: a burst at the start, on a busy machine, stays in it.
    pending.pop("PenstockLagAboveBound", None)
    assert all(num_seconds <= MOMENT_S for num_seconds in pending.values()), pending
    # All of them were evaluated.
    groups = ended_run.prometheus.ask("rules")["groups"]
    evaluated = [rule["name"] for group in groups for rule in group["rules"] if rule["lastEvaluation"] > "2000"]
    assert set(evaluated) == set(rules("record")) | set(rules("alert"))
    assert [rule for group in groups for rule in group["rules"] if rule["health"] != "ok"] == []


def test_each_process_is_a_target_that_answers_and_says_who_it_is(ended_run: MonitoredRun) -> None:
    up = {labels["role"]: values for labels, values in ended_run.over('up{job="penstock"}')}
    assert up.keys() == {"trainer", "producer-0", "producer-1"}
    assert all(sum(values) >= 5 for values in up.values()), up
    assert max(shown_by("Producers", ended_run)["producers"]) == 2
    sampled = ended_run.over("penstock_tokens_generated_total")
    assert {(labels["run"], labels["producer"]) for labels, _ in sampled} == {(RUN, "producer-0"), (RUN, "producer-1")}
    assert not any("exported_run" in labels for labels, _ in ended_run.over('{run="live"}'))


def test_every_metric_of_the_code_is_scraped(ended_run: MonitoredRun) -> None:
    declared = [
        one for kind in (ProducerMetric, TrainerMetric) for one in vars(kind).values() if isinstance(one, Metric)
    ]
    declared += TRAINER_GAUGES.values()
    scraped = set(ended_run.prometheus.ask("label/__name__/values", start=ended_run.began_s, end=ended_run.ended_s))
    # A metric with labels whose values are not declared has no sample until its first event.
    expected = [one for one in declared if not one.labels or one.values]
    missing = [one.name for one in expected if not {one.name, f"{one.name}_bucket"} & scraped]
    assert missing == []


def test_the_numbers_in_prometheus_are_those_of_the_runs_own_files(ended_run: MonitoredRun) -> None:
    rewards = {line["reward"] for line in ended_run.updates()}
    ((_, values),) = ended_run.over("penstock_reward")
    assert set(values) <= rewards and len(set(values)) > 3
    ((_, bound),) = ended_run.over("penstock_lag_bound_steps")
    assert set(bound) == {2.0}
    ((_, credit),) = ended_run.over("penstock_credit_groups")
    assert set(credit) == {CREDIT}
    ((_, waiting),) = ended_run.over("max(penstock_groups_open - penstock_prompts_open)")
    assert 0 <= min(waiting) <= max(waiting) <= CREDIT
