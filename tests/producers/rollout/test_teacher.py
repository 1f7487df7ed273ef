"""A teacher on a server: its logprobs of what was sampled, and what becomes of a group when it fails, hangs or errs."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from penstock.producers.rollout import scoring
from penstock.producers.rollout.teacher import TeacherError, TeacherServer
from penstock.schemas.config import ConfigError, TeacherConfig
from penstock.schemas.rollout import RolloutGroup, decode_group, encode_group, unpack_floats, unpack_ids
from stub_teacher import StubTeacher, logprob_of
from training_groups import group_of, segment

TOKENS = list("abcdefgh")


class LetterTokenizer:
    """A tokenizer of a token a letter."""

    def __len__(self) -> int:
        return len(TOKENS)

    def decode(self, token_ids: list[int]) -> str:
        return "".join(TOKENS[n] for n in token_ids)


@pytest.fixture
async def stub(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[StubTeacher]:
    monkeypatch.setattr(scoring, "RETRY_PAUSE_S", 0.001)
    async with StubTeacher.running(TOKENS) as running:
        yield running


@asynccontextmanager
async def asking(stub: StubTeacher, **limits: Any) -> AsyncIterator[TeacherServer]:
    server = TeacherServer(TeacherConfig(url=stub.url), **limits)
    try:
        yield server
    finally:
        await server.close()


async def scored(stub: StubTeacher, group: RolloutGroup, **limits: Any) -> RolloutGroup:
    async with asking(stub, **limits) as server:
        return await server.score(group)


def a_group(siblings: int = 1) -> RolloutGroup:
    """Two segments a sibling, the first of two turns with a token of the environment at its end."""
    turns = segment([1, 2, 3, 4, 5, 6, 7], [(2, 4), (5, 6)], [7, 7, 8])
    return group_of(1, [[turns, segment([1, 2, n], [(2, 3)], [8])] for n in range(siblings)], [0.5] * siblings)


async def test_every_sampled_token_has_the_teachers_logprob_in_its_own_context(stub) -> None:
    group = await scored(stub, a_group(3))
    for rollout, before in zip(group.rollouts, a_group(3).rollouts, strict=True):
        for part, plain in zip(rollout.segments, before.segments, strict=True):
            ids = unpack_ids(part.token_ids).tolist()
            places = [place for start, end in part.loss_mask for place in range(start, end)]
            assert list(unpack_floats(part.teacher_logprobs)) == [logprob_of(ids, place) for place in places]
            assert (part.token_ids, part.behavior_logprobs) == (plain.token_ids, plain.behavior_logprobs)
    assert sorted(len(body["prompt"]) for body in stub.asked) == [3, 3, 3, 6, 6, 6], "up to the last sampled token"
    assert all((body["prompt_logprobs"], body["max_tokens"]) == (0, 1) for body in stub.asked)
    assert decode_group(encode_group(group)) == group


async def test_a_teacher_is_asked_again_as_a_judge_is_and_then_is_an_error(stub) -> None:
    for script, error in [
        (["hang", "fail"], ""),
        (["fail"] * 6, r"ConnectionError: HTTP 503: Service Unavailable \(tried 3 times\)"),
    ]:
        stub.script.extend(script)
        if error:
            with pytest.raises(TeacherError, match=error):
                await scored(stub, a_group(), retries=2)
        else:
            assert await scored(stub, a_group(), timeout_s=0.2, retries=20) == await scored(stub, a_group())


async def test_an_answer_of_no_use_is_an_error_at_once(stub) -> None:
    def rows(*logprobs: Any) -> dict[str, Any]:
        return {"choices": [{"prompt_logprobs": [{"3": {"logprob": each}} for each in logprobs] or [None] * 6}]}

    nothing = "no prompt logprob of token 2, id 3"
    for answer, reason in [
        ("refuse", r"HTTP 400: .*maximum context length is 8"),
        ({"choices": []}, rf"{nothing} \(IndexError: .*expected an answer of a vLLM server"),
        ({"choices": [{"text": ""}]}, rf"{nothing} \(KeyError: 'prompt_logprobs'\)"),
        (rows(), rf"{nothing} \(TypeError: "),
        (rows(*[-9999.0] * 6), r"logprob -9999.0 of token 2, id 3"),
        (rows(*["nan"] * 6), r"logprob nan of token 2, id 3: expected"),
    ]:
        stub.asked.clear()
        stub.script.append(answer)
        with pytest.raises(TeacherError, match=reason):
            await scored(stub, group_of(1, [[segment([1, 2, 3, 4], [(2, 4)], [7, 7])]], [0.5]), retries=3)
        assert len(stub.asked) == 1


async def test_no_more_requests_are_open_at_once_than_the_run_file_allows(stub) -> None:
    await scored(stub, a_group(7), concurrency=3)
    assert (len(stub.asked), stub.most) == (14, 3)


async def test_a_server_of_the_same_tokens_passes_and_another_is_named(stub, monkeypatch) -> None:
    monkeypatch.setattr("penstock.producers.rollout.teacher.TOKENS_COMPARED_AT_ONCE", 3)
    async with asking(stub, retries=0) as server:
        await server.check(LetterTokenizer())
        stub.tokens = [*TOKENS[:4], "x", *TOKENS[5:]]
        with pytest.raises(
            ConfigError, match=r"another vocabulary than that of model.path: token 4 is 'x' there and 'e'"
        ):
            await server.check(LetterTokenizer())
        stub.tokens = TOKENS[:6]
        with pytest.raises(ConfigError, match=rf"teacher.url = '{stub.url}': .*HTTP 500.*; expected a vLLM server"):
            await server.check(LetterTokenizer())
    stub.url += "/nowhere"
    async with asking(stub, retries=0) as server:
        with pytest.raises(ConfigError, match=r"HTTP 404: .*; expected a vLLM server, as in http://host:8000/v1"):
            await server.check(LetterTokenizer())
