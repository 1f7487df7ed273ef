"""`penstock try`: the prompts, completions and rewards of an environment, before anything is trained on them."""

import traceback
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from penstock.producers.engines.settings import end_ids
from penstock.producers.interfaces import EngineError, RolloutFacts
from penstock.producers.rollout.episode import load_tokenizer, tokenize
from penstock.producers.rollout.rewards import RewardError
from penstock.producers.rollout.run_environments import RunEnvironment, open_environments, pose
from penstock.producers.rollout.scoring import RewardScorer
from penstock.schemas.config import ConfigError, RunConfig
from penstock.schemas.process.plugins import ends_caller
from penstock.schemas.prompt import Prompt, Reward
from penstock.schemas.rollout import FinishReason

MOST_COMPLETIONS = 4
"""Completions of one prompt."""
_MOST_PIECES = 64


async def show_tasks(config: RunConfig, num_prompts: int) -> bool:
    """Prints the first training tasks and the first held-out one. Returns False if the user's code raised, or if a
    gold answer is worth nothing.

    Raises:
        ConfigError: the environment or the reward cannot be used, or the model cannot be loaded.
    """
    tokenizer, model, shown_model = _load(config)
    model_ends = [] if model is None else _model_ends(config, model)
    trials = [_Trial(config, source, tokenizer, model, model_ends) for source in open_environments(config)]
    for trial in trials:
        held_out, settings = trial.environment.num_evaluation_prompts, config.every_environment[trial.name]
        print(f"environment  {trial.name} ({settings.path}), {held_out} held-out prompts")
        print(f"model        {shown_model}")
        if trial.converses:
            print("note         it converses: completions are those of its first turn, and are not scored")
        for index in range(1, num_prompts + 1) if settings.weight else ():
            print(f"\ntask {index}")
            await trial.show(index, held_out=False)
        if held_out:
            print("\nheld-out task 1")
            await trial.show(1, held_out=True)
        trial.scorer.close()
    return not any(trial.num_worthless or trial.shown_errors for trial in trials)


class _Trial:
    """One environment. tokenizer, model: None without a model. model_ends: its own end-of-sequence ids."""

    def __init__(
        self, config: RunConfig, source: RunEnvironment, tokenizer: Any, model: Any, model_ends: Sequence[int]
    ) -> None:
        self._config = config
        self.name = source.name
        self.environment = source.environment
        self.converses = source.converses
        self.scorer = RewardScorer(source.rewards, config.reward)
        self.shown_errors: set[str] = set()
        self.num_worthless = 0
        """Gold answers without a reward above 0, in a box either."""
        self._sampling = source.sampling
        self._takes_facts = any(each.takes_facts for each in source.rewards)
        self._tokenizer, self._model, self._model_ends = tokenizer, model, model_ends

    async def show(self, index: int, held_out: bool) -> None:
        """Prints one task with its gold answer's reward, and its completions with theirs."""
        try:
            prompt = pose(self.environment, index, held_out=held_out)
            token_ids = tokenize(self._tokenizer, prompt) if self._tokenizer else []
        except BaseException as error:  # the environment and the chat template are the user's
            if ends_caller(error):
                raise
            self._failed("prompt", error)
            return
        if self._tokenizer:
            _say("prompt", self._tokenizer.decode(token_ids))
            _say("tokens", f"{len(token_ids)}: {_pieces(self._tokenizer, token_ids)}")
        else:
            if prompt.text is not None:
                _say("prompt", prompt.text)
            for message in prompt.messages or ():
                _say(message.role, message.text)
        for name, value in prompt.metadata.items():
            _say("metadata", f"{name} = {value}")
        await self._show_gold(prompt, len(token_ids))
        if prompt.images and self._tokenizer:
            _say("note", "nothing is sampled: a prompt with images needs the run's engine")
        sampled = [] if prompt.images else list(self._sampled(token_ids))
        texts, facts = [text for text, _ in sampled], [each for _, each in sampled]
        rewards = [] if self.converses or not sampled else await self._score(prompt, texts, facts)
        for text, reward in zip_longest(texts, rewards):
            _say("says", text)
            _show("", reward)

    async def _show_gold(self, prompt: Prompt, num_prompt_tokens: int) -> None:
        """Scores the answer as it is, and while its reward is 0, in a box and in a tag."""
        if not prompt.answer:
            return
        _say("answer", prompt.answer)
        if self._takes_facts and not self._tokenizer:
            _say("note", "not scored: the reward takes `facts`, which need a model (--set model.path=FOLDER)")
            return
        forms = {
            "as a completion ": prompt.answer,
            "in a \\boxed{} ": f"\\boxed{{{prompt.answer}}}",
            "in <answer> ": f"<answer>{prompt.answer}</answer>",
        }
        for form, text in forms.items():
            num_tokens = len(self._tokenizer.encode(text, add_special_tokens=False)) if self._tokenizer else 0
            facts = self._facts(num_prompt_tokens, num_tokens, "stop")
            rewards = await self._score(prompt, [text], [facts])
            for reward in rewards:
                _show(form, reward)
            if not rewards or rewards[0].value > 0:
                return
        self.num_worthless += 1
        _say("warning", "the gold answer is worth nothing in any of these forms: can any completion be right?")

    async def _score(self, prompt: Prompt, texts: Sequence[str], facts: Sequence[RolloutFacts]) -> Sequence[Reward]:
        """Returns the rewards of siblings; if the reward fails, prints the error and returns none."""
        try:
            return await self.scorer.score(prompt, texts, facts)
        except RewardError as error:
            self._failed("reward", error.__cause__ or error)
            return ()

    def _facts(self, num_prompt_tokens: int, num_tokens: int, finish_reason: FinishReason) -> RolloutFacts:
        return RolloutFacts(
            num_prompt_tokens=num_prompt_tokens,
            num_tokens=num_tokens,
            max_tokens=self._sampling.max_tokens,
            finish_reason=finish_reason,
        )

    def _sampled(self, token_ids: list[int]) -> Iterator[tuple[str, RolloutFacts]]:
        """Samples completions by transformers' own generation, with the run's sampling settings."""
        if not self._tokenizer:
            return
        import torch
        from transformers import GenerationConfig

        sampling, model = self._sampling, self._model
        ends = {*self._model_ends, self._tokenizer.eos_token_id, *sampling.stop_token_ids} - {None}
        is_greedy = sampling.temperature < 1e-5
        varied = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": max(0, sampling.top_k)}
        settings = GenerationConfig(
            max_new_tokens=sampling.max_tokens,
            num_return_sequences=1 if is_greedy else min(self._config.group_size, MOST_COMPLETIONS),
            eos_token_id=sorted(ends) or None,
            pad_token_id=min(ends, default=0),
            do_sample=not is_greedy,
            **({} if is_greedy else varied),
        )
        with torch.no_grad():
            prompt = torch.tensor([token_ids], device=model.device)
            found = model.generate(prompt, attention_mask=torch.ones_like(prompt), generation_config=settings)
        for sampled in found[:, len(token_ids) :].tolist():
            end = next((n for n, token_id in enumerate(sampled) if token_id in ends), len(sampled))
            text = self._tokenizer.decode(sampled[:end], skip_special_tokens=True, clean_up_tokenization_spaces=False)
            ended = end < len(sampled)
            yield text, self._facts(len(token_ids), end + ended, "stop" if ended else "length")

    def _failed(self, what: str, error: BaseException) -> None:
        """Prints an error, with its traceback unless one from the same place was printed before."""
        place = f"{type(error)}{traceback.format_tb(error.__traceback__)}"
        lines = traceback.format_exception_only(error)[:1] if place in self.shown_errors else []
        self.shown_errors.add(place)
        _say(f"{what}!", "".join(lines or traceback.format_exception(error)).rstrip())


