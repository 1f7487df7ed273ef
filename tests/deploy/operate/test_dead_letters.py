"""Dead letters: listed, shown, and released again, once for each request whatever happens meanwhile."""

import msgspec
import pytest

from inspected_run import byte_tokenizer
from mini_producer import dead_fields, group_fields, make_group, unscored_fields
from penstock.consumers.checkpoints.state import CheckpointState, LedgerState, ReleasedTask
from penstock.consumers.learning.batch.lag import LagTable
from penstock.consumers.stream.connection import TrainerConnection
from penstock.consumers.stream.ledger import Ledger
from penstock.consumers.stream.reader import Reader
from penstock.consumers.stream.release import Releaser
from penstock.consumers.stream.run_progress import RunProgress
from penstock.consumers.stream.scripts import Scripts
from penstock.deploy.launch.run_folder import save_run_file
from penstock.producers.rollout.episode import load_tokenizer
from penstock.schemas.config import CheckpointConfig, ModelConfig
from penstock.schemas.keys import Field, Kind
from penstock.schemas.rollout import encode_group
from scripted_learner import KilledError
from short_run import ShortRun
from waiting import wait_for

pytestmark = pytest.mark.redis


@pytest.fixture
def run(redis_url, tmp_path, monkeypatch):
    run = ShortRun(redis_url, tmp_path, monkeypatch, checkpoint=CheckpointConfig(every=2))
    yield run
    run.close()


class Half:
    """The trainer's half of a requeue, step by step: ledger, reader, releaser. `resume` makes one of a saved ledger."""

    def __init__(self, run: ShortRun, state: LedgerState | None = None) -> None:
        self.run = run
        self.connection = TrainerConnection(run.url, outage_s=5)
        self.scripts = Scripts(self.connection, run.keys, lease_s=60.0)
        self.scripts.open_epoch(int(self.connection.client.hget(run.keys.commit, "epoch") or -1) + 1)
        saved = msgspec.json.encode(state or LedgerState())
        self.ledger = Ledger.from_state(msgspec.json.decode(saved, type=LedgerState))
        self.reader = Reader(self.connection, run.keys, self.ledger, group_size=2)
        self.progress = RunProgress(0, CheckpointState(policy_version=-1))
        self.releaser = Releaser(self.scripts, self.ledger, self.reader, run.config, self.progress)

    def heal(self) -> int:
        """Reconciles as the trainer does; returns the requeued indexes that were released."""
        self.releaser.reconcile(LagTable(9, {}, {}))
        for record in self.reader.take_refused():
            self.scripts.dead_letter(record)
            if record.index is not None:
                self.ledger.settle(record.index, "dead", record.reason)
        return self.releaser.release_requeued(9)

    def release(self, target: int) -> None:
        after = self.ledger.num_released
        tasks = [ReleasedTask("main", number) for number in range(after + 1, target + 1)]
        self.scripts.release(after, tasks, 0)
        for task in tasks:
            self.ledger.release(task)

    def prompts(self) -> list[int]:
        return [int(fields[Field.INDEX]) for _, fields in self.connection.client.xrange(self.run.keys.prompts)]

    def save(self) -> LedgerState:
        return self.ledger.to_state()

    def resume(self, state: LedgerState) -> "Half":
        self.connection.close()
        return Half(self.run, state)


@pytest.fixture
def half(run, redis_client):
    """Indexes 1 to 8 released; 3 and 5 died, the others are settled; 9 to 12 are prompts."""
    half = Half(run)
    half.release(12)
    for entry_id, fields in redis_client.xrange(run.keys.prompts):
        if int(fields[Field.INDEX]) <= 8:
            redis_client.xdel(run.keys.prompts, entry_id)
    for index in (1, 2, 4, 6, 7, 8):
        half.ledger.settle(index, "trained")
    redis_client.xadd(run.keys.rollouts, dead_fields(3, "reward: boom"))
    redis_client.xadd(run.keys.rollouts, dead_fields(5, "prompt: long"))
    assert half.heal() == 0
    assert list(half.ledger.by_outcome["dead"]) == [3, 5]
    return half


