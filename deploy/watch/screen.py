"""Draws `penstock watch`: one view at a time that keys switch, or all views once."""

import contextlib
import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.rule import Rule
from rich.text import Text

from penstock.deploy.watch.flow import flow
from penstock.deploy.watch.gathering import Gatherer
from penstock.deploy.watch.learning import learning
from penstock.deploy.watch.off_policy import off_policy
from penstock.deploy.watch.snapshot import RunSnapshot
from penstock.deploy.watch.text import duration, joined, moment

_SNAPSHOT_S = 1.0
_KEY_S = 0.1
_QUIT = {"q", "Q", "\x03", "\x04"}
VIEWS = {"Flow": flow, "Learning": learning, "Off-policy": off_policy}


def head(seen: RunSnapshot) -> Text:
    newest = seen.newest
    num_updates = seen.config.num_updates
    position = f"update {newest.update if newest else 0}/{num_updates}"
    words: list[Text | str] = [Text(seen.config.name, style="bold"), position]
    when = f"{moment(newest.time_s)}, {duration(seen.time_s - newest.time_s)} ago" if newest is not None else ""
    if seen.is_over:
        words.append(Text(f"over: finished {when}", style="green"))
    elif not seen.is_running:
        state = f"not running; last update {when}" if newest is not None else "not running; no update yet"
        words.append(Text(state, style="yellow"))
    else:
        rate = seen.updates_per_s
        if rate is not None and newest is not None:
            words.append(f"{duration((num_updates - newest.update) / rate)} left")
        words.append(Text(moment(seen.time_s), style="dim"))
    return joined(words)


def one_view(seen: RunSnapshot, number: int, width: int) -> RenderableType:
    """Draws view 1, 2 or 3, with a line of all views' keys above it."""
    tabs = Text()
    for place, name in enumerate(VIEWS, start=1):
        tabs.append(f" {place} {name} ", style="reverse bold" if place == number else "dim")
    tabs.append("   q quits", style="dim")
    return Group(head(seen), tabs, Text(), list(VIEWS.values())[number - 1](seen, width))


def all_views(seen: RunSnapshot, width: int) -> RenderableType:
    parts: list[RenderableType] = [head(seen)]
    for name, view in VIEWS.items():
        parts += [Rule(name, align="left", style="dim"), view(seen, width)]
    return Group(*parts)


def watch(gatherer: Gatherer, console: Console) -> None:
    """Draws until q, Ctrl-C or SIGTERM, and restores the terminal."""
    screen = Live(console=console, screen=True, auto_refresh=False)
    with _ended_by_sigterm(), contextlib.suppress(KeyboardInterrupt), _keys() as read_key, screen:
        _draw(gatherer, read_key, screen)


def _draw(gatherer: Gatherer, read_key: Callable[[], str], screen: Live) -> None:
    """Takes a snapshot every `_SNAPSHOT_S`, waits for keys in between, `_KEY_S` at a time, and draws what has changed;
    a quit key or KeyboardInterrupt ends it."""
    number, drawn, due_s = 1, None, 0.0
    key = ""
    while key not in _QUIT:
        if key.isdecimal() and 1 <= int(key) <= len(VIEWS):
            number = int(key)
        if time.monotonic() >= due_s:
            snapshot = _snapshot(gatherer)
            due_s = time.monotonic() + _SNAPSHOT_S
        now = (number, screen.console.size, due_s)
        if now != drawn:
            drawn = now
            view = one_view(snapshot, number, screen.console.width) if isinstance(snapshot, RunSnapshot) else snapshot
            screen.update(view, refresh=True)
        key = read_key()


def _snapshot(gatherer: Gatherer) -> RunSnapshot | Text:
    try:
        return gatherer.gather()
    except Exception as error:  # the isolation boundary: no unexpected file or reply ends the view
        return Text(f"cannot be shown: {type(error).__name__}: {error}", style="red")


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[], str]]:
    """Yields a function that returns the next key, or "" after `_KEY_S`; always "" if standard input is no terminal."""
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
    """Makes SIGTERM end the view as Ctrl-C does, which restores the terminal."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
