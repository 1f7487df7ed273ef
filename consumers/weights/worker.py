"""A thread that is there already: handing work to it takes microseconds, starting one takes as long as it pleases."""

import threading
from collections.abc import Callable
from queue import SimpleQueue


class Worker:
    """Does what it is given, one after the other, until the process ends."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._given: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def give(self, work: Callable[[], None]) -> None:
        """work: raises nothing. The first begins the thread."""
        self._given.put(work)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()

    def end(self) -> None:
        """The thread ends after what it was given before; does not wait for it."""
        self._given.put(None)

    def _run(self) -> None:
        while (work := self._given.get()) is not None:
            work()
