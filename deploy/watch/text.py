"""Formats numbers, bars and sparklines."""

import math
import time
from collections.abc import Iterable, Sequence
from itertools import pairwise

from rich.text import Text

from penstock.deploy.operate import printing

_STEPS = "▁▂▃▄▅▆▇█"
_BAR = "█"
NOTHING = "-"


def sparkline(values: Sequence[float], width: int) -> str:
    """Draws `values` in at most `width` characters, each the mean of its share of them; "" without values.

    The lowest mean has the lowest step and the highest mean the highest; equal means have half height.
    """
    numbers = [value for value in values if math.isfinite(value)]
    if not numbers or width < 1:
        return ""
    # Scaled below 1, exactly: sums and ranges of the largest numbers are not finite.
    exponent = math.frexp(max(map(abs, numbers)))[1]
    numbers = [math.ldexp(value, -exponent) for value in numbers]
    count = min(width, len(numbers))
    edges = [round(n * len(numbers) / count) for n in range(count + 1)]
    means = [sum(numbers[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    if high - low <= 1e-12 * max(abs(low), abs(high)):
        return _STEPS[3] * count
    return "".join(_STEPS[min(7, int(8 * (mean - low) / (high - low)))] for mean in means)


def bar(share: float, width: int) -> str:
    """Draws a bar, of at least one character if `share` is above 0."""
    return _BAR * (max(1, round(share * width)) if share > 0 else 0)


def number(value: float | None) -> str:
    """Formats with at most four significant digits, or as an integer: `0.9874`, `12,345`, `1.2e-06`, `1.2e+12`."""
    if value is None or not math.isfinite(value):
        return NOTHING
    size = abs(value)
    if value == 0 or 1e-3 <= size < 1:
        return f"{value:.4f}" if value else "0"
    if size < 1e-3 or size >= 1e12:
        return f"{value:.1e}"
    return f"{value:,.0f}" if size >= 1000 else f"{value:.4g}"


def percent(share: float | None) -> str:
    if share is None:
        return NOTHING
    return f"{share:.0%}" if share == 0 or share >= 0.1 else f"{share:.1%}"


def count(value: float | None) -> str:
    return NOTHING if value is None else f"{value:,.0f}"


def milliseconds(seconds: float | None) -> str:
    return NOTHING if seconds is None else f"{seconds * 1e3:,.0f} ms"


def size(num_bytes: float) -> str:
    """Formats as in `950 B`, `118 kB`, `1.2 MB`, `16 GB`."""
    step = min(3, int(math.log10(max(1.0, num_bytes)) / 3))
    value = num_bytes / 1000**step
    return f"{value:.{int(value < 10 and step > 0)}f} {('B', 'kB', 'MB', 'GB')[step]}"


def duration(seconds: float) -> str:
    """Formats as in `12 s`, `3 min`, `2.5 h`."""
    if seconds < 120:
        return f"{max(0.0, seconds):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def moment(time_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(time_s))


def safe(text: str, limit: int = 200) -> str:
    """Escapes control characters in text from producers, Redis or files, and shortens it."""
    shown = printing.safe(text)
    return shown if len(shown) <= limit else shown[: limit - 1] + "…"


def joined(parts: Iterable[Text | str]) -> Text:
    """Joins the parts that are not empty into one line."""
    return Text("  ").join(part if isinstance(part, Text) else Text(part) for part in parts if len(part))
