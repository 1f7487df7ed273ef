"""The learning rate of each optimizer step: warm-up, plateau, decay. Imports no torch: a resume is checked by it.

Formula, of step n = 0, 1, .. of N planned ones, with W of warm-up, D of decay and the configured rate, the peak::

    n < W            peak * (n + 1) / W            the last warm-up step has the peak
    otherwise        peak * f(x),  x = min(1, (N - n) / D) and 0 from n = N on
                     constant f = 1;  linear f = x;  cosine f = (1 - cos(pi * x)) / 2

D = N - W unless `trainer.decay_steps` says otherwise; a smaller D leaves a plateau at the peak: warmup-stable-decay.

Source: cosine SGDR (arXiv 1608.03983, eq. 5, one cycle); warmup-stable-decay MiniCPM (arXiv 2404.06395, section 4). The
values are those of transformers' schedules of these names, whose warm-up begins at n / W, with a step at rate 0.
"""

import math

from penstock.schemas.config import RunConfig


def learning_rate(config: RunConfig, step: int) -> float:
    """Returns the rate of optimizer step `step`, counted from 0 over the steps taken."""
    trainer = config.trainer
    if step < trainer.warmup_steps:
        return trainer.learning_rate * (step + 1) / trainer.warmup_steps
    if trainer.decay == "constant":
        return trainer.learning_rate
    num_decay = trainer.decay_steps or max(1, config.num_steps_planned - trainer.warmup_steps)
    left = min(1.0, max(0.0, (config.num_steps_planned - step) / num_decay))
    return trainer.learning_rate * (left if trainer.decay == "linear" else (1 - math.cos(math.pi * left)) / 2)
