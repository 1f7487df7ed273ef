"""Whole runs, as `penstock run` starts them, with parts that another module starts; producers without an engine of
their own."""

import os
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from penstock.deploy.launch.launcher import Launcher, part_command
from penstock.deploy.launch.live_view import View
from penstock.deploy.launch.placement import Placement
from penstock.deploy.launch.run_folder import RunFolder
from penstock.producers.interfaces import Engine
from penstock.producers.loop import Producer
from penstock.producers.observe.metrics import ProducerMetrics
from penstock.producers.stream.connection import ProducerConnection
from penstock.producers.stream.context import ProducerContext
from penstock.schemas.config import RunConfig

PRODUCER_ID = "producer-0"


class DeathsView(View):
    """Shows nothing but deaths."""

    def note(self, text: str) -> None:
        if "died" in text:
            print(f"    {text}", flush=True)

    def draw(self) -> None:
        """There is no frame."""


def launch(config: RunConfig, runs: Path, view: View, starter: Callable[[str], Sequence[str]]) -> int:
    """Runs `config` from its beginning; returns the launcher's exit status.

    starter: by role, trainer or producer, the module that starts the part and its first arguments; those of the
        `penstock` command follow.

    Raises:
        PartDied, ServerError, ConfigError: see the launcher.
    """

    def command_for(part: str, config: RunConfig, runs: Path, resume: bool) -> Sequence[str]:
        command = part_command(part, config, runs, resume)
        arguments = command[command.index("penstock.deploy.cli") + 1 :]
        return [sys.executable, "-m", *starter(arguments[0]), *arguments]

    with RunFolder(config, runs, resume=False) as folder:
        folder.save(config)
        with view:
            launcher = Launcher(
                config, runs, Placement(), resume=False, view=view, lock=folder.lock, command_for=command_for
            )
            return launcher.run()


@asynccontextmanager
async def open_producer(
    config: RunConfig, runs: Path, engine: Engine, environments: Any, tokenizer: Any, metrics: ProducerMetrics
) -> AsyncIterator[Producer]:
    """Opens a producer at `REDIS_URL` with a running engine; its connection is closed at the end."""
    connection = ProducerConnection.open(os.environ["REDIS_URL"], outage_s=10.0, metrics=metrics)
    try:
        context = ProducerContext(config, runs=runs, producer_id=PRODUCER_ID, connection=connection, metrics=metrics)
        yield Producer(context, engine, environments, tokenizer)
    finally:
        await connection.close()
