"""Preprocess images as a model's processor does (transformers' PIL backend): resize, crop, normalize."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import sha256
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

from jaxllm.errors import UserError
from jaxllm.media.images import as_rgb, pillow

if TYPE_CHECKING:
    from PIL.Image import Image

LARGEST = 4096  # pixels of a side after resizing
_BILINEAR, _BICUBIC = 2, 3
CLIP_VALUES = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
# Default side, whether the shortest edge is resized to it and the center cropped, mean and deviation.
_KINDS: dict[str, tuple[int, bool, tuple[tuple[float, ...], tuple[float, ...]]]] = {
    "CLIPImageProcessor": (224, True, CLIP_VALUES),
    "LlavaImageProcessor": (224, True, CLIP_VALUES),
    "SiglipImageProcessor": (224, False, ((0.5,) * 3, (0.5,) * 3)),
}
_GEMMA = "Gemma3ImageProcessor"
_PAN_AND_SCAN = frozenset(f"pan_and_scan_{key}" for key in ("min_crop_size", "max_num_crops", "min_ratio_to_activate"))
_OLDER = {"CLIPFeatureExtractor": "CLIPImageProcessor"}
# Without effect here, or of the text side of a processor.
UNREAD = frozenset(
    """
    image_processor_type feature_extractor_type processor_class data_format input_data_format device return_tensors
    default_to_square do_pad pad_size image_seq_length disable_grouping do_convert_rgb
    """.split()
)


class Prepared(NamedTuple):
    """A preprocessed image or sound."""

    digest: bytes  # of all that its embeddings depend on
    num_tokens: int
    # float32[3, H, W], or float32[patches, 3 · pixels of a patch]; of sound see sounds.py
    pixels: np.ndarray
    grid: tuple[int, int] | None = None  # rows and columns of tokens, if these have positions in two dimensions


class Measured(NamedTuple):
    """A checked image or sound, not yet preprocessed."""

    num_tokens: int
    grid: tuple[int, int] | None
    read: Callable[[], np.ndarray]  # makes `Prepared.pixels`


@dataclass(frozen=True, kw_only=True)
class Processor(ABC):
    """A model's preprocessing."""

    kind: ClassVar[str] = "image"  # key of multi_modal_data
    noun: ClassVar[str] = "image"  # in errors
    placeholder: int  # token id
    video: int | None = None  # token id of videos
    # Token ids before and after an image; prompts of texts have the first for an image. Not a part of digests.
    marks: tuple[int, int] | None = field(default=None, repr=False)
    context: int | None = field(default=None, repr=False)  # most tokens of a request; not a part of digests

    @property
    @abstractmethod
    def most_tokens(self) -> int:
        """Return the most tokens of an image, or of a piece of a sound."""

    def within(self, context: int) -> Processor:
        return replace(self, context=context)

    def prepare(
        self,
        images: Sequence[Any],
        name: str = "multi_modal_data",
        parameter: str = "multi_modal_data",
        earlier: Sequence[Prepared] = (),
        other: int = 0,
    ) -> list[Prepared]:
        """Preprocess images, except prepared ones; raise UserError, naming `name`, for values that are no images.

        `earlier` are images of the same request, `other` its tokens of other media: all must fit into the context,
        which bounds their memory.
        """
        found: list[Prepared] = []
        total = other + sum(image.num_tokens for image in earlier)
        for image in images:
            if isinstance(image, Prepared):
                found.append(image)
                continue
            num_tokens, grid, read = self.measure(image, name, parameter)
            total += num_tokens
            if self.context is not None and total > self.context:
                raise UserError(
                    f"{name}: {self.noun}s have {total} tokens, and the model's context has {self.context}; send fewer "
                    "or smaller ones.",
                    parameter,
                )
            pixels = read()
            digest = sha256(repr((self, pixels.shape, grid)).encode())
            digest.update(pixels.tobytes())
            found.append(Prepared(digest.digest(), num_tokens, pixels, grid))
        return found

    @abstractmethod
    def measure(self, image: Any, name: str, parameter: str) -> Measured:
        """Check an image; raise UserError, naming `name`, for another value or too many tokens."""

    def listed(self, given: Any) -> list[Any]:
        """Return the images of a list or tuple, or the only one."""
        return list(given) if isinstance(given, list | tuple) and not isinstance(given, Prepared) else [given]

    def pieces(self, image: Prepared) -> Iterator[tuple[int, Prepared]]:
        """Yield the pieces of an image that are encoded separately, with their first tokens."""
        yield 0, image


