"""Requests for chat completions, checked field by field.

Tokens must be sampled from the distribution that the run records, otherwise the trainer would mistake the logprobs of
one policy for those of another. So a request may shorten an answer (a limit, stop strings), but not change how it is
sampled.
"""

from collections.abc import Callable, Mapping
from reprlib import Repr
from typing import Any, NamedTuple

from penstock.producers.endpoint.chat.errors import bad_request
from penstock.producers.endpoint.chat.sizes import check_num_parts
from penstock.schemas.config import RESERVED_BY_TEMPLATES
from penstock.schemas.images import ImageError, digest_of
from penstock.schemas.process.image_files import decoded
from penstock.schemas.rollout import SamplingSettings, one_line

Json = dict[str, Any]

_SHORT = Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 200
_SHORT.maxlist = _SHORT.maxdict = 16
_IGNORED = frozenset({
    "model", "user", "metadata", "client_metadata", "store", "seed", "service_tier", "safety_identifier",
    "prompt_cache_key", "prompt_cache_retention", "verbosity", "include_reasoning", "skip_special_tokens",
    "spaces_between_special_tokens", "priority", "request_id",
})  # fmt: skip
"""Fields that do not affect the tokens' distribution and are ignored."""
IMAGES = ("image", "image_url", "input_image")
"""The types of parts that are images: Anthropic's, and those of OpenAI's two APIs."""
_LIMITS = ("max_completion_tokens", "max_output_tokens", "max_tokens")
"""The names under which clients limit an answer; the smallest counts."""
MOST_STOPS, STOP_CHARACTERS = 64, 1024
"""The most stop strings of a request, and characters of each: every sampled token is compared with all of them."""
MOST_TOOLS = 1024
"""The most tools of a request, all of which are read again for each part of a streamed answer."""


_SAID, _NESTED, _DEPTH = ("messages", "input", "system"), ("content", "output"), 3
"""The fields of requests that hold messages or parts, those that hold parts within, and how deep: the parts of a tool's
result in a message."""


class ImageIn(dict[str, str]):
    """A part of a message that is an image whose file is known: `{"type": "image", "image": digest}`."""


class ChatRequest(NamedTuple):
    """A valid request.

    max_tokens: the most tokens of the answer; None without a limit.
    stop: texts that end the answer.
    token_ids: whether the response carries vLLM's own fields of token ids.
    tokens_as_ids: whether logprobs name tokens by their ids, as vLLM does on demand.
    ignored: the fields without effect from which the client may expect one.
    ignores: whether such a request is answered; False refuses it.
    num_bytes: its length as JSON.
    images: the image files in the messages, by digest; an `ImageIn` is the place of one.
    """

    messages: list[Json]
    tools: list[Json]
    use_tools: bool
    parallel_tool_calls: bool
    max_tokens: int | None
    stream: bool
    include_usage: bool
    logprobs: bool
    template_arguments: Json
    stop: tuple[str, ...]
    token_ids: bool
    tokens_as_ids: bool
    ignored: tuple[str, ...]
    ignores: bool
    num_bytes: int
    images: Mapping[str, bytes] = {}


def parse_chat(
    document: Json,
    sampling: SamplingSettings,
    *,
    ignore: bool = False,
    num_bytes: int = 0,
    images: Mapping[str, bytes] | None = None,
) -> ChatRequest:
    """Parses a request for a chat completion, and checks it against the run's sampling.

    ignore: answer a request for other sampling as if it had not asked for it (`endpoint.unsupported`).
    num_bytes: its length.
    images: the files of its images, see `without_files`.

    Raises:
        ApiError: 400, names the field, its value and what was expected.
    """
    left = {name: value for name, value in document.items() if name not in _IGNORED}
    take = left.pop
    messages, tools = objects(take("messages", None), "messages", at_least=1), objects(take("tools", None), "tools")
    for n, message in enumerate(messages):
        check_message(message, f"messages[{n}]")
    functions, ignored_tools = _functions(tools, ignore)
    limits = {name: take(name, None) for name in _LIMITS}
    stream_options = checked_object(take("stream_options", None), "stream_options", "an object")
    own_variables = "an object of the template's own variables"
    template_arguments = checked_object(take("chat_template_kwargs", None), "chat_template_kwargs", own_variables)
    if reserved := RESERVED_BY_TEMPLATES & set(template_arguments):
        raise bad_request(
            f"chat_template_kwargs has {min(reserved)!r}, expected {own_variables}", "chat_template_kwargs"
        )
    parallel_tool_calls = take("parallel_tool_calls", None)
    return ChatRequest(
        messages=list(messages),  # an environment may change its own list while the answer is sampled
        tools=functions,
        use_tools=bool(functions) and left.get("tool_choice") != "none",
        parallel_tool_calls=parallel_tool_calls is None or _flag(parallel_tool_calls, "parallel_tool_calls"),
        max_tokens=_limit(limits),
        stream=_flag(take("stream", None), "stream"),
        include_usage=_flag(stream_options.get("include_usage"), "stream_options.include_usage"),
        logprobs=_flag(take("logprobs", None), "logprobs"),
        template_arguments=template_arguments,
        stop=_stop(take("stop", None)),
        token_ids=_flag(take("return_token_ids", None), "return_token_ids"),
        tokens_as_ids=_flag(take("return_tokens_as_token_ids", None), "return_tokens_as_token_ids"),
        ignored=(*ignored_tools, *_check_sampling(left, sampling, ignore)),
        ignores=ignore,
        num_bytes=num_bytes,
        images=images or {},
    )


