"""Times products of few tokens on the GPU at hand: `python gpu_sweep.py [--budget 70] [--dry]`. JSON goes to $OUT.

Kernels are compiled by processes while those that are ready are timed, in CUDA graphs over weights that L2 cannot hold.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import multiprocessing
import os
import random
import statistics
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

START = time.monotonic()
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

# Rows of a matrix, columns, matrices, whether there is a norm, and a residual.
PRODUCTS = {
    "qkv": (6144, 4096, 1, True, False),
    "o": (4096, 4096, 1, False, True),
    "up": (14336, 4096, 2, True, False),
    "down": (4096, 14336, 1, False, True),
}
EPS = 1e-5
PROCESSORS, SHARED = 132, 227 << 10
POOL = 512 << 20  # bytes of weights


def variants(product: str, tokens: int, seed: int = 0) -> list[tuple]:
    """List (has gain, splits, lanes, tokens, rows, columns, warps, stages), today's first."""
    rows, depth, matrices, has_norm, _ = PRODUCTS[product]
    block = max(8, tokens)
    found = []
    for lanes, size, width, warps, stages, splits in itertools.product(
        (1, 2, 4, 8), (16, 32, 64, 128), (32, 64, 128, 256, 512), (1, 2, 4, 8), (3, 4, 5, 6, 8), (1, 2, 3, 4, 6, 8)
    ):
        all_rows = matrices * size
        if lanes > 1 and (lanes > warps or warps > 2 * lanes or width > 128 or all_rows > 64):
            continue
        if lanes == 1 and (warps > max(all_rows // 16, 1) * 2 or width < 64):
            continue
        step = lanes * width
        if step > 1024 or (product == "up" and splits > 2):
            continue
        stage, others = all_rows * step * 2, block * step * 2
        shared = (stages - 1) * (stage + others)
        if shared > SHARED or lanes * all_rows * block // (32 * warps) > 64:
            continue
        if max(all_rows, block) * step // (32 * warps) > 256:  # numbers of a thread
            continue
        programs = -(-rows // size) * splits
        if programs < 0.95 * PROCESSORS and not (size == 32 and splits == 1):
            continue
        visits = -(-depth // (splits * step))
        if visits < stages:
            continue
        resident = min((228 << 10) // (shared + 1024), 64 // warps, programs / PROCESSORS)
        under_way = resident * (stages - 2) * stage
        if not 36 << 10 <= under_way <= 190 << 10:
            continue
        found.append((splits, lanes, block, size, width, warps, stages))
    random.Random(f"{product}{tokens}{seed}").shuffle(found)
    kinds = (True, False) if has_norm else (False,)
    first = [(has_norm, *today(product, tokens))]
    by_lanes = {key: [one for one in found if (one[1] > 1, one[0] > 1) == key]
                for key in itertools.product((False, True), repeat=2)}
    mixed = [one for group in itertools.zip_longest(*by_lanes.values()) for one in group if one is not None]
    return first + [(kind, *one) for one in mixed for kind in kinds if (kind, *one) != first[0]]


def focused(product: str, tokens: int) -> list[tuple]:
    """List what is near to what the first run found: columns are not divided among programs."""
    rows, depth, matrices, has_norm, _ = PRODUCTS[product]
    block = max(8, tokens)
    found = []
    for lanes, size, width, warps, stages in itertools.product(
        (1, 2, 4), (16, 32, 64, 128), (64, 128, 256, 512), (1, 2, 4, 8), (3, 4, 5, 6, 7, 8)
    ):
        all_rows, step = matrices * size, lanes * width
        is_wide = lanes == 1 and all_rows >= 64 and warps >= 4 and block >= 16  # wgmma
        if lanes > 1 and (block > 8 or lanes > warps or width > 128 or all_rows > 128 or warps > 2 * lanes):
            continue
        if block >= 16 and has_norm and not is_wide:
            continue
        if (block == 64 and not is_wide) or (lanes == 1 and not is_wide and warps > max(all_rows // 16, 2)):
            continue
        stage, others = all_rows * step * 2, block * step * 2
        shared = (stages - (not is_wide)) * (stage + others + 2 * step * has_norm) + 4096
        if shared > SHARED or lanes * all_rows * block // (32 * warps) > 96:
            continue
        if max(all_rows, block) * step // (32 * warps) > 256:
            continue
        programs = -(-rows // size)
        resident = min((228 << 10) // (shared + 1024), 64 // warps, programs / PROCESSORS)
        under_way = resident * (stages - 2) * stage
        if programs < 60 or not (20 if block == 64 else 32) << 10 <= under_way <= 200 << 10:
            continue
        found.append((has_norm, 1, lanes, block, size, width, warps, stages))
    random.Random(f"{product}{tokens}").shuffle(found)
    first = (has_norm, *today(product, tokens))
    return [first, *(one for one in found if one != first)]


def today(product: str, tokens: int) -> tuple:
    """Return the tuning of commit a9dbdfd."""
    table = {
        1: ((8, 32, 256, 4, 5), (16, 32, 256, 4, 5), (32, 64, 128, 8, 6), (64, 64, 128, 8, 6)),
        2: ((8, 16, 256, 4, 5), (16, 16, 256, 4, 5), (32, 64, 64, 4, 4), (64, 64, 64, 8, 4)),
    }[PRODUCTS[product][2]]
    most, size, width, warps, stages = next((one for one in table if tokens <= one[0]), table[-1])
    return 1, 1, most, size, width, warps, stages


def build(what: tuple) -> tuple:
    """Compile a variant, and what adds its pieces: machine code, name, shared memory and warps of each."""
    product, tokens, (has_gain, splits, lanes, block, size, width, warps, stages) = what
    os.environ["JAX_PLATFORMS"] = "cpu"
    from pallas_kernels import triton_bridge
    from pallas_kernels.linear import fused_triton
    from pallas_kernels.tuning import Tuning

    rows, depth, matrices, _, has_residual = PRODUCTS[product]
    activation = "silu" if matrices == 2 else None

    def compiled(kernel, types, constants, tuning):
        names = kernel.arg_names
        fixed = constants | {name: None for name in names if name not in types and name not in constants}
        signature = tuple((name, types[name]) for name in names if name in types)
        one = triton_bridge.compile_kernel(kernel, signature, tuple(fixed.items()), tuning, 90)
        return one.asm["cubin"], one.metadata.name, one.metadata.shared, tuning.warps, one.asm["ptx"].count("wgmma.mma")

    types = {"x": "*bf16", "weight": "*bf16", "out": "*fp32" if splits > 1 else "*bf16"}
    types |= {"gain": "*bf16"} if has_gain else {}
    types |= {"residual": "*bf16"} if has_residual and splits == 1 else {}
    constants = {"T": None if tokens % block == 0 else tokens, "O": rows, "D": depth, "EPS": EPS, "IS_PLUS_ONE": False}
    constants |= {"ACTIVATION": activation, "SPLITS": splits, "LANES": lanes, "BM": block, "BN": size, "BK": width}
    try:
        found = [compiled(fused_triton.multiply_fused, types, constants, Tuning(warps, stages))]
        if splits > 1:
            types = {"pieces": "*fp32", "out": "*bf16"} | ({"gain": "*bf16", "x": "*bf16"} if has_gain else {})
            types |= {"residual": "*bf16"} if has_residual else {}
            constants = {"O": rows, "D": depth, "EPS": EPS, "ACTIVATION": activation, "SPLITS": splits}
            constants |= {"BN": 256, "BK": 1024}
            found.append(compiled(fused_triton.add_pieces, types, constants, Tuning(2, 1)))
    except Exception as error:
        return what, f"{type(error).__name__}: {str(error).strip()[:100]}"
    return what, found


class Launcher:
    """Loads machine code and launches it, by the driver."""

    def __init__(self) -> None:
        self.cuda = ctypes.CDLL("libcuda.so.1")

    def check(self, code: int) -> None:
        if code:
            text = ctypes.c_char_p()
            self.cuda.cuGetErrorName(code, ctypes.byref(text))
            raise RuntimeError(f"CUDA error {code} {text.value!r}")

    def load(self, cubin: bytes, name: str, shared: int):
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        self.check(self.cuda.cuModuleLoadData(ctypes.byref(module), cubin))
        self.check(self.cuda.cuModuleGetFunction(ctypes.byref(function), module, name.encode()))
        if shared > 48 << 10:
            self.check(self.cuda.cuFuncSetAttribute(function, 8, ctypes.c_int(shared)))
        return module, function

    def unload(self, module) -> None:
        self.cuda.cuModuleUnload(module)

    def launch(self, function, grid, warps: int, shared: int, stream: int, pointers) -> None:
        values = [ctypes.c_uint64(one) for one in (*pointers, 0, 0)]
        array = (ctypes.c_void_p * len(values))(*(ctypes.addressof(one) for one in values))
        sizes = [ctypes.c_uint(one) for one in (*grid, 32 * warps, 1, 1, shared)]
        self.check(self.cuda.cuLaunchKernel(function, *sizes, ctypes.c_void_p(stream), array, None))


class Bench:
    """Arrays on the device."""

    def __init__(self) -> None:
        import torch

        self.torch = torch
        torch.manual_seed(0)
        self.pool = torch.empty(POOL // 2, dtype=torch.bfloat16, device="cuda")
        for part in self.pool.split(1 << 26):
            part.copy_(torch.randn(part.shape, device="cuda", dtype=torch.bfloat16) / 64)
        self.x = torch.randn(64, 14336, device="cuda").bfloat16()
        self.gain = torch.rand(14336, device="cuda").bfloat16()
        self.residual = torch.randn(64, 14336, device="cuda").bfloat16()
        self.out = torch.empty(64 * 14336, dtype=torch.bfloat16, device="cuda")
        self.pieces = torch.empty(32 << 20, dtype=torch.float32, device="cuda")
        torch.cuda.synchronize()
        self.launcher, self.side = Launcher(), torch.cuda.Stream()
        self.references: dict = {}

    def weights(self, product: str):
        rows, depth, matrices, _, _ = PRODUCTS[product]
        size = rows * depth * matrices
        return [self.pool[n * size : (n + 1) * size].view(rows * matrices, depth) for n in range(POOL // 2 // size)]

    def reference(self, product: str, tokens: int, has_gain: bool):
        key = product, tokens, has_gain
        if key not in self.references:
            rows, depth, matrices, _, has_residual = PRODUCTS[product]
            x = self.x.flatten()[: tokens * depth].view(tokens, depth).float()
            if has_gain:
                x = x * self.torch.rsqrt((x * x).mean(1, keepdim=True) + EPS) * self.gain[:depth].float()
            out = x @ self.weights(product)[0].float().T
            if matrices == 2:
                out = self.torch.nn.functional.silu(out[:, :rows]) * out[:, rows:]
            if has_residual:
                out = out + self.residual.flatten()[: tokens * rows].view(tokens, rows).float()
            self.references[key] = out
        return self.references[key]

    def run(self, what: tuple, parts: list, replays: int = 3) -> tuple[float, float]:
        """Return microseconds and the relative error."""
        torch = self.torch
        product, tokens, (has_gain, splits, _, block, size, _, _, _) = what
        rows, depth, matrices, _, has_residual = PRODUCTS[product]
        loaded = [self.launcher.load(*part[:3]) for part in parts]
        at = lambda one: one.data_ptr()  # noqa: E731
        grid = (-(-rows // size), splits, -(-tokens // block))

        def launch(weight, stream: int) -> None:
            given = [at(self.x), at(weight)] + [at(self.gain)] * has_gain
            given += [at(self.residual)] * (has_residual and splits == 1)
            given.append(at(self.pieces if splits > 1 else self.out))
            self.launcher.launch(loaded[0][1], grid, parts[0][3], parts[0][2], stream, given)
            if splits > 1:
                given = [at(self.pieces)] + [at(self.x), at(self.gain)] * has_gain
                given += [at(self.residual)] * has_residual + [at(self.out)]
                self.launcher.launch(loaded[1][1], (rows // 256, tokens, 1), parts[1][3], parts[1][2], stream, given)

        weights = self.weights(product)
        self.out.fill_(float("nan"))
        if splits > 1:
            self.pieces[: splits * tokens * rows * matrices].fill_(float("nan"))
        torch.cuda.synchronize()
        launch(weights[0], torch.cuda.current_stream().cuda_stream)
        torch.cuda.synchronize()
        wanted = self.reference(product, tokens, has_gain)
        got = self.out[: tokens * rows].view(tokens, rows).float()
        error = float((got - wanted).norm() / wanted.norm())
        turns = max(2, (24 if product != "up" else 8) // len(weights)) * len(weights)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self.side):  # not `torch.cuda.graph`, which collects garbage each time
            graph.capture_begin()
            for turn in range(turns):
                launch(weights[turn % len(weights)], self.side.cuda_stream)
            graph.capture_end()
        graph.replay()
        taken = []
        for _ in range(replays):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            taken.append(begin.elapsed_time(end) * 1e3 / turns)
        del graph
        for module, _ in loaded:
            self.launcher.unload(module)
        return statistics.median(taken), error


def name(one) -> str:
    has_gain, splits, lanes, block, size, width, warps, stages = one
    return f"{'g' if has_gain else '-'} s{splits} l{lanes} {block}x{size}x{width}/{warps}w{stages}s"


def xla(budget: float) -> None:
    """Print the kernels that XLA makes of the products, by the profiler; each in a process's own program."""
    import re
    import tempfile
    from concurrent.futures import ThreadPoolExecutor

    import jax
    import jax.numpy as jnp

    from pallas_kernels.linear import fused_xla

    def made(case):
        product, tokens = case
        rows, depth, matrices, has_norm, has_residual = PRODUCTS[product]

        def chain(x, gain, residual, weights):
            outs = []
            for weight in weights:
                out = fused_xla.fused_linear(
                    x, weight, None, gain if has_norm else None, residual if has_residual else None,
                    eps=EPS, is_plus_one=False, activation="silu" if matrices == 2 else None)
                outs.append(out)
                x, residual = jax.lax.optimization_barrier((x, residual, out))[:2]
            return outs

        key = jax.random.key(0)
        size = (rows * matrices, depth)
        weights = [jax.random.normal(key, size, jnp.bfloat16) for _ in range(max(2, (120 << 20) // (size[0] * depth)))]
        arrays = (jax.random.normal(key, (tokens, depth), jnp.bfloat16), jnp.ones(depth, jnp.bfloat16),
                  jnp.ones((tokens, rows), jnp.bfloat16), weights)
        return case, jax.jit(chain).lower(*arrays).compile(), arrays

    def shown(case, run, arrays) -> None:
        jax.block_until_ready(run(*arrays))
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder):
                for _ in range(3):
                    jax.block_until_ready(run(*arrays))
            data = jax.profiler.ProfileData.from_file(str(next(Path(folder).rglob("*.xplane.pb"))))
        found: dict = {}
        for plane in data.planes:
            if plane.name.startswith("/device:GPU"):
                for line in plane.lines:
                    if "Stream" in line.name:
                        for event in line.events:
                            key = re.sub(r"[._]?\d+$", "", event.name)[:40]
                            found.setdefault(key, []).append(event.duration_ns / 1e3)
        turns = 3 * len(arrays[3])
        whole = sum(map(sum, found.values())) / turns
        size = PRODUCTS[case[0]][0] * PRODUCTS[case[0]][1] * PRODUCTS[case[0]][2] * 2
        parts = ", ".join(f"{key} {sum(each) / turns:.1f}" for key, each in found.items())
        print(f"XLA {case[0]} {case[1]}: {whole:.1f} us, {size / max(whole, 1e-9) / 1e6:.2f} TB/s ({parts})", flush=True)

    pool = ThreadPoolExecutor(4)
    for tokens in (2, 64, 16):
        ready = list(pool.map(made, [(product, tokens) for product in PRODUCTS]))  # which times kernels as well
        for case, run, arrays in ready:
            shown(case, run, arrays)
        if time.monotonic() - START > 0.6 * budget:
            break
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--budget", type=float, default=72, help="seconds of wall time")
    parser.add_argument("--tokens", default="2,16,64,32")
    parser.add_argument("--each", type=int, default=110, help="variants of a product and number of tokens")
    parser.add_argument("--focus", action="store_true", help="near to what the first run found; XLA's are not measured")
    parser.add_argument("--dry", action="store_true", help="compile only")
    parser.add_argument("--xla", type=float, default=0, help="(of a process of its own) seconds")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    options = parser.parse_args()
    if options.xla:
        return xla(options.xla)
    out = Path(os.environ.get("OUT", "/tmp"))
    sizes = [int(one) for one in options.tokens.split(",")]
    combos = [(product, tokens) for tokens in sizes for product in PRODUCTS]
    lists = {combo: (focused if options.focus else variants)(*combo) for combo in combos}
    print({f"{product} {tokens}": len(each) for (product, tokens), each in lists.items()})
    weight = {} if options.focus else {32: 0.5}
    queue = []
    for index in range(options.each):
        for combo in combos:
            if index < len(lists[combo]) * 1 and index < options.each * weight.get(combo[1], 1):
                queue.append((*combo, lists[combo][index]))
    context = multiprocessing.get_context("spawn")
    workers = ProcessPoolExecutor(options.workers, mp_context=context)
    futures = [workers.submit(build, what) for what in queue]
    rows, failed = [], []
    if options.dry:
        for future in futures:
            what, parts = future.result()
            if isinstance(parts, str):
                failed.append((what, parts))
                print(what[0], what[1], name(what[2]), parts, flush=True)
            else:
                rows.append((what, parts[0][2], parts[0][4]))
        print(f"{len(rows)} compiled, {len(failed)} not, {time.monotonic() - START:.0f} s")
        return None
    bench = Bench()
    print(f"[{time.monotonic() - START:.1f}] {bench.torch.cuda.get_device_name()}, {len(queue)} variants", flush=True)
    kept: dict = {}
    xla_time = 1.0 if options.focus else 16.0
    last = options.budget - xla_time - 5
    for future in futures:
        if time.monotonic() - START > last:
            break
        try:
            what, parts = future.result(timeout=max(last - (time.monotonic() - START), 0.1))
        except TimeoutError:
            break
        product, tokens, one = what
        if isinstance(parts, str):
            failed.append((what, parts))
            continue
        try:
            taken, error = bench.run(what, parts)
        except RuntimeError as problem:
            failed.append((what, str(problem)[:100]))
            print("FAILED", product, tokens, name(one), str(problem)[:100], flush=True)
            if len(failed) > 60:
                break
            continue
        rows.append({"product": product, "tokens": tokens, "variant": one, "name": name(one), "us": taken,
                     "error": error, "wgmma": parts[0][4] > 0, "is_today": one == lists[product, tokens][0]})
        kept.setdefault((product, tokens, one[0]), []).append((taken if error < 1e-2 else 1e9, what, parts))
    print(f"[{time.monotonic() - START:.1f}] {len(rows)} timed of {len(queue)}, {len(failed)} failed", flush=True)
    for _, problem in {problem: (what, problem) for what, problem in failed}.values():
        print("failed:", problem, flush=True)
    running = list((getattr(workers, "_processes", None) or {}).values())
    workers.shutdown(wait=False, cancel_futures=True)
    for process in running:
        process.kill()
    (out / "sweep.json").write_text(json.dumps(rows))
    confirmed: list = []
    bad = [row for row in rows if not row["error"] < 1e-2]
    print(f"{len(bad)} wrong:", *(f"{row['product']} {row['tokens']} {row['name']} {row['error']:.1e}" for row in bad[:8]))
    print("us (TB/s) of the product; g: with the gain in the loop, -: tokens that are normed already; s splits l lanes")
    for (product, tokens, has_gain), each in sorted(kept.items(), key=lambda pair: (sizes.index(pair[0][1]), pair[0])):
        size = PRODUCTS[product][0] * PRODUCTS[product][1] * PRODUCTS[product][2] * 2
        each.sort(key=lambda one: one[0])
        again = []
        for _, what, parts in each[:6]:
            again.append((bench.run(what, parts, 9)[0] if time.monotonic() - START < options.budget - xla_time
                          else _, what))
        again.sort(key=lambda pair: pair[0])
        before = [row["us"] for row in rows
                  if row["is_today"] and (row["product"], row["tokens"], row["variant"][0]) == (product, tokens, has_gain)]
        shown = "; ".join(f"{taken:.1f} ({size / taken / 1e6:.2f}) {name(what[2])[2:]}" for taken, what in again[:5])
        own = f" today {before[0]:.1f} ({size / before[0] / 1e6:.2f})" if before else ""
        print(f"{product} {tokens}{' g' if has_gain else ''}{own} best of {len(each)}: {shown}", flush=True)
        confirmed += [{"again": True, "product": product, "tokens": tokens, "name": name(what[2]), "us": taken}
                 for taken, what in again]
    (out / "sweep.json").write_text(json.dumps(rows + confirmed))
    del bench.pool, bench.pieces
    bench.torch.cuda.empty_cache()
    left = options.budget - (time.monotonic() - START) - 1
    if left > 6 and not options.focus:
        subprocess.run([sys.executable, os.path.abspath(__file__), "--xla", str(left)], timeout=left + 2, check=False)
    print(f"[{time.monotonic() - START:.1f}] done", flush=True)
    return None


if __name__ == "__main__":
    try:
        main()
    except subprocess.TimeoutExpired:
        print("XLA took too long")
    sys.stdout.flush()
    os._exit(0)  # waits for no process that compiles
