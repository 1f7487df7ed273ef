"""Evaluates one model: boots an engine on it, then poses and scores every held-out prompt of every set."""

import asyncio
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from penstock.consumers.learning.held_out import HeldOutAnswers, held_out_figures
from penstock.deploy.launch.command_line import DEFAULT_RUNS, run_coroutine
from penstock.deploy.launch.engine_output import Say
from penstock.deploy.launch.start_checks import check_environments
from penstock.deploy.operate.export import export_from
from penstock.deploy.operate.run_access import OpenRun, find_run
from penstock.producers.__main__ import EngineFactory, answer_parser, start_vllm
from penstock.producers.endpoint.calls import Calls
from penstock.producers.endpoint.inside import Conversations
from penstock.producers.engines.weight_files import BaseModel
from penstock.producers.interfaces import Engine
from penstock.producers.observe.metrics import ProducerMetrics
from penstock.producers.rollout.episode import Episodes, load_tokenizer
from penstock.producers.rollout.run_environments import RunEnvironments
from penstock.producers.stream.in_flight import Claim, Dead
from penstock.schemas.best import BEST_FILE
from penstock.schemas.config import ConfigError, RunConfig, environment_fields
from penstock.schemas.figures import missing_figures
from penstock.schemas.rollout import RolloutGroup, unpack_ids

NAME = "evaluate"
"""The producer id in groups and metrics."""
SAY_S = 2.0
"""How often progress is reported."""


class ShownAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """A held-out prompt with its first answer."""

    prompt: str
    """Its text, or the last message of it."""
    gold: str
    """`Prompt.answer`; empty if the environment sets none."""
    answer: str
    """What the model said; the turns of a conversation one after another."""
    reward: float


class SetResult(msgspec.Struct, frozen=True, kw_only=True):
    """A model's results on one environment's held-out prompts."""

    name: str
    """The environment's."""
    num_prompts: int
    num_samples: int
    """Answers to each prompt."""
    num_failed: int
    """Prompts without any answer: each counts as 0."""
    figures: dict[str, float]
    """`reward` and its parts, `pass@<k>`, lengths; see `penstock.consumers.learning.held_out.held_out_figures`."""
    shown: tuple[ShownAnswer, ...] = ()
    """The first prompts that were answered, as many as requested."""


class Evaluated(msgspec.Struct, frozen=True, kw_only=True):
    """model: as named by the caller. failures: prompts without an answer, by reason. wall_s: without booting."""

    model: str
    sets: tuple[SetResult, ...]
    failures: dict[str, int]
    wall_s: float


def evaluate(
    model: str | Path,
    config: RunConfig,
    *,
    runs: str | Path = DEFAULT_RUNS,
    say: Say = lambda text: None,
    start_engine: EngineFactory = start_vllm,
    show: int = 0,
) -> Evaluated:
    """Boots an engine on `model` and poses all held-out prompts of the run file's environments, including those with
    weight 0, as its `[evaluation]` says.

    Each request is seeded by its place, so that an evaluation is as reproducible as the engine. It uses no trainer and
    no Redis.

    Args:
        model: folder of a transformers model, or the name or folder of a run, whose newest checkpoint is taken.
        config: what is posed, and how; its own model is not read.
        runs: folder of all runs.
        say: called with lines of progress.
        start_engine: boots the engine.
        show: prompts of each set that the result shows with an answer.

    Raises:
        ConfigError: no such model, an environment that cannot be used, or no held-out prompts.
        EngineError: the engine does not start or serve.
        OSError: a run's checkpoint cannot be read or exported.
    """
    with _whole_model(str(model), Path(runs), say) as folder:
        own = msgspec.structs.replace(config.model, path=str(folder))
        posed = msgspec.structs.replace(config, model=own, lora=None, mode="synchronous")
        checked, environments = check_environments(posed)
        if not any(checked.num_evaluation_prompts.values()):
            fields = ", ".join(f"{field}.path = {each.path!r}" for field, each in environment_fields(checked))
            raise ConfigError(f"{fields}: no held-out prompts; expected some, and evaluation.num_prompts above 0")
        for name, size in checked.num_evaluation_prompts.items():
            if not size:
                say(f"{name} has no held-out prompts, or none are requested: it is left out")
        tokenizer = load_tokenizer(checked)
        parser = answer_parser(checked, tokenizer)

        async def run() -> Evaluated:
            say(f"booting the engine on {folder}")
            engine = await start_engine(checked, seed=checked.seed)
            try:
                found = await answer_held_out(
                    checked, environments, engine, tokenizer, parser=parser, say=say, show=show
                )
                return msgspec.structs.replace(found, model=str(model))
            finally:
                await engine.close()

        return run_coroutine(run())