def test_a_requeued_index_is_opened_once_whatever_happens_before_and_after_the_commit(run, half, redis_client, capsys):
    before = half.save()
    status, out, _ = run.command(capsys, "dead", "requeue", "test", "3")
    assert (status, out) == (0, "requeued 3: the trainer releases them from its next reconcile on\n")
    assert half.heal() == 1
    assert half.prompts() == [9, 10, 11, 12, 3]
    assert 3 not in half.ledger.settled and half.ledger.dead_reasons == {"prompt": 1}
    assert half.ledger.released_again == {"requeued": 1}
    half.reader.rewind()
    assert half.heal() == 0, "one request opens it once, though the stream still holds the record that it died of"
    assert half.prompts().count(3) == 1 and 3 not in half.ledger.settled
    crashed = half.resume(before)  # before the commit: it is done again
    assert 3 in crashed.ledger.settled and crashed.heal() == 1
    assert 3 not in crashed.ledger.settled and crashed.ledger.released_again == {"requeued": 1}
    assert set(crashed.prompts()) == {3, 9, 10, 11, 12}
    committed = crashed.resume(crashed.save())
    assert committed.heal() == 0 and 3 not in committed.ledger.settled and 5 in committed.ledger.settled
    redis_client.xadd(run.keys.rollouts, group_fields(3, 9))
    committed.heal()
    assert list(committed.reader.ready) == [3]
    committed.ledger.settle(3, "trained")
    assert committed.heal() == 0, "what is trained stays trained"
    rolled_back = committed.resume(before)
    assert rolled_back.heal() == 1 and 3 not in rolled_back.ledger.settled
    rolled_back.connection.close()


def test_an_index_that_dies_again_leaves_another_letter_and_can_be_requeued_again(run, half, redis_client, capsys):
    never_dead = msgspec.structs.replace(half.save(), dead=[], dead_by_reason={})
    run.command(capsys, "dead", "requeue", "test", "3")
    half.heal()
    redis_client.xadd(run.keys.rollouts, dead_fields(3, "reward: boom again"))
    half.heal()
    assert 3 in half.ledger.settled
    letters = [(letter["reason"], letter["state"]) for letter in run.json(capsys, "dead", "list", "test")]
    # The ledger that was saved last does not know of the requeue yet.
    assert letters == [("reward: boom", "requeued"), ("prompt: long", "dead"), ("reward: boom again", "dead")]
    assert run.command(capsys, "dead", "requeue", "test", "3")[0] == 0
    assert half.heal() == 1
    assert half.ledger.released_again == {"requeued": 2}
    # A rollback to before the death reads the same records, and honors the requests: each letter is void.
    again = half.resume(never_dead)
    again.heal()
    assert 3 not in again.ledger.settled and 5 in again.ledger.settled
    assert not redis_client.hexists(run.keys.dead_index, "3")
    again.connection.close()


def test_requeued_indexes_wait_for_credit_and_for_updates_to_do(run, half, capsys):
    for index in (9, 10):
        half.ledger.settle(index, "trained")
    half.release(21)
    assert half.ledger.num_open == 11 and run.config.credit == 12
    assert run.command(capsys, "dead", "requeue", "test", "--all")[1].startswith("requeued 3, 5: ")
    assert half.heal() == 1
    assert half.ledger.num_open == 12 and 3 not in half.ledger.settled and 5 in half.ledger.settled
    half.release(50)
    for index in range(11, 51):
        half.ledger.settle(index, "trained")
    half.progress.num_batches = run.config.num_updates
    assert half.releaser.release_requeued(9) == 0, "all updates are done"
    half.progress.num_batches = 0
    assert half.releaser.release_requeued(9) == 1
    assert list(half.ledger.by_outcome["dead"]) == []


def test_letters_are_listed_with_reason_producer_and_size(run, half, redis_client, capsys):
    poison = encode_group(make_group(11, 9, rewards=(0.0, 1.0, 1.0)))
    entry = {Field.INDEX: "11", Field.KIND: Kind.GROUP, Field.PAYLOAD: poison}
    redis_client.xadd(run.keys.rollouts, entry)
    redis_client.xadd(run.keys.rollouts, {**entry, Field.INDEX: "12", Field.PAYLOAD: b"\x93\x01junk"})
    redis_client.xadd(run.keys.rollouts, {Field.KIND: Kind.GROUP, Field.PAYLOAD: poison})
    half.heal()
    status, out, _ = run.command(capsys, "dead", "list", "test")
    assert status == 0 and out.startswith("5 dead letters")
    letters = run.json(capsys, "dead", "list", "test")
    assert [(letter["index"], letter["state"]) for letter in letters] == [
        (3, "dead"),
        (5, "dead"),
        (11, "dead"),
        (12, "dead"),
        (None, "no index"),
    ]
    assert letters[2]["reason"] == "poison: rollouts: 3 siblings, expected at most 2"
    assert [letter["environment"] for letter in letters] == ["main"] * 4 + [None] and "main" in out
    assert [letter["producer"] for letter in letters] == [None, None, "producer-0", None, "producer-0"]
    assert [letter["payload_bytes"] for letter in letters] == [0, 0, len(poison), 6, len(poison)]
    assert out.count("producer-0") == 2


