"""One run on one machine: Redis, the trainer and the producers as child processes.

Order of starting: Redis, the producers one after another, then the trainer. Order of stopping: the trainer (it writes a
checkpoint), the producers (they hand back what is in flight), Redis last. A finished trainer sets the run's `finished`
flag, on which producers leave by themselves.
"""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import FrameType, TracebackType

import redis
from penstock.deploy.launch.child import Child, describe_status
from penstock.deploy.launch.live_view import View
from penstock.deploy.launch.producer_pool import Heartbeats, PartDied, ProducerPool
from penstock.deploy.launch.redis_server import RedisServer, connect
from penstock.deploy.launch.run_folder import RUN_FILE
from penstock.schemas.config import RunConfig
from penstock.schemas.keys import Commit, Keys
from penstock.schemas.process.logs import FORM
from penstock.schemas.process.redis_url import configured_url

_TICK_S = 0.1
_TRAINER_GRACE_S = 120.0
"""A checkpoint of a large model takes its time."""
_PRODUCER_GRACE_S = 30.0
_GRACE_WITHOUT_REDIS_S = 5.0

CommandFor = Callable[[str, RunConfig, Path, bool], Sequence[str]]


class Interrupted(Exception):
    """A signal asks for the end of the run. `number` is the signal."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class Signals(AbstractContextManager["Signals"]):
    """Counts Ctrl-C and SIGTERM while it is open, in place of acting on them between two statements."""

    def __init__(self) -> None:
        self.count = 0
        self.number = signal.SIGINT

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        self.number = signal.Signals(number)

    def __enter__(self) -> "Signals":
        self._before = {number: signal.signal(number, self._handle) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


def part_command(part: str, config: RunConfig, runs: Path, resume: bool) -> list[str]:
    """The command line of `trainer` or `producer-<n>`; both read the resolved run file in the run's folder."""
    role = "trainer" if part == "trainer" else "producer"
    command = [
        sys.executable,
        "-m",
        "penstock.deploy.cli",
        role,
        str(config.folder(runs) / RUN_FILE),
        "--runs",
        str(runs),
    ]
    if role == "producer":
        command += ["--id", part]
    elif resume:
        command.append("--resume")
    return command


