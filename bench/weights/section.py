"""The weights section: the cost of publishing a policy for the trainer, the transfer, the producers and their
engines."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from statistics import median

import msgspec

from bench.pipeline.modes import ModeRun, paused_share, run_mode
from bench.pipeline.section import random_model, run_config, save
from bench.result import Figure, Goal, compare
from bench.section import (
    Bench,
    BenchSection,
    found_apart,
    host_folder,
    make_model,
    measure_apart,
    redis_server,
    start_apart,
    wait_for,
)
from bench.weights.changes import Changes, ChangesJob, qwen_508m
from bench.weights.holding import Held, HoldingJob
from bench.weights.pauses import Paused, PauseSettings
from bench.weights.publishing import Published, PublishingJob
from penstock.deploy.launch.redis_server import RedisServer

MB = 1_000_000
HOLD, PUBLISH = "bench.weights.holding:hold", "bench.weights.publishing:publish"


class WeightsSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes and repetitions. The defaults take about a quarter of an hour on two quiet cores."""

    sizes_mb: tuple[float, ...] = (1, 200, 1000)
    changed: float = 0.01
    blocked_versions: int = 5
    burn_s_per_gb: float = 4.0
    """Of the next batch's passes, between two policies."""
    way_versions: int = 4
    way_mb: float = 1000
    producers: int = 4
    late_mb: float = 200
    late_versions: int = 100
    pause_blocks: int = 3
    pause_updates_per_block: tuple[int, ...] = (12, 5, 3)
    """By size."""
    demo_limit_s: float = 100.0
    changes: tuple[tuple[str, float], ...] = (("1e-6", 0.03), ("1e-5", 0.12))
    """Learning rates, and the goal for each."""
    changes_thinned: int = 64
    changes_warm_steps: int = 40
    changes_steps: int = 3


QUICK_WEIGHTS = WeightsSettings(
    sizes_mb=(1, 8),
    blocked_versions=2,
    way_versions=2,
    way_mb=4,
    late_mb=2,
    late_versions=5,
    pause_blocks=1,
    pause_updates_per_block=(3,),
    demo_limit_s=6.0,
    changes_thinned=2048,
    changes_warm_steps=2,
    changes_steps=1,
)
"""Shows that everything runs. Its figures mean nothing."""

PAUSE_MODELS: dict[str, dict[str, int]] = {
    "1 MB": {},
    "200 MB": {
        "hidden_size": 1024, "intermediate_size": 3072, "num_layers": 4, "num_heads": 16, "num_kv_heads": 8,
        "head_dim": 64,
    },
    "1 GB": {
        "hidden_size": 1024, "intermediate_size": 3072, "num_layers": 20, "num_heads": 16, "num_kv_heads": 8,
        "head_dim": 64,
    },
}  # fmt: skip
"""Recipes of so many bytes of float32 weights."""


def measure_blocked(bench: Bench) -> list[Figure]:
    settings = bench.settings
    figures: list[Figure] = []
    for size_mb in settings.sizes_mb:
        published, _ = _run(
            bench,
            f"blocked-{size_mb:g}",
            size_mb,
            settings.blocked_versions,
            burn_s=max(0.2, settings.burn_s_per_gb * size_mb / 1000),
            today=True,
        )
        figures += blocked_figures(f"{size_mb:g} MB, {settings.changed:.0%} changed", published)
    return figures


def blocked_figures(what: str, published: Published) -> Iterator[Figure]:
    blocked_s = median(published.blocked_s)
    yield compare(
        f"seconds that the trainer is blocked per update, {what}",
        unit="ms",
        measured=blocked_s * 1000,
        reference=published.copy_s * 1000,
        reference_is="one copy of the same bytes in memory",
        goal=Goal(at_most=1.0),
        details=msgspec.to_builtins(published),
    )
    yield compare(
        f"the same against a whole file, {what}",
        unit="ms",
        measured=blocked_s * 1000,
        reference=published.today_publish_s * 1000,
        reference_is="copied, written to tmpfs as one file, read back and hashed by BLAKE2b, as before the weight log",
        goal=Goal(at_most=0.1),
    )


def measure_changed(bench: Bench) -> list[Figure]:
    settings = bench.settings
    figures = []
    for rate, goal in settings.changes:
        job = ChangesJob(
            shapes=tuple(qwen_508m()),
            thinned=settings.changes_thinned,
            learning_rate=float(rate),
            warm_steps=settings.changes_warm_steps,
            steps=settings.changes_steps,
        )
        found = measure_apart(f"changes-{rate}", "bench.weights.changes:measure_changes", job, Changes, bench.folder)
        figures.append(changed_figure(rate, found, goal))
    return figures


