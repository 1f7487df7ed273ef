"""Tasksets of verifiers 0.4: their programs call the model over HTTP, at an address of each conversation's own."""

import secrets
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import verifiers.v1 as vf
from aiohttp import web
from verifiers.v1.dialects.chat import ChatDialect

from penstock.producers.interfaces import Conversation
from penstock.schemas.prompt import Message, Reward

MODEL = "policy"
MAX_BODY_BYTES = 256 * 1024 * 1024
"""The conversation itself refuses messages that are too long."""


class TasksetLibrary:
    """`verifiers.v1.load_environment`; see `penstock.producers.environments.verifiers.Library`.

    id, args: the taskset's id and settings. env: further settings of the environment.
    num_held_out: tasks that are held out, the first ones.
    """

    def __init__(self, id: str, args: Mapping[str, Any], env: Mapping[str, Any], num_held_out: int) -> None:
        self._config = vf.resolve_env_config({**env, "taskset": {**args, "id": id}})
        taskset = vf.load_environment(self._config).taskset
        if not taskset.bounded:
            raise ValueError("its taskset is infinite; expected a finite one")
        tasks = list(taskset)
        self.evaluation, self.training = tasks[:num_held_out], tasks[num_held_out:]

    def pose(self, task: Any) -> tuple[tuple[Message, ...], str]:
        prompt, system = task.data.prompt, task.data.system_prompt
        said = [Message(role="user", content=prompt)] if isinstance(prompt, str) else []
        if prompt is not None and not said:
            said = [Message(role=message.role, content=str(message.content)) for message in prompt]
        before = [] if system is None else [Message(role="system", content=system)]
        return (*before, *(said or [Message(role="user", content="")])), ""

    async def run(self, task: Any, conversation: Conversation) -> Reward:
        environment = vf.load_environment(self._config)  # it holds what one episode at a time uses
        async with _served(conversation) as url, environment.serving():
            client = vf.EvalClientConfig(base_url=url, api_key_var="PENSTOCK_API_KEY")
            episode = await environment.run_episode(task, vf.ModelContext(model=MODEL, client=client))
        if not episode.ok:
            errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
            raise RuntimeError(f"verifiers: {'; '.join(f'{error.type}: {error.message}' for error in errors)}")
        if len(episode.traces) != 1:
            raise RuntimeError(f"verifiers: {len(episode.traces)} agents have run, expected one")
        (trace,) = episode.traces
        parts = {name: reward.score for name, reward in trace.rewards.items() if reward is not None}
        parts |= {name: value for name, value in trace.metrics.items() if value is not None}
        return Reward(value=trace.reward, parts=parts)


@asynccontextmanager
async def _served(conversation: Conversation) -> AsyncIterator[str]:
    """Serves a conversation on this machine as chat completions; yields their base URL, which is secret."""
    dialect = ChatDialect()

    async def answer(request: web.Request) -> web.Response:
        fields = await request.json()
        is_streamed = fields.pop("stream", False)
        fields.pop("stream_options", None)
        try:
            message = await conversation.chat(fields.pop("messages", []), **fields)
        except Exception as error:  # an `ApiError` has OpenAI's body
            body = getattr(error, "body", {"error": {"message": f"{type(error).__name__}: {error}"}})
            return web.json_response(body, status=getattr(error, "status", 500))
        finish_reason = "tool_calls" if message.get("tool_calls") else conversation.facts.finish_reason
        choice = {"index": 0, "finish_reason": finish_reason, "message": message}
        raw = {"id": "", "created": 0, "model": MODEL, "object": "chat.completion", "choices": [choice]}
        if is_streamed:
            return web.Response(body=b"".join(dialect.stream_events(raw)), content_type="text/event-stream")
        return web.json_response(raw)

    app, token = web.Application(client_max_size=MAX_BODY_BYTES), secrets.token_urlsafe(16)
    app.router.add_post(f"/{token}/v1{dialect.upstream_path}", answer)
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/{token}/v1"
    finally:
        await runner.cleanup()
