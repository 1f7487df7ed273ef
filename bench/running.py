"""Runs that are measured: their models and settings, whole ones as `penstock run` starts them, and producers without an
engine of their own."""

import os
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from bench.result import BenchError
from bench.section import Bench
from penstock.deploy.launch.child import Child
from penstock.deploy.launch.launcher import Launcher, part_command
from penstock.deploy.launch.live_view import View
from penstock.deploy.launch.placement import Placement
from penstock.deploy.launch.run_folder import RunFolder, resolved_toml
from penstock.producers.interfaces import Engine
from penstock.producers.loop import Producer
from penstock.producers.observe.metrics import ProducerMetrics
from penstock.producers.stream.connection import ProducerConnection
from penstock.producers.stream.context import ProducerContext
from penstock.schemas.config import RunConfig, load_config

PRODUCER_ID = "producer-0"


NEVER_PER_S = 1e-6
"""Updates of a feeder that announces its first policy alone."""
RUN_FILE = Path(__file__).parents[1] / "deploy" / "runs" / "demo.toml"


def make_model(folder: Path, **recipe: Any) -> Path:
    """Makes the demo's model, or one of another `recipe`, if there is none in `folder`; returns that. Raises
    BenchError."""
    from penstock.deploy.demo import make_model as models

    try:
        models.make_model(folder, models.ModelRecipe(**recipe), progress=lambda line: None)
    except (models.WarmStartError, FileExistsError) as error:
        raise BenchError(f"{folder}: {error}") from error
    return folder


def demo_model() -> Path:
    """Returns the demo's own model; makes it where `make demo` does."""
    return make_model(Path(load_config(RUN_FILE).model.path))


def random_model(bench: Bench, name: str, **recipe: int) -> Path:
    return make_model(bench.folder / f"model-{name}", train=False, **recipe)


def demo_config(name: str, model: Path, *overrides: str) -> RunConfig:
    """Returns the demo's run with another name and model, and without a port for metrics."""
    return load_config(RUN_FILE, [f"name={name}", f'model.path="{model}"', "metrics.port=0", *overrides])


def save_config(bench: Bench, config: RunConfig) -> str:
    """Writes a run file and returns its path."""
    file = bench.folder / f"{config.name}.toml"
    file.write_text(resolved_toml(config), encoding="utf-8")
    return str(file)


def start_feeder(config: RunConfig, folder: Path, updates_per_s: float) -> Child:
    """Starts `bench.feeder` at `REDIS_URL` with the model's own weights; it must be ended."""
    folder.mkdir(parents=True, exist_ok=True)
    run_file, weights = folder / "run.toml", Path(config.model.path) / "model.safetensors"
    run_file.write_text(resolved_toml(config), encoding="utf-8")
    command = [sys.executable, "-m", "bench.feeder", str(run_file), "--weights", str(weights)]
    return Child("feeder", [*command, "--updates-per-s", str(updates_per_s)], log=folder / "feeder.log")


class DeathsView(View):
    """Shows nothing but deaths."""

    def note(self, text: str) -> None:
        if "died" in text:
            print(f"    {text}", flush=True)

    def draw(self) -> None:
        """There is no frame."""


def launch(config: RunConfig, runs: Path, view: View, core_of: Mapping[str, int]) -> int:
    """Runs `config` from its beginning; returns the launcher's exit status. core_of: trainer and producers by role.

    Raises:
        PartDied, ServerError, ConfigError: see the launcher.
    """

    def command_for(part: str, config: RunConfig, runs: Path, resume: bool) -> Sequence[str]:
        command = part_command(part, config, runs, resume)
        arguments = command[command.index("penstock.deploy.cli") + 1 :]
        return [sys.executable, "-m", "bench.pipeline.pinned", str(core_of.get(arguments[0], -1)), *arguments]

    with RunFolder(config, runs, resume=False) as folder:
        folder.save(config)
        with view:
            return Launcher(
                config, runs, Placement(), resume=False, view=view, lock=folder.lock, command_for=command_for
            ).run()


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
