"""Each fault of an engine, its labels or its record is named by its cause; where nothing is wrong nothing is found."""

import math
import random
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
import pytest
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from parity_bench import COLD, ParityBench, groups_of, prompts, with_logprobs, with_sampling
from penstock.consumers.parity import conventions
from penstock.consumers.parity.report import ParityError, ParityReport
from penstock.schemas.rollout import RolloutGroup, SamplingSettings
from transformers_engine import TransformersCompletion, group_of

FLAT = SamplingSettings(temperature=1.0, max_tokens=16)
TRUNCATED = SamplingSettings(temperature=0.9, top_p=0.8, top_k=20, max_tokens=16)
PENALISED = SamplingSettings(
    temperature=0.9, max_tokens=16, presence_penalty=0.5, frequency_penalty=0.25, repetition_penalty=1.3
)
Groups = list[RolloutGroup]
Versions = list[int]


@pytest.fixture(scope="module")
def benches(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ParityBench]:
    """By the type of the body; those of 16 bits are noisy."""
    return {
        dtype: ParityBench.make(tmp_path_factory.mktemp(dtype), dtype=dtype, tied=dtype == "bfloat16")
        for dtype in ("float32", "bfloat16", "float16")
    }


def sampled(bench: ParityBench, sampling: SamplingSettings = COLD, count: int = 12, **settings: Any) -> Groups:
    """Samples 4 siblings of 16 tokens to each of `count` prompts."""
    return groups_of(bench.engine().generate(prompts(count, 6), 4, 16, sampling=sampling, **settings), sampling)


def reported(
    bench: ParityBench,
    convention: Callable[[Tensor, SamplingSettings, Tensor], Tensor],
    sampling: SamplingSettings = COLD,
    *,
    count: int = 12,
    with_masks: bool = False,
) -> Groups:
    """Samples from an engine that reports logprobs of another convention."""
    engine = bench.engine()
    engine.convention = convention
    answers = engine.generate(prompts(count, 6), 4, 16, sampling=sampling)
    return groups_of(answers, sampling, with_masks=with_masks)


def raw(logits: Tensor, sampling: SamplingSettings, drawn: Tensor) -> Tensor:
    return logits.log_softmax(-1)


def whole_vocabulary(logits: Tensor, sampling: SamplingSettings, drawn: Tensor) -> Tensor:
    return (logits / sampling.temperature).log_softmax(-1)


def each_sibling(change: Callable[[list[float]], list[float]], bench: ParityBench) -> Groups:
    return with_logprobs(sampled(bench, updates={9: 1}), lambda siblings: list(map(change, siblings)))


def one_swap(bench: ParityBench) -> Groups:
    groups = sampled(bench)
    return with_logprobs(groups[:1], lambda siblings: [siblings[1], siblings[0], *siblings[2:]]) + groups[1:]


def noisy(bench: ParityBench) -> Groups:
    draw = random.Random(0)
    return with_logprobs(
        groups_of(bench.engine().generate(prompts(24, 6), 8, 8, sampling=COLD)),
        lambda siblings: [[value + 3e-3 * draw.gauss(0, 1) for value in sibling] for sibling in siblings],
    )


def labelled(change: Callable[[Versions], Versions], bench: ParityBench, **settings: Any) -> Groups:
    """Labels the tokens as `change` makes of their true versions, beside groups with labels that are right."""
    engine = bench.engine()
    answers = engine.generate(prompts(6, 5), 4, 16, sampling=COLD, **settings)
    for answer in answers:
        for sibling in answer.siblings:
            sibling.versions = change(sibling.versions)
    return groups_of(answers + engine.generate(prompts(6, 5, 1), 4, 16, sampling=COLD))


def late(num_tokens: int, true: Versions) -> Versions:
    return true[:1] * num_tokens + true[:-num_tokens]


def early(num_tokens: int, true: Versions) -> Versions:
    return true[num_tokens:] + true[-1:] * num_tokens


