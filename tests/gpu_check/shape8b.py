"""The engine of the 8B shape, shared by the parts `model`, `graphs` and `starts`, with the same programs.

On a CPU it is a tiny shape of the same family, with a GPU's table of programs.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from benchmarks.bare import Packed, compile_greedy, narrowest, replay
from jaxllm import LLM
from jaxllm.engine.llm_engine import LLMEngine
from jaxllm.runner import batch
from jaxllm.runner.compiled_programs import Key
from jaxllm.scheduler.state import Plan
from pallas_kernels import measuring
from tests.gpu_check import models
from tests.gpu_check.check import Check
from tests.support import inspection

BLOCK = 16
SIZES = {"max_model_len": 8448, "max_num_seqs": 256, "max_num_batched_tokens": 8192, "num_kv_blocks": 18000}
DRY_SIZES = {"max_model_len": 256, "max_num_seqs": 8, "max_num_batched_tokens": 128, "num_kv_blocks": 600}


class Shape(NamedTuple):
    """A model's folder, and the bytes that its steps read."""

    folder: Path
    dtype: str
    sizes: dict[str, int]
    weights: int  # bytes that a step reads
    parameters: int
    per_token: int  # bytes of keys and values of one token
    layers: int

    @property
    def options(self) -> dict[str, Any]:
        """The engine's arguments."""
        return {"dtype": self.dtype, "load_format": "dummy", "block_size": BLOCK, **self.sizes}

    @property
    def flags(self) -> list[str]:
        """The engine's arguments as command-line flags."""
        return [text for name, value in self.options.items() for text in (f"--{name.replace('_', '-')}", str(value))]

    def floor(self, rows: int, context: float, bytes_per_second: float) -> float:
        """Return the least seconds of a decode step."""
        return (self.weights + rows * context * self.per_token) / bytes_per_second


def write(check: Check) -> Shape:
    """Write the model's folder, without weights; its cache is as large as device memory allows."""
    config = models.CONFIGS["Llama-3.1-8B"]
    config = models.tiny(config) if check.is_dry else config
    dtype, itemsize = ("float32", 4) if check.is_dry else ("bfloat16", 2)
    weights, per_token = models.read_bytes(config, itemsize), models.kv_bytes(config, itemsize)
    sizes = dict(DRY_SIZES if check.is_dry else SIZES)
    if memory := check.ceilings()["memory_gb"] * 1e9:
        room = 0.88 * memory - 1.1 * weights - 7e9  # embeddings, temporary arrays, and two sets of programs
        sizes["num_kv_blocks"] = int(min(sizes["num_kv_blocks"], room // (BLOCK * per_token)))
    folder = models.write_config(config, check.folder / "shape8b", dtype)
    return Shape(folder, dtype, sizes, weights, weights // itemsize, per_token, config["num_hidden_layers"])


def start(check: Check, shape: Shape) -> LLM:
    """Make the engine with its covering programs."""
    began = time.perf_counter()
    llm = LLM(str(shape.folder), precompile="covering", enable_prefix_caching=False, **shape.options)
    programs = llm.engine.runner.programs
    check.measure(
        start="covering programs", seconds=time.perf_counter() - began, programs=len(programs), of=programs.num_all,
        tracing=llm.engine.runner.metrics.trace_seconds,
    )  # fmt: skip
    return llm


def compile_sizes(check: Check, llm: LLM, rows: Iterable[int], tokens: Sequence[int]) -> None:
    """Compile the measured steps, in the variant that the engine's table has."""
    began = time.perf_counter()
    programs = llm.engine.runner.programs
    wanted = sorted({decode_size(llm.engine, own) for own in rows})
    compile_greedy(llm.engine, wanted, tokens, num_threads=os.cpu_count() or 2)
    check.measure(
        start=f"steps of {wanted} rows, {list(tokens)} tokens", seconds=time.perf_counter() - began,
        programs=len(programs), of=programs.num_all, tracing=llm.engine.runner.metrics.trace_seconds,
    )  # fmt: skip


def compile_rest(check: Check, llm: LLM, seconds: float) -> None:
    """Compile the other programs for at most `seconds`."""
    began, programs = time.perf_counter(), llm.engine.runner.programs
    ready = programs.ready()
    programs.begin([key for key in programs.rest if key not in ready], os.cpu_count() or 2)
    while len(programs) < programs.num_all and time.perf_counter() - began < seconds:
        time.sleep(0.2)
    left = inspection.drop_queue(programs)
    programs.wait()
    if left and not check.is_dry:
        check.not_run(f"{left} of {programs.num_all} programs were not compiled in {seconds:.0f} s")
    check.measure(
        start="the other programs", seconds=time.perf_counter() - began, programs=len(programs), of=programs.num_all,
        tracing=llm.engine.runner.metrics.trace_seconds,
    )  # fmt: skip


def decode_size(engine: LLMEngine, rows: int) -> int:
    """Return the rows of the table's smallest decode program that holds `rows`."""
    shapes = batch.decode_shapes(engine.runner.geometry.num_slots, 2, "gpu")
    return min(shape.rows for shape in shapes if shape.rows >= rows)


def fill(engine: LLMEngine) -> None:
    """Fill the cache with noise: zeros would be read as fast, but multiplied faster."""
    state = inspection.state_of(engine.runner)
    inspection.set_state(engine.runner, None)
    shapes = [[None if one is None else (one.shape, one.dtype) for one in layer] for layer in state.kv]
    state = state.replace(kv=None)  # freed first: both would not fit
    made = tuple(tuple(None if one is None else measuring.noise(*one, seed=2) for one in layer) for layer in shapes)
    inspection.set_state(engine.runner, state.replace(kv=made))


def decode_step(engine: LLMEngine, rows: int, context: int) -> Packed:
    """Pack a step of `rows` sequences in distinct blocks, for the program that the engine would choose."""
    runner, count = engine.runner, -(-context // BLOCK)
    order = np.random.default_rng(0).permutation(rows * count).astype(np.int32)
    slot, index = np.divmod(np.arange(rows * count, dtype=np.int32), count)
    inspection.patch_tables(runner, np.stack([slot, index, order], axis=1))
    ones = np.ones(rows, np.int32)
    plan = Plan(
        now=0.0,
        num_decodes=rows,
        slots=np.arange(rows),
        epochs=np.zeros(runner.geometry.num_slots, np.int64),
        starts=ones * (context - 1),
        lengths=ones,
        samples=ones.astype(bool),
        turns=ones,
        table=np.zeros((0, 3), np.int32),
    )
    variant = narrowest(runner.programs)
    key = runner.programs.choose(plan, variant)[0]
    if key != Key(key.shape, variant) or key.shape.rows != decode_size(engine, rows):
        raise RuntimeError(f"{rows} rows run in {key}: the program of that size is not compiled")
    return Packed(plan, key, batch.pack(plan, key.shape, runner.geometry.num_slots))


def dispatch_seconds(engine: LLMEngine, step: Packed, count: int) -> float:
    """Return the host's seconds to dispatch a step."""
    runner = engine.runner
    buffer = inspection.fitted(runner, step.buffer, step.key)
    replay(engine, [step])
    began = time.perf_counter()
    joined = inspection.dispatch(runner, [(runner.programs[step.key], buffer)] * count)
    taken = time.perf_counter() - began
    jax.block_until_ready(joined)
    return taken / count
