"""An engine in transformers: it samples token by token with a KV cache, loads weights in flight, and can be made to
report wrong logprobs."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from penstock.schemas.prompt import Prompt, Reward
from penstock.schemas.rollout import (
    Rollout,
    RolloutGroup,
    SamplingSettings,
    Segment,
    pack_floats,
    pack_ids,
)
from wire_examples import FINGERPRINT, spans


@dataclass
class TransformersCompletion:
    """One sibling: versions, logprobs and the sets of tokens that the sampler kept, token by token."""

    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    kept: list[list[int]]


@dataclass
class TransformersAnswer:
    """The siblings of one prompt."""

    prompt: list[int]
    siblings: list[TransformersCompletion]


@lru_cache(maxsize=4)
def _model(folder: Path, dtype: str) -> Any:
    """Loads a model once. transformers modifies its own classes during a load, so two threads that load at the same
    time would leave them modified, and some engines are made in a producer's thread."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()


class TransformersEngine:
    """An engine on a transformers model in `folder`. files: published weights by version.

    dtype: of the body. head: the type of the head's logits.
    convention: maps (logits [B, V], sampling, log-softmax that the sampler draws from [B, V]) to the reported
        log-softmax [B, V]; None reports the distribution that was sampled from.
    """

    def __init__(
        self, folder: Path, files: Mapping[int, Path], *, dtype: str = "float32", head: str = "float32"
    ) -> None:
        self.model: Any = copy.deepcopy(_model(folder, dtype))
        self.files = files
        self._head = head
        self.convention: Callable[[Tensor, SamplingSettings, Tensor], Tensor] | None = None

    @torch.no_grad()
    def logits(self, ids: Sequence[int]) -> Tensor:
        """Returns the logits of one sequence, [T, V] float32, with the weights loaded last."""
        return self.model(input_ids=torch.tensor([ids])).logits[0].float()

    @torch.no_grad()
    def generate(
        self,
        prompts: Sequence[list[int]],
        siblings: int,
        num_tokens: int,
        *,
        version: int = 0,
        updates: Mapping[int, int] | None = None,
        sampling: SamplingSettings | None = None,
        seed: int = 0,
        clear: bool = False,
        stale: tuple[int, int] | None = None,
    ) -> list[TransformersAnswer]:
        """Samples `siblings` answers to each of `prompts`, which have the same length.

        updates: versions whose weights are loaded, by the step before which they are.
        clear: an update discards the keys and values computed so far.
        stale: (version, tokens): older weights compute the keys and values of so many tokens of the context.
        """
        sampling = sampling or SamplingSettings(max_tokens=num_tokens)
        random = torch.Generator().manual_seed(seed)
        ids = torch.tensor(prompts).repeat_interleave(siblings, 0)
        length, cache = ids.shape[1], DynamicCache()
        if stale is not None:
            self.load(stale[0])
            self._body(ids[:, : stale[1]], cache)
        self.load(version)
        out: list[tuple[Tensor, Tensor, int, Tensor]] = []
        for step in range(num_tokens):
            if updates and step in updates:
                version = updates[step]
                self.load(version)
                if clear:
                    cache = DynamicCache()
            hidden = self._body(ids[:, cache.get_seq_length() :], cache)[:, -1]
            logits = self._logits(hidden)
            drawn = processed(logits, ids[:, :length], ids[:, length:], sampling)
            reported = drawn if self.convention is None else self.convention(logits, sampling, drawn)
            token = torch.multinomial(drawn.exp(), 1, generator=random)
            out.append((token[:, 0], reported.gather(1, token)[:, 0], version, drawn > -torch.inf))
            ids = torch.cat([ids, token], 1)
        return [
            TransformersAnswer(
                prompts[p],
                [
                    TransformersCompletion(
                        [int(t[r]) for t, _, _, _ in out],
                        [float(b[r]) for _, b, _, _ in out],
                        [v for _, _, v, _ in out],
                        [kept[r].nonzero()[:, 0].tolist() for _, _, _, kept in out],
                    )
                    for r in range(p * siblings, (p + 1) * siblings)
                ],
            )
            for p in range(len(prompts))
        ]

    def load(self, version: int) -> None:
        if version in self.files:
            state = load_file(self.files[version])
            missing = self.model.load_state_dict(state, strict=False).missing_keys
            assert set(missing) <= {"lm_head.weight"}, missing

    def _body(self, ids: Tensor, cache: DynamicCache) -> Tensor:
        return self.model.model(input_ids=ids, past_key_values=cache, use_cache=True).last_hidden_state

    def _logits(self, hidden: Tensor) -> Tensor:
        weight = self.model.lm_head.weight
        if self._head != "float32":
            dtype = getattr(torch, self._head)
            return (hidden.to(dtype) @ weight.to(dtype).t()).float()
        return hidden.float() @ weight.float().t()


