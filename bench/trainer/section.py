"""The trainer section: ranks against one process, one process against a plain loop, and a run against TRL.

Every rank has one torch thread, like each process of a run on one machine.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median

import msgspec
import torch
from msgspec.structs import replace
from safetensors.torch import load_file

from bench.result import Figure, Goal, compare, compare_rounds, in_turns
from bench.section import Bench, BenchSection, found_apart, make_model, measure_apart, wait_for
from bench.sizing import LARGE, SMALL, MemoryCase, MemoryMeasured, MemoryModel, measure, save_model
from bench.trainer.part import AgainstPlain, OnRanks, Timed, Work, relative_difference
from bench.trainer.peer import LongAnswersSettings, measure_accuracy, measure_long_answers
from bench.trainer.ranks import start_ranks
from docs.sizing import measured_case, total_gb

ON_RANKS = "bench.trainer.part:on_ranks"
MAX_DIFFERENCE = 1e-5
DEMO_WORK = Work(num_groups=32, group_size=8, prompt_tokens=6, sampled_tokens=4, tokens_per_pass=8192)
"""The demo's update: a sum of three digits and the end."""


class TrainerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes and repetitions. The defaults take about half an hour on two quiet cores, most of it TRL's."""

    model: MemoryModel = SMALL
    work: Work = Work(num_groups=4, group_size=4, prompt_tokens=16, sampled_tokens=496, tokens_per_pass=4096)
    plain_rounds: int = 5
    demo_steps: int = 30
    ranks_rounds: int = 3
    ranks_steps: int = 2
    memory_model: MemoryModel = LARGE
    memory_tokens: int = 1024
    """Of each pass."""
    memory_ranks: tuple[int, ...] = (1, 2, 4)
    weights_work: Work = Work(num_groups=4, group_size=4, prompt_tokens=16, sampled_tokens=48, tokens_per_pass=512)
    weights_ranks: tuple[int, ...] = (2, 4)
    weights_steps: int = 10
    long_answers: LongAnswersSettings = LongAnswersSettings()
    accuracy_updates: int = 3000
    accuracy_limit_s: float = 600.0


_TINY = MemoryModel("tiny", 64, 128, 2, 2, 1, 300)
_LITTLE = Work(num_groups=4, group_size=2, prompt_tokens=4, sampled_tokens=16, tokens_per_pass=64)
QUICK_TRAINER = TrainerSettings(
    model=_TINY,
    work=_LITTLE,
    plain_rounds=1,
    demo_steps=2,
    ranks_rounds=1,
    ranks_steps=1,
    memory_model=_TINY,
    memory_ranks=(1, 2),
    weights_work=_LITTLE,
    weights_ranks=(2,),
    weights_steps=2,
    long_answers=LongAnswersSettings(
        hidden_size=64, intermediate_size=128, num_layers=2, max_tokens=32, updates=3, first_update=1
    ),
    accuracy_updates=3,
    accuracy_limit_s=6.0,
)
"""Shows that everything runs. Its figures mean nothing."""


def measure_plain(bench: Bench) -> list[Figure]:
    return [plain_figure(*each) for each in _timed(bench, compiled=False)]


def measure_compiled(bench: Bench) -> list[Figure]:
    return [compiled_figure(*each) for each in _timed(bench, compiled=True)]


def _timed(bench: Bench, *, compiled: bool) -> Iterator[tuple[str, Timed, int]]:
    """Yields, for each model, its name, its times, and the tokens of each round."""
    settings = bench.settings
    demo = bench.folder / "demo"
    if not demo.exists():
        make_model(demo, train=False)
    jobs = {
        "the demo's model": (demo, DEMO_WORK, settings.demo_steps),
        settings.model.name: (_model(bench, settings.model), settings.work, 1),
    }
    for name, (folder, work, steps) in jobs.items():
        job = AgainstPlain(model=str(folder), work=work, rounds=settings.plain_rounds, steps=steps, compiled=compiled)
        part = f"{'compiled' if compiled else 'plain'}-{folder.name}"
        timed = measure_apart(part, "bench.trainer.part:against_plain", job, Timed, bench.folder)
        yield name, timed, work.num_tokens * steps


def plain_figure(name: str, timed: Timed, num_tokens: int) -> Figure:
    """Compares the learner's rate with the plain loop's. num_tokens: of each round."""
    learner, plain = ([num_tokens / seconds for seconds in timed.seconds[name]] for name in ("learner", "plain"))
    return compare_rounds(
        f"one rank: tokens trained per second, {name}",
        learner,
        plain,
        reference_is="a plain loop without diagnostics on the same batches, in turns; processor time of one thread",
        goal=Goal(at_least=0.97),
        details=msgspec.to_builtins(timed),
    )


def compiled_figure(name: str, timed: Timed, num_tokens: int) -> Figure:
    """As `plain_figure`, of the learner without `trainer.compile` in the plain loop's place."""
    figure = plain_figure(f"{name}, compiled", timed, num_tokens)
    reference_is = "without trainer.compile, in turns; processor time of one thread, without the first step"
    return replace(figure, reference_is=reference_is, goal=None, reached=None)


