"""Scripts, reader, releaser, publisher and evaluator, each alone on a real server."""

import msgspec
import pytest

from mini_producer import dead_fields, group_fields, make_group
from penstock.consumers.checkpoints.state import CheckpointState, ReleasedTask
from penstock.consumers.learning.batch.lag import LagTable, is_stale
from penstock.consumers.stream.connection import TrainerConnection
from penstock.consumers.stream.evaluation import MOST_OPEN, Evaluator
from penstock.consumers.stream.ledger import Ledger
from penstock.consumers.stream.reader import Reader, Refused
from penstock.consumers.stream.release import Releaser
from penstock.consumers.stream.run_progress import RunProgress
from penstock.consumers.stream.scripts import FencedError, Scripts, announced_of, forks_of
from penstock.schemas.config import EnvironmentConfig, HeldOut, ModelConfig, RunConfig, SolvedConfig
from penstock.schemas.keys import Field, Keys, Kind
from penstock.schemas.metrics import figures_of
from penstock.schemas.policy import make_version
from penstock.schemas.process.outage import RedisGoneError
from penstock.schemas.rollout import encode_group

pytestmark = pytest.mark.redis

KEYS = Keys("test")


@pytest.fixture
def connection(redis_url):
    connection = TrainerConnection(redis_url, outage_s=5)
    yield connection
    connection.close()


@pytest.fixture
def scripts(connection):
    scripts = Scripts(connection, KEYS)
    scripts.open_epoch(0)
    return scripts


def config(**changes) -> RunConfig:
    return RunConfig(
        name="test",
        model=ModelConfig(path="none"),
        environment=EnvironmentConfig(path="none:None"),
        **{"num_updates": 10, "groups_per_batch": 4, "group_size": 2, "max_lag": 2, **changes},
    )


def lag_table(current: int = 5) -> LagTable:
    return LagTable(current, {}, {})


def tasks(first: int, last: int) -> list[ReleasedTask]:
    return [ReleasedTask("main", number) for number in range(first, last + 1)]


def sets(**num_prompts: int) -> dict[str, HeldOut]:
    """How each environment is evaluated: one answer to each of so many held-out prompts."""
    return {name: HeldOut(num_prompts=n, num_samples=1, solved=SolvedConfig()) for name, n in num_prompts.items()}


def test_every_write_of_an_older_epoch_is_refused(connection, scripts):
    Scripts(connection, KEYS).open_epoch(3)
    for write in (
        scripts.check,
        lambda: scripts.release(0, tasks(1, 5), 0),
        lambda: scripts.release_again(0, [(1, ReleasedTask("main", 1))]),
        lambda: scripts.drop_unreachable(),
        lambda: scripts.announce(1, b"{}", b"", 0),
        lambda: scripts.evaluate([(f"0-{n}", task) for n, task in enumerate(tasks(1, 3), 1)]),
        lambda: scripts.dead_letter(Refused(1, "poison", b"")),
        lambda: scripts.commit("c", b"0-0"),
        lambda: scripts.describe({"run_file": b"{}"}),
        lambda: scripts.note_tasks({1: ReleasedTask("main", 1)}),
        lambda: scripts.note_parity({"one": b"{}"}),
        scripts.finish,
        lambda: scripts.restore(0, {}),
        lambda: scripts.open_epoch(2),
        lambda: scripts.open_epoch(3),
    ):
        with pytest.raises(FencedError):
            write()


def test_a_trainer_that_finds_another_run_of_its_name_changes_nothing(connection, scripts, redis_client):
    redis_client.flushall()
    Scripts(connection, KEYS).open_epoch(0)
    before = redis_client.hgetall(KEYS.commit)
    for write in (scripts.check, lambda: scripts.release(0, tasks(1, 5), 0), lambda: scripts.restore(7, {})):
        with pytest.raises(FencedError, match="has begun here under the name of this one"):
            write()
    assert redis_client.hgetall(KEYS.commit) == before and not redis_client.exists(KEYS.prompts)


