"""Updates of TRL's GRPOTrainer, in the peers' environment."""

import tempfile
import time
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback
from transformers.utils.logging import disable_progress_bar

from bench.peers.trl_run import Stopwatch, TimedTrainer
from bench.peers.trl_settings import training_rows, trl_settings
from bench.trainer.long_answers import LongAnswers, PeerUpdates, TrlJob
from penstock.schemas.config import load_config


class _CountedTrainer(TimedTrainer):
    """TimedTrainer that counts the tokens of each update's completions."""

    tokens: list[int]

    def _generate_and_score_completions(self, *args: Any, **kwargs: Any) -> Any:
        batch = super()._generate_and_score_completions(*args, **kwargs)
        self.tokens.append(int(batch["completion_mask"].sum()))
        return batch


class _Clock(TrainerCallback):
    """The time of each update."""

    def __init__(self) -> None:
        self.ends_s: list[float] = []

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.ends_s.append(time.perf_counter())

    on_step_end = on_train_begin


def measure(job: TrlJob) -> PeerUpdates:
    torch.set_num_threads(job.num_threads)
    disable_progress_bar()
    config = load_config(Path(job.run_file))
    environment = LongAnswers(seed=config.seed)
    tokenizer = AutoTokenizer.from_pretrained(config.model.path, padding_side="left")
    clock, stopwatch = _Clock(), Stopwatch()

    def reward(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        return [environment.reward(environment.prompt(0), completion) for completion in completions]

    with tempfile.TemporaryDirectory() as scratch:
        trainer = _CountedTrainer(
            model=AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32),
            reward_funcs=reward,
            args=trl_settings(config, job.updates, scratch),
            train_dataset=training_rows(environment, job.updates * config.groups_per_batch),
            processing_class=tokenizer,
            callbacks=[clock],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.stopwatch, trainer.tokens = stopwatch, []
        trainer.train()
    phases_s = stopwatch.phases_s(clock.ends_s[-1] - clock.ends_s[0])
    return PeerUpdates(
        name=f"TRL {version('trl')}",
        seconds=[end - start for start, end in pairwise(clock.ends_s)],
        tokens=trainer.tokens,
        phases_s={name: seconds / job.updates for name, seconds in phases_s.items()},
    )
