"""The containers' start: passwords are handed out, the trainer begins or continues, each producer gets a GPU."""

import hashlib
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client import start_http_server

from penstock.deploy.images import hand_out, healthy
from waiting import wait_for

ROOT = Path(__file__).parents[3]
IMAGES = ROOT / "deploy" / "images"
COMMON = "/workspace/run.toml --name demo --runs {} --set metrics.host=0.0.0.0"
"""What the trainer's script tells every trainer, with the folder of all runs."""


class ScriptMachine:
    """A PATH with a `penstock` that notes how it was called and does as told, and a machine with three GPUs."""

    def __init__(self, folder: Path) -> None:
        self.runs = folder / "runs"
        self.runs.mkdir()
        self.locks = folder / "locks"
        self.locks.mkdir()
        self._bin = folder / "bin"
        self._bin.mkdir()
        self.calls_file = folder / "calls"
        self.put("nvidia-smi", "printf '0\\n1\\n2\\n'")

    def put(self, name: str, script: str) -> None:
        file = self._bin / name
        file.write_text(f"#!/bin/sh\n{script}\n")
        file.chmod(0o755)

    def put_penstock(self, script: str) -> None:
        self.put("penstock", f'echo "$*" >> {self.calls_file}\n{script}')

    def start(self, name: str, **environment: str) -> subprocess.Popen[str]:
        arguments = ["/workspace/run.toml"] if name == "trainer.sh" else ["--set", "seed=3"]
        return subprocess.Popen(
            [IMAGES / name, *arguments],
            env={
                "PATH": f"{self._bin}:{os.environ['PATH']}",
                "RUN": "demo",
                "REDIS_URL": "redis://demo-producer@redis",
                "RUNS": str(self.runs),
                "GPU_LOCKS": str(self.locks),
                **environment,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, name: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Starts it and waits for its end."""
        with self.start(name, **environment) as process:
            output, said = process.communicate(timeout=120)
        return subprocess.CompletedProcess(process.args, process.returncode, output, said)

    def calls(self) -> list[str]:
        return self.calls_file.read_text().splitlines() if self.calls_file.exists() else []

    def wait_for_calls(self, count: int) -> None:
        wait_for(self.calls, lambda calls: len(calls) >= count)


@pytest.fixture
def machine(tmp_path: Path) -> ScriptMachine:
    return ScriptMachine(tmp_path)


def test_a_trainer_begins_or_continues_a_run_and_reports_its_end_and_a_failed_one_is_a_failed_container(
    machine: ScriptMachine,
) -> None:
    report = f"report demo --runs {machine.runs}"
    machine.put_penstock("exit 0")
    assert machine.run("trainer.sh").returncode == 0
    assert machine.calls() == [f"trainer {COMMON.format(machine.runs)}", report]
    (machine.runs / "demo" / "checkpoints").mkdir(parents=True)
    (machine.runs / "demo" / "checkpoints" / "epoch-0").touch()
    for script, status, calls in (("exit 0", 0, 2), ("exit 1", 1, 1), ("exit 2", 2, 1), ('[ "$1" = trainer ]', 0, 2)):
        machine.calls_file.unlink()
        machine.put_penstock(script)
        done = machine.run("trainer.sh")
        assert (done.returncode, len(machine.calls())) == (status, calls), script
        assert machine.calls()[0].endswith("--resume")
    assert "the run is complete; its report could not be written" in done.stderr


def test_a_trainer_that_is_stopped_is_waited_for_and_is_not_a_complete_run(machine: ScriptMachine) -> None:
    trapping = "trap 'sleep 0.3; echo saved; exit 0' TERM"
    machine.put("penstock", f'{trapping}\necho "$*" >> {machine.calls_file}\nwhile :; do sleep 0.02; done')
    process = machine.start("trainer.sh")
    machine.wait_for_calls(1)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=120)
    assert (process.returncode, output) == (143, "saved\n")
    assert len(machine.calls()) == 1


@pytest.mark.parametrize(("index", "is_host"), [("0", "yes"), ("1", "no")])
def test_a_pod_of_several_starts_its_ranks_by_torchrun_and_the_first_one_reports(
    machine: ScriptMachine, index: str, is_host: str
) -> None:
    machine.put("torchrun", f'echo "torchrun $*" >> {machine.calls_file}')
    machine.put_penstock("exit 0")
    assert machine.run("trainer.sh", PET_NNODES="2", JOB_COMPLETION_INDEX=index).returncode == 0
    started, *reported = machine.calls()
    # Ranks that torchrun starts again continue, whatever there was when the pod began.
    options = f"--rdzv-conf is_host={is_host},read_timeout=600 --no-python"
    assert started == f"torchrun {options} penstock trainer {COMMON.format(machine.runs)} --resume"
    assert reported == ([f"report demo --runs {machine.runs}"] if index == "0" else [])


def test_a_container_without_what_it_must_be_told_says_so(machine: ScriptMachine) -> None:
    for script, environment, said in (
        ("trainer.sh", {"PET_NNODES": "2"}, "the number of this pod is missing"),
        ("trainer.sh", {"RUN": ""}, "the name of the run is missing"),
        ("producer.sh", {"RUN": ""}, "the name of the run is missing"),
    ):
        done = machine.run(script, **environment)
        assert done.returncode != 0 and said in done.stderr


def test_a_producer_without_gpus_starts_as_it_is(machine: ScriptMachine) -> None:
    machine.put_penstock('echo "${CUDA_VISIBLE_DEVICES-none}"')
    assert machine.run("producer.sh").stdout == "none\n"
    join = f"--join redis://demo-producer@redis --run demo --runs {machine.runs} --set metrics.host=0.0.0.0"
    assert machine.calls() == [f"producer {join} --set seed=3"]


def test_every_producer_takes_a_gpu_of_its_own_and_never_the_trainers(machine: ScriptMachine) -> None:
    machine.put_penstock('echo "$CUDA_DEVICE_ORDER $CUDA_VISIBLE_DEVICES"\nexec sleep 60')
    running = []
    try:
        for count in (1, 2):
            running.append(machine.start("producer.sh", TRAINER_GPU="1"))
            machine.wait_for_calls(count)
        taken = [process.stdout.readline().strip() for process in running if process.stdout]
        assert taken == ["PCI_BUS_ID 0", "PCI_BUS_ID 2"]
        third = machine.run("producer.sh", TRAINER_GPU="1")
        assert third.returncode == 2
        assert "no GPU is free" in third.stderr
        running[0].kill()
        running[0].wait(30)
        running.append(machine.start("producer.sh", TRAINER_GPU="1"))
        freed = running[-1].stdout
        assert freed is not None and freed.readline() == "PCI_BUS_ID 0\n"
    finally:
        for process in running:
            process.kill()
            process.communicate(timeout=120)


def test_passwords_are_made_once_and_each_part_gets_its_own(tmp_path: Path, capsys) -> None:
    arguments = ["lab", "--passwords", str(tmp_path / "all"), "--to", str(tmp_path / "to"), "--redis", "redis:6379"]
    assert hand_out.main(arguments) == 0
    first = {file.relative_to(tmp_path): file.read_text() for file in tmp_path.rglob("*") if file.is_file()}
    assert hand_out.main(arguments) == 0
    assert {file.relative_to(tmp_path): file.read_text() for file in tmp_path.rglob("*") if file.is_file()} == first
    users = (tmp_path / "to" / "redis" / "users.acl").read_text()
    seen = set()
    for part in ("producer", "trainer", "observer", "operator"):
        file = tmp_path / "to" / part / "password"
        assert stat.S_IMODE(file.stat().st_mode) == 0o400
        assert file.read_text() == (tmp_path / "all" / f"lab-{part}").read_text()
        assert (tmp_path / "to" / part / "username").read_text() == f"lab-{part}"
        assert f"user lab-{part} reset on #{hashlib.sha256(file.read_bytes()).hexdigest()}" in users
        assert file.read_text() not in users
        seen.add(file.read_text())
    assert len(seen) == 4
    assert hand_out.main(["a/b", *arguments[1:]]) == 2
    assert "a/b" in capsys.readouterr().err


def test_given_passwords_are_kept_and_written_as_json_whatever_they_hold(tmp_path: Path) -> None:
    (tmp_path / "all").mkdir()
    (tmp_path / "all" / "lab-observer").write_text('with "quotes"\n')
    hand_out.hand_out("lab", tmp_path / "all", tmp_path / "to", "redis:6379")
    assert (tmp_path / "to" / "observer" / "password").read_text() == 'with "quotes"'
    exporter = json.loads((tmp_path / "to" / "observer" / "exporter.json").read_text())
    assert exporter == {"redis://redis:6379": 'with "quotes"', "redis://lab-observer@redis:6379": 'with "quotes"'}


def test_the_setup_image_hands_out_with_what_it_copies_and_the_standard_library(tmp_path: Path) -> None:
    for line in (IMAGES / "setup.Dockerfile").read_text().splitlines():
        if line.startswith("COPY "):
            *sources, target = line.split()[1:]
            folder = tmp_path / target.removeprefix("/")
            for source in map(ROOT.joinpath, sources):
                if source.is_dir():
                    shutil.copytree(source, folder)
                else:
                    folder.mkdir(parents=True, exist_ok=True)
                    shutil.copy(source, folder)
    command = [sys.executable, "-S", "-m", "penstock.deploy.images.hand_out", "lab", "--redis", "redis:6379"]
    done = subprocess.run(
        [*command, "--passwords", tmp_path / "all", "--to", tmp_path / "to"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path / "opt" / "penstock")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "to" / "redis" / "users.acl").is_file()


def test_a_container_is_healthy_while_its_metrics_are_served(monkeypatch, capsys) -> None:
    server, thread = start_http_server(0, "127.0.0.1")
    monkeypatch.setattr(healthy, "URL", f"http://127.0.0.1:{server.server_port}/metrics")
    assert healthy.main() == 0
    server.shutdown()
    thread.join()
    server.server_close()
    assert healthy.main() == 1
    assert "127.0.0.1" in capsys.readouterr().err