def test_a_group_of_another_run_of_the_name_is_dropped_and_its_index_stays_open(scripts, redis_client):
    scripts.release(0, tasks(1, 2), 0)
    ledger = Ledger()
    for task in tasks(1, 2):
        ledger.release(task)
    reader = Reader(scripts.connection, KEYS, ledger, 2, run_id=scripts.run_id)
    for run_id in ("other", scripts.run_id):
        redis_client.xadd(KEYS.rollouts, {**group_fields(1, 0), Field.RUN_ID: run_id})
    redis_client.xadd(KEYS.rollouts, {**dead_fields(2, "reward: boom"), Field.RUN_ID: "other"})
    reader.read_to_end(lag_table())
    assert list(reader.ready) == [1] and reader.take_refused() == [] and ledger.num_duplicates_dropped == 0
    redis_client.xtrim(KEYS.prompts, maxlen=0)
    for run_id in ("other", scripts.run_id):
        redis_client.xadd(KEYS.prompts, {Field.INDEX: 2, Field.VERSION: 0, Field.RUN_ID: run_id})
        releaser = Releaser(scripts, ledger, reader, config(), RunProgress(0, CheckpointState(policy_version=0)))
        assert releaser.reconcile(lag_table()) == (run_id == "other"), "another run's prompt is nobody's"
        ledger.postponed.clear()


def test_held_out_prompts_asked_twice_before_their_policy_is_announced_stay(scripts, redis_client, caplog):
    asked = [("0-1", ReleasedTask("main", 1)), ("0-2", ReleasedTask("main", 2))]
    assert [scripts.evaluate(asked), scripts.evaluate(asked)] == [2, 0]  # the second after a lost reply
    assert [entry for entry, _ in redis_client.xrange(KEYS.evaluations)] == [b"0-1", b"0-2"]
    assert "are used up" not in caplog.text and not scripts.has_renewed()


def result(version: int, n: int, *rewards: float, by: str = "good-1", environment: str = "") -> dict:
    group = make_group(0, version, rewards=rewards, evaluation_id=f"{version}-{n}")
    group = msgspec.structs.replace(group, sampled_by=(by,), environment=environment)
    return {Field.EVALUATION: f"{version}-{n}", Field.KIND: Kind.GROUP, Field.PAYLOAD: encode_group(group)}


def failed(name: str) -> dict:
    return {Field.EVALUATION: name, Field.KIND: Kind.DEAD, Field.REASON: "reward: boom"}


def answer(client, *results: dict) -> None:
    """As a producer does: the entry is gone from the stream of what is asked."""
    for fields in results:
        client.xadd(KEYS.evaluation_results, fields)
        client.xdel(KEYS.evaluations, fields[Field.EVALUATION])


def asked(client) -> dict[bytes, int]:
    """By entry the number of the held-out prompt."""
    return {entry_id: int(fields[Field.TASK]) for entry_id, fields in client.xrange(KEYS.evaluations)}


def test_answers_are_removed_as_they_are_read_and_a_new_trainer_asks_anew(connection, scripts, redis_client):
    evaluator = Evaluator(scripts, sets(main=3))

    def done_after(*names: str, run_id: str = scripts.run_id) -> list[int]:
        answer(redis_client, *({**failed(name), Field.RUN_ID: run_id} for name in names))
        versions = [evaluation.policy_version for evaluation in evaluator.collect()]
        assert redis_client.xlen(KEYS.evaluation_results) == 0, "also while an evaluation is open"
        return versions

    evaluator.request(0, update=0)
    evaluator.request(1, update=1)
    assert done_after("0-1", "0-2", "1-1") == []
    assert done_after("0-3", run_id="other") == [], "answered by the weights of another run"
    assert done_after("0-3") == [0]
    answer(redis_client, failed("1-2"))
    Scripts(connection, KEYS).open_epoch(1)
    assert redis_client.xlen(KEYS.evaluations) == redis_client.xlen(KEYS.evaluation_results) == 0


