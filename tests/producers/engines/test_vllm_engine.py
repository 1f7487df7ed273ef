"""The running engine: what it refuses, what it reports, and how it ends."""

import asyncio
import contextlib
import gc
from types import SimpleNamespace

import psutil
import pytest
import pytest_asyncio
import torch
from msgspec.structs import replace

from penstock.producers.interfaces import EngineError
from penstock.schemas.rollout import SamplingSettings, unpack_floats, unpack_ids
from shared_engine import publish, qwen3, run_config, weights_of
from waiting import until

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.asyncio(loop_scope="session"),
]

PROMPT = [3, 4, 5]
EAGER = {"args": {"enforce_eager": True}}


def engine_processes() -> set[psutil.Process]:
    """Engines that were started from here: by spawn, or forked from the server of `forked_engines`."""
    own = psutil.Process()
    found = set()
    for process in own.children(recursive=True):
        with contextlib.suppress(psutil.Error):
            command = " ".join(process.cmdline())
            if "spawn_main" in command or ("forkserver" in command and process.ppid() != own.pid):
                found.add(process)
    return found


@pytest_asyncio.fixture(loop_scope="session")
async def tied_engine(tied_engine):
    """The shared one, whatever other tests have left in it."""
    await tied_engine.load(weights_of(tied_engine.base))
    return tied_engine


async def start_long_request(engine) -> asyncio.Task:
    """A request of hundreds of tokens that the engine has accepted."""
    task = asyncio.create_task(engine.generate(PROMPT, SamplingSettings(max_tokens=500), 16, "long"))
    await until(lambda: engine._llm.get_num_unfinished_requests() or task.done())
    return task


async def test_a_build_for_gpus_is_refused_where_there_is_none(vllm_engine, tmp_path, monkeypatch):
    from penstock.producers.engines import vllm

    monkeypatch.setattr(vllm, "current_platform", SimpleNamespace(is_unspecified=lambda: True))
    with pytest.raises(EngineError, match=r"built for GPUs and finds none: expected an NVIDIA GPU .* extra \[cpu\]"):
        await vllm_engine.start(run_config(tmp_path))


async def test_the_fingerprint_is_what_the_engine_reports(tied_engine):
    found = tied_engine.engine.fingerprint
    assert (found.engine, found.dtype, found.head_dtype) == ("vllm", "float32", "float32")
    assert (found.logprobs_mode, found.prefix_caching, found.async_scheduling) == ("processed_logprobs", False, False)
    assert found.other == {"skip_tokenizer_init": "true"}
    assert tied_engine.engine.max_model_len == 512


async def test_a_seeded_request_draws_the_same_bits_alone_and_beside_others(tied_engine):
    engine, sampling = tied_engine.engine, SamplingSettings(max_tokens=20)
    alone = await engine.generate(PROMPT, sampling, 4, "alone", seed=5)
    beside, other, *_ = await asyncio.gather(
        engine.generate(PROMPT, sampling, 4, "beside", seed=5),
        engine.generate(PROMPT, sampling, 4, "another seed", seed=50),
        engine.generate([7, 8], sampling, 16, "seeded", seed=6),
        engine.generate([9], sampling, 16, "unseeded"),
    )
    assert beside == alone
    assert len({completion.token_ids for completion in (*alone, *other)}) == 8


async def test_a_stop_token_ends_a_completion_and_belongs_to_it(tied_engine):
    greedy = SamplingSettings(temperature=0, max_tokens=8)
    (free,) = await tied_engine.engine.generate(PROMPT, greedy, 1, "free")
    ids = list(unpack_ids(free.token_ids))
    stopping = SamplingSettings(temperature=0, max_tokens=8, stop_token_ids=(ids[0],))
    (stopped,) = await tied_engine.engine.generate(PROMPT, stopping, 1, "stopped")
    assert list(unpack_ids(stopped.token_ids)) == ids[:1]
    assert stopped.finish_reason == "stop"


async def test_the_likeliest_ids_of_each_token_are_those_of_a_softmax_finished_or_not(tied_engine):
    engine, sampling = tied_engine.engine, SamplingSettings(max_tokens=12, temperature=0.7, top_logprobs=5)
    plain, *_ = await engine.generate(PROMPT, SamplingSettings(max_tokens=12, temperature=0.7), 4, "plain", seed=5)
    found = await engine.generate(PROMPT, sampling, 4, "top", seed=5)
    assert found[0].token_ids == plain.token_ids and plain.top_logprobs is None
    for one in found:
        ids = unpack_ids(one.token_ids).tolist()
        logits = tied_engine.base(torch.tensor([PROMPT + ids])).logits[0, len(PROMPT) - 1 : -1].float()
        logprobs, top = torch.log_softmax(logits / 0.7, 1), one.top_logprobs
        assert top.count == 5 and top.problem(len(ids)) is None
        likeliest = torch.tensor(unpack_ids(top.ids).tolist()).view(-1, 5)
        assert torch.equal(likeliest.sort(1).values, logprobs.topk(5).indices.sort(1).values)
        wanted = logprobs.gather(1, likeliest).flatten()
        torch.testing.assert_close(torch.tensor(unpack_floats(top.logprobs).tolist()), wanted, atol=1e-4, rtol=1e-4)
    running = asyncio.create_task(engine.generate(PROMPT, replace(sampling, max_tokens=400), 16, "running"))
    await until(lambda: all(one.num_tokens for one in engine.sampled("running")) and engine.sampled("running"))
    sampled = engine.sampled("running")
    running.cancel()
    await asyncio.wait({running})
    assert "abort" in {one.finish_reason for one in sampled}, "one of sixteen may have ended by itself, not all"
    assert [one.top_logprobs.problem(one.num_tokens) for one in sampled] == [None] * 16


