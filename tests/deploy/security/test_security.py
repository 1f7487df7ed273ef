"""Who may do what on a shared Redis, TLS, and where passwords must never appear. On real Redis and Valkey."""

import asyncio
import stat
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import quote

import msgspec
import pytest
import redis
from redis import exceptions

import penstock.consumers.__main__ as entry
import wire_examples
from penstock.consumers.stream.connection import TrainerConnection
from penstock.consumers.stream.scripts import Scripts
from penstock.deploy import cli
from penstock.deploy.launch.run_folder import save_run_file
from penstock.deploy.security import __main__ as command
from penstock.deploy.security.acl import ADMIN, ROLES, acl_file, user_name, user_names
from penstock.producers.observe.metrics import ProducerMetrics
from penstock.producers.stream.connection import ProducerConnection
from penstock.producers.stream.in_flight import Claim, DeadRollout, InFlightTable
from penstock.producers.stream.journals import Journal, JournalHolder, Journals
from penstock.producers.stream.progress_store import ProgressStore
from penstock.producers.stream.rollout_progress import RolloutProgress
from penstock.producers.stream.writer import Writer
from penstock.schemas.config import ProducersConfig
from penstock.schemas.keys import Field, Keys
from penstock.schemas.policy import Chunk, WeightManifest
from penstock.schemas.weights.codec import digest, pack
from penstock.schemas.weights.log import WeightLog
from penstock.schemas.weights.reading import WeightReader
from penstock.schemas.weights.stores import RedisChunks
from producer_thread import ProducerThread
from real_server import RealServer
from scripted_learner import ScriptedLearner
from trainer_bench import TrainerBench

pytestmark = pytest.mark.redis

KEYS, OTHER = Keys("test"), Keys("test2")
PASSWORDS = {name: f"pass/{name}?#@:%" for name in user_names(["test", "test2"])}


@pytest.fixture
def guarded(server_binary: Path, tmp_path: Path) -> Iterator[RealServer]:
    """A server that knows the users of the runs `test` and `test2`, and nobody else."""
    file = tmp_path / "users.acl"
    file.write_text(acl_file(["test", "test2"], PASSWORDS))
    server = RealServer(server_binary, "--aclfile", str(file))
    yield server
    server.remove()


def url_of(server: RealServer, user: str) -> str:
    return f"unix://{user}:{quote(PASSWORDS[user], safe='')}@{server.socket}"


@pytest.fixture
def client_of(guarded: RealServer) -> Iterator[Callable[[str], redis.Redis]]:
    """`client_of("test-producer")`: a client under that user."""
    clients: list[redis.Redis] = []

    def connect(user: str) -> redis.Redis:
        clients.append(redis.Redis.from_url(url_of(guarded, user), protocol=2))
        return clients[-1]

    yield connect
    for client in clients:
        client.close()


