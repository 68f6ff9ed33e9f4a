"""A decode step of real shapes with random weights beside its floor: the bytes it must read over the read bandwidth.

The steps are packed by hand, so that a context of 8,192 tokens costs no prompt; their keys and values are noise. How
long the device waits for the host between two steps of the engine is measured as tests/benchmarks/overlap.py does.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxllm.config import EngineArgs
from jaxllm.engine.llm_engine import LLMEngine
from jaxllm.runner import batch
from jaxllm.runner.compiled_programs import Key
from jaxllm.sampling.sampler import Variant
from jaxllm.scheduler.state import Plan
from pallas_kernels import measuring
from tests.benchmarks import overlap
from tests.benchmarks.bare import Packed, compile_greedy, packed_steps, replay
from tests.gpu_check import models
from tests.gpu_check.check import Check

ROWS, CONTEXTS = (1, 16, 64, 256), (1024, 8192)
STEPS = 20
AIMS = {1: 1.15, 64: 1.3}  # times the floor, of the 8B shape, by rows
GAP = 0.05  # of a step
BLOCK = 16


def run(check: Check) -> None:
    for name in ("Llama-3.1-8B",) if check.is_dry else ("Llama-3.1-8B", "Qwen2.5-0.5B"):
        if check.is_over(30, name):
            continue
        with check.guarded(name), tempfile.TemporaryDirectory() as folder:
            _measure(check, name, Path(folder))


def _measure(check: Check, name: str, folder: Path) -> None:
    config = models.tiny(models.CONFIGS[name]) if check.is_dry else models.CONFIGS[name]
    dtype, itemsize = ("float32", 4) if check.is_dry else ("bfloat16", 2)
    all_rows, contexts = ((1, 64), (48,)) if check.is_dry else (ROWS, CONTEXTS)
    models.write_config(config, folder, dtype)
    weights, per_token = models.read_bytes(config, itemsize), models.kv_bytes(config, itemsize)
    memory = check.ceilings()["memory_gb"] * 1e9
    room = 0.85 * memory - weights * 1.2 - 3e9 if memory else 1e12
    longest = max(contexts) + 64
    fitting, blocks = [], max(8 * overlap.ROWS, -(-longest // BLOCK))  # those that the engine's own steps need
    for context in contexts:
        for rows in all_rows:
            if rows * context * per_token > room:
                needed = rows * context * per_token / 1e9
                check.skip(f"{name}, {rows} rows of {context}: {needed:.0f} GB of keys and values do not fit")
                continue
            fitting.append((rows, context))
            blocks = max(blocks, rows * -(-context // BLOCK))
    settings: dict[str, Any] = {
        "max_model_len": longest,
        "max_num_seqs": max(all_rows),
        "num_kv_blocks": blocks,
        "max_num_batched_tokens": max(1024, max(all_rows)),
        "enable_prefix_caching": False,
    }
    engine = LLMEngine(
        EngineArgs(
            model=str(folder), dtype=dtype, load_format="dummy", precompile="covering", block_size=BLOCK, **settings
        )
    )
    try:
        compile_greedy(engine, all_rows, [])
        _gap(check, name, engine)
        _fill(engine)
        for rows, context in fitting:
            what = f"{name}, {rows} rows of {context}"
            if check.is_over(2, what):
                continue
            taken = _seconds(engine, rows, context, 2 if check.is_dry else STEPS)
            floor = (weights + rows * context * per_token) / check.ceilings()["read_bytes_per_second"]
            check.measure(step=what, milliseconds=1e3 * taken, floor_milliseconds=1e3 * floor, times=taken / floor)
            if name == "Llama-3.1-8B" and rows in AIMS:
                check.target(f"{what}, times its floor", taken / floor, AIMS[rows], is_least=False)
    finally:
        engine.close()


def _gap(check: Check, name: str, engine: LLMEngine) -> None:
    """Measure what share of its steps the device waits for the host."""
    with packed_steps() as steps:
        overlap.measure(engine, bare=0.0)
    decodes = [step for step in steps if step.key.shape.is_decode and len(step.plan.slots) == overlap.ROWS]
    shares = []
    for _ in range(1 if check.is_dry else 3):
        bare = replay(engine, decodes) / len(decodes)
        taken, idle = overlap.measure(engine, bare)
        shares.append((idle / taken, 1e3 * taken, 1e3 * bare))
    share, taken, bare = (statistics.median(column) for column in zip(*shares, strict=True))
    check.measure(engine=f"{name}, {overlap.ROWS} rows", milliseconds=taken, bare_milliseconds=bare, idle=share)
    check.target(f"{name}, {overlap.ROWS} rows, share of a step that the device waits", share, GAP, is_least=False)


def _fill(engine: LLMEngine) -> None:
    """Put noise into the cache: zeros would be read as fast, but multiplied faster."""
    runner = engine.runner
    structure = jax.tree.structure(runner._state_shapes)
    state = jax.tree.unflatten(structure, runner._state)
    runner._state = ()
    shapes = [[None if one is None else (one.shape, one.dtype) for one in layer] for layer in state.kv]
    state = state.replace(kv=None)  # gone before the new ones are made: both would not fit
    made = tuple(tuple(None if one is None else measuring.noise(*one, seed=2) for one in layer) for layer in shapes)
    runner._state = tuple(jax.tree.leaves(state.replace(kv=made)))


def _seconds(engine: LLMEngine, rows: int, context: int, steps: int) -> float:
    """Return the seconds of a step of `rows` sequences, each in blocks of its own."""
    runner, count = engine.runner, -(-context // BLOCK)
    order = np.random.default_rng(0).permutation(rows * count).astype(np.int32)
    slot, index = np.divmod(np.arange(rows * count, dtype=np.int32), count)
    runner._patch(np.stack([slot, index, order], axis=1), None)
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
    key = runner.programs.choose(plan, Variant.GREEDY)[0]
    assert key == Key(key.shape, Variant.GREEDY) and key.shape.rows <= max(rows, 2), f"{key} serves {rows} rows"
    packed = Packed(plan, key, batch.pack(plan, key.shape, runner.geometry.num_slots))
    replay(engine, [packed] * 2)
    return statistics.median(replay(engine, [packed] * steps) for _ in range(3)) / steps
