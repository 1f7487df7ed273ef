"""Penstock's pipeline and TRL's GRPOTrainer on one model, task and machine, one by one: the tokens of long and uneven
answers, and the time that the run file's task takes.

TRL generates with transformers: with vLLM it can on GPUs alone.
"""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import msgspec

from bench.pipeline.modes import ACCURACY, ModeRun, accuracy_by_update, run_mode, trainer_parts
from bench.pipeline.section import EVALUATE_EVERY, random_model, run_config, save
from bench.result import BenchError, Breakdown, Figure, Goal, break_down, compare
from bench.section import Bench, NoPeersError, make_model, measure_apart, peers_python, run_file_model
from bench.trainer.peer_job import PeerUpdates, TrlJob, TrlUpdates
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
"""Of Penstock's run with long answers."""
OTHER_PARTS = "publish, evaluation, bookkeeping"
HEAD_START = "-0.63"
"""Ends the name of the model that already solves more of the run file's task, about 0.63."""


class LongAnswersSettings(msgspec.Struct, frozen=True, kw_only=True):
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


def measure_long_answers(bench: Bench) -> list[Figure | Breakdown]:
    settings = bench.settings.long_answers
    model = random_model(
        bench,
        "long-answers",
        hidden_size=settings.hidden_size,
        intermediate_size=settings.intermediate_size,
        num_layers=settings.num_layers,
        num_heads=6,
        num_kv_heads=2,
        head_dim=64,
    )
    config = RunConfig(
        name="long-answers",
        seed=1,
        num_updates=settings.updates,
        group_size=settings.group_size,
        groups_per_batch=settings.groups,
        model=ModelConfig(path=str(model)),
        environment=EnvironmentConfig(path="bench.trainer.peer_job:LongAnswers"),
        sampling=SamplingConfig(temperature=1.0, max_tokens=settings.max_tokens),
        producers=ProducersConfig(count=1, groups_in_flight=settings.groups),
        # So small a learning rate moves no weight: every update meets answers of the same lengths.
        trainer=TrainerConfig(learning_rate=1e-12),
        evaluation=EvaluationConfig(num_prompts=0),
        metrics=MetricsConfig(port=0),
    )
    ours = updates_of(run_mode(config, bench.folder / "runs", limit_s=LIMIT_S), settings)
    job = TrlJob(run_file=str(save(bench, config)), updates=settings.trl_updates, num_threads=settings.trl_threads)
    return list(rate_figures(ours, _run_trl(bench, config.name, job)))


def measure_accuracy(bench: Bench) -> list[Figure | Breakdown]:
    """Measures the run file's task from two models: its own, and one that already solves more of it."""
    settings, model = bench.settings, run_file_model(bench)
    better = model.with_name(model.name + HEAD_START)
    make_model(better, forgotten_carries=0.5, lowest_accuracy=0.58, highest_accuracy=0.68)
    figures: list[Figure | Breakdown] = []
    for start in (model, better):
        config = run_config(bench, f"from-{start.name}", start, f"evaluation.every={EVALUATE_EVERY}")
        limit_s = settings.accuracy_limit_s
        ours = run_mode(config, bench.folder / "runs", limit_s=limit_s, accuracy=ACCURACY, pinned=False)
        job = TrlJob(
            run_file=str(save(bench, config)),
            updates=settings.accuracy_updates,
            num_threads=1,
            goal=ACCURACY,
            every=EVALUATE_EVERY,
            limit_s=limit_s,
        )
        figures += accuracy_figures(start, ours, _run_trl(bench, config.name, job))
    return figures


def _run_trl(bench: Bench, name: str, job: TrlJob) -> TrlUpdates | str:
    """Returns TRL's updates, or the reason why it did not run."""
    try:
        python = peers_python()
    except NoPeersError as error:
        return str(error)
    threads = str(job.num_threads)
    found: TrlUpdates = measure_apart(
        f"trl-{name}",
        "bench.trainer.trl_part:measure",
        job,
        TrlUpdates,
        bench.folder,
        python=python,
        environment={"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads},
    )
    return found


def updates_of(run: ModeRun, settings: LongAnswersSettings) -> PeerUpdates:
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


def rate_figures(ours: PeerUpdates, theirs: TrlUpdates | str) -> Iterator[Figure | Breakdown]:
    """Compares updates with long answers. theirs: the reason if TRL did not run."""
    peer = None if isinstance(theirs, str) else theirs
    reference_is = f"{peer.name} with transformers' generate on both cores" if peer else "not measured"
    yield compare(
        "answers of up to 512 tokens, 98 on average: tokens trained per second",
        unit="/s",
        measured=ours.tokens_per_s,
        reference=peer.tokens_per_s if peer else None,
        reference_is=reference_is,
        goal=Goal(at_least=8.0),
        details={"penstock": msgspec.to_builtins(ours), "trl": _details(theirs)},
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


def accuracy_figures(start: Path, ours: ModeRun, theirs: TrlUpdates | str) -> Iterator[Figure | Breakdown]:
    """Compares the times to `ACCURACY`: Penstock's from the first admitted prompt on with evaluations, TRL's from the
    start of training without."""
    peer = None if isinstance(theirs, str) else theirs
    yield compare(
        f"seconds to {ACCURACY} held-out accuracy from {start.name}",
        unit="s",
        measured=ours.time_to_accuracy_s,
        reference=peer.seconds_to(ACCURACY) if peer else None,
        reference_is=f"{peer.name} with transformers' generate on one thread" if peer else "not measured",
        details={
            "num_updates": ours.num_updates,
            "accuracy_by_update": accuracy_by_update(ours),
            "trl": _details(theirs),
        },
    )
    if peer:
        yield break_down(f"{peer.name} from {start.name}", peer.phases_s, peer.s_per_update, "time per update")


def _details(theirs: TrlUpdates | str) -> dict[str, object]:
    return {"reason": theirs} if isinstance(theirs, str) else msgspec.to_builtins(theirs)
