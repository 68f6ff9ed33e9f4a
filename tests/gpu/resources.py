"""Measure the resources of the Triton kernels by compiling them without a GPU: `python -m tests.gpu.resources`.

Registers per thread, spilled bytes, shared memory per program, and use of Hopper's wgmma.
"""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import triton
from tqdm import tqdm

import pallas_kernels
from pallas_kernels import Choice, Kind, triton_bridge

TOOL = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
CAPABILITIES = (80, 90, 100)
# Query heads, key-value heads, head size, further options: Qwen2.5-0.5B, Llama 3 8B, Gemma 2 9B, gpt-oss.
HEADS: dict[str, tuple[int, int, int, dict[str, Any]]] = {
    "0.5B": (14, 2, 64, {}),
    "8B": (32, 8, 128, {}),
    "9B": (16, 8, 256, {"window": 4096, "softcap": 50.0}),
    "gpt-oss": (64, 8, 64, {"window": 128, "sinks": True}),
}
TYPES = (("bfloat16", "bfloat16"), ("bfloat16", "int8"), ("bfloat16", "float8_e4m3fn"), ("float32", "float32"))
# Query heads, latent and rest of DeepSeek-V2-Lite and of V3, on one device and on four, and of a test.
LATENTS = (
    *(("V2-Lite", 16, 512, 64, *types) for types in TYPES),
    *(("V3", 128, 512, 64, *types) for types in (TYPES[0], TYPES[2])),
    ("V3 by four", 32, 512, 64, *TYPES[0]),
    ("a small latent", 5, 16, 8, *TYPES[0]),
)
# Groups of columns of a matrix of 4,096, by the kind of its numbers: as checkpoints of FP8, GPTQ and MXFP4 have them.
WEIGHTS = {"int8": 1, "float8": 1, "int4": 32, "float4": 128}
# Rows and columns of a layer's matrices, and the options of their products: of Qwen2.5-0.5B and Llama 3 8B.
FUSED: dict[str, tuple[int, int, set[str]]] = {
    "0.5B qkv": (1152, 896, {"norm", "bias"}),
    "0.5B out": (896, 896, {"residual"}),
    "0.5B up": (9728, 896, {"norm", "activation"}),
    "0.5B down": (896, 4864, {"residual"}),
    "8B qkv": (6144, 4096, {"norm"}),
    "8B out": (4096, 4096, {"residual"}),
    "8B up": (28672, 4096, {"norm", "activation"}),
    "8B down": (4096, 14336, {"residual"}),
}
# Experts, experts per token, width, an expert's width, and whether biases and a clamp exist: on one device.
EXPERTS = {
    "Qwen3-30B-A3B": (128, 8, 2048, 768, False),
    "Mixtral-8x7B": (8, 2, 4096, 14336, False),
    "gpt-oss-20b": (32, 4, 2880, 2880, True),
}
VOCABULARIES = (32000, 152064)  # of Llama 2 and Qwen2.5 7B
BLOCKS, BLOCK_TOKENS, CONTEXT, TILE = 512, 16, 256, 32  # CONTEXT in blocks

Resources = dict[str, int | bool]