# What nobody but the administrator may do. KEYS and SCRIPT are the keywords, not the run's keys.
_NOBODY = [
    "KEYS *", "FLUSHALL", "FLUSHDB", "CONFIG GET *", "CONFIG SET maxmemory 1", "SHUTDOWN NOSAVE",
    "ACL LIST", "ACL SETUSER x on", "CLIENT LIST", "CLIENT KILL TYPE normal", "MONITOR", "REPLICAOF NO ONE", "SAVE",
    "BGREWRITEAOF", "SCRIPT FLUSH", "SCRIPT KILL", "FUNCTION LIST", "MODULE LIST", "SWAPDB 0 1", "PUBLISH c m",
    "SUBSCRIBE c", "RENAME {test}:prompts {test}:x", "COPY {test}:policy {test}:x", "DUMP {test}:commit",
    "SET free 1", "GET free", "UNLINK {test}:rollouts", "EXPIRE {test}:rollouts 1",
    "EVAL return{redis.call('flushall')} 0", "MIGRATE h 1 {test}:policy 0 1", "XSETID {test}:rollouts 9-9",
    "XADD {test2}:prompts * index 1", "XADD {test2}:rollouts * index 1", "HSET {test2}:commit epoch 9",
    "HGET {test2}:commit epoch", "XREAD STREAMS {test2}:rollouts 0", "GET {test2}:producers:a",
    "SET {test2}:producers:a x", "XRANGE {test2}:policy - +",
]  # fmt: skip
_FORBIDDEN = {
    "producer": [
        "HSET {test}:commit finished 1", "HDEL {test}:commit epoch", "HGETALL {test}:commit", "DEL {test}:commit",
        "XADD {test}:policy * manifest x", "XTRIM {test}:policy MAXLEN 0", "XDEL {test}:policy 0-1",
        "XADD {test}:evaluations * n 1", "XADD {test}:dead * index 1", "XTRIM {test}:dead_rollouts MAXLEN 0",
        "HSET {test}:dead_index 1 0-1", "HSET {test}:chunks 1-delta-0-0 x", "HDEL {test}:chunks 1-delta-0-0",
        "HSET {test}:anchors 1 x", "HDEL {test}:anchors 1",
        "HSET {test}:requeued 1 0-1", "SET {test}:lease me", "XRANGE {test}:rollouts - +", "XDEL {test}:rollouts 0-1",
        "XREAD STREAMS {test}:rollouts 0", "XTRIM {test}:rollouts MAXLEN 0", "XGROUP DESTROY {test}:prompts producers",
        "XGROUP SETID {test}:prompts producers $", "DEL {test}:prompts", "EVAL return 0", "EVALSHA x 0", "SCAN 0",
        "SCRIPT LOAD return", "INFO", "WATCH {test}:prompts", "GET {test2}:progress:1", "SET {test2}:progress:1 x",
        "HSET {test}:chunks 1 x", "HDEL {test}:chunks 1", "DEL {test}:chunks", "HKEYS {test}:chunks",
        "HSET {test}:anchors 1 x", "HDEL {test}:anchors 1", "HSET {test}:run run_file x", "HDEL {test}:run run_file",
        "HGET {test}:images x", "HDEL {test}:images x", "HSET {test2}:images x y", "DEL {test}:images",
        "HGET {test2}:chunks 1", "HGETALL {test2}:anchors", "HGETALL {test2}:run", "DEL {test}:rollouts",
    ],
    "trainer": [
        "XREADGROUP GROUP producers me STREAMS {test}:prompts >", "XGROUP CREATE {test}:prompts g 0 MKSTREAM",
        "XADD {test}:rollouts * index 1", "XADD {test}:evaluation_results * n 1", "XADD {test}:dead_rollouts * index 1",
        "SET {test}:producers:a x",
        "DEL {test}:producers:a", "DEL {test}:commit", "XTRIM {test}:prompts MAXLEN 0", "XDEL {test}:rollouts 0-1",
        "HSET {test}:requeued 1 0-1", "HDEL {test}:requeued 1", "DEL {test}:chunks", "HSET {test2}:chunks 1 x",
        "HSET {test2}:run run_file x",
    ],
    "observer": [
        "HSET {test}:chunks 1 x", "HSET {test}:run run_file x", "HSET {test}:anchors 1 x",
        "HSET {test}:commit finished 1", "XADD {test}:prompts * index 1", "XADD {test}:rollouts * index 1",
        "HSET {test}:requeued 1 0-1", "SET {test}:producers:a x", "DEL {test}:producers:a", "EVALSHA x 0",
        "EVAL_RO return{redis.call('hset','{test}:commit','a','b')} 1 {test}:commit",
        "EVAL_RO return{redis.call('hget','{test2}:commit','a')} 1 {test}:commit", "SCRIPT LOAD return",
        "XREADGROUP GROUP producers me STREAMS {test}:prompts >", "XTRIM {test}:rollouts MAXLEN 0",
        "DEL {test}:rollouts",
    ],
    "operator": [
        "HDEL {test}:requeued 1", "DEL {test}:commit",
        "EVAL return{redis.call('del','{test}:commit')} 1 {test}:commit",
    ],
}  # fmt: skip


@pytest.mark.parametrize("role", ROLES)
def test_a_user_can_do_none_of_what_its_role_does_not_need(client_of, role: str) -> None:
    admin, client = client_of(ADMIN), client_of(user_name("test", role))
    for keys in (KEYS, OTHER):
        for stream in (keys.prompts, keys.rollouts, keys.policy):
            admin.xadd(stream, {"a": "b"})
        admin.hset(keys.commit, "epoch", 0)
    before = admin.execute_command("DBSIZE")
    for line in [*_NOBODY, *_FORBIDDEN[role]]:
        allowed = []
        try:
            allowed.append(client.execute_command(*line.split(" ")))
        except exceptions.NoPermissionError:
            continue
        except redis.ResponseError as error:
            # Refused inside a script, which redis-py does not tell apart.
            refusals = ("NOPERM", "ACL failure", "The user executing the script can't")
            assert any(refusal in str(error) for refusal in refusals), f"{line}: {error}"
            continue
        pytest.fail(f"{role} may {line}: {allowed}")
    assert admin.execute_command("DBSIZE") == before
    assert admin.hgetall(KEYS.commit) == {b"epoch": b"0"}


