"""Spans of an agent's rollout: its calls, and its tools, which run between an answer and the next call."""

from collections.abc import Iterator
from itertools import pairwise

from penstock.producers.endpoint.call_ledger import Call
from penstock.producers.stream.spans import chat_span
from penstock.schemas.rollout import EngineFingerprint
from penstock.schemas.spans import Span, Value


def rollout_spans(
    rollout_id: str,
    about: dict[str, Value],
    fingerprint: EngineFingerprint,
    calls: list[Call],
    opened_s: float,
    ended_s: float,
    error: str,
) -> Iterator[Span]:
    """Yields the spans of a rollout that has ended.

    calls: in the order of their answers; an earlier holder may have answered some before this one opened it.
    """
    about = {"gen_ai.operation.name": "invoke_agent", "gen_ai.conversation.id": rollout_id, **about}
    start_s = min([opened_s, *(call.began_s for call in calls if call.began_s)])
    yield Span("invoke_agent", start_s, ended_s, about | {"rl.sample.turns": len(calls)}, id=rollout_id, error=error)
    for call, following in pairwise([*calls, None]):
        assert call is not None
        prompt = len(call.prompt) // 4
        yield chat_span(fingerprint, call.began_s, call.ended_s, prompt, [call.completion], parent=rollout_id)
        for made in call.reply.get("tool_calls") or ():
            name = made["function"]["name"]
            tool: dict[str, Value] = {
                "gen_ai.operation.name": "execute_tool",
                "gen_ai.tool.name": name,
                "gen_ai.tool.call.id": made["id"],
            }
            until_s = ended_s if following is None else max(call.ended_s, following.began_s)
            yield Span(f"execute_tool {name}", call.ended_s, until_s, tool, parent=rollout_id)
