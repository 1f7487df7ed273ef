"""The audit: right about live, stopped, finished and killed runs, and about ledgers that were made wrong on purpose."""

import hashlib
import json
import random
import shutil
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mini_producer import dead_fields, group_fields
from penstock.consumers.checkpoints.state import CheckpointState, LedgerState
from penstock.consumers.stream.scripts import Scripts
from penstock.deploy.launch.redis_server import RedisServer
from penstock.deploy.launch.run_folder import RunFolder
from penstock.deploy.operate import audit as audit_module
from penstock.deploy.operate import run_access
from penstock.deploy.operate.ledger_check import OpenPrompt, Reading, StreamEntry, check_ledger
from penstock.deploy.operate.saved_ledger import NOTHING_SAVED
from penstock.deploy.report.attrition import AttritionWindow
from penstock.schemas.attrition import Rollouts
from penstock.schemas.config import CheckpointConfig, EvaluationConfig
from penstock.schemas.keys import PRODUCERS_GROUP, Field
from penstock.schemas.process.redis_url import connection_file
from scripted_learner import KilledError
from short_run import ShortRun
from waiting import wait_for


def ranges(*indexes: int) -> tuple[tuple[int, int], ...]:
    return tuple((index, index + 1) for index in sorted(indexes))


def check_of(
    *, policy_version: int = 5, released: int = 0, prompts=(), stream=(), requested=None, finished=False, **ledger
):
    """prompts: (index, version) in the order of release; stream: indexes that were appended after all prompts."""
    ledger.setdefault("dead_by_reason", {"poison": ledger["dead"]} if "dead" in ledger else {})
    reading = Reading(
        saved=CheckpointState(policy_version=policy_version, ledger=LedgerState(**ledger)),
        released=released,
        prompts=[OpenPrompt(f"{n}-0", index, version, False) for n, (index, version) in enumerate(prompts, 1)],
        stream=[StreamEntry(f"{n}-0", index) for n, index in enumerate(stream, 1000)],
        requested=requested or {},
        letters=set(),
        finished=finished,
    )
    return check_ledger(reading)


def problems(ledger) -> list[str]:
    return [str(problem) for problem in ledger.problems]


@given(st.lists(st.sampled_from(["trained", "skipped", "dead", "prompt", "stream"]), max_size=40), st.data())
def test_ledger_balances_until_one_index_is_taken_out_of_them(places, data):
    def judged(gone: int):
        at = {place: [n for n, p in enumerate(places, 1) if p == place and n != gone] for place in set(places)}
        return check_of(
            released=len(places),
            prompts=[(index, 5) for index in at.get("prompt", ())],
            stream=at.get("stream", ()),
            **{outcome: ranges(*at.get(outcome, ())) for outcome in ("trained", "skipped", "dead")},
        )

    ledger = judged(gone=0)
    assert problems(ledger) == []
    counted = (ledger.trained, ledger.skipped, ledger.dead, ledger.queued, ledger.on_stream)
    assert counted == tuple(places.count(place) for place in ("trained", "skipped", "dead", "prompt", "stream"))
    if places:
        gone = data.draw(st.integers(1, len(places)))
        assert problems(judged(gone)) == [f"lost: neither settled, nor on the stream, nor a prompt: {gone}"]


LOST = "lost: neither settled, nor on the stream, nor a prompt: "
AGAIN, REASONS = "settled, and released again: ", "dead without exactly one reason, or with one and not dead: "


