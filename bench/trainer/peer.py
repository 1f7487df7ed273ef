"""Penstock's pipeline and TRL's GRPOTrainer on one model, task and machine, one by one: the tokens of long and uneven
answers, and the time that the demo takes.

TRL generates with transformers: with vLLM it can on GPUs alone.
"""

from itertools import pairwise

import msgspec

from bench.pipeline.modes import ACCURACY, EVALUATE_EVERY, ModeRun, accuracy_by_update, run_mode, trainer_parts
from bench.result import BenchError, Figure, Goal
from bench.running import demo_config, demo_model, random_model, save_config
from bench.section import PART_LIMIT_S, Bench, NoPeersError, measure_apart, peers_python
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
"""For Penstock's run with long answers."""


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


def measure_long_answers(bench: Bench) -> list[Figure]:
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
    ours = updates_of(run_mode(config, bench.folder / "runs", limit_s=LIMIT_S), settings.first_update)
    job = TrlJob(run_file=save_config(bench, config), updates=settings.trl_updates, num_threads=settings.trl_threads)
    return long_answer_figures(ours, run_trl(bench, config.name, job))


def measure_demo(bench: Bench) -> list[Figure]:
    """Measures the time to an accuracy of the demo."""
    settings = bench.settings
    config = demo_config("demo-and-trl", demo_model(), f"evaluation.every={EVALUATE_EVERY}")
    limit_s = settings.accuracy_limit_s
    ours = run_mode(config, bench.folder / "runs", limit_s=limit_s, accuracy=ACCURACY, pinned=False)
    job = TrlJob(
        run_file=save_config(bench, config),
        updates=settings.accuracy_updates,
        num_threads=1,
        goal=ACCURACY,
        every=EVALUATE_EVERY,
        limit_s=limit_s,
    )
    return [demo_figure(ours, run_trl(bench, config.name, job))]


def run_trl(bench: Bench, name: str, job: TrlJob, part_limit_s: float = PART_LIMIT_S) -> TrlUpdates | str:
    """Returns TRL's updates, or the reason why it did not run. part_limit_s: of all of it, evaluations included."""
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
        limit_s=part_limit_s,
    )
    return found


def updates_of(run: ModeRun, first_update: int) -> PeerUpdates:
    """Raises BenchError if the run did not get as far as the updates that count."""
    updates = run.telemetry.updates
    if len(updates) <= first_update:
        raise BenchError(f"{len(updates)} updates in {LIMIT_S:g} s, expected more than {first_update}")
    return PeerUpdates(
        name="Penstock",
        seconds=[after.time_s - before.time_s for before, after in pairwise(updates[first_update - 1 :])],
        tokens=[update.num_tokens_trained for update in updates[first_update:]],
        phases_s=trainer_parts(run, first_update),
    )


def long_answer_figures(ours: PeerUpdates, theirs: TrlUpdates | str) -> list[Figure]:
    """Compares updates with long answers. theirs: the reason if TRL did not run."""
    peer = None if isinstance(theirs, str) else theirs
    reference_is = f"{peer.name} with transformers' generate on both cores" if peer else "not measured"
    return [
        Figure(
            "answers of up to 512 tokens, 98 on average: tokens trained per second",
            unit="/s",
            measured=ours.tokens_per_s,
            reference=peer.tokens_per_s if peer else None,
            reference_is=reference_is,
            goal=Goal(at_least=8.0),
            details={"penstock": msgspec.to_builtins(ours), "trl": msgspec.to_builtins(theirs)},
        ),
        Figure(
            "the same: seconds per update",
            unit="s",
            measured=ours.s_per_update,
            reference=peer.s_per_update if peer else None,
            reference_is=reference_is,
        ),
    ]


def demo_figure(ours: ModeRun, theirs: TrlUpdates | str) -> Figure:
    """Compares the times to `ACCURACY`: Penstock's from the first admitted prompt on with evaluations, TRL's from the
    start of training without."""
    peer = None if isinstance(theirs, str) else theirs
    return Figure(
        f"seconds to {ACCURACY} held-out accuracy, the demo",
        unit="s",
        measured=ours.time_to_accuracy_s,
        reference=peer.seconds_to(ACCURACY) if peer else None,
        reference_is=f"{peer.name} with transformers' generate on one thread" if peer else "not measured",
        details={"accuracy_by_update": accuracy_by_update(ours), "trl": msgspec.to_builtins(theirs)},
    )
