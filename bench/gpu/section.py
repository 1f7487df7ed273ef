"""The rows of `python -m bench.gpu`, each measured against a limit. One that cannot be measured says why."""

import importlib.util
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any
from xml.etree import ElementTree

import msgspec
import torch
from safetensors.torch import load_file, save_file

from bench.gpu.part import (
    CHANGED,
    HEAD_MATMULS,
    HeadFound,
    HeadJob,
    KernelFound,
    KernelJob,
    LoadFound,
    PolicyJob,
    TrainerFound,
    TrainerJob,
    WeightsFound,
)
from bench.pipeline.section import STREAMING, random_model, run_config, save, streaming_figures
from bench.pipeline.streaming import Load, Streamed, StreamingSettings
from bench.result import BenchError, Figure, Goal, absent, compare
from bench.section import Bench, BenchSection, host_folder, make_model, measure_apart, redis_server, wait_for
from bench.sizing import save_random
from bench.weights.pauses import Paused, PauseSettings
from bench.weights.section import PAUSE_MODELS, pause_figure
from docs.sizing import SHAPES
from penstock.consumers.parity.report import REPORT_FILE, TOLERANCES
from penstock.deploy.launch.child import Child
from penstock.deploy.launch.memory import USABLE, ModelShape, RankSetting, total_gb
from penstock.deploy.launch.redis_server import ServerError
from penstock.deploy.report.telemetry import read_telemetry
from penstock.schemas.config import ConfigError

ROOT = Path(__file__).parents[2]
LABELS = ROOT / "tests" / "producers" / "engines" / "test_vllm_version_labels.py"
GOAL_REWARD = 0.9
"""Of the demo: the share of held-out sums that are exact."""
TINY = ModelShape("tiny", 64, 128, 2, 2, 1, 32, 300, tied=True)


class GpuSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes and repetitions. The defaults are for one GPU of 80 GB or more, and take some twenty minutes there.

    pause_shape: of the model whose updates are timed. producer_model: the one of `PAUSE_MODELS` that is sampled from.
    demo_updates: 0 leaves what the run file says.
    """

    device: str = "cuda"
    rounds: int = 10
    gemm_size: int = 8192
    head_tokens: int = 8192
    head_shape: ModelShape = SHAPES[2]
    trainer_shapes: tuple[ModelShape, ...] = SHAPES[:3]
    row_tokens: int = 2048
    num_rows: int = 16
    tokens_per_pass: int = 8192
    weights_bytes: int = 2_000_000_000
    demo_updates: int = 0
    pause_shape: ModelShape = SHAPES[2]
    pause_blocks: int = 3
    producer_model: str = "1 GB"
    producer_rounds: int = 3


TOY = GpuSettings(
    device="cpu",
    rounds=2,
    gemm_size=256,
    head_tokens=64,
    head_shape=TINY,
    trainer_shapes=(TINY,),
    row_tokens=32,
    num_rows=4,
    tokens_per_pass=64,
    weights_bytes=2_000_000,
    demo_updates=2,
    pause_shape=TINY,
    pause_blocks=1,
    producer_model="1 MB",
    producer_rounds=1,
)
"""The same on a CPU, which shows that everything runs. Its figures mean nothing."""


def failed(name: str, reason: str) -> Figure:
    """Returns a figure whose goal is to be measured at all."""
    goal = Goal(at_least=1.0)
    return compare(f"{name}: failed", unit="", measured=None, reference=1.0, goal=goal, details={"reason": reason})


def _or_absent(name: str, row: Callable[[Bench], Sequence[Figure]], bench: Bench, *, engine: bool) -> Sequence[Figure]:
    """Returns a row's figures; one that says why, if it cannot be measured or fails. engine: True if it needs vLLM."""
    if engine and importlib.util.find_spec("vllm") is None:
        return [absent(name, "vLLM is not installed")]
    if bench.settings.device == "cuda" and not torch.cuda.is_available():
        return [absent(name, "torch finds no CUDA device")]
    try:
        return row(bench)
    except (ServerError, OSError, torch.OutOfMemoryError) as error:  # no server, no room
        return [absent(name, f"{type(error).__name__}: {error}")]
    except BenchError as error:
        return [failed(name, str(error))]
    except (ConfigError, RuntimeError) as error:
        return [failed(name, f"{type(error).__name__}: {error}")]


