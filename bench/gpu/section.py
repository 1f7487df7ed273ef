"""The rows of `python -m bench gpu`, each measured against a limit. One that cannot be measured says why."""

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

from bench.gpu.part import CHANGED, HEAD_MATMULS, GpuJob, GpuSizes
from bench.pipeline.section import stream
from bench.pipeline.streaming import Load, StreamingSettings
from bench.result import BenchError, Figure, Goal, absent
from bench.running import RUN_FILE, demo_config, make_model, random_model, save_config
from bench.section import Bench, BenchSection, host_folder, measure_apart, wait_for
from bench.sizing import save_random
from bench.weights.pauses import PauseSettings
from bench.weights.section import PAUSE_MODELS
from docs.sizing import SHAPES
from penstock.consumers.parity.report import REPORT_FILE
from penstock.deploy.launch.child import Child
from penstock.deploy.launch.memory import USABLE, ModelShape, RankSetting, total_gb
from penstock.deploy.launch.redis_server import ServerError
from penstock.deploy.report.telemetry import read_telemetry
from penstock.schemas.config import ConfigError

ROOT = Path(__file__).parents[2]
LABELS = ROOT / "tests" / "producers" / "engines" / "test_vllm_version_labels.py"
GOAL_REWARD = 0.9
"""The share of the demo's held-out sums that are exact."""
TINY = ModelShape("tiny", 64, 128, 2, 2, 1, 32, 300, tied=True)


class GpuSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes and repetitions. The defaults are for one GPU of 80 GB or more, and take some twenty minutes there.

    shapes: of the models that are trained; the last one's head is measured, and its updates. producer_model: the one of
    `PAUSE_MODELS` that is sampled from. demo_updates: 0 leaves what the run file says.
    """

    sizes: GpuSizes = GpuSizes()
    shapes: tuple[ModelShape, ...] = SHAPES[:3]
    demo_updates: int = 0
    blocks: int = 3
    producer_model: str = "1 GB"


TOY_SIZES = GpuSizes(
    device="cpu", rounds=2, gemm_size=256, head_tokens=64, row_tokens=32, num_rows=4, tokens_per_pass=64,
    weights_bytes=2_000_000,
)  # fmt: skip


def failed(name: str, reason: str) -> Figure:
    """Returns a figure whose goal is to be measured at all."""
    goal = Goal(at_least=1.0)
    return Figure(f"{name}: failed", unit="", measured=None, reference=1.0, goal=goal, details={"reason": reason})


def _or_absent(name: str, row: Callable[[Bench], Sequence[Figure]], bench: Bench) -> Sequence[Figure]:
    """Returns a row's figures; one that says why, if it cannot be measured or fails."""
    if name in ENGINE_ROWS and importlib.util.find_spec("vllm") is None:
        return [absent(name, "vLLM is not installed")]
    if bench.settings.sizes.device == "cuda" and not torch.cuda.is_available():
        return [absent(name, "torch finds no CUDA device")]
    try:
        return list(row(bench))
    except (ServerError, OSError, torch.OutOfMemoryError) as error:  # no server, no room
        return [absent(name, f"{type(error).__name__}: {error}")]
    except (BenchError, ConfigError, RuntimeError) as error:
        return [failed(name, f"{type(error).__name__}: {error}")]


def _apart(bench: Bench, name: str, shape: ModelShape | None = None, folder: Path | None = None) -> dict[str, Any]:
    job = GpuJob(sizes=bench.settings.sizes, folder=str(folder or bench.folder), shape=shape)
    found: dict[str, Any] = measure_apart(name, f"bench.gpu.part:measure_{name}", job, dict[str, Any], bench.folder)
    return found


def measure_tests(bench: Bench) -> list[Figure]:
    files = sorted(file for file in (ROOT / "tests").rglob("test_*.py") if "mark.gpu" in file.read_text("utf-8"))
    return [_tests(bench, "tests that need a GPU", *map(str, files), "-m", "gpu")]


def measure_labels(bench: Bench) -> list[Figure]:
    return [_tests(bench, "version labels, two engines that sample while they are updated", str(LABELS))]


