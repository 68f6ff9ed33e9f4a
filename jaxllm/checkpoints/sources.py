"""Locate the parts of weights in a checkpoint's tensors, and read their rows piecewise."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from jaxllm.checkpoints.checkpoint import Tensor, open_tensors
from jaxllm.checkpoints.stored_matrices import Matrix, Side, collect
from jaxllm.errors import UserError
from jaxllm.families.family import Family
from jaxllm.families.stored_formats import StoredFormat
from jaxllm.model.decoder import Params
from jaxllm.model.head import Head
from jaxllm.model.parameters import Part, Weight
from jaxllm.model.rows import Rows, in_tensors

_PIECE_BYTES = 32 * 2**20  # copied before pages are released

Store = Callable[[int, np.ndarray], None]  # takes the first row's number, and rows


@dataclass(frozen=True)
class Source:
    """The location of a part's rows: `at` of the [out, in] (or [out]) view of a tensor, or of its `expert`."""

    tensor: Tensor | Matrix
    at: Rows
    expert: int | None
    is_transposed: bool

    def view(self) -> np.ndarray:
        assert isinstance(self.tensor, Tensor)
        values = self.tensor.values()
        if self.expert is not None:
            values = values[self.expert]
        return values.T if self.is_transposed else values

    def whole(self, part: Part) -> np.ndarray:
        """Return a view of the part's rows; with a comb, of its runs of rows, [runs, rows of one, ...].

        Heads that alternate with another part's are copied.
        """
        values, comb = self.view(), self.at.comb
        if comb is None:
            return values[self.at.first : self.at.first + part.rows]
        teeth = values.reshape(-1, comb.period, *values.shape[1:])
        teeth = teeth[:, comb.first : comb.first + comb.length]
        return teeth if part.comb is not None else teeth.reshape(part.rows, *values.shape[1:])

    def give(
        self, side: Side, width: int, start: int, count: int, columns: tuple[slice, ...], store: Store, row: int
    ) -> int:
        """Pass `columns` of `count` rows from `start` to `store`, numbered from `row`; return the next row.

        A quantized matrix has `side`s, `width` columns wide. Releases the pages read.
        """
        for rows in self.at.slices(start, count):
            if isinstance(self.tensor, Matrix):
                view = self.tensor.view(side, self.expert, width)
                for some in _steps(rows, view.row_bytes):
                    store(row, block := view.read(some, *columns))
                    row += len(block)
                    self.tensor.release()
            else:
                give_columns(source := self.view()[(rows, *columns)], row, store, self.tensor)
                row += len(source)
        return row


def _steps(rows: slice, row_bytes: int) -> Iterator[slice]:
    step, count, each = rows.step or 1, len(range(rows.start, rows.stop, rows.step or 1)), _PIECE_BYTES // row_bytes
    for start in range(0, count, max(1, each)):
        first, last = rows.start + start * step, rows.start + (min(start + max(1, each), count) - 1) * step
        yield slice(first, last + 1, step)


