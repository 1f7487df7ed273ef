"""Decodes image files: the same pixels for the engine and the trainer."""

import io
from typing import Any

from penstock.schemas.images import MAX_IMAGE_BYTES, MAX_IMAGE_PIXELS, ImageError

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
_MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr")


def decoded(data: bytes) -> Any:
    """Returns an image file as a PIL image in RGB: upright as its EXIF data says, transparency over white.

    Raises:
        ImageError: not one still image of `FORMATS` in 8 bits per channel, or larger than `MAX_IMAGE_BYTES` or
            `MAX_IMAGE_PIXELS`.
    """
    from PIL import Image, ImageOps

    if len(data) > MAX_IMAGE_BYTES:
        raise ImageError(f"an image of {len(data):,} bytes, expected at most {MAX_IMAGE_BYTES:,}")
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            _check(image)
            image.load()
            upright = ImageOps.exif_transpose(image)
            if not upright.has_transparency_data:
                return upright.convert("RGB")
            coloured = upright.convert("RGBA")
            return Image.alpha_composite(Image.new("RGBA", coloured.size, "white"), coloured).convert("RGB")
    except ImageError:
        raise
    except Exception as error:  # Pillow's readers raise many kinds for broken files
        expected = f"an image file of {', '.join(FORMATS)}"
        raise ImageError(f"{len(data):,} bytes that cannot be decoded ({error}), expected {expected}") from error


def _check(image: Any) -> None:
    width, height = image.size
    if width * height > MAX_IMAGE_PIXELS:
        raise ImageError(f"an image of {width} x {height} pixels, expected at most {MAX_IMAGE_PIXELS:,}")
    if (num_frames := getattr(image, "n_frames", 1)) > 1:
        raise ImageError(f"an animated image of {num_frames} frames, expected one")
    if image.mode not in _MODES:
        raise ImageError(f"an image of the mode {image.mode!r}, expected one of {', '.join(_MODES)}")
