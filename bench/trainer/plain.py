"""The loop that the trainer is compared with: a transformers model, the float32 head, clipped AdamW, no more."""

from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from penstock.consumers.learning.attention import IMPLEMENTATION
from penstock.consumers.learning.batch import Batch, MicroBatch
from penstock.consumers.learning.head import selected_logprobs
from penstock.schemas.config import RunConfig

CLIP = 0.2


class PlainLoop:
    """One process, float32, one optimizer step a batch: GRPO with truncated importance weights, token by token.

    Makes no diagnostics, knows no ranks, and takes the batches that the learner takes.
    """

    def __init__(self, folder: Path, config: RunConfig) -> None:
        trainer = config.trainer
        self._threshold, self._max_grad_norm = config.correction.threshold, trainer.max_grad_norm
        self.module = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation=IMPLEMENTATION
        ).eval()
        self._parameters = list(self.module.parameters())
        self._optimizer = torch.optim.AdamW(
            self._parameters,
            lr=trainer.learning_rate,
            betas=trainer.betas,
            weight_decay=trainer.weight_decay,
            fused=True,
        )

    def step(self, batch: Batch) -> None:
        (minibatch,) = batch.minibatches
        for microbatch in minibatch.microbatches:
            self._loss(microbatch, minibatch.num_tokens).backward()
        torch.nn.utils.clip_grad_norm_(self._parameters, self._max_grad_norm, foreach=True)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def _loss(self, microbatch: MicroBatch, num_tokens: int) -> Tensor:
        body = self.module.get_decoder()
        hidden = body(
            input_ids=microbatch.token_ids[None],
            position_ids=microbatch.position_ids[None],
            use_cache=False,
            layout=microbatch.layout,
        ).last_hidden_state[0]

        def loss(part: slice, logprobs: Tensor) -> Tensor:
            advantages, behavior = microbatch.advantages[part], microbatch.behavior_logprobs[part]
            weights = (logprobs.detach() - behavior).exp().clamp(max=self._threshold)
            ratio = (logprobs - logprobs.detach()).exp()
            gain = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
            return -(weights * gain).sum() / num_tokens

        def token_grads(part: slice, logprobs: Tensor, entropy: Tensor) -> tuple[Tensor, None]:
            with torch.enable_grad():
                leaf = logprobs.detach().requires_grad_()
                return torch.autograd.grad(loss(part, leaf), leaf)[0], None

        logprobs, _ = selected_logprobs(
            torch.nn.functional.embedding(microbatch.predicting, hidden),
            self.module.get_output_embeddings().weight,
            microbatch.targets,
            microbatch.temperature,
            token_grads=token_grads,
        )
        return loss(slice(None), logprobs)
