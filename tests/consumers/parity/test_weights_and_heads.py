"""Other weights, labels, keys and values, and heads: each fault is named."""

import msgspec
import pytest
import torch
import torch.nn.functional as F

import penstock.consumers.learning.loss.scoring
from parity_bench import COLD, ParityBench, groups_of, prompts, with_logprobs
from penstock.consumers.parity import versions
from penstock.consumers.parity.replay import Replay, ReplayPlan
from penstock.consumers.parity.report import ParityReport
from transformers_engine import spans


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> ParityBench:
    return ParityBench.make(tmp_path_factory.mktemp("bench"))


@pytest.fixture(scope="module")
def low(tmp_path_factory: pytest.TempPathFactory) -> ParityBench:
    """A body in bfloat16, which is noisy."""
    return ParityBench.make(tmp_path_factory.mktemp("low"), dtype="bfloat16")


def assert_named(report: ParityReport, cause: str, setting: str) -> None:
    assert (report.verdict.status, report.verdict.cause) == ("mismatch", cause), [report.verdict, *report.hypotheses]
    assert setting in report.verdict.advice


def labelled(answers, change):
    """The versions of each completion as `change` makes them."""
    for answer in answers:
        for own in answer.siblings:
            own.versions = change(own.versions)
    return answers


def test_an_update_that_was_skipped_is_named(bench) -> None:
    engine = bench.engine()
    right = engine.generate(prompts(6, 5), 4, 16, sampling=COLD)
    # The label moves on from 0 to 1, the weights stay.
    skipped = labelled(engine.generate(prompts(6, 7, 1), 4, 16, sampling=COLD, seed=1), lambda v: [1] * len(v))
    across = labelled(
        engine.generate(prompts(6, 7, 2), 4, 16, sampling=COLD, seed=2, updates={9: 2}),
        lambda v: [1 if n >= 4 and own == 0 else own for n, own in enumerate(v)],
    )
    report = bench.check(groups_of([*right, *skipped, *across]))
    assert_named(report, "weights-1", "before its version is announced")
    assert "labelled 1, sampled by 0" in report.verdict.sentence


def test_updates_that_land_one_version_late_are_named(bench) -> None:
    engine = bench.engine()
    answers = [
        *labelled(engine.generate(prompts(6, 5), 4, 16, version=1, sampling=COLD), lambda v: [2] * len(v)),
        *labelled(engine.generate(prompts(6, 5, 1), 4, 16, version=2, sampling=COLD), lambda v: [3] * len(v)),
    ]
    assert_named(bench.check(groups_of(answers)), "weights-1", "label is set in the same step")


def test_weights_that_are_ahead_of_their_label_are_named(bench) -> None:
    answers = bench.engine().generate(prompts(6, 5), 4, 16, version=2, sampling=COLD)
    assert_named(bench.check(groups_of(labelled(answers, lambda v: [1] * len(v)))), "weights+1", "weights")


def test_weights_two_versions_old_are_named(bench) -> None:
    answers = bench.engine().generate(prompts(6, 5), 4, 16, version=1, sampling=COLD)
    assert_named(bench.check(groups_of(labelled(answers, lambda v: [3] * len(v)))), "weights-2", "weights")


@pytest.mark.parametrize("k", [1, 2, 5])
@pytest.mark.parametrize("side", ["late", "early"])
def test_labels_that_move_some_tokens_off_are_named(bench, k, side) -> None:
    def moved(versions: list[int]) -> list[int]:
        return [versions[0]] * k + versions[:-k] if side == "late" else versions[k:] + [versions[-1]] * k

    engine = bench.engine()
    answers = labelled(engine.generate(prompts(6, 5), 4, 16, updates={6: 1, 10: 2}, sampling=COLD), moved)
    answers += engine.generate(prompts(6, 5, 1), 4, 16, version=1, sampling=COLD)
    report = bench.check(groups_of(answers))
    assert_named(report, f"label-{side}", "vLLM: weight_versions")
    assert f"by {k} token" in report.verdict.sentence


def test_a_stale_prefix_is_named(bench) -> None:
    engine = bench.engine()
    right = engine.generate(prompts(6, 40), 4, 12, version=2, sampling=COLD)
    stale = engine.generate(prompts(6, 40, 1), 4, 12, version=2, stale=(1, 32), sampling=COLD)
    report = bench.check(groups_of([*right, *stale]))
    assert_named(report, "stale-prefix", "engine.prefix_caching = false")


