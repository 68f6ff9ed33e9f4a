"""From a folder or a hub id to the decoder's parameters on their devices, or random ones of the same shapes.

Streams: one weight at a time is copied out of the mapped file, piece by piece, into the memory its array keeps, so
that the peak stays near the size of the weights. Knows which tensors a family stores, but no family by name.
"""

from __future__ import annotations

import functools
import math
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh
from jax.typing import DTypeLike
from tqdm import tqdm

from jaxllm.errors import UserError
from jaxllm.model import orbax_checkpoint
from jaxllm.model.checkpoint import Tensor, open_tensors, read_json
from jaxllm.model.decoder import Leaf, Params, Weight, declare
from jaxllm.model.families import Family
from jaxllm.model.spec import Spec
from jaxllm.sharding import SPLIT_AXES, named

_TOKENIZER_FILES = ["*.json", "*.txt", "*.model", "*.jinja"]
_PIECE_BYTES = 32 * 2**20  # copied before the pages read are given back


def resolve(model: str, revision: str | None = None, tokenizer_only: bool = False) -> Path:
    """Find the folder of a model: a local one as it is, else the hub's repository of that id, downloaded if need be.

    The hub is asked for the newest commit of `revision`; without a network the local copy serves. Files already here
    are not fetched again. Whatever goes wrong is a UserError of one line.
    """
    folder = Path(model).expanduser()
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
                ignore_patterns=["*/*", "consolidated*"],  # other formats of the same weights
            )
        )
    except (HfHubHTTPError, OSError, ValueError) as error:
        where = model if revision is None else f"{model} at revision {revision}"
        reasons = {
            "LocalEntryNotFoundError": "the hub cannot be reached, and its local cache does not hold it",
            "OfflineModeIsEnabled": "the hub is switched off (HF_HUB_OFFLINE), and its local cache does not hold it",
            "RepositoryNotFoundError": "the hub has no such repository, or it is private (log in with `hf auth login`)",
            "RevisionNotFoundError": "the hub's repository has no such revision",
            "GatedRepoError": "the hub gives it only to those who accepted its terms (log in with `hf auth login`)",
        }
        kind = type(error).__name__
        reason = reasons.get(kind, f"{kind}: {' '.join(str(error).split()):.200}")
        raise UserError(f"no folder {model} is here, and {where} could not be had: {reason}.", "model") from None


def read_config(folder: Path) -> dict[str, Any]:
    """Read a model's config.json; a missing one is a UserError."""
    return read_json(folder / "config.json")


def read_generation_config(folder: Path) -> dict[str, Any]:
    """Read a model's generation_config.json; empty where there is none."""
    path = folder / "generation_config.json"
    return read_json(path) if path.is_file() else {}


def check_shards(spec: Spec, shards: int) -> None:
    """Refuse a number of devices over which the model cannot be divided evenly."""
    heads_divide = spec.num_kv_heads % shards == 0 or shards % spec.num_kv_heads == 0
    for name, count, divides in (
        ("attention heads", spec.num_heads, spec.num_heads % shards == 0),
        ("key-value heads", spec.num_kv_heads, heads_divide),
        ("feed-forward columns", spec.ffn_width, spec.ffn_width % shards == 0),
    ):
        if not divides:
            raise UserError(
                f"tensor_parallel_size {shards} does not divide the model's {count} {name}.", "tensor_parallel_size"
            )


def check(folder: Path, spec: Spec, family: Family, shards: int) -> None:
    """Refuse a checkpoint whose files are broken or do not hold the weights of `spec`; reads headers only."""
    check_shards(spec, shards)
    if orbax_checkpoint.is_here(folder):
        orbax_checkpoint.check(folder, declare(spec, shards))
        return
    _find_sources(declare(spec, shards), family, _by_name(open_tensors(folder), family))


