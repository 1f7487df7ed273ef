"""A run of the demo, monitored from start to end by a Prometheus that stays up afterwards."""

import json
import os
import shutil
import signal
import subprocess
import time

import redis
import yaml

from demo_run import DemoRun
from penstock.schemas.process.redis_url import connection_file
from prometheus_server import PrometheusServer, has_prometheus, wait_until_served
from real_server import at_free_port

EXPORTER = shutil.which("prometheus-redis-exporter") or shutil.which("redis_exporter")
GROUPS_PER_BATCH = 8
PACED = """
import asyncio

from penstock.producers.environments.arithmetic import Arithmetic


class Paced(Arithmetic):
    async def reward(self, prompt, completion):
        await asyncio.sleep(2)
        return super().reward(prompt, completion)
"""
"""The module `paced`: an environment for about one update per second."""


class MonitoredRun(DemoRun):
    """A monitored run. began_s, ended_s: times of its first and last scrape; num_cut: connections to Redis that were
    cut."""

    def begin(self) -> None:
        """Starts the run, and Prometheus if it is installed."""
        self.began_s = time.time()
        self.num_cut = 0
        self._cut_s = 0.0
        self._exporter: subprocess.Popen[bytes] | None = None
        self.prometheus: PrometheusServer | None = None
        self.start(fresh=False)
        if has_prometheus():
            self.wait_for(connection_file(self.folder).exists)
            self._watch()

    def _watch(self) -> None:
        """Starts Prometheus and the exporter as `penstock prometheus` says."""
        if EXPORTER:
            self._exporter = at_free_port(self._start_exporter)
        else:
            self.ask("prometheus", self.name)
        file = self.folder / "prometheus.yml"
        config = yaml.safe_load(file.read_text())
        config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        file.write_text(yaml.safe_dump(config))
        self.prometheus = PrometheusServer(file, self.runs)

    def _start_exporter(self, port: int) -> subprocess.Popen[bytes]:
        """Runs the command that `penstock prometheus` displays, in a shell."""
        shown = self.ask("prometheus", self.name, "--redis-exporter", f"127.0.0.1:{port}")
        (line,) = (line for line in shown.splitlines() if "--redis.addr" in line)
        line, log = line.replace("prometheus-redis-exporter", EXPORTER or ""), self.runs / "exporter.log"
        with log.open("wb") as output:
            exporter = subprocess.Popen(line, shell=True, start_new_session=True, stdout=output, stderr=output)
        wait_until_served(f"http://127.0.0.1:{port}/metrics", exporter, log)
        return exporter

    def cut_and_stop(self) -> None:
        """Cuts the connections to Redis once, waits until the run has recovered and stops it by a signal."""
        with redis.Redis.from_url(json.loads(connection_file(self.folder).read_text())["url"]) as client:
            try:
                self.wait_for(lambda: self._cut_connections(client))
                self.wait_for_update(self.updates()[-1]["update"] + 25)
            finally:  # also after a failure: the other tests need the processors
                self.ended_s = time.time()
                self.stop()

    def _cut_connections(self, client: redis.Redis) -> bool:
        """Cuts every connection but this one, every two seconds, until the trainer has logged an outage; returns
        whether it has. It waits for a reply half of the time, and reopens an idle connection silently."""
        if time.monotonic() > self._cut_s + 2:
            self._cut_s = time.monotonic()
            self.num_cut += int(client.client_kill_filter(_type="normal"))
        return " is away " in (self.folder / "logs" / "trainer.log").read_text()

    def over(self, expr: str) -> list[tuple[dict[str, str], list[float]]]:
        """Returns the values of a query during the run, by labels."""
        assert self.prometheus is not None
        return self.prometheus.over(expr, self.began_s, self.ended_s)

    def close(self) -> None:
        """Stops Prometheus, the exporter and the run."""
        if self.prometheus is not None:
            self.prometheus.close()
        if self._exporter is not None and self._exporter.poll() is None:
            os.killpg(self._exporter.pid, signal.SIGTERM)  # the shell and the exporter
            self._exporter.wait(60)
        self.stop()
