"""Ids that were encoded again from text are recognised by the logprobs of the sampled ones."""

import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from parity_bench import COLD, ParityBench
from penstock.consumers.parity.report import ParityError
from penstock.schemas.rollout import RolloutGroup
from transformers_engine import TransformersCompletion, group_of

ALPHABET = "abcdef "
MERGES = [("a", "b"), ("c", "d"), ("ab", "cd"), ("e", "f"), ("b", "c"), ("d", "e"), (" ", "a"), ("f", "a")]


def merging_tokenizer(alphabet: str = ALPHABET) -> Any:
    """Byte-pair encoding of a few letters: many texts have several tokenizations, one of which it makes."""
    entries = [*alphabet, *("".join(pair) for pair in MERGES)]
    tokenizer = Tokenizer(models.BPE(vocab={entry: n for n, entry in enumerate(entries)}, merges=MERGES))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return merging_tokenizer()


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> ParityBench:
    folder: Path = tmp_path_factory.mktemp("bench")
    return ParityBench.make(folder, dtype=request.param, vocab_size=len(tokenizer))


def sampled(bench: ParityBench, tokenizer: Any) -> list[tuple[str, Any]]:
    rng = random.Random(0)
    texts = []
    while len(texts) < 8:
        text = "".join(rng.choice(ALPHABET) for _ in range(14))
        if not texts or len(tokenizer.encode(text)) == len(tokenizer.encode(texts[0])):
            texts.append(text)
    answers = bench.engine().generate([tokenizer.encode(text) for text in texts], 4, 16, sampling=COLD)
    return list(zip(texts, answers, strict=True))


def record(pairs: list[tuple[str, Any]]) -> list[RolloutGroup]:
    return [group_of(n, answer, COLD, text=text) for n, (text, answer) in enumerate(pairs, 1)]


def retokenized(own: TransformersCompletion, tokenizer: Any) -> TransformersCompletion:
    ids = tokenizer.encode(tokenizer.decode(own.token_ids))[: len(own.token_ids)]
    return TransformersCompletion(ids, own.logprobs[: len(ids)], own.versions[: len(ids)], own.kept[: len(ids)])


def test_sampled_ids_are_at_parity(bench, tokenizer) -> None:
    report = bench.check(record(sampled(bench, tokenizer)), tokenizer=tokenizer)
    assert report.verdict.status == "parity", report.verdict


def test_ids_made_again_from_text_are_named(bench, tokenizer) -> None:
    pairs = sampled(bench, tokenizer)
    for _, answer in pairs:
        answer.siblings = [retokenized(own, tokenizer) for own in answer.siblings]
    report = bench.check(record(pairs), tokenizer=tokenizer)
    assert (report.verdict.status, report.verdict.cause) == ("mismatch", "retokenized"), [*report.hypotheses]
    assert "record the ids that the engine returns" in report.verdict.advice
    assert "was sampled where" in report.verdict.sentence


def test_without_a_tokenizer_the_report_says_that_it_was_not_looked_for(bench, tokenizer) -> None:
    pairs = sampled(bench, tokenizer)
    for _, answer in pairs:
        answer.siblings = [retokenized(own, tokenizer) for own in answer.siblings]
    report = bench.check(record(pairs))
    assert (report.verdict.status, report.verdict.cause) == ("mismatch", "unexplained")
    assert any("no tokenizer given" in note for note in report.notes)


def test_another_models_tokenizer_is_an_error(bench, tokenizer) -> None:
    other = merging_tokenizer("fedcb a")
    with pytest.raises(ParityError, match="the tokenizer does not match the token ids: group 1 was asked"):
        bench.check(record(sampled(bench, tokenizer)), tokenizer=other)
