"""The processor time that the record of rollouts adds to an update, which a thread writes while the next one trains."""

import time
from collections.abc import Iterator
from pathlib import Path

from bench.groups import learner_config, random_group
from bench.result import Figure, Goal, compare_rounds
from bench.trainer.ranks import LEARNING_RATE, Work
from penstock.consumers.learning.batch.lag import LagTable
from penstock.consumers.learning.learner.learner import Learner
from penstock.consumers.observe.record import RolloutRecorder, Taken
from penstock.schemas.config import ModelConfig


def record_figures(model: Path, work: Work, rounds: int, folder: Path) -> Iterator[Figure]:
    config = learner_config(
        ModelConfig(path=str(model)),
        device="cpu",
        learning_rate=LEARNING_RATE,
        tokens_per_microbatch=work.tokens_per_pass,
    )
    learner, lag_of = Learner(config), LagTable(0, {}, {})
    lengths = [work.sampled_tokens] * work.group_size
    groups = [
        random_group(index, lengths, learner.vocabulary, prompt_tokens=work.prompt_tokens)
        for index in range(1, work.num_groups + 1)
    ]
    recorder = RolloutRecorder(config, folder / "record-row", 0, {}, lag_of)
    record_s, step_s = [], []
    for n in range(rounds + 1):  # the first does not count
        began_s = time.process_time()
        batch = learner.pack(groups, lag_of)
        report = learner.step(batch)
        trained_s = time.process_time()
        recorder.add(Taken(n, n, groups, batch, report, lag_of))
        recorder.sync()
        ended_s = time.process_time()
        step_s.append(trained_s - began_s)
        record_s.append(ended_s - trained_s)
    recorder.close()
    yield compare_rounds(
        f"recording an update's rollouts, {model.name}",
        record_s[1:],
        step_s[1:],
        reference_is="the update itself, in processor time",
        unit="s",
        goal=Goal(at_most=0.01),
        details={"num_tokens": work.num_tokens},
    )