def test_a_ledger_that_is_wrong_is_named_and_what_faults_and_operators_leave_is_counted() -> None:
    dead, trained = {"released": 3, "dead": ((1, 4),)}, {"released": 3, "trained": ((1, 4),)}
    requested = {**dead, "prompts": [(2, 7)], "requested": {2: "9-0"}}
    two, postponed = {"released": 2, "dead": ((1, 3),)}, {"released": 3, "trained": ((1, 2),), "postponed": (2, 3)}
    ended = {"released": 6, "trained": ((1, 3),), "prompts": [(3, 5)], "stream": [4], "finished": True}
    for found, named, counts in (
        ({"released": 4, "trained": ((1, 4),), "skipped": ((3, 5),)}, ["settled twice (trained and skipped): 3"], {}),
        ({"released": 3, "trained": ((1, 3), (2, 4))}, ["settled twice (trained and trained): 2"], {}),
        # A later policy, or the one that trained it, has released it again.
        ({**trained, "prompts": [(2, 6)]}, [AGAIN + "2"], {}),
        ({**trained, "prompts": [(2, 5)]}, [AGAIN + "2"], {}),
        ({**dead, "prompts": [(2, 10**9)]}, [AGAIN + "2"], {}),
        # A fault has left the prompts. Dead ones make no policy: it died while the trainer stood at this very one.
        ({**trained, "prompts": [(2, 4), (3, 1)]}, [], {"settled_prompts": 2}),
        ({**dead, "prompts": [(2, 5)]}, [], {"settled_prompts": 1}),
        # An operator has requeued it. A request honored before this checkpoint excuses nothing: it has died again.
        (requested, [], {"dead": 3, "requeued_waiting": 1, "settled_prompts": 0}),
        ({**requested, "requeued": {2: ("9-0", "5-0")}}, [AGAIN + "2"], {}),
        ({"released": 3, "trained": ((1, 4), (7, 9))}, ["settled, but never released: 7-8"], {}),
        ({**two, "dead_by_reason": {"lag": ((1, 2),)}}, [REASONS + "2"], {}),
        ({**two, "dead_by_reason": {"lag": ((1, 3),), "poison": ((1, 2),)}}, [REASONS + "1"], {}),
        ({"released": 2, "trained": ((1, 3),), "dead_by_reason": {"lag": ((2, 3),)}}, [REASONS + "2"], {}),
        (ended, [], {"cancelled": 4, "queued": 0, "on_stream": 0, "claimed": 0}),
        ({**postponed, "stream": [3]}, [], {"postponed": 1, "on_stream": 1}),
        ({**postponed, "finished": True}, [], {"cancelled": 2}),
        ({"released": 1, "trained": ((1, 2),), "stream": [0, 99], "prompts": [(50, 1)]}, [], {"never_released": 3}),
    ):
        ledger = check_of(**found)
        assert problems(ledger) == named, found
        assert {name: getattr(ledger, name) for name in counts} == counts, found


def test_a_stale_group_counts_once_although_its_entry_is_still_on_the_stream():
    entry, prompt = StreamEntry("5-0", 1), OpenPrompt("6-0", 1, 5, True)
    ledger = check_ledger(Reading(NOTHING_SAVED, 1, [prompt], [entry], {}, set(), False))
    assert (ledger.claimed, ledger.on_stream) == (1, 0) and problems(ledger) == []
    ledger = check_ledger(Reading(NOTHING_SAVED, 1, [OpenPrompt("4-9", 1, 5, True)], [entry], {}, set(), False))
    assert (ledger.claimed, ledger.on_stream) == (0, 1)


@pytest.fixture
def run(redis_url, tmp_path, monkeypatch):
    run = ShortRun(redis_url, tmp_path, monkeypatch)
    yield run
    run.close()


@pytest.mark.redis
def test_a_finished_run_balances_and_its_counts_are_those_of_the_trainer(run, capsys):
    run.producer(
        lambda index, version: (
            dead_fields(index, "reward: boom")
            if index in (3, 9)
            else group_fields(index, version, rewards=(0.0, float(index != 5)))
        )
    )
    assert run.trainer().run()
    status, out, _ = run.command(capsys, "audit", "test")
    assert status == 0
    assert "The ledger balances: each of 50 released indexes is in exactly one place." in out
    found = run.json(capsys, "audit", "test")
    assert found["balanced"] and found["finished"] and found["update"] == 12
    ledger, trainer = found["ledger"], run.ledger()
    assert ledger["dead_reasons"] == {"reward": 2} == trainer["dead_reasons"]
    for name in ("released", "trained", "skipped", "dead", "cancelled"):
        assert ledger[name] == trainer[f"num_groups_{name}"]
    assert (ledger["trained"], ledger["skipped"]) == (47, 1)
    assert found["num_evaluations"] == 4 and found["num_letters"] == 2


