"""The time of each kernel, against the machine's two ceilings and torch's attention on the same shapes.

If a rival decode kernel is faster, it is written to the table that `pallas_kernels.resolve` reads. Torch's keys and
values are contiguous, which is easier than pages; its calls are timed one by one.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels
from pallas_kernels import choice, measuring, tune
from pallas_kernels.measuring import Case
from tests.gpu_check.check import Check
from tests.gpu_check.parts import missing
from tests.gpu_check.sites import choices, site_of

Heads = tuple[int, int, int]
# XLA:CPU does not multiply bfloat16 inside loops.
DTYPE, DRY_DTYPE = "bfloat16", "float32"
HEADS: dict[str, Heads] = {"8B": (32, 8, 128), "0.5B": (14, 2, 64)}
TINY: dict[str, Heads] = {"tiny": (4, 2, 16)}
# Query heads over one latent of 512 and a rest of 64: DeepSeek-V2-Lite, V3.
LATENTS: dict[str, tuple[Heads, int]] = {"V2-Lite": ((16, 1, 576), 512), "V3": ((128, 1, 576), 512)}
TINY_LATENTS: dict[str, tuple[Heads, int]] = {"tiny latents": ((4, 1, 24), 16)}
LATENT_ROWS, LATENT_CONTEXT = (1, 64), 8192
ROWS, CONTEXTS = (1, 16, 64, 256), (1024, 8192, 32768)
PROMPTS = ((1, 1024), (1, 8192), (1, 32768), (16, 1024))
# Width, columns of the heads' product, feed-forward width.
LAYERS: dict[str, tuple[int, int, int]] = {"8B": (4096, 6144, 14336), "0.5B": (896, 1152, 4864)}
TINY_LAYERS: dict[str, tuple[int, int, int]] = {"tiny": (64, 128, 96)}
FEW = (1, 16, 64)
CACHES = ("int8", "float8_e4m3fn")
TOKENS = (1, 16, 64, 256, 8192)
# E, n, D, F of Qwen3-30B-A3B.
EXPERTS, TINY_EXPERTS = (128, 8, 2048, 768), (4, 2, 32, 24)
ROUTED = (2, 16, 64, 256, 2048)
SLOW_TOKENS = 65536  # most in the cache for timing implementations that are never the default
SLOW_PROMPT = 1024
RIVALS = ("flashinfer",)  # of the default on a GPU; timed on every shape
LEAST_GAIN = 1.03  # at which a rival is selected
DECODE_AIM, DECODE_FROM, PREFILL_AIM = 0.80, 32768, 0.60


def run(check: Check) -> None:
    ceilings = check.ceilings()
    memory = ceilings["memory_gb"] * 1e9
    heads, dtype = TINY if check.is_dry else HEADS, _dtype(check)
    rows, contexts, prompts = ((3,), (40,), ((1, 40),)) if check.is_dry else (ROWS, CONTEXTS, PROMPTS)
    largest = next(iter(heads))
    decoded: dict[str, list[dict[str, float]]] = {model: [] for model in heads}
    # Shapes with targets are first.
    for context in reversed(contexts):
        for number in rows:
            for model, own in heads.items():
                num_bytes = 4 * own[1] * own[2] * number * context
                what = f"paged_decode, {model}, {number} rows of {context}"
                if memory and num_bytes > memory * 0.45:
                    check.skip(f"{what}: its cache of {num_bytes / 1e9:.0f} GB does not fit")
                    continue
                decoded[model].append(_decode(check, ceilings, what, model, own, number, context))
    if not check.is_dry:
        for model, own in heads.items():
            with check.guarded(f"paged_decode, {model}, which is the fastest"):
                note_fastest(check, model, own, decoded[model])
    for number, length in prompts:
        for model, own in heads.items():
            what = f"paged_prefill, {model}, {number} prompts of {length}"
            _all(
                check, ceilings, "paged_prefill", what, own, dtype, length <= SLOW_PROMPT,
                lambda own=own, number=number, length=length: measuring.prefill(own, number, length, dtype),
            )  # fmt: skip
            if not check.is_over(4, f"{what}, torch"):
                _torch(check, ceilings, what, own, number, length, length)
    for cache_dtype in CACHES:
        what = f"paged_decode, {largest}, {rows[-1]} rows of {contexts[0]}, cache of {cache_dtype}"
        _all(check, ceilings, "paged_decode", what, heads[largest], cache_dtype, False,
             lambda cached=cache_dtype: measuring.decode(
                 heads[largest], rows[-1], contexts[0], dtype, cached, _pool(check)))  # fmt: skip
    _latents(check, ceilings)
    for tokens in (3,) if check.is_dry else TOKENS:
        what = f"write_kv, {largest}, {tokens} tokens"
        _all(check, ceilings, "write_kv", what, heads[largest], dtype, True,
             lambda tokens=tokens: _write(heads[largest], tokens, dtype))  # fmt: skip
    for model, layer in (TINY_LAYERS if check.is_dry else LAYERS).items():
        for tokens in (3,) if check.is_dry else FEW:
            what = f"fused_linear, the products of layers of {model}, {tokens} tokens"
            _all(check, ceilings, "fused_linear", what, heads[model], dtype, True,
                 lambda layer=layer, tokens=tokens: measuring.products(
                     *layer, tokens, dtype, _pool(check)))  # fmt: skip
    for tokens in (3,) if check.is_dry else ROUTED:
        what = f"fused_experts, Qwen3-30B-A3B, {tokens} tokens"
        _all(check, ceilings, "fused_experts", what, heads[largest], dtype, tokens <= 64,
             lambda tokens=tokens: _experts(TINY_EXPERTS if check.is_dry else EXPERTS, tokens, dtype))  # fmt: skip


def _latents(check: Check, ceilings: dict[str, float]) -> None:
    """Time attention to latents, in decode steps and in one prompt."""
    dtype = _dtype(check)
    rows, context = ((3,), 40) if check.is_dry else (LATENT_ROWS, LATENT_CONTEXT)
    for model, (heads, width) in (TINY_LATENTS if check.is_dry else LATENTS).items():
        for number in rows:
            what = f"paged_decode, {model}, {number} rows of {context}"
            _all(check, ceilings, "paged_decode", what, heads, dtype, check.is_dry,
                 lambda heads=heads, width=width, number=number: measuring.decode(
                     heads, number, context, dtype, None, _pool(check), width), width)  # fmt: skip
        what = f"paged_prefill, {model}, 1 prompt of {context}"
        _all(check, ceilings, "paged_prefill", what, heads, dtype, check.is_dry,
             lambda heads=heads, width=width: measuring.prefill(
                 heads, 1, context, dtype, None, width), width)  # fmt: skip


def _decode(
    check: Check, ceilings: dict[str, float], what: str, model: str, heads: Heads, rows: int, context: int
) -> dict[str, float]:
    dtype = _dtype(check)
    shares = _all(
        check, ceilings, "paged_decode", what, heads, dtype, rows * context <= SLOW_TOKENS and model != "0.5B",
        lambda: measuring.decode(heads, rows, context, dtype, pool_bytes=_pool(check)),
    )  # fmt: skip
    best = shares.get(pallas_kernels.resolve("paged_decode", site_of(dtype, dtype, heads)).name)
    if best is not None and rows * context >= DECODE_FROM and model == "8B":
        check.target(f"{what}, share of bandwidth", best, DECODE_AIM, is_least=True)
    if model != "0.5B" and not check.is_over(4, f"{what}, torch"):
        _torch(check, ceilings, what, heads, rows, 1, context)
    return shares


def gains(shapes: Sequence[Mapping[str, float]], usual: str) -> dict[str, float]:
    """Return the speed of each rival relative to the default: the geometric mean over shapes that both ran."""
    ratios = {rival: [one[rival] / one[usual] for one in shapes if {rival, usual} <= set(one)] for rival in RIVALS}
    return {rival: statistics.geometric_mean(own) for rival, own in ratios.items() if own}


def note_fastest(check: Check, model: str, heads: Heads, shapes: Sequence[Mapping[str, float]]) -> None:
    """Write to the table whether a rival decodes faster with these heads; unchanged if none was timed."""
    facts = choice.deciding("paged_decode", site_of(DTYPE, DTYPE, heads))
    found = gains(shapes, choice.PREFERRED["gpu"]["paged_decode"][0])
    if not found:
        return
    rival = max(found, key=lambda name: found[name])
    check.measure(call=f"paged_decode, {model}, all shapes", by=rival, times_as_fast=found[rival])
    table = [row for row in choice.fastest() if not facts.items() <= row.items()]
    if found[rival] >= LEAST_GAIN:
        measured = {"device": jax.devices()[0].device_kind, "jax": jax.__version__, "times": round(found[rival], 3)}
        table.append({**facts, "fastest": rival, "measured": measured})
    tune.write(table, choice.FASTEST)
    choice.fastest.cache_clear()


def _all(
    check: Check,
    ceilings: dict[str, float],
    operation: str,
    what: str,
    heads: Heads,
    cache_dtype: str,
    has_slow: bool,
    make: Callable[[], Case],
    value_size: int | None = None,
) -> dict[str, float]:
    """Time the implementations that run here, slow ones only if `has_slow`; return shares of the ceiling."""
    shares = {}
    site = site_of(_dtype(check), cache_dtype, heads, value_size=value_size)
    best = pallas_kernels.resolve(operation, site).name
    always = {best, *choice.COMPILED} if site.platform == "gpu" else {best}
    for name, chosen in choices(operation, site):
        if isinstance(chosen, str):
            continue
        if (name not in always and not has_slow) or check.is_over(3, f"{what}, {name}"):
            continue
        with check.guarded(f"{what}, {name}"):
            case = make()
            floor, of = _floor(case, ceilings)
            taken = measuring.seconds(case.step(chosen), case.arrays, _turns(check, floor), 3)
            shares[name] = floor / taken
            check.measure(call=what, by=name, microseconds=1e6 * taken, share=shares[name], of=of)
            if operation == "paged_prefill" and name == best and heads[2] == 128 and of == "matrix rate":
                check.target(f"{what}, share of matrix rate", shares[name], PREFILL_AIM, is_least=True)
    return shares


def _floor(case: Case, ceilings: dict[str, float]) -> tuple[float, str]:
    """Return the least possible seconds, and the resource that bounds them."""
    floors = {
        "bandwidth": case.num_bytes / ceilings["read_bytes_per_second"],
        "matrix rate": case.flops / ceilings["flops_per_second"],
    }
    of = max(floors, key=lambda name: floors[name])
    return floors[of], of


def _turns(check: Check, floor: float) -> int:
    return 2 if check.is_dry else int(np.clip(0.02 / floor, 3, 200))


def _dtype(check: Check) -> str:
    return DRY_DTYPE if check.is_dry else DTYPE


def _pool(check: Check) -> int:
    return 1 << 16 if check.is_dry else measuring.POOL_BYTES


def _write(heads: Heads, tokens: int, dtype: str) -> Case:
    """Make tokens to store, in other blocks at each turn."""
    num_heads, kv_heads, size = heads
    blocks = 4 * tokens
    cache = (blocks, kv_heads, measuring.BLOCK, size)
    qkv = measuring.noise((tokens, num_heads + 2 * kv_heads, size), dtype)
    turn = (measuring.noise((tokens, size // 2), "float32"), measuring.noise((tokens, size // 2), "float32", 1))

    def step(implementation: Any) -> measuring.Step:
        def write(number: jax.Array, arrays: Any) -> tuple[jax.Array, Any]:
            qkv, k, v = arrays
            places = (jnp.arange(tokens, dtype=jnp.int32) * 3 + number) % blocks
            offsets = jnp.full(tokens, 5, jnp.int32)
            made = pallas_kernels.write_kv(qkv, k, v, places, offsets, turn=turn, implementation=implementation)
            return made.q, (qkv, made.k_cache, made.v_cache)

        return write

    arrays = (qkv, measuring.noise(cache, dtype, 1), measuring.noise(cache, dtype, 2))
    return Case(step, arrays, 2 * qkv.nbytes + 2 * turn[0].nbytes, 0)


def _experts(sizes: tuple[int, int, int, int], tokens: int, dtype: str) -> Case:
    """Make tokens with random experts, others at each turn."""
    count, per_token, width, inner = sizes
    random = np.random.default_rng(0)
    chosen = np.argsort(random.random((tokens, count)), axis=1)[:, :per_token].astype(np.int32)
    up, down = measuring.noise((count, 2 * inner, width), dtype), measuring.noise((count, width, inner), dtype, 1)
    x = measuring.noise((tokens, width), dtype, 2)

    def step(implementation: Any) -> measuring.Step:
        def multiply(number: jax.Array, arrays: Any) -> tuple[jax.Array, Any]:
            x, up, down, chosen, gates = arrays
            moved = (chosen + number) % count
            out = pallas_kernels.fused_experts(x, up, down, moved, gates, implementation=implementation)
            return out, arrays

        return multiply

    arrays = (x, up, down, jnp.asarray(chosen), jnp.asarray(random.random(chosen.shape), jnp.float32))
    read = len(np.unique(chosen)) * (up.nbytes + down.nbytes) // count
    return Case(step, arrays, read + 2 * x.nbytes, 6 * chosen.size * width * inner)


def _torch(
    check: Check, ceilings: dict[str, float], what: str, heads: Heads, rows: int, queries: int, context: int
) -> None:
    """Time torch's attention, flex attention (compiled) and flash_attn, if installed."""
    if missing(("torch",)):
        check.skip("torch's attention: torch is not installed")
        return
    import torch  # pyright: ignore[reportMissingImports]

    device = "cuda" if torch.cuda.is_available() else "cpu"
    num_heads, kv_heads, size = heads
    is_causal = queries > 1
    kind = {"device": device, "dtype": torch.bfloat16}

    def made() -> tuple[Any, Any, Any]:
        q = torch.randn(rows, num_heads, queries, size, **kind)
        # One random piece, repeated: drawing gigabytes would take longer than the measurement.
        piece = torch.randn(1, kv_heads, context, size, **kind)
        return q, piece.expand(rows, -1, -1, -1).contiguous(), piece.flip(2).expand(rows, -1, -1, -1).contiguous()

    def sdpa(q: Any, k: Any, v: Any) -> Any:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True)

    calls: dict[str, Callable[[Any, Any, Any], Any]] = {"torch sdpa": sdpa}
    if device == "cuda" and (rows, context) in ((16, 8192), (1, 8192)) and num_heads == 32:
        if check.left > 25:
            calls["torch flex, compiled"] = _flex(torch, is_causal, queries, context)
        if not missing(("flash_attn",)):
            from flash_attn import flash_attn_func  # pyright: ignore[reportMissingImports]

            calls["flash_attn"] = lambda q, k, v: flash_attn_func(
                *(one.transpose(1, 2) for one in (q, k, v)), causal=is_causal
            )
    num_bytes = 2 * (2 * rows * context * kv_heads * size + 2 * rows * queries * num_heads * size)
    scored = queries * (queries + 1) // 2 if is_causal else context
    floor, of = _floor(
        Case(lambda _: lambda _, __: (_, __), (), num_bytes, 4 * rows * num_heads * size * scored), ceilings
    )
    with check.guarded(f"{what}, torch"), torch.inference_mode():
        arrays = made()
        for name, call in calls.items():
            with check.guarded(f"{what}, {name}"):
                taken = _torch_seconds(torch, device, lambda call=call: call(*arrays), _turns(check, floor))
                check.measure(call=what, by=name, microseconds=1e6 * taken, share=floor / taken, of=of)
    if device == "cuda":
        torch.cuda.empty_cache()


def _flex(torch: Any, is_causal: bool, queries: int, context: int) -> Callable[[Any, Any, Any], Any]:
    from torch.nn.attention.flex_attention import (  # pyright: ignore[reportMissingImports]
        create_block_mask,
        flex_attention,
    )

    mask = None
    if is_causal:
        mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, queries, context, device="cuda")
    compiled = torch.compile(flex_attention)
    return lambda q, k, v: compiled(q, k, v, block_mask=mask, enable_gqa=True)


def _torch_seconds(torch: Any, device: str, call: Callable[[], Any], turns: int) -> float:
    """Return the seconds of one call, the median of three rounds."""

    def wait() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    call()
    wait()
    taken = []
    for _ in range(3):
        began = time.perf_counter()
        for _ in range(turns):
            call()
        wait()
        taken.append((time.perf_counter() - began) / turns)
    return statistics.median(taken)