@dataclass(frozen=True, kw_only=True)
class PictureProcessor(Processor):
    """Preprocessing of images."""

    resample: int  # number of Pillow's filter
    scale: float | None
    mean: tuple[float, ...] | None
    deviation: tuple[float, ...] | None

    def measure(self, image: Any, name: str, parameter: str) -> Measured:
        rgb = as_rgb(image, name, parameter)
        return Measured(*self.layout(rgb.size, name, parameter), partial(self.pixels, rgb))

    @abstractmethod
    def layout(self, size: tuple[int, int], name: str, parameter: str) -> tuple[int, tuple[int, int] | None]:
        """Return the number of tokens of an image of a size, width and height, and their rows and columns.

        Raises UserError, naming `name`, for images of too many tokens.
        """

    @abstractmethod
    def pixels(self, image: Image) -> np.ndarray:
        """Return an RGB image's input to the model."""

    def levels(self) -> np.ndarray:
        return levels(self.scale, self.mean, self.deviation)


def levels(scale: float | None, mean: tuple[float, ...] | None, deviation: tuple[float, ...] | None) -> np.ndarray:
    """Return the input to the model for each channel and value of a pixel, float32[3, 256]."""
    values = np.arange(256)
    found = np.tile(values.astype(np.float32), (3, 1))
    if scale is not None:
        found[:] = (values.astype(np.float64) * scale).astype(np.float32)
    if mean is not None and deviation is not None:
        means, deviations = (np.asarray(each, np.float32)[:, None] for each in (mean, deviation))
        found = (found - means) / deviations
    return found


@dataclass(frozen=True, kw_only=True)
class ImageProcessor(PictureProcessor):
    """Images of one size, resized to `size`, height and width, or `shortest`, the shortest edge."""

    num_tokens: int
    size: tuple[int, int] | None
    shortest: int | None
    crop: tuple[int, int] | None  # height and width
    pads: bool = False  # to a square, with the mean's color

    @property
    def most_tokens(self) -> int:
        return self.num_tokens

    def layout(self, size: tuple[int, int], name: str, parameter: str) -> tuple[int, tuple[int, int] | None]:
        return self.num_tokens, None

    def pixels(self, image: Image) -> np.ndarray:
        if self.pads:
            image = _padded(image, self.mean)
        width, height = image.size
        size = self.size
        if self.shortest is not None:
            short, long = min(width, height), max(width, height)
            longer = int(self.shortest * long / short)
            size = (self.shortest, longer) if height <= width else (longer, self.shortest)
        if size is not None:
            image = image.resize((size[1], size[0]), resample=self.resample)
        values = np.asarray(image).transpose(2, 0, 1)
        if self.crop is not None:
            values = _cropped(values, self.crop)
        return np.stack([levels[channel] for levels, channel in zip(self.levels(), values, strict=True)])


def read_processor(settings: Mapping[str, Any], placeholder: int, num_tokens: int, side: int) -> ImageProcessor:
    """Return the processor of preprocessor_config.json; `side` is the model's, in pixels.

    Raises UserError, naming the key, for unsupported settings, or images of another size.
    """
    own = Settings(settings)
    kind = str(own.take("image_processor_type", own.take("feature_extractor_type", "CLIPImageProcessor")))
    kind = kind.removesuffix("Fast").removesuffix("Pil")
    kind = _OLDER.get(kind, kind)
    if kind not in _KINDS:
        known = ", ".join(_KINDS)
        raise own.error("image_processor_type", kind, f"only {known}")
    default, crops, (mean, deviation) = _KINDS[kind]
    size, shortest = own.size("size", {"shortest_edge": default} if crops else {"height": default, "width": default})
    crop, square = own.size("crop_size", {"height": default, "width": default})
    crop = crop if square is None else (square, square)
    resizes, does_crop = own.switch("do_resize", True), own.switch("do_center_crop", crops)
    pads = own.switch("do_pad", False) and kind == "LlavaImageProcessor"
    values = own.values(mean, deviation)
    own.finish(UNREAD)
    found = ImageProcessor(
        placeholder=placeholder,
        num_tokens=num_tokens,
        size=size if resizes else None,
        shortest=shortest if resizes else None,
        crop=crop if does_crop else None,
        pads=pads,
        **values,
    )
    return _fitting(found, side)


def read_gemma(
    settings: Mapping[str, Any], placeholder: int, marks: tuple[int, int], num_tokens: int, side: int
) -> ImageProcessor:
    """Return Gemma 3's processor without pan-and-scan; arguments and errors as in `read_processor`."""
    own = Settings(settings)
    kind = str(own.take("image_processor_type", _GEMMA)).removesuffix("Fast").removesuffix("Pil")
    if kind != _GEMMA:
        raise own.error("image_processor_type", kind, f"only {_GEMMA}")
    if own.switch("do_pan_and_scan", False):
        raise own.error("do_pan_and_scan", True, "only false")
    size, _ = own.size("size", {"height": 224, "width": 224})
    resizes = own.switch("do_resize", True)
    values = own.values((0.5,) * 3, (0.5,) * 3, _BILINEAR)
    own.finish(UNREAD | _PAN_AND_SCAN)
    found = ImageProcessor(
        placeholder=placeholder,
        marks=marks,
        num_tokens=num_tokens,
        size=size if resizes else None,
        shortest=None,
        crop=None,
        **values,
    )
    return _fitting(found, side)


