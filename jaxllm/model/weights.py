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
from jaxllm.model.declaration import Comb, Part, Weight
from jaxllm.model.decoder import Leaf, Params, declare
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
    experts = spec.experts
    widths = [spec.ffn_width] if experts is None or not all(experts.layers) else []
    widths += [experts.ffn_width, experts.shared_width] if experts else []
    for name, count, divides in (
        ("attention heads", spec.num_heads, spec.num_heads % shards == 0),
        ("key-value heads", spec.num_kv_heads, heads_divide),
        *(("feed-forward columns", width, width % shards == 0) for width in widths),
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
            return _read(weight, sources[layer, name], shards, weight.type_of(jnp.dtype(dtype)), index or ())

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
    """One part of a weight as it is stored: a view [out, in] (or [out]) of the mapped file, and how to let it go.

    Rows that are a comb of the tensor's are parted into its teeth: [teeth, out, in].
    """

    values: np.ndarray
    release: Callable[[], None]


def stored_parts(folder: Path, spec: Spec, family: Family) -> dict[orbax_checkpoint.Name, StoredPart]:
    """Look up every part of every weight in a safetensors checkpoint, by layer and name; refuses what `load` does."""
    declared = declare(spec, 1)
    sources = _find_sources(declared, family, _by_name(open_tensors(folder), family))
    return {
        (layer, name): StoredPart(source.whole(part), source.tensor.release)
        for layer, weights in [(None, declared.top), *enumerate(declared.layers)]
        for weight_name, weight in weights.items()
        for number, piece in enumerate(sources[layer, weight_name])
        for part, source in zip(weight.parts, piece, strict=True)
        for name in [part.name if weight.stack is None else f"{part.name}.{number}"]
    }


def abstract(spec: Spec, mesh: Mesh, dtype: DTypeLike) -> Params[jax.ShapeDtypeStruct]:
    """Describe the parameters, shapes, type and shardings, with nothing allocated: what programs are compiled for."""
    shards = mesh.devices.size
    check_shards(spec, shards)

    def build(_layer: int | None, _name: str, weight: Weight) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(weight.shape, weight.type_of(jnp.dtype(dtype)), sharding=named(mesh, weight.axes))

    return _build(declare(spec, shards), build)


def load_random(spec: Spec, mesh: Mesh, dtype: DTypeLike, seed: int = 0) -> Params[Array]:
    """Make parameters of the right shapes without a checkpoint: deviation 0.02, norms neutral."""
    shards = mesh.devices.size
    check_shards(spec, shards)
    seeds = np.random.default_rng(seed)

    def build(layer: int | None, name: str, weight: Weight) -> Array:
        return _random_maker(weight, weight.type_of(jnp.dtype(dtype)), mesh)(seeds.integers(2**32, dtype=np.uint32))

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
    """Where the rows of one part are: in the [out, in] (or [out]) view of a tensor, from row `first` on or by `comb`.

    `expert` says which piece of a tensor that holds all experts.
    """

    tensor: Tensor
    first: int
    comb: Comb | None
    expert: int | None
    is_transposed: bool

    def view(self) -> np.ndarray:
        """View the tensor, or its piece of one expert, as [out, in] (or [out])."""
        values = self.tensor.values()
        if self.expert is not None:
            values = values[self.expert]
        return values.T if self.is_transposed else values

    def whole(self, part: Part) -> np.ndarray:
        """View all rows of the part; those of a comb that the part itself names by tooth, [teeth, rows of one, ...].

        Heads that alternate with those of other parts are copied.
        """
        values = self.view()
        if self.comb is None:
            return values[self.first : self.first + part.rows]
        teeth = values.reshape(-1, self.comb.period, *values.shape[1:])
        teeth = teeth[:, self.comb.first : self.comb.first + self.comb.length]
        return teeth if part.comb is not None else teeth.reshape(part.rows, *values.shape[1:])

    def rows(self, start: int, count: int) -> list[np.ndarray]:
        """View `count` of the part's rows from `start` on, in as few pieces as there are."""
        values = self.view()
        if self.comb is None:
            return [values[self.first + start : self.first + start + count]]
        first, length, period = self.comb.first, self.comb.length, self.comb.period
        if length == 1:
            return [values[first + start * period :: period][:count]]
        groups = range(start // length, -(-(start + count) // length))
        pieces = []
        for group in groups:
            shift = first + group * (period - length)  # from a row of the part to that of the tensor
            begin, end = max(start, group * length), min(start + count, (group + 1) * length)
            pieces.append(values[shift + begin : shift + end])
        return pieces


# For each weight, the parts of each of its pieces along axis 0 (one piece where it is no stack of experts).
Sources = dict[tuple[int | None, str], tuple[tuple[_Source, ...], ...]]


def _by_name(tensors: dict[str, Tensor], family: Family) -> dict[str, Tensor]:
    """Drop the family's prefix: a checkpoint saved from the bare model, without the head, lacks it."""
    return {name.removeprefix(family.prefix): tensor for name, tensor in tensors.items()}


def _find_sources(declared: Params[Weight], family: Family, tensors: dict[str, Tensor]) -> Sources:
    """Look up the tensors behind every weight; refuse missing, misshapen and unexpected ones."""
    sources: Sources = {}
    used: set[str] = set()
    for layer, weights in [(None, declared.top), *enumerate(declared.layers)]:
        for name, weight in weights.items():
            pieces = []
            for expert in [None] if weight.stack is None else range(weight.stack):
                names, found = _find_parts(weight, family, tensors, layer, expert)
                pieces.append(found)
                used.update(names)
            sources[layer, name] = tuple(pieces)
    # A head stored beside the embedding that it is tied to is a copy of it.
    copies = set() if "head" in declared.top else {family.tensors["head"]}
    behind = f"layers.{len(declared.layers)}."  # layers that guess further tokens ahead, which are not built
    for name in sorted(set(tensors) - used - copies):
        if not name.endswith(family.ignored) and not (family.has_layers_behind and name.startswith(behind)):
            raise UserError(
                f"{tensors[name].file.name}: tensor {tensors[name].name} is not part of the model that config.json "
                "describes; the two do not belong together.",
                "model",
            )
    return sources


def _find_parts(
    weight: Weight, family: Family, tensors: dict[str, Tensor], layer: int | None, expert: int | None
) -> tuple[list[str], tuple[_Source, ...]]:
    """Look up the tensors of one piece of a weight, and check their shapes; return their names as well."""
    patterns = [family.tensors[part.name] for part in weight.parts]
    names = [pattern.format(layer, expert) for pattern in patterns]
    rows: Counter[str] = Counter()  # found so far in each tensor
    found = []
    for part, pattern, name in zip(weight.parts, patterns, names, strict=True):
        if name not in tensors:
            raise UserError(f"the checkpoint has no tensor {name} (nor one with {family.prefix!r} before it).", "model")
        comb = part.comb
        if part.name in family.alternating:
            comb = Comb(rows[name] // part.rows * part.block, part.block, names.count(name) * part.block)
        which = expert if pattern.count("{}") == 1 else None  # the tensor holds all experts
        found.append(_Source(tensors[name], rows[name], comb, which, part.name in family.transposed))
        rows[name] += part.rows if part.comb is None else part.rows // part.comb.length * part.comb.period
    for source, name in zip(found, names, strict=True):
        shape = (rows[name], *weight.one[1:])
        shape = shape[::-1] if source.is_transposed else shape
        _check_shape(source.tensor, shape if source.expert is None else (weight.stack or 0, *shape))
    return names, tuple(found)


def _check_shape(tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tensor.shape != shape:
        raise UserError(
            f"{tensor.file.name}: tensor {tensor.name} has shape {list(tensor.shape)}, config.json says {list(shape)}.",
            "model",
        )
    tensor.values()  # refuses a type that cannot be read


def _read(
    weight: Weight, sources: tuple[tuple[_Source, ...], ...], shards: int, dtype: np.dtype, index: tuple[slice, ...]
) -> np.ndarray:
    """Copy the piece `index` of a weight out of its tensors."""
    bounds = [piece.indices(length) for piece, length in zip(index, weight.shape, strict=True)]
    out = _aligned(tuple(stop - start for start, stop, _ in bounds), dtype)
    if weight.stack is None:
        _fill(out, weight.parts, sources[0], weight.shape[0], weight.axes[0], shards, index)
    else:
        for piece, parts in zip(out, sources, strict=True):  # experts are never divided among devices
            _fill(piece, weight.parts, parts, weight.shape[1], weight.axes[1], shards, index[1:])
    return out


def _fill(
    out: np.ndarray,
    parts: tuple[Part, ...],
    sources: tuple[_Source, ...],
    rows: int,
    axis: str | None,
    shards: int,
    index: tuple[slice, ...],
) -> None:
    """Copy the piece `index` of what `parts` make up, `rows` of them along `axis`, into `out`."""
    start, stop, _ = index[0].indices(rows)
    pieces = shards if axis in SPLIT_AXES else 1
    length = rows // pieces  # rows of one shard
    filled = 0
    for shard in range(start // length, stop // length):
        for part, source in zip(parts, sources, strict=True):
            share = -(-part.rows * part.copies // pieces)
            first = shard // part.copies * share
            real = max(0, min(share, part.rows - first))  # the vocabulary's last rows may be padding
            for wanted in source.rows(first, real):
                wanted = wanted[(slice(None), *index[1:])]
                _copy(wanted, out[filled : filled + len(wanted)], source.tensor)
                filled += len(wanted)
            out[filled : filled + share - real] = 0
            filled += share - real


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
        bits = jnp.zeros(weight.shape, jnp.uint32)
        for dimension, length in enumerate(weight.shape):
            bits = bits * jnp.uint32(length) + lax.broadcasted_iota(jnp.uint32, weight.shape, dimension)
        bits = bits ^ seed
        for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
            bits = (bits ^ (bits >> shift)) * jnp.uint32(factor)
        bits = bits ^ (bits >> 16)
        uniform = lax.bitcast_convert_type(bits, jnp.int32).astype(jnp.float32) * 2.0**-31  # [-1, 1)
        return (uniform * (0.02 * math.sqrt(3))).astype(dtype)

    return jax.jit(make, out_shardings=named(mesh, weight.axes))