def stale_prefix(bench: ParityBench, *, shared: bool) -> Groups:
    engine = bench.engine()
    asked = prompts(6, 40, 1)
    if shared:  # by pairs of prompts
        asked = [start + end for start in prompts(4, 32, 1) for end in prompts(2, 8, start[0])]
    right = engine.generate(prompts(6, 40), 4, 12, version=2, sampling=COLD)
    return groups_of(right + engine.generate(asked, 4, 12, version=2, stale=(1, 32), sampling=COLD))


def another_norm(bench: ParityBench) -> Groups:
    engine = bench.engine()
    for layer in engine.model.model.layers:
        layer.input_layernorm.variance_epsilon = 3.0
    return groups_of(engine.generate(prompts(12, 6), 4, 16, sampling=COLD))


def by_16_bit_head(bench: ParityBench) -> Groups:
    return groups_of(
        bench.engine(head="float16" if bench.dtype == "float16" else "bfloat16").generate(
            prompts(24, 6), 8, 12, sampling=COLD
        )
    )


FAULTS: list[tuple[str, Callable[[ParityBench], Groups], str]] = [
    ("raw", lambda bench: reported(bench, raw, count=40), 'engine.logprobs_mode = "processed_logprobs"'),
    (
        "temperature",
        lambda bench: with_sampling(sampled(bench, FLAT, 60), temperature=0.7),
        "1 where 0.7 is recorded, and the tokens were drawn there",
    ),
    (
        "temperature",
        lambda bench: with_sampling(sampled(bench, COLD, 40), temperature=1.2),
        "0.7 where 1.2 is recorded",
    ),
    ("log2", partial(each_sibling, lambda own: [b / math.log(2) for b in own]), "multiply by ln 2"),
    ("log10", partial(each_sibling, lambda own: [b / math.log(10) for b in own]), "multiply by ln 10"),
    ("probability", partial(each_sibling, lambda own: [math.exp(b) for b in own]), "natural logarithms"),
    ("rounded", partial(each_sibling, lambda own: torch.tensor(own).bfloat16().tolist()), "keep logprobs in float32"),
    ("rounded", partial(each_sibling, lambda own: torch.tensor(own).half().tolist()), "keep logprobs in float32"),
    ("shifted+1", partial(each_sibling, lambda own: [-1.0, *own[:-1]]), "align behavior_logprobs"),
    ("shifted-1", partial(each_sibling, lambda own: [*own[1:], -1.0]), "align behavior_logprobs"),
    ("siblings", one_swap, "by its index in the request's outputs"),
    ("kept-support", lambda bench: sampled(bench, TRUNCATED), "record the sampling_mask"),
    ("whole-vocabulary", lambda bench: reported(bench, whole_vocabulary, TRUNCATED), "sampling_mask"),
    ("whole-vocabulary", lambda bench: reported(bench, whole_vocabulary, TRUNCATED, with_masks=True), "sampling_mask"),
    ("penalties", lambda bench: sampled(bench, PENALISED), "repetition_penalty = 1"),
    ("without-penalties", lambda bench: reported(bench, whole_vocabulary, PENALISED), "repetition_penalty = 1"),
    (
        "sampling",
        lambda bench: with_sampling(
            reported(bench, raw, msgspec.structs.replace(FLAT, top_p=0.6), count=60), top_p=1.0
        ),
        "sampling settings that the record lacks",
    ),
    ("engine-spread", noisy, "batch invariance"),
    ("weights-1", partial(labelled, lambda true: [2] * len(true), version=1), "labelled 2, sampled by 1"),
    (
        "weights-1",
        partial(labelled, lambda true: [v or int(n > 3) for n, v in enumerate(true)], updates={9: 2}),
        "before its version is",
    ),
    ("weights+1", partial(labelled, lambda true: [1] * len(true), version=2), "labelled 1, sampled by 2"),
    ("weights-2", partial(labelled, lambda true: [3] * len(true), version=1), "labelled 3, sampled by 1"),
    *(
        (f"label-{moved.__name__}", partial(labelled, partial(moved, k), updates={6: 1, 10: 2}), f"by {k} token")
        for moved, k in ((late, 1), (early, 2))
    ),
    ("stale-prefix", partial(stale_prefix, shared=False), "engine.prefix_caching = false"),
    ("stale-prefix", partial(stale_prefix, shared=True), "engine.prefix_caching = false"),
    ("recomputed-kv", lambda bench: sampled(bench, updates={6: 1, 11: 2}, clear=True), "clear_cache=False"),
    ("engine-head", by_16_bit_head, 'engine.head_dtype = "float32"'),
    ("unexplained", another_norm, "compare layer by layer"),
    ("unexplained", partial(each_sibling, lambda own: [-3.0 - n for n, _ in enumerate(own)]), "compare layer by layer"),
]
"""The cause, the rollouts, and a part of the verdict: what was found, or what to set."""