def _tests(bench: Bench, name: str, *arguments: str) -> Figure:
    report = bench.folder / "tests.xml"
    report.unlink(missing_ok=True)  # another row's
    command = [sys.executable, "-m", "pytest", "-q", "--timeout=900", "-p", "no:cacheprovider", f"--junitxml={report}"]
    environment = {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])}
    try:
        wait_for([Child("pytest", [*command, *arguments], log=bench.folder / "tests.log", environment=environment)])
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
    return Figure(
        name,
        unit="passed",
        measured=float(total - skipped - failures - errors),
        reference=float(total - skipped),
        reference_is="those that ran",
        goal=Goal(at_least=1.0),
        details={"num_skipped": skipped, "failed": [f"{case.get('classname')}::{case.get('name')}" for case in bad]},
    )


def measure_head(bench: Bench) -> Iterator[Figure]:
    sizes, shape = bench.settings.sizes, bench.settings.shapes[-1]
    found = _apart(bench, "head", shape)
    for name, matmuls in HEAD_MATMULS.items():
        operations = matmuls * 2 * sizes.head_tokens * shape.hidden * shape.vocabulary
        yield Figure(
            f"head, forward and backward, {name}",
            unit="TFLOP/s",
            measured=operations / median(found[name]) / 1e12,
            reference=found["gemm_tflops"][0],
            reference_is=f"a product of two matrices of {sizes.gemm_size:,} squared in bfloat16",
            goal=Goal(at_least=0.75),
            details={"seconds": found[name], "num_tokens": sizes.head_tokens, "products": matmuls},
        )


def measure_trainer(bench: Bench) -> Iterator[Figure]:
    sizes = bench.settings.sizes
    setting = RankSetting(1, sizes.tokens_per_pass, "bfloat16", checkpointing=True, on_cuda=sizes.device == "cuda")
    for shape in bench.settings.shapes:
        formula_gb, name = total_gb(shape, setting), f"trainer, {shape.name}"
        there_gb = torch.cuda.get_device_properties(0).total_memory / 1e9 if sizes.device == "cuda" else float("inf")
        if formula_gb > USABLE * there_gb:
            yield absent(name, f"{formula_gb:.0f} GB needed, {USABLE:.0%} of {there_gb:.0f} GB there")
            continue
        try:
            yield from trainer_figures(name, _apart(bench, "trainer", shape, bench.folder / shape.name), formula_gb)
        except BenchError as error:
            yield failed(name, str(error))
        shutil.rmtree(bench.folder / shape.name, ignore_errors=True)


def trainer_figures(name: str, found: dict[str, Any], formula_gb: float) -> Iterator[Figure]:
    seconds = median(found["seconds"])
    rate = found["flops"] / seconds / 1e12
    yield Figure(
        f"{name}: model FLOPs of an update",
        unit="TFLOP/s",
        measured=rate,
        reference=found["peak_tflops"] or found["gemm_tflops"],
        reference_is="the device's peak in bfloat16" if found["peak_tflops"] else "a large matrix product in bfloat16",
        goal=Goal(at_least=0.45),
        details={
            "seconds": found["seconds"],
            "tokens_per_s": found["num_tokens"] / seconds,
            "share_of_matrix_product": rate / found["gemm_tflops"],
        },
    )
    yield Figure(
        f"{name}: peak memory",
        unit="GB",
        measured=found["peak_bytes"] / 1e9,
        reference=formula_gb,
        reference_is="the formula of docs/sizing.md",
        goal=Goal(at_most=1.15),
    )


def measure_weights(bench: Bench) -> Iterator[Figure]:
    num_bytes = bench.settings.sizes.weights_bytes
    with host_folder("gpu") as folder:
        found = _apart(bench, "weights", folder=folder)
    parts = {
        f"snapshot of the policy, {num_bytes / 1e9:g} GB in bfloat16": ("snapshot_s", Goal(at_least=0.9)),
        f"what has changed of it, {CHANGED:.0%}, found, encoded and written": ("write_s", None),
    }
    for name, (part, goal) in parts.items():
        yield Figure(
            name,
            unit="GB/s",
            measured=num_bytes / median(found[part]) / 1e9,
            reference=found["to_host_bytes_per_s"][0] / 1e9,
            reference_is="the same bytes copied from device to pinned memory",
            goal=goal,
            details={"seconds": found[part]},
        )


