"""A real Prometheus scrapes a real short run: every query of every panel and every recording rule returns data."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml
from prometheus_server import PrometheusServer, free_port, needs_prometheus, wait_until_served

from deploy.grafana.__main__ import DASHBOARDS
from deploy.make_model import make_model
from deploy.prometheus.command import RULES
from schemas.endpoint import connection_file
from schemas.metrics import TRAINER_GAUGES, Metric, ProducerMetric, TrainerMetric

pytestmark = [pytest.mark.vllm, pytest.mark.redis, pytest.mark.slow, pytest.mark.timeout(600), needs_prometheus]

ROOT = Path(__file__).parents[2]
RUN = "watched"
NUM_UPDATES = 80
BOOT_S = 240.0
MOMENT_S = 30
EXPORTER = shutil.which("prometheus-redis-exporter") or shutil.which("redis_exporter")
RATE_INTERVAL = "20s"
"""The shortest that Grafana takes for `$__rate_interval` with the provisioned data source."""
NO_DATA_IN_HEALTH = {
    'max(penstock_reference_kl_nats{run="$run"})': "the demo's objective has no term for a reference model",
    'sum by (kind) (rate(penstock_trainer_stream_errors_total{run="$run"}[$__rate_interval]))': "no command has failed",
    "penstock:chi2:median_hour_before": "the run is shorter than an hour",
}
"""Tried with promtool instead (tests/deploy/prometheus/without_data_in_health.yml)."""


class Watched:
    """A run of the demo from its first second to its last, in a Prometheus that is still up."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "runs" / RUN
        self._log = folder / "output"
        self.began_s = time.time()
        make_model(folder / "model", progress=lambda line: None)
        command = [sys.executable, "-m", "deploy.cli", "run", "deploy/runs/demo.toml", "--name", RUN]
        command += ["--runs", str(folder / "runs"), "--set", f"model.path={folder / 'model'}"]
        command += ["--set", f"num_updates={NUM_UPDATES}", "--set", "checkpoint.every=20", "--set", "metrics.port=0"]
        with self._log.open("wb") as log:
            self._run = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
        self._exporter: subprocess.Popen[bytes] | None = None
        self.prometheus: PrometheusServer | None = None

    def watch(self) -> None:
        """To the end of the run."""
        self._wait_for(connection_file(self.folder))
        shown = subprocess.run(
            [sys.executable, "-m", "deploy.cli", "prometheus", str(self.folder)],
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
        assert shown.returncode == 0, shown.stderr
        file = self.folder / "prometheus.yml"
        config = yaml.safe_load(file.read_text())
        config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        if EXPORTER:
            config["scrape_configs"].append(self._start_exporter(EXPORTER))
        file.write_text(yaml.safe_dump(config))
        self.prometheus = PrometheusServer(file, self.folder.parent)
        assert self._run.wait(BOOT_S + 120) == 0, self.output()
        self.ended_s = time.time()

    def _start_exporter(self, binary: str) -> dict[str, Any]:
        address = f"127.0.0.1:{free_port()}"
        url = urlsplit(json.loads(connection_file(self.folder).read_text())["url"])
        log = self.folder.parent / "exporter.log"
        with log.open("wb") as output:
            self._exporter = subprocess.Popen(
                [binary, "--redis.addr", f"unix://{url.path}", "--web.listen-address", address],
                env={**os.environ, "REDIS_PASSWORD": url.password or ""},
                stdout=output,
                stderr=output,
            )
        wait_until_served(f"http://{address}/metrics", self._exporter, log)
        return {"job_name": "redis", "static_configs": [{"targets": [address]}]}

    def _wait_for(self, file: Path) -> None:
        deadline = time.monotonic() + BOOT_S
        while not file.exists():
            assert self._run.poll() is None and time.monotonic() < deadline, self.output()
            time.sleep(0.1)

    def over(self, expr: str) -> list[tuple[dict[str, str], list[float]]]:
        assert self.prometheus is not None
        return self.prometheus.over(expr, self.began_s, self.ended_s)

    def output(self) -> str:
        logs = "\n".join(f"--- {file.name}\n{file.read_text()[-2000:]}" for file in self.folder.glob("logs/*.log"))
        return self._log.read_text() + logs

    def close(self) -> None:
        if self.prometheus is not None:
            self.prometheus.close()
        for process in (self._run, self._exporter):
            if process is not None and process.poll() is None:
                process.terminate()
                process.wait(60)


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    run = Watched(tmp_path_factory.mktemp("watched"))
    try:
        run.watch()
        yield run
    finally:
        run.close()


def queries() -> list[Any]:
    """Every query of every panel that a healthy run has data for."""
    found = {}
    for name, build in DASHBOARDS.items():
        for panel in build()["panels"]:
            for target in panel.get("targets", ()):
                expr = target["expr"]
                if expr not in NO_DATA_IN_HEALTH:
                    found[f"{name.removesuffix('.json')}: {panel['title']}: {target['legendFormat']}"] = expr
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


@pytest.mark.parametrize("name", [name for name in rules("record") if name not in NO_DATA_IN_HEALTH])
def test_a_recording_rule_returns_data_of_the_run(watched: Watched, name: str) -> None:
    found = watched.over(name)
    assert found and {labels["run"] for labels, _ in found} == {RUN}


def test_what_a_healthy_run_has_no_data_for_is_tried_with_promtool() -> None:
    text = (ROOT / "tests" / "deploy" / "prometheus" / "without_data_in_health.yml").read_text()
    tried = {one["expr"] for test in yaml.safe_load(text)["tests"] for one in test["promql_expr_test"]}
    assert tried == {expr.replace("$run", "demo").replace("$__rate_interval", "1m") for expr in NO_DATA_IN_HEALTH}
    shown = {
        target["expr"]
        for build in DASHBOARDS.values()
        for one in build()["panels"]
        for target in one.get("targets", ())
    }
    assert NO_DATA_IN_HEALTH.keys() <= shown | set(rules("record"))


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
    sampled = watched.over("penstock_tokens_generated_total")
    assert {(labels["run"], labels["producer"]) for labels, _ in sampled} == {(RUN, "producer-0"), (RUN, "producer-1")}
    assert not any("exported_run" in labels for labels, _ in watched.over('{run="watched"}'))


def test_a_process_that_has_ended_in_good_order_is_no_target_any_more(watched: Watched) -> None:
    assert list((watched.folder / "metrics").glob("*.json")) == []
    wait_for(lambda: watched.prometheus.ask("targets")["activeTargets"], lambda found: "penstock" not in jobs_of(found))


def jobs_of(targets: list[dict[str, Any]]) -> set[str]:
    return {target["labels"]["job"] for target in targets}


def wait_for(look: Callable[[], Any], is_so: Callable[[Any], bool], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_so(found := look()):
        assert time.monotonic() < deadline, found
        time.sleep(0.2)


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
