"""The checked tokens, those left out with a note, and input that cannot be checked."""

import shutil

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from parity_bench import COLD, ParityBench, groups_of, prompts, with_logprobs
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
    return groups_of(
        [
            *engine.generate(prompts(4, 6), 4, 8, sampling=COLD),
            *engine.generate(prompts(4, 6, 1), 4, 8, version=1, updates={4: 2}, sampling=COLD),
        ]
    )


def read(*segments: Segment, has=lambda version: version >= 0, max_tokens=None):
    groups = [group_of(n, [[each]], [0.0]) for n, each in enumerate(segments, 1)]
    return read_sample(groups, 23, has, max_tokens)


def test_a_row_holds_what_the_engine_saw_of_one_request() -> None:
    sample = read(segment([1, 2, 3, 4, 5, 6], [(2, 5)], [7, 7, 8]))
    (row,) = sample.rows
    assert row.token_ids.tolist() == [1, 2, 3, 4, 5]
    assert (row.sampled.tolist(), row.versions.tolist(), row.is_mixed) == ([2, 3, 4], [7, 7, 8], True)
    assert as_labelled(row).spans == ((7, 0, 3), (8, 3, 4))


def test_turns_of_one_policy_are_one_row_and_those_of_several_are_a_row_each() -> None:
    ids, runs = [1, 2, 3, 4, 5, 6, 7], [(2, 4), (5, 7)]
    same, mixed = segment(ids, runs, [7, 7, 7, 7]), segment(ids, runs, [7, 7, 7, 8])
    (row,) = read(same).rows
    assert row.sampled.tolist() == [2, 3, 5, 6]
    first, second = read(mixed).rows
    assert (first.token_ids.tolist(), first.versions.tolist()) == ([1, 2, 3, 4], [7, 7])
    assert (second.token_ids.tolist(), second.versions.tolist()) == (ids, [7, 8])
    assert (second.sampled.tolist(), second.before) == ([5, 6], 2)
    # The second turn's request computes the first one's answer again.
    assert as_labelled(second).spans == ((7, 0, 5), (8, 5, 6))


def test_positions_count_on_over_the_segments_of_a_rollout() -> None:
    parts = [segment([1, 2, 3], [(1, 3)], [7, 7]), segment([1, 2, 3, 4, 5], [(4, 5)], [7])]
    sample = read_sample([group_of(1, [parts], [0.0])], 23, lambda version: True)
    assert sample.positions.tolist() == [0, 1, 2]
    assert (sample.num_rollouts, sample.num_groups, sample.num_tokens) == (1, 1, 3)


def test_rows_of_unknown_policies_are_left_out_and_counted() -> None:
    sample = read(segment([1, 2, 3], [(1, 3)], [UNKNOWN_VERSION, 7]), segment([1, 2, 3], [(1, 3)], [7, 7]))
    assert sample.num_tokens == 2
    assert sample.notes == ("1 rows left out: sampled by an unknown policy (version -1)",)


def test_rows_whose_weights_are_gone_are_left_out_and_counted() -> None:
    sample = read(
        segment([1, 2, 3], [(1, 3)], [6, 7]), segment([1, 2, 3], [(1, 3)], [7, 7]), has=lambda version: version == 7
    )
    assert sample.num_tokens == 2
    (note,) = sample.notes
    assert "weights of version 6 are gone; a larger weights.keep_versions keeps them" in note


def test_at_most_so_many_tokens_are_looked_at_in_groups_spread_evenly() -> None:
    sample = read(*[segment([n, 2, 3], [(1, 3)], [7, 7]) for n in range(20)], max_tokens=10)
    assert sample.num_tokens == 10
    assert np.ptp([row.group for row in sample.rows]) >= 12
    assert "5 of 20 groups checked" in sample.notes[0]


def test_evenly_keeps_to_the_budget_but_takes_one_at_least() -> None:
    assert evenly([5, 5, 5], None) == [0, 1, 2]
    assert evenly([50], 10) == [0]
    for budget in (7, 20, 33):
        sizes = [1 + n % 5 for n in range(40)]
        chosen = evenly(sizes, budget)
        assert 0.7 * budget <= sum(sizes[n] for n in chosen) <= budget


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([], "no rollout groups"),
        ([group_of(1, [[segment([1, 2], [], [])]], [0.0])], "1 rollout groups without a sampled token"),
        ([group_of(1, [[segment([1, 2], [(1, 2)], [-1])]], [0.0])], "no row can be checked: .* version_spans"),
        ([group_of(1, [[segment([1, 2], [(1, 2)], [7], [0.0])]], [0.0])], "every behavior_logprob is 0"),
        ([group_of(4, [[segment([1, 2], [(1, 2)], [7], [float("nan")])]], [0.0])], "group 4: .* not finite"),
        ([group_of(4, [[segment([1, 2], [(1, 2)], [7], [])]], [0.0])], "group 4: 0 behavior_logprobs for 1 sampled"),
        ([group_of(4, [[segment([1, 23], [(1, 2)], [7])]], [0.0])], "group 4: token id 23, .* vocabulary of 23"),
    ],
)
def test_what_holds_nothing_to_compare_is_an_error_that_says_what_is_missing(groups, message) -> None:
    with pytest.raises(ParityError, match=message):
        read_sample(groups, 23, lambda version: version >= 0)


