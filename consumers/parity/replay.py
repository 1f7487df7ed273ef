"""Logprobs as the trainer computes them, under any assignment of weights to the tokens of a row."""

import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from penstock.consumers.learning.batch.batch import Support
from penstock.consumers.learning.batch.layout import make_layout
from penstock.consumers.learning.batch.packing import pack_segments, segment_routes
from penstock.consumers.learning.loss.scoring import head_logprobs
from penstock.consumers.learning.model.attention import Scores, attend
from penstock.consumers.learning.model.head import OutputHead
from penstock.consumers.learning.model.lora import adapter_share
from penstock.consumers.learning.model.packed_model import PackedModel
from penstock.consumers.learning.model.vision import Vision
from penstock.consumers.parity.report import ParityError
from penstock.consumers.parity.sample import Sample, SampleRow
from penstock.consumers.parity.tolerance import TOLERANCES, Tolerance
from penstock.schemas.config import ConfigError, RunConfig

_CONFIG = "config.json"
_CACHE_BYTES = 1 << 30
"""The most bytes of weights kept in memory in addition to the model's: a small model's versions are read once."""
_KEPT_TOKENS = 8192
"""The most sampled tokens whose hidden states are kept."""


class LoadedPolicy(NamedTuple):
    """A model in memory, which is left unchanged, and the version of its weights."""

    version: int
    model: PackedModel


class PolicyStore:
    """The trainer's model with the weights of any version; one version is in the model at a time.

    weights: the published safetensors file of a version, or a folder with a whole model, the base's for an adapter;
        None if it is gone.
    loaded: serves its version without a load.
    """

    def __init__(
        self,
        config: RunConfig,
        weights: Callable[[int], Path | None],
        device: torch.device,
        loaded: LoadedPolicy | None = None,
    ) -> None:
        self._config, self._weights, self._loaded = config, weights, loaded
        self._paths: dict[int, Path | None] = {}
        self._model: PackedModel | None = None
        self._held: Path | None = None
        self._cache: dict[Path, dict[str, Tensor]] = {}
        self.device, self.dtype, self.lora = device, config.model.dtype, config.lora

    def has(self, version: int) -> bool:
        """Returns whether the weights of `version` are loaded or have a file."""
        return version >= 0 and (self._is_loaded(version) or self._path(version) is not None)

    @property
    def vocabulary(self) -> int:
        return self._in_memory.vocabulary

    def model(self, version: int) -> PackedModel:
        """Returns the model with the weights of `version`, valid until the next call.

        Raises:
            ParityError: the weights are gone or do not fit the model of model.path.
        """
        if self._loaded is not None and self._is_loaded(version):
            return self._loaded.model
        path = self._path(version)
        if path is None:
            raise ParityError(f"the weights of version {version} are gone; a larger weights.keep_versions keeps them")
        model = self._base()
        if path == self._held:
            return model
        self._held = None
        if path in self._cache:
            model.copy(self._cache[path])
        else:
            self._read(model, path, version)
        self._held = path
        return model

    @property
    def vision(self) -> Vision | None:
        """What shows images to the model in memory."""
        return self._in_memory.vision

    @property
    def _in_memory(self) -> PackedModel:
        """A model of any version."""
        return self._loaded.model if self._loaded is not None else self._base()

    @contextmanager
    def adapter_share(self, share: float) -> Iterator[None]:
        """Within the context the models in memory compute with this share of their adapters."""
        models = [self._model, self._loaded.model if self._loaded is not None else None]
        with ExitStack() as entered:
            for model in models:
                if model is not None:
                    entered.enter_context(adapter_share(model.module, share))
            yield

    def _read(self, model: PackedModel, path: Path, version: int) -> None:
        try:
            if self.lora is not None:  # a folder is the base, without an adapter
                model.load_adapter({} if path.is_dir() else load_file(path))
            else:
                with self._folder(path) as folder:
                    model.load(folder)
        except (ConfigError, OSError, SafetensorError) as error:
            if not path.exists():
                raise ParityError(
                    f"the weights of version {version} were deleted during the check ({path.resolve()}); a larger "
                    "weights.keep_versions keeps them"
                ) from error
            raise ParityError(
                f"the weights of version {version} in {path.resolve()} are not those of model.path = "
                f"{self._config.model.path!r}: {error}"
            ) from error
        state = model.state()
        size = sum(tensor.nbytes for tensor in state.values())
        if (len(self._cache) + 1) * size <= _CACHE_BYTES:
            self._cache[path] = {name: tensor.clone() for name, tensor in state.items()}

    def _is_loaded(self, version: int) -> bool:
        return self._loaded is not None and version == self._loaded.version

    def _path(self, version: int) -> Path | None:
        if version not in self._paths:
            found = self._weights(version)
            self._paths[version] = found if found is not None and found.exists() else None
        return self._paths[version]

    def _base(self) -> PackedModel:
        if self._model is None:
            self._model = PackedModel(
                self._config.model.path,
                self.dtype,
                self.device,
                lora=self.lora,
                max_model_len=self._config.engine.max_model_len,
                replays_routes=self._config.model.replay_routes,
            )
            self._held = Path(self._config.model.path)
        return self._model

    @contextmanager
    def _folder(self, path: Path) -> Iterator[Path]:
        """Yields a folder that transformers can load: `path`, or the published file with the base's configuration."""
        if path.is_dir():
            yield path
            return
        with tempfile.TemporaryDirectory(prefix="penstock-parity-") as folder:
            (Path(folder) / "model.safetensors").symlink_to(path.absolute())
            (Path(folder) / _CONFIG).symlink_to((Path(self._config.model.path) / _CONFIG).resolve())
            yield Path(folder)