@pytest.mark.redis
@pytest.mark.parametrize("at", [0, 9])
def test_a_killed_run_balances_by_its_last_checkpoint_and_what_redis_holds(run, capsys, at):
    run.producer()
    with pytest.raises(KilledError):
        run.trainer(fail_at={at: KilledError()}).run()
    run.end_producers()
    found = run.json(capsys, "audit", "test")
    assert found["balanced"] and not found["finished"]
    ledger = found["ledger"]
    assert ledger["trained"] == at // 4 * 16, "what was trained after the checkpoint is not saved, and on the stream"
    windows = [msgspec.convert(window, AttritionWindow) for window in found["windows"]]
    assert (windows[-1].last if windows else 0) == found["update"] == at // 4 * 4
    trained = sum((outcomes["trained"] for window in windows for outcomes in window.rollouts.values()), Rollouts())
    assert (trained.num, trained.num_scored) == (2 * ledger["trained"],) * 2
    assert ledger["released"] == ledger["trained"] + ledger["on_stream"] + ledger["queued"] + ledger["claimed"]


@pytest.mark.redis
def test_a_run_whose_trainer_died_between_checkpoint_and_commit_balances_by_the_committed_one(run, capsys, monkeypatch):
    commit = Scripts.commit
    commits = []

    def die_at_the_second(self, *arguments):
        commits.append(arguments)
        if len(commits) == 2:
            raise KilledError
        return commit(self, *arguments)

    monkeypatch.setattr(Scripts, "commit", die_at_the_second)
    run.producer()
    with pytest.raises(KilledError):
        run.trainer().run()
    run.end_producers()
    found = run.json(capsys, "audit", "test")
    saved = [path.name for path in (run.folder / "checkpoints").iterdir() if path.is_dir()]
    assert {name.partition("-")[0] for name in saved} == {"4", "8"}
    assert found["checkpoint"].startswith("4-") and found["balanced"] and found["ledger"]["trained"] == 16


@pytest.mark.redis
def test_a_moving_run_balances_at_every_moment(redis_url, tmp_path, monkeypatch, capsys):
    changes = {
        "num_updates": 120,
        "checkpoint": CheckpointConfig(every=1),
        "evaluation": EvaluationConfig(num_prompts=0),
    }
    run = ShortRun(redis_url, tmp_path, monkeypatch, **changes)
    chance, num_audits, num_moving = random.Random(0), 0, 0

    def answer(index: int, version: int) -> dict:
        # The run does not come to its end before it was looked at often enough.
        wait_for(lambda: index < 40 * (num_audits + 2) or (num_audits > 5 and num_moving > 2))
        # Some come too old and are released again, some die: each way that an index can take.
        kind = chance.random()
        if kind < 0.1:
            return dead_fields(index, "reward: boom")
        return group_fields(index, max(0, version - 9) if kind < 0.3 else version)

    try:
        run.producer(answer)
        trainer = run.trainer()
        thread = run.train(trainer)
        while thread.is_alive():
            found = run.json(capsys, "audit", "test")
            assert found["balanced"], found["ledger"]["problems"]
            num_audits += 1
            num_moving += 0 < found["update"] < 120
        thread.join()
        assert num_audits > 5 and num_moving > 2
        assert run.json(capsys, "audit", "test")["balanced"]
        assert run.ledger()["num_groups_released_again"]["stale"] > 0
    finally:
        run.close()


