"""A scorer in a process of its own, for answers that may take it for ever or that it evaluates as a program."""

import logging
import multiprocessing
import signal
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from penstock.producers.environments import jail

logger = logging.getLogger(__name__)

_STARTUP_TIMEOUT_S = 120.0
"""For a scoring process to import its library on a busy machine."""


class ScoringProcess:
    """Values answers in a process that is killed when one takes too long; the next call starts another.

    A signal could not do that: it works in a main thread only, and cannot interrupt one long multiplication such as
    `9**9**9`, which also holds up every other thread of its process. Calls from several threads take turns. Once it is
    ready, the process can start no program, process or thread, and has no network; files it can reach as the producer
    can.

    owner: whose scorer it is, for messages. make: called in the process with `arguments`, returns the function that
    values an answer; all are pickled. An answer over which that function raises, ends its process or takes more than
    `timeout_s` is worth 0.
    """

    def __init__(self, owner: str, make: Callable[..., Callable[..., float]], *arguments: Any, timeout_s: float):
        self._owner, self._make, self._timeout_s = owner, (make, *arguments), timeout_s
        self._turn = threading.Lock()
        self._process: multiprocessing.process.BaseProcess | None = None
        self._pipe: Connection | None = None

    def value(self, *answer: Any) -> float:
        """Returns what the function returns for these arguments.

        Raises:
            RuntimeError: the process cannot be started.
        """
        with self._turn:
            if self._process is None or not self._process.is_alive():
                self._start()
            assert self._pipe is not None
            what, shown = f"took more than {self._timeout_s:g} s", repr(answer)[:200]
            try:
                self._pipe.send(answer)
                if self._pipe.poll(self._timeout_s):
                    return float(self._pipe.recv_bytes())  # no pickle: what an answer has made of the process may write
            except (EOFError, OSError, ValueError):
                what = "ended the scoring process"
            logger.warning("%s: scoring an answer %s, worth 0: %s", self._owner, what, shown)
            self.stop()
            return 0.0

    def _start(self) -> None:
        # Spawned, not forked: a fork would copy the producer's running threads and engine.
        context = multiprocessing.get_context("spawn")
        self._pipe, far_end = context.Pipe()
        arguments = (far_end, self._owner, *self._make)
        self._process = context.Process(target=_score_forever, args=arguments, name="scorer", daemon=True)
        self._process.start()
        far_end.close()
        try:
            if self._pipe.poll(_STARTUP_TIMEOUT_S) and self._pipe.recv_bytes():
                return
            why = f"did not start within {_STARTUP_TIMEOUT_S} s"
        except EOFError:
            why = "ended before it was ready"
        self.stop()
        raise RuntimeError(f"{self._owner}: the scoring process {why}")

    def stop(self) -> None:
        """Ends the process, if there is one."""
        if self._process is None or self._pipe is None:
            return
        self._process.kill()
        self._process.join()
        self._pipe.close()
        self._process = None


def _score_forever(pipe: Connection, owner: str, make: Callable[..., Callable[..., float]], *arguments: Any) -> None:
    """Receives answers and sends their values, until the other end closes."""
    # A terminal's signals reach the whole process group; the producer's shutdown ends this process.
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    score = make(*arguments)
    try:
        jail.call("prctl", jail.NO_NEW_PRIVILEGES, 1, 0, 0, 0)
        jail.refuse_calls(network=False, programs=False)
    except (OSError, KeyError) as error:  # a kernel without the filter, a machine without its numbers
        logger.warning("%s: an answer may start programs, where its scorer evaluates it: %s", owner, error)
    pipe.send_bytes(b"ready")
    while True:
        try:
            answer = pipe.recv()
        except EOFError:
            return
        try:
            value = float(score(*answer))
        except Exception:  # the scorers of some tasks raise for an answer that is no number, or no move
            value = 0.0
        pipe.send_bytes(repr(value).encode())
