"""The live view: a thread that looks at the run, and a screen that is drawn when there is something new."""

import contextlib
import os
import select
import signal
import sys
import termios
import threading
import time
import tty
from collections.abc import Callable, Iterator
from types import FrameType

from penstock.deploy.watch.gathering import Gatherer
from penstock.deploy.watch.screen import VIEWS, one_view
from penstock.deploy.watch.snapshot import RunSnapshot
from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

_LOOK_S = 1.0
_KEY_S = 0.1
_QUIT = {"q", "Q", "\x03", "\x04"}


class Looking:
    """Has a run looked at once a second by a thread of its own, so that keys never wait for a host that is away."""

    def __init__(self, gatherer: Gatherer) -> None:
        self.latest: RunSnapshot | None = None
        self.problem = ""
        self._gatherer = gatherer
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self.latest, self.problem = self._gatherer.gather(), ""
            except Exception as error:  # the isolation boundary: a file or a reply of any kind never ends the view
                self.problem = f"{type(error).__name__}: {error}"
            self._stop.wait(_LOOK_S)

    def __enter__(self) -> "Looking":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()


def watch(gatherer: Gatherer, console: Console) -> None:
    """Draws until q, Ctrl-C or SIGTERM, and leaves the terminal as it was."""
    with _ended_by_sigterm(), contextlib.suppress(KeyboardInterrupt):
        screen = Live(console=console, screen=True, auto_refresh=False)
        with Looking(gatherer) as looking, _keys() as read_key, screen:
            _draw(looking, read_key, screen)


def _draw(looking: Looking, read_key: Callable[[], str], screen: Live) -> None:
    number, drawn = 1, None
    while (key := read_key()) not in _QUIT:
        if key.isdecimal() and 1 <= int(key) <= len(VIEWS):
            number = int(key)
        # Once a second all the same: ages go on.
        now = (number, screen.console.size, id(looking.latest), looking.problem, int(time.monotonic()))
        if now != drawn:
            drawn = now
            screen.update(_picture(looking, number, screen.console), refresh=True)


def _picture(looking: Looking, number: int, console: Console) -> RenderableType:
    if looking.problem:
        return Text(f"cannot be shown: {looking.problem}", style="red")
    if looking.latest is None:
        return Text("looking ...", style="dim")
    return one_view(looking.latest, number, console.width)


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[], str]]:
    """A function that returns the next key, or "" after `_KEY_S`; always "" where standard input is no terminal."""
    if not sys.stdin.isatty():

        def nothing() -> str:
            time.sleep(_KEY_S)
            return ""

        yield nothing
        return
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)

    def key() -> str:
        ready, _, _ = select.select([descriptor], [], [], _KEY_S)
        return os.read(descriptor, 1).decode(errors="replace") or "q" if ready else ""

    try:
        tty.setcbreak(descriptor)
        yield key
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


@contextlib.contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """SIGTERM ends the view as Ctrl-C does: the terminal is left as it was."""

    def end(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
