"""One producer process: checks the settings, builds the parts, and runs the loop until a signal or the run's end."""

import asyncio
import gc
import hashlib
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, TypeVar

from redis.exceptions import RedisError

from penstock.producers.endpoint.access import api_key
from penstock.producers.endpoint.chat.answers import AnswerParser
from penstock.producers.interfaces import Engine, EngineError
from penstock.producers.loop import OtherRunError, Producer, QuarantinedError
from penstock.producers.observe.metrics import ProducerMetrics
from penstock.producers.observe.running_loop import RunningLoop
from penstock.producers.rollout.episode import load_tokenizer
from penstock.producers.rollout.programs import end_programs
from penstock.producers.rollout.run_environments import open_environments
from penstock.producers.rollout.teacher import TeacherServer
from penstock.producers.stream.connection import ProducerConnection
from penstock.producers.stream.context import ProducerContext
from penstock.producers.stream.heartbeat import ProducerIdTakenError, check_id_is_free
from penstock.producers.weights.host_folder import folder_of_copies
from penstock.schemas.config import ConfigError, RunConfig
from penstock.schemas.keys import Keys
from penstock.schemas.process import logs
from penstock.schemas.process.outage import RedisGoneError
from penstock.schemas.process.ports import authority
from penstock.schemas.process.redis_url import redis_url
from penstock.schemas.process.stopping import stop_signals
from penstock.schemas.rollout import shown_error

log = logging.getLogger(__name__)

T = TypeVar("T")
EngineFactory = Callable[..., Awaitable[Engine]]
"""`await factory(config, seed=...)` boots an engine that is ready to sample, or raises EngineError."""

EXPECTED_ERRORS = (
    ConfigError,
    EngineError,
    RedisGoneError,
    ProducerIdTakenError,
    QuarantinedError,
    OtherRunError,
    RedisError,
)
"""Each ends the process with one logged line."""


def main(
    config: RunConfig, *, runs: Path, producer_id: str | None = None, engine_factory: EngineFactory | None = None
) -> int:
    """Runs one producer until SIGTERM, SIGINT, SIGHUP or the end of the run; returns the exit status.

    It is 0 after a clean stop. Otherwise one line is logged: 2 means that the settings cannot be used, 1 that the
    producer cannot start or continue for another reason (Redis, the engine, an id in use, a quarantine, a `sys.exit()`
    or KeyboardInterrupt in a task that the user's code started).
    """
    name = producer_id or f"{socket.gethostname()}-{os.getpid()}"
    logs.configure("producer", run=config.name, id=name)
    status = 0
    try:
        with asyncio.Runner(loop_factory=RunningLoop) as runner:
            runner.run(_produce(config, runs, name, engine_factory or start_vllm))
    except* EXPECTED_ERRORS as errors:
        first = _first(errors)
        log.error("producer %s ends: %s", name, first)
        status = 2 if isinstance(first, ConfigError) else 1
    except* (SystemExit, KeyboardInterrupt) as errors:  # Ctrl-C raises none here
        ended = _first(errors)
        log.error("producer %s ends: the user's code raised %s", name, shown_error(ended), exc_info=ended)
        status = 1
    finally:
        end_programs()
    return status


async def _produce(config: RunConfig, runs: Path, producer_id: str, engine_factory: EngineFactory) -> None:
    stop = asyncio.Event()
    for number in stop_signals():
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with AsyncExitStack() as closing:
        building = _build(config, runs, producer_id, engine_factory, stop, closing)
        # Until the producer serves, it holds no claims: a signal cancels the start.
        producer = await _unless_stopped(stop, building)
        if producer is not None:
            loop = asyncio.get_running_loop()
            assert isinstance(loop, RunningLoop)
            gc.collect()
            gc.freeze()  # to look through all that is loaded again takes half a second, in which nothing else runs
            loop.watch()  # until here, it is blocked by what is loaded
            await producer.serve()


async def _build(
    config: RunConfig,
    runs: Path,
    producer_id: str,
    engine_factory: EngineFactory,
    stop: asyncio.Event,
    closing: AsyncExitStack,
) -> Producer:
    """Builds the producer, the cheap checks first; what it opens is closed by `closing`."""
    environments = open_environments(config)
    tokenizer = load_tokenizer(config)
    folder_of_copies(config.weights.host_folder)  # raises before the engine boots
    metrics = ProducerMetrics(run=config.name, producer=producer_id)
    connection = ProducerConnection.open(redis_url(config, runs), outage_s=config.redis.outage_s, metrics=metrics)
    closing.push_async_callback(connection.close)
    await check_id_is_free(connection, Keys(config.name), producer_id)
    port = metrics.registry.serve(config.metrics, config.folder(runs), producer_id)
    closing.callback(metrics.registry.close)
    parser = answer_parser(config, tokenizer)
    teacher = None
    if config.teacher is not None and config.teacher_url is not None:
        server = TeacherServer(config.teacher)
        closing.push_async_callback(server.close)
        await server.check(tokenizer)  # before the engine boots
        teacher = server.score
    engine = await engine_factory(config, seed=_seed(config, producer_id))
    closing.push_async_callback(engine.close)
    logs.bind(policy_version=lambda: engine.policy_version)
    log.info("producer %s: engine ready, metrics on %s", producer_id, authority(config.metrics.host, port))
    context = ProducerContext(
        config,
        runs=runs,
        producer_id=producer_id,
        connection=connection,
        metrics=metrics,
        metrics_port=port,
        teacher=teacher,
    )
    producer = Producer(context, engine, environments, tokenizer, answer_parser=parser, stop=stop)
    await producer.open()
    return producer


async def _unless_stopped(stop: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """Returns the result of `work`; cancels it and returns None if `stop` is set before it is done."""
    task, stopping = asyncio.create_task(work), asyncio.create_task(stop.wait())
    await asyncio.wait({task, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if not task.done():
        task.cancel()
        await asyncio.wait({task})
    return None if task.cancelled() else task.result()


async def start_vllm(config: RunConfig, *, seed: int) -> Engine:
    """Boots a producer's vLLM engine; an `EngineFactory`."""
    # vLLM reads both when it is imported, here and in its engine process: no log handler of its own, and the level.
    os.environ.setdefault("VLLM_CONFIGURE_LOGGING", "0")
    logging.getLogger("vllm").setLevel(os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"))
    try:
        from penstock.producers.engines.vllm import VllmEngine
    except ImportError as error:
        raise EngineError(f"vLLM cannot be imported ({error}); install the extra [cpu] or [gpu]") from error
    logs.adopt()
    logs.hand_down("vllm")
    return await VllmEngine.start(config, seed=seed)


def answer_parser(config: RunConfig, tokenizer: Any) -> AnswerParser | None:
    """Returns the parser that `[endpoint]` names, None without one."""
    if config.endpoint is not None:
        api_key(config.endpoint)  # raises before the engine boots
    if config.endpoint is None or (config.endpoint.tool_parser is None and config.endpoint.reasoning_parser is None):
        return None
    try:
        from penstock.producers.engines.answer_parser import VllmAnswerParser
    except ImportError as error:
        raise EngineError(f"vLLM cannot be imported ({error}); install the extra [cpu] or [gpu]") from error
    return VllmAnswerParser(tokenizer, config.endpoint, config.model.chat_template_kwargs)


def _seed(config: RunConfig, producer_id: str) -> int:
    """Returns a producer's own random seed: engines that share one would sample the same noise."""
    digest = hashlib.blake2b(f"{config.seed}:{producer_id}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1


def _first(errors: BaseExceptionGroup) -> BaseException:
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
