"""The dashboards: in step with the code that makes them, and legible. That Grafana knows every field, its own builders
see to."""

import json
import re
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import yaml

from penstock.deploy.grafana.__main__ import DASHBOARDS, FOLDER, as_json
from penstock.schemas import spans
from penstock.schemas.metrics import LAG_LABELS

ROOT = Path(__file__).parents[3]
PROVISIONING = ROOT / "deploy" / "grafana" / "provisioning"


def dashboards() -> dict[str, dict[str, Any]]:
    return {name: json.loads(as_json(dashboard)) for name, dashboard in DASHBOARDS.items()}


def panels() -> list[dict[str, Any]]:
    return [panel for one in dashboards().values() for panel in one["panels"] if panel["type"] != "row"]


def thresholds(panel: dict[str, Any]) -> list[tuple[float | None, str]]:
    return [(step["value"], step["color"]) for step in panel["fieldConfig"]["defaults"]["thresholds"]["steps"]]


def test_what_is_checked_in_is_what_the_code_makes() -> None:
    assert {file.name for file in FOLDER.glob("*.json")} == set(DASHBOARDS)
    for name, dashboard in DASHBOARDS.items():
        text = (FOLDER / name).read_text(encoding="utf-8")
        assert text == as_json(dashboard), f"{name}: run `python -m penstock.deploy.grafana`"


def test_each_panel_says_what_it_shows_of_the_run_that_is_chosen() -> None:
    for panel in panels():
        title = panel["title"]
        assert len(title) <= 40 and panel["description"][-1] in ".:" and len(panel["description"]) < 330, title
        values = [value for value, _ in thresholds(panel)[1:]]
        assert values == sorted(set(values)), title
        assert panel["fieldConfig"]["defaults"]["unit"], title
        legends = [target["legendFormat"] for target in panel["targets"]]
        assert all(legends) and len(set(legends)) == len(legends), title
        for target in panel["targets"]:
            assert target["datasource"]["uid"] == panel["datasource"]["uid"] == "${datasource}", title
            selectors = re.findall(r"(?<![\w\"])(?:penstock|ALERTS)[\w:]*(\{[^}]*\})?", target["expr"])
            assert "redis_memory" in target["expr"] or selectors, title
            assert all("$run" in one for one in selectors), f"of every run: {target['expr']}"


def test_legends_name_labels_that_their_query_keeps_and_colours_legends_that_are_there() -> None:
    for panel in panels():
        legends = {target["legendFormat"] for target in panel["targets"]}
        known = legends | {f"lag {label}" for label in LAG_LABELS}
        known |= {"trained", "skipped", "dead", "wait", "step", "publish"}
        assert {one["matcher"]["options"] for one in panel["fieldConfig"]["overrides"]} <= known, panel["title"]
        for target in panel["targets"]:
            for label in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]):
                kept = re.findall(r"by \(([^)]*)\)", target["expr"])
                is_recorded = "penstock:" in target["expr"]
                assert is_recorded or any(label in labels.split(", ") for labels in kept), (label, target["expr"])


def test_a_group_s_time_is_linked_to_the_traces_of_the_run_by_their_indexes() -> None:
    ((one, link),) = [
        (one, link)
        for one in dashboards().values()
        for panel in one["panels"]
        for link in panel.get("links", [])
        if panel["title"] == "A group's time"
    ]
    (pane,) = json.loads(parse_qs(urlsplit(link["url"]).query)["panes"][0]).values()
    (asked,) = pane["queries"]
    of_the_run, _, shown = asked["query"].partition(" | ")
    assert 'resource.penstock.run.name = "$run"' in of_the_run and f'name = "{spans.ROOT}"' in of_the_run
    assert shown == "select(span.penstock.group.index)"
    variables = {each["name"]: each for each in one["templating"]["list"]}
    assert asked["datasource"]["uid"] == pane["datasource"] == "${tempo}" and variables["tempo"]["query"] == "tempo"


def test_the_runbook_points_to_panels_that_are_there() -> None:
    text = re.sub(r"`[^`]*`", "", (ROOT / "docs" / "runbook.md").read_text(encoding="utf-8"))
    named = {" ".join(name.split()) for name in re.findall(r"(?<![*\w])\*([^*]+)\*(?!\*)", text)}
    assert named - {"critical", "warning", "info"} <= {panel["title"] for panel in panels()}
    assert "Tokens by lag" in named


def test_grafana_is_provisioned_with_the_data_source_and_the_folder() -> None:
    assert len({one["uid"] for one in dashboards().values()}) == len(DASHBOARDS)
    (source,) = yaml.safe_load((PROVISIONING / "datasources" / "prometheus.yml").read_text())["datasources"]
    assert (source["type"], source["uid"], source["isDefault"]) == ("prometheus", "prometheus", True)
    scraped = yaml.safe_load((ROOT / "deploy" / "prometheus" / "prometheus.yml").read_text())["global"]
    assert source["jsonData"]["timeInterval"] == scraped["scrape_interval"]
    (provider,) = yaml.safe_load((PROVISIONING / "dashboards" / "penstock.yml").read_text())["providers"]
    assert provider["type"] == "file" and provider["options"]["path"] == "/var/lib/grafana/dashboards"