async def answer_held_out(
    config: RunConfig,
    environments: RunEnvironments,
    engine: Engine,
    tokenizer: Any,
    *,
    parser: Any = None,
    say: Say = lambda text: None,
    show: int = 0,
) -> Evaluated:
    """Answers all held-out prompts with a running engine; see `evaluate`.

    config: with `num_prompts` of each environment's evaluation set.

    Raises:
        EngineError: the engine has stopped.
    """
    metrics, began_s = ProducerMetrics(run=config.name, producer=NAME), time.monotonic()
    episodes = Episodes(
        config, producer_id=NAME, metrics=metrics, environments=environments, tokenizer=tokenizer, engine=engine
    )
    conversations = None
    if config.endpoint is not None and environments.any_converse:
        calls = Calls.of(config, engine, _Loaded(), tokenizer, parser, metrics)
        conversations = Conversations(
            environments, calls, config.endpoint, producer_id=NAME, fingerprint=engine.fingerprint
        )
    sets = config.held_out
    claims = [_claim(name, n + 1) for name, how in sets.items() for n in range(how.num_prompts or 0)]
    room = asyncio.Semaphore(_most_at_once(config))
    found: dict[str, list[HeldOutAnswers]] = {}
    answers: dict[str, dict[int, ShownAnswer]] = {name: {} for name in sets}
    failures: Counter[str] = Counter()
    progress = _Progress(len(claims), say)

    async def one(claim: Claim) -> None:
        async with room:
            if conversations is not None and environments.converses(claim.environment):
                group = await conversations.evaluate(claim)
            else:
                group = await episodes.run(claim)
        if isinstance(group, Dead):
            failures[group.reason] += 1
        elif claim.index <= show and group.rollouts:
            answers[claim.environment][claim.index] = _shown(group, tokenizer)
        got = HeldOutAnswers(claim.environment) if isinstance(group, Dead) else HeldOutAnswers.of(group)
        found.setdefault(claim.environment, []).append(got)
        progress.add()

    try:
        async with asyncio.TaskGroup() as tasks:
            for claim in claims:
                tasks.create_task(one(claim))
    except ExceptionGroup as error:  # an engine that has died fails every request
        raise error.exceptions[0] from None
    finally:
        episodes.close()
    results = [
        SetResult(
            name=name,
            num_prompts=len(found[name]),
            num_samples=how.num_samples or 1,
            num_failed=sum(not each.rewards for each in found[name]),
            figures=held_out_figures(found[name], sets),
            shown=tuple(answer for _, answer in sorted(answers[name].items())),
        )
        for name, how in sets.items()
        if name in found
    ]
    by_name = {each.name: each.figures for each in results}
    for setting, problem in missing_figures(config, {}, by_name).items():
        say(f"{setting}: {problem}")
    return Evaluated(
        model=config.model.path, sets=tuple(results), failures=dict(failures), wall_s=time.monotonic() - began_s
    )


def _shown(group: RolloutGroup, tokenizer: Any) -> ShownAnswer:
    rollout, prompt = group.rollouts[0], group.prompt
    runs = [
        unpack_ids(segment.token_ids[4 * start : 4 * end])
        for segment in rollout.segments
        for start, end in segment.loss_mask
    ]
    return ShownAnswer(
        prompt=prompt.messages[-1].text if prompt.messages else prompt.text or "",
        gold=prompt.answer,
        answer="\n".join(tokenizer.decode(run, skip_special_tokens=True) for run in runs),
        reward=rollout.reward.value,
    )


class _Loaded:
    """The weights of an engine that are never replaced."""

    async def wait_for(self, version: int, lag_bound: int, run_id: str) -> None:
        """Returns at once: the weights are the right ones."""


class _Progress:
    def __init__(self, num_prompts: int, say: Say) -> None:
        self._num_prompts, self._say = num_prompts, say
        self._num_done, self._said_at = 0, time.monotonic()

    def add(self) -> None:
        self._num_done += 1
        if self._num_done == self._num_prompts or time.monotonic() - self._said_at >= SAY_S:
            self._said_at = time.monotonic()
            self._say(f"{self._num_done:,} of {self._num_prompts:,} held-out prompts answered")


def _claim(environment: str, n: int) -> Claim:
    name = f"0-{n}"
    return Claim(
        stream=environment, entry_id=name.encode(), index=n, version=0, evaluation_id=name, environment=environment
    )


def _most_at_once(config: RunConfig) -> int:
    """Returns how many prompts may be in flight, so that their answers fit a producer's room."""
    most = max(how.num_samples for how in config.held_out.values())
    return max(1, config.producers.groups_in_flight * config.group_size // most)


@contextmanager
def _whole_model(model: str, runs: Path, say: Callable[[str], None]) -> Iterator[Path]:
    """Yields the folder of a model. A run's newest checkpoint is exported to a temporary folder, in the dtype of its
    engines and with an adapter merged into its base."""
    folder = Path(model)
    if (folder / "adapter_config.json").is_file():
        options = "--checkpoint best --merged" if (folder / BEST_FILE).is_file() else "--merged"
        raise ConfigError(
            f"{model}: an adapter without its base; expected a whole model (`penstock export RUN FOLDER {options}`)"
        )
    if (folder / "config.json").is_file():
        if not BaseModel(model).files:  # the engine would serve random weights
            raise ConfigError(f"{model}: a model without safetensors weights; expected them in its folder")
        yield folder
        return
    try:
        name, run_folder, config = find_run(model, runs)
    except ConfigError as error:
        raise ConfigError(f"{error}; expected a folder with a model's config.json, or a run") from None
    if run_folder is None or config is None:
        raise ConfigError(f"{model}: its folder is not on this machine, and its checkpoints are in it")
    with tempfile.TemporaryDirectory(prefix="evaluated-", dir=run_folder) as temporary:
        whole = Path(temporary) / "model"
        run = OpenRun(name, run_folder, config, None, "not asked")
        merged = config.lora is not None
        checkpoint = export_from(run, None, whole, config.model.dtype, say, merged=merged)
        say(f"{name}: checkpoint {checkpoint}")
        yield whole
