"""Read quantized matrices from checkpoints, piecewise, in the layout of `pallas_kernels.linear`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from jaxllm.checkpoints.checkpoint import Tensor
from jaxllm.errors import UserError
from jaxllm.families.stored_formats import StoredFormat
from pallas_kernels import Kind
from pallas_kernels.linear.numbers import PACKED, dequantized, packed

Side = Literal["floats", "values", "scales", "zeros"]

_SCALES = ("F32", "F16", "BF16", "F8_E8M0")
_AWQ_NIBBLES = np.asarray([0, 4, 1, 5, 2, 6, 3, 7])  # positions of columns in a word (AutoAWQ, "order_map")
# For activations and KV cache, which are not quantized.
_UNUSED = tuple(f".{what}_{kind}" for what in ("input", "output", "k", "v", "q") for kind in ("scale", "zero_point"))
_MAIN = {"packed": ".weight_packed", "plain": ".weight", "gptq": ".qweight", "awq": ".qweight", "mxfp4": "_blocks"}


@dataclass(frozen=True)
class View:
    """A matrix [rows, columns] computed piecewise on access."""

    shape: tuple[int, int]
    row_bytes: int
    read: Callable[[slice, slice], np.ndarray]


@dataclass(frozen=True)
class Matrix:
    """A quantized matrix [out, in], or stacked for E experts [E, out, in].

    `values` returns rows and columns, columns in stored elements; `scales` and `zeros` return [rows, G] for G stored
    groups of `group` columns.
    """

    name: str
    file: Path
    shape: tuple[int, ...]
    kind: Kind
    group: int
    tensors: tuple[Tensor, ...]
    values: Callable[[int | None, slice, slice], np.ndarray]
    scales: Callable[[int | None, np.ndarray], np.ndarray]
    zeros: Callable[[int | None, np.ndarray], np.ndarray] | None

    def view(self, side: Side, expert: int | None, groups: int) -> View:
        """Return a view of values, scales, zeros or floats; scales and zeros for `groups`, each within a stored one."""
        rows, columns = self.shape[-2:]
        if side == "floats":
            return View((rows, columns), 4 * columns, lambda some, of: self._floats(expert, some, of))
        if side == "values":
            width = columns // 2 if self.kind in PACKED else columns
            return View((rows, width), width, lambda some, of: self.values(expert, some, of))
        parts = self.scales if side == "scales" else self.zeros
        stored = np.arange(groups) * (columns // groups) // self.group

        def read(some: slice, of: slice) -> np.ndarray:
            assert parts is not None
            return parts(expert, _numbers(some, rows))[:, stored[of]]

        return View((rows, groups), 4 * groups, read)

    def _floats(self, expert: int | None, some: slice, of: slice) -> np.ndarray:
        columns = self.shape[-1]
        start, stop, _ = of.indices(columns)
        bounds = [bound // 2 if self.kind in PACKED else bound for bound in (start, stop)]
        numbers = _numbers(some, self.shape[-2])
        size = math.gcd(self.group, start, stop - start)
        stored = np.arange(start, stop, size) // self.group
        scales = self.scales(expert, numbers)[:, stored].T
        zeros = None if self.zeros is None else self.zeros(expert, numbers)[:, stored].T
        return dequantized(self.values(expert, some, slice(*bounds)), scales, zeros, self.kind, np.float32, np)

    def release(self) -> None:
        for tensor in self.tensors:
            tensor.release()


def collect(tensors: dict[str, Tensor], stored: StoredFormat) -> dict[str, Tensor | Matrix]:
    """Replace the tensors of each quantized matrix by one `Matrix` under its unquantized name; keep others.

    Raises UserError if a tensor is missing or misshapen.
    """
    end = _MAIN[stored.layout]
    found: dict[str, Tensor | Matrix] = {}
    used: set[str] = set()
    for name, tensor in tensors.items():
        if not name.endswith(end) or (
            stored.layout == "plain" and f"{name.removesuffix('weight')}{stored.scale}" not in tensors
        ):
            continue
        parts = _Tensors(tensors, name.removesuffix(end), stored, tensor, used)
        matrix = _LAYOUTS[stored.layout](parts)
        found[parts.stem if stored.layout == "mxfp4" else f"{parts.stem}.weight"] = matrix
    kept = {name: tensor for name, tensor in tensors.items() if name not in used and not name.endswith(_UNUSED)}
    return kept | found


class _Tensors:
    def __init__(
        self, tensors: dict[str, Tensor], stem: str, stored: StoredFormat, main: Tensor, used: set[str]
    ) -> None:
        self.stem, self.stored, self.main = stem, stored, main
        self._tensors, self._used = tensors, used
        self._own = {main.name: main}
        used.add(f"{stem}{_MAIN[stored.layout]}")

    def take(self, end: str) -> Tensor:
        name = f"{self.stem}{end}"
        if name not in self._tensors:
            raise UserError(f"{self.main.file.name}: tensor {self.main.name} lacks the tensor {name}.", "model")
        self._used.add(name)
        self._own[name] = self._tensors[name]
        return self._tensors[name]

    def has(self, end: str) -> bool:
        return f"{self.stem}{end}" in self._tensors

    def refuse(self, why: str, tensor: Tensor | None = None) -> UserError:
        tensor = tensor or self.main
        return UserError(f"{tensor.file.name}: tensor {tensor.name} {why}.", "model")

    def check(self, tensor: Tensor, *shapes: tuple[int, ...]) -> None:
        if tensor.shape not in shapes:
            wanted = " or ".join(str(list(shape)) for shape in shapes)
            raise self.refuse(
                f"has shape {list(tensor.shape)}, quantization_config and {self.main.name} say {wanted}", tensor
            )

    def groups(self, columns: int) -> tuple[int, int]:
        size = self.stored.scheme.group or columns
        return size, -(-columns // size)

    def matrix(self, shape: tuple[int, ...], values: Any, scales: Any, zeros: Any) -> Matrix:
        if shape[-1] % 2 or not math.prod(shape):
            raise self.refuse(f"makes a matrix {list(shape)}, of which two columns do not fill a byte")
        scheme = self.stored.scheme
        group, _ = self.groups(shape[-1])
        parts = tuple(self._own.values())
        return Matrix(
            self.main.name,
            self.main.file,
            shape,
            scheme.kind,
            group,
            parts,
            values,
            scales,
            zeros if scheme.has_zeros else None,
        )


def _numbers(rows: slice, count: int) -> np.ndarray:
    return np.arange(*rows.indices(count))


def _nibbles(words: np.ndarray, places: np.ndarray, bits: int) -> np.ndarray:
    """Unpack words into numbers, minus half the range."""
    numbers = (words.view(np.uint32) >> (bits * places).astype(np.uint32)) & np.uint32((1 << bits) - 1)
    return numbers.astype(np.int16) - np.int16(1 << (bits - 1))


def _bits(kind: Kind) -> int:
    return 4 if kind == "int4" else 8


def _signed(values: np.ndarray, kind: Kind) -> np.ndarray:
    """Convert bytes to the kernel's numbers: 8-bit ones are stored with an offset of 128."""
    return values if kind == "int4" else (values ^ np.uint8(0x80)).view(np.int8)


