"""The page of metrics: its reference is what the processes serve, and its prose names every metric and no other."""

import re

import pytest
import torch

from padded_batches import mismatch_metrics
from penstock.deploy.prometheus.metrics_reference import (
    BEGIN,
    PAGE,
    producer_metrics,
    trainer_metrics,
    unit_of,
    with_reference,
)
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


def by_key() -> dict[str, str]:
    """Name in Prometheus by name in updates.jsonl; the buckets' under `name/lag_`, an environment's `environments/`."""
    found = {}
    for key, name, *_ in (row for row in rows() if len(row) == 4):
        if key.startswith("`"):
            name = name.strip("`")
            prefix = "environments/" if name.startswith("penstock_environment_") else ""
            found[prefix + key.strip("`") + ("/lag_" if name.endswith("_by_lag") else "")] = name
    return found


def test_the_reference_on_the_page_is_what_the_code_says() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == with_reference(page), "run `python -m penstock.deploy.prometheus`"


def test_the_reference_holds_every_metric_that_is_declared_with_the_type_that_is_served() -> None:
    found = [*trainer_metrics(), *producer_metrics()]
    assert sorted(one.metric.name for one in found) == sorted(metric.name for metric in declared())
    types = {one.metric.name: one.type for one in found}
    assert types["penstock_updates_total"] == "counter"
    assert types["penstock_weight_pause_seconds"] == "histogram"
    assert types["penstock_chi2_by_lag"] == "gauge"
    text = PAGE.read_text(encoding="utf-8")
    assert "| `penstock_weight_loads_total` | counter | `result`: loaded, failed |" in text
    assert "| `penstock_mismatch_lag0_nats` | gauge |  | nats |" in text


def test_units_are_read_off_the_names_or_declared() -> None:
    units = [unit_of(Metric(f"penstock_{name}", "")) for name in ("a_seconds", "b_bytes_total", "c_frac_by_lag")]
    assert units == ["s", "B", "share"]
    assert [unit_of(Metric("penstock_d", "", unit=unit)) for unit in ("nats", "none")] == ["nats", "none"]


@pytest.mark.parametrize("metric", [Metric("penstock_d_total", ""), Metric("penstock_d_seconds", "", unit="s")])
def test_a_metric_without_a_unit_or_with_two_is_refused(metric: Metric) -> None:
    with pytest.raises(ValueError, match="expected one of the two"):
        unit_of(metric)


@pytest.mark.parametrize("metric", declared(), ids=lambda metric: metric.name)
def test_each_metric_has_a_unit_or_says_that_it_has_none(metric: Metric) -> None:
    unit = unit_of(metric)
    assert unit in UNITS_IN_USE
    says_a_share = metric.help.startswith(("Share of", "Effective sample size"))
    assert not says_a_share or unit == "share"
    assert "in nats" not in metric.help or unit == "nats"
    assert ("_kl_" not in metric.name and not metric.name.endswith("_kl")) or unit == "nats"
    assert "tokens" not in metric.name.split("_") or unit == "tokens"
    assert "groups" not in metric.name.split("_") or unit == "groups"


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


def test_the_page_maps_each_name_as_the_trainer_does() -> None:
    expected = {key: metric.name for key, metric in TRAINER_GAUGES.items()}
    expected |= {f"{key}/lag_": metric.name for key, metric in TRAINER_GAUGES_BY_LAG.items()}
    expected |= {f"environments/{key}": metric.name for key, metric in TRAINER_GAUGES_BY_ENVIRONMENT.items()}
    assert by_key() == expected


def test_the_page_names_everything_that_the_diagnostics_find() -> None:
    train = torch.tensor([[-1.0, -2.0], [-1.0, -2.0]])
    found = mismatch_metrics(
        train,
        train,
        torch.ones(2, 2, dtype=torch.bool),
        weights=torch.ones(2, 2),
        lag=torch.tensor([[0, 0], [5, 6]]),
        threshold=2.0,
        advantages=torch.tensor([1.0, -1.0]),
    )
    assert {re.sub(r"(/lag_).*", r"\1", name) for name in found} <= by_key().keys()
    assert len(found) == 16 + 2 + 14 + 2 * 10  # each bucket here has one sign of the advantage
