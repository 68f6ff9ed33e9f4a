"""The questions that only a GPU can answer: a small measurement and one line each."""

from __future__ import annotations

import pickle
import statistics
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import serialize_executable
from jax.sharding import NamedSharding, PartitionSpec

import pallas_kernels
from jaxllm.runner import step
from pallas_kernels import measuring, tuning
from tests.gpu_check.check import Check
from tests.gpu_check.parts import missing
from tests.gpu_check.sites import choices, site_of

HEADS, DRY_HEADS = (32, 8, 128), (4, 2, 16)
CALLS = 48  # of a kernel in one step: two in each of 24 layers
WIDTHS, DRY_WIDTHS = (4096, 14336), (64, 96)
VOCABULARY, DRY_VOCABULARY = 151936, 512
LAYERS = 32  # each of which has two sums over devices
GRAPHS = "xla_gpu_enable_command_buffer"
LEAVES = 170  # of a model of 24 layers, as a step is given them


def run(check: Check) -> None:
    for question, answer in QUESTIONS.items():
        if not check.is_over(2, question):
            with check.guarded(question):
                check.answer(question, answer(check))


def _bridge(check: Check) -> str:
    """Chain writes as a step's layers are, in one program, with each implementation."""
    heads = DRY_HEADS if check.is_dry else HEADS
    count = 2 if check.is_dry else CALLS
    num_heads, kv_heads, size = heads
    qkv = measuring.noise((1, num_heads + 2 * kv_heads, size), "bfloat16")
    found = []
    for name, chosen in choices("write_kv", site_of("bfloat16", "bfloat16", heads)):
        if isinstance(chosen, str):
            continue
        caches = [measuring.noise((64, kv_heads, 16, size), "bfloat16", seed) for seed in range(2 * count)]

        def step(qkv: jax.Array, caches: list[jax.Array], chosen: Any = chosen) -> tuple[jax.Array, list[jax.Array]]:
            made = list(caches)
            place = jnp.zeros(1, jnp.int32)
            for layer in range(count):
                k, v = caches[2 * layer : 2 * layer + 2]
                written = pallas_kernels.write_kv(qkv, k, v, place, place, implementation=chosen)
                made[2 * layer : 2 * layer + 2] = [written.k_cache, k if written.v_cache is None else written.v_cache]
                qkv = qkv.at[:, :num_heads].set(written.q + 1)
            return qkv, made

        run = jax.jit(step, donate_argnums=(0, 1))
        state = run(qkv + 0, caches)
        found.append(f"{name} {1e6 * _each(lambda state, run=run: run(*state), state) / count:.2f} us a call")
    absent = "; jax_triton is not installed, nothing to compare with" if missing(("jax_triton",)) else ""
    return f"{', '.join(found)} (with one elementwise kernel between two), {count} in one program{absent}."


def _splits(check: Check) -> str:
    """Have fewer or more programs share the keys than are expected to run at once."""
    if jax.devices()[0].platform != "gpu":
        return "not asked of a CPU."
    capability = pallas_kernels.capability_of(jax.devices()[0])
    chosen, usual, found = pallas_kernels.Choice("triton", capability), tuning.RESIDENT, []
    for rows, context in ((1, 8192), (1, 32768), (16, 8192), (64, 8192)):
        taken = {}
        for resident in (1, 2, 3, 4, 6, 8):
            if check.left < 3:
                break
            with mock.patch.object(tuning, "RESIDENT", resident):
                case = measuring.decode(HEADS, rows, context)
                taken[resident] = measuring.seconds(case.step(chosen), case.arrays, 20, 3)
        if taken:
            best = min(taken, key=lambda resident: taken[resident])
            shares = {resident: round(taken[best] / one, 2) for resident, one in taken.items()}
            found.append(f"{rows} x {context}: {best} (chosen: {usual}; speed by programs {shares})")
    return "programs of a multiprocessor: " + "; ".join(found) + "."


