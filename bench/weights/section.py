"""The weights section: the cost of publishing a policy for the trainer, the transfer, the producers and their
engines."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from bench.result import Figure, Goal
from bench.running import demo_config, random_model, save_config
from bench.section import (
    Bench,
    BenchSection,
    found_apart,
    host_folder,
    measure_apart,
    redis_server,
    start_apart,
    wait_for,
)
from bench.weights.changes import ChangesJob
from bench.weights.holding import Held, HoldingJob
from bench.weights.pauses import PauseSettings
from bench.weights.publishing import Published, PublishingJob
from penstock.deploy.launch.redis_server import RedisServer

MB = 1_000_000
HOLD, PUBLISH = "bench.weights.holding:hold", "bench.weights.publishing:publish"
CHANGED = 0.01
"""The share of the elements that an update changes."""
CHANGES = {1e-6: 0.03, 1e-5: 0.12}
"""Learning rates, and the goal for each."""
BURN_S_PER_GB = 4.0
"""Products between two policies, in place of the next batch's passes."""
NUM_PRODUCERS = 4
WIDE = {"hidden_size": 1024, "intermediate_size": 3072, "num_heads": 16, "num_kv_heads": 8, "head_dim": 64}
PAUSE_MODELS: dict[str, dict[str, int]] = {
    "1 MB": {},
    "200 MB": {**WIDE, "num_layers": 4},
    "1 GB": {**WIDE, "num_layers": 20},
}
"""Recipes of so many bytes of float32 weights."""


class WeightsSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes and repetitions. The defaults take about a quarter of an hour on two quiet cores.

    versions: of a policy whose publication is timed. pause_updates: in a block, by size. changes_thinned: one row of so
    many is drawn.
    """

    sizes_mb: tuple[float, ...] = (1, 200, 1000)
    versions: int = 5
    way_mb: float = 1000
    late_mb: float = 200
    late_versions: int = 100
    pause_blocks: int = 3
    pause_updates: tuple[int, ...] = (12, 5, 3)
    changes_thinned: int = 64
    changes_warm_steps: int = 40


def measure_blocked(bench: Bench) -> Iterator[Figure]:
    for size_mb in bench.settings.sizes_mb:
        what = f"{size_mb:g} MB, {CHANGED:.0%} changed"
        burn_s = max(0.2, BURN_S_PER_GB * size_mb / 1000)
        published, _ = _run(bench, f"blocked-{size_mb:g}", size_mb, burn_s=burn_s)
        blocked_s = median(published.blocked_s)
        yield Figure(
            f"seconds that the trainer is blocked per update, {what}",
            unit="ms",
            measured=blocked_s * 1000,
            reference=published.copy_s * 1000,
            reference_is="one copy of the same bytes in memory",
            goal=Goal(at_most=1.0),
            details=msgspec.to_builtins(published),
        )


def measure_changed(bench: Bench) -> Iterator[Figure]:
    settings = bench.settings
    for rate, goal in CHANGES.items():
        job = ChangesJob(
            learning_rate=rate,
            goal=goal,
            thinned=settings.changes_thinned,
            warm_steps=settings.changes_warm_steps,
            steps=3,
        )
        part = "bench.weights.changes:measure_changes"
        yield measure_apart(f"changes-{rate:g}", part, job, Figure, bench.folder)


def measure_way(bench: Bench) -> Iterator[Figure]:
    size_mb = bench.settings.way_mb
    published, alone = _run(bench, "one-producer", size_mb, holders=1)
    one_s = _way_s(published, alone)
    yield Figure(
        f"optimizer step to a producer that holds the policy, {size_mb:g} MB, 1% changed, through Redis",
        unit="s",
        measured=median(one_s),
        details={"by_version_s": one_s},
    )
    published, several = _run(bench, "producers", size_mb, holders=NUM_PRODUCERS)
    several_s = _way_s(published, several)
    yield Figure(
        f"the same until {len(several)} producers of one host hold it",
        unit="s",
        measured=median(several_s),
        reference=median(one_s),
        reference_is="one producer",
        goal=Goal(at_most=1.1),
        details={"by_version_s": several_s, "fetched_bytes": [held.num_bytes for held in several]},
    )
    copy_bytes, own_bytes = max(held.copy_bytes for held in several), most_at_once([held.own_bytes for held in several])
    yield Figure(
        f"memory of a host with {len(several)} producers, without their engines",
        unit="MB",
        measured=(copy_bytes + own_bytes) / MB,
        reference=size_mb,
        reference_is="one policy",
        goal=Goal(at_most=1.2),
        details={"copy_bytes": copy_bytes, "own_bytes": own_bytes},
    )


def most_at_once(own_bytes: list[list[tuple[float, int]]]) -> int:
    """Returns the most that several processes have together at any time. own_bytes: of each, see `Held`."""
    changes = sorted((at, number, found) for number, line in enumerate(own_bytes) for at, found in line)
    now, most = [0] * len(own_bytes), 0
    for _, number, found in changes:
        now[number] = found
        most = max(most, sum(now))
    return most


def _way_s(published: Published, producers: list[Held]) -> list[float]:
    """Returns, by version after the first, the seconds from its publication until the last producer holds it."""
    return [
        max(held.held_s[version] for held in producers) - began_s
        for version, began_s in enumerate(published.began_s, start=1)
    ]


def measure_late(bench: Bench) -> list[Figure]:
    """Compares a producer that joins after many policies with one that joins when there is one."""
    size_mb, num_versions = bench.settings.late_mb, bench.settings.late_versions

    def joined(name: str, num_versions: int) -> Held:
        with host_folder(name) as scratch, _server(bench, name) as server:
            # Anchors of a policy of this size would be files.
            anchors = str(bench.folder / f"{name}-anchors")
            publishing = _publishing(server.url, name, size_mb, num_versions, bench.folder, anchors=anchors)
            measure_apart(f"{name}-trainer", PUBLISH, publishing, Published, bench.folder)
            holding = HoldingJob(url=server.url, run=name, host_folder=str(scratch), last=num_versions)
            held: Held = measure_apart(f"{name}-holder", HOLD, holding, Held, bench.folder)
            return held

    anchor, late = joined("anchor", 0), joined("late", num_versions)
    return [
        Figure(
            f"a producer that joins {num_versions} policies late holds the newest, {size_mb:g} MB",
            unit="s",
            measured=late.first_s,
            reference=anchor.first_s,
            reference_is="one that joins when there is the anchor alone",
            goal=Goal(at_most=1.6),
            details={"fetched_bytes": late.num_bytes, "anchor_bytes": anchor.num_bytes},
        )
    ]


def measure_pauses(bench: Bench) -> Iterator[Figure]:
    for (size, recipe), num_updates in zip(PAUSE_MODELS.items(), bench.settings.pause_updates, strict=False):
        name = f"pause-{size.replace(' ', '')}"
        job = PauseSettings(
            size=size,
            run_file=save_config(bench, demo_config(name, random_model(bench, name, **recipe))),
            blocks=bench.settings.pause_blocks,
            updates_per_block=num_updates,
            sequences_in_flight=8 if recipe else 32,
            spacing_s=0.5 if recipe else 0.15,
        )
        yield measure_apart(name, "bench.weights.pauses:measure_pauses", job, Figure, bench.folder)


def _server(bench: Bench, name: str) -> AbstractContextManager[RedisServer]:
    """A Redis with room for policies of any size."""
    return redis_server(bench.folder / f"redis-{name}", maxmemory_mb=8000)


def _run(bench: Bench, name: str, size_mb: float, *, holders: int = 0, **more: Any) -> tuple[Published, list[Held]]:
    """Runs a trainer that publishes, alongside producers that hold what it publishes."""
    versions = bench.settings.versions
    with host_folder(name) as scratch, _server(bench, name) as server:
        names = [f"{name}-holder-{n}" for n in range(holders)]
        holding = HoldingJob(url=server.url, run=name, host_folder=str(scratch), last=versions)
        children = [start_apart(holder, HOLD, holding, bench.folder) for holder in names]
        job = _publishing(server.url, name, size_mb, versions, scratch, holders=holders, **more)
        wait_for([*children, start_apart(name, PUBLISH, job, bench.folder)])
    return found_apart(name, Published, bench.folder), [found_apart(holder, Held, bench.folder) for holder in names]


def _publishing(url: str, run: str, size_mb: float, num_versions: int, folder: Path, **more: Any) -> PublishingJob:
    return PublishingJob(
        url=url,
        run=run,
        num_bytes=int(size_mb * MB) // 2 * 2,
        changed=CHANGED,
        num_versions=num_versions,
        folder=str(folder),
        **more,
    )


WEIGHTS = BenchSection(
    "weights",
    {
        "blocked": measure_blocked,
        "changed": measure_changed,
        "way": measure_way,
        "late": measure_late,
        "pause": measure_pauses,
    },
    WeightsSettings(),
    quick=WeightsSettings(
        sizes_mb=(1, 8),
        versions=2,
        way_mb=4,
        late_mb=2,
        late_versions=5,
        pause_blocks=1,
        pause_updates=(3,),
        changes_thinned=2048,
        changes_warm_steps=2,
    ),
)