def test_weights_that_are_all_gone_are_named_with_the_setting_that_keeps_them(bench, groups) -> None:
    with pytest.raises(ParityError, match=r"every policy that the rollouts name are gone: version 0, 1, 2; .*keep_ver"):
        bench.check(groups, weights=lambda version: None)


def test_some_weights_gone_leave_the_rest_to_check(bench, groups) -> None:
    report = bench.check(groups, weights=lambda version: bench.files[version] if version != 2 else None)
    assert (report.verdict.status, report.num_groups, report.versions) == ("parity", 4, (0,))
    assert any("16 rows left out: weights of version 2 are gone" in note for note in report.notes)


def test_weights_of_another_model_are_an_error(bench, groups, tmp_path) -> None:
    tiny_model(tmp_path / "other", vocab_size=48, hidden_size=32)
    with pytest.raises(ParityError, match=r"the weights of version 1 in .* are not those of model\.path"):
        bench.check(groups, weights={**bench.files, 1: tmp_path / "other" / "model.safetensors"}.get)


def test_weights_that_lack_a_tensor_are_an_error(bench, groups, tmp_path) -> None:
    state = load_file(bench.files[1])
    save_file({name: w for name, w in state.items() if "layers.1.mlp" not in name}, tmp_path / "part.safetensors")
    with pytest.raises(ParityError, match=r"the weights of version 1 .* lacks the weights"):
        bench.check(groups, weights={**bench.files, 1: tmp_path / "part.safetensors"}.get)


def test_weights_that_are_no_file_of_weights_are_an_error(bench, groups, tmp_path) -> None:
    (tmp_path / "junk.safetensors").write_bytes(b"nothing of the kind")
    with pytest.raises(ParityError, match="the weights of version 1"):
        bench.check(groups, weights={**bench.files, 1: tmp_path / "junk.safetensors"}.get)


def test_weights_that_go_during_the_check_are_an_error_that_says_so(bench, tmp_path) -> None:
    file = tmp_path / "v1.safetensors"
    shutil.copy(bench.files[1], file)
    policies = PolicyStore(configuration(bench.folder), {1: file}.get, torch.device("cpu"))
    assert policies.has(1)
    file.unlink()
    with pytest.raises(ParityError, match=r"version 1 were deleted during the check .*weights\.keep_versions"):
        policies.model(1)


def test_ids_outside_the_models_vocabulary_are_an_error(bench, tmp_path, groups) -> None:
    tiny_model(tmp_path / "small")
    small = ParityBench(tmp_path / "small", bench.files)
    with pytest.raises(ParityError, match=r"token id \d+, but model\.path has a vocabulary of 23"):
        small.check(groups)


def test_a_handful_of_tokens_is_unclear(bench) -> None:
    groups = groups_of(bench.engine().generate(prompts(1, 6), 2, 4, sampling=COLD))
    report = bench.check(groups)
    assert (report.verdict.status, report.verdict.cause) == ("unclear", "too few tokens")


def test_settings_off_the_recipe_are_noted(bench, groups) -> None:
    changed = [
        msgspec.structs.replace(
            group, fingerprint=msgspec.structs.replace(group.fingerprint, prefix_caching=True, head_dtype="bfloat16")
        )
        for group in groups
    ]
    notes = bench.check([*changed, *groups]).notes
    assert any("prefix_caching = true" in note for note in notes)
    assert any("head_dtype = 'bfloat16'" in note for note in notes)
    assert any("2 different engine fingerprints" in note for note in notes)


def test_values_of_a_unit_that_is_none_do_not_fit_anything(bench, groups) -> None:
    nonsense = with_logprobs(groups, lambda siblings: [[-3.0 - n for n, _ in enumerate(own)] for own in siblings])
    report = bench.check(nonsense)
    assert (report.verdict.status, report.verdict.cause) == ("mismatch", "unexplained")
    assert "layer by layer" in report.verdict.advice


def test_a_report_survives_json_whatever_was_found(bench, groups) -> None:
    for found in (groups, with_logprobs(groups, lambda siblings: [[-1.0] * len(own) for own in siblings])):
        report = bench.check(found)
        assert msgspec.json.decode(msgspec.json.encode(report), type=type(report)) == report
