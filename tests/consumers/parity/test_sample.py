"""The checked tokens, those left out with a note, and input that cannot be checked."""

import shutil
from collections.abc import Callable

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from parity_bench import COLD, ParityBench, groups_of, prompts
from penstock.consumers.parity.replay import PolicyStore, as_labelled
from penstock.consumers.parity.report import ParityError
from penstock.consumers.parity.sample import evenly, read_sample
from penstock.schemas.policy import UNKNOWN_VERSION
from penstock.schemas.rollout import RolloutGroup, Segment
from training_groups import configuration, group_of, segment, tiny_model


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> ParityBench:
    return ParityBench.make(tmp_path_factory.mktemp("bench"))


@pytest.fixture(scope="module")
def groups(bench: ParityBench) -> list[RolloutGroup]:
    engine = bench.engine()
    answers = engine.generate(prompts(4, 6), 4, 8, sampling=COLD)
    return groups_of(answers + engine.generate(prompts(4, 6, 1), 4, 8, version=1, updates={4: 2}, sampling=COLD))


def read(*segments: Segment, has: Callable[[int], bool] = lambda version: version >= 0, max_tokens=None):
    groups = [group_of(n, [[each]], [0.0]) for n, each in enumerate(segments, 1)]
    return read_sample(groups, 23, has, max_tokens)


def test_a_row_holds_what_the_engine_saw_of_one_request() -> None:
    (row,) = read(segment([1, 2, 3, 4, 5, 6], [(2, 5)], [7, 7, 8])).rows
    assert row.token_ids.tolist() == [1, 2, 3, 4, 5]
    assert (row.sampled.tolist(), row.versions.tolist(), row.is_mixed) == ([2, 3, 4], [7, 7, 8], True)
    assert as_labelled(row).spans == ((7, 0, 3), (8, 3, 4))

    ids, runs = [1, 2, 3, 4, 5, 6, 7], [(2, 4), (5, 7)]
    (row,) = read(segment(ids, runs, [7, 7, 7, 7])).rows
    assert row.sampled.tolist() == [2, 3, 5, 6], "turns of one policy are one row"
    first, second = read(segment(ids, runs, [7, 7, 7, 8])).rows
    assert (first.token_ids.tolist(), first.versions.tolist()) == ([1, 2, 3, 4], [7, 7])
    assert (second.token_ids.tolist(), second.versions.tolist()) == (ids, [7, 8])
    assert (second.sampled.tolist(), second.before) == ([5, 6], 2)
    assert as_labelled(second).spans == ((7, 0, 5), (8, 5, 6)), "it computes the first turn's answer again"

    parts = [segment([1, 2, 3], [(1, 3)], [7, 7]), segment([1, 2, 3, 4, 5], [(4, 5)], [7])]
    sample = read_sample([group_of(1, [parts], [0.0])], 23, lambda version: True)
    assert sample.positions.tolist() == [0, 1, 2]
    assert (sample.num_rollouts, sample.num_groups, sample.num_tokens) == (1, 1, 3)


def test_rows_that_cannot_be_checked_are_left_out_and_counted() -> None:
    right = segment([1, 2, 3], [(1, 3)], [7, 7])
    sample = read(segment([1, 2, 3], [(1, 3)], [UNKNOWN_VERSION, 7]), right)
    assert (sample.num_tokens, sample.notes) == (2, ("1 rows left out: sampled by an unknown policy (version -1)",))
    sample = read(segment([1, 2, 3], [(1, 3)], [6, 7]), right, has=lambda version: version == 7)
    assert sample.num_tokens == 2
    assert "weights of version 6 are gone; a larger weights.keep_versions keeps them" in sample.notes[0]
    sample = read(*[segment([n, 2, 3], [(1, 3)], [7, 7]) for n in range(20)], max_tokens=10)
    assert sample.num_tokens == 10 and "5 of 20 groups checked" in sample.notes[0]
    assert np.ptp([row.group for row in sample.rows]) >= 12, "spread evenly"
    assert (evenly([5, 5, 5], None), evenly([50], 10)) == ([0, 1, 2], [0])


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([], "no rollout groups"),
        ([group_of(1, [[segment([1, 2], [], [])]], [0.0])], "1 rollout groups without a sampled token"),
        ([group_of(1, [[segment([1, 2], [(1, 2)], [-1])]], [0.0])], "no row can be checked: .* version_spans"),
        ([group_of(1, [[segment([1, 2], [(1, 2)], [7], [0.0])]], [0.0])], "every behavior_logprob is 0"),
        ([group_of(4, [[segment([1, 2], [(1, 2)], [7], [float("nan")])]], [0.0])], "group 4: .* not finite"),
        ([group_of(4, [[segment([1, 23], [(1, 2)], [7])]], [0.0])], "group 4: token id 23, .* vocabulary of 23"),
    ],
)
def test_what_holds_nothing_to_compare_is_an_error_that_says_what_is_missing(groups, message) -> None:
    with pytest.raises(ParityError, match=message):
        read_sample(groups, 23, lambda version: version >= 0)


def test_weights_that_are_gone_or_wrong_are_named(bench, groups, tmp_path) -> None:
    tiny_model(tmp_path / "other", vocab_size=48, hidden_size=32)
    kept = {name: w for name, w in load_file(bench.files[1]).items() if "layers.1.mlp" not in name}
    save_file(kept, tmp_path / "part.safetensors")
    (tmp_path / "junk.safetensors").write_bytes(b"nothing of the kind")
    for file, message in {
        "other/model.safetensors": r"the weights of version 1 in .* are not those of model\.path",
        "part.safetensors": "the weights of version 1 .* lacks the weights",
        "junk.safetensors": "the weights of version 1 in .* are not those of",
    }.items():
        with pytest.raises(ParityError, match=message):
            bench.check(groups, weights={**bench.files, 1: tmp_path / file}.get)
    with pytest.raises(ParityError, match=r"every policy that the rollouts name are gone: version 0, 1, 2; .*keep_ver"):
        bench.check(groups, weights=lambda version: None)
    report = bench.check(groups, weights=lambda version: bench.files[version] if version != 2 else None)
    assert (report.verdict.status, report.num_groups, report.versions) == ("parity", 4, (0,))
    assert any("16 rows left out: weights of version 2 are gone" in note for note in report.notes)

    file = tmp_path / "v1.safetensors"
    shutil.copy(bench.files[1], file)
    policies = PolicyStore(configuration(bench.folder), {1: file}.get, torch.device("cpu"))
    assert policies.has(1)
    file.unlink()
    with pytest.raises(ParityError, match=r"version 1 were deleted during the check .*weights\.keep_versions"):
        policies.model(1)


def test_a_handful_of_tokens_is_unclear_and_settings_off_the_recipe_are_noted(bench, groups) -> None:
    changed = [
        msgspec.structs.replace(
            group, fingerprint=msgspec.structs.replace(group.fingerprint, prefix_caching=True, head_dtype="bfloat16")
        )
        for group in groups
    ]
    notes = "\n".join(bench.check([*changed, *groups]).notes)
    assert "prefix_caching = true" in notes and "head_dtype = 'bfloat16'" in notes
    assert "2 different engine fingerprints" in notes
    report = bench.check(groups_of(bench.engine().generate(prompts(1, 6), 2, 4, sampling=COLD)))
    assert (report.verdict.status, report.verdict.cause) == ("unclear", "too few tokens")
