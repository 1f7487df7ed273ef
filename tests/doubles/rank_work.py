"""Functions that ranks run in tests of the sharded learner."""

import os
import resource
import signal
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor

import penstock.consumers.learning.model.learner_state as learner_state
from penstock.consumers.distributed.watch import Watch
from penstock.consumers.learning.batch.batch import Place
from penstock.consumers.learning.batch.lag import LagTable
from penstock.consumers.learning.interfaces import LossInputs, LossOutputs
from penstock.consumers.learning.learner.learner import Learner
from penstock.consumers.learning.learner.step_report import StepReport
from penstock.consumers.learning.learner.warm_start import warm_steps
from penstock.consumers.learning.model.packed_model import PackedModel
from penstock.consumers.learning.ranks import Ranks
from penstock.consumers.observe.record import Taken, records_of
from penstock.consumers.parity.gate import Gate, ParityRefusedError
from penstock.consumers.parity.loaded import LoadedChecks
from penstock.consumers.parity.report import ParityError
from penstock.consumers.stream.connection import TrainerConnection
from penstock.consumers.stream.scripts import Scripts
from penstock.consumers.weights.publisher import Publisher
from penstock.consumers.weights.shard import PolicyShard, ShardPublisher
from penstock.consumers.weights.writer import WeightPlaces
from penstock.schemas.config import RunConfig
from penstock.schemas.keys import Keys
from penstock.schemas.policy import WeightManifest
from penstock.schemas.record import SegmentFindings
from penstock.schemas.rollout import RolloutGroup
from penstock.schemas.weights.reading import WeightReader
from penstock.schemas.weights.stores import REDIS, ChunkStoreError, RedisChunks
from recorded_training import RecordedTraining, settings
from training_groups import lag_from

MARK = -3.25
"""A behavior logprob at which `NanAtMark` has a loss of NaN."""


class Trained(NamedTuple):
    """The reports and the recorded findings of each batch, and the weights after all of them."""

    reports: list[StepReport]
    findings: list[dict[Place, SegmentFindings]]
    weights: dict[str, torch.Tensor]


class NanAtMark:
    """REINFORCE with a loss of NaN on a micro-batch that holds the mark."""

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        gain = inputs.importance_weights * inputs.advantages * inputs.current_logprobs
        loss = -torch.where(inputs.loss_mask, gain, 0.0).sum() / inputs.denominator
        return LossOutputs(loss=loss * float("nan") if (inputs.behavior_logprobs == MARK).any() else loss)


def train(
    ranks: Ranks, watch: Watch | None, configs: dict[str, RunConfig], batches: dict[str, list[list[RolloutGroup]]]
) -> dict[str, Trained] | None:
    """Trains with each configuration; returns the results by its name, on the lead."""
    found = {}
    for name, config in configs.items():
        learner = Learner(config, ranks)
        learner.follow_versions(older_policies(learner))
        if ranks.is_lead:
            deque(warm_steps(learner), maxlen=0)
            steps = [step(learner, groups) for groups in batches[name]]
            found[name] = Trained(*map(list, zip(*steps, strict=True)), learner.published_weights())
            ranks.order("end")
        else:
            follow_to_the_end(ranks, learner.orders)
    return found if ranks.is_lead else None


def older_policies(learner: Learner) -> Callable[[int], list[torch.Tensor]]:
    """Returns stand-ins for the policies that versions 3 to 6 published."""
    first = [part.values.to(part.dtype, copy=True) for part in learner.published_parts()()]
    return lambda version: [values * (0.8 + version / 50) for values in first]


def step(learner: Learner, groups: list[RolloutGroup]) -> tuple[StepReport, dict[Place, SegmentFindings]]:
    """Trains on a batch; returns its report and the recorded findings of each segment."""
    lag_of = LagTable(7, {}, {0: 7})
    batch = learner.pack(groups, lag_of)
    report = learner.step(batch)
    _, recorded = records_of(Taken(0, 0, groups, batch, report, lag_of), learner.config)
    by_index = {each.decode().index: each.findings for each in recorded}
    found = {
        Place(index, r, s): findings
        for index, of_group in by_index.items()
        for r, of_rollout in enumerate(of_group)
        for s, findings in enumerate(of_rollout)
    }
    return report, found


class EndOfOrders(Exception):
    """The order `end` was received."""


