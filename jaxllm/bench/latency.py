"""Latency of a batch from prompts to last token, as vLLM's `bench latency`."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm

from jaxllm.bench.throughput import check_lengths, sampling_params
from jaxllm.bench.workload import Job

if TYPE_CHECKING:
    from jaxllm.llm import LLM

PERCENTAGES = (10, 25, 50, 75, 90, 99)


def measure(
    llm: LLM,
    batch_size: int,
    input_len: int,
    output_len: int,
    n: int,
    detokenize: bool,
    num_warmups: int,
    num_iters: int,
    seed: int,
) -> np.ndarray:
    """Return the seconds of `num_iters` batches of random prompts; raise `EngineError` if a length differs."""
    random = np.random.default_rng(seed)
    prompts = random.integers(0, llm.engine.model.vocab_size, (batch_size, input_len)).tolist()
    jobs = [Job(tuple(prompt), input_len, output_len) for prompt in prompts]
    params = [sampling_params(job, n, detokenize) for job in jobs]
    seconds = []
    with tqdm(total=num_warmups + num_iters, desc="Warm-up", disable=not sys.stderr.isatty()) as bar:
        for number in range(num_warmups + num_iters):
            if number == num_warmups:
                bar.set_description("Batches")
            began = time.perf_counter()
            outputs = llm.generate(prompts, params, use_tqdm=False)
            seconds.append(time.perf_counter() - began)
            check_lengths(outputs, jobs, n)
            bar.update()
    return np.array(seconds[num_warmups:])


def report(latencies: np.ndarray) -> tuple[str, dict[str, Any]]:
    percentiles = dict(zip(PERCENTAGES, np.percentile(latencies, PERCENTAGES).tolist(), strict=True))
    shown = {"Avg": latencies.mean(), "Std": latencies.std()}
    shown |= {f"{share}% percentile": value for share, value in percentiles.items()}
    lines = [f"{name} latency: {round(float(value), 6)} seconds" for name, value in shown.items()]
    figures = {
        "avg_latency": float(latencies.mean()),
        "std_latency": float(latencies.std()),
        "latencies": latencies.tolist(),
        "percentiles": {str(share): value for share, value in percentiles.items()},
    }
    return "\n".join(lines), figures
