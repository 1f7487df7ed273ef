"""The dashboards: in step with the code that makes them, and legible. That Grafana knows every field, its own builders
see to."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.deploy.grafana import limits
from penstock.deploy.grafana.__main__ import DASHBOARDS, FOLDER, as_json
from penstock.deploy.prometheus.command import RULES
from penstock.schemas.metrics import LAG_LABELS

ROOT = Path(__file__).parents[3]
PROVISIONING = ROOT / "deploy" / "grafana" / "provisioning"
KINDS = {"timeseries", "stat", "state-timeline", "heatmap"}
NEITHER_GOOD_NOR_BAD = {
    # Names and places, and what of them is bad is in a panel of its own.
    ("flow.json", "Waited for"),
    ("flow.json", "Groups by place"),
    ("flow.json", "Groups settled"),
    ("flow.json", "The trainer's time"),
    # What counts is the difference of the lines, which the trainer tests and an alert names.
    ("off_policy.json", "Length, by what became of the rollout"),
    ("off_policy.json", "Groups lost, by length"),
    ("off_policy.json", "Rollouts, by outcome and end"),
    ("off_policy.json", "Reward, by what became of the rollout"),
    # How much of a thing there is depends on machines, model and task.
    ("flow.json", "Admission"),
    ("flow.json", "Tokens per second"),
    ("flow.json", "In flight"),
    ("flow.json", "Tokens: generated, trained, masked"),
    ("flow.json", "Updates"),
    ("flow.json", "Bytes of an update"),
    ("flow.json", "Age of the policy held"),
    ("flow.json", "Chain"),
    ("flow.json", "The host's copy brought up to date"),
    ("learning.json", "Reward and held-out reward"),
    ("learning.json", "Parts of the reward"),
    ("learning.json", "Spread of the reward"),
    ("learning.json", "Completion length"),
    ("learning.json", "Entropy"),
    ("learning.json", "KL to the reference model and a teacher"),
    ("learning.json", "Learning rate"),
    ("learning.json", "Loss"),
    ("learning.json", "Optimizer steps"),
    ("off_policy.json", "Lag heat map"),
    ("off_policy.json", "Weight applied by lag"),
    ("off_policy.json", "Tokens by lag"),
}
LIMIT_OF_THE_RUN = {
    ("flow.json", "Policy behind"): ("lag bound", "penstock_lag_bound_steps"),
    ("flow.json", "Memory"): ("limit", "redis_memory_max_bytes"),
    ("flow.json", "Chunks in Redis"): ("limit", "penstock_weight_redis_limit_bytes"),
    ("off_policy.json", "Lag"): ("bound", "penstock_lag_bound_steps"),
    ("off_policy.json", "Mismatch at lag 0"): ("band", "penstock_mismatch_lag0_band_nats"),
    ("off_policy.json", "Mismatch at lag 0 by producer"): ("band", "penstock_mismatch_lag0_band_nats"),
}
"""Panels whose limit differs from run to run, and is drawn beside the values: its legend and metric."""
WITHOUT_UNIT = {
    # Counts.
    "Producers": "none",
    "Alerts firing": "none",
    "Lag heat map": "short",
    "Tokens by lag": "short",
    # Names.
    "Waited for": "none",
    "Waited for, over time": "none",
    # Pure numbers, and ratios that are no shares.
    "Reward and held-out reward": "short",
    "Parts of the reward": "short",
    "Reward, by what became of the rollout": "short",
    "Spread of the reward": "short",
    "Gradient norm": "short",
    "Learning rate": "sci",
    "Loss": "short",
    "χ²": "short",
    "χ² by lag": "short",
    "Weight applied by lag": "short",
    # In nats, of any magnitude: the description says so.
    "Mismatch at lag 0": "sci",
    "Mismatch at lag 0 by producer": "sci",
    "Producers in quarantine": "short",
}
ALERTS_LIMITS = {
    "PenstockNoUpdate": (limits.NO_UPDATE_S, ("flow.json", "Since the last update")),
    "PenstockLagAboveBound": (limits.BEYOND_BOUND, ("off_policy.json", "Tokens beyond the bound")),
    "PenstockLowEss": (limits.LOW_ESS, ("off_policy.json", "Effective sample size by lag")),
    "PenstockChi2Jump": (limits.CHI2_JUMP, ("off_policy.json", "χ²")),
    "PenstockPauseLong": (limits.PAUSE_S, ("flow.json", "A pause")),
    "PenstockCopiesRebuilt": (limits.COPIES_REBUILT, ("flow.json", "Copies rebuilt")),
    "PenstockDeadLettersGrowing": (limits.DEAD, ("flow.json", "Groups that die")),
    "PenstockQueueFull": (limits.QUEUE_FULL, ("flow.json", "Queue")),
    "PenstockRedisMemoryHigh": (limits.MEMORY_NEARLY_FULL, ("flow.json", "Memory, of the limit")),
}
"""Number and panel."""


def dashboards() -> dict[str, dict[str, Any]]:
    return {name: json.loads(as_json(dashboard)) for name, dashboard in DASHBOARDS.items()}


def panels() -> list[Any]:
    return [
        pytest.param(panel, id=f"{name.removesuffix('.json')}: {title}") for (name, title), panel in by_title().items()
    ]


def by_title() -> dict[tuple[str, str], dict[str, Any]]:
    return {
        (name, panel["title"]): panel
        for name, dashboard in dashboards().items()
        for panel in dashboard["panels"]
        if panel["type"] != "row"
    }


def test_what_is_checked_in_is_what_the_code_makes() -> None:
    assert {file.name for file in FOLDER.glob("*.json")} == set(DASHBOARDS)
    for name, dashboard in DASHBOARDS.items():
        text = (FOLDER / name).read_text(encoding="utf-8")
        assert text == as_json(dashboard), f"{name}: run `python -m penstock.deploy.grafana`"


@pytest.mark.parametrize("panel", panels())
def test_a_panel_says_what_it_shows(panel: dict[str, Any]) -> None:
    assert panel["type"] in KINDS
    assert len(panel["title"]) <= 40
    assert panel["description"][-1] in ".:" and len(panel["description"]) < 330
    assert panel["datasource"]["uid"] == "${datasource}"
    for target in panel["targets"]:
        assert target["legendFormat"], "a legend of the bare labels is for nobody"
        assert target["datasource"]["uid"] == "${datasource}"
        selectors = re.findall(r"(?<![\w\"])(?:penstock|ALERTS)[\w:]*(\{[^}]*\})?", target["expr"])
        assert "redis_memory" in target["expr"] or selectors
        assert all("$run" in one for one in selectors), f"of every run: {target['expr']}"


@pytest.mark.parametrize(("place", "panel"), [pytest.param(*one, id=": ".join(one[0])) for one in by_title().items()])
def test_a_panel_has_limits_unless_no_value_is_good_or_bad(place: tuple[str, str], panel: dict[str, Any]) -> None:
    base, *others = panel["fieldConfig"]["defaults"]["thresholds"]["steps"]
    assert base["value"] is None
    values = [step["value"] for step in others]
    assert values == sorted(set(values))
    if place in NEITHER_GOOD_NOR_BAD | LIMIT_OF_THE_RUN.keys():
        assert not others, "no longer to be named above"
        return
    assert {"red", "orange"} & {step["color"] for step in (base, *others)} and others
    style = panel["fieldConfig"]["defaults"].get("custom", {}).get("thresholdsStyle")
    assert panel["type"] != "timeseries" or style == {"mode": "dashed"}, "the limits are not drawn"


@pytest.mark.parametrize("place", LIMIT_OF_THE_RUN, ids=": ".join)
def test_a_limit_that_differs_from_run_to_run_is_drawn_as_a_dashed_red_line(place: tuple[str, str]) -> None:
    legend, metric = LIMIT_OF_THE_RUN[place]
    panel = by_title()[place]
    (target,) = (one for one in panel["targets"] if one["legendFormat"] == legend)
    assert metric in target["expr"]
    overrides = panel["fieldConfig"]["overrides"]
    drawn = {one["id"]: one["value"] for found in overrides if found["matcher"]["options"] == legend
             for one in found["properties"]}  # fmt: skip
    assert drawn["color"]["fixedColor"] == "red" and drawn["custom.lineStyle"]["fill"] == "dash"


def test_the_lists_above_name_panels_that_are_there() -> None:
    places = by_title().keys()
    assert places >= NEITHER_GOOD_NOR_BAD | LIMIT_OF_THE_RUN.keys()
    assert {title for _, title in places} >= WITHOUT_UNIT.keys()


@pytest.mark.parametrize("panel", panels())
def test_a_panel_has_a_unit_unless_it_shows_counts_or_pure_numbers(panel: dict[str, Any]) -> None:
    unit = panel["fieldConfig"]["defaults"]["unit"]
    if panel["title"] in WITHOUT_UNIT:
        assert unit == WITHOUT_UNIT[panel["title"]]
        return
    assert unit in ("percentunit", "s", "bytes") or re.fullmatch(r"suffix: [a-z]+(/s)?", unit)
    names = {name for target in panel["targets"] for name in re.findall(r"[\w:]+", target["expr"])}
    shows_a_share = any(re.search(r"_frac(tion)?(_|$)|:ratio", name) for name in names)
    says_a_share = re.search(r"\b[Ss]hare of\b", panel["description"])
    assert unit == "percentunit" or not (shows_a_share or says_a_share)


@pytest.mark.parametrize("alert", ALERTS_LIMITS)
def test_a_panel_turns_bad_where_its_alert_does(alert: str) -> None:
    rules = [rule for group in yaml.safe_load((RULES / "alerts.yml").read_text())["groups"] for rule in group["rules"]]
    (expr,) = (rule["expr"] for rule in rules if rule.get("alert") == alert)
    wanted = re.findall(r"[<>]=? (\d[\d.]*)(?![\d.]| \*)", expr)
    # A divisor that must not be 0 comes before the limit.
    limit, title = ALERTS_LIMITS[alert]
    assert [float(value) for value in wanted if float(value)] == [limit]
    steps = by_title()[title]["fieldConfig"]["defaults"]["thresholds"]["steps"]
    assert limit in [step["value"] for step in steps]


def test_a_panel_and_the_rules_call_the_same_share_a_bottleneck() -> None:
    text = (RULES / "recording.yml").read_text()
    assert {float(value) for value in re.findall(r"trainer_waiting:ratio_rate5m >= bool ([\d.]+)", text)} == {
        limits.WAITING
    }
    assert {float(value) for value in re.findall(r"producers_paused:ratio_rate5m >= bool ([\d.]+)", text)} == {
        limits.PAUSED
    }


@pytest.mark.parametrize("name", DASHBOARDS)
def test_no_two_panels_or_rows_of_a_dashboard_have_one_title(name: str) -> None:
    titles = [panel["title"] for panel in dashboards()[name]["panels"]]
    assert sorted(titles) == sorted(set(titles))


def test_the_runbook_points_to_panels_that_are_there() -> None:
    text = re.sub(r"`[^`]*`", "", (ROOT / "docs" / "runbook.md").read_text(encoding="utf-8"))
    named = {" ".join(name.split()) for name in re.findall(r"(?<![*\w])\*([^*]+)\*(?!\*)", text)}
    assert named - {"critical", "warning", "info"} <= {title for _, title in by_title()}
    assert "Tokens by lag" in named


@pytest.mark.parametrize("panel", panels())
def test_legends_of_a_panel_name_labels_that_their_query_keeps_and_differ(panel: dict[str, Any]) -> None:
    legends = [target["legendFormat"] for target in panel["targets"]]
    assert len(set(legends)) == len(legends)
    overridden = {one["matcher"]["options"] for one in panel["fieldConfig"]["overrides"]}
    for target in panel["targets"]:
        for label in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]):
            kept = re.findall(r"by \(([^)]*)\)", target["expr"])
            is_recorded = "penstock:" in target["expr"]
            assert is_recorded or any(label in labels.split(", ") for labels in kept), (label, target["expr"])
    fixed = {legend for legend in legends if "{{" not in legend}
    known = fixed | {f"lag {label}" for label in LAG_LABELS}
    known |= {"trained", "skipped", "dead", "wait", "step", "publish"}
    assert overridden <= known


@pytest.mark.parametrize("dashboard", dashboards().values(), ids=lambda one: one["uid"])
def test_panels_lie_side_by_side_and_never_on_each_other(dashboard: dict[str, Any]) -> None:
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
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)


def test_each_dashboard_can_be_turned_to_another_run_and_data_source() -> None:
    assert len({one["uid"] for one in dashboards().values()}) == len(DASHBOARDS)
    for dashboard in dashboards().values():
        assert [variable["name"] for variable in dashboard["templating"]["list"]] == ["datasource", "run"]


def test_grafana_is_provisioned_with_the_data_source_and_the_folder() -> None:
    (source,) = yaml.safe_load((PROVISIONING / "datasources" / "prometheus.yml").read_text())["datasources"]
    assert (source["type"], source["uid"], source["isDefault"]) == ("prometheus", "prometheus", True)
    scraped = yaml.safe_load((ROOT / "deploy" / "prometheus" / "prometheus.yml").read_text())["global"]
    assert source["jsonData"]["timeInterval"] == scraped["scrape_interval"]
    (provider,) = yaml.safe_load((PROVISIONING / "dashboards" / "penstock.yml").read_text())["providers"]
    assert provider["type"] == "file" and provider["options"]["path"] == "/var/lib/grafana/dashboards"
