"""Decode images from callers, bounded in bytes and pixels. Thread-safe."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxllm.errors import UserError
from jaxllm.media.sizes import MOST_PIXELS, check_size

if TYPE_CHECKING:
    from PIL.Image import Image

MOST_BYTES = 20 << 20  # of a file
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
_MOST_SCANS = 64  # of a progressive JPEG, which usually has 10; each passes over all pixels
_ANIMATED = ("PNG", "WEBP", "GIF")  # a JPEG of several pictures has a preview
_WIDE = ("I", "F")  # modes of more than 8 bits a channel


def pillow() -> Any:
    """Return the module `PIL.Image`; raise UserError if it is not installed."""
    try:
        from PIL import Image
    except ImportError as error:
        raise UserError("Images need Pillow: pip install 'jaxllm[media]'.", "image") from error
    return Image


def decode(data: bytes, name: str, parameter: str = "messages") -> Image:
    """Return a file's image, mode kept, rotated by its EXIF data; raise UserError, naming `name`, if it is invalid."""
    if len(data) > MOST_BYTES:
        raise UserError(f"{name} has {len(data)} bytes; an image may have {MOST_BYTES}. Send a smaller one.", parameter)
    module = pillow()
    from PIL import ImageOps

    try:
        image = module.open(io.BytesIO(data), formats=FORMATS)
        check_size(image.size, name, parameter)
        if image.format in _ANIMATED and getattr(image, "n_frames", 1) > 1:
            raise UserError(f"{name} is animated; send one of its frames.", parameter)
        check_mode(image.mode, name, parameter)
        # Two bytes begin a scan; metadata have them by chance.
        if data[:2] == b"\xff\xd8" and data.count(b"\xff\xda") > _MOST_SCANS + (len(data) >> 18):
            raise UserError(f"{name} has more than {_MOST_SCANS} scans; write it as a baseline JPEG.", parameter)
        image.load()
        return ImageOps.exif_transpose(image)
    except (UserError, MemoryError):
        raise
    except module.DecompressionBombError as error:
        raise UserError(f"{name} has too many pixels; an image may have {MOST_PIXELS}.", parameter) from error
    except Exception as error:  # OSError, SyntaxError, ValueError, struct.error and others
        known = ", ".join(FORMATS)
        raise UserError(f"{name} is not an image that can be read ({known}), or is cut off.", parameter) from error


def check_mode(mode: str, name: str, parameter: str) -> None:
    if mode.partition(";")[0] in _WIDE:
        raise UserError(f"{name} has more than 8 bits a channel (mode {mode}); convert it to 8.", parameter)


def as_rgb(given: Any, name: str, parameter: str) -> Image:
    """Return a caller's PIL image, or uint8 array [height, width, 3], as RGB; raise UserError if it is neither."""
    module = pillow()
    if isinstance(given, np.ndarray) and given.dtype == np.uint8 and given.ndim == 3 and given.shape[2] == 3:
        check_size((given.shape[1], given.shape[0]), name, parameter)
        return module.fromarray(np.ascontiguousarray(given))
    image: Any = given
    if not isinstance(given, module.Image):
        raise UserError(
            f"{name} must be a PIL image, or a uint8 array of height, width and 3 channels, not "
            f"{type(given).__name__}.",
            parameter,
        )
    check_size(image.size, name, parameter)
    check_mode(image.mode, name, parameter)
    try:
        return image if image.mode == "RGB" else image.convert("RGB")
    except MemoryError:
        raise
    except Exception as error:  # read at its first use
        raise UserError(f"{name} cannot be read, or is cut off.", parameter) from error
