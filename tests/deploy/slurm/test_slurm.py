"""deploy/slurm: scripts that sbatch takes, whose commands exist, and that end as their jobs should."""

import os
import re
import shlex
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from penstock.deploy.cli import app
from penstock.producers.loop import GRACE_S, SHUTDOWN_TIMEOUT_S
from waiting import wait_for

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "deploy" / "slurm"
SCRIPTS = sorted(FOLDER.iterdir())
PARTS = ("trainer.sbatch", "producers.sbatch")


class Cluster:
    """A job's environment on a PATH whose commands note how they were called."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.calls_file = folder / "calls"
        (folder / "bin").mkdir()
        self.put("scontrol", '[ "$1" != show ] || printf "node7\\nnode8\\n"')
        self.put("scancel")
        self.put("srun")
        self.put("penstock")

    def put(self, name: str, script: str = "") -> None:
        file = self.folder / "bin" / name
        shown = 'echo "$(basename "$0") $*" "url=${REDIS_URL:-}" "password=${REDIS_PASSWORD_FILE:-}"'
        file.write_text(f"#!/bin/bash\n{shown} >> {self.calls_file}\n{script}\n")
        file.chmod(0o755)

    def start(self, script: str, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        variables = {
            "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}",
            "SLURM_JOB_ID": "123456",
            "SLURM_JOB_NODELIST": "node[7-8]",
            "SLURM_JOB_NUM_NODES": "2",
            "SLURM_CPUS_PER_TASK": "32",
        }
        return subprocess.Popen(
            ["bash", FOLDER / script, *arguments],
            env=variables | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, script: str, *arguments: str, **environment: str) -> tuple[int, str]:
        """The exit status and what was said on standard error."""
        with self.start(script, *arguments, **environment) as process:
            _, said = process.communicate(timeout=120)
        return process.returncode, said

    def calls(self, name: str) -> list[str]:
        lines = self.calls_file.read_text().splitlines() if self.calls_file.exists() else []
        return [line for line in lines if line.startswith(f"{name} ")]


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path)


def options(script: Path) -> dict[str, str]:
    """The `#SBATCH` lines of a script."""
    found = re.findall(r"^#SBATCH --([a-z-]+)(?:=(\S+))?$", script.read_text(), re.M)
    assert len(found) == script.read_text().count("#SBATCH ")
    return dict(found)


def test_the_script_of_each_part_is_sound_bash_and_says_which_argument_it_lacks(cluster: Cluster) -> None:
    assert [script.name for script in SCRIPTS] == ["producers.sbatch", "redis.sbatch", "trainer.sbatch"]
    for script in SCRIPTS:
        assert script.read_text().startswith("#!/bin/bash\n") and os.access(script, os.X_OK)
        assert subprocess.run(["bash", "-n", script]).returncode == 0
        if (checker := shutil.which("shellcheck")) is not None:
            assert subprocess.run([checker, script]).returncode == 0
        status, said = cluster.run(script.name)
        assert status != 0 and "expected" in said, script.name


def test_jobs_ask_for_what_their_parts_need() -> None:
    trainer, producers, redis = (options(FOLDER / f"{name}.sbatch") for name in ("trainer", "producers", "redis"))
    assert trainer["ntasks-per-node"] == "1"  # one torchrun a node starts the ranks of its GPUs
    assert "gpus-per-node" in trainer and producers["gpus-per-node"] == "1" and "gpus-per-node" not in redis
    assert "array" in producers and producers["ntasks"] == "1"
    for name in (trainer, producers):
        assert name["open-mode"] == "append" and "requeue" in name  # a job that is queued again keeps its log
    assert "requeue" not in redis  # it would come back at another address
    number, _, seconds = producers["signal"].removeprefix("B:").partition("@")
    assert number == "TERM" and int(seconds) >= 2 * (GRACE_S + SHUTDOWN_TIMEOUT_S), "its claims are handed back"


@pytest.mark.parametrize("script", PARTS)
def test_options_go_to_penstock_which_takes_them(cluster: Cluster, script: str) -> None:
    asked = ["run.toml", "--runs", "/lab/runs", "--set", "trainer.learning_rate=1e-6"]
    assert cluster.run(script, *asked, REDIS_URL="redis://there") == (0, "")
    (call,) = cluster.calls("srun" if script == "trainer.sbatch" else "penstock")
    words = shlex.split(call.rpartition(" url=")[0])
    command = words[words.index("penstock") + 1 :]
    assert command[1:6] == asked
    _, taken, _ = app.parse_args(command, exit_on_error=False, print_error=False)
    if script == "trainer.sbatch":
        assert taken.arguments["resume"]  # torchrun starts ranks again
        launched = get_args_parser().parse_args(words[words.index("torchrun") + 1 :])
        assert (launched.nnodes, launched.nproc_per_node, launched.no_python) == ("2", "gpu", True)
        assert launched.rdzv_endpoint == "node7:23456"
        assert launched.shutdown_timeout < int(options(FOLDER / script)["signal"].partition("@")[2])


@pytest.mark.parametrize("script", PARTS)
def test_redis_is_the_given_one_or_that_of_its_job(cluster: Cluster, script: str, tmp_path: Path) -> None:
    status, said = cluster.run(script, "run.toml")
    assert status != 0 and "expected REDIS_URL, or the folder that redis.sbatch was given" in said
    (tmp_path / "url").write_text("redis://node3:6379\n")
    assert cluster.run(script, "run.toml", PENSTOCK_REDIS=str(tmp_path))[0] == 0
    assert cluster.run(script, "run.toml", PENSTOCK_REDIS=str(tmp_path), REDIS_URL="redis://mine")[0] == 0
    of_the_job, given = cluster.calls("srun" if script == "trainer.sbatch" else "penstock")
    assert of_the_job.endswith(f" url=redis://node3:6379 password={tmp_path}/password")
    assert given.endswith(" url=redis://mine password=")


def test_a_trainer_whose_time_is_over_saves_and_is_queued_again(cluster: Cluster) -> None:
    cluster.put(
        "srun", f"trap 'echo saved; exit 1' TERM\necho $$ > {cluster.folder}/step\nwhile :; do sleep 0.02; done"
    )
    cluster.put("scancel", f'[ "$1" = --signal=TERM ] && kill -TERM "$(cat {cluster.folder}/step)"')
    with cluster.start("trainer.sbatch", "run.toml", REDIS_URL="redis://there") as job:
        wait_for(
            lambda: (cluster.folder / "step").exists() and (cluster.folder / "step").read_text(), bool, timeout_s=30
        )
        job.send_signal(signal.SIGUSR1)
        output, _ = job.communicate(timeout=120)
    assert (job.returncode, output) == (1, "saved\n")
    assert any("requeue 123456" in call for call in cluster.calls("scontrol"))


def test_a_trainer_that_ends_by_itself_or_is_cancelled_is_waited_for_and_not_queued_again(cluster: Cluster) -> None:
    for status in (0, 1):
        cluster.put("srun", f"exit {status}")
        assert cluster.run("trainer.sbatch", "run.toml", REDIS_URL="redis://there")[0] == status
    cluster.put(
        "srun", f"echo $$ > {cluster.folder}/step\nwhile [ ! -e {cluster.folder}/over ]; do sleep 0.02; done; exit 1"
    )
    with cluster.start("trainer.sbatch", "run.toml", REDIS_URL="redis://there") as job:
        wait_for(lambda: (cluster.folder / "step").exists(), bool)
        job.send_signal(signal.SIGTERM)  # Slurm sends it to the step as well
        (cluster.folder / "over").touch()
        job.communicate(timeout=120)
    assert job.returncode == 1
    assert not [call for call in cluster.calls("scontrol") if "requeue" in call]


def test_redis_has_its_password_from_a_file_that_others_cannot_read(cluster: Cluster, tmp_path: Path) -> None:
    cluster.put("server", "cat")
    cluster.put("python3", f'[[ "$*" == *secrets* ]] && echo sesame || echo {cluster.folder}/bin/server')
    folder = tmp_path / "redis"
    with cluster.start("redis.sbatch", str(folder), PENSTOCK_REDIS_PORT="7001") as job:
        configuration, said = job.communicate(timeout=120)
    assert (job.returncode, said) == (0, "")
    settings = dict(line.split(" ", 1) for line in configuration.splitlines())
    assert settings["requirepass"] == "sesame" and settings["dir"] == f'"{folder}"'
    assert (settings["appendonly"], settings["maxmemory-policy"]) == ("yes", "noeviction")
    assert re.fullmatch(r"redis://\S+:7001\n", (folder / "url").read_text())
    assert (folder.stat().st_mode & 0o777, (folder / "password").stat().st_mode & 0o777) == (0o700, 0o600)
    assert not [call for call in cluster.calls("server") if "sesame" in call]  # a command line is public
