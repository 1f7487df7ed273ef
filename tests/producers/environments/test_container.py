"""Containers, where this machine has docker or podman and a static busybox to make an image of."""

import asyncio
import io
import os
import shutil
import signal
import subprocess
import sys
import tarfile
from collections.abc import Iterator

import pytest

from penstock.producers.environments.container import Container, runtime
from penstock.producers.environments.sandbox import MB, Limits, SandboxError, packed
from waiting import wait_for

LIMITS = Limits(wall_s=60.0, memory_bytes=100 * MB, processes=50, output_bytes=100)
IMAGE = "localhost/penstock-test:1"


@pytest.fixture(scope="module")
def command() -> Iterator[str]:
    """The container runtime, with an image that has a shell."""
    busybox = shutil.which("busybox")
    if (name := runtime()) is None or busybox is None:
        pytest.skip("neither docker nor podman answers, or there is no busybox")
    files = io.BytesIO()
    with tarfile.open(fileobj=files, mode="w") as archive:
        archive.add(busybox, "bin/busybox")
        for program in ("sh", "cat", "pwd", "true", "echo", "sleep", "kill", "ls", "ps"):
            link = tarfile.TarInfo(f"bin/{program}")
            link.type, link.linkname = tarfile.SYMTYPE, "busybox"
            archive.addfile(link)
    subprocess.run([name, "import", "-", IMAGE], input=files.getvalue(), check=True, capture_output=True)
    tried = subprocess.run([name, "run", "--rm", IMAGE, "/bin/true"], capture_output=True, text=True)
    if tried.returncode:
        pytest.skip(f"{name} runs no container here: {tried.stderr.strip()}")
    yield name
    subprocess.run([name, "image", "rm", "-f", IMAGE], check=True, capture_output=True)


def containers(command: str) -> str:
    listed = subprocess.run([command, "ps", "-a", "--format", "{{.Image}}"], check=True, capture_output=True, text=True)
    return listed.stdout


async def test_commands_run_in_a_container_that_is_gone_afterwards(command: str) -> None:
    async with Container.open(command, IMAGE, LIMITS, network=False) as box:
        assert box.work == "/"
        await box.restore(packed({"/tests/test.sh": b"#!/bin/sh\necho from a file $A; cat; ls /tests"}))
        result = await box.run(["/tests/test.sh"], stdin=b"given ", cwd="/tests", env={"A": "b"})
        assert (result.exit_code, result.stdout) == (0, b"from a file b\ngiven test.sh\n")
        assert (
            await box.run(["sh", "-c", "sleep 99 & while :; do echo xxx; done"], wall_s=2.0)
        ).ended_by == "wall time"
        assert (await box.run(["sh", "-c", "ps | grep -c '[s]leep 99'"])).stdout == b"0\n"
        assert (await box.run(["nowhere"])).exit_code == 127
        assert (await box.run(["sh", "-c", "kill -9 1; exit 3"])).exit_code == 3
        assert await box.save(MB) is None
        assert IMAGE in containers(command)
    assert IMAGE not in containers(command)


async def test_a_container_that_cannot_start_or_ends_is_an_error(command: str) -> None:
    with pytest.raises(SandboxError, match="its container cannot be started"):
        async with Container.open(command, "localhost/nowhere:1", LIMITS, network=False):
            pass
    async with Container.open(command, IMAGE, LIMITS, network=False) as box:
        await asyncio.to_thread(subprocess.run, [command, "rm", "-f", box._name], check=True, capture_output=True)
        with pytest.raises(SandboxError, match="its container has ended"):
            await box.run(["true"])


async def test_a_command_that_no_program_can_be_given_is_answered_as_the_local_sandbox_does() -> None:
    box = Container("true", "name", "/", LIMITS)
    for command, why in (("a\0b", "null byte"), ("\ud83d", "surrogates not"), ("x" * 140_000, "too long")):
        result = await box.run(["bash", "-c", command])
        assert result.exit_code == 127 and result.text.startswith("bash: ") and why in result.text
    with pytest.raises(FileNotFoundError):
        await Container("nowhere", "name", "/", LIMITS).run(["true"])


PRODUCER = """
import asyncio, sys
from penstock.producers.environments.container import Container
from penstock.producers.environments.sandbox import Limits
async def main():
    async with Container.open(sys.argv[1], sys.argv[2], Limits(), network=False) as box:
        print(box.work, flush=True)
        await asyncio.sleep(999)
asyncio.run(main())
"""


def test_a_container_does_not_outlive_a_killed_producer(command: str) -> None:
    argv = [sys.executable, "-c", PRODUCER, command, IMAGE]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as producer:
        assert producer.stdout is not None
        assert producer.stdout.readline() == "/\n"
        os.kill(producer.pid, signal.SIGKILL)
    wait_for(lambda: IMAGE not in containers(command))


async def test_a_container_is_removed_when_its_opening_is_cancelled(command: str) -> None:
    async def open_one() -> None:
        async with Container.open(command, IMAGE, LIMITS, network=False):
            await asyncio.Event().wait()

    opening = asyncio.create_task(open_one())
    await asyncio.sleep(0)
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    assert IMAGE not in containers(command)
