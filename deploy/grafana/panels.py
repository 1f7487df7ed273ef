"""Panels of Grafana's dashboard model (schema 41), as plain dicts."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from penstock.schemas.metrics import LAG_LABELS

Panel = dict[str, Any]

DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
WIDTH, HEIGHT = 8, 8
"""Of a panel unless it says otherwise, in Grafana's grid of 24 columns."""
LAG_COLOURS = dict(zip(LAG_LABELS, ("#0d9488", "#2563eb", "#7c3aed", "#db2777", "#92400e"), strict=True))
"""Cold to warm, as in the report."""


class PrometheusQuery(NamedTuple):
    """`expr` in PromQL, with `$run` and `$__rate_interval`; `legend` names a series by its labels, `{{producer}}`."""

    expr: str
    legend: str


class Limit(NamedTuple):
    """From `value` on a panel is of `colour`."""

    value: float
    colour: str


def timeseries(
    title: str,
    description: str,
    queries: Sequence[PrometheusQuery],
    *,
    unit: str,
    limits: Sequence[Limit] = (),
    base: str = "green",
    minimum: float | None = None,
    maximum: float | None = None,
    stacked: bool = False,
    log_scale: bool = False,
    colours: Mapping[str, str] | None = None,
    dashed: Sequence[str] = (),
    width: int = WIDTH,
    height: int = HEIGHT,
) -> Panel:
    """Lines over time. `limits` are drawn as lines; `colours` by legend; `dashed` are legends of what is a bound."""
    custom: dict[str, Any] = {
        "drawStyle": "line",
        "lineWidth": 2,
        "fillOpacity": 25 if stacked else 0,
        "showPoints": "auto",
        "pointSize": 4,
        "spanNulls": False,
        "stacking": {"mode": "normal" if stacked else "none", "group": "A"},
        "scaleDistribution": {"type": "log", "log": 10} if log_scale else {"type": "linear"},
        "thresholdsStyle": {"mode": "dashed" if limits else "off"},
    }
    panel = _panel("timeseries", title, description, queries, width=width, height=height)
    panel["fieldConfig"] = {
        "defaults": _defaults(unit, limits, base, minimum, maximum)
        | {"color": {"mode": "palette-classic"}, "custom": custom},
        "overrides": [
            *(_override(name, "color", {"mode": "fixed", "fixedColor": one}) for name, one in (colours or {}).items()),
            *(_override(name, "custom.lineStyle", {"fill": "dash", "dash": [8, 6]}) for name in dashed),
        ],
    }
    panel["options"] = {
        "legend": {"showLegend": True, "displayMode": "table", "placement": "bottom", "calcs": ["lastNotNull", "mean"]},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }
    return panel


def by_lag(title: str, description: str, metric: str, *, unit: str, **options: Any) -> Panel:
    """One line for each lag bucket of `metric`, in the colour that the bucket has everywhere."""
    query = PrometheusQuery(f'max by (lag) ({metric}{{run="$run"}})', "lag {{lag}}")
    colours = {f"lag {label}": colour for label, colour in LAG_COLOURS.items()}
    return timeseries(title, description, [query], unit=unit, colours=colours, **options)


def stat(
    title: str,
    description: str,
    query: PrometheusQuery,
    *,
    unit: str,
    limits: Sequence[Limit] = (),
    base: str = "green",
    name_only: bool = False,
    no_value: str = "-",
    width: int = 4,
) -> Panel:
    """The last value in large; with `name_only` the legend in its place."""
    panel = _panel("stat", title, description, [query], width=width, height=5, instant=True)
    defaults = _defaults(unit, limits, base, None, None)
    panel["fieldConfig"] = {
        "defaults": defaults | {"color": {"mode": "thresholds"}, "noValue": no_value},
        "overrides": [],
    }
    panel["options"] = {
        "reduceOptions": {"values": False, "calcs": ["lastNotNull"], "fields": ""},
        "textMode": "name" if name_only else "value",
        "colorMode": "background" if name_only else "value",
        "graphMode": "none",
        "justifyMode": "center",
        "orientation": "auto",
        "wideLayout": True,
        "showPercentChange": False,
        "percentChangeColorMode": "standard",
    }
    return panel


