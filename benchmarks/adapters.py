"""The cost of LoRA adapters: decodes 16 rows of Qwen2.5-0.5B's shape with 0, 1, 2, 4 and 8 distinct ones per step.

`python -m benchmarks.adapters`. Random weights, float32, greedy, adapters of rank 16 of every product. A step
without adapters is measured right before and after each with some, so that other load affects both alike; medians are
compared. Rows without an adapter lose as much as the step does.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from functools import partial
from pathlib import Path

import jax

from benchmarks import shapes
from benchmarks.aims import require
from benchmarks.sides import GEOMETRY, medians, prompts_of
from jaxllm import LLM, LoRARequest, SamplingParams
from jaxllm.checkpoints import weights
from jaxllm.runner.compiled_programs import Key
from jaxllm.sampling.sampler import Variant
from tests.support import inspection
from tests.support.adapters import write_adapter

ROWS, PROMPT, NEW, RANK = GEOMETRY["max_num_seqs"], 8, 9, 16
COUNTS = (1, 2, 4, 8)
MOST_LOST = 0.05  # of the speed of rows without an adapter, in a step with two adapters


def write(folder: Path, number: int, layers: int) -> LoRARequest:
    """Write an adapter of every product of the shape's layers."""
    shape = shapes.SHAPES["qwen2.5-0.5b"]
    width, inner, keys = shape["hidden_size"], shape["intermediate_size"], 64 * shape["num_key_value_heads"]
    attention = {"q": width, "k": keys, "v": keys, "o": width}
    sizes = {f"self_attn.{name}_proj": (size, width) for name, size in attention.items()}
    sizes |= {"mlp.gate_proj": (inner, width), "mlp.up_proj": (inner, width), "mlp.down_proj": (width, inner)}
    modules = {f"model.layers.{layer}.{name}": size for layer in range(layers) for name, size in sizes.items()}
    return LoRARequest(f"a{number}", number, str(write_adapter(folder / f"a{number}", modules, RANK, seed=number)))


def decode(llm: LLM, adapters: list[LoRARequest]) -> float:
    """Return the seconds of a step that decodes all rows; adapters alternate, and half of the rows have none."""
    own = [adapters[row // 2 % len(adapters)] if adapters and row % 2 else None for row in range(ROWS)]
    taken = []
    for new in (NEW, 1):
        params = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True)
        began = time.perf_counter()
        llm.generate(prompts_of(ROWS, PROMPT), params, use_tqdm=False, lora_request=own)
        taken.append(time.perf_counter() - began)
    return (taken[0] - taken[1]) / (NEW - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=24, help="of the shape")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--counts", type=int, nargs="+", default=COUNTS, help="distinct adapters in a step")
    options = parser.parse_args()
    model = str(shapes.folder_of("qwen2.5-0.5b", "float32", options.layers))
    counts = options.counts
    settings = {"enable_lora": True, "max_loras": max(counts), "max_lora_rank": RANK, "precompile": "covering"}
    settings |= GEOMETRY | {"max_num_batched_tokens": ROWS * PROMPT}
    with tempfile.TemporaryDirectory() as folder, LLM(model, dtype="float32", **settings) as llm:
        adapters = [write(Path(folder), number, options.layers) for number in range(1, max(counts) + 1)]
        programs = llm.engine.runner.programs

        def is_wanted(key: Key) -> bool:
            return key.shape.is_decode and key.variant is Variant.GREEDY and key.shape.tokens == ROWS

        programs.begin([key for key in programs.rest if is_wanted(key)], 2)
        programs.wait()
        jobs = {
            (count, number): partial(decode, llm, adapters[: number % 2 * count])
            for count in counts
            for number in range(3)
        }
        for job in jobs.values():  # queues its programs; compiling them later would occupy a core
            job()
        programs.wait()
        seconds = medians(options.rounds, jobs)
        own = weights.num_bytes(inspection.params_of(llm.engine.runner))
        each = sum(leaf.nbytes for leaf in jax.tree.leaves(llm.engine.adapters.get(adapters[0]).weights))
    times = {count: 2 * seconds[count, 1] / (seconds[count, 0] + seconds[count, 2]) for count in counts}
    for count in counts:
        print(
            f"{count} adapters of rank {RANK} in {ROWS} rows, half of them without: {seconds[count, 1] * 1e3:6.1f} ms "
            f"a step, {times[count]:.3f} times as long as without (bytes read: {1 + count * each / own:.3f})"
        )
    lost = 1 - 1 / times.get(2, 1.0)
    print(f"rows without an adapter lose {lost:.1%} beside ones with two (at most {MOST_LOST:.0%})")
    require(lost <= MOST_LOST, "adapters cost their neighbours more than is promised")


if __name__ == "__main__":
    main()
