"""The trained model: a transformers model run over a batch's rows, on the values that are published."""

import gc
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.stateless import _reparametrize_module
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import remove_tied_weights_from_state_dict

from penstock.consumers.learning.batch.batch import MicroBatch, idle_microbatch
from penstock.consumers.learning.batch.images import RowImages
from penstock.consumers.learning.batch.layout import Arrangement, PackedLayout, TokenShare
from penstock.consumers.learning.batch.split import split_tokens
from penstock.consumers.learning.model.attention import IMPLEMENTATION, OwnAttention, is_unpadded
from penstock.consumers.learning.model.blocks import blocks, compile_blocks
from penstock.consumers.learning.model.exchange import to_owners
from penstock.consumers.learning.model.head import OutputHead
from penstock.consumers.learning.model.loading import (
    DTYPES,
    body_of,
    empty_model,
    even_length,
    kept_in_float32,
    language_of,
    load_model,
    logit_scale,
    sees_images,
    set_attention,
    softcap,
    tensors_of,
)
from penstock.consumers.learning.model.lora import LoraLinear, adapt, adapter_of, adapter_share, published_name
from penstock.consumers.learning.model.model_check import ModelCheckError, check_model, check_range, uncalled
from penstock.consumers.learning.model.published import PublishedPart
from penstock.consumers.learning.model.rounding import dither
from penstock.consumers.learning.model.routing import RouteReplay
from penstock.consumers.learning.model.shards import fill, gathered, held, shard
from penstock.consumers.learning.model.split_attention import SplitAttention, WholeRows
from penstock.consumers.learning.model.vision import Vision, open_vision
from penstock.consumers.learning.ranks import Ranks
from penstock.schemas.config import ConfigError, LoraConfig

log = logging.getLogger(__name__)

_PASSES: tuple[tuple[str, Arrangement], ...] = (
    (IMPLEMENTATION, "packed"),
    (IMPLEMENTATION, "whole"),
    ("sdpa", "rectangles"),
    ("eager", "rectangles"),
)
"""Attention and arrangement of rows, the fastest first."""


