"""A link's query of the list, and the SQL that it stands for."""

import math
import re
from collections.abc import Mapping
from typing import Any, Literal, get_args

import msgspec

from penstock.schemas.policy import make_version

GROUPS_PER_BATCH = 10**6
"""More than any batch has: row numbers grow from batch to batch."""
Sort = Literal["newest", "index", "reward", "lag", "ess", "weight", "masked", "tokens", "version"]
_NUMBER = f"position * {GROUPS_PER_BATCH} + place"
_LARGEST_LAG = "CASE WHEN num_sampled_tokens <> '[]' THEN max_lag END"
_SORT_VALUES: dict[str, str] = {
    "newest": _NUMBER,
    "index": "group_index",
    "reward": "(SELECT avg(value) FROM json_each(rewards))",
    "lag": _LARGEST_LAG,
    "ess": "ess_fraction",
    "weight": "max_weight",
    "masked": "num_masked",
    "tokens": "(SELECT sum(value) FROM json_each(num_sampled_tokens))",
    "version": "CASE WHEN max_version >= 0 THEN max_version END",
}
"""What a list is sorted by, in columns of the record's table `groups`."""
_EXPECTED = {
    "sort": ", ".join(get_args(Sort)),
    "order": "asc or desc",
    **dict.fromkeys(("lag_min", "lag_max", "page", "size", "until"), "a whole number"),
}
_LARGEST = 2**53
"""A browser's numbers are exact up to it."""
_VERSION = re.compile(r"(?:(\d{1,6}):)?(\d{1,15})")


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
    for name in ("lag_min", "lag_max", "page", "until"):
        value = getattr(query, name)
        if value is not None and abs(value) > _LARGEST:
            raise QueryError(f"{name} = {value}: expected at most {_LARGEST}")
    if query.version and not _VERSION.fullmatch(query.version):
        raise QueryError(f"version = {query.version!r}: expected a number, or EPOCH:STEPS after a rollback")
    if query.page < 1 or not 1 <= query.size <= 200:
        raise QueryError(f"page = {query.page}, size = {query.size}: expected a page from 1, of 1 to 200 groups")
    return query


def condition(query: RowQuery) -> tuple[str, dict[str, Any]]:
    """Returns the condition on `groups` that a query stands for, except for its text, and its parameters."""
    values = {name: value for name, value in msgspec.structs.asdict(query).items() if value not in (None, "")}
    if query.version:
        match = _VERSION.fullmatch(query.version)
        assert match is not None, "parse_query has checked it"
        values["version"] = make_version(int(match[1] or 0), int(match[2]))
    conditions = {
        "until": f"{_NUMBER} <= :until",
        "outcome": "outcome = :outcome",
        "producer": "producer_id = :producer",
        "environment": "environment = :environment",
        "finish": "EXISTS (SELECT 1 FROM json_each(finish_reasons) WHERE value = :finish)",
        "version": "min_version >= 0 AND :version BETWEEN min_version AND max_version",
        "lag_min": f"{_LARGEST_LAG} >= :lag_min",
        "lag_max": f"{_LARGEST_LAG} <= :lag_max",
        "ess_min": "ess_fraction >= :ess_min",
        "ess_max": "ess_fraction <= :ess_max",
    }
    parts = [sql for name, sql in conditions.items() if name in values]
    rewards = [f"value {sign} :{name}" for name, sign in (("reward_min", ">="), ("reward_max", "<=")) if name in values]
    if rewards:
        parts.append(f"EXISTS (SELECT 1 FROM json_each(rewards) WHERE {' AND '.join(rewards)})")
    return " AND ".join(parts) or "1", values


def ordering(query: RowQuery) -> str:
    """Returns the order of the list: groups without the number come last, those of one number as they arrived."""
    value = _SORT_VALUES[query.sort]
    return f"{value} IS NULL, {value} {query.order}, {_NUMBER}"
