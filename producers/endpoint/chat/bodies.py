"""JSON bodies of requests, and that of the request which finishes a rollout."""

import json
import re
from typing import Any

import msgspec

from penstock.producers.endpoint.chat.errors import bad_request
from penstock.producers.endpoint.chat.requests import checked_object, kind_of, shown
from penstock.producers.endpoint.chat.sizes import check_num_parts
from penstock.schemas.prompt import Reward
from penstock.schemas.rollout import MAX_REWARD, check_part_names

Json = dict[str, Any]

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def parse_json(body: bytes) -> Json:
    """Raises ApiError 400 for anything but a JSON object."""
    value = _decoded(body)
    if not isinstance(value, dict):
        raise bad_request(f"the body is {kind_of(value)}, expected a JSON object", code="invalid_json")
    return value


def parse_finish(body: bytes) -> Reward:
    """Parses `{"reward": 1.0, "metrics": {"exact": 1.0}}`, or the reward alone.

    Raises:
        ApiError: 400, names the field, its value and what was expected.
    """
    value = _decoded(body)
    document = value if isinstance(value, dict) else {"reward": value}
    if unknown := set(document) - {"reward", "metrics"}:
        raise bad_request(f"{min(unknown)!r}: unknown field, expected reward and metrics", min(unknown))
    metrics = checked_object(document.get("metrics"), "metrics", "an object of numbers")
    try:
        check_part_names(metrics, "metrics")
    except ValueError as error:
        raise bad_request(str(error), "metrics") from None
    return Reward(
        value=_number(document.get("reward"), "reward"),
        parts={name: _number(number, f"metrics.{name}") for name, number in metrics.items()},
    )


def _decoded(body: bytes) -> Any:
    check_num_parts(body, "the body")
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        why = _lone_surrogate(body) or f"the body is not JSON: {error}"
        raise bad_request(why, code="invalid_json") from None


def _lone_surrogate(body: bytes) -> str:
    """Returns the error of a body with half a surrogate pair, where msgspec reports a truncated body; else empty."""
    if not _SURROGATE.search(body):
        return ""
    try:
        json.dumps(json.loads(body), ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        found = error.object[error.start]
        return f"the body holds {found!a} without its other half, a lone surrogate; expected text that UTF-8 can encode"
    except (ValueError, RecursionError):
        pass
    return ""


def _number(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= MAX_REWARD:
        expected = f"a number from {-MAX_REWARD:g} to {MAX_REWARD:g}"
        raise bad_request(f"{name} is {shown(value)}, expected {expected}", name)
    return float(value)
