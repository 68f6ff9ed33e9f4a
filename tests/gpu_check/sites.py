"""The implementations that run on this machine, the reasons of the others, and the precision of products."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax

import pallas_kernels
from pallas_kernels import Choice, Site

INTERPRETED = ("float32", "float16", "int8")  # types that Triton's interpreter supports


def site_of(dtype: str, cache_dtype: str, heads: tuple[int, int, int], **further: Any) -> Site:
    """Describe an operation on this machine's first device; `heads` are query heads, key-value heads and their size."""
    device = jax.devices()[0]
    return Site(
        platform=device.platform,
        capability=pallas_kernels.capability_of(device),
        dtype=dtype,
        cache_dtype=cache_dtype,
        heads=heads[0],
        kv_heads=heads[1],
        head_size=heads[2],
        **further,
    )


def choices(operation: str, site: Site) -> Iterator[tuple[str, Choice | str]]:
    """Yield every implementation's name with its choice, or with the reason that it does not run here."""
    for name in pallas_kernels.implementations(operation):
        if name == "triton" and is_interpreted():
            able = {site.dtype, site.cache_dtype} <= set(INTERPRETED)
            yield name, Choice(name, 90) if able else f"Triton's interpreter does not know {site.cache_dtype}"
            continue
        try:
            reason = pallas_kernels.refusal(operation, name, site)
        except ImportError as error:  # not written yet, or a missing package
            reason = f"it cannot be imported: {error}"
        yield name, Choice(name, site.capability) if reason is None else reason


@contextmanager
def full_precision() -> Iterator[None]:
    """Multiply float32 in full precision, in all threads: on a GPU XLA would round to TensorFloat-32."""
    before = jax.config.jax_default_matmul_precision
    jax.config.update("jax_default_matmul_precision", "highest")
    try:
        yield
    finally:
        jax.config.update("jax_default_matmul_precision", before)


def is_interpreted() -> bool:
    """Return whether Triton's kernels run on the host."""
    return os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None