def _products(check: Check) -> str:
    """Compare what XLA picks with no Triton, and 8-bit weights with 16-bit ones."""
    inner, outer = DRY_WIDTHS if check.is_dry else WIDTHS
    wide, narrow = measuring.noise((inner, outer), "bfloat16"), measuring.noise((inner, outer), "int8", 1)
    scale = jnp.ones(outer, jnp.bfloat16)
    on_gpu = jax.devices()[0].platform == "gpu"
    variants: dict[str, tuple[Any, dict[str, Any]]] = {"bf16": (wide, {}), "int8": (narrow, {})}
    if on_gpu:
        variants["bf16 without Triton"] = (wide, {"xla_gpu_enable_triton_gemm": False})
    bandwidth, found = check.ceilings()["read_bytes_per_second"], []
    for rows in (2,) if check.is_dry else (1, 16, 64):
        x, shares = measuring.noise((rows, inner), "bfloat16", 2), []
        for name, (weights, flags) in variants.items():

            def multiply(x: jax.Array, weights: jax.Array) -> jax.Array:
                # Eight products, each waiting for the one before it.
                for _ in range(8):
                    product = (x @ weights.astype(jnp.bfloat16)) * scale
                    x = x + product[:, :inner] * jnp.bfloat16(1e-6)
                return x

            program = jax.jit(multiply).lower(x, weights).compile(compiler_options=flags or None)
            taken = _each(lambda y, program=program, weights=weights: program(y, weights), x) / 8
            shares.append(f"{name} {weights.nbytes / taken / bandwidth:.0%}")
        found.append(f"{rows} rows: {', '.join(shares)}")
    return f"share of bandwidth, {inner} x {outer}: {'; '.join(found)}."


def _flags(check: Check) -> str:
    return f"COLLECTIVES: {_collectives(check)}; SKIP_TEMP: {_skip_temp()}"


def _collectives(check: Check) -> str:
    """Time a step's products and sums over devices with the sums inside the CUDA graph, as steps are, and outside."""
    devices = jax.devices()
    if len(devices) < 2:
        return "one device is here, it needs several"
    mesh, over = jax.make_mesh((len(devices),), ("tp",)), PartitionSpec
    width, count = (64, 2) if check.is_dry else (4096, 2 * LAYERS)
    weight = jax.device_put(measuring.noise((width, width), "bfloat16"), NamedSharding(mesh, over(None, "tp")))

    def chain(x: jax.Array, weight: jax.Array) -> jax.Array:
        own = weight.shape[1]
        for _ in range(count):
            x = x + lax.psum((x[:, :own] @ weight.T) * jnp.bfloat16(1e-3), "tp")
        return x

    whole = jax.shard_map(chain, mesh=mesh, in_specs=(over(), over(None, "tp")), out_specs=over())
    lowered = jax.jit(whole, donate_argnums=0).lower(
        jax.device_put(measuring.noise((64, width), "bfloat16", 1), NamedSharding(mesh, over())), weight
    )
    usual, taken = step.compiler_options("gpu")[GRAPHS], {}
    for name, kinds in {"inside": usual, "outside": usual.replace(",COLLECTIVES", "")}.items():
        program = lowered.compile(compiler_options={GRAPHS: kinds})
        x = jax.device_put(measuring.noise((64, width), "bfloat16", 1), NamedSharding(mesh, over()))
        taken[name] = 1e6 * _each(lambda x, program=program: program(x, weight), x)
    text = f"{count} products and sums over {len(devices)} devices take {taken['inside']:.0f} us with the sums inside "
    text += f"the graph and {taken['outside']:.0f} outside"
    if taken["outside"] < 0.98 * taken["inside"]:
        text += f": start engines here with XLA_FLAGS=--{GRAPHS}={usual.replace(',COLLECTIVES', '')}"
    return text


def _skip_temp() -> str:
    """Try the graphs' other way of being patched."""
    if jax.devices()[0].platform != "gpu":
        return "not asked of a CPU."
    leaves = [measuring.noise((256, 256), "bfloat16", seed) for seed in range(32)]

    def chain(x: jax.Array, leaves: list[jax.Array]) -> jax.Array:
        for leaf in leaves:
            x = jnp.tanh(x @ leaf)
        return x

    lowered = jax.jit(chain, donate_argnums=0).lower(leaves[0], leaves)
    taken = {}
    for mode in ("ALWAYS_UPDATE", "SKIP_TEMP"):
        program = lowered.compile(compiler_options={"xla_gpu_command_buffer_update_mode": mode})
        taken[mode] = 1e6 * _each(lambda x, program=program: program(x, leaves), leaves[0] + 0)
    return (
        f"32 small products in one program take {taken['ALWAYS_UPDATE']:.0f} us, with it {taken['SKIP_TEMP']:.0f} us."
    )