def _apart(bench: Bench, name: str, function: str, job: object, kind: type) -> Any:
    return measure_apart(name, f"bench.gpu.part:{function}", job, kind, bench.folder)


def measure_tests(bench: Bench) -> list[Figure]:
    files = sorted(file for file in (ROOT / "tests").rglob("test_*.py") if "mark.gpu" in file.read_text("utf-8"))
    return [_tests(bench, "tests that need a GPU", [*map(str, files), "-m", "gpu"])]


def measure_labels(bench: Bench) -> list[Figure]:
    return [_tests(bench, "version labels, two engines that sample while they are updated", [str(LABELS)])]


def _tests(bench: Bench, name: str, arguments: Sequence[str]) -> Figure:
    report = bench.folder / "tests.xml"
    report.unlink(missing_ok=True)  # another row's
    command = [sys.executable, "-m", "pytest", "-q", "--timeout=900", "-p", "no:cacheprovider", f"--junitxml={report}"]
    log = bench.folder / "tests.log"
    environment = {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])}
    child = Child("pytest", [*command, *arguments], log=log, environment=environment)
    try:
        wait_for([child])
    except BenchError:
        if not report.exists():
            raise
    return passed_figure(name, report)


def passed_figure(name: str, junit: Path) -> Figure:
    """Counts the tests that passed among those that ran. junit: pytest's report."""
    suites = list(ElementTree.parse(junit).iter("testsuite"))
    total, skipped, failures, errors = (
        sum(int(suite.get(key, 0)) for suite in suites) for key in ("tests", "skipped", "failures", "errors")
    )
    if total == skipped:
        return absent(name, f"{skipped} tests skipped, none ran")
    bad = [case for suite in suites for case in suite.iter("testcase") if {"failure", "error"} & {e.tag for e in case}]
    return compare(
        name,
        unit="passed",
        measured=float(total - skipped - failures - errors),
        reference=float(total - skipped),
        reference_is="those that ran",
        goal=Goal(at_least=1.0),
        details={"num_skipped": skipped, "failed": [f"{case.get('classname')}::{case.get('name')}" for case in bad]},
    )


def measure_head(bench: Bench) -> list[Figure]:
    settings, shape = bench.settings, bench.settings.head_shape
    job = HeadJob(
        device=settings.device,
        num_tokens=settings.head_tokens,
        hidden_size=shape.hidden,
        vocabulary=shape.vocabulary,
        gemm_size=settings.gemm_size,
        rounds=settings.rounds,
    )
    return list(head_figures(job, _apart(bench, "head", "measure_head", job, HeadFound)))


def head_figures(job: HeadJob, found: HeadFound) -> Iterator[Figure]:
    product = 2 * job.num_tokens * job.hidden_size * job.vocabulary
    for name, seconds in found.seconds.items():
        yield compare(
            f"head, forward and backward, {name}",
            unit="TFLOP/s",
            measured=HEAD_MATMULS[name] * product / median(seconds) / 1e12,
            reference=found.gemm_tflops,
            reference_is=f"a product of two matrices of {job.gemm_size:,} squared in bfloat16",
            goal=Goal(at_least=0.75),
            details={"seconds": seconds, "num_tokens": job.num_tokens, "products": HEAD_MATMULS[name]},
        )


def measure_trainer(bench: Bench) -> list[Figure]:
    settings = bench.settings
    figures: list[Figure] = []
    for shape in settings.trainer_shapes:
        formula_gb = total_gb(shape, _rank_setting(settings))
        if settings.device == "cuda":
            there_gb = torch.cuda.get_device_properties(0).total_memory / 1e9
            if formula_gb > USABLE * there_gb:
                reason = f"{formula_gb:.0f} GB needed, {USABLE:.0%} of {there_gb:.0f} GB there"
                figures.append(absent(f"trainer, {shape.name}", reason))
                continue
        folder = bench.folder / shape.name
        job = TrainerJob(
            device=settings.device,
            folder=str(folder),
            shape=shape,
            row_tokens=settings.row_tokens,
            num_rows=settings.num_rows,
            tokens_per_pass=settings.tokens_per_pass,
            gemm_size=settings.gemm_size,
            rounds=settings.rounds,
        )
        try:
            found = _apart(bench, f"trainer-{shape.name}", "measure_trainer", job, TrainerFound)
        except BenchError as error:
            figures.append(failed(f"trainer, {shape.name}", str(error)))
        else:
            figures += trainer_figures(shape.name, found, formula_gb)
        shutil.rmtree(folder, ignore_errors=True)
    return figures


