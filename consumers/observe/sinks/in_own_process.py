"""A sink in a process of its own.

Some packages change how the process around them ends: hooks around `sys.exit`, and waits without a limit for a server
that is unreachable. A trainer must not wait for either.
"""

import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from penstock.consumers.observe.sinks.points import Sink, SinkPoint
from penstock.schemas.process import logs

FINISH_S = 30.0
"""How long a sink may take to upload the last points, whether the trainer lives or not."""


class SinkError(RuntimeError):
    """A failure in a sink's process."""


class InOwnProcess:
    """A sink that `open_sink` opens in another process; it is called there, and pickled on the way.

    Raises:
        SinkError: from any method, what the sink raised.
    """

    def __init__(self, name: str, open_sink: Callable[[], Sink]) -> None:
        logs.hand_down()
        context = multiprocessing.get_context("spawn")
        self._connection, far_end = context.Pipe()
        # A daemon ends with this process at the latest.
        self._process = context.Process(target=_serve, args=(far_end, name, open_sink, FINISH_S), daemon=True)
        self._process.start()
        far_end.close()
        self._answer()

    def write(self, point: SinkPoint) -> None:
        self._connection.send(point)
        self._answer()

    def close(self) -> None:
        self._connection.send(None)
        if not self._connection.poll(FINISH_S):
            self._process.terminate()
            raise SinkError(f"it has not taken the last points within {FINISH_S:.0f} s")
        self._answer()

    def _answer(self) -> None:
        """Waits for the answer to the last message; the answer, or the end of the process, unblocks it."""
        try:
            problem = self._connection.recv()
        except EOFError:
            raise SinkError("its process has ended") from None
        if problem is not None:
            raise SinkError(problem)


def _serve(connection: Connection, name: str, open_sink: Callable[[], Sink], finish_s: float) -> None:
    """Opens the sink, writes points until it receives None or the trainer ends, then closes the sink. Answers each
    message with None or an error. Ends `finish_s` after the trainer at the latest.

    Waits for a message; one, or the trainer's end, unblocks it.
    """
    threading.Thread(target=_end_after_parent, args=(finish_s,), name="parent", daemon=True).start()
    for number in (signal.SIGINT, signal.SIGHUP):  # a terminal's are for the trainer, which then closes this sink
        signal.signal(number, signal.SIG_IGN)
    logs.inherit(name)
    logging.getLogger(name).setLevel(logging.WARNING)  # W&B's would log the whole configuration
    try:
        sink = open_sink()
    except Exception as error:
        connection.send(f"{type(error).__name__}: {error}")
        return
    connection.send(None)
    while (point := _next(connection)) is not None:
        connection.send(_problem(sink.write, point))
    problem = _problem(sink.close)
    if not connection.closed:
        connection.send(problem)


def _end_after_parent(finish_s: float) -> None:
    """Ends this process `finish_s` after the trainer: packages wait for an unreachable server without a limit."""
    trainer = multiprocessing.parent_process()
    assert trainer is not None
    trainer.join()
    time.sleep(finish_s)
    os._exit(1)


def _next(connection: Connection) -> SinkPoint | None:
    try:
        point: SinkPoint | None = connection.recv()
        return point
    except EOFError:  # the trainer was killed; the sink has what was sent before
        connection.close()
        return None


def _problem(call: Any, *arguments: Any) -> str | None:
    try:
        call(*arguments)
        return None
    except Exception as error:
        return f"{type(error).__name__}: {error}"
