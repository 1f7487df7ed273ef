"""What a model's chat template leaves out of what it is given: variables that it never reads, and messages and tools
that it renders nothing of.

A template skips such things without an error, and to search the rendering for them proves nothing: "7" stands in many
prompts, and templates trim and escape. So what must be shown is rendered once more with marks in it. A mark that the
rendering lacks stands for something that the model would not know of, and so does a change (of a type, of whose result
it is) that changes no rendering. Reasoning may be left out, as most templates do
in earlier turns, and so may an answer's text beside its calls, or the calls beside it.
"""

import json
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

Json = dict[str, Any]
Render = Callable[[list[Json], list[Json] | None], str]
"""Renders messages and tools with the other arguments of a request."""

KINDS_KEPT = 1024
_VALUES = frozenset({"default", "examples"})
"""Keys of a schema under which no schemas stand, and which templates may leave out."""
_CHOICES = ("enum", "const")


class _Change(NamedTuple):
    """Another value for a key of schemas that stand from `first` to `last` deep; parameters stand at 1."""

    key: str
    value: Any
    first: int
    last: float


_CHANGES = (
    _Change("type", "other", 1, 1),
    _Change("type", "other", 2, math.inf),
    _Change("required", [], 0, 0),
    _Change("required", [], 1, math.inf),
)
"""For what templates render in words of their own."""
_RARE = ("function_call", "refusal", "audio")
"""Fields of messages of which hardly any template knows."""
_IN_MACROS = ("caller", "varargs", "kwargs", "self", "super")
_MARK = re.compile(r"penstockmark(\d+)end", re.IGNORECASE)


def read_variables(chat_template: str | Mapping[str, str]) -> frozenset[str]:
    """Returns the variables that a chat template takes from its caller; of several templates, those of any.

    Raises:
        jinja2.TemplateError: it cannot be parsed.
    """
    if isinstance(chat_template, str):
        return _read_variables(chat_template)
    return frozenset().union(*map(_read_variables, chat_template.values()))


@lru_cache(16)
def _read_variables(chat_template: str) -> frozenset[str]:
    # Its import takes seconds. The parser is transformers' own, since it knows its tags.
    from transformers.utils.chat_template_utils import _compile_jinja_template

    environment = _compile_jinja_template(chat_template).environment
    body = environment.parse(chat_template).body
    return frozenset(_reads(body, _IN_MACROS)) - environment.globals.keys()


def _reads(parts: Iterable[Any], bound: Collection[str]) -> Iterator[str]:
    """Yields the names that nodes of Jinja read where the template itself has not set them. bound: those it has set.

    jinja2.meta.find_undeclared_variables would also name those that are set in a branch and read there.
    """
    known = set(bound)
    for part in parts:
        kind = type(part).__name__
        if kind == "Name" and part.ctx == "load" and part.name not in known:
            yield part.name
        elif kind == "If":
            yield from _reads([part.test], known)
            for branch in (part.body, part.elif_, part.else_):
                yield from _reads(branch, known)
            if part.else_ and not part.elif_:
                known |= _sets(part.body) & _sets(part.else_)
        elif kind == "For":
            inside = known | _targets(part.target) | {"loop"}
            yield from _reads([part.iter, *part.else_], known)
            yield from _reads([*([part.test] if part.test else []), *part.body], inside)
        elif kind in ("Macro", "CallBlock"):
            known |= {part.name} if kind == "Macro" else set()
            yield from _reads([*([part.call] if kind == "CallBlock" else []), *part.defaults], known)
            yield from _reads(part.body, known.union(*map(_targets, part.args)))
        elif kind == "With":
            yield from _reads(part.values, known)
            yield from _reads(part.body, known.union(*map(_targets, part.targets)))
        else:
            yield from _reads(part.iter_child_nodes(exclude=["target"]), known)
            known |= _sets([part])


def _sets(parts: Iterable[Any]) -> set[str]:
    assigned = [part.target for part in parts if type(part).__name__ in ("Assign", "AssignBlock")]
    return set().union(*map(_targets, assigned))


def _targets(target: Any) -> set[str]:
    """Returns the names that a target of an assignment sets."""
    return set().union(*map(_targets, target.items)) if hasattr(target, "items") else {getattr(target, "name", "")}


class Marks:
    """Marks, each of which stands for a field that a rendering should show."""

    def __init__(self) -> None:
        self._fields: list[str] = []

    def mark(self, field: str) -> str:
        """Returns a new mark: a word that no template takes apart."""
        self._fields.append(field)
        return f"penstockmark{len(self._fields) - 1}end"

    def missing(self, text: str) -> list[str]:
        """Returns the fields of the marks that `text` lacks, without repetition."""
        shown = {int(match[1]) for match in _MARK.finditer(text)}
        return list(dict.fromkeys(field for n, field in enumerate(self._fields) if n not in shown))