def _rank_setting(settings: GpuSettings) -> RankSetting:
    return RankSetting(1, settings.tokens_per_pass, "bfloat16", checkpointing=True, on_cuda=settings.device == "cuda")


def trainer_figures(name: str, found: TrainerFound, formula_gb: float) -> Iterator[Figure]:
    seconds = median(found.seconds)
    rate = found.flops / seconds / 1e12
    yield compare(
        f"trainer, {name}: model FLOPs of an update",
        unit="TFLOP/s",
        measured=rate,
        reference=found.peak_tflops or found.gemm_tflops,
        reference_is="the device's peak in bfloat16" if found.peak_tflops else "a large matrix product in bfloat16",
        goal=Goal(at_least=0.45),
        details={
            "seconds": found.seconds,
            "tokens_per_s": found.num_tokens / seconds,
            "share_of_matrix_product": rate / found.gemm_tflops,
            "phase_s": found.phase_s,
        },
    )
    yield compare(
        f"trainer, {name}: peak memory",
        unit="GB",
        measured=found.peak_bytes / 1e9,
        reference=formula_gb,
        reference_is="the formula of docs/sizing.md",
        goal=Goal(at_most=1.15),
    )


def measure_weights(bench: Bench) -> list[Figure]:
    return list(weights_figures(*_policy(bench, "weights", WeightsFound)))


def _policy(bench: Bench, name: str, kind: type) -> tuple[PolicyJob, Any]:
    """Returns the job of a part that moves a policy, and what it found."""
    settings = bench.settings
    with host_folder("gpu") as folder:
        job = PolicyJob(
            device=settings.device, folder=str(folder), num_bytes=settings.weights_bytes, rounds=settings.rounds
        )
        return job, _apart(bench, name, f"measure_{name}", job, kind)


def weights_figures(job: PolicyJob, found: WeightsFound) -> Iterator[Figure]:
    limit = found.to_host_bytes_per_s / 1e9
    what = f"{job.num_bytes / 1e9:g} GB in bfloat16"
    parts = {
        f"snapshot of the policy, {what}": (found.snapshot_s, Goal(at_least=0.9)),
        f"what has changed of it, {CHANGED:.0%}, found, encoded and written": (found.write_s, None),
    }
    for name, (seconds, goal) in parts.items():
        yield compare(
            name,
            unit="GB/s",
            measured=job.num_bytes / median(seconds) / 1e9,
            reference=limit,
            reference_is="the same bytes copied from device to pinned memory",
            goal=goal,
            details={"seconds": seconds, "chunk_bytes": found.num_bytes},
        )


def measure_load(bench: Bench) -> list[Figure]:
    return [load_figure(*_policy(bench, "load", LoadFound))]


def load_figure(job: PolicyJob, found: LoadFound) -> Figure:
    pinned, mapped, buffer = (
        job.num_bytes / median(seconds) / 1e9 for seconds in (found.pinned_s, found.mapped_s, found.buffer_s)
    )
    return compare(
        f"a policy of {job.num_bytes / 1e9:g} GB from the host's copy to the device",
        unit="GB/s",
        measured=pinned,
        reference=buffer,
        reference_is="the same from pinned memory of torch's",
        goal=Goal(at_least=0.9),
        details={"pages_not_locked": mapped, **msgspec.to_builtins(found)},
    )


def measure_kernel(bench: Bench) -> list[Figure]:
    return [
        kernel_figure(_apart(bench, "kernel", "measure_kernel", KernelJob(device=bench.settings.device), KernelFound))
    ]


def kernel_figure(found: KernelFound) -> Figure:
    return compare(
        "an operator of vLLM's extension: relative error",
        unit="",
        measured=found.error,
        reference=2.0**-8,
        reference_is="the rounding of bfloat16",
        goal=Goal(at_most=1.0),
        details={"vllm": found.version},
    )


