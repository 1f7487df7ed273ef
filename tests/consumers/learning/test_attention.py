"""Packed rows compute what each row computes alone, and never see each other."""

from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from penstock.consumers.learning.batch.layout import MIN_BUCKET_TOKENS, make_layout
from penstock.consumers.learning.model import attention
from penstock.consumers.learning.model.attention import IMPLEMENTATION
from training_groups import VOCABULARY, tiny_model


@pytest.fixture(autouse=True)
def float64_throughout(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers computes this norm in float32 whatever it is given."""

    def forward(self: Qwen3RMSNorm, hidden: torch.Tensor) -> torch.Tensor:
        return self.weight * hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)

    monkeypatch.setattr(Qwen3RMSNorm, "forward", forward)


def _pack(rows: list[list[int]], shared: int = 0, min_bucket_tokens: int = MIN_BUCKET_TOKENS):
    """Rows, longest first, with the same `shared` first tokens: ids, positions, layout, each token's packed place."""
    lengths = np.array([len(row) for row in rows])
    own = lengths - shared
    own_starts = shared + np.cumsum(own) - own
    ids = rows[0][:shared] + [token for row in rows for token in row[shared:]]
    positions = list(range(shared)) + [p for row in rows for p in range(shared, len(row))]
    zeros = np.zeros(len(rows), dtype=np.int64)
    layout = make_layout(zeros, zeros + shared, own_starts, lengths, len(ids), min_bucket_tokens)
    places = [
        [p if p < shared else int(start) + p - shared for p in range(len(row))]
        for row, start in zip(rows, own_starts, strict=True)
    ]
    return torch.tensor(ids), torch.tensor(positions), layout, places


def _models(folder, **changes):
    """The same weights in float64 under the packed attention and under transformers' own."""
    tiny_model(folder, **changes)
    return [
        AutoModelForCausalLM.from_pretrained(folder, attn_implementation=name, dtype=torch.float64)
        for name in (IMPLEMENTATION, "sdpa")
    ]


def _hidden(model, ids, positions, layout) -> torch.Tensor:
    outputs = model.model(input_ids=ids[None], position_ids=positions[None], use_cache=False, layout=layout)
    return outputs.last_hidden_state[0]


def _random_rows(lengths: list[int], shared: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(4)
    prefix = torch.randint(0, VOCABULARY, (shared,), generator=generator).tolist()
    return [
        prefix + torch.randint(0, VOCABULARY, (length - shared,), generator=generator).tolist()
        for length in sorted(lengths, reverse=True)
    ]


LENGTHS = [13, 12, 7, 7, 5, 2, 1, 1]
SLIDING = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}


def _flash_attention_row_by_row(
    q, k, v, bounds, key_bounds, longest, longest_key, *, scale, window_size, enable_gqa=False
):
    """Computes what torch's varlen_attn is documented to compute, which it does not on CPU."""
    assert enable_gqa == (q.shape[1] != k.shape[1])
    assert bounds.dtype == key_bounds.dtype == torch.int32
    assert (longest, longest_key) == (int(bounds.diff().max()), int(key_bounds.diff().max()))
    assert (len(q), len(k)) == (int(bounds[-1]), int(key_bounds[-1]))
    before, after = window_size
    assert after == 0
    rows = []
    for (start, end), (first, last) in zip(pairwise(bounds.tolist()), pairwise(key_bounds.tolist()), strict=True):
        # The last query sees the last key.
        behind = (last - first) - (end - start)
        seen = torch.ones(end - start, last - first, dtype=torch.bool).tril(behind)
        if before >= 0:
            seen = seen.triu(behind - before)
        of_queries, of_keys = slice(start, end), slice(first, last)
        heads = (states[part].transpose(0, 1) for states, part in ((q, of_queries), (k, of_keys), (v, of_keys)))
        attended = F.scaled_dot_product_attention(*heads, attn_mask=seen, scale=scale, enable_gqa=enable_gqa)
        rows.append(attended.transpose(0, 1))
    return torch.cat(rows)


def _flash_attention_of_torch_2_11(q, k, v, bounds, key_bounds, longest, longest_key, *, scale, window_size):
    rest = (bounds, key_bounds, longest, longest_key)
    grouped = q.shape[1] != k.shape[1]
    return _flash_attention_row_by_row(q, k, v, *rest, scale=scale, window_size=window_size, enable_gqa=grouped)


def _attention_to_whole_heads(q, k, v, **options):
    assert q.shape[1] == k.shape[1] == v.shape[1] and not options["enable_gqa"]
    return _SDPA(q, k, v, **options)


_SDPA = F.scaled_dot_product_attention


@pytest.fixture(params=["rectangles", "whole heads", "unpadded", "unpadded, torch 2.11"])
def form(request, monkeypatch: pytest.MonkeyPatch) -> None:
    """The forms of the attention; those for CUDA on stand-ins for its kernels."""
    if request.param.startswith("unpadded"):
        kernel = _flash_attention_of_torch_2_11 if "2.11" in request.param else _flash_attention_row_by_row
        monkeypatch.setattr(attention, "varlen_attn", kernel)
        monkeypatch.setattr(attention, "_in_rectangles", attention.unpadded)
    elif request.param == "whole heads":
        monkeypatch.setattr(attention, "_wants_whole_heads", lambda query: True)
        monkeypatch.setattr(attention, "F", _Functions)


class _Functions:
    embedding = staticmethod(F.embedding)
    scaled_dot_product_attention = staticmethod(_attention_to_whole_heads)


@pytest.mark.usefixtures("form")
def test_packed_rows_equal_rows_run_one_by_one(tmp_path) -> None:
    upstream = torch.randn(8, max(LENGTHS), 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for name, changes in (("grouped", {}), ("full", {"num_key_value_heads": 4}), ("sliding", SLIDING)):
        packed, plain = _models(tmp_path / name, **changes)
        for shared, one_bucket in ((0, True), (1, False), (3, True), (3, False)):
            case = name, shared, one_bucket
            rows = _random_rows([length for length in LENGTHS if length >= max(shared, 1)], shared)
            ids, positions, layout, places = _pack(rows, shared, MIN_BUCKET_TOKENS if one_bucket else 1)
            assert (len(layout.buckets) == 1) == one_bucket, case
            hidden = _hidden(packed, ids, positions, layout)
            packed.zero_grad(), plain.zero_grad()
            for r, row in enumerate(rows):
                alone = plain.model(input_ids=torch.tensor([row]), use_cache=False).last_hidden_state[0]
                torch.testing.assert_close(hidden[places[r]], alone, rtol=1e-10, atol=1e-10, msg=str(case))
                (alone * upstream[r, : len(row)]).sum().backward()
            sum((hidden[places[r]] * upstream[r, : len(row)]).sum() for r, row in enumerate(rows)).backward()
            for (key, got), wanted in zip(packed.model.named_parameters(), plain.model.parameters(), strict=True):
                torch.testing.assert_close(got.grad, wanted.grad, rtol=1e-9, atol=1e-10, msg=f"{case} {key}")


def test_a_row_that_changes_or_is_not_finite_changes_no_other_row(tmp_path) -> None:
    model, _ = _models(tmp_path)
    rows = [[token % (VOCABULARY - 1) for token in row] for row in _random_rows([9, 6, 6, 3], shared=2)]
    before_ids, positions, layout, places = _pack(rows, 2)
    rows[1] = rows[1][:2] + [VOCABULARY - 1] * 4
    with torch.no_grad():
        model.model.embed_tokens.weight[VOCABULARY - 1] = float("nan")
    before, after = (_hidden(model, ids, positions, layout) for ids in (before_ids, _pack(rows, 2)[0]))
    for r in (0, 2, 3):
        assert torch.equal(before[places[r]], after[places[r]])
    assert torch.isfinite(before).all() and after[places[1][2:]].isnan().all()


def test_padding_inside_a_bucket_is_bounded() -> None:
    lengths = list(range(100, 0, -1))
    *_, layout, _ = _pack([[0] * length for length in lengths], min_bucket_tokens=64)
    assert sum(bucket.numel() for bucket in layout.buckets) < 1.25 * sum(lengths) + 64
    assert sorted(len(row) for bucket in layout.buckets for row in bucket) == sorted(
        bucket.shape[1] for bucket in layout.buckets for _ in bucket
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("window", [None, 4])
def test_flash_attention_on_a_gpu_equals_rectangles(window) -> None:
    lengths, shared = LENGTHS[:5], 2
    *_, layout, _ = _pack(_random_rows(lengths, shared), shared)
    layout = layout.to(torch.device("cuda"))
    generator = torch.Generator("cuda").manual_seed(0)
    flat = [
        torch.randn(len(layout.slots), heads * 64, device="cuda", generator=generator).bfloat16().requires_grad_()
        for heads in (4, 2, 2)
    ]
    results = []
    for attend in (attention.unpadded, attention._in_rectangles):
        attended = attend(flat, layout, 64, attention.Scores(0.125, window))
        results.append((attended, torch.autograd.grad(attended.float().square().sum(), flat)))
    (got, got_grads), (wanted, wanted_grads) = results
    torch.testing.assert_close(got, wanted, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(got_grads, wanted_grads, rtol=5e-2, atol=5e-2)


@pytest.mark.parametrize("width", [2, 3, 5])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("most_weights", [attention._MOST_WEIGHTS, 4 * 2 * 6 * 2], ids=["whole", "two queries a block"])
def test_caps_sinks_and_wide_values_are_those_of_the_definition(
    width, softcap, sinks, window, most_weights, monkeypatch
) -> None:
    monkeypatch.setattr(attention, "_MOST_WEIGHTS", most_weights)
    rows, generator = _random_rows([6, 4]), torch.Generator().manual_seed(0)
    *_, layout, places = _pack(rows)
    query, key, value = (
        torch.randn(1, heads, 10, columns, dtype=torch.float64, generator=generator).requires_grad_()
        for heads, columns in ((4, 3), (2, 3), (2, width))
    )
    of_sinks = torch.randn(4, dtype=torch.float64, generator=generator).requires_grad_() if sinks else None
    settings = {"softcap": softcap, "s_aux": of_sinks, "sliding_window": window}
    found, _ = attention.packed_attention(torch.nn.Module(), query, key, value, None, layout=layout, **settings)
    expected = torch.zeros_like(found)
    for place in places:
        q, k, v = (states[0, :, place] for states in (query, *(s.repeat_interleave(2, 1) for s in (key, value))))
        products = q @ k.transpose(1, 2) * 3**-0.5
        products = products if softcap is None else softcap * torch.tanh(products / softcap)
        ones = torch.ones(len(place), len(place), dtype=torch.bool)
        seen = ones.tril() if window is None else ones.tril() & ~ones.tril(-window)
        products = products.masked_fill(~seen, -torch.inf)
        if of_sinks is not None:
            products = torch.cat([products, of_sinks[:, None, None].expand(-1, len(place), 1)], dim=2)
        expected[0, place] = (products.softmax(2)[..., : len(place)] @ v).transpose(0, 1)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    inputs = [query, key, value] + ([of_sinks] if sinks else [])
    gradients = (torch.autograd.grad(each.square().sum(), inputs) for each in (found, expected))
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-5)


def test_a_model_that_passes_no_layout_is_not_packed() -> None:
    states = torch.zeros(1, 1, 1, 2)
    with pytest.raises(NotImplementedError, match="does not pass the layout"):
        attention.packed_attention(torch.nn.Module(), states, states, states, None)
