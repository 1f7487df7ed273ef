"""A run at Weights & Biases, in a process of its own.

The package changes how the process around it ends: hooks around `sys.exit`, and an unlimited wait for an unreachable
server. A trainer must not wait for either.
"""

import json
import logging
import multiprocessing
import os
import signal
import threading
import time
import uuid
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec

from penstock.consumers.observe.sinks.points import SinkPoint
from penstock.schemas.config import WANDB_OFFLINE, RunConfig, WandbConfig
from penstock.schemas.process import logs
from penstock.schemas.process.files import write_whole

FINISH_S = 30.0
"""How long W&B may take to upload the last points, whether the trainer lives or not."""


class WandbError(RuntimeError):
    """A failure in W&B's process."""


class WeightsAndBiases:
    """One W&B run for all trainers of a run: `wandb.json` keeps its id. The step is the update.

    Online, updates that W&B has are not sent again after a resume. Offline it is unknown what the server has: each
    trainer leaves a folder of its own under `wandb/`, all with one id, and a repeated update is in several.

    Raises:
        WandbError: no key, no server.
    """

    def __init__(self, wandb: WandbConfig, config: RunConfig, run_folder: Path) -> None:
        run_id = _run_id(run_folder / "wandb.json")
        logs.hand_down()
        context = multiprocessing.get_context("spawn")
        self._connection, far_end = context.Pipe()
        # A daemon ends with this process at the latest.
        self._process = context.Process(
            target=_serve, args=(far_end, wandb, config, run_folder, run_id, FINISH_S), daemon=True
        )
        self._process.start()
        far_end.close()
        self._answer()

    def write(self, point: SinkPoint) -> None:
        self._connection.send(point)
        self._answer()

    def close(self) -> None:
        self._connection.send(None)
        if not self._connection.poll(FINISH_S):
            self._process.terminate()
            raise WandbError(f"it has not taken the last points within {FINISH_S:.0f} s")
        self._answer()

    def _answer(self) -> None:
        """Waits for the answer to the last message; the answer, or the end of the process, unblocks it."""
        try:
            problem = self._connection.recv()
        except EOFError:
            raise WandbError("its process has ended") from None
        if problem is not None:
            raise WandbError(problem)


def _run_id(file: Path) -> str:
    try:
        return str(json.loads(file.read_text("utf-8"))["id"])
    except (FileNotFoundError, ValueError, KeyError):
        new = uuid.uuid4().hex[:8]
        write_whole(file, json.dumps({"id": new}))
        return new


def _serve(
    connection: Connection, wandb: WandbConfig, config: RunConfig, run_folder: Path, run_id: str, finish_s: float
) -> None:
    """Opens the W&B run, logs points until it receives None or the trainer ends, then finishes the run. Answers each
    message with None or an error. Ends `finish_s` after the trainer at the latest.

    Waits for a message; one, or the trainer's end, unblocks it.
    """
    threading.Thread(target=_end_after_parent, args=(finish_s,), name="parent", daemon=True).start()
    os.environ["WANDB_SILENT"] = "true"
    for number in (signal.SIGINT, signal.SIGHUP):  # a terminal's are for the trainer, which then closes this sink
        signal.signal(number, signal.SIG_IGN)
    logs.inherit("wandb")
    try:
        run = _Run(wandb, config, run_folder, run_id)
    except Exception as error:
        connection.send(f"{type(error).__name__}: {error}")
        return
    connection.send(None)
    while (point := _next(connection)) is not None:
        connection.send(_problem(run.write, point))
    problem = _problem(run.finish)
    if not connection.closed:
        connection.send(problem)


def _end_after_parent(finish_s: float) -> None:
    """Ends this process `finish_s` after the trainer: W&B waits for an unreachable server without a limit."""
    trainer = multiprocessing.parent_process()
    assert trainer is not None
    trainer.join()
    time.sleep(finish_s)
    os._exit(1)


def _next(connection: Connection) -> SinkPoint | None:
    try:
        point: SinkPoint | None = connection.recv()
        return point
    except EOFError:  # the trainer was killed; W&B has what was sent before
        connection.close()
        return None


def _problem(call: Any, *arguments: Any) -> str | None:
    try:
        call(*arguments)
        return None
    except Exception as error:
        return f"{type(error).__name__}: {error}"


class _Run:
    def __init__(self, wandb: WandbConfig, config: RunConfig, run_folder: Path, run_id: str) -> None:
        import wandb as package

        logging.getLogger("wandb").setLevel(logging.WARNING)  # it would log the whole configuration
        self._run = package.init(
            project=wandb.project,
            name=config.name,
            id=run_id,
            # Offline the server cannot be asked, and `wandb sync` goes by the id.
            resume=None if os.environ.get("WANDB_MODE") in WANDB_OFFLINE else "allow",
            dir=run_folder,
            config=msgspec.to_builtins(config),
            settings=package.Settings(silent=True, console="off", disable_git=True, x_disable_stats=True),
        )
        self._run.define_metric("evaluation/*", step_metric="evaluation/update")
        self._step: int = self._run.step
        """W&B drops rows of an earlier step."""
        self._last_update = self._step - 1
        """The last update on the server."""

    def write(self, point: SinkPoint) -> None:
        if point.kind == "evaluations":
            # It follows its update's own line, and W&B takes steps in order, so it has an axis of its own.
            named = {f"evaluation/{name}": value for name, value in point.numbers.items()}
            self._log({**named, "evaluation/update": point.update}, point.update)
        elif point.update > self._last_update:
            self._last_update = point.update
            self._log(point.numbers, point.update)

    def _log(self, numbers: dict[str, float], update: int) -> None:
        self._step = max(self._step, update)
        self._run.log(numbers, step=self._step)

    def finish(self) -> None:
        self._run.finish()
