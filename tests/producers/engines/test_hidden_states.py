"""Hidden states recorded in vLLM's worker: what the hooks keep, and that the engine is left as it was."""

import asyncio

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from penstock.producers.engines.hidden_states import LOGITS_CHUNK_TOKENS, HiddenStateCapture
from penstock.producers.interfaces import CaptureError
from penstock.schemas import hidden_states as names
from penstock.schemas.rollout import SamplingSettings
from shared_engine import qwen3, weights_of

HIDDEN, VOCABULARY = 4, 11


class Norm(nn.Module):
    """Fused with the addition before it, in place, as vLLM's."""

    def forward(self, states, residual=None):
        if residual is None:
            return states * 2
        residual += states
        states.copy_(residual * 2)
        return states, residual


class Add(nn.Module):
    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = value

    def forward(self, states):
        return states + self.value


class Layer(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = Norm(), Norm()
        self.self_attn, self.mlp = Add(1.0 + index), Add(0.5)

    def forward(self, positions, states, residual):
        if residual is None:
            residual, states = states, self.input_layernorm(states)
        else:
            states, residual = self.input_layernorm(states, residual)
        states, residual = self.post_attention_layernorm(self.self_attn(states), residual)
        return self.mlp(states), residual


class Body(nn.Module):
    """Two layers that carry the residual stream in two parts; `do_not_compile` is vLLM's."""

    def __init__(self) -> None:
        super().__init__()
        self.do_not_compile = False
        self.embed_tokens = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList([Layer(0), Layer(1)])
        self.norm = Norm()

    def forward(self, ids):
        states, residual = self.embed_tokens(ids), None
        for layer in self.layers:
            states, residual = layer(torch.arange(len(ids)), states, residual)
        return self.norm(states, residual)[0]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = Body()
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def compute_logits(self, states):
        return self.head(states)


class CapturingWorker(HiddenStateCapture):
    rank = 0

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def get_model(self) -> nn.Module:
        return self.model

    @torch.inference_mode()
    def serve(self, *batches: list[int]) -> None:
        for ids in batches:
            states = self.model.model(torch.tensor(ids))
        self.model.compute_logits(states[-1:])


@pytest.fixture
def worker() -> CapturingWorker:
    torch.manual_seed(0)
    return CapturingWorker(Model())


def expected(model: Model, ids: list[int]) -> dict[str, torch.Tensor]:
    """The same network with one stream, written out."""
    found = {}
    stream = model.model.embed_tokens(torch.tensor(ids))
    for index in (0, 1):
        found[names.layer(index, names.INPUT)] = stream
        found[names.layer(index, names.ATTENTION)] = stream * 2 + 1 + index
        stream = stream + found[names.layer(index, names.ATTENTION)]
        found[names.layer(index, names.MIDDLE)] = stream
        found[names.layer(index, names.MLP)] = stream * 2 + 0.5
        stream = stream + found[names.layer(index, names.MLP)]
    found |= {names.STREAM: stream, names.NORM: stream * 2, names.AS_SERVED: stream[-1] * 2}
    logprobs = torch.log_softmax(model.head(stream * 2), dim=-1)
    found[names.LOGPROBS] = logprobs[:-1].gather(1, torch.tensor(ids)[1:, None])[:, 0]
    return found | {names.TOKEN_IDS: torch.tensor(ids)}


def record(worker: CapturingWorker, path, ids: list[int], *batches: list[int]) -> None:
    """Serves a sequence in these batches, then as a request of its own, and ends the capture."""
    worker.penstock_begin_capture(ids)
    worker.serve(*batches or [ids])
    worker.penstock_capture_as_served()
    worker.serve(ids)
    worker.penstock_end_capture(str(path), 7)


def test_every_part_of_every_layer_is_recorded_for_exactly_the_sequence(worker, tmp_path):
    ids = [3, 1, 4, 1, 5]
    for batches in (  # at once, in chunks, padded, in padded chunks
        [ids], [[3, 1], [4, 1], [5]], [[*ids, 0, 0, 0]], [[3, 1, 0, 0], [4, 1, 5, 9]],
    ):  # fmt: skip
        record(worker, tmp_path / "c", ids, *batches)
        found, wanted = load_file(tmp_path / "c"), expected(worker.model, ids)
        assert found.keys() == wanted.keys()
        for name in wanted:
            torch.testing.assert_close(found[name], wanted[name], msg=name)
        with safe_open(tmp_path / "c", framework="pt") as file:
            assert file.metadata() == {"format": names.FORMAT, "num_layers": "2", "policy_version": "7"}
    long = [n % VOCABULARY for n in range(2 * LOGITS_CHUNK_TOKENS + 2)]
    record(worker, tmp_path / "long", long)
    logprobs = load_file(tmp_path / "long")[names.LOGPROBS]
    torch.testing.assert_close(logprobs, expected(worker.model, long)[names.LOGPROBS])


def test_hooks_and_compilation_are_as_before_afterwards_even_where_nothing_was_served(worker):
    worker.penstock_begin_capture([1, 2])
    assert worker.model.model.do_not_compile
    worker.penstock_begin_capture([1, 2])
    worker.penstock_end_capture(None, 0)
    worker.penstock_end_capture(None, 0)
    assert not worker.model.model.do_not_compile
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in worker.model.modules())
    assert "compute_logits" not in vars(worker.model)


