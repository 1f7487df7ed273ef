"""Queries, panels and dashboards of one style, made by Grafana's own builders (the development dependency
grafana-foundation-sdk)."""

import json
from collections.abc import Mapping, Sequence
from itertools import chain, repeat
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote

from grafana_foundation_sdk.builders import common as builders
from grafana_foundation_sdk.builders import dashboard as dashboards
from grafana_foundation_sdk.builders import prometheus
from grafana_foundation_sdk.builders import stat as stats
from grafana_foundation_sdk.builders import timeseries as timelines
from grafana_foundation_sdk.models import common
from grafana_foundation_sdk.models import dashboard as model
from grafana_foundation_sdk.models.prometheus import QueryEditorMode

from penstock.deploy.prometheus.metrics_reference import unit_of
from penstock.deploy.report import drawing
from penstock.schemas.metrics import (
    LAG_LABELS,
    TRAINER_GAUGES,
    TRAINER_GAUGES_BY_LAG,
    UPDATE_METRICS,
    title_of,
)

Panel = timelines.Panel | stats.Panel
Kind = TypeVar("Kind", bound=Panel)
Queries = Mapping[str, str]
"""PromQL by legend. An expression has `$run` and `$__rate_interval`; a legend names labels as `{{producer}}`."""
Limits = Mapping[float, str]
"""The panel's colour from each value on, ascending."""

SHARE = "percentunit"
"""The unit of a fraction, shown in per cent."""
DATASOURCE = model.DataSourceRef(type_val="prometheus", uid="${datasource}")
LAG_COLOURS = dict(zip(LAG_LABELS, drawing.LAG_COLOURS, strict=True))
"""Cold to warm, as in the report."""


class Row(NamedTuple):
    """Panels from left to right, wrapped at the right edge; those of one line should be of one height.

    widths: of the panels in order, of 24 in all; the last one is that of the panels that follow.
    """

    panels: Sequence[Panel]
    widths: tuple[int, ...] = (8,)


def of_run(metric: str) -> str:
    return f'{metric}{{run="$run"}}'


def last(metric: str, by: str = "") -> str:
    """Returns a query for the metric's last value, or one per value of the label `by`."""
    return f"max{_by(by)}({of_run(metric)})"


def rate(metric: str, by: str = "") -> str:
    """Returns a query for a counter's increase per second, or one per value of the label `by`."""
    return f"sum{_by(by)}(rate({of_run(metric)}[$__rate_interval]))"


def quantiles(histogram: str, p99: str) -> Queries:
    """Returns queries for median and 99th percentile of a histogram. p99: the legend of the latter."""
    buckets = f"sum by (le) (rate({of_run(f'{histogram}_bucket')}[$__rate_interval]))"
    return {"median": f"histogram_quantile(0.5, {buckets})", p99: f"histogram_quantile(0.99, {buckets})"}


def _by(label: str) -> str:
    return f" by ({label}) " if label else ""


def timeseries(
    title: str,
    description: str,
    queries: Queries,
    *,
    unit: str = SHARE,
    limits: Limits | None = None,
    base: str = "green",
    minimum: float | None = 0,
    maximum: float | None = None,
    stacked: bool = False,
    log_scale: bool = False,
    colours: Mapping[str, str] | None = None,
    bound: str | None = None,
) -> Panel:
    """Makes a panel of lines over time. `limits` are drawn as lines; `colours` are by legend; `bound` is the legend of
    a line that is itself a limit."""
    legend = builders.VizLegendOptions().show_legend(True).display_mode(common.LegendDisplayMode.TABLE)
    panel = (
        _filled(timelines.Panel(), title, description, queries, unit, limits, base, height=8)
        .color_scheme(dashboards.FieldColor().mode(model.FieldColorModeId.PALETTE_CLASSIC))
        .line_width(2)
        .point_size(4)
        .legend(legend.placement(common.LegendPlacement.BOTTOM).calcs(["lastNotNull", "mean"]))
        .tooltip(builders.VizTooltipOptions().mode(common.TooltipDisplayMode.MULTI).sort(common.SortOrder.DESCENDING))
    )
    if stacked:
        panel.fill_opacity(25).stacking(builders.StackingConfig().mode(common.StackingMode.NORMAL).group("A"))
    if log_scale:
        panel.scale_distribution(builders.ScaleDistributionConfig().type(common.ScaleDistribution.LOG).log(10))
    if limits:
        panel.thresholds_style(builders.GraphThresholdsStyleConfig().mode(common.GraphThresholdsStyleMode.DASHED))
    if minimum is not None and not log_scale:
        panel.min(minimum)
    if maximum is not None:
        panel.max(maximum)
    for name, colour in (colours or ({} if bound is None else {bound: "red"})).items():
        panel.override_by_name(name, [model.DynamicConfigValue("color", {"mode": "fixed", "fixedColor": colour})])
    if bound is not None:
        line = common.LineStyle(fill="dash", dash=[8, 6])
        panel.override_by_name(bound, [model.DynamicConfigValue("custom.lineStyle", line)])
    return panel


UNITS = {"s": "s", "B": "bytes", "share": SHARE, "none": "short"}
"""Grafana's units by those of metrics; others are a suffix."""


def of_update(key: str, description: str, **options: Any) -> Panel:
    """Makes a panel of what is measured of each update, with title, unit and limits of the table of metrics."""
    return timeseries(
        _titled(key), description, {title_of(key): last(TRAINER_GAUGES[key].name)}, **_from_table(key, options)
    )


