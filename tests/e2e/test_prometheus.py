"""A real Prometheus scrapes a real short run: every query of every panel and every recording rule returns data.

The run has a term for a reference model, and its connections to Redis are cut once in the middle.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
import yaml
from penstock.deploy.demo.make_model import make_model
from penstock.deploy.grafana.__main__ import DASHBOARDS
from penstock.deploy.prometheus.command import RULES
from penstock.schemas.config import DEFAULT_OBJECTIVE
from penstock.schemas.metrics import TRAINER_GAUGES, Metric, ProducerMetric, TrainerMetric
from penstock.schemas.process.redis_url import connection_file

from prometheus_server import PrometheusServer, free_port, needs_prometheus, wait_until_served
from waiting import wait_for

pytestmark = [pytest.mark.vllm, pytest.mark.redis, pytest.mark.slow, pytest.mark.timeout(600), needs_prometheus]

ROOT = Path(__file__).parents[2]
RUN = "watched"
NUM_UPDATES = 80
BOOT_S = 240.0
MOMENT_S = 30
EXPORTER = shutil.which("prometheus-redis-exporter") or shutil.which("redis_exporter")
RATE_INTERVAL = "20s"
"""The shortest that Grafana takes for `$__rate_interval` with the provisioned data source."""
NO_DATA_IN_A_SHORT_RUN = {"penstock:chi2:median_hour_before": "it begins five minutes ago, and the run is shorter"}
"""A recording rule, of no panel; tried with promtool (tests/deploy/prometheus/without_data_in_a_short_run.yml)."""
CUT_AFTER = 30
"""Updates."""


class Watched:
    """A run of the demo from its first second to its last, in a Prometheus that is still up."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "runs" / RUN
        self._log = folder / "output"
        self.began_s = time.time()
        make_model(folder / "model", progress=lambda line: None)
        command = [sys.executable, "-m", "penstock.deploy.cli", "run", "deploy/runs/demo.toml", "--name", RUN]
        command += ["--runs", str(folder / "runs"), "--set", f"model.path={folder / 'model'}"]
        command += ["--set", f"num_updates={NUM_UPDATES}", "--set", "checkpoint.every=20", "--set", "metrics.port=0"]
        command += ["--set", f"objective.path={DEFAULT_OBJECTIVE}", "--set", "objective.kwargs.kl_coefficient=0.001"]
        with self._log.open("wb") as log:
            self._run = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
        self._exporter: subprocess.Popen[bytes] | None = None
        self.prometheus: PrometheusServer | None = None
        self._cut_s = 0.0

    def watch(self) -> None:
        """To the end of the run."""
        self._wait_until(connection_file(self.folder).exists)
        address = f"127.0.0.1:{free_port()}"
        command = [sys.executable, "-m", "penstock.deploy.cli", "prometheus", str(self.folder)]
        command += ["--redis-exporter", address] if EXPORTER else []
        shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert shown.returncode == 0, shown.stderr
        if EXPORTER:
            (line,) = (line for line in shown.stdout.splitlines() if "--redis.addr" in line)
            self._start_exporter(line.replace("prometheus-redis-exporter", EXPORTER), address)
        file = self.folder / "prometheus.yml"
        config = yaml.safe_load(file.read_text())
        config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        file.write_text(yaml.safe_dump(config))
        self.prometheus = PrometheusServer(file, self.folder.parent)
        self._wait_for(lambda: self._num_updates() >= CUT_AFTER)
        with redis.Redis.from_url(json.loads(connection_file(self.folder).read_text())["url"]) as client:
            self._wait_for(lambda: self._cut_connections(client))
        assert self._run.wait(BOOT_S + 120) == 0, self.output()
        self.ended_s = time.time()

    def _start_exporter(self, line: str, address: str) -> None:
        """By the command as it is shown, in a shell."""
        log = self.folder.parent / "exporter.log"
        with log.open("wb") as output:
            self._exporter = subprocess.Popen(line, shell=True, start_new_session=True, stdout=output, stderr=output)
        wait_until_served(f"http://{address}/metrics", self._exporter, log)

    def _cut_connections(self, client: redis.Redis) -> bool:
        """Everybody's but this one, every two seconds until the trainer has noticed: it waits for an answer half of the
        time, and an idle connection is opened again without anybody's noticing."""
        if time.monotonic() > self._cut_s + 2:
            self._cut_s = time.monotonic()
            client.client_kill_filter(_type="normal")
        return "is away" in (self.folder / "logs" / "trainer.log").read_text()

    def _num_updates(self) -> int:
        lines = self.folder / "updates.jsonl"
        return len(lines.read_text().splitlines()) if lines.exists() else 0

    def _wait_until(self, is_so: Callable[[], bool]) -> None:
        wait_for(is_so, timeout_s=BOOT_S, process=self._run, log=self.output)

    def over(self, expr: str) -> list[tuple[dict[str, str], list[float]]]:
        assert self.prometheus is not None
        return self.prometheus.over(expr, self.began_s, self.ended_s)

    def output(self) -> str:
        logs = "\n".join(f"--- {file.name}\n{file.read_text()[-2000:]}" for file in self.folder.glob("logs/*.log"))
        return self._log.read_text() + logs

    def close(self) -> None:
        if self.prometheus is not None:
            self.prometheus.close()
        if self._exporter is not None and self._exporter.poll() is None:
            os.killpg(self._exporter.pid, signal.SIGTERM)  # the shell and the exporter
            self._exporter.wait(60)
        if self._run.poll() is None:
            self._run.terminate()
            self._run.wait(60)


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    run = Watched(tmp_path_factory.mktemp("watched"))
    try:
        run.watch()
        yield run
    finally:
        run.close()


