"""The list of groups: one row each, and the query that filters, sorts and pages them."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple, get_args

import msgspec

from penstock.schemas.policy import make_version
from penstock.schemas.record import GroupEntry

Sort = Literal["newest", "index", "reward", "lag", "ess", "weight", "masked", "tokens", "version"]
_EXPECTED = {
    "sort": ", ".join(get_args(Sort)),
    "order": "asc or desc",
    **dict.fromkeys(("lag_min", "lag_max", "page", "size", "until"), "a whole number"),
}
_VERSION = re.compile(r"(?:(\d{1,6}):)?(\d{1,15})")


class InspectedRow(NamedTuple):
    """A group as the list shows it.

    key: its name in links. number: grows in order of arrival.
    outcome: the entry's, or `unsettled` and `unreadable` for groups that are only on the stream.
    update: the update that it was part of; None on the stream.
    """

    key: str
    number: int
    outcome: str
    update: int | None
    entry: GroupEntry


class QueryError(ValueError):
    """An unusable parameter; the message names it, its value and what was expected."""


class RowQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The filters, order and page in a link to the list. Empty text and None match everything.

    reward_min, reward_max: range of at least one sibling's reward. lag_min, lag_max: of the group's largest lag.
    ess_min, ess_max: of its ESS fraction; a group without one does not match.
    finish: at least one sibling's finish reason. version: `37` or `2:37`, within the group's versions.
    q: text in prompt, answer or metadata, in any case.
    until: largest row number, so that pages do not move while more groups arrive.
    """

    reward_min: float | None = None
    reward_max: float | None = None
    lag_min: int | None = None
    lag_max: int | None = None
    ess_min: float | None = None
    ess_max: float | None = None
    outcome: str = ""
    finish: str = ""
    producer: str = ""
    environment: str = ""
    version: str = ""
    q: str = ""
    sort: Sort = "newest"
    order: Literal["asc", "desc"] = "desc"
    page: int = 1
    size: int = 50
    until: int | None = None


def parse_query(parameters: Mapping[str, str]) -> RowQuery:
    """Reads a link's parameters. Raises QueryError for one that is unknown, no number, or out of range."""
    given = {name: value for name, value in parameters.items() if value != ""}
    try:
        query = msgspec.convert(given, RowQuery, strict=False)
    except msgspec.ValidationError as error:
        name = str(error).partition(" - at `$.")[2].rstrip("`")
        if name not in given:
            unknown = ", ".join(sorted(given.keys() - set(RowQuery.__struct_fields__)))
            raise QueryError(f"{unknown}: expected one of {', '.join(RowQuery.__struct_fields__)}") from None
        raise QueryError(f"{name} = {given[name][:50]!r}: expected {_EXPECTED.get(name, 'a number')}") from None
    for name in ("reward_min", "reward_max", "ess_min", "ess_max"):
        value = getattr(query, name)
        if value is not None and not math.isfinite(value):
            raise QueryError(f"{name} = {value}: expected a finite number")
    if query.version and not _VERSION.fullmatch(query.version):
        raise QueryError(f"version = {query.version!r}: expected a number, or EPOCH:STEPS after a rollback")
    if query.page < 1 or not 1 <= query.size <= 200:
        raise QueryError(f"page = {query.page}, size = {query.size}: expected a page from 1, of 1 to 200 groups")
    return query


def select(rows: Sequence[InspectedRow], query: RowQuery) -> list[InspectedRow]:
    """Returns the rows that match a query except for its text, in its order; rows without the sort value come last."""
    tests = _tests(query)
    found = [row for row in rows if all(test(row) for test in tests)]
    if query.sort == "newest":
        return found[::-1] if query.order == "desc" else found
    value = _VALUES[query.sort]
    having = [(of_row, row) for row in found if (of_row := value(row.entry)) is not None]
    having.sort(key=lambda pair: pair[0], reverse=query.order == "desc")
    return [row for _, row in having] + [row for row in found if value(row.entry) is None]


def facets(rows: Sequence[InspectedRow]) -> dict[str, list[str]]:
    """Returns every outcome, finish reason, producer and environment that occurs."""
    return {
        "outcome": sorted({row.outcome for row in rows}),
        "finish": sorted({reason for row in rows for reason in row.entry.finish_reasons}),
        "producer": sorted({row.entry.producer_id for row in rows} - {""})[:_MAX_CHOICES],
        "environment": sorted({row.entry.environment for row in rows} - {""}),
    }


def mean_reward(entry: GroupEntry) -> float | None:
    return sum(entry.rewards) / len(entry.rewards) if entry.rewards else None


_MAX_CHOICES = 500
_VALUES: dict[str, Callable[[GroupEntry], float | None]] = {
    "index": lambda entry: entry.index,
    "reward": mean_reward,
    "lag": lambda entry: entry.max_lag if entry.num_sampled_tokens else None,
    "ess": lambda entry: entry.ess_fraction,
    "weight": lambda entry: entry.max_weight,
    "masked": lambda entry: entry.num_masked,
    "tokens": lambda entry: sum(entry.num_sampled_tokens) if entry.num_sampled_tokens else None,
    "version": lambda entry: entry.max_version if entry.max_version >= 0 else None,
}


def _tests(query: RowQuery) -> list[Callable[[InspectedRow], bool]]:
    tests: list[Callable[[InspectedRow], bool]] = []
    if query.until is not None:
        until = query.until
        tests.append(lambda row: row.number <= until)
    if query.outcome:
        tests.append(lambda row: row.outcome == query.outcome)
    if query.producer:
        tests.append(lambda row: row.entry.producer_id == query.producer)
    if query.environment:
        tests.append(lambda row: row.entry.environment == query.environment)
    if query.finish:
        tests.append(lambda row: query.finish in row.entry.finish_reasons)
    if query.version:
        version = _version(query.version)
        tests.append(lambda row: 0 <= row.entry.min_version <= version <= row.entry.max_version)
    tests += _range_test(query.lag_min, query.lag_max, lambda entry: [_VALUES["lag"](entry)])
    tests += _range_test(query.ess_min, query.ess_max, lambda entry: [entry.ess_fraction])
    tests += _range_test(query.reward_min, query.reward_max, lambda entry: entry.rewards)
    return tests


def _range_test(
    low: float | None, high: float | None, values: Callable[[GroupEntry], Sequence[float | None]]
) -> list[Callable[[InspectedRow], bool]]:
    """Returns a test that one of an entry's values lies in a range; no test without a bound."""
    if low is None and high is None:
        return []
    least = -math.inf if low is None else low
    most = math.inf if high is None else high
    return [lambda row: any(value is not None and least <= value <= most for value in values(row.entry))]


def _version(text: str) -> int:
    match = _VERSION.fullmatch(text)
    assert match is not None, "parse_query has checked it"
    return make_version(int(match[1] or 0), int(match[2]))
