"""A sandbox: runs commands that nobody vouches for, under limits, and leaves nothing behind.

    sandboxes = Sandboxes(Limits(wall_s=5))
    async with sandboxes.open() as sandbox:
        result = await sandbox.run(["python3", "-c", "print(6 * 7)"])

What a command does is a `CommandResult`, whatever it is: an exit status, a signal, a limit that it exceeded. What the
sandbox itself fails at is a `SandboxError`, and the rollout is dead with its reason.
"""

import asyncio
import contextlib
import functools
import io
import json
import logging
import os
import sys
import tarfile
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec

from penstock.producers.environments import jail

log = logging.getLogger(__name__)

Json = dict[str, Any]

MB = 1 << 20
GRACE_S = 60.0
"""For the sandbox to say how a command ended, after its wall time, on a busy machine."""
START_S = 60.0
NAMESPACES, LIMITS = "namespaces", "limits"
PATH = f"{sys.prefix}/bin:/usr/local/bin:/usr/bin:/bin"
PYTHON = (sys.executable, "-I", "-S", "-c")
"""Runs a program that follows, in a sandbox."""
_JAIL = Path(jail.__file__)
_PACK = """
import gzip, os, sys, tarfile
root = sys.argv[1]
device = os.lstat(root).st_dev
hidden = []
def kept(member):
    path = os.path.join(root, member.name)
    if os.lstat(path).st_dev != device or member.name == "dev":
        return None
    needed = 0o500 if member.isdir() else 0o400 if member.isfile() else 0
    if member.mode & needed != needed:
        hidden.append((path, member.mode))
        os.chmod(path, member.mode | needed)
    return member
try:
    with gzip.GzipFile(fileobj=sys.stdout.buffer, mode="wb", compresslevel=1, mtime=0) as packed:
        with tarfile.open(fileobj=packed, mode="w|") as archive:
            for name in sorted(os.listdir(root)):
                archive.add(os.path.join(root, name), name, filter=kept)
finally:
    for path, mode in reversed(hidden):
        os.chmod(path, mode)
"""
_UNPACK = """
import sys, tarfile
with tarfile.open(fileobj=sys.stdin.buffer, mode="r|gz") as archive:
    archive.extraction_filter = lambda member, path: member
    archive.extractall(sys.argv[1])
"""
"""Both run in the sandbox, as the commands do: links that a command has left lead nowhere that it could not go."""