WeightSpan = tuple[int, int, int]
"""Version, start, end: the model computes tokens `start:end` of the row with the weights of `version`. Its output at a
token predicts the next one, and its keys and values there serve all later tokens."""


class ReplayPlan(NamedTuple):
    """Which weights compute which token of a row. spans: tile the row's tokens up to the last but one."""

    row: SampleRow
    spans: tuple[WeightSpan, ...]


@dataclass(frozen=True)
class ForwardPass:
    """The output of one forward pass for M sampled tokens; satisfies `learning.scoring.SampledTokens`.

    hidden: [N, H]. tokens: [M] int64 on CPU, places in the sample. predicting, targets: [M] int64.
    temperature: [M] float32.
    """

    hidden: Tensor
    head: OutputHead
    tokens: Tensor
    predicting: Tensor
    targets: Tensor
    temperature: Tensor
    support: Support | None

    def of_sampled_tokens(self) -> "ForwardPass":
        """Returns the pass without the hidden states that predict no sampled token: [M, H]."""
        places = torch.arange(len(self.predicting), device=self.predicting.device)
        return replace(self, hidden=F.embedding(self.predicting, self.hidden), predicting=places)


def whole(row: SampleRow, version: int) -> ReplayPlan:
    """Returns a plan in which one version computes the whole row."""
    return ReplayPlan(row, ((version, 0, int(row.sampled[-1])),))


def as_labelled(row: SampleRow, versions: np.ndarray | None = None) -> ReplayPlan:
    """Returns the plan of an engine in keep mode: a token's keys and values are computed in the step that samples the
    next one, those of the context in the step that samples the first.

    Args:
        versions: [m], instead of the row's own.
    """
    versions = row.versions if versions is None else versions
    changes = np.flatnonzero(versions[1:] != versions[:-1]) + 1
    bounds = [0, *(row.sampled[changes] - 1).tolist(), int(row.sampled[-1])]
    firsts = [0, *changes.tolist()]
    spans = tuple((int(versions[n]), start, end) for n, (start, end) in zip(firsts, pairwise(bounds), strict=True))
    return ReplayPlan(row, spans)


