"""An event loop whose clock counts the time in which it ran, and which names what blocks it."""

import asyncio
import logging
import sys
import threading
import time
import traceback

from penstock.schemas.process.plugins import user_place

log = logging.getLogger(__name__)

TICK_S = 1.0
"""How often a watched loop looks at the clock, at the least."""
BLOCKED_S = 5.0
"""A loop that does not run for so long is logged."""


def running_s() -> float:
    """Returns the time of the running event loop in seconds: of a `RunningLoop`, without standstills. Outside of a
    loop, monotonic seconds."""
    try:
        return asyncio.get_running_loop().time()
    except RuntimeError:
        return time.monotonic()


class RunningLoop(asyncio.SelectorEventLoop):
    """An event loop whose timers and deadlines leave out the time in which it stood still: the process was stopped, the
    machine slept, or a coroutine blocked it.

    Once it is watched, no pause of more than `TICK_S` passes unless it stands still; of such a pause, the clock counts
    `TICK_S`. A thread logs the line of code that blocks it for `BLOCKED_S`.
    """

    def __init__(self) -> None:
        self._stood_still_s = 0.0
        self._last_looked: float | None = None
        """Monotonic seconds; None until it is watched."""
        self._blocked_in = ""
        self._closing = threading.Event()
        super().__init__()

    def time(self) -> float:
        now = super().time()
        if self._last_looked is not None:
            late_s = now - self._last_looked - TICK_S
            if late_s > TICK_S:
                self._stood_still_s += late_s
            if late_s > BLOCKED_S:
                why = self._blocked_in or "it was stopped, or the machine slept"
                log.warning("this process stood still for %.0f s (%s); deadlines do not count it", late_s, why)
            self._last_looked = now
        return now - self._stood_still_s

    def watch(self) -> None:
        """Begins to leave out the time in which the loop stands still. Call it on the loop, once it only waits."""
        self._last_looked = super().time()
        self._tick()
        thread = threading.Thread(target=self._name_what_blocks, args=(threading.get_ident(),), name="loop-watch")
        thread.daemon = True
        thread.start()

    def close(self) -> None:
        self._closing.set()
        super().close()

    def _tick(self) -> None:
        self.call_later(TICK_S, self._tick)

    def _name_what_blocks(self, loop_thread: int) -> None:
        """Waits `TICK_S` again and again until the loop closes, and logs once where each blockage is."""
        while True:
            began = time.monotonic()
            if self._closing.wait(TICK_S):
                return
            now, last_looked = time.monotonic(), self._last_looked or began
            if now - last_looked < BLOCKED_S:
                self._blocked_in = ""
            elif not self._blocked_in and now - began < 2 * TICK_S:  # else this thread was stopped with the loop's
                frames = traceback.walk_stack(sys._current_frames()[loop_thread])
                self._blocked_in = user_place(frames) or "in code that is not the user's"
                log.warning(
                    "the event loop has not run for %.0f s, blocked %s: no claim is refreshed and no group goes on; "
                    "expected a coroutine that awaits, or a plain function, which gets a thread",
                    now - last_looked,
                    self._blocked_in,
                )
