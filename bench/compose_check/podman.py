"""podman and podman-compose with the options that this machine needs."""

import json
import os
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

DEPLOY = Path(__file__).parents[2] / "deploy"
COMPOSE_FILE = DEPLOY / "compose.yaml"
PROJECT = "penstock-check"


_NAMES = "--format={{.Name}}"
_KINDS = {
    ("ps", "--all", "--format={{.Names}}"): ("rm", "--force", "--depend", "--ignore", "--time=10"),
    ("pod", "ls", _NAMES): ("pod", "rm", "--force"),
    ("volume", "ls", _NAMES): ("volume", "rm", "--force"),
    ("network", "ls", _NAMES): ("network", "rm", "--force"),
}
"""The command that lists the names of all, and the one that removes one."""


class CommandError(RuntimeError):
    """A command failed; the message holds the command and its output."""


class Podman:
    """`PODMAN` (podman) and `PODMAN_COMPOSE` (podman-compose) are the programs, `COMPOSE_CHECK_BUILD_FLAGS` and
    `COMPOSE_CHECK_RUN_FLAGS` options that podman needs on this machine to build and to run.

    settings: variables of the compose file.
    """

    def __init__(self, settings: Mapping[str, str]) -> None:
        self._podman = os.environ.get("PODMAN", "podman")
        self._compose = os.environ.get("PODMAN_COMPOSE", "podman-compose")
        self._build_flags = shlex.split(os.environ.get("COMPOSE_CHECK_BUILD_FLAGS", ""))
        self._run_flags = os.environ.get("COMPOSE_CHECK_RUN_FLAGS", "")
        self._environment = {**os.environ, **settings}

    def build(self, image: str, dockerfile: Path, context: Path, *options: str) -> None:
        # One layer an image: some storage drivers copy every layer whole.
        flags = ["--format=docker", "--layers=false", *self._build_flags]
        self._do([self._podman, "build", *flags, *options, "--file", str(dockerfile), "--tag", image, str(context)])

    def has_image(self, image: str) -> bool:
        return subprocess.run([self._podman, "image", "exists", image]).returncode == 0

    def compose(self, *arguments: str) -> None:
        self._do(self._composed(*arguments))

    def run(self, service: str, *arguments: str) -> int:
        """`docker compose run --rm SERVICE ARGUMENTS...`; returns the exit status and lets its output through."""
        command = self._one_off("--rm", service, *arguments)
        print(f"$ {shlex.join(command)}", flush=True)
        return subprocess.run(command, env=self._environment).returncode

    def output(self, service: str, *arguments: str) -> str:
        """As `run`; returns the output."""
        return self._ask(self._one_off("--rm", service, *arguments))

    def start(self, name: str, publish: str, service: str, *arguments: str) -> None:
        """`docker compose run --detach --name NAME --publish PUBLISH SERVICE ARGUMENTS...`."""
        self._do(self._one_off("--detach", "--name", name, "--publish", publish, service, *arguments))

    def _one_off(self, *arguments: str) -> list[str]:
        return self._composed("--profile", "tools", "run", "-T", "--no-deps", *arguments)

    def _composed(self, *arguments: str) -> list[str]:
        command = [self._compose, "--podman-path", self._podman, "--project-name", PROJECT, "--file", str(COMPOSE_FILE)]
        if self._run_flags:
            command.append(f"--podman-run-args={self._run_flags}")
        return [*command, *arguments]

    def containers(self, service: str) -> dict[str, str]:
        """Returns the state (`running`, `exited`, ...) of a service's containers by name, in the order of their
        numbers."""
        filters = [
            f"--filter=label=com.docker.compose.service={service}",
            f"--filter=label=com.docker.compose.project={PROJECT}",
        ]
        found = json.loads(self._ask([self._podman, "ps", "--all", "--format=json", *filters]))
        names = sorted(((each["Names"][0], each["State"]) for each in found), key=lambda pair: _number(pair[0]))
        return dict(names)

    def exit_status(self, container: str) -> int:
        return int(self._ask([self._podman, "inspect", "--format={{.State.ExitCode}}", container]))

    def is_healthy(self, container: str) -> bool:
        """Runs the container's health check once: podman leaves that to systemd, which may be absent."""
        return subprocess.run([self._podman, "healthcheck", "run", container], capture_output=True).returncode == 0

    def finds(self, container: str, name: str) -> bool:
        """True if `container` resolves the name of another. If not, podman sets the network up again for a later
        attempt: its name server (aardvark-dns 1.4) may end while containers come and go."""
        if subprocess.run([self._podman, "exec", container, "getent", "hosts", name], capture_output=True).returncode:
            subprocess.run([self._podman, "network", "reload", container], capture_output=True)
            return False
        return True

    def stop(self, container: str, grace_s: int) -> None:
        self._ask([self._podman, "stop", f"--time={grace_s}", container])

    def remove(self, container: str) -> None:
        self._ask([self._podman, "rm", container])

    def remove_everything(self) -> list[str]:
        """Removes everything of the project, in any state; returns what podman said about what it could not remove.

        `podman-compose down` leaves volumes, and where it fails, containers: one that others depend on is not removed
        before them.
        """
        problems = []
        for list_all, remove in _KINDS.items():
            try:
                names = self._ask([self._podman, *list_all]).split()
            except CommandError as error:
                problems.append(str(error))
                continue
            for name in names:
                if name.startswith((f"{PROJECT}_", f"pod_{PROJECT}")):
                    try:
                        self._ask([self._podman, *remove, name])
                    except CommandError as error:
                        problems.append(str(error))
        return problems

    def logs(self, container: str) -> str:
        done = subprocess.run(
            [self._podman, "logs", container], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8"
        )
        return done.stdout

    def _do(self, command: Sequence[str]) -> None:
        print(f"$ {shlex.join(command)}", flush=True)
        self._ask(command, stderr=subprocess.STDOUT)

    def _ask(self, command: Sequence[str], stderr: int = subprocess.PIPE) -> str:
        """Returns the output."""
        done = subprocess.run(command, env=self._environment, stdout=subprocess.PIPE, stderr=stderr, encoding="utf-8")
        if done.returncode != 0:
            said = done.stdout if stderr == subprocess.STDOUT else done.stderr
            raise CommandError(f"{shlex.join(command)}: status {done.returncode}: {said[-4000:]}")
        return done.stdout


def _number(container: str) -> int:
    return int(container.rpartition("_")[2])