def changed_figure(rate: str, found: Changes, goal: float) -> Figure:
    return compare(
        f"bytes per update, AdamW at a learning rate of {rate}, shapes of a 508M model",
        unit="MB",
        measured=median(found.num_bytes) / MB,
        reference=found.dense_bytes / MB,
        reference_is="all elements in bfloat16; gradients are drawn at random, one row of each matrix in a few",
        goal=Goal(at_most=goal),
        details=msgspec.to_builtins(found),
    )


def measure_way(bench: Bench) -> list[Figure]:
    settings = bench.settings
    size_mb = settings.way_mb
    published, (alone,) = _run(bench, "one-producer", size_mb, settings.way_versions, holders=1, today=True)
    several_published, several = _run(bench, "producers", size_mb, settings.way_versions, holders=settings.producers)
    return list(way_figures(size_mb, published, alone, several_published, several))


def way_figures(
    size_mb: float, published: Published, alone: Held, several_published: Published, several: list[Held]
) -> Iterator[Figure]:
    one_s = _way_s(published, [alone])
    yield compare(
        f"optimizer step to a producer that holds the policy, {size_mb:g} MB, 1% changed, through Redis",
        unit="s",
        measured=median(one_s),
        reference=published.today_publish_s + published.today_verify_s,
        reference_is="a whole file on tmpfs, hashed by BLAKE2b on both sides, as before the weight log; no load",
        goal=Goal(at_most=0.5),
        details={"by_version_s": one_s},
    )
    several_s = _way_s(several_published, several)
    yield compare(
        f"the same until {len(several)} producers of one host hold it",
        unit="s",
        measured=median(several_s),
        reference=median(one_s),
        reference_is="one producer",
        goal=Goal(at_most=1.1),
        details={"by_version_s": several_s, "fetched_bytes": [held.num_bytes for held in several]},
    )
    copy_bytes, own_bytes = max(held.copy_bytes for held in several), most_at_once([held.own_bytes for held in several])
    yield compare(
        f"memory of a host with {len(several)} producers, without their engines",
        unit="MB",
        measured=(copy_bytes + own_bytes) / MB,
        reference=size_mb,
        reference_is="one policy",
        goal=Goal(at_most=1.2),
        details={
            "copy_bytes": copy_bytes,
            "own_bytes": own_bytes,
            "most_of_each_bytes": [max(found for _, found in held.own_bytes) for held in several],
        },
    )


def most_at_once(own_bytes: list[list[tuple[float, int]]]) -> int:
    """Returns the most that several processes have together at any time. own_bytes: of each, see `Held`."""
    now, most = [0] * len(own_bytes), 0
    for _, number, found in sorted((at, number, found) for number, each in enumerate(own_bytes) for at, found in each):
        now[number] = found
        most = max(most, sum(now))
    return most


def _way_s(published: Published, held: list[Held]) -> list[float]:
    """Returns, by version after the first, the seconds from its publication until the last producer holds it."""
    return [
        max(each.held_s[version] for each in held) - began_s
        for version, began_s in enumerate(published.began_s, start=1)
    ]


def measure_late(bench: Bench) -> list[Figure]:
    """Compares a producer that joins after many policies with one that joins when there is one."""
    settings = bench.settings

    def joined(name: str, num_versions: int) -> Held:
        with host_folder(name) as scratch, _server(bench, name) as server:
            # Anchors of a policy of this size would be files.
            anchors = str(bench.folder / f"{name}-anchors")
            publishing = _publishing(
                bench, server.url, name, settings.late_mb, num_versions, bench.folder, anchors=anchors
            )
            measure_apart(f"{name}-trainer", PUBLISH, publishing, Published, bench.folder)
            holding = HoldingJob(url=server.url, run=name, host_folder=str(scratch), last=num_versions)
            held: Held = measure_apart(f"{name}-holder", HOLD, holding, Held, bench.folder)
            return held

    anchor, late = joined("anchor", 0), joined("late", settings.late_versions)
    return [late_figure(settings.late_mb, settings.late_versions, late, anchor)]


