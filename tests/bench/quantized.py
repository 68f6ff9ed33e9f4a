"""What `--quantization int8` is worth: decoding 1 and 16 rows of Qwen2.5-0.5B's shape, beside bfloat16.

`python -m tests.bench.quantized`. Random weights, greedy, prompts of token ids. Rounds alternate between the engines,
so that what else the machine does hits both alike; the medians are compared.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from jaxllm import SamplingParams, batch
from jaxllm.config import EngineConfig
from jaxllm.embedded import MODEL_DIR
from jaxllm.engine import LLMEngine
from jaxllm.model import weights
from jaxllm.programs import Key
from jaxllm.sampling import Variant

MODEL = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
    "vocab_size": 151936,
}
SLOTS, PROMPT, ROUNDS = 16, 16, 5
STEPS = {1: 10, 16: 6}  # timed in a round
PROMISED = {1: 1.3, 16: 1.2}


def make(folder: Path, **settings: Any) -> LLMEngine:
    """Start an engine that has the programs of 1 and 16 greedy rows, and few others."""
    (folder / "config.json").write_text(json.dumps(MODEL))
    config = EngineConfig.from_kwargs(
        model=str(folder),
        tokenizer=str(MODEL_DIR),
        load_format="dummy",
        precompile="covering",
        max_model_len=256,
        max_num_seqs=SLOTS,
        max_num_batched_tokens=SLOTS,
        num_kv_blocks=SLOTS * 4,
        **settings,
    )
    engine = LLMEngine(config)
    programs = engine.runner.programs
    shapes = {shape.rows: shape for shape in batch.decode_shapes(SLOTS, 2)}
    programs.begin([Key(shapes[max(2, rows)], Variant.GREEDY) for rows in STEPS], 2)
    programs.wait()
    return engine


def measure(engine: LLMEngine, rows: int) -> float:
    """Return the seconds of a step that decodes so many rows."""
    params = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)
    for number in range(rows):
        engine.add_request(str(number), [3 + number] * PROMPT, params)
    for _ in range(rows * PROMPT // SLOTS + 4):  # prompts, and the first decode steps
        engine.step()
    began = time.perf_counter()
    for _ in range(STEPS[rows]):
        engine.step()
    seconds = (time.perf_counter() - began) / STEPS[rows]
    for number in range(rows):
        engine.abort_request(str(number))
    while engine.has_unfinished_requests():
        engine.step()
    engine.reset_prefix_cache()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.quantized")
    parser.add_argument("--dtype", default="float32", help="of what is not quantized")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        engines = {
            "bfloat16": make(Path(name), dtype="bfloat16"),
            "int8": make(Path(name), dtype=options.dtype, quantization="int8"),
        }
    seconds: dict[tuple[str, int], list[float]] = {(name, rows): [] for name in engines for rows in STEPS}
    for number in range(ROUNDS + 1):
        for (name, rows), taken in seconds.items():
            measured = measure(engines[name], rows)
            if number:  # the first round warms up
                taken.append(measured)
    for name, engine in engines.items():
        print(f"{name}: weights of {weights.num_bytes(engine.runner._params) / 2**20:.0f} MiB")
        engine.close()
    figures = {}
    for rows, promised in PROMISED.items():
        narrow, ours = (statistics.median(seconds[name, rows]) for name in engines)
        figures[rows] = narrow / ours
        print(
            f"{rows:2} rows: bfloat16 {narrow * 1e3:6.1f} ms a step, int8 (the rest {options.dtype}) {ours * 1e3:6.1f} "
            f"ms: {narrow / ours:.2f} times as fast (promised: {promised})"
        )
    print(json.dumps({"quantized": figures}))
    assert all(figures[rows] >= promised for rows, promised in PROMISED.items())


if __name__ == "__main__":
    main()
