"""Preprocess images of any size as patches, as transformers' Qwen2VLImageProcessor does (PIL backend).

Sides are rounded to whole tokens, and images of too few or too many pixels are scaled.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxllm.errors import UserError
from jaxllm.media.cutting import cut, most_tokens
from jaxllm.media.processor import CLIP_VALUES, UNREAD, PictureProcessor, Processor, Settings
from jaxllm.media.videos import VideoProcessor

if TYPE_CHECKING:
    from PIL.Image import Image

LARGEST = 1 << 26  # pixels of a resized image
_KINDS = ("Qwen2VLImageProcessor", "Qwen2_5_VLImageProcessor")  # the second is in early files
_UNREAD = UNREAD | {"temporal_patch_size"}  # an image is one frame, repeated


@dataclass(frozen=True, kw_only=True)
class PatchProcessor(PictureProcessor):
    """Images of any size, cut into patches; a token is a square of merge × merge patches."""

    patch: int  # pixels of a patch's side
    merge: int  # patches of a token's side
    fewest: int  # pixels of a resized image
    most: int
    videos: VideoProcessor | None = field(default=None, repr=False)  # not a part of digests

    def within(self, context: int) -> PatchProcessor:
        videos = None if self.videos is None else replace(self.videos, context=context)
        return replace(self, context=context, videos=videos)

    @property
    def side(self) -> int:
        return self.patch * self.merge

    @property
    def most_tokens(self) -> int:
        return self.most_image if self.videos is None else max(self.most_image, self.videos.most_tokens)

    @property
    def most_image(self) -> int:
        found = most_tokens(self.fewest, self.most, self.side)
        return found if self.context is None else min(found, self.context)

    def layout(self, size: tuple[int, int], name: str, parameter: str) -> tuple[int, tuple[int, int] | None]:
        width, height = self.resized(*size)
        rows, columns = height // self.side, width // self.side
        if rows * columns > self.most_image:
            raise UserError(
                f"{name} has {rows * columns} tokens, and an image may have {self.most_image}; send a smaller one.",
                parameter,
            )
        return rows * columns, (rows, columns)

    def resized(self, width: int, height: int) -> tuple[int, int]:
        """Return an image's width and height after resizing: multiples of a token's side."""
        side, area = self.side, width * height
        wide, high = round(width / side) * side, round(height / side) * side
        if wide * high > self.most:
            factor = math.sqrt(area / self.most)
            wide, high = (max(side, math.floor(each / factor / side) * side) for each in (width, height))
        elif wide * high < self.fewest:
            factor = math.sqrt(self.fewest / area)
            wide, high = (math.ceil(each * factor / side) * side for each in (width, height))
        return wide, high

    def pixels(self, image: Image) -> np.ndarray:
        """Resize and normalize an RGB image; return float32[patches, values]: a token's adjacent, tokens in rows."""
        wide, high = self.resized(*image.size)
        values = np.asarray(image.resize((wide, high), resample=self.resample))
        return cut(values, self.patch, self.merge, self.levels())


def video_processor(processor: Processor | None) -> VideoProcessor | None:
    return processor.videos if isinstance(processor, PatchProcessor) else None


def read_patches(
    settings: Mapping[str, Any], placeholder: int, video: int | None, patch: int, merge: int
) -> PatchProcessor:
    """Return the processor of preprocessor_config.json; `patch` and `merge` are the model's.

    Raises UserError, naming the key, for unsupported settings.
    """
    own = Settings(settings)
    kind = str(own.take("image_processor_type", _KINDS[0])).removesuffix("Fast").removesuffix("Pil")
    if kind not in _KINDS:
        raise own.error("image_processor_type", kind, f"only {_KINDS[0]}")
    for key, default, wanted in (("patch_size", 14, patch), ("merge_size", 2, merge)):
        if own.take(key, default) != wanted:
            raise own.error(key, own.take(key, default), f"{wanted}, the model's,")
    if not own.switch("do_resize", True):
        raise own.error("do_resize", False, "only true")
    size = own.take("size", {})
    keys = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}
    if not isinstance(size, Mapping) or size.keys() - keys:
        raise own.error("size", size, "shortest_edge and longest_edge, numbers of pixels,")
    fewest, most = (
        own.take(key, size.get(edge, default))
        for key, (edge, default) in zip(("min_pixels", "max_pixels"), keys.items(), strict=True)
    )
    if not (type(fewest) is type(most) is int and (patch * merge) ** 2 <= most <= LARGEST and 1 <= fewest <= most):
        shown = f"from {(patch * merge) ** 2} to {LARGEST}, and at least min_pixels,"
        raise own.error("max_pixels", (fewest, most), shown)
    values = own.values(*CLIP_VALUES)
    own.finish(_UNREAD)
    return PatchProcessor(
        placeholder=placeholder, video=video, patch=patch, merge=merge, fewest=fewest, most=most, **values
    )
