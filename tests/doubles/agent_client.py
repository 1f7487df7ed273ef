"""A minimal agent, and a scripted policy that answers it."""

import asyncio
import io
import json
import re
from collections.abc import Callable
from typing import Any

import aiohttp

from chat_templates import decode, encode

ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CALL = '<tool_call>{"arguments":{"a":3,"b":4},"name":"add"}</tool_call>'
"""A tool call as no template writes it."""
ANSWER = "therefore seven"


class AgentClient:
    """A client of one producer's endpoint; `close` it."""

    def __init__(self, url: str, key: str | None = None) -> None:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.session = aiohttp.ClientSession(url, headers=headers, timeout=aiohttp.ClientTimeout(300))

    async def close(self) -> None:
        await self.session.close()

    async def request(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """Sends a request; returns the status and the decoded body. body: bytes are sent as they are."""
        data = body if isinstance(body, bytes | io.BytesIO | None) else json.dumps(body).encode()
        async with self.session.request(method, path, data=data) as reply:
            return reply.status, await reply.json()

    async def error(self, method: str, path: str, body: Any = None) -> tuple[int, str]:
        """Sends a request that is refused; returns the status and the error's code."""
        status, answer = await self.request(method, path, body)
        assert status >= 400, answer
        return status, answer["error"]["code"]

    async def text(self, path: str, body: Any) -> tuple[int, str, str]:
        """Posts a body; returns the status, the content type and the text."""
        async with self.session.post(path, json=body) as reply:
            return reply.status, reply.content_type, await reply.text()

    async def open(self, *, timeout_s: float = 30.0) -> dict[str, Any]:
        """Opens a rollout. Waits for credit with growing pauses, as an agent should: hundreds that ask all the time
        would leave the producer no time to claim."""
        pause_s = 0.02
        async with asyncio.timeout(timeout_s):
            while True:
                status, body = await self.request("POST", "/r")
                if status == 200:
                    return body
                assert status == 429, body
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, 0.5)

    async def chat(self, rollout: dict[str, Any], messages: list[dict], **fields: Any) -> dict[str, Any]:
        """Asks for an answer; returns the assistant's message."""
        path = f"/r/{rollout['id']}/v1/chat/completions"
        status, body = await self.request("POST", path, {"messages": messages, **fields})
        assert status == 200, body
        return body["choices"][0]["message"]

    async def finish(self, rollout: dict[str, Any], reward: float, **metrics: float) -> None:
        """Finishes a rollout with its reward."""
        body = {"reward": reward, "metrics": metrics}
        status, answer = await self.request("POST", f"/r/{rollout['id']}/finish", body)
        assert status == 200, answer

    async def converse(self, rollout: dict[str, Any], num_turns: int = 2, *, keep_ids: bool = False) -> list[dict]:
        """Converses for `num_turns`: a question and follow-ups, and the tool's result after each call. Returns all
        messages."""
        messages: list[dict] = [{"role": "user", "content": f"task {rollout['index']}"}]
        for turn in range(num_turns):
            reply = await self.chat(rollout, messages, tools=[ADD])
            messages.append(reply if keep_ids else as_plain_client(reply))
            if turn + 1 < num_turns:
                calls = reply.get("tool_calls")
                messages.append(
                    {"role": "tool", "tool_call_id": calls[0]["id"], "content": "7"}
                    if calls
                    else {"role": "user", "content": f"and then {turn}"}
                )
        return messages


def as_plain_client(message: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of a message that an OpenAI client sends back."""
    return {name: message[name] for name in ("role", "content", "tool_calls") if name in message}


def spelled(text: str, style: str = "chatml") -> list[int]:
    """Returns the ids of an answer letter by letter, as no tokenizer would encode it."""
    parts = re.findall("</?tool_call>|.", text)
    return [token for part in [*parts, "<|im_end|>"] for token in encode(style, part)]


def tool_user(style: str = "chatml") -> Callable[[list[int], int], list[int]]:
    """Returns a script for ScriptedEngine: it calls the tool after a user's message and answers after the tool's."""
    answer, call = spelled(ANSWER, style), spelled(CALL, style)

    def script(prompt_ids: list[int], sibling: int) -> list[int]:
        last = decode(style, prompt_ids).split("<|im_start|>")[-2]
        return answer if last.startswith("tool") else call

    return script