def _dispatch(check: Check) -> str:
    """Give a program as many donated arrays as a step has, and read nothing back."""
    leaves = [jnp.ones(8, jnp.float32) for _ in range(LEAVES)]
    run = jax.jit(lambda leaves: [leaf + 1 for leaf in leaves], donate_argnums=0)
    leaves = jax.block_until_ready(run(leaves))
    count = 10 if check.is_dry else 200
    began = time.perf_counter()
    for _ in range(count):
        leaves = run(leaves)
    given = (time.perf_counter() - began) / count
    jax.block_until_ready(leaves)
    whole = (time.perf_counter() - began) / count
    return (
        f"a program of {LEAVES} donated arrays is dispatched in {1e6 * given:.0f} us and done in {1e6 * whole:.0f} us, "
        "one behind the other; of the engine's steps see the part step."
    )


def _top(check: Check) -> str:
    size = DRY_VOCABULARY if check.is_dry else VOCABULARY
    found = []
    for rows in (2,) if check.is_dry else (16, 256):
        logits = measuring.noise((rows, size), "float32")
        calls: dict[str, Callable[[jax.Array], Any]] = {
            "argmax": lambda x: jnp.argmax(x, -1),
            "top 16": lambda x: lax.top_k(x, 16),
            "top 64": lambda x: lax.top_k(x, 64),
            "sort": jnp.sort,
        }
        texts = []
        for name, call in calls.items():

            def step(turn: jax.Array, x: jax.Array, call: Any = call) -> tuple[jax.Array, jax.Array]:
                sums = [one.astype(jnp.float32).sum() for one in jax.tree.leaves(call(x + turn))]
                return jnp.stack(sums), x

            texts.append(f"{name} {1e6 * measuring.seconds(step, logits + 0, 2 if check.is_dry else 10, 3):.0f} us")
        found.append(f"{rows} rows: {', '.join(texts)}")
    return f"of {size} logits, {'; '.join(found)}."


def _load(check: Check) -> str:
    """Compile a program, keep it, and load it as another process would."""
    leaves = [measuring.noise((64, 64), "bfloat16", seed) for seed in range(8)]

    def chain(x: jax.Array, leaves: list[jax.Array]) -> jax.Array:
        for leaf in leaves:
            x = jnp.tanh(x @ leaf) + jnp.sort(x)
        return x

    lowered = jax.jit(chain).lower(leaves[0], leaves)
    began = time.perf_counter()
    compiled = lowered.compile()
    between = time.perf_counter()
    text = pickle.dumps(serialize_executable.serialize(compiled))
    kept = time.perf_counter()
    loaded = serialize_executable.deserialize_and_load(*pickle.loads(text), execution_devices=jax.devices()[:1])
    took = time.perf_counter() - kept
    one, other = (np.asarray(program(leaves[0], leaves), np.float32) for program in (compiled, loaded))
    same = "the same result" if np.array_equal(one, other) else "ANOTHER result"
    return f"compiled in {between - began:.2f} s, loaded in {took:.3f} s ({len(text) / 1e3:.0f} kB), {same}."


def _each(call: Callable[[Any], Any], state: Any, count: int = 30) -> float:
    """Return the seconds of a call whose result is the next one's argument, the median of three rounds."""
    taken = []
    state = jax.block_until_ready(call(state))
    for _ in range(3):
        began = time.perf_counter()
        for _ in range(count):
            state = call(state)
        jax.block_until_ready(state)
        taken.append((time.perf_counter() - began) / count)
    return statistics.median(taken)


QUESTIONS: dict[str, Callable[[Check], str]] = {
    "1. What does a call of the bridge cost in a program of many?": _bridge,
    "2. Among how many programs should contexts be divided?": _splits,
    "3. Which matrix products does XLA pick, and do 8-bit weights stay fused?": _products,
    "4. What are +COLLECTIVES and SKIP_TEMP worth?": _flags,
    "5. How long does the host take for a step?": _dispatch,
    "6. What do top_k and sort take?": _top,
    "7. Is a serialized program loaded faster than compiled?": _load,
}