def test_too_many_open_evaluations_drop_the_oldest_that_nobody_has_begun(scripts, redis_client):
    evaluator = Evaluator(scripts, sets(main=2))
    evaluator.request(0, update=0)
    answer(redis_client, failed("0-1"))
    assert evaluator.collect() == []
    for version in range(1, 20):
        evaluator.request(version, update=version)
    kept = [0, *range(20 - MOST_OPEN + 1, 20)]
    assert evaluator.pending == kept
    left = {f"{version}-{n}".encode(): n for version in kept for n in (1, 2)}
    assert asked(redis_client) == {name: n for name, n in left.items() if name != b"0-1"}


def test_a_write_outlives_a_server_that_is_emptied_again_once_its_epoch_is_restored(connection, redis_client):
    losses = ["first", "second"]

    def restore() -> None:
        scripts.restore(0, {})
        if losses:
            losses.pop()
            redis_client.flushall()

    scripts = Scripts(connection, KEYS, restore)
    scripts.open_epoch(0)
    redis_client.flushall()
    assert scripts.release(0, tasks(1, 2), 0) == 2
    assert not losses and redis_client.xlen(KEYS.prompts) == 2


def test_a_release_or_an_epoch_repeated_after_a_lost_reply_changes_nothing_and_the_cursor_never_goes_back(
    scripts, redis_client
):
    assert [scripts.open_epoch(4)[b"epoch"] for _ in range(2)] == [b"4"] * 2
    for last in (5, 5, 2):
        assert scripts.release(0, tasks(1, last), 7) == 5
    assert scripts.release(10, tasks(11, 12), 7) == 12, "nor does it fall behind what the trainer knows"
    for cursor, released in ((4, b"12"), (14, b"14")):
        scripts.restore(cursor, {})
        assert redis_client.hget(KEYS.commit, "released") == released
    entries = redis_client.xrange(KEYS.prompts)
    assert [(int(fields[Field.INDEX]), fields[Field.VERSION]) for _, fields in entries] == [
        (index, b"7") for index in (1, 2, 3, 4, 5, 11, 12)
    ]


def test_no_more_is_released_than_the_remaining_updates_need(connection, scripts):
    ledger = Ledger()
    progress = RunProgress(0, CheckpointState(policy_version=-1))
    reader = Reader(connection, KEYS, ledger, group_size=2)
    releaser = Releaser(scripts, ledger, reader, config(num_updates=3), progress)
    releaser.release(0)
    for index in range(1, 10):
        ledger.settle(index, "dead" if index == 5 else "trained")
    progress.num_batches = 2
    before = ledger.num_released
    releaser.release(0)
    assert ledger.num_released == before + 1, "a dead group fills no batch and is replaced; nothing else is needed"


def test_what_cannot_be_trained_is_refused_and_named(connection, redis_client):
    ledger = Ledger()
    ledger.num_released = 6
    reader = Reader(connection, KEYS, ledger, group_size=2)
    payload = encode_group(make_group(2, 5))
    for fields in (
        {Field.KIND: Kind.GROUP, Field.PAYLOAD: payload},
        {Field.INDEX: "1", Field.KIND: Kind.GROUP, Field.PAYLOAD: payload[:-7]},
        {Field.INDEX: "2", Field.KIND: Kind.GROUP, Field.PAYLOAD: encode_group(make_group(9, 5))},
        group_fields(3, 6),
        group_fields(4, 5, rewards=(0.0, 1.0, 1.0)),
        dead_fields(5, "reward: ZeroDivisionError"),
        group_fields(99, 5),
        group_fields(6, 5),
    ):
        redis_client.xadd(KEYS.rollouts, fields)
    reader.read_to_end(lag_table(5))
    assert list(reader.ready) == [6]
    refused = [(record.index, record.reason) for record in reader.take_refused()]
    assert refused[0] == (None, "poison: index field None")
    assert refused[1][0] == 1 and refused[1][1].startswith("poison: payload: not a rollout group")
    assert refused[2] == (2, "poison: index: the entry says 2, its payload 9")
    assert refused[3] == (3, "poison: version_spans: version 6 is ahead of the trainer's 5")
    assert refused[4] == (4, "poison: rollouts: 3 siblings, expected at most 2")
    assert refused[5] == (5, "reward: ZeroDivisionError")
    assert refused[6] == (None, "poison: index 99 was never released")