class Replay:
    """Runs plans over the rows of a sample. budget: tokens of one forward pass. tolerance: default: the least."""

    def __init__(self, sample: Sample, policies: PolicyStore, budget: int, tolerance: Tolerance | None = None) -> None:
        self.sample, self.policies = sample, policies
        self.tolerance = TOLERANCES[policies.dtype] if tolerance is None else tolerance
        self._budget, self._device = budget, policies.device
        self._kept: list[ForwardPass] = []

    @torch.no_grad()
    def labelled(self, rows: Sequence[SampleRow]) -> Iterator[ForwardPass]:
        """Runs rows as they are labelled: all of a small sample that one policy drew once only, however often they are
        asked for, since its head stays in memory."""
        plans = [as_labelled(row) for row in rows]
        is_kept = self.sample.num_tokens <= _KEPT_TOKENS and len(np.unique(self.sample.versions)) == 1
        if not is_kept or len(rows) < len(self.sample.rows):
            yield from self.passes(plans)
            return
        if not self._kept:
            self._kept = [each.of_sampled_tokens() for each in self.passes(plans)]
        yield from self._kept

    def baseline(self) -> Tensor:
        """Returns the logprobs of all rows as they are labelled; see `logprobs`."""
        return self._logprobs(self.labelled(self.sample.rows))

    @torch.no_grad()
    def logprobs(self, plans: Iterable[ReplayPlan]) -> Tensor:
        """Returns the logprobs of the plans' tokens by the trainer's own code, [M] float64 on CPU, NaN elsewhere."""
        return self._logprobs(self.passes(plans))

    @torch.no_grad()
    def _logprobs(self, passes: Iterable[ForwardPass]) -> Tensor:
        found = torch.full((self.sample.num_tokens,), torch.nan, dtype=torch.float64)
        for each in passes:
            logprobs, _ = head_logprobs(each.hidden, each.head, each)
            found[each.tokens] = logprobs.double().cpu()
        return found

    @torch.no_grad()
    def passes(self, plans: Iterable[ReplayPlan]) -> Iterator[ForwardPass]:
        """Runs the plans, one policy after the other as far as each row's spans allow."""
        plans = list(plans)
        whole = [plan for plan in plans if len(plan.spans) == 1]
        for version in sorted({plan.spans[0][0] for plan in whole}):
            yield from self._whole([plan for plan in whole if plan.spans[0][0] == version], version)
        mixed = sorted(
            (plan for plan in plans if len(plan.spans) > 1),
            key=lambda plan: (plan.spans[0][0], plan.spans[-1][0], plan.spans[-1][2]),
        )
        for batch in _within(mixed, self._budget):
            yield from self._continued(batch)

    def _whole(self, plans: list[ReplayPlan], version: int) -> Iterator[ForwardPass]:
        model = self.policies.model(version)
        segments = [(plan.row.group, plan.row.segment, plan.row.sampling.temperature) for plan in plans]
        files = {digest: file for plan in plans for digest, file in plan.row.files.items()}
        for microbatch, places in pack_segments(segments, self._budget, arrangement=model.arrangement, files=files):
            microbatch = microbatch.to(self._device)
            hidden, head = model.forward(microbatch)
            some = [plans[place] for place in places]
            yield ForwardPass(
                hidden=hidden,
                head=head,
                tokens=torch.cat([torch.arange(plan.row.tokens.start, plan.row.tokens.stop) for plan in some]),
                predicting=microbatch.predicting,
                targets=microbatch.targets,
                temperature=microbatch.temperature,
                support=microbatch.support,
            )

    def _continued(self, plans: list[ReplayPlan]) -> Iterator[ForwardPass]:
        """Runs one span after the other with the keys and values of earlier spans."""
        cache = KvCache(len(plans), max(plan.spans[-1][2] for plan in plans))
        left = {p: list(plan.spans) for p, plan in enumerate(plans)}
        while left:
            version = min(spans[0][0] for spans in left.values())
            now = [p for p, spans in left.items() if spans[0][0] == version]
            parts = [(plans[p], p, *left[p].pop(0)[1:]) for p in now]
            left = {p: spans for p, spans in left.items() if spans}
            yield from self._span(parts, version, cache)

    def _span(
        self, parts: list[tuple[ReplayPlan, int, int, int]], version: int, cache: "KvCache"
    ) -> Iterator[ForwardPass]:
        """Runs one forward pass over parts (plan, row of the cache, start, end); yields it if it predicts a token."""
        positions = self._tensor([np.arange(start, end) for *_, start, end in parts])
        cache.begin(self._tensor([np.full(end - start, line) for _, line, start, end in parts]), positions)
        ids = self._tensor([plan.row.token_ids[start:end] for plan, _, start, end in parts])
        model = self.policies.model(version)
        if model.arrangement != "packed":
            raise ParityError(
                "rows sampled by several policies cannot be replayed: no packed pass is exact for "
                f"{type(model.module).__name__}, whose keys and values could be kept; expected rows of one version"
            )
        routes = [(segment_routes(plan.row.segment), start, end) for plan, _, start, end in parts]
        known = [rows[start:end] for rows, start, end in routes if rows is not None]
        forced = self._tensor(known) if len(known) == len(parts) else None
        hidden, head = model.run(ids, positions, cache, forced)
        scored: list[tuple[ReplayPlan, np.ndarray, np.ndarray]] = []
        """Plan, offsets among its sampled tokens, and the places in the pass that predict them."""
        num_before = 0
        for plan, _, start, end in parts:
            before = plan.row.sampled - 1
            offsets = np.flatnonzero((before >= start) & (before < end))
            scored.append((plan, offsets, num_before + before[offsets] - start))
            num_before += end - start
        if not any(len(offsets) for _, offsets, _ in scored):
            return
        support = _support([(plan.row.segment.sampling_mask, offsets) for plan, offsets, _ in scored])
        temperatures = [np.full(len(o), plan.row.sampling.temperature, dtype=np.float32) for plan, o, _ in scored]
        yield ForwardPass(
            hidden=model.scaled(hidden),
            head=head,
            tokens=torch.from_numpy(np.concatenate([plan.row.first + offsets for plan, offsets, _ in scored])),
            predicting=self._tensor([places for *_, places in scored]),
            targets=self._tensor([plan.row.token_ids[plan.row.sampled[offsets]] for plan, offsets, _ in scored]),
            temperature=self._tensor(temperatures),
            support=None if support is None else support.to(self._device),
        )

    def _tensor(self, parts: Sequence[np.ndarray]) -> Tensor:
        return torch.from_numpy(np.concatenate(parts)).to(self._device)


