"""Writes the JSON of every dashboard; a test compares it with the code."""

from pathlib import Path

from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard

from penstock.deploy.grafana import flow, learning, off_policy

FOLDER = Path(__file__).parent / "dashboards"
DASHBOARDS = {"flow.json": flow.DASHBOARD, "learning.json": learning.DASHBOARD, "off_policy.json": off_policy.DASHBOARD}


def as_json(dashboard: Dashboard) -> str:
    return str(JSONEncoder(indent=2, ensure_ascii=False).encode(dashboard)) + "\n"


def main() -> None:
    for name, dashboard in DASHBOARDS.items():
        (FOLDER / name).write_text(as_json(dashboard), encoding="utf-8")


if __name__ == "__main__":
    main()
