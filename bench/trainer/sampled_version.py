"""The processor time of proximal logprobs under the versions that sampled the tokens, against the other setting."""

import time
from collections.abc import Iterator
from pathlib import Path

from msgspec.structs import replace

from bench.groups import learner_config, random_group
from bench.result import Figure, compare_rounds
from bench.trainer.ranks import LEARNING_RATE, Work
from penstock.consumers.learning.learner.learner import Learner
from penstock.schemas.config import CorrectionConfig, ModelConfig

NEWEST = 2


def sampled_version_figures(model: Path, work: Work, rounds: int) -> Iterator[Figure]:
    """Every second group is two updates old, the others one: two older versions in each batch."""
    config = replace(
        learner_config(
            ModelConfig(path=str(model)),
            device="cpu",
            learning_rate=LEARNING_RATE,
            tokens_per_microbatch=work.tokens_per_pass,
        ),
        max_lag=NEWEST,
    )
    lengths = [work.sampled_tokens] * work.group_size
    found: dict[str, list[float]] = {}
    for proximal in ("consumed", "sampled_version"):
        learner = Learner(replace(config, correction=CorrectionConfig(proximal=proximal)))
        published = [part.values.to(part.dtype, copy=True) for part in learner.published_parts()()]
        learner.follow_versions(lambda version, published=published: published)
        groups = [
            random_group(n, lengths, learner.vocabulary, prompt_tokens=work.prompt_tokens, versions=(n % 2,))
            for n in range(1, work.num_groups + 1)
        ]
        times = found[proximal] = []
        for _ in range(rounds + 1):
            batch = learner.pack(groups, lambda version: NEWEST - version)
            began_s = time.process_time()
            learner.step(batch)
            times.append(time.process_time() - began_s)
    yield compare_rounds(
        f"an update with proximal logprobs under the sampling versions, {model.name}",
        found["sampled_version"][1:],  # the first does not count
        found["consumed"][1:],
        reference_is="the update with those of the policy before it, in processor time",
        unit="s",
        details={"num_tokens": work.num_tokens, "older_versions": 2},
    )
