"""A dashboard: rows of panels, laid out on Grafana's grid, with the variables that all dashboards share."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from penstock.deploy.grafana.panels import DATASOURCE, Panel

COLUMNS = 24
SCHEMA_VERSION = 41


class DashboardRow(NamedTuple):
    title: str
    panels: Sequence[Panel]


def make_dashboard(uid: str, title: str, description: str, rows: Sequence[DashboardRow]) -> dict[str, Any]:
    """Panels go from left to right and wrap at the right edge; those of one line should be of one height."""
    panels: list[Panel] = []
    y = 0
    for row in rows:
        panels.append(
            {
                "type": "row",
                "title": row.title,
                "collapsed": False,
                "gridPos": {"x": 0, "y": y, "w": COLUMNS, "h": 1},
                "panels": [],
            }
        )
        x, y, height = 0, y + 1, 0
        for panel in row.panels:
            size = panel["gridPos"]
            if x + size["w"] > COLUMNS:
                x, y, height = 0, y + height, 0
            panels.append(panel | {"gridPos": size | {"x": x, "y": y}})
            x, height = x + size["w"], max(height, size["h"])
        y += height
    return {
        "uid": uid,
        "title": title,
        "description": description,
        "tags": ["penstock"],
        "schemaVersion": SCHEMA_VERSION,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "timezone": "browser",
        "refresh": "5s",
        "time": {"from": "now-15m", "to": "now"},
        "templating": {"list": _variables()},
        "annotations": {"list": []},
        "links": [
            {
                "type": "dashboards",
                "title": "Penstock",
                "tags": ["penstock"],
                "asDropdown": False,
                "includeVars": True,
                "keepTime": True,
                "targetBlank": False,
                "icon": "external link",
                "tooltip": "",
            }
        ],
        "panels": [panel | {"id": number} for number, panel in enumerate(panels, 1)],
    }


def _variables() -> list[dict[str, Any]]:
    return [
        {
            "type": "datasource",
            "name": "datasource",
            "label": "Data source",
            "query": "prometheus",
            "refresh": 1,
            "hide": 0,
        },
        {
            "type": "query",
            "name": "run",
            "label": "Run",
            "datasource": DATASOURCE,
            "query": {"query": "label_values(penstock_lag_bound_steps, run)", "refId": "run"},
            "refresh": 2,
            "sort": 1,
            "hide": 0,
        },
    ]
