"""Measures the trainer's memory against the formula of docs/sizing.py: `python -m bench.sizing` writes a result.

Each rank is a process of its own, on one torch thread, that trains a few tokens and then a batch of two passes. What
counts is the peak of resident memory in that batch, over the memory before the model was loaded: the moments are there,
and in its second pass the gradients.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Literal

import msgspec
import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig
from transformers.utils.logging import disable_progress_bar

from bench.groups import learner_config, random_group
from bench.machine import reset_peak, status_bytes
from bench.result import RESULTS, now
from bench.section import found_apart, wait_for
from bench.trainer.ranks import RankJob, start_ranks
from penstock.consumers.learning.batch.batch import Batch
from penstock.consumers.learning.learner.learner import Learner
from penstock.deploy.launch.memory import ModelShape
from penstock.schemas.config import Dtype, ModelConfig
from penstock.schemas.process.files import write_whole

ROW_TOKENS = 512


class MemoryCase(msgspec.Struct, frozen=True):
    """tokens: of each of the two passes that every rank has of a batch."""

    model: ModelShape
    dtype: Dtype
    tokens: int
    checkpointing: bool
    ranks: int = 1
    accumulation: Literal["unsharded", "sharded"] = "sharded"
    by_expert: bool = False


class MemoryMeasured(msgspec.Struct, frozen=True):
    """peak_bytes: of the rank that has most, while it trains."""

    case: MemoryCase
    peak_bytes: int


class MemoryJob(RankJob, frozen=True, kw_only=True):
    """folder: of the model."""

    case: MemoryCase
    folder: str


SMALL = ModelShape("20M", 384, 1024, 10, 6, 2, 64, 12000, tied=True)
LARGE = ModelShape("100M", 768, 2048, 12, 12, 4, 64, 32000, tied=True)
MIXTURE = ModelShape("80M, 32 experts", 384, 256, 8, 6, 2, 64, 12000, tied=True, experts=32, experts_per_token=4)
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
    *(
        MemoryCase(MIXTURE, "float32", 1024, True, ranks, by_expert=by_expert)
        for ranks in (2, 4)
        for by_expert in (False, True)
    ),
)


def main() -> None:
    argparse.ArgumentParser(prog="python -m bench.sizing", description="Measure the trainer's memory.").parse_args()
    found = []
    for each in CASES:
        found.append(measure(each))
        print(f"{each}: {found[-1].peak_bytes / 1e6:.0f} MB", flush=True)
    file = RESULTS / f"sizing-{now()[:10]}.json"
    write_whole(file, msgspec.json.format(msgspec.json.encode(found)).decode() + "\n")
    print(f"result  {file}")


def measure(case: MemoryCase) -> MemoryMeasured:
    """Runs a case. Raises BenchError: a rank failed, or took too long."""
    # Large blocks of memory go back to the system when they are freed; by default glibc keeps ever larger ones.
    environment = {"MALLOC_MMAP_THRESHOLD_": "65536"}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_random(case.model, folder)
        job = MemoryJob(case=case, folder=name, num_ranks=case.ranks)
        wait_for(start_ranks("memory", "bench.sizing:measure_rank", job, folder, environment=environment))
        return found_apart("memory", MemoryMeasured, folder)


def measure_rank(job: MemoryJob) -> MemoryMeasured:
    """Measures the largest peaks of all ranks, on the lead; the other ranks do not return."""
    case, ranks = job.case, job.open()
    reset_peak()
    before, files_before = status_bytes("VmRSS"), status_bytes("RssFile")
    learner = Learner(
        learner_config(
            ModelConfig(path=job.folder, dtype=case.dtype),
            device="cpu",
            tokens_per_microbatch=case.tokens,
            gradient_checkpointing=case.checkpointing,
            gradient_accumulation=case.accumulation,
            expert_parallel=case.by_expert,
        ),
        ranks,
    )

    def largest_peak() -> int:
        # Of a mixture the whole file stays mapped for the tensors that are not joined; the system may drop its pages.
        mapped = status_bytes("RssFile") - files_before
        return max(ranks.gather(status_bytes("VmHWM") - before - mapped))

    if not ranks.is_lead:
        ranks.follow(learner.orders | {"reset": reset_peak, "largest": largest_peak, "end": sys.exit})

    def batch_of(rollouts_per_pass: int) -> Batch:
        lengths, vocabulary = [ROW_TOKENS - 1] * rollouts_per_pass, case.model.vocabulary
        groups = [random_group(index, lengths, vocabulary) for index in range(2 * case.ranks)]
        batch = learner.pack(groups, lambda version: 0)
        (minibatch,) = batch.minibatches
        assert rollouts_per_pass * ROW_TOKENS < case.tokens or len(minibatch.microbatches) == len(groups)
        return batch

    few, batch = batch_of(2), batch_of(case.tokens // ROW_TOKENS)
    learner.step(few)
    ranks.order("reset")
    reset_peak()
    learner.step(batch)
    ranks.order("largest")
    peak = largest_peak()
    ranks.order("end")
    return MemoryMeasured(case, peak)


def save_random(
    shape: ModelShape, folder: Path, *, device: str = "cpu", dtype: torch.dtype = torch.float32, **more: int
) -> None:
    """Saves a Qwen3 of this shape, a Qwen3-MoE if it has experts, with random weights, made on `device`, in one file.
    more: fields of its config.json."""
    disable_progress_bar()
    torch.manual_seed(0)
    kind: type[Qwen3Config] | type[Qwen3MoeConfig] = Qwen3Config
    if shape.experts:
        kind = Qwen3MoeConfig
        more |= {
            "moe_intermediate_size": shape.intermediate,
            "num_experts": shape.experts,
            "num_experts_per_tok": shape.experts_per_token,
        }
    config = kind(
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


if __name__ == "__main__":
    main()
