"""Environments of verifiers 0.2 and 0.3: rows of data sets, and a client that the environment calls."""

import json
from collections.abc import Mapping
from typing import Any

import verifiers as vf
from verifiers.clients.openai_chat_completions_client import OpenAIChatCompletionsClient, OpenAIChatResponse

from penstock.producers.environments.stepping import TOO_LONG
from penstock.producers.interfaces import Conversation
from penstock.schemas.prompt import Message, Reward


class RowsLibrary:
    """`verifiers.load_environment(id, **args)`; see `penstock.producers.environments.verifiers.Library`."""

    def __init__(self, id: str, args: Mapping[str, Any]) -> None:
        self._environment = vf.load_environment(id, **args)
        if self._environment.requires_group_rollouts or self._environment.provides_advantages:
            raise ValueError("it scores whole groups; expected rewards of one rollout each")
        self.training = self._environment.build_dataset() or ()
        self.evaluation = self._environment.build_eval_dataset() or ()

    def pose(self, task: Any) -> tuple[tuple[Message, ...], str]:
        messages = tuple(Message(role=said["role"], content=_text(said["content"])) for said in task["prompt"])
        return messages, _text(task.get("answer") or "")

    async def run(self, task: Any, conversation: Conversation) -> Reward:
        done = await self._environment.run_rollout(task, _Policy(conversation), "policy", {})
        if done.get("error") is not None:
            raise RuntimeError(f"verifiers: {done['error_chain']}")
        return Reward(value=float(done["reward"]), parts={name: float(v) for name, v in done["metrics"].items()})


class _Policy(OpenAIChatCompletionsClient):
    """The model as verifiers calls it."""

    def __init__(self, conversation: Conversation) -> None:
        super().__init__(conversation)
        self._conversation = conversation

    async def close(self) -> None:
        pass

    async def get_native_response(
        self, prompt: Any, model: str, sampling_args: Any, tools: Any = None, **_: Any
    ) -> OpenAIChatResponse:
        fields = {"tools": tools} if tools else {}
        try:
            message = await self._conversation.chat(prompt, **sampling_args, **fields)
        except Exception as error:
            if getattr(error, "code", None) in TOO_LONG:
                raise vf.OverlongPromptError from error
            raise
        choice = {"index": 0, "finish_reason": self._conversation.facts.finish_reason, "message": message}
        return OpenAIChatResponse.model_validate(
            {"id": "", "created": 0, "model": model, "object": "chat.completion", "choices": [choice]}
        )

    async def raise_from_native_response(self, response: Any) -> None:
        """Accepts an empty answer: the policy has given it, and it is scored like others."""


def _text(content: Any) -> str:
    return content if isinstance(content, str) else json.dumps(content)
