"""An engine whose cache is too small preempts requests and computes their keys and values again: no sign of a fault."""

import pytest
import torch
from prometheus_client import REGISTRY

from penstock.consumers.parity.replay import PolicyStore, Replay, as_labelled
from penstock.consumers.parity.sample import read_sample
from penstock.consumers.parity.tolerance import TOLERANCES
from penstock.consumers.parity.verdict import gap_of
from probed_engine import start

pytestmark = [pytest.mark.vllm, pytest.mark.exhaustive, pytest.mark.timeout(300)]

BLOCK, LENGTH = 32, 160
CACHE_GIB = 2.0**-11
"""32 blocks, of 32 tokens in 2 layers of keys and values of 32 float32 numbers. The siblings of one prompt need 48."""


def num_preempted() -> float:
    """By vLLM's own count, of the newest engine."""
    metrics = [metric for metric in REGISTRY.collect() if metric.name == "vllm:num_preemptions"]
    return sum(sample.value for metric in metrics for sample in metric.samples if sample.name.endswith("_total"))


async def test_rows_that_were_preempted_are_within_the_band(vllm_engine, tmp_path):
    args = {"block_size": BLOCK, "disable_log_stats": False}
    probed = await start(vllm_engine, tmp_path, tied=False, eager=True, kv_cache_gib=CACHE_GIB, args=args)
    try:
        groups = await probed.sample([], max_tokens=LENGTH)
        assert num_preempted() > 0
    finally:
        await probed.engine.close()
    policies = PolicyStore(probed.config, probed.weights.get, torch.device("cpu"))
    sample = read_sample(groups, policies.vocabulary, policies.has)
    logprobs = Replay(sample, policies, 8192).logprobs(map(as_labelled, sample.rows))
    assert gap_of(sample.engine, logprobs).mean <= TOLERANCES["float32"].mean
