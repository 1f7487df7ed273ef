"""The check of the containers: how long it waits, what it leaves behind, what it says last."""

import stat
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench.compose_check import __main__ as entry
from bench.compose_check import check as module
from bench.compose_check.check import ENDLESS, LAST_UPDATES, LIMIT_S, STALL_S, Check, CheckError, wait_for
from bench.compose_check.podman import Podman
from penstock.schemas.config import load_config

PODMAN = """#!/bin/sh
# Containers, volumes and so on are files below $THINGS; a name with "busy" cannot be removed.
kind=$1; shift
case $kind in
    ps) kind=container; set -- ls ;;
    rm) kind=container; set -- rm "$@" ;;
esac
verb=$1
for name; do :; done
case $verb in
    ls) ls "$THINGS/$kind" ;;
    rm) case $name in *busy*) echo "$name is in use" >&2; exit 2 ;; esac; rm -f "$THINGS/$kind/$name" ;;
esac
"""


@pytest.fixture
def things(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What a stand-in for podman lists and removes."""
    for program, text in (("podman", PODMAN), ("podman-compose", "#!/bin/sh\necho no such pod; exit 125\n")):
        (tmp_path / program).write_text(text)
        (tmp_path / program).chmod(stat.S_IRWXU)
        monkeypatch.setenv(program.upper().replace("-", "_"), str(tmp_path / program))
    monkeypatch.setenv("THINGS", str(tmp_path))
    for kind in ("container", "pod", "volume", "network"):
        (tmp_path / kind).mkdir()
    return tmp_path


def left(things: Path) -> list[str]:
    return sorted(file.name for kind in ("container", "pod", "volume", "network") for file in (things / kind).iterdir())


def test_everything_of_the_check_is_removed_and_nothing_of_others(things: Path, tmp_path: Path) -> None:
    (things / "container" / "penstock-check_trainer_1").touch()
    (things / "container" / "penstock-check_inspect").touch()
    (things / "container" / "penstock_trainer_1").touch()
    (things / "pod" / "pod_penstock-check").touch()
    (things / "volume" / "penstock-check_busy").touch()
    (things / "volume" / "penstock-check_runs").touch()
    (things / "network" / "penstock-check_default").touch()
    (tmp_path / "work").mkdir()
    problems = Check(tmp_path / "work").stop()  # although `podman-compose down` fails
    assert left(things) == ["penstock-check_busy", "penstock_trainer_1"]
    (problem,) = problems
    assert "volume rm --force penstock-check_busy: status 2: penstock-check_busy is in use" in problem
    (things / "volume" / "penstock-check_busy").unlink()
    (things / "volume").rmdir()
    (problem,) = Podman({}).remove_everything()
    assert "volume ls" in problem, "one that cannot even list is a problem and no exception"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Time passes by sleeping alone."""
    now = [0.0]
    sleep = lambda seconds: now.__setitem__(0, now[0] + seconds)  # noqa: E731
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    return now


def test_a_wait_goes_on_while_something_moves_and_ends_once_nothing_does(clock: list[float]) -> None:
    boots_s = 8 * STALL_S
    wait_for("two engines", lambda: clock[0] > boots_s, lambda: clock[0] // (STALL_S / 2))
    assert clock[0] > boots_s
    began = clock[0]
    with pytest.raises(CheckError, match=r"waited 401 s for two engines; nothing has moved for the last 301 s"):
        wait_for("two engines", lambda: False, lambda: min(clock[0] - began, 100.0))
    with pytest.raises(CheckError, match=f"waited {LIMIT_S + 1:.0f} s"):  # it moves in circles
        wait_for("an engine", lambda: False, lambda: clock[0])


class RunInContainers:
    """A run at update 57 whose trainer ends with `status` when it is stopped, and with 0 once it has been continued."""

    def __init__(self, run_file: Path, status: int) -> None:
        self.run_file = run_file
        self.status = status
        self.is_running = True
        self.planned: list[int] = []

    def compose(self, verb: str, service: str) -> None:
        assert (verb, service) == (("start", "stop")[self.is_running], "trainer")
        if verb == "stop":
            self.is_running = False
        else:
            self.planned.append(load_config(self.run_file).num_updates)
            self.status = 0

    def output(self, service: str, *command: str) -> str:
        assert (service, command[0]) == ("penstock", "list") and not self.is_running  # its last update is on the disk
        return '[{"num_updates": 57}]'

    def containers(self, service: str) -> dict[str, str]:
        is_running = self.is_running or (service == "producer" and not self.planned)
        return {f"{service}_1": "running" if is_running else "exited"}

    def finds(self, container: str, name: str) -> bool:
        return (container, name) == ("redis_1", "prometheus")

    def exit_status(self, container: str) -> int:
        return self.status

    def logs(self, container: str) -> str:
        return "/runs/demo/report.html"


def test_the_run_is_ended_a_few_updates_after_everything_was_seen_and_a_trainer_must_stop_as_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    check = Check(tmp_path)
    assert load_config(tmp_path / "demo.toml").num_updates == ENDLESS
    run = RunInContainers(tmp_path / "demo.toml", status=1)
    monkeypatch.setattr(check, "podman", run)
    with pytest.raises(CheckError, match="trainer_1: ended with status 1 when it was asked to, expected 143"):
        check._end()
    assert not run.planned
    run = RunInContainers(tmp_path / "demo.toml", status=143)
    monkeypatch.setattr(check, "podman", run)
    check._end()
    assert run.planned == [57 + LAST_UPDATES]
    assert "stopped at update 57, continued" in capsys.readouterr().out


def test_a_check_that_passes_and_leaves_something_behind_has_not_passed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["compose_check", "run"])
    monkeypatch.setattr(Check, "run", lambda check: None)
    monkeypatch.setattr(Check, "stop", lambda check: ["a volume is in use"])
    assert entry.main() == 1
    assert "a volume is in use" in capsys.readouterr().err
