"""Writes the suite's results as a page: what was tried, and what happened."""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tests.chaos.faults import KINDS, RANK_KINDS
from tests.chaos.hits import brief
from tests.chaos.ranks import NUM_RANKS, RANK_TIMEOUT_S

HEAD = """# Faults: what was tried and what happened

Every index that is released is settled once in the saved policy: trained, skipped or dead. `make chaos` tries to make
that untrue: random faults, from a seed, on real processes (producers, trainers, Redis or Valkey), and a ledger that the
code under test has no hand in. This page was written by that command from its own results.

The ledger has two sides. The **environment** of the run notes each index that it poses, and it alone decides what must
become of one: an index of no reward variance must be skipped, one whose reward raises must die, every other one must be
trained. The **witness** looks over each optimizer step: it writes down a digest of the weights (and of the optimizer's
moments) before the step, another one after it, and the index of the prompt of each row that it finds in the step's own
tensors. Where ranks share the model each of them reports the rows that it trained itself, and the digest is that of the
whole tensors. At the end it digests the saved policy and walks back from digest to digest to the base model: what lies
on the way is what has shaped this policy, whatever was rolled back, resumed or claimed. Then each index that should
have been trained must be on that way once, with each of its completions once, no other may be, and the checkpoint's
ledger, the dead letters and `penstock audit` must agree.

The counts of **rollouts** in the checkpoint must close: each settled index has all of its siblings in them.

Three broken protocols (no reconciling, ledger not restored, every rank trains the rows of all) are caught by it in
`make test-all`.
"""

NOT_TRIED = """## What is simulated, and what is not

- **Power loss** is a SIGKILL after which the append-only file is cut back to a random point of its last second, in the
  middle of a command or of a MULTI as well: what `everysec` may lose. Under `always` nothing that was answered is cut.
  Checkpoints are fsynced before they are committed and stay; the machine's own file cache is not dropped.
- **A full disk** is a real one: the checkpoint folder is a small tmpfs, and the suite takes what is left of it.
- A **rank** is hit at its work by code that the run file names (objective, optimizer) or that wraps the learner, in an
  update that the seed chooses, after it has stayed there for three beats: a message can name a phase only if the others
  have heard of it. Ranks are processes on one machine, over gloo; the network between them does not fail.
- **Frozen** processes are stopped by SIGSTOP. Claims go stale after 1 s here and leases after 1 s, so that a freeze of
  up to 5 s is a long one.
- Clocks are not moved, packets are not reordered (it is TCP or a UNIX socket), and no memory is corrupted. Failover to
  a replica has tests of its own.
- Redis is started beside the parts, as one of your own would be. The server that `penstock run` starts is a part of the
  run: when it is killed the run ends, by design, and `--resume` continues it. To survive that, give it a Redis of its
  own ([how](operations.md#running-it)).
- A seed fixes kinds, order, times and amounts of the faults, not what the processes are doing at that moment.
"""


COLUMNS = (
    "seed",
    "server",
    "appendfsync",
    "trainers",
    "faults",
    "trainer processes",
    "released",
    "trained",
    "skipped",
    "dead",
    "lost",
    "trained twice",
    "generated again",
    "steps undone",
)


def write_report(results: Path, page: Path) -> None:
    page.write_text(render(json.loads(results.read_bytes())))


def render(results: dict[str, Any]) -> str:
    legs = results["legs"]
    faults = [fault for leg in legs for fault in leg["faults"]]
    num_lost = sum(leg["verdict"]["num_lost"] for leg in legs)
    num_twice = sum(leg["verdict"]["num_trained_twice"] for leg in legs)
    num_problems = sum(len(leg["verdict"]["problems"]) for leg in legs)
    minutes = sum(leg["seconds"] for leg in legs) / 60
    lines = [
        HEAD,
        f"**{len(faults)} faults in {len(legs)} runs, {minutes:.0f} minutes: {num_lost} indexes lost, {num_twice} "
        f"trained twice, {num_problems} complaints of any kind.** {results['date']}, {results['machine']}.",
        "",
        "## Runs",
        "",
        *_table(
            COLUMNS,
            [_leg_row(leg) for leg in legs],
        ),
        "",
        "`generated again` counts prompts that were posed to an engine more than once; `steps undone` the optimizer "
        "steps that a rollback took back.",
        "",
        "## Faults",
        "",
        *_table(["fault", "times", "what was done"], _kind_rows(faults, with_disk=results["with_disk"])),
        "",
        *_hits([hit for leg in legs for hit in leg["hits"]]),
        *_ends(legs),
        NOT_TRIED,
    ]
    return "\n".join(lines)


def _leg_row(leg: dict[str, Any]) -> list[object]:
    of, verdict = leg["leg"], leg["verdict"]
    return [
        of["seed"],
        leg["server"],
        "always" if of["seed"] % 4 == 0 else "everysec",
        ("one, resumed" if of["seed"] % 2 else "two, one stands by") + f", of {NUM_RANKS} ranks" * of["with_ranks"],
        len(leg["faults"]),
        verdict["num_epochs"],
        *(f"{verdict[name]:,}" for name in ("num_released", "num_trained", "num_skipped", "num_dead")),
        verdict["num_lost"],
        verdict["num_trained_twice"],
        f"{verdict['num_generated'] - verdict['num_released']:,}",
        verdict["num_steps_undone"],
    ]


def _kind_rows(faults: list[dict[str, Any]], *, with_disk: bool) -> list[list[object]]:
    counts = Counter(fault["kind"] for fault in faults)
    kinds = (*KINDS, *RANK_KINDS)
    rows: list[list[object]] = [[kind.name, counts[kind.name], kind.about] for kind in kinds]
    if not with_disk:
        rows.append(["", "", "No tmpfs could be mounted there, so that no disk was full."])
    return rows


def _hits(hits: list[dict[str, Any]]) -> list[str]:
    """Returns the table of ranks that were hit, by place, fate and rank."""
    rows = []
    for place, fate, rank in sorted({(hit["place"], hit["fate"], hit["rank"]) for hit in hits}):
        alike = [hit for hit in hits if (hit["place"], hit["fate"], hit["rank"]) == (place, fate, rank)]
        ended, went_on = (_span(hit[name] for hit in alike) for name in ("ended_s", "went_on_s"))
        rows.append([f"rank {rank} {fate}, {place}", len(alike), ended, f"`{brief(alike[0]['line'])}`", went_on])
    if not rows:
        return []
    return [
        f"Ranks that were hit, with a `rank_timeout_s` of {RANK_TIMEOUT_S:g}. The trainer has ended when the last of "
        "its processes has: a rank that stays frozen is killed by the launcher 15 s after the end of the others. "
        "Training goes on with the first step of the next trainer, which may have stood by.",
        "",
        *_table(["rank", "times", "trainer ended after (s)", "its error", "training went on after (s)"], rows),
        "",
    ]


def _span(seconds: Iterable[float]) -> str:
    found = sorted(seconds)
    return f"{found[0]:.1f}" if found[0] == found[-1] else f"{found[0]:.1f} to {found[-1]:.1f}"


def _ends(legs: list[dict[str, Any]]) -> list[str]:
    ends: Counter[str] = Counter()
    for leg in legs:
        ends.update(leg["ends"])
    if not ends:
        return []
    return [
        "Other processes that ended by themselves because of a fault, each with one line, never a traceback:",
        "",
        *_table(["times", "its last line"], [[count, f"`{line}`"] for line, count in ends.most_common()]),
        "",
    ]


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    return [f"| {' | '.join(map(str, row))} |" for row in (head, ["---"] * len(head), *rows)]
