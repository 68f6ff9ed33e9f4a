"""Attention in C++ (attention.cc) for CPUs: decode reads the cache once."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax import Array

from pallas_kernels.attention.arguments import AttentionArgs, Tiles
from pallas_kernels.choice import Site
from pallas_kernels.native import build

_CACHES = ("float32", "bfloat16", "float16", "int8", "float8_e4m3fn", "float8_e5m2")


def refusal(operation: str, site: Site) -> str | None:
    if site.platform != "cpu":
        return "it is for CPUs"
    if site.dtype not in ("float32", "bfloat16", "float16") or site.cache_dtype not in _CACHES:
        return f"it takes no {site.dtype} over a cache of {site.cache_dtype}"
    return build.refusal()


def paged_decode(q: Array, lengths: Array, args: AttentionArgs) -> Array:
    return _call("jaxllm_decode", q, (lengths,), args)


def paged_prefill(q: Array, tiles: Tiles, args: AttentionArgs, *, tile: int) -> Array:
    return _call("jaxllm_prefill", q, tiles, args)


def _call(handler: str, q: Array, rows: tuple[Array, ...], args: AttentionArgs) -> Array:
    further = (args.v_cache, args.sinks, args.k_scales, args.v_scales)
    given = sum(1 << bit for bit, array in enumerate(further) if array is not None)
    result = jax.ShapeDtypeStruct((*q.shape[:2], args.value_width), q.dtype)
    options: dict[str, Any] = {"scale": np.float64(args.scale), "softcap": np.float64(args.softcap or 0.0)}
    options |= {"given": np.int64(given), "window": np.int64(args.window or 0)}
    call = jax.ffi.ffi_call(build.target(handler), result)
    return call(q, args.k_cache, args.tables, *rows, *(array for array in further if array is not None), **options)