def measure_ranks(bench: Bench) -> list[Figure]:
    """Measures in turns one rank, two ranks, and two trainers that share nothing but the machine, each with the whole
    batch."""
    settings = bench.settings
    model = _model(bench, settings.model)

    def seconds(name: str, num_ranks: int, copies: int = 1) -> float:
        job = OnRanks(model=str(model), work=settings.work, num_ranks=num_ranks, steps=settings.ranks_steps)
        names = [f"{name}-{n}" for n in range(copies)]
        wait_for([child for each in names for child in start_ranks(each, ON_RANKS, job, bench.folder)])
        return max(median(found_apart(each, list[float], bench.folder)) for each in names)

    measures = {
        "one": lambda: seconds("one-rank", 1),
        "two": lambda: seconds("two-ranks", 2),
        "apart": lambda: seconds("apart", 1, copies=2),
    }
    return list(ranks_figures(in_turns(settings.ranks_rounds, measures), settings))


def ranks_figures(found: Mapping[str, Sequence[float]], settings: TrainerSettings) -> Iterator[Figure]:
    """Compares two ranks with one, and with the machine's limit: two trainers that share nothing."""
    num_tokens = settings.work.num_tokens
    one, two = ([num_tokens / seconds for seconds in found[name]] for name in ("one", "two"))
    yield compare_rounds(
        f"two ranks: tokens trained per second, {settings.model.name}",
        two,
        one,
        reference_is="one rank; one thread a rank, in turns",
        goal=Goal(at_least=1.6),
        details={f"{name}_s": list(values) for name, values in found.items()},
    )
    yield compare_rounds(
        f"two trainers that share nothing: tokens trained per second, {settings.model.name}",
        [2 * num_tokens / seconds for seconds in found["apart"]],
        one,
        reference_is="one of them alone: what is short of 2 is caches, memory and clock",
    )


def measure_memory(bench: Bench) -> list[Figure]:
    settings = bench.settings
    cases = (
        MemoryCase(settings.memory_model, "float32", settings.memory_tokens, False, ranks)
        for ranks in settings.memory_ranks
    )
    return [figure for case in cases for figure in memory_figures(measure(case))]


def memory_figures(measured: MemoryMeasured) -> Iterator[Figure]:
    case = measured.case
    formula = total_gb(*measured_case(msgspec.to_builtins(case))) * 1e3
    where = f"{case.model.name}, {case.ranks} rank{'s' * (case.ranks > 1)}"
    yield compare(
        f"peak memory per rank, {where}",
        unit="MB",
        measured=measured.peak_bytes / 1e6,
        reference=formula,
        reference_is="16 / N bytes a parameter, activations, and what is gathered: docs/sizing.md",
        goal=Goal(at_most=1.15),
    )
    yield compare(
        f"peak memory while loading, {where}",
        unit="MB",
        measured=measured.loading_bytes / 1e6,
        reference=measured.peak_bytes / 1e6,
        reference_is="the peak while training; of the rank that has most, which holds the whole model once",
    )


def measure_weights(bench: Bench) -> list[Figure]:
    settings = bench.settings
    model = _model(bench, settings.model)

    def weights(num_ranks: int, again: str = "") -> dict[str, torch.Tensor]:
        name = f"weights-{num_ranks}{again}"
        file = bench.folder / f"{name}.pt"
        job = OnRanks(
            model=str(model),
            work=settings.weights_work,
            num_ranks=num_ranks,
            steps=settings.weights_steps - 1,
            weights=str(file),
        )
        wait_for(start_ranks(name, ON_RANKS, job, bench.folder))
        found: dict[str, torch.Tensor] = torch.load(file)
        return found

    expected, start = weights(1), load_file(model / "model.safetensors")
    found: list[Figure] = []
    for num_ranks in settings.weights_ranks:
        first, again = weights(num_ranks), weights(num_ranks, "-again")
        found += weights_figures(f"{num_ranks} ranks, {settings.model.name}", expected, first, again, start)
    return found


def weights_figures(
    where: str,
    expected: Mapping[str, torch.Tensor],
    first: Mapping[str, torch.Tensor],
    again: Mapping[str, torch.Tensor],
    start: Mapping[str, torch.Tensor],
) -> Iterator[Figure]:
    apart = {name: relative_difference(first[name], tensor) for name, tensor in expected.items()}
    moved = max(relative_difference(tensor, start[name]) for name, tensor in expected.items())
    yield compare(
        f"weights after training on {where}: relative difference",
        unit="",
        measured=max(apart.values()),
        reference=MAX_DIFFERENCE,
        reference_is="the difference allowed from those of one rank, of the parameter that differs most",
        goal=Goal(at_most=1.0),
        details={"parameter": max(apart, key=lambda name: apart[name]), "moved_by_training": moved},
    )
    num_different = sum(not torch.equal(first[name], tensor) for name, tensor in again.items())
    yield compare(
        f"the same once more on {where}: parameters with other bits",
        unit="",
        measured=float(num_different),
        reference=0.0,
        reference_is="the first time",
        goal=Goal(at_most=0.0),
        ratio=float(num_different),
    )


def _model(bench: Bench, model: MemoryModel) -> Path:
    folder = bench.folder / model.name
    if not folder.exists():
        save_model(model, folder)
    return folder


TRAINER = BenchSection(
    "trainer",
    {
        "plain": measure_plain,
        "compiled": measure_compiled,
        "ranks": measure_ranks,
        "rank-memory": measure_memory,
        "weights": measure_weights,
        "long-answers": measure_long_answers,
        "peers": measure_accuracy,
    },
    TrainerSettings(),
    QUICK_TRAINER,
    uses_run_file=True,
)