class SandboxError(RuntimeError):
    """The sandbox itself has failed, not what ran in it."""


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a sandbox may use. All but `wall_s` and `output_bytes`, which are one command's, hold for all processes
    together.

    cpu_s: processor time of a command. memory_bytes: memory that is no file's; also the most that one process may ask
        for. disk_bytes: all files (without namespaces: one file). output_bytes: of each of the two outputs; what is
        beyond it is dropped.
    """

    wall_s: float = 10.0
    cpu_s: float = 10.0
    memory_bytes: int = 512 * MB
    disk_bytes: int = 64 * MB
    processes: int = 64
    output_bytes: int = 65536

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if not getattr(self, name) > 0:
                raise ValueError(f"limits.{name} is {getattr(self, name)}, expected more than 0")


class CommandResult(NamedTuple):
    """How a command ended.

    exit_code: 127 if there is no such program; -9 for one that signal 9 has ended. ended_by: the limit that ended it
    ("wall time", "CPU time", "memory", "processes"), or empty. is_truncated: some of its output is left out.
    """

    exit_code: int
    stdout: bytes
    stderr: bytes
    ended_by: str
    is_truncated: bool
    wall_s: float

    @property
    def text(self) -> str:
        """Both outputs, and what a reader should know of the end."""
        said = (self.stdout + self.stderr).decode(errors="replace")
        notes = ["some output is left out"] if self.is_truncated else []
        notes += [f"ended by its limit of {self.ended_by}"] if self.ended_by else []
        notes += [f"exit status {self.exit_code}"] if self.exit_code and not self.ended_by else []
        return said + "".join(f"\n[{note}]" for note in notes)


class Sandbox(Protocol):
    """Files and processes of one episode, until it is closed."""

    isolation: str
    """What keeps its commands apart, in words."""
    work: str
    """The folder that commands begin in."""

    async def run(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        wall_s: float | None = None,
        output_bytes: int | None = None,
    ) -> CommandResult:
        """Runs one command. Processes that it leaves live on until the sandbox is closed, or a limit exceeded.

        Raises:
            SandboxError: the sandbox has failed.
        """
        ...

    async def save(self, most_bytes: int) -> bytes | None:
        """Returns its files, packed; the same bytes for the same files. None if they are more than `most_bytes`."""
        ...

    async def restore(self, state: bytes) -> None:
        """Adds the files that `save` has packed.

        Raises:
            SandboxError: they cannot be unpacked.
        """
        ...


class Sandboxes:
    """Sandboxes on this machine, without containers. At most `concurrency` commands run at once; others wait.

    Raises:
        ValueError: `needs_namespaces`, and the kernel does not let this process have them.
    """

    def __init__(
        self, limits: Limits | None = None, *, concurrency: int | None = None, needs_namespaces: bool = False
    ) -> None:
        self.limits = limits or Limits()
        self.why_not = _why_no_namespaces()
        if needs_namespaces and self.why_not:
            raise ValueError(f"a sandbox of namespaces is not to be had here ({self.why_not})")
        self.room = asyncio.Semaphore(concurrency or os.cpu_count() or 1)

    @contextlib.asynccontextmanager
    async def open(self, limits: Limits | None = None) -> AsyncIterator["LocalSandbox"]:
        """Opens a sandbox. limits: its own; None for those of all.

        Raises:
            SandboxError: it cannot be started.
        """
        sandbox = await LocalSandbox.started(limits or self.limits, LIMITS if self.why_not else NAMESPACES, self.room)
        try:
            yield sandbox
        finally:
            await sandbox.close()


class LocalSandbox:
    """A `Sandbox` of processes of this machine; see `jail`."""

    def __init__(self, process: asyncio.subprocess.Process, limits: Limits, isolation: str, room: asyncio.Semaphore):
        self._process = process
        self._limits, self.isolation, self._room = limits, isolation, room
        self._turn = asyncio.Lock()
        self.work = ""
        self._is_lost = False

    @classmethod
    async def started(cls, limits: Limits, isolation: str, room: asyncio.Semaphore) -> "LocalSandbox":
        """Raises SandboxError: it cannot be started."""
        async with room:
            settings = _settings(limits, isolation)
            pipe = asyncio.subprocess.PIPE
            try:
                process = await asyncio.create_subprocess_exec(
                    *settings, stdin=pipe, stdout=pipe, stderr=pipe, env={}, cwd="/", start_new_session=True
                )
            except OSError as error:
                raise SandboxError(f"cannot be started: {error}") from error
            sandbox = cls(process, limits, isolation, room)
            try:
                sandbox.work = (await sandbox._asked(b"", START_S))[0]["work"]
            except BaseException:
                await sandbox.close()
                raise
            return sandbox

    async def run(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        wall_s: float | None = None,
        output_bytes: int | None = None,
    ) -> CommandResult:
        """See `Sandbox.run`."""
        wall_s = self._limits.wall_s if wall_s is None else wall_s
        request = _request(
            argv,
            stdin,
            cwd=self.work if cwd is None else cwd,
            env={"PATH": PATH, "HOME": self.work, "LANG": "C.UTF-8", **(env or {})},
            wall_s=wall_s,
            output_bytes=self._limits.output_bytes if output_bytes is None else output_bytes,
        )
        async with self._turn, self._room:
            reply, data = await self._asked(request, wall_s + GRACE_S)
        if reply["failure"]:
            raise SandboxError(f"a command cannot be run: {reply['failure']}")
        num_stdout = reply["num_stdout"]
        ended = reply["exit_code"], data[:num_stdout], data[num_stdout:]
        return CommandResult(*ended, reply["ended_by"], reply["is_truncated"], reply["wall_s"])

    async def save(self, most_bytes: int) -> bytes | None:
        """See `Sandbox.save`."""
        result = await self.run([*PYTHON, _PACK, self._root], output_bytes=most_bytes, cwd="/", wall_s=GRACE_S)
        return None if result.is_truncated else _checked("saved", result).stdout

    async def restore(self, state: bytes) -> None:
        """See `Sandbox.restore`."""
        argv = [*PYTHON, _UNPACK, self._root]
        _checked("restored", await self.run(argv, stdin=state, cwd="/", wall_s=GRACE_S))

    async def close(self) -> None:
        """Ends everything in it, and waits until it has ended."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            async with asyncio.timeout(GRACE_S):
                await self._process.communicate()
        except TimeoutError:
            self._process.kill()
            log.error("a sandbox has not ended within %g s after its close; process %d", GRACE_S, self._process.pid)

    @property
    def _root(self) -> str:
        return self.work if self.isolation == LIMITS else "/"

    async def _asked(self, frame: bytes, timeout_s: float) -> tuple[Json, bytes]:
        """Sends a request and returns the reply. After an error or a cancellation there is no other."""
        process = self._process
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        if self._is_lost:
            raise SandboxError("it has failed before, or a command in it was cancelled")
        self._is_lost = True
        try:
            async with asyncio.timeout(timeout_s):
                process.stdin.write(frame)
                await process.stdin.drain()
                num_header, num_data = jail.FRAME.unpack(await process.stdout.readexactly(jail.FRAME.size))
                header = json.loads(await process.stdout.readexactly(num_header))
                data = await process.stdout.readexactly(num_data)
        except TimeoutError:
            raise SandboxError(f"no reply within {timeout_s:g} s") from None
        except (OSError, EOFError):
            process.stdin.close()
            said = (await process.stderr.read()).decode(errors="replace").strip().rpartition("\n")[2]
            raise SandboxError(f"it has ended by itself: {said or 'killed'}") from None
        self._is_lost = False
        return header, data


