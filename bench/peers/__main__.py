"""`make bench-peers`: TRL's GRPOTrainer on the model, task, groups and learning rate of a run file, to greedy 0.9.

Runs in an environment of its own (requirements.txt), on one torch thread unless told otherwise. TRL generates with
transformers: with vLLM it can on GPUs alone. Its clock starts when training does and leaves evaluations out, so that
they can be frequent; Penstock's `goal_reached_s` starts at the first admitted prompt and includes them.
"""

import argparse
import json
import os
import platform
import sys
import warnings
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from bench.machine import load_average, processor_name
from penstock.deploy.launch.command_line import add_set
from penstock.schemas.config import ConfigError, RunConfig, load_config

if TYPE_CHECKING:
    from bench.peers.trl_run import CurvePoint, Measurement

DEFAULT_RUN_FILE = Path("deploy") / "runs" / "demo.toml"
RESULTS = Path(__file__).parents[1] / "results"
HEAD_START = "-0.63"
REQUIREMENTS = "bench/peers/requirements.txt"


def main(argv: Sequence[str] | None = None) -> int:
    """Measures each model in turn, writes the result file and prints a table. Exit status 2 for unusable input."""
    arguments = _parser().parse_args(argv)
    _prepare_environment(arguments.threads)
    try:
        config = load_config(arguments.run_file, arguments.set)
        models = arguments.model or default_models(config)
        check_inputs(config, models, arguments.summary)
        measurements = [_measure(config, model, arguments) for model in models]
    except (ConfigError, FileExistsError) as error:
        print(f"bench-peers: {error}", file=sys.stderr)
        return 2
    result = build_result(config, measurements, arguments)
    output = arguments.output or RESULTS / f"peers-{result['date'][:10]}.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(result, indent=2) + "\n")
    for measurement, summary in zip(result["measurements"], arguments.summary or [None] * len(models), strict=True):
        print_measurement(measurement, summary)
    print(f"\nresult  {output}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.peers", description="Time TRL's GRPOTrainer on the task of a Penstock run file."
    )
    parser.add_argument("run_file", type=Path, nargs="?", default=DEFAULT_RUN_FILE, metavar="RUN.toml")
    parser.add_argument(
        "--model",
        type=Path,
        action="append",
        metavar="FOLDER",
        help=f"start from this model; repeatable (default: the run file's and its {HEAD_START} twin, made if missing)",
    )
    parser.add_argument(
        "--summary",
        type=Path,
        action="append",
        metavar="FILE",
        help="summary.json of a Penstock run from the same start, one per model, to compare with",
    )
    parser.add_argument("--goal", type=float, default=0.9, help="greedy accuracy to stop at (default: %(default)s)")
    parser.add_argument(
        "--time-limit", type=float, default=600.0, metavar="S", help="training seconds per model (default: %(default)s)"
    )
    parser.add_argument(
        "--max-updates", type=int, default=3000, metavar="N", help="updates per model (default: %(default)s)"
    )
    parser.add_argument(
        "--every", type=int, default=5, metavar="N", help="updates between evaluations (default: %(default)s)"
    )
    parser.add_argument("--threads", type=int, default=1, help="compute threads of torch (default: %(default)s)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="default: bench/results/peers-<date>.json")
    add_set(parser, "override a field of the run file")
    return parser


def _prepare_environment(num_threads: int) -> None:
    """Bounds the thread pools and keeps the hub out of it, before any of these libraries is imported."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[name] = str(num_threads)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ["HF_HUB_OFFLINE"] = "1"
    # TRL's own defaults use the old name of this setting.
    warnings.filterwarnings("ignore", message=".*gradient_checkpointing` is deprecated", category=FutureWarning)


def default_models(config: RunConfig) -> list[Path]:
    """Returns the two starts: the run file's own model, and one that already solves more of the task (about 0.63)."""
    return [Path(config.model.path), Path(config.model.path + HEAD_START)]


def check_inputs(config: RunConfig, models: Sequence[Path], summaries: Sequence[Path] | None) -> None:
    """Raises ConfigError if a model other than the two starts, or a summary, is missing."""
    for model in models:
        if model not in default_models(config) and not (model / "config.json").is_file():
            raise ConfigError(f"--model {model}: no model there; expected a folder with config.json")
    for summary in summaries or ():
        if not summary.is_file():
            raise ConfigError(f"--summary {summary}: no such file")
    if summaries and len(summaries) != len(models):
        raise ConfigError(f"--summary: {len(summaries)} given for {len(models)} models; expected one each, in order")


def _measure(config: RunConfig, model: Path, arguments: argparse.Namespace) -> "Measurement":
    try:
        import torch

        from bench.peers.trl_run import measure
    except ImportError as error:
        raise ConfigError(f"{error}; install what {REQUIREMENTS} lists (`make bench-peers` does)") from None
    torch.set_num_threads(arguments.threads)
    if not (model / "config.json").is_file():
        _make_start(model)
    print(
        f"TRL {version('trl')} from {model}: {config.groups_per_batch} groups of {config.group_size}, "
        f"learning rate {config.trainer.learning_rate:g}, {arguments.threads} thread(s)",
        flush=True,
    )
    return measure(
        config,
        model,
        max_updates=arguments.max_updates,
        every=arguments.every,
        goal=arguments.goal,
        time_limit_s=arguments.time_limit,
        report=_print_point,
    )


def _make_start(folder: Path) -> None:
    from penstock.deploy.demo.make_model import ModelRecipe, WarmStartError, make_model

    recipe = ModelRecipe()
    if folder.name.endswith(HEAD_START):
        recipe = ModelRecipe(forgotten_carries=0.5, lowest_accuracy=0.58, highest_accuracy=0.68)
    try:
        make_model(folder, recipe)
    except WarmStartError as error:
        raise ConfigError(f"{folder}: {error}; name another start with --model") from error


def _print_point(point: "CurvePoint") -> None:
    reward = "" if point.reward is None else f"  reward {point.reward:.3f}"
    print(f"  update {point.update:5d}  {point.train_s:7.1f} s  accuracy {point.accuracy:.4f}{reward}", flush=True)


def build_result(
    config: RunConfig, measurements: Sequence["Measurement"], arguments: argparse.Namespace
) -> dict[str, Any]:
    """Returns the content of the result file."""
    return {
        "benchmark": "peers",
        "peer": "trl.GRPOTrainer",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": {name: version(name) for name in ("trl", "transformers", "accelerate", "torch")},
        "num_threads": arguments.threads,
        "goal": arguments.goal,
        "settings": {
            "run_file": str(arguments.run_file),
            "seed": config.seed,
            "environment": msgspec.to_builtins(config.environment),
            "group_size": config.group_size,
            "groups_per_batch": config.groups_per_batch,
            "learning_rate": config.trainer.learning_rate,
            "temperature": config.sampling.temperature,
            "max_tokens": config.sampling.max_tokens,
            "num_evaluation_prompts": config.evaluation.num_prompts,
        },
        "measurements": [msgspec.to_builtins(measurement) for measurement in measurements],
    }


def machine() -> dict[str, Any]:
    """Describes the processor, its load, and the Python that ran."""
    return {
        "processor": processor_name(),
        "num_cores": os.cpu_count(),
        "load_average": load_average(),
        "system": platform.platform(),
        "python": platform.python_version(),
    }


def print_measurement(measurement: dict[str, Any], summary_file: Path | None) -> None:
    """Prints one model's figures, and Penstock's if there is a summary."""
    m = measurement
    reached = m["time_to_goal_s"]
    print(f"\n{m['model']}: greedy accuracy {m['curve'][0]['accuracy']:.3f} -> {m['curve'][-1]['accuracy']:.3f}")
    print(f"  to the goal      {'not reached' if reached is None else f'{reached:.1f} s of training'}")
    print(f"  updates          {m['num_updates']} in {m['train_s']:.1f} s, {m['updates_per_s']:.2f}/s")
    shares = ", ".join(f"{phase} {seconds / m['train_s']:.0%}" for phase, seconds in m["phases_s"].items())
    print(f"  processor time   {m['train_cpu_s']:.1f} s")
    print(f"  time             {shares}  (evaluations apart: {m['evaluation_s']:.1f} s)")
    if summary_file is not None:
        ours = json.loads(summary_file.read_text())["goal_reached_s"]
        shown = "not reached" if ours is None else f"{ours:.1f} s"
        ratio = f", {ours / reached:.2f} of TRL's time" if ours is not None and reached else ""
        print(f"  Penstock         {shown}{ratio}")


if __name__ == "__main__":
    sys.exit(main())