def test_the_trainer_writes_the_weight_log_and_a_producer_reads_it(guarded: RealServer, client_of) -> None:
    admin, trainer, producer = (
        client_of(ADMIN),
        *(client_of(user_name("test", role)) for role in ("trainer", "producer")),
    )
    written = RedisChunks(lambda command: command(trainer), KEYS)
    written.put("0-whole-0-0", chunk := pack([]))
    written.put("0-whole-0-1", b"left by a trainer that was killed")
    assert sorted(written.keys()) == ["0-whole-0-0", "0-whole-0-1"]
    written.delete(["0-whole-0-1"])
    described = {"run_file": b"{}", "model_digest": b"d"}
    with closing(TrainerConnection(url_of(guarded, user_name("test", "trainer")), outage_s=5)) as connection:
        scripts = Scripts(connection, KEYS)
        scripts.open_epoch(0)
        scripts.describe(described)
    manifest = WeightManifest(
        version=0,
        parent_version=-1,
        total_bytes=0,
        tensors=(),
        chunks=(Chunk(key="0-whole-0-0", num_bytes=len(chunk), digest=digest(chunk), num_changed=0, pieces=()),),
    )
    admin.xadd(KEYS.policy, {Field.MANIFEST: msgspec.json.encode(manifest)}, id="0-1")
    admin.hset(KEYS.anchors, "0", msgspec.json.encode(manifest))
    reader = WeightReader(lambda command: command(producer), KEYS)
    assert reader.log() == WeightLog({0: manifest}, {0: manifest})
    assert reader.parts(manifest, manifest.chunks[0]) == []
    assert producer.hgetall(KEYS.description) == {name.encode(): value for name, value in described.items()}


async def test_a_producer_appends_letters_of_dead_rollouts(guarded: RealServer, client_of) -> None:
    admin, metrics = client_of(ADMIN), ProducerMetrics()
    connection = ProducerConnection.open(url_of(guarded, "test-producer"), outage_s=5, metrics=metrics)
    writer = Writer(connection, KEYS, InFlightTable(num_groups=1, group_size=1), metrics, "p1", "i1")
    claim = Claim(stream=KEYS.prompts, entry_id=b"1-0", index=3, version=0)
    writer.put_letter(claim, DeadRollout("a.1", "idle for 3 s"))
    running = asyncio.create_task(writer.run())
    await asyncio.wait_for(writer.drain(), 30)
    running.cancel()
    await connection.close()
    ((_, letter),) = admin.xrange(KEYS.dead_rollouts)
    assert letter[b"index"] == b"3" and letter[b"rollout"] == b"a.1"


async def test_a_producer_keeps_the_progress_of_its_rollouts(guarded: RealServer, client_of) -> None:
    admin, metrics = client_of(ADMIN), ProducerMetrics()
    connection = ProducerConnection.open(url_of(guarded, "test-producer"), outage_s=5, metrics=metrics)
    table = InFlightTable(num_groups=1, group_size=3)
    store = ProgressStore(connection, KEYS, table, metrics, ProducersConfig())
    progress, journals = RolloutProgress(store, "i1"), Journals(store, JournalHolder("i1", "a"))
    claim = Claim(stream=KEYS.prompts, entry_id=b"1-0", index=41, version=0)
    claim.in_flight = SimpleNamespace(so_far=wire_examples.group_in_flight)
    table.add(claim)
    await progress.save()
    assert admin.exists(KEYS.progress(41)) and await progress.find(
        claim
    ) == wire_examples.group_in_flight().finished_by("i1")
    journal = Journal(claim=claim)
    for said in (b"one", b"two"):
        journal.add(said)
        await journals.append(journal)
    await journals.find_moved([journal])
    assert await journals.read(claim) == [b"one", b"two"] and not journal.has_moved
    assert await journals.holder_of(41) == JournalHolder("i1", "a") and admin.ttl(KEYS.progress(41)) > 0
    await store.end()
    await connection.close()
    assert not admin.exists(KEYS.progress(41))


def test_only_the_operator_may_requeue_what_is_dead(
    guarded: RealServer, client_of, tmp_path, monkeypatch, capsys
) -> None:
    admin = client_of(ADMIN)
    admin.hset(KEYS.commit, "epoch", 0)
    letter = admin.xadd(KEYS.dead, {"index": 3, "reason": "reward: boom", "payload": "", "entry": ""})
    admin.hset(KEYS.dead_index, "3", letter)
    for role in ("observer", "trainer", "operator"):
        monkeypatch.setenv("REDIS_URL", url_of(guarded, user_name("test", role)))
        status = cli.main(["dead", "requeue", "test", "3", "--runs", str(tmp_path)])
        shown = capsys.readouterr()
        if role == "operator":
            assert (status, shown.err) == (0, "")
        else:
            assert status == 1 and shown.err.startswith("penstock: Redis refuses: ") and shown.err.count("\n") == 1
            assert not admin.exists(KEYS.requeued)
    assert admin.hgetall(KEYS.requeued) == {b"3": letter}


