"""The trainer section: ranks against one process, the record of rollouts, images, and a run against TRL.

Every rank has one torch thread, like each process of a run on one machine.
"""

from collections.abc import Iterator
from pathlib import Path
from statistics import median

import msgspec

from bench.result import Figure, Goal, compare_rounds, in_turns
from bench.section import Bench, BenchSection, found_apart, wait_for
from bench.sizing import MIXTURE, SMALL, save_random
from bench.trainer.images import ImagesSettings, images_figures
from bench.trainer.peer import LongAnswersSettings, measure_demo, measure_long_answers
from bench.trainer.ranks import OnRanks, Work, start_ranks
from bench.trainer.real import RealSettings, measure_real
from bench.trainer.record import record_figures
from bench.trainer.sampled_version import sampled_version_figures
from penstock.deploy.launch.memory import ModelShape

ON_RANKS = "bench.trainer.ranks:on_ranks"


class TrainerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes and repetitions. The defaults take about half an hour on two quiet cores, most of it TRL's."""

    model: ModelShape = SMALL
    mixture: ModelShape = MIXTURE
    work: Work = Work(num_groups=4, group_size=4, prompt_tokens=16, sampled_tokens=496, tokens_per_pass=4096)
    mixture_work: Work = Work(num_groups=2, group_size=4, prompt_tokens=16, sampled_tokens=112, tokens_per_pass=1024)
    ranks_rounds: int = 3
    ranks_steps: int = 2
    record_rounds: int = 5
    images: ImagesSettings = ImagesSettings()
    long_answers: LongAnswersSettings = LongAnswersSettings()
    real: RealSettings = RealSettings()
    accuracy_updates: int = 3000
    accuracy_limit_s: float = 600.0


def ranks_figures(bench: Bench) -> Iterator[Figure]:
    """Compares two ranks with one, and with the machine's limit: two trainers that share nothing, each with the whole
    batch."""
    settings = bench.settings
    model, num_tokens = _model(bench, settings.model), settings.work.num_tokens

    def rate(name: str, num_ranks: int, copies: int = 1) -> float:
        job = OnRanks(model=str(model), work=settings.work, num_ranks=num_ranks, steps=settings.ranks_steps)
        names = [f"{name}-{n}" for n in range(copies)]
        wait_for([child for copy in names for child in start_ranks(copy, ON_RANKS, job, bench.folder)])
        return copies * num_tokens / max(median(found_apart(copy, list[float], bench.folder)) for copy in names)

    measures = {
        "one": lambda: rate("one-rank", 1),
        "two": lambda: rate("two-ranks", 2),
        "apart": lambda: rate("apart", 1, copies=2),
    }
    found = in_turns(settings.ranks_rounds, measures)
    yield compare_rounds(
        f"two ranks: tokens trained per second, {settings.model.name}",
        found["two"],
        found["one"],
        reference_is="one rank; one thread a rank, in turns",
        goal=Goal(at_least=1.6),
    )
    yield compare_rounds(
        f"two trainers that share nothing: tokens trained per second, {settings.model.name}",
        found["apart"],
        found["one"],
        reference_is="one of them alone: what is short of 2 is caches, memory and clock",
    )


def experts_figures(bench: Bench) -> Iterator[Figure]:
    """Compares a mixture's grouped products with a loop over its experts, and experts that stay on their rank with ones
    that every rank gathers."""
    settings = bench.settings
    model, num_tokens = _model(bench, settings.mixture), settings.mixture_work.num_tokens

    def rate(name: str, num_ranks: int, **how: bool) -> float:
        job = OnRanks(
            model=str(model), work=settings.mixture_work, num_ranks=num_ranks, steps=settings.ranks_steps, **how
        )
        wait_for(start_ranks(name, ON_RANKS, job, bench.folder))
        return num_tokens / median(found_apart(name, list[float], bench.folder))

    measures = {
        "grouped": lambda: rate("grouped", 1),
        "loop": lambda: rate("loop", 1, loops_over_experts=True),
        "by expert": lambda: rate("by-expert", 2, by_expert=True),
        "gathered": lambda: rate("gathered", 2),
    }
    found = in_turns(settings.ranks_rounds, measures)
    for better, worse, reference_is in (
        ("grouped", "loop", "a loop over the experts, one rank, in turns"),
        ("by expert", "gathered", "every rank gathers all experts; two ranks, in turns"),
        ("by expert", "grouped", "one rank, in turns"),
    ):
        yield compare_rounds(
            f"experts {better}: tokens trained per second, {settings.mixture.name}",
            found[better],
            found[worse],
            reference_is=reference_is,
        )


def _model(bench: Bench, model: ModelShape) -> Path:
    folder = bench.folder / model.name
    if not folder.exists():
        save_random(model, folder)
    return folder


TRAINER = BenchSection(
    "trainer",
    {
        "ranks": ranks_figures,
        "experts": experts_figures,
        "record": lambda bench: record_figures(
            _model(bench, bench.settings.model), bench.settings.work, bench.settings.record_rounds, bench.folder
        ),
        "sampled-version": lambda bench: sampled_version_figures(
            _model(bench, bench.settings.model), bench.settings.work, bench.settings.record_rounds
        ),
        "images": lambda bench: images_figures(bench.settings.images, bench.folder / "seeing"),
        "long-answers": measure_long_answers,
        "peers": measure_demo,
        "real": measure_real,
    },
    TrainerSettings(),
    quick=TrainerSettings(
        model=ModelShape("tiny", 64, 128, 2, 2, 1, 64, 300, tied=True),
        mixture=ModelShape("tiny mixture", 64, 64, 2, 2, 1, 64, 300, tied=True, experts=4, experts_per_token=2),
        work=Work(num_groups=4, group_size=2, prompt_tokens=4, sampled_tokens=16, tokens_per_pass=64),
        mixture_work=Work(num_groups=4, group_size=2, prompt_tokens=4, sampled_tokens=16, tokens_per_pass=64),
        ranks_rounds=1,
        ranks_steps=1,
        record_rounds=1,
        images=ImagesSettings(
            hidden=64,
            layers=2,
            tower_hidden=32,
            tower_layers=2,
            vocabulary=64,
            width=96,
            height=64,
            group_size=2,
            sampled_tokens=8,
            rounds=1,
        ),
        long_answers=LongAnswersSettings(
            hidden_size=64, intermediate_size=128, num_layers=2, max_tokens=32, updates=3, first_update=1
        ),
        real=RealSettings(seeds=(1,), updates=3, every=2, overrides=("groups_per_batch=2", "evaluation.num_prompts=4")),
        accuracy_updates=3,
        accuracy_limit_s=6.0,
    ),
)
