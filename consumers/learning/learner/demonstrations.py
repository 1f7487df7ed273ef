"""Demonstrations for a warm start: token sequences of which the assistant's turns are trained on.

The context of a turn is what the engine would read: the messages before it, rendered by the model's chat template with
the generation prompt. The turn is what the engine would have to sample: the ids that follow when it is rendered too, up
to the one that ends a completion. What templates add after that one is context of the next turn.

The ids of the context must be the first ones of both renderings, as prime-rl demands (TRL marks turns in templates of
its own, verl encodes each message alone). A later turn continues the sequence if its context does; where a template
changes earlier turns, as by leaving out their reasoning, it begins another one, as an agent's rollout does.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from penstock.schemas.config import ConfigError, RunConfig
from penstock.schemas.policy import UNKNOWN_VERSION
from penstock.schemas.rollout import Segment, VersionSpan, one_line, pack_ids

Demonstration = tuple[Segment, ...]
"""The sequences of one line; its turns are their loss masks, without behavior logprobs."""

_FIELD = "warm_start.demonstrations"
_ROLES = {"developer": "system"}
_EXPECTED = "`messages`, or the texts `prompt` and `completion`"
_GENERATION = "generation_config.json"


def read_demonstrations(config: RunConfig, longest: float) -> list[Demonstration]:
    """Reads and tokenizes `warm_start.demonstrations`. Imports transformers. longest: the most tokens of a sequence.

    Raises:
        ConfigError: no such file, no line in it, or a line that cannot be a demonstration; the message names the line.
    """
    assert config.warm_start is not None
    path = config.warm_start.demonstrations
    try:
        lines = Path(path).read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"{_FIELD} = {path!r}: {error.strerror}; expected a file of JSON lines") from None
    encode = _Encoder(config)
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            demonstration = encode(line)
            if (num_tokens := max(segment.num_tokens for segment in demonstration)) > longest:
                raise ValueError(f"{num_tokens:,} tokens; expected at most {longest:,}, the engine's longest sequence")
        except ValueError as error:
            raise ConfigError(f"{_FIELD} = {path!r}: line {number}: {one_line(str(error))}") from None
        found.append(demonstration)
    if not found:
        raise ConfigError(f"{_FIELD} = {path!r}: it is empty; expected JSON lines with `messages`")
    return found


class _Encoder:
    """Turns lines into token sequences by the model's tokenizer and chat template. Its errors are ValueErrors."""

    def __init__(self, config: RunConfig) -> None:
        from transformers import AutoTokenizer  # takes seconds

        path = config.model.path
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(path, local_files_only=True)
        except (OSError, ValueError) as error:
            said = one_line(str(error))
            raise ConfigError(f"model.path = {path!r}: no tokenizer that transformers can load: {said}") from None
        self._variables = config.model.chat_template_kwargs
        self._ends = {*_end_ids(Path(path)), *config.sampling.stop_token_ids}
        if self._tokenizer.eos_token_id is not None:
            self._ends.add(self._tokenizer.eos_token_id)

    def __call__(self, line: bytes) -> Demonstration:
        try:
            document = msgspec.json.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"not JSON: {error}") from None
        if not isinstance(document, dict):
            raise ValueError(f"{one_line(repr(document))}; expected an object with {_EXPECTED}")
        turns = self._of_messages(document) if "messages" in document else self._of_text(document)
        return tuple(_segments(turns))

    def _of_text(self, document: dict[str, Any]) -> Iterator[tuple[list[int], list[int]]]:
        prompt, completion = document.get("prompt"), document.get("completion")
        if not (isinstance(prompt, str) and isinstance(completion, str) and prompt and completion):
            raise ValueError(f"{one_line(repr(document))}; expected {_EXPECTED}")
        context = self._tokenizer.encode(prompt, add_special_tokens=False)
        whole = self._tokenizer.encode(prompt + completion, add_special_tokens=False)
        _check_prefix(context, whole, "completion", "of the prompt alone")
        if self._tokenizer.eos_token_id is None:
            raise ValueError("the model's tokenizer has no end of sequence to end a completion; expected `messages`")
        yield context, [*whole, self._tokenizer.eos_token_id]

    def _of_messages(self, document: dict[str, Any]) -> Iterator[tuple[list[int], list[int]]]:
        """Yields context and whole sequence of each of the assistant's turns."""
        messages, tools = _messages(document["messages"]), document.get("tools")
        turns = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
        if not turns:
            raise ValueError("no message of the role 'assistant'; expected one or more, which are trained on")
        for place in turns:
            context = self._render(messages[:place], tools, add_generation_prompt=True)
            whole = self._render(messages[: place + 1], tools)
            _check_prefix(context, whole, f"messages[{place}]", "of the messages before it with the generation prompt")
            if not self._ends & set(whole[len(context) :]):
                # In some families the mark of the next speaker ends a turn.
                following = messages[place + 1 : place + 2] or [{"role": "user", "content": "."}]
                ended = self._render([*messages[: place + 1], *following], tools)
                whole = ended if ended[: len(whole)] == whole else whole
            end = next((n for n in range(len(context), len(whole)) if whole[n] in self._ends), None)
            if end is None:
                raise ValueError(
                    f"messages[{place}]: the model's chat template renders no token after this turn at which a "
                    f"completion ends (ids {sorted(self._ends)}); expected one, or its id in sampling.stop_token_ids"
                )
            yield context, whole[: end + 1]

    def _render(self, messages: list[dict[str, Any]], tools: Any, **options: Any) -> list[int]:
        try:
            return self._tokenizer.apply_chat_template(
                messages, tools=tools, return_dict=False, **self._variables, **options
            )
        except Exception as error:  # the template is the model's own and may raise anything
            roles = ", ".join(message["role"] for message in messages)
            raise ValueError(
                f"the model's chat template refuses messages of the roles {roles or 'none'}: "
                f"{type(error).__name__}: {error}"
            ) from None