def load(
    folder: Path, spec: Spec, family: Family, mesh: Mesh, dtype: DTypeLike, progress: bool = False
) -> Params[Array]:
    """Read a checkpoint into arrays of `dtype`, laid out over `mesh` as `decoder.declare` says.

    Every tensor is looked up and its shape checked before the first byte is copied: a missing, unexpected or misshapen
    one is a UserError that names it.
    """
    shards = mesh.devices.size
    check_shards(spec, shards)
    declared = declare(spec, shards)
    if orbax_checkpoint.is_here(folder):
        return orbax_checkpoint.load(folder, declared, mesh, dtype, progress)
    tensors = _by_name(open_tensors(folder), family)
    sources = _find_sources(declared, family, tensors)
    total = sum(math.prod(weight.shape) for weight in jax.tree.leaves(declared)) * jnp.dtype(dtype).itemsize
    bar = tqdm(total=total, unit="B", unit_scale=True, unit_divisor=1024, desc="weights", disable=not progress)
    pending: Array | None = None

    def build(layer: int | None, name: str, weight: Weight) -> Array:
        nonlocal pending

        def read(index: tuple[slice, ...] | None) -> np.ndarray:
            return _read(weight, sources[layer, name], shards, jnp.dtype(dtype), index or ())

        array = jax.make_array_from_callback(weight.shape, named(mesh, weight.axes), read)
        if pending is not None:
            pending.block_until_ready()  # so that at most two weights are on their way to a device
        pending = array
        bar.update(array.nbytes)
        return array

    with bar:
        return jax.block_until_ready(_build(declared, build))


@dataclass(frozen=True)
class StoredPart:
    """One part of a weight as it is stored: a view [out, in] (or [out]) of the mapped file, and how to let it go."""

    values: np.ndarray
    release: Callable[[], None]


def stored_parts(folder: Path, spec: Spec, family: Family) -> dict[orbax_checkpoint.Name, StoredPart]:
    """Look up every part of every weight in a safetensors checkpoint, by layer and name; refuses what `load` does."""
    declared = declare(spec, 1)
    sources = _find_sources(declared, family, _by_name(open_tensors(folder), family))
    return {
        (layer, part.name): StoredPart(source.rows()[: part.rows], source.tensor.release)
        for layer, weights in [(None, declared.top), *enumerate(declared.layers)]
        for name, weight in weights.items()
        for part, source in zip(weight.parts, sources[layer, name], strict=True)
    }


def abstract(spec: Spec, mesh: Mesh, dtype: DTypeLike) -> Params[jax.ShapeDtypeStruct]:
    """Describe the parameters, shapes, type and shardings, with nothing allocated: what programs are compiled for."""
    shards = mesh.devices.size
    check_shards(spec, shards)

    def build(_layer: int | None, _name: str, weight: Weight) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(weight.shape, jnp.dtype(dtype), sharding=named(mesh, weight.axes))

    return _build(declare(spec, shards), build)


def load_random(spec: Spec, mesh: Mesh, dtype: DTypeLike, seed: int = 0) -> Params[Array]:
    """Make parameters of the right shapes without a checkpoint: deviation 0.02, norms neutral."""
    shards = mesh.devices.size
    check_shards(spec, shards)
    seeds = np.random.default_rng(seed)

    def build(layer: int | None, name: str, weight: Weight) -> Array:
        return _random_maker(weight, jnp.dtype(dtype), mesh)(seeds.integers(2**32, dtype=np.uint32))

    return _build(declare(spec, shards), build)


def _build(declared: Params[Weight], build: Callable[[int | None, str, Weight], Leaf]) -> Params[Leaf]:
    """Make every declared weight, in order, with `build(layer, name, weight)`."""
    return Params(
        {name: build(None, name, weight) for name, weight in declared.top.items()},
        tuple(
            {name: build(layer, name, weight) for name, weight in weights.items()}
            for layer, weights in enumerate(declared.layers)
        ),
    )


@dataclass(frozen=True)
class _Source:
    """Where the rows of one part are: in the [out, in] (or [out]) view of a tensor, from row `first` on."""

    tensor: Tensor
    first: int
    is_transposed: bool

    def rows(self) -> np.ndarray:
        values = self.tensor.values()
        return (values.T if self.is_transposed else values)[self.first :]


Sources = dict[tuple[int | None, str], tuple[_Source, ...]]


def _by_name(tensors: dict[str, Tensor], family: Family) -> dict[str, Tensor]:
    """Drop the family's prefix: a checkpoint saved from the bare model, without the head, lacks it."""
    return {name.removeprefix(family.prefix): tensor for name, tensor in tensors.items()}


