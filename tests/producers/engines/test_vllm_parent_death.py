"""An engine process ends with its parent, wherever in its boot it is. That the engines of a killed run end, the tests
of the demo show each time."""

import os
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from process_family import MARK, command_lines, family
from shared_engine import qwen3
from waiting import wait_for

pytestmark = [pytest.mark.vllm, pytest.mark.exhaustive, pytest.mark.slow, pytest.mark.timeout(400)]

ROOT = Path(__file__).parents[3]
PARENTS = """
import asyncio, os, signal, sys

async def main():
    args = {"skip_tokenizer_init": True, "enforce_eager": True}
    config = RunConfig(
        name="parent-death",
        model=ModelConfig(path=sys.argv[1]),
        environment=EnvironmentConfig(path="nobody:Needed"),
        engine=EngineConfig(kv_cache_gib=0.1, args=args),
    )
    engine = await VllmEngine.start(config)
    print("ready", flush=True)
    await asyncio.sleep(600)

if __name__ == "__main__":
    # As in a producer, vLLM is not what the main module imports: the engine process begins with importing that.
    from penstock.producers.engines.vllm import VllmEngine
    from penstock.schemas.config import EngineConfig, EnvironmentConfig, ModelConfig, RunConfig

    # Parents that were killed are nobody's to wait for.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        variable, mark, output = line.split()
        if (child := os.fork()) == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.environ[variable] = mark
            os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT), 1)
            os.dup2(1, 2)
            asyncio.run(main())
        print(child, flush=True)
"""


@pytest.fixture(scope="module")
def temporary() -> Iterator[Path]:
    """A TMPDIR of their own, whose path is short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def parents(tmp_path_factory, temporary) -> Iterator[subprocess.Popen[str]]:
    """Forks a parent of an engine for each line it is given, and answers with its process id."""
    folder = tmp_path_factory.mktemp("parents")
    qwen3(tied=True, seed=0).save_pretrained(folder / "model")
    (folder / "parents.py").write_text(PARENTS)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "VLLM_LOGGING_LEVEL": "INFO", "TMPDIR": str(temporary)}
    command = [sys.executable, str(folder / "parents.py"), str(folder / "model")]
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process
        process.kill()


@pytest.mark.parametrize("moment", ["at its start", "loading", "ready"])
def test_no_process_and_no_socket_of_an_engine_outlives_a_killed_parent(parents, temporary, tmp_path, moment):
    mark, output = str(uuid.uuid4()), tmp_path / "output"
    output.touch()
    parents.stdin.write(f"{MARK} {mark} {output}\n")
    parents.stdin.flush()
    parent = psutil.Process(int(parents.stdout.readline()))

    def said(text: str) -> bool:
        assert parent.is_running(), "the parent ended early"
        return text in output.read_text(errors="replace")

    def engine_has_begun() -> bool:
        # Other children of that time are vLLM's look at the model and multiprocessing's resource tracker.
        return any("spawn_main" in " ".join(command) for command in command_lines(parent.children()))

    try:
        wait_for(engine_has_begun, timeout_s=120)
        if moment != "at its start":
            wait_for(lambda: said("Loading weights took" if moment == "loading" else "ready"), timeout_s=120)
        assert len(family(mark)) >= 1
        sockets = list(temporary.glob("penstock-engine-*"))
        assert len(sockets) == 1 or moment == "at its start"
    finally:
        parent.kill()
    try:
        wait_for(lambda: not family(mark), timeout_s=60)
        assert moment == "at its start" or not sockets[0].exists()
    finally:
        for process in family(mark):
            process.kill()
