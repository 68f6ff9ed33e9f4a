"""The machine: what is installed, and the two ceilings that all else is compared with, measured here and now."""

from __future__ import annotations

import importlib.metadata

import jax
import jax.numpy as jnp

from pallas_kernels import measuring
from tests.gpu_check.check import Check
from tests.gpu_check.parts import PARTS, missing

READ = (4 << 30, 16 << 20)  # bytes that are read, on a GPU and dry
SIDE = (8192, 256)  # of the matrices


def run(check: Check) -> None:
    device = jax.devices()[0]
    if device.platform != "gpu" and not check.is_dry:
        check.fail(f"JAX sees {device.device_kind} only")
        return
    versions = {}
    for name in ("jax", "jaxlib", "triton", "torch", "transformers", "flax"):
        versions[name] = "absent" if missing((name,)) else importlib.metadata.version(name)
    stats = device.memory_stats() or {}
    check.measure(
        device=device.device_kind,
        capability=str(getattr(device, "compute_capability", "")),
        memory_gb=stats.get("bytes_limit", 0) / 1e9,
        read_bytes_per_second=max(_read(READ[check.is_dry]), _copy(READ[check.is_dry] // 2)),
        flops_per_second=_multiply(SIDE[check.is_dry]),
        **versions,
    )
    for name, part in PARTS.items():
        if absent := missing(part.needs):
            check.skip(f"{name} will be: {', '.join(absent)} {'is' if len(absent) == 1 else 'are'} not installed")


def _read(num_bytes: int) -> float:
    """Return bytes a second that are read, the largest number of an array being looked for."""
    array = measuring.noise((num_bytes // 2 // 4096, 4096), "bfloat16")
    taken = measuring.seconds(lambda turn, array: (jnp.max(array + turn.astype(array.dtype)), array), array, 8)
    return num_bytes / taken


def _copy(num_bytes: int) -> float:
    """Return bytes a second that are read and written."""
    array = measuring.noise((num_bytes // 4 // 4096, 4096), "float32")

    def copy(turn: jax.Array, arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
        changed = arrays + turn
        return changed, changed

    return 2 * num_bytes / measuring.seconds(copy, array, 8)


def _multiply(side: int) -> float:
    """Return operations a second of a product of two matrices in bfloat16."""
    keys = jax.random.split(jax.random.key(0))
    arrays = tuple(jax.random.normal(key, (side, side), jnp.bfloat16) * side**-0.25 for key in keys)

    def multiply(_: jax.Array, arrays: tuple[jax.Array, ...]) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        product = (arrays[0] @ arrays[1]) * jnp.bfloat16(side**-0.25)
        return product, (product, arrays[1])

    return 2 * side**3 / measuring.seconds(multiply, arrays, 8)
