"""The process's own generators of random numbers, lent to one game at a time."""

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

_LOCK = threading.Lock()


class GlobalRandom:
    """What `random` and `numpy.random` draw for one game, whatever others draw meanwhile.

    Libraries of games seed and draw from the process's own generators, which the games of a producer share. Within
    `lent()` these continue where the game has left them, and afterwards they are as before. Games wait for one another.
    """

    def __init__(self, seed: int) -> None:
        self._python = random.Random(seed).getstate()
        self._numpy = np.random.RandomState(seed).get_state()

    @contextmanager
    def lent(self) -> Iterator[None]:
        with _LOCK:
            python, numpy = random.getstate(), np.random.get_state()
            random.setstate(self._python)
            np.random.set_state(self._numpy)
            try:
                yield
            finally:
                self._python, self._numpy = random.getstate(), np.random.get_state()
                random.setstate(python)
                np.random.set_state(numpy)
