"""One run on one machine: Redis, the trainer and the producers as child processes.

Start: Redis, then producers and trainer, side by side where the cores allow, else one after another. Stop: the trainer,
which writes a checkpoint; the producers, which hand back what is in flight; Redis. A finished trainer sets the run's
`finished` flag, on which producers exit.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import FrameType

import redis

from penstock.deploy.launch.child import Child, describe_status
from penstock.deploy.launch.command_line import MODULES_PATH
from penstock.deploy.launch.live_view import View
from penstock.deploy.launch.placement import Placement
from penstock.deploy.launch.producer_pool import PartDied, ProducerPool, boots_at_once
from penstock.deploy.launch.redis_server import RedisServer, connect
from penstock.deploy.launch.run_folder import RUN_FILE
from penstock.deploy.launch.standstill import Standstill
from penstock.schemas.config import RunConfig
from penstock.schemas.keys import Commit, Keys
from penstock.schemas.process.logs import FORM
from penstock.schemas.process.redis_url import configured_url
from penstock.schemas.process.stopping import stop_signals

_TICK_S = 0.1
_TRAINER_STOP_S = 120.0
"""Time to write the checkpoint of a large model."""
_PRODUCER_STOP_S = 30.0
_STOP_WITHOUT_REDIS_S = 5.0


class Interrupted(Exception):
    """The signal `number` ends the run, or what `reason` names as it would."""

    def __init__(self, number: int, reason: str = "") -> None:
        super().__init__(reason or signal.Signals(number).name)
        self.number = number


class Signals:
    """Counts Ctrl-C, SIGTERM and SIGHUP while open, so that they take effect between steps only. Open in another thread
    than the main one, it handles no signals."""

    def __init__(self) -> None:
        self.count = 0
        self.number = signal.SIGINT
        self._terminals = [number for number in (1, 2) if os.isatty(number)]

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        self.number = signal.Signals(number)
        if number == signal.SIGHUP and self._terminals:  # closed: writing there would fail
            nowhere = os.open(os.devnull, os.O_WRONLY)
            for terminal in self._terminals:
                os.dup2(nowhere, terminal)
            os.close(nowhere)

    def __enter__(self) -> "Signals":
        handled = stop_signals() if threading.current_thread() is threading.main_thread() else ()
        self._before = {number: signal.signal(number, self._handle) for number in handled}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


def part_command(part: str, config: RunConfig, runs: Path, resume: bool) -> list[str]:
    """Returns the command line of `trainer` or `producer-<n>`, with the resolved run file in the run's folder."""
    role = "trainer" if part == "trainer" else "producer"
    run_file = str(config.folder(runs) / RUN_FILE)
    command = [sys.executable, "-m", "penstock.deploy.cli", role, run_file, "--runs", str(runs)]
    if role == "producer":
        command += ["--id", part]
    elif resume:
        command.append("--resume")
    return command


