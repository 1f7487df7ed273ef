"""How long a command may go unanswered, learned from answers that came too late."""

import time

FORGET_S = 60.0


class AdaptiveTimeout:
    """After a command that was given up, each is given twice that time in proportion, until for a minute none has
    needed more than usual. A disk or a link that is slower than thought would otherwise be asked the same for ever.

    longest_s: no command gets more, unless it does so usually.
    """

    def __init__(self, longest_s: float) -> None:
        self._longest_s = longest_s
        self._factor = 1.0
        self._slow_at = 0.0

    def limit_s(self, usual_s: float) -> float:
        if time.monotonic() - self._slow_at > FORGET_S:
            self._factor = 1.0
        return max(usual_s, min(usual_s * self._factor, self._longest_s))

    def exceeded(self, usual_s: float, limit_s: float) -> None:
        self._factor = max(self._factor, 2 * limit_s / usual_s)
        self._slow_at = time.monotonic()

    def answered(self, usual_s: float, took_s: float) -> None:
        if took_s > usual_s:
            self._slow_at = time.monotonic()
