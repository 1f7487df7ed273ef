"""Token ids that were made again from text: the sampled ones are found by their logprobs.

Text has many tokenizations; an engine that hands out text loses which one it sampled. Where the ids in a record are
not the sampled ones, the recorded logprobs are still those of the sampled ones, in order. So from the first token that
is off the sampled ids are rebuilt: among the vocabulary entries that the remaining text begins with, the one whose
logprob under the model is the recorded one.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from penstock.consumers.learning.head import GREEDY_TEMPERATURE
from penstock.consumers.learning.packing import pack_segments
from penstock.consumers.parity.candidate import Candidate
from penstock.consumers.parity.errors import ParityError
from penstock.consumers.parity.policies import PolicyStore
from penstock.consumers.parity.readings import plain_logits
from penstock.consumers.parity.report import TOLERANCES
from penstock.consumers.parity.sample import Sample, SampleRow
from penstock.schemas.prompt import Prompt
from penstock.schemas.rollout import RolloutGroup, Segment, VersionSpan, pack_floats, pack_ids
from torch import Tensor

MAX_ROWS = 16
"""Rows that are off and are looked at."""
MAX_STEPS = 64
"""Tokens rebuilt per row."""
_FOUND = 0.9
"""Share of the examined tokens for which an entry must fit."""
_PROMPTS = 32


def check_tokenizer(groups: Sequence[RolloutGroup], tokenizer: Any) -> None:
    """Raises ParityError where no prompt's text is in what its ids decode to: another model's tokenizer."""
    asked = [group for group in groups if group.prompt.text or group.prompt.messages][:_PROMPTS]
    for group in asked:
        segment = group.rollouts[0].segments[0]
        end = segment.loss_mask[0][0] if segment.loss_mask else segment.num_tokens
        ids = np.frombuffer(segment.token_ids, dtype=np.int32)[:end].tolist()
        try:
            decoded = tokenizer.decode(ids)
        except (IndexError, OverflowError, TypeError):
            continue  # an id that the tokenizer does not know
        if _asked(group.prompt).strip() in decoded:
            return
    if asked:
        raise ParityError(
            f"the tokenizer does not match the token ids: group {asked[0].index} was asked "
            f"{_asked(asked[0].prompt)[:60]!r}, and no prompt is in what its ids decode to; expected the tokenizer of "
            "the model that the rollouts were sampled from"
        )


def _asked(prompt: Prompt) -> str:
    return prompt.messages[-1].content if prompt.messages else prompt.text or ""


class Search:
    """Rebuilds the sampled ids of rows that are off."""

    def __init__(
        self, sample: Sample, policies: PolicyStore, tokenizer: Any, budget: int, device: torch.device
    ) -> None:
        self._sample, self._policies, self._budget, self._device = sample, policies, budget, device
        self._tolerance = TOLERANCES[policies.dtype]
        self._allowed = self._tolerance.max or self._tolerance.p99
        """The largest gap of a single token that counts as equal."""
        self._ids: dict[str, int] = tokenizer.get_vocab()
        self._entries = {number: entry for entry, number in self._ids.items()}
        self._longest = max(map(len, self._ids))

    def candidate(self, null: Tensor) -> Candidate | None:
        """null: [M] float64, as processed. None where no row of one policy and one turn is off."""
        gaps = (self._sample.engine - null).abs()
        rows = [
            row
            for row in self._sample.rows
            if not row.is_mixed
            and len(row.segment.loss_mask) == 1
            and gaps[row.tokens].mean() > self._tolerance.mean
            and gaps[row.tokens].max() > self._allowed
        ][:MAX_ROWS]
        found = torch.full_like(null, torch.nan)
        num_found = num_stuck = 0
        example = ""
        for row in rows:
            first = int((gaps[row.tokens] > self._allowed).nonzero()[0])
            path, logprobs, stuck = self._rebuild(row, first)
            start, end = row.first + first, row.first + first + len(path)
            found[row.first : start] = null[row.first : start]
            found[start:end] = torch.tensor(logprobs, dtype=torch.float64)
            found[end : end + stuck] = null[end : end + stuck]
            num_found, num_stuck = num_found + len(path), num_stuck + stuck
            if path and not example:
                recorded, sampled = int(row.token_ids[row.sampled[first]]), path[0]
                example = f"{self._entries[sampled]!r} was sampled where {self._entries.get(recorded)!r} is recorded"
        if not rows:
            return None
        return Candidate(
            layer="semantics",
            name="retokenized",
            says="of other ids with the same text",
            trainer=found,
            possible=num_found >= _FOUND * (num_found + num_stuck),
            note=f"{num_found} ids found again in {len(rows)} rows that are off; in {num_stuck} of them none fits",
            detail=example,
        )

    @torch.no_grad()
    def _rebuild(self, row: SampleRow, first: int) -> tuple[list[int], list[float], bool]:
        """The sampled ids from sampled token `first` on with their logprobs, and whether one was not found."""
        ids = row.token_ids[: row.sampled[first]].tolist()
        text = "".join(self._entries.get(n, "\0") for n in row.token_ids[row.sampled[first] :].tolist())
        path: list[int] = []
        logprobs: list[float] = []
        for offset in range(first, min(len(row.sampled), first + MAX_STEPS)):
            entries = [text[:size] for size in range(1, min(self._longest, len(text)) + 1) if text[:size] in self._ids]
            if not entries:
                return path, logprobs, bool(text)
            choices = torch.tensor([self._ids[entry] for entry in entries])
            fitting = self._next(row, ids + path)[choices]
            gaps = (fitting - self._sample.engine[row.first + offset]).abs()
            best = int(gaps.argmin())
            if gaps[best] > self._allowed:
                return path, logprobs, True
            path.append(int(choices[best]))
            logprobs.append(float(fitting[best]))
            text = text[len(entries[best]) :]
        return path, logprobs, False

    def _next(self, row: SampleRow, ids: list[int]) -> Tensor:
        """[V] float64 on CPU: log-softmax after `ids` under the row's policy, at its temperature."""
        segments = [(0, _asking(ids), row.sampling.temperature)]
        ((microbatch, _),) = pack_segments(segments, self._budget)
        microbatch = microbatch.to(self._device)
        hidden, head = self._policies.model(int(row.versions[0])).forward(microbatch)
        temperature = 1.0 if row.sampling.temperature < GREEDY_TEMPERATURE else row.sampling.temperature
        logits = plain_logits(F.embedding(microbatch.predicting, hidden), head)
        return (logits / temperature).log_softmax(-1)[0].cpu()


def _asking(ids: list[int]) -> Segment:
    """A segment whose one sampled token, of any id, comes after `ids`."""
    return Segment(
        token_ids=pack_ids([*ids, 0]),
        behavior_logprobs=pack_floats([0.0]),
        loss_mask=((len(ids), len(ids) + 1),),
        version_spans=(VersionSpan(0, len(ids), len(ids) + 1),),
    )