def queries() -> list[Any]:
    """Every query of every panel."""
    found = {}
    for name, build in DASHBOARDS.items():
        for panel in build()["panels"]:
            for target in panel.get("targets", ()):
                found[f"{name.removesuffix('.json')}: {panel['title']}: {target['legendFormat']}"] = target["expr"]
    return [pytest.param(expr, id=name) for name, expr in found.items()]


def rules(kind: str) -> list[str]:
    files = [yaml.safe_load(file.read_text()) for file in RULES.glob("*.yml")]
    found = [rule for file in files for group in file["groups"] for rule in group["rules"]]
    return sorted({rule[kind] for rule in found if kind in rule})


@pytest.mark.parametrize("expr", queries())
def test_a_panels_query_returns_data(watched: Watched, expr: str) -> None:
    if "redis_" in expr and not EXPORTER:
        pytest.skip("needs prometheus-redis-exporter on PATH (the Debian package of that name)")
    assert watched.over(expr.replace("$run", RUN).replace("$__rate_interval", RATE_INTERVAL)), expr


@pytest.mark.parametrize("name", [name for name in rules("record") if name not in NO_DATA_IN_A_SHORT_RUN])
def test_a_recording_rule_returns_data_of_the_run(watched: Watched, name: str) -> None:
    found = watched.over(name)
    assert found and {labels["run"] for labels, _ in found} == {RUN}


def test_what_a_short_run_has_no_data_for_is_a_rule_of_no_panel_and_tried_with_promtool() -> None:
    text = (ROOT / "tests" / "deploy" / "prometheus" / "without_data_in_a_short_run.yml").read_text()
    tried = {one["expr"] for test in yaml.safe_load(text)["tests"] for one in test["promql_expr_test"]}
    assert tried == NO_DATA_IN_A_SHORT_RUN.keys() and tried <= set(rules("record"))
    shown = " ".join(
        target["expr"]
        for build in DASHBOARDS.values()
        for one in build()["panels"]
        for target in one.get("targets", ())
    )
    assert not any(name in shown for name in tried)


def test_a_cut_connection_is_counted_by_trainer_and_producers_and_shown(watched: Watched) -> None:
    shown = {legend: values for legend, values in shown_by("Failed commands", watched).items() if max(values) > 0}
    assert "trainer: ConnectionError" in shown and "producers: connection" in shown
    # Neither more than one is worth, nor from before.
    assert min(shown["producers: connection"]) == 0
    assert all(max(values) < 50 for values in shown.values()), shown


def shown_by(title: str, watched: Watched) -> dict[str, list[float]]:
    """The lines of a panel of Flow by their legends."""
    (panel,) = (panel for panel in DASHBOARDS["flow.json"]()["panels"] if panel["title"] == title)
    found = {}
    for target in panel["targets"]:
        for labels, values in watched.over(target["expr"].replace("$run", RUN).replace("$__rate_interval", "20s")):
            legend = target["legendFormat"]
            for label, value in labels.items():
                legend = legend.replace(f"{{{{{label}}}}}", value)
            found[legend] = values
    return found


