"""A simulated run that writes a run's folder: telemetry and a record, as real parts write them."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from penstock.consumers.learning.step_report import StepReport
from penstock.consumers.observe.record_files import RecordFiles
from penstock.deploy.launch.run_folder import save_run_file
from penstock.deploy.plan.producer import EngineJob, SimulatedProducer
from penstock.deploy.plan.simulation import Course, Simulation
from penstock.producers.stream.heartbeat import HEARTBEAT_S
from penstock.schemas.attrition import Attrition
from penstock.schemas.config import RunConfig
from penstock.schemas.process.json_lines import JsonLines
from penstock.schemas.record import FOLDER, BatchHead, GroupEntry, RecordedGroup, RecordHeader, encode_batch
from penstock.schemas.rollout import RolloutGroup, Timings, encode_group

TRAINER = "trainer"


class RecordedSimulation(Simulation):
    """A simulation that `write` writes to a folder. Its clock begins at 1 s: a time of 0 means unknown in telemetry.

    ahead_s: seconds by which clocks are ahead of Redis', by `TRAINER` or a producer's name.
    """

    def __init__(self, config: RunConfig, *arguments, ahead_s: Mapping[str, float] | None = None) -> None:
        super().__init__(config, *arguments)
        self._ahead_s = ahead_s or {}
        self._names: dict[SimulatedProducer, str] = {}
        self._events: dict[str, list[dict]] = {}
        self._note()
        self.clock.after(HEARTBEAT_S, self._beat)
        self._claimed_s: dict[int, float] = {}
        self._sampled: dict[int, tuple[str, float]] = {}
        self._batches: list[list[RolloutGroup]] = []
        self._lines: list[dict] = []

    def _drawn(self, claim):
        self._claimed_s[claim.index] = self.clock.now_s
        return super()._drawn(claim)

    def _finish(self, producer: SimulatedProducer, job: EngineJob) -> None:
        self._sampled[job.claim.index] = self._names[producer], self.clock.now_s
        super()._finish(producer, job)

    def _publish(self, groups: list[RolloutGroup], report: StepReport, waited_s: float) -> None:
        before = self.course.num_updates
        super()._publish(groups, report, waited_s)
        if self.course.num_updates == before:
            return
        self._batches.append([self._timed(group) for group in groups])
        self._lines.append(
            {
                "update": before + 1,
                "policy_version": before + 1,
                "time_s": 1 + self._idle_since_s + self._ahead_s.get(TRAINER, 0.0),
                "clock_ahead_s": self._ahead_s.get(TRAINER, 0.0),
                "lag_histogram": report.lag_histogram,
                "num_tokens_trained": report.num_tokens_trained,
                "num_tokens_masked_lag": report.num_tokens_masked_lag,
                "num_groups_trained": len(groups),
                "num_groups_skipped": 0,
                "queue_depth": self._queue[-1],
                "wait_s": waited_s,
                "rollouts": _counts(groups),
            }
        )

    def _claim(self) -> None:
        self._note()
        super()._claim()

    def _note(self) -> None:
        """Records new producers, and the weights that producers have loaded."""
        for producer in self.producers:
            name = self._names.setdefault(producer, f"producer-{len(self._names)}")
            events = self._events.setdefault(name, [])
            loaded = [event["policy_version"] for event in events if event["event"] == "weights"]
            if producer.engine.version not in loaded:
                how = {"policy_version": producer.engine.version, "pause_s": self._pace.pause_s}
                self._add(name, "weights", load_s=self._pace.load_s, **how)

    def _beat(self) -> None:
        for producer, name in self._names.items():
            num_tokens = producer.engine.num_tokens
            self._add(
                name,
                "rate",
                tokens_per_s=0.0,
                num_tokens=num_tokens,
                in_flight=len(producer.table),
                clock_ahead_s=self._ahead_s.get(name, 0.0),
            )
        self.clock.after(HEARTBEAT_S, self._beat)

    def _add(self, name: str, event: str, **fields) -> None:
        time_s = 1 + self.clock.now_s + self._ahead_s.get(name, 0.0)
        self._events[name].append({"event": event, "time_s": time_s, **fields})

    def _timed(self, group: RolloutGroup) -> RolloutGroup:
        name, generated_s = self._sampled[group.index]
        ahead_s = 1 + self._ahead_s.get(name, 0.0)
        claimed_s, generated_s = ahead_s + self._claimed_s[group.index], ahead_s + generated_s
        timings = Timings(claimed_s=claimed_s, generated_s=generated_s, appended_s=generated_s)
        return msgspec.structs.replace(group, producer_id=name, timings=timings)

    def write(self, runs, *, record: bool = True) -> Course:
        config, course = self._config, self.run()
        folder = config.folder(runs)
        save_run_file(msgspec.structs.replace(config, record=record), folder)
        for name, events in self._events.items():
            log = JsonLines(folder / "producers" / f"{name}.jsonl")
            for event in events:
                log.write(**event)
            log.close()
        lines = JsonLines(folder / "updates.jsonl")
        for line in self._lines:
            lines.write(**line)
        lines.close()
        if not record:
            return course
        files = RecordFiles(folder / FOLDER, RecordHeader(run=config.name, epoch=0), config.recording)
        for position, groups in enumerate(self._batches):
            entries = tuple(
                GroupEntry(index=group.index, outcome="trained", advantages=(1.0, -1.0)) for group in groups
            )
            head = BatchHead(
                position=position, update=position + 1, policy_version=position, counts=True, groups=entries
            )
            files.append(encode_batch(head, [RecordedGroup(_encoded(group), ()) for group in groups]))
        files.close()
        return course


def _counts(groups: Sequence[RolloutGroup]) -> Any:
    found = Attrition()
    for group in groups:
        found.add(group.environment, "trained", group, len(group.rollouts))
    return msgspec.to_builtins(found.rollouts)


def _encoded(group: RolloutGroup) -> bytes:
    """Encodes a group with token ids, which a simulation omits."""
    rollouts = tuple(
        msgspec.structs.replace(
            rollout,
            segments=tuple(
                msgspec.structs.replace(segment, token_ids=bytes(len(segment.behavior_logprobs)))
                for segment in rollout.segments
            ),
        )
        for rollout in group.rollouts
    )
    return encode_group(msgspec.structs.replace(group, rollouts=rollouts))
