"""Sandboxes, attacked: every case runs real processes, with namespaces where this machine has them, and without."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from penstock.producers.environments import jail
from penstock.producers.environments import sandbox as module
from penstock.producers.environments.sandbox import (
    MB,
    CommandResult,
    Limits,
    LocalSandbox,
    SandboxError,
    Sandboxes,
    packed,
)
from waiting import until, wait_for

KINDS = ("namespaces", "limits")
LIMITS = Limits(wall_s=300.0, cpu_s=0.7, memory_bytes=200 * MB, disk_bytes=8 * MB, processes=20, output_bytes=2000)


def sandboxes(kind: str, limits: Limits = LIMITS) -> Sandboxes:
    made = Sandboxes(limits)
    if kind == "namespaces" and made.why_not:
        pytest.skip(f"no namespaces: {made.why_not}")
    made.why_not = "" if kind == "namespaces" else "not wanted"
    return made


@pytest.fixture(params=KINDS)
async def box(request: pytest.FixtureRequest) -> AsyncIterator[LocalSandbox]:
    async with sandboxes(request.param).open() as opened:
        yield opened


async def python(box: LocalSandbox, code: str, **how: Any) -> CommandResult:
    return await box.run([sys.executable, "-I", "-S", "-c", code], **how)


class Attack(NamedTuple):
    """What a program does, the limit that ends it (with another exit code than 0 if it is None), and what it says."""

    code: str
    ended_by: str | None = ""
    says: str = ""
    only: str = ""


ATTACKS = {
    "fork bomb": Attack("import os\nwhile True:\n try: os.fork()\n except OSError: pass", None, only="namespaces"),
    "many processes": Attack("import os, time\nfor _ in range(99):\n if not os.fork(): time.sleep(99)", None),
    "memory": Attack("x = bytearray(1 << 40)", None, "MemoryError"),
    "memory of many": Attack(
        "import os, time\nfor _ in range(8):\n if not os.fork(): x = b'x' * (60 << 20); break\ntime.sleep(99)",
        "memory",
    ),
    "shared memory": Attack(
        "import mmap, time\nx = mmap.mmap(-1, 400 << 20)\nfor i in range(0, 400 << 20, 4096): x[i] = 1\ntime.sleep(9)",
        "memory",
    ),
    "memory without a mapping": Attack("import os; os.memfd_create('x')", None, "PermissionError"),
    "endless output": Attack("while True: print('x' * 999)", "CPU time", "x" * 999),
    "sleep": Attack("import time; time.sleep(99)", "wall time"),
    "processor": Attack("while True: pass", "CPU time"),
    "processors": Attack("import os\nos.fork(); os.fork()\nwhile True: pass", "CPU time"),
    "ignored signals": Attack(
        "import signal, time\nfor n in range(1, 65):\n try: signal.signal(n, signal.SIG_IGN)\n"
        " except (OSError, ValueError): pass\ntime.sleep(99)",
        "wall time",
    ),
    "closed outputs": Attack("import os, time\nfor n in range(3): os.close(n)\ntime.sleep(99)", "wall time"),
    "a large file": Attack("f = open('x', 'wb')\nwhile True: f.write(b'x' * 65536)", None),
    "many files": Attack(
        "try:\n for n in range(9000): open(f'{n}', 'w').write('x' * 4096)\nexcept OSError as e: print(e)",
        says="No space left",
        only="namespaces",
    ),
    "its folder removed": Attack("import os, shutil\nshutil.rmtree(os.getcwd())"),
    "bytes that are no text": Attack(r"import os; os.write(1, b'\xff\xfe\x00ok')", says="\ufffd\ufffd\0ok"),
    "network": Attack(
        "import socket\ntry: socket.create_connection(('1.1.1.1', 53), 2)\nexcept OSError as e: print('refused')",
        says="refused",
    ),
    "its parent killed": Attack("import os; os.kill(os.getppid(), 9)", only="namespaces"),
    "everyone killed": Attack("import os; os.kill(-1, 9)", None, only="namespaces"),
    "its parent's memory": Attack(
        "open(f'/proc/{__import__(\"os\").getppid()}/mem', 'rb')", None, "Error", "namespaces"
    ),
    "other processes": Attack(
        "import os; print(sorted(int(n) for n in os.listdir('/proc') if n.isdigit())[0:9])",
        says="[1, ",
        only="namespaces",
    ),
    "the machine's files": Attack(f"open({__file__!r})", None, "FileNotFoundError", "namespaces"),
    "programs replaced": Attack("import os; os.rename('/bin', '/gone')", None, "OSError", "namespaces"),
    "programs written": Attack("open('/usr/bin/env', 'w')", None, "OSError", "namespaces"),
    "another namespace": Attack(
        "import ctypes; print(ctypes.CDLL(None).unshare(0x10000000))", says="-1", only="namespaces"
    ),
    "a signal": Attack("import os; os.kill(os.getpid(), 11)", None),
}


@pytest.mark.parametrize("name", ATTACKS)
@pytest.mark.parametrize("kind", KINDS)
async def test_what_a_command_does_is_a_result_and_the_sandbox_lives_on(kind: str, name: str) -> None:
    attack = ATTACKS[name]
    if attack.only not in ("", kind):
        pytest.skip(f"{attack.only} only")
    async with sandboxes(kind).open() as box:
        result = await python(box, attack.code, wall_s=1.0 if attack.ended_by == "wall time" else 300.0)
        if attack.ended_by is None:
            assert result.exit_code or result.ended_by
        else:
            assert (result.ended_by, bool(result.exit_code)) == (attack.ended_by, bool(attack.ended_by)), result
        assert attack.says in result.text
        assert len(result.stdout) <= LIMITS.output_bytes and len(result.stderr) <= LIMITS.output_bytes
        if attack.ended_by != "":
            assert (await box.run(["sh", "-c", "echo alive"])).stdout == b"alive\n"


@pytest.mark.parametrize(
    ("argv", "exit_code", "says"),
    [
        (["nowhere"], 127, "No such file"),
        (["echo", "x" * 200_000], 127, "Argument list too long"),
        (["echo", "a\0b"], 127, "null byte"),
        (["echo", *("y" * 10 for _ in range(20_000))], 0, "y" * 10),
        (["cat"], 0, "given"),
        (["sh", "-c", "exit 3"], 3, ""),
    ],
)
async def test_commands_that_cannot_be_run_are_results_too(
    box: LocalSandbox, argv: list[str], exit_code: int, says: str
) -> None:
    result = await box.run(argv, stdin=b"given")
    assert result.exit_code == exit_code
    assert says in result.text


DAEMON = """
import os, sys, time
if os.fork(): os._exit(0)
os.setsid()
if os.fork(): os._exit(0)
for n in range(3): os.close(n)
os.execvp("sleep", ["sleep", sys.argv[1]])
"""


def asleep(mark: str) -> bool:
    """Returns whether a process of this machine sleeps for `mark` seconds."""
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if place.read_bytes() == b"sleep\0%s\0" % mark.encode():
                return True
        except OSError:
            continue
    return False


async def test_a_daemon_lives_until_its_sandbox_is_closed_and_no_longer(box: LocalSandbox) -> None:
    mark = f"{1000 + os.getpid()}.{len(box.isolation)}"
    await box.run([sys.executable, "-c", DAEMON, mark])
    await until(lambda: asleep(mark))
    await box.close()
    assert not asleep(mark)
    assert box.isolation == "namespaces" or not Path(box.work).exists()  # noqa: ASYNC240


PRODUCER = """
import asyncio, sys
from penstock.producers.environments import sandbox as module
from penstock.producers.environments.sandbox import Sandboxes
async def main():
    boxes = Sandboxes()
    boxes.why_not = "" if sys.argv[2] == "namespaces" else "not wanted"
    async with boxes.open() as box:
        print(box.work, flush=True)
        await box.run(["sh", "-c", f"setsid sleep {sys.argv[1]} & sleep {sys.argv[1]}"], wall_s=600)
