"""A run's folder and server in which trainers can be started repeatedly, and checks of their results."""

import json
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import wait
from pathlib import Path

import redis

import penstock.consumers.__main__ as entry
from cutting_proxy import TRAINER_SCRIPTS, CuttingProxy
from mini_producer import MiniProducer
from penstock.consumers.checkpoints.state import ReleasedTask
from penstock.consumers.observe.metrics import TrainerMetrics
from penstock.consumers.stream.connection import TrainerConnection
from penstock.consumers.stream.scripts import SCRIPTS
from penstock.consumers.trainer import Trainer
from penstock.schemas.config import RunConfig, load_config
from penstock.schemas.keys import Keys
from scripted_learner import FILE

RUN_FILE = """
name = "test"
num_updates = 12
groups_per_batch = 4
group_size = 2
max_lag = 2
[model]
path = "none"
[environment]
path = "none:None"
[evaluation]
every = 5
num_prompts = 3
[checkpoint]
every = 4
[metrics]
port = 0
[parity]
gate = "off" # the producer's logprobs are invented
"""


class TrainerBench:
    """A run in a folder; `close` ends everything that it started. overrides: of the run file."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url = url
        self.runs = folder
        self.keys = Keys("test")
        self.file = folder / "run.toml"
        self.file.write_text(RUN_FILE)
        self.overrides: list[str] = []
        self.producers: list[MiniProducer] = []
        self.connections: list[TrainerConnection] = []
        self.trainers: list[Trainer] = []
        self.metrics: TrainerMetrics | None = None
        self.commits_later = False
        """True: a checkpoint is committed once it is on disk and an update has ended, as in a run. False: the trainer
        waits for each checkpoint."""

    @property
    def config(self) -> RunConfig:
        return load_config(self.file, self.overrides)

    @property
    def folder(self) -> Path:
        return self.runs / "test"

    def trainer(
        self,
        *,
        resume: bool = False,
        standby: bool = False,
        url: str | None = None,
        fail_at: Mapping[int, BaseException] | None = None,
    ) -> Trainer:
        """Opens a trainer. fail_at: see ScriptedLearner."""
        connection = TrainerConnection(url or self.url, outage_s=90)
        self.connections.append(connection)
        self.metrics = TrainerMetrics()
        trainer = entry.open_trainer(self.config, self.runs, connection, self.metrics, resume=resume, standby=standby)
        assert trainer is not None
        if not self.commits_later:
            commit_at_once(trainer)
        if fail_at is not None:
            trainer.learner.fail_at.update(fail_at)
        self.trainers.append(trainer)
        return trainer

    def stopped_at(self, step: int) -> Trainer:
        """Runs a trainer that is stopped in its optimizer step number `step`, and has committed."""
        trainer = self.trainer()
        at_step(trainer, step, trainer.stop)
        assert trainer.run() is False
        return trainer

    def producer(self, answer=None, url: str | None = None) -> MiniProducer:
        """Starts a producer."""
        producer = MiniProducer(url or self.url, "test", answer, self.config.lag_bound)
        producer.start()
        self.producers.append(producer)
        return producer

    def proxy(self) -> CuttingProxy:
        """Returns a proxy in front of the server that knows the trainer's scripts by name."""
        with redis.Redis.from_url(self.url, protocol=2) as client:
            for script in SCRIPTS.values():
                client.script_load(script)  # so that the first call of each is the one that counts
        return CuttingProxy(self.url, TRAINER_SCRIPTS)

    def ledger(self) -> dict:
        return json.loads((self.folder / "trainer.json").read_text())

    def lines(self, name: str) -> list[dict]:
        return [json.loads(line) for line in (self.folder / name).read_text().splitlines()]

    def saved_training(self, client: redis.Redis) -> list[int]:
        """Returns the indexes that the policy in the committed checkpoint was trained on, as the learner recorded
        them."""
        pointer = client.hget(self.keys.commit, "checkpoint").decode()
        return json.loads((self.folder / "checkpoints" / pointer / "tensors" / FILE).read_text())

    def end_producers(self) -> None:
        for producer in self.producers:
            producer.stop.set()
            producer.join()
            producer.client.close()
        self.producers.clear()

    def close(self) -> None:
        self.end_producers()
        for trainer in self.trainers:
            trainer.close()
        for connection in self.connections:
            connection.close()


def tasks_taken(trainer) -> dict[int, ReleasedTask]:
    """Returns a dict of tasks by index that the trainer fills while it packs its batches."""
    taken: dict[int, ReleasedTask] = {}
    pack = trainer.learner.pack

    def note_and_pack(groups, *arguments):
        taken.update({group.index: ReleasedTask(group.environment, group.task) for group in groups})
        return pack(groups, *arguments)

    trainer.learner.pack = note_and_pack
    return taken


def assert_settled_once(bench: TrainerBench, client: redis.Redis, *, dead: set[int] = frozenset()) -> None:
    """Checks that every released index is trained once in the saved policy, or dead, both as the learner recorded it
    and in the ledger."""
    trained, ledger = bench.saved_training(client), bench.ledger()
    twice = [index for index, count in Counter(trained).items() if count > 1]
    assert not twice, f"trained twice in the saved policy: {twice}"
    released = set(range(1, ledger["num_groups_released"] + 1))
    assert set(trained) | dead == released, f"lost: {sorted(released - set(trained) - dead)}"
    assert not set(trained) & dead
    assert ledger["num_groups_trained"] == len(trained)
    assert ledger["num_groups_dead"] == len(dead)
    assert ledger["num_groups_cancelled"] == ledger["num_groups_open"] == 0


def assert_balanced(bench: TrainerBench, trainer: Trainer) -> None:
    """Checks that the ledger accounts for every released index, and that the learner has trained none twice."""
    ledger = bench.ledger()
    settled = ledger["num_groups_trained"] + ledger["num_groups_skipped"] + ledger["num_groups_dead"]
    assert ledger["num_groups_released"] == settled + ledger["num_groups_cancelled"] + ledger["num_groups_open"]
    trained = trainer.learner.trained
    assert len(set(trained)) == len(trained), "an index was trained twice in the saved policy"


def commit_at_once(trainer: Trainer) -> None:
    """Makes the trainer wait for each checkpoint that it begins, so that the time of each commit is determined."""
    commit_if_due = trainer._commit_if_due

    def commit(*, busy: bool) -> None:
        commit_if_due(busy=busy)
        if trainer.commits._snapshot is not None:
            wait([trainer.commits._snapshot.writing])
            commit_if_due(busy=busy)

    trainer._commit_if_due = commit


def at_step(trainer, step: int, action: Callable[[], object]) -> None:
    """Runs `action` once, at the beginning of the trainer's optimizer step number `step`, from 0."""
    train, left = trainer.learner.step, [action]

    def act_and_train(batch):
        if trainer.learner.num_steps == step and left:
            left.pop()()
        return train(batch)

    trainer.learner.step = act_and_train


def tracebacks(caplog) -> list[logging.LogRecord]:
    """Returns the log records with a traceback."""
    return [record for record in caplog.records if record.exc_info]
