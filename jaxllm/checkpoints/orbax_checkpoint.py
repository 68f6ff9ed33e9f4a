"""Orbax checkpoints, restored piecewise onto any number of devices.

One array per part of a weight (see `parameters.Part`) and expert, unsharded, unpadded, in the stored type. A list of
files, written last, detects incomplete copies.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from jaxllm.checkpoints.files import inside, read_object, reading_bar
from jaxllm.errors import UserError
from jaxllm.model import quantized, stages
from jaxllm.model.decoder import Params
from jaxllm.model.parameters import Part, Weight
from jaxllm.model.sharding import Layout

FOLDER = "orbax"
LISTING = "orbax.json"
_SMALL_FILE = 2**20  # bytes; smaller files, Orbax's index, have a checksum
CHUNK_BYTES = 2**20  # a shard's columns are in few chunks
_FLOATS = ("float16", "bfloat16", "float32", "float64")

Name = tuple[int | None, str]  # layer (None outside) and name of a part


def is_here(folder: Path) -> bool:
    """Return whether a folder has an Orbax checkpoint, possibly damaged."""
    return (folder / LISTING).is_file() or (folder / FOLDER).is_dir()


def has_head(folder: Path) -> bool:
    return (read_object(folder, LISTING) or {}).get("has_head") is True


def write(folder: Path, parts: dict[Name, np.ndarray], written: Callable[[Name], None]) -> None:
    import orbax.checkpoint as ocp
    from orbax.checkpoint import type_handlers

    names = {_key(name): name for name in parts}

    class OneByOne(type_handlers.NumpyHandler):
        """Writes arrays one at a time; Orbax would copy all first."""

        async def serialize(self, values: Any, infos: Any, args: Any = None) -> Any:
            for value, about, arg in zip(values, infos, args, strict=True):
                for future in await super().serialize([value], [about], [arg]):
                    future.result()
                written(names[about.name])
            return []

    tree: dict[str, Any] = {}
    for name, values in parts.items():
        _place(tree, name, values)
    handlers = type_handlers.create_type_handler_registry(
        (np.ndarray, OneByOne(deepcopy_host_arrays=False)),
        (jax.Array, type_handlers.ArrayHandler()),  # required by Orbax
    )
    handler = ocp.PyTreeCheckpointHandler(use_compression=False, type_handler_registry=handlers)
    chunked = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES), tree)
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save((folder / FOLDER).absolute(), ocp.args.PyTreeSave(tree, save_args=chunked))
    listing = {"files": list_files(folder), "has_head": (None, "head") in parts}
    (folder / LISTING).write_text(json.dumps(listing, indent=1) + "\n")


def check(folder: Path, declared: Params[Weight]) -> None:
    """Refuse a checkpoint that is incomplete, damaged or for other weights; reads no arrays."""
    listed = (read_object(folder, LISTING) or {}).get("files")
    if not isinstance(listed, dict):
        raise UserError(
            f"{folder} has no whole {LISTING}: its Orbax checkpoint is not complete; convert again.", "model"
        )
    found = list_files(folder)
    for name in sorted(listed):
        if found.get(name) != listed[name]:
            fault = "is missing" if name not in found else "is not as it was written (cut off, or changed)"
            raise UserError(f"{folder}: {name} of the Orbax checkpoint {fault}; copy or convert it again.", "model")
    stored = _describe(folder)
    for name, (weight, part) in _parts(declared).items():
        array = stored.pop(_key(name), None)
        expected = _shape(weight, part)
        if array is None:
            raise UserError(f"{folder}: the Orbax checkpoint has no array {_key(name)}.", "model")
        if tuple(array.shape) != expected:
            raise UserError(
                f"{folder}: array {_key(name)} of the Orbax checkpoint has shape {list(array.shape)}, config.json says "
                f"{list(expected)}.",
                "model",
            )
        if str(array.dtype) not in _FLOATS:
            raise UserError(f"{folder}: array {_key(name)} has type {array.dtype}, not one of {_FLOATS}.", "model")
    for key in sorted(stored):
        raise UserError(
            f"{folder}: array {key} of the Orbax checkpoint is not part of the model that config.json describes; the "
            "two do not belong together.",
            "model",
        )


def load(folder: Path, declared: Params[Weight], layout: Layout, dtype: DTypeLike, progress: bool) -> Params[Array]:
    """Restore weights as arrays of `dtype`, a layer at a time.

    Each device reads its piece of each part, rounded once; weights to quantize are read as float32, then quantized.
    """
    check(folder, declared)
    dtype = jnp.dtype(dtype)
    described = jax.tree.leaves(jax.tree.map(lambda weight: quantized.describe(weight, layout, dtype), declared))
    total = sum(leaf.size * leaf.dtype.itemsize for leaf in described)
    bar = reading_bar(total, progress)

    def restore(layer: int | None, weights: dict[str, Weight]) -> dict[str, Any]:
        here, tree = layout.of_layer(layer), dict[str, Any]()
        if not here.is_here:
            return {name: quantized.describe(weight, here, dtype) for name, weight in weights.items()}
        for weight in weights.values():
            for part in weight.parts:
                kind = jnp.dtype(jnp.float32) if weight.scheme is not None else weight.type_of(dtype)
                for expert, name in enumerate(_names(weight, part)):
                    own = here if weight.stack is None else _holding(weight, expert, here)
                    if _local(own):
                        _place(tree, (layer, name), _target(weight, part, own, kind))
        pieces = _restore(folder, tree)
        pieces = pieces["top"] if layer is None else pieces["layers"][str(layer)]
        arrays: dict[str, Any] = {
            name: _join(weight, [pieces[part.name] for part in weight.parts], here)
            if weight.stack is None
            else _stack(weight, [pieces[part.name] for part in weight.parts], here)
            for name, weight in weights.items()
        }
        arrays |= {
            name: quantized.quantize(arrays.pop(name), weight, here)
            for name, weight in weights.items()
            if weight.scheme is not None
        }
        bar.update(sum(array.nbytes for array in jax.tree.leaves(jax.block_until_ready(arrays))))
        return arrays

    with bar:
        top: dict[str, Any] = {}
        for name, weight in declared.top.items():  # the largest, one at a time
            top |= restore(None, {name: weight})
        layers = [restore(layer, weights) for layer, weights in enumerate(declared.layers)]
        return Params(top, stages.join(layers, layout))


def list_files(folder: Path) -> dict[str, list[int | None]]:
    """Return the checkpoint's files: size in bytes, and CRC-32 of small ones."""
    found: dict[str, list[int | None]] = {}
    for path in sorted((folder / FOLDER).rglob("*")):
        name = path.relative_to(folder).as_posix()
        if inside(folder, name).is_file():
            size = path.stat().st_size
            found[name] = [
                size,
                zlib.crc32(path.read_bytes()) if size < _SMALL_FILE else None,
            ]
    return found


