"""The images of a vision-language model's rows: pixel values, the tower's features, and the rows' positions.

The tower runs once for each distinct image of a pass, and its features go to every place of the image. transformers'
own processor and tower compute them, and its forward pass puts them in place of the placeholder tokens.
"""

import io
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import signature
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from transformers import AutoImageProcessor
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

from penstock.consumers.learning.batch.images import RowImages
from penstock.consumers.learning.model.loading import language_of
from penstock.schemas.images import processor_settings
from penstock.schemas.process.image_files import decoded

_MOST_KEPT = 64
"""Images whose pixel values are kept, and whose features if the tower is frozen."""


class _Pass(NamedTuple):
    """files: the distinct images by digest. order: the digests of the images in the tokens. token_ids: [rows, tokens],
    as they were sampled, 0 in place of placeholders."""

    files: Mapping[str, bytes]
    order: Sequence[str]
    token_ids: Tensor


class Vision:
    """The part of a vision-language model that only images go through: the tower, and what maps its features to the
    width of the language model.

    Args:
        path: the model's folder, with the files of its processor.

    Raises:
        OSError, ValueError: no image processor there, or one that transformers cannot load.
    """

    def __init__(self, module: Any, path: str) -> None:
        self._body: Any = module.base_model
        self._processor: Any = AutoImageProcessor.from_pretrained(path, local_files_only=True)
        whole: Any = PROCESSOR_MAPPING[type(module.config)]
        self._settings: dict[str, Any] = whole.valid_processor_kwargs._defaults.get("images_kwargs", {})
        self._tower = self._body.get_image_features
        self._accepted = signature(self._tower).parameters.keys()
        self.token: int = module.config.image_token_id
        """The placeholder's id."""
        self.tokens_per_frame: int | None = None
        """Features of one picture of those that the processor makes of an image; None before one has been encoded, and
        unused where the processor gives a grid."""
        self.is_bidirectional: bool = "token_type_ids" in signature(self._body.forward).parameters
        """Tokens of an image see each other in both directions."""
        self._pixels: OrderedDict[str, dict[str, Tensor]] = OrderedDict()
        self._features: OrderedDict[str, SimpleNamespace] = OrderedDict()
        """Of a frozen tower."""
        self._has_plain_positions = self._is_cropped = False
        self._pass: _Pass | None = None
        """The one that runs."""
        self.num_runs = 0
        """Images that the tower was run over."""
        self._body.get_image_features = self._placed_features
        module.get_input_embeddings().register_forward_pre_hook(self._true_tokens)

    def parameters(self) -> list[nn.Parameter]:
        """Returns those of the tower and its projection."""
        language = {id(each) for each in language_of(self._body).parameters()}
        return [each for each in self._body.parameters() if id(each) not in language]

    @property
    def settings(self) -> dict[str, Any]:
        """See `penstock.schemas.images.processor_settings`."""
        return processor_settings(self._processor, self._settings)

    @property
    def has_positions(self) -> bool:
        """True if images give the tokens of a row positions in three dimensions."""
        return hasattr(self._body, "get_rope_index")

    @contextmanager
    def otherwise(self, *, plain_positions: bool = False, cropped: bool = False, **settings: Any) -> Iterator[None]:
        """Shows images in the block as a faulty engine may: at plain positions, cut to the square in their middle, or
        with other settings of the processor."""
        before = self._settings
        self._settings, self._is_cropped = before | settings, cropped
        self._has_plain_positions = plain_positions
        self._forget()
        try:
            yield
        finally:
            self._settings, self._has_plain_positions, self._is_cropped = before, False, False
            self._forget()

    def _forget(self) -> None:
        self._pixels.clear()
        self._features.clear()

    @contextmanager
    def seeing(
        self, images: RowImages, device: torch.device, in_rectangle: bool, by_own_masks: bool
    ) -> Iterator[dict[str, Any]]:
        """Gives the model the images of a pass in the block, over the packed tokens or their one rectangle; yields the
        arguments of the body that images change. by_own_masks: attention is transformers', with its masks."""
        index = images.buckets[0] if in_rectangle else torch.arange(len(images.token_ids))[None]
        token_ids, places = images.token_ids[index], images.places_in(index)
        is_image = (places >= 0) & (token_ids == self.token)
        # transformers finds placeholders by their id, which may be sampled too: others get another id here, and theirs
        # back in the embedding.
        other = 0 if self.token else 1
        marked = token_ids.masked_fill(token_ids == self.token, other).masked_fill(is_image, self.token)
        found: dict[str, Any] = {"input_ids": marked.to(device), "pixel_values": torch.empty(0)}
        if self.has_positions and not self._has_plain_positions:
            found["position_ids"] = self._positions(images, in_rectangle).to(device)
        if by_own_masks and self.is_bidirectional:
            found["token_type_ids"] = is_image.long().to(device)
        self._pass = _Pass(images.files, images.order(places), token_ids.masked_fill(is_image, 0).to(device))
        try:
            yield found
        finally:
            self._pass = None

    def blocks(self, images: RowImages, device: torch.device) -> Tensor | None:
        """Returns `PackedLayout.blocks`."""
        if not self.is_bidirectional:
            return None
        return images.places.masked_fill(images.token_ids != self.token, -1).to(device)

    def _positions(self, images: RowImages, in_rectangle: bool) -> Tensor:
        """Returns the positions in time, height and width, [3, 1, N], or [3, rows, longest row] of the rectangle."""
        found = []
        for bucket in images.buckets:
            token_ids, places = images.token_ids[bucket], images.places_in(bucket)
            order = images.order(places)
            grids = [self.pixels(digest, images.files[digest])["image_grid_thw"] for digest in order]
            positions, _ = self._body.get_rope_index(
                token_ids,
                mm_token_type_ids=((places >= 0) & (token_ids == self.token)).int(),
                image_grid_thw=torch.cat(grids) if grids else None,
            )
            found.append(positions)
        if in_rectangle:
            return found[0]
        return torch.cat([each.flatten(1) for each in found], dim=1)[:, images.slots][:, None]

    def num_tokens(self, digest: str, file: bytes) -> int:
        """Returns the placeholders of an image.

        Raises:
            ImageError: it cannot be decoded.
        """
        pixels = self.pixels(digest, file)
        if (grid := pixels.get("image_grid_thw")) is not None:
            return int(grid.prod()) // self._body.config.vision_config.spatial_merge_size**2
        if self.tokens_per_frame is None:
            device = self.parameters()[0].device
            one = {name: each.to(device) for name, each in pixels.items()}
            self.tokens_per_frame = int(self._tower(**one, return_dict=True).pooler_output.shape[1])
        return self.tokens_per_frame * pixels["pixel_values"].shape[:-3].numel()

    def own_arguments(self, token_ids: Sequence[int], files: Sequence[bytes]) -> dict[str, Any]:
        """Returns the arguments of transformers' own forward pass over one row whose images are `files`; each token of
        the placeholder's id is one."""
        device = self.parameters()[0].device
        is_image = torch.tensor([[token == self.token for token in token_ids]], device=device)
        kinds = {"token_type_ids": is_image.long(), "mm_token_type_ids": is_image.int()}
        accepted = signature(self._body.forward).parameters
        found = {name: each.to(device) for name, each in self.processed(files).items()}
        return found | {name: each for name, each in kinds.items() if name in accepted}

    def pixels(self, digest: str, file: bytes) -> dict[str, Tensor]:
        """Returns the processor's tensors of an image."""
        if digest not in self._pixels:
            self._pixels[digest] = self.processed([file])
        return _kept(self._pixels, digest)

    def processed(self, files: Sequence[bytes]) -> dict[str, Tensor]:
        """Returns the processor's tensors of the images of a row, those that the tower takes."""
        images = [_cropped(decoded(file)) if self._is_cropped else decoded(file) for file in files]
        tensors = self._processor(images=images, return_tensors="pt", **self._settings)
        return {name: each for name, each in tensors.items() if name in self._accepted}

    def _true_tokens(self, _: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        return arguments if self._pass is None else (self._pass.token_ids,)

    def _placed_features(self, *arguments: Any, **named: Any) -> Any:
        """Replaces the body's `get_image_features`: in a pass, the features of the images in their order."""
        if self._pass is None:
            return self._tower(*arguments, **named)
        pieces = self._encoded(self._pass.files)
        return _joined([pieces[digest] for digest in self._pass.order])

    def _encoded(self, files: Mapping[str, bytes]) -> dict[str, SimpleNamespace]:
        """Returns the features of images by digest. Those of equal shapes run together."""
        first = self.parameters()[0]
        is_frozen = not first.requires_grad
        found = {digest: _kept(self._features, digest) for digest in files if digest in self._features}
        of_shape: dict[tuple[Any, ...], list[str]] = {}
        for digest, file in files.items():
            if digest not in found:
                pixels = self.pixels(digest, file)
                of_shape.setdefault(tuple(each.shape for each in pixels.values()), []).append(digest)
        for alike in of_shape.values():
            tensors = [self.pixels(digest, files[digest]) for digest in alike]
            joined = {name: torch.cat([each[name] for each in tensors]).to(first.device) for name in tensors[0]}
            encoded = self._tower(**joined, return_dict=True)
            self.num_runs += len(alike)
            for number, digest in enumerate(alike):
                found[digest] = _piece(encoded, number, len(alike))
                if is_frozen:
                    self._features[digest] = found[digest]
                    _kept(self._features, digest)
        return found


def open_vision(module: Any, path: str) -> Vision | None:
    """Returns the vision of a model; None without the files of its image processor, which text alone does not need."""
    try:
        return Vision(module, path)
    except OSError:
        return None


def encoded(pixels: np.ndarray) -> bytes:
    """Returns the file of an image. pixels: [height, width, 3] uint8."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format="PNG")
    return file.getvalue()


def _cropped(image: Image.Image) -> Image.Image:
    left, top = ((side - min(image.size)) // 2 for side in image.size)
    return image.crop((left, top, left + min(image.size), top + min(image.size)))


def _kept(cache: OrderedDict[str, Any], digest: str) -> Any:
    """Returns an entry of a cache and makes it the latest; the earliest go."""
    cache.move_to_end(digest)
    while len(cache) > _MOST_KEPT:
        cache.popitem(last=False)
    return cache[digest]


def _piece(encoded: Any, number: int, count: int) -> SimpleNamespace:
    """Returns the features of one of `count` images of equal shapes."""

    def of_image(features: Any) -> Tensor:
        own: Tensor = features[number] if isinstance(features, tuple) else features.chunk(count)[number]
        return own

    deep = [of_image(layer) for layer in getattr(encoded, "deepstack_features", None) or ()]
    return SimpleNamespace(pooler_output=of_image(encoded.pooler_output), deepstack_features=deep)


def _joined(pieces: Sequence[SimpleNamespace]) -> SimpleNamespace:
    """Returns the features of images one after another, as the body takes them."""
    poolers = [each.pooler_output for each in pieces]
    return SimpleNamespace(
        pooler_output=tuple(poolers) if poolers[0].ndim == 2 else torch.cat(poolers),
        deepstack_features=[tuple(layer) for layer in zip(*(each.deepstack_features for each in pieces), strict=True)],
    )