def tamper(run: ShortRun, change) -> None:
    """Changes the ledger in the committed checkpoint, and its checksum with them."""
    (folder,) = [path for path in (run.folder / "checkpoints").iterdir() if path.name.startswith("8-")]
    state = json.loads((folder / "state.json").read_text())
    change(state["ledger"])
    data = json.dumps(state).encode()
    (folder / "state.json").write_bytes(data)
    sums = json.loads((folder / "checksums.json").read_text())
    sums["state.json"] = hashlib.blake2b(data, digest_size=16).hexdigest()
    (folder / "checksums.json").write_text(json.dumps(sums))


@pytest.fixture
def stopped(run):
    """A run killed at update 10, its checkpoint of update 8, and nobody there."""
    run.producer()
    with pytest.raises(KilledError):
        run.trainer(fail_at={10: KilledError()}).run()
    run.end_producers()
    return run


def audit_fails(run, capsys) -> str:
    status, out, _ = run.command(capsys, "audit", "test")
    assert status == 1 and "The ledger does NOT balance." in out
    (line,) = [line for line in out.splitlines() if line.startswith("PROBLEM ")]
    return line


@pytest.mark.redis
def test_what_is_wrong_with_a_run_is_named_and_its_claims_are_counted(stopped, redis_client, capsys):
    entries = redis_client.xrange(stopped.keys.rollouts)
    entry_id, fields = [(entry, fields) for entry, fields in entries if int(fields[Field.INDEX]) > 32][2]
    redis_client.xdel(stopped.keys.rollouts, entry_id)
    assert audit_fails(stopped, capsys) == f"PROBLEM {LOST}{int(fields[Field.INDEX])}"
    redis_client.xadd(stopped.keys.rollouts, fields)
    prompt = redis_client.xadd(stopped.keys.prompts, {Field.INDEX: 7, Field.VERSION: 9})
    assert audit_fails(stopped, capsys) == f"PROBLEM {AGAIN}7"
    redis_client.xdel(stopped.keys.prompts, prompt)
    before = stopped.json(capsys, "audit", "test")["ledger"]  # the trainer may have released what nobody has claimed
    last = before["released"]
    redis_client.hset(stopped.keys.commit, "released", last + 3)
    for index in range(last + 1, last + 4):
        redis_client.xadd(stopped.keys.prompts, {Field.INDEX: index, Field.VERSION: 9})
    redis_client.xreadgroup(PRODUCERS_GROUP, "p", {stopped.keys.prompts: ">"}, count=2)
    found = stopped.json(capsys, "audit", "test")
    counts = (found["ledger"]["claimed"] - before["claimed"], found["ledger"]["queued"] - before["queued"])
    assert found["balanced"] and counts == (2, 1)
    tamper(stopped, lambda ledger: ledger["skipped"].append([7, 8]))
    assert audit_fails(stopped, capsys) == "PROBLEM settled twice (trained and skipped): 7"


@pytest.mark.redis
def test_a_problem_counts_only_where_every_reading_of_a_moving_run_shows_it(stopped, redis_client, capsys, monkeypatch):
    read = audit_module.read_ledger
    hidden = []

    def read_while_one_moves(client, keys, folder):
        """Hides one index at a time, a different one each time, as if it moved between two looks."""
        observed = read(client, keys, folder)
        hidden.append(observed.reading.stream[-1 - len(hidden)])
        observed.reading.stream.remove(hidden[-1])
        return audit_module.ObservedRun(observed.reading, observed.saved, moved=True)

    monkeypatch.setattr(audit_module, "read_ledger", read_while_one_moves)
    assert stopped.json(capsys, "audit", "test")["balanced"]
    assert len(hidden) == 2, "two readings that share no problem show none"


