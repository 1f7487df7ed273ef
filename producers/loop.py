"""The life of a rollout: claimed, posed, sampled, scored, appended. And the end of a producer's."""

import asyncio
import contextlib
import logging
import os
import socket
import time
from pathlib import Path
from typing import Any

from penstock.producers.endpoint.answers import AnswerParser
from penstock.producers.interfaces import Engine, EngineError, Environment
from penstock.producers.observe.event_log import EventLog
from penstock.producers.observe.metrics import ProducerMetrics
from penstock.producers.rollout.episode import Episodes
from penstock.producers.rollout.rewards import RewardFunction, RewardScorer
from penstock.producers.stream.claims import Claims
from penstock.producers.stream.connection import ProducerConnection
from penstock.producers.stream.heartbeat import HEARTBEAT_S, HeartbeatSender
from penstock.producers.stream.in_flight import Claim, Dead, InFlightTable
from penstock.producers.stream.writer import Writer
from penstock.producers.weights.follower import LoadReport, WeightFollower
from penstock.schemas.config import ConfigError, RunConfig
from penstock.schemas.heartbeat import Heartbeat, InFlight
from penstock.schemas.keys import Keys
from penstock.schemas.process.cancellation import cancel_and_wait

log = logging.getLogger(__name__)

GRACE_S = 3.0
"""A producer that is told to stop lets groups finish for so long before it hands the rest back."""
SHUTDOWN_TIMEOUT_S = 5.0
"""Redis gets so long to take what a stopping producer leaves; claims it does not hear of expire by themselves."""


