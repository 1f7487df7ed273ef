"""The study's engine: samples a whole update in one batch, in this process, from the weights it is given."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from penstock.schemas.rollout import (
    EngineFingerprint,
    FinishReason,
    SamplingSettings,
    TopLogprobs,
    pack_floats,
    pack_ids,
)

GREEDY_BELOW = 1e-5
"""As in vLLM: a lower temperature takes the likeliest token, and logprobs are those of temperature 1."""


class Sampled(NamedTuple):
    """One completion: ids, ending with the stop token if it was sampled, the logprobs they were sampled with, and the
    likeliest ids if the settings ask for any."""

    token_ids: list[int]
    behavior_logprobs: list[float]
    finish_reason: FinishReason
    top: TopLogprobs | None = None


class StudySampler:
    """transformers' own model class on CPU in float32, with a KV cache.

    It shares no code with the trainer's packed forward pass: its logprobs agree with the trainer's on equal weights up
    to rounding, and the tokens it labels with a version were sampled by that version alone.

    Args:
        path: folder of a transformers model.
        stop_token_id: ends a completion.
    """

    def __init__(self, path: str, stop_token_id: int) -> None:
        transformers_logging.disable_progress_bar()
        self.model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self._stop = stop_token_id
        self.fingerprint = EngineFingerprint(
            engine="in-process",
            version=transformers.__version__,
            model=path,
            dtype="float32",
            head_dtype="float32",
            logprobs_mode="processed_logprobs",
            prefix_caching=False,
            async_scheduling=False,
        )

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Samples from these weights from now on; the names are those of `Learner.published_weights`."""
        self.model.load_state_dict(weights)

    @torch.inference_mode()
    def sample(
        self, prompts: Sequence[Sequence[int]], num_siblings: int, settings: SamplingSettings, seed: int
    ) -> list[list[Sampled]]:
        """Returns `num_siblings` completions of each prompt, a list for each prompt.

        The noise depends on `seed` and on a token's place in the batch alone: equal seeds give a policy that changed
        little mostly the same tokens.

        Raises:
            ValueError: prompts of different lengths, which this batch without padding cannot hold, or top-k or top-p.
        """
        lengths = {len(prompt) for prompt in prompts}
        if len(lengths) != 1:
            raise ValueError(f"sample: prompts have {sorted(lengths)} tokens, expected one length for all")
        if settings.top_k not in (0, -1) or settings.top_p != 1.0:
            raise ValueError(f"sample: top_k {settings.top_k}, top_p {settings.top_p}: expected 0 and 1.0")
        generator = torch.Generator().manual_seed(seed)
        outputs = self.model(input_ids=torch.tensor(prompts), use_cache=True, logits_to_keep=1)
        cache = outputs.past_key_values
        cache.batch_repeat_interleave(num_siblings)
        logits = outputs.logits[:, -1].repeat_interleave(num_siblings, dim=0)
        ids: list[Tensor] = []
        logprobs: list[Tensor] = []
        likeliest: list[Any] = []
        running = torch.ones(len(logits), dtype=torch.bool)
        for position in range(settings.max_tokens):
            if position:
                outputs = self.model(input_ids=ids[-1][:, None], past_key_values=cache, use_cache=True)
                logits = outputs.logits[:, -1]
            distribution = _distribution(logits, settings.temperature)
            chosen = _choose(distribution, settings.temperature, generator)
            ids.append(chosen)
            logprobs.append(distribution.gather(1, chosen[:, None])[:, 0])
            if settings.top_logprobs:
                likeliest.append(distribution.topk(settings.top_logprobs))
            running &= chosen != self._stop
            if not running.any():
                break
        rows = [
            _until_stop(row, values, self._stop)
            for row, values in zip(torch.stack(ids, 1).tolist(), torch.stack(logprobs, 1).tolist(), strict=True)
        ]
        if likeliest:
            top_ids, top = (torch.stack([each[n] for each in likeliest], 1) for n in (1, 0))
            rows = [_with_top(row, top_ids[n], top[n]) for n, row in enumerate(rows)]
        return [rows[first : first + num_siblings] for first in range(0, len(rows), num_siblings)]


def _distribution(logits: Tensor, temperature: float) -> Tensor:
    """Returns the logprobs [B, V] that tokens are drawn by, from logits [B, V]."""
    return torch.log_softmax(logits.float() / (1.0 if temperature < GREEDY_BELOW else temperature), dim=-1)


def _choose(logprobs: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
    """Chooses a token id for each row of logprobs [B, V]; returns [B]."""
    if temperature < GREEDY_BELOW:
        return logprobs.argmax(-1)
    # multinomial takes the largest of p / e with e exponential noise: the coupling that `sample` promises.
    return torch.multinomial(logprobs.exp(), 1, generator=generator)[:, 0]


def _with_top(row: Sampled, ids: Tensor, logprobs: Tensor) -> Sampled:
    """Returns the completion with its likeliest ids; both are [T, k], of as many tokens or more."""
    num = len(row.token_ids)
    packed = pack_ids(ids[:num].flatten().tolist()), pack_floats(logprobs[:num].flatten().tolist())
    return row._replace(top=TopLogprobs(ids.shape[1], *packed))


def _until_stop(ids: list[int], logprobs: list[float], stop: int) -> Sampled:
    if stop not in ids:
        return Sampled(ids, logprobs, "length")
    length = ids.index(stop) + 1
    return Sampled(ids[:length], logprobs[:length], "stop")
