"""Preprocess videos as transformers' Qwen2VLVideoProcessor and Qwen3VLVideoProcessor do.

A pair of frames becomes one grid of tokens, with the size of an image. Pairs do not attend to each other in the tower,
so each is encoded and cached by itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, NamedTuple

import numpy as np

from jaxllm.errors import UserError
from jaxllm.media.cutting import cut, most_tokens
from jaxllm.media.films import MOST_FRAMES, USUAL_FPS, Film
from jaxllm.media.processor import CLIP_VALUES, UNREAD, Prepared, Settings, levels
from jaxllm.media.resizing import resized
from jaxllm.media.sizes import MOST_RATIO

PAIR = 2  # frames
FILE_FPS = 2.0  # at which files are sampled
MOST_CHOSEN = 1 << 30  # pixels of chosen frames before they are resized: some 20 s of a processor
LARGEST = 1 << 34  # pixels of a setting
OPTIONS = "mm_processor_kwargs"
SAMPLING = frozenset(("fps", "num_frames", "min_frames", "max_frames", "do_sample_frames"))
# Settings of videos only.
OWN = SAMPLING | {"cap_pixels_per_frame", "max_video_tokens"}
_UNREAD = UNREAD | frozenset(
    """
    video_processor_type return_metadata video_metadata size_divisor crop_size max_duration max_image_size
    """.split()
)
_EVEN = (0.5,) * 3


class PreparedVideo(NamedTuple):
    """A preprocessed video."""

    pairs: tuple[Prepared, ...]
    seconds: tuple[float, ...]  # of each pair, if texts before pairs name them
    step: float  # of positions in time from pair to pair

    @property
    def num_tokens(self) -> int:
        return sum(pair.num_tokens for pair in self.pairs)


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How frames are chosen."""

    do_sample_frames: bool
    fps: float | None  # frames a second to choose
    num_frames: int | None  # to choose
    min_frames: int
    max_frames: int

    def replaced(self, options: Mapping[str, Any]) -> Sampling:
        """Return these with a request's `mm_processor_kwargs`; raise UserError for unknown or invalid ones."""
        unknown = sorted(str(name) for name in options.keys() - SAMPLING)
        if unknown:
            known = ", ".join(sorted(SAMPLING))
            raise UserError(f"mm_processor_kwargs of a request may have {known}, not {unknown[0]!r:.40}.", OPTIONS)
        given = {name: value for name, value in options.items() if value is not None}
        if {"fps", "num_frames"} <= given.keys():
            raise UserError("mm_processor_kwargs: give fps or num_frames, not both.", OPTIONS)
        for name, value in given.items():
            is_valid = {
                "fps": type(value) in (int, float) and 0 < value <= 1e6,
                "do_sample_frames": isinstance(value, bool),
            }.get(name, type(value) is int and 1 <= value <= MOST_FRAMES)
            if not is_valid:
                raise UserError(f"mm_processor_kwargs: {name} = {value!r:.40} is not possible.", OPTIONS)
        whole = {name: getattr(self, name) for name in SAMPLING}
        if "fps" in given:
            whole["num_frames"] = None
        if "num_frames" in given:
            whole["fps"] = None
        return Sampling(**whole | given)