def named(report: ParityReport, cause: str, part: str) -> str:
    verdict = report.verdict
    assert (verdict.status, verdict.cause) == ("mismatch", cause), [verdict, *report.hypotheses]
    assert part in verdict.sentence, verdict.sentence
    return verdict.sentence


@pytest.mark.parametrize(("cause", "fault", "part"), FAULTS, ids=[f"{n}-{row[0]}" for n, row in enumerate(FAULTS)])
def test_a_fault_is_named_with_what_to_do(benches, cause, fault, part) -> None:
    sentence = named(benches["float32"].check(fault(benches["float32"])), cause, part)
    residuals = [float(number) for number in re.findall(r"\d\.\de[+-]\d\d", sentence)]
    if len(residuals) == 2 and cause not in ("engine-spread", "rounded"):
        assert residuals[1] < 1e-5 < 1e-4 < residuals[0]


@pytest.mark.parametrize(
    ("cause", "fault", "part"),
    [row for row in FAULTS if row[0] == "siblings" or row[0] == "engine-head"],
    ids=["siblings", "engine-head"],
)
def test_a_fault_that_is_smaller_than_body_noise_is_named(benches, cause, fault, part) -> None:
    for dtype in ("bfloat16", "float16"):
        named(benches[dtype].check(fault(benches[dtype])), cause, part)


