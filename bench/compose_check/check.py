"""The pipeline in containers: up, one producer, three, one again, and the end of the run."""

import http.client
import json
import socket
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.compose_check.podman import DEPLOY, PROJECT, CommandError, Podman
from penstock.deploy.inspector.command import DEFAULT_PORT as INSPECT_PORT

ENDLESS = 1_000_000
"""More updates than any machine makes during the check, which ends the run once it has seen everything."""
LAST_UPDATES = 20
"""Updates from the restart to the end."""
STALL_S = 300.0
"""A wait fails once nothing it watches has changed for this long. Engines that boot in parallel on a busy machine take
many minutes, and log a line now and then."""
LIMIT_S = 3600.0
"""A wait fails after this time in any case: a container that restarts over and over changes too."""
_STEP_S = 1.0
_STOPPED = 143
"""Status of a trainer that a signal has ended before the end of the run."""
SERVICES = ("setup", "redis", "redis-exporter", "prometheus", "prepare", "producer", "trainer")
"""All services but Grafana."""


class CheckError(RuntimeError):
    """The containers do not behave as expected."""


class Check:
    def __init__(self, workspace: Path) -> None:
        self._run_file = workspace / "demo.toml"
        self._plan(ENDLESS)
        workspace.chmod(0o755)  # containers run as another user
        port = _free_port()
        self._prometheus = f"http://127.0.0.1:{port}/api/v1"
        self.podman = Podman({"PENSTOCK_WORKSPACE": str(workspace), "PENSTOCK_PROMETHEUS_PORT": str(port)})

    def run(self) -> None:
        """Raises CheckError or CommandError at the first failure."""
        started = time.monotonic()
        if problems := self.stop():  # what is left of an earlier check
            raise CheckError("; ".join(problems))
        self._start()
        self._scale(3)
        self._scale(1)
        self._command("audit", "demo")
        self._command("watch", "demo", "--once")
        self._command("report", "demo")
        self._command("dead", "requeue", "demo", "--all")
        self._inspect()
        self._end()
        self._command("audit", "demo")
        self._command("replay", "demo", "--updates", "3")
        print(f"compose-check: passed in {time.monotonic() - started:.0f} s", flush=True)

    def stop(self) -> list[str]:
        """Ends and removes everything that the check made; returns one line for each thing that is left."""
        try:
            self.podman.compose("down")
        except CommandError as error:
            print(f"compose-check: removing one by one, since {error}", flush=True)
        return self.podman.remove_everything()

    def tell(self) -> None:
        """Prints the last lines of every container."""
        for service in SERVICES:
            try:
                for name, state in self.podman.containers(service).items():
                    print(f"== {name}: {state}\n" + "\n".join(self.podman.logs(name).splitlines()[-12:]), flush=True)
            except CommandError as error:
                print(f"== {service}: {error}", flush=True)

    def _start(self) -> None:
        self.podman.compose("up", "--detach", "--no-build", *SERVICES)
        self._await_names()
        wait_for("the trainer to make updates", lambda: self._num_updates() > 0, self._signs(*SERVICES))
        self._await_targets(num_producers=1)
        for service in ("redis", "trainer", "producer", "prometheus"):
            for name in self.podman.containers(service):
                if not self.podman.is_healthy(name):
                    raise CheckError(f"{name}: its health check fails")
        print("up: every target of Prometheus is up, every health check passes", flush=True)

    def _scale(self, count: int) -> None:
        updates = self._num_updates()
        running = self._running_producers()
        if count > len(running):
            scale = ["--scale", f"producer={count}"]
            self.podman.compose("up", "--detach", "--no-build", "--no-recreate", "--no-deps", *scale, "producer")
            self._await_names()
        for name in running[count:]:  # what `docker compose up --scale` does and podman-compose does not
            self.podman.stop(name, grace_s=30)
            if self.podman.exit_status(name) != 0:
                raise CheckError(f"{name}: ended with status {self.podman.exit_status(name)} when it was asked to")
            self.podman.remove(name)
        self._await_targets(num_producers=count)
        # Ids are in the label, so as many series as producers means that no two have one id.
        appended = 'count(sum by (producer) (increase(penstock_groups_appended_total{kind="group"}[15s])) > 0)'
        wait_for(f"{count} producers to append groups", lambda: self._value(appended) == count, self._signs("producer"))
        wait_for("the run to go on", lambda: self._num_updates() > updates, self._signs("producer", "trainer"))
        print(f"scaled to {count}: each appends groups, every target is up", flush=True)

    def _await_names(self) -> None:
        """The image of Redis has `getent`, which not every published image has."""
        (redis,) = self.podman.containers("redis")
        wait_for("containers to find each other", lambda: self.podman.finds(redis, "prometheus"), lambda: None)

    def _running_producers(self) -> list[str]:
        return [name for name, state in self.podman.containers("producer").items() if state == "running"]

    def _await_targets(self, num_producers: int) -> None:
        wanted = {"penstock-trainer": 1, "penstock-producer": num_producers, "redis": 1, "prometheus": 1}

        def are_up() -> bool:
            if set(self.podman.containers("trainer").values()) != {"running"}:
                raise CheckError(f"the trainer has ended before the run had {num_producers} producers")
            targets = self._ask("targets?state=active")["activeTargets"]
            jobs = [target["labels"]["job"] for target in targets]
            up = all(target["health"] == "up" for target in targets)
            return up and {job: jobs.count(job) for job in wanted} == wanted and set(jobs) == set(wanted)

        what = f"Prometheus to have all targets up with {num_producers} producers"
        wait_for(what, are_up, self._signs("producer", "prometheus"))

    def _plan(self, num_updates: int) -> None:
        demo = (DEPLOY / "runs" / "demo.toml").read_text("utf-8")
        self._run_file.write_text(demo.replace("num_updates = 200", f"num_updates = {num_updates}"), encoding="utf-8")

    def _end(self) -> None:
        """Stops the trainer, and lets it continue to an end that is near."""
        (trainer,) = self.podman.containers("trainer")
        (producer,) = self._running_producers()
        self.podman.compose("stop", "trainer")
        if (status := self.podman.exit_status(trainer)) != _STOPPED:
            raise CheckError(f"{trainer}: ended with status {status} when it was asked to, expected {_STOPPED}")
        (run,) = json.loads(self.podman.output("penstock", "list", "--json"))
        num_updates = run["num_updates"]
        self._plan(num_updates + LAST_UPDATES)
        self.podman.compose("start", "trainer")
        self._await_names()
        self._await_end(trainer, producer)
        print(f"stopped at update {num_updates}, continued, ended {LAST_UPDATES} updates later", flush=True)

    def _await_end(self, trainer: str, producer: str) -> None:
        has_ended = lambda: "running" not in self.podman.containers("trainer").values()  # noqa: E731
        wait_for("the run's end", has_ended, lambda: (self._num_updates(), self._signs("trainer")()))
        if self.podman.exit_status(trainer) != 0 or "report.html" not in self.podman.logs(trainer):
            raise CheckError(f"{trainer}: status {self.podman.exit_status(trainer)}, expected 0 and a report")
        wait_for("the producer to leave", lambda: not self._running_producers(), self._signs("producer"))
        if self.podman.exit_status(producer) != 0:
            raise CheckError(f"{producer}: status {self.podman.exit_status(producer)} at the end of the run")
        print("\n".join(self.podman.logs(trainer).splitlines()[-30:]), flush=True)

    def _command(self, *arguments: str) -> None:
        if self.podman.run("penstock", *arguments) != 0:
            raise CheckError(f"penstock {' '.join(arguments)}: failed")

    def _inspect(self) -> None:
        name, port = f"{PROJECT}_inspect", _free_port()
        arguments = ("inspect", "demo", "--host", "0.0.0.0")
        self.podman.start(name, f"127.0.0.1:{port}:{INSPECT_PORT}", "penstock", *arguments)
        try:
            is_up = lambda: bool(_read_json(f"http://127.0.0.1:{port}/api/run"))  # noqa: E731
            wait_for("the inspector", is_up, lambda: self.podman.logs(name))
            seen = _read_json(f"http://127.0.0.1:{port}/api/run")
            if (
                seen["kind"] != "record"
                or not seen["num_groups"]
                or any("shown as ids" in note for note in seen["notes"])
            ):
                raise CheckError(f"the inspector shows {seen}, expected groups of the record, with their tokens' texts")
        finally:
            self.podman.stop(name, grace_s=10)
            status = self.podman.exit_status(name)
            self.podman.remove(name)
        if status != 0:
            raise CheckError(f"{name}: ended with status {status} when it was asked to")
        print(f"inspected: {seen['num_groups']} groups of the {seen['kind']}", flush=True)

    def _num_updates(self) -> float:
        return self._value("sum(penstock_updates_total)")

    def _signs(self, *services: str) -> Callable[[], object]:
        """Returns a function for what changes while containers start and end: their states and logs."""
        return lambda: [
            (name, state, len(self.podman.logs(name)))
            for service in services
            for name, state in self.podman.containers(service).items()
        ]

    def _value(self, query: str) -> float:
        """Returns the one value of a query; 0 without a series."""
        found = self._ask(f"query?query={urllib.parse.quote(query)}")["result"]
        return float(found[0]["value"][1]) if found else 0.0

    def _ask(self, path: str) -> dict[str, Any]:
        data: dict[str, Any] = _read_json(f"{self._prometheus}/{path}").get("data", {"result": [], "activeTargets": []})
        return data


def wait_for(what: str, is_so: Callable[[], bool], progress: Callable[[], object]) -> None:
    """Waits until `is_so`. `progress` returns something that changes as long as the wait may succeed.

    Raises:
        CheckError: it has not changed for `STALL_S`, or `LIMIT_S` have passed.
    """
    started = moved = time.monotonic()
    seen = progress()
    while not is_so():
        now = time.monotonic()
        if (newest := progress()) != seen:
            seen, moved = newest, now
        if now - moved > STALL_S or now - started > LIMIT_S:
            since = f"nothing has moved for the last {now - moved:.0f} s"
            raise CheckError(f"waited {now - started:.0f} s for {what}; {since} (project {PROJECT})")
        time.sleep(_STEP_S)


def _read_json(url: str) -> dict[str, Any]:
    """Returns the JSON of a page; empty while there is no answer yet."""
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            found: dict[str, Any] = json.load(answer)
            return found
    except (OSError, http.client.HTTPException):
        return {}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def workspace() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="penstock-check-")
