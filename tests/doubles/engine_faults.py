"""Faults of an engine that the parity check must find; each function samples four groups with one."""

import math
from collections.abc import Callable

import msgspec

from parity_bench import COLD, VOCABULARY, ParityBench, groups_of, prompts, with_logprobs, with_sampling
from penstock.schemas.rollout import RolloutGroup, SamplingSettings, pack_ids, unpack_ids

NUM_GROUPS, LENGTH = 4, 10
PROMPTS = prompts(NUM_GROUPS, 20)
SIBLINGS = {"float32": 3, "bfloat16": 26}
"""Siblings by dtype; the watch tests each group as a unit."""


def sampled_by(group: RolloutGroup, name: str, index: int) -> RolloutGroup:
    return msgspec.structs.replace(group, producer_id=name, sampled_by=(f"instance of {name}",), index=index)


def sample_groups(bench: ParityBench, sampling: SamplingSettings = COLD, **settings) -> list[RolloutGroup]:
    return groups_of(
        bench.engine().generate(PROMPTS, SIBLINGS[bench.dtype], LENGTH, sampling=sampling, **settings), sampling
    )


def raw(bench: ParityBench) -> list[RolloutGroup]:
    engine = bench.engine()
    engine.convention = lambda logits, sampling, drawn: logits.log_softmax(-1)
    return groups_of(engine.generate(PROMPTS, SIBLINGS[bench.dtype], LENGTH, sampling=COLD))


def another_temperature(bench: ParityBench) -> list[RolloutGroup]:
    return with_sampling(sample_groups(bench, SamplingSettings(temperature=1.2, max_tokens=16)), temperature=0.7)


def top_p_that_is_not_recorded(bench: ParityBench) -> list[RolloutGroup]:
    return with_sampling(sample_groups(bench, msgspec.structs.replace(COLD, top_p=0.7)), top_p=1.0)


def retokenized(bench: ParityBench) -> list[RolloutGroup]:
    """Samples from a vocabulary whose second half are other ids of the same texts."""

    def changed(group: RolloutGroup) -> RolloutGroup:
        def again(segment):
            start, ids = segment.loss_mask[0][0], unpack_ids(segment.token_ids).tolist()
            ids[start:] = [token % (VOCABULARY // 2) for token in ids[start:]]
            return msgspec.structs.replace(segment, token_ids=pack_ids(ids))

        rollouts = (
            msgspec.structs.replace(rollout, segments=tuple(map(again, rollout.segments))) for rollout in group.rollouts
        )
        return msgspec.structs.replace(group, rollouts=tuple(rollouts))

    return list(map(changed, sample_groups(bench)))


def swapped_siblings(bench: ParityBench) -> list[RolloutGroup]:
    return with_logprobs(sample_groups(bench), lambda siblings: [siblings[1], siblings[0], *siblings[2:]])


def labels_only(bench: ParityBench) -> list[RolloutGroup]:
    """Samples version 3 and labels it version 0."""
    engine = bench.engine()
    answers = engine.generate(PROMPTS, SIBLINGS[bench.dtype], LENGTH, version=3, sampling=COLD)
    for answer in answers:
        for own in answer.siblings:
            own.versions = [0] * LENGTH
    return groups_of(answers)


def stale_prefix(bench: ParityBench) -> list[RolloutGroup]:
    return sample_groups(bench, stale=(3, 19))


def another_layer(bench: ParityBench) -> list[RolloutGroup]:
    engine = bench.engine()
    for layer in engine.model.model.layers:
        layer.input_layernorm.variance_epsilon = 3.0
    return groups_of(engine.generate(PROMPTS, SIBLINGS[bench.dtype], LENGTH, sampling=COLD))


def bfloat16_head(bench: ParityBench) -> list[RolloutGroup]:
    return groups_of(bench.engine(head="bfloat16").generate(PROMPTS, SIBLINGS[bench.dtype], LENGTH, sampling=COLD))


def not_finite(bench: ParityBench) -> list[RolloutGroup]:
    """Samples groups in which one logprob of the last sibling is NaN, so that the trainer refuses the group."""
    return with_logprobs(sample_groups(bench), lambda siblings: [*siblings[:-1], [math.nan, *siblings[-1][1:]]])


def interrupted(bench: ParityBench, late: int = 0) -> list[RolloutGroup]:
    """Replaces version 0 by version 3 before the sixth token, and the label `late` tokens later."""
    answers = bench.engine().generate(PROMPTS, SIBLINGS[bench.dtype], LENGTH, sampling=COLD, updates={5: 3})
    for answer in answers:
        for own in answer.siblings:
            own.versions = own.versions[:1] * late + own.versions[: LENGTH - late]
    return groups_of(answers)


def label_late(bench: ParityBench) -> list[RolloutGroup]:
    return interrupted(bench, late=2)


FAULTS: dict[Callable[[ParityBench], list[RolloutGroup]], str] = {
    raw: "raw",
    another_temperature: "temperature",
    top_p_that_is_not_recorded: "unexplained",
    retokenized: "unexplained",
    swapped_siblings: "siblings",
    labels_only: "unexplained",
    stale_prefix: "unexplained",
    another_layer: "unexplained",
    bfloat16_head: "engine-head",
}
"""The cause that the check names, by fault, without the weights of other policies, which a trainer does not hold in
memory."""