class PackedModel:
    """A causal language model with float32 masters.

    The forward pass runs on the masters rounded to `dtype`, what the engines serve; gradients pass straight through the
    rounding. The language-model head is not part of it: `forward` returns it instead.

    Rows run packed, by the packed attention. If that is not exact for the architecture, they run whole, and recurrences
    and convolutions are told where each begins, which some kernels for GPUs heed; otherwise in a rectangle, padded on
    the right, by the model's own attention, recurrences and convolutions. No position of a causal model reads a later
    one, so that padding needs no mask.

    Args:
        path: folder of a transformers model.
        dtype: `model.dtype`, the type of the published weights and of the body's arithmetic.
        ranks: the ranks that share the parameters; each holds a shard of every one, and gathers a block while it runs.
        compiled: runs the blocks through torch.compile.
        frozen: the model is not trained: it is held in `dtype`, without masters.
        lora: trains adapters only, so that only they have masters; the rest of the model is held in `dtype`.
        seed: seeds new adapters and the places of dithered masters.
        dithered: the masters begin at random places within their rounding intervals; see `rounding.dither`.
        field: the run file's field whose value is `path`.
        max_model_len: the engine's longest sequence in tokens, `engine.max_model_len`, which decides some rotary
            frequencies (`fix_rope`).
        replays_routes: rows are computed by their routes, the experts that the engine chose.
        by_expert: each rank holds and computes whole experts (`expert_ranks`).
        freezes_vision: a vision tower is not trained.
        per_pass: consecutive ranks that compute their micro-batches' tokens together.

    Raises:
        ConfigError: no such model, incomplete weights, a head that is not one linear map or that contradicts the
            configuration, an architecture that is computed wrongly in every way (see `model_check`), or one that lacks
            the adapters' targets or bypasses them.
    """

    def __init__(
        self,
        path: str,
        dtype: str,
        device: torch.device,
        ranks: Ranks | None = None,
        *,
        gradient_checkpointing: bool = False,
        compiled: bool = False,
        frozen: bool = False,
        lora: LoraConfig | None = None,
        seed: int = 0,
        dithered: bool = False,
        field: str = "model.path",
        max_model_len: int | None = None,
        replays_routes: bool = False,
        by_expert: bool = False,
        per_pass: int = 1,
        freezes_vision: bool = False,
    ) -> None:
        self._named = f"{field} = {path!r}"
        self._max_model_len = max_model_len
        self.lora = lora
        self._ranks = Ranks() if ranks is None else ranks
        self._dtype = torch.float32  # until the check is over
        self._rounded: dict[str, Tensor] = {}
        """The body's parameters in `dtype` during a forward pass."""
        self._published_names: dict[str, str] | None = None
        """Name of the published tensor by name of its master; empty unless each master has one."""
        self._published_dtypes: dict[str, torch.dtype] = {}
        """By the published tensor's name, once `_published_names` is known."""
        self._shards: Any = None
        """Runs the body of a model that several ranks share; None in a world of one."""
        self.arrangement: Arrangement = "packed"
        """That of the rows that it runs, or one after it in `Arrangement`'s order."""
        whole = None
        if self._ranks.mesh is None:
            module = load_model(path, self._named, max_model_len).to(device)
        else:
            if self._ranks.is_lead:
                whole = PackedModel(
                    path, dtype, torch.device("cpu"), gradient_checkpointing=gradient_checkpointing, lora=lora,
                    seed=seed, dithered=dithered, field=field, max_model_len=max_model_len,
                    replays_routes=replays_routes, per_pass=per_pass, freezes_vision=freezes_vision,
                )  # fmt: skip
            module = empty_model(path, torch.float32 if lora is None and not frozen else DTYPES[dtype], max_model_len)
        self._take(module, path, gradient_checkpointing)
        if self.vision is not None and per_pass > 1:
            raise ConfigError(
                f"trainer.context_parallel = {per_pass} with {self._named}: images of a row cannot be split; expected 1"
            )
        if self.vision is not None and freezes_vision:
            for parameter in self.vision.parameters():
                parameter.requires_grad_(False)
        self._whole_rows = WholeRows(
            blocks(language_of(module), self._named, "trainer.context_parallel = 1") if per_pass > 1 else ()
        )
        self.routing: RouteReplay | None = RouteReplay(self.module, self._named) if replays_routes else None
        if self._ranks.mesh is None:
            self._choose_pass(DTYPES[dtype], per_pass)
            if per_pass > 1 and self.arrangement != "packed":
                self._check_split(f"trainer.context_parallel = {per_pass}")
            if self.routing is not None:
                idle = idle_microbatch().to(device)
                self.routing.check(lambda routes: self.forward(replace(idle, routes=routes.to(device))))
            if dtype == "float16":
                check_range(self.module, self._in_dtype(torch.float16), self._named, arrangement=self.arrangement)
            if dithered:
                dither(self.module, DTYPES[dtype], seed, self._kept)
        if lora is not None or frozen:
            self._freeze(DTYPES[dtype])
        if lora is not None:
            adapt(self.module, lora, seed, path)
        if compiled:
            compile_blocks(language_of(self.module), device)
        if self._ranks.mesh is not None:
            chosen = self if whole is None else whole
            attention, self.arrangement = self._ranks.gather((chosen.attention, chosen.arrangement))[0]
            if whole is not None and whole.vision is not None and self.vision is not None:
                self.vision.tokens_per_frame = whole.vision.tokens_per_frame
            set_attention(self.module, attention)
            self._shards = shard(
                self.module, self._ranks.mesh, DTYPES[dtype], self._kept, self._named, by_expert=by_expert
            )
            fill(self.module, None if whole is None else whole.module, self._ranks, device)
            del whole
            gc.collect()  # it holds itself, by the function that checkpointing calls
        self._dtype = DTYPES[dtype]
        if lora is not None and self._ranks.mesh is None:
            self._check_adapters(lora)

    def _check_adapters(self, lora: LoraConfig) -> None:
        layers = {name: layer for name, layer in self.module.named_modules() if isinstance(layer, LoraLinear)}
        device = self.module.get_output_embeddings().weight.device
        if names := uncalled(layers, self.forward, device, self.arrangement):
            raise ConfigError(
                f"lora.targets = {list(lora.targets)!r}: {type(self.module).__name__} reads the weight of {names[0]} "
                "without calling the layer, and would ignore its adapter; expected targets without "
                f"{names[0].rpartition('.')[2]!r}"
            )

    def _freeze(self, dtype: torch.dtype) -> None:
        """Holds the parameters as they are published, untrained."""
        for name, parameter in self.module.named_parameters():
            parameter.requires_grad_(False)
            parameter.data = parameter.data.to(self._published_dtype(name, parameter, dtype))

    def _take(self, module: Any, path: str, gradient_checkpointing: bool) -> None:
        # Without dropout: the trainer must reproduce the policy that sampled.
        self.module: Any = module.eval()
        if gradient_checkpointing:
            self._checkpoint_layers()
        head = module.get_output_embeddings()
        if not isinstance(head, nn.Linear):
            raise ConfigError(f"{self._named}: expected a linear language-model head")
        self.vocabulary: int = head.weight.shape[0]
        """Token ids are below this."""
        self._logit_scale: float = logit_scale(module.config.get_text_config())
        self._softcap: float | None = softcap(module.config.get_text_config())
        self.vision: Vision | None = open_vision(module, path) if sees_images(module) else None
        self._kept: frozenset[str] = kept_in_float32(module)
        self._kept_ids: set[int] = {id(p) for name, p in module.named_parameters() if name in self._kept}
        self.even_length: float = even_length(module)
        """Tokens of a row above which attention's products cost more than those of the weights."""

    def _choose_pass(self, dtype: torch.dtype, per_pass: int) -> None:
        """Sets attention and arrangement of rows to the first that the check finds exact."""
        reasons: list[str] = []
        for attention, self.arrangement in _PASSES:
            if self.arrangement == "whole" and per_pass > 1:
                continue  # a part of the tokens may begin within a row
            try:
                set_attention(self.module, attention)
                self._check(dtype)
                if self.arrangement != "packed":
                    how = "padded to a rectangle" if self.arrangement == "rectangles" else "whole"
                    log.warning(
                        "the rows of a pass are %s, which is slower than packing them: %s %s",
                        how, type(self.module).__name__, reasons[0],
                    )  # fmt: skip
                return
            except (ModelCheckError, ValueError) as error:  # transformers lacks this attention for the architecture
                reasons.append(str(error))
        raise ConfigError(
            f"{self._named}: {type(self.module).__name__} {reasons[0]}; with rows padded to a rectangle: {reasons[-1]}"
        )

    def _check_split(self, setting: str) -> None:
        def shared(microbatch: MicroBatch) -> tuple[Tensor, OutputHead]:
            found = self.forward(split_tokens([microbatch])[0])
            self._whole_rows.current = None
            return found

        try:
            check_model(self.module, shared, arrangement="rectangles")
        except ModelCheckError as error:
            raise ConfigError(
                f"{setting} with {self._named}: {type(self.module).__name__} {error}; expected 1"
            ) from error

    def _in_dtype(self, dtype: torch.dtype) -> Callable[[MicroBatch], tuple[Tensor, OutputHead]]:
        """Returns `forward` in `dtype`, during the checks at start."""

        def in_dtype(microbatch: MicroBatch) -> tuple[Tensor, OutputHead]:
            self._dtype = dtype
            try:
                return self.forward(microbatch)
            finally:
                self._dtype = torch.float32

        return in_dtype

    def _check(self, dtype: torch.dtype) -> None:
        device = self.module.get_output_embeddings().weight.device
        check_model(
            self.module,
            self.forward,
            None if dtype == torch.float32 else self._in_dtype(dtype),
            is_other_kernel=is_unpadded(device, dtype) and self.attention == IMPLEMENTATION,
            arrangement=self.arrangement,
            vision=self.vision,
        )

    def _checkpoint_layers(self) -> None:
        try:
            self.module.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": self._recomputation})
        except ValueError as error:
            raise ConfigError(f"trainer.gradient_checkpointing = true: {error}") from None
        for module in self.module.modules():
            if isinstance(module, GradientCheckpointingLayer):
                # Checkpointing works in training mode only; the modules inside the layer stay in evaluation mode.
                module.training = True

    def _recomputation(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Returns the contexts of a layer's forward pass and of its recomputation, which uses the same weights."""
        if not self._rounded:
            return nullcontext(), nullcontext()
        return nullcontext(), _reparametrize_module(self.body, self._rounded, tie_weights=True)

    @property
    def body(self) -> nn.Module:
        """The model without its head."""
        return body_of(self.module)

    @property
    def attention(self) -> str:
        """The name of the attention by which the model runs."""
        name: str = self.module.config._attn_implementation
        return name

    def parameters(self) -> list[nn.Parameter]:
        """Returns the masters, tied ones once: none of a frozen model, this rank's shards of a shared one."""
        return [parameter for parameter in self.at_rest().parameters() if parameter.requires_grad]

    def at_rest(self) -> Any:
        """Returns the module with its masters in place: a pass without gradient leaves gathered values there."""
        if self._shards is not None:
            self._shards.reshard()
        return self.module

    def forward(self, microbatch: MicroBatch) -> tuple[Tensor, OutputHead]:
        """Returns hidden states [N, H], `scaled`, and the head: published values, in `dtype`."""
        if microbatch.share is None:
            hidden, head = self.run(
                microbatch.token_ids, microbatch.position_ids, microbatch.layout, microbatch.routes, microbatch.images
            )
        else:
            hidden, head = self._run_split(microbatch, microbatch.share)
        return self.scaled(hidden), head

    def _run_split(self, microbatch: MicroBatch, share: TokenShare) -> tuple[Tensor, OutputHead]:
        """Runs the body over this rank's share of the tokens; returns as `run` does, for the rank's own micro-batch."""
        group = self._ranks.neighbours(len(share.sent)) if len(share.sent) > 1 else None
        if self.arrangement == "packed":
            assert group is not None  # a rank alone has nothing to split
            hidden, head = self.run(share.token_ids, share.position_ids, SplitAttention(share, group), share.routes)
            return to_owners(hidden, share, group), head
        if self.routing is not None:
            self.routing.take(share.routes)
        self._whole_rows.current = share, microbatch.layout, group
        hidden, head = self._run(input_ids=microbatch.token_ids[microbatch.layout.buckets[0]])
        return to_owners(hidden[0], share, group), head

    def run(
        self,
        token_ids: Tensor,
        position_ids: Tensor,
        layout: PackedLayout | OwnAttention | None,
        routes: Tensor | None = None,
        images: RowImages | None = None,
    ) -> tuple[Tensor, OutputHead]:
        """Runs the body over [N] tokens; returns the hidden states before `scaled`, and the head.

        If several ranks share the model, every rank must run it, on any tokens, and the head is valid until the next
        run. layout: None for one row while the model attends by transformers' own attention. routes: see `MicroBatch`.

        Raises:
            NotImplementedError: an `OwnAttention`, of a model that runs in rectangles.
        """
        self._whole_rows.current = None
        in_rectangles = self.arrangement == "rectangles"
        if self.routing is not None:
            if routes is not None and isinstance(layout, PackedLayout) and in_rectangles:
                routes = routes[layout.buckets[0]].flatten(0, 1)
            self.routing.take(routes)
        if layout is None or not in_rectangles:
            with self._seeing(images, token_ids.device, False, layout is None) as of_images:
                if images is not None and self.vision is not None and isinstance(layout, PackedLayout):
                    layout = replace(layout, blocks=self.vision.blocks(images, token_ids.device))
                arguments: dict[str, Any] = {"input_ids": token_ids[None], "position_ids": position_ids[None]}
                arguments["layout"] = layout
                if self.arrangement == "whole" and isinstance(layout, PackedLayout):
                    arguments |= layout.boundaries
                hidden, head = self._run(**arguments | of_images)
            return hidden[0], head
        if not isinstance(layout, PackedLayout):
            raise NotImplementedError(f"{type(self.module).__name__} has no packed pass")
        (rectangle,) = layout.buckets
        with self._seeing(images, token_ids.device, True, True) as of_images:
            hidden, head = self._run(**{"input_ids": token_ids[rectangle]} | of_images)
        return F.embedding(layout.slots, hidden.flatten(0, 1)), head

    def _seeing(
        self, images: RowImages | None, device: torch.device, in_rectangle: bool, by_own_masks: bool
    ) -> AbstractContextManager[dict[str, Any]]:
        """Gives the model the images of a pass in the block; see `Vision.seeing`."""
        if images is None:
            return nullcontext({})
        if self.vision is None:
            raise NotImplementedError(f"{self._named}: images in a row, which it cannot be shown")
        return self.vision.seeing(images, device, in_rectangle, by_own_masks)

    def _run(self, **arguments: Any) -> tuple[Tensor, OutputHead]:
        """Runs the body; returns its last hidden states and the head."""
        arguments["use_cache"] = False
        if self._shards is not None:
            # Parameters that a pass without gradient has gathered would be those before the last optimizer step.
            self._shards.reshard()
            hidden: Tensor = self._shards(**arguments)
            return hidden, self._head()
        if self._dtype is torch.float32:
            outputs = self.body(**arguments)
        else:
            self._rounded = {
                name: p if id(p) in self._kept_ids else p.to(self._dtype) for name, p in self.body.named_parameters()
            }
            outputs = torch.func.functional_call(self.body, self._rounded, kwargs=arguments)
            self._rounded = {}
        return outputs.last_hidden_state, self._head()

    def _head(self) -> OutputHead:
        head = self.module.get_output_embeddings()
        weight = head.weight if head.bias is None else torch.cat([head.weight, head.bias[:, None]], dim=1)
        return OutputHead(weight.to(self._dtype), self._softcap)

    def scaled(self, hidden: Tensor) -> Tensor:
        """Returns the body's last hidden states [N, H] as the head takes them: multiplied by the model's logit factor,
        which the head lacks, and with a column of 1 for a bias."""
        if self.module.get_output_embeddings().bias is not None:
            hidden = F.pad(hidden, (0, 1), value=1.0)
        if self._logit_scale == 1.0:
            return hidden
        # A power of two changes the exponent only; another factor would be rounded in 16 bits.
        is_exact = abs(math.frexp(self._logit_scale)[0]) == 0.5
        return (hidden if is_exact else hidden.float()) * self._logit_scale

    def reduce_gradients(self, now: bool) -> None:
        """Sets whether the next backward pass adds up the ranks' gradients, as the last one before each optimizer step
        must."""
        if self._shards is not None:
            self._shards.set_requires_gradient_sync(now)

    def published_weights(self) -> dict[str, Tensor]:
        """Returns copies on CPU in `dtype`, by the names that `save_pretrained` would write; no two share memory.

        If several ranks share the model, all must call it, and only the lead's result is not empty.
        """
        state = self._untied() if self._shards is None else self.state()
        self._describe(state)
        if self._shards is not None:
            dtypes = {name: self._published_dtype(name, tensor, self._dtype) for name, tensor in state.items()}
            state = gathered(state, dtypes, self._ranks)
            if not state:
                return {}
        return {
            name: tensor.detach().to("cpu", self._published_dtypes[name], copy=True).contiguous()
            for name, tensor in self._published(state).items()
        }

    def published_parts(self) -> Callable[[], list[PublishedPart]]:
        """Returns a function that returns this rank's parts of the published tensors: one of every tensor, perhaps
        without elements, in the same order on all ranks, by the names that `save_pretrained` would write. Another
        thread may call it, until the next optimizer step.

        If only names differ from the masters', the parts are the masters themselves. If tensors are split or joined, a
        model that several ranks share is gathered on the lead immediately, and the other ranks have no parts.
        """
        state = self._untied() if self._shards is None else self.state()
        names = self._describe(state)
        if names:
            return lambda: self._parts({names[name]: tensor for name, tensor in state.items()})
        if self._shards is None:
            return lambda: self._parts(self._published(state))
        weights = self.published_weights()
        return lambda: self._parts(weights)

    def check_replaceable(self) -> None:
        """Raises ConfigError if `replaced` cannot write published values into the masters, because names or shapes of
        this architecture's published tensors are not theirs."""
        masters = {held(each.detach(), self._ranks)[1].untyped_storage().data_ptr() for each in self.state().values()}
        for part in self.published_parts()():
            if len(part.values) and part.values.untyped_storage().data_ptr() not in masters:
                raise ConfigError(
                    f"correction.proximal = 'sampled_version' with {self._named}: {part.name} is published as a copy "
                    "of parts of other tensors, into which older versions cannot be loaded; expected 'consumed'"
                )

    @contextmanager
    def replaced(self) -> Iterator[Callable[[Sequence[Tensor]], None]]:
        """Yields a function that replaces the masters by published values of another policy, this rank's elements of
        each of `published_parts`; afterwards the masters are what they were. They take their memory twice until then.
        """
        own = [part.values for part in self.published_parts()()]
        masters = [values.clone() for values in own]

        @torch.no_grad()
        def replace(values: Sequence[Tensor]) -> None:
            for master, value in zip(own, values, strict=True):
                master.copy_(value)

        try:
            yield replace
        finally:
            replace(masters)

    def _parts(self, tensors: Mapping[str, Tensor]) -> list[PublishedPart]:
        """Returns this rank's part of each published tensor."""
        parts = []
        for name, tensor in tensors.items():
            start, values = held(tensor.detach(), self._ranks)
            dtype = self._published_dtypes[name]
            parts.append(PublishedPart(name, dtype, tuple(tensor.shape), start, values.contiguous()))
        return parts

    def _published_dtype(self, name: str, tensor: Tensor, dtype: torch.dtype) -> torch.dtype:
        """Returns the type in which a tensor of the module is published by a model of `dtype`."""
        return dtype if tensor.is_floating_point() and name not in self._kept else tensor.dtype

    def _describe(self, state: Mapping[str, Tensor]) -> dict[str, str]:
        """Finds the published tensors' names and types once; returns the names by master name, or nothing if some are
        split or joined."""
        if self._published_names is None:
            likenesses = {
                name: torch.empty(tensor.shape, dtype=self._published_dtype(name, tensor, self._dtype), device="meta")
                for name, tensor in state.items()
            }
            names = {id(likeness): name for name, likeness in likenesses.items()}
            converted = self._published(dict(likenesses))
            self._published_dtypes = {name: likeness.dtype for name, likeness in converted.items()}
            renamed = {names[id(likeness)]: name for name, likeness in converted.items() if id(likeness) in names}
            self._published_names = renamed if len(renamed) == len(state) == len(converted) else {}
        return self._published_names

    def _published(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Renames, splits and joins tensors as `save_pretrained` would; adapters get peft's names."""
        if self.lora is None:
            return revert_weight_conversion(self.module, state)
        return {published_name(name): tensor for name, tensor in state.items()}

    def _untied(self) -> dict[str, Tensor]:
        if self.lora is not None:
            return self.state()
        return remove_tied_weights_from_state_dict(self.module.state_dict(), self.module)

    def load(self, folder: Path | str) -> None:
        """Replaces the masters by those in `folder`, in place.

        Raises:
            ConfigError: no model in `folder`, or one of other shapes.
        """
        if self._shards is not None:
            raise NotImplementedError("a model that several ranks share is loaded from their checkpoint")
        try:
            named = f"model.path = {str(folder)!r}"
            self.module.load_state_dict(load_model(str(folder), named, self._max_model_len).state_dict())
        except RuntimeError as error:
            raise ConfigError(f"{folder}: does not fit the model of {self._named}: {error}") from None

    @torch.no_grad()
    def load_adapter(self, weights: Mapping[str, Tensor]) -> None:
        """Replaces the adapters' masters by published ones; without any the policy is the base.

        Raises:
            ConfigError: the adapters belong to another model.
        """
        masters = {published_name(name): tensor for name, tensor in self.state().items()}
        shapes, found = ({name: t.shape for name, t in each.items()} for each in (masters, weights))
        if weights and shapes != found:
            names = sorted(name for name in shapes.keys() | found.keys() if shapes.get(name) != found.get(name))
            raise ConfigError(f"not an adapter of {self._named} of the run's rank: {names[:3]} differ")
        for name, master in masters.items():
            if weights:
                master.copy_(weights[name])
            else:
                master.zero_()

    @property
    def is_base(self) -> bool:
        """True if the policy is the base: its adapters are untrained."""
        factors = [tensor for name, tensor in self.state().items() if name.endswith("lora_B")]
        return self.lora is not None and not any(bool(held(each, self._ranks)[1].any()) for each in factors)

    @torch.no_grad()
    def copy(self, weights: Mapping[str, Tensor]) -> None:
        """Copies the `state` of a model of the same shapes and ranks; each tensor keeps its own type."""
        for name, tensor in self.state().items():
            tensor.copy_(weights[name])

    def state(self) -> dict[str, Tensor]:
        """Returns the masters as `tensors_of` does; with adapters, theirs only."""
        return tensors_of(self.at_rest()) if self.lora is None else adapter_of(self.at_rest())


class BaseOfAdapter:
    """The base under a model's adapters as a policy: a KL term's reference without memory of its own."""

    def __init__(self, model: PackedModel) -> None:
        self._model = model

    def forward(self, microbatch: MicroBatch) -> tuple[Tensor, OutputHead]:
        """See `PackedModel.forward`; without gradient."""
        with torch.no_grad(), adapter_share(self._model.module, 0.0):
            return self._model.forward(microbatch)
