"""Handlers of the signals that stop a trainer in order, installed before it imports heavy modules."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from penstock.schemas.process.stopping import stop_signals

AGAIN_S = 0.01


class StoppedError(BaseException):
    """A signal to stop came before training began. Like KeyboardInterrupt it is not an Exception, so that code that
    catches failures while a model is loaded does not catch it."""

    def __init__(self) -> None:
        super().__init__("stopped before training began; the run is as it was")


class StopSignals:
    """Handles the signals for the rest of the process, in three stages.

    At first a signal raises StoppedError wherever the program is: nothing has to be saved yet, and a trainer may be
    killed at any point. After `hand_to` a signal calls the given function. After `ignore` it does nothing: the process
    is about to end.

    Where Python can only print an exception and continue (finalizers and callbacks of weak references, which imports
    run), the signal is sent again a moment later.
    """

    def __init__(self) -> None:
        self._requested = False
        self._stop: Callable[[], None] | None = None
        self._print_unraisable = sys.unraisablehook
        sys.unraisablehook = self._unraisable
        for number in stop_signals():
            signal.signal(number, self._handle)

    def hand_to(self, stop: Callable[[], None]) -> None:
        """From now on a signal calls `stop`.

        Raises:
            StoppedError: a signal came before, and its exception was swallowed.
        """
        self._stop = stop
        if self._requested:
            raise StoppedError

    def ignore(self) -> None:
        self._stop = lambda: None

    def _unraisable(self, args: Any) -> None:
        if not isinstance(args.exc_value, StoppedError):
            self._print_unraisable(args)
        elif self._stop is None:
            is_over = threading.Event()
            threading.Thread(target=self._send_again, args=(is_over,), daemon=True).start()
            is_over.set()

    def _send_again(self, is_over: threading.Event) -> None:
        """Waits for the end of `_unraisable`, in which a second exception would be swallowed like the first."""
        is_over.wait()
        time.sleep(AGAIN_S)
        self._requested = False
        os.kill(os.getpid(), signal.SIGTERM)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        first, self._requested = not self._requested, True
        if self._stop is not None:
            self._stop()
        elif first:  # later ones change nothing
            raise StoppedError
