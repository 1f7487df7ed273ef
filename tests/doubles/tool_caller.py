"""An environment that converses with the model and rewards tool calls."""

import random
from typing import Any

from penstock.schemas.prompt import Prompt, Reward

NUMBER = {"type": "number"}
PARAMETERS = {"type": "object", "properties": {"a": NUMBER, "b": NUMBER}}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}]


class ToolCaller:
    """Prompt n is the text `n`; the reward is the share of three turns in which the tool was called."""

    num_evaluation_prompts = 0

    def __init__(self, *, seed: int = 0) -> None:
        self.replies: list[dict[str, Any]] = []

    def prompt(self, index: int) -> Prompt:
        return Prompt(text=str(index))

    evaluation_prompt = prompt

    def reward(self, prompt: Prompt, completion: str) -> float:
        raise AssertionError("a conversation has its own reward")

    async def converse(self, prompt: Prompt, conversation: Any) -> Reward:
        messages: list[dict[str, Any]] = [{"role": "user", "content": prompt.text}]
        num_calls = 0
        for _ in range(3):
            reply = await conversation.chat(messages, tools=TOOLS)
            self.replies.append(reply)
            messages.append(reply)
            num_calls += "tool_calls" in reply
            for call in reply.get("tool_calls", ()):
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": "7"})
            if "tool_calls" not in reply:
                messages.append({"role": "user", "content": "use the tool"})
        return Reward(value=num_calls / 3, parts={"calls": float(num_calls)})


class ChancyCaller(ToolCaller):
    """Its rewards differ, so that every group teaches."""

    async def converse(self, prompt: Prompt, conversation: Any) -> Reward:
        reward = await super().converse(prompt, conversation)
        return Reward(value=random.random(), parts=reward.parts)