def _support(masks: Sequence[tuple[tuple[bytes, ...] | None, np.ndarray]]) -> Support | None:
    if all(mask is None for mask, _ in masks):
        return None
    entries = [b"" if mask is None else mask[offset] for mask, offsets in masks for offset in offsets.tolist()]
    kept = np.frombuffer(b"".join(entries), dtype=np.int32).astype(np.int64)
    return Support(torch.from_numpy(kept), torch.tensor([len(entry) // 4 for entry in entries]))


def _within(plans: Sequence[ReplayPlan], budget: int) -> Iterator[list[ReplayPlan]]:
    part: list[ReplayPlan] = []
    for plan in plans:
        # The cache is a rectangle: every row takes as much as the longest.
        longest = max(other.spans[-1][2] for other in (*part, plan))
        if part and longest * (len(part) + 1) > budget:
            yield part
            part = []
        part.append(plan)
    if part:
        yield part


def run_sequence(model: PackedModel, token_ids: Tensor) -> tuple[Tensor, OutputHead]:
    """Runs the body over one sequence, [N] int64 on the model's device; returns the hidden states [N, H] before
    `PackedModel.scaled`, and the head."""
    counts = np.array([len(token_ids)])
    layout = make_layout(0 * counts, 0 * counts, 0 * counts, counts, len(token_ids)).to(token_ids.device)
    return model.run(token_ids, torch.arange(len(token_ids), device=token_ids.device), layout)


class KvCache:
    """Keys and values of R rows of at most T tokens, by layer, kept across weight updates as the engine keeps them."""

    def __init__(self, num_rows: int, longest: int) -> None:
        self._shape = (num_rows, longest)
        self._store: dict[int, tuple[Tensor, Tensor]] = {}

    def begin(self, rows: Tensor, positions: Tensor) -> None:
        """Sets the N tokens of the next forward pass.

        rows, positions: [N] int64, row after row; positions ascend and continue where the row's last pass ended.
        """
        self._rows, self._positions = rows, positions
        self._active, lengths = rows.unique_consecutive(return_counts=True)
        starts = lengths.cumsum(0) - lengths
        self._line = torch.arange(len(self._active), device=rows.device).repeat_interleave(lengths)
        self._column = torch.arange(len(rows), device=rows.device) - starts.repeat_interleave(lengths)
        self._rectangle = (len(self._active), int(lengths.max()))
        self._end = int(positions.max()) + 1

    def attend(self, layer: int, flat: list[Tensor], head_dim: int, scores: Scores) -> Tensor:
        """See `OwnAttention`. Keys and values of the pass join the kept ones."""
        query, key, value = flat
        if layer not in self._store:
            self._store[layer] = (
                key.new_zeros(*self._shape, key.shape[1]),
                value.new_zeros(*self._shape, value.shape[1]),
            )
        kept = self._store[layer]
        for store, new in zip(kept, (key, value), strict=True):
            store[self._rows, self._positions] = new
        queries = query.new_zeros(*self._rectangle, query.shape[1])
        queries[self._line, self._column] = query
        places = self._positions.new_zeros(self._rectangle)
        places[self._line, self._column] = self._positions
        columns = torch.arange(self._end, device=places.device)
        # A padded query has place 0 and sees one token, so that its softmax is defined.
        seen = columns <= places[:, :, None]
        if scores.sliding_window is not None:
            seen &= columns > places[:, :, None] - scores.sliding_window
        q, k, v = (
            states.unflatten(-1, (-1, head_dim)).transpose(1, 2)
            for states in (queries, *(store[self._active, : self._end] for store in kept))
        )
        return attend(q, k, v, seen[:, None], scores).transpose(1, 2).flatten(2)[self._line, self._column]
