"""Preprocess images of any size as patches, as transformers' Qwen2VLImageProcessor does (PIL backend).

Sides are rounded to whole tokens, and images of too few or too many pixels are scaled.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxllm.errors import UserError
from jaxllm.media.images import MOST_RATIO
from jaxllm.media.processor import CLIP_VALUES, UNREAD, PictureProcessor, Settings

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

    @property
    def side(self) -> int:
        return self.patch * self.merge

    @property
    def most_tokens(self) -> int:
        # Rounding a long image's short side up can exceed both bounds of pixels.
        long = math.sqrt(MOST_RATIO)
        rounded = self.fewest + (long + 1 / long) * self.side * math.sqrt(self.fewest) + self.side**2
        found = math.ceil(max(self.most, long * self.side * math.sqrt(self.most), rounded) / self.side**2)
        return found if self.context is None else min(found, self.context)

    def layout(self, size: tuple[int, int], name: str, parameter: str) -> tuple[int, tuple[int, int] | None]:
        width, height = self.resized(*size)
        rows, columns = height // self.side, width // self.side
        if rows * columns > self.most_tokens:
            raise UserError(
                f"{name} has {rows * columns} tokens, and an image may have {self.most_tokens}; send a smaller one.",
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
        rows, columns, size = high // self.side, wide // self.side, self.patch**2
        cut = values.reshape(rows, self.merge, self.patch, columns, self.merge, self.patch, 3)
        cut = cut.transpose(0, 3, 1, 4, 6, 2, 5).reshape(-1, 3, size)
        found = np.empty(cut.shape, np.float32)
        for channel, levels in enumerate(self.levels()):
            found[:, channel] = levels[cut[:, channel]]
        return found.reshape(-1, 3 * size)


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
