"""A ledger of what was trained, based on the bits of the weights themselves.

Every optimizer step of every trainer leaves one line: the digest of the policy before it, the digest after it, and the
task index of each row that was in the tensors of that step. The digest covers the weights and the optimizer's moments;
the indexes are read back from the prompt's token ids inside the packed batch, not from any index field.

With several ranks each rank reads the rows that it was given itself, and the digest is that of the whole tensors,
assembled from the shards. A line, and a checkpoint's digest, is therefore independent of the number of ranks.

At the end the suite digests the saved policy from its files and walks back, digest by digest, to the base model. The
steps on that way have shaped the policy, no more and no less:

- A step that was rolled back is on another branch: its digest is no ancestor of the saved one.
- Nothing that the code under test saves, restores, counts or claims takes part. It could only deceive the ledger by
  making weights that equal, bit for bit, those of another history.
- Weights that no step has made (a checkpoint's model with another one's moments, a step outside `Learner.step`) end
  the walk before the base model, which is also a violation.

A line is written with one `write` on a descriptor opened for appending, after the step and before anything can save its
result: a process killed in between leaves either a whole line or weights that exist nowhere. With several ranks rank 0
writes it once it has heard of all of them, before it can order anything else.
"""

import hashlib
import json
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor, Shard

from penstock.consumers.learning.batch.batch import Batch, MicroBatch
from penstock.consumers.learning.learner.learner import Learner
from penstock.consumers.learning.learner.step_report import StepReport
from penstock.deploy.demo.char_tokenizer import ALPHABET, build_tokenizer
from penstock.schemas.config import RunConfig
from tests.chaos.environment import index_of

FIRST_CHARACTER = build_tokenizer(16).convert_tokens_to_ids(ALPHABET[0])


class ChainError(RuntimeError):
    """The saved policy cannot be traced back to the base model, step by step."""


def digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """Returns the digest of a policy: weights as `masters/<name>`, and the optimizer's state as `<moment>/<name>`."""
    hashed = hashlib.blake2b(digest_size=16)
    for name in sorted(tensors):
        hashed.update(name.encode())
        hashed.update(tensors[name].detach().cpu().contiguous().numpy().tobytes())
    return hashed.hexdigest()


def digest_of_base(model_folder: Path) -> str:
    """Returns the digest of a model folder without optimizer state."""
    weights = load_file(model_folder / "model.safetensors")
    return digest({f"masters/{name}": weight for name, weight in weights.items()})


def digest_of_checkpoint(folder: Path) -> str:
    """Returns the digest of the whole tensors, from the parts in the files of all ranks.

    Raises:
        ChainError: parts are missing or too many.
    """
    parts: defaultdict[str, list[tuple[int, torch.Tensor]]] = defaultdict(list)
    for file in sorted((folder / "tensors").glob("rank-*.safetensors")):
        with safe_open(file, "pt") as opened:
            places = json.loads(opened.metadata()["DCP_SHARDING_INFO"])
            for name in opened.keys():  # noqa: SIM118, it is no mapping
                row, *others = places[name]["saved_offsets"] or [0]
                if any(others):
                    raise ChainError(f"{file}: {name} is cut along another dimension than the first")
                parts[name].append((row, opened.get_tensor(name)))
    return digest({name: _put_together(name, found) for name, found in parts.items()})


def _put_together(name: str, parts: Sequence[tuple[int, torch.Tensor]]) -> torch.Tensor:
    if len(parts) == 1 and parts[0][0] == 0:
        return parts[0][1]
    ordered = sorted(parts, key=lambda part: part[0])
    expected = 0
    for row, part in ordered:
        if row != expected:
            raise ChainError(f"{name}: a part begins at row {row}, expected {expected}")
        expected += len(part)
    return torch.cat([part for _, part in ordered])


def rows_in(batch: Batch) -> list[int]:
    """Returns the task index of each row in a batch's tensors, ascending."""
    return sorted(index for microbatch in batch.microbatches for index in _rows_in(microbatch))