@pytest.mark.redis
def test_a_torn_checkpoint_is_passed_over_with_a_warning_and_with_all_torn_nothing_can_be_told(stopped, capsys):
    folder = stopped.folder / "checkpoints"
    (newest,) = folder.glob("8-*")
    shutil.copytree(newest, folder / "9-0badf00d")  # was never committed: it is not taken for the torn one
    (newest / "state.json").write_bytes(b"{")
    status, out, _ = stopped.command(capsys, "audit", "test")
    assert "checkpoint 4-" in out
    assert f"warning: checkpoint {newest.name} cannot be read: state.json: checksum differs" in out
    # The commit of the torn one has trimmed what it held: what the one before it lacks is nowhere, until a resume.
    assert status == 1 and f"PROBLEM {LOST}17-32" in out
    for path in folder.glob("*-*/state.json"):
        path.write_bytes(b"{")
    status, out, err = stopped.command(capsys, "audit", "test")
    assert status == 2 and out == "" and "state.json: checksum differs" in err


@pytest.mark.redis
def test_an_emptied_redis_shows_what_is_to_be_released_again(stopped, redis_client, capsys):
    redis_client.flushall()
    status, out, _ = stopped.command(capsys, "audit", "test")
    assert status == 1 and "warning: Redis holds nothing of this run" in out and f"PROBLEM {LOST}33-" in out


@pytest.mark.redis
def test_without_redis_a_finished_run_is_told_by_its_checkpoint_and_another_is_not(run, capsys, monkeypatch):
    run.producer()
    run.trainer().run()
    monkeypatch.setenv("REDIS_URL", "redis://127.0.0.1:1")
    status, out, _ = run.command(capsys, "audit", "test")
    assert status == 0 and "warning: by its newest checkpoint alone: REDIS_URL: no Redis answers" in out
    unknown = [line.split("unknown")[0].split() for line in out.splitlines() if "unknown" in line]
    assert unknown == [["evaluations", "4"], ["dead", "letters"], ["settled,", "on", "the", "stream"]]
    found = run.json(capsys, "audit", "test")
    assert (found["num_letters"], found["num_evaluation_prompts_open"], found["ledger"]["never_released"]) == (
        None,
    ) * 3
    (run.folder / "trainer.json").unlink()
    status, out, err = run.command(capsys, "audit", "test")
    assert (status, out) == (2, "")
    assert err.startswith("penstock: test: not finished, and only Redis knows where its open indexes are; REDIS_URL")


@pytest.mark.redis
def test_a_run_s_own_server_is_started_for_the_audit_and_stopped_after_it(tmp_path, monkeypatch, server_binary, capsys):
    # A run keeps to the server that it was started with: an older Redis does not read Valkey's files.
    server = RedisServer(tmp_path / "test", maxmemory_mb=64, binary=server_binary)
    run = ShortRun(server.url, tmp_path, monkeypatch)
    try:
        run.producer()
        with pytest.raises(KilledError):
            run.trainer(fail_at={6: KilledError()}).run()
        run.close()
        monkeypatch.delenv("REDIS_URL")
        live = run.json(capsys, "audit", "test")
    finally:
        server.stop()
    assert not connection_file(run.folder).exists()
    assert run.json(capsys, "audit", str(run.folder)) == live
    assert live["balanced"] and live["ledger"]["trained"] == 16
    assert not connection_file(run.folder).exists(), "the server that the audit has started is gone again"


@pytest.mark.redis
def test_a_run_that_is_in_use_without_a_redis_that_answers_is_not_touched(stopped, capsys, monkeypatch, tmp_path):
    monkeypatch.delenv("REDIS_URL")
    monkeypatch.setattr(run_access, "WAIT_S", 0.2)
    (stopped.folder / "redis" / "appendonlydir").mkdir(parents=True)
    with RunFolder(stopped.config, Path(stopped.runs), resume=True):
        status, out, err = stopped.command(capsys, "audit", "test")
    assert (status, out) == (2, "") and "is in use, but its Redis does not answer" in err
