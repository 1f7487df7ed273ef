"""The images of a group: their bytes, once by digest, and the tokens that stand for them in a segment."""

import base64
import binascii
import hashlib
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

MAX_IMAGE_BYTES = 16 * 1024 * 1024
"""The largest image file."""
MAX_IMAGE_PIXELS = 32 * 1024 * 1024
"""The most pixels of an image: 96 MiB as RGB."""
MAX_IMAGES = 1024
"""The most images of a group."""
MAX_IMAGES_BYTES = 64 * 1024 * 1024
"""The most bytes of a group's image files."""
_CLASSES = ("image_processor_type", "processor_class")
"""Names of classes in a processor's file, which say less than its own."""


class ImageError(ValueError):
    """An image that cannot be given to a model; the message says what it is and what was expected."""


class ImagePlace(msgspec.Struct, frozen=True, array_like=True):
    """`token_ids[start:end]` of a segment stand for an image, exactly as the engine saw them: from the first to the
    last token that the model's processor put in place of it, tokens between its rows included.

    digest: SHA-256 of the image file's bytes, in hex.
    """

    digest: str
    start: int
    end: int

    def moved(self, by: int) -> "ImagePlace":
        """Returns the place in tokens of which this segment's begin at `by`."""
        return ImagePlace(self.digest, self.start + by, self.end + by)


def digest_of(data: bytes) -> str:
    """Returns the digest by which an image file is known."""
    return hashlib.sha256(data).hexdigest()


def problem_of_places(
    places: Sequence[ImagePlace], num_tokens: int, sampled: Iterable[tuple[int, int]], images: Mapping[str, bytes]
) -> str | None:
    """Returns why these are not the places of `images` in the context of a segment; None if they are.

    sampled: the runs of sampled tokens, `[start, end)`.
    """
    previous_end, runs = 0, list(sampled)
    for place in places:
        if not previous_end <= place.start < place.end <= num_tokens:
            return f"({place.start}, {place.end}), expected {previous_end} <= start < end <= {num_tokens}"
        if place.digest not in images:
            return f"no image of the digest {place.digest[:64]!a}, expected its bytes in the group's images"
        if any(start < place.end and place.start < end for start, end in runs):
            return f"({place.start}, {place.end}) holds sampled tokens, expected context alone"
        previous_end = place.end
    return None


def processor_settings(processor: Any, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what decides the pixels that a model is shown, by name and as JSON has it: class and settings of
    transformers' image processor. defaults: of the model's processor for every call."""
    named = {name: value for name, value in (processor.to_dict() | dict(defaults)).items() if name not in _CLASSES}
    found = {"class": type(processor).__name__} | named
    return dict(msgspec.json.decode(msgspec.json.encode(found, enc_hook=str)))


def settings_that_differ(here: Mapping[str, Any], there: Mapping[str, Any]) -> list[str]:
    """Returns the names of the settings that two image processors do not share."""
    return sorted(name for name in {*here, *there} if here.get(name) != there.get(name))


def problem_of_images(images: Mapping[str, bytes]) -> str | None:
    """Returns why these are not image files by digest, or empty for one that is kept elsewhere; None if they are."""
    if len(images) > MAX_IMAGES:
        return f"{len(images):,} images, expected at most {MAX_IMAGES:,}"
    if (num_bytes := sum(map(len, images.values()))) > MAX_IMAGES_BYTES:
        return f"{num_bytes:,} bytes in {len(images):,} files, expected at most {MAX_IMAGES_BYTES:,}"
    for digest, data in images.items():
        if data and (found := digest_of(data)) != digest:
            return f"{len(data):,} bytes of the digest {found}, expected {digest[:64]!a}"
    return None


def file_of(source: Any) -> bytes:
    """Returns the image file that an environment or a data set names.

    source: its bytes, a data URL, a path, a PIL image, or `datasets`' `{"bytes": ..., "path": ...}`.

    Raises:
        ImageError: anything else, such as a URL to fetch, or a file that cannot be read.
    """
    if isinstance(source, Mapping):
        source = source.get("bytes") or source.get("path")
    if isinstance(source, bytes):
        return source
    if hasattr(source, "save"):
        file = io.BytesIO()
        source.save(file, format="PNG")
        return file.getvalue()
    if isinstance(source, str) and source.startswith("data:"):
        return bytes_in(source)
    if not isinstance(source, str | Path) or not source or "://" in str(source):
        raise ImageError(
            f"an image as {repr(source)[:80]}, expected bytes, a data URL, a path or a PIL image; nothing is fetched"
        )
    try:
        return Path(source).read_bytes()
    except OSError as error:
        raise ImageError(f"an image file {str(source)!r} that cannot be read: {error}") from error


def data_url(data: bytes) -> str:
    """Returns an image file as a data URL; readers know its kind by its first bytes."""
    return "data:image/png;base64," + base64.b64encode(data).decode()


def bytes_in(url: Any) -> bytes:
    """Returns the image file in a data URL.

    Raises:
        ImageError: anything else, or not Base64.
    """
    head, _, data = url.partition(",") if isinstance(url, str) else ("", "", "")
    if not (head.startswith("data:image/") and head.endswith(";base64")):
        raise ImageError(f"an image at {repr(url)[:80]}, expected data:image/...;base64,...; nothing is fetched")
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ImageError(f"an image in a data URL that is not Base64: {error}") from error
