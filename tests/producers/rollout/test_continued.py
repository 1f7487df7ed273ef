"""Rollouts that break off and are continued elsewhere: what is sampled, its labels and its distribution."""

import asyncio
import itertools
import math
from collections import Counter
from random import Random

import pytest
from msgspec.structs import replace

from penstock.producers.interfaces import Completion
from penstock.producers.rollout.adoption import adopted
from penstock.producers.rollout.episode import UNSCORED, rollout_of
from penstock.producers.rollout.sampling import Siblings
from penstock.schemas.prompt import Prompt
from penstock.schemas.rollout import (
    RolloutGroup,
    SamplingSettings,
    VersionSpan,
    decode_group,
    encode_group,
    pack_floats,
    pack_ids,
    unpack_ids,
)
from scripted_engine import FINGERPRINT

PROMPT = [9, 8]
END = 3
CHANCES = {8: (0.4, 0.35, 0.25), 1: (0.5, 0.2, 0.3), 2: (0.25, 0.35, 0.4)}
"""Of the tokens 1, 2 and END, after the last token."""
SAMPLING = SamplingSettings(max_tokens=4)
SIBLINGS = 4
GROUP = RolloutGroup(
    index=1, prompt=Prompt(text="p"), rollouts=(), producer_id="a", fingerprint=FINGERPRINT, sampling=SAMPLING
)
LIMIT = 59.7
"""Chi-square of 30 degrees of freedom exceeds it once in a thousand times."""


class ChainEngine:
    """Samples a Markov chain of three tokens, a step for each turn of the event loop."""

    def __init__(self, version: int, noise: Random) -> None:
        self.policy_version = version
        self.seeds: list[int | None] = []
        self._noise = noise
        self._rows: dict[str, list[list[int]]] = {}
        self._limit = 0

    async def generate(self, prompt_token_ids, sampling, num_siblings, request_id, stop=(), seed=None, images=None):
        self.seeds.append(seed)
        noises = [self._noise if seed is None else Random(seed + n) for n in range(num_siblings)]
        rows = self._rows[request_id] = [[] for _ in range(num_siblings)]
        try:
            while any(reason(row, sampling.max_tokens) == "abort" for row in rows):
                for row, noise in zip(rows, noises, strict=True):
                    if reason(row, sampling.max_tokens) == "abort":
                        last = (prompt_token_ids + row)[-1]
                        row.append(noise.choices((1, 2, END), CHANCES[last])[0])
                await asyncio.sleep(0)
            return [self._completion(prompt_token_ids, row, sampling.max_tokens) for row in rows]
        finally:
            del self._rows[request_id]

    def sampled(self, request_id: str) -> list[Completion]:
        # A continued sibling's context does not matter beyond its last token, whose chance is known.
        return [self._completion(PROMPT, row, 99) for row in self._rows.get(request_id, ())]

    def _completion(self, prompt: list[int], row: list[int], limit: int) -> Completion:
        return Completion(
            token_ids=pack_ids(row),
            behavior_logprobs=pack_floats(logprobs(prompt[-1], row)),
            version_spans=(VersionSpan(self.policy_version, 0, len(row)),) if row else (),
            finish_reason=reason(row, limit),
        )


def reason(row: list[int], limit: int) -> str:
    if row and row[-1] == END:
        return "stop"
    return "length" if len(row) == limit else "abort"


def logprobs(before: int, row: list[int]) -> list[float]:
    return [math.log(CHANCES[last][token - 1]) for last, token in zip([before, *row], row, strict=False)]


def through_redis(completions: list[Completion]) -> RolloutGroup:
    """As a claim's next holder reads it."""
    rollouts = tuple(rollout_of(pack_ids(PROMPT), one, UNSCORED) for one in completions)
    return decode_group(encode_group(replace(GROUP, rollouts=rollouts), dead=True), dead=True)


async def broken_off(siblings: Siblings, num_steps: int) -> list[Completion] | None:
    """What is known of them after some steps, or None if they were finished before; they are cancelled."""
    sampling = asyncio.create_task(siblings.sample())
    for _ in range(num_steps + 1):
        await asyncio.sleep(0)
    found = siblings.so_far()
    sampling.cancel()
    await asyncio.wait({sampling})
    return found