def test_agents_rollouts_are_listed_and_shown_and_cannot_be_requeued(run, half, redis_client, capsys):
    for index, rollout in (("3", "a.1"), ("6", "a.2"), ("6", "a.2"), ("6", "a.\x1b[2J")):
        letter = {Field.INDEX: index, Field.ROLLOUT: rollout, Field.PRODUCER: "a", Field.REASON: "idle for 3 s"}
        redis_client.xadd(run.keys.dead_rollouts, letter)
    redis_client.xadd(run.keys.dead_rollouts, {b"junk": b"\xff"})
    status, out, _ = run.command(capsys, "dead", "list", "test")
    assert status == 0 and out.startswith("2 dead letters") and "\x1b" not in out
    assert out.index("reward: boom") < out.index("4 rollouts of agents ended without a reward") < out.index("a.1")
    letters = run.json(capsys, "dead", "list", "test")
    assert [(letter["index"], letter["state"], letter["rollout"]) for letter in letters] == [
        (3, "dead", None),
        (5, "dead", None),
        (3, "rollout", "a.1"),
        (6, "rollout", "a.2"),
        (6, "rollout", "a.\x1b[2J"),
        (None, "rollout", ""),
    ]
    status, out, _ = run.command(capsys, "dead", "show", "test", "6")
    assert status == 0 and out.count("index 6 of main, rollout") == 2 and "producer a" in out
    assert "rollout  a.2\nreason   idle for 3 s\n" in out and "\x1b" not in out
    assert len(run.json(capsys, "dead", "show", "test", "3")) == 2
    error = refused(run, capsys, "requeue", "test", "6")
    assert "INDEX = 6: not dead in run 'test': its last letter is marked 'rollout'" in error
    assert run.json(capsys, "dead", "requeue", "test", "--all") == {"indexes": [3, 5], "without_index": 0}


def test_a_letter_is_shown_with_prompt_and_rewards_or_with_its_first_bytes(run, half, redis_client, capsys):
    poison = encode_group(make_group(11, 9, rewards=(0.0, 1.0, 0.5)))
    redis_client.xadd(run.keys.rollouts, {Field.INDEX: "11", Field.KIND: Kind.GROUP, Field.PAYLOAD: poison})
    redis_client.xadd(run.keys.rollouts, {Field.INDEX: "12", Field.KIND: Kind.GROUP, Field.PAYLOAD: b"\x93\x01junk"})
    half.heal()
    status, out, _ = run.command(capsys, "dead", "show", "test", "11")
    assert status == 0
    assert "reason   poison: rollouts: 3 siblings, expected at most 2" in out
    assert "prompt   12+34=\nanswer   46\n" in out
    (content,) = run.json(capsys, "dead", "show", "test", "11")
    assert [sibling["reward"] for sibling in content["siblings"]] == [0.0, 1.0, 0.5]
    assert content["siblings"][0]["versions"] == [9]
    out = run.command(capsys, "dead", "show", "test", "12")[1]
    assert "payload  payload: not a rollout group: " in out and "begins   9301 6a756e6b" in out
    (content,) = run.json(capsys, "dead", "show", "test", "3")
    assert content["siblings"] is None and content["hex_preview"] is None


def refused(run, capsys, *argv: str) -> str:
    status, out, err = run.command(capsys, "dead", *argv)
    assert (status, out) == (2, "") and err.count("\n") == 1
    return err


def test_wrong_requests_are_refused_with_the_reason(run, half, redis_client, capsys):
    assert "INDEX = 4: no dead letter of run 'test' names it" in refused(run, capsys, "show", "test", "4")
    error = refused(run, capsys, "requeue", "test", "3", "4")
    assert "INDEX = 4: not dead in run 'test': no dead letter names it; nothing was requeued" in error
    assert redis_client.exists(run.keys.requeued) == 0
    assert "expected one of INDEX..., --reason R and --all" in refused(run, capsys, "requeue", "test")
    assert "expected one of INDEX" in refused(run, capsys, "requeue", "test", "3", "--all")
    error = refused(run, capsys, "requeue", "test", "--reason", "lag")
    assert "--reason lag: no index of run 'test' died of it; expected one of: prompt, reward" in error
    run.command(capsys, "dead", "requeue", "test", "3")
    error = refused(run, capsys, "requeue", "test", "3")
    assert "INDEX = 3: not dead in run 'test': its last letter is marked 'requeued'" in error


