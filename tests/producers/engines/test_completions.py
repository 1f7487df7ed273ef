"""Finished outputs, packed and held against themselves."""

from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from penstock.producers.engines import completions
from penstock.producers.engines.completions import Reported
from penstock.producers.interfaces import Completion, EngineError
from penstock.producers.rollout.sampling import join
from penstock.schemas.rollout import SamplingSettings, VersionSpan, unpack_floats, unpack_ids
from penstock.schemas.routes import Routes


def pack(given: Any, request_id: str, *, masked: bool = False) -> Completion:
    return completions.pack(given, request_id, Reported(masked, None))


def output(
    token_ids=(7, 8, 9),
    logprobs=(-0.5, -1.5, -2.0),
    logprob_ids=None,
    spans=((4, 0, 2), (5, 2, 3)),
    reason="stop",
    kept=None,
    experts=None,
):
    versions = [SimpleNamespace(version=str(version), start=start, end=end) for version, start, end in spans]
    flat = SimpleNamespace(token_ids=list(token_ids if logprob_ids is None else logprob_ids), logprobs=list(logprobs))
    return SimpleNamespace(
        token_ids=list(token_ids),
        logprobs=flat,
        weight_versions=versions,
        finish_reason=reason,
        sampling_mask=None if kept is None else SimpleNamespace(token_ids=kept),
        routed_experts=experts,
    )


def test_what_is_sampled_survives_packing():
    completion = pack(output(kept=[[7, 3], [8], [1, 9, 2]]), "r", masked=True)
    assert list(unpack_ids(completion.token_ids)) == [7, 8, 9]
    assert list(unpack_floats(completion.behavior_logprobs)) == [-0.5, -1.5, -2.0]
    assert completion.version_spans == (VersionSpan(4, 0, 2), VersionSpan(5, 2, 3))
    assert completion.finish_reason == "stop" and pack(output(), "r").sampling_mask is None
    assert completion.sampling_mask is not None
    assert [list(unpack_ids(entry)) for entry in completion.sampling_mask] == [[7, 3], [8], [1, 9, 2]]
    aborted = pack(output((), (), (), (), "abort"), "r", masked=True)
    assert (aborted.token_ids, aborted.sampling_mask, aborted.finish_reason) == (b"", (), "abort")


def test_an_output_that_contradicts_itself_is_an_error():
    no_tiling = ((), ((4, 0, 2),), ((4, 0, 1), (5, 2, 3)), ((4, 1, 3),), ((4, 0, 0), (5, 0, 3)), ((4, 0, 4),))
    for given, masked, message in [
        *((output(spans=spans), False, "version spans") for spans in no_tiling),
        *(
            (output(logprob_ids=ids), False, "3 tokens, but logprobs of")
            for ids in ((7, 8), (7, 8, 8), (7, 1) * 3, (7, 1, 8, 1, 9))
        ),
        (output(), True, "3 tokens, but a sampling mask of 0"),
        (output(kept=[[7], [8]]), True, "3 tokens, but a sampling mask of 2"),
        (output(kept=[[7], [8], [9]]), False, "3 tokens, but a sampling mask of 3"),
    ]:
        with pytest.raises(EngineError, match=f"request r: {message}"):
            pack(given, "r", masked=masked)


def test_likeliest_ids_are_kept_apart_from_the_sampled_ones():
    ids, logprobs = (7, 3, 7, 8, 4, 5, 9, 9, 1), [-n / 2 for n in range(9)]
    packed = pack(output(logprob_ids=ids, logprobs=logprobs), "r")
    assert unpack_floats(packed.behavior_logprobs).tolist() == [0, -1.5, -3]
    top = packed.top_logprobs
    assert top is not None and top.count == 2 and unpack_ids(top.ids).tolist() == [3, 7, 4, 5, 9, 1]
    assert unpack_floats(top.logprobs).tolist() == [-0.5, -1, -2, -2.5, -3.5, -4]
    assert join([packed.part(0, 1), packed.part(1, 1), packed.part(1, 3)]) == packed
    assert pack(output(), "r").top_logprobs is None


def unfinished(chunks, experts=(), **parts):
    """What vLLM keeps of a sibling that it samples, with masks as its sampler gives them."""
    whole = output(**parts)

    def as_running(new_token_ids, finish_reason, stop_reason):
        assert finish_reason is None, "of a finished output vLLM makes lists of its masks"
        return SimpleNamespace(**vars(whole) | {"weight_versions": None, "finish_reason": None})

    return SimpleNamespace(
        _new_completion_output=as_running,
        _weight_version_spans=lambda: whole.weight_versions,
        sampling_mask_chunks=[
            SimpleNamespace(token_ids=np.array(ids, np.int32), offsets=None if ends is None else np.array(ends))
            for ids, ends in chunks
        ],
        routed_experts_chunks=list(experts),
    )


