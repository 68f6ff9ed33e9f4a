"""Load LoRA adapters in PEFT's format as arrays laid out like the adapted weights."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxllm.checkpoints.checkpoint import Tensor, never_read, read_file
from jaxllm.checkpoints.files import read_object
from jaxllm.checkpoints.lora_config import CONFIG, LoraConfig, read_lora_config
from jaxllm.errors import UserError
from jaxllm.families.families import Family
from jaxllm.model import decoder, lora
from jaxllm.model.lora import PRODUCTS, Adapter, Pair
from jaxllm.model.parameters import Weight
from jaxllm.model.rows import in_order, in_tensors
from jaxllm.model.sharding import UNDIVIDED, Layout
from jaxllm.model.spec import Spec

WEIGHTS = "adapter_model.safetensors"

_OF_THE_MODEL = "base_model.model."  # prefix by two PEFT wrappers
_NAME = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")


@dataclass(frozen=True, eq=False)
class LoraFiles:
    """A loaded adapter: rank, digest, and arrays for all devices, zero-padded to the engine's maximal rank."""

    rank: int
    digest: bytes
    weights: Adapter[np.ndarray]


@dataclass(frozen=True)
class _Module:
    """An adapter's addition to a linear module: scale · B·A, with A [rank, in] and B [out, rank]."""

    a: Tensor
    b: Tensor
    rank: int
    scale: float


def read_adapter(
    folder: Path, spec: Spec, family: Family, layout: Layout, max_rank: int, dtype: DTypeLike
) -> LoraFiles:
    """Load an adapter; raise UserError if invalid or of a higher rank than `max_rank`.

    Arrays are unsharded, of `dtype` and rank `max_rank`.
    """
    lora.check_supported(spec)
    try:
        fields = read_object(folder, CONFIG)
        if fields is None:
            raise UserError(f"{folder} has no {CONFIG}.")
        if not (folder / WEIGHTS).is_file():
            raise UserError(f"{folder} has no {WEIGHTS}{never_read(folder)}.")
        config, tensors = read_lora_config(fields), read_file(folder, WEIGHTS)
        modules = _find_modules(config, tensors, _linear_modules(spec, family), family, max_rank)
        # One copy: the digest and the arrays agree even if the file changes.
        stored = {each.name: np.array(each.values()) for module in modules.values() for each in (module.a, module.b)}
        weights = _fill(modules, stored, spec, family, layout, max_rank, jnp.dtype(dtype))
    except UserError as error:
        raise UserError(str(error), "lora_request") from None
    return LoraFiles(max(module.rank for module in modules.values()), _digest(modules, stored), weights)


def highest_rank(folder: Path) -> int:
    """Return the highest rank in an adapter's config, not validating the rest; raise UserError without a config."""
    fields = read_object(folder, CONFIG)
    if fields is None:
        raise UserError(f"{folder} has no {CONFIG}.", "lora_request")
    table = fields.get("rank_pattern")
    ranks = [fields.get("r"), *(table.values() if isinstance(table, dict) else ())]
    return max((rank for rank in ranks if type(rank) is int and rank > 0), default=8)  # PEFT's default


def _linear_modules(spec: Spec, family: Family) -> dict[str, tuple[int, int]]:
    """Return outputs and inputs of adaptable modules by name, such as "layers.0.self_attn.q_proj"."""
    sizes: dict[str, tuple[int, int]] = {}
    for _, layer, weight in _products(spec, UNDIVIDED):
        names = _names(weight, family, layer)
        _, rows = in_tensors(weight.parts, names, family.alternating)
        sizes |= {name: (rows[name], weight.shape[1]) for name in names}
    return sizes


def _products(spec: Spec, layout: Layout) -> Iterator[tuple[str, int, Weight]]:
    for layer, weights in enumerate(decoder.declare(spec, layout).layers):
        yield from ((name, layer, weights[name]) for name in PRODUCTS if name in weights)


def _names(weight: Weight, family: Family, layer: int) -> list[str]:
    return [family.tensors[part.name].format(layer).removesuffix(".weight") for part in weight.parts]