def states(title: str, description: str, query: PrometheusQuery, *, on: str, width: int = WIDTH) -> Panel:
    """A band for each series, coloured and reading `on` while it is 1."""
    panel = _panel("state-timeline", title, description, [query], width=width)
    mappings = [
        {
            "type": "value",
            "options": {
                "0": {"text": " ", "color": "transparent", "index": 0},
                "1": {"text": on, "color": "orange", "index": 1},
            },
        }
    ]
    defaults = _defaults("none", [Limit(1, "orange")], "transparent", 0, 1)
    panel["fieldConfig"] = {
        "defaults": defaults
        | {"color": {"mode": "thresholds"}, "mappings": mappings, "custom": {"lineWidth": 0, "fillOpacity": 80}},
        "overrides": [],
    }
    panel["options"] = {
        "showValue": "auto",
        "rowHeight": 0.9,
        "mergeValues": True,
        "alignValue": "center",
        "legend": {"showLegend": False, "displayMode": "list", "placement": "bottom", "calcs": []},
        "tooltip": {"mode": "single", "sort": "none"},
        "perPage": 20,
    }
    return panel


def heatmap(title: str, description: str, query: PrometheusQuery, *, unit: str, axis: str, width: int = WIDTH) -> Panel:
    """A Prometheus histogram over time: `query` gives its buckets by `le`, `unit` is that of a bucket's count."""
    panel = _panel("heatmap", title, description, [query], width=width, height=10)
    panel["targets"][0]["format"] = "heatmap"
    panel["fieldConfig"] = {
        "defaults": _defaults(unit, (), "green", 0, None)
        | {
            "custom": {
                "scaleDistribution": {"type": "linear"},
                "hideFrom": {"tooltip": False, "viz": False, "legend": False},
            }
        },
        "overrides": [],
    }
    panel["options"] = {
        "calculate": False,
        "color": {
            "mode": "scheme",
            "scheme": "Blues",
            "fill": "dark-blue",
            "scale": "exponential",
            "exponent": 0.5,
            "steps": 64,
            "reverse": False,
        },
        "cellGap": 1,
        "cellValues": {"unit": unit},
        "filterValues": {"le": 1e-9},
        "rowsFrame": {"layout": "auto"},
        "showValue": "never",
        "yAxis": {"axisPlacement": "left", "axisLabel": axis, "unit": "none", "reverse": False},
        "legend": {"show": True},
        "tooltip": {"mode": "single", "yHistogram": True, "showColorScale": True},
        "exemplars": {"color": "rgba(255,0,255,0.7)"},
    }
    return panel


def _panel(
    kind: str,
    title: str,
    description: str,
    queries: Sequence[PrometheusQuery],
    *,
    width: int,
    height: int = HEIGHT,
    instant: bool = False,
) -> Panel:
    targets = [
        {
            "refId": chr(ord("A") + place),
            "datasource": DATASOURCE,
            "expr": query.expr,
            "legendFormat": query.legend,
            "instant": instant,
            "range": not instant,
            "editorMode": "code",
        }
        for place, query in enumerate(queries)
    ]
    return {
        "type": kind,
        "title": title,
        "description": description,
        "datasource": DATASOURCE,
        "targets": targets,
        "gridPos": {"x": 0, "y": 0, "w": width, "h": height},
    }


def _defaults(
    unit: str, limits: Sequence[Limit], base: str, minimum: float | None, maximum: float | None
) -> dict[str, Any]:
    steps: list[dict[str, Any]] = [{"value": None, "color": base}]
    steps += [{"value": limit.value, "color": limit.colour} for limit in limits]
    defaults: dict[str, Any] = {"unit": unit, "thresholds": {"mode": "absolute", "steps": steps}}
    if minimum is not None:
        defaults["min"] = minimum
    if maximum is not None:
        defaults["max"] = maximum
    return defaults


def _override(name: str, field: str, value: Any) -> dict[str, Any]:
    return {"matcher": {"id": "byName", "options": name}, "properties": [{"id": field, "value": value}]}
