"""Checks before a start that need the model's tokenizer or call the user's reward."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from penstock.consumers.learning.learner.demonstrations import read_demonstrations
from penstock.deploy.launch.command_line import run_coroutine
from penstock.deploy.launch.context_length import longest_sequence
from penstock.deploy.launch.posed_tasks import PosedTask
from penstock.deploy.launch.start_checks import Checked
from penstock.producers.interfaces import RolloutFacts
from penstock.producers.rollout.chat_template import LeftOut, read_variables
from penstock.producers.rollout.episode import load_tokenizer, tokenize
from penstock.producers.rollout.rewards import RewardError
from penstock.producers.rollout.scoring import RewardScorer
from penstock.schemas.config import ConfigError, RunConfig, named_figures
from penstock.schemas.images import ImageError
from penstock.schemas.process.image_files import decoded
from penstock.schemas.process.plugins import definition, place_in
from penstock.schemas.prompt import Prompt
from penstock.schemas.rollout import one_line

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "chat_template.jinja")
_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
_MOST_CHARACTERS = 300


def check_prompts(checked: Checked) -> list[str]:
    """Tokenizes the posed tasks as producers do, and scores the first gold answers of rewards that are no coroutines,
    of all where a setting names a part of the reward; returns warnings. Imports transformers, unless the model's folder
    has no tokenizer.

    Raises:
        ConfigError: demonstrations that cannot be used, prompts that the model's chat template does not render or that
            the model has no room for, a reward of another type, or a figure that no reward has.
    """
    config = checked.config
    if not any((Path(config.model.path) / name).is_file() for name in _TOKENIZER_FILES):
        return []
    tokenizer, left_out, warnings = load_tokenizer(config), LeftOut(), list[str]()
    room = longest_sequence(config)
    if config.warm_start is not None:
        read_demonstrations(config, room)
    for task in checked.tasks:
        if not task.source.converses:
            _check_prompt(config, task, tokenizer, room)
            if not warnings:
                warnings += _left_out(task.asked, task.prompt, tokenizer, left_out)
    if config.endpoint is not None and getattr(tokenizer, "chat_template", None) is None:
        asked = f"model.path = {config.model.path!r}"
        raise ConfigError(f"{asked}: its tokenizer has no chat template, which [endpoint] needs")
    return [*warnings, *_check_rewards(checked, tokenizer), *_unread_variables(config, tokenizer)]


def _check_prompt(config: RunConfig, task: PosedTask, tokenizer: Any, room: int) -> None:
    prompt, path = task.prompt, config.model.path
    if prompt.messages is not None and getattr(tokenizer, "chat_template", None) is None:
        raise ConfigError(
            f"{task.asked} has messages, and the tokenizer of model.path = {path!r} has no chat template; expected a "
            "prompt with `text`, or a model with a chat template"
        )
    if prompt.images:
        _check_scorers(config, task)
    for n, image in enumerate(prompt.images, 1):
        try:
            decoded(image.data or b"")
        except ImageError as error:
            raise ConfigError(f"{task.asked}: image {n} of {len(prompt.images)}: {error}") from error
    try:
        num_tokens = len(tokenize(tokenizer, prompt))
    except Exception as error:  # the chat template is the model's own and may raise anything
        roles = f" of the roles {', '.join(message.role for message in prompt.messages)}" if prompt.messages else ""
        said = f"{type(error).__name__}: {one_line(str(error))[:_MOST_CHARACTERS]}"
        raise ConfigError(
            f"{task.asked}: the chat template of model.path = {path!r} refuses its messages{roles}: {said}; expected "
            "messages that it renders"
        ) from error
    if not 0 < num_tokens < room:
        limit = "engine.max_model_len" if config.engine.max_model_len else f"the context of model.path = {path!r}"
        expected = f"fewer than {limit} = {room}, which completions share" if num_tokens else "at least one"
        raise ConfigError(f"{task.asked} has {num_tokens or 'no'} tokens; expected {expected}")


def _check_scorers(config: RunConfig, task: PosedTask) -> None:
    """Raises ConfigError if a prompt has images, and a model that scores its answers cannot be shown them."""
    if config.teacher_url is not None:
        raise ConfigError(
            f"{task.asked} has images, which teacher.url = {config.teacher_url!r} is not sent; expected teacher.model"
        )
    others = {"model.reference": config.model.reference, "teacher.model": config.teacher and config.teacher.model}
    for field, path in others.items():
        if path and not any((Path(path) / name).is_file() for name in _PROCESSOR_FILES):
            raise ConfigError(
                f"{task.asked} has images, and {field} = {path!r} has no image processor; expected a model that sees, "
                f"with its {' or '.join(_PROCESSOR_FILES)}"
            )


def _left_out(who: str, prompt: Prompt, tokenizer: Any, left_out: LeftOut) -> Iterator[str]:
    """Yields a warning if the chat template leaves out a message of a prompt."""

    def render(messages: list[dict[str, Any]], tools: Any) -> str:
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)

    messages = [message.for_template for message in prompt.messages or ()]
    if messages:
        for field in left_out.messages(render, messages, None, render(messages, None), range(len(messages)), "")[:1]:
            yield f"{who}: {field} is left out by the model's chat template, so the model does not know of it"


def _check_rewards(checked: Checked, tokenizer: Any) -> Iterator[str]:
    """Scores a gold answer and an empty one of each environment; yields warnings. A coroutine may call a judge, and is
    called only where a setting names a part of its reward. So is the reward of an environment that converses, whose
    conversations mostly have its parts and others; a coroutine of such a one is not, since it may start sandboxes."""
    config, environments = checked.config, checked.environments
    named = [each for each in named_figures(config) if each[2].startswith("reward/")]
    asked = {source.name: any(name in ("", source.name) for _, name, _ in named) for source in environments}
    first = {task.source.name: task for task in reversed(checked.tasks)}
    parts: dict[str, set[str] | None] = {}
    for name, task in first.items():
        parts[name] = None
        doubts = (task.source.converses, any(each.is_async for each in task.source.rewards))
        if not any(doubts) or (asked[name] and not all(doubts)):
            try:
                parts[name] = run_coroutine(_parts(config, task, tokenizer))
            except Exception as error:
                if task.source.converses:  # its conversations have prompts and rewards of their own
                    continue
                if not isinstance(error, RewardError):
                    raise
                if error.__cause__ is None:  # it returned something else than a reward
                    functions = [getattr(each.function, "func", each.function) for each in task.source.rewards]
                    place = "".join(map(definition, functions))
                    raise ConfigError(f"{task.asked}: its reward: {error}{place}") from None
                place = place_in(error.__cause__, config.every_environment[name])
                yield f"{task.asked}: the reward of its gold answer, or of an empty one, raises {error}{place}"
    for setting, name, figure in named:
        sources = [name] if name else list(parts)
        found = [parts.get(each) for each in sources]
        if any(figure in each for each in found if each):
            continue
        if None in found or any(first[each].source.converses for each in sources):
            yield f"{setting}: whether the reward has this part is not known before the first rewards"
        else:
            known = sorted(set().union(*filter(None, found)))
            raise ConfigError(f"{setting}: the reward has no such part; expected {' or '.join(['reward', *known])}")


async def _parts(config: RunConfig, task: PosedTask, tokenizer: Any) -> set[str]:
    source, prompt = task.source, task.prompt
    num_tokens, max_tokens = len(tokenize(tokenizer, prompt)), source.evaluation_sampling.max_tokens
    texts = (prompt.answer, "")
    facts = [
        RolloutFacts(num_prompt_tokens=num_tokens, num_tokens=1, max_tokens=max_tokens, finish_reason="stop")
        for _ in texts
    ]
    scorer = RewardScorer(source.rewards, config.reward)
    try:
        return {f"reward/{part}" for reward in await scorer.score(prompt, texts, facts) for part in reward.parts}
    finally:
        scorer.close()


def _unread_variables(config: RunConfig, tokenizer: Any) -> Iterator[str]:
    if not (variables := config.model.chat_template_kwargs):
        return
    try:
        read = read_variables(getattr(tokenizer, "chat_template", None) or "")
    except Exception as error:  # jinja2's own; it is imported with transformers
        said = one_line(str(error))[:_MOST_CHARACTERS]
        raise ConfigError(f"model.path = {config.model.path!r}: its chat template cannot be parsed: {said}") from error
    for name in variables:
        if name not in read:
            yield f"model.chat_template_kwargs.{name}: the model's chat template does not read it, so it has no effect"
