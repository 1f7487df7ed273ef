"""Streams: their text comes while it is sampled, and is what the finished message says."""

import asyncio
import json
import threading
from typing import Any

import anthropic
import openai
import pytest

from agent_client import ADD, CALL, spelled
from chat_templates import encode, tokenizer_of
from penstock.producers.endpoint import server
from penstock.producers.endpoint.chat.answers import AnswerParser, Answers, PlainText
from penstock.producers.endpoint.chat.requests import parse_chat
from penstock.producers.endpoint.chat.streams import ChatEvents
from penstock.producers.endpoint.prompts import Prompts
from penstock.producers.interfaces import Completion
from penstock.schemas.config import SamplingConfig
from penstock.schemas.rollout import SamplingSettings, VersionSpan, pack_floats, pack_ids
from producer_run import KEYS
from scripted_engine import ScriptedEngine
from tag_parser import TagParser
from waiting import until

ASKED = [{"role": "user", "content": "what is three plus four"}]
TEXT = "<think>\nhard\n</think>\n\nthree plus four makes seven"
APIS: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": ASKED, "model": "x"},
    "responses": {"input": ASKED, "model": "x"},
    "messages": {"messages": ASKED, "model": "x", "max_tokens": 200},
}


class SteppedEngine(ScriptedEngine):
    """Samples no further than `most` tokens of each request."""

    most = 0

    def stepped(self, request_id: str, num_sampled: int) -> None:
        if num_sampled >= self.most:
            self.may_sample.clear()

    def go_on(self, most: int) -> None:
        self.most = most
        self.may_sample.set()


def stepped_engine() -> SteppedEngine:
    engine = SteppedEngine(script=lambda ids, sibling: spelled(TEXT), max_model_len=4096)
    engine.may_sample.clear()
    return engine


async def events_of(reply: Any) -> Any:
    """Yields the events of a stream, None for one that keeps it alive."""
    while line := await reply.content.readline():
        if line in (b": sampling\n", b'data: {"type":"ping"}\n'):
            yield None
        elif line.startswith(b"data: {"):
            yield json.loads(line[6:])
        else:
            assert line.startswith((b"event: ", b"data: [DONE]", b"\n"))


def delta_of(event: Any) -> str:
    """Returns the text that an event adds to the answer's content."""
    if "choices" in (event or {}):
        return event["choices"][0]["delta"].get("content") or ""
    if "delta" in (event or {}) and event["type"] == "content_block_delta":
        return event["delta"].get("text", "")
    return event["delta"] if (event or {}).get("type") == "response.output_text.delta" else ""


@pytest.mark.redis
@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("elsewhere", [False, True])
async def test_bytes_come_before_the_first_token_and_text_before_the_last(opened, serve, api, elsewhere) -> None:
    """Also by a producer that does not hold the rollout."""
    one, rollout = await opened(stepped_engine())
    client = one.client
    if elsewhere:
        client = (await serve(producer_id="b", beside=one)).client
        await until(lambda: one.url.encode() in (one.server.client.get(KEYS.producer("a")) or b""))
    path = f"/r/{rollout['id']}/v1/{api}"
    async with client.session.post(path, json=APIS[api] | {"stream": True}) as reply:
        assert (reply.status, reply.content_type) == (200, "text/event-stream")
        events = events_of(reply)
        comments = 0
        async for event in events:
            assert not delta_of(event)
            comments += event is None
            if comments == 2:
                break
        num_sampled = len(spelled(TEXT)) - 10
        one.engine.go_on(num_sampled)
        begun = ""
        async for event in events:
            begun += delta_of(event)
            if "three plus" in begun:
                break
        assert "seven".startswith(begun.removeprefix("three plus four makes ")) or "three plus four".startswith(begun)
        one.engine.go_on(1000)
        rest = [event async for event in events]
    assert begun + "".join(map(delta_of, rest)) == "three plus four makes seven"
    call = one.producer.endpoint.agents.find(rollout["id"]).ledger.calls[0]
    assert call.reply["content"] == "three plus four makes seven" and call.num_sampled == len(spelled(TEXT))


@pytest.mark.redis
@pytest.mark.parametrize("api", APIS)
async def test_an_answer_that_fails_after_its_first_event_ends_with_the_error(opened, api) -> None:
    engine = stepped_engine()
    one, rollout = await opened(engine)
    engine.go_on(1)
    path, agents = f"/r/{rollout['id']}/v1/{api}", one.producer.endpoint.agents
    rollout_here = agents.find(rollout["id"])
    package: Any = anthropic if api == "messages" else openai
    url = rollout["base_url"].removesuffix("/v1" if api == "messages" else "")
    make = package.AsyncAnthropic if api == "messages" else package.AsyncOpenAI
    async with make(base_url=url, api_key="none") as client:
        create = client.chat.completions.create if api == "chat/completions" else getattr(client, api).create
        stream = await create(**APIS[api], stream=True)
        with pytest.raises(package.APIError, match="has ended: idle for 20 s"):
            async for _ in stream:
                if rollout_here.is_open:
                    agents.give_up(rollout_here, "idle for 20 s")
    status, code = await one.client.error("POST", path, APIS[api] | {"stream": True})
    assert (status, code) == (410, "rollout_ended"), "before the first event the status says it"


