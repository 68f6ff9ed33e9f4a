"""Read videos from callers, bounded before frames are decoded: files, frames in memory, and lists of JPEGs.

Animated GIF, WebP and PNG need Pillow, other files PyAV. Thread-safe; reading may take seconds.
"""

from __future__ import annotations

import io
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from jaxllm.errors import UserError
from jaxllm.media.decoders import RecordingProcess
from jaxllm.media.images import as_rgb, decode, pillow
from jaxllm.media.sizes import check_size

MOST_BYTES = 64 << 20  # of a file
MOST_FRAMES = 1 << 16  # of a file
MOST_DECODED = 1 << 32  # pixels of a file's frames together: some seconds
MOST_ANIMATED = 1 << 28  # of animations, which are read twice
MOST_CELLS = 1 << 12  # frames of animations
USUAL_FPS = 24.0  # of frames without a rate, as in transformers
_ANIMATION_FPS = 10.0  # if a file has no times
_SIGNATURES = ((0, b"GIF8", "GIF"), (0, b"\x89PNG", "PNG"), (8, b"WEBP", "WEBP"))
# By signature; demuxers that open further files or URLs are never tried.
_CONTAINERS = ((4, b"ftyp", "mov"), (0, b"\x1a\x45\xdf\xa3", "matroska"), (8, b"AVI ", "avi"))
_DAMAGED = "is not a video that can be read (MP4, WebM, Matroska, AVI, or an animated GIF, WebP or PNG), or is cut off."


@dataclass(kw_only=True)
class Film(ABC):
    """A video whose frames are not decoded yet."""

    is_file: ClassVar[bool]

    name: str  # in errors
    parameter: str
    size: tuple[int, int]  # width and height
    count: int  # frames
    total: int  # frames of the video from which they were taken
    fps: float | None  # of that video
    indices: Sequence[int] | None = None  # of the frames in it; None: all of them
    samples: bool | None = None  # whether to choose frames; None: as the request or the processor does

    @property
    def is_encoded(self) -> bool:
        """Return whether frames must be decoded."""
        return self.is_file

    @abstractmethod
    def frames(self, indices: Sequence[int]) -> Iterator[np.ndarray]:
        """Yield uint8[H, W, 3] of ascending, perhaps repeated indices; raise UserError if one cannot be read."""


@dataclass(kw_only=True)
class Still(Film):
    """Frames in memory: PIL images, arrays or image files."""

    is_file: ClassVar[bool] = False
    images: Sequence[Any]

    @property
    def is_encoded(self) -> bool:
        return isinstance(self.images[0], bytes)

    def frames(self, indices: Sequence[int]) -> Iterator[np.ndarray]:
        for index in indices:
            image = _rgb(self.images[index], f"{self.name}, frame {index}", self.parameter)
            if image.size != self.size:
                raise UserError(f"{self.name} has frames of different sizes; resize them to one.", self.parameter)
            yield np.asarray(image)


class _File(Film):
    """A file's film; subclasses read frames in order."""

    is_file: ClassVar[bool] = True

    def __init__(self, name: str, parameter: str, size: tuple[int, int], total: int, fps: float, most: int) -> None:
        _check_work(name, parameter, size, total, most)
        super().__init__(name=name, parameter=parameter, size=size, count=total, total=total, fps=fps)

    def frames(self, indices: Sequence[int]) -> Iterator[np.ndarray]:
        counts = Counter(indices)
        wanted = list(counts)
        try:
            for index, frame in zip(wanted, self._chosen(wanted), strict=True):
                for _ in range(counts[index]):
                    yield frame
        except (UserError, MemoryError):
            raise
        except Exception as error:
            raise UserError(f"{self.name} {_DAMAGED}", self.parameter) from error

    @abstractmethod
    def _chosen(self, indices: Sequence[int]) -> Iterator[np.ndarray]:
        """Yield the pixels of ascending, different indices."""


class _Animation(_File):
    def __init__(self, data: bytes, kind: str, name: str, parameter: str) -> None:
        self._data, self._kind = data, kind
        # Pillow counts a GIF's frames by reading them; each begins with these bytes, which others have by chance.
        if kind == "GIF" and data.count(b"\0,") > MOST_CELLS + len(data) // 4096:
            raise UserError(f"{name} has too many frames; an animation may have {MOST_CELLS}.", parameter)
        image = self._opened()
        total = int(getattr(image, "n_frames", 1))
        if total > MOST_CELLS:
            raise UserError(f"{name} has {total} frames; an animation may have {MOST_CELLS}.", parameter)
        super().__init__(name, parameter, image.size, total, _ANIMATION_FPS, MOST_ANIMATED)
        milliseconds = sum(float(each.info.get("duration") or 0) for each in self._decoded())
        if milliseconds > 0:
            self.fps = total * 1000 / milliseconds

    def _opened(self) -> Any:
        return pillow().open(io.BytesIO(self._data), formats=(self._kind,))

    def _decoded(self) -> Iterator[Any]:
        image = self._opened()
        for index in range(self.total):
            image.seek(index)
            image.load()
            yield image

    def _chosen(self, indices: Sequence[int]) -> Iterator[np.ndarray]:
        wanted = set(indices)
        for index, image in zip(range(indices[-1] + 1), self._decoded(), strict=False):
            if index in wanted:
                yield np.asarray(image.convert("RGB"))