def test_the_places_of_the_groups_add_up_to_the_credit(watched: Watched) -> None:
    places = shown_by("Groups by place", watched)
    assert places.keys() == {"prompts queued", "in producers", "ready to train", "free credit"}
    assert all(min(values) >= 0 for values in places.values())
    assert max(places["in producers"]) > 0 and max(places["ready to train"]) > 0
    together = [sum(values) for values in zip(*(values[-20:] for values in places.values()), strict=True)]
    assert set(together) == {96.0}


@pytest.mark.skipif(not EXPORTER, reason="needs prometheus-redis-exporter on PATH (the Debian package of that name)")
def test_the_memory_of_a_runs_own_redis_is_watched_by_the_exporter_that_the_command_names(watched: Watched) -> None:
    ((_, shares),) = watched.over("redis_memory_used_bytes / redis_memory_max_bytes")
    assert 0 < min(shares) <= max(shares) < 0.85
    assert set(shown_by("Memory", watched)) >= {"limit"}


def test_no_alert_fires_nor_is_pending_for_long_in_a_healthy_run(watched: Watched) -> None:
    assert watched.over('ALERTS{alertstate="firing"}') == []
    # Pending for a moment is what their `for` is there for: a producer that takes new weights is behind.
    pending = {labels["alertname"]: len(values) for labels, values in watched.over("ALERTS")}
    pending.pop("PenstockNoTrainer", None)  # the launcher boots the producers first
    assert all(num_seconds <= MOMENT_S for num_seconds in pending.values()), pending
    # And that is not because they were not evaluated.
    groups = watched.prometheus.ask("rules")["groups"]
    evaluated = [rule["name"] for group in groups for rule in group["rules"] if rule["lastEvaluation"] > "2000"]
    assert set(evaluated) == set(rules("record")) | set(rules("alert"))
    assert [rule for group in groups for rule in group["rules"] if rule["health"] != "ok"] == []


def test_exactly_one_part_is_the_bottleneck_at_any_time(watched: Watched) -> None:
    ((_, values),) = watched.over("sum(penstock:bottleneck)")
    assert set(values) == {1.0}


def test_each_process_is_a_target_that_answers_and_says_who_it_is(watched: Watched) -> None:
    up = {labels["role"]: values for labels, values in watched.over('up{job="penstock"}')}
    assert up.keys() == {"trainer", "producer-0", "producer-1"}
    assert all(sum(values) >= 5 for values in up.values()), up
    assert max(shown_by("Producers", watched)["producers"]) == 2
    sampled = watched.over("penstock_tokens_generated_total")
    assert {(labels["run"], labels["producer"]) for labels, _ in sampled} == {(RUN, "producer-0"), (RUN, "producer-1")}
    assert not any("exported_run" in labels for labels, _ in watched.over('{run="watched"}'))


def test_a_process_that_has_ended_in_good_order_is_no_target_any_more(watched: Watched) -> None:
    assert list((watched.folder / "metrics").glob("*.json")) == []
    wait_for(lambda: watched.prometheus.ask("targets")["activeTargets"], lambda found: "penstock" not in jobs_of(found))


def jobs_of(targets: list[dict[str, Any]]) -> set[str]:
    return {target["labels"]["job"] for target in targets}


def test_every_metric_of_the_code_is_scraped(watched: Watched) -> None:
    declared = [
        one for kind in (ProducerMetric, TrainerMetric) for one in vars(kind).values() if isinstance(one, Metric)
    ]
    declared += TRAINER_GAUGES.values()
    scraped = set(watched.prometheus.ask("label/__name__/values", start=watched.began_s, end=watched.ended_s))
    # Without values known beforehand a metric with labels has no sample until something happens.
    expected = [one for one in declared if not one.labels or one.values]
    missing = [one.name for one in expected if not {one.name, f"{one.name}_bucket"} & scraped]
    assert missing == []


def test_the_numbers_in_prometheus_are_those_of_the_runs_own_files(watched: Watched) -> None:
    lines = [json.loads(line) for line in (watched.folder / "updates.jsonl").read_text().splitlines()]
    assert len(lines) == NUM_UPDATES
    rewards = {line["reward"] for line in lines}
    ((_, values),) = watched.over("penstock_reward")
    assert set(values) <= rewards and len(set(values)) > 3
    ((_, bound),) = watched.over("penstock_lag_bound_steps")
    assert set(bound) == {2.0}
    ((_, credit),) = watched.over("penstock_credit_groups")
    assert set(credit) == {96.0}
    ((_, waiting),) = watched.over("max(penstock_groups_open - penstock_prompts_open)")
    assert 0 <= min(waiting) <= max(waiting) <= 96