def test_nobody_gets_in_without_a_password(guarded: RealServer) -> None:
    for user in ("default", *user_names(["test"])):
        url = f"unix://{user}:wrong@{guarded.socket}"
        with redis.Redis.from_url(url, protocol=2) as stranger, pytest.raises(redis.AuthenticationError):
            stranger.ping()


def test_a_whole_run_works_with_each_part_under_its_own_user(
    guarded: RealServer, client_of, tmp_path: Path, monkeypatch, capsys
) -> None:
    monkeypatch.setattr(entry, "load_learner", ScriptedLearner)
    bench = TrainerBench(url_of(guarded, "test-trainer"), tmp_path)
    producers = [
        ProducerThread(bench.config, url_of(guarded, "test-producer"), tmp_path, producer_id) for producer_id in "ab"
    ]
    try:
        trainer = bench.trainer()
        for producer in producers:
            producer.start()
        assert trainer.run()
        for producer in producers:
            producer.finish()
            assert producer.problem is None
        ledger = bench.ledger()
        assert ledger["num_updates"] == 12
        assert ledger["num_groups_released"] == ledger["num_groups_trained"] + ledger["num_groups_skipped"]
        # A second trainer resumes, which runs every script of a rollback too.
        bench.overrides = ["num_updates=14"]
        assert bench.trainer(resume=True).learner.num_steps == trainer.learner.num_steps
    finally:
        for producer in producers:
            producer.finish()
        bench.close()
    admin = client_of(ADMIN)
    refused = [entry for entry in admin.acl_log() if b"client|" not in entry["object"].encode()]
    assert refused == [], "no part asked for what it may not do"
    save_run_file(bench.config, bench.folder)
    monkeypatch.setenv("REDIS_URL", url_of(guarded, user_name("test", "observer")))
    for arguments in (["audit", "test"], ["producers", "test"], ["dead", "list", "test"]):
        assert cli.main([*arguments, "--runs", str(tmp_path)]) in (0, 1), capsys.readouterr().err
        assert "NOPERM" not in capsys.readouterr().err


def test_the_command_writes_hashes_and_keeps_the_passwords_it_finds(tmp_path: Path, capsys) -> None:
    folder = tmp_path / "secrets"
    assert command.main(["demo", "--passwords", str(folder)]) == 0
    first = capsys.readouterr().out
    assert [line.split()[1] for line in first.splitlines()] == ["default", ADMIN, *(f"demo-{role}" for role in ROLES)]
    for name in user_names(["demo"]):
        assert stat.S_IMODE((folder / name).stat().st_mode) == 0o600
        assert len(password := (folder / name).read_text()) >= 40
        assert password not in first
    assert command.main(["demo", "--passwords", str(folder)]) == 0
    assert capsys.readouterr().out == first
    assert command.main(["no spaces", "--passwords", str(folder)]) == 2
    assert "run name 'no spaces': expected letters" in capsys.readouterr().err
    (folder / "demo-trainer").write_text("\n")
    assert command.main(["demo", "--passwords", str(folder)]) == 2
    assert "demo-trainer: the file is empty" in capsys.readouterr().err


def test_a_run_can_be_added_to_a_server_that_runs(guarded: RealServer, client_of, tmp_path: Path) -> None:
    assert client_of("test-observer").xlen(KEYS.prompts) == 0
    passwords = {**PASSWORDS, **dict.fromkeys(user_names(["late"]), "secret")}
    passwords[ADMIN] = PASSWORDS[ADMIN]
    (tmp_path / "users.acl").write_text(acl_file(["test", "test2", "late"], passwords))
    client_of(ADMIN).execute_command("ACL", "LOAD")
    # Redis may close connections when it loads users; who connects again has the rights of before.
    assert client_of("test-observer").xlen(KEYS.prompts) == 0
    with redis.Redis.from_url(f"unix://late-observer:secret@{guarded.socket}", protocol=2) as client:
        assert client.xlen(Keys("late").prompts) == 0
        with pytest.raises(exceptions.NoPermissionError):
            client.xlen(KEYS.prompts)