def _find_sources(declared: Params[Weight], family: Family, tensors: dict[str, Tensor]) -> Sources:
    """Look up the tensors behind every weight; refuse missing, misshapen and unexpected ones."""
    sources: Sources = {}
    used: set[str] = set()
    for layer, weights in [(None, declared.top), *enumerate(declared.layers)]:
        for name, weight in weights.items():
            names = [family.tensors[part.name].format(layer) for part in weight.parts]
            is_transposed = family.is_transposed and layer is not None and len(weight.shape) == 2
            rows: Counter[str] = Counter()  # found so far in each tensor
            found = []
            for part, tensor_name in zip(weight.parts, names, strict=True):
                if tensor_name not in tensors:
                    raise UserError(
                        f"the checkpoint has no tensor {tensor_name} (nor one with {family.prefix!r} before it).",
                        "model",
                    )
                found.append(_Source(tensors[tensor_name], rows[tensor_name], is_transposed))
                rows[tensor_name] += part.rows
            for tensor_name, count in rows.items():
                _check_shape(tensors[tensor_name], (count, *weight.shape[1:]), is_transposed)
            sources[layer, name] = tuple(found)
            used.update(names)
    # A head stored beside the embedding that it is tied to is a copy of it.
    copies = set() if "head" in declared.top else {family.tensors["head"]}
    for name in sorted(set(tensors) - used - copies):
        if not name.endswith(family.ignored):
            raise UserError(
                f"{tensors[name].file.name}: tensor {tensors[name].name} is not part of the model that config.json "
                "describes; the two do not belong together.",
                "model",
            )
    return sources


def _check_shape(tensor: Tensor, shape: tuple[int, ...], is_transposed: bool) -> None:
    expected = shape[::-1] if is_transposed else shape
    if tensor.shape != expected:
        raise UserError(
            f"{tensor.file.name}: tensor {tensor.name} has shape {list(tensor.shape)}, config.json says "
            f"{list(expected)}.",
            "model",
        )
    tensor.values()  # refuses a type that cannot be read


def _read(
    weight: Weight, sources: tuple[_Source, ...], shards: int, dtype: np.dtype, index: tuple[slice, ...]
) -> np.ndarray:
    """Copy the piece `index` of a weight out of its tensors."""
    bounds = [piece.indices(length) for piece, length in zip(index, weight.shape, strict=True)]
    out = _aligned(tuple(stop - start for start, stop, _ in bounds), dtype)
    pieces = shards if weight.axes[0] in SPLIT_AXES else 1
    length = weight.shape[0] // pieces  # rows of one shard
    filled = 0
    for shard in range(bounds[0][0] // length, bounds[0][1] // length):
        for part, source in zip(weight.parts, sources, strict=True):
            rows = -(-part.rows * part.copies // pieces)
            first = shard // part.copies * rows
            real = max(0, min(rows, part.rows - first))  # the vocabulary's last rows may be padding
            wanted = source.rows()[(slice(first, first + real), *index[1:])]
            _copy(wanted, out[filled : filled + real], source.tensor)
            out[filled + real : filled + rows] = 0
            filled += rows
    return out


def _copy(source: np.ndarray, target: np.ndarray, tensor: Tensor) -> None:
    """Copy and cast `source`, a view of `tensor`, giving its pages back on the way."""
    rows = len(source)
    if source.flags.c_contiguous and source.size:  # a row of a transposed tensor lies on all of its pages
        rows = max(1, _PIECE_BYTES * len(source) // source.nbytes)
    for start in range(0, len(source), max(1, rows)):
        target[start : start + rows] = source[start : start + rows]
        tensor.release()


def _aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Allocate an array that XLA on a CPU takes over without copying: it must start on a multiple of 64 bytes."""
    num_bytes = math.prod(shape) * dtype.itemsize
    buffer = np.empty(num_bytes + 64, np.uint8)
    start = -buffer.ctypes.data % 64
    return buffer[start : start + num_bytes].view(dtype).reshape(shape)


@functools.cache
def _random_maker(weight: Weight, dtype: np.dtype, mesh: Mesh) -> Callable[[np.uint32], Array]:
    """Compile what fills one weight, a function of a seed."""

    def make(seed: Array) -> Array:
        if weight.initial != "normal":
            return jnp.full(weight.shape, weight.initial == "ones", dtype)
        # MurmurHash3's finaliser over each element's number: 320 million values a second on two cores, where
        # jax.random.normal makes 29 million; and the same values however the array is laid out.
        stride = jnp.uint32(weight.shape[-1])
        bits = lax.broadcasted_iota(jnp.uint32, weight.shape, 0) * stride
        bits = (bits + lax.broadcasted_iota(jnp.uint32, weight.shape, len(weight.shape) - 1)) ^ seed
        for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
            bits = (bits ^ (bits >> shift)) * jnp.uint32(factor)
        bits = bits ^ (bits >> 16)
        uniform = lax.bitcast_convert_type(bits, jnp.int32).astype(jnp.float32) * 2.0**-31  # [-1, 1)
        return (uniform * (0.02 * math.sqrt(3))).astype(dtype)

    return jax.jit(make, out_shardings=named(mesh, weight.axes))
