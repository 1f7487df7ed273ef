"""The sinks of a run, fed without holding up training."""

import contextlib
import importlib.util
import logging
import netrc
import os
import pkgutil
import queue
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from penstock.consumers.observe.sinks.points import ShownCompletion, Sink, SinkPoint, numbers_of
from penstock.schemas.config import (
    WANDB_OFFLINE,
    ConfigError,
    MetricsConfig,
    MlflowConfig,
    RunConfig,
    TrackioConfig,
    WandbConfig,
)

log = logging.getLogger(__name__)

MAX_WAITING = 1000
"""The most points that wait for a sink; further ones are dropped and counted."""
CLOSE_S = 30.0
"""How long a trainer that ends waits for a sink."""
RETRY_S = 60.0
"""The pause after a sink's failure."""
_IN_OWN_PROCESS = {
    "wandb": "penstock.consumers.observe.sinks.weights_and_biases:WeightsAndBiases",
    "trackio": "penstock.consumers.observe.sinks.trackio:Trackio",
    "mlflow": "penstock.consumers.observe.sinks.mlflow:Mlflow",
}
_WANDB_KEYS = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")


def check_sinks(config: MetricsConfig) -> list[str]:
    """Raises ConfigError if the package of a sink is not installed. Returns a warning if W&B is online without a key,
    which its process would find only later. Does not import W&B's package, which changes how a process ends."""
    for package in ("tensorboard", *_IN_OWN_PROCESS):
        is_wanted = bool(getattr(config, package))
        spec = importlib.util.find_spec(package) if is_wanted else None
        if is_wanted and (spec is None or spec.origin is None):  # a folder of that name is no package
            raise ConfigError(
                f"metrics.{package} is set: the package {package} is not installed; expected the extra: "
                f"pip install 'penstock[{package}]'"
            )
    if config.wandb is None or os.environ.get("WANDB_MODE") in WANDB_OFFLINE or any(map(os.environ.get, _WANDB_KEYS)):
        return []
    host = urlsplit(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname or ""
    file = Path(os.environ.get("NETRC") or "~/.netrc").expanduser()
    with contextlib.suppress(OSError, netrc.NetrcParseError):
        if netrc.netrc(str(file)).authenticators(host):
            return []
    return [
        f"metrics.wandb: no key for {host}, neither in WANDB_API_KEY nor in {file}: the run would train and W&B get "
        "nothing; expected a key (`wandb login` writes one), or WANDB_MODE=offline"
    ]


class Sinks:
    """Every sink of the run file, each fed by a thread of its own. Of a sink's failures the first is logged and all are
    counted; it is opened again later, and points are dropped and counted until then.

    start: the update that this trainer continues after; a sink's points of later updates are void.
    on_error: called with the sink's name at each failure and at each point dropped.

    Raises:
        ConfigError: see `check_sinks`.
    """

    def __init__(self, config: RunConfig, run_folder: Path, start: int, on_error: Callable[[str], None]) -> None:
        metrics = config.metrics
        check_sinks(metrics)
        self._last_update = start
        self._feeders: list[_Feeder] = []
        if metrics.tensorboard:
            opened = partial(_tensorboard, run_folder / "tensorboard", start)
            self._feeders.append(_Feeder("tensorboard", opened, on_error))
        for name in _IN_OWN_PROCESS:
            if (settings := getattr(metrics, name)) is not None:
                opened = partial(_in_own_process, name, settings, config, run_folder)
                self._feeders.append(_Feeder(name, opened, on_error))

    def update(self, line: Mapping[str, Any], completions: tuple[ShownCompletion, ...] = ()) -> None:
        """Takes a line of updates.jsonl. The line of a batch that made no update repeats a number and is ignored."""
        if line["update"] > self._last_update:
            self._last_update = line["update"]
            self._feed("updates", line, completions)

    def evaluation(self, line: Mapping[str, Any]) -> None:
        self._feed("evaluations", line)

    def close(self) -> None:
        """Waits until everything is written, for `CLOSE_S` at most. A second call does nothing."""
        for feeder in self._feeders:
            feeder.end()
        for feeder in self._feeders:
            feeder.join()
        self._feeders = []

    def _feed(self, kind: str, line: Mapping[str, Any], completions: tuple[ShownCompletion, ...] = ()) -> None:
        if self._feeders:
            point = SinkPoint(kind, line["update"], line["time_s"], numbers_of(line), completions)
            for feeder in self._feeders:
                feeder.put(point)


class _Feeder:
    """Opens a sink and writes points to it, in a thread that waits for a point: `put` or `end` unblocks it.

    open_sink: called with `reopened`, True after the first open.
    """

    def __init__(self, name: str, open_sink: Callable[[bool], Sink], on_error: Callable[[str], None]) -> None:
        self._name = name
        self._open_sink = open_sink
        self._on_error = on_error
        self._sink: Sink | None = None
        self._has_opened = self._has_warned = self._is_ending = False
        self._next_try_s = 0.0
        self._points: queue.SimpleQueue[SinkPoint | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"sink-{name}", daemon=True)
        self._thread.start()

    def put(self, point: SinkPoint) -> None:
        if self._points.qsize() < MAX_WAITING:
            self._points.put(point)
        else:
            self._failed("it does not keep up, points are dropped")

    def end(self) -> None:
        self._is_ending = True
        self._points.put(None)

    def join(self) -> None:
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            self._failed(f"it has not taken the last points within {CLOSE_S:.0f} s")

    def _run(self) -> None:
        self._open()
        while (point := self._points.get()) is not None:
            if self._sink is None and time.monotonic() >= self._next_try_s and not self._is_ending:
                self._open()
            if self._sink is None:
                self._failed("points are dropped until it is open again")
            else:
                self._write(self._sink, point)
        try:
            if self._sink is not None:
                self._sink.close()
        except Exception as error:
            self._failed(f"{type(error).__name__}: {error}")

    def _open(self) -> None:
        try:
            self._sink = self._open_sink(self._has_opened)
            self._has_opened = True
        except Exception as error:  # the isolation boundary: a sink's failure never reaches training
            self._pause(f"it cannot be opened: {type(error).__name__}: {error}")

    def _write(self, sink: Sink, point: SinkPoint) -> None:
        try:
            sink.write(point)
        except Exception as error:
            self._sink = None
            with contextlib.suppress(Exception):  # counted below
                sink.close()
            self._pause(f"{type(error).__name__}: {error}")

    def _pause(self, why: str) -> None:
        self._next_try_s = time.monotonic() + RETRY_S
        self._failed(why)

    def _failed(self, why: str) -> None:
        self._on_error(self._name)
        if not self._has_warned:
            self._has_warned = True
            log.warning("metrics.%s: %s; training goes on, later failures are counted only", self._name, why)


def _tensorboard(folder: Path, start: int, reopened: bool) -> Sink:
    from penstock.consumers.observe.sinks.tensorboard import TensorBoard  # its package is an extra

    return TensorBoard(folder, None if reopened else start)


def _in_own_process(
    name: str,
    settings: WandbConfig | TrackioConfig | MlflowConfig,
    config: RunConfig,
    run_folder: Path,
    reopened: bool,
) -> Sink:
    from penstock.consumers.observe.sinks.in_own_process import InOwnProcess

    return InOwnProcess(name, partial(_open, name, settings, config, run_folder))


def _open(name: str, *arguments: Any) -> Sink:
    """Opens a sink in its own process, which alone imports it."""
    sink: Sink = pkgutil.resolve_name(_IN_OWN_PROCESS[name])(*arguments)
    return sink
