"""Scrape configurations, recording rules and alerts, by promtool; and that each alert is tried and explained."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.deploy import cli
from penstock.deploy.prometheus.__main__ import TEMPLATES, generated
from penstock.deploy.prometheus.command import HERE, RULES, write_prometheus_config
from penstock.schemas import limits
from penstock.schemas.config import ConfigError
from prometheus_server import needs_prometheus

ROOT = Path(__file__).parents[3]
UNIT_TESTS = Path(__file__).parent
RUNBOOK = "docs/runbook.md"
SEVERITIES = {"critical", "warning", "info"}


def rules(kind: str) -> list[dict[str, Any]]:
    files = [yaml.safe_load(file.read_text()) for file in sorted(RULES.glob("*.yml"))]
    return [rule for file in files for group in file["groups"] for rule in group["rules"] if kind in rule]


ALERTS = {rule["alert"]: rule for rule in rules("alert")}


def promtool(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["promtool", *map(str, arguments)], capture_output=True, text=True, timeout=300)


def unit_tests(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load((UNIT_TESTS / f"{name}.yml").read_text())["tests"])


@needs_prometheus
def test_rules_do_what_their_unit_tests_say_and_promtool_takes_the_configuration_for_containers() -> None:
    for result in (
        promtool("test", "rules", *sorted(UNIT_TESTS.glob("*.yml"))),
        promtool("check", "rules", *RULES.glob("*.yml")),
        promtool("check", "config", HERE / "prometheus.yml"),
    ):
        assert result.returncode == 0, result.stdout + result.stderr


def test_what_is_checked_in_is_what_the_templates_and_the_limits_make(monkeypatch: pytest.MonkeyPatch) -> None:
    """One file says each limit: another one there is another one in every rule that asks for it."""
    for file, text in generated().items():
        assert file.read_text(encoding="utf-8") == text, f"{file}: run `python -m penstock.deploy.prometheus`"
    monkeypatch.setattr(limits, "LOW_ESS", 0.123)
    assert "ess_fraction_by_lag:avg1m[2m]) < 0.123\n" in generated()[RULES / "alerts.yml"]
    templates = "".join(template.read_text() for template in TEMPLATES.glob("*.yml"))
    written = re.findall(r"[<>]=? (?:bool )?(\d[\d.]*)(?!\d| \*)", re.sub(r"#.*", "", templates))
    assert set(written) <= {"0", "6"}, "limits are named, but for the starts of a trainer in half an hour"


@pytest.mark.parametrize("name", ALERTS)
def test_an_alert_leads_to_what_to_do_and_is_tried_in_health_and_on_a_run_that_falls_ill(name: str) -> None:
    """Bad from the first sample on, a mean over a long time is as quick as one over a short time."""
    notes = ALERTS[name]["annotations"]
    assert ALERTS[name]["labels"]["severity"] in SEVERITIES
    assert notes["summary"] and "{{" not in notes["summary"]
    assert re.search(r"\{\{.*(\$value|query|\$labels\.instance|\$labels\.producer).*\}\}", notes["description"])
    assert notes["runbook_url"] == f"{RUNBOOK}#{name.lower()}"
    tried = {
        test["name"]: [one["exp_alerts"] for one in test["alert_rule_test"] if one["alertname"] == name]
        for test in unit_tests(name)
    }
    healthy = [wanted for test, wanted in tried.items() if test.startswith("healthy")]
    assert healthy and not any(alerts for wanted in healthy for alerts in wanted)
    fallen = [wanted for test, wanted in tried.items() if test.startswith("after health, ")]
    assert fallen and all(not wanted[0] and wanted[-1] for wanted in fallen)


def test_each_unit_test_belongs_to_an_alert_and_each_recording_rule_has_a_value_or_carries_an_alert() -> None:
    others = ("recording_rules", "without_data_in_a_short_run")
    assert {file.stem for file in UNIT_TESTS.glob("*.yml")} == {*ALERTS, *others}
    tried = {one["expr"] for name in others for test in unit_tests(name) for one in test["promql_expr_test"]}
    exprs = [rule["expr"] for rule in (*ALERTS.values(), *rules("record"))]
    for rule in rules("record"):
        name = rule["record"]
        is_used = any(re.search(rf"{re.escape(name)}\b", expr) for expr in exprs)
        assert any(name in expr for expr in tried) or is_used, name


def test_the_runbook_has_a_section_for_each_alert_and_for_no_other() -> None:
    titles_and_bodies = re.split(r"^## (.*)\n", (ROOT / RUNBOOK).read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    sections = dict(zip(titles_and_bodies[::2], titles_and_bodies[1::2], strict=True))
    assert [title for title in sections if title.startswith("Penstock")] == list(ALERTS)
    for name in ALERTS:
        for part in ("**What it means.**", "**How to look.**", "**What to do.**"):
            assert part in sections[name], f"{name}: {part}"


@needs_prometheus
def test_the_configuration_of_a_run_on_this_machine_is_written_into_its_folder(tmp_path: Path, capsys: Any) -> None:
    run = tmp_path / 'my "runs"' / "demo"
    (run / "metrics").mkdir(parents=True)
    (run / "run.toml").write_text('name = "demo"')
    (run / "metrics" / "trainer.json").write_text('[{"targets": ["127.0.0.1:9400"], "labels": {"run": "demo"}}]')
    assert cli.main(["prometheus", "demo", "--runs", str(run.parent)]) == 0
    assert f"--config.file={run / 'prometheus.yml'}" in capsys.readouterr().out
    config = yaml.safe_load((run / "prometheus.yml").read_text())
    assert config["rule_files"] == [f"{RULES}/*.yml"]
    (job,) = config["scrape_configs"]
    assert job["file_sd_configs"][0]["files"] == [f"{run}/metrics/*.json"]
    assert job["job_name"] == "penstock" and job["honor_labels"]
    result = promtool("check", "config", run / "prometheus.yml")
    assert result.returncode == 0, result.stdout + result.stderr


@needs_prometheus
def test_an_exporter_for_redis_is_watched_where_its_address_is_given(tmp_path: Path, capsys: Any) -> None:
    run = tmp_path / "the runs" / "demo"
    (run / "redis").mkdir(parents=True)
    (run / "run.toml").write_text('name = "demo"')
    connection = run / "redis" / "connection.json"
    connection.write_text(json.dumps({"url": "unix://:s3cr-e_t@/a/redis.sock", "socket": "/a/redis.sock"}))
    command = ["prometheus", str(run), "--redis-exporter", "127.0.0.1:9121"]
    assert cli.main(command) == 0
    shown = capsys.readouterr().out
    assert "s3cr" not in shown
    (line,) = (line for line in shown.splitlines() if "--redis.addr" in line)
    assert line.endswith("--redis.addr=unix:///a/redis.sock --web.listen-address=127.0.0.1:9121")
    password, _, _ = line.partition(" prometheus-redis-exporter ")
    said = subprocess.run(["sh", "-c", f'{password}; echo "$REDIS_PASSWORD"'], capture_output=True, text=True)
    assert said.stdout == "s3cr-e_t\n"
    config = yaml.safe_load((run / "prometheus.yml").read_text())
    assert [job["job_name"] for job in config["scrape_configs"]] == ["penstock", "redis"]
    assert config["scrape_configs"][1]["static_configs"] == [{"targets": ["127.0.0.1:9121"]}]
    result = promtool("check", "config", run / "prometheus.yml")
    assert result.returncode == 0, result.stdout + result.stderr

    connection.unlink()
    assert cli.main(command) == 0
    assert "the run's own Redis is not running" in capsys.readouterr().out
    assert cli.main([*command[:-1], "9121"]) == 2
    assert capsys.readouterr().err == ("penstock: --redis-exporter '9121': expected HOST:PORT, as in 127.0.0.1:9121\n")


def test_what_is_no_run_is_refused(tmp_path: Path, capsys: Any) -> None:
    assert cli.main(["prometheus", "absent", "--runs", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"penstock: absent: neither a run's folder nor a run in {tmp_path}\n"
    with pytest.raises(ConfigError, match="takes \\* for a pattern"):
        write_prometheus_config(tmp_path / "a*b")