@pytest.mark.redis
async def test_a_client_that_hangs_up_on_a_stream_ends_the_call_and_may_ask_again(opened) -> None:
    engine = stepped_engine()
    one, rollout = await opened(engine, group_size=1)
    engine.go_on(40)
    path, body = f"/r/{rollout['id']}/v1/chat/completions", APIS["chat/completions"] | {"stream": True}
    async with one.client.session.post(path, json=body) as reply:
        async for event in events_of(reply):
            if delta_of(event):
                break
        reply.close()
    await until(lambda: engine.cancelled)
    engine.go_on(1000)
    _, _, text = await one.client.text(path, body)
    assert text.endswith("data: [DONE]\n\n")
    await one.client.finish(rollout, 1.0)
    ((segment,),) = [rollout.segments for rollout in (await one.groups(1))[0].rollouts]
    assert sum(end - start for start, end in segment.loss_mask) == len(spelled(TEXT))


class Whole:
    """A parser that knows a call only from its last character on, which is not its text's beginning."""

    skip_special_tokens = False

    def parse(self, text: str, *arguments: Any) -> Any:
        return TagParser().parse(text.replace("functools[", "<tool_call>").replace("]", "</tool_call>"), *arguments)


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        (PlainText(), "a \U0001f600 <b> [c] {d} \u4e2d\u6587"),
        (PlainText(), "one STOP two"),
        (PlainText(), "one STO two ST"),
        (TagParser(), TEXT),
        (TagParser(), f"<think>\n{CALL} a < b [c]\n</think>\n\nlet me see"),
        (TagParser(), f"let me see {CALL} {CALL}"),
        (TagParser(), f"{CALL}"),
        (TagParser(), "let me see <tool_call>{"),
        (Whole(), f"let me see functools[{CALL[11:-12]}]"),
    ],
)
def test_what_is_streamed_after_any_token_begins_the_finished_message(parser: AnswerParser, text: str) -> None:
    answers = Answers(tokenizer_of("chatml"), parser, finds_reasoning="<think>" in text)
    fields = {"tools": [ADD]} if "tool_call" in text or "functools" in text else {}
    request = parse_chat({"messages": ASKED, "stop": ["STOP"], **fields}, SamplingSettings())
    for spelling in (spelled(text), encode("chatml", text + "<|im_end|>")):
        num = len(spelling)
        whole = Completion(
            token_ids=pack_ids(spelling),
            behavior_logprobs=pack_floats([-1.0] * num),
            version_spans=(VersionSpan(0, 0, num),),
            finish_reason="stop",
        )
        whole = answers.ended(request, whole)[0]
        message = answers.message(request, [1], whole)
        longest = {"reasoning": "", "content": ""}
        for n in range(whole.num_tokens + 1):
            for part, said in answers.so_far(request, [1], whole.part(0, n)).items():
                longest[part] = max(said, longest[part], key=len)
                assert (message.get(part) or "").startswith(said), (n, part)
        for part, said in longest.items():
            assert 2 * len(said) >= len((message.get(part) or "").partition("<tool_call>")[0]), part


def test_a_part_that_was_streamed_otherwise_than_it_is_parsed_stays_as_its_client_has_it() -> None:
    answers = Answers(tokenizer_of("chatml"), TagParser())
    message: dict[str, Any] = {"content": None, "tool_calls": []}
    answers.keep_sent(message, {"content": "so"})
    assert message["content"] == "so"


@pytest.mark.redis
async def test_long_answers_are_written_beside_the_loop_and_short_ones_in_it(opened, monkeypatch) -> None:
    threads: list[threading.Thread] = []

    def noting(write: Any) -> Any:
        def noted(*arguments: Any) -> Any:
            threads.append(threading.current_thread())
            return write(*arguments)

        return noted

    monkeypatch.setattr(server, "_json", noting(server._json))
    monkeypatch.setattr(ChatEvents, "_chunk", noting(ChatEvents._chunk))
    engine = ScriptedEngine(script=lambda ids, sibling: spelled("seven" * 900), max_model_len=8192)
    one, rollout = await opened(engine, sampling=SamplingConfig(max_tokens=8000))
    path, main = f"/r/{rollout['id']}/v1/chat/completions", threading.main_thread()
    for stream, num_tokens, is_beside in (
        (False, 10, False),
        (True, 10, False),
        (False, 8000, True),
        (True, 8000, True),
    ):
        threads.clear()
        await one.client.text(path, APIS["chat/completions"] | {"stream": stream, "max_tokens": num_tokens})
        assert (threads[-1] is not main) == is_beside, (stream, num_tokens)


@pytest.mark.redis
async def test_long_messages_do_not_stop_other_calls(opened, monkeypatch) -> None:
    begun, may_end = threading.Semaphore(0), threading.Event()
    prompt = Prompts.prompt

    def slow(self: Prompts, request: Any, ledger: Any) -> Any:
        if request.num_bytes > 100_000:
            begun.release()
            may_end.wait(300)
        return prompt(self, request, ledger)

    monkeypatch.setattr(Prompts, "prompt", slow)
    one, rollout = await opened()
    path = f"/r/{rollout['id']}/v1/chat/completions"
    parts: list[dict] = [{"type": "object", "properties": {f"k{n}": {} for n in range(20_000)}}]
    parts.append({"type": "object", "properties": {"a": {"enum": list(range(50_000))}}})
    bodies: list[dict] = [
        {"messages": ASKED, "tools": [{"function": {"name": "f", "parameters": one}}]} for one in parts
    ]
    bodies.append({"messages": [{"role": "user", "content": [{"type": "text", "text": "the " * 30_000}]}]})
    bodies.append({"messages": ASKED * 5000})
    calling = [asyncio.create_task(one.client.error("POST", path, body)) for body in bodies * 2]
    try:
        await asyncio.to_thread(begun.acquire)
        for _ in range(3):
            await one.client.chat(rollout, ASKED, tools=[ADD])
        assert not any(call.done() for call in calling)
    finally:
        may_end.set()
    assert set(await asyncio.gather(*calling)) == {(400, "context_length_exceeded")}