asyncio.run(main())
"""


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_outlives_a_killed_producer(kind: str) -> None:
    sandboxes(kind)
    mark = f"{2000 + os.getpid()}.{len(kind)}"
    argv = [sys.executable, "-c", PRODUCER, mark, kind]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as producer:
        assert producer.stdout is not None
        work = producer.stdout.readline().strip()
        wait_for(lambda: asleep(mark))
        producer.send_signal(signal.SIGKILL)
    wait_for(lambda: not asleep(mark) and (kind == "namespaces" or not os.path.exists(work)))


async def test_files_are_saved_and_restored_and_are_the_same_bytes_for_the_same_files(box: LocalSandbox) -> None:
    await box.run(["sh", "-c", "mkdir a; echo one > a/b; ln -s /etc a/out; chmod 700 a/b; touch -d 2001-01-01 a/b"])
    state = await box.save(MB)
    assert state is not None and state == await box.save(MB)
    async with sandboxes(box.isolation).open() as other:
        await other.restore(state)
        found = await other.run(["sh", "-c", "cd $0/a && cat b && stat -c %a-%Y b && readlink out", other.work])
        assert found.stdout.decode().split() == ["one", "700-978307200", "/etc"]
        assert await other.save(10) is None
        with pytest.raises(SandboxError, match=r"its files cannot be restored: [\s\S]*not a gzip file"):
            await other.restore(b"nothing of the kind")


async def test_files_that_their_owner_cannot_read_are_saved_and_stay_so(box: LocalSandbox) -> None:
    await box.run(["sh", "-c", "echo one > key; mkdir d; echo two > d/file; chmod 200 key; chmod 0 d/file d"])
    state = await box.save(MB)
    assert state is not None and state == await box.save(MB)
    async with sandboxes(box.isolation).open() as other:
        await other.restore(state)
        for each in (box, other):
            found = await each.run(["sh", "-c", "stat -c %a key d; chmod 700 d d/file key; cat key d/file"])
            assert found.stdout.decode().split() == ["200", "0", "one", "two"]


async def test_files_that_are_restored_go_nowhere_through_a_link_that_code_has_left(tmp_path: Path) -> None:
    async with sandboxes("namespaces").open() as box:
        await box.run(["ln", "-s", str(tmp_path), "/tests"])
        with pytest.raises(SandboxError, match="cannot be restored"):
            await box.restore(packed({"tests/secret": b"answer"}))
    assert not os.listdir(tmp_path)


async def test_a_sandbox_that_dies_or_is_given_up_is_an_error_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    async with sandboxes("namespaces").open() as box:
        box._process.kill()
        with pytest.raises(SandboxError, match="it has ended by itself: killed"):
            await box.run(["true"])
        with pytest.raises(SandboxError, match="failed before"):
            await box.run(["true"])
    async with sandboxes("limits").open() as box:
        os.kill(box._process.pid, signal.SIGSTOP)
        monkeypatch.setattr(module, "GRACE_S", 0.1)
        with pytest.raises(SandboxError, match="no reply within"):
            await box.run(["true"], wall_s=0.1)
        os.kill(box._process.pid, signal.SIGCONT)
        monkeypatch.undo()
    monkeypatch.setattr(module, "_JAIL", Path("/nowhere.py"))
    with pytest.raises(SandboxError, match="No such file"):
        async with sandboxes("limits").open():
            pass


FREE_PYTHON = "/usr/bin/python3"
"""Which every user can run."""


FORKS = """
import os, time
children = []
try:
    while child := os.fork():
        children.append(child)
    time.sleep(99)