def _packed(parts: _Tensors) -> Matrix:
    """Read pack-quantized: words of adjacent columns, lowest bits first, as the kernel's."""
    kind = parts.stored.scheme.kind
    per_word = 32 // _bits(kind)
    words = parts.main.codes("I32")
    said = parts.take(".weight_shape")
    shape = tuple(said.integers().reshape(-1).tolist())
    if len(shape) != 2 or not all(0 < size <= 2**31 for size in shape):
        raise parts.refuse(f"says the shape {shape!s:.80}, which no matrix has", said)
    rows, columns = shape
    parts.check(parts.main, (rows, -(-columns // per_word)))
    bytes_ = words.view(np.uint8)
    _check_order(parts, ".weight_g_idx", columns)

    def values(expert: int | None, some: slice, of: slice) -> np.ndarray:
        return _signed(bytes_[some, of], kind)

    return parts.matrix((rows, columns), values, _scales(parts, rows, columns), _zeros(parts, rows, columns))


def _plain(parts: _Tensors) -> Matrix:
    kind = parts.stored.scheme.kind
    if len(parts.main.shape) != 2:
        raise parts.refuse(f"has shape {list(parts.main.shape)}, which no quantized matrix has")
    rows, columns = parts.main.shape
    numbers = parts.main.codes("F8_E4M3" if kind == "float8" else "I8")

    def values(expert: int | None, some: slice, of: slice) -> np.ndarray:
        if kind != "int4":
            return numbers[some, of]
        start, stop, _ = of.indices(columns // 2)
        return packed(numbers[some, 2 * start : 2 * stop] + np.int8(8), np)

    return parts.matrix((rows, columns), values, _scales(parts, rows, columns), _zeros(parts, rows, columns))


def _scales(parts: _Tensors, rows: int, columns: int) -> Callable[[int | None, np.ndarray], np.ndarray]:
    """Read compressed-tensors and fp8 scales: per group, row, block or matrix."""
    tensor, block = parts.take(f".{parts.stored.scale}"), parts.stored.block
    return _by_rows(parts, tensor, tensor.codes(*_SCALES), -(-rows // block), parts.groups(columns)[1], block)


def _by_rows(parts: _Tensors, tensor: Tensor, array: np.ndarray, rows: int, groups: int, block: int) -> Any:
    """Return a reader of an array [rows, groups], or a scalar, where `block` matrix rows share a row."""
    alone = ((), (1,), (1, 1)) if groups == 1 else ()
    parts.check(tensor, (rows, groups), *(((rows,),) if groups == 1 else ()), *alone)
    table = array.reshape(-1, groups)

    def read(expert: int | None, numbers: np.ndarray) -> np.ndarray:
        return table[numbers // block if len(table) == rows else np.zeros_like(numbers)].astype(np.float32)

    return read


def _zeros(parts: _Tensors, rows: int, columns: int) -> Any:
    """Read compressed-tensors zeros, plain or in words of adjacent rows."""
    if not parts.stored.scheme.has_zeros:
        if parts.has(".weight_zero_point"):
            parts.take(".weight_zero_point")  # zeros, stored by some writers
        return None
    tensor, (_, groups) = parts.take(".weight_zero_point"), parts.groups(columns)
    bits = _bits(parts.stored.scheme.kind)
    per_word = 32 // bits
    if not parts.stored.packs_zeros:
        return _by_rows(parts, tensor, tensor.codes("I8"), rows, groups, 1)
    words = tensor.codes("I32")
    parts.check(tensor, (-(-rows // per_word), groups))

    def read(expert: int | None, numbers: np.ndarray) -> np.ndarray:
        return _nibbles(words[numbers // per_word], (numbers % per_word)[:, None], bits)

    return read


def _check_order(parts: _Tensors, end: str, columns: int) -> None:
    if not parts.has(end):
        return
    order, (size, _) = parts.take(end), parts.groups(columns)
    parts.check(order, (columns,))
    numbers = order.integers()
    if np.array_equal(numbers, np.arange(columns) // size) or np.all(numbers == -1):
        return
    raise parts.refuse("puts columns in another order (desc_act, actorder), which is not supported", order)


def _gptq(parts: _Tensors) -> Matrix:
    """Read GPTQ: transposed words of adjacent columns; zeros in words of adjacent rows."""
    scheme, bits = parts.stored.scheme, _bits(parts.stored.scheme.kind)
    per_word = 32 // bits
    words = parts.main.codes("I32")
    if words.ndim != 2:
        raise parts.refuse(f"has shape {list(words.shape)}, which no quantized matrix has")
    rows, columns = words.shape[1], words.shape[0] * per_word
    scales = _transposed_scales(parts, rows, columns)
    _check_order(parts, ".g_idx", columns)
    tensor, (_, groups) = parts.take(".qzeros"), parts.groups(columns)
    stored = tensor.codes("I32")
    parts.check(tensor, (groups, -(-rows // per_word)))

    def values(expert: int | None, some: slice, of: slice) -> np.ndarray:
        start, stop, _ = of.indices(4 * len(words))
        turned = np.ascontiguousarray(words[start // 4 : -(-stop // 4), some].T).view(np.uint8)
        return _signed(turned[:, start % 4 : start % 4 + stop - start], scheme.kind)

    def zeros(expert: int | None, numbers: np.ndarray) -> np.ndarray:
        found = _nibbles(stored[:, numbers // per_word], numbers % per_word, bits)
        return (found + np.int16(parts.stored.zero_shift)).T

    if scheme.has_zeros:
        return parts.matrix((rows, columns), values, scales, zeros)

    def checked_scales(expert: int | None, numbers: np.ndarray) -> np.ndarray:
        if np.any(zeros(expert, numbers)):
            raise parts.refuse("has zeros, though quantization_config says that it is symmetric (sym)", tensor)
        return scales(expert, numbers)

    return parts.matrix((rows, columns), values, checked_scales, None)


def _awq(parts: _Tensors) -> Matrix:
    """Read AWQ: transposed words of adjacent rows, also zeros, in AutoAWQ's order."""
    words = parts.main.codes("I32")
    if words.ndim != 2:
        raise parts.refuse(f"has shape {list(words.shape)}, which no quantized matrix has")
    columns, rows = words.shape[0], words.shape[1] * 8
    scales = _transposed_scales(parts, rows, columns)
    tensor, (_, groups) = parts.take(".qzeros"), parts.groups(columns)
    stored = tensor.codes("I32")
    parts.check(tensor, (groups, rows // 8))

    def values(expert: int | None, some: slice, of: slice) -> np.ndarray:
        start, stop, _ = of.indices(columns // 2)
        numbers = _numbers(some, rows)
        found = _nibbles(words[2 * start : 2 * stop, numbers // 8], _AWQ_NIBBLES[numbers % 8], 4)
        return packed(found.T + np.int16(8), np)

    def zeros(expert: int | None, numbers: np.ndarray) -> np.ndarray:
        return _nibbles(stored[:, numbers // 8], _AWQ_NIBBLES[numbers % 8], 4).T

    return parts.matrix((rows, columns), values, scales, zeros)


def _transposed_scales(parts: _Tensors, rows: int, columns: int) -> Callable[[int | None, np.ndarray], np.ndarray]:
    tensor = parts.take(".scales")
    parts.check(tensor, (parts.groups(columns)[1], rows))
    array = tensor.codes(*_SCALES)
    return lambda expert, numbers: array[:, numbers].T.astype(np.float32)


def _mxfp4(parts: _Tensors) -> Matrix:
    """Read MXFP4: 32 numbers in 16 bytes, even ones in low halves, with a scale exponent."""
    if len(parts.main.shape) != 4 or parts.main.shape[3] != 16:
        raise parts.refuse(f"has shape {list(parts.main.shape)}, not [experts, rows, groups, 16]")
    experts, rows, groups, _ = parts.main.shape
    numbers = parts.main.codes("U8").reshape(experts, rows, groups * 16)
    exponents = parts.take("_scales")
    parts.check(exponents, (experts, rows, groups))
    scales = exponents.codes("U8").view(np.dtype("uint8"))

    def read(expert: int | None, some: np.ndarray) -> np.ndarray:
        found = scales[expert or 0, some].astype(np.int32)
        return np.where(found == 255, np.float32(np.nan), np.ldexp(np.float32(1), found - 127)).astype(np.float32)

    def values(expert: int | None, some: slice, of: slice) -> np.ndarray:
        return numbers[expert or 0, some, of]

    return parts.matrix((experts, rows, groups * 32), values, read, None)


_LAYOUTS: dict[str, Callable[[_Tensors], Matrix]] = {
    "packed": _packed,
    "plain": _plain,
    "gptq": _gptq,
    "awq": _awq,
    "mxfp4": _mxfp4,
}
