"""Sandboxes that are containers, by the command line of docker or podman, whichever answers."""

import asyncio
import contextlib
import errno
import functools
import gzip
import hashlib
import secrets
import shutil
import subprocess
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.producers.environments.sandbox import GRACE_S, CommandResult, Limits, SandboxError

RUNTIMES = ("docker", "podman")
ANSWER_S = 20.0
_PIPE = asyncio.subprocess.PIPE


@functools.cache
def runtime() -> str | None:
    """Returns the command of a container runtime that answers; None without one."""
    for name in RUNTIMES:
        if shutil.which(name):
            with contextlib.suppress(subprocess.TimeoutExpired):
                if subprocess.run([name, "info"], capture_output=True, timeout=ANSWER_S).returncode == 0:
                    return name
    return None


def image_name(folder: Path) -> str:
    """Returns the name of the image that is made from a folder: another one for other files."""
    digest = hashlib.blake2b(digest_size=12)
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        digest.update(f"{path.relative_to(folder)}\0{path.stat().st_mode:o}\0".encode() + path.read_bytes() + b"\0")
    return f"localhost/penstock:{digest.hexdigest()}"


async def build(command: str, folder: Path, image: str, timeout_s: float) -> None:
    """Makes an image of this name from a folder with a Dockerfile, unless there is one.

    Raises:
        SandboxError: it cannot be made.
    """
    if (await _done([command, "image", "inspect", image], ANSWER_S)).exit_code:
        made = await _done([command, "build", "-t", image, str(folder)], timeout_s)
        if made.exit_code:
            raise SandboxError(f"{folder}: its image cannot be built: {made.text.strip()[-300:]}")


class Container:
    """A `Sandbox` in a container. It ends when its standard input does: when it is closed or the producer dies."""

    def __init__(self, command: str, name: str, work: str, limits: Limits) -> None:
        self.isolation = f"a container of {command}"
        self.work = work
        self._command, self._name, self._limits = command, name, limits

    @classmethod
    @contextlib.asynccontextmanager
    async def open(
        cls,
        command: str,
        image: str,
        limits: Limits,
        *,
        work: str = "",
        cpus: float | None = None,
        network: bool = False,
    ) -> AsyncIterator["Container"]:
        """Raises SandboxError: it cannot be started."""
        name = f"penstock-{secrets.token_hex(8)}"
        options = ["--rm", "-i", "--name", name, "--memory", str(limits.memory_bytes)]
        options += ["--pids-limit", str(limits.processes), "--security-opt", "no-new-privileges"]
        options += ["--network", "none"] if not network else []
        options += ["--cpus", str(cpus)] if cpus else []
        options += ["--workdir", work] if work else []
        # Its first process reads what the producer never writes.
        argv = [command, "run", *options, "--entrypoint", "cat", image]
        process = await asyncio.create_subprocess_exec(*argv, stdin=_PIPE, stdout=_PIPE, stderr=_PIPE)
        assert process.stdin is not None and process.stderr is not None
        container = cls(command, name, work, limits)
        try:
            began = time.monotonic()
            while (await _done([command, "exec", name, "true"], ANSWER_S)).exit_code:
                if process.returncode is not None or time.monotonic() - began > GRACE_S:
                    said = (await process.stderr.read()).decode(errors="replace") if process.returncode else "no answer"
                    raise SandboxError(f"its container cannot be started: {said.strip()[-300:]}")
                await asyncio.sleep(0.1)
            if not work:
                container.work = (await container.run(["pwd"], cwd="")).stdout.decode().strip()
            yield container
        finally:
            process.stdin.close()
            removed = await asyncio.shield(_done([command, "rm", "-f", name], GRACE_S))
            if removed.exit_code and "no such container" not in removed.text.lower():
                raise SandboxError(f"container {name} cannot be removed: {removed.text.strip()[-300:]}")
            await process.communicate()

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
        """See `Sandbox.run`. At the end of its wall time all processes of the container are killed but its first."""
        where = self.work if cwd is None else cwd
        options = [part for name, value in (env or {}).items() for part in ("-e", f"{name}={value}")]
        options += ["-w", where] if where else []
        wall_s = self._limits.wall_s if wall_s is None else wall_s
        most = self._limits.output_bytes if output_bytes is None else output_bytes
        try:
            result = await _done([self._command, "exec", "-i", *options, self._name, *argv], wall_s, stdin, most)
        except (ValueError, OSError) as error:  # a NUL byte, half of a surrogate pair; too many characters
            if isinstance(error, OSError) and error.errno != errno.E2BIG:
                raise
            said = f"{argv[0][:80]}: {error}\n".encode(errors="replace")
            return CommandResult(127, b"", said, "", False, 0.0)  # as the local sandbox says it
        if result.ended_by:
            await _done([self._command, "exec", self._name, "sh", "-c", "kill -9 -1"], ANSWER_S)
        alive = [self._command, "exec", self._name, "true"]
        if result.exit_code in (125, 126, 127) and (await _done(alive, ANSWER_S)).exit_code:
            raise SandboxError(f"its container has ended: {result.text.strip()[-300:]}")
        return result

    async def save(self, most_bytes: int) -> bytes | None:
        """Returns None: what has been changed in an image is not kept."""
        return None

    async def restore(self, state: bytes) -> None:
        """See `Sandbox.restore`."""
        plain = gzip.decompress(state)
        copied = await _done([self._command, "cp", "-", f"{self._name}:/"], GRACE_S, plain)
        if copied.exit_code:
            raise SandboxError(f"files cannot be copied into its container: {copied.text.strip()[-300:]}")


async def _done(argv: Sequence[str], wall_s: float, stdin: bytes = b"", output_bytes: int = 65536) -> CommandResult:
    """Runs a program of this machine."""
    began = time.monotonic()
    process = await asyncio.create_subprocess_exec(
        *argv, stdin=_PIPE, stdout=_PIPE, stderr=_PIPE, start_new_session=True
    )
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    ended_by = ""
    outputs = [_Kept(output_bytes), _Kept(output_bytes)]
    readers = [kept.read(stream) for kept, stream in zip(outputs, (process.stdout, process.stderr), strict=True)]
    try:
        async with asyncio.timeout(wall_s):
            await asyncio.gather(_written(process, stdin), *readers, process.wait())
    except TimeoutError:
        ended_by = "wall time"
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    out, err = outputs
    code, lost = process.returncode or 0, out.is_truncated or err.is_truncated
    return CommandResult(code, bytes(out.data), bytes(err.data), ended_by, lost, time.monotonic() - began)


async def _written(process: Any, data: bytes) -> None:
    with contextlib.suppress(ConnectionError):
        process.stdin.write(data)
        await process.stdin.drain()
    process.stdin.close()


class _Kept:
    """The beginning of an output; the rest is read and dropped."""

    def __init__(self, most: int) -> None:
        self.data, self.is_truncated, self._most = bytearray(), False, most

    async def read(self, stream: asyncio.StreamReader) -> None:
        while part := await stream.read(65536):
            room = self._most - len(self.data)
            self.data += part[:room]
            self.is_truncated |= len(part) > room
