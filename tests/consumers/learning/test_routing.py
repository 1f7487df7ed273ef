"""Mixtures are computed by the experts that a rollout names, against transformers with the same choice."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from penstock.consumers.learning.batch.packing import pack_segments
from penstock.consumers.learning.batch.trainable import check_trainable
from penstock.consumers.learning.loss.scoring import head_logprobs
from penstock.consumers.learning.model.packed_model import PackedModel
from penstock.schemas.config import ConfigError
from penstock.schemas.rollout import RecordError, Segment, VersionSpan, pack_ids
from penstock.schemas.routes import Routes
from training_groups import random_group, tiny_model

LAYERS, EXPERTS, PER_TOKEN, CONTEXT = 3, 8, 2, 5
SIZES = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32, "num_hidden_layers": 3,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "num_experts": EXPERTS, "sliding_window": 16,
    "num_local_experts": EXPERTS, "n_routed_experts": EXPERTS, "num_experts_per_tok": PER_TOKEN, "n_group": 2,
    "topk_group": 1, "first_k_dense_replace": 1, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8, "v_head_dim": 16, "max_position_embeddings": 512, "initializer_range": 0.15,
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip
KINDS = ("qwen3_moe", "gpt_oss", "glm4_moe", "olmoe", "mixtral", "deepseek_v3", "granitemoe")


def _mixture(kind: str, folder: Path) -> Any:
    torch.manual_seed(0)
    default = AutoConfig.for_model(kind)
    sizes = SIZES | ({"head_dim": 8, "num_key_value_heads": 2} if kind == "deepseek_v3" else {})
    config = type(default)(**{name: size for name, size in sizes.items() if hasattr(default, name)})
    model = AutoModelForCausalLM.from_config(config).float().eval()
    model.save_pretrained(folder)
    return model


def _segment(token_ids: list[int], routes: np.ndarray | None) -> Segment:
    span = VersionSpan(0, CONTEXT, len(token_ids))
    return Segment(
        token_ids=pack_ids(token_ids),
        behavior_logprobs=bytes(4 * (span.end - span.start)),
        loss_mask=((span.start, span.end),),
        version_spans=(span,),
        routes=msgspec.UNSET if routes is None else Routes(LAYERS, PER_TOKEN, "B", routes.tobytes()),
    )


def _logprobs(model: PackedModel, rows: list[list[int]], routes: list[np.ndarray] | None) -> Tensor:
    """Returns the logprobs of the rows' tokens after their context, the rows in the order of `pack_segments`."""
    segments = [(n, _segment(row, None if routes is None else routes[n]), 1.0) for n, row in enumerate(rows)]
    ((microbatch, places),) = pack_segments(segments, 4096, arrangement=model.arrangement)
    assert places == tuple(range(len(rows)))
    return head_logprobs(*model.forward(microbatch), microbatch)[0]


@contextmanager
def _chosen(monkeypatch: pytest.MonkeyPatch, routes: np.ndarray, first_layer: int) -> Iterator[None]:
    """Lets the routers of transformers' own layers choose these experts [N, layers, experts per token]."""
    topk, layers = torch.topk, iter(range(first_layer, LAYERS))

    def choose(scores: Tensor, k: int, *arguments: Any, **keywords: Any) -> Any:
        if scores.shape != (len(routes), EXPERTS):
            return topk(scores, k, *arguments, **keywords)
        forced = torch.from_numpy(routes[:, next(layers)].astype(np.int64))
        return torch.return_types.topk((scores.gather(-1, forced), forced))

    with monkeypatch.context() as patched:
        patched.setattr(torch, "topk", choose)
        patched.setattr(Tensor, "topk", choose)
        yield


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_mixture_is_computed_by_its_routes(tmp_path, monkeypatch, kind: str, checkpointing: bool) -> None:
    reference = _mixture(kind, tmp_path)
    first_layer = LAYERS - sum(isinstance(getattr(m, "experts", None), torch.nn.Module) for m in reference.modules())
    model = PackedModel(
        str(tmp_path), "float32", torch.device("cpu"), replays_routes=True, gradient_checkpointing=checkpointing
    )
    random = np.random.default_rng(0)
    rows = [random.integers(3, 64, length).tolist() for length in (40, 17, 9)]
    unknown = [np.full((len(row) - 1, LAYERS, PER_TOKEN), 0xFF, dtype=np.uint8) for row in rows]
    free = _logprobs(model, rows, None)
    assert torch.equal(_logprobs(model, rows, unknown), free)

    routes = [
        random.permuted(np.tile(np.arange(EXPERTS, dtype=np.uint8), (len(row) - 1, LAYERS, 1)), axis=-1) for row in rows
    ]
    routes = [each[..., :PER_TOKEN] for each in routes]
    assert model.routing is not None
    with model.routing.compared() as differing:
        found = _logprobs(model, rows, routes)
    assert sorted(differing) == list(range(first_layer, LAYERS))
    assert all(0.5 < float(each.float().mean()) <= 1 for (each,) in differing.values())
    with model.routing.freed():
        assert torch.equal(_logprobs(model, rows, routes), free)
    found = _logprobs(model, rows, routes)
    assert float((found - free).detach().abs().mean()) > 0.05
    expected = []
    for row, forced in zip(rows, routes, strict=True):
        with _chosen(monkeypatch, np.concatenate([forced, forced[:1]]), first_layer):
            logits = reference(torch.tensor([row])).logits[0, CONTEXT - 1 : -1]
        expected.append(torch.log_softmax(logits, -1).gather(1, torch.tensor(row[CONTEXT:])[:, None])[:, 0])
    torch.testing.assert_close(found, torch.cat(expected), rtol=0, atol=2e-5)

    found.sum().backward()
    torch.cat(expected).sum().backward()
    gradients = {name: each.grad for name, each in model.module.named_parameters()}
    assert any("gate.weight" in name or "router" in name for name, each in gradients.items() if each is not None)
    for name, parameter in reference.named_parameters():
        if parameter.grad is not None:
            error = (gradients[name] - parameter.grad).norm() / parameter.grad.norm()
            assert error < 1e-4, name


def test_what_cannot_be_replayed_is_refused(tmp_path) -> None:
    tiny_model(tmp_path)
    with pytest.raises(
        ConfigError, match=r"model\.replay_routes = true with .*: Qwen3ForCausalLM has no layers of exp"
    ):
        PackedModel(str(tmp_path), "float32", torch.device("cpu"), replays_routes=True)
    group = random_group(1, 1, siblings=1)
    (rollout,) = group.rollouts
    (segment,) = rollout.segments

    def routed(layers: int, per_token: int, expert: int) -> Any:
        ids = bytes([expert]) * layers * per_token * (segment.num_tokens - 1)
        routes = Routes(layers, per_token, "B", ids)
        changed = msgspec.structs.replace(segment, routes=routes)
        return msgspec.structs.replace(group, rollouts=(msgspec.structs.replace(rollout, segments=(changed,)),))

    check_trainable(routed(3, 2, 7), 10**6, experts=(3, 8, 2))
    check_trainable(routed(3, 2, 0xFF), 10**6, experts=(3, 8, 2))
    for given, message in (
        (group, r"routes: none, expected those of every token \(model\.replay_routes = true\)"),
        (routed(2, 2, 7), r"routes of \(2, 2\) layers and experts per token, expected the model's \(3, 2\)"),
        (routed(3, 2, 8), r"routes with expert 8, expected less than the model's 8"),
    ):
        with pytest.raises(RecordError, match=f"group 1: {message}"):
            check_trainable(given, 10**6, experts=(3, 8, 2))
