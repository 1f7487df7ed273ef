"""GSPO with the clip rate that PipelineRL reports."""

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.consumers.learning.interfaces import LossInputs
from penstock.consumers.learning.objectives.gspo import Gspo
from penstock.consumers.learning.rows import Rows

CLIP_RATE = "gspo_clip_indicator"
"""The metric's key in updates.jsonl; the ablation shows it under its name there, clamp_log_ratio_new_old_indicator."""


@dataclass(frozen=True, kw_only=True)
class GspoWithClipRate(Gspo):
    """`Gspo` with one more metric.

    `gspo_clip_indicator` is the share of tokens whose row has a ratio outside [1 - clip_low, 1 + clip_high], whatever
    the sign of its advantage. Source: PipelineRL's `rl_step`, branch "gspo", where it is
    `clamp_log_ratio_new_old_indicator`. The trainer's own metric of that name is that of its branch "reinforce": one
    side, by token, against the correction's threshold. `policy_clipped_frac` counts less: only where the clip changes
    the gain.
    """

    def gain(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        gain, metrics = super().gain(inputs)
        with torch.no_grad():
            log_ratio = inputs.current_logprobs - inputs.proximal_logprobs
            ratio = Rows(inputs.row_ids, inputs.loss_mask).mean(log_ratio).exp()
            outside = (ratio < 1 - self.clip_low) | (ratio > 1 + self.clip_high)
            metrics[CLIP_RATE] = (outside & inputs.loss_mask).sum()
        return gain, metrics
