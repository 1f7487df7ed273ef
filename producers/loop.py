"""The loop of a producer, from claim to append, and the order in which it shuts down."""

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections import deque
from collections.abc import Coroutine
from functools import partial
from typing import Any

import msgspec

from penstock.producers.endpoint.chat.answers import AnswerParser
from penstock.producers.interfaces import Engine, EngineError
from penstock.producers.rollout.episode import Episodes
from penstock.producers.rollout.run_environments import RunEnvironments
from penstock.producers.stream.claims import Claims
from penstock.producers.stream.context import ProducerContext
from penstock.producers.stream.heartbeat import HEARTBEAT_S, HeartbeatSender
from penstock.producers.stream.in_flight import Claim, Dead, InFlightTable
from penstock.producers.stream.progress_store import ProgressStore
from penstock.producers.stream.rollout_progress import RolloutProgress
from penstock.producers.stream.writer import Writer
from penstock.producers.weights.follower import WeightFollower
from penstock.producers.weights.host_copy import HostCopy
from penstock.schemas.config import ConfigError
from penstock.schemas.heartbeat import Heartbeat, InFlight
from penstock.schemas.images import settings_that_differ
from penstock.schemas.process import clock
from penstock.schemas.process.cancellation import cancel_and_wait, gather_or_cancel
from penstock.schemas.process.plugins import ends_caller
from penstock.schemas.producer_parity import ProducerParity
from penstock.schemas.rollout import RolloutGroup
from penstock.schemas.weights.reading import WeightReader

log = logging.getLogger(__name__)

RATE_BEATS = 15
"""Heartbeats over which the token rate is measured: engines sample in bursts."""
ALONE_FROM = 3
"""From this attempt on a prompt runs alone. The first producer that ended with it may simply have been killed, so what
it had in flight is tried together once more."""
ENGINE_CHECK_S = 5.0
"""The pause before each check of the engine."""
GRACE_S = 3.0
"""How long a stopping producer lets groups finish before it hands the rest back."""
LAST_SAVE_S = 2.0
"""How long Redis may take to accept the progress of what a stopping producer does not finish."""
SHUTDOWN_TIMEOUT_S = 5.0
"""How long Redis may take to accept what a stopping producer leaves. Claims that it is not told about expire."""


class QuarantinedError(RuntimeError):
    """The trainer found that this instance's logprobs keep differing from its own. A new instance is judged anew."""


class OtherRunError(RuntimeError):
    """Another run of this name has begun, for which this producer was not started."""