def _key(name: Name) -> str:
    layer, part = name
    return f"top.{part}" if layer is None else f"layers.{layer}.{part}"


def _place(tree: dict[str, Any], name: Name, leaf: Any) -> None:
    *path, last = _key(name).split(".")
    for step in path:
        tree = tree.setdefault(step, {})
    tree[last] = leaf


def _parts(declared: Params[Weight]) -> dict[Name, tuple[Weight, Part]]:
    return {
        (layer, name): (weight, part)
        for layer, weights in [(None, declared.top), *enumerate(declared.layers)]
        for weight in weights.values()
        for part in weight.parts
        for name in _names(weight, part)
    }


def _names(weight: Weight, part: Part) -> list[str]:
    return [part.name] if weight.stack is None else [f"{part.name}.{expert}" for expert in range(weight.stack)]


def _shape(weight: Weight, part: Part) -> tuple[int, ...]:
    """Return a part's stored shape: [out, ...], or with a comb [teeth, rows per tooth, ...]."""
    rows = (part.rows,) if part.comb is None else (part.rows // part.comb.length, part.comb.length)
    return (*rows, *weight.one[1:])


def _reader() -> Any:
    """Return a checkpointer that waits for no other process."""
    import orbax.checkpoint as ocp

    own = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(primary_host=own, active_processes={own})
    handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=alone)
    return ocp.Checkpointer(handler, multiprocessing_options=alone)