def test_a_group_of_another_task_than_its_index_stands_for_is_refused(connection, redis_client):
    ledger = Ledger()
    for number in (7, 8, 9, 10):
        ledger.release(ReleasedTask("sums", number))
    reader = Reader(connection, KEYS, ledger, group_size=2)
    posed = {1: ("sums", 7), 2: ("sums", 9), 3: ("words", 9), 4: ("", 0)}
    for index, (environment, task) in posed.items():
        group = msgspec.structs.replace(make_group(index, 5), environment=environment, task=task)
        fields = {Field.INDEX: str(index), Field.KIND: Kind.GROUP, Field.PAYLOAD: encode_group(group)}
        redis_client.xadd(KEYS.rollouts, fields)
    reader.read_to_end(lag_table(5))
    assert {index: (held.group.environment, held.group.task) for index, held in reader.ready.items()} == {
        1: ("sums", 7),
        4: ("sums", 10),  # a record of an earlier release does not say
    }
    refused = [(record.index, record.reason) for record in reader.take_refused()]
    assert refused == [
        (2, "poison: task: index 2 is task 8 of environment 'sums', its payload has task 9 of 'sums'"),
        (3, "poison: task: index 3 is task 9 of environment 'sums', its payload has task 9 of 'words'"),
    ]


def test_reconciling_releases_exactly_what_is_in_neither_stream(connection, scripts, redis_client):
    ledger = Ledger()
    reader = Reader(connection, KEYS, ledger, group_size=2)
    releaser = Releaser(scripts, ledger, reader, config(), RunProgress(0, CheckpointState(policy_version=-1)))
    releaser.release(0)
    entries = {int(fields[Field.INDEX]): entry_id for entry_id, fields in redis_client.xrange(KEYS.prompts)}
    for index in (1, 2, 3, 4):
        redis_client.xdel(KEYS.prompts, entries[index])
    ledger.settle(1, "trained")
    redis_client.xadd(KEYS.rollouts, group_fields(2, 0))
    redis_client.xadd(KEYS.rollouts, dead_fields(3, "deadline"))
    assert releaser.reconcile(lag_table()) == 1
    releaser.release(0)
    assert ledger.released_again == {"lost": 1}
    prompts = [int(fields[Field.INDEX]) for _, fields in redis_client.xrange(KEYS.prompts)]
    assert prompts == [5, 6, 7, 8, 9, 10, 11, 12, 4, 13], "and one more, as the credit allows"
    assert releaser.reconcile(lag_table()) == 0
    assert ledger.released_again == {"lost": 1}


def test_a_group_is_stale_only_when_no_token_lies_within_the_bound():
    group = make_group(1, 3)
    assert is_stale(group, lag_table(6), 2)
    assert not is_stale(group, lag_table(5), 2)
    mixed = msgspec.structs.replace(group, rollouts=(*group.rollouts, *make_group(1, 5).rollouts))
    assert not is_stale(mixed, lag_table(6), 2)
    assert not is_stale(make_group(1, -1), lag_table(6), 2), "an unknown version is masked by the batch, not dropped"


def test_the_commit_hash_tells_forks_and_last_announced_versions(connection, scripts, redis_client):
    scripts.announce(0, b"{}", b"{}", 0)
    scripts.announce(1, b"{}", b"", 0)
    successor = Scripts(connection, KEYS)
    commit = successor.open_epoch(1)
    first = make_version(1, 0)
    successor.announce(first, b"{}", b"{}", 0, 1)
    assert forks_of(commit) == {}
    assert announced_of(commit) == {0: 1}
    commit = redis_client.hgetall(KEYS.commit)
    assert forks_of(commit) == {1: 1}
    assert announced_of(commit) == {0: 1, 1: first}