@dataclass(frozen=True, kw_only=True)
class VideoProcessor:
    """A model's preprocessing of videos."""

    placeholder: int  # token id
    around: tuple[int, int]  # token ids before and after the pairs that are named by their time
    is_stamped: bool  # Qwen3-VL: texts name times, and bounds of pixels are those of all frames
    rate: float  # positions a second, of models without texts
    patch: int
    merge: int
    fewest: int  # pixels
    most: int
    caps: bool  # cap_pixels_per_frame
    cap_tokens: int
    resample: int
    scale: float | None
    mean: tuple[float, ...] | None
    deviation: tuple[float, ...] | None
    sampling: Sampling = field(repr=False)  # not a part of digests
    context: int | None = field(default=None, repr=False)

    @property
    def side(self) -> int:
        return self.patch * self.merge

    @property
    def most_tokens(self) -> int:
        """Return the most tokens of a pair."""
        frames = PAIR if self.is_stamped else 1
        fewest, most = -(-self.fewest // frames), max(self.most // frames, self.side**2)
        if self.caps:
            most = max(most, int(self.fewest * 1.05))
        found = most_tokens(fewest, most, self.side)
        return found if self.context is None else min(found, self.context)

    def prepare(
        self, film: Film, options: Mapping[str, Any], name: str, parameter: str, earlier: int = 0
    ) -> PreparedVideo:
        """Preprocess a video; raise UserError, naming `name`.

        `options` are the request's `mm_processor_kwargs`, `earlier` its tokens of other media: all must fit into the
        context, which is checked before frames are decoded.
        """
        sampling = self.sampling.replaced(options)
        indices = self._indices(film, sampling, options, name, parameter)
        wide, high = self.resized(*film.size, len(indices), name, parameter)
        rows, columns = high // self.side, wide // self.side
        count = -(-len(indices) // PAIR)
        total = rows * columns * count + earlier
        if rows * columns > self.most_tokens or (self.context is not None and total > self.context):
            raise UserError(
                f"{name}: {len(indices)} frames have {count} × {rows * columns} tokens, {total} with other media, and "
                f"the model's context has {self.context}; send fewer (fps, num_frames) or smaller ones.",
                parameter,
            )
        if film.is_encoded and len(indices) * film.size[0] * film.size[1] > MOST_CHOSEN:
            raise UserError(
                f"{name}: {len(indices)} frames of {film.size[0]} × {film.size[1]} pixels are chosen, which may have "
                f"{MOST_CHOSEN} in all; send fewer (fps, num_frames) or smaller ones.",
                parameter,
            )
        shown = indices if film.indices is None else [film.indices[index] for index in indices]
        whole = shown + [shown[-1]] * (-len(shown) % PAIR)
        # The rate of frames that are not sampled may be given as `fps`.
        fps = film.fps or (len(indices) == film.count and options.get("fps")) or USUAL_FPS
        rate = fps if film.fps is None else len(indices) / film.total * fps
        step = np.float32(self.rate) * np.float32(PAIR / rate)
        seconds = [(whole[at] / fps + whole[at + PAIR - 1] / fps) / 2 for at in range(0, len(whole), PAIR)]
        pairs = self._pairs(film, indices, wide, high, 0.0 if self.is_stamped else float(step))
        return PreparedVideo(tuple(pairs), tuple(seconds) if self.is_stamped else (), float(step))

    def _pairs(self, film: Film, indices: Sequence[int], wide: int, high: int, step: float) -> list[Prepared]:
        table = levels(self.scale, self.mean, self.deviation)
        rows, columns = high // self.side, wide // self.side
        found: list[Prepared] = []
        held: list[np.ndarray] = []
        digested = (self, rows, columns, step)
        last = len(indices) - 1
        for at, frame in enumerate(film.frames(indices)):
            held.append(cut(resized(frame, high, wide, self.resample), self.patch, self.merge, table))
            if at == last and len(held) < PAIR:
                held.append(held[0])
            if len(held) == PAIR:
                pixels, held = np.stack(held), []
                # Without texts the number of a pair is a position.
                digest = sha256(repr((*digested, 0 if self.is_stamped else len(found))).encode())
                digest.update(pixels.tobytes())
                found.append(Prepared(digest.digest(), rows * columns, pixels, (rows, columns)))
        return found

    def _indices(
        self, film: Film, sampling: Sampling, options: Mapping[str, Any], name: str, parameter: str
    ) -> list[int]:
        """Return the frames to read."""
        samples = film.samples
        if samples is None:
            samples = options.get("do_sample_frames")
        if samples is None:
            samples = film.is_file or (sampling.do_sample_frames and film.indices is None)
        if samples:
            rate = (film.fps or USUAL_FPS) * film.count / film.total
            found = (stamped_indices if self.is_stamped else paired_indices)(film.count, rate, sampling)
        else:
            found = list(range(film.count))
        if self.is_stamped and len(found) < PAIR:
            raise UserError(f"{name} has one frame, and a video has two or more; send an image.", parameter)
        return found

    def resized(self, width: int, height: int, count: int, name: str, parameter: str) -> tuple[int, int]:
        """Return the width and height of `count` frames after resizing: multiples of a token's side."""
        side = self.side
        if self.is_stamped and min(height, width) < side:
            factor = max(side / height, side / width)
            height, width = int(height * factor), int(width * factor)
        if max(height, width) > MOST_RATIO * min(height, width):
            raise UserError(f"{name}: one side of frames may be {MOST_RATIO} times the other.", parameter)
        most = self.most
        if self.caps and self.is_stamped:
            cap = min(self.cap_tokens * side * side, self.most // count)
            most = max(cap, int(self.fewest * 1.05)) * count
        elif self.caps:
            most = max(min(most, int(self.cap_tokens * side * side * 0.9) * PAIR // count), int(self.fewest * 1.05))
        wide, high = round(width / side) * side, round(height / side) * side
        frames, rounded = (count, round(count / PAIR) * PAIR) if self.is_stamped else (1, 1)
        area = frames * height * width
        if rounded * wide * high > most:
            factor = math.sqrt(area / most)
            wide, high = (max(side, math.floor(each / factor / side) * side) for each in (width, height))
        elif rounded * wide * high < self.fewest:
            factor = math.sqrt(self.fewest / area)
            wide, high = (math.ceil(each * factor / side) * side for each in (width, height))
        return wide, high


def check_used(options: Mapping[str, Any], num_videos: int) -> None:
    if options and not num_videos:
        raise UserError(f"{OPTIONS} choose frames of videos, and the request has none; leave them out.", OPTIONS)


def paired_indices(total: int, rate: float, sampling: Sampling) -> list[int]:
    """Return the frames that Qwen2-VL's processor chooses, an even number; one frame of one."""
    if total < PAIR:
        return [0]
    if sampling.num_frames is not None:
        count = min(max(PAIR, round(sampling.num_frames / PAIR) * PAIR), total)
    else:
        most = min(sampling.max_frames, total) // PAIR * PAIR
        asked = min(max(total / rate * (sampling.fps or FILE_FPS), sampling.min_frames), most, total)
        count = max(PAIR, math.floor(asked / PAIR) * PAIR)
    step = total / count
    places = np.arange(math.ceil(total / step), dtype=np.float64) * step
    return places.astype(np.float32).astype(np.int64).tolist()


def stamped_indices(total: int, rate: float, sampling: Sampling) -> list[int]:
    """Return the frames that Qwen3-VL's processor chooses."""
    count = sampling.num_frames
    if count is None:
        count = int(total / rate * (sampling.fps or FILE_FPS))
        count = min(max(count, sampling.min_frames), sampling.max_frames, total)
    return np.linspace(0, total - 1, count).round().astype(np.int64).tolist()


def read_videos(
    settings: Mapping[str, Any],
    *,
    placeholder: int,
    around: tuple[int, int],
    is_stamped: bool,
    rate: float,
    patch: int,
    merge: int,
) -> VideoProcessor:
    """Return the processor of video_preprocessor_config.json; raise UserError, naming the key, for unknown settings.

    The arguments are the model's.
    """
    own = Settings(settings, "video_preprocessor_config.json")
    known = "Qwen3VLVideoProcessor" if is_stamped else "Qwen2VLVideoProcessor"
    kind = str(own.take("video_processor_type", known)).removesuffix("Fast")
    if kind != known and not (kind == "Qwen2_5_VLVideoProcessor" and not is_stamped):
        raise own.error("video_processor_type", kind, f"only {known}")
    side = 32 if is_stamped else 28  # of the class's bounds
    for key, default, wanted in (
        ("patch_size", 16 if is_stamped else 14, patch),
        ("merge_size", 2, merge),
        ("temporal_patch_size", PAIR, PAIR),
    ):
        if own.take(key, default) != wanted:
            raise own.error(key, own.take(key, default), f"{wanted}, the model's,")
    if not own.switch("do_resize", True):
        raise own.error("do_resize", False, "only true")
    if own.switch("do_center_crop", False):
        raise own.error("do_center_crop", True, "only false")
    size = own.take("size", {})
    keys = {"shortest_edge": 128 * side**2, "longest_edge": 768 * side**2}
    if not isinstance(size, Mapping) or {key for key, value in size.items() if value is not None} - keys.keys():
        raise own.error("size", size, "shortest_edge and longest_edge, numbers of pixels,")
    fewest, most = (
        own.take(key, size.get(edge) or default)
        for key, (edge, default) in zip(("min_pixels", "max_pixels"), keys.items(), strict=True)
    )
    least = (patch * merge) ** 2
    if not (type(fewest) is type(most) is int and least <= most <= LARGEST and 1 <= fewest <= most):
        raise own.error("max_pixels", (fewest, most), f"from {least} to {LARGEST}, and at least min_pixels,")
    values = own.values(*((_EVEN, _EVEN) if is_stamped else CLIP_VALUES))
    if values["resample"] not in (2, 3):
        raise own.error("resample", values["resample"], "2 or 3")
    sampling = Sampling(
        do_sample_frames=is_stamped, fps=2 if is_stamped else None, num_frames=None, min_frames=4, max_frames=768
    )
    caps, tokens = (
        own.switch("cap_pixels_per_frame", False),
        own.take("max_video_tokens", 768 if is_stamped else 128000),
    )
    if type(tokens) is not int or not 1 <= tokens <= LARGEST:
        raise own.error("max_video_tokens", tokens, "a number of tokens")
    given = {name: own.take(name, None) for name in SAMPLING}
    own.finish(_UNREAD)
    return VideoProcessor(
        placeholder=placeholder,
        around=around,
        is_stamped=is_stamped,
        rate=rate,
        patch=patch,
        merge=merge,
        fewest=fewest,
        most=most,
        caps=caps,
        cap_tokens=tokens,
        sampling=sampling.replaced(given),
        **values,
    )
