"""`python -m bench.recipes_check [RECIPE ...]`: runs each recipe small, on CPU, and checks the runs.

Each is the recipe's own run file with the changes of `SMALL`: few updates, and SmolLM2-135M-Instruct for the model,
but for those that see.
Needs the extras gguf and reasoning-gym, and an index for the first fetch of the model.
"""

import argparse
import contextlib
import io
import json
import math
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pyarrow
import pyarrow.parquet
from PIL import Image

from penstock.deploy.launch.command_line import recipes
from penstock.deploy.operate.printing import print_rows

MODEL = Path("runs/models/smollm2").absolute()
SEEING = Path("runs/models/pictures").absolute()
JUDGE_PORT = 8741
BOOT_S = 900
PENSTOCK = [sys.executable, "-m", "penstock.deploy.cli"]
SMALL: dict[str, dict[str, object]] = {
    "reasoning-gym": {},
    "distill": {"teacher.model": MODEL, "groups_per_batch": 16},
    "gsm8k": {
        "model.dtype": "float32",
        "model.chat_template_kwargs": "{}",
        "groups_per_batch": 2,
        "batch.fill": "any",
        "sampling.max_tokens": 64,
        "engine.max_model_len": 512,
        "engine.kv_cache_gib": 0.25,
        "producers.count": 1,
        "producers.groups_in_flight": 4,
    },
    "code": {"groups_per_batch": 2},
    "tools": {"groups_per_batch": 2, "batch.fill": "any"},
    "judge": {"environment.kwargs.judge.base_url": f"http://127.0.0.1:{JUDGE_PORT}/v1", "groups_per_batch": 2},
    "pictures": {"model.path": SEEING, "groups_per_batch": 4},
    "qwen3-vl": {
        "model.path": SEEING,
        "model.dtype": "float32",
        "groups_per_batch": 2,
        "batch.fill": "any",
        "sampling.max_tokens": 16,
        "engine.max_model_len": 512,
        "engine.kv_cache_gib": 0.25,
        "producers.count": 1,
        "producers.groups_in_flight": 4,
        "trainer.num_processes": 1,
    },
    "long-answers": {
        "model.dtype": "float32",
        "group_size": 2,
        "groups_per_batch": 2,
        "batch.fill": "any",
        "sampling.max_tokens": 1024,
        "engine.max_model_len": 2048,
        "engine.kv_cache_gib": 0.25,
        "producers.count": 1,
        "producers.groups_in_flight": 4,
        "trainer.tokens_per_microbatch": 1024,
    },
}
"""Changes to each recipe's run file, beside those of all: `model.path`, `num_updates`, few held-out prompts."""


def main() -> int:
    names = [name.removeprefix("recipe:") for name in recipes()]
    parser = argparse.ArgumentParser(prog="python -m bench.recipes_check", description=__doc__)
    parser.add_argument("recipes", nargs="*", metavar="RECIPE", help=f"of {', '.join(names)}; all by default")
    parser.add_argument("--updates", type=int, default=2)
    asked = parser.parse_args()
    if unknown := set(asked.recipes) - set(names):
        parser.error(f"no recipe {min(unknown)!r}, expected some of {', '.join(names)}")
    subprocess.run([*PENSTOCK, "fetch-model", "smollm2", MODEL], check=True)
    subprocess.run([*PENSTOCK, "make-model", SEEING, "--task", "pictures"], check=True)
    rows = []
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        write_data(Path(folder))
        for name in asked.recipes or names:
            began = time.monotonic()
            with judge_server() if name == "judge" else contextlib.nullcontext():
                problems = check(name, asked.updates, Path(folder) / "runs")
            rows.append((name, f"{time.monotonic() - began:.0f} s", "; ".join(problems) or "passed"))
            print(f"{name}: {rows[-1][2]}", flush=True)
    print_rows(("recipe", "took", "result"), rows)
    return int(any(result != "passed" for _, _, result in rows))


def check(name: str, num_updates: int, runs: Path) -> list[str]:
    """Runs a recipe small; returns what is wrong with the run, nothing if all is well."""
    settings = {"model.path": MODEL, "num_updates": num_updates, "evaluation.num_prompts": 4, **SMALL[name]}
    changes = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    done = subprocess.run([*PENSTOCK, "run", f"recipe:{name}", "--runs", runs, *changes])
    return [*([f"status {done.returncode}"] if done.returncode else []), *faults(runs / name, num_updates)]


def faults(run: Path, num_updates: int) -> list[str]:
    """Returns what is wrong with a run that has ended: updates that were not made, rewards and gradients that are none,
    a ledger that does not balance."""
    file = run / "updates.jsonl"
    updates = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.is_file() else []
    found = [] if len(updates) == num_updates else [f"{len(updates)} of {num_updates} updates"]
    for update in updates:
        found += [
            f"update {update['update']}: {figure} is {update.get(figure)}"
            for figure in ("reward", "loss")
            if not isinstance(update.get(figure), int | float) or not math.isfinite(update[figure])
        ]
    audit = subprocess.run([*PENSTOCK, "audit", run], capture_output=True, text=True, encoding="utf-8")
    return found if audit.returncode == 0 else [*found, f"audit: {(audit.stderr or audit.stdout).strip()}"]


def write_data(folder: Path) -> None:
    """Writes stand-ins for the data that the recipes' pages fetch or make."""
    for name in ("train", "test"):
        problems = [
            {
                "question": f"A {name} has {n} wagons and {n + 4} more. How many?",
                "answer": f"{n}+{n + 4}\n#### {2 * n + 4}",
            }
            for n in range(8)
        ]
        questions = [{"question": f"What is a {thing} for?"} for thing in ("lamp", "spoon", "chair", "clock")]
        for file, rows in ((f"gsm8k/{name}.jsonl", problems), (f"questions-{name}.jsonl", questions)):
            path = folder / "data" / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        drawings = [
            {"images": [{"bytes": _drawing(8 * n), "path": None}], "problem": "<image>Find x.", "answer": str(n)}
            for n in range(4, 10)
        ]
        path = folder / "data" / "geometry3k" / "data" / f"{name}-00000-of-00001.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(drawings), path)


def _drawing(side: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (side, 48), "white").save(file, format="PNG")
    return file.getvalue()


@contextlib.contextmanager
def judge_server() -> Iterator[None]:
    """Serves the model as `judge` by vLLM's own server."""
    command: list[str | Path] = [
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        MODEL,
        "--served-model-name",
    ]
    options = ["judge", "--port", str(JUDGE_PORT), "--max-model-len", "2048", "--max-num-seqs", "16", "--enforce-eager"]
    options += ["--kv-cache-memory-bytes", str(256 << 20)]
    with Path("judge.log").open("w", encoding="utf-8") as log:
        server = subprocess.Popen([*command, *options], stdout=log, stderr=log)
    try:
        began = time.monotonic()
        while not _answers():
            if server.poll() is not None or time.monotonic() - began > BOOT_S:
                raise RuntimeError(f"no judge: {Path('judge.log').read_text(encoding='utf-8')[-2000:]}")
            time.sleep(1)
        yield
    finally:
        server.terminate()
        server.wait()


def _answers() -> bool:
    try:
        urllib.request.urlopen(f"http://127.0.0.1:{JUDGE_PORT}/health", timeout=5).close()
    except OSError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