class Launcher:
    """Runs one run to its end.

    view: an open view. lock: file descriptor of the run folder's lock, which the run's own Redis keeps.
    command_for: the command line of a part.
    """

    def __init__(
        self,
        config: RunConfig,
        runs: Path,
        *,
        resume: bool,
        view: View,
        lock: int | None = None,
        command_for: Callable[[str, RunConfig, Path, bool], Sequence[str]] = part_command,
    ) -> None:
        self._config = config
        self._runs = runs
        self._resume = resume
        self._view = view
        self._lock = lock
        self._command_for = command_for
        self._keys = Keys(config.name)
        self._server: RedisServer | None = None
        self._trainer: Child | None = None
        self._pool = ProducerPool(config.producers.count, self._start_part, view)

    def run(self) -> int:
        """Returns 0 for a finished run, 128 + the signal for one that a signal has stopped. Nothing of it runs on.

        Raises:
            PartDied: a part ended that the run cannot do without.
            ConfigError, ServerError: no Redis to be had.
        """
        with Signals() as self._signals:
            status = 0
            try:
                self._start_redis()
                self._boot_producers()
                self._trainer = self._start_part("trainer")
                self._view.state("trainer", "running")
                self._serve()
            except Interrupted as interrupt:
                self._view.note(f"{interrupt}: stopping in order; once more stops at once")
                status = 128 + interrupt.number
                self._stop()
            except PartDied as death:
                self._view.note(f"{death.part} died, stopping the others")
                self._stop()
                raise
            else:
                self._stop()
            finally:
                self._kill()
            return status

    def _start_redis(self) -> None:
        url = configured_url(self._config)
        if url is None:
            folder = self._config.folder(self._runs)
            self._server = RedisServer(folder, maxmemory_mb=self._config.redis.maxmemory_mb, lock=self._lock)
            self._view.state("redis", "running")
            url = self._server.url
        self._url = url
        self._client = connect(url)
        self._heartbeats = Heartbeats(self._client, self._keys)
        if self._resume:
            # Or producers would leave at once a run that had ended and is now to go on.
            self._client.hdel(self._keys.commit, Commit.FINISHED)

    def _start_part(self, part: str) -> Child:
        config = self._config
        is_trainer = part == "trainer"
        num_threads = str(config.trainer.num_threads if is_trainer else config.producers.num_threads)
        return Child(
            part,
            self._command_for(part, config, self._runs, self._resume),
            log=config.folder(self._runs) / "logs" / f"{part}.log",
            environment={
                "REDIS_URL": self._url,
                "PYTHONUNBUFFERED": "1",
                # Who has started everything on one machine reads its logs in an editor.
                FORM: os.environ.get(FORM) or "text",
                "OMP_NUM_THREADS": num_threads,
                "MKL_NUM_THREADS": num_threads,
            },
        )

    def _boot_producers(self) -> None:
        """Waits until every producer has booted, so that no boot takes cores from a run under way. A death or a signal
        ends it early, by exception."""
        while not self._pool.is_complete:
            self._look_after_others()

    def _look_after_others(self) -> None:
        if self._signals.count:
            raise Interrupted(self._signals.number)
        self._check_server()
        self._pool.tick(self._heartbeats.read(), finished=self._finished)
        self._pause()

    def _serve(self) -> None:
        """Waits for the trainer to finish; a death or a signal ends it early, by exception."""
        assert self._trainer is not None
        while True:
            status = self._trainer.poll()
            if status is not None:
                if status != 0 or not self._finished():
                    self._view.state("trainer", describe_status(status))
                    raise PartDied(self._trainer, f"{describe_status(status)} before the run was finished")
                self._view.catch_up()
                self._view.state("trainer", "finished")
                return
            self._look_after_others()

    def _check_server(self) -> None:
        if self._server is not None and self._server.child.poll() is not None:
            raise PartDied(self._server.child, describe_status(self._server.child.poll() or 0))

    def _finished(self) -> bool:
        try:
            return self._client.hget(self._keys.commit, Commit.FINISHED) == b"1"
        except redis.RedisError:
            return False

    def _pause(self) -> None:
        self._view.refresh(self._heartbeats.latest)
        time.sleep(_TICK_S)

    def _stop(self) -> None:
        """Ends every part in order. One more signal kills what is left."""
        self._signals.count = 0
        with_redis = self._server is None or self._server.child.poll() is None
        if self._trainer is not None and self._trainer.poll() is None:
            self._view.state("trainer", "stopping")
            self._trainer.send(signal.SIGTERM)
            self._wait([self._trainer], _TRAINER_GRACE_S if with_redis else _GRACE_WITHOUT_REDIS_S)
        grace_s = _PRODUCER_GRACE_S if with_redis else _GRACE_WITHOUT_REDIS_S
        self._pool.kill_booting()
        if self._finished():
            self._wait(self._pool.children, grace_s)
        self._pool.terminate()
        self._wait(self._pool.children, grace_s)
        if self._server is not None:
            self._server.stop()
            self._view.state("redis", "stopped")
        self._client.close()

    def _wait(self, children: Iterable[Child], grace_s: float) -> None:
        """Until all have ended; kills who is left when `grace_s` is over or a second signal asks for haste."""
        waiting = [child for child in children if child.returncode is None]
        deadline = time.monotonic() + grace_s
        killing = False
        while waiting:
            for child in [child for child in waiting if child.poll() is not None]:
                waiting.remove(child)
                self._view.state(child.name, "stopped" if child.returncode == 0 else describe_status(child.poll() or 0))
            if not killing and (time.monotonic() > deadline or self._signals.count):
                killing = True
                for child in waiting:
                    child.kill()
            self._pause()

    def _kill(self) -> None:
        """Leaves nothing running, whatever happened before. Without effect on what has ended."""
        for child in [*([self._trainer] if self._trainer else []), *self._pool.children]:
            child.kill()
            while child.poll() is None:
                time.sleep(0.003)
        if self._server is not None:
            self._server.kill()