def packed(files: Mapping[str, bytes]) -> bytes:
    """Returns files by path as `Sandbox.restore` takes them; a path is relative to the root that `save` packs."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=1) as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(name.lstrip("/"))
            member.size, member.mode = len(data), 0o755
            archive.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


def _checked(what: str, result: CommandResult) -> CommandResult:
    if result.exit_code:
        raise SandboxError(f"its files cannot be {what}: {result.text.strip()[-300:]}")
    return result


def _request(argv: Sequence[str], stdin: bytes = b"", **how: Any) -> bytes:
    header = json.dumps({"argv": list(argv), **how}).encode()
    return jail.FRAME.pack(len(header), len(stdin)) + header + stdin


def _settings(limits: Limits, isolation: str) -> list[str]:
    """Returns the command line of a jail."""
    shown = [*jail.SHOWN, sys.prefix, sys.base_prefix]
    settings = {"limits": msgspec.to_builtins(limits), "isolation": isolation, "shown": shown}
    return [sys.executable, "-I", "-S", str(_JAIL), json.dumps(settings)]


@functools.cache
def _why_no_namespaces() -> str:
    """Returns why sandboxes cannot have namespaces here; empty if they can. Says once which isolation is in force."""
    with ThreadPoolExecutor(1) as thread:  # there may be a running loop in this one
        why = thread.submit(asyncio.run, _failure()).result()
    if why:
        log.warning("sandboxes run without namespaces (%s): commands see this machine's files", why)
    else:
        log.info("sandboxes run in namespaces: no network, no files and processes but their own")
    return why


async def _failure() -> str:
    """Returns why a sandbox with namespaces cannot run a command here; empty if it can."""
    try:
        sandbox = await LocalSandbox.started(Limits(), NAMESPACES, asyncio.Semaphore())
        try:
            result = await sandbox.run([*PYTHON, ""], wall_s=START_S)
        finally:
            await sandbox.close()
    except SandboxError as error:
        return str(error)
    return result.text if result.exit_code else ""
