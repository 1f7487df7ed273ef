"""Rewards: the environment's or the run file's own function, or several of them with weights.

A function's signature, read once, decides what it is given: all siblings if its second parameter is called
`completions`, and what is known of the rollout apart from its text if it has a parameter `facts`.
"""

import contextlib
import functools
import inspect
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.producers.interfaces import Environment, RolloutFacts
from penstock.schemas.config import OWN_REWARD, ConfigError, Plug, RewardConfig, RunConfig
from penstock.schemas.process.plugins import definition, ends_caller, is_whole, place_in, resolve, shown_value
from penstock.schemas.prompt import Prompt, Reward
from penstock.schemas.rollout import MAX_REWARD, check_part_names, shown_error

RewardFunction = Callable[..., Any]

SCORING = "while scoring"
REWARD_THREADS = 16
"""Concurrent calls of a reward that is no coroutine. Its owner may set another number: 1 if it is not thread-safe."""


class RewardError(ValueError):
    """A reward function raised (`__cause__`), or returned something that is no finite number."""


def explained(error: BaseException, tries: int = 1, kind: type[RewardError] = RewardError) -> RewardError:
    """Returns an error of this kind that names `error` and the number of tries; a RewardError as it is."""
    if isinstance(error, RewardError):
        return error
    tried = f" (tried {tries} times)" if tries > 1 else ""
    failure = kind(f"{shown_error(error)}{tried}")
    failure.__cause__ = error
    return failure


@dataclass(frozen=True, kw_only=True)
class RewardCall:
    """One call of a reward function, and the completions that it scores: one, or those of a group."""

    function: Callable[[], Any]
    completions: Sequence[str]
    is_of_group: bool

    def checked(self, found: Any) -> tuple[Reward, ...]:
        """Returns what the function returned as the reward of each completion.

        Raises:
            RewardError: see `checked`; or a group with another number of rewards than completions.
        """
        if not self.is_of_group:
            return (checked(found, _named(self.completions[0])),)
        _refuse_coroutine(found)
        wanted = len(self.completions)
        if not isinstance(found, Sequence) and not hasattr(found, "__array__"):
            raise RewardError(f"{repr(found)[:80]} for a group, expected a list of {wanted} rewards")
        if len(found) != wanted:
            raise RewardError(f"{len(found)} rewards for a group, expected {wanted}, one for each completion")
        return tuple(checked(one, _named(text)) for one, text in zip(found, self.completions, strict=True))

    def failure(self, error: BaseException, tries: int = 1) -> RewardError:
        """Returns the error of a group; the user's own is its cause, with a note that names the completion."""
        of = f"a group of {len(self.completions)}, the first: " if self.is_of_group else "the completion "
        with contextlib.suppress(Exception):  # an error of a frozen class takes no note
            # Several calls may raise one and the same error, of a request that they share.
            error.__notes__ = [note for note in getattr(error, "__notes__", ()) if not note.startswith(SCORING)]
            error.add_note(f"{SCORING} {of}{self.completions[0][:200]!r}")
        return explained(error, tries)


@dataclass(frozen=True, kw_only=True)
class RewardComponent:
    """A reward function, its arguments bound, and what it is given. One without a name is the only one."""

    function: RewardFunction
    takes_group: bool
    takes_facts: bool
    is_async: bool
    num_threads: int
    """Of a function that is no coroutine."""
    name: str = ""
    weight: float = 1.0

    def calls(
        self, prompt: Prompt, completions: Sequence[str], facts: Sequence[RolloutFacts] | None
    ) -> Iterator[RewardCall]:
        """Yields the calls that score a group. facts: of each completion; None only if they are not taken."""
        if self.takes_group:
            known = {"facts": list(facts or ())} if self.takes_facts else {}
            function = functools.partial(self.function, prompt, list(completions), **known)
            yield RewardCall(function=function, completions=completions, is_of_group=True)
            return
        for n, completion in enumerate(completions):
            about = {"facts": facts[n]} if self.takes_facts and facts is not None else {}
            function = functools.partial(self.function, prompt, completion, **about)
            yield RewardCall(function=function, completions=(completion,), is_of_group=False)


