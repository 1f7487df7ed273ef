"""The pipeline section: what streaming, updating in flight and asynchrony cost and bring."""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from penstock.deploy.launch.child import Child, describe_status
from penstock.deploy.launch.redis_server import RedisServer
from penstock.deploy.launch.start_checks import resolved_toml
from penstock.schemas.config import ConfigError, RunConfig, load_config

from bench.modes import ACCURACY, ModeRun, mode_breakdowns, rate_figure, run_mode, time_figure
from bench.pauses import Paused, PauseSettings
from bench.records import record_figures
from bench.result import BenchError, Breakdown, Figure, Goal, Result, compare, describe_machine, now
from bench.streaming import Load, Streamed, StreamingSettings

RUN_FILE = Path(__file__).parents[1] / "deploy" / "runs" / "demo.toml"
VLLM_SLEEP_S = 0.02
"""What vLLM's pause_generation sleeps: part of a pause that nobody who calls it can avoid."""
PART_LIMIT_S = 900.0
EVALUATE_EVERY = 5
"""Updates between evaluations where the time to an accuracy is measured: that time is no finer than they are."""
NEVER = 10**9

LARGE_MODEL = ("hidden_size=1024", "intermediate_size=3072", "num_layers=4", "num_heads=16", "num_kv_heads=8",
               "head_dim=64")  # fmt: skip
"""A recipe of 200 MB of float32 weights."""


class PipelineSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How long and how often. The defaults take about ten minutes on two quiet cores."""

    streaming_rounds: int = 3
    streaming_window_s: float = 8.0
    updates_per_s: tuple[float, ...] = (0.5, 3.5)
    """The first is what the goal is set for, the second is the demo's."""
    pause_blocks: int = 3
    small_updates_per_block: int = 12
    large_updates_per_block: int = 5
    rate_limit_s: float = 30.0
    learning_limit_s: float = 100.0
    """Seconds of training for a run of the modes; those that learn end earlier once they have reached the accuracy."""


QUICK = PipelineSettings(
    streaming_rounds=1,
    streaming_window_s=3.0,
    pause_blocks=1,
    small_updates_per_block=3,
    large_updates_per_block=2,
    rate_limit_s=6.0,
    learning_limit_s=12.0,
)
"""Shows that everything runs. Its figures mean nothing."""

Found = tuple[list[Figure], list[Breakdown]]


def measure_pipeline(rows: Sequence[str], settings: PipelineSettings, run_file: Path, work: Path) -> Result:
    """Measures the named rows of `ROWS` in order; scratch goes to a folder under `work` that is removed at the end.

    Raises:
        BenchError, ConfigError, PartDied, ServerError: a row could not be measured.
    """
    machine, date, began = describe_machine(), now(), time.monotonic()
    figures: list[Figure] = []
    breakdowns: list[Breakdown] = []
    with scratch(work) as folder:
        bench = _Bench(settings, run_file, folder)
        for row in rows:
            print(f"pipeline: {row} ...", flush=True)
            found = ROWS[row](bench)
            figures += found[0]
            breakdowns += found[1]
    return Result(
        section="pipeline",
        date=date,
        machine=machine,
        settings={"run_file": os.path.relpath(run_file), **msgspec.to_builtins(settings)},
        wall_s=time.monotonic() - began,
        figures=tuple(figures),
        breakdowns=tuple(breakdowns),
    )


@contextmanager
def scratch(work: Path) -> Iterator[Path]:
    """A new folder under `work`, removed at the end; kept, and named, where something failed."""
    work.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="bench-", dir=work)).absolute()
    try:
        yield folder
    except Exception:
        print(f"bench: logs of what failed are in {folder}", file=sys.stderr)
        raise
    except KeyboardInterrupt:
        shutil.rmtree(folder)
        raise
    shutil.rmtree(folder)


