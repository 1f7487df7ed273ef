"""The check is quick and small: a thousand rollouts in seconds, and never the logits of more than a chunk."""

import pytest

from parity_bench import COLD, ParityBench, groups_of, prompts, with_logprobs
from penstock.consumers.parity import conventions
from penstock.deploy.demo.make_model import ModelRecipe, make_model
from transformers_engine import TransformersEngine, publish_perturbed


def test_a_thousand_rollouts_of_the_demo_model_take_seconds(tmp_path) -> None:
    make_model(tmp_path / "demo", ModelRecipe(train=False), progress=lambda _: None)
    files = publish_perturbed(tmp_path / "weights", tmp_path / "demo", range(5))
    engine = TransformersEngine(tmp_path / "demo", files)
    answers = engine.generate(prompts(65, 6), 8, 5, version=2, sampling=COLD)
    answers += engine.generate(prompts(60, 6, 1), 8, 5, version=2, updates={2: 3, 4: 4}, sampling=COLD)
    bench = ParityBench(tmp_path / "demo", files)
    report = bench.check(groups_of(answers))
    assert (report.verdict.status, report.num_rollouts, report.num_tokens) == ("parity", 1000, 5000)
    assert report.seconds < 30
    for answer in answers:
        for own in answer.siblings:
            own.versions = [version - 1 for version in own.versions]
    wrong = bench.check(groups_of(answers))
    assert wrong.verdict.cause == "weights+1"
    assert wrong.seconds < 60


@pytest.fixture
def logits_held(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    held: list[int] = []
    computed = conventions.plain_logits

    def plain_logits(*arguments):
        logits = computed(*arguments)
        held.append(logits.numel())
        return logits

    monkeypatch.setattr(conventions, "plain_logits", plain_logits)
    return held


def test_logits_exist_for_a_chunk_at_a_time_and_chunks_change_nothing(tmp_path, logits_held, monkeypatch) -> None:
    bench = ParityBench.make(tmp_path)
    groups = groups_of(bench.engine().generate(prompts(8, 6), 4, 16, sampling=COLD))
    whole = bench.check(groups)
    assert max(logits_held) == 8 * 4 * 16 * 48
    logits_held.clear()
    monkeypatch.setattr(conventions, "CHUNK_ELEMENTS", 1000)
    monkeypatch.setattr(conventions, "TILE_ELEMENTS", 64 * 7)
    parts = bench.check(groups)
    assert max(logits_held) <= 1000
    for one, other in zip(whole.hypotheses, parts.hypotheses, strict=True):
        assert one.name == other.name
        assert other.gap.mean == pytest.approx(one.gap.mean, rel=1e-6)


def test_a_large_sample_is_read_in_part_and_says_so(tmp_path, logits_held, monkeypatch) -> None:
    bench = ParityBench.make(tmp_path)
    monkeypatch.setattr("penstock.consumers.parity.semantics.MAX_TOKENS", 200)
    groups = groups_of(bench.engine().generate(prompts(12, 6), 4, 16, sampling=COLD))
    groups[:1] = with_logprobs(groups[:1], lambda siblings: [[b - 1.0 for b in own] for own in siblings])
    report = bench.check(groups)
    # Once as it is, once by a bfloat16 head, once for the fit of a temperature, once at that temperature.
    assert sum(logits_held) <= 4 * 200 * 48
    assert any("tried on 192 of 768 tokens" in note for note in report.notes)
    # The one group that is off is among the few that are read.
    raw = next(each for each in report.hypotheses if each.name == "raw")
    assert raw.gap.num_tokens == 192
    assert report.verdict.status == "mismatch"