def without_files(document: Json, image_of: Callable[[Any], bytes]) -> tuple[Json, dict[str, bytes]]:
    """Returns a request of any of the APIs with an `ImageIn` for each image, and the image files by digest.

    image_of: returns the image file that a part of a message names.

    Raises:
        ApiError: 400, names the image and what was expected.
    """
    files: dict[str, bytes] = {}

    def taken(value: Any, where: str, depth: int) -> Any:
        if isinstance(value, list):
            return [taken(each, f"{where}[{n}]", depth) for n, each in enumerate(value)]
        if not isinstance(value, dict) or not depth:
            return value
        if value.get("type") not in IMAGES:
            inner = {name: taken(value[name], f"{where}.{name}", depth - 1) for name in _NESTED if name in value}
            return value | inner
        try:
            decoded(data := image_of(_source(value)))
        except ImageError as error:
            raise bad_request(f"{where}: {error}", where.partition("[")[0], "invalid_image") from error
        files[digest_of(data)] = data
        return ImageIn(type="image", image=digest_of(data))

    found = {name: taken(document[name], name, _DEPTH) for name in _SAID if isinstance(document.get(name), list)}
    return document | found, files


def _source(part: Json) -> Any:
    """Returns what names an image: in OpenAI's APIs a URL, in Anthropic's Base64."""
    source = part.get("image_url", part.get("source", part.get("image")))
    if isinstance(source, dict) and source.get("type") == "base64":
        return f"data:{source.get('media_type')};base64,{source.get('data')}"
    return source.get("url", source) if isinstance(source, dict) else source


def _functions(tools: list[Json], ignore: bool) -> tuple[list[Json], list[str]]:
    """Returns the tools that are functions, and what names the others; those are ignored or refused."""
    if len(tools) > MOST_TOOLS:
        raise bad_request(f"tools has {len(tools)} tools, expected at most {MOST_TOOLS}", "tools")
    functions, others, places = [], [], dict[str, int]()
    for n, tool in enumerate(tools):
        if ignore and tool.get("type", "function") != "function":
            others.append(f"tools: {tool['type']}")
        else:
            _check_tool(tool, f"tools[{n}]")
            if (first := places.setdefault(name := tool["function"]["name"], n)) != n:
                raise bad_request(
                    f"tools[{first}] and tools[{n}] are both {shown(name)}, expected different names", "tools"
                )
            functions.append(tool)
    return functions, others


def _check_sampling(left: Json, sampling: SamplingSettings, ignore: bool) -> tuple[str, ...]:
    """Checks that every remaining field has the value that the run samples with; returns those that have another one
    and are to be ignored."""
    ignored = []
    fixed: dict[str, tuple[Callable[[Any], bool], str]] = {
        "n": (_equals(1), "1: siblings are rollouts of their own"),
        "temperature": (_equals(sampling.temperature), f"{sampling.temperature:g}, as the run samples"),
        "top_p": (_equals(sampling.top_p), f"{sampling.top_p:g}, as the run samples"),
        "top_k": (_keeps_as_many(sampling.top_k), f"{sampling.top_k}, as the run samples"),
        "min_p": (_equals(0), "0"),
        "min_tokens": (_equals(0), "0"),
        "presence_penalty": (_equals(0), "0"),
        "frequency_penalty": (_equals(0), "0"),
        "repetition_penalty": (_equals(1), "1"),
        "top_logprobs": (_equals(0), "0: the logprob of the sampled token is all there is"),
        "stop_token_ids": (_same_ids(sampling.stop_token_ids), f"{list(sampling.stop_token_ids)}, as the run samples"),
        "tool_choice": (
            lambda value: value in ("auto", "none"),
            "'auto' or 'none': to force a call constrains sampling",
        ),
        "response_format": (lambda value: value == {"type": "text"}, "{'type': 'text'}"),
    }
    for name, value in left.items():
        holds, expected = fixed.get(name, (None, ""))
        if value is None or (holds is None and (value is False or (isinstance(value, list | dict) and not value))):
            continue
        if holds is not None and holds(value):
            continue
        if ignore and name != "n":  # a client that asks for several answers reads several
            ignored.append(name)
        elif holds is None:
            raise bad_request(
                f"{name} is {shown(value)}: not supported; expected it to be left out", name, "unsupported_parameter"
            )
        else:
            raise bad_request(f"{name} is {shown(value)}, expected {expected}", name, "unsupported_value")
    return tuple(ignored)