def _find_modules(
    config: LoraConfig, tensors: dict[str, Tensor], sizes: dict[str, tuple[int, int]], family: Family, max_rank: int
) -> dict[str, _Module]:
    found: dict[str, dict[str, Tensor]] = {}
    names: dict[str, str] = {}
    for tensor in tensors.values():
        match = _NAME.fullmatch(tensor.name)
        module = _usual(match[1], family, sizes) if match else ""
        if match is None or module not in sizes:
            raise _refusal(tensor.name, family)
        if names.setdefault(module, match[1]) != match[1]:
            raise UserError(f"{WEIGHTS}: module {module} has two names.")
        found.setdefault(module, {})[match[2]] = tensor
    # As in the model that was trained: with or without the output head, of any version of transformers.
    prefix = next((full.removesuffix(module) for module, full in names.items()), family.prefix)
    modules: dict[str, _Module] = {}
    for name, (rows, columns) in sizes.items():
        full, pair = names.get(name, prefix + name), found.get(name, {})
        if not config.is_targeted(full):
            for tensor in pair.values():
                raise UserError(f"{WEIGHTS}: tensor {tensor.name} is of a module that {CONFIG} does not name.")
            continue
        rank = config.rank_of(full)
        if rank > max_rank:
            raise UserError(f"the adapter's rank is {rank}, at most {max_rank} here; start with max_lora_rank={rank}.")
        for factor, shape in (("A", (rank, columns)), ("B", (rows, rank))):
            if factor not in pair:
                missing = f"{_OF_THE_MODEL}{full}.lora_{factor}.weight"
                raise UserError(f"{WEIGHTS}: tensor {missing} is missing, though {CONFIG} names its module.")
            if pair[factor].shape != shape:
                said = f"has shape {list(pair[factor].shape)}, the model and {CONFIG} say {list(shape)}"
                raise UserError(f"{WEIGHTS}: tensor {pair[factor].name} {said}.")
        modules[name] = _Module(pair["A"], pair["B"], rank, config.scale_of(full))
    if not modules:
        raise UserError(f"{CONFIG}: target_modules names no module of the model.")
    return modules


def _usual(name: str, family: Family, sizes: dict[str, tuple[int, int]]) -> str:
    """Return a module's name as in `sizes`, if it matches one; in models without the head the prefix is shorter."""
    return next((found for own in (name, f"model.{name}") if (found := family.usual(own)) in sizes), name)


def _refusal(tensor: str, family: Family) -> UserError:
    module = re.sub(r"\.lora_.*", "", tensor.removeprefix(_OF_THE_MODEL))
    if family.images is not None and family.usual(module).startswith(family.heads):
        return UserError(
            f"{WEIGHTS}: tensor {tensor:.100} adapts {module:.100}, which reads images or sound; only adapters of the "
            "decoder are supported: train one with exclude_modules."
        )
    return UserError(
        f"{WEIGHTS}: tensor {tensor:.100} belongs to no matrix of the model's attention or plain feed-forward; "
        "adapters of experts, embeddings, the head and other modules are not supported."
    )


def _fill(
    modules: dict[str, _Module],
    stored: dict[str, np.ndarray],
    spec: Spec,
    family: Family,
    layout: Layout,
    max_rank: int,
    dtype: np.dtype,
) -> Adapter[np.ndarray]:
    layers: list[dict[str, Pair[np.ndarray]]] = [{} for _ in range(spec.num_layers)]
    for product, layer, weight in _products(spec, layout):
        names = _names(weight, family, layer)
        a = np.zeros((len(names), max_rank, weight.shape[1]), dtype)
        b = tuple(np.zeros((part.rows * part.copies, max_rank), dtype) for part in weight.parts)
        places, _ = in_tensors(weight.parts, names, family.alternating)
        for name, part, place, rows_a, rows_b in zip(names, weight.parts, places, a, b, strict=True):
            if name not in modules:
                continue
            module = modules[name]
            rows_a[: module.rank] = _values(module.a.name, stored, 1.0, dtype)
            values = _values(module.b.name, stored, module.scale, dtype)
            runs = in_order((part,), len(rows_b), layout.shards(weight.axes[0]), slice(None))
            pieces = [values[piece] for run in runs for piece in place.slices(run.first, run.count)]
            rows_b[:, : module.rank] = np.concatenate(pieces)
        layers[layer][product] = Pair(a.reshape(-1, weight.shape[1]), b)
    return tuple(layers)


def _values(name: str, stored: dict[str, np.ndarray], scale: float, dtype: np.dtype) -> np.ndarray:
    with np.errstate(over="ignore", invalid="ignore"):
        values = (stored[name].astype(np.float32) * np.float32(scale)).astype(dtype)
    if not np.isfinite(values).all():
        raise UserError(f"{WEIGHTS}: tensor {name} has values that are not finite numbers.")
    return values


def _digest(modules: dict[str, _Module], stored: dict[str, np.ndarray]) -> bytes:
    digest = hashlib.sha256()
    for name, module in sorted(modules.items()):
        for tensor in (module.a, module.b):
            digest.update(f"{name} {module.scale.hex()} {tensor.dtype} {tensor.shape} ".encode())
            digest.update(stored[tensor.name].view(np.uint8).data)
    return digest.digest()
