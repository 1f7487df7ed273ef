"""The verdict: compares the records of the witness and the environment with each other and with the run's ledger."""

import json
import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from penstock.deploy.operate.audit import audit
from penstock.schemas.keys import PRODUCERS_GROUP, Commit, Field
from tests.chaos.environment import Fate, Notes, fate
from tests.chaos.supervisor import Supervisor
from tests.chaos.witness import ChainError, StepChain, digest_of_base, digest_of_checkpoint


class ChaosVerdict(msgspec.Struct, kw_only=True):
    """problems: violations, empty for a run that kept the promise. The rest are figures for the report."""

    problems: list[str] = []
    num_released: int = 0
    num_trained: int = 0
    num_skipped: int = 0
    num_dead: int = 0
    num_lost: int = 0
    num_trained_twice: int = 0
    num_generated: int = 0
    """Prompts posed to an engine, including those posed again."""
    num_steps_in_policy: int = 0
    num_steps_undone: int = 0
    """Optimizer steps that a rollback undid, or that a replaced trainer took in vain."""
    num_epochs: int = 0
    num_duplicates_dropped: int = 0
    num_released_again: dict[str, int] = {}


def judge(supervisor: Supervisor) -> ChaosVerdict:
    """Checks the saved policy, the environment's notes, the ledger and Redis. The run must have ended."""
    verdict = ChaosVerdict()
    commit: Any = supervisor.server.client.hgetall(supervisor.keys.commit)
    pointer = commit.get(Commit.CHECKPOINT, b"").decode()
    folder = supervisor.run_folder / "checkpoints" / pointer
    if not pointer or not folder.is_dir():
        verdict.problems.append(f"the committed checkpoint {pointer!r} is not there")
        return verdict
    notes = Notes(supervisor.notes)
    verdict.num_released = notes.last_index
    verdict.num_generated = sum(notes.posed.values())
    verdict.num_epochs = len(list(supervisor.run_folder.glob("checkpoints/epoch-*")))
    try:
        _judge_policy(verdict, supervisor, folder, notes)
    except ChainError as error:
        verdict.problems.append(f"the saved policy has no history: {error}")
    _judge_ledger(verdict, folder)
    _judge_rollouts(verdict, folder, supervisor.config.group_size, sum(notes.scored.values()))
    if not supervisor.problems:  # of a run that did not end, Redis and the open indexes say nothing
        _judge_redis(verdict, supervisor)
    _audit(verdict, supervisor)
    return verdict


def _judge_policy(verdict: ChaosVerdict, supervisor: Supervisor, folder: Path, notes: Notes) -> None:
    """Checks that the policy was trained once on each index that belongs in it, and on no other, without the ledger."""
    chain = StepChain(supervisor.steps, digest_of_base(Path(supervisor.config.model.path)))
    tip = digest_of_checkpoint(folder)
    history = chain.history(tip)
    verdict.num_steps_in_policy = len(history)
    verdict.num_steps_undone = chain.num_steps - len(history)
    times = Counter(index for step in history for index in set(step))
    num_rows = Counter(index for step in history for index in step)
    siblings = supervisor.config.group_size
    released = range(1, notes.last_index + 1)
    # A completion that two ranks have trained is in too many rows of one step.
    twice = [index for index, count in times.items() if count > 1 or num_rows[index] > siblings]
    partly = [index for index, count in num_rows.items() if count < siblings]
    never_posed = [index for index in released if index not in notes.posed]
    lost = [index for index in released if fate(index) is Fate.TRAINED and index not in times]
    wrong = [index for index in times if index not in released or fate(index) is not Fate.TRAINED]
    verdict.num_trained = len(times)
    verdict.num_trained_twice = len(twice)
    verdict.num_lost = len(set(lost) | set(never_posed))
    _complain(verdict, "trained twice", twice)
    _complain(verdict, f"trained with fewer than {siblings} completions", partly)
    _complain(verdict, "released and never trained", lost)
    _complain(verdict, "released and never posed to an engine", never_posed)
    _complain(verdict, "trained, which the environment did not intend", wrong)


