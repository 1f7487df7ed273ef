"""Measures the memory of the trainer beside the formula of docs/sizing.py: `python -m bench.sizing` writes a result.

Each case is a process of its own, on one torch thread, that trains a few tokens and then a batch of two passes. What
counts is the peak of resident memory in that batch, over the memory before the model was loaded: the moments are there,
and in its second pass the gradients.
"""

import argparse
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec
import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from bench.result import RESULTS, now
from penstock.consumers.learning.learner import Learner
from penstock.consumers.learning.packing import pack
from penstock.schemas.config import ModelConfig, Plug, RunConfig, TrainerConfig
from penstock.schemas.process.files import write_whole
from penstock.schemas.prompt import Prompt, Reward
from penstock.schemas.rollout import (
    EngineFingerprint,
    Rollout,
    RolloutGroup,
    SamplingSettings,
    Segment,
    VersionSpan,
    pack_floats,
    pack_ids,
)

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
    """tokens: of each of the two passes of a batch."""

    model: MemoryModel
    dtype: str
    tokens: int
    checkpointing: bool


class MemoryMeasured(msgspec.Struct, frozen=True):
    case: MemoryCase
    peak_bytes: int


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
)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.sizing", description="Measure the trainer's memory.")
    parser.add_argument("--case", type=Path, help=argparse.SUPPRESS)
    case = parser.parse_args().case
    if case is not None:
        print(peak_bytes(msgspec.json.decode(case.read_bytes(), type=MemoryCase)))
        return 0
    found = []
    for each in CASES:
        found.append(MemoryMeasured(each, measure(each)))
        print(f"{each}: {found[-1].peak_bytes / 1e6:.0f} MB", flush=True)
    file = RESULTS / f"sizing-{now()[:10]}.json"
    write_whole(file, msgspec.json.format(msgspec.json.encode(found)).decode() + "\n")
    print(f"result  {file}")
    return 0


def measure(case: MemoryCase) -> int:
    """Runs a case in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "case.json"
        file.write_bytes(msgspec.json.encode(case))
        command = [sys.executable, "-m", "bench.sizing", "--case", str(file)]
        # Large blocks of memory go back to the system when they are freed; by default glibc keeps ever larger ones.
        environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    return int(done.stdout.split()[-1])


def peak_bytes(case: MemoryCase) -> int:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        _save_model(case.model, Path(folder))
        config = RunConfig(
            name="sizing",
            model=ModelConfig(path=folder, dtype=case.dtype),  # type: ignore[arg-type]
            environment=Plug(path="none:None"),
            trainer=TrainerConfig(
                device="cpu", tokens_per_microbatch=case.tokens, gradient_checkpointing=case.checkpointing
            ),
        )
        before = _status_bytes("VmRSS")
        learner = Learner(config)
        batch = pack([_group(1, case), _group(2, case)], lambda version: 0, config)
        (minibatch,) = batch.minibatches
        assert len(minibatch.microbatches) == 2
        learner.step(pack([_group(0, case, num_rollouts=2)], lambda version: 0, config))
        Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
        learner.step(batch)
    return _status_bytes("VmHWM") - before


def _save_model(model: MemoryModel, folder: Path) -> None:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=model.vocabulary,
        hidden_size=model.hidden,
        intermediate_size=model.intermediate,
        num_hidden_layers=model.layers,
        num_attention_heads=model.heads,
        num_key_value_heads=model.kv_heads,
        head_dim=64,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)


def _group(index: int, case: MemoryCase, num_rollouts: int | None = None) -> RolloutGroup:
    """Rollouts of `ROW_TOKENS` tokens each, their shared prompt token among them: one forward pass."""
    rng = np.random.default_rng(index)
    num_sampled = ROW_TOKENS - 1
    segments = [
        Segment(
            token_ids=pack_ids([1, *rng.integers(0, case.model.vocabulary, num_sampled).tolist()]),
            behavior_logprobs=pack_floats([-math.log(case.model.vocabulary)] * num_sampled),
            loss_mask=((1, ROW_TOKENS),),
            version_spans=(VersionSpan(0, 1, ROW_TOKENS),),
        )
        for _ in range(num_rollouts or case.tokens // ROW_TOKENS)
    ]
    return RolloutGroup(
        index=index,
        prompt=Prompt(text="?"),
        rollouts=tuple(
            Rollout(segments=(segment,), reward=Reward(value=float(n % 2))) for n, segment in enumerate(segments)
        ),
        producer_id="producer-0",
        fingerprint=EngineFingerprint(
            engine="none",
            version="0",
            model="Qwen3ForCausalLM",
            dtype=case.dtype,
            head_dtype="float32",
            logprobs_mode="processed_logprobs",
            prefix_caching=False,
            async_scheduling=False,
        ),
        sampling=SamplingSettings(temperature=1.0, max_tokens=ROW_TOKENS),
    )


def _status_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))


if __name__ == "__main__":
    sys.exit(main())
