"""Writes every dashboard's JSON; a test holds it to be in step with the code."""

import json
from pathlib import Path
from typing import Any

from penstock.deploy.grafana import flow, learning, off_policy

FOLDER = Path(__file__).parent / "dashboards"
DASHBOARDS = {"flow.json": flow.dashboard, "learning.json": learning.dashboard, "off_policy.json": off_policy.dashboard}


def as_json(dashboard: dict[str, Any]) -> str:
    return json.dumps(dashboard, indent=2, ensure_ascii=False) + "\n"


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, build in DASHBOARDS.items():
        (FOLDER / name).write_text(as_json(build()), encoding="utf-8")


if __name__ == "__main__":
    main()