def test_a_reason_names_all_that_died_of_it_and_a_finished_run_takes_no_requeue(run, half, redis_client, capsys):
    assert run.json(capsys, "dead", "requeue", "test", "--reason", "prompt")["indexes"] == [5]
    assert run.json(capsys, "dead", "requeue", "test", "--reason", "reward: boom")["indexes"] == [3]
    redis_client.xadd(run.keys.rollouts, {Field.KIND: Kind.GROUP, Field.PAYLOAD: b"?"})
    half.heal()
    out = run.command(capsys, "dead", "requeue", "test", "--all")[1]
    assert out.startswith("nothing to requeue\n") and "1 letters name no index, so there is nothing to release" in out
    half.scripts.finish()
    assert "run 'test' is finished and releases nothing more" in refused(run, capsys, "requeue", "test", "3")


def test_without_dead_letters_the_list_says_so_and_a_redis_that_is_away_is_one_line(
    run, redis_client, capsys, monkeypatch
):
    redis_client.hset(run.keys.commit, "epoch", 0)
    assert run.command(capsys, "dead", "list", "test") == (0, "no dead letters\n", "")
    monkeypatch.setenv("REDIS_URL", "redis://127.0.0.1:1")
    for command in (["list", "test"], ["show", "test", "3"], ["requeue", "test", "--all"]):
        status, out, err = run.command(capsys, "dead", *command)
        assert (status, out) == (1, "") and err.startswith("penstock: REDIS_URL: no Redis answers")


def test_a_run_killed_within_a_requeue_trains_what_was_requeued_once_and_its_ledger_balances(run, redis_client, capsys):
    died = []

    def answer(index: int, version: int) -> dict:
        if index == 3 and not died:
            died.append(index)
            return dead_fields(3, "reward: boom")
        if index == 20 and len(died) == 1:
            died.append(index)
            wait_for(lambda: redis_client.hexists(run.keys.dead_index, "3"))
            assert run.command(capsys, "dead", "requeue", "test", "3")[0] == 0
        return group_fields(index, version)

    run.producer(answer)
    trainer = run.trainer()
    release_again = trainer.leadership.scripts.release_again

    def release_and_die(version, tasks):
        release_again(version, tasks)
        if [index for index, _ in tasks] == [3]:
            raise KilledError

    trainer.leadership.scripts.release_again = release_and_die
    with pytest.raises(KilledError):
        trainer.run()
    assert run.json(capsys, "audit", "test")["balanced"]
    trainer = run.trainer(resume=True)
    assert trainer.run()
    ledger = run.ledger()
    assert (ledger["num_groups_trained"], ledger["num_groups_dead"]) == (48, 0)
    assert ledger["num_groups_released_again"]["requeued"] == 1
    trained = trainer.learner.trained
    assert trained.count(3) == 1 and len(set(trained)) == 48
    found = run.json(capsys, "audit", "test")
    assert found["balanced"] and found["ledger"]["dead"] == 0
    assert [letter["state"] for letter in run.json(capsys, "dead", "list", "test")] == ["released again"]


def test_the_letter_of_a_reward_that_raised_shows_prompt_completions_producer_and_traceback(
    run, half, capsys, tmp_path
):
    byte_tokenizer(tmp_path / "model")
    config = msgspec.structs.replace(run.config, model=ModelConfig(path=str(tmp_path / "model")))
    save_run_file(config, run.folder)
    half.connection.client.xadd(run.keys.rollouts, unscored_fields(9, "reward: KeyError: 'x'"))
    half.heal()
    status, out, _ = run.command(capsys, "dead", "show", "test", "9")
    assert status == 0 and "producer p1" in out and "reason   reward: KeyError: 'x'" in out
    assert "raised   Traceback (most recent call last):" in out and "           in reward" in out
    assert "prompt   " in out and "none" in out
    assert "says 0   \\x15\\x16\\x02" in out, "escaped for the terminal"
    (content,) = run.json(capsys, "dead", "show", "test", "9")
    assert content["traceback"].endswith("KeyError: 'x'\n") and content["letter"]["producer"] == "p1"
    assert content["prompt"] == make_group(9, 0).prompt.text and content["problem"] is None
    said = load_tokenizer(config).decode([21, 22, 2])
    assert [(sibling["reward"], sibling["completion"]) for sibling in content["siblings"]] == [(None, said)] * 2
