"""Checks of a dry run that need the model's tokenizer or the user's reward."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from penstock.deploy.launch.command_line import run_coroutine
from penstock.deploy.launch.memory import read_model_config
from penstock.producers.interfaces import RolloutFacts
from penstock.producers.rollout.chat_template import LeftOut, read_variables
from penstock.producers.rollout.episode import load_tokenizer, tokenize
from penstock.producers.rollout.rewards import RewardError
from penstock.producers.rollout.run_environments import RunEnvironment, RunEnvironments, pose
from penstock.producers.rollout.scoring import RewardScorer
from penstock.schemas.config import ConfigError, RunConfig, environment_fields, named_figures
from penstock.schemas.prompt import Prompt
from penstock.schemas.rollout import one_line

_MOST_PROMPTS = 8
"""First prompts of each kind that are tokenized."""
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "chat_template.jinja")
_MOST_CHARACTERS = 300


def check_prompts(config: RunConfig, environments: RunEnvironments) -> list[str]:
    """Tokenizes the first prompts as producers do, and scores gold answers where a setting names a part of the reward;
    returns warnings. Imports transformers, unless the model's folder has no tokenizer.

    Raises:
        ConfigError: prompts that the model's chat template does not render or that the model has no room for, or a
            figure that no reward has.
    """
    if not any((Path(config.model.path) / name).is_file() for name in _TOKENIZER_FILES):
        return []
    tokenizer, left_out, warnings = load_tokenizer(config), LeftOut(), list[str]()
    for field, settings in environment_fields(config):
        source = environments.named(settings.name)
        if not source.converses:
            for held_out, index, prompt in _first_prompts(source, is_trained=settings.weight > 0):
                who = f"{field}.path = {settings.path!r}: {'evaluation_prompt' if held_out else 'prompt'}({index})"
                _check_prompt(config, who, prompt, tokenizer)
                if not warnings:
                    warnings += _left_out(who, prompt, tokenizer, left_out)
    if config.endpoint is not None and getattr(tokenizer, "chat_template", None) is None:
        asked = f"model.path = {config.model.path!r}"
        raise ConfigError(f"{asked}: its tokenizer has no chat template, which [endpoint] needs")
    _check_figures(config, environments, tokenizer)
    return [*warnings, *_unread_variables(config, tokenizer)]


def _first_prompts(source: RunEnvironment, *, is_trained: bool) -> Iterator[tuple[bool, int, Prompt]]:
    """Yields whether a prompt is held out, its number, and the prompt; as many of each kind as there are."""
    environment = source.environment
    num_tasks = getattr(environment, "num_tasks", None) or _MOST_PROMPTS
    for held_out, available in ((False, num_tasks * is_trained), (True, environment.num_evaluation_prompts)):
        for index in range(1, min(_MOST_PROMPTS, available) + 1):
            try:
                yield held_out, index, pose(environment, index, held_out=held_out)
            except Exception:  # of the user's own; `check` has posed the first ones
                break


def _check_prompt(config: RunConfig, who: str, prompt: Prompt, tokenizer: Any) -> None:
    path = config.model.path
    if prompt.messages is not None and getattr(tokenizer, "chat_template", None) is None:
        raise ConfigError(
            f"{who} has messages, and the tokenizer of model.path = {path!r} has no chat template; expected a prompt "
            "with `text`, or a model with a chat template"
        )
    try:
        num_tokens = len(tokenize(tokenizer, prompt))
    except Exception as error:  # the chat template is the model's own and may raise anything
        roles = f" of the roles {', '.join(message.role for message in prompt.messages)}" if prompt.messages else ""
        said = f"{type(error).__name__}: {one_line(str(error))[:_MOST_CHARACTERS]}"
        raise ConfigError(
            f"{who}: the chat template of model.path = {path!r} refuses its messages{roles}: {said}; expected messages "
            "that it renders"
        ) from error
    room = config.engine.max_model_len or longest_sequence(config)
    if not num_tokens or (room and num_tokens >= room):
        limit = "engine.max_model_len" if config.engine.max_model_len else f"the context of model.path = {path!r}"
        expected = f"fewer than {limit} = {room}, which completions share" if num_tokens else "at least one"
        raise ConfigError(f"{who} has {num_tokens or 'no'} tokens; expected {expected}")


def _left_out(who: str, prompt: Prompt, tokenizer: Any, left_out: LeftOut) -> Iterator[str]:
    """Yields a warning if the chat template leaves out a message of a prompt."""

    def render(messages: list[dict[str, Any]], tools: Any) -> str:
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)

    messages = [{"role": message.role, "content": message.content} for message in prompt.messages or ()]
    if messages:
        for field in left_out.messages(render, messages, None, render(messages, None), range(len(messages)), "")[:1]:
            yield f"{who}: {field} is left out by the model's chat template, so the model does not know of it"


def check_context(config: RunConfig) -> None:
    """Raises ConfigError if engine.max_model_len is beyond the model's own limit: the engine would refuse it later."""
    asked, limit = config.engine.max_model_len, longest_sequence(config)
    if asked is not None and limit and asked > limit:
        raise ConfigError(
            f"engine.max_model_len = {asked}: model.path = {config.model.path!r} has a context of {limit} tokens "
            "(max_position_embeddings); expected at most that"
        )


def longest_sequence(config: RunConfig) -> int:
    """Returns the model's longest sequence in tokens; 0 if it is not known or its rotary embeddings are scaled."""
    model = read_model_config(Path(config.model.path))
    rope = model.get("rope_parameters") or model.get("rope_scaling") or {}
    is_scaled = rope.get("rope_type", rope.get("type", "default")) != "default"
    limit = model.get("max_position_embeddings")
    return limit if isinstance(limit, int) and not is_scaled else 0


def _check_figures(config: RunConfig, environments: RunEnvironments, tokenizer: Any) -> None:
    """Scores a gold answer and an empty one where a setting names a part of the reward."""
    named = [each for each in named_figures(config) if each[2].startswith("reward/")]
    for setting, name, figure in named if config.endpoint is None else ():
        sources = [environments.named(name)] if name else list(environments)
        parts: set[str] = set()
        for source in sources:
            if source.converses or not source.environment.num_evaluation_prompts:
                continue
            found = run_coroutine(_parts(config, source, tokenizer))
            if found is None:
                return  # the reward fails for these answers: its parts are not known
            parts |= {f"reward/{part}" for part in found}
        if figure not in parts and not any(source.converses for source in sources):
            raise ConfigError(
                f"{setting}: the reward has no such part; expected {' or '.join(['reward', *sorted(parts)])}"
            )


async def _parts(config: RunConfig, source: RunEnvironment, tokenizer: Any) -> set[str] | None:
    prompt = pose(source.environment, 1, held_out=True)
    num_tokens, max_tokens = len(tokenize(tokenizer, prompt)), source.evaluation_sampling.max_tokens
    texts = (prompt.answer, "")
    facts = [
        RolloutFacts(num_prompt_tokens=num_tokens, num_tokens=1, max_tokens=max_tokens, finish_reason="stop")
        for _ in texts
    ]
    scorer = RewardScorer(source.rewards, config.reward)
    try:
        return {part for reward in await scorer.score(prompt, texts, facts) for part in reward.parts}
    except RewardError:
        return None
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
