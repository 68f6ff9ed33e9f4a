"""Decode attention and SwiGLU on one H100, variants beside today's: python gpu_sweep.py [--budget 75] [--out FILE].

--dry runs tiny cases in Triton's interpreter on a CPU (TRITON_INTERPRET=1); --aot compiles all kernels for 9.0 only.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import threading
import time
import traceback
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from pathlib import Path

T0 = time.monotonic()
ap = argparse.ArgumentParser()
ap.add_argument("--budget", type=float, default=75)
ap.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "/tmp")) / "attend_sweep2.json")
ap.add_argument("--dry", action="store_true")
ap.add_argument("--aot", action="store_true")
ap.add_argument("--cases", default="")
opt = ap.parse_args()
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")
if opt.dry:
    os.environ |= {"TRITON_INTERPRET": "1", "JAX_PLATFORMS": "cpu"}
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import jax
import jax.numpy as jnp
import numpy as np
import triton
import triton.language as tl
from jax import lax

from pallas_kernels.attention import triton_pieces
from pallas_kernels.attention.division import Pieces, evenly
from pallas_kernels.attention.triton_decode import attend_pieces
from pallas_kernels.attention.triton_kernels import attend
from pallas_kernels.triton_activations import gated
from pallas_kernels.triton_bridge import call
from pallas_kernels.tuning import Tuning

HEADS, KV, SIZE, P = (32, 8, 128, 16)
DTYPE = jnp.float16 if opt.dry else jnp.bfloat16
M = 16 if opt.dry else 2048
SCALE = 0.3
RESULTS, FAILED = [], []
CAP = 90


def say(*a):
    print(f"[{time.monotonic() - T0:5.1f}]", *a, flush=True)


def left():
    return opt.budget - (time.monotonic() - T0)


# ---- kernels -------------------------------------------------------------------------------------------------------


@triton.jit
def swiglu(x, out, F: tl.constexpr, BF: tl.constexpr, BT: tl.constexpr, KIND: tl.constexpr):
    """BT tokens of BF columns."""
    columns = tl.program_id(0) * BF + tl.arange(0, BF)
    tokens = (tl.program_id(1) * BT + tl.arange(0, BT)).to(tl.int64)
    at = x + tokens[:, None] * (2 * F) + columns[None, :]
    gate = tl.load(at)
    up = tl.load(at + F)
    result = gated(gate.to(tl.float32), up.to(tl.float32), KIND, None, 1.0)
    tl.store(out + tokens[:, None] * F + columns[None, :], result.to(out.dtype.element_ty))


@triton.jit
def combine_columns(
    values, sums, piece_first, piece_counts, sinks, out,
    H: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Bring BV columns of all heads' values together; grid (blocks of H x V, rows)."""
    row = tl.program_id(1)
    columns = tl.program_id(0) * BV + tl.arange(0, BV)
    heads = columns // V
    count = tl.load(piece_counts + row)
    first = tl.load(piece_first + row)
    if count > 1:
        result = tl.zeros((BV,), tl.float32)
        highest = tl.full((BV,), -1e30, tl.float32)
        total = tl.zeros((BV,), tl.float32)
        for at in range(0, count, AT_ONCE):
            pieces = at + tl.arange(0, AT_ONCE)
            is_there = (pieces < count)[:, None]
            own = (first + pieces)[:, None] * H + heads[None, :]
            highests = tl.load(sums + 2 * own, mask=is_there, other=-1e30)
            totals = tl.load(sums + 2 * own + 1, mask=is_there, other=0.0)
            found = tl.load(values + (first + pieces)[:, None] * (H * V) + columns[None, :], mask=is_there, other=0.0)
            higher = tl.maximum(highest, tl.max(highests, 0))
            shrink = tl.exp2(highest - higher)
            weights = tl.where(is_there, tl.exp2(highests - higher[None, :]), 0.0)
            result = result * shrink + tl.sum(found * weights, 0)
            total = total * shrink + tl.sum(weights * totals, 0)
            highest = higher
        tl.store(out + row * (H * V) + columns, (result / total).to(out.dtype.element_ty))


