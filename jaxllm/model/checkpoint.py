"""A folder of safetensors files as named, memory-mapped tensors, checked before anything is read.

Reads the format itself (an 8-byte length, a JSON header, the bytes; github.com/huggingface/safetensors, "Format"), so
that every fault names its file and tensor, and so that pages already copied can be given back: mapped pages count as
the process's memory until then. Knows no model and no JAX.
"""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxllm.errors import UserError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

_DTYPES: dict[str, np.dtype] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F64": np.dtype(np.float64),
}
_LONGEST_HEADER = 100_000_000  # bytes; the format's own limit


@dataclass(frozen=True)
class Tensor:
    """Where one tensor's bytes are. `dtype` is the format's own name; `start` counts from the file's first byte."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    num_bytes: int
    mapping: mmap.mmap

    def values(self) -> np.ndarray:
        """View the tensor in the mapped file; types other than 16, 32 and 64-bit floats are a UserError."""
        if self.dtype not in _DTYPES:
            raise UserError(
                f"{self.file.name}: tensor {self.name} has type {self.dtype}; only {', '.join(_DTYPES)} can be read "
                "(quantised checkpoints are not supported)."
            )
        count = math.prod(self.shape)
        return np.frombuffer(self.mapping, _DTYPES[self.dtype], count, self.start).reshape(self.shape)

    def release(self) -> None:
        """Give the tensor's pages back to the system; they are read again if needed."""
        if hasattr(mmap, "MADV_DONTNEED"):
            first = self.start // mmap.PAGESIZE * mmap.PAGESIZE
            self.mapping.madvise(mmap.MADV_DONTNEED, first, self.start + self.num_bytes - first)


def open_tensors(folder: Path) -> dict[str, Tensor]:
    """Map every safetensors file of a model and list its tensors by name.

    One `model.safetensors`, or the files that `model.safetensors.index.json` names. A missing or truncated file, a
    senseless header or an index that does not agree with its files is a UserError that names it.
    """
    if not (folder / INDEX).is_file():
        if not (folder / SINGLE).is_file():
            hint = " (convert its .bin files first)" if list(folder.glob("*.bin")) else ""
            raise UserError(f"{folder} holds neither {SINGLE} nor {INDEX}{hint}.", "model")
        return _read_file(folder / SINGLE)
    index = read_json(folder / INDEX)
    places = index.get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
        raise UserError(f"{folder / INDEX}: weight_map must name a file for each tensor.")
    tensors: dict[str, Tensor] = {}
    files = {file: _read_file(_inside(folder, file)) for file in sorted(set(places.values()))}
    for name, file in places.items():
        if name not in files[file]:
            raise UserError(f"{file}: tensor {name} is missing, though {INDEX} says it is there.")
        tensors[name] = files[file][name]
    for file, found in files.items():
        _refuse(set(found) - set(places), f"{file}: tensor {{}} is not in {INDEX}.")
    return tensors


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; a missing file or anything else in it is a UserError."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise UserError(f"{path.parent} has no {path.name}.", "model") from None
    except (ValueError, RecursionError, OSError) as error:
        raise UserError(f"{path} cannot be read: {error}.", "model") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} must hold a JSON object, not {type(value).__name__}.", "model")
    return value


def _inside(folder: Path, file: str) -> Path:
    if Path(file).name != file:
        raise UserError(f"{folder / INDEX}: {file!r} is not the name of a file in the folder.")
    return folder / file


def _refuse(names: Iterable[str], message: str) -> None:
    for name in sorted(names):
        raise UserError(message.format(name))


def _read_file(path: Path) -> dict[str, Tensor]:
    try:
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
        header = json.loads(mapping[8 : 8 + length])
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict):
        raise UserError(f"{path} is not a safetensors file: its header is not a JSON object.")
    header.pop("__metadata__", None)
    return {name: _tensor(path, name, entry, 8 + length, size, mapping) for name, entry in header.items()}


def _tensor(path: Path, name: str, entry: Any, base: int, size: int, mapping: mmap.mmap) -> Tensor:
    try:
        dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        if not all(isinstance(number, int) and number >= 0 for number in (*shape, begin, end)) or begin > end:
            raise ValueError
    except (KeyError, TypeError, ValueError):
        raise UserError(f"{path}: the header's entry for tensor {name} makes no sense.") from None
    if base + end > size:
        raise UserError(f"{path} is truncated: tensor {name} ends at byte {base + end} of {size}.")
    if dtype in _DTYPES and math.prod(shape) * _DTYPES[dtype].itemsize != end - begin:
        raise UserError(f"{path}: tensor {name} of shape {shape} and type {dtype} does not fill {end - begin} bytes.")
    return Tensor(name, path, dtype, shape, base + begin, end - begin, mapping)