def test_an_anchor_alone_is_no_announcement_and_what_is_older_than_the_floor_goes(scripts, redis_client):
    for version in range(4):
        scripts.announce(version, b"{}", b"{}" if version in (0, 2) else b"", 0)
    scripts.announce(3, b"", b"{}", 2)
    assert [entry_id for entry_id, _ in redis_client.xrange(KEYS.policy)] == [b"2-1", b"3-1"]
    assert set(redis_client.hkeys(KEYS.anchors)) == {b"2", b"3"}
    scripts.announce(2, b"", b"{}", 0)
    assert redis_client.hget(KEYS.commit, "policy_version") == b"3"


def test_an_evaluation_is_complete_when_each_prompt_was_answered_once(scripts, redis_client):
    evaluator = Evaluator(scripts, sets(main=3))
    evaluator.request(5, update=5)
    evaluator.request(5, update=5)
    assert asked(redis_client) == {b"5-1": 1, b"5-2": 2, b"5-3": 3}
    answer(redis_client, result(5, 1, 1.0), result(5, 1, 0.0), result(5, 2, 1.0), result(4, 3, 1.0))
    assert evaluator.collect() == []
    answer(redis_client, failed("5-3"))
    (done,) = evaluator.collect()
    assert (done.policy_version, done.num_prompts, done.num_failed) == (5, 3, 1)
    assert done.figures["reward"] == pytest.approx(2 / 3)
    assert evaluator.pending == []


def test_an_evaluation_of_several_environments_has_the_rewards_of_those_that_the_groups_name(scripts, redis_client):
    evaluator = Evaluator(scripts, sets(sums=2, words=2))
    evaluator.request(5, update=5)
    tasks = [(fields[Field.ENVIRONMENT], fields[Field.TASK]) for _, fields in redis_client.xrange(KEYS.evaluations)]
    assert tasks == [(b"sums", b"1"), (b"sums", b"2"), (b"words", b"1"), (b"words", b"2")]
    answer(redis_client, result(5, 1, 0.25, environment="words"), failed("5-2"))
    answer(redis_client, result(5, 3, 1.0, environment="sums"), result(5, 4, 0.75))
    (done,) = evaluator.collect()
    assert {name: figures_of(of_one) for name, of_one in done.environments.items()} == {
        "sums": {"reward": 0.5},  # what has failed counts as 0
        "words": {"reward": 0.5},  # one that names none is of the environment that was asked
    }
    assert (done.figures["reward"], done.num_failed) == (0.5, 1)


def test_an_evaluation_of_several_answers_a_prompt_has_means_and_pass_at_k(scripts, redis_client):
    how = HeldOut(num_prompts=2, num_samples=4, pass_at=(1, 2), solved=SolvedConfig(value=0.5))
    evaluator = Evaluator(scripts, {"main": how})
    evaluator.request(5, update=5)
    answer(redis_client, result(5, 1, 1.0, 0.5, 0.0, 0.0), result(5, 2, 0.0, 0.0, 0.0, 0.0))
    (done,) = evaluator.collect()
    assert done.figures == done.environments["main"]
    assert done.figures == pytest.approx(
        {
            "reward": 0.1875, "reward_se": 0.1875, "pass@1": 0.25, "pass@1_se": 0.25,
            "pass@2": 5 / 12, "pass@2_se": 5 / 12, "completion_tokens": 3.0, "truncated_frac": 0.0, "num_samples": 8,
        }
    )  # fmt: skip