def _fitting(found: ImageProcessor, side: int) -> ImageProcessor:
    """Return a processor; raise UserError if its images are not squares of the model's `side`."""
    end = found.crop or found.size
    if end != (side, side):
        message = f"preprocessor_config.json: images of {end} pixels do not fit the model's {side} × {side}."
        raise UserError(message, "preprocessor_config.json")
    return found


class Settings:
    """Reads preprocessor_config.json, and refuses unknown keys."""

    def __init__(self, values: Mapping[str, Any], file: str = "preprocessor_config.json") -> None:
        self._values, self._file = values, file
        self._read: set[str] = set()

    def take(self, key: str, default: Any) -> Any:
        self._read.add(key)
        value = self._values.get(key)
        return default if value is None else value

    def switch(self, key: str, default: bool) -> bool:
        value = self.take(key, default)
        if not isinstance(value, bool):
            raise self.error(key, value, "true or false")
        return value

    def number(self, key: str, default: float) -> float:
        value = self.take(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self.error(key, value, "a number")
        return float(value)

    def numbers(self, key: str, default: Sequence[float]) -> tuple[float, ...]:
        value = self.take(key, default)
        is_list = isinstance(value, list | tuple) and len(value) == 3
        if not is_list or not all(type(one) in (int, float) and math.isfinite(one) for one in value):
            raise self.error(key, value, "a list of 3 numbers")
        return tuple(map(float, value))

    def size(self, key: str, default: Any) -> tuple[tuple[int, int] | None, int | None]:
        value = self.take(key, default)
        if isinstance(value, int) and not isinstance(value, bool):  # of early files: a square, or the shortest edge
            value = {"shortest_edge": value} if "shortest_edge" in default else {"height": value, "width": value}
        if isinstance(value, Mapping):
            given = {name: number for name, number in value.items() if number is not None}
            if all(type(number) is int and 1 <= number <= LARGEST for number in given.values()):
                if given.keys() == {"height", "width"}:
                    return (given["height"], given["width"]), None
                if given.keys() == {"shortest_edge"}:
                    return None, given["shortest_edge"]
        raise self.error(key, value, f"height and width, or a shortest_edge, from 1 to {LARGEST}")

    def values(self, mean: Sequence[float], deviation: Sequence[float], resample: int = _BICUBIC) -> dict[str, Any]:
        """Return the fields of `PictureProcessor`; the arguments are defaults."""
        rescales, normalizes = self.switch("do_rescale", True), self.switch("do_normalize", True)
        factor, resample = self.number("rescale_factor", 1 / 255), self.take("resample", resample)
        if resample not in range(6):
            raise self.error("resample", resample, "a number of Pillow's filters")
        self.switch("do_convert_rgb", True)
        means, deviations = self.numbers("image_mean", mean), self.numbers("image_std", deviation)
        return {
            "resample": int(resample),
            "scale": factor if rescales else None,
            "mean": means if normalizes else None,
            "deviation": deviations if normalizes else None,
        }

    def finish(self, unread: frozenset[str]) -> None:
        for key, value in self._values.items():
            if key not in self._read and key not in unread and value is not None:
                raise self.error(key, value, "a processor without it")

    def error(self, key: str, value: Any, wanted: str) -> UserError:
        return UserError(f"{self._file}: {key} = {value!r:.80} is not supported, {wanted} is.", key)


def _cropped(values: np.ndarray, crop: tuple[int, int]) -> np.ndarray:
    """Return the center [3, *crop]; smaller images are padded with zeros."""
    height, width = values.shape[1:]
    wide, high = max(crop[1], width), max(crop[0], height)
    if (high, wide) != (height, width):
        above, left = math.ceil((high - height) / 2), math.ceil((wide - width) / 2)
        padded = np.zeros((3, high, wide), values.dtype)
        padded[:, above : above + height, left : left + width] = values
        top, first = (height - crop[0]) // 2 + above, (width - crop[1]) // 2 + left
        return padded[:, max(0, top) : top + crop[0], max(0, first) : first + crop[1]]
    top, first = (height - crop[0]) // 2, (width - crop[1]) // 2
    return values[:, top : top + crop[0], first : first + crop[1]]


def _padded(image: Image, mean: tuple[float, ...] | None) -> Image:
    width, height = image.size
    if width == height:
        return image
    side = max(width, height)
    color = tuple(int(each * 255) for each in mean or (0.0,) * 3)
    padded = pillow().new("RGB", (side, side), color)
    padded.paste(image, ((side - width) // 2, (side - height) // 2))
    return padded
