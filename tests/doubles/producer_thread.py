"""Runs a whole producer in a thread, with a scripted engine and a tokenizer of characters."""

import asyncio
import threading
import zlib
from collections import Counter
from pathlib import Path

from one_environment import alone
from penstock.producers.interfaces import Engine
from penstock.producers.loop import Producer
from penstock.producers.observe.metrics import ProducerMetrics
from penstock.producers.stream.connection import ProducerConnection
from penstock.producers.stream.context import ProducerContext
from penstock.schemas.config import RunConfig
from penstock.schemas.prompt import Prompt
from scripted_engine import ScriptedEngine


class Characters:
    """A tokenizer with one token per character."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [ord(character) % 90 + 2 for character in text]

    def batch_decode(self, rows: list[list[int]], **_: object) -> list[str]:
        return ["".join(chr(token) for token in row) for row in rows]


class ScoredTasks:
    """Tasks with rewards of 0 and 1 that depend on the completion alone."""

    num_evaluation_prompts = 8

    def prompt(self, index: int) -> Prompt:
        return Prompt(text=f"{index}")

    def evaluation_prompt(self, n: int) -> Prompt:
        return Prompt(text=f"e{n}")

    def reward(self, prompt: Prompt, completion: str) -> float:
        return float(zlib.crc32(completion.encode()) % 2)


class VariedTasks(ScoredTasks):
    """Tasks in which consecutive siblings have different rewards, so that no group is skipped for lack of variance."""

    def __init__(self) -> None:
        self._num_rewards: Counter[str] = Counter()

    def reward(self, prompt: Prompt, completion: str) -> float:
        self._num_rewards[prompt.text] += 1
        return float(self._num_rewards[prompt.text] % 2)


class ProducerThread(threading.Thread):
    """Serves from `start` until `finish` or the end of the run. problem: the error that ended it, None after a clean
    stop."""

    def __init__(
        self,
        config: RunConfig,
        url: str,
        runs: Path,
        producer_id: str = "producer-0",
        *,
        tasks: ScoredTasks | None = None,
        engine: Engine | None = None,
    ) -> None:
        super().__init__(daemon=True)
        self._config, self._url, self._runs, self._id = config, url, runs, producer_id
        self._loop: asyncio.AbstractEventLoop | None = None
        self._end: asyncio.Event | None = None
        self._tasks = tasks or ScoredTasks()
        self._engine = engine
        self.problem: BaseException | None = None

    def run(self) -> None:
        try:
            asyncio.run(self.serve())
        except Exception as error:
            self.problem = error

    def end(self) -> None:
        """Tells the producer to stop."""
        if self._loop is not None and self._end is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._end.set)

    def finish(self) -> None:
        """Stops the producer and waits for its end."""
        self.end()
        self.join(120)
        assert not self.is_alive()

    async def serve(self) -> None:
        """Serves in the caller's event loop, where an engine may be running already, instead of in a thread."""
        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        metrics, tasks = ProducerMetrics(), self._tasks
        connection = ProducerConnection.open(self._url, outage_s=90.0, metrics=metrics)
        try:
            context = ProducerContext(
                self._config, runs=self._runs, producer_id=self._id, connection=connection, metrics=metrics
            )
            environments = alone(self._config, tasks)
            producer = Producer(context, self._engine or ScriptedEngine(), environments, Characters(), stop=self._end)
            await producer.open()
            await producer.serve()
        finally:
            await connection.close()
