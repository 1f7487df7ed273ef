"""The page of metrics names every metric there is, and no other."""

import re
from pathlib import Path

import torch

from consumers.diagnostics import mismatch_metrics
from schemas.metrics import TRAINER_GAUGES, TRAINER_GAUGES_BY_LAG, Metric, ProducerMetric, TrainerMetric

PAGE = Path(__file__).parents[2] / "deploy" / "docs" / "metrics.md"


def rows() -> list[list[str]]:
    """The cells of every row of the page's tables but their heads."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    return [row for row in cells if not row[0].startswith("in ")]


def by_key() -> dict[str, str]:
    """Name in Prometheus by name in updates.jsonl; the buckets' under `name/lag_`."""
    found = {}
    for key, name, *_ in (row for row in rows() if len(row) == 4):
        if key.startswith("`"):
            name = name.strip("`")
            found[key.strip("`") + ("/lag_" if name.endswith("_by_lag") else "")] = name
    return found


def test_the_page_names_every_metric_and_its_labels_and_no_other() -> None:
    classes = (ProducerMetric, TrainerMetric)
    declared = [value for kind in classes for value in vars(kind).values() if isinstance(value, Metric)]
    declared += [*TRAINER_GAUGES.values(), *TRAINER_GAUGES_BY_LAG.values()]
    named = [re.findall(r"`(penstock_\w+)", row[0] if len(row) == 3 else row[1]) for row in rows()]
    assert all(len(names) == 1 for names in named)
    assert sorted(name for names in named for name in names) == sorted(metric.name for metric in declared)
    text = PAGE.read_text(encoding="utf-8")
    for metric in declared:
        if metric.labels and not metric.name.endswith("_by_lag"):
            assert f"`{metric.name}{{{metric.labels[0]}" in text, metric.name


def test_the_page_maps_each_name_as_the_trainer_does() -> None:
    expected = {key: metric.name for key, metric in TRAINER_GAUGES.items()}
    expected |= {f"{key}/lag_": metric.name for key, metric in TRAINER_GAUGES_BY_LAG.items()}
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
    assert len(found) == 16 + 2 + 13 + 2 * 9  # each bucket here has one sign of the advantage