def follow_to_the_end(ranks: Ranks, orders: dict[str, Any]) -> None:
    """Follows the lead's orders until the order `end`."""

    def end() -> None:
        raise EndOfOrders

    try:
        ranks.follow({**orders, "end": end})
    except EndOfOrders:
        return


def train_from_checkpoints(
    ranks: Ranks, watch: Watch | None, config: RunConfig, batches: list[list[RolloutGroup]], read: Path, write: Path
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]] | None:
    """Trains on the batches, from the tensors in `read` if they exist; writes its own to `write`, beside another step.
    Returns the weights before and after the batches, on the lead."""
    learner = Learner(config, ranks)
    if not ranks.is_lead:
        follow_to_the_end(ranks, learner.orders)
        return None
    if read.exists():
        learner.load_checkpoint(read, {**learner.state(), "num_steps": 3, "num_updates": 3})
    before = learner.published_weights()
    for groups in batches:
        learner.step(learner.pack(groups, lag_from(7)))
    weights = learner.published_weights()
    write.mkdir(parents=True)
    writing = learner.begin_checkpoint(write)
    learner.step(learner.pack(batches[0], lag_from(7)))
    assert len(writing.result()) == ranks.size
    ranks.order("end")
    return before, weights


def write_to_a_full_disk(ranks: Ranks, watch: Watch | None, config: RunConfig, folder: Path) -> str | None:
    """Writes a checkpoint while the last rank's disk is full; returns the lead's error."""
    learner, limits = Learner(config, ranks), resource.getrlimit(resource.RLIMIT_FSIZE)
    if not ranks.is_lead:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
        follow_to_the_end(ranks, learner.orders)
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        return None
    try:
        learner.begin_checkpoint(folder).result()
    except OSError as error:
        return str(error)
    finally:
        ranks.order("end")
    return ""


def step_once(
    ranks: Ranks, watch: Watch | None, configs: dict[str, RunConfig], groups: list[RolloutGroup]
) -> dict[str, tuple[dict[str, torch.Tensor], dict[Place, SegmentFindings]]] | None:
    """Takes one step with each configuration; returns the gradients of its last optimizer step and the recorded
    findings of each segment by the configuration's name, on the lead."""
    found = {}
    for name, config in configs.items():
        learner = Learner(config, ranks)
        gradients: dict[str, torch.Tensor] = {}

        def keep(*_: object, model: PackedModel = learner.model, kept: dict[str, torch.Tensor] = gradients) -> None:
            for key, parameter in model.state().items():
                if isinstance(gradient := parameter.grad, DTensor):
                    gradient = gradient.full_tensor()
                if gradient is not None:
                    kept[key] = gradient.clone()

        learner.optimizer.register_step_pre_hook(keep)
        if ranks.is_lead:
            found[name] = gradients, step(learner, groups)[1]
            ranks.order("end")
        else:
            follow_to_the_end(ranks, learner.orders)
    return found if ranks.is_lead else None


def check_gate(
    ranks: Ranks, watch: Watch | None, config: RunConfig, batches: dict[str, list[RolloutGroup]], folder: Path
) -> dict[str, str] | None:
    """Returns the gate's refusal of each batch, or an empty text; writes its reports to folders of their names."""
    learner = Learner(config, ranks)
    if not ranks.is_lead:
        checks = LoadedChecks(config)

        def yardstick(groups: list[RolloutGroup]) -> None:
            checks.measure(groups, learner.model)

        def gate(groups: list[RolloutGroup], version: int) -> None:
            with suppress(ParityError):
                checks.check(groups, learner.model, version)

        follow_to_the_end(ranks, {"yardstick": yardstick, "gate": gate})
        return None
    said = {}
    for name, groups in batches.items():
        try:
            Gate(config, folder / name, LoadedChecks(config), ranks=ranks).check(
                groups, learner.model, 0, LagTable(0, {}, {})
            )
            said[name] = ""
        except ParityRefusedError as error:
            said[name] = str(error)
    ranks.order("end")
    return said


def record_updates(ranks: Ranks, watch: Watch | None, folder: Path, model: Path, num_updates: int) -> None:
    """Trains `num_updates` and records them in `folder`."""
    if not ranks.is_lead:
        follow_to_the_end(ranks, Learner(settings(model), ranks).orders)
        return
    RecordedTraining(folder, model, ranks).train(num_updates)
    ranks.order("end")


