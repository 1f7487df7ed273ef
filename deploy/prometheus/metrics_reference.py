"""The metrics reference in docs/metrics.md, generated from the definitions and from what the processes serve."""

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from prometheus_client import CollectorRegistry

from penstock.consumers.observe.metrics import TrainerMetrics
from penstock.producers.observe.metrics import ProducerMetrics
from penstock.schemas.metrics import (
    LAG_LABELS,
    TRAINER_GAUGES,
    TRAINER_GAUGES_BY_ENVIRONMENT,
    TRAINER_GAUGES_BY_LAG,
    Metric,
    ProducerMetric,
    TrainerMetric,
)

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
BEGIN = "<!-- written by `python -m penstock.deploy.prometheus` -->"
END = "<!-- end of what is written -->"
UNITS = {"seconds": "s", "bytes": "B", "nats": "nats", "steps": "steps", "groups": "groups"}
SHARES = ("frac", "fraction", "ess")


class Exported(NamedTuple):
    """A metric and its type in a scrape."""

    metric: Metric
    type: str


def exported(registry: CollectorRegistry, definitions: Iterable[Metric]) -> list[Exported]:
    """Returns the metrics that `registry` serves, by name.

    Raises:
        KeyError: it serves a metric that has no definition.
    """
    by_name = {metric.name: metric for metric in definitions}
    found = []
    for family in registry.collect():
        name = f"{family.name}_total" if family.type == "counter" else family.name
        found.append(Exported(by_name[name], family.type))
    return sorted(found, key=lambda one: one.metric.name)


def trainer_metrics() -> list[Exported]:
    tables = (TRAINER_GAUGES, TRAINER_GAUGES_BY_LAG, TRAINER_GAUGES_BY_ENVIRONMENT)
    definitions = [*_declared(TrainerMetric), *(metric for table in tables for metric in table.values())]
    return exported(TrainerMetrics().registry, definitions)


def producer_metrics() -> list[Exported]:
    return exported(ProducerMetrics().registry, _declared(ProducerMetric))


def unit_of(metric: Metric) -> str:
    """Returns the unit from the name's last word before `_total`, by Prometheus' convention, else from the definition.

    Raises:
        ValueError: neither names one, or both do.
    """
    last = metric.name.removesuffix("_total").removesuffix("_by_lag").rpartition("_")[2]
    named = "share" if last in SHARES else UNITS.get(last, "")
    if bool(named) == bool(metric.unit):
        raise ValueError(f"{metric.name}: unit {metric.unit!r} and {named!r} in its name, expected one of the two")
    return named or metric.unit


def reference() -> str:
    """Returns the tables in Markdown."""
    parts = [f"{BEGIN}\n"]
    for title, found in (("The trainer", trainer_metrics()), ("A producer", producer_metrics())):
        parts.append(f"### {title}\n\n| name | type | labels | unit | help |\n|---|---|---|---|---|")
        parts += [_row(one) for one in found]
        parts.append("")
    return "\n".join([*parts, END])


def with_reference(page: str) -> str:
    """Returns the page with the reference replaced."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{reference()}{after}"


def _declared(kind: type) -> list[Metric]:
    return [value for value in vars(kind).values() if isinstance(value, Metric)]


def _row(one: Exported) -> str:
    metric = one.metric
    values = metric.values or (LAG_LABELS if metric.labels == ("lag",) else ())
    labels = ", ".join(f"`{label}`" for label in metric.labels) + (f": {', '.join(values)}" if values else "")
    kind = f"{one.type}, to {max(metric.buckets):g}" if metric.buckets else one.type
    return f"| `{metric.name}` | {kind} | {labels} | {unit_of(metric)} | {metric.help} |"