class _Bench:
    """One run of the section: its rows."""

    def __init__(self, settings: PipelineSettings, run_file: Path, folder: Path) -> None:
        self._settings = settings
        self._run_file = run_file
        self._folder = folder

    def records(self) -> Found:
        return record_figures(), []

    def pause(self) -> Found:
        settings = self._settings
        small = self._pauses("pause-1MB", (), settings.small_updates_per_block, sequences=32, spacing_s=0.15)
        large = self._pauses("pause-200MB", LARGE_MODEL, settings.large_updates_per_block, sequences=8, spacing_s=0.5)
        return [pause_figure("1 MB", small, 1.25), pause_figure("200 MB", large, 1.1)], []

    def _pauses(
        self, name: str, recipe: Sequence[str], updates_per_block: int, *, sequences: int, spacing_s: float
    ) -> Paused:
        run_file = self._save(self._config(name, self._random_model(name, recipe)))
        settings = PauseSettings(
            run_file=str(run_file),
            blocks=self._settings.pause_blocks,
            updates_per_block=updates_per_block,
            sequences_in_flight=sequences,
            spacing_s=spacing_s,
        )
        return self._measure_engine("pauses", name, settings, Paused)

    def streaming(self) -> Found:
        model = self._random_model("streaming", ())
        config = self._config("streaming", model, f'weights.folder="{model}"')
        settings = StreamingSettings(
            run_file=str(self._save(config)),
            runs=str(self._folder / "runs"),
            loads=(
                # Ends by chance: a random model says <eos> once in some 98 tokens.
                Load(name="long completions", max_tokens=256, ramp_s=3.0, margin_s=2.5),
                # What the demo's trained model answers: three digits and <eos>.
                Load(name="demo's completions", max_tokens=4, ramp_s=1.5, margin_s=0.3),
            ),
            updates_per_s=self._settings.updates_per_s,
            rounds=self._settings.streaming_rounds,
            window_s=self._settings.streaming_window_s,
        )
        server = RedisServer(self._folder / "redis", maxmemory_mb=512)
        try:
            found = self._measure_engine(
                "streaming", "streaming", settings, list[Streamed], environment={"REDIS_URL": server.url}
            )
        finally:
            server.stop()
        goal_rate = self._settings.updates_per_s[0]
        return [figure for streamed in found for figure in streaming_figures(streamed, goal_rate)], []

    def modes(self) -> Found:
        model = Path(load_config(self._run_file).model.path)
        if not model.is_dir():
            self._make_model(model, ())
        figures: list[Figure] = []
        breakdowns: list[Breakdown] = []
        fixed: dict[str, ModeRun] = {}
        learning: dict[str, ModeRun] = {}
        for mode in ("asynchronous", "synchronous"):
            # So small a learning rate moves no weight: every update meets the same work.
            config = self._mode_config(mode, model, "fixed", "trainer.learning_rate=1e-12", f"evaluation.every={NEVER}")
            fixed[mode] = run_mode(config, self._folder / "runs", limit_s=self._settings.rate_limit_s)
            breakdowns += mode_breakdowns(mode, fixed[mode])
        figures.append(rate_figure(fixed["asynchronous"], fixed["synchronous"], config))
        for mode in fixed:
            config = self._mode_config(mode, model, "learning", f"evaluation.every={EVALUATE_EVERY}")
            learning[mode] = run_mode(
                config, self._folder / "runs", limit_s=self._settings.learning_limit_s, accuracy=ACCURACY
            )
        figures.append(time_figure(learning["asynchronous"], learning["synchronous"]))
        return figures, breakdowns

    def _mode_config(self, mode: str, model: Path, what: str, *overrides: str) -> RunConfig:
        own = (f"mode={mode}", "producers.count=1", "producers.num_threads=1", "trainer.num_threads=1")
        return self._config(f"{mode}-{what}", model, *own, *overrides)

    def _config(self, name: str, model: Path, *overrides: str) -> RunConfig:
        return load_config(self._run_file, [f"name={name}", f'model.path="{model}"', "metrics.port=0", *overrides])

    def _save(self, config: RunConfig) -> Path:
        file = self._folder / f"{config.name}.toml"
        file.write_text(resolved_toml(config))
        return file

    def _random_model(self, name: str, recipe: Sequence[str]) -> Path:
        folder = self._folder / f"model-{name}"
        self._make_model(folder, ("train=false", *recipe))
        return folder

    def _make_model(self, folder: Path, recipe: Sequence[str]) -> None:
        command = [sys.executable, "-m", "penstock.deploy.cli", "make-model", str(folder)]
        for field in recipe:
            command += ["--set", field]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise BenchError(f"{' '.join(command[3:])}: {done.stderr.strip() or describe_status(done.returncode)}")

    def _measure_engine(
        self, kind: str, name: str, settings: Any, result_type: Any, *, environment: dict[str, str] | None = None
    ) -> Any:
        """Runs `bench.engine_part` and returns what it found. Ends with it, however that is."""
        settings_file, result_file = self._folder / f"{name}-settings.json", self._folder / f"{name}-result.json"
        settings_file.write_bytes(msgspec.json.encode(settings))
        command = [sys.executable, "-m", "bench.engine_part", kind, str(settings_file), str(result_file)]
        threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        child = Child(name, command, log=self._folder / f"{name}.log", environment=threads | (environment or {}))
        try:
            deadline = time.monotonic() + PART_LIMIT_S
            while child.poll() is None:
                if time.monotonic() > deadline:
                    raise BenchError(f"{name}: not done after {PART_LIMIT_S:g} s; its log ends:\n{child.last_lines()}")
                time.sleep(0.1)
        finally:
            child.kill()
        if child.returncode:
            raise BenchError(f"{name} {describe_status(child.returncode)}; its log ends:\n{child.last_lines()}")
        return msgspec.json.decode(result_file.read_bytes(), type=result_type)


