"""The delivery protocol as one state machine: the real trainer and the real claims and writers of producers, on a real
server, in any order, with lost replies, kills, takeovers and a server that returns to an older state.

Whatever happens, no index is lost or trained twice in the policy that stands, no release exceeds the credit, a replaced
trainer changes nothing, and `penstock audit` finds every index.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import penstock.consumers.__main__ as entry
from cutting_proxy import TRAINER_SCRIPTS, CuttingProxy
from mini_producer import make_group
from penstock.consumers.stream.ledger import OUTCOMES
from penstock.consumers.stream.scripts import SCRIPTS, FencedError
from penstock.consumers.trainer import Trainer
from penstock.deploy.operate.audit import read_ledger
from penstock.deploy.operate.ledger_check import check_ledger
from penstock.producers.observe.metrics import ProducerMetrics
from penstock.producers.stream.claims import FREE_AT_ONCE_MS, Claims
from penstock.producers.stream.connection import ProducerConnection
from penstock.producers.stream.in_flight import Claim, Dead, InFlightTable
from penstock.producers.stream.writer import Writer
from penstock.schemas.config import ProducersConfig
from penstock.schemas.keys import PRODUCERS_GROUP, Field
from penstock.schemas.policy import WeightManifest
from real_server import LossyServer
from scripted_learner import ScriptedLearner
from trainer_bench import TrainerBench, assert_settled_once

pytestmark = [pytest.mark.redis, pytest.mark.slow]

NUM_UPDATES = 6
GROUPS_PER_BATCH = 2
TRAINER_COMMANDS = ("open_epoch", "release", "release_again", "announce", "dead_letter", "commit", "XREAD", "XRANGE")
PRODUCER_COMMANDS = ("XREADGROUP", "XCLAIM", "XPENDING", "EXEC")
MOST_ROUNDS = 400
"""Of honest work to the end of the run; some twenty are enough."""


class ProducerAtHand:
    """A producer's claims and writer, each step of which the test takes. Its engine is the test's word."""

    def __init__(self, url: str, bench: TrainerBench, name: str, metrics: ProducerMetrics) -> None:
        config = ProducersConfig(groups_in_flight=4)
        self.connection = ProducerConnection.open(url, outage_s=90, metrics=metrics)
        self.table = InFlightTable(num_groups=4, group_size=2)
        streams = (bench.keys.prompts,)
        self._claims = Claims(
            self.connection, bench.keys, name, self.table, config, streams=streams, one_at_a_time=True
        )
        self._claims.refresh_s = 0.001
        self._writer = Writer(self.connection, bench.keys, self.table, metrics, name, f"{name}-1")
        self.held: list[Claim] = []

    async def open(self) -> None:
        await self._claims.open()

    async def claim(self) -> None:
        if self.table.groups_free:
            self.held += await self._claims.take()

    async def append(self, claim: Claim, version: int, reason: str | None) -> None:
        outcome = (
            Dead(reason)
            if reason
            else msgspec.structs.replace(
                make_group(claim.index, version), environment=claim.environment, task=claim.task
            )
        )
        self._writer.put(claim, outcome)
        writing = asyncio.create_task(self._writer.run())
        await self._writer.drain()
        writing.cancel()
        await asyncio.gather(writing, return_exceptions=True)

    async def hand_back(self) -> None:
        self.held.clear()
        await self._claims.hand_back()

    async def close(self) -> None:
        await self.connection.close()


class DeliveryProtocol(RuleBasedStateMachine):
    def __init__(self, server_binary: Path) -> None:
        super().__init__()
        self.ending = contextlib.ExitStack()
        self.server = LossyServer(server_binary)
        self.ending.callback(self.server.remove)
        for script in SCRIPTS.values():
            self.server.client.script_load(script)
        self.proxy = self.ending.enter_context(CuttingProxy(self.server.url, TRAINER_SCRIPTS))
        self.bench = TrainerBench(self.proxy.url, Path(self.ending.enter_context(TemporaryDirectory())))
        self.ending.callback(self.bench.close)
        self.bench.overrides = [
            f"num_updates={NUM_UPDATES}", f"groups_per_batch={GROUPS_PER_BATCH}", "max_lag=1",
            "evaluation.num_prompts=0", "checkpoint.every=100", "record=false",
        ]  # fmt: skip
        self.loop = self.ending.enter_context(asyncio.Runner())
        self.metrics = ProducerMetrics()
        self.producers: list[ProducerAtHand] = []
        self.former: list[Trainer] = []
        self.has_lost_data = False

    @initialize()
    def begin(self) -> None:
        self.trainer = self._opened(resume=False)
        for name in "ab":
            self.producers.append(self._started(name))

    # The trainer's side

    @rule()
    def read(self) -> None:
        self.trainer.intake.reader.read(self.trainer.intake.lag_of, block=False)

    @rule()
    def train(self) -> None:
        """Takes a batch, trains and settles it and publishes the policy, as `Trainer.run` does."""
        trainer = self.trainer
        if trainer.progress.num_batches == NUM_UPDATES:
            return
        groups = self._within_credit(partial(trainer.intake.batch, GROUPS_PER_BATCH))
        if groups is None:
            return
        report = trainer.learner.step(trainer.learner.pack(groups, trainer.intake.lag_of))
        trainer.progress.num_taken += 1
        trainer.intake.settle(groups, report)
        if report.skipped_reason is None:
            trainer.policy.publish()
            trainer.publisher.wait()
        self._within_credit(trainer.intake.release)

    @rule()
    def begin_commit(self) -> None:
        if self.trainer.commits._snapshot is None:
            self.trainer.commits.begin()

    @rule()
    def complete_commit(self) -> None:
        if self.trainer.commits.complete(wait=True) is not None:
            self._within_credit(self.trainer.intake.reconcile)
            if not self.has_lost_data:
                self._audit()

    @rule()
    def look_for_losses(self) -> None:
        self._within_credit(lambda: self.trainer.recovery.look_for_losses(0.0))
        self.trainer.publisher.wait()

    @rule()
    def take_over(self) -> None:
        """A second trainer resumes from the last commit while the first one hangs."""
        self.former.append(self.trainer)
        self.trainer = self._opened(resume=True)

    @precondition(lambda self: self.former)
    @rule(data=st.data())
    def wake_up(self, data: st.DataObject) -> None:
        """A trainer that was replaced goes on where it was: it is fenced, and Redis and the checkpoints stay."""
        trainer = self.former[data.draw(st.integers(0, len(self.former) - 1), label="trainer")]
        scripts, ledger = trainer.leadership.scripts, trainer.intake.ledger
        writes: dict[str, Callable[[], Any]] = {
            "commit": partial(scripts.commit, "0-stale", b"9999999999999-0"),
            "release": partial(
                scripts.release, ledger.num_released, list(ledger.tasks.values())[:1] or [("main", 1)], 0
            ),
            "announce": partial(scripts.announce, trainer.policy.version + 1, b"{}", b"", 0),
            "finish": scripts.finish,
            "complete": partial(trainer.commits.complete, wait=True),
            "check": trainer.recovery.check,
        }
        write = data.draw(st.sampled_from(sorted(writes)), label="write")
        before = self._contents()
        with (
            contextlib.nullcontext()
            if write == "complete" and not trainer.commits._snapshot
            else pytest.raises(FencedError)
        ):
            trainer.leadership._checked_at = 0.0
            writes[write]()
        assert self._contents() == before, f"a replaced trainer has changed something by {write}"

    # The producers' side

    @rule(number=st.integers(0, 1))
    def claim(self, number: int) -> None:
        self.loop.run(self.producers[number].claim())

    @rule(number=st.integers(0, 1), is_old=st.booleans(), reason=st.sampled_from([None, None, None, "reward: boom"]))
    def append(self, number: int, is_old: bool, reason: str | None) -> None:
        producer = self.producers[number]
        if producer.held:
            version = 0 if is_old else self._newest_policy()
            self.loop.run(producer.append(producer.held.pop(0), version, reason))

    @rule(number=st.integers(0, 1))
    def hand_back(self, number: int) -> None:
        self.loop.run(self.producers[number].hand_back())

    @rule(number=st.integers(0, 1), is_noticed=st.booleans())
    def kill_producer(self, number: int, is_noticed: bool) -> None:
        """is_noticed: it starts again under its name; otherwise others find its claims idle."""
        self.loop.run(self.producers[number].close())
        if is_noticed:
            self.producers[number] = self._started("ab"[number])
        else:
            self.producers[number] = self._started(f"p{len(self.former)}{number}")
            self._let_idle()

    @rule(number=st.integers(0, 1))
    def append_twice(self, number: int) -> None:
        """A producer that was thought dead appends a group that another one has, or will."""
        producer = self.producers[number]
        if producer.held:
            claim = producer.held[0]
            self.server.client.xadd(
                self.bench.keys.rollouts,
                {"index": claim.index, "kind": "group", "payload": msgspec.msgpack.encode(make_group(claim.index, 0))},
            )

    @rule(num_rounds=st.integers(1, 3))
    def work(self, num_rounds: int) -> None:
        """Everybody does their work, so that there is something to lose."""
        for _ in range(num_rounds):
            for number, producer in enumerate(self.producers):
                self.claim(number)
                while producer.held:
                    self.append(number, False, None)
            self.read()
            self.train()

    # Redis

    @rule(
        command=st.sampled_from((*TRAINER_COMMANDS, *PRODUCER_COMMANDS)),
        when=st.sampled_from(["before", "reply", "within"]),
    )
    def cut(self, command: str, when: Any) -> None:
        """The connection breaks at the next such command."""
        self.proxy.cut(command, 1, when)

    @rule()
    def remember(self) -> None:
        """What has happened up to now is on the server's disk."""
        self.server.remember()

    @rule(is_emptied=st.booleans(), with_trainer=st.booleans())
    def lose_data(self, is_emptied: bool, with_trainer: bool) -> None:
        """The server is emptied, or dies and returns with what it had on its disk; so does the trainer, or notices."""
        self.has_lost_data = True
        if is_emptied:
            self.server.client.flushall()
        else:
            self.server.restart()
        if with_trainer:
            self.take_over()
        else:
            self._notice()

    # What always holds

    @invariant()
    def each_index_is_settled_once_and_as_the_policy_was_trained(self) -> None:
        if not hasattr(self, "trainer"):
            return
        ledger, trained = self.trainer.intake.ledger, self.trainer.learner.trained
        assert len(set(trained)) == len(trained), f"trained twice: {trained}"
        assert set(ledger.by_outcome["trained"]) == set(trained)
        settled = [index for outcome in OUTCOMES for index in ledger.by_outcome[outcome]]
        assert sorted(settled) == sorted(ledger.settled) and len(set(settled)) == len(settled)
        assert ledger.settled.highest <= ledger.num_released
        assert not [index for index in self.trainer.intake.reader.ready if index in ledger.settled]

    def teardown(self) -> None:
        with self.ending:
            if not hasattr(self, "trainer"):
                return
            self.ending.callback(self._close_producers)
            self._work_to_the_end()
            dead = set(self.trainer.intake.ledger.by_outcome["dead"])
            assert len(self.trainer.learner.trained) == NUM_UPDATES * GROUPS_PER_BATCH
            assert self.trainer.run()  # commits, and marks the run finished
            self.bench.close()
            assert_settled_once(self.bench, self.server.client, dead=dead)
            self._audit()

    def _close_producers(self) -> None:
        for producer in self.producers:
            self.loop.run(producer.close())

    def _work_to_the_end(self) -> None:
        """Everybody does their work honestly until every update is made."""
        for _ in range(MOST_ROUNDS):
            if self.trainer.progress.num_batches == NUM_UPDATES:
                return
            num_settled = len(self.trainer.intake.ledger.settled)
            self.work(1)
            if len(self.trainer.intake.ledger.settled) == num_settled:
                self._let_idle()
                self.look_for_losses()
        raise AssertionError(f"lost: {self._open_indexes()} are open, and nobody can get them")

    def _open_indexes(self) -> list[int]:
        ledger = self.trainer.intake.ledger
        return list(ledger.settled.missing(ledger.num_released))

    def _opened(self, *, resume: bool) -> Trainer:
        trainer = self.bench.trainer(resume=resume)
        trainer.leadership.scripts.connection.pause = lambda seconds: None  # type: ignore[method-assign]
        trainer.policy.publish_first()
        trainer.publisher.wait()
        self.trainer = trainer
        self._within_credit(trainer.intake.reconcile)
        return trainer

    def _started(self, name: str) -> ProducerAtHand:
        producer = ProducerAtHand(self.proxy.url, self.bench, name, self.metrics)
        self.loop.run(producer.open())
        return producer

    def _within_credit(self, release: Callable[[], Any]) -> Any:
        """Runs what releases indexes: it releases none beyond the credit."""
        ledger = self.trainer.intake.ledger
        before = ledger.num_released, ledger.released_again.total()
        result = release()
        if (ledger.num_released, ledger.released_again.total()) != before:
            assert ledger.num_open - len(ledger.postponed) <= self.bench.config.credit
        return result

    def _notice(self) -> None:
        trainer = self.trainer
        trainer.leadership._checked_at = 0.0
        trainer.publisher.check()
        trainer.leadership.scripts.check()
        self._within_credit(trainer.recovery.check)
        trainer.publisher.wait()

    def _newest_policy(self) -> int:
        newest: Any = self.server.client.xrevrange(self.bench.keys.policy, count=1)
        return msgspec.json.decode(newest[0][1][Field.MANIFEST], type=WeightManifest).version

    def _let_idle(self) -> None:
        """As if no claim had been refreshed for long."""
        stream, client = self.bench.keys.prompts, self.server.client
        for row in client.xpending_range(stream, PRODUCERS_GROUP, "-", "+", 100):
            ids = [row["message_id"]]
            client.xclaim(stream, PRODUCERS_GROUP, row["consumer"], 0, ids, idle=FREE_AT_ONCE_MS, justid=True)

    def _contents(self) -> dict[Any, Any]:
        """Everything in Redis but the lease and the chunks, which the publisher's thread tidies; and the checkpoint."""
        client: Any = self.server.client
        read = {b"stream": client.xrange, b"hash": client.hgetall, b"string": client.get}
        keys = [key for key in client.scan_iter() if not key.endswith((b":lease", b":chunks"))]
        committed: Any = client.hget(self.bench.keys.commit, "checkpoint")
        kept = list((self.bench.folder / "checkpoints" / committed.decode()).rglob("*")) if committed else []
        return {key: read[client.type(key)](key) for key in keys} | {"committed": kept}

    def _audit(self) -> None:
        observed = read_ledger(self.server.client, self.bench.keys, self.bench.folder)
        checked = check_ledger(observed.reading)
        assert checked.balanced, checked.problems


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(entry, "load_learner", ScriptedLearner)
    monkeypatch.setattr("penstock.producers.stream.connection.pause_s", lambda num_failures: 0.0)
    yield


@pytest.mark.parametrize("num_examples", [50, pytest.param(1000, marks=pytest.mark.exhaustive)])
@pytest.mark.usefixtures("quick")
def test_whatever_happens_no_index_is_lost_or_trained_twice(server_binary: Path, num_examples: int) -> None:
    """Fifty examples are the same each time, a thousand are drawn anew. None is shrunk: that would take minutes."""
    how = settings(
        max_examples=num_examples,
        stateful_step_count=40,
        deadline=None,
        database=None,
        derandomize=num_examples == 50,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(partial(DeliveryProtocol, server_binary), settings=how)