def test_nothing_is_written_of_other_rows_of_another_build_or_by_another_worker(worker, tmp_path):
    for batch in ([3, 1], [9, 3, 1, 4]):  # a part, other requests
        with pytest.raises(RuntimeError, match="of 3 tokens of the sequence were computed"):
            record(worker, tmp_path / "c", [3, 1, 4], batch)
    worker.rank = 1
    record(worker, tmp_path / "c", [3, 1])
    worker.model.model.layers[1] = nn.Identity()
    with pytest.raises(RuntimeError, match="no pipeline parallelism"):
        worker.penstock_begin_capture([3])
    assert not (tmp_path / "c").exists()


SEQUENCE = [n % 60 + 3 for n in range(70)]


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.asyncio(loop_scope="session")
async def test_vllm_shows_what_transformers_computes(shared_engine, tmp_path):
    model = qwen3(tied=shared_engine.base.config.tie_word_embeddings, seed=8)
    version = await shared_engine.load(weights_of(model))
    path = tmp_path / "capture.safetensors"
    await shared_engine.engine.capture(SEQUENCE, str(path))

    found = load_file(path)
    with safe_open(path, framework="pt") as file:
        assert file.metadata()["policy_version"] == str(version)
    with torch.no_grad():
        outputs = model(torch.tensor([SEQUENCE]), output_hidden_states=True)
        logprobs = torch.log_softmax(outputs.logits[0, :-1], dim=-1)
    chosen = logprobs.gather(1, torch.tensor(SEQUENCE)[1:, None])[:, 0]
    for name, theirs in [
        (names.layer(0, names.INPUT), outputs.hidden_states[0][0]),
        (names.layer(1, names.INPUT), outputs.hidden_states[1][0]),
        (names.NORM, outputs.hidden_states[2][0]),
        (names.AS_SERVED, outputs.hidden_states[2][0, -1]),
        (names.LOGPROBS, chosen),
    ]:
        torch.testing.assert_close(found[name], theirs, atol=2e-5, rtol=1e-4, msg=name)


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.asyncio(loop_scope="session")
async def test_vllm_serves_on_after_a_capture_and_refuses_one_while_it_serves(tied_engine, tmp_path):
    engine, greedy = tied_engine.engine, SamplingSettings(temperature=0, max_tokens=20)
    before = await engine.generate(SEQUENCE, greedy, 1, "before capture")
    await engine.capture(SEQUENCE, str(tmp_path / "first"))
    assert await engine.generate(SEQUENCE, greedy, 1, "after capture") == before

    with pytest.raises(ValueError, match="600 tokens"):
        await engine.capture([3] * 600, str(tmp_path / "second"))
    with pytest.raises(CaptureError, match="No such file"):
        await engine.capture(SEQUENCE, str(tmp_path / "missing" / "third"))
    running = asyncio.create_task(engine.generate(SEQUENCE, SamplingSettings(max_tokens=400), 8, "beside a capture"))
    for _ in range(1000):
        if engine._llm.get_num_unfinished_requests():
            break
        await asyncio.sleep(0)
    with pytest.raises(CaptureError, match="8 requests in flight"):
        await engine.capture(SEQUENCE, str(tmp_path / "fourth"))
    await running
    assert await engine.generate(SEQUENCE, greedy, 1, "after refusals") == before