def pause_figure(size: str, paused: Paused, at_most: float) -> Figure:
    reference_s = paused.bare_load_s + VLLM_SLEEP_S
    return compare(
        f"pause per update, {size} of weights",
        unit="ms",
        measured=paused.pause_s * 1000,
        reference=reference_s * 1000,
        reference_is="bare load of the same file by the idle engine + the 20 ms that vLLM's pause_generation sleeps",
        goal=Goal(at_most=at_most),
        details={
            **msgspec.to_builtins(paused),
            "ratio_of_token_gap": max(0.0, paused.token_gap_s - paused.step_s) / reference_s,
        },
    )


def streaming_figures(streamed: Streamed, goal_rate: float) -> Iterator[Figure]:
    """Tokens/s with its goal at one rate of updates, and the share of time paused at each."""
    where = f"{streamed.load}, {streamed.updates_per_s:g} updates/s"
    yield compare(
        f"producer tokens/s, {where}",
        unit="/s",
        measured=streamed.tokens_per_s,
        reference=streamed.bare_tokens_per_s,
        reference_is="bare AsyncLLM in the same process: no Redis, no updates",
        goal=Goal(at_least=0.97) if streamed.updates_per_s == goal_rate else None,
        ratio=streamed.ratio,
        details=msgspec.to_builtins(streamed),
    )
    yield compare(
        f"share of time paused, {where}",
        unit="%",
        measured=streamed.paused_share * 100,
        reference=None,
        reference_is="",
        goal=None,
    )


ROWS: dict[str, Callable[[_Bench], Found]] = {
    "records": _Bench.records,
    "pause": _Bench.pause,
    "streaming": _Bench.streaming,
    "modes": _Bench.modes,
}


def check_run_file(run_file: Path) -> None:
    """Raises ConfigError where the run file cannot be used."""
    config = load_config(run_file)
    if config.redis.url is not None:
        raise ConfigError(f"{run_file}: redis.url = {config.redis.url!r}: the benchmark starts its own; remove it")
