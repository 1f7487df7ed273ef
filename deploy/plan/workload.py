"""How long completions are: by a file, by a distribution, or as in the record of a run."""

import difflib
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

from penstock.schemas.config import ConfigError

Lengths = Callable[[Random, int], Sequence[float]]
"""Draws the lengths of so many siblings, in tokens, as if there were no limit."""

DISTRIBUTIONS: dict[str, tuple[tuple[str, ...], Callable[..., float]]] = {
    "constant": (("TOKENS",), lambda random, tokens: tokens),
    "uniform": (("LEAST", "MOST"), lambda random, least, most: random.uniform(least, most)),
    "exponential": (("MEAN",), lambda random, mean: random.expovariate(1 / mean)),
    "log-normal": (("MEDIAN", "SIGMA"), lambda random, median, sigma: median * random.lognormvariate(0, sigma)),
}
"""By name the parameters, numbers above 0, and a draw."""
_SPELT = ", ".join(":".join((name, *parameters)) for name, (parameters, _) in DISTRIBUTIONS.items())


def lengths_of(given: str) -> Lengths:
    """The lengths that `--lengths` means: a file, or a distribution as `log-normal:800:1.2`.

    Raises:
        ConfigError: neither, a parameter that is no number above 0, or a line of the file that is no length.
    """
    file = Path(given)
    if file.is_file():
        return _lengths_in(file)
    name, *texts = given.split(":")
    if name not in DISTRIBUTIONS:
        similar = difflib.get_close_matches(name, DISTRIBUTIONS, n=1)
        meant = f"; did you mean {similar[0]}?" if similar else ""
        raise ConfigError(f"--lengths {given}: neither a file, nor a run, nor one of {_SPELT}{meant}")
    parameters, draw = DISTRIBUTIONS[name]
    values = [_number(text) for text in texts]
    if len(values) != len(parameters) or not all(values) or (name == "uniform" and values[0] > values[1]):  # type: ignore[operator]
        raise ConfigError(f"--lengths {given}: expected {':'.join((name, *parameters))}, with numbers above 0")
    return lambda random, num_siblings: [draw(random, *values) for _ in range(num_siblings)]


def of_groups(groups: Sequence[Sequence[float]]) -> Lengths:
    """Lengths drawn from those of groups: siblings of one group stay together, as far as they are enough."""

    def draw(random: Random, num_siblings: int) -> Sequence[float]:
        group = random.choice(groups)
        is_enough = num_siblings <= len(group)
        return random.sample(group, num_siblings) if is_enough else random.choices(group, k=num_siblings)

    return draw


def _lengths_in(file: Path) -> Lengths:
    """A length a line, or a JSON array of the lengths of a group's siblings."""
    groups: list[list[float]] = []
    try:
        lines = file.read_text().splitlines()
    except UnicodeDecodeError as error:
        raise ConfigError(f"--lengths {file}: {error}; expected lines of text") from None
    for number, line in enumerate(lines, start=1):
        if line.strip():
            groups.append(_group_in(line, f"--lengths {file}: line {number}"))
    if not groups:
        raise ConfigError(f"--lengths {file}: no length in it, expected a number of tokens a line")
    if all(len(group) == 1 for group in groups):
        groups = [[length for group in groups for length in group]]
        return lambda random, num_siblings: random.choices(groups[0], k=num_siblings)
    return of_groups(groups)


def _group_in(line: str, where: str) -> list[float]:
    try:
        found: Any = json.loads(line)
    except json.JSONDecodeError:
        found = None
    group = found if isinstance(found, list) else [found]
    if not group or not all(type(each) in (int, float) and 0 < each < math.inf for each in group):
        shown = line.strip() if len(line) <= 60 else f"{line[:57]}..."
        raise ConfigError(f"{where}: {shown}: expected a number of tokens above 0, or an array of them, as [812, 1440]")
    return group


def _number(text: str) -> float | None:
    """A number above 0; None if it is none."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0 < value < math.inf else None