def bfloat16_logprobs(hidden, weight, targets, temperature=1.0, **_):
    logprobs = F.linear(hidden.bfloat16(), weight.bfloat16()).float().div(temperature[:, None]).log_softmax(-1)
    return logprobs.gather(1, targets[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1)


def test_a_bfloat16_head_in_the_trainer_only_is_named(benches, monkeypatch) -> None:
    monkeypatch.setattr("penstock.consumers.learning.loss.scoring.selected_logprobs", bfloat16_logprobs)
    for bench in benches.values():
        named(bench.check(sampled(bench)), "trainer-head", "penstock.consumers.learning.model.head.selected_logprobs")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("seed", [1, 2])
def test_with_nothing_wrong_it_is_parity(benches, dtype, seed) -> None:
    engine = benches[dtype].engine()
    answers = engine.generate(prompts(12, 6, seed), 8, 12, sampling=COLD, seed=seed)
    answers += engine.generate(prompts(6, 9, seed), 4, 16, version=1, updates={3: 2, 8: 3}, sampling=COLD)
    report = benches[dtype].check(groups_of(answers))
    assert report.verdict.status == "parity", [report.verdict, *report.hypotheses]
    assert (report.versions, report.num_tokens) == ((0, 1, 2, 3), 12 * 8 * 12 + 6 * 4 * 16)
    assert msgspec.json.decode(msgspec.json.encode(report), type=ParityReport) == report


def test_a_truncated_distribution_is_parity_with_the_mask(benches) -> None:
    answers = benches["float32"].engine().generate(prompts(12, 6), 4, 16, updates={7: 1}, sampling=TRUNCATED)
    report = benches["float32"].check(groups_of(answers, TRUNCATED, with_masks=True))
    assert report.verdict.status == "parity", report.verdict


def test_logits_exist_for_a_chunk_at_a_time_and_for_a_part_of_a_large_sample(benches, monkeypatch) -> None:
    held: list[int] = []
    computed = conventions.plain_logits

    def plain_logits(*arguments):
        logits = computed(*arguments)
        held.append(logits.numel())
        return logits

    monkeypatch.setattr(conventions, "plain_logits", plain_logits)
    groups = sampled(benches["float32"])
    whole = benches["float32"].check(groups)
    assert max(held) == 12 * 4 * 16 * 48
    monkeypatch.setattr(conventions, "CHUNK_ELEMENTS", 1000)
    monkeypatch.setattr(conventions, "TILE_ELEMENTS", 64 * 7)
    held.clear()
    parts = benches["float32"].check(groups)
    assert max(held) <= 1000
    for one, other in zip(whole.hypotheses, parts.hypotheses, strict=True):
        assert other.name == one.name and other.gap.mean == pytest.approx(one.gap.mean, rel=1e-6)

    monkeypatch.setattr("penstock.consumers.parity.semantics.MAX_TOKENS", 200)
    held.clear()
    groups[:1] = with_logprobs(groups[:1], lambda siblings: [[b - 1.0 for b in own] for own in siblings])
    report = benches["float32"].check(groups)
    # Once as it is, once by a bfloat16 head, once for the fit of a temperature, once at that temperature.
    assert sum(held) <= 4 * 200 * 48
    assert any("tried on 192 of 768 tokens" in note for note in report.notes)
    assert report.verdict.status == "mismatch", "the one group that is off is among the few that are read"


ALPHABET = "abcdef "
MERGES = [("a", "b"), ("c", "d"), ("ab", "cd"), ("e", "f"), ("b", "c"), ("d", "e"), (" ", "a"), ("f", "a")]


def merging_tokenizer(alphabet: str = ALPHABET) -> Any:
    """Byte-pair encoding of a few letters: many texts have several tokenizations, one of which it makes."""
    entries = [*alphabet, *("".join(pair) for pair in MERGES)]
    tokenizer = Tokenizer(models.BPE(vocab={entry: n for n, entry in enumerate(entries)}, merges=MERGES))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ids_made_again_from_text_are_named_with_the_tokenizer_that_made_them(tmp_path, dtype) -> None:
    tokenizer = merging_tokenizer()
    bench = ParityBench.make(tmp_path, dtype=dtype, vocab_size=len(tokenizer))
    draw = random.Random(0)
    texts: list[str] = []
    while len(texts) < 8:
        text = "".join(draw.choice(ALPHABET) for _ in range(14))
        if not texts or len(tokenizer.encode(text)) == len(tokenizer.encode(texts[0])):
            texts.append(text)
    answers = bench.engine().generate([tokenizer.encode(text) for text in texts], 4, 16, sampling=COLD)

    def record(change: Callable[[TransformersCompletion], TransformersCompletion]) -> Groups:
        return [
            group_of(n, replace(answer, siblings=list(map(change, answer.siblings))), COLD, text=text)
            for n, (text, answer) in enumerate(zip(texts, answers, strict=True), 1)
        ]

    right = record(lambda sibling: sibling)
    assert bench.check(right, tokenizer=tokenizer).verdict.status == "parity"
    with pytest.raises(ParityError, match="the tokenizer does not match the token ids: group 1 was asked"):
        bench.check(right, tokenizer=merging_tokenizer("fedcb a"))

    def again(sibling: TransformersCompletion) -> TransformersCompletion:
        ids = tokenizer.encode(tokenizer.decode(sibling.token_ids))[: len(sibling.token_ids)]
        n = len(ids)
        return TransformersCompletion(ids, sibling.logprobs[:n], sibling.versions[:n], sibling.kept[:n])

    wrong = record(again)
    sentence = named(bench.check(wrong, tokenizer=tokenizer), "retokenized", "record the ids that the engine returns")
    assert "was sampled where" in sentence
    report = bench.check(wrong)
    named(report, "unexplained", "compare layer by layer")
    assert any("no tokenizer given" in note for note in report.notes)