except OSError:
    for child in children:
        os.kill(child, 9)
        os.waitpid(child, 0)
    print(len(children))
"""
"""Says how many children the kernel lets it have; none is left."""


@pytest.mark.skipif(os.geteuid() != 0 or not os.path.exists(FREE_PYTHON), reason="needs root and Debian's Python")
async def test_without_namespaces_the_commands_of_root_have_a_user_of_their_own(monkeypatch, tmp_path: Path) -> None:
    for name, value in (("executable", FREE_PYTHON), ("prefix", "/usr"), ("base_prefix", "/usr")):
        monkeypatch.setattr(sys, name, value)
    monkeypatch.setattr(module, "PYTHON", (FREE_PYTHON, "-I", "-S", "-c"))
    async with sandboxes("limits").open() as box:
        user = int((await python(box, "import os; print(os.getuid(), end=''); open('x', 'w')")).text)
        assert user > jail.OWN_USERS and Path(box.work, "x").stat().st_uid == user  # noqa: ASYNC240
        for name in ("fork bomb", "its parent killed", "everyone killed", "its parent's memory", "processors"):
            result = await python(box, ATTACKS[name].code)
            assert result.exit_code or result.ended_by or name == "everyone killed", name
            assert (await box.run(["sh", "-c", "echo alive"])).stdout == b"alive\n", name
        result = await python(box, FORKS)
        assert result.ended_by == "processes" or 10 < int(result.stdout) <= LIMITS.processes + 2
        tmp_path.chmod(0o700)  # noqa: ASYNC240
        assert "PermissionError" in (await python(box, f"import os; os.listdir({str(tmp_path)!r})")).text
        state = await box.save(MB)
        async with sandboxes("limits").open() as other:
            await other.restore(state)
            assert (await other.run(["ls"])).text == "x\n"
    assert not Path(box.work).exists()  # noqa: ASYNC240


async def test_a_cancelled_command_ends_with_its_sandbox() -> None:
    mark = f"{3000 + os.getpid()}.5"
    async with sandboxes("limits").open() as box:
        running = asyncio.create_task(box.run(["sleep", mark]))
        await until(lambda: asleep(mark))
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    assert not asleep(mark)


async def test_sandboxes_share_nothing_and_at_most_so_many_commands_run_at_once() -> None:
    boxes = sandboxes("namespaces")
    boxes.room = asyncio.Semaphore(2)

    async def episode(number: int) -> str:
        async with boxes.open() as box:
            await box.run(["sh", "-c", f"echo {number} >> /tmp/seen"])
            return (await box.run(["cat", "/tmp/seen"])).text

    assert await asyncio.gather(*map(episode, range(8))) == [f"{number}\n" for number in range(8)]


def test_limits_that_are_none_are_refused() -> None:
    with pytest.raises(ValueError, match="is 0, expected more than 0"):
        Limits(processes=0)