def test_a_release_says_which_task_it_is_until_checkpoints_hold_it(scripts, redis_client):
    scripts.release(0, [ReleasedTask("words", 1), ReleasedTask("sums", 1), ReleasedTask("sums", 2)], 0)
    scripts.release_again(0, [(2, ReleasedTask("sums", 1))])
    released = [(fields[Field.ENVIRONMENT], fields[Field.TASK]) for _, fields in redis_client.xrange(KEYS.prompts)]
    assert released == [(b"words", b"1"), (b"sums", b"1"), (b"sums", b"2"), (b"sums", b"1")]
    assert redis_client.hgetall(KEYS.tasks) == {b"1": b"1 words", b"2": b"1 sums", b"3": b"2 sums"}
    redis_client.delete(KEYS.tasks)
    scripts.release_again(0, [(1, ReleasedTask("words", 1)), (3, ReleasedTask("sums", 2))])
    assert redis_client.hgetall(KEYS.tasks) == {b"1": b"1 words", b"3": b"2 sums"}, "a second release as the first"
    scripts.commit("c", b"0-0", 2)
    assert redis_client.hgetall(KEYS.tasks) == {b"3": b"2 sums"}


@pytest.fixture
def quarantined() -> set[str]:
    return set()


@pytest.fixture
def evaluator(scripts, quarantined) -> Evaluator:
    return Evaluator(scripts, sets(main=3), lambda samplers: not quarantined.isdisjoint(samplers))


def test_what_a_quarantined_producer_has_answered_is_asked_again_and_does_not_count(
    evaluator, quarantined, redis_client
):
    evaluator.request(5, update=5)
    answer(redis_client, result(5, 1, 1.0, by="bad-1"), result(5, 2, 0.5))
    assert evaluator.collect() == []
    evaluator.request(7, update=7)
    quarantined.add("bad-1")
    answer(redis_client, result(5, 3, 1.0, by="bad-1"))
    assert evaluator.collect() == [] and evaluator.pending == [5, 7]
    before = {b"7-1": 1, b"7-2": 2, b"7-3": 3, b"7-4": 1, b"7-5": 3}
    assert asked(redis_client) == before
    assert evaluator.collect() == [] and asked(redis_client) == before, "once"
    answer(redis_client, result(7, 5, 0.0), result(7, 4, 0.25, by="bad-1"))
    assert evaluator.collect() == []
    assert asked(redis_client) == {b"7-1": 1, b"7-2": 2, b"7-3": 3, b"7-6": 1}
    answer(redis_client, result(7, 6, 0.1))
    (done,) = evaluator.collect()
    assert (done.policy_version, done.update, done.num_failed) == (5, 5, 0)
    assert done.figures["reward"] == pytest.approx((0.1 + 0.5 + 0.0) / 3)
    answer(redis_client, *(result(7, n, 0.75) for n in (1, 2, 3)))
    (done,) = evaluator.collect()
    assert (done.policy_version, done.figures["reward"]) == (7, 0.75)
    assert evaluator.pending == [] and asked(redis_client) == {}


def test_an_emptied_server_is_asked_again_also_what_was_asked_twice(evaluator, quarantined, redis_client):
    evaluator.request(5, update=5)
    answer(redis_client, result(5, 1, 1.0, by="bad-1"))
    evaluator.collect()
    quarantined.add("bad-1")
    evaluator.request(7, update=7)
    evaluator.collect()
    before = {b"5-2": 2, b"5-3": 3, b"7-1": 1, b"7-2": 2, b"7-3": 3, b"7-4": 1}
    for has_lost in (False, True):
        if has_lost:
            redis_client.delete(KEYS.evaluations)
        evaluator.request_again()
        assert asked(redis_client) == before, "what is there is not asked twice"
    assert evaluator.collect() == [] and asked(redis_client) == before, (
        "the first answer is read again, and is of no entry"
    )


def test_an_outage_is_an_error_that_says_for_how_long_and_a_refused_password_one_at_once(tmp_path, server_url):
    kinds = []
    away = TrainerConnection(f"unix://{tmp_path}/none.sock", outage_s=0.2, on_error=kinds.append)
    with pytest.raises(RedisGoneError, match="has been away for"):
        away.call(lambda client: client.ping())
    assert set(kinds) == {"ConnectionError"}
    refused = TrainerConnection(server_url.replace("unix://:", "unix://:not-"), outage_s=30)
    with pytest.raises(RedisGoneError, match="refuses the credentials"):
        refused.call(lambda client: client.ping())