def calls() -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """Return the calls to compile by name: a function of (implementation, *arrays), and the arrays' shapes."""
    found = {}
    for (model, (heads, kv_heads, size, options)), (dtype, cached) in itertools.product(HEADS.items(), TYPES):
        if model == "gpt-oss" and cached != "bfloat16":
            continue
        kind = f"{model}, {cached} cache"
        cache = _array((BLOCKS, kv_heads, BLOCK_TOKENS, size), cached)
        scales = None if cached == dtype else _array(cache.shape[:3], "float32")
        own = (scales, _array((heads,), dtype) if "sinks" in options else None)
        for rows in (1, 64):
            arrays = (_array((rows, heads, size), dtype), cache, cache, _ints(rows, CONTEXT), _ints(rows), *own)
            found[f"paged_decode of {rows} rows, {kind}"] = (partial(_decode, size, options), arrays)
        tiles = tuple(_ints(64) for _ in range(3))
        arrays = (_array((2048, heads, size), dtype), cache, cache, _ints(64, CONTEXT), *tiles, *own)
        found[f"paged_prefill, {kind}"] = (partial(_prefill, size, options), arrays)
        for tokens in (64, 2048):
            qkv, turn = _array((tokens, heads + 2 * kv_heads, size), dtype), _array((tokens, size // 2), "float32")
            arrays = (qkv, cache, cache, _ints(tokens), _ints(tokens), turn, scales)
            found[f"write_kv of {tokens} tokens, {kind}"] = (partial(_write, False), arrays)
    found |= latent_calls()
    cache = _array((BLOCKS, 4, BLOCK_TOKENS, 256), "bfloat16")
    arrays = (_array((2048, 8, 256), "bfloat16"), cache, cache, _ints(64, CONTEXT), *tiles, _ints(2048))
    found["paged_prefill, images of Gemma 3, bfloat16 cache"] = (_prefill_images, arrays)
    for (kind, groups), tokens in itertools.product(WEIGHTS.items(), (16, 256)):
        rows, columns = 6144, 4096
        stored = {"int8": "int8", "float8": "float8_e4m3fn"}.get(kind, "uint8")
        weight = _array((rows, columns // 2 if stored == "uint8" else columns), stored)
        arrays = (_array((tokens, columns), "bfloat16"), weight, _array((groups, rows), "float32"))
        found[f"linear of {tokens} tokens, {kind}"] = (partial(_linear, kind), arrays)
    for (name, (rows, columns, own)), tokens in itertools.product(FUSED.items(), (1, 16, 64)):
        arrays = (_array((tokens, columns), "bfloat16"), _array((rows, columns), "bfloat16"))
        found[f"fused_linear of {tokens} tokens, {name}"] = (partial(_fused, own), arrays)
    for (model, (count, per_token, width, inner, has_bias)), tokens in itertools.product(
        EXPERTS.items(), (16, 256, 2048)
    ):
        shapes = [(tokens, width), (count, 2 * inner, width), (count, width, inner)]
        biases = [(count, 2 * inner), (count, width)] if has_bias else []
        routed = (_ints(tokens, per_token), _array((tokens, per_token), "float32"))
        weights, own = ([_array(shape, "bfloat16") for shape in each] for each in (shapes, biases))
        found[f"fused_experts of {tokens} tokens, {model}"] = (_experts, (*weights, *routed, *own))
    arrays = (_array((64, 128), "float32"), _array((128,), "float32"))
    found["fused_topk of 64 tokens, 8 of 128 experts"] = (_topk, arrays)
    qkv, cache = _array((64, 48, 128), "bfloat16"), _array((BLOCKS, 8, BLOCK_TOKENS, 128), "bfloat16")
    arrays = (qkv, cache, cache, _ints(64), _ints(64), _array((64, 32), "float32"), None)
    found["write_kv of 64 tokens, neighbours, half of a head"] = (partial(_write, True), arrays)
    for size in VOCABULARIES:
        for rows in (1, 64):
            logits, row = _array((rows, size), "float32"), _array((rows,), "float32")
            kinds = {"greedy": (), "random": (row, _array((rows, 2), "uint32"), _ints(rows))}
            kinds["filtered"] = (*kinds["random"], _ints(rows), row, row)
            for kind, own in kinds.items():
                found[f"sample of {rows} rows of {size}, {kind}"] = (_sample, (logits, *own))
    return found


def latent_calls() -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """Return the calls of latent attention, which has one key for all heads and no values."""
    found = {}
    for model, heads, rank, rest, dtype, cached in LATENTS:
        size, options, kind = rank + rest, {"value_size": rank}, f"{model}, {cached} cache"
        cache = _array((BLOCKS, 1, BLOCK_TOKENS, size), cached)
        own = (None if cached == dtype else _array(cache.shape[:3], "float32"), None)
        for rows in (1, 64) if cached == "bfloat16" else (64,):
            arrays = (_array((rows, heads, size), dtype), cache, None, _ints(rows, CONTEXT), _ints(rows), *own)
            found[f"paged_decode of {rows} rows, {kind}"] = (partial(_decode, size, options), arrays)
        tiles = tuple(_ints(64) for _ in range(3))
        arrays = (_array((2048, heads, size), dtype), cache, None, _ints(64, CONTEXT), *tiles, *own)
        found[f"paged_prefill, {kind}"] = (partial(_prefill, size, options), arrays)
        if model == "V2-Lite":
            for tokens in (64, 2048):
                arrays = (_array((tokens, heads + 1, size), dtype), cache, None, _ints(tokens), _ints(tokens), *own)
                found[f"write_kv of {tokens} tokens, {kind}"] = (_write_latents, arrays)
    return found


def measure(call: Any, arrays: tuple[Any, ...], capability: int) -> dict[str, Resources]:
    """Compile the kernels of a call; return the resources of each by name."""
    compiled: dict[str, Resources] = {}
    compile_kernel = triton_bridge.compile_kernel

    def noting(kernel: Any, *given: Any) -> Any:
        result = compile_kernel(kernel, *given)
        compiled[kernel.__name__] = read(result)
        return result

    triton_bridge.compile_kernel = noting
    try:
        jax.eval_shape(partial(call, Choice("triton", capability)), *arrays)
    finally:
        triton_bridge.compile_kernel = compile_kernel
    return compiled


def read(compiled: Any) -> Resources:
    """Read the resources of a compiled kernel from its machine code."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        text = subprocess.run([TOOL, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    registers, stack = (int(re.findall(rf"{name}:(\d+)", text)[-1]) for name in ("REG", "STACK"))
    has_wgmma = "wgmma.mma_async" in compiled.asm["ptx"]
    return {"registers": registers, "stack": stack, "shared": compiled.metadata.shared, "wgmma": has_wgmma}


def everything(capability: int) -> dict[str, Resources]:
    """Compile all kernels for one kind of device."""
    found = {}
    for name, (call, arrays) in tqdm(calls().items(), desc=f"sm_{capability}", disable=not sys.stderr.isatty()):
        if capability < 89 and "float8_e4m3fn" in name:
            continue  # refused there
        for kernel, resources in measure(call, arrays, capability).items():
            found[f"sm_{capability} {kernel}: {name}"] = resources
    return found


def _array(shape: tuple[int, ...], dtype: str) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def _ints(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def _decode(size: int, options: dict[str, Any], implementation: Choice, *arrays: Any) -> Any:
    *given, scales, sinks = arrays
    own = options | {"scale": size**-0.5, "k_scales": scales, "v_scales": _of_values(given, scales), "sinks": sinks}
    return pallas_kernels.paged_decode(*given, **own, implementation=implementation)


def _prefill(size: int, options: dict[str, Any], implementation: Choice, *arrays: Any) -> Any:
    *given, scales, sinks = arrays
    own = options | {"scale": size**-0.5, "k_scales": scales, "v_scales": _of_values(given, scales), "sinks": sinks}
    return pallas_kernels.paged_prefill(*given, **own, tile=TILE, implementation=implementation)


def _prefill_images(implementation: Choice, *arrays: Any) -> Any:
    *given, last_seen = arrays
    own: dict[str, Any] = {"scale": 256**-0.5, "window": 1024, "last_seen": last_seen, "tile": TILE}
    return pallas_kernels.paged_prefill(*given, **own, implementation=implementation)


def _of_values(given: list[Any], scales: Any) -> Any:
    return None if given[2] is None else scales


def _linear(kind: Kind, implementation: Choice, *arrays: Any) -> Any:
    return pallas_kernels.linear(*arrays, kind=kind, implementation=implementation)


def _fused(own: set[str], implementation: Choice, x: Any, weight: Any) -> Any:
    """Multiply as a layer does, with smaller arrays sliced from the product's."""
    norm = pallas_kernels.Norm(weight[0], 1e-5) if "norm" in own else None
    return pallas_kernels.fused_linear(
        x,
        weight,
        weight[:, 0] if "bias" in own else None,
        norm=norm,
        residual=jnp.zeros((len(x), len(weight)), x.dtype) if "residual" in own else None,
        activation="silu" if "activation" in own else None,
        implementation=implementation,
    )


def _experts(implementation: Choice, *arrays: Any) -> Any:
    clamp = 7.0 if len(arrays) > 5 else None
    return pallas_kernels.fused_experts(*arrays, clamp=clamp, implementation=implementation)


def _topk(implementation: Choice, *arrays: Any) -> Any:
    return pallas_kernels.fused_topk(*arrays, per_token=8, is_normalised=True, implementation=implementation)


def _write(is_interleaved: bool, implementation: Choice, *arrays: Any) -> Any:
    *given, turn, scales = arrays
    own = {"turn": (turn, turn), "k_scales": scales, "v_scales": scales, "is_interleaved": is_interleaved}
    return pallas_kernels.write_kv(*given, **own, implementation=implementation)


def _write_latents(implementation: Choice, *arrays: Any) -> Any:
    *given, scales, _ = arrays
    return pallas_kernels.write_kv(*given, k_scales=scales, implementation=implementation)


def _sample(implementation: Choice, *arrays: Any) -> Any:
    return pallas_kernels.sample(*arrays, implementation=implementation)


def main() -> None:
    found = {name: kernel for capability in CAPABILITIES for name, kernel in everything(capability).items()}
    for name, kernel in found.items():
        print(json.dumps({name: kernel}))


if __name__ == "__main__":
    main()