class Producer:
    """Turns prompts into rollouts with one engine.

    The loop waits, in this order, for

    | what                                  | who unblocks it                        |
    |---------------------------------------|----------------------------------------|
    | weights within the lag bound          | `weights`: the trainer's announcement  |
    | room in the in-flight table           | `writer`: an append                    |
    | a prompt                              | `claims`: the trainer's release        |
    | weights fresh enough for that prompt  | `weights`                              |
    | completions, then rewards             | the engine; the reward                 |

    A clean stop, after `stop` is set:

    1. No more claims and no more openings by agents.
    2. Groups and agents' rollouts have `GRACE_S` to finish, none if the run is finished; the others are cancelled.
       Before and after that time the groups' progress is saved.
    3. The writer appends what is finished and the claims of the others are handed back, in `SHUTDOWN_TIMEOUT_S`.
    4. The services end, and the heartbeat is deleted last: one sent later would keep the id taken.
    5. The caller closes engine, metrics and connection.

    answer_parser: of reasoning and tool calls in the answers to agents, if the run has an endpoint for them.
    stop: set from outside (a signal) to end `serve`; also set when the run is finished.
    """

    def __init__(
        self,
        context: ProducerContext,
        engine: Engine,
        environments: RunEnvironments,
        tokenizer: Any,
        *,
        answer_parser: AnswerParser | None = None,
        stop: asyncio.Event | None = None,
    ) -> None:
        config, connection, keys = context.config, context.connection, context.keys
        environments.check_endpoint(config)
        self.stop = stop or asyncio.Event()
        self._config = config
        self.context = context
        self._environments = environments
        self._engine = engine
        self.table = InFlightTable(
            num_groups=config.producers.groups_in_flight,
            group_size=config.group_size,
            num_samples=max(each.num_samples for each in environments),
        )
        context.metrics.in_flight.set_function(lambda: len(self.table))
        reader = WeightReader(connection.call, keys)
        copy = HostCopy(config.weights.host_folder, config.name, connection.place, reader, context.metrics)
        self.weights = WeightFollower(connection, keys, engine, copy, context.metrics, self._on_load, self._on_run)
        # Agents claim their prompts themselves.
        streams = None if config.endpoint is None else (keys.evaluations,)
        self.claims = Claims(connection, keys, context.producer_id, self.table, config.producers, streams)
        self._episodes = Episodes(
            config,
            producer_id=context.producer_id,
            metrics=context.metrics,
            environments=environments,
            tokenizer=tokenizer,
            engine=engine,
            teacher=context.teacher,
        )
        names = context.producer_id, context.instance
        self.writer = Writer(connection, keys, self.table, context.metrics, *names, config.metrics.traces)
        self._store = ProgressStore(connection, keys, self.table, context.metrics, config.producers)
        self.progress = RolloutProgress(self._store, context.instance)
        self.heartbeat = HeartbeatSender(
            connection, keys, context.producer_id, self._describe, self._on_finished, self._on_quarantined
        )
        self._described: list[Any] = []
        """The run file and the model's digest in Redis when the run was joined."""
        self._running: dict[asyncio.Task[None], Claim] = {}
        self._passed_on: asyncio.Queue[Claim] = asyncio.Queue()
        """Claims of `endpoint` for prompts that are not conversations."""
        self._run_is_finished = False
        self._quarantine: ProducerParity | None = None
        self._tokens_per_s = 0.0
        self.endpoint = None
        if config.endpoint is not None:
            # Its HTTP server is installed with the engine, and the launcher imports this module without either.
            from penstock.producers.endpoint.server import AgentEndpoint

            self.endpoint = AgentEndpoint(
                context,
                table=self.table,
                weights=self.weights,
                writer=self.writer,
                progress=self._store,
                engine=engine,
                environments=environments,
                tokenizer=tokenizer,
                parser=answer_parser,
                pass_on=self._passed_on.put_nowait,
            )

    async def open(self) -> None:
        """Registers with the run.

        Raises:
            RedisGoneError: Redis was away for too long.
            ProducerIdTakenError: another process runs under this id.
        """
        await self.heartbeat.claim_id()
        await self.claims.open()
        if self.endpoint is not None:
            await self.endpoint.agents.claims.open()
        self.context.events.write("start", fingerprint=self._engine.fingerprint)

    async def serve(self) -> None:
        """Turns prompts into rollouts until `stop`, then leaves nothing behind that only it could finish.

        Raises:
            EngineError: the engine has stopped. Its claims stay, and count as an attempt when they are taken over.
            RedisGoneError: Redis was away for too long.
            QuarantinedError: the trainer does not train from this instance any more. Everything is handed back.
            OtherRunError: another run of this name has begun, with other settings.
        """
        parts = (
            self.heartbeat.run,
            self._record_rate,
            self._watch_engine,
            self.weights.follow,
            self.weights.keep_current,
            self.claims.keep,
            self.progress.run,
            self.writer.run,
        )
        try:
            async with asyncio.TaskGroup() as services:
                running = [services.create_task(part()) for part in parts]
                await self._work_until_stopped()
                drained = await self._drain()
                await cancel_and_wait(running)
            if drained:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(SHUTDOWN_TIMEOUT_S):
                        await self.heartbeat.stop()
            if self._quarantine is not None:
                raise QuarantinedError(f"it is quarantined: {self._quarantine.reason}")
        finally:
            if self.endpoint is not None:
                await self.endpoint.close(append=False)
            self._episodes.close()
            self.context.events.close()

    async def _work_until_stopped(self) -> None:
        """Claims and runs groups until `stop`, then ends those that run (steps 1 and 2 of a clean stop)."""
        async with asyncio.TaskGroup() as groups:
            claiming = [groups.create_task(self._claim(groups)), groups.create_task(self._take_passed_on(groups))]
            serving = groups.create_task(self._serve_agents())
            await self.stop.wait()
            await cancel_and_wait(claiming)
            await self._save_progress()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0 if self._drops_progress else GRACE_S):
                    if self.endpoint is not None:
                        await self.endpoint.agents.drain()
                    await self._wait_until_idle()
            await self._save_progress()
            await cancel_and_wait([*self._running, serving])
            if self.endpoint is not None:
                await self.endpoint.close(append=not self._drops_progress)

    async def _save_progress(self) -> None:
        """Saves what is sampled for the producers that take the claims over; drops it if nobody is to go on with it."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_SAVE_S):
                if self._drops_progress:
                    await self._store.end()
                    return
                if self.endpoint is not None:
                    await self.endpoint.agents.save_all()
                await self.progress.save()

    async def _serve_agents(self) -> None:
        """Serves the run's agents, if it has an endpoint for them; runs until cancelled."""
        if self.endpoint is not None:
            await self.endpoint.start()
            await self.endpoint.run()

    async def _drain(self) -> bool:
        """Waits until Redis has every finished group and every unfinished claim is free for others (step 3).

        Returns False if Redis is unreachable for `SHUTDOWN_TIMEOUT_S`.
        """
        try:
            async with asyncio.timeout(SHUTDOWN_TIMEOUT_S):
                await self.writer.drain()
                if self.endpoint is not None:
                    await self.endpoint.agents.claims.find_lost()
                num_claims = await self.claims.hand_back()
                log.info("stopped: %d unfinished claims handed back", num_claims)
                return True
        except TimeoutError:
            idle_s = self._config.producers.claim_idle_s
            log.warning("stopped without Redis: %d claims are free for others in %g s", len(self.table), idle_s)
            return False

    async def _claim(self, groups: asyncio.TaskGroup) -> None:
        """Waits for weights within the lag bound, for room, and for a prompt. A weight load, a group's append and the
        trainer's release unblock it. Runs until cancelled."""
        while True:
            await self.weights.wait_until_current(self._config.lag_bound)
            await self.table.wait_for_room()
            for claim in await self.claims.take():
                await self._begin(groups, claim)

    async def _take_passed_on(self, groups: asyncio.TaskGroup) -> None:
        """Waits for claims that the endpoint passes on; runs until cancelled."""
        while True:
            await self._begin(groups, await self._passed_on.get())

    async def _begin(self, groups: asyncio.TaskGroup, claim: Claim) -> None:
        """Starts a claim. From attempt `ALONE_FROM` on, and at the last of several attempts, it runs alone, after
        all finished groups are appended: it may be what ended its producers, and must cost no other an attempt."""
        if (claim.stream, claim.entry_id) not in self.table:
            return  # dropped since it was claimed
        max_attempts = self._config.producers.max_attempts
        is_alone = max(2, min(ALONE_FROM, max_attempts)) <= claim.attempt <= max_attempts
        if is_alone:
            await self._wait_until_appended()
        task = groups.create_task(self._run(claim))
        self._running[task] = claim
        task.add_done_callback(self._running.pop)
        if is_alone:
            await self._wait_until_appended()

    async def _wait_until_appended(self) -> None:
        await self._wait_until_idle()
        await self.writer.drain()

    async def _wait_until_idle(self) -> None:
        while self._running:
            await asyncio.wait(set(self._running))

    async def _run(self, claim: Claim) -> None:
        """Carries one claim from its prompt to the writer. Waits for weights that are fresh enough for it; a load
        unblocks it.

        An evaluation measures policy `version`, so it waits for that version itself (or a newer one).
        """
        max_attempts = self._config.producers.max_attempts
        if claim.attempt > max_attempts:
            found = await self.progress.left_by_the_dead(claim)
            self.writer.put(claim, Dead(f"attempts: handed out {max_attempts} times without a result", group=found))
            return
        lag_bound = self._config.lag_bound if claim.evaluation_id is None else 0
        await self.weights.wait_for(claim.version, lag_bound, claim.run_id)
        found = await self.progress.find(claim)
        try:
            if self.endpoint is not None and self._environments.converses(claim.environment):
                # Agents claim training prompts of conversations themselves.
                work: Coroutine[Any, Any, RolloutGroup | Dead] = self.endpoint.conversations.evaluate(claim)
            else:
                work = self._episodes.run(claim, found)
            (outcome,) = await gather_or_cancel([work])  # a task of its own, which the environment may cancel
            self.writer.put(claim, outcome)
        except EngineError:
            raise
        except BaseException as error:  # the isolation boundary of this loop: one group never ends the others
            if ends_caller(error):
                raise
            self.writer.put(claim, Dead.of("producer", error))

    def _on_load(self, **load: Any) -> None:
        self.context.events.write("weights", **load)
        if self._config.producers.abort_past_lag:
            for claim in self.table:
                self._episodes.abort_past_lag(claim, load["policy_version"])

    async def _on_run(self, run_id: str) -> None:
        """Joins a run, and drops what was claimed in an earlier one of its name: its trainer is gone.

        Raises:
            OtherRunError: it is described otherwise than the earlier one.
            ConfigError: the trainer shows the model other pixels of an image than the engine.
        """
        commands, key = self.context.connection.commands, self.context.keys.description
        described: list[Any] = [
            await self.context.connection.retrying(partial(commands.hget, key, field))
            for field in ("run_file", "model_digest")
        ]
        if self.context.run_id and described != self._described:
            raise OtherRunError(
                f"another run of this name has begun ({run_id}, after {self.context.run_id}), with other settings or "
                "another model: start the producer again with those"
            )
        self._described = described
        self._check_pixels(await self.context.connection.retrying(partial(commands.hget, key, "image_processor")))
        self.context.run_id = self.claims.run_id = run_id
        if others := {claim for claim in self.table if claim.run_id not in ("", run_id)}:
            log.warning("%d claims of an earlier run of this name are dropped", len(others))
        for task, claim in self._running.items():
            if claim in others:
                task.cancel()
        if self.endpoint is not None:
            self.endpoint.agents.claims.run_id = run_id
            self.endpoint.agents.leave(others)
        for claim in others:
            self.table.remove(claim)

    def _check_pixels(self, told: Any) -> None:
        here, there = self._engine.image_processor, msgspec.json.decode(told or b"{}")
        if here and there and (names := settings_that_differ(here, there)):
            found = "; ".join(f"{name} = {here.get(name)!r} here, {there.get(name)!r} at the trainer" for name in names)
            raise ConfigError(
                f"model.path = {self._config.model.path!r}: the settings of the image processor differ ({found}); "
                "expected the same preprocessor_config.json and packages on both sides"
            )

    def _on_finished(self) -> None:
        if not self._run_is_finished:
            log.info("the run is finished")
        self._run_is_finished = True
        self.stop.set()

    def _on_quarantined(self, finding: ProducerParity) -> None:
        self._quarantine = finding
        self.stop.set()

    @property
    def _drops_progress(self) -> bool:
        """True if nobody is to go on with what is in flight: the run is finished, or the engine cannot be trusted."""
        return self._run_is_finished or self._quarantine is not None

    async def _record_rate(self) -> None:
        """Waits `HEARTBEAT_S`, measures the token rate of the last `RATE_BEATS` waits, and again; runs until
        cancelled."""
        measured = deque([(time.monotonic(), self._num_tokens)], maxlen=RATE_BEATS)
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            now, num_tokens = time.monotonic(), self._num_tokens
            since, before = measured[0]
            self._tokens_per_s = (num_tokens - before) / (now - since)
            measured.append((now, num_tokens))
            self.context.events.write(
                "rate",
                tokens_per_s=self._tokens_per_s,
                num_tokens=num_tokens,
                policy_version=self._engine.policy_version,
                clock_ahead_s=self.heartbeat.clock_ahead_s,
            )

    async def _watch_engine(self) -> None:
        """Waits `ENGINE_CHECK_S`, asks the engine for a sign of life, and again; runs until cancelled.

        Raises:
            EngineError: see `Engine.check`.
        """
        while True:
            await asyncio.sleep(ENGINE_CHECK_S)
            await self._engine.check()

    def _describe(self) -> Heartbeat:
        return Heartbeat(
            producer_id=self.context.producer_id,
            host=socket.gethostname(),
            pid=os.getpid(),
            policy_version=self._engine.policy_version,
            in_flight=tuple(InFlight(index=c.index, claimed_s=c.claimed_s, attempt=c.attempt) for c in self.table),
            tokens_per_s=self._tokens_per_s,
            num_tokens_generated=self._num_tokens,
            num_groups_appended=self.writer.num_groups_appended,
            num_weight_loads_failed=self.weights.num_failed,
            metrics_port=self.context.metrics_port,
            fingerprint=self._engine.fingerprint,
            sent_s=clock.steady_s(),
            last_error=self.weights.last_error,
            endpoint="" if self.endpoint is None else self.endpoint.url,
            instance=self.context.instance,
            run_id=self.weights.run_id,
            unreadable_version=self.weights.unreadable_version,
        )

    @property
    def _num_tokens(self) -> int:
        """Tokens sampled since the start."""
        return self._episodes.num_tokens + (0 if self.endpoint is None else self.endpoint.calls.num_tokens)
