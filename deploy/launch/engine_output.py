"""The output of a command that boots an engine: progress to stderr, the engine's own output to a file."""

import os
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

Say = Callable[[str], None]


def progress(is_wanted: bool) -> Say:
    """Makes a function that prints progress with the seconds since the start. It prints to the current stderr even if
    stderr is redirected later."""
    began = time.monotonic()
    stderr = os.dup(2)

    def say(text: str) -> None:
        if is_wanted:
            os.write(stderr, f"{time.monotonic() - began:6.1f} s  {text}\n".encode())

    weakref.finalize(say, os.close, stderr)
    return say


@contextmanager
def output_in(log: Path) -> Iterator[None]:
    """Redirects the output of this process and its children to a file: engines print a lot, and stdout is for the
    report."""
    log.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    kept = {number: os.dup(number) for number in (1, 2)}
    with log.open("wb") as file:
        for number in kept:
            os.dup2(file.fileno(), number)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, copy in kept.items():
            os.dup2(copy, number)
            os.close(copy)
