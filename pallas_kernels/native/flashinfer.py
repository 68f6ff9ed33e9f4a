"""Decode attention with FlashInfer's XQA kernel for NVIDIA GPUs from 9.0.

Unlike its other decode kernels it needs no plan from the host, so it works in CUDA graphs. Neither FlashInfer nor torch
is imported: nvcc compiles one of its files with flashinfer.cu.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.metadata
import importlib.util
import math
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from pallas_kernels import tuning
from pallas_kernels.attention.arguments import AttentionArgs
from pallas_kernels.choice import Site
from pallas_kernels.native import build

VERSION = "0.7.2.post1"  # of flashinfer-python
SOURCE = Path(__file__).with_name("flashinfer.cu")
TYPES = ("float16", "bfloat16")
BLOCKS = (16, 32, 64, 128)  # tokens
_PIECE = 256  # keys per iteration
# Highest score of rows without keys. Combining their pieces gives 0 / 0; an equal sink makes it 0 / 1, without effect
# on others.
_LOWEST = -1e5
_FLAGS = (
    *("-shared", "-Xcompiler=-fPIC", "-std=c++17", "-O3", "-w", "-use_fast_math", "--expt-relaxed-constexpr"),
    *("-DNDEBUG=1", "-DBEAM_WIDTH=1", "-DUSE_INPUT_KV=0", "-DUSE_CUSTOM_BARRIER=1", "-DCACHE_ELEM_ENUM=0"),
    *("-DLOW_PREC_OUTPUT=0", "-DSPEC_DEC=0", "-DMLA_WRAPPER=0", "-DUSE_SM90_MHA=0"),
    "-DSLIDING_WINDOW=1",  # costs no registers; unlimited by default
)
_loading = threading.Lock()


def refusal(operation: str, site: Site) -> str | None:
    """Compile the kernel if necessary, in about ten seconds; return why it cannot run here, or None."""
    group = site.heads // max(site.kv_heads, 1)
    if site.platform != "gpu" or site.capability is None or site.capability // 10 not in (9, 10, 12):
        return "its kernel is for NVIDIA GPUs of capability 9, 10 and 12"
    if site.dtype not in TYPES or site.cache_dtype != site.dtype:
        return (
            f"its kernel attends in {' and '.join(TYPES)} over a cache of the same type (of 8 bits with one scale for "
            f"all of it, ours has one for each vector), not in {site.dtype} over {site.cache_dtype}"
        )
    if site.value_size is not None:
        return "its kernel for latent attention that needs no plan is for capability 12 alone"
    if site.block_tokens not in BLOCKS:
        return f"its kernel takes blocks of {', '.join(map(str, BLOCKS))} tokens, not {site.block_tokens}"
    if site.head_size % 16 or site.head_size > 256:
        return f"its kernel takes heads of a multiple of 16 up to 256, not {site.head_size}"
    padded = max(64, 1 << (site.head_size - 1).bit_length())
    if group > 64 or padded * -(-group // 16) * 16 > 8192:
        return f"{group} query heads of {site.head_size} for each of keys do not fit its kernel"
    if site.has_softcap:
        return "its kernel does not bound scores"
    try:
        load_library(site)
    except build.Refused as error:
        return str(error)
    return None


def paged_decode(q: Array, lengths: Array, args: AttentionArgs, *, capability: int | None) -> Array:
    rows, heads, size = q.shape
    _, kv_heads, tokens, _ = args.k_cache.shape
    site = Site(
        platform="gpu",
        capability=capability,
        dtype=str(q.dtype),
        cache_dtype=str(args.k_cache.dtype),
        heads=heads,
        kv_heads=kv_heads,
        head_size=size,
        value_size=args.value_size,
        block_tokens=tokens,
        has_softcap=args.softcap is not None,
    )
    reason = refusal("paged_decode", site)
    if reason is not None or args.v_cache is None or args.v_cache.shape != args.k_cache.shape:
        raise ValueError(f"paged_decode=flashinfer: {reason or 'its kernel takes values of the size of keys'}")
    name, library = load_library(site)
    tiles, context = rows * kv_heads, args.tables.shape[1] * tokens
    processors = tuning.PROCESSORS[tuning.generation(capability)]
    pieces = min(max(processors // tiles, 1), -(-context // _PIECE))
    no_sinks = jnp.full(heads if pieces > 1 else 0, _LOWEST)
    workspace = jax.ShapeDtypeStruct((library.jaxllm_xqa_bytes(tiles, pieces),), jnp.uint8)
    out, _ = jax.ffi.ffi_call(name, [jax.ShapeDtypeStruct(q.shape, q.dtype), workspace])(
        q,
        args.k_cache,
        args.v_cache,
        args.tables,
        lengths,
        no_sinks if args.sinks is None else args.sinks.astype(jnp.float32),
        scale=np.float32(args.scale * math.sqrt(size)),  # it divides by the root
        window=np.int32(args.window or np.iinfo(np.int32).max),
        processors=np.int32(processors),
    )
    return out


def load_library(site: Site) -> tuple[str, ctypes.CDLL]:
    sizes = {
        "TOKENS_PER_PAGE": site.block_tokens,
        "HEAD_ELEMS": site.head_size,
        "HEAD_GRP_SIZE": site.heads // site.kv_heads,
        "INPUT_FP16": int(site.dtype == "float16"),
    }
    macros = [f"-D{name}={size}" for name, size in sizes.items()]
    with _loading:  # for concurrent tracing
        return _loaded(site.capability or 0, tuple(macros))


@functools.cache
def _loaded(capability: int, macros: tuple[str, ...]) -> tuple[str, ctypes.CDLL]:
    headers = _headers()
    compiler = next(filter(None, map(shutil.which, _compilers())), None)
    if compiler is None:
        raise build.Refused("no nvcc is installed (looked in $CUDA_HOME, $PATH, /usr/local/cuda, nvidia-cuda-nvcc)")
    command = [
        compiler,
        *_FLAGS,
        *macros,
        f"-gencode=arch=compute_{capability}a,code=sm_{capability}a",
        *(f"-I{folder}" for folder in (headers / "csrc", headers / "cccl" / "libcudacxx" / "include")),
        f"-I{jax.ffi.include_dir()}",
    ]
    own = hashlib.sha256(SOURCE.read_bytes()).hexdigest()
    place = build.kept(build.cache_folder(), "xqa", command, [SOURCE], [VERSION, own])
    library = ctypes.CDLL(str(place))
    library.jaxllm_xqa_bytes.argtypes = [ctypes.c_int64, ctypes.c_int64]
    library.jaxllm_xqa_bytes.restype = ctypes.c_int64
    for device in jax.local_devices() if jax.default_backend() == "gpu" else ():
        error = library.jaxllm_xqa_prepare(device.local_hardware_id)
        if error:
            raise build.Refused(f"its kernel is not ready on {device}: CUDA's error {error}")
    name = f"jaxllm_{place.stem}"
    jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(library.jaxllm_xqa), platform="CUDA")
    return name, library


def _headers() -> Path:
    spec = importlib.util.find_spec("flashinfer")
    if spec is None or spec.origin is None:
        raise build.Refused("the package flashinfer-python is not installed")
    version = importlib.metadata.version("flashinfer-python")
    if version != VERSION:
        raise build.Refused(f"it needs flashinfer-python {VERSION}, here is {version}")
    return Path(spec.origin).parent / "data"


def _compilers() -> Iterator[str]:
    """Yield candidate paths of nvcc, the user's first."""
    if "CUDA_HOME" in os.environ:
        yield str(Path(os.environ["CUDA_HOME"]) / "bin" / "nvcc")
    yield "nvcc"
    yield "/usr/local/cuda/bin/nvcc"
    wheels = importlib.util.find_spec("nvidia")
    for folder in (wheels.submodule_search_locations or ()) if wheels else ():
        yield from map(str, sorted(Path(folder).glob("cu*/bin/nvcc")))
