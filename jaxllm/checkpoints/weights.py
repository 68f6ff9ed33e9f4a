"""Load parameters from a folder or hub id onto devices, or make random ones.

Weights are copied piecewise, so that the peak of memory stays near their size.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import DTypeLike

from jaxllm.checkpoints import orbax_checkpoint
from jaxllm.checkpoints.files import read_object, reading_bar
from jaxllm.checkpoints.sources import Source, Sources, Store, open_sources
from jaxllm.checkpoints.stored_matrices import Matrix, Side
from jaxllm.embedded import SHIPPED
from jaxllm.errors import UserError
from jaxllm.families.families import Family
from jaxllm.model import decoder, quantized, stages
from jaxllm.model.decoder import Params, declare, with_schemes
from jaxllm.model.head import Head
from jaxllm.model.parameters import Part, Scheme, Weight
from jaxllm.model.quantized import Quantized, rounded, turned
from jaxllm.model.rows import in_order
from jaxllm.model.sharding import Layout
from jaxllm.model.spec import Spec

_TOKENIZER_FILES = ["*.json", "*.txt", "*.model", "*.jinja"]
_QUANTIZED_BYTES = 2**20  # at once: intermediates fit into a processor's cache


def resolve(model: str, revision: str | None = None, tokenizer_only: bool = False) -> Path:
    """Return a model's folder: one included in jaxllm, a local one, or the hub's, downloaded.

    The hub is queried for the newest commit of `revision`; without network the cached copy is used. Raises UserError on
    failure.
    """
    folder = SHIPPED.get(model) or Path(model).expanduser()
    if folder.is_dir():
        if revision is not None:
            raise UserError(f"{model} is a local folder, which has no revision {revision!r}; leave it out.", "revision")
        return folder
    if folder.exists():
        raise UserError(f"{model} is a file; give the folder that holds config.json and the weights.", "model")
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", model) or model.startswith("."):
        raise UserError(f"there is no folder {model}, and it is not the id of a hub repository (owner/name).", "model")
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return Path(
            huggingface_hub.snapshot_download(
                model,
                revision=revision,
                allow_patterns=_TOKENIZER_FILES if tokenizer_only else [*_TOKENIZER_FILES, "*.safetensors"],
                # Other formats; folders like 1_Pooling are parts of the model.
                ignore_patterns=["[!0-9]*/*", "?[!_]*/*", "consolidated*"],
            )
        )
    except (HfHubHTTPError, OSError, ValueError) as error:
        where = model if revision is None else f"{model} at revision {revision}"
        reasons = {
            "LocalEntryNotFoundError": "the hub cannot be reached, and its local cache does not hold it",
            "OfflineModeIsEnabled": "the hub is switched off (HF_HUB_OFFLINE), and its local cache does not hold it",
            "RepositoryNotFoundError": "the hub has no such repository, or it is private (log in with `hf auth login`)",
            "RevisionNotFoundError": "the hub's repository has no such revision",
            "GatedRepoError": "the hub requires its terms to be accepted (log in with `hf auth login`)",
        }
        kind = type(error).__name__
        reason = reasons.get(kind, f"{kind}: {' '.join(str(error).split()):.200}")
        raise UserError(f"no folder {model} is here, and {where} could not be had: {reason}.", "model") from None


def read_config(folder: Path) -> dict[str, Any]:
    config = read_object(folder, "config.json")
    if config is None:
        raise UserError(f"{folder} has no config.json.", "model")
    return config


def read_generation_config(folder: Path) -> dict[str, Any]:
    return read_object(folder, "generation_config.json") or {}


def check(folder: Path, spec: Spec, family: Family, layout: Layout, head: Head | None = None) -> None:
    """Raise UserError if the files are broken or lack the weights of `spec`; reads headers only."""
    decoder.check_shards(spec, layout)
    declared = _declare(spec, layout, None, head, family)
    if orbax_checkpoint.is_here(folder):
        orbax_checkpoint.check(folder, declared)
        return
    open_sources(folder, declared, family, head)


def load(
    folder: Path,
    spec: Spec,
    family: Family,
    layout: Layout,
    dtype: DTypeLike,
    progress: bool = False,
    quantization: str | None = None,
    head: Head | None = None,
) -> Params[Array]:
    """Read a checkpoint into arrays of `dtype`, or `Quantized` as declared, from the stored numbers.

    Raises UserError, before copying, for a missing, unexpected or misshapen tensor.
    """
    decoder.check_shards(spec, layout)
    declared = _declare(spec, layout, at_load(quantization, _is_cpu(layout)), head, family)
    if orbax_checkpoint.is_here(folder):
        return orbax_checkpoint.load(folder, declared, layout, dtype, progress)
    return read(declared, open_sources(folder, declared, family, head), layout, dtype, progress)


def read(
    declared: Params[Weight], sources: Sources, layout: Layout, dtype: DTypeLike, progress: bool = False
) -> Params[Array]:
    total = num_bytes(jax.tree.map(lambda weight: quantized.describe(weight, layout, dtype), declared))
    bar = reading_bar(total, progress)
    pending: Any = None

    def build(layer: int | None, name: str, weight: Weight) -> Any:
        nonlocal pending
        own = layout.of_layer(layer)
        if not own.is_here:
            return quantized.describe(weight, own, dtype)
        array = read_weight(weight, sources[layer, name], own, dtype)
        jax.block_until_ready(pending)  # at most two weights are in transfer
        pending = array
        bar.update(num_bytes(array))
        return array

    with bar:
        return jax.block_until_ready(_build(declared, layout, build))


def read_weight(weight: Weight, parts: tuple[tuple[Source, ...], ...], layout: Layout, dtype: DTypeLike) -> Any:
    """Return one weight: an array of `dtype`, or `Quantized` as declared."""
    if weight.scheme is None:
        return _load_side("floats", quantized.describe(weight, layout, dtype), weight, parts, layout)
    is_stored = isinstance(parts[0][0].tensor, Matrix)
    return _load_stored(weight, parts, layout) if is_stored else _load_rounded(weight, parts, layout)


@dataclass(frozen=True)
class StoredPart:
    """A view [out, in] (or [out]) of the mapped file, and its release; with a comb [runs, rows of one, in]."""

    values: np.ndarray
    release: Callable[[], None]


def stored_parts(
    folder: Path, spec: Spec, family: Family, head: Head | None = None
) -> dict[orbax_checkpoint.Name, StoredPart]:
    if family.stored is not None:
        raise UserError(f"{folder} is quantized already ({family.stored.method}), and read as it is.", "model")
    declared = declare(spec, head=head)
    sources = open_sources(folder, declared, family, head)
    return {
        (layer, name): StoredPart(source.whole(part), source.tensor.release)
        for layer, weights in [(None, declared.top), *enumerate(declared.layers)]
        for weight_name, weight in weights.items()
        for number, piece in enumerate(sources[layer, weight_name])
        for part, source in zip(weight.parts, piece, strict=True)
        for name in [part.name if weight.stack is None else f"{part.name}.{number}"]
    }


def abstract(
    spec: Spec,
    layout: Layout,
    dtype: DTypeLike,
    quantization: str | None = None,
    head: Head | None = None,
    family: Family | None = None,
) -> Params[jax.ShapeDtypeStruct]:
    """Describe the parameters (shapes, types, shardings) without allocating."""
    decoder.check_shards(spec, layout)
    declared = _declare(spec, layout, at_load(quantization, _is_cpu(layout)), head, family)
    described = jax.tree.map(lambda weight: quantized.describe(weight, layout, dtype), declared)
    return Params(described.top, stages.describe(described.layers, layout))


def declared_weights(
    spec: Spec, layout: Layout, quantization: str | None, head: Head | None, family: Family
) -> Params[Weight]:
    return _declare(spec, layout, at_load(quantization, _is_cpu(layout)), head, family)


def at_load(quantization: str | None, is_cpu: bool) -> Scheme | None:
    """Return the scheme that rounds matrices of a 16 or 32-bit checkpoint.

    With "int8" a CPU also rounds the multiplied rows, to sum integers; a GPU, bound by reading weights, would gain
    nothing. Published 4-bit checkpoints have groups of 128 columns.
    """
    schemes = {"int8": Scheme("int8", rounds_rows=is_cpu), "fp8": Scheme("float8"), "int4": Scheme("int4", 128)}
    return None if quantization is None else schemes[quantization]


def _is_cpu(layout: Layout) -> bool:
    return layout.devices[0].platform == "cpu"


def _declare(
    spec: Spec, layout: Layout, scheme: Scheme | None, head: Head | None, family: Family | None
) -> Params[Weight]:
    if family is None or family.stored is None:
        return declare(spec, layout, scheme, head)
    stored = family.stored

    def choose(layer: int | None, weight: Weight) -> Scheme | None:
        if not weight.is_product or weight.parts[0].name == "embed":
            return None
        modules = {
            name if name.startswith("lm_head") else family.prefix + name
            for part in weight.parts
            for expert in range(weight.stack or 1)
            for name in [family.tensors[part.name].format(layer, expert).removesuffix(".weight")]
        }
        covered = {module for module in modules if stored.covers(module)}
        if covered and covered != modules:
            raise UserError(
                f"config.json: quantization_config covers {min(covered)} but not {min(modules - covered)}, which are "
                "one matrix here; that is not supported.",
                "quantization_config",
            )
        return stored.scheme if covered else None

    return with_schemes(declare(spec, layout, head=head), choose, layout)


def num_bytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def load_random(
    spec: Spec,
    layout: Layout,
    dtype: DTypeLike,
    seed: int = 0,
    quantization: str | None = None,
    head: Head | None = None,
    family: Family | None = None,
) -> Params[Array]:
    """Return random parameters: standard deviation 0.02, norms neutral."""
    decoder.check_shards(spec, layout)
    return draw(_declare(spec, layout, at_load(quantization, _is_cpu(layout)), head, family), layout, dtype, seed)


def draw(declared: Params[Weight], layout: Layout, dtype: DTypeLike, seed: int = 0) -> Params[Array]:
    seeds = np.random.default_rng(seed)

    def build(layer: int | None, name: str, weight: Weight) -> Any:
        own, seed = layout.of_layer(layer), seeds.integers(2**32, dtype=np.uint32)
        if not own.is_here:
            return quantized.describe(weight, own, dtype)
        array = _random_maker(weight, weight.type_of(jnp.dtype(dtype)), own)(seed)
        return quantized.quantize(array, weight, own) if weight.scheme is not None else array

    return _build(declared, layout, build)


def _build(declared: Params[Weight], layout: Layout, build: Callable[[int | None, str, Weight], Any]) -> Params[Array]:
    top = {name: build(None, name, weight) for name, weight in declared.top.items()}
    layers = [
        {name: build(layer, name, weight) for name, weight in weights.items()}
        for layer, weights in enumerate(declared.layers)
    ]
    return Params(top, stages.join(layers, layout))


def _load_rounded(weight: Weight, sources: tuple[tuple[Source, ...], ...], layout: Layout) -> Quantized[Array]:
    """Read and quantize a matrix, each device's piece once: scales are kept until requested."""
    scheme = weight.scheme
    assert scheme is not None
    shapes = quantized.describe(weight, layout, np.float32)
    kept: dict[tuple[int, int], np.ndarray] = {}

    def place(index: tuple[slice, ...] | None, shape: tuple[int, ...], axes: tuple[str | None, ...]) -> tuple[int, int]:
        each = zip(index or (), shape, axes, strict=True)
        row, column = ((piece.start or 0) * layout.shards(axis) // length for piece, length, axis in each)
        return row, column

    def values(index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None
        bounds = [piece.indices(length) for piece, length in zip(index, weight.shape, strict=True)]
        rows, columns = (stop - start for start, stop, _ in bounds)
        out = _aligned((rows, shapes.values.sharding.shard_shape(shapes.values.shape)[1]), shapes.values.dtype)
        sizes = np.empty((rows, columns // (scheme.group or columns)), np.float32)

        def store(row: int, block: np.ndarray) -> None:
            step = max(1, _QUANTIZED_BYTES // (4 * columns))
            for start in range(0, len(block), step):
                some = slice(row + start, row + min(start + step, len(block)))
                out[some], sizes[some] = rounded(block[start : start + step].astype(np.float32), scheme, np)

        fill(store, "floats", weight.parts, sources[0], weight.shape, layout.shards(weight.axes[0]), index)
        kept[place(index, weight.shape, weight.axes)] = sizes.T
        return out

    def scales(index: tuple[slice, ...] | None) -> np.ndarray:
        piece, rows = place(index, shapes.scales.shape, turned(weight.axes))
        return kept[rows, piece]

    def packed_values(index: tuple[slice, ...] | None) -> np.ndarray:
        # With several values per byte the array is narrower, in equally many pieces.
        rows, of = index or (slice(None), slice(None))
        width = weight.shape[1] // shapes.values.shape[1]
        return values((rows, slice((of.start or 0) * width, (of.stop or shapes.values.shape[1]) * width)))

    made = jax.make_array_from_callback(shapes.values.shape, shapes.values.sharding, packed_values)
    made_scales = jax.make_array_from_callback(shapes.scales.shape, shapes.scales.sharding, scales)
    return Quantized(made, made_scales, scheme=scheme)


def _load_stored(weight: Weight, sources: tuple[tuple[Source, ...], ...], layout: Layout) -> Quantized[Array]:
    shapes = quantized.describe(weight, layout, np.float32)
    values = _load_side("values", shapes.values, weight, sources, layout)
    scales = _load_side("scales", shapes.scales, weight, sources, layout)
    zeros = None if shapes.zeros is None else _load_side("zeros", shapes.zeros, weight, sources, layout)
    return Quantized(values, scales, zeros, scheme=shapes.scheme)


def _load_side(
    side: Side, described: jax.ShapeDtypeStruct, weight: Weight, sources: tuple[tuple[Source, ...], ...], layout: Layout
) -> Array:
    """Read one of a weight's arrays onto the devices; scales and zeros are transposed, with groups as rows."""

    def read(index: tuple[slice, ...] | None) -> np.ndarray:
        if side in ("scales", "zeros"):
            own = turned(index or (slice(None),) * len(described.shape))
            return np.ascontiguousarray(np.swapaxes(read_rows(turned(described.shape), own), -1, -2))
        return read_rows(described.shape, index or ())

    def read_rows(shape: tuple[int, ...], index: tuple[slice, ...]) -> np.ndarray:
        bounds = [piece.indices(length) for piece, length in zip(index, shape, strict=True)]
        out = _aligned(tuple(stop - start for start, stop, _ in bounds), np.dtype(described.dtype))
        if weight.stack is None:
            one_shape, inner, pieces, found = shape, index, [out], sources
        else:  # the device's experts
            one_shape, inner, pieces, found = shape[1:], index[1:], out, sources[index[0]]
        for piece, parts in zip(pieces, found, strict=True):

            def store(row: int, block: np.ndarray, piece: np.ndarray = piece) -> None:
                piece[row : row + len(block)] = block

            fill(store, side, weight.parts, parts, one_shape, layout.shards(weight.axes_of_one[0]), inner)
        return out

    return jax.make_array_from_callback(described.shape, described.sharding, read)


def fill(
    store: Store,
    side: Side,
    parts: tuple[Part, ...],
    sources: tuple[Source, ...],
    shape: tuple[int, ...],
    shards: int,
    index: tuple[slice, ...],
) -> None:
    """Pass piece `index` of the `shape` that `parts` form, with rows in `shards`, to `store`."""
    filled = 0
    for number, first, count, padding in in_order(parts, shape[0], shards, index[0]):
        filled = sources[number].give(side, shape[-1], first, count, index[1:], store, filled)
        if padding:
            store(filled, np.zeros((padding, *shape[1:]), np.float32)[(slice(None), *index[1:])])
        filled += padding


def _aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Allocate an array aligned to 64 bytes, which XLA on a CPU uses without copying."""
    num_bytes = math.prod(shape) * dtype.itemsize
    buffer = np.empty(num_bytes + 64, np.uint8)
    start = -buffer.ctypes.data % 64
    return buffer[start : start + num_bytes].view(dtype).reshape(shape)


@functools.cache
def _random_maker(weight: Weight, dtype: np.dtype, layout: Layout) -> Callable[[np.uint32], Array]:
    def make(seed: Array) -> Array:
        if weight.initial != "normal":
            return jnp.full(weight.shape, weight.initial == "ones", dtype)
        # MurmurHash3's finalizer: 320 million values a second on two cores (jax.random.normal: 29 million), for any
        # sharding.
        bits = jnp.zeros(weight.shape, jnp.uint32)
        for dimension, length in enumerate(weight.shape):
            bits = bits * jnp.uint32(length) + lax.broadcasted_iota(jnp.uint32, weight.shape, dimension)
        bits = bits ^ seed
        for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
            bits = (bits ^ (bits >> shift)) * jnp.uint32(factor)
        bits = bits ^ (bits >> 16)
        uniform = lax.bitcast_convert_type(bits, jnp.int32).astype(jnp.float32) * 2.0**-31  # [-1, 1)
        return (uniform * (0.02 * math.sqrt(3))).astype(dtype)

    return jax.jit(make, out_shardings=layout.sharding(*weight.axes))