def test_a_stale_prefix_that_only_some_prompts_share_is_named(bench) -> None:
    engine = bench.engine()
    pairs = [shared + end for shared in prompts(4, 32, 1) for end in prompts(2, 8, shared[0])]
    right = engine.generate(prompts(6, 40), 4, 12, version=2, sampling=COLD)
    stale = engine.generate(pairs, 4, 12, version=2, stale=(1, 32), sampling=COLD)
    report = bench.check(groups_of([*right, *stale]))
    assert_named(report, "stale-prefix", "engine.prefix_caching = false")


def test_older_prefixes_are_tried_on_few_tokens_and_seldom_where_nothing_explains(bench, monkeypatch) -> None:
    monkeypatch.setattr(versions, "STALE_TOKENS", 600)
    replayed: list[list[ReplayPlan]] = []
    logprobs = Replay.logprobs

    def recorded(replay, plans):
        plans = list(plans)
        replayed.append([plan for plan in plans if plan.spans[0][2] < plan.row.start])
        return logprobs(replay, plans)

    monkeypatch.setattr(Replay, "logprobs", recorded)
    answers = bench.engine().generate(prompts(12, 130), 2, 12, version=3, sampling=COLD)
    groups = with_logprobs(
        groups_of(answers), lambda siblings: [[b - 0.3 * n % 0.7 for n, b in enumerate(own)] for own in siblings]
    )
    assert bench.check(groups).verdict.cause == "unexplained"
    trials = [plans for plans in replayed if plans]
    # Blocks of 16, 32, 64 and 128 tokens, three policies back; these prompts share nothing, and 128 is whole for all.
    assert len(trials) == 3
    assert all(sum(len(plan.row.token_ids) for plan in plans) <= 600 for plans in trials)


def test_keys_and_values_computed_anew_are_named(bench) -> None:
    answers = bench.engine().generate(prompts(6, 8), 4, 16, updates={6: 1, 11: 2}, clear=True, sampling=COLD)
    assert_named(bench.check(groups_of(answers)), "recomputed-kv", "clear_cache=False")


def bfloat16_logprobs(hidden, weight, targets, temperature=1.0, **_):
    scale = torch.where(torch.as_tensor(temperature) < 1e-5, 1.0, temperature)
    logprobs = F.linear(hidden.bfloat16(), weight.bfloat16()).float().div(scale[:, None]).log_softmax(-1)
    return logprobs.gather(1, targets[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_bfloat16_head_in_the_trainer_only_is_named(bench, low, dtype, monkeypatch) -> None:
    here = bench if dtype == "float32" else low
    groups = groups_of(here.engine().generate(prompts(12, 6), 4, 16, sampling=COLD))
    monkeypatch.setattr(penstock.consumers.learning.loss.scoring, "selected_logprobs", bfloat16_logprobs)
    assert_named(here.check(groups), "trainer-head", "penstock.consumers.learning.model.head.selected_logprobs")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_bfloat16_head_in_the_engine_only_is_named(bench, low, dtype) -> None:
    here = bench if dtype == "float32" else low
    groups = groups_of(here.engine(head="bfloat16").generate(prompts(24, 6), 8, 12, sampling=COLD))
    assert_named(here.check(groups), "engine-head", 'engine.head_dtype = "float32"')


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_with_nothing_wrong_it_is_parity(tmp_path, tied, dtype, seed) -> None:
    here = ParityBench.make(tmp_path, dtype=dtype, tied=tied, seed=seed)
    engine = here.engine()
    answers = engine.generate(prompts(12, 6, seed), 8, 12, sampling=COLD, seed=seed)
    answers += engine.generate(prompts(6, 9, seed), 4, 16, version=1, updates={3: 2, 8: 3}, sampling=COLD)
    report = here.check(groups_of(answers))
    assert report.verdict.status == "parity", [report.verdict, *report.hypotheses]


def test_a_swapped_pair_of_siblings_is_seen_under_body_noise(low) -> None:
    groups = groups_of(low.engine().generate(prompts(24, 6), 4, 12, sampling=COLD))
    first, second, *rest = groups[5].rollouts
    (one,), (two,) = first.segments, second.segments
    swapped = (
        msgspec.structs.replace(
            first, segments=(msgspec.structs.replace(one, behavior_logprobs=two.behavior_logprobs),)
        ),
        msgspec.structs.replace(
            second, segments=(msgspec.structs.replace(two, behavior_logprobs=one.behavior_logprobs),)
        ),
    )
    groups[5] = msgspec.structs.replace(groups[5], rollouts=(*swapped, *rest))
    assert_named(low.check(groups), "siblings", "by its index")


def test_spans_of_the_double_are_run_lengths() -> None:
    assert [tuple(msgspec.to_builtins(span)) for span in spans([1, 1, 2], 5)] == [(1, 5, 7), (2, 7, 8)]