def _load(config: RunConfig) -> tuple[Any, Any, str]:
    """Loads tokenizer and model; returns them, or None without a model, and the line to print about the model."""
    path = config.model.path
    if not path:
        return None, None, "none: prompts are not tokenized, and nothing is sampled (--set model.path=FOLDER)"
    if not Path(path).is_dir():
        return None, None, f"no folder {path!r} yet: prompts are not tokenized, nothing is sampled"
    return load_tokenizer(config), _load_model(config), path


def _load_model(config: RunConfig) -> Any:
    import torch
    from transformers.utils import logging

    from penstock.consumers.learning.model.device import choose_device
    from penstock.consumers.learning.model.loading import read_model

    logging.disable_progress_bar()
    torch.manual_seed(config.seed)
    try:
        model = read_model(config.model.path, "auto")
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise ConfigError(f"model.path = {config.model.path!r}: transformers cannot load it: {error}") from None
    return model.to(choose_device("auto")).eval()


def _model_ends(config: RunConfig, model: Any) -> Sequence[int]:
    """Returns the model's own end-of-sequence ids, as the engine reads them."""
    try:
        ends = end_ids(config.model.path)
    except EngineError as error:
        raise ConfigError(str(error)) from None
    if ends is not None:
        return ends
    declared = model.config.eos_token_id
    return declared if isinstance(declared, list) else [] if declared is None else [declared]


def _pieces(tokenizer: Any, token_ids: list[int]) -> str:
    """Returns the tokens of a prompt separated by bars, without the middle of a long one."""
    shown = [tokenizer.decode([token_id]) for token_id in token_ids]
    if len(shown) > _MOST_PIECES:
        half = _MOST_PIECES // 2
        shown = [*shown[:half], f" ... {len(shown) - _MOST_PIECES} more ... ", *shown[-half:]]
    return "|".join(piece.replace("\n", "\\n") for piece in shown)


def _show(form: str, reward: Reward | None) -> None:
    if reward is not None:
        parts = ", ".join(f"{name} {value:g}" for name, value in reward.parts.items())
        _say("reward", f"{form}{reward.value:g}" + (f"  ({parts})" if parts else ""))


def _say(label: str, text: str) -> None:
    for number, line in enumerate(text.split("\n") or [""]):
        print(f"{'' if number else label:12} {line}")
