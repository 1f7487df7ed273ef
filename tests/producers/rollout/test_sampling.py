"""A completion that the engine breaks off is taken up again."""

import asyncio

import pytest

from penstock.producers.interfaces import Completion, EngineError
from penstock.producers.rollout.sampling import Siblings
from penstock.schemas.rollout import SamplingSettings, VersionSpan, pack_floats, pack_ids, unpack_floats, unpack_ids
from scripted_engine import ScriptedEngine
from waiting import until


class BreakingEngine:
    """Answers each request with the next of `parts`: how many tokens, their version, how it ended."""

    def __init__(self, *parts: tuple[int, int, str]) -> None:
        self._parts = list(parts)
        self.requests: list[tuple[list[int], int, str]] = []
        self.seeds: list[int | None] = []

    async def generate(self, prompt_token_ids, sampling, num_siblings, request_id, stop=(), seed=None, images=None):
        self.seeds.append(seed)
        self.requests.append((prompt_token_ids, sampling.max_tokens, request_id))
        count, version, reason = self._parts.pop(0)
        first = 100 + sum(len(prompt) for prompt, _, _ in self.requests[:-1])
        return [
            Completion(
                token_ids=pack_ids(range(first, first + count)),
                behavior_logprobs=pack_floats([-float(version)] * count),
                version_spans=(VersionSpan(version, 0, count),) if count else (),
                finish_reason=reason,
                sampling_mask=tuple(pack_ids([n]) for n in range(first, first + count)) if sampling.top_k else None,
            )
        ]


async def sampled(engine: BreakingEngine, num_siblings: int = 1, **sampling: int) -> list[Completion]:
    return await Siblings(engine, [1, 2], SamplingSettings(**sampling), num_siblings, "call").sample()


async def test_an_aborted_answer_goes_on_from_its_partial_ids_with_what_is_left_of_the_budget() -> None:
    engine = BreakingEngine((2, 5, "abort"), (0, 5, "abort"), (1, 5, "abort"), (3, 6, "stop"))
    (completion,) = await sampled(engine, max_tokens=8)
    ids = unpack_ids(completion.token_ids).tolist()
    assert len(ids) == 6 and completion.finish_reason == "stop"
    assert completion.version_spans == (VersionSpan(5, 0, 3), VersionSpan(6, 3, 6))
    assert unpack_floats(completion.behavior_logprobs).tolist() == [-5.0] * 3 + [-6.0] * 3
    assert [prompt for prompt, _, _ in engine.requests] == [
        [1, 2],
        [1, 2, *ids[:2]],
        [1, 2, *ids[:2]],
        [1, 2, *ids[:3]],
    ]
    assert [budget for _, budget, _ in engine.requests] == [8, 6, 6, 5]
    assert len({name for _, _, name in engine.requests}) == 4


async def test_the_parts_of_an_answer_keep_the_ids_that_each_was_sampled_from() -> None:
    parts = (2, 5, "abort"), (0, 5, "abort"), (3, 6, "stop")
    (completion,) = await sampled(BreakingEngine(*parts), max_tokens=8, top_k=1)
    assert completion.sampling_mask is not None and b"".join(completion.sampling_mask) == completion.token_ids
    (completion,) = await sampled(BreakingEngine(*parts), max_tokens=8)
    assert completion.sampling_mask is None
    (completion,) = await sampled(BreakingEngine((2, 1, "abort"), (2, 1, "abort")), max_tokens=4)
    assert completion.finish_reason == "length" and len(completion.token_ids) == 16, "the budget was used up in parts"
    with pytest.raises(EngineError, match=r"returns 0 likeliest ids with each token; expected .*top_logprobs = 5"):
        await sampled(BreakingEngine((2, 5, "stop")), top_logprobs=5)


async def test_the_parts_of_a_seeded_answer_have_seeds_of_their_own_the_same_each_time() -> None:
    seeds = []
    for seed in (5, 5, 6, None):
        engine = BreakingEngine((1, 5, "abort"), (1, 5, "abort"), (1, 5, "stop"))
        await Siblings(engine, [1, 2], SamplingSettings(max_tokens=8), 1, "call", seed=seed).sample()
        seeds.append(engine.seeds)
    assert seeds[0] == seeds[1] and seeds[3] == [None] * 3
    assert seeds[0][0] == 5 and len({*seeds[0], *seeds[2]}) == 6


async def test_an_engine_that_cannot_say_how_far_it_is_goes_on_to_its_answer(caplog) -> None:
    engine = ScriptedEngine()
    engine.may_sample.clear()

    def sampled(request_id: str) -> list[Completion]:
        raise EngineError("3 tokens, but logprobs of 2")

    engine.sampled = sampled  # type: ignore[method-assign]
    siblings = Siblings(engine, [1], SamplingSettings(max_tokens=8), 2, "a")
    sampling = asyncio.create_task(siblings.sample())
    await until(lambda: engine.num_active == 1)
    assert siblings.so_far() is None and siblings.so_far() is None
    engine.may_sample.set()
    assert [len(one.token_ids) // 4 for one in await sampling] == [5, 5]
    assert caplog.messages == ["progress of a rollout is not kept: 3 tokens, but logprobs of 2"]


async def test_an_engine_that_gets_nowhere_or_answers_with_another_number_is_given_up() -> None:
    for parts, num_siblings, message in [
        ([(0, 1, "abort")] * 9, 1, "aborted 4 times in a row without a token"),
        ([(2, 1, "stop")], 2, "request call: 1 completions, expected 2"),
    ]:
        with pytest.raises(EngineError, match=message):
            await sampled(BreakingEngine(*parts), num_siblings, max_tokens=4)
