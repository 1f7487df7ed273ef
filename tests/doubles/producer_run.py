"""A server, a trainer played by hand, and whole producers in the test's own event loop with scripted engines."""

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

from penstock.producers.loop import Producer
from penstock.schemas.config import ProducersConfig, RunConfig
from penstock.schemas.keys import PRODUCERS_GROUP, Field, Keys
from penstock.schemas.prompt import Prompt
from scripted_engine import ScriptedEngine

KEYS = Keys("test")
QUICK = ProducersConfig(groups_in_flight=8, claim_idle_s=0.4, claim_refresh_s=0.1)
"""For producers that take each other's claims over. On a busy machine one takes a claim over whose holder lives."""
PATIENT = ProducersConfig(groups_in_flight=8)


class Numbers:
    """Task n is the text `n`; task 13 has none, and the reward of task 14 fails."""

    num_evaluation_prompts = 8

    def prompt(self, index: int) -> Prompt:
        if index == 13:
            raise LookupError("task 13 is missing")
        return Prompt(text=str(index))

    def evaluation_prompt(self, n: int) -> Prompt:
        return Prompt(text=f"e{n}")

    def reward(self, prompt: Prompt, completion: str) -> float:
        return 1 / 0 if prompt.text == "14" else 1.0


def ids(text: str) -> tuple[int, ...]:
    return tuple("0123456789+= -abcdefghijklmnopqrstuvwxyz".index(character) + 2 for character in text)


class Run:
    """One server, one hand-played trainer, and the producers that the test starts."""

    def __init__(self, server, config: RunConfig, trainer, build: Callable[..., Producer]) -> None:
        self.server = server
        self.config = config
        self.trainer = trainer
        self.client = server.client
        self.build = build
        self.tasks: list[asyncio.Task] = []

    async def producer(
        self, engine: ScriptedEngine | None = None, producer_id: str = "a", *, via: Any = None
    ) -> tuple[Producer, Any]:
        """A producer that serves, and its task. via: a proxy before the server."""
        producer = self.build(engine or ScriptedEngine(), producer_id, via or self.server)
        await producer.open()
        task = asyncio.create_task(producer.serve())
        self.tasks.append(task)
        return producer, task

    async def read(self, num_entries: int) -> list[dict[bytes, bytes]]:
        return await asyncio.to_thread(self.trainer.read, num_entries, 20.0)

    def num_open(self) -> int:
        return self.client.xlen(KEYS.prompts)

    def num_claimed(self) -> int:
        return self.client.xpending(KEYS.prompts, PRODUCERS_GROUP)["pending"]

    def appended(self) -> Counter[int]:
        """How often each index stands on the rollout stream."""
        return Counter(int(fields[Field.INDEX]) for _, fields in self.client.xrange(KEYS.rollouts))
