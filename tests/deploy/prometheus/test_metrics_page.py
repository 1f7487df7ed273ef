"""The page of metrics: its reference is what the processes serve, and its prose names every metric and no other."""

import re

import pytest

from penstock.deploy.prometheus.metrics_reference import BEGIN, PAGE, producer_metrics, trainer_metrics, unit_of
from penstock.schemas.metrics import (
    TRAINER_GAUGES,
    TRAINER_GAUGES_BY_ENVIRONMENT,
    TRAINER_GAUGES_BY_LAG,
    Metric,
    ProducerMetric,
    TrainerMetric,
)

UNITS_IN_USE = {"none", "s", "B", "nats", "share", "steps", "groups", "tokens", "batches", "errors", "loads"}
UNITS_IN_USE |= {"rollouts", "calls", "segments", "answers", "policies", "deltas", "copies", "tries"}


def rows() -> list[list[str]]:
    """The cells of every row of the prose's tables but their heads."""
    prose, _, _ = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    lines = prose.splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    return [row for row in cells if not row[0].startswith("in ")]


def declared() -> list[Metric]:
    classes = (ProducerMetric, TrainerMetric)
    found = [value for kind in classes for value in vars(kind).values() if isinstance(value, Metric)]
    tables = (TRAINER_GAUGES, TRAINER_GAUGES_BY_LAG, TRAINER_GAUGES_BY_ENVIRONMENT)
    return [*found, *(metric for table in tables for metric in table.values())]


def test_every_metric_that_is_declared_is_served_with_its_type() -> None:
    found = [*trainer_metrics(), *producer_metrics()]
    assert sorted(one.metric.name for one in found) == sorted(metric.name for metric in declared())
    types = {one.metric.name: one.type for one in found}
    assert types["penstock_updates_total"] == "counter"
    assert types["penstock_weight_pause_seconds"] == "histogram"
    assert types["penstock_chi2_by_lag"] == "gauge"


def test_each_metric_has_a_unit_in_its_name_or_declares_one() -> None:
    for metric in declared():
        unit = unit_of(metric)
        assert unit in UNITS_IN_USE, metric
        says_a_share = metric.help.startswith(("Share of", "Effective sample size"))
        assert not says_a_share or unit == "share", metric
        assert "in nats" not in metric.help or unit == "nats", metric
    for metric in (Metric("penstock_d_total", ""), Metric("penstock_d_seconds", "", unit="s")):
        with pytest.raises(ValueError, match="expected one of the two"):
            unit_of(metric)


def test_the_prose_names_every_metric_its_labels_and_their_values_and_no_other() -> None:
    named = [re.findall(r"`(penstock_\w+)", row[0] if len(row) == 3 else row[1]) for row in rows()]
    assert all(len(names) == 1 for names in named)
    assert sorted(name for names in named for name in names) == sorted(metric.name for metric in declared())
    lines = {name: " | ".join(row) for (name,), row in zip(named, rows(), strict=True)}
    said_by_the_head = [*TRAINER_GAUGES_BY_LAG.values(), *TRAINER_GAUGES_BY_ENVIRONMENT.values()]
    for metric in declared():
        if metric.labels and metric not in said_by_the_head:
            assert f"`{metric.name}{{{metric.labels[0]}" in lines[metric.name], metric.name
        for value in metric.values:
            assert f"`{value}`" in lines[metric.name], f"{metric.name}: {value}"
