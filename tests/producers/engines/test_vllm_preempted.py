"""An engine whose cache is too small preempts requests and computes their keys and values again: no sign of a fault."""

import pytest
import torch
from prometheus_client import REGISTRY

from penstock.consumers.learning.learner.fresh_rows import RowGap
from penstock.consumers.parity.recheck import with_recomputed
from penstock.consumers.parity.replay import PolicyStore, Replay, as_labelled
from penstock.consumers.parity.report import TOLERANCES
from penstock.consumers.parity.sample import read_sample
from penstock.consumers.parity.watch import is_within
from probed_engine import GROUP_SIZE, PROMPTS, start

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

BLOCK, LENGTH = 32, 160
CACHE_GIB = 2.0**-11
"""32 blocks, of 32 tokens in 2 layers of keys and values of 32 float32 numbers. The siblings of one prompt need 48."""


def num_preempted() -> float:
    """By vLLM's own count, of the newest engine."""
    metrics = [metric for metric in REGISTRY.collect() if metric.name == "vllm:num_preemptions"]
    return sum(sample.value for metric in metrics for sample in metric.samples if sample.name.endswith("_total"))


async def test_rows_that_were_preempted_are_within_the_band_also_where_an_update_came_before(vllm_engine, tmp_path):
    args = {"block_size": BLOCK, "disable_log_stats": False}
    probed = await start(vllm_engine, tmp_path, tied=False, eager=True, kv_cache_gib=CACHE_GIB, args=args)
    try:
        mixed = False
        while not mixed:  # a machine that stalls may have nothing in flight when the update comes
            groups = await probed.sample([probed.policy(nudge=0.02)], max_tokens=LENGTH)
            spans = [segment.version_spans for g in groups for rollout in g.rollouts for segment in rollout.segments]
            mixed = any(len(each) > 1 for each in spans)
        assert num_preempted() > 0
    finally:
        await probed.engine.close()
    policies = PolicyStore(probed.config, probed.weights.get, torch.device("cpu"))
    for group in groups:
        sample = read_sample([group], policies.vocabulary, policies.has)
        replay = Replay(sample, policies, 8192)
        kept = replay.logprobs(map(as_labelled, sample.rows))
        again = with_recomputed(replay, kept)
        pure = sample.mask_of([row for row in sample.rows if not row.is_mixed])
        assert torch.equal(kept[pure], again[pure])
        for part in (pure, ~pure):
            gaps = [RowGap.of(logprobs[part], sample.engine[part], GROUP_SIZE) for logprobs in (kept, again)]
            print(*(f"{gap.mean:.1e}" for gap in gaps), "with kept keys and values, and with those computed again")
            assert is_within(gaps[1], TOLERANCES["float32"])
    assert len(groups) == 2 * len(PROMPTS)