class Launcher:
    """Starts the parts of one run, each on its GPUs, and supervises them until the run ends.

    view: an open view. lock: file descriptor of the run folder's lock, which the run's own Redis keeps open.
    stop: once set, the run is stopped in order, as by SIGINT. on_tick: called ten times a second while the run goes on.
    command_for: returns the command line of a part.
    """

    def __init__(
        self,
        config: RunConfig,
        runs: Path,
        placement: Placement,
        *,
        resume: bool,
        view: View,
        lock: int,
        stop: threading.Event | None = None,
        on_tick: Callable[[], None] = lambda: None,
        command_for: Callable[[str, RunConfig, Path, bool], Sequence[str]] = part_command,
    ) -> None:
        self._config = config
        self._runs = runs
        self._placement = placement
        self._resume = resume
        self._view = view
        self._lock = lock
        self._stop_asked = stop or threading.Event()
        self._on_tick = on_tick
        self._command_for = command_for
        self._keys = Keys(config.name)
        self._server: RedisServer | None = None
        self._trainer: Child | None = None
        # An engine measures the free memory of its GPU while it boots.
        at_once = 1 if placement.is_shared else boots_at_once(config.producers)
        self._pool = ProducerPool(config.producers.count, at_once, self._start_part, view)

    def run(self) -> int:
        """Returns 0 for a finished run, 128 + the signal for one that a signal stopped. All parts have ended then.

        Raises:
            PartDied: a part ended without which the run cannot go on.
            ConfigError, ServerError: no Redis can be started or reached.
        """
        with Signals() as self._signals:
            status = 0
            try:
                self._start_redis()
                while not self._pool.is_settled:
                    self._watch_others()
                self._trainer = self._start_part("trainer")
                self._view.state("trainer", "running")
                self._serve()
                self._stop()
            except Interrupted as interrupt:
                self._view.note(f"{interrupt}: stopping in order; a second signal kills")
                status = 128 + interrupt.number
                self._stop()
            except PartDied as death:
                self._view.note(f"{death.part} died, stopping the others")
                self._stop()
                raise
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
        self._standstill = Standstill(self._config, self._runs, self._client, self._view.progress)
        if self._resume:
            # A resumed run may have ended; its producers would exit at once.
            self._client.hdel(self._keys.commit, Commit.FINISHED)

    def _start_part(self, part: str) -> Child:
        config = self._config
        is_trainer = part == "trainer"
        num_threads = str(config.trainer.num_threads if is_trainer else config.producers.num_threads)
        return Child(
            part,
            [*self._command_for(part, config, self._runs, self._resume), *self._placement.options(part)],
            log=config.folder(self._runs) / "logs" / f"{part}.log",
            environment={
                "REDIS_URL": self._url,
                "PYTHONUNBUFFERED": "1",
                # Logs of one machine are read in an editor.
                FORM: os.environ.get(FORM) or "text",
                MODULES_PATH: os.pathsep.join(sys.path),
                "OMP_NUM_THREADS": num_threads,
                "MKL_NUM_THREADS": num_threads,
                **self._placement.environment(part),
            },
        )

    def _watch_others(self) -> None:
        """Runs one tick. Raises PartDied or Interrupted."""
        self._on_tick()
        if self._signals.count:
            raise Interrupted(self._signals.number)
        if self._stop_asked.is_set():
            raise Interrupted(signal.SIGINT, "the caller asks for an end")
        server = self._server.child if self._server is not None else None
        if server is not None and (status := server.poll()) is not None:
            raise PartDied(server, describe_status(status))
        heartbeats = self._standstill.look(self._children(), self._pool.num_booting)
        self._view.blocked(self._standstill.reason)
        self._pool.tick(heartbeats, finished=self._finished)
        self._pause()

    def _children(self) -> list[Child]:
        own = self._server.child if self._server is not None else None
        return [child for child in (own, self._trainer, *self._pool.children) if child is not None]

    def _serve(self) -> None:
        """Waits until the trainer has finished. Raises PartDied or Interrupted."""
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
            self._watch_others()

    def _finished(self) -> bool:
        try:
            return self._client.hget(self._keys.commit, Commit.FINISHED) == b"1"
        except redis.RedisError:
            return False

    def _pause(self) -> None:
        self._view.refresh(self._standstill.heartbeats)
        time.sleep(_TICK_S)

    def _stop(self) -> None:
        """Ends every part in order. Another signal kills the parts that are left."""
        self._signals.count = 0
        trainer_s, timeout_s = _TRAINER_STOP_S, _PRODUCER_STOP_S
        if self._server is not None and self._server.child.poll() is not None:
            trainer_s = timeout_s = _STOP_WITHOUT_REDIS_S
        if self._trainer is not None and self._trainer.poll() is None:
            self._view.state("trainer", "stopping")
            self._trainer.send(signal.SIGTERM)
            self._wait([self._trainer], trainer_s)
        self._pool.kill_booting()
        if self._finished():
            self._wait(self._pool.children, timeout_s)
        self._pool.terminate()
        self._wait(self._pool.children, timeout_s)
        if self._server is not None:
            self._server.stop()
            self._view.state("redis", "stopped")
        self._client.close()

    def _wait(self, children: Iterable[Child], timeout_s: float) -> None:
        """Waits until all have ended; kills those left after `timeout_s` or at another signal."""
        waiting = [child for child in children if child.returncode is None]
        deadline = time.monotonic() + timeout_s
        while waiting:
            for child in waiting:
                if (status := child.poll()) is not None:
                    ended = "; ".join(filter(None, (describe_status(status), child.last_error())))
                    self._view.state(child.name, "stopped" if status == 0 else ended)
                elif time.monotonic() > deadline or self._signals.count:
                    child.kill()
            waiting = [child for child in waiting if child.returncode is None]
            self._pause()

    def _kill(self) -> None:
        """Kills every part that still runs."""
        for child in (self._trainer, *self._pool.children):
            if child is not None:
                child.end()
        if self._server is not None:
            self._server.kill()