class LeftOut:
    """Finds what a chat template leaves out. Any number of threads may use it at once.

    What was seen to be rendered is remembered: a list of tools, and each kind of message (by its role, its place and
    its neighbor). Then a message of that kind needs no further rendering if its text stands in the prompt.
    """

    def __init__(self) -> None:
        self._rendered: set[Any] = set()

    def messages(
        self, render: Render, messages: list[Json], tools: list[Json] | None, text: str, at: Sequence[int], context: str
    ) -> list[str]:
        """Returns the fields of messages that their rendering `text` leaves out.

        Args:
            messages: as templates take them, with text as content, or parts if there are images.
            at: the indices of those to look at.
            context: identifies the other arguments of the rendering.
        """
        rare = [f"messages[{n}].{name}" for n in at for name in _RARE if _is_unshown(messages[n].get(name), text)]
        ordered = _ordered(messages)
        moved = [n for n in at if ordered[n] is not messages[n]]
        if moved and _renders_to(text, render, ordered, tools):
            rare += [f"messages[{n}].tool_call_id" for n in moved]
        kinds = {n: (*_kind(messages, n), tools is not None, context) for n in at if _says_anything(messages[n])}
        unshown = {n for n in kinds if not _stands_in(messages[n], text)}
        doubtful = {n for n in kinds if n in unshown or kinds[n] not in self._rendered}
        if not doubtful:
            return rare
        marks = Marks()
        marked = [_marked(message, n, marks) if n in doubtful else message for n, message in enumerate(messages)]
        try:
            missing = marks.missing(render(marked, tools))
        except Exception:  # the template is the model's own, and may check a text that marks change
            return rare + [_field(messages[n], n) for n in sorted(unshown)]
        if not missing:
            self._remember(*(kinds[n] for n in doubtful))
        return rare + missing

    def tools(self, render: Render, messages: list[Json], tools: list[Json], text: str, context: str) -> list[str]:
        """Returns the fields of tools that their rendering `text` leaves out: names, descriptions and parameters (their
        names, descriptions and choices; types and `required` if all of a level are left out). Arguments as for
        `messages`."""
        kind = hash(json.dumps(tools)), context
        unshown = [f"tools has {name!r}" for tool in tools if (name := tool["function"]["name"]) not in text]
        if kind in self._rendered and not unshown:
            return []
        marks = Marks()
        try:
            missing = marks.missing(render(messages, [_marked_tool(tool, n, marks) for n, tool in enumerate(tools)]))
            missing = missing or unshown or _unread(render, messages, tools, text)
        except Exception:  # as above; or the parameters are too deep
            missing = unshown
        if not missing:
            self._remember(kind)
        return missing

    def _remember(self, *kinds: Any) -> None:
        if len(self._rendered) > KINDS_KEPT:  # clients may invent any number of roles
            self._rendered.clear()
        self._rendered.update(kinds)


def _kind(messages: list[Json], n: int) -> tuple[Any, ...]:
    before = messages[n - 1] if n else {}
    calls = tuple("tool_calls" in message for message in (messages[n], before))
    has_parts = isinstance(messages[n]["content"], list)
    return messages[n]["role"], before.get("role"), calls, n + 1 == len(messages), _is_named(messages[n]), has_parts


def _field(message: Json, n: int) -> str:
    return f"messages[{n}].content of the role {message['role']!r}"


def _is_unshown(value: Any, text: str) -> bool:
    said = value.get("name") or value.get("id") if isinstance(value, dict) else value
    return not (isinstance(said or "", str) and (said or "") in text)


def _ordered(messages: list[Json]) -> list[Json]:
    """Returns the messages with the results of tools assigned to the calls in their order."""
    ordered, calls = [], list[Any]()
    for message in messages:
        if message["role"] != "tool":
            known = calls = [call.get("id") for call in message.get("tool_calls") or ()]
        elif calls and message.get("tool_call_id") in known:
            if message["tool_call_id"] != calls[0]:
                message = message | {"tool_call_id": calls[0]}
            calls = calls[1:]
        ordered.append(message)
    return ordered


def _renders_to(text: str, render: Render, messages: list[Json], tools: list[Json] | None) -> bool:
    try:
        return render(messages, tools) == text
    except Exception:  # the template is the model's own: it reads what it refuses
        return False


def _is_named(message: Json) -> bool:
    """Returns whether a message says who speaks; that of a tool stands in its call."""
    return message["role"] != "tool" and isinstance(message.get("name"), str) and message["name"] != ""


def _says_anything(message: Json) -> bool:
    return bool(_said(message) or message.get("tool_calls") or _is_named(message))


