"""The watch of the ranks over each other: one that is lost ends all of them, with a message that says which and why."""

import atexit
import json
import logging
import os
import sys
import threading
import time
from datetime import timedelta
from typing import Any, NoReturn

import torch.distributed as dist

from penstock.consumers.learning.ranks import Ranks

log = logging.getLogger(__name__)

BEAT_S = 1.0
LOST_AFTER_BEATS = 5
"""Beats that are missing before a rank counts as gone, once another one has lost its connection to it."""
TRAINER_ENDS = "the trainer ends, and --resume continues it from its last checkpoint"
GRACE_S = 2.0
"""The time that the main thread has to end by itself after a verdict."""
_ENDED, _FAILED, _LOST, _BEAT, _SAID = (f"watch/{name}" for name in ("ended", "failed", "lost", "beat", "said"))


def leave_process(status: int) -> NoReturn:
    """Ends this process and leaves its process groups as they are: their destructors may abort while others end."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


class Watch:
    """A thread of every rank that tells the others of its life through the store, and ends its process with theirs.

    A rank is lost if it says so itself; if it has not been heard of for `timeout_s`; or, once this rank's communication
    has failed, if it is not heard of for some beats, or has not met the same failure. Silence is counted in this rank's
    own beats: one that was frozen itself has missed nothing.

    ending: what the loss of a rank leads to, for the message about it.
    """

    def __init__(self, ranks: Ranks, store: Any, timeout_s: float, ending: str = TRAINER_ENDS) -> None:
        self._ranks = ranks
        self._store: dist.Store = store.clone()  # a wait of the main thread would hold this one up
        self._store.set_timeout(timedelta(seconds=max(10 * BEAT_S, timeout_s)))
        self._timeout_s, self._ending = timeout_s, ending
        self._beat_s = min(BEAT_S, timeout_s / 10)
        self._num_beats = 0
        self._heard: dict[int, tuple[bytes, int]] = {}
        """By rank its newest beat, and the number of this rank's own at which it was first seen."""
        self._verdict = ""
        self._is_reached = threading.Event()
        self._is_taken = False
        self._lost_at: int | None = None
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()

    def ended(self, status: int) -> None:
        """Called by the lead once it has ended in order: the others end with the same status, and so does this
        process."""
        self._is_over.set()
        self._store.set(_ENDED, str(status))
        atexit.register(leave_process, status)

    def refused(self, error: Exception) -> None:
        """Called by a rank that cannot go on because of a setting or a file, as the others cannot: the lead says so and
        ends them.

        Waits for that; after the time-out of the ranks this one is alone in it, and leaves.
        """
        if not self._ranks.is_lead:
            time.sleep(self._timeout_s)
        self.leave(error)

    def leave(self, error: BaseException) -> None:
        """Called by a rank that an error ends: tells the others, or says which rank is to blame once that is known."""
        if not _is_of_others(error):
            text = f"{type(error).__name__}: {_first_line(error)}".removesuffix(": ")
            self._store.set(f"{_FAILED}/{self._ranks.rank}", json.dumps([self._ranks.phase, text]))
            self._is_over.set()
            self._say(f"rank {self._ranks.rank} failed in {self._ranks.phase}: {text}", error)
            return
        self._is_taken = True
        self._store.set(f"{_LOST}/{self._ranks.rank}", self._ranks.phase)
        self._lost_at = self._num_beats
        self._is_reached.wait()
        self._say(f"{self._verdict} ({_first_line(error)})")

    def _run(self) -> None:
        ranks = self._ranks
        while not self._is_over.wait(self._beat_s):
            self._num_beats += 1
            try:
                beside = ranks.phase_beside and f", {ranks.phase_beside} beside"
                self._store.set(f"{_BEAT}/{ranks.rank}", f"{self._num_beats} {ranks.phase}{beside}")
                if not ranks.is_lead and self._store.check([_ENDED]):
                    os._exit(int(self._store.get(_ENDED)))
                verdict = self._look()
            except Exception as error:  # the store is the launcher's: without it nothing can be agreed upon any more
                verdict = f"the launcher of the ranks is gone: {_first_line(error)}"
            if verdict:
                self._reach(verdict)
                return

    def _look(self) -> str:
        """Why the trainer has to end; empty while there is no reason."""
        others = [rank for rank in range(self._ranks.size) if rank != self._ranks.rank]
        for rank in others:
            if self._store.check([f"{_FAILED}/{rank}"]):
                phase, cause = json.loads(self._store.get(f"{_FAILED}/{rank}"))
                return f"rank {rank} failed in {phase}: {cause}"
        silent_s = {rank: (self._num_beats - self._heard_at(rank)) * self._beat_s for rank in others}
        lost_s = 0.0 if self._lost_at is None else (self._num_beats - self._lost_at) * self._beat_s
        enough_s = LOST_AFTER_BEATS * self._beat_s
        allowed_s = self._timeout_s if self._lost_at is None else min(self._timeout_s, enough_s)
        if gone := [rank for rank in others if silent_s[rank] > allowed_s]:
            named = ", ".join(f"rank {rank} ({self._phase_of(rank)})" for rank in gone)
            how = "has died or is frozen" if len(gone) == 1 else "have died or are frozen"
            return f"{named} {how}: not heard of for {max(silent_s[rank] for rank in gone):.0f} s"
        if lost_s > 2 * enough_s:
            hung = [rank for rank in others if not self._store.check([f"{_LOST}/{rank}"])]
            if hung:
                named = ", ".join(f"rank {rank} ({self._phase_of(rank)})" for rank in hung)
                return f"{named} did not answer: hung, or slower than trainer.rank_timeout_s = {self._timeout_s:g}"
            return "the ranks have lost their connections to each other"
        return ""

    def _heard_at(self, rank: int) -> int:
        """When the newest beat of a rank was first seen here; a rank that has not begun counts from the first look."""
        key = f"{_BEAT}/{rank}"
        beat = self._store.get(key) if self._store.check([key]) else b""
        if self._heard.get(rank, (None, 0))[0] != beat:
            self._heard[rank] = beat, self._num_beats
        return self._heard[rank][1]

    def _phase_of(self, rank: int) -> str:
        return self._heard[rank][0].decode().partition(" ")[2] or "start"

    def _reach(self, verdict: str) -> None:
        """Hands the verdict to the main thread, and ends the process if that does not end it: its threads may wait for
        a rank that is lost."""
        self._verdict = verdict
        self._is_reached.set()
        time.sleep(GRACE_S)
        if self._is_over.is_set():
            return
        if not self._is_taken:
            self._say(verdict)
        os._exit(1)

    def _say(self, text: str, error: BaseException | None = None) -> None:
        """The first of the ranks to come here speaks: the lead may be the one that is lost. error: shown with its
        traceback."""
        try:
            is_first = self._store.add(_SAID, 1) == 1
        except Exception:  # the launcher is gone, and each says so
            is_first = True
        if is_first:
            log.error("%s; %s", text, self._ending, exc_info=error)


def _is_of_others(error: BaseException) -> bool:
    """Whether an error is the sign of another rank's end: communication failed or timed out."""
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error) for word in ("gloo", "NCCL", "nccl", "Gloo"))


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0].partition(". This is typically")[0]