def give_columns(source: np.ndarray, row: int, store: Store, tensor: Tensor) -> None:
    """Pass `source`, a view of `tensor`, to `store` from `row` on; release its pages."""
    rows = len(source)
    if source.flags.c_contiguous and source.size:  # a row of a transposed tensor is on all its pages
        rows = max(1, _PIECE_BYTES * len(source) // source.nbytes)
    for start in range(0, len(source), max(1, rows)):
        store(row + start, source[start : start + rows])
        tensor.release()


# By weight: the parts of each piece along axis 0 (one unless experts are stacked).
Sources = dict[tuple[int | None, str], tuple[tuple[Source, ...], ...]]


def open_sources(folder: Path, declared: Params[Weight], family: Family, head: Head | None) -> Sources:
    """Return the tensors of every weight; raise UserError for missing, misshapen or unexpected ones."""
    tensors = {usual_name(name, family): tensor for name, tensor in open_tensors(folder).items()}
    if head is not None:
        for path in {name.rpartition("/")[0] for name in head.tensors().values()} - {""}:
            tensors |= {f"{path}/{name}": tensor for name, tensor in open_tensors(folder, path).items()}
    found = tensors if family.stored is None else collect(tensors, family.stored)
    return find_sources(declared, with_head(family, head), found)


def find_sources(declared: Params[Weight], family: Family, tensors: Mapping[str, Tensor | Matrix]) -> Sources:
    sources: Sources = {}
    used: set[str] = set()
    for (layer, name), weight in by_name(declared).items():
        names, sources[layer, name] = find_pieces(weight, family, tensors, layer)
        used.update(names)
    for name in sorted(set(tensors) - used):
        if not is_unread(name, declared, family):
            raise UserError(
                f"{tensors[name].file.name}: tensor {tensors[name].name} is not part of the model that config.json "
                "describes; the two do not belong together.",
                "model",
            )
    return sources


def by_name(declared: Params[Weight]) -> dict[tuple[int | None, str], Weight]:
    layers = [(None, declared.top), *enumerate(declared.layers)]
    return {(layer, name): weight for layer, weights in layers for name, weight in weights.items()}


def is_unread(name: str, declared: Params[Weight], family: Family) -> bool:
    """Return whether a checkpoint may have this tensor, which no weight consists of."""
    # May be stored as a copy of a tied embedding.
    is_copy = "head" not in declared.top and name == family.tensors["head"]
    is_behind = family.has_layers_behind and name.startswith(f"layers.{len(declared.layers)}.")
    return is_copy or is_behind or name.endswith(family.ignored) or name.startswith(family.heads)


def find_pieces(
    weight: Weight, family: Family, tensors: Mapping[str, Tensor | Matrix], layer: int | None
) -> tuple[list[str], tuple[tuple[Source, ...], ...]]:
    """Return the names of a weight's tensors, and its entry of `Sources`."""
    names: list[str] = []
    pieces: list[tuple[Source, ...]] = []
    for expert in [None] if weight.stack is None else range(weight.stack):
        own, found = _find_parts(weight, family, tensors, layer, expert)
        names += own
        pieces.append(found)
    return names, tuple(pieces)


def shapes_of(weight: Weight, family: Family, layer: int | None) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a weight's tensors in an unquantized checkpoint."""
    shapes: dict[str, tuple[int, ...]] = {}
    for expert in [None] if weight.stack is None else range(weight.stack):
        patterns = [family.tensors[part.name] for part in weight.parts]
        names = [pattern.format(layer, expert) for pattern in patterns]
        _, rows = in_tensors(weight.parts, names, family.alternating)
        for part, pattern, name in zip(weight.parts, patterns, names, strict=True):
            shape = (rows[name], *weight.one[1:])
            shape = shape[::-1] if part.name in family.transposed else shape
            holds_all = expert is not None and pattern.count("{}") == 1
            shapes[name] = (weight.stack or 0, *shape) if holds_all else shape
    return shapes


def usual_name(name: str, family: Family) -> str:
    """Return a tensor's name without the family's prefix, and with "weight" and "bias" for early names."""
    name = family.usual(name)
    # Names of early transformers checkpoints.
    return name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")


def with_head(family: Family, head: Head | None) -> Family:
    return family if head is None else replace(family, tensors={**family.tensors, **head.tensors()})


def _find_parts(
    weight: Weight, family: Family, tensors: Mapping[str, Tensor | Matrix], layer: int | None, expert: int | None
) -> tuple[list[str], tuple[Source, ...]]:
    patterns = [family.tensors[part.name] for part in weight.parts]
    names = [pattern.format(layer, expert) for pattern in patterns]
    for name in names:
        if name not in tensors:
            raise UserError(f"the checkpoint has no tensor {name} (nor one with {family.prefix!r} before it).", "model")
    places, rows = in_tensors(weight.parts, names, family.alternating)
    found = []
    for part, pattern, name, at in zip(weight.parts, patterns, names, places, strict=True):
        which = expert if pattern.count("{}") == 1 else None  # the tensor has all experts
        is_transposed = part.name in family.transposed and isinstance(tensors[name], Tensor)
        found.append(Source(tensors[name], at, which, is_transposed))
    for source, name in zip(found, names, strict=True):
        shape = (rows[name], *weight.one[1:])
        shape = shape[::-1] if source.is_transposed else shape
        _check_type(weight, source.tensor, family.stored, name)
        _check_shape(source.tensor, shape if source.expert is None else (weight.stack or 0, *shape))
        if family.stored is not None and weight.is_product:
            _check_scheme(weight, source.tensor, family.stored, name)
    return names, tuple(found)


def _check_shape(tensor: Tensor | Matrix, shape: tuple[int, ...]) -> None:
    if tensor.shape != shape:
        raise UserError(
            f"{tensor.file.name}: tensor {tensor.name} has shape {list(tensor.shape)}, config.json says {list(shape)}.",
            "model",
        )
    if isinstance(tensor, Tensor):
        tensor.values()  # raises for an unsupported type


def _check_type(weight: Weight, tensor: Tensor | Matrix, stored: StoredFormat | None, name: str) -> None:
    if isinstance(tensor, Matrix) or tensor.is_float:
        return
    if stored is None:
        why = "config.json has no quantization_config that says how it is quantized"
    elif weight.scheme is not None:
        scales = f"{name.removesuffix('weight')}{stored.scale}" if stored.layout == "plain" else "its scales"
        why = f"the checkpoint lacks {scales}, without which a matrix of {stored.method} cannot be read"
    elif stored.leaves_out(name.removesuffix(".weight")):
        why = f"quantization_config in config.json ({stored.method}) leaves it out"
    else:
        why = f"of {stored.method} it is read unquantized only"
    raise UserError(f"{tensor.file.name}: tensor {tensor.name} has type {tensor.dtype}, but {why}.", "model")


def _check_scheme(weight: Weight, tensor: Tensor | Matrix, stored: StoredFormat, name: str) -> None:
    if isinstance(tensor, Matrix) == (weight.scheme is not None):
        return
    fault = "is quantized" if isinstance(tensor, Matrix) else "is not quantized"
    why = "quantization_config in config.json says the opposite"
    if isinstance(tensor, Matrix) and not stored.leaves_out(name.removesuffix(".weight")):
        why = f"but of {stored.method} it is read unquantized only"
    raise UserError(f"{tensor.file.name}: tensor {tensor.name} {fault}, {why}.", "quantization_config")
