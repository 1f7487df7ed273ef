"""Rewards by a model behind an OpenAI-compatible URL: questions of a data set, answers judged against a rubric."""

import json
import os
from collections.abc import Mapping
from typing import Any

import aiohttp

from penstock.producers.environments.dataset import Dataset
from penstock.schemas.prompt import Prompt, Reward
from penstock.schemas.rollout import one_line

Json = dict[str, Any]

_MOST_QUOTED = 200
_FORM = 'Reply with JSON alone, as in {"reason": "one sentence", "verdict": %s}. The verdict is one of %s.'


class JudgeError(RuntimeError):
    """The judge has given no verdict that counts; the message says what it did instead."""


class Rubric:
    """Asks a model behind the chat completions of any server that speaks OpenAI's API for verdicts on answers.

    base_url: the server's, with its `/v1`. model: its name there.
    rubric: what the judge is told: the criteria by which it decides. Question, reference (the task's answer, if it has
        one) and answer follow.
    verdicts: the reward of each verdict by its name.
    key_variable: the environment variable with the server's key, on every producer's host; unset means none is sent.
    max_tokens: of a judgement. A longer one is cut off, which is no verdict.
    schema: False for a server that refuses `response_format`; then only the prompt asks for the form.

    Raises:
        ValueError: base_url is no URL, the rubric is empty, or all verdicts have one reward.
    """

    def __init__(
        self,
        *,
        base_url: str,
        model: str,
        rubric: str,
        verdicts: Mapping[str, float],
        key_variable: str = "OPENAI_API_KEY",
        max_tokens: int = 512,
        schema: bool = True,
    ) -> None:
        if not base_url.startswith(("http://", "https://")):
            raise ValueError(f"Judge: base_url is {base_url!r}, expected a URL, as in 'http://127.0.0.1:8000/v1'")
        if not rubric.strip():
            raise ValueError("Judge: rubric is empty, expected the criteria by which the judge decides")
        if len(set(verdicts.values())) < 2:
            raise ValueError(f"Judge: verdicts = {dict(verdicts)}, expected names with at least two different rewards")
        self._url = f"{base_url.rstrip('/')}/chat/completions"
        self._key_variable = key_variable
        self._verdicts = dict(verdicts)
        example, names = json.dumps(next(iter(verdicts))), ", ".join(map(json.dumps, verdicts))
        self._instructions = f"{rubric.strip()}\n\n{_FORM % (example, names)}"
        self._asked: Json = {"model": model, "temperature": 0.0, "max_tokens": max_tokens}
        if schema:
            asked = {"name": "judgement", "strict": True, "schema": _schema(list(verdicts))}
            self._asked["response_format"] = {"type": "json_schema", "json_schema": asked}

    async def reward(self, prompt: Prompt, completion: str) -> Reward:
        """Returns the reward of the verdict on one answer.

        Raises:
            JudgeError: there is none.
            aiohttp.ClientError: the server is not reached.
        """
        told = {"role": "system", "content": self._instructions}, {"role": "user", "content": _case(prompt, completion)}
        key = os.environ.get(self._key_variable)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        async with (
            # reward.timeout_s ends a call that takes too long.
            aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout()) as session,
            session.post(self._url, json=self._asked | {"messages": told}) as reply,
        ):
            text = await reply.text()
            if reply.status != 200:
                raise JudgeError(f"{self._url} answers {reply.status}: {_quoted(text)}")
        return Reward(value=self._verdicts[verdict(text, self._verdicts)])


class Judge(Dataset):
    """A `Dataset` whose answers a model judges.

    judge: the arguments of `Rubric`. The others are those of `Dataset`.

    `[reward]` has the limits: `concurrency`, `timeout_s` and `retries`. A judgement that is not of the form asked for
    is a failure like an error of the server or a timeout: the judge is asked again, and after the last retry the group
    is dead.
    """

    def __init__(self, *, judge: Mapping[str, Any], **dataset: Any) -> None:
        super().__init__(**dataset)
        self._rubric = Rubric(**judge)

    async def reward(self, prompt: Prompt, completion: str) -> Reward:  # type: ignore[override]
        return await self._rubric.reward(prompt, completion)


async def judged(prompt: Prompt, completion: str, **judge: Any) -> Reward:
    """Returns `Judge`'s reward for prompts of any environment. judge: the arguments of `Rubric`."""
    return await Rubric(**judge).reward(prompt, completion)


def verdict(reply: str, names: Mapping[str, float]) -> str:
    """Returns the verdict in the body of a chat completion.

    Raises:
        JudgeError: the body is none, the judgement is cut off or refused, is no JSON object with a `verdict`, or has
            another one than those of `names`.
    """
    try:
        (choice,) = json.loads(reply)["choices"]
        ended, content = choice["finish_reason"], choice["message"]["content"]
    except (ValueError, TypeError, KeyError):
        raise JudgeError(f"the judge's reply is no chat completion of one choice: {_quoted(reply)}") from None
    if ended != "stop" or not isinstance(content, str):
        raise JudgeError(f"the judgement ended by {ended!r}, expected 'stop' and a text: {_quoted(str(content))}")
    try:
        found = json.loads(content)["verdict"]
    except (ValueError, TypeError, KeyError):
        raise JudgeError(f"the judgement is no JSON object with a verdict: {_quoted(content)}") from None
    if not isinstance(found, str) or found not in names:
        raise JudgeError(f"the verdict is {_quoted(json.dumps(found))}, expected one of {', '.join(names)}")
    return found


def _case(prompt: Prompt, completion: str) -> str:
    """Returns question, reference and answer as JSON: an answer cannot pretend to be another part of the case."""
    asked = [each.text for each in prompt.messages or () if each.role != "system"]
    case = {"question": "\n\n".join(asked) if prompt.text is None else prompt.text}
    if prompt.answer:
        case["reference"] = prompt.answer
    return json.dumps(case | {"answer": completion}, ensure_ascii=False, indent=1)


def _schema(names: list[str]) -> Json:
    properties = {"reason": {"type": "string"}, "verdict": {"type": "string", "enum": names}}
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def _quoted(text: str) -> str:
    return repr(one_line(text)[:_MOST_QUOTED])
