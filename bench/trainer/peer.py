"""Long and uneven answers: Penstock's pipeline and TRL's GRPOTrainer on one model, task and machine, one by one."""

import os
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import msgspec

from bench.head.section import peers_python
from bench.pipeline.modes import ModeRun, run_mode, trainer_parts
from bench.result import BenchError, Breakdown, Figure, Goal, break_down, compare
from bench.section import make_model, measure_apart
from bench.trainer.long_answers import PeerUpdates, TrlJob
from penstock.deploy.launch.run_folder import resolved_toml
from penstock.schemas.config import (
    EnvironmentConfig,
    EvaluationConfig,
    MetricsConfig,
    ModelConfig,
    ProducersConfig,
    RunConfig,
    SamplingConfig,
    TrainerConfig,
)

LIMIT_S = 900.0
"""Of Penstock's run."""
OTHER_PARTS = "publish, evaluation, bookkeeping"


class PeerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The model is a random Qwen3 of 14M parameters, which ends an answer at any token with a chance of about 1 in 98.

    first_update: of Penstock's that counts; before it the stream fills. trl_threads: Penstock's two processes have one
    each.
    """

    hidden_size: int = 384
    intermediate_size: int = 1152
    num_layers: int = 8
    max_tokens: int = 512
    groups: int = 16
    group_size: int = 8
    updates: int = 8
    first_update: int = 3
    trl_updates: int = 2
    trl_threads: int = 2


def peer_figures(settings: PeerSettings, folder: Path) -> Iterator[Figure | Breakdown]:
    model = folder / "model-long-answers"
    make_model(
        model,
        train=False,
        hidden_size=settings.hidden_size,
        intermediate_size=settings.intermediate_size,
        num_layers=settings.num_layers,
        num_heads=6,
        num_kv_heads=2,
        head_dim=64,
    )
    config = _config(settings, model)
    ours = updates_of(run_mode(config, folder / "runs", limit_s=LIMIT_S), settings)
    theirs = _run_trl(config, settings, folder)
    yield from compared(ours, theirs)


def _config(settings: PeerSettings, model: Path) -> RunConfig:
    return RunConfig(
        name="long-answers",
        seed=1,
        num_updates=settings.updates,
        group_size=settings.group_size,
        groups_per_batch=settings.groups,
        model=ModelConfig(path=str(model)),
        environment=EnvironmentConfig(path="bench.trainer.long_answers:LongAnswers"),
        sampling=SamplingConfig(temperature=1.0, max_tokens=settings.max_tokens),
        producers=ProducersConfig(count=1, groups_in_flight=settings.groups),
        # So small a learning rate moves no weight: every update meets answers of the same lengths.
        trainer=TrainerConfig(learning_rate=1e-12),
        evaluation=EvaluationConfig(num_prompts=0),
        metrics=MetricsConfig(port=0),
    )


def _run_trl(config: RunConfig, settings: PeerSettings, folder: Path) -> PeerUpdates | str:
    """Returns TRL's updates, or the reason why it did not run."""
    python = peers_python()
    if not python.is_file():
        return f"{python} is not there; make bench makes it"
    run_file = folder / "long-answers.toml"
    run_file.write_text(resolved_toml(config))
    job = TrlJob(run_file=str(run_file), updates=settings.trl_updates, num_threads=settings.trl_threads)
    threads = str(settings.trl_threads)
    found: PeerUpdates = measure_apart(
        "trl",
        "bench.trainer.trl_part:measure",
        job,
        PeerUpdates,
        folder,
        # Not resolved: the interpreter of an environment is a link, and finds its packages by where the link lies.
        python=os.path.abspath(python),
        environment={"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads},
    )
    return found


def updates_of(run: ModeRun, settings: PeerSettings) -> PeerUpdates:
    """Raises BenchError if the run did not get as far as the updates that count."""
    updates, first = run.telemetry.updates, settings.first_update
    if len(updates) <= first:
        raise BenchError(f"{len(updates)} updates in {LIMIT_S:g} s, expected more than {first}")
    return PeerUpdates(
        name="Penstock",
        seconds=[after.time_s - before.time_s for before, after in pairwise(updates[first - 1 :])],
        tokens=[update.num_tokens_trained for update in updates[first:]],
        phases_s=trainer_parts(run, first),
    )


def compared(ours: PeerUpdates, theirs: PeerUpdates | str) -> Iterator[Figure | Breakdown]:
    peer = None if isinstance(theirs, str) else theirs
    details = {"penstock": msgspec.to_builtins(ours)}
    details["trl"] = msgspec.to_builtins(theirs) if peer else {"reason": theirs}
    reference_is = f"{peer.name} with transformers' generate on both cores" if peer else "not measured"
    yield compare(
        "answers of up to 512 tokens, 98 on average: tokens trained per second",
        unit="/s",
        measured=ours.tokens_per_s,
        reference=peer.tokens_per_s if peer else None,
        reference_is=reference_is,
        goal=Goal(at_least=8.0),
        details=details,
    )
    yield compare(
        "the same: seconds per update",
        unit="s",
        measured=ours.s_per_update,
        reference=peer.s_per_update if peer else None,
        reference_is=reference_is,
    )
    yield break_down("Penstock's trainer", ours.phases_s, ours.s_per_update, "time per update", rest=OTHER_PARTS)
    if peer:
        yield break_down(peer.name, peer.phases_s, peer.s_per_update, "time per update")