class Producer:
    """Everything one producer process is made of, put together.

    answer_parser: of reasoning and tool calls in the answers to agents, where the run has an endpoint for them.
    stop: set from outside (a signal) to end `serve`; also set when the run is finished.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        runs: Path,
        producer_id: str,
        connection: ProducerConnection,
        engine: Engine,
        environment: Environment,
        reward: RewardFunction,
        tokenizer: Any,
        metrics: ProducerMetrics,
        metrics_port: int = 0,
        answer_parser: AnswerParser | None = None,
        stop: asyncio.Event | None = None,
    ) -> None:
        if config.endpoint is None and hasattr(environment, "converse"):
            raise ConfigError(
                f"environment.path = {config.environment.path!r}: it converses, which goes through the endpoint; "
                "expected an [endpoint] table in the run file"
            )
        keys = Keys(config.name)
        self.stop = stop or asyncio.Event()
        self._config = config
        self._producer_id = producer_id
        self._engine = engine
        self._metrics = metrics
        self._metrics_port = metrics_port
        self._telemetry = EventLog(config.folder(runs), producer_id)
        self._table = InFlightTable(num_groups=config.producers.groups_in_flight, group_size=config.group_size)
        streams = None if config.endpoint is None else (keys.evaluations,)
        self._claims = Claims(connection, keys, producer_id, self._table, config.producers, streams)
        self._weights = WeightFollower(
            connection, keys, engine, config.weights_folder(runs), metrics, self._record_load
        )
        self._scorer = RewardScorer(reward)
        self._episodes = Episodes(
            config,
            environment=environment,
            tokenizer=tokenizer,
            engine=engine,
            scorer=self._scorer,
            producer_id=producer_id,
            metrics=metrics,
        )
        self._writer = Writer(connection, keys, self._table, metrics)
        self._beat = HeartbeatSender(connection, keys, producer_id, self._describe, self._on_finished)
        self._running: set[asyncio.Task[None]] = set()
        self._run_is_finished = False
        self._tokens_per_s = 0.0
        self._endpoint = None
        if config.endpoint is not None:
            # Its server comes with the engine, and the launcher imports this module without either.
            from penstock.producers.endpoint.agent_endpoint import AgentEndpoint

            self._agent_claims = Claims(
                connection, keys, producer_id, self._table, config.producers, (keys.prompts,), one_at_a_time=True
            )
            self._endpoint = AgentEndpoint(
                config,
                producer_id=producer_id,
                keys=keys,
                connection=connection,
                claims=self._agent_claims,
                table=self._table,
                weights=self._weights,
                writer=self._writer,
                engine=engine,
                environment=environment,
                tokenizer=tokenizer,
                parser=answer_parser,
                metrics=metrics,
                telemetry=self._telemetry,
            )

    async def open(self) -> None:
        """Makes itself known to the run.

        Raises:
            RedisGoneError: Redis was away for too long.
            ProducerIdTakenError: another process runs under this id.
        """
        await self._beat.claim_id()
        await self._claims.open()
        if self._endpoint is not None:
            await self._agent_claims.open()
        self._telemetry.write("start", fingerprint=self._engine.fingerprint)

    async def serve(self) -> None:
        """Turns prompts into rollouts until told to stop, then leaves nothing behind that only it could finish.

        Raises:
            EngineError: the engine serves no longer. Its claims stay, and count as an attempt when they are taken over.
            RedisGoneError: Redis was away for too long.
        """
        parts = (
            self._beat.run,
            self._record_rate,
            self._weights.follow,
            self._weights.keep_current,
            self._claims.keep,
            self._writer.run,
        )
        try:
            async with asyncio.TaskGroup() as services:
                running = [services.create_task(part()) for part in parts]
                await self._work_until_stopped()
                heard = await self._drain()
                await cancel_and_wait(running)
            if heard:
                # Only now: a heartbeat sent after its removal would keep the id taken.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(SHUTDOWN_TIMEOUT_S):
                        await self._beat.stop()
        finally:
            if self._endpoint is not None:
                await self._endpoint.close(append=False)
            self._scorer.close()
            self._telemetry.close()

    async def _work_until_stopped(self) -> None:
        """Claims and runs groups until `stop`. The order in which things end here, then in `_drain`,
        then in `serve` is that of every clean stop."""
        async with asyncio.TaskGroup() as groups:
            claiming = groups.create_task(self._claim(groups))
            serving = groups.create_task(self._serve_agents())
            await self.stop.wait()
            await cancel_and_wait([claiming])
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0 if self._run_is_finished else GRACE_S):
                    if self._endpoint is not None:
                        await self._endpoint.drain()
                    await self._wait_until_idle()
            await cancel_and_wait([*self._running, serving])
            if self._endpoint is not None:
                await self._endpoint.close(append=not self._run_is_finished)

    async def _serve_agents(self) -> None:
        """Serves the run's agents, where it has an endpoint for them; runs until cancelled."""
        if self._endpoint is not None:
            await self._endpoint.start()
            await self._endpoint.run()

    async def _drain(self) -> bool:
        """Waits until Redis has every finished group and every unfinished claim is somebody else's to take.

        Returns False where Redis was not to be had in `SHUTDOWN_TIMEOUT_S`.
        """
        try:
            async with asyncio.timeout(SHUTDOWN_TIMEOUT_S):
                await self._writer.drain()
                num_claims = await self._claims.hand_back()
                if self._endpoint is not None:
                    num_claims += await self._agent_claims.hand_back()
                log.info("stopped: %d unfinished claims handed back", num_claims)
                return True
        except TimeoutError:
            idle_s = self._config.producers.claim_idle_s
            log.warning("stopped without Redis: %d claims are others' in %g s", len(self._table), idle_s)
            return False

    async def _claim(self, groups: asyncio.TaskGroup) -> None:
        """Waits for weights within the lag bound, for room, and for a prompt. A weight load, a group's append and the
        trainer's release unblock it. Runs until cancelled."""
        while True:
            await self._weights.wait_until_current(self._config.lag_bound)
            await self._table.wait_for_room()
            for claim in await self._claims.take():
                if claim.attempt == 1:
                    self._start(groups, claim)
                else:
                    await self._run_alone(groups, claim)

    def _start(self, groups: asyncio.TaskGroup, claim: Claim) -> None:
        task = groups.create_task(self._run(claim))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        self._metrics.in_flight.set(len(self._table))

    async def _run_alone(self, groups: asyncio.TaskGroup, claim: Claim) -> None:
        """A prompt that was given up before may be what ended its producer: nothing else is at stake beside it."""
        await self._wait_until_idle()
        self._start(groups, claim)
        await self._wait_until_idle()

    async def _wait_until_idle(self) -> None:
        while self._running:
            await asyncio.wait(set(self._running))

    async def _run(self, claim: Claim) -> None:
        """One claim from its prompt to the writer. Waits for weights that are fresh enough for it; a load unblocks it.

        An evaluation asks what policy `version` is worth, so it waits for that version itself (or a newer one).
        """
        max_attempts = self._config.producers.max_attempts
        if claim.attempt > max_attempts:
            self._writer.put(claim, Dead(f"attempts: handed out {max_attempts} times without a result"))
            return
        await self._weights.wait_for(claim.version, self._config.lag_bound if claim.evaluation_id is None else 0)
        run = self._episodes.run
        if claim.evaluation_id is not None and self._endpoint is not None and self._endpoint.evaluates:
            run = self._endpoint.evaluate
        try:
            self._writer.put(claim, await run(claim))
        except EngineError:
            raise
        except Exception as error:  # the isolation boundary of this loop: one group never ends the others
            log.exception("%s failed", claim)
            self._writer.put(claim, Dead(f"producer: {type(error).__name__}: {error}"))

    def _on_finished(self) -> None:
        if not self._run_is_finished:
            log.info("the run is finished")
        self._run_is_finished = True
        self.stop.set()

    def _record_load(self, report: LoadReport) -> None:
        self._telemetry.write(
            "weights",
            policy_version=report.policy_version,
            pause_s=report.pause_s,
            load_s=report.load_s,
            prefetch_s=report.prefetch_s,
            bytes=report.num_bytes,
        )

    async def _record_rate(self) -> None:
        """Waits `HEARTBEAT_S`, measures the token rate since, and again; runs until cancelled."""
        since, num_tokens = time.monotonic(), self._num_tokens
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            now, before = time.monotonic(), num_tokens
            num_tokens = self._num_tokens
            self._tokens_per_s = (num_tokens - before) / (now - since)
            since = now
            self._telemetry.write(
                "rate",
                tokens_per_s=self._tokens_per_s,
                num_tokens=num_tokens,
                in_flight=len(self._table),
                policy_version=self._engine.policy_version,
            )

    def _describe(self) -> Heartbeat:
        return Heartbeat(
            producer_id=self._producer_id,
            host=socket.gethostname(),
            pid=os.getpid(),
            policy_version=self._engine.policy_version,
            in_flight=tuple(InFlight(index=c.index, claimed_s=c.claimed_s, attempt=c.attempt) for c in self._table),
            tokens_per_s=self._tokens_per_s,
            num_tokens_generated=self._num_tokens,
            num_groups_appended=self._writer.num_groups_appended,
            num_weight_loads_failed=self._weights.num_failed,
            metrics_port=self._metrics_port,
            fingerprint=self._engine.fingerprint,
            sent_s=time.time(),
            last_error=self._weights.last_error,
            endpoint="" if self._endpoint is None else self._endpoint.url,
        )

    @property
    def _num_tokens(self) -> int:
        """Tokens sampled since the start."""
        return self._episodes.num_tokens + (0 if self._endpoint is None else self._endpoint.num_tokens)
