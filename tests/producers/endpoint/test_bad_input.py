"""Images and tools of equal names are refused, wherever they come from, and the run goes on."""

from typing import Any

import pytest

from agent_client import ADD
from penstock.schemas.keys import Field, Kind
from tool_caller import ToolCaller

pytestmark = [pytest.mark.redis, pytest.mark.parametrize("server_binary", ["valkey"], indirect=True)]

TASK = [{"role": "user", "content": "what is three plus four"}]
URL = "data:image/png;base64,AAAA"
PARTS: dict[str, Any] = {
    "chat/completions": {"type": "image_url", "image_url": {"url": URL}},
    "responses": {"type": "input_image", "image_url": URL},
    "messages": {"type": "image", "source": {"type": "url", "url": URL}},
}
TOOLS: dict[str, Any] = {
    "chat/completions": ADD,
    "responses": {"type": "function", **ADD["function"]},
    "messages": {"name": "add", "input_schema": ADD["function"]["parameters"]},
}
IS_AN_IMAGE, ARE_BOTH = "content[0] is an image", "tools[0] and tools[1] are both 'add', expected different names"


@pytest.mark.parametrize("api", PARTS)
async def test_every_api_refuses_them_and_the_rollout_goes_on(opened, api: str) -> None:
    one, rollout = await opened(group_size=1)
    messages = "input" if api == "responses" else "messages"
    for body, said in (
        ({messages: [{"role": "user", "content": [PARTS[api]]}]}, IS_AN_IMAGE),
        ({messages: TASK, "tools": [TOOLS[api], TOOLS[api]]}, ARE_BOTH),
    ):
        status, answer = await one.client.request("POST", f"/r/{rollout['id']}/v1/{api}", body)
        assert status == 400 and said in answer["error"]["message"]
    await one.client.converse(rollout)
    await one.client.finish(rollout, 1.0)
    assert [len(each.segments) for each in (await one.groups(1))[0].rollouts] == [1]


async def test_a_conversation_with_them_is_dead_with_the_reason_and_the_next_is_not(serve) -> None:
    class Careless(ToolCaller):
        async def converse(self, prompt, conversation):
            if prompt.text == "1":
                await conversation.chat([{"role": "user", "content": [PARTS["chat/completions"]]}])
            if prompt.text == "2":
                await conversation.chat(TASK, tools=[ADD, ADD])
            return await super().converse(prompt, conversation)

    one = await serve(environment=Careless(), group_size=2)
    one.trainer.release(1, 3)
    entries = {int(fields[Field.INDEX]): fields for fields in await one.entries(3)}
    assert IS_AN_IMAGE in entries[1][Field.REASON].decode() and ARE_BOTH in entries[2][Field.REASON].decode()
    assert entries[3][Field.KIND] == Kind.GROUP and not one.task.done()