def _judge_rollouts(verdict: ChaosVerdict, folder: Path, siblings: int, num_scored: int) -> None:
    """Checks that the checkpoint's counts of rollouts balance: each settled index has all of its siblings in them, and
    none is counted that the environment has not scored."""
    ledger = json.loads((folder / "state.json").read_bytes())["ledger"]
    num: Counter[str] = Counter()
    for outcomes in ledger["attrition"]["rollouts"].values():
        for outcome, by_length in outcomes.items():
            num[outcome] += sum(counts["num"] for counts in by_length.values())
    expected = {name: siblings * sum(end - start for start, end in ledger[name]) for name in Fate}
    expected |= {"missing": 0, "duplicate": siblings * ledger["num_duplicates_dropped"]}
    for outcome, count in expected.items():
        if num[outcome] != count:
            verdict.problems.append(f"{num[outcome]} rollouts are counted as {outcome}, expected {count}")
    if (num_counted := num["trained"] + num["skipped"] + num["stale"]) > num_scored:
        verdict.problems.append(f"{num_counted} rollouts with a reward are counted, {num_scored} were scored")


def _judge_ledger(verdict: ChaosVerdict, folder: Path) -> None:
    """Checks that the checkpoint's ledger agrees with the environment and the witness, index by index."""
    ledger = json.loads((folder / "state.json").read_bytes())["ledger"]
    recorded = {name: {i for start, end in ledger[name] for i in range(start, end)} for name in Fate}
    verdict.num_skipped, verdict.num_dead = len(recorded[Fate.SKIPPED]), len(recorded[Fate.DEAD])
    verdict.num_duplicates_dropped = ledger["num_duplicates_dropped"]
    verdict.num_released_again = ledger["released_again"]
    if ledger["num_released"] != verdict.num_released:
        verdict.problems.append(
            f"the ledger knows {ledger['num_released']} released indexes, the environment {verdict.num_released}"
        )
    for outcome in Fate:
        meant = {index for index in range(1, verdict.num_released + 1) if fate(index) is outcome}
        _complain(verdict, f"meant to be {outcome}, and not recorded so", meant - recorded[outcome])
        _complain(verdict, f"recorded as {outcome}, and not meant so", recorded[outcome] - meant)
    if len(recorded[Fate.TRAINED]) != verdict.num_trained:
        verdict.problems.append(
            f"{len(recorded[Fate.TRAINED])} recorded as trained, {verdict.num_trained} in the policy"
        )


def _judge_redis(verdict: ChaosVerdict, supervisor: Supervisor) -> None:
    """Checks that nothing is left open, and that every dead letter belongs to an index that was meant to die."""
    client, keys = supervisor.server.client, supervisor.keys
    trainer = json.loads((supervisor.run_folder / "trainer.json").read_text())
    if not trainer["finished"] or trainer["num_groups_cancelled"]:
        verdict.problems.append(f"finished: {trainer['finished']}, cancelled: {trainer['num_groups_cancelled']}")
    if client.xlen(keys.prompts):
        left: Any = client.xrange(keys.prompts)
        _complain(verdict, "a prompt still, after the end", [int(fields[Field.INDEX]) for _, fields in left])
        groups: Any = client.xinfo_groups(keys.prompts)
        held: Any = client.xpending_range(keys.prompts, PRODUCERS_GROUP, "-", "+", 100)
        verdict.problems.append(f"prompts left: {left[:3]}; their group: {groups}; pending: {held[:3]}")
    letters = {int(index) for index in client.hkeys(keys.dead_index)}
    _complain(verdict, "a dead letter for what was not meant to die", {i for i in letters if fate(i) is not Fate.DEAD})


def _audit(verdict: ChaosVerdict, supervisor: Supervisor) -> None:
    """Checks that `penstock audit` agrees."""
    os.environ["REDIS_URL"] = supervisor.server.url
    found = audit(supervisor.config.name, runs=supervisor.runs)
    verdict.problems += [f"penstock audit: {problem}" for problem in found.ledger.problems]


def _complain(verdict: ChaosVerdict, what: str, indexes: Iterable[int]) -> None:
    found = sorted(indexes)
    if found:
        verdict.problems.append(f"{len(found)} indexes {what}: {', '.join(map(str, found[:8]))}")
