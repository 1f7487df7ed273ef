"""SIGTERM and SIGINT from a trainer's first moment on, before anything heavy is imported."""

import signal
from collections.abc import Callable
from types import FrameType


class StoppedError(BaseException):
    """Told to stop before training began. Like KeyboardInterrupt no Exception: whoever catches what fails while a model
    is loaded must not take it for such a failure."""

    def __init__(self) -> None:
        super().__init__("stopped before training began; the run is as it was")


class StopSignals:
    """Takes the signals over for the rest of the process, in three stages.

    First a signal raises StoppedError wherever the program is: nothing is there yet that would have to be saved, and
    what a trainer has begun may be left at any point (it might as well be killed). After `hand_to` it calls what it was
    handed to. After `ignore` the process is about to end, and with the status it has.
    """

    def __init__(self) -> None:
        self._requested = False
        self._stop: Callable[[], None] | None = None
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._handle)

    def hand_to(self, stop: Callable[[], None]) -> None:
        """From now on a signal calls `stop`.

        Raises:
            StoppedError: one came before, and somebody has swallowed the exception.
        """
        self._stop = stop
        if self._requested:
            raise StoppedError

    def ignore(self) -> None:
        self._stop = lambda: None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        first, self._requested = not self._requested, True
        if self._stop is not None:
            self._stop()
        elif first:  # a second one leaves what the first has begun to end
            raise StoppedError
