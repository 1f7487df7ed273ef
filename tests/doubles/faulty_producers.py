"""Three producers in one thread, each with an engine on the run's own policies; one of them becomes faulty."""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from itertools import chain, cycle
from pathlib import Path

import msgspec
import redis

from engine_faults import LENGTH, SIBLINGS, label_late, sampled_by
from parity_bench import COLD, ParityBench, prompts
from penstock.consumers.parity.logged_versions import LoggedVersions
from penstock.schemas.keys import Field, Keys, Kind
from penstock.schemas.producer_parity import ProducerParity
from penstock.schemas.rollout import Rollout, RolloutGroup, encode_group
from penstock.schemas.weights.reading import WeightReader
from transformers_engine import TransformersEngine, group_of

NAMES = ("good", "bad", "fine")


class FaultyProducers:
    """Answers prompts in turn, as `MiniProducer.answer`; the bad producer ignores its quarantine.

    since: the first policy that the bad producer samples with the fault. first: producers of the first answers.
    answered: producers by index, in the order of their answers. batches: producers by index, for each batch that was
    trained. found: each producer's quarantine, and the number of batches trained before it.
    """

    def __init__(
        self,
        bench: ParityBench,
        client: redis.Redis,
        keys: Keys,
        folder: Path,
        fault: Callable[[ParityBench], list[RolloutGroup]],
        since: int = 1,
        first: Sequence[str] = (),
    ) -> None:
        folder.mkdir()
        reader = WeightReader(lambda command: command(client), keys)
        self._policies = LoggedVersions(bench.folder, folder, reader)
        self._bench, self._fault, self._since = bench, fault, since
        self._engine = TransformersEngine(bench.folder, {}, dtype=bench.dtype)
        self._names = chain(first, cycle(NAMES))
        self._ready: tuple[int, deque[RolloutGroup]] = (-1, deque())
        self.answered: dict[int, list[str]] = {}
        self.batches: list[dict[int, str]] = []
        self.found: dict[str, tuple[ProducerParity, int]] = {}

    def answer(self, index: int, version: int) -> dict:
        name = next(self._names)
        self.answered.setdefault(index, []).append(name)
        is_bad = name == "bad" and version >= self._since
        group = self._wrong(version) if is_bad else self._right(index, version)
        payload = encode_group(sampled_by(group, name, index))
        return {Field.INDEX: str(index), Field.KIND: Kind.GROUP, Field.PAYLOAD: payload}

    def watched(self, trainer):
        """Records the trainer's batches and the quarantines that it decides; returns the trainer."""
        pack, add = trainer.learner.pack, trainer.intake.quarantine.add

        def note_and_pack(groups, lag_of):
            self.batches.append({group.index: group.producer_id for group in groups})
            return pack(groups, lag_of)

        def note_and_add(instance, found):
            self.found[found.producer_id] = found, len(self.batches)
            add(instance, found)

        trainer.learner.pack, trainer.intake.quarantine.add = note_and_pack, note_and_add
        return trainer

    def num_trained(self, name: str, *, after: int = 0) -> int:
        """Returns the number of a producer's groups in the batches after the first `after`."""
        return sum(Counter(batch.values())[name] for batch in self.batches[after:])

    def _file(self, version: int) -> Path:
        path = self._policies(version)
        assert path is not None, f"the policy {version} that was the newest is gone"
        return path

    def _right(self, index: int, version: int) -> RolloutGroup:
        self._engine.files = {version: self._file(version)}
        (answer,) = self._engine.generate(
            prompts(1, 20, seed=index), SIBLINGS["float32"], LENGTH, version=version, sampling=COLD, seed=index
        )
        return group_of(index, answer, COLD)

    def _wrong(self, version: int) -> RolloutGroup:
        of, groups = self._ready
        if of != version or not groups:
            # The faults sample version 0 alone, or followed by version 3.
            meant = {0: version, 3: version + 1}
            files = {0: self._file(version), 3: self._bench.files[3]}
            if self._fault is label_late:
                meant = {0: version - 1, 3: version}
                files = {name: self._file(each) for name, each in meant.items()}
            bad = self._fault(ParityBench(self._bench.folder, files, self._bench.dtype))
            self._ready = version, deque(relabelled(group, meant) for group in bad)
        return self._ready[1].popleft()


def relabelled(group: RolloutGroup, versions: dict[int, int]) -> RolloutGroup:
    """Returns the group with its versions mapped by `versions`."""

    def changed(rollout: Rollout) -> Rollout:
        (segment,) = rollout.segments
        spans = tuple(msgspec.structs.replace(s, version=versions[s.version]) for s in segment.version_spans)
        return msgspec.structs.replace(rollout, segments=(msgspec.structs.replace(segment, version_spans=spans),))

    return msgspec.structs.replace(group, rollouts=tuple(map(changed, group.rollouts)))
