"""Images in vLLM's prompts: where its processor puts them, and the requests that hold them; imports no vLLM."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from penstock.producers.interfaces import EngineError, PlacedImages
from penstock.schemas.images import ImageError, ImagePlace, digest_of, processor_settings
from penstock.schemas.process.image_files import decoded


class ImagePrompts:
    """Expands the placeholders of images as the model's processor does, in the engine's own process for prompts.

    vLLM takes prompts with one placeholder for each image and puts the image's tokens in its place. So for a prompt
    that is already expanded it is given the images alone, whose tokens must be those of the prompt: a sampled token
    that looks like a placeholder stays what it is.

    placeholder: the ids that stand for one image before that.
    """

    def __init__(self, renderer: Any, placeholder: Sequence[int]) -> None:
        self._renderer, self._placeholder = renderer, list(placeholder)
        self._apart: int = renderer.get_tokenizer().eos_token_id or 0

    @classmethod
    async def of(cls, renderer: Any, text: str) -> "ImagePrompts":
        """Returns those of a model whose prompts have `text` for an image.

        Raises:
            EngineError: the processor does not put an image there.
        """
        from PIL import Image

        ids = renderer.get_tokenizer().encode(text, add_special_tokens=False)
        try:
            rendered = await cls(renderer, ())._rendered(ids, [Image.new("RGB", (32, 32))], ["placeholder"], sent=False)
        except ValueError as error:
            raise EngineError(str(error)) from error
        (found,) = rendered["mm_placeholders"]["image"]
        placeholder = ids[found.offset : len(ids) - (len(rendered["prompt_token_ids"]) - found.offset - found.length)]
        if not placeholder:
            raise EngineError(f"the model's processor has no token for an image in {text!r}, expected one")
        return cls(renderer, placeholder)

    async def expand(self, ids: list[int], files: Sequence[bytes]) -> tuple[list[int], PlacedImages]:
        """Returns a prompt with the tokens of its images, and their places.

        Raises:
            ValueError: an image that cannot be decoded, or another number of placeholders than of images.
        """
        if (found := self._count(ids)) != len(files):
            raise ValueError(f"{found} placeholders of images for {len(files)} images, expected one each")
        if not files:
            return ids, PlacedImages()
        digests = [digest_of(data) for data in files]
        rendered = await self._decoded(ids, files, digests, sent=False)
        places = self._places(rendered, digests)
        return list(rendered["prompt_token_ids"]), PlacedImages(places, dict(zip(digests, files, strict=True)))

    async def request(self, ids: list[int], images: PlacedImages) -> Any:
        """Returns vLLM's request for an expanded prompt.

        Raises:
            ValueError: its images are gone, or the processor expands it to other tokens.
        """
        digests = [place.digest for place in images.places]
        if missing := [each for each in digests if each not in images.files]:
            raise ValueError(f"no image of the digest {missing[0]}, expected its bytes")
        # Each image between two other tokens, so that the tokens around it stay as they are.
        alone = [self._apart, *(token for _ in digests for token in (*self._placeholder, self._apart))]
        rendered = await self._decoded(alone, [images.files[each] for each in digests], digests, sent=True)
        given, found = rendered["prompt_token_ids"], rendered["mm_placeholders"]["image"]
        for n, (place, at) in enumerate(zip(images.places, found, strict=True), 1):
            is_embed = [True] * at.length if at.is_embed is None else at.is_embed.tolist()
            here, there = ids[place.start : place.end], given[at.offset : at.offset + at.length]
            if not len(here) == len(there) or any(
                one != other for one, other, seen in zip(here, there, is_embed, strict=True) if seen
            ):
                raise ValueError(
                    f"the processor expands image {n} of {len(found)} to other tokens than the {len(here)} at "
                    f"{place.start} of the prompt, expected the same ones; its settings may have changed"
                )
        moved = [replace(at, offset=place.start) for place, at in zip(images.places, found, strict=True)]
        return rendered | {"prompt_token_ids": ids, "mm_placeholders": {"image": moved}}

    def _count(self, ids: list[int]) -> int:
        size = len(self._placeholder)
        if size == 1:
            return ids.count(self._placeholder[0])
        return sum(ids[n : n + size] == self._placeholder for n in range(len(ids)))

    def _places(self, rendered: Any, digests: Sequence[str]) -> tuple[ImagePlace, ...]:
        found = rendered["mm_placeholders"]["image"]
        return tuple(ImagePlace(d, at.offset, at.offset + at.length) for d, at in zip(digests, found, strict=True))

    async def _decoded(self, ids: list[int], files: Sequence[bytes], digests: Sequence[str], *, sent: bool) -> Any:
        pictures = await asyncio.to_thread(_pictures, files)
        return await self._rendered(ids, pictures, digests, sent=sent)

    async def _rendered(self, ids: list[int], pictures: Sequence[Any], digests: Sequence[str], *, sent: bool) -> Any:
        """Returns vLLM's request. sent: it goes to the engine's process, which then has its images."""
        prompt = {
            "prompt_token_ids": ids,
            "multi_modal_data": {"image": list(pictures)},
            # Siblings and later turns share what the processor and the vision tower make of an image.
            "multi_modal_uuids": {"image": list(digests)},
        }
        try:
            return await self._renderer.process_for_engine_async(prompt, time.time(), skip_mm_cache=not sent)
        except (ValueError, RuntimeError) as error:
            raise ValueError(f"the model's processor refuses the images: {error}") from error


def image_processor_of(processor: Any) -> dict[str, Any]:
    """Returns `Engine.image_processor` of vLLM's processor of a model."""
    whole = processor.info.get_hf_processor()
    if (own := getattr(whole, "image_processor", None)) is None:
        return {}
    return processor_settings(own, whole.valid_processor_kwargs._defaults.get("images_kwargs", {}))


def _pictures(files: Sequence[bytes]) -> list[Any]:
    pictures = []
    for n, data in enumerate(files, 1):
        try:
            pictures.append(decoded(data))
        except ImageError as error:
            raise ImageError(f"image {n} of {len(files)}: {error}") from error
    return pictures