def by_lag(key: str, description: str, **options: Any) -> Panel:
    """Makes a panel as `of_update` with a line per lag bucket, in the bucket's colour."""
    queries = {"lag {{lag}}": last(TRAINER_GAUGES_BY_LAG[key].name, by="lag")}
    colours = {f"lag {label}": colour for label, colour in LAG_COLOURS.items()}
    return timeseries(f"{_titled(key)} by lag", description, queries, colours=colours, **_from_table(key, options))


def _titled(key: str) -> str:
    title = title_of(key)
    return title[0].upper() + title[1:] if title.isascii() else title


def _from_table(key: str, options: dict[str, Any]) -> dict[str, Any]:
    """Returns options of a panel; those given come first."""
    unit = unit_of(TRAINER_GAUGES.get(key) or TRAINER_GAUGES_BY_LAG[key])
    return {"unit": UNITS.get(unit, f"suffix: {unit}"), **limits_of(key), **options}


def limits_of(key: str) -> dict[str, Any]:
    """Returns a panel's options for the limits of a number of an update."""
    metric = UPDATE_METRICS[key]
    if metric.bad_below is not None:
        return {"limits": {metric.bad_below: "green"}, "base": "red"}
    limits = {metric.worse_above: "orange", metric.bad_above: "red"}
    return {"limits": {limit: colour for limit, colour in limits.items() if limit is not None}}


def stat(
    title: str,
    description: str,
    queries: Queries,
    *,
    unit: str = SHARE,
    limits: Limits | None = None,
    base: str = "green",
    name_only: bool = False,
    no_value: str = "-",
) -> Panel:
    """Makes a panel of the last value in large type; with `name_only`, of the legend."""
    return (
        _filled(stats.Panel(), title, description, queries, unit, limits, base, height=5, instant=True)
        .color_scheme(dashboards.FieldColor().mode(model.FieldColorModeId.THRESHOLDS))
        .no_value(no_value)
        .reduce_options(builders.ReduceDataOptions().values(False).calcs(["lastNotNull"]).fields(""))
        .text_mode(common.BigValueTextMode.NAME if name_only else common.BigValueTextMode.VALUE)
        .color_mode(common.BigValueColorMode.BACKGROUND if name_only else common.BigValueColorMode.VALUE)
        .graph_mode(common.BigValueGraphMode.NONE)
        .justify_mode(common.BigValueJustifyMode.CENTER)
    )


def _filled(
    panel: Kind,
    title: str,
    description: str,
    queries: Queries,
    unit: str,
    limits: Limits | None,
    base: str,
    height: int,
    *,
    instant: bool = False,
) -> Kind:
    """Sets the properties that every kind of panel has; returns the panel."""
    any_panel: Any = panel  # the SDK has no common type
    steps = [
        model.Threshold(value=None, color=base),
        *(model.Threshold(value, colour) for value, colour in (limits or {}).items()),
    ]
    any_panel.title(title).description(description).datasource(DATASOURCE).height(height).unit(unit)
    any_panel.thresholds(dashboards.ThresholdsConfig().mode(model.ThresholdsMode.ABSOLUTE).steps(steps))
    for number, (legend, expr) in enumerate(queries.items()):
        query = prometheus.Dataquery().ref_id(chr(ord("A") + number)).datasource(DATASOURCE)
        query.expr(expr).legend_format(legend).editor_mode(QueryEditorMode.CODE)
        query.instant() if instant else query.range()
        any_panel.with_target(query)
    return panel


def traces() -> dashboards.DashboardLink:
    """Returns a link to the run's traces of the time shown, in Explore: `tempo` is the dashboard's data source of them,
    the first of that type that Grafana has."""
    source = "${tempo}"
    query = '{ resource.penstock.run.name = "$run" && name = "rl.loop" } | select(span.penstock.group.index)'
    asked = {"refId": "A", "datasource": {"type": "tempo", "uid": source}, "queryType": "traceql", "query": query}
    pane = {"datasource": source, "queries": [asked], "range": {"from": "${__from}", "to": "${__to}"}}
    # Grafana puts its variables in as they stand in the address.
    panes = quote(json.dumps({"traces": pane}), safe="${}")
    link = dashboards.DashboardLink("Traces of the groups").type(model.DashboardLinkType.LINK)
    return link.url(f"/explore?schemaVersion=1&panes={panes}").target_blank(True)


def dashboard(uid: str, title: str, description: str, rows: Mapping[str, Row]) -> model.Dashboard:
    link = dashboards.DashboardLink("Penstock").type(model.DashboardLinkType.DASHBOARDS).tags(["penstock"])
    run = (
        dashboards.QueryVariable("run")
        .label("Run")
        .datasource(DATASOURCE)
        .query({"query": "label_values(penstock_lag_bound_steps, run)", "refId": "run"})
        .refresh(model.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(model.VariableSort.ALPHABETICAL_ASC)
    )
    builder = (
        dashboards.Dashboard(title)
        .uid(uid)
        .description(description)
        .tags(["penstock"])
        .version(1)
        .tooltip(model.DashboardCursorSync.CROSSHAIR)
        .refresh("5s")
        .time("now-15m", "now")
        .with_variable(dashboards.DatasourceVariable("datasource").label("Data source").type("prometheus"))
        .with_variable(run)
        .with_variable(dashboards.DatasourceVariable("tempo").type("tempo").hide(model.VariableHide.HIDE_VARIABLE))
        .link(link.include_vars(True).keep_time(True).icon("external link"))
    )
    for title_of_row, row in rows.items():
        builder.with_row(dashboards.Row(title_of_row))
        widths = chain(row.widths, repeat(row.widths[-1]))
        for panel, width in zip(row.panels, widths, strict=False):
            builder.with_panel(panel.span(width))
    made: model.Dashboard = builder.build()
    for number, each in enumerate(made.panels or (), 1):
        each.id_val = number
    return made