class _Recording(_File):
    def __init__(self, data: bytes, kind: str, name: str, parameter: str) -> None:
        _library()
        self._given = (data, kind, MOST_FRAMES, name, parameter)
        self._read: RecordingProcess | None = RecordingProcess(*self._given)
        facts = self._read.facts
        (width, height), fps = facts["size"], facts["fps"]
        super().__init__(
            name, parameter, (width, height), facts["total"], fps if 0 < fps < 1e6 else USUAL_FPS, MOST_DECODED
        )

    def _chosen(self, indices: Sequence[int]) -> Iterator[np.ndarray]:
        process, self._read = self._read or RecordingProcess(*self._given), None
        try:
            for pixels in process.frames(indices):
                yield np.frombuffer(pixels, np.uint8).reshape(self.size[1], self.size[0], 3)
        finally:
            process.end()


def _library() -> Any:
    try:
        import av  # pyright: ignore[reportMissingImports]
    except (ImportError, OSError) as error:
        raise UserError(
            "Videos other than GIF, WebP and PNG need PyAV: pip install 'jaxllm[media]'.", "video"
        ) from error
    return av


def _check_work(name: str, parameter: str, size: tuple[int, int], total: int, most: int) -> None:
    check_size(size, name, parameter)
    if not 1 <= total <= MOST_FRAMES:
        raise UserError(f"{name} has {total} frames; a video may have {MOST_FRAMES}.", parameter)
    if total * size[0] * size[1] > most:
        raise UserError(
            f"{name} has {total} frames of {size[0]} × {size[1]} pixels; a video of its kind may have {most} pixels in "
            "all. Send a shorter or smaller one.",
            parameter,
        )


def _rgb(image: Any, name: str, parameter: str) -> Any:
    return as_rgb(decode(image, name, parameter) if isinstance(image, bytes) else image, name, parameter)


def is_recording(data: bytes) -> bool:
    return any(data.startswith(signature, at) for at, signature, _ in _CONTAINERS)


def read_film(data: bytes, name: str, parameter: str = "messages") -> Film:
    """Return a file's film; raise UserError, naming `name`, if it is invalid or too large."""
    if len(data) > MOST_BYTES:
        raise UserError(f"{name} has {len(data)} bytes; a video may have {MOST_BYTES}. Send a smaller one.", parameter)
    try:
        for at, signature, kind in _SIGNATURES:
            if data.startswith(signature, at):
                pillow()
                return _Animation(data, kind, name, parameter)
        for at, signature, kind in _CONTAINERS:
            if data.startswith(signature, at):
                return _Recording(data, kind, name, parameter)
    except (UserError, MemoryError):
        raise
    except Exception as error:
        raise UserError(f"{name} {_DAMAGED}", parameter) from error
    raise UserError(f"{name} {_DAMAGED}", parameter)


def read_stills(files: Sequence[bytes], name: str, parameter: str = "messages") -> Film:
    """Return a film of frames, each an image file."""
    if sum(map(len, files)) > MOST_BYTES:
        raise UserError(f"{name} is too large: a video may have {MOST_BYTES} bytes. Send a smaller one.", parameter)
    return _still(files, {"frames_indices": range(len(files))}, name, parameter)


def film_of(given: Any, name: str, parameter: str) -> Film:
    """Return the film of a caller's value: frames, (frames, metadata), or a file's bytes.

    Frames are uint8[T, H, W, 3] or a list of PIL images or arrays; metadata are those of vLLM: fps, total_num_frames,
    frames_indices, do_sample_frames.
    """
    if isinstance(given, bytes):
        return read_film(given, name, parameter)
    metadata: Mapping[str, Any] = {}
    if isinstance(given, tuple) and len(given) == 2 and isinstance(given[1], Mapping):
        given, metadata = given
    is_array = isinstance(given, np.ndarray) and given.ndim == 4
    if not is_array and not (isinstance(given, list | tuple) and given):
        raise UserError(
            f"{name} must be a uint8 array of frames, height, width and 3 channels, a list of images, or a file's "
            f"bytes, not {type(given).__name__}.",
            parameter,
        )
    return _still(list(given), metadata, name, parameter)


def _still(images: Sequence[Any], metadata: Mapping[str, Any], name: str, parameter: str) -> Still:
    if not 1 <= len(images) <= MOST_FRAMES:
        raise UserError(f"{name} has {len(images)} frames; a video may have 1 to {MOST_FRAMES}.", parameter)
    width, height = _rgb(images[0], f"{name}, frame 0", parameter).size
    if isinstance(images[0], bytes):
        _check_work(name, parameter, (width, height), len(images), MOST_ANIMATED)
    fps, indices, samples = (metadata.get(key) for key in ("fps", "frames_indices", "do_sample_frames"))
    total = metadata.get("total_num_frames")
    if fps is not None and not (type(fps) in (int, float) and 0 < fps <= 1e6):
        raise UserError(f"{name}: fps must be a number above 0, got {fps!r:.40}.", parameter)
    if not isinstance(samples, bool | None):
        raise UserError(f"{name}: do_sample_frames must be true or false, got {samples!r:.40}.", parameter)
    plain: list[int] | None = None
    if indices is not None:
        plain = [int(each) for each in indices if isinstance(each, int | np.integer) and 0 <= each < 1 << 31]
        if len(plain) != len(images):
            raise UserError(f"{name}: frames_indices must be {len(images)} numbers, one for each frame.", parameter)
        last = max(len(images), max(plain) + 1)
    else:
        last = len(images)
    if total is not None and not (type(total) is int and last <= total < 1 << 31 and (plain or total == last)):
        raise UserError(f"{name}: total_num_frames cannot be {total!r:.40}.", parameter)
    return Still(
        images=images,
        count=len(images),
        size=(width, height),
        total=total or last,
        indices=plain,
        fps=fps,
        samples=samples,
        name=name,
        parameter=parameter,
    )
