"""The ledger of what was trained, kept by the bits of the weights themselves.

Every optimizer step of every trainer process leaves one line: the digest of the policy before it, the digest after it,
and the task indexes whose prompts were in the tensors of that step. The digest covers the weights and the optimizer's
moments; the indexes are read back from the prompt's token ids inside the packed batch, not from any index field.

At the end the suite digests the saved policy from its files and walks the lines back, digest by digest, to the base
model. What lies on that way is what has shaped the policy, no more and no less:

- A step that was rolled back is on another branch: its digest is no ancestor of the saved one.
- Nothing that the code under test saves, restores, counts or claims takes part. It could only deceive the ledger by
  making weights that equal, bit for bit, those of another history.
- Weights that no step has made (a checkpoint's model beside another one's moments, a step outside `Learner.step`) end
  the walk before the base model, which is a violation too.

A line is written with one `write` on a descriptor opened for appending, after the step and before anything can save its
result: a process killed in between leaves either a whole line or weights that exist nowhere.
"""

import hashlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from penstock.consumers.learning.batch import Batch, MicroBatch
from penstock.consumers.learning.learner import Learner
from penstock.consumers.learning.step_report import StepReport
from penstock.deploy.demo.char_tokenizer import ALPHABET, build_tokenizer
from penstock.schemas.config import RunConfig
from tests.chaos.environment import END, index_of

FIRST_CHARACTER = build_tokenizer(16).convert_tokens_to_ids(ALPHABET[0])


class ChainError(RuntimeError):
    """The saved policy cannot be traced back to the base model, step by step."""


def digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """A policy: weights as `masters/<name>`, and the optimizer's state as `<moment>/<name>`."""
    hashed = hashlib.blake2b(digest_size=16)
    for name in sorted(tensors):
        hashed.update(name.encode())
        hashed.update(tensors[name].detach().cpu().contiguous().numpy().tobytes())
    return hashed.hexdigest()


def digest_of_base(model_folder: Path) -> str:
    weights = load_file(model_folder / "model.safetensors")
    return digest({f"masters/{name}": weight for name, weight in weights.items()})


def digest_of_checkpoint(folder: Path) -> str:
    return digest(load_file(folder / "tensors" / "rank-0.safetensors"))


def prompts_in(batch: Batch) -> tuple[int, ...]:
    """The task indexes of the prompts in a batch's tensors, ascending; one in two micro-batches counts once."""
    return tuple(sorted({index for microbatch in batch.microbatches for index in _prompts_in(microbatch)}))


def _prompts_in(microbatch: MicroBatch) -> Iterator[int]:
    """Wherever positions start from 0 a prompt begins, and it ends with its `=`."""
    text = "".join(
        ALPHABET[token - FIRST_CHARACTER] if token >= FIRST_CHARACTER else "?"
        for token in microbatch.token_ids.tolist()
    )
    for start, position in enumerate(microbatch.position_ids.tolist()):
        if position == 0:
            yield index_of(text[start : text.index(END, start) + 1])


def observed_learner(file: Path) -> type[Learner]:
    """A Learner that leaves a line in `file` for each step that changed it."""

    class ObservedLearner(Learner):
        def __init__(self, config: RunConfig, *arguments: Any) -> None:
            super().__init__(config, *arguments)
            self._lines = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

        def step(self, batch: Batch) -> StepReport:
            indexes = prompts_in(batch)
            before = self._digest()
            report = super().step(batch)
            after = self._digest()
            if after != before:
                line = f"{before} {after} {','.join(map(str, indexes))}\n".encode()
                if os.write(self._lines, line) != len(line):
                    raise OSError(f"{file}: a line was written in part")
            return report

        def _digest(self) -> str:
            tensors = {}
            for name, parameter in self.model.module.named_parameters():
                moments = self.optimizer.state.get(parameter, {})
                tensors |= {f"{key}/{name}": value for key, value in {"masters": parameter, **moments}.items()}
            return digest(tensors)

    return ObservedLearner


class StepChain:
    """Every step that any trainer took, by the digest of what it made.

    Raises:
        ChainError: a torn line, or two histories with one result.
    """

    def __init__(self, file: Path, root: str) -> None:
        self._root = root
        self._made: dict[str, tuple[str, tuple[int, ...]]] = {}
        text = file.read_text() if file.exists() else ""
        if text and not text.endswith("\n"):
            raise ChainError(f"{file}: the last line is torn")
        self.num_steps = 0
        """Steps taken, those included that a rollback has undone."""
        for line in text.splitlines():
            before, after, indexes = line.split(" ")
            step = before, tuple(int(index) for index in indexes.split(",") if index)
            if self._made.setdefault(after, step) != step:
                raise ChainError(f"{after}: made from {self._made[after]} and from {step}")
            self.num_steps += 1

    def history(self, tip: str) -> list[tuple[int, ...]]:
        """The indexes of each step from the base model to the policy `tip`.

        Raises:
            ChainError: it does not lead there.
        """
        steps: list[tuple[int, ...]] = []
        at = tip
        while at != self._root:
            if at not in self._made or len(steps) > len(self._made):
                raise ChainError(f"policy {tip}: {len(steps)} steps back are weights {at} that no step has made")
            at, indexes = self._made[at]
            steps.append(indexes)
        return steps[::-1]