def siblings(engine: ChainEngine, seed: int | None = None, before: tuple[Completion, ...] = ()) -> Siblings:
    return Siblings(engine, PROMPT, SAMPLING, SIBLINGS, "r", seed=seed, adopted=before)  # type: ignore[arg-type]


def taken_over(completions: list[Completion], held: int = 1) -> list[Completion]:
    found = through_redis(completions)
    return adopted(found, GROUP, pack_ids(PROMPT), num_siblings=SIBLINGS, held=held, lag_bound=1)


async def test_what_is_sampled_is_kept_token_by_token_and_the_rest_is_of_the_adopters_policy() -> None:
    noise = Random(5)
    num_kept = num_finished = 0
    for _ in range(200):
        before = await broken_off(siblings(ChainEngine(0, noise)), 2)
        assert before is not None
        after = await siblings(ChainEngine(1, noise), before=taken_over(before)).sample()
        for old, new in zip(before, after, strict=True):
            ids, num_old = unpack_ids(new.token_ids).tolist(), len(old.token_ids) // 4
            assert new.token_ids.startswith(old.token_ids)
            assert new.behavior_logprobs == pack_floats(logprobs(PROMPT[-1], ids))
            own = (VersionSpan(1, num_old, len(ids)),) if len(ids) > num_old else ()
            assert new.version_spans == (*old.version_spans, *own)
            assert new.finish_reason == reason(ids, SAMPLING.max_tokens)
            assert old.finish_reason == "abort" or new == old
            num_kept += num_old
            num_finished += old.finish_reason != "abort"
    assert num_kept > 1000 and 100 < num_finished < 600


def exact() -> dict[tuple[int, ...], float]:
    """The chance of each completion."""
    chances = {}
    for length in range(1, SAMPLING.max_tokens + 1):
        for row in itertools.product((1, 2), repeat=length - 1):
            for last in (1, 2, END) if length == SAMPLING.max_tokens else (END,):
                ids = [*row, last]
                chances[tuple(ids)] = math.exp(sum(logprobs(PROMPT[-1], ids)))
    return chances


def chi_square(found: Counter[tuple[int, ...]]) -> float:
    chances, total = exact(), found.total()
    assert len(chances) == 31 and sum(chances.values()) == pytest.approx(1) and set(found) <= set(chances)
    return sum((found[ids] - total * chance) ** 2 / (total * chance) for ids, chance in chances.items())


async def sampled(seeded: bool, num_breaks: int) -> Counter[tuple[int, ...]]:
    """The completions of 1,000 groups, each broken off after any number of steps, and again."""
    noise, found = Random(7), Counter[tuple[int, ...]]()
    for number in range(1000):
        before: list[Completion] = []
        seed = 1000 * number if seeded else None  # a prompt that is handed back keeps its attempt, and so its seed
        for _ in range(num_breaks):
            going = siblings(ChainEngine(0, noise), seed, tuple(before))
            so_far = await broken_off(going, 1 + noise.randrange(4))
            before = taken_over(so_far) if so_far else before
        last = siblings(ChainEngine(0, noise), seed, tuple(before))
        found.update(tuple(unpack_ids(one.token_ids)) for one in await last.sample())
    return found


@pytest.mark.parametrize("seeded", [False, True])
async def test_a_continued_rollout_is_distributed_as_an_uninterrupted_one(seeded: bool) -> None:
    """Were only the unfinished siblings begun anew, short answers would be favored."""
    for num_breaks in (0, 2):
        assert chi_square(await sampled(seeded, num_breaks)) < LIMIT


async def test_nothing_is_said_of_siblings_between_two_requests() -> None:
    class Silent(ChainEngine):
        def sampled(self, request_id: str) -> list[Completion]:
            return []

    assert siblings(ChainEngine(0, Random(1))).so_far() is None
    assert await broken_off(siblings(Silent(0, Random(1))), 1) is None