def train_until(
    ranks: Ranks,
    watch: Watch,
    config: RunConfig,
    groups: list[RolloutGroup],
    folder: Path,
    culprit: int,
    place: str,
    fault: str,
) -> None:
    """Trains until the fault of the rank `culprit` in its second step, after its heartbeats have named the place."""
    learner = Learner(config, ranks)
    if ranks.rank == culprit:
        reach(learner, place, lambda: FAULTS[fault](config.trainer.rank_timeout_s))
    if not ranks.is_lead:
        ranks.follow(learner.orders)
    for number in range(10**6):
        learner.step(learner.pack(groups, lag_from(7)))
        if place == "checkpoint":
            (folder / str(number)).mkdir(parents=True)
            learner.begin_checkpoint(folder / str(number)).result()


def reach(learner: Learner, place: str, then: Callable[[], None]) -> None:
    """Makes the learner call `then` at a place of its second step."""
    calls = 0

    def count(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            then()

    def before(work: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **options: Any) -> Any:
            count()
            return work(*arguments, **options)

        return counted

    if place == "forward":
        learner.scorer.score = before(learner.scorer.score)  # type: ignore[method-assign]
    elif place == "backward":
        score = learner.scorer.score

        def hooked(*arguments: Any) -> Any:
            loss, part = score(*arguments)
            loss.register_hook(count)
            return loss, part

        learner.scorer.score = hooked  # type: ignore[method-assign]
    elif place == "optimizer":
        learner.optimizer.step = before(learner.optimizer.step)  # type: ignore[method-assign]
    elif place == "checkpoint":
        learner_state.write_tensors = before(learner_state.write_tensors)
    else:
        learner.pack = before(learner.pack)  # type: ignore[method-assign]


def _after_two_beats(act: Callable[[], None]) -> Callable[[float], None]:
    def wait_and_act(timeout_s: float) -> None:
        time.sleep(timeout_s / 5)
        act()

    return wait_and_act


def _run_out_of_memory() -> None:
    raise torch.OutOfMemoryError("Tried to allocate 20.00 GiB.")


FAULTS: dict[str, Callable[[float], None]] = {
    "killed": _after_two_beats(lambda: os.kill(os.getpid(), signal.SIGKILL)),
    "frozen": _after_two_beats(lambda: os.kill(os.getpid(), signal.SIGSTOP)),
    "out of memory": _after_two_beats(_run_out_of_memory),
    "hung": _after_two_beats(lambda: time.sleep(10**6)),
}
"""Faults of a rank, each called with the ranks' time-out."""


def publish_and_read(
    ranks: Ranks, watch: Watch | None, config: RunConfig, batches: list[list[RolloutGroup]], url: str, folder: Path
) -> list[tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], WeightManifest]] | None:
    """Publishes the policy after each batch; returns what readers of the weight log get, what one rank would publish,
    and the manifest, on the lead. The second rank's store is full at first."""
    learner = Learner(config, ranks)
    connection, keys = TrainerConnection(url, 10), Keys(config.name)
    shard = PolicyShard(ranks, keys, connection.call, learner.published_parts)
    if ranks.rank == 1:
        put, failures = RedisChunks.put, [ChunkStoreError("full")]

        def put_after_failures(self: RedisChunks, key: str, data: bytes) -> None:
            if failures and key.endswith("-1-0"):
                raise failures.pop()
            put(self, key, data)

        RedisChunks.put = put_after_failures  # type: ignore[method-assign]
    if not ranks.is_lead:
        learner.before_update = shard.snapshots.wait
        follow_to_the_end(ranks, {**learner.orders, "publish": ShardPublisher(shard, ranks).begin})
        return None
    scripts = Scripts(connection, keys)
    scripts.open_epoch(0)
    places = WeightPlaces(REDIS, REDIS, "", 1 << 29)
    publisher = Publisher(scripts, shard, ranks, places, 8)
    learner.before_update = publisher.wait_for_snapshot
    reader = WeightReader(connection.call, keys)
    found = []
    for version, groups in enumerate([None, *batches]):
        if groups is not None:
            learner.step(learner.pack(groups, lag_from(7)))
        publisher.publish(version, version - 1)
        publisher.wait()
        log = reader.log()
        manifest = reader.write(log.chain(version), folder / f"{version}.safetensors")
        found.append((load_file(folder / f"{version}.safetensors"), learner.published_weights(), manifest))
    ranks.order("end")
    return found
