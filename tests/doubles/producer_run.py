"""A server, a trainer operated by the test, and whole producers in its event loop with scripted engines."""

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
QUICK = ProducersConfig(groups_in_flight=8, claim_idle_s=0.4)
"""For producers that take over each other's claims. On a busy machine one may take over a live producer's claim."""
PATIENT = ProducersConfig(groups_in_flight=8)


class Numbers:
    """Task n is the text `n`; task 13 is missing, and the reward of task 14 raises."""

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
    """Returns the ids of a text in the tokenizer of the fixture `model_folder`."""
    return tuple("0123456789+= -abcdefghijklmnopqrstuvwxyz".index(character) + 2 for character in text)


class ProducerRun:
    """One server, one trainer operated by the test, and the producers that it starts."""

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
        """Starts a producer; returns it and its task. via: a proxy in front of the server."""
        producer = self.build(engine or ScriptedEngine(), producer_id, via or self.server)
        await producer.open()
        task = asyncio.create_task(producer.serve())
        self.tasks.append(task)
        return producer, task

    async def read(self, num_entries: int) -> list[dict[bytes, bytes]]:
        """Waits for the next entries of the rollout stream."""
        return await asyncio.to_thread(self.trainer.read, num_entries)

    def num_open(self) -> int:
        return self.client.xlen(KEYS.prompts)

    def num_claimed(self) -> int:
        return self.client.xpending(KEYS.prompts, PRODUCERS_GROUP)["pending"]

    def appended(self) -> Counter[int]:
        """Returns how often each index is on the rollout stream."""
        return Counter(int(fields[Field.INDEX]) for _, fields in self.client.xrange(KEYS.rollouts))