def measure_demo(bench: Bench) -> Iterator[Figure]:
    """Runs the demo in bfloat16, as `penstock run` places it: the parity gate's gap, and the accuracy it reaches."""
    model, runs = make_model(bench.folder / "model-demo"), bench.folder / "runs"
    overrides = [f"model.path={model}", "model.dtype=bfloat16", "metrics.port=0", "parity.gate=warn"]
    if bench.settings.demo_updates:
        overrides.append(f"num_updates={bench.settings.demo_updates}")
    command = [sys.executable, "-m", "penstock.deploy.cli", "run", str(RUN_FILE), "--name", "demo"]
    command += ["--runs", str(runs), *(word for override in overrides for word in ("--set", override))]
    wait_for([Child("penstock run", command, log=bench.folder / "demo.log", environment={})])
    report = msgspec.json.decode((runs / "demo" / REPORT_FILE).read_bytes())
    gap, verdict = report["hypotheses"][0]["gap"], report["verdict"]
    yield Figure(
        "parity gate, the demo in bfloat16: mean gap",
        unit="nats",
        measured=gap["mean"],
        reference=report["tolerance"]["mean"],
        reference_is="the gap that counts as parity",
        goal=Goal(at_most=1.0),
        details={"status": verdict["status"], "sentence": verdict["sentence"], **gap},
    )
    rewards = [point.reward for point in read_telemetry(runs / "demo").evaluations]
    yield Figure(
        "the demo in bfloat16: held-out sums that are exact",
        unit="",
        measured=max(rewards, default=0.0),
        reference=GOAL_REWARD,
        reference_is="the demo's goal",
        goal=Goal(at_least=1.0),
        details={"rewards": rewards},
    )


def measure_pause(bench: Bench) -> list[Figure]:
    settings, shape = bench.settings, bench.settings.shapes[-1]
    with host_folder("gpu") as folder:
        save_random(shape, folder, device=settings.sizes.device, dtype=torch.bfloat16)
        torch.cuda.empty_cache()
        overrides = ("model.dtype=bfloat16", "engine.max_model_len=1024", "engine.args.skip_tokenizer_init=true")
        job = PauseSettings(
            size=f"{shape.name} in bfloat16",
            run_file=save_config(bench, demo_config("pause", folder, *overrides)),
            blocks=settings.blocks,
            updates_per_block=5,
            sequences_in_flight=32,
            spacing_s=0.5,
        )
        return [measure_apart("pause", "bench.weights.pauses:measure_pauses", job, Figure, bench.folder)]


def measure_producer(bench: Bench) -> list[Figure]:
    model = random_model(bench, "producer", **PAUSE_MODELS[bench.settings.producer_model])
    weights = model / "model.safetensors"
    save_file({name: tensor.bfloat16() for name, tensor in load_file(weights).items()}, weights, {"format": "pt"})
    config = demo_config("producer", model, "model.dtype=bfloat16", "producers.groups_in_flight=32")
    job = StreamingSettings(
        run_file=save_config(bench, config),
        runs=str(bench.folder / "runs"),
        loads=(Load(name="long completions", max_tokens=256, ramp_s=3.0, margin_s=2.5),),
        updates_per_s=(0.5,),
        rounds=bench.settings.blocks,
        window_s=8.0,
    )
    return stream(bench, job)


ENGINE_ROWS = ("labels", "demo", "pause", "producer")
"""Those that need vLLM."""
ROWS: tuple[Callable[[Bench], Any], ...] = (
    measure_tests, measure_head, measure_trainer, measure_weights, measure_labels, measure_demo,
    measure_pause, measure_producer,
)  # fmt: skip

GPU = BenchSection(
    "gpu",
    {name: partial(_or_absent, name, row) for row in ROWS for name in [row.__name__.removeprefix("measure_")]},
    GpuSettings(),
    quick=GpuSettings(sizes=TOY_SIZES, shapes=(TINY,), demo_updates=2, blocks=1, producer_model="1 MB"),
)
