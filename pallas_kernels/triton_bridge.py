"""Call Triton kernels from traced JAX code, in CUDA graphs.

jax-triton supports CUDA graphs since 0.4 (Python 3.12, Triton 3.7); with older versions this calls `jax.ffi` and
`jaxlib.gpu_triton` with the same PTX and program. Kernels are compiled when traced, for a named capability. With
TRITON_INTERPRET=1 they run on the host: float32 and float16 only.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import functools
import importlib.metadata
import os
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import triton
from jax import Array
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from pallas_kernels.choice import Site
from pallas_kernels.tuning import Tuning

# CUDA 13.0's assembler refuses newer PTX. Fusion is explicit: Triton's default changes in 3.10.
_OPTIONS = {"ptx_version": 87, "enable_fp_fusion": True}
# XLA hashes a call's PTX often; line info would be over half of it. Global: jax-triton compiles during lowering.
if "TRITON_DISABLE_LINE_INFO" not in os.environ:
    knobs.compilation.disable_line_info = True
_ALIGNED = 16  # bytes, for 16-byte loads
_TYPES = {
    "bool": "i1",
    "int8": "i8",
    "uint8": "u8",
    "int16": "i16",
    "int32": "i32",
    "uint32": "u32",
    "int64": "i64",
    "float16": "fp16",
    "bfloat16": "bf16",
    "float32": "fp32",
    "float8_e4m3fn": "fp8e4nv",
    "float8_e5m2": "fp8e5",
}


def is_interpreted() -> bool:
    return knobs.runtime.interpret


def refusal(site: Site) -> str | None:
    if knobs.runtime.interpret and site.platform == "cpu":
        return None
    if site.platform != "gpu" or site.capability is None:
        return "Triton kernels run on NVIDIA GPUs"
    has = f"this GPU has {site.capability // 10}.{site.capability % 10}"
    if site.capability < 80:
        return f"it needs compute capability 8.0, {has}"
    if site.dtype not in ("bfloat16", "float16", "float32"):
        return f"queries of {site.dtype} are not supported"
    if site.cache_dtype == "float8_e4m3fn" and site.capability < 89:
        return f"a cache of {site.cache_dtype} needs compute capability 8.9, {has}"
    if site.cache_dtype != site.dtype and site.cache_dtype not in ("int8", "float8_e4m3fn", "float8_e5m2"):
        return f"a cache of {site.cache_dtype} does not go with queries of {site.dtype}"
    return None


def call(
    kernel: Any,
    arrays: Sequence[Array | None],
    outputs: Sequence[jax.ShapeDtypeStruct],
    grid: tuple[int, ...],
    tuning: Tuning,
    capability: int | None,
    aliases: Mapping[int, int] | None = None,
    **constants: Any,
) -> tuple[Array, ...]:
    """Run a Triton kernel over `grid`; return its `outputs`.

    Its parameters are `arrays`, outputs without aliases, then `constants` by name. `aliases` maps indices of `arrays`
    to outputs, which must be last: updated in place if donated or unused later.
    """
    aliases = dict(aliases or {})
    fresh = [number for number in range(len(outputs)) if number not in aliases.values()]
    if fresh != list(range(len(fresh))):
        raise ValueError("outputs that take an array's place come last")
    names = kernel.arg_names
    new_outputs = [outputs[number] for number in fresh]
    parameters = [*arrays, *new_outputs]
    given = [array for array in arrays if array is not None]
    places = {place: sum(one is not None for one in arrays[:place]) for place in aliases}
    renamed = {places[place]: output for place, output in aliases.items()}
    if knobs.runtime.interpret:
        return _interpreted(kernel, arrays, outputs, grid, aliases, constants)
    if capability is None:
        raise ValueError(f"{kernel.__name__} is compiled for a GPU, and it is not said for which")
    jax_triton = find_jax_triton()
    if jax_triton is not None:
        called = jax_triton.triton_call(
            *arrays,
            kernel=kernel,
            out_type=tuple(outputs),
            grid=grid,
            name=kernel.__name__,
            compute_capability=capability,
            num_warps=tuning.warps,
            num_stages=tuning.stages,
            backend_options=_OPTIONS,
            input_output_aliases=renamed,
            **constants,
        )
        return tuple(called)
    types = [None if one is None else "*" + _TYPES[str(np.dtype(one.dtype))] for one in parameters]
    signature = {name: kind for name, kind in zip(names, types, strict=False) if kind is not None}
    fixed = constants | {name: None for name, one in zip(names, parameters, strict=False) if one is None}
    compiled = compile_kernel(kernel, tuple(signature.items()), tuple(fixed.items()), tuning, capability)
    payload = payload_of(kernel.__name__, compiled, len(signature), grid, tuning, capability)
    run = jax.ffi.ffi_call("triton_kernel_call_ffi", tuple(outputs), input_output_aliases=renamed)
    return tuple(run(*given, opaque=payload))


@functools.cache
def find_jax_triton() -> Any:
    try:
        version = importlib.metadata.version("jax-triton")
    except importlib.metadata.PackageNotFoundError:
        return None
    if tuple(map(int, version.split(".")[:2])) < (0, 4):
        return None
    environment = dict(os.environ)
    import jax_triton

    os.environ.update(environment)  # removed by the import
    return jax_triton


@functools.cache
def compile_kernel(
    kernel: Any,
    signature: tuple[tuple[str, str], ...],
    constants: tuple[tuple[str, Any], ...],
    tuning: Tuning,
    capability: int,
) -> Any:
    """Compile for a GPU, not necessarily present.

    `signature` has arrays' Triton types; other parameters are `constants`.
    """
    types = dict(signature)
    pointers = [place for place, name in enumerate(kernel.arg_names) if name in types]
    source = ASTSource(
        kernel,
        signature={name: types.get(name, "constexpr") for name in kernel.arg_names},
        constexprs=dict(constants),
        attrs={(place,): [["tt.divisibility", _ALIGNED]] for place in pointers},
    )
    options = {"num_warps": tuning.warps, "num_stages": tuning.stages, **_OPTIONS}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def payload_of(name: str, compiled: Any, arrays: int, grid: tuple[int, ...], tuning: Tuning, capability: int) -> bytes:
    from jaxlib import gpu_triton

    metadata = compiled.metadata
    kernel = gpu_triton.TritonKernel(
        metadata.name, tuning.warps, 1, metadata.shared, compiled.asm["ptx"], "", capability
    )
    parameters = [gpu_triton.create_array_parameter(0, _ALIGNED)] * arrays
    launch = gpu_triton.TritonKernelCall(kernel, *grid, *(1,) * (3 - len(grid)), parameters)
    return zlib.compress(launch.to_proto(name, b""))


def _interpreted(
    kernel: Any,
    arrays: Sequence[Array | None],
    outputs: Sequence[jax.ShapeDtypeStruct],
    grid: tuple[int, ...],
    aliases: Mapping[int, int],
    constants: Mapping[str, Any],
) -> tuple[Array, ...]:
    given = [place for place, array in enumerate(arrays) if array is not None]

    def run(*values: Array) -> tuple[np.ndarray, ...]:
        hosts: list[_Tensor | None] = [None] * len(arrays)
        for place, value in zip(given, values, strict=True):
            hosts[place] = _Tensor(np.array(value))
        fresh = [_Tensor(_unwritten(one)) for number, one in enumerate(outputs) if number not in aliases.values()]
        kernel[grid](*hosts, *fresh, **constants)
        results = fresh + [hosts[place] for place, _ in sorted(aliases.items(), key=lambda pair: pair[1])]
        return tuple(one.array for one in results if one is not None)

    return tuple(jax.pure_callback(run, tuple(outputs), *(arrays[place] for place in given)))


def _unwritten(like: jax.ShapeDtypeStruct) -> np.ndarray:
    """Return NaN or the smallest integers, to detect unwritten elements."""
    if jax.numpy.issubdtype(like.dtype, np.floating):
        return np.full(like.shape, np.nan, like.dtype)
    return np.full(like.shape, np.iinfo(like.dtype).min, like.dtype)


class _Tensor:
    """The torch tensor interface of Triton's interpreter, on a NumPy array."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = np.ascontiguousarray(array)
        self.dtype = str(self.array.dtype)

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def untyped_storage(self) -> _Tensor:
        return self

    def cpu(self) -> _Tensor:
        return self

    def new_empty(self, *_: Any, device: Any = None) -> _Tensor:
        return self

    def set_(self, *_: Any) -> _Tensor:
        return self

    def copy_(self, _: Any) -> None:
        pass

    def storage_offset(self) -> int:
        return 0

    def size(self) -> tuple[int, ...]:
        return self.array.shape

    def stride(self) -> tuple[int, ...]:
        return tuple(step // self.array.itemsize for step in self.array.strides)
