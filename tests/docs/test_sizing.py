"""The sizing page: its formula counts what autograd keeps, matches published models, and the page is current."""

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from docs import sizing
from docs.sizing import SHAPES
from penstock.consumers.learning.batch.layout import make_layout
from penstock.consumers.learning.model.attention import IMPLEMENTATION
from penstock.deploy.launch.memory import (
    ModelShape,
    RankSetting,
    block_bytes_per_token,
    rank_bytes,
    read_shape,
    total_gb,
)
from penstock.schemas.config import ConfigError

NUM_TOKENS = 64
PUBLISHED = {
    "Qwen3-0.6B": 596_049_920,
    "Qwen3-1.7B": 1_720_574_976,
    "Qwen3-4B": 4_022_468_096,
    "Qwen3-8B": 8_190_735_360,
    "Qwen3-14B": 14_768_307_200,
    "Qwen3-32B": 32_762_123_264,
    "Qwen3-30B-A3B": 30_532_122_624,
    "Llama-3.1-70B": 70_553_706_496,
}
"""Parameters, as the headers of the published weights count them."""
SMALL = (
    ModelShape("qwen3", 96, 160, 2, 6, 3, 32, 50, tied=True),
    ModelShape("llama", 64, 128, 2, 4, 2, 16, 50, tied=False, has_head_norms=False),
    ModelShape("moe", 64, 32, 2, 4, 2, 16, 50, tied=False, experts=8, experts_per_token=2),
)


def model_of(shape: ModelShape, layers: int) -> Any:
    fields: dict[str, Any] = {
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "tie_word_embeddings": shape.tied,
        "attn_implementation": IMPLEMENTATION,
    }
    if shape.experts:
        experts = {"num_experts": shape.experts, "num_experts_per_tok": shape.experts_per_token}
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(**fields, **experts, moe_intermediate_size=shape.intermediate))
    if shape.has_head_norms:
        return Qwen3ForCausalLM(Qwen3Config(**fields))
    return LlamaForCausalLM(LlamaConfig(**fields))


def kept_bytes(shape: ModelShape, layers: int, dtype: torch.dtype) -> int:
    """Returns the bytes that autograd keeps of a forward pass, without the model, each piece of memory once."""
    torch.manual_seed(0)
    model = model_of(shape, layers).to(dtype)
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    kept: dict[int, tuple[int, Tensor]] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes(), tensor  # the tensor too, so that its address stays its own
        return tensor

    start, length = np.zeros(1, dtype=np.int64), np.array([NUM_TOKENS])
    layout = make_layout(start, start, start, length, NUM_TOKENS)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        tokens = torch.arange(NUM_TOKENS)[None]
        model.model(input_ids=tokens % shape.vocabulary, position_ids=tokens, use_cache=False, layout=layout)
    return sum(size for size, _ in kept.values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", SMALL, ids=lambda shape: shape.name)
def test_a_block_keeps_as_many_bytes_a_token_as_the_formula_says(shape: ModelShape, dtype: str) -> None:
    kept = functools.partial(kept_bytes, shape, dtype=getattr(torch, dtype))
    measured = (kept(layers=3) - kept(layers=2)) / NUM_TOKENS
    # The choice of experts is left out: some hundred bytes, whatever the width.
    few = (40 * shape.experts_per_token + 5 * shape.experts + 8) if shape.experts else 0
    assert 0 <= measured - block_bytes_per_token(shape, dtype) <= few


@pytest.mark.parametrize("shape", [*SHAPES, *SMALL], ids=lambda shape: shape.name)
def test_the_parameters_of_a_shape_are_those_of_the_model(shape: ModelShape) -> None:
    if shape.name in PUBLISHED:
        assert shape.parameters == PUBLISHED[shape.name]
    else:
        assert shape.parameters == model_of(shape, shape.layers).num_parameters()


@pytest.mark.parametrize("shape", SMALL, ids=lambda shape: shape.name)
def test_the_shape_of_a_model_is_read_from_its_folder(shape: ModelShape, tmp_path: Path) -> None:
    model_of(shape, shape.layers).config.save_pretrained(tmp_path / shape.name)
    found = read_shape(tmp_path / shape.name)
    assert found is not None and found.max_model_len > 0
    assert found._replace(name=shape.name, max_model_len=0) == shape


def test_a_model_of_other_fields_has_no_known_shape(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "mamba", "hidden_size": 8, "num_hidden_layers": 2}')
    assert read_shape(tmp_path) is None
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json: .*; expected JSON"):
        read_shape(tmp_path)


def test_every_published_size_is_asked_for() -> None:
    assert PUBLISHED.keys() == {shape.name for shape in SHAPES}


def test_twice_the_ranks_halve_what_is_sharded_and_nothing_else() -> None:
    two, four = (rank_bytes(SHAPES[3], RankSetting(ranks)) for ranks in (2, 4))
    sharded = "masters, gradients, moments"
    assert two.pop(sharded) == 2 * four.pop(sharded) == 8 * SHAPES[3].parameters
    assert two == four


def test_gradients_that_are_reduced_once_a_step_cost_four_bytes_a_parameter_on_every_rank() -> None:
    for ranks in (2, 8):
        more = [total_gb(SHAPES[3], RankSetting(ranks, unsharded=unsharded)) for unsharded in (True, False)]
        assert more[0] - more[1] == pytest.approx(4 * SHAPES[3].parameters / 1e9)


def test_the_longest_pass_fits_and_a_longer_one_does_not() -> None:
    shape = SHAPES[3]
    longest = sizing.longest_pass(shape, 4, 80) * 1000
    assert total_gb(shape, RankSetting(4, longest)) <= 72 < total_gb(shape, RankSetting(4, longest + 1000))
    assert sizing.longest_pass(shape, 1, 80) == 0


def test_the_formula_is_within_15_percent_of_what_was_measured() -> None:
    measured = sizing.newest_result()
    assert len(measured) >= 8
    for each in measured:
        shape, setting = sizing.measured_case(each["case"])
        assert each["peak_bytes"] / 1e9 == pytest.approx(total_gb(shape, setting), rel=0.15)


def test_the_page_is_what_the_program_writes() -> None:
    text = sizing.PAGE.read_text(encoding="utf-8")
    assert text == sizing.page(text), "run `python docs/sizing.py`"
    assert all(f"<!-- {name} -->\n|" in text for name in sizing.TABLES)
