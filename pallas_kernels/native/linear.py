"""Products of few rows in C++ (linear.cc), at memory speed.

XLA:CPU reaches 60 % of it for one row of bfloat16, dequantizes matrices in every step, and takes 1.25 to 2.5 times as
long for 2 to 9 rows of float32 as for one.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from pallas_kernels.choice import Site
from pallas_kernels.linear import xla
from pallas_kernels.linear.numbers import PACKED, Kind
from pallas_kernels.native import build

# Most rows by weight type. Speedup over XLA with 2, 16, 32 and 64 rows, 12 layers of the 0.5B shape, two Zen 4 cores:
# bfloat16 2.0, 1.9, 1.6, 1.2; rounded rows 1.9, 1.5, 1.2, 0.9; float32 1.2, 1.0, 1.0, 0.9; 8-bit floats 5.5 (one row),
# 1.9, 1.15, 0.65.
_FLAGS = build.processor()
if "avx512_bf16" in _FLAGS:
    MOST_ROWS = {"float32": 28, "bfloat16": 64, "quantized": 32}
elif "avx512f" in _FLAGS:
    MOST_ROWS = {"float32": 9, "bfloat16": 16, "quantized": 16}
else:
    # Two Zen 3 cores, 2, 8 and 16 rows: bfloat16 2.8, 1.9, 1.2; rounded rows 1.8, 1.0, 0.9; int8 in groups 14, 5, 3.7;
    # float32 0.9, 0.6, 1.0.
    MOST_ROWS = {"float32": 0, "bfloat16": 16, "quantized": 16}
_KINDS = {"float": 0, "int8": 1, "float8": 2, "int4": 3, "float4": 4}
_ROUNDED = 5
_TYPES = {"float": None, "int8": "int8", "float8": "float8_e4m3fn", "int4": "uint8", "float4": "uint8"}
_NUMBERS = ("float32", "bfloat16", "float16", "uint8", "int8")  # of scales and zeros


def refusal(operation: str, site: Site) -> str | None:
    if site.platform != "cpu":
        return "it is for CPUs"
    if site.dtype not in ("float32", "bfloat16"):
        return f"it multiplies float32 and bfloat16, not {site.dtype}"
    return build.refusal()


def linear(
    x: Array, weight: Array, scales: Array | None, zeros: Array | None, *, kind: Kind, rounds_rows: bool
) -> Array:
    if not takes(x, weight, scales, zeros, kind):
        return xla.linear(x, weight, scales, zeros, kind=kind, rounds_rows=rounds_rows)
    product = jax.ffi.ffi_call(
        build.target("jaxllm_linear"), jax.ShapeDtypeStruct((x.shape[0], weight.shape[0]), jnp.float32)
    )
    rest = [array for array in (scales, zeros) if array is not None]
    return product(x, weight, *rest, kind=np.int64(_ROUNDED if rounds_rows else _KINDS[kind]))


def takes(x: Array, weight: Array, scales: Array | None, zeros: Array | None, kind: Kind) -> bool:
    if x.dtype not in (jnp.float32, jnp.bfloat16):
        return False
    if not 1 <= x.shape[0] <= MOST_ROWS["quantized" if kind != "float" else str(x.dtype)]:
        return False
    if weight.dtype != (_TYPES[kind] or x.dtype):
        return False
    if any(array is not None and str(array.dtype) not in _NUMBERS for array in (scales, zeros)):
        return False
    groups = 1 if scales is None else scales.shape[0]
    step = 32 if kind in PACKED else 16 if groups > 1 else 1  # columns per read
    return x.shape[1] // groups % step == 0