def _stands_in(message: Json, text: str) -> bool:
    """Returns whether a text contains that of a message, as it is or as JSON writes it."""
    said = _said(message)
    if calls := message.get("tool_calls"):
        return all(call["function"]["name"] in text for call in calls)
    if isinstance(message["content"], list):
        return all(part.get("text", "").strip() in text for part in message["content"])
    return said in text or any(json.dumps(said, ensure_ascii=is_ascii)[1:-1] in text for is_ascii in (False, True))


def _said(message: Json) -> str:
    """Returns the text of a message, without images."""
    content = message["content"]
    return (content if isinstance(content, str) else "".join(part.get("text", "") for part in content)).strip()


def _marked(message: Json, n: int, marks: Marks) -> Json:
    if _is_named(message):
        message = message | {"name": message["name"] + marks.mark(f"messages[{n}].name")}
    if calls := message.get("tool_calls"):
        field = f"messages[{n}].tool_calls"
        if not _said(message) or isinstance(message["content"], list):
            return message | {"tool_calls": [_marked_call(call, marks.mark(field)) for call in calls]}
        mark = marks.mark(field)  # many templates render either the text or the calls
        return message | {
            "content": message["content"] + mark,
            "tool_calls": [_marked_call(call, mark) for call in calls],
        }
    field = _field(message, n)
    if isinstance(message["content"], list):
        parts = [
            part | {"text": part["text"] + marks.mark(field)} if "text" in part else part for part in message["content"]
        ]
        return message | {"content": parts}
    # Text before an answer's may be its reasoning.
    before = "" if message["role"] == "assistant" else marks.mark(field)
    return message | {"content": before + message["content"] + marks.mark(field)}


def _marked_call(call: Json, mark: str) -> Json:
    function = call["function"]
    return call | {"function": function | {"arguments": function["arguments"] | {mark: mark}}}


def _marked_tool(tool: Json, n: int, marks: Marks) -> Json:
    function, where = tool["function"], f"tools[{n}].function"
    marked = function | {"name": function["name"] + marks.mark(f"tools has {function['name']!r}")}
    if function.get("description"):
        marked["description"] = function["description"] + marks.mark(f"{where}.description")
    if function.get("parameters"):
        marked["parameters"] = _marked_schema(function["parameters"], f"{where}.parameters", marks)
    return tool | {"function": marked}


def _marked_schema(schema: Json, where: str, marks: Marks) -> Json:
    marked = dict(schema)
    for key, value in schema.items():
        field = f"{where}.{key}"
        if key == "properties" and isinstance(value, dict):
            marked[key] = {
                name + marks.mark(f"{field}.{name}"): _marked_value(part, f"{field}.{name}", marks)
                for name, part in value.items()
            }
        elif key == "description" and isinstance(value, str) and value.strip():
            marked[key] = value + marks.mark(field)
        elif key in _CHOICES:
            choices = [f"{one}{marks.mark(field)}" for one in (value if isinstance(value, list) else [value])]
            marked[key] = choices if isinstance(value, list) else choices[0]
        elif key not in _VALUES:
            marked[key] = _marked_value(value, field, marks)
    return marked


def _marked_value(value: Any, where: str, marks: Marks) -> Any:
    if isinstance(value, dict):
        return _marked_schema(value, where, marks)
    if isinstance(value, list):
        return [_marked_value(one, where, marks) for one in value]
    return value


def _unread(render: Render, messages: list[Json], tools: list[Json], text: str) -> list[str]:
    """Returns fields of tools whose change changes nothing in the rendering."""
    for change in _CHANGES:
        fields: list[str] = []
        changed = []
        for n, tool in enumerate(tools):
            parameters = tool["function"].get("parameters")
            parameters = _changed(parameters, change, f"tools[{n}].function.parameters", 0, fields)
            changed.append(tool | {"function": tool["function"] | {"parameters": parameters}})
        if fields and _renders_to(text, render, messages, changed):
            return fields
    return []


def _changed(schema: Any, change: _Change, where: str, depth: int, fields: list[str]) -> Any:
    """Returns a schema with another value for one key; adds the places to `fields`."""
    if isinstance(schema, list):
        return [_changed(one, change, where, depth, fields) for one in schema]
    if not isinstance(schema, dict):
        return schema
    result = dict(schema)
    for key, value in schema.items():
        field = f"{where}.{key}"
        if key == "properties" and isinstance(value, dict):
            result[key] = {
                name: _changed(part, change, f"{field}.{name}", depth + 1, fields) for name, part in value.items()
            }
        elif key == change.key and value and not isinstance(value, dict):
            if change.first <= depth <= change.last:
                fields.append(field)
                result[key] = change.value
        elif key not in (*_VALUES, *_CHOICES):
            result[key] = _changed(value, change, field, depth + 1, fields)
    return result
