"""Images in agents' messages: a whole producer on a real server, its engine scripted."""

import copy
import io
import json
from typing import Any

import pytest

from agent_client import ADD, AgentClient, as_plain_client, tool_user
from chat_templates import CHATML_TURNS, encode, tokenizer_of
from penstock.schemas.images import data_url, digest_of
from penstock.schemas.prompt import Message, Prompt
from penstock.schemas.rollout import unpack_ids
from producer_run import KEYS, Numbers
from scripted_engine import ScriptedEngine
from tool_caller import ToolCaller
from vision_models import picture
from waiting import until

pytestmark = [pytest.mark.redis, pytest.mark.parametrize("server_binary", ["valkey"], indirect=True)]

(MARK,) = encode("chatml", "~")
RED, BLUE = picture(3, 2, 1), picture(3, 2, 2)
WIDE = picture(5, 1, 3)
TOO_LARGE = picture(700, 700, 4)
"""1.4 MB."""


def shown(file: bytes, api: str = "chat/completions") -> dict[str, Any]:
    return {
        "chat/completions": {"type": "image_url", "image_url": {"url": data_url(file)}},
        "responses": {"type": "input_image", "image_url": data_url(file)},
        "messages": {
            "type": "image",
            "source": {"type": "base64", "media_type": "image/png", "data": data_url(file).partition(",")[2]},
        },
    }[api]


def seeing() -> dict[str, Any]:
    """The arguments of a producer whose model takes images; each is as many tokens as it is wide."""
    tokenizer = copy.deepcopy(tokenizer_of("chatml"))
    said = "{%- if message.content is string -%}{{ message.content }}{%- else -%}{%- for part in message.content -%}"
    said += "{{ '~' if part.type == 'image' else part.text }}{%- endfor -%}{%- endif -%}"
    head = "{{ '<|im_start|>' + message.role + '\\n' }}"
    old = "{{ '<|im_start|>' + message.role + '\\n' + (message.content or '') }}"
    assert old in CHATML_TURNS
    tokenizer.chat_template = tokenizer.chat_template.replace(old, head + said)
    engine = ScriptedEngine(script=tool_user(), max_model_len=4096, image_token=MARK)
    return {"engine": engine, "tokenizer": tokenizer, "group_size": 1}


def asked(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "text", "text": "see "}, *parts]}]


def places_in(segment: Any) -> list[tuple[str, int]]:
    """Digest and width of each image, checked against the tokens."""
    ids = unpack_ids(segment.token_ids).tolist()
    for place in segment.images:
        assert ids[place.start : place.end] == [MARK] * (place.end - place.start)
    assert ids.count(MARK) == sum(place.end - place.start for place in segment.images)
    return [(place.digest, place.end - place.start) for place in segment.images]


async def turn(client: AgentClient, rollout: Any, messages: list[Any], *results: bytes) -> None:
    """Asks, and answers the call with images."""
    reply = await client.chat(rollout, messages, tools=[ADD])
    messages.append(as_plain_client(reply))
    parts = [{"type": "text", "text": "7"}, *map(shown, results)]
    if calls := reply.get("tool_calls"):
        messages.append({"role": "tool", "tool_call_id": calls[0]["id"], "content": parts})


async def test_a_conversation_with_images_is_one_segment_that_says_where_each_is(opened):
    one, rollout = await opened(**seeing())
    messages = asked(shown(RED), {"type": "text", "text": " and "}, shown(RED))
    await turn(one.client, rollout, messages, WIDE)
    await turn(one.client, rollout, messages)
    await one.client.finish(rollout, 1.0)
    (group,) = await one.groups(1)
    ((segment,),) = (each.segments for each in group.rollouts)
    assert places_in(segment) == [(digest_of(RED), 3), (digest_of(RED), 3), (digest_of(WIDE), 5)]
    assert group.images == {digest_of(RED): RED, digest_of(WIDE): WIDE}
    assert len(segment.loss_mask) == 2 and one.count("penstock_agent_calls_total", prompt="drifted") == 1
    assert [len(given.places) for given in one.engine.images[-2:]] == [2, 3]
    assert tuple(segment.images) == one.engine.images[-1].places


@pytest.mark.parametrize("api", ["responses", "messages"])
async def test_the_other_apis_show_images_too(opened, api: str):
    one, rollout = await opened(**seeing())
    field = "input" if api == "responses" else "messages"
    text = {"type": "input_text" if api == "responses" else "text", "text": "see"}
    body = {field: [{"role": "user", "content": [text, shown(WIDE, api)]}], "max_tokens": 9}
    status, answer = await one.client.request("POST", f"/r/{rollout['id']}/v1/{api}", body)
    assert status == 200, answer
    await one.client.finish(rollout, 1.0)
    (group,) = await one.groups(1)
    assert places_in(group.rollouts[0].segments[0]) == [(digest_of(WIDE), 5)]