def measure_demo(bench: Bench) -> list[Figure]:
    """Runs the demo in bfloat16, as `penstock run` places it: the parity gate's gap, and the accuracy it reaches."""
    model, runs = bench.folder / "model-demo", bench.folder / "runs"
    make_model(model)
    updates = bench.settings.demo_updates
    overrides = [
        f"model.path={model}", "model.dtype=bfloat16", "metrics.port=0", "parity.gate=warn",
        *([f"num_updates={updates}"] if updates else []),
    ]  # fmt: skip
    command = [sys.executable, "-m", "penstock.deploy.cli", "run", str(bench.run_file), "--name", "demo"]
    command += ["--runs", str(runs), *(word for each in overrides for word in ("--set", each))]
    wait_for([Child("penstock run", command, log=bench.folder / "demo.log", environment={})])
    return list(demo_figures(runs / "demo"))


def demo_figures(run_folder: Path) -> Iterator[Figure]:
    report = msgspec.json.decode((run_folder / REPORT_FILE).read_bytes())
    gap, verdict = report["hypotheses"][0]["gap"], report["verdict"]
    yield compare(
        "parity gate, the demo in bfloat16: mean gap",
        unit="nats",
        measured=gap["mean"],
        reference=TOLERANCES[report["dtype"]].mean,
        reference_is="the gap that counts as parity",
        goal=Goal(at_most=1.0),
        details={"status": verdict["status"], "sentence": verdict["sentence"], **gap},
    )
    telemetry = read_telemetry(run_folder)
    rewards = [point.reward for point in telemetry.evaluations]
    yield compare(
        "the demo in bfloat16: held-out sums that are exact",
        unit="",
        measured=max(rewards, default=0.0),
        reference=GOAL_REWARD,
        reference_is="the demo's goal",
        goal=Goal(at_least=1.0),
        details={"rewards": rewards, "num_updates": len(telemetry.updates)},
    )


def measure_pause(bench: Bench) -> list[Figure]:
    settings, shape = bench.settings, bench.settings.pause_shape
    with host_folder("gpu") as folder:
        save_random(shape, folder, device=settings.device, dtype=torch.bfloat16)
        torch.cuda.empty_cache()
        config = run_config(
            bench, "pause", folder, "model.dtype=bfloat16", "engine.max_model_len=1024",
            "engine.args.skip_tokenizer_init=true",
        )  # fmt: skip
        job = PauseSettings(
            run_file=str(save(bench, config)),
            blocks=settings.pause_blocks,
            updates_per_block=5,
            sequences_in_flight=32,
            spacing_s=0.5,
        )
        found = measure_apart("pause", "bench.weights.pauses:measure_pauses", job, Paused, bench.folder)
        return [pause_figure(f"{shape.name} in bfloat16", found)]


def measure_producer(bench: Bench) -> list[Figure]:
    settings = bench.settings
    model = random_model(bench, "producer", **PAUSE_MODELS[settings.producer_model])
    weights = model / "model.safetensors"
    save_file({name: tensor.bfloat16() for name, tensor in load_file(weights).items()}, weights, {"format": "pt"})
    config = run_config(bench, "producer", model, "model.dtype=bfloat16", "producers.groups_in_flight=32")
    job = StreamingSettings(
        run_file=str(save(bench, config)),
        runs=str(bench.folder / "runs"),
        loads=(Load(name="long completions", max_tokens=256, ramp_s=3.0, margin_s=2.5),),
        updates_per_s=(0.5,),
        rounds=settings.producer_rounds,
        window_s=8.0,
    )
    with redis_server(bench.folder / "redis", maxmemory_mb=8000) as server:
        url = {"REDIS_URL": server.url}
        found = measure_apart("producer", STREAMING, job, list[Streamed], bench.folder, environment=url)
    return [figure for streamed in found for figure in streaming_figures(streamed, 0.5)]


_ROWS = {"tests": measure_tests, "head": measure_head, "trainer": measure_trainer, "weights": measure_weights}
_ENGINE_ROWS = {
    "kernel": measure_kernel,
    "load": measure_load,
    "labels": measure_labels,
    "demo": measure_demo,
    "pause": measure_pause,
    "producer": measure_producer,
}

GPU = BenchSection(
    "gpu",
    {name: partial(_or_absent, name, row, engine=False) for name, row in _ROWS.items()}
    | {name: partial(_or_absent, name, row, engine=True) for name, row in _ENGINE_ROWS.items()},
    GpuSettings(),
    TOY,
    uses_run_file=True,
)