def test_what_is_still_sampled_packs_like_an_aborted_output():
    chunks = [([7, 3], None), ([8, 1, 9, 2], [0, 1, 4])]
    found = completions.pack_unfinished(unfinished(chunks), "r", Reported(True, None))
    assert found == pack(output(reason="abort", kept=[[7, 3], [8], [1, 9, 2]]), "r", masked=True)
    assert completions.pack_unfinished(unfinished([]), "r", Reported(False, None)) == pack(output(reason="abort"), "r")
    with pytest.raises(EngineError, match="request r: 3 tokens, but a sampling mask of 1"):
        completions.pack_unfinished(unfinished(chunks[:1]), "r", Reported(True, None))


def test_experts_are_packed_with_those_of_the_prompt():
    experts = np.arange(5 * 2 * 2, dtype=np.int32).reshape(5, 2, 2)  # of a prompt of 3 tokens, and 2 of the 3 sampled
    packed = completions.pack(output(experts=experts), "r", Reported(False, "B"))
    assert packed.routes == Routes(2, 2, "B", bytes(range(20))) and packed.num_context_routes == 2
    assert completions.pack_unfinished(
        unfinished([], [experts[:3], experts[3:]]), "r", Reported(False, "H")
    ).routes == Routes(2, 2, "H", experts.astype("<u2").tobytes())
    assert completions.pack(output((), (), (), ()), "r", Reported(False, "B")).routes is None
    for few in (None, experts[:2]):
        with pytest.raises(EngineError, match=r"request r: 3 tokens, but experts of [02];.*replay_routes"):
            completions.pack(output(experts=few), "r", Reported(False, "B"))
    parts = [packed.part(0, 1), packed.part(1, 3)]
    assert [part.routes.num_rows for part in parts] == [3, 2] and join(parts) == packed
    again = msgspec.structs.replace(parts[1], routes=Routes(2, 2, "B", b"x" * 12 + parts[1].routes.ids))
    assert join([parts[0], again]) == packed, "what a second request computes again is not what was sampled by"


@pytest.mark.vllm
def test_masks_are_read_from_what_vllm_makes_of_its_sampler_s_output(vllm_engine):
    """Two steps of two requests, through vLLM's own classes: the sampler's tensors, the scheduler's slices, the joining
    of a request's steps."""
    import torch
    from vllm.outputs import CompletionOutput, SamplingMask, WeightVersionSpan
    from vllm.v1.worker.gpu.sample.output import SamplingMaskTensors

    compact = torch.tensor([[4, 9], [1, 3]], dtype=torch.int32)
    bits = np.packbits(np.eye(16, dtype=bool)[[1, 3, 5]].any(0), bitorder="little")
    steps = [
        # The second row is wider than the two ids that have room: its bits tell.
        SamplingMaskTensors(compact, torch.from_numpy(np.stack([0 * bits, bits])), counts, 16)
        for counts in (torch.tensor([2, 3]), torch.tensor([1, 2]))
    ]
    for row, expected in ((0, [[4, 9], [4]]), (1, [[1, 3, 5], [1, 3]])):
        chunks = [step.tolists().slice_request(row, 1) for step in steps]
        mask = SamplingMask([position for chunk in chunks for position in chunk.to_nested_list()])
        given = CompletionOutput(
            index=0,
            text="",
            token_ids=[position[0] for position in expected],
            cumulative_logprob=None,
            logprobs=SimpleNamespace(token_ids=[position[0] for position in expected], logprobs=[-0.5, -0.1]),
            finish_reason="length",
            sampling_mask=mask,
            weight_versions=[WeightVersionSpan("3", 0, 2)],
        )
        found = pack(given, "r", masked=True).sampling_mask
        assert found is not None and [list(unpack_ids(entry)) for entry in found] == expected
        state = SimpleNamespace(
            _new_completion_output=lambda *_, whole=given: whole,
            _weight_version_spans=lambda whole=given: whole.weight_versions,
            sampling_mask_chunks=chunks,
            routed_experts_chunks=[],
        )
        assert completions.pack_unfinished(state, "r", Reported(True, None)).sampling_mask == found


@pytest.mark.vllm
@pytest.mark.usefixtures("vllm_engine")  # which ignores the warnings of its import
def test_a_greedy_request_has_one_id_to_choose_from_where_vllm_tells_masks_and_refuses_a_temperature_of_0():
    from penstock.producers.engines.vllm import sampling_params

    for masked, greedy in ((True, (1.0, 1)), (False, (0.0, 0))):
        params = sampling_params(SamplingSettings(temperature=0.0), 1, masked=masked)
        assert (params.temperature, params.top_k) == greedy
        params = sampling_params(SamplingSettings(temperature=0.7, top_k=20, top_p=0.9), 4, masked=masked)
        assert (params.temperature, params.top_k, params.top_p) == (0.7, 20, 0.9)