def _end_ids(model: Path) -> set[int]:
    """Returns the ids that end a completion by the model's generation settings, which the engine follows."""
    try:
        found = msgspec.json.decode((model / _GENERATION).read_bytes()).get("eos_token_id")
    except FileNotFoundError:
        return set()
    return {found} if isinstance(found, int) else set(found or ())


def _messages(messages: Any) -> list[dict[str, Any]]:
    """Checks messages; returns them as templates take them, and as the endpoint gives them to these: the arguments of
    calls decoded, the role `developer` as `system`."""
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"messages = {messages!r}: expected a list of messages")
    for place, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError(f"messages[{place}] = {message!r}: expected an object with `role` and `content`")
        content = message.get("content")
        if not (isinstance(content, str) or (content is None and message.get("tool_calls"))):
            raise ValueError(f"messages[{place}].content = {content!r}: expected a text")
    return [{**each, **_calls(each), "role": _ROLES.get(each["role"], each["role"])} for each in messages]


def _calls(message: dict[str, Any]) -> dict[str, Any]:
    if not message.get("tool_calls"):
        return {}
    calls = []
    for call in message["tool_calls"]:
        function = call.get("function", call)
        if isinstance(arguments := function.get("arguments"), str):
            function = {**function, "arguments": msgspec.json.decode(arguments)}
        calls.append({**call, "function": function} if "function" in call else function)
    return {"content": message.get("content") or "", "tool_calls": calls}


def _check_prefix(context: list[int], whole: list[int], what: str, of: str) -> None:
    if not context or whole[: len(context)] != context or len(whole) == len(context):
        same = next((n for n, pair in enumerate(zip(context, whole, strict=False)) if pair[0] != pair[1]), len(whole))
        raise ValueError(
            f"{what}: its rendering does not continue that {of}: of {len(context)} ids the first {same} are equal; "
            "expected a chat template whose renderings do, and a turn that begins with a token of its own"
        )


def _segments(turns: Iterator[tuple[list[int], list[int]]]) -> Iterator[Segment]:
    """Joins turns, each with its context, into sequences."""
    ids: list[int] = []
    runs: list[tuple[int, int]] = []
    for context, whole in turns:
        if runs and context[: len(ids)] != ids:
            yield _segment(ids, runs)
            runs = []
        ids = whole
        runs.append((len(context), len(whole)))
    yield _segment(ids, runs)


def _segment(ids: Sequence[int], runs: Sequence[tuple[int, int]]) -> Segment:
    num_trained = sum(end - start for start, end in runs)
    return Segment(
        token_ids=pack_ids(ids),
        behavior_logprobs=bytes(4 * num_trained),
        loss_mask=tuple(runs),
        version_spans=tuple(VersionSpan(UNKNOWN_VERSION, start, end) for start, end in runs),
    )
