"""Any taskset of the library verifiers, unchanged: its tasks, programs, turns, tools and rewards. The programs call the
model over HTTP, at an address of each conversation's own."""

import asyncio
import secrets
import signal
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from aiohttp import web

from penstock.producers.environments.dataset import task_of
from penstock.producers.environments.stepping import OneAnswer, library
from penstock.producers.interfaces import Conversation
from penstock.schemas.process.stopping import stop_signals
from penstock.schemas.prompt import Message, Prompt, Reward

MODEL = "policy"
MAX_BODY_BYTES = 256 * 1024 * 1024
"""The conversation itself refuses messages that are too long."""


class VerifiersEnvironment:
    """The environment of a taskset, as `verifiers.v1.load_environment` loads it.

    The first `num_evaluation_prompts` tasks are held out; the others are shuffled per epoch. An episode in which
    verifiers records an error is dead with it. Others get the trace's reward, with its rewards and metrics as parts.

    id: of an installed taskset, or of a module in the working directory.
    args: the taskset's settings.
    env: further settings of the environment, such as `agent.harness` and `agent.runtime`.

    Raises:
        ValueError: it cannot be loaded, is infinite, has too few tasks, or tasks without a reward.
        ImportError: verifiers is not installed, or in another release.
    """

    def __init__(
        self,
        *,
        seed: int,
        id: str,
        args: Mapping[str, Any] | None = None,
        env: Mapping[str, Any] | None = None,
        num_evaluation_prompts: int = 0,
    ) -> None:
        try:
            release = version("verifiers")
        except PackageNotFoundError as error:
            raise ImportError("verifiers is not installed: pip install 'penstock[verifiers]'") from error
        if release.split(".")[:2] != ["0", "4"]:
            raise ImportError(f"verifiers {release} is installed, expected 0.4: pip install 'penstock[verifiers]'")
        self._vf = library("verifiers.v1", "verifiers")
        handlers = {number: signal.getsignal(number) for number in stop_signals()}
        try:
            self._config = self._vf.resolve_env_config({**(env or {}), "taskset": {**(args or {}), "id": id}})
            environment = self._vf.load_environment(self._config)
            tasks = list(environment.taskset) if environment.taskset.bounded else None
        except Exception as error:  # the taskset is the user's
            raise ValueError(f"VerifiersEnvironment: id = {id!r}: {type(error).__name__}: {error}") from error
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)  # it installs its own, which exit at once
        if tasks is None:
            raise ValueError(f"VerifiersEnvironment: id = {id!r}: its taskset is infinite; expected a finite one")
        if not 0 <= num_evaluation_prompts < len(tasks):
            raise ValueError(
                f"VerifiersEnvironment: num_evaluation_prompts is {num_evaluation_prompts}, expected 0 or more, and "
                f"fewer than the {len(tasks)} tasks of {id!r}"
            )
        scores_itself = type(environment).finalize is not self._vf.Env.finalize
        if not (scores_itself or tasks[0].hooks("reward") or tasks[0].plugged_judges()):
            raise ValueError(
                f"VerifiersEnvironment: the tasks of {id!r} have no reward, expected a method with @vf.reward"
            )
        self._seed, self._tasks = seed, tasks
        self.num_evaluation_prompts, self.num_tasks = num_evaluation_prompts, len(tasks) - num_evaluation_prompts
        self._servers: _Servers | None = None

    def prompt(self, index: int) -> Prompt:
        return self._pose(self.num_evaluation_prompts + task_of(index, self.num_tasks, self._seed))

    def evaluation_prompt(self, n: int) -> Prompt:
        return self._pose(n - 1)

    async def reward(self, prompt: Prompt, completion: str) -> Reward:
        """Returns the reward of a conversation with this answer alone; there is no room for another turn."""
        return await self.converse(prompt, OneAnswer(completion))

    async def converse(self, prompt: Prompt, conversation: Conversation) -> Reward:
        async with _served(conversation) as url, self._serving() as environment:
            client = self._vf.EvalClientConfig(base_url=url, api_key_var="PENSTOCK_API_KEY")
            context = self._vf.ModelContext(model=MODEL, client=client)
            episode = await environment.run_episode(self._tasks[int(prompt.metadata["row"])], context)
        if not episode.ok:
            errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
            raise RuntimeError(f"verifiers: {'; '.join(f'{error.type}: {error.message}' for error in errors)}")
        if len(episode.traces) != 1:
            raise RuntimeError(f"verifiers: {len(episode.traces)} agents have run, expected one")
        (trace,) = episode.traces
        parts = {name: reward.score for name, reward in trace.rewards.items() if reward is not None}
        parts |= {name: value for name, value in trace.metrics.items() if value is not None}
        return Reward(value=trace.reward, parts=parts)

    def _pose(self, row: int) -> Prompt:
        data = self._tasks[row].data
        said = data.prompt if isinstance(data.prompt, str | None) else ""
        messages = [Message(role="user", content=said or "")]
        if not isinstance(data.prompt, str | None):
            messages = [Message(role=message.role, content=str(message.content)) for message in data.prompt]
        if data.system_prompt is not None:
            messages.insert(0, Message(role="system", content=data.system_prompt))
        return Prompt(messages=tuple(messages), metadata={"row": str(row)})

    @asynccontextmanager
    async def _serving(self) -> AsyncIterator[Any]:
        """Yields the environment with its servers, such as those of a taskset's tools, which the conversations that run
        at once share; the last one ends them."""
        if self._servers is None or self._servers.task.done():
            self._servers = _Servers(self._vf.load_environment(self._config))
        servers = self._servers
        servers.num_users += 1
        try:
            await asyncio.shield(servers.ready)
            yield servers.environment
        finally:
            servers.num_users -= 1
            if not servers.num_users:
                self._servers = None if self._servers is servers else self._servers
                servers.idle.set()
                await asyncio.shield(servers.task)


class _Servers:
    """What an environment serves, from its making until `idle` is set. ready: done once it is served."""

    def __init__(self, environment: Any) -> None:
        self.environment = environment
        self.num_users = 0
        self.idle = asyncio.Event()
        self.ready = asyncio.get_running_loop().create_future()
        self.task = asyncio.create_task(self._serve())

    async def _serve(self) -> None:
        try:
            async with self.environment.serving():
                self.ready.set_result(None)
                await self.idle.wait()
        except Exception as error:
            if self.ready.done():
                raise
            self.ready.set_exception(error)


@asynccontextmanager
async def _served(conversation: Conversation) -> AsyncIterator[str]:
    """Serves a conversation on this machine as chat completions; yields their base URL, which is secret."""
    from verifiers.v1.dialects.chat import ChatDialect

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