def check_message(message: Json, where: str) -> None:
    """Raises ApiError 400, named after `where`, for a message that no template could render."""
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise bad_request(f"{where}.role is {shown(role)}, expected a role of the chat template", where)
    content = message.get("content")
    if isinstance(content, list):
        for n, part in enumerate(content):
            if isinstance(part, ImageIn):
                continue
            if not (isinstance(part, dict) and isinstance(part.get("text", part.get("refusal")), str)):
                kind = part.get("type") if isinstance(part, dict) else None
                if kind in IMAGES:
                    raise bad_request(
                        f"{where}.content[{n}] is an image ({kind!r}), which the model is not given: it is served as a "
                        "model of text; expected parts of text",
                        where,
                        "unsupported_image",
                    )
                raise bad_request(f"{where}.content holds {shown(part)}, expected parts of text", where)
    elif content is not None and not isinstance(content, str):
        raise bad_request(f"{where}.content is {kind_of(content)}, expected text", where)
    for name in ("reasoning", "reasoning_content", "name", "tool_call_id"):
        if not isinstance(value := message.get(name), str | None):
            raise bad_request(f"{where}.{name} is {shown(value)}, expected text", where)
    for call in objects(message.get("tool_calls"), f"{where}.tool_calls"):
        function = call.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise bad_request(f"{where}.tool_calls holds {shown(call)}, expected calls of functions", where)
        if isinstance(arguments := function.get("arguments"), str):  # JSON once more
            check_num_parts(arguments.encode("utf-8", "surrogatepass"), f"{where}.tool_calls: arguments", where)


def _check_tool(tool: Json, where: str) -> None:
    function = tool.get("function")
    if tool.get("type", "function") != "function" or not isinstance(function, dict):
        raise bad_request(f"{where} is {shown(tool)}, expected a function", where)
    for name, kind, optional in (("name", str, False), ("description", str, True), ("parameters", dict, True)):
        value = function.get(name)
        if not (isinstance(value, kind) or (optional and value is None)):
            expected = "an object" if kind is dict else "text"
            raise bad_request(f"{where}.function.{name} is {shown(value)}, expected {expected}", where)


def objects(value: Any, name: str, at_least: int = 0) -> list[Json]:
    """Returns a list of at least so many JSON objects; raises ApiError 400 for anything else. None is an empty one."""
    value = [] if value is None and not at_least else value
    if not isinstance(value, list) or len(value) < at_least or not all(isinstance(item, dict) for item in value):
        raise bad_request(f"{name} is {shown(value)}, expected a list of objects", name)
    return value


def _limit(limits: Mapping[str, Any]) -> int | None:
    given = {name: value for name, value in limits.items() if value is not None}
    for name, value in given.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise bad_request(f"{name} is {shown(value)}, expected 1 or more", name)
    return min(given.values(), default=None)


def _stop(value: Any) -> tuple[str, ...]:
    texts = value if isinstance(value, list) else [] if value is None or value == "" else [value]
    if not all(isinstance(text, str) and text for text in texts):
        raise bad_request(f"stop is {shown(value)}, expected a text or a list of texts, none of them empty", "stop")
    longest = max(map(len, texts), default=0)
    if len(texts) > MOST_STOPS or longest > STOP_CHARACTERS:
        raise bad_request(
            f"stop has {len(texts)} texts of up to {longest} characters, expected at most {MOST_STOPS} of up to "
            f"{STOP_CHARACTERS}",
            "stop",
        )
    return tuple(texts)


def checked_object(value: Any, name: str, expected: str) -> Json:
    """Returns an object, an empty one for None; raises ApiError 400 for anything else."""
    if value is not None and not isinstance(value, dict):
        raise bad_request(f"{name} is {shown(value)}, expected {expected}", name)
    return value or {}


def _same_ids(expected: tuple[int, ...]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and sorted(map(repr, value)) == sorted(map(repr, expected))


def _flag(value: Any, name: str) -> bool:
    if value is not None and not isinstance(value, bool):
        raise bad_request(f"{name} is {shown(value)}, expected true or false", name)
    return bool(value)


def _keeps_as_many(top_k: int) -> Callable[[Any], bool]:
    every = (0, -1)
    same = every if top_k in every else (top_k,)
    return lambda value: any(_equals(number)(value) for number in same)


def _equals(expected: float) -> Callable[[Any], bool]:
    def holds(value: Any) -> bool:
        return isinstance(value, int | float) and not isinstance(value, bool) and value == expected

    return holds


def kind_of(value: Any) -> str:
    """Returns the kind of a JSON value, for an error's message."""
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


def shown(value: Any) -> str:
    """Returns a value for an error's message: short, on one line, whatever its length."""
    return one_line(_SHORT.repr(value)[:200])