def component(
    function: RewardFunction,
    field: str = "reward",
    *,
    kwargs: Mapping[str, Any] | None = None,
    name: str = "",
    weight: float = 1.0,
) -> RewardComponent:
    """Makes a component of a function, whose signature says what it takes. field: of the run file, for messages.

    Raises:
        ConfigError: it cannot be called with a prompt and completions, or see `reward_threads`.
    """
    kwargs = kwargs or {}
    try:
        parameters = inspect.signature(function).parameters
        takes_facts = "facts" in parameters
        names = [each.name for each in parameters.values() if each.kind is not each.KEYWORD_ONLY]
        if names[:1] in (["prompts"], ["completions"]):  # it would bind, and fail at the first completion
            raise TypeError(f"parameters {names}: a function for TRL, which docs/coming-from.md#rewards carries over")
        inspect.signature(function).bind(None, None, **({"facts": None} if takes_facts else {}), **kwargs)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{field}: {error}; expected a function (prompt: Prompt, completion: str, **kwargs) -> float | Reward, "
            "which may take `facts: RolloutFacts`, or for all siblings at once (prompt, completions: list[str], "
            "**kwargs) -> list, which may take `facts: list[RolloutFacts]`"
        ) from None
    return RewardComponent(
        function=functools.partial(function, **kwargs),
        takes_group=names[1:2] == ["completions"],
        takes_facts=takes_facts,
        is_async=any(map(inspect.iscoroutinefunction, (function, type(function).__call__))),
        num_threads=reward_threads(function, field),
        name=name,
        weight=weight,
    )


def reward_components(config: RunConfig, environment: Environment, asked: str) -> tuple[RewardComponent, ...]:
    """Returns the functions that `[reward]` names; without one the environment's own. asked: the environment's field
    and path, for messages.

    Raises:
        ConfigError: one cannot be imported or does not fit; or limits for coroutines are set and none is a coroutine.
    """
    settings = config.reward
    if settings.components:
        found = tuple(
            _component_of(each, f"reward.components[{n}]", environment, asked, name=each.name, weight=each.weight)
            for n, each in enumerate(settings.components)
        )
    else:
        found = (_component_of(settings, "reward", environment, asked),)
    for name in ("concurrency", "timeout_s", "retries"):
        value = getattr(settings, name)
        if value != getattr(RewardConfig(), name) and not any(each.is_async for each in found):
            raise ConfigError(f"reward.{name} = {value}: it is for coroutines; expected an `async def` reward")
    return found


def _component_of(plug: Plug, field: str, environment: Environment, asked: str, **named: Any) -> RewardComponent:
    is_own = plug.path == OWN_REWARD
    function = environment.reward if is_own else resolve(plug, field)
    return component(function, asked if is_own else f"{field}.path = {plug.path!r}", kwargs=plug.kwargs, **named)


def reward_threads(function: RewardFunction, field: str) -> int:
    """Returns the attribute `reward_threads` of the environment or of the function itself, else `REWARD_THREADS`.
    field: of the run file, for messages.

    Raises:
        ConfigError: it is not a whole number from 1.
    """
    function = function.func if isinstance(function, functools.partial) else function
    owner = getattr(function, "__self__", function)
    try:
        threads = getattr(owner, "reward_threads", REWARD_THREADS)
    except BaseException as error:  # of the user's own property
        if ends_caller(error):
            raise
        raise ConfigError(f"{field}: reading reward_threads raises {shown_error(error)}{place_in(error)}") from error
    if not is_whole(threads) or threads < 1:
        raise ConfigError(
            f"{field}: reward_threads = {shown_value(threads)}, expected a whole number from 1{definition(function)}"
        )
    return operator.index(threads)


def weighted(components: Sequence[RewardComponent], rewards: Sequence[Reward]) -> Reward:
    """Returns the weighted sum of the components' rewards for one completion. Its parts are each component's unweighted
    value by its name, and that component's parts as `name/part`.

    Raises:
        RewardError: more parts than a record holds, or a sum beyond its range.
    """
    parts: dict[str, float] = {}
    for each, reward in zip(components, rewards, strict=True):
        parts[each.name] = reward.value
        parts |= {f"{each.name}/{part}": value for part, value in reward.parts.items()}
    value = sum(each.weight * reward.value for each, reward in zip(components, rewards, strict=True))
    return checked(Reward(value=value, parts=parts), "reward.components")


def checked(reward: Any, of: str) -> Reward:
    """Returns what the user's code returned as a reward, as a `Reward`. of: what it rewards, for the message.

    Raises:
        RewardError: not a number that a record can hold, or parts that `check_part_names` refuses.
    """
    _refuse_coroutine(reward)
    found = reward
    try:
        if isinstance(found, str | bytes):
            raise TypeError("float() reads numbers in text")
        if not isinstance(found, Reward):
            found = Reward(value=float(found))
        fits = abs(found.value) <= MAX_REWARD and all(map(math.isfinite, found.parts.values()))
    except (TypeError, ValueError, OverflowError):
        fits = False
    if not fits:
        shown, most = repr(reward)[:80], f"of at most {MAX_REWARD:g}"
        raise RewardError(f"{shown} for {of}, expected a finite number {most}, or a Reward of such numbers")
    try:
        check_part_names(found.parts, "parts")
    except ValueError as error:
        raise RewardError(f"{error}, in the reward of {of}") from None
    return found


def _refuse_coroutine(found: Any) -> None:
    if inspect.iscoroutine(found):
        found.close()
        raise RewardError("the function returned a coroutine, which is awaited only if it is an `async def` itself")


def _named(completion: str) -> str:
    return f"completion {completion[:80]!r}"
