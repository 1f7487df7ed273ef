"""Draws the lengths of completions from a file, a distribution or the record of a run."""

import difflib
import importlib.util
import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

from penstock.schemas.config import ConfigError
from penstock.schemas.rollout import one_line

Lengths = Callable[[Random, int], Sequence[float]]
"""Draws the lengths of a number of siblings, in tokens, without a limit; they may be infinite."""

_MOST_EXPONENT = 700.0
"""e to a larger power overflows a float; lengths are cut long before."""
DISTRIBUTIONS: dict[str, tuple[tuple[str, ...], Callable[..., float]]] = {
    "constant": (("TOKENS",), lambda random, tokens: tokens),
    "uniform": (("LEAST", "MOST"), lambda random, least, most: random.uniform(least, most)),
    "exponential": (("MEAN",), lambda random, mean: random.expovariate(1 / mean)),
    "log-normal": (
        ("MEDIAN", "SIGMA"),
        lambda random, median, sigma: median * math.exp(min(_MOST_EXPONENT, random.normalvariate(0, sigma))),
    ),
}
"""By name: the parameters, numbers above 0, and a function that draws."""
_SPELT = ", ".join(":".join((name, *parameters)) for name, (parameters, _) in DISTRIBUTIONS.items())


def lengths_of(given: str) -> Lengths:
    """Returns the lengths that `--lengths` names: a file, or a distribution such as `log-normal:800:1.2`.

    Raises:
        ConfigError: it is neither, a parameter is no number above 0, or a line of the file is no length.
    """
    if not given:
        raise ConfigError(f"--lengths '': expected a file, a run, or one of {_SPELT}")
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
    """Draws lengths from those of groups: siblings come from one group."""

    def draw(random: Random, num_siblings: int) -> Sequence[float]:
        group = random.choice(groups)
        is_enough = num_siblings <= len(group)
        return random.sample(group, num_siblings) if is_enough else random.choices(group, k=num_siblings)

    return draw


def of_buckets(buckets: Sequence[tuple[int, int, int]]) -> Lengths:
    """Draws lengths from buckets: a bucket's count, its tokens and its bound, a power of 2. Within a bucket, lengths
    are uniform around their mean; siblings are independent."""
    spans = []
    for num, num_tokens, bound in buckets:
        mean, least = num_tokens / num, bound // 2 + 1
        reach = max(0.0, min(mean - least, bound - mean))
        spans.append((mean - reach, mean + reach))
    weights = [num for num, _, _ in buckets]

    def draw(random: Random, num_siblings: int) -> Sequence[float]:
        return [random.uniform(*span) for span in random.choices(spans, weights, k=num_siblings)]

    return draw


def _lengths_in(file: Path) -> Lengths:
    """Reads lengths from a file: each line, or row of a Parquet file, is a length or an array of siblings' lengths."""
    is_table = file.suffix == ".parquet"
    rows = _rows_of_table(file) if is_table else _rows_of_text(file)
    kind = "row" if is_table else "line"
    groups = [_group(found, f"--lengths {file}: {kind} {number}") for number, found in rows]
    if not groups:
        raise ConfigError(f"--lengths {file}: no length in it, expected a number of tokens a {kind}")
    if all(len(group) == 1 for group in groups):
        groups = [[length for group in groups for length in group]]
        return lambda random, num_siblings: random.choices(groups[0], k=num_siblings)
    return of_groups(groups)


def _rows_of_text(file: Path) -> Iterator[tuple[int, Any]]:
    """Yields the numbers of lines that are not empty, and their content: as JSON if it is JSON, else as text."""
    try:
        lines = file.read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise ConfigError(f"--lengths {file}: {error}; expected lines of text, or a name ending in .parquet") from None
    except OSError as error:
        raise ConfigError(f"--lengths {file}: cannot be read: {error.strerror}") from None
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                yield number, json.loads(line)
            except (ValueError, RecursionError):  # no JSON, an integer of thousands of digits, arrays that deep
                yield number, line.strip()


def _rows_of_table(file: Path) -> Iterator[tuple[int, Any]]:
    """Yields rows by number: of the only column, or the groups of a record that `penstock record export` wrote."""
    if importlib.util.find_spec("pyarrow") is None:
        raise ConfigError(
            f"--lengths {file}: pyarrow is not installed; expected the extra: pip install 'penstock[parquet]'"
        )
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    group, others = ["epoch", "position", "index"], ["rollout", "outcome", "positions"]
    try:
        names = pq.read_schema(file).names
        if not {*group, *others} <= {*names}:
            if len(names) != 1:
                shown = one_line(", ".join(names))
                raise ConfigError(f"--lengths {file}: columns {shown}: expected a single one, or an exported record")
            return enumerate(pq.read_table(file)[0].to_pylist(), start=1)
        table = pq.read_table(file, columns=[*group, *others])
    except (pa.ArrowInvalid, OSError) as error:
        raise ConfigError(f"--lengths {file}: cannot be read: {one_line(str(error))}") from None
    table = table.filter(pc.is_in(table["outcome"], pa.array(["trained", "skipped"])))  # sampled whole
    num_tokens = pc.max_element_wise(pc.list_value_length(table["positions"]), 1)
    table = table.drop_columns(["positions"]).append_column("tokens", num_tokens)
    rollouts = table.group_by([*group, "rollout"], use_threads=False).aggregate([("tokens", "sum")])
    groups = rollouts.group_by(group, use_threads=False).aggregate([("tokens_sum", "list")])
    return enumerate(groups["tokens_sum_list"].to_pylist(), start=1)


def _group(found: Any, where: str) -> list[float]:
    group = found if isinstance(found, list) else [found]
    if not group or not all(type(each) in (int, float) and 0 < each < math.inf for each in group):
        shown = found if isinstance(found, str) else json.dumps(found, default=str)
        shown = one_line(shown if len(shown) <= 60 else f"{shown[:57]}...")
        raise ConfigError(f"{where}: {shown}: expected a number of tokens above 0, or an array of them, as [812, 1440]")
    return group


def _number(text: str) -> float | None:
    """Parses a number above 0; returns None for any other text."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0 < value < math.inf else None
