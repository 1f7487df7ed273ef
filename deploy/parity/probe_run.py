"""A run of one engine, made for the check: prompts sampled while weights change in flight, and what goes on inside."""

import asyncio
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from penstock.deploy.parity.material import Material
from penstock.deploy.parity.perturbed import make_policies
from penstock.deploy.parity.weights import WeightVersions
from penstock.producers.interfaces import CaptureError, EngineError, Environment
from penstock.producers.rollout.episode import load_tokenizer
from penstock.producers.rollout.probe import PosedPrompt, batch_dependence, pose, probe
from penstock.schemas.config import ConfigError, RunConfig
from penstock.schemas.process.plugins import construct
from penstock.schemas.rollout import RolloutGroup, SamplingSettings, unpack_ids

NUM_UPDATES = 3
MOST_TOKENS = 96
"""Of a completion: enough for an update to find it in flight."""
_CAPTURE = "hidden_states.safetensors"

Say = Callable[[str], None]


class Probed(NamedTuple):
    """capture: the hidden states of one sequence; None where they could not be recorded, and a note then says why."""

    material: Material
    capture: Path | None


def run_probe(config: RunConfig, folder: Path, *, num_prompts: int, log: Path, say: Say) -> Probed:
    """Boots one engine as `config` has it and probes it; weights and hidden states lie in `folder`, what vLLM prints
    in `log`.

    Raises:
        ConfigError: a prompt that the model has no room for, or an environment or a model that cannot be used.
        EngineError, WeightLoadError: the engine does not start or serve.
    """
    environment = construct(config.environment, "environment", Environment, seed=config.seed)
    tokenizer = load_tokenizer(config)
    prompts = pose(environment, tokenizer, num_prompts)
    with _output_in(log):
        groups, notes = asyncio.run(_sample(config, prompts, folder, say))
    weights = WeightVersions(Path(config.model.path), folder)
    weights.hold()
    material = Material(
        title=f"a probe of {config.name}'s engine",
        config=config,
        groups=groups,
        weights=weights,
        policy_version=NUM_UPDATES,
        forks={},
        announced={},
        notes=notes,
    )
    capture = folder / _CAPTURE
    return Probed(material, capture if capture.exists() else None)


async def _sample(
    config: RunConfig, prompts: list[PosedPrompt], folder: Path, say: Say
) -> tuple[list[RolloutGroup], tuple[str, ...]]:
    say("booting vLLM")
    engine_type = _engine_type()
    engine = await engine_type.start(config)
    try:
        sampling = _sampling(config, prompts, engine.max_model_len)
        say(f"making {NUM_UPDATES} policies")
        updates = make_policies(config, folder, NUM_UPDATES)
        say(f"sampling {len(prompts)} prompts {NUM_UPDATES + 1} times, with {NUM_UPDATES} updates in flight")
        groups = await probe(engine, prompts, sampling, group_size=config.group_size, updates=updates)
        notes = [
            f"a probe: {len(prompts)} prompts, up to {sampling.max_tokens} tokens a completion, {NUM_UPDATES} updates "
            "of random noise in flight",
            str(await batch_dependence(engine, prompts, sampling.max_tokens)),
        ]
        say("recording hidden states")
        sequence = max(
            (rollout.segments[0] for group in groups for rollout in group.rollouts), key=lambda each: each.num_tokens
        )
        try:
            await engine.capture(unpack_ids(sequence.token_ids).tolist(), str((folder / _CAPTURE).absolute()))
        except CaptureError as error:
            notes.append(f"layers were not compared: {error}")
        return groups, tuple(notes)
    finally:
        await engine.close()


def _engine_type() -> Any:
    try:
        from penstock.producers.engines.vllm import VllmEngine
    except ImportError as error:
        raise EngineError(f"vLLM cannot be imported ({error}); install the extra [cpu] or [gpu]") from error
    return VllmEngine


def _sampling(config: RunConfig, prompts: list[PosedPrompt], max_model_len: int) -> SamplingSettings:
    """The run's own, with completions of a probe's length."""
    room = max_model_len - max(len(posed.token_ids) for posed in prompts)
    if room < 1:
        raise ConfigError(
            f"engine.max_model_len = {max_model_len}: the longest of {len(prompts)} prompts leaves no room to answer"
        )
    own = config.sampling
    return SamplingSettings(
        temperature=own.temperature,
        top_k=own.top_k,
        top_p=own.top_p,
        max_tokens=min(room, own.max_tokens, MOST_TOKENS),
        stop_token_ids=own.stop_token_ids,
    )


def progress(is_wanted: bool) -> Say:
    """Says on stderr what goes on, with the seconds since the start; on the one of now, wherever it leads later."""
    began = time.monotonic()
    stderr = os.dup(2)

    def say(text: str) -> None:
        if is_wanted:
            os.write(stderr, f"{time.monotonic() - began:6.1f} s  {text}\n".encode())

    return say


@contextmanager
def _output_in(log: Path) -> Iterator[None]:
    """What this process and those it starts print goes to a file: an engine prints much, and stdout is the report's."""
    log.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    kept = {number: os.dup(number) for number in (1, 2)}
    with log.open("wb") as file:
        for number in kept:
            os.dup2(file.fileno(), number)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, copy in kept.items():
            os.dup2(copy, number)
            os.close(copy)
