"""A thread that waits for work: handing work to it takes microseconds, starting a thread may take long."""

import threading
from collections.abc import Callable
from queue import SimpleQueue


class Worker:
    """Runs functions one after the other in a daemon thread, which does not hold up the end of the process."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._given: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def give(self, work: Callable[[], None]) -> None:
        """Queues `work`, which must not raise. The first call starts the thread."""
        self._given.put(work)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()

    def end(self) -> None:
        """Ends the thread after the work queued so far, without waiting for it."""
        self._given.put(None)

    def _run(self) -> None:
        while (work := self._given.get()) is not None:
            work()
