"""Measures the memory of the trainer beside the formula of docs/sizing.py: `python -m bench.sizing` writes a result.

Each rank is a process of its own, on one torch thread, that trains a few tokens and then a batch of two passes. What
counts is the peak of resident memory in that batch, over the memory before the model was loaded: the moments are there,
and in its second pass the gradients.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Literal

import msgspec
import torch
import torch.distributed as dist
from msgspec.structs import astuple
from transformers import AutoModelForCausalLM, Qwen3Config
from transformers.utils.logging import disable_progress_bar

from bench.result import RESULTS, now
from bench.trainer.groups import random_group
from penstock.consumers.distributed.world import World
from penstock.consumers.learning.batch import Batch
from penstock.consumers.learning.learner import Learner
from penstock.consumers.learning.ranks import Ranks
from penstock.deploy.launch.memory import ModelShape
from penstock.schemas.config import EnvironmentConfig, ModelConfig, RunConfig, TrainerConfig
from penstock.schemas.process.files import write_whole

ROW_TOKENS = 512


class MemoryModel(msgspec.Struct, frozen=True):
    """A Qwen3 with tied embeddings and heads of 64."""

    name: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int


class MemoryCase(msgspec.Struct, frozen=True):
    """tokens: of each of the two passes that every rank has of a batch."""

    model: MemoryModel
    dtype: Literal["float32", "bfloat16"]
    tokens: int
    checkpointing: bool
    ranks: int = 1
    accumulation: Literal["unsharded", "sharded"] = "sharded"


class MemoryMeasured(msgspec.Struct, frozen=True):
    case: MemoryCase
    peak_bytes: int
    """Of the rank that has most, while it trains."""
    loading_bytes: int
    """The same until the model is loaded and shared out."""


MODELS = (MemoryModel("20M", 384, 1024, 10, 6, 2, 12000), MemoryModel("100M", 768, 2048, 12, 12, 4, 32000))
SMALL, LARGE = MODELS
CASES = (
    *(
        MemoryCase(SMALL, "float32", tokens, checkpointing)
        for tokens in (1024, 4096)
        for checkpointing in (False, True)
    ),
    *(
        MemoryCase(LARGE, "float32", tokens, checkpointing)
        for tokens in (1024, 2048)
        for checkpointing in (False, True)
    ),
    *(MemoryCase(LARGE, "float32", 1024, False, ranks) for ranks in (2, 4)),
    *(MemoryCase(LARGE, dtype, 1024, True, ranks) for dtype in ("float32", "bfloat16") for ranks in (2, 4)),
    *(MemoryCase(LARGE, "float32", 1024, True, ranks, "unsharded") for ranks in (2, 4)),
)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.sizing", description="Measure the trainer's memory.")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--case", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case is not None:
        case = msgspec.json.decode(arguments.case.read_bytes(), type=MemoryCase)
        Rank(case, arguments.rank, arguments.case.parent).run()
        return 0
    found = []
    for each in CASES:
        found.append(measure(each))
        print(f"{each}: {found[-1].peak_bytes / 1e6:.0f} MB", flush=True)
    file = RESULTS / f"sizing-{now()[:10]}.json"
    write_whole(file, msgspec.json.format(msgspec.json.encode(found)).decode() + "\n")
    print(f"result  {file}")
    return 0


def measure(case: MemoryCase) -> MemoryMeasured:
    """Runs a case, each of its ranks in a process of its own."""
    # Large blocks of memory go back to the system when they are freed; by default glibc keeps ever larger ones.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as name, ExitStack() as started:
        folder = Path(name)
        (folder / "case.json").write_bytes(msgspec.json.encode(case))
        save_model(case.model, folder)
        command = [sys.executable, "-m", "bench.sizing", "--case", str(folder / "case.json"), "--rank"]
        for rank in range(case.ranks):
            started.enter_context(subprocess.Popen([*command, str(rank)], env=environment))
        started.close()  # waits for all
        loading, peak = map(int, (folder / "peaks").read_text().split())
    return MemoryMeasured(case, peak, loading)


class Rank:
    """One rank of a case, the lead of which writes the largest peaks into the folder."""

    def __init__(self, case: MemoryCase, rank: int, folder: Path) -> None:
        torch.set_num_threads(1)
        self._case, self._folder = case, folder
        self._ranks = Ranks()
        if case.ranks > 1:
            store = dist.FileStore(str(folder / "store"), case.ranks)
            self._ranks = World(store, rank, case.ranks, torch.device("cpu"), timeout_s=600.0)
        trainer = TrainerConfig(
            device="cpu",
            tokens_per_microbatch=case.tokens,
            gradient_checkpointing=case.checkpointing,
            gradient_accumulation=case.accumulation,
        )
        self._config = RunConfig(
            name="sizing",
            model=ModelConfig(path=str(folder), dtype=case.dtype),
            environment=EnvironmentConfig(path="none:None"),
            trainer=trainer,
        )

    def run(self) -> None:
        self._forget()
        self._before = status_bytes("VmRSS")
        self._learner = Learner(self._config, self._ranks)
        own = {"forget": self._forget, "largest": self._largest, "end": sys.exit}
        if not self._ranks.is_lead:
            self._ranks.follow(self._learner.orders | own)
        self._ranks.order("largest")
        loading = self._largest()
        few, batch = (self._batch(num) for num in (2, self._case.tokens // ROW_TOKENS))
        self._learner.step(few)
        self._ranks.order("forget")
        self._forget()
        self._learner.step(batch)
        self._ranks.order("largest")
        (self._folder / "peaks").write_text(f"{loading} {self._largest()}")
        self._ranks.order("end")

    def _batch(self, num_rollouts: int) -> Batch:
        lengths, vocabulary = [ROW_TOKENS - 1] * num_rollouts, self._case.model.vocabulary
        groups = [random_group(index, lengths, vocabulary) for index in range(2 * self._case.ranks)]
        batch = self._learner.pack(groups, lambda version: 0)
        (minibatch,) = batch.minibatches
        assert num_rollouts * ROW_TOKENS < self._case.tokens or len(minibatch.microbatches) == len(groups)
        return batch

    def _forget(self) -> None:
        """Lets the peak so far be forgotten."""
        Path("/proc/self/clear_refs").write_text("5")

    def _largest(self) -> int:
        return max(self._ranks.gather(status_bytes("VmHWM") - self._before))


def save_model(model: MemoryModel, folder: Path) -> None:
    save_random(ModelShape(*astuple(model), head_dim=64, tied=True), folder)


def save_random(
    shape: ModelShape, folder: Path, *, device: str = "cpu", dtype: torch.dtype = torch.float32, **more: int
) -> None:
    """A Qwen3 of this shape with random weights, made on `device`, in one file. more: fields of its config.json."""
    disable_progress_bar()
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        tie_word_embeddings=shape.tied,
        **more,
    )
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.save_pretrained(folder, max_shard_size="1TB")


def status_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))


if __name__ == "__main__":
    sys.exit(main())
