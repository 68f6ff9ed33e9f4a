"""Safetensors files as named, memory-mapped tensors, validated before any is read.

The format (github.com/huggingface/safetensors, "Format") is parsed here, so that errors name file and tensor, and
copied pages, which count as process memory, can be released.
"""

from __future__ import annotations

import math
import mmap
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxllm.checkpoints.files import inside, parse_object, read_object
from jaxllm.errors import UserError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

FLOATS: dict[str, np.dtype] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F64": np.dtype(np.float64),
}
_INTEGERS: dict[str, np.dtype] = {"I64": np.dtype(np.int64), "I32": np.dtype(np.int32)}
# Types of quantized matrices besides floats.
_CODES: dict[str, np.dtype] = {
    **{"I32": np.dtype(np.int32), "I8": np.dtype(np.int8), "U8": np.dtype(np.uint8)},
    **{"F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn), "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu)},
}
# Per element of each type of the format.
_BITS: dict[str, int] = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("BOOL", "I8", "U8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
_LONGEST_HEADER = 100_000_000  # the format's limit
_LARGEST = 2**48  # of a size, and of the product of nonzero sizes; numpy refuses larger arrays
_MOST_AXES = 32
_FILE_NAME = re.compile(r"\w[\w.+-]{0,200}\.safetensors", re.ASCII)


@dataclass(frozen=True)
class Tensor:
    """The location of a tensor. `dtype` is the format's name; `start` counts from the start of the file."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    num_bytes: int
    mapping: mmap.mmap

    def values(self) -> np.ndarray:
        """Return a view of a tensor's floats; raise UserError for another type."""
        if self.dtype not in FLOATS:
            raise UserError(
                f"{self.file.name}: tensor {self.name} has type {self.dtype}; only {', '.join(FLOATS)} can be read."
            )
        return self._view(FLOATS[self.dtype])

    def integers(self) -> np.ndarray:
        if self.dtype not in _INTEGERS:
            raise UserError(
                f"{self.file.name}: tensor {self.name} has type {self.dtype}, not one of {', '.join(_INTEGERS)}."
            )
        return self._view(_INTEGERS[self.dtype])

    def codes(self, *types: str) -> np.ndarray:
        if self.dtype not in types:
            raise UserError(f"{self.file.name}: tensor {self.name} has type {self.dtype}, not {' or '.join(types)}.")
        return self._view((FLOATS | _CODES)[self.dtype])

    @property
    def is_float(self) -> bool:
        return self.dtype in FLOATS

    def raw(self) -> np.ndarray:
        return np.frombuffer(self.mapping, np.uint8, self.num_bytes, self.start)

    def _view(self, dtype: np.dtype) -> np.ndarray:
        return np.frombuffer(self.mapping, dtype, math.prod(self.shape), self.start).reshape(self.shape)

    def release(self) -> None:
        """Release the tensor's pages; they are read again if needed."""
        if hasattr(mmap, "MADV_DONTNEED"):
            first = self.start // mmap.PAGESIZE * mmap.PAGESIZE
            self.mapping.madvise(mmap.MADV_DONTNEED, first, self.start + self.num_bytes - first)


def open_tensors(folder: Path, part: str = "") -> dict[str, Tensor]:
    """Map all safetensors files of a model, or of its sub-folder `part`; raise UserError, naming an invalid file."""
    if part or not (folder / INDEX).is_file():
        place = folder / part
        if not (place / SINGLE).is_file():
            raise UserError(f"{place} holds neither {SINGLE} nor {INDEX}{never_read(place)}.", "model")
        return read_file(folder, (Path(part) / SINGLE).as_posix())
    index = read_object(folder, INDEX) or {}
    places = index.get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
        raise UserError(f"{folder / INDEX}: weight_map must name a file for each tensor.")
    for file in set(places.values()):
        if not _FILE_NAME.fullmatch(file):
            raise UserError(f"{folder / INDEX}: {file!r} is not the name of a safetensors file in the folder.")
    tensors: dict[str, Tensor] = {}
    files = {file: read_file(folder, file) for file in sorted(set(places.values()))}
    for name, file in places.items():
        if name not in files[file]:
            raise UserError(f"{file}: tensor {name} is missing, though {INDEX} says it is there.")
        tensors[name] = files[file][name]
    for file, found in files.items():
        _refuse(set(found) - set(places), f"{file}: tensor {{}} is not in {INDEX}.")
    return tensors


def never_read(folder: Path) -> str:
    """Return a hint that names a pickle file in the folder, or ""."""
    others = [path.name for kind in ("bin", "pt", "pth", "pkl", "ckpt") for path in folder.glob(f"*.{kind}")]
    if not others:
        return ""
    return f" ({min(others)} is never read, since to read such a file runs its code: convert it to safetensors first)"


def _refuse(names: Iterable[str], message: str) -> None:
    for name in sorted(names):
        raise UserError(message.format(name))


def read_file(folder: Path, file: str) -> dict[str, Tensor]:
    path = inside(folder, file)
    try:
        if not path.is_file():
            raise UserError(f"{path} cannot be read: there is no such file.")
        with path.open("rb") as stream:
            size = path.stat().st_size
            if size < 8:
                raise UserError(f"{path} is truncated: {size} bytes are not even a header.")
            mapping = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from None
    length = int.from_bytes(mapping[:8], "little")
    if length > _LONGEST_HEADER:
        raise UserError(f"{path} is not a safetensors file: its header would have {length} bytes.")
    if 8 + length > size:
        raise UserError(f"{path} is truncated: its header has {length} bytes, the whole file {size}.")
    try:
        header = parse_object(mapping[8 : 8 + length])
    except ValueError as error:
        raise UserError(f"{path} is not a safetensors file: its header {error}.") from None
    notes = header.pop("__metadata__", {})
    texts = [text for pair in notes.items() for text in pair] if isinstance(notes, dict) else [None]
    if not all(isinstance(text, str) and _is_unicode(text) for text in texts):
        raise UserError(f"{path}: the header's __metadata__ must be texts by name.")
    tensors = {name: _tensor(path, name, entry, 8 + length, size, mapping) for name, entry in header.items()}
    _check_layout(path, tensors.values(), 8 + length, size)
    return tensors


def _is_unicode(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _tensor(path: Path, name: str, entry: Any, base: int, size: int, mapping: mmap.mmap) -> Tensor:
    try:
        name.encode()
        if not isinstance(entry["shape"], list) or not isinstance(entry["data_offsets"], list):
            raise ValueError
        dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        if not all(type(number) is int and 0 <= number <= _LARGEST for number in (*shape, begin, end)) or begin > end:
            raise ValueError
        if not isinstance(dtype, str) or len(shape) > _MOST_AXES or math.prod(filter(None, shape)) > _LARGEST:
            raise ValueError
    except (KeyError, TypeError, ValueError):
        raise UserError(f"{path}: the header's entry for tensor {name} makes no sense.") from None
    if base + end > size:
        raise UserError(f"{path} is truncated: tensor {name} ends at byte {base + end} of {size}.")
    if dtype not in _BITS:
        raise UserError(f"{path}: tensor {name} has type {dtype:.32}, which is not one of {', '.join(_BITS)}.")
    if math.prod(shape) * _BITS[dtype] != 8 * (end - begin):
        raise UserError(f"{path}: tensor {name} of shape {shape} and type {dtype} does not fill {end - begin} bytes.")
    return Tensor(name, path, dtype, shape, base + begin, end - begin, mapping)


def _check_layout(path: Path, tensors: Iterable[Tensor], base: int, size: int) -> None:
    """Refuse overlapping tensors and unused bytes, as the format specifies."""
    place = base
    for tensor in sorted(tensors, key=lambda tensor: (tensor.start, tensor.num_bytes)):
        if tensor.start != place:
            fault = "shares bytes with another" if tensor.start < place else "begins behind bytes that belong to none"
            raise UserError(f"{path}: tensor {tensor.name} {fault}.")
        place += tensor.num_bytes
    if place != size:
        raise UserError(f"{path}: the last {size - place} bytes belong to no tensor.")
