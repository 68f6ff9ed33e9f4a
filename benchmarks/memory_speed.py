"""Decoding against memory bandwidth: the time of a step on a CPU, its growth with context, and its memory.

`python -m benchmarks.memory_speed --plot docs/context.svg`. Qwen2.5-0.5B's shape, random weights, greedy; with
the C++ kernels and with XLA's, alternating. The bytes of all weights, times steps per second, are compared with the
bandwidth of two threads in the same round. Peak memory is that of a process that has answered 16 prompts of 512 tokens.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from benchmarks import shapes
from benchmarks.aims import require
from benchmarks.bare import compile_greedy
from benchmarks.sides import GEOMETRY, Side, prompts_of
from jaxllm import LLM, SamplingParams
from jaxllm.checkpoints import weights
from tests.support import inspection

KERNELS = {"C++": (), "XLA": ("linear=xla", "paged_decode=xla_lanes", "paged_prefill=xla")}
KINDS: dict[str, dict[str, Any]] = {  # to measure steps
    "bfloat16": {"dtype": "bfloat16"},
    "float32": {"dtype": "float32"},
    "int8": {"dtype": "float32", "quantization": "int8"},
}
SCHEMES: dict[str, dict[str, Any]] = KINDS | {  # to measure memory
    "bfloat16, fp8 weights": {"dtype": "bfloat16", "quantization": "fp8"},
    "bfloat16, int4 weights": {"dtype": "bfloat16", "quantization": "int4"},
    "bfloat16, int8 cache": {"dtype": "bfloat16", "kv_cache_dtype": "int8"},
    "bfloat16, fp8 cache": {"dtype": "bfloat16", "kv_cache_dtype": "fp8"},
}
LEAST_SHARE = {"bfloat16": 0.85, "int8": 0.75}  # of the memory bandwidth, at one row
LEAST_GAIN = 1.5  # at 16 rows of bfloat16
LEAST_PREFILL = 600  # tokens per second of bfloat16, for a prompt of 3,500
MOST_GROWTH = 0.012  # seconds that a step takes longer with 3,500 tokens of context than with 256
SHORT, LONG = 256, 3500
MIXED = (64, 128, 256, 512, 1024, 1536, 2048, 3500)  # tokens of eight prompts
NEW = 16
MOST_CHUNKS = 40  # more than the steps that compute the prompts of `MIXED`
READ = 1 << 28  # bytes read to measure bandwidth
Seconds = dict[tuple[Any, ...], float]


def bandwidth(array: np.ndarray, threads: int) -> float:
    """Return the bytes per second at which `threads` threads read an array: the median of five runs."""
    parts = np.array_split(array, threads)
    taken = []
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(5):
            began = time.perf_counter()
            list(pool.map(np.max, parts))
            taken.append(time.perf_counter() - began)
    return array.nbytes / statistics.median(taken)


def answer(llm: LLM, lengths: Sequence[int]) -> tuple[float, float]:
    """Return the seconds until all prompts have a token, and of a later step with all of them."""
    prompts = [prompt[:length] for prompt, length in zip(prompts_of(len(lengths), max(lengths)), lengths, strict=True)]
    last = SamplingParams(temperature=0.0, max_tokens=NEW + 1, ignore_eos=True)
    params = [*[replace(last, max_tokens=NEW + MOST_CHUNKS)] * (len(lengths) - 1), last]
    metrics = llm.generate(prompts, params, use_tqdm=False)[-1].metrics
    assert metrics is not None and metrics.first_token_time is not None and metrics.finished_time is not None
    return metrics.first_token_time - metrics.arrival_time, (metrics.finished_time - metrics.first_token_time) / NEW


def measure(
    kind: str, folder: str, contexts: Sequence[int], rounds: int, read: Callable[[], float]
) -> tuple[Seconds, float]:
    """Return the median seconds of a step and of a prompt, and the share of bandwidth that one row reaches."""
    longest = max(1024, *contexts) + NEW + MOST_CHUNKS
    blocks = (max(longest, sum(MIXED)) // 16 + 64) if LONG in contexts else longest // 16 + 64
    sizes = GEOMETRY | {"max_model_len": longest, "num_kv_blocks": blocks}
    engines = {}
    for name, kernels in KERNELS.items():
        llm = engines[name] = LLM(folder, precompile="covering", kernels=kernels, **sizes, **KINDS[kind])
        compile_greedy(llm.engine, [1, 2, 8, 16], [16, 512])
    loads: dict[str | int, Sequence[int]] = {context: [context] for context in contexts}
    loads |= {f"rows {rows}": [16] * rows for rows in (1, 8, 16)}
    if LONG in contexts:
        loads["mixed"] = MIXED
    num_bytes = weights.num_bytes(inspection.params_of(engines["C++"].engine.runner))
    seconds: dict[tuple[Any, ...], list[float]] = defaultdict(list)
    shares = []
    for _ in range(rounds):
        for load, lengths in tqdm(loads.items(), desc=kind, disable=None):
            for name, llm in engines.items():
                before = read()
                first, step = answer(llm, lengths)
                seconds[name, "prompt", load].append(first)
                seconds[name, "step", load].append(step)
                if (name, load) == ("C++", "rows 1"):
                    shares.append(num_bytes / step / ((before + read()) / 2))
    for llm in engines.values():
        llm.close()
    return {job: statistics.median(own) for job, own in seconds.items()}, statistics.median(shares)


def report(kind: str, found: Seconds, share: float) -> None:
    """Print the results."""
    print(f"{kind}: one row reads its weights at {share:.0%} of the memory's speed")
    for name, *what in found:
        if name == "C++":
            ours, other = (found[one, *what] for one in KERNELS)
            is_prompt = what[0] == "prompt" and isinstance(what[1], int)
            speed = f", {what[1] / ours:.0f} and {what[1] / other:.0f} tokens a second" if is_prompt else ""
            job = " ".join(map(str, what))
            print(f"{kind}, {job}: {ours * 1e3:.1f} ms, XLA's {other * 1e3:.1f}: {other / ours:.2f} times{speed}")


def misses(kind: str, found: Seconds, share: float) -> list[str]:
    """Return the aims that were missed."""
    behind = []
    if share < LEAST_SHARE.get(kind, 0.0):
        behind.append(f"{kind} reads at {share:.0%}")
    if kind == "bfloat16":
        if found["XLA", "step", "rows 16"] / found["C++", "step", "rows 16"] < LEAST_GAIN:
            behind.append("16 rows")
        if {("C++", "step", SHORT), ("C++", "step", LONG)} <= found.keys():
            if found["C++", "step", LONG] - found["C++", "step", SHORT] > MOST_GROWTH:
                behind.append(f"decoding behind {LONG} tokens")
            if LONG / found["C++", "prompt", LONG] < LEAST_PREFILL:
                behind.append(f"a prompt of {LONG} tokens")
    return behind


def draw(results: dict[str, Seconds], contexts: Sequence[int], path: Path) -> None:
    """Plot steps and prompts over context."""
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams["svg.fonttype"] = "none"  # keeps texts as text: a tenth of the size
    figure = Figure(figsize=(9.0, 3.6), layout="constrained")
    for axes, what, label in zip(
        figure.subplots(1, 2), ("step", "prompt"), ("a step of one row, ms", "prompt tokens a second"), strict=True
    ):
        for number, (kind, found) in enumerate(results.items()):
            for name, style in (("C++", "-"), ("XLA", "--")):
                taken = np.array([found[name, what, context] for context in contexts])
                drawn = taken * 1e3 if what == "step" else np.array(contexts) / taken
                axes.plot(contexts, drawn, style, color=f"C{number}", marker="o", label=f"{kind}, {name}")
        axes.set(xlabel="tokens of context", ylabel=label, ylim=(0, None))
        axes.grid(alpha=0.3)
    figure.axes[0].legend(fontsize="small")
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=24, help="of the shape")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=list(KINDS))
    parser.add_argument("--contexts", type=int, nargs="+", default=[SHORT, 1024, LONG, 8192])
    parser.add_argument("--threads", type=int, default=2, help="that measure the memory")
    parser.add_argument("--plot", type=Path, help="an .svg or .png")
    options = parser.parse_args()
    folder = str(shapes.folder_of("qwen2.5-0.5b", "bfloat16", options.layers))
    read = partial(bandwidth, np.ones(READ // 4, np.float32), options.threads)
    results, behind = {}, []
    for kind in options.kinds:
        results[kind], share = measure(kind, folder, options.contexts, options.rounds, read)
        report(kind, results[kind], share)
        behind += misses(kind, results[kind], share)
    if options.plot:
        draw(results, options.contexts, options.plot)
    for scheme, settings in SCHEMES.items():
        rest = {key: own for key, own in settings.items() if key != "dtype"}
        with Side("jaxllm", Path(folder), settings["dtype"], **rest) as side:
            side.run(16, 512, NEW)
            step, peak = side.decode(1, 16, NEW), side.peak_mib()
            print(f"{scheme}: {peak:.0f} MiB at most, {step * 1e3:.1f} ms a step of one row")
    require(not behind, f"behind what is promised: {', '.join(behind)}")


if __name__ == "__main__":
    main()