def late_figure(size_mb: float, num_versions: int, late: Held, anchor: Held) -> Figure:
    return compare(
        f"a producer that joins {num_versions} policies late holds the newest, {size_mb:g} MB",
        unit="s",
        measured=late.first_s,
        reference=anchor.first_s,
        reference_is="one that joins when there is the anchor alone",
        goal=Goal(at_most=1.6),
        details={"fetched_bytes": late.num_bytes, "anchor_bytes": anchor.num_bytes},
    )


def measure_pauses(bench: Bench) -> list[Figure]:
    found = zip(PAUSE_MODELS.items(), bench.settings.pause_updates_per_block, strict=False)
    return [pause_figure(size, _paused(bench, size, recipe, updates)) for (size, recipe), updates in found]


def _paused(bench: Bench, size: str, recipe: dict[str, int], updates_per_block: int) -> Paused:
    name = f"pause-{size.replace(' ', '')}"
    config = run_config(bench, name, random_model(bench, name, **recipe))
    settings = PauseSettings(
        run_file=str(save(bench, config)),
        blocks=bench.settings.pause_blocks,
        updates_per_block=updates_per_block,
        sequences_in_flight=8 if recipe else 32,
        spacing_s=0.5 if recipe else 0.15,
    )
    return measure_apart(name, "bench.weights.pauses:measure_pauses", settings, Paused, bench.folder)


def pause_figure(size: str, paused: Paused) -> Figure:
    return compare(
        f"pause per update, {size} of weights",
        unit="ms",
        measured=paused.pause_s * 1000,
        reference=paused.bare_load_s * 1000,
        reference_is="vLLM's own load of the same file into the idle engine",
        goal=Goal(at_most=1.05),
        details={
            **msgspec.to_builtins(paused),
            "ratio_of_token_gap": max(0.0, paused.token_gap_s - paused.step_s) / paused.bare_load_s,
        },
    )


def measure_demo(bench: Bench) -> list[Figure]:
    model = bench.folder / "demo"
    make_model(model)
    config = run_config(bench, "paused", model)
    return [demo_figure(run_mode(config, bench.folder / "runs", limit_s=bench.settings.demo_limit_s, pinned=False))]


def demo_figure(run: ModeRun) -> Figure:
    num_producers = len(run.telemetry.producers)
    return compare(
        "share of the run file's time that a producer is paused",
        unit="%",
        measured=100 * paused_share(run) / num_producers,
        reference=12.0,
        reference_is="the most it may be",
        goal=Goal(at_most=1.0),
        details={"num_producers": num_producers, "num_updates": run.num_updates},
    )


def _server(bench: Bench, name: str) -> AbstractContextManager[RedisServer]:
    """A Redis with room for policies of any size."""
    return redis_server(bench.folder / f"redis-{name}", maxmemory_mb=8000)


def _run(
    bench: Bench,
    name: str,
    size_mb: float,
    num_versions: int,
    *,
    holders: int = 0,
    burn_s: float = 0.0,
    today: bool = False,
) -> tuple[Published, list[Held]]:
    """Runs a trainer that publishes, alongside producers that hold what it publishes."""
    with host_folder(name) as scratch, _server(bench, name) as server:
        jobs = {
            f"{name}-holder-{n}": HoldingJob(url=server.url, run=name, host_folder=str(scratch), last=num_versions)
            for n in range(holders)
        }
        children = [start_apart(each, HOLD, job, bench.folder) for each, job in jobs.items()]
        job = _publishing(
            bench, server.url, name, size_mb, num_versions, scratch, burn_s=burn_s, holders=holders, today=today
        )
        children.append(start_apart(name, PUBLISH, job, bench.folder))
        wait_for(children)
    return found_apart(name, Published, bench.folder), [found_apart(each, Held, bench.folder) for each in jobs]


def _publishing(
    bench: Bench, url: str, name: str, size_mb: float, num_versions: int, folder: Path, **more: object
) -> PublishingJob:
    return PublishingJob(
        url=url,
        run=name,
        num_bytes=int(size_mb * MB) // 2 * 2,
        changed=bench.settings.changed,
        num_versions=num_versions,
        folder=str(folder),
        **more,  # type: ignore[arg-type]
    )


WEIGHTS = BenchSection(
    "weights",
    {
        "blocked": measure_blocked,
        "changed": measure_changed,
        "way": measure_way,
        "late": measure_late,
        "pause": measure_pauses,
        "demo": measure_demo,
    },
    WeightsSettings(),
    QUICK_WEIGHTS,
    uses_run_file=True,
)