async def test_a_prompt_that_vllm_refuses_is_an_error_of_the_request_only(tied_engine):
    sampling = SamplingSettings(max_tokens=4)
    for prompt in ([], [3] * 600, [3, 64]):  # empty, longer than the context, an unknown id
        with pytest.raises(ValueError, match="request refused refused: "):
            await tied_engine.engine.generate(prompt, sampling, 2, "refused")
    assert len(await tied_engine.engine.generate(PROMPT, sampling, 2, "next")) == 2


async def test_cancelling_generate_aborts_the_request(tied_engine):
    running = await start_long_request(tied_engine.engine)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert tied_engine.engine._llm.get_num_unfinished_requests() == 0


async def test_a_setting_that_the_engine_reports_otherwise_stops_the_start(vllm_engine, tmp_path):
    # The CPU build switches asynchronous scheduling off, whatever it is asked for.
    qwen3(tied=True, seed=0).save_pretrained(tmp_path / "model")
    # Nothing in this file but the ends of sequences may keep an engine from its start.
    (tmp_path / "model" / "generation_config.json").write_text('{"num_return_sequences": 4, "eos_token_id": 1}')
    config = run_config(tmp_path / "model", engine={"args": {"enforce_eager": True, "async_scheduling": True}})
    before = engine_processes()
    with pytest.raises(EngineError, match=r"engine\.args\.async_scheduling: wanted True, .* reports False"):
        await vllm_engine.start(config)
    assert engine_processes() <= before


async def test_a_model_that_vllm_refuses_is_an_engine_error(vllm_engine, tmp_path):
    qwen3(tied=True, seed=0).save_pretrained(tmp_path / "model")
    with pytest.raises(EngineError, match=r"(?s)model\.path = .*9999"):
        await vllm_engine.start(run_config(tmp_path / "model", engine={"max_model_len": 9999}))
    with pytest.raises(EngineError, match="no such folder"):
        await vllm_engine.start(run_config(tmp_path / "nothing"))


@pytest.mark.filterwarnings("ignore:Unclosed context:ResourceWarning")
async def test_cancelling_the_start_leaves_no_process_behind(vllm_engine, tmp_path, monkeypatch):
    # As in a producer, the engine process begins with the import of vLLM.
    from vllm.utils.system_utils import get_mp_context

    monkeypatch.setattr("vllm.v1.engine.utils.get_mp_context", get_mp_context)
    qwen3(tied=True, seed=0).save_pretrained(tmp_path / "model")
    before = engine_processes()
    starting = asyncio.create_task(vllm_engine.start(run_config(tmp_path / "model", engine=EAGER)))
    children = set(psutil.Process().children())
    while children >= set(psutil.Process().children()):
        assert not starting.done()
        await asyncio.sleep(0.1)
    await asyncio.sleep(1)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(starting, timeout=120)
    assert engine_processes() <= before
    del starting
    gc.collect()  # what vLLM leaves behind of an engine that never was


async def test_an_engine_process_that_freezes_is_named_and_one_that_dies_fails_what_is_under_way(
    vllm_engine, tmp_path, monkeypatch
):
    from penstock.producers.engines import vllm

    model = qwen3(tied=True, seed=0)
    model.save_pretrained(tmp_path / "model")
    before = engine_processes()
    engine = await vllm_engine.start(run_config(tmp_path / "model", engine=EAGER))
    (process,) = engine_processes() - before
    await engine.check()
    for _ in range(20):  # on a busy machine it may have ended before its engine is stopped
        running = await start_long_request(engine)
        process.suspend()
        await asyncio.sleep(0.1)
        if not running.done():
            break
        process.resume()
    monkeypatch.setattr(vllm, "ANSWER_S", 0.5)
    with pytest.raises(EngineError, match=rf"engine process \(pid {process.pid}\) is frozen: no answer within 0.5 s"):
        await engine.check()
    loading = asyncio.create_task(engine.load_weights(*publish(weights_of(model), 1, tmp_path)))
    await asyncio.sleep(0.05)
    process.kill()
    for task in (running, loading):
        with pytest.raises(EngineError, match="died"):
            await asyncio.wait_for(task, timeout=90)
    with pytest.raises(EngineError, match="died"):
        await engine.generate(PROMPT, SamplingSettings(max_tokens=4), 1, "late")
    await engine.close()
