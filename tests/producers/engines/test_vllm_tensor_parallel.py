"""One engine over two ranks: what it samples, its labels, its updates and their failures, its hidden states."""

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
import torch
from safetensors.torch import load_file

from labelled_weights import assert_exact_labels, label_of, weights_of_token
from penstock.consumers.learning.batch.lag import LagTable
from penstock.consumers.learning.model.packed_model import PackedModel
from penstock.consumers.parity.gate import Gate
from penstock.consumers.parity.loaded import LoadedChecks
from penstock.producers.interfaces import CaptureError, WeightLoadError
from penstock.producers.rollout.probe import PosedPrompt, probe
from penstock.schemas import hidden_states as names
from penstock.schemas.prompt import Prompt
from penstock.schemas.rollout import SamplingSettings, unpack_floats
from scripted_engine import ScriptedEngine
from shared_engine import (
    PROMPT,
    EngineHost,
    assert_serves,
    boot_shared,
    qwen3,
    reference_logprobs,
    run_config,
    weights_of,
)

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.exhaustive,
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.asyncio(loop_scope="session"),
]

MEMORY = Path("/dev/shm")


def shared_memory() -> set[Path]:
    return set(MEMORY.glob("vllm_dist_*"))


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def parallel_engine(vllm_engine, tmp_path_factory):
    from faulty_worker import FaultyWorker
    from penstock.producers.engines import vllm

    before, folder = shared_memory(), tmp_path_factory.mktemp("parallel")
    settings = {"tensor_parallel_size": 2, "args": {"enforce_eager": True}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm, "EngineReport", FaultyWorker)
        shared = await boot_shared(vllm_engine, folder, tied=True, **settings)
    assert shared_memory() <= before, "a killed engine would leave it behind"
    yield shared
    await shared.engine.close()


async def test_two_ranks_sample_what_one_rank_samples(parallel_engine, tied_engine):
    weights = weights_of(qwen3(tied=True, seed=31))
    found = []
    for shared in (parallel_engine, tied_engine):
        await shared.load(weights)
        greedy = await shared.engine.generate(PROMPT, SamplingSettings(temperature=0, max_tokens=40), 1, "greedy")
        seeded = await shared.engine.generate(PROMPT, SamplingSettings(max_tokens=40), 16, "seeded", seed=5)
        found.append([*greedy, *seeded])
    for two, one in zip(*found, strict=True):
        assert two.token_ids == one.token_ids
        np.testing.assert_allclose(
            unpack_floats(two.behavior_logprobs), unpack_floats(one.behavior_logprobs), atol=1e-4, rtol=0
        )
    assert len({completion.token_ids for completion in found[0]}) > 10
    assert parallel_engine.engine.fingerprint.other["engine.tensor_parallel_size"] == "2"


async def test_the_parity_gate_opens_for_its_rollouts(parallel_engine, tmp_path):
    model = qwen3(tied=True, seed=32)
    version = await parallel_engine.load(weights_of(model))
    model.save_pretrained(tmp_path / "model")
    posed = [PosedPrompt(Prompt(text="?"), ids) for ids in (PROMPT, [7, 9])]
    groups = await probe(parallel_engine.engine, posed, SamplingSettings(max_tokens=64), group_size=8)
    config = run_config(tmp_path / "model")
    gate = Gate(config, tmp_path, LoadedChecks(config))
    trainer = PackedModel(str(tmp_path / "model"), "float32", torch.device("cpu"))
    gate.check(groups, trainer, version, LagTable(version, {}, {}))
    assert not gate.is_pending
    assert json.loads((tmp_path / "parity.json").read_text())["verdict"]["status"] == "parity"


async def test_no_token_is_mislabelled_while_both_ranks_load_from_a_copy_that_others_patch(parallel_engine, tmp_path):
    host, base = EngineHost(tmp_path), weights_of(parallel_engine.base)
    followers = host.follower(parallel_engine.engine), host.follower(ScriptedEngine())

    async def update() -> None:
        announced = [host.announce(lambda version: weights_of_token(base, label_of(version))) for _ in followers]
        await asyncio.gather(*map(host.load, followers, announced))

    await assert_exact_labels(parallel_engine.engine, update, 6)
    host.close()


async def test_a_load_that_fails_on_one_rank_is_taken_back_on_both(parallel_engine, tmp_path):
    old, new = qwen3(tied=True, seed=33), qwen3(tied=True, seed=34)
    host = EngineHost(tmp_path)
    follower = host.follower(parallel_engine.engine)
    serving = host.announce(lambda _: weights_of(old))
    await host.load(follower, serving)
    running = asyncio.create_task(
        parallel_engine.engine.generate(PROMPT, SamplingSettings(max_tokens=120), 8, "running")
    )
    for rank in (0, 1, 0):
        await parallel_engine.engine._llm.collective_rpc("penstock_break_load", args=(rank,))
        wrong = host.announce(lambda _: weights_of(new))
        with pytest.raises(WeightLoadError, match=rf"^policy {wrong.version}: [^:]*: rank {rank}: OSError: the f"):
            await host.load(follower, wrong)
    assert {span.version for c in await running for span in c.version_spans} == {serving.version}
    await assert_serves(parallel_engine.engine, old, serving.version)

    newer = host.announce(lambda _: weights_of(new))
    await host.load(follower, newer)
    await assert_serves(parallel_engine.engine, new, newer.version)
    host.close()


async def test_hidden_states_are_those_of_the_whole_model_and_a_failed_capture_leaves_both_ranks_in_step(
    parallel_engine, tmp_path
):
    model, sequence = qwen3(tied=True, seed=35), [n % 60 + 3 for n in range(70)]
    version = await parallel_engine.load(weights_of(model))
    for _ in range(2):  # only the first rank writes
        with pytest.raises(CaptureError, match=r"rank 0: .*No such file"):
            await parallel_engine.engine.capture(sequence, str(tmp_path / "missing" / "capture"))
    await parallel_engine.engine.capture(sequence, str(tmp_path / "capture"))
    found = load_file(tmp_path / "capture")
    with torch.no_grad():
        states = model(torch.tensor([sequence]), output_hidden_states=True).hidden_states
    wanted = {names.layer(0, names.INPUT): states[0], names.layer(1, names.INPUT): states[1], names.NORM: states[2]}
    for name, theirs in wanted.items():
        torch.testing.assert_close(found[name], theirs[0], atol=2e-5, rtol=1e-4, msg=name)
    chosen = torch.from_numpy(reference_logprobs(model, sequence[:1], sequence[1:], 1.0))
    torch.testing.assert_close(found[names.LOGPROBS], chosen, atol=2e-5, rtol=1e-4)
    await assert_serves(parallel_engine.engine, model, version)
