"""Finished outputs, packed and held against themselves."""

from types import SimpleNamespace

import pytest

from penstock.producers.engines.completions import pack
from penstock.producers.interfaces import EngineError
from penstock.schemas.rollout import VersionSpan, unpack_floats, unpack_ids


def output(
    token_ids=(7, 8, 9), logprobs=(-0.5, -1.5, -2.0), logprob_ids=None, spans=((4, 0, 2), (5, 2, 3)), reason="stop"
):
    versions = [SimpleNamespace(version=str(version), start=start, end=end) for version, start, end in spans]
    flat = SimpleNamespace(token_ids=list(token_ids if logprob_ids is None else logprob_ids), logprobs=list(logprobs))
    return SimpleNamespace(token_ids=list(token_ids), logprobs=flat, weight_versions=versions, finish_reason=reason)


def test_ids_logprobs_and_versions_survive_packing():
    completion = pack(output(), "r")
    assert list(unpack_ids(completion.token_ids)) == [7, 8, 9]
    assert list(unpack_floats(completion.behavior_logprobs)) == [-0.5, -1.5, -2.0]
    assert completion.version_spans == (VersionSpan(4, 0, 2), VersionSpan(5, 2, 3))
    assert completion.finish_reason == "stop"


@pytest.mark.parametrize(
    "spans", [(), ((4, 0, 2),), ((4, 0, 1), (5, 2, 3)), ((4, 1, 3),), ((4, 0, 0), (5, 0, 3)), ((4, 0, 4),)]
)
def test_version_spans_that_do_not_tile_the_tokens_are_an_error(spans):
    with pytest.raises(EngineError, match="request r: version spans"):
        pack(output(spans=spans), "r")


@pytest.mark.parametrize("ids", [(7, 8), (7, 8, 8), (7, 1, 8, 1, 9, 1)])
def test_logprobs_of_other_tokens_are_an_error(ids):
    with pytest.raises(EngineError, match="request r: 3 tokens, but logprobs of"):
        pack(output(logprob_ids=ids), "r")


def test_an_aborted_output_keeps_what_was_sampled_of_it():
    completion = pack(output(reason="abort"), "r")
    assert completion.finish_reason == "abort" and list(unpack_ids(completion.token_ids)) == [7, 8, 9]
    assert pack(output((), (), (), (), "abort"), "r").token_ids == b""
