"""The dashboards: in step with the code that makes them, and legible. That Grafana knows every field, its own builders
see to."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.deploy.grafana.__main__ import DASHBOARDS, FOLDER, as_json
from penstock.deploy.grafana.panels import by_lag, of_update
from penstock.schemas import limits
from penstock.schemas.metrics import LAG_LABELS

ROOT = Path(__file__).parents[3]
PROVISIONING = ROOT / "deploy" / "grafana" / "provisioning"
LIMIT_OF_THE_RUN = {
    "Policy behind": ("lag bound", "penstock_lag_bound_steps"),
    "Chunks in Redis": ("limit", "penstock_weight_redis_limit_bytes"),
    "Lag": ("bound", "penstock_lag_bound_steps"),
    "Mismatch at lag 0": ("band", "penstock_mismatch_lag0_band_nats"),
}
"""Panels whose limit differs from run to run, and is drawn beside the values: its legend and metric."""


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


def test_a_panel_of_the_table_has_its_title_unit_and_limits() -> None:
    ess = json.loads(as_json(by_lag("ess_fraction", "What counts.").build()))
    assert ess["title"] == "ESS by lag" and ess["fieldConfig"]["defaults"]["unit"] == "percentunit"
    assert thresholds(ess) == [(None, "red"), (limits.LOW_ESS, "green")]
    assert ess["targets"][0]["expr"] == 'max by (lag) (penstock_ess_fraction_by_lag{run="$run"})'
    chi2 = json.loads(as_json(of_update("chi2", "Noise.").build()))
    assert thresholds(chi2) == [(None, "green"), (limits.CHI2_JUMP, "orange"), (limits.CHI2_NOISE, "red")]


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


def test_a_limit_that_differs_from_run_to_run_is_drawn_as_a_dashed_red_line() -> None:
    by_title = {panel["title"]: panel for panel in panels()}
    for title, (legend, metric) in LIMIT_OF_THE_RUN.items():
        panel = by_title[title]
        (target,) = (one for one in panel["targets"] if one["legendFormat"] == legend)
        assert metric in target["expr"], title
        overrides = panel["fieldConfig"]["overrides"]
        drawn = {one["id"]: one["value"] for found in overrides if found["matcher"]["options"] == legend
                 for one in found["properties"]}  # fmt: skip
        assert drawn["color"]["fixedColor"] == "red" and drawn["custom.lineStyle"]["fill"] == "dash", title


def test_the_runbook_points_to_panels_that_are_there() -> None:
    text = re.sub(r"`[^`]*`", "", (ROOT / "docs" / "runbook.md").read_text(encoding="utf-8"))
    named = {" ".join(name.split()) for name in re.findall(r"(?<![*\w])\*([^*]+)\*(?!\*)", text)}
    assert named - {"critical", "warning", "info"} <= {panel["title"] for panel in panels()}
    assert "Tokens by lag" in named


@pytest.mark.parametrize("dashboard", dashboards().values(), ids=lambda one: one["uid"])
def test_panels_lie_side_by_side_each_with_a_title_of_its_own(dashboard: dict[str, Any]) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        assert panel["type"] == "row" or (place["w"] >= 4 and place["h"] >= 5), "too small to be read"
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells
    for what in ("id", "title"):
        values = [panel[what] for panel in dashboard["panels"]]
        assert len(set(values)) == len(values), what
    assert [variable["name"] for variable in dashboard["templating"]["list"]] == ["datasource", "run"]


def test_grafana_is_provisioned_with_the_data_source_and_the_folder() -> None:
    assert len({one["uid"] for one in dashboards().values()}) == len(DASHBOARDS)
    (source,) = yaml.safe_load((PROVISIONING / "datasources" / "prometheus.yml").read_text())["datasources"]
    assert (source["type"], source["uid"], source["isDefault"]) == ("prometheus", "prometheus", True)
    scraped = yaml.safe_load((ROOT / "deploy" / "prometheus" / "prometheus.yml").read_text())["global"]
    assert source["jsonData"]["timeInterval"] == scraped["scrape_interval"]
    (provider,) = yaml.safe_load((PROVISIONING / "dashboards" / "penstock.yml").read_text())["providers"]
    assert provider["type"] == "file" and provider["options"]["path"] == "/var/lib/grafana/dashboards"