def processed(logits: Tensor, prompt: Tensor, sampled: Tensor, sampling: SamplingSettings) -> Tensor:
    """Returns the log-softmax [B, V] that vLLM samples from: penalties, temperature, top-k, top-p in this order."""
    z = logits.float().clone()
    counts = F.one_hot(sampled, z.shape[1]).sum(1) if sampled.shape[1] else torch.zeros_like(z, dtype=torch.long)
    seen = (counts > 0) | (F.one_hot(prompt, z.shape[1]).sum(1) > 0)
    r = sampling.repetition_penalty
    z = torch.where(seen, torch.where(z > 0, z / r, z * r), z)
    z = z - sampling.frequency_penalty * counts - sampling.presence_penalty * (counts > 0)
    z = z / (sampling.temperature if sampling.temperature >= 1e-5 else 1.0)
    if sampling.top_k > 0:
        kth = z.topk(min(sampling.top_k, z.shape[1])).values[:, -1:]
        z = z.masked_fill(z < kth, -torch.inf)
    if sampling.top_p < 1.0:
        ascending, order = z.sort()
        low = ascending.softmax(-1).cumsum(-1) <= 1 - sampling.top_p
        low[:, -1] = False
        z = z.masked_fill(torch.zeros_like(low).scatter(1, order, low), -torch.inf)
    return z.log_softmax(-1)


def group_of(
    index: int, answer: TransformersAnswer, sampling: SamplingSettings, *, with_masks: bool = False, text: str = "?"
) -> RolloutGroup:
    """Returns the record of one prompt's siblings."""
    rollouts = []
    for n, own in enumerate(answer.siblings):
        start = len(answer.prompt)
        rollouts.append(
            Rollout(
                segments=(
                    Segment(
                        token_ids=pack_ids(answer.prompt + own.token_ids),
                        behavior_logprobs=pack_floats(own.logprobs),
                        loss_mask=((start, start + len(own.token_ids)),),
                        version_spans=spans(own.versions, start),
                        finish_reason="length",
                        sampling_mask=tuple(pack_ids(kept) for kept in own.kept) if with_masks else None,
                    ),
                ),
                reward=Reward(value=float(n % 2)),
            )
        )
    return RolloutGroup(
        index=index,
        prompt=Prompt(text=text),
        rollouts=tuple(rollouts),
        producer_id="producer-0",
        fingerprint=FINGERPRINT,
        sampling=sampling,
    )


def publish_perturbed(
    folder: Path, base: Path, versions: Sequence[int], *, size: float = 0.02, dtype: str = "float32"
) -> dict[int, Path]:
    """Writes a published file for each version, each a step of relative size `size` from the one before; returns
    them."""
    state = load_file(base / "model.safetensors")
    folder.mkdir(parents=True, exist_ok=True)
    files = {}
    for version in versions:
        random = torch.Generator().manual_seed(version)
        if version:
            state = {
                name: w + size * w.std() * torch.randn(w.shape, generator=random) if w.ndim == 2 else w
                for name, w in state.items()
            }
        files[version] = folder / f"v{version}.safetensors"
        save_file({name: w.to(getattr(torch, dtype)).contiguous() for name, w in state.items()}, files[version])
    return files
