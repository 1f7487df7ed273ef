"""The warm start: steps of cross-entropy on demonstrations before the first update.

Formula, of step n and its demonstrations with T tokens of assistant turns in all, whatever the number of ranks::

    loss = - sum over these tokens of log p(token | what precedes it) / T

at temperature 1, by AdamW (or `trainer.optimizer`) at `warm_start.learning_rate`. Its moments end with it.
"""

import logging
import math
import random
import time
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

from penstock.consumers.learning.learner.demonstrations import read_demonstrations
from penstock.consumers.learning.learner.learner import Learner

log = logging.getLogger(__name__)


class WarmStep(NamedTuple):
    """One step. step: from 1. loss: before the step, in nats a token. num_tokens: of assistant turns."""

    step: int
    num_steps: int
    loss: float
    grad_norm: float
    num_tokens: int
    step_s: float


def warm_steps(learner: Learner) -> Iterator[WarmStep]:
    """Takes those steps of the warm start that the learner has not taken yet. Equal settings take equal steps.

    Raises:
        ConfigError: see `read_demonstrations`.
    """
    config, settings = learner.config, learner.config.warm_start
    if settings is None or learner.num_warm_steps >= settings.steps:
        return
    demonstrations = read_demonstrations(config, config.engine.max_model_len or math.inf)

    @cache
    def order(epoch: int) -> list[int]:
        return random.Random(f"{config.seed}:{epoch}").sample(range(len(demonstrations)), len(demonstrations))

    log.info("warm start: %d steps on %d demonstrations", settings.steps, len(demonstrations))
    for number in range(learner.num_warm_steps, settings.steps):
        began_s = time.monotonic()
        places = range(number * settings.batch_size, (number + 1) * settings.batch_size)
        chosen = [order(place // len(demonstrations))[place % len(demonstrations)] for place in places]
        minibatch = learner.pack_demonstrations([segment for n in chosen for segment in demonstrations[n]])
        loss, grad_norm = learner.warm_step(minibatch)
        if not math.isfinite(loss + grad_norm):
            log.warning("warm start: step %d is skipped: loss %g, gradient norm %g", number + 1, loss, grad_norm)
        taken_s = time.monotonic() - began_s
        yield WarmStep(number + 1, settings.steps, loss, grad_norm, minibatch.num_tokens, taken_s)