async def test_another_image_of_the_same_size_opens_a_segment(opened):
    one, rollout = await opened(**seeing())
    messages = asked(shown(RED))
    await turn(one.client, rollout, messages)
    messages[0] = asked(shown(BLUE))[0]
    await turn(one.client, rollout, messages)
    await one.client.finish(rollout, 1.0)
    (group,) = await one.groups(1)
    first, second = group.rollouts[0].segments
    assert (places_in(first), places_in(second)) == ([(digest_of(RED), 3)], [(digest_of(BLUE), 3)])
    assert set(group.images) == {digest_of(RED), digest_of(BLUE)}


async def test_bad_images_are_refused_by_name_and_the_rollout_goes_on(opened, monkeypatch):
    monkeypatch.setattr("penstock.producers.endpoint.groups.MAX_IMAGES_BYTES", 3 * 10**6)
    one, rollout = await opened(**seeing() | {"group_size": 3})
    for parts, code, message in [
        ([{"type": "image_url", "image_url": {"url": "https://a.org/b.png"}}], "invalid_image", "nothing is fetched"),
        ([{"type": "image_url", "image_url": {"url": "/etc/hostname"}}], "invalid_image", "expected data:image/"),
        ([shown(RED), shown(b"none")], "invalid_image", "messages[0].content[2]: 4 bytes that cannot be decoded"),
        ([{"type": "image", "image": digest_of(RED)}], "invalid_image", "messages[0].content[1]: an image at"),
        ([{"type": "image_url"}], "invalid_image", "messages[0].content[1]"),
        ([{"type": "text", "text": "~"}], "invalid_image", "0 images, expected none, or one for each placeholder"),
        ([shown(TOO_LARGE)], "rollout_too_large", "expected at most 1,000,000, its share of a group's"),
    ]:
        path = f"/r/{rollout['id']}/v1/chat/completions"
        body = io.BytesIO(json.dumps({"messages": asked(*parts)}).encode())
        status, answer = await one.client.request("POST", path, body)
        assert (status, answer["error"]["code"]) == (400, code) and message in answer["error"]["message"], answer
    await one.client.converse(rollout)
    await one.client.finish(rollout, 1.0)
    for _ in range(2):
        other = await one.client.open()
        await turn(one.client, other, asked(shown(WIDE)))
        await one.client.finish(other, 0.0)
    (group,) = await one.groups(1)
    assert [len(places_in(each.segments[0])) if each.segments[0].images else 0 for each in group.rollouts] == [0, 1, 1]


class Looking(Numbers):
    """Poses a picture."""

    def prompt(self, index: int) -> Prompt:
        parts = [{"type": "text", "text": f"{index}: "}, {"type": "image", "image": WIDE}]
        return Prompt(messages=(Message(role="user", content=parts),), answer="7")


async def test_a_prompt_s_image_reaches_the_agent_and_is_in_the_group_once(opened):
    one, rollout = await opened(**seeing() | {"environment": Looking(), "group_size": 1})
    messages = rollout["prompt"]["messages"]
    assert messages[0]["content"][1] == shown(WIDE)
    await turn(one.client, rollout, messages)
    await one.client.finish(rollout, 1.0)
    (group,) = await one.groups(1)
    assert group.images == {digest_of(WIDE): WIDE} and group.prompt.images[0].digest == digest_of(WIDE)
    assert places_in(group.rollouts[0].segments[0]) == [(digest_of(WIDE), 5)]


async def test_a_rollout_with_images_outlives_its_producer(opened, serve):
    one, rollout = await opened(**seeing())
    messages = asked(shown(RED))
    await turn(one.client, rollout, messages, WIDE)
    one.producer.stop.set()
    two = await serve(producer_id="b", beside=one, **seeing())
    await until(lambda: two.server.client.llen(KEYS.progress(1)) > 0)
    await one.task
    await until(lambda: two.producer.endpoint.agents.find(rollout["id"]) is not None)
    await turn(two.client, rollout, messages)
    await two.client.finish(rollout, 1.0)
    (group,) = await two.groups(1)
    ((segment,),) = (each.segments for each in group.rollouts)
    assert places_in(segment) == [(digest_of(RED), 3), (digest_of(WIDE), 5)] and len(segment.loss_mask) == 2
    assert group.images == {digest_of(RED): RED, digest_of(WIDE): WIDE} and len(group.sampled_by) == 2


class Shown(ToolCaller):
    """Converses about a file on its disk."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self._path = path

    async def converse(self, prompt, conversation):
        await conversation.chat(asked({"type": "image_url", "image_url": {"url": self._path}}), tools=[ADD])
        return 1.0


async def test_an_environment_s_own_conversation_may_show_its_files(serve, tmp_path):
    (tmp_path / "wide.png").write_bytes(WIDE)
    one = await serve(environment=Shown(str(tmp_path / "wide.png")), **seeing())
    one.trainer.release(1, 1)
    (group,) = await one.groups(1)
    assert places_in(group.rollouts[0].segments[0]) == [(digest_of(WIDE), 5)] and group.images == {
        digest_of(WIDE): WIDE
    }
