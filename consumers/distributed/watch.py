"""The ranks watch each other: a lost rank ends all of them, with a message that says which one and why."""

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
"""Missing beats after which a rank counts as lost, once another has lost its connection to it."""
TRAINER_ENDS = "the trainer ends, and --resume continues it from its last checkpoint"
GRACE_S = 2.0
"""How long the main thread may take to end by itself after a verdict."""
_ENDED, _FAILED, _LOST, _BEAT, _SAID = (f"watch/{name}" for name in ("ended", "failed", "lost", "beat", "said"))


def leave_process(status: int) -> NoReturn:
    """Ends this process and leaves its process groups as they are: their destructors may abort while others end."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


class Watch:
    """A thread of every rank that sends heartbeats through the store and ends its process when another rank is lost.

    A rank is lost if it says so; if no beat has come for `timeout_s`; or, once this rank's communication has failed, if
    no beat comes for some beats, or the rank does not report the same failure. Silence is counted in this rank's own
    beats: a rank that was frozen itself has missed nothing.

    ending: the consequence of a lost rank, for the message about it.
    """

    def __init__(self, ranks: Ranks, store: Any, timeout_s: float, ending: str = TRAINER_ENDS) -> None:
        self._ranks = ranks
        self._store: dist.Store = store.clone()  # a wait of the main thread would hold this one up
        self._store.set_timeout(timedelta(seconds=max(10 * BEAT_S, timeout_s)))
        self._timeout_s, self._ending = timeout_s, ending
        self._beat_s = min(BEAT_S, timeout_s / 10)
        self._num_beats = 0
        self._heard: dict[int, tuple[bytes, int]] = {}
        """By rank: its newest beat, and the number of this rank's own beat at which it was first seen."""
        self._verdict = ""
        self._is_reached = threading.Event()
        self._is_taken = False
        self._lost_at: int | None = None
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()

    def ended(self, status: int) -> None:
        """Called by the lead after a regular end: the others end with the same status, and so does this process."""
        self._is_over.set()
        self._store.set(_ENDED, str(status))
        atexit.register(leave_process, status)

    def refused(self, error: Exception) -> None:
        """Called by a rank that cannot continue because of a setting or a file, which normally stops all of them: the
        lead reports it and ends the others.

        Waits for that; leaves after the ranks' time-out, since only this rank has the error then.
        """
        if not self._ranks.is_lead:
            time.sleep(self._timeout_s)
        self.leave(error)

    def leave(self, error: BaseException) -> None:
        """Called by a rank that ends with an error: tells the others, or logs which rank caused it, once known."""
        if not _is_communication_error(error):
            text = f"{type(error).__name__}: {_first_line(error)}".removesuffix(": ")
            self._store.set(f"{_FAILED}/{self._ranks.rank}", json.dumps([self._ranks.phase, text]))
            self._is_over.set()
            self._log_once(f"rank {self._ranks.rank} failed in {self._ranks.phase}: {text}", error)
            return
        self._is_taken = True
        self._store.set(f"{_LOST}/{self._ranks.rank}", self._ranks.phase)
        self._lost_at = self._num_beats
        self._is_reached.wait()
        self._log_once(f"{self._verdict} ({_first_line(error)})")

    def _run(self) -> None:
        ranks = self._ranks
        while not self._is_over.wait(self._beat_s):
            self._num_beats += 1
            try:
                beside = ranks.thread_phases and f", {ranks.thread_phases} beside"
                self._store.set(f"{_BEAT}/{ranks.rank}", f"{self._num_beats} {ranks.phase}{beside}")
                if not ranks.is_lead and self._store.check([_ENDED]):
                    os._exit(int(self._store.get(_ENDED)))
                verdict = self._find_verdict()
            except Exception as error:  # the store is the launcher's: without it the ranks cannot agree on anything
                verdict = f"the launcher of the ranks is gone: {_first_line(error)}"
            if verdict:
                self._reach(verdict)
                return

    def _find_verdict(self) -> str:
        """Returns why the trainer has to end; empty if it does not."""
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
        """Returns this rank's beat at which a rank's newest one was first seen, or at the first look."""
        key = f"{_BEAT}/{rank}"
        beat = self._store.get(key) if self._store.check([key]) else b""
        if self._heard.get(rank, (None, 0))[0] != beat:
            self._heard[rank] = beat, self._num_beats
        return self._heard[rank][1]

    def _phase_of(self, rank: int) -> str:
        return self._heard[rank][0].decode().partition(" ")[2] or "start"

    def _reach(self, verdict: str) -> None:
        """Hands the verdict to the main thread, and ends the process if that thread does not: it may be waiting for a
        lost rank."""
        self._verdict = verdict
        self._is_reached.set()
        time.sleep(GRACE_S)
        if self._is_over.is_set():
            return
        if not self._is_taken:
            self._log_once(verdict)
        os._exit(1)

    def _log_once(self, text: str, error: BaseException | None = None) -> None:
        """Logs the text on the first rank that calls this: the lead may be the one that is lost. error: logged with its
        traceback."""
        try:
            is_first = self._store.add(_SAID, 1) == 1
        except Exception:  # the launcher is gone, and each says so
            is_first = True
        if is_first:
            log.error("%s; %s", text, self._ending, exc_info=error)


def _is_communication_error(error: BaseException) -> bool:
    """Returns whether an error is due to the end of another rank: communication failed or timed out."""
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error) for word in ("gloo", "NCCL", "nccl", "Gloo"))


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0].partition(". This is typically")[0]