def _describe(folder: Path) -> dict[str, Any]:
    try:
        with _reader() as checkpointer:
            tree = checkpointer.metadata((folder / FOLDER).absolute()).item_metadata.tree
    except Exception as error:
        raise _unreadable(folder, error) from error
    return {".".join(str(entry.key) for entry in path): leaf for path, leaf in jax.tree.leaves_with_path(tree)}


def _target(weight: Weight, part: Part, layout: Layout, dtype: jnp.dtype) -> Any:
    """Return restore arguments for a part: a piece per device, shared by neighbours where copied."""
    import orbax.checkpoint as ocp

    if _is_one_array(weight):  # pads the vocabulary with zeros
        return ocp.ArrayRestoreArgs(
            dtype=dtype, sharding=layout.sharding(*weight.axes), global_shape=weight.shape, strict=False
        )
    first, *inner = weight.axes_of_one
    axes = (first, *inner) if part.comb is None else (first, None, *inner)
    sharding = layout.with_copies(first, part.copies).sharding(*axes)
    return ocp.ArrayRestoreArgs(dtype=dtype, sharding=sharding, global_shape=_shape(weight, part))


def _holding(weight: Weight, expert: int, layout: Layout) -> Layout:
    """Return the layout of the devices that hold an expert."""
    axis = weight.axes[0]
    return layout.of_shard(axis, expert * layout.shards(axis) // (weight.stack or 1))


def _restore(folder: Path, targets: dict[str, Any]) -> dict[str, Any]:
    import orbax.checkpoint as ocp

    item = jax.tree.map(lambda target: jax.ShapeDtypeStruct(target.global_shape, target.dtype), targets)
    args = ocp.args.PyTreeRestore(item, restore_args=targets, partial_restore=True)
    try:
        with _reader() as checkpointer:
            return checkpointer.restore((folder / FOLDER).absolute(), args)
    except jax.errors.JaxRuntimeError:  # exhausted memory
        raise
    except Exception as error:  # Orbax raises plain Exception
        raise _unreadable(folder, error) from error


def _unreadable(folder: Path, error: Exception) -> UserError:
    reason = " ".join(str(error).split())
    return UserError(f"{folder}: the Orbax checkpoint cannot be read ({reason:.200}); convert it again.", "model")


def _is_one_array(weight: Weight) -> bool:
    first = weight.parts[0]
    return weight.stack is None and len(weight.parts) == 1 and first.copies == 1 and first.comb is None


def _join(weight: Weight, pieces: list[Array], layout: Layout) -> Array:
    if _is_one_array(weight):
        return pieces[0]
    held = [_by_device(piece) for piece in pieces]
    joined = [_concatenate(weight, [piece[device] for piece in held]) for device in _local(layout)]
    return jax.make_array_from_single_device_arrays(weight.shape, layout.sharding(*weight.axes), joined)


def _stack(weight: Weight, pieces: list[dict[str, Array]], layout: Layout) -> Array:
    """Join the experts of each device; those of other processes were not restored."""
    experts = sorted(map(int, pieces[0]))
    held = [[_by_device(piece[str(expert)]) for piece in pieces] for expert in experts]
    stacked = [
        jnp.stack([_concatenate(weight, [piece[device] for piece in parts]) for parts in held if device in parts[0]])
        for device in _local(layout)
    ]
    return jax.make_array_from_single_device_arrays(weight.shape, layout.sharding(*weight.axes), stacked)


def _local(layout: Layout) -> list[Any]:
    return [device for device in layout.devices if device.process_index == jax.process_index()]


def _by_device(array: Array) -> dict[Any, Array]:
    return {shard.device: shard.data for shard in array.addressable_shards}


def _concatenate(weight: Weight, parts: list[Array]) -> Array:
    inner = weight.one[1:]
    return jnp.concatenate([part.reshape(-1, *part.shape[part.ndim - len(inner) :]) for part in parts])