def _rows_in(microbatch: MicroBatch) -> Iterator[int]:
    """Yields the index of each row, in order. The row's first sampled token is predicted by the last token of its
    prompt, the `=`; the prompt begins where positions start. Siblings may share it."""
    text = "".join(
        ALPHABET[token - FIRST_CHARACTER] if token >= FIRST_CHARACTER else "?"
        for token in microbatch.token_ids.tolist()
    )
    row = -1
    for row_id, end in zip(microbatch.row_ids.tolist(), microbatch.predicting.tolist(), strict=True):
        if row_id != row:
            row = row_id
            yield index_of(text[end - int(microbatch.position_ids[end]) : end + 1])


def observed_learner(file: Path) -> type[Learner]:
    """Returns a Learner class that writes a line to `file` for each step that changed it."""

    class ObservedLearner(Learner):
        def __init__(self, config: RunConfig, *arguments: Any) -> None:
            super().__init__(config, *arguments)
            self._lines = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

        def _step(self, batch: Batch) -> StepReport:
            """Runs on every rank, with its own part of the batch."""
            rows = [index for of_rank in self._from_all(rows_in(batch)) for index in of_rank]
            before = self.weights_digest()
            report = super()._step(batch)
            after = self.weights_digest()
            if after != before and self.ranks.is_lead:
                line = f"{before} {after} {','.join(map(str, sorted(rows)))}\n".encode()
                if os.write(self._lines, line) != len(line):
                    raise OSError(f"{file}: a line was written in part")
            return report

        def weights_digest(self) -> str:
            tensors: dict[str, torch.Tensor] = {}
            for name, parameter in self.model.at_rest().named_parameters():
                moments = self.optimizer.state.get(parameter, {})
                tensors |= {f"{key}/{name}": value for key, value in {"masters": parameter, **moments}.items()}
            shards = self._from_all({name: _own(tensor) for name, tensor in tensors.items() if _is_shard(tensor)})
            whole = {name: torch.cat([of_rank[name] for of_rank in shards]) for name in shards[0]}
            return digest(tensors | whole)

        def _from_all(self, value: Any) -> list[Any]:
            """Returns the value of each rank, gathered by torch and not by the code under test."""
            if self.ranks.size == 1:
                return [value]
            found: list[Any] = [None] * self.ranks.size
            dist.all_gather_object(found, value)
            return found

    return ObservedLearner


def _is_shard(tensor: torch.Tensor) -> bool:
    if isinstance(tensor, DTensor):
        assert tensor.placements == (Shard(0),)
        return True
    return False


def _own(tensor: Any) -> torch.Tensor:
    own: torch.Tensor = tensor.detach().to_local()
    return own


class StepChain:
    """Every step that any trainer took, by the digest of its result.

    Raises:
        ChainError: a torn line, or two histories with one result.
    """

    def __init__(self, file: Path, root: str) -> None:
        self._root = root
        self._made: dict[str, tuple[str, tuple[int, ...]]] = {}
        """By digest: the digest before, and the indexes of the step's rows."""
        text = file.read_text() if file.exists() else ""
        if text and not text.endswith("\n"):
            raise ChainError(f"{file}: the last line is torn")
        self.num_steps = 0
        """Steps taken, including those that a rollback has undone."""
        for line in text.splitlines():
            before, after, indexes = line.split(" ")
            step = before, tuple(int(index) for index in indexes.split(",") if index)
            if self._made.setdefault(after, step) != step:
                raise ChainError(f"{after}: made from {self._made[after]} and from {step}")
            self.num_steps += 1

    def history(self, tip: str) -> list[tuple[int, ...]]:
        """Returns the index of each row of each step from the base model to the policy `tip`.

        Raises:
            ChainError: the steps do not lead there.
        """
        steps: list[tuple[str, tuple[int, ...]]] = []
        at = tip
        while at != self._root:
            if at not in self._made or len(steps) > len(self._made):
                raise ChainError(f"policy {tip}: {len(steps)} steps back are weights {at} that no step has made")
            steps.append(self._made[at])
            at = steps[-1][0]
        return [indexes for _, indexes in reversed(steps)]