def attended(variant, q, k, v, table, lengths):
    """One layer's attention as a variant does it: form, keys, warps, stages, least keys, programs of a processor, joined."""
    form, keys, warps, stages, least, resident, at_once = variant
    rows = len(lengths)
    pieces = evenly(lengths, M * P, None, keys, max(resident * 132 // KV, 1), least)
    apart = triton_pieces.outputs(pieces, rows, HEADS, SIZE)
    own = {"H": HEADS, "K": KV, "C": SIZE, "V": SIZE, "CP": SIZE, "VP": SIZE, "P": P, "M": M, "BM": 16, "BN": keys}
    own |= {"SCALE": SCALE * triton_pieces.LOG2_E, "WINDOW": None, "SOFTCAP": None}
    if not apart:
        own |= {"parts": None, "sums": None}
    shapes = [jax.ShapeDtypeStruct(q.shape, q.dtype), *apart]
    grid = (len(pieces.row), KV)
    tuning = Tuning(warps, stages)
    if form == "old":
        arrays = (q, k, v, None, None, table, lengths, None, None, None, *pieces[:3], pieces.count)
        out, *written = call(attend, arrays, shapes, grid, tuning, CAP, **own)
    else:
        counts = jnp.where(pieces.row >= 0, pieces.count[pieces.row], 1)
        packed = jnp.stack([pieces.row, pieces.begin, pieces.end, counts], axis=1)
        own["HEADS_FIRST"] = form == "swap"
        grid = grid[::-1] if form == "swap" else grid
        out, *written = call(
            attend_pieces, (q, k, v, None, None, table, None, None, packed), shapes, grid, tuning, CAP, **own
        )
    if not written:
        return out
    if at_once[1] > SIZE or at_once[3]:
        once, columns, warps, _ = at_once
        (out,) = call(
            combine_columns,
            (*written, pieces.first, pieces.count, None, out),
            [jax.ShapeDtypeStruct(out.shape, out.dtype)],
            (HEADS * SIZE // columns, rows),
            Tuning(warps, 1),
            CAP,
            aliases={5: 0},
            H=HEADS,
            V=SIZE,
            BV=columns,
            AT_ONCE=once,
        )
        return out
    once, columns, warps, _ = at_once
    (out,) = call(
        triton_pieces.combine, (*written, pieces.first, pieces.count, None, out),
        [jax.ShapeDtypeStruct(out.shape, out.dtype)], (rows, HEADS, SIZE // columns), Tuning(warps, 1), CAP, aliases={5: 0},
        H=HEADS, V=SIZE, BV=columns, AT_ONCE=once,
    )  # fmt: skip
    return out


def chain(variant, q, k, v, tables, lengths):
    outs = []
    for table in tables:
        q = attended(variant, q, k, v, table, lengths)
        outs.append(q)
    return tuple(outs)


def reference(q, k, v, table, lengths):
    """In float32, a row at a time, a block of keys at a time."""
    most = M * P if opt.dry else 1024

    def row(one):
        q, table, length = one
        q = q.astype(jnp.float32).reshape(KV, HEADS // KV, SIZE)

        def some(at, carry):
            values, highest, total = carry
            ids = lax.dynamic_slice(table, (at * most // P,), (most // P,))
            keys, vals = (x[ids].transpose(1, 0, 2, 3).reshape(KV, most, SIZE) for x in (k, v))
            there = at * most + jnp.arange(most) < length
            keys, vals = (jnp.where(there[None, :, None], x.astype(jnp.float32), 0) for x in (keys, vals))
            s = (q[:, :, None] * keys[:, None]).sum(-1) * SCALE  # no product of XLA's, which would be tuned
            s = jnp.where(there, s, -1e30)
            higher = jnp.maximum(highest, s.max(-1))
            w = jnp.where(there, jnp.exp(s - higher[..., None]), 0)
            shrink = jnp.exp(highest - higher)
            values = values * shrink[..., None] + (w[..., None] * vals[:, None]).sum(2)
            return values, higher, total * shrink + w.sum(-1)

        G = HEADS // KV
        first = (jnp.zeros((KV, G, SIZE)), jnp.full((KV, G), -1e30), jnp.zeros((KV, G)))
        values, _, total = lax.fori_loop(0, -(-length // most), some, first)
        return (values / total[..., None]).reshape(HEADS, SIZE)

    return lax.map(row, (q, table, lengths))


# ---- what is measured ----------------------------------------------------------------------------------------------


def j(once=16, columns=128, warps=2, is_wide=False):
    return (once, columns, warps, is_wide)


TODAY = ("old", 32, 4, 5, 256, 4, j())


def new(keys, warps, stages, least, resident, joined=None):
    return ("new", keys, warps, stages, least, resident, joined or j())


def swap(*given):
    return ("swap", *new(*given)[1:])


JOINS = [j(16), j(32), j(64), j(16, 32), j(32, 32), j(64, 32), j(32, 32, 4), j(32, 64, 4), j(32, 16, 1), j(32, 128, 4),
         j(16, 128, 4), j(8, 128, 2), j(32, 32, 2, True), j(32, 64, 4, True), j(16, 64, 2, True)]  # fmt: skip
SHAPES = [(32, 4, 1, 2), (32, 4, 2, 2), (32, 4, 3, 2), (32, 4, 4, 2), (32, 4, 2, 4), (32, 4, 4, 4), (64, 4, 1, 2),
          (64, 4, 1, 4), (64, 4, 2, 2), (64, 4, 2, 4), (64, 4, 3, 3), (32, 4, 3, 3), (32, 4, 2, 3)]  # fmt: skip
FEW = [new(32, 4, 2, 32, 2, one) for one in JOINS] + [new(k, w, s, k, r, j(32, 32, 4)) for k, w, s, r in SHAPES]
LONG = [new(k, w, s, k, r, j(32, 32, 4)) for k, w, s, r in SHAPES] + [new(64, 4, 2, 64, 4, one) for one in JOINS[:9]]
WIDE = [j(16, 512, 4, True), j(16, 1024, 4, True), j(8, 4096, 8, True), j(16, 2048, 8, True), j(8, 1024, 4, True)]
MANY = [
    new(64, 4, 2, 128, 4),
    new(64, 4, 2, 256, 4),
    new(64, 4, 2, 128, 5),
    new(64, 4, 2, 128, 3),
    new(64, 4, 2, 128, 8),
    swap(64, 4, 2, 128, 4),
    new(64, 8, 2, 128, 4),
    new(64, 8, 2, 128, 6),
    new(64, 4, 1, 128, 4),
    new(128, 4, 2, 128, 3),
    new(128, 8, 1, 128, 4),
    new(64, 2, 2, 128, 4),
    new(32, 4, 2, 128, 6),
    *(new(64, 4, 2, 128, 4, one) for one in WIDE),
]
K1 = 1021
CASES = [
    ("1 row of 1k, bucket of 2", [K1, 0], 16, FEW),
    ("64 rows of 1k", [K1] * 64, 3, MANY),
    ("1 row of 8k, bucket of 2", [8187, 0], 4, LONG[:18]),
    ("256 rows of 1k", [K1] * 256, 2, MANY),
    ("4 rows of 1k", [K1] * 4, 6, FEW[:8] + FEW[15:]),
    ("16 rows of 1k", [K1] * 16, 4, LONG[:18] + MANY[2:9]),
    ("one of 32k among 63 of 512", [32700, *[509] * 63], 3, MANY),
    ("1 row of 32k, bucket of 2", [32700, 0], 3, LONG[:15]),
    ("4 rows of 8k", [8187] * 4, 2, LONG[:13]),
    ("16 rows of 8k", [8187] * 16, 2, MANY[:9]),
]
if opt.dry:
    few = [new(32, 4, 3, 32, 4, j(2, 512, 4, True)), new(32, 4, 3, 32, 4, j(32, 32, 4))]
    CASES = [("2 rows", [131, 0], 2, few)]
if opt.cases:
    CASES = [one for one in CASES if any(w in one[0] for w in opt.cases.split(","))]
BLOCKS = 1 + (64 if opt.dry else 16640)


def short(v):
    return f"{v[0]} {v[1]:>3} keys {v[2]}w{v[3]}s least {v[4]:>3} x{v[5]:<2} join {v[6][0]}x{v[6][1]}/{v[6][2]}w{'*' * v[6][3]}"


def shapes_of(lengths, layers):
    s = jax.ShapeDtypeStruct
    cache = s((BLOCKS, KV, P, SIZE), DTYPE)
    rows = len(lengths)
    q, table = s((rows, HEADS, SIZE), DTYPE), s((rows, M), jnp.int32)
    return q, cache, cache, [table] * layers, s((rows,), jnp.int32)


def warm_kernel(job):
    """In a child: put a kernel into Triton's cache on disk."""
    jax.config.update("jax_platforms", "cpu")
    kind, variant, lengths = job
    try:
        if kind == "attend":
            jax.eval_shape(partial(chain, variant), *shapes_of(lengths, 1))
        else:
            jax.eval_shape(partial(swiglu_triton, variant), jax.ShapeDtypeStruct((TOKENS, 2 * INNER), DTYPE))
    except Exception as e:
        return f"{kind} {variant}: {type(e).__name__}: {str(e)[:200]}"
    return None


def tables_of(rng, lengths, layers):
    """Random blocks for each layer, distinct within it; what is behind a row's end is block 0, which is NaN."""
    found = []
    need = [-(-n // P) for n in lengths]
    order = 1 + rng.permutation(BLOCKS - 1)
    at = 0
    for _ in range(layers):
        if at + sum(need) > len(order):
            order, at = 1 + rng.permutation(BLOCKS - 1), 0
        table = np.zeros((len(lengths), M), np.int32)
        for row, count in enumerate(need):
            table[row, :count] = order[at : at + count]
            at += count
        found.append(jnp.asarray(table))
    return found


def kernel_events(folder):
    """(start, name, ns) of all kernels of a trace, in order."""
    data = jax.profiler.ProfileData.from_file(str(next(Path(folder).rglob("*.xplane.pb"))))
    found = []
    for plane in data.planes:
        if not plane.name.startswith("/device:GPU"):
            continue
        for line in plane.lines:
            if "Stream" in line.name:
                found += [(e.start_ns, e.name, e.duration_ns) for e in line.events]
    return sorted(found)


TURNS = 4


def expected(q, k, v, tables, counts):
    return [reference(q[i], k, v, tables[i], counts) for i in range(len(tables))]


def measure(case, programs, arrays, ref):
    name, lengths, layers, _ = case
    q, k, v, tables, counts = arrays
    num_bytes = sum(lengths) * KV * SIZE * 2 * 2 + 2 * q.nbytes
    good = []
    for variant, run in programs:
        try:
            nan = [jnp.full((1 << 22,), jnp.nan, jnp.float32) for _ in range(8)]
            jax.block_until_ready(nan)
            del nan
            outs = jax.block_until_ready(run(*arrays))
            wanted = ref([q, *outs[:-1]], k, v, tables, counts)
            errors = []
            for got, want in zip(outs, wanted, strict=True):
                got, want = np.asarray(got, np.float32), np.asarray(want)
                seen = np.asarray(lengths) > 0
                got, want = got[seen], want[seen]
                errors.append(float(np.linalg.norm(got - want) / np.linalg.norm(want)))
            error = max(errors) if all(np.isfinite(errors)) else float("nan")
            good.append((variant, run, error))
        except Exception as e:
            FAILED.append((name, short(variant), f"{type(e).__name__}: {str(e)[:160]}"))
    events = None
    if not opt.dry:
        try:
            with tempfile.TemporaryDirectory() as folder:
                with jax.profiler.trace(folder):
                    for _, run, _ in good:
                        for _ in range(TURNS):
                            jax.block_until_ready(run(*arrays))
                events = kernel_events(folder)
        except Exception as e:
            say("no profile:", type(e).__name__, str(e)[:160])
    own = {"attend": [], "combine": []}
    for _, event, taken in events or []:
        for kind in own:
            if event.startswith(kind):
                own[kind].append(taken / 1e3)
    each = TURNS * layers
    has = {kind: len(found) == each * len(good) for kind, found in own.items()}
    if events is not None and not all(has.values()):
        say(f"{name}: { ({k: len(x) for k, x in own.items()}) } kernels seen, {each * len(good)} expected")
    say(f"{name}: {num_bytes / 1e6:.1f} MB, floor {num_bytes / 3.18e6:.1f} us; us: attend + combine, wall a layer")
    for number, (variant, run, error) in enumerate(good):
        b = time.perf_counter()
        for _ in range(8):
            outs = run(*arrays)
        jax.block_until_ready(outs)
        wall = (time.perf_counter() - b) / 8 / layers * 1e6
        a, c = (
            statistics.median(own[kind][number * each : (number + 1) * each]) if has[kind] else float("nan")
            for kind in own
        )
        speed = num_bytes / a / 1e6 if a == a else num_bytes / wall / 1e6
        mark = "" if error < 1e-2 else f"   WRONG {error:.3g}"
        print(f"  {short(variant):44} {a:7.1f} + {c:4.1f}  {speed:5.2f} TB/s  wall {wall:7.1f}{mark}", flush=True)
        RESULTS.append({"case": name, "variant": variant, "attend": a, "combine": c, "wall": wall, "error": error})


# ---- SwiGLU --------------------------------------------------------------------------------------------------------

TOKENS, INNER = (32, 256) if opt.dry else (8192, 14336)


def now(x):
    gate, up = jnp.split(x, 2, axis=-1)
    return jax.nn.silu(gate) * up


def in_float32(x):
    gate, up = (one.astype(jnp.float32) for one in jnp.split(x, 2, axis=-1))
    return (jax.nn.silu(gate) * up).astype(x.dtype)


def by_rsqrt(x):
    gate, up = (one.astype(jnp.float32) for one in jnp.split(x, 2, axis=-1))
    half = lax.rsqrt(1 + jnp.exp(-gate))
    return (gate * half * half * up).astype(x.dtype)


def by_tanh(x):
    gate, up = (one.astype(jnp.float32) for one in jnp.split(x, 2, axis=-1))
    return (gate * (0.5 + 0.5 * jnp.tanh(0.5 * gate)) * up).astype(x.dtype)


def only_product(x):
    gate, up = jnp.split(x, 2, axis=-1)
    return gate * up


def swiglu_triton(variant, x):
    block, tokens, warps = variant
    shape = jax.ShapeDtypeStruct((TOKENS, INNER), x.dtype)
    (out,) = call(swiglu, (x,), [shape], (INNER // block, TOKENS // tokens), Tuning(warps, 1), CAP,
                  F=INNER, BF=block, BT=tokens, KIND="silu")  # fmt: skip
    return out


SWIGLU, FORMS = [], {}


def product(x, w, kind, is_gated):
    """As today (float32, rounded by what follows), or rounded by the product itself."""
    kept = jnp.float32 if kind == "float32" else x.dtype
    inner = lax.dot_general(x, w, (((1,), (1,)), ((), ())), preferred_element_type=kept)
    if is_gated:
        inner = now(inner.astype(jnp.float32))
    return inner.astype(x.dtype)


def measure_products():
    """A layer's four products of prompts, gate and up with SwiGLU."""

    def normal(seed, *shape):
        return jax.jit(lambda: jax.random.normal(jax.random.key(seed), shape, DTYPE) * 0.1)()

    size = 64 if opt.dry else 4096
    wanted = {"up + SwiGLU": (2 * INNER, size, True), "qkv": (6144, size, False), "out": (size, size, False),
              "down": (size, INNER, False), "up alone": (2 * INNER, size, False)}  # fmt: skip
    for tokens in (TOKENS, TOKENS // 8):
        for name, (rows, columns, is_gated) in wanted.items():
            x, w = normal(1, tokens, columns), normal(2, rows, columns)
            for kind in ("float32", "as x"):
                if left() < 4:
                    return
                run = jax.jit(partial(product, kind=kind, is_gated=is_gated))
                jax.block_until_ready(run(x, w))
                taken = []
                for _ in range(3):
                    b = time.perf_counter()
                    for _ in range(10):
                        out = run(x, w)
                    jax.block_until_ready(out)
                    taken.append((time.perf_counter() - b) / 10 * 1e6)
                us, flops = min(taken), 2 * tokens * rows * columns
                say(f"{name} of {tokens} tokens, {kind}: {us:.0f} us, {flops / us / 1e6:.0f} TFLOP/s")
                RESULTS.append({"case": name, "tokens": tokens, "variant": kind, "wall": us})


def measure_swiglu(programs):
    x = jax.jit(lambda key: (jax.random.normal(key, (TOKENS, 2 * INNER), jnp.float32) * 2).astype(DTYPE))(
        jax.random.key(1)
    )
    some = np.random.default_rng(0).integers(0, TOKENS, 64)
    inside = np.asarray(x[some].astype(jnp.float32), np.float64)
    want = inside[:, :INNER] / (1 + np.exp(-inside[:, :INNER])) * inside[:, INNER:]
    say(f"SwiGLU of {TOKENS} x {2 * INNER}: floor {TOKENS * INNER * 6 / 3.18e6:.0f} us")
    wide = jax.jit(lambda: x.astype(jnp.float32))()
    for name, future in programs:
        try:
            compiled = future.result()
            run = (lambda _, run=compiled: run(wide)) if name == WIDE else compiled
            out = jax.block_until_ready(run(x))
            if name == WIDE:
                error = 0.0
            else:
                error = float(np.linalg.norm(np.asarray(out[some].astype(jnp.float32)) - want) / np.linalg.norm(want))
            taken = []
            for _ in range(3):
                b = time.perf_counter()
                for _ in range(10):
                    out = run(x)
                jax.block_until_ready(out)
                taken.append((time.perf_counter() - b) / 10 * 1e6)
            us = min(taken)
            print(f"  {name:24} {us:7.1f} us {TOKENS * INNER * 6 / us / 1e6:5.2f} TB/s  error {error:.1e}", flush=True)
            RESULTS.append({"case": "swiglu", "variant": name, "wall": us, "error": error})
        except Exception as e:
            FAILED.append(("swiglu", name, f"{type(e).__name__}: {str(e)[:160]}"))


def main():
    jobs = {("attend", v): ("attend", v, lengths) for _, lengths, _, vs in reversed(CASES) for v in vs}
    jobs |= {("swiglu", v): ("swiglu", v, None) for v in SWIGLU}
    cores = min(os.cpu_count() or 2, 16)
    if not opt.dry:
        with ProcessPoolExecutor(cores) as pool:  # forked before JAX starts a backend or a thread
            bad = [one for one in pool.map(warm_kernel, reversed(jobs.values())) if one]
        say(f"{len(jobs)} kernels compiled", *bad)
    if opt.aot:
        return
    say(jax.devices()[0].device_kind, jax.__version__, triton.__version__)
    options = {}
    if jax.devices()[0].platform == "gpu":
        from jaxllm.runner import step

        options = step.compiler_options("gpu")
    rng = np.random.default_rng(0)
    pool = ThreadPoolExecutor(cores)
    lock = threading.Lock()

    def build(run, *shapes):
        with lock:  # tracing is Python
            lowered = jax.jit(run).lower(*shapes)
        return lowered.compile(compiler_options=options or None)

    futures = {}
    split = [CASES[:2], CASES[2:]]
    for number, cases in enumerate(split):
        for name, lengths, layers, variants in cases:
            for v in variants:
                futures[name, v] = pool.submit(build, partial(chain, v), *shapes_of(lengths, layers))
            q, *others = shapes_of(lengths, layers)
            futures[name, "reference"] = pool.submit(build, expected, [q] * layers, *others)
        if number == 0:
            x = jax.ShapeDtypeStruct((TOKENS, 2 * INNER), DTYPE)
            wide = jax.ShapeDtypeStruct(x.shape, jnp.float32)
            glus = [(name, pool.submit(build, form, wide if name == WIDE else x)) for name, form in FORMS.items()]

    def pooled(seed):
        some = jax.random.normal(jax.random.key(seed), (BLOCKS, KV, P, SIZE), DTYPE)
        return some.at[0].set(jnp.nan)

    k, v = (jax.block_until_ready(jax.jit(pooled, static_argnums=0)(seed)) for seed in (2, 3))
    say("caches made")
    for number, case in enumerate(CASES):
        name, lengths, layers, variants = case
        if left() < 4:
            say(f"no time left for {name} and what follows")
            break
        try:
            programs = []
            for variant in variants:
                try:
                    programs.append((variant, futures[name, variant].result(timeout=max(left(), 1))))
                except Exception as e:
                    FAILED.append((name, short(variant), f"{type(e).__name__}: {str(e)[:160]}"))
            q = jax.random.normal(jax.random.key(number), (len(lengths), HEADS, SIZE), DTYPE)
            arrays = (q, k, v, tables_of(rng, lengths, layers), jnp.asarray(lengths, jnp.int32))
            ref = futures[name, "reference"].result(timeout=max(left(), 1))
            measure(case, programs, jax.block_until_ready(arrays), ref)
        except Exception:
            traceback.print_exc(limit=4)
        if number == 4:
            measure_products()
        opt.out.write_text(json.dumps({"results": RESULTS, "failed": FAILED}, default=str))
    if opt.dry:
        measure_products()
    opt.out.write_text(json.dumps({"results": RESULTS, "failed": FAILED}, default=str))
    for one in FAILED[:20]:
        print("  FAILED", *one)
    say("done")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
