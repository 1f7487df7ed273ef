"""A reward that asks a judge over HTTP, and what becomes of a group whose judge fails or hangs."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from aiohttp import ClientSession, web

from penstock.producers.rollout import scoring
from penstock.producers.rollout.rewards import RewardError, component
from penstock.producers.rollout.scoring import RewardScorer
from penstock.schemas.config import RewardConfig
from penstock.schemas.prompt import Prompt, Reward

PROMPT = Prompt(text="1+1=", answer="2")


class JudgeServer:
    """Answers POST / with 1.0, after it has done with the first requests for a text what the script says."""

    def __init__(self) -> None:
        self.script: dict[str, list[str]] = {}
        self.sent: list[str] = []
        self.asked: list[str] = []
        self.inside = self.most = 0
        self.url = ""

    async def answer(self, request: web.Request) -> web.Response:
        text = await request.text()
        self.asked.append(text)
        self.inside += 1
        self.most = max(self.most, self.inside)
        try:
            todo = self.script.get(text, [])
            what = todo.pop(0) if todo else "answer"
            if what == "hang":
                await asyncio.Event().wait()
            await asyncio.sleep(0)
            return web.Response(status=503) if what == "fail" else web.json_response(1.0)
        finally:
            self.inside -= 1


@pytest.fixture
async def judge(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[JudgeServer]:
    monkeypatch.setattr(scoring, "RETRY_PAUSE_S", 0.001)
    server = JudgeServer()
    app = web.Application()
    app.router.add_post("/", server.answer)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    server.url = "http://{}:{}/".format(*runner.addresses[0])
    try:
        yield server
    finally:
        await runner.cleanup()


async def judged(judge: JudgeServer, completions: Sequence[str], **limits: Any) -> Sequence[Reward]:
    async with ClientSession(raise_for_status=True) as session:

        async def reward(prompt: Prompt, completion: str) -> float:
            judge.sent.append(completion)
            async with session.post(judge.url, data=completion) as reply:
                return float(await reply.json())

        return await RewardScorer([component(reward)], RewardConfig(**limits)).score(PROMPT, completions)


async def test_a_judge_that_fails_and_hangs_for_a_while_is_asked_again(judge: JudgeServer) -> None:
    judge.script = {"a": ["fail", "hang"], "b": ["hang"]}
    assert await judged(judge, "abc", timeout_s=0.2, retries=20) == (Reward(value=1.0),) * 3
    assert judge.asked.count("a") >= 3 and judge.asked.count("b") >= 2


@pytest.mark.parametrize(
    ("does", "reason"),
    [
        ("fail", r"ClientResponseError: 503, .*\(tried 3 times\)"),
        ("hang", r"TimeoutError: no answer within 0.05 s \(reward.timeout_s\) \(tried 3 times\)"),
    ],
)
async def test_a_judge_that_fails_or_hangs_after_its_retries_leaves_no_reward(judge, does: str, reason: str) -> None:
    judge.script = {"b": [does] * 3}
    with pytest.raises(RewardError, match=reason):
        await judged(judge, "b", timeout_s=0.05 if does == "hang" else 5.0, retries=2)
    assert judge.sent == ["b"] * 3


async def test_no_more_calls_are_made_at_once_than_the_run_file_allows(judge: JudgeServer) -> None:
    assert len(await judged(judge, "abcdefghij", concurrency=3)) == 10
    assert judge.most == 3


async def test_a_pause_before_a_retry_holds_no_place_of_another_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "RETRY_PAUSE_S", 600.0)
    others = asyncio.Event()

    async def reward(prompt: Prompt, completion: str) -> float:
        if completion == "bad":
            raise ConnectionError("away")
        others.set()
        return 1.0

    scorer = RewardScorer([component(reward)], RewardConfig(concurrency=1, retries=1))
    scoring_both = asyncio.create_task(scorer.score(PROMPT, ["bad", "good"]))
    await asyncio.wait_for(others.wait(), 60)
    scoring_both.cancel()
    with pytest.raises(asyncio.CancelledError):
        await scoring_both
