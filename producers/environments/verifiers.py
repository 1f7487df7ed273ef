"""Any environment of the library verifiers, unchanged: its tasks, turns, tools, stop conditions and rewards."""

import json
import signal
from collections.abc import Mapping
from typing import Any

from penstock.producers.environments.dataset import task_of
from penstock.producers.interfaces import Conversation, RolloutFacts
from penstock.schemas.prompt import Message, Prompt, Reward

try:
    import verifiers as vf
    from verifiers.clients.openai_chat_completions_client import OpenAIChatCompletionsClient, OpenAIChatResponse
except ImportError as error:
    raise ImportError(f"{error}: pip install 'penstock[verifiers]'") from error

Json = dict[str, Any]

TOO_LONG = ("context_length_exceeded", "rollout_too_large")
"""Codes of calls for which no room is left."""


class VerifiersEnvironment:
    """`verifiers.load_environment(id, **args)`. Rows of its data set are shuffled per epoch; those of its evaluation
    set, if it has one, are held out.

    A rollout in which verifiers records an error dies of it. Other rollouts get its reward, with its metrics as parts.

    id: of an installed environment, or of a module in the working directory.
    args: of its `load_environment`.
    num_evaluation_prompts: how many rows of its evaluation set to use, from the first on; None means all.

    Raises:
        ValueError: it cannot be loaded, has no tasks, or scores the rollouts of a group together (their rewards or
            their advantages).
    """

    def __init__(
        self, *, seed: int, id: str, args: Mapping[str, Any] | None = None, num_evaluation_prompts: int | None = None
    ) -> None:
        handlers = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
        try:
            self._environment = vf.load_environment(id, **(args or {}))
        except Exception as error:  # the environment is the user's
            raise ValueError(f"VerifiersEnvironment: id = {id!r}: {type(error).__name__}: {error}") from error
        finally:
            for each, handler in handlers.items():
                signal.signal(each, handler)  # it installs its own, which exit at once
        if self._environment.requires_group_rollouts or self._environment.provides_advantages:
            raise ValueError(f"VerifiersEnvironment: {id!r} scores whole groups; expected rewards of one rollout each")
        training, evaluation = self._environment.build_dataset(), self._environment.build_eval_dataset()
        if not training:
            raise ValueError(f"VerifiersEnvironment: {id!r} has no training rows")
        self._rows = {"training": training, "evaluation": evaluation or ()}
        self._seed = seed
        self.num_tasks = len(training)
        available = len(self._rows["evaluation"])
        wanted = available if num_evaluation_prompts is None else num_evaluation_prompts
        if not 0 <= wanted <= available:
            raise ValueError(f"VerifiersEnvironment: num_evaluation_prompts is {wanted}, expected 0 to {available}")
        self.num_evaluation_prompts = wanted

    def prompt(self, index: int) -> Prompt:
        return self._pose("training", task_of(index, self.num_tasks, self._seed))

    def evaluation_prompt(self, n: int) -> Prompt:
        return self._pose("evaluation", n - 1)

    async def reward(self, prompt: Prompt, completion: str) -> Reward:
        """Returns the reward of a conversation with this answer alone; there is no room for another turn."""
        return await self.converse(prompt, _OneAnswer(completion))

    async def converse(self, prompt: Prompt, conversation: Conversation) -> Reward:
        row = self._rows[prompt.metadata["set"]][int(prompt.metadata["row"])]
        done = await self._environment.run_rollout(row, _Policy(conversation), "policy", {})
        if done.get("error") is not None:
            raise RuntimeError(f"verifiers: {done['error_chain']}")
        return Reward(value=float(done["reward"]), parts={name: float(v) for name, v in done["metrics"].items()})

    def _pose(self, name: str, number: int) -> Prompt:
        row = self._rows[name][number]
        messages = tuple(Message(role=each["role"], content=_text(each["content"])) for each in row["prompt"])
        asked = {"set": name, "row": str(number)}
        return Prompt(messages=messages, answer=_text(row.get("answer") or ""), metadata=asked)


class _OneAnswer:
    """A `Conversation` with one given answer."""

    facts = RolloutFacts(num_prompt_tokens=0, num_tokens=0, max_tokens=0, finish_reason="stop")

    def __init__(self, text: str) -> None:
        self._left = [text]

    async def chat(self, messages: list[Json], **fields: Any) -> Json:
        if not self._left:
            raise vf.OverlongPromptError("there is one answer")
        return {"role": "assistant", "content": self._left.pop()}


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
