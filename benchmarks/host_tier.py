"""Tokens and time that the host's tier saves: `python -m benchmarks.host_tier`.

Conversations alternate in a pool of half their working set: the prompt tokens that are computed twice, as a share of
those without the tier (the embedded model). Then the time to the first token of a prompt of 512 tokens that is in the
host's memory, or only on disk, as a share of the time to compute it (the 0.5B shape).
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import shapes
from benchmarks.aims import require
from benchmarks.bare import compile_greedy
from jaxllm import LLM, SamplingParams
from jaxllm.embedded import MODEL_DIR

CONVERSATIONS, TURNS, SAID, ANSWERED = 8, 4, 48, 16  # tokens of a turn
BLOCK, PROMPT, OWN = 16, 512, 16
COMPUTED_AGAIN, FIRST_TOKEN = 0.1, 0.25


def computed_again(size: float) -> int:
    """Return the prompt tokens that are computed twice with `size` GiB of the host's memory."""
    random = np.random.default_rng(0)
    longest = TURNS * (SAID + ANSWERED)
    sizes: dict[str, Any] = {"max_num_seqs": 1, "max_num_batched_tokens": 64, "max_model_len": longest + BLOCK}
    blocks = CONVERSATIONS * longest // BLOCK // 2
    params = SamplingParams(temperature=0.0, max_tokens=ANSWERED, ignore_eos=True)
    with LLM(str(MODEL_DIR), num_kv_blocks=blocks, kv_offloading_size=size, precompile="covering", **sizes) as llm:
        texts: list[list[int]] = [[] for _ in range(CONVERSATIONS)]
        for _ in range(TURNS):
            for text in texts:
                text += random.integers(5, 1000, SAID).tolist()
                (output,) = llm.generate([{"prompt_token_ids": text}], params, use_tqdm=False)
                text += output.outputs[0].token_ids
        # New tokens of each turn: those of the question, and those of a block that was not full.
        new = TURNS * CONVERSATIONS * SAID + (TURNS - 1) * CONVERSATIONS * BLOCK
        return max(0, llm.engine.metrics.chunk_tokens - new)


def first_token_share(layers: int | None, rounds: int) -> tuple[float, float]:
    """Return the median seconds to the first token of a prompt, computed and loaded from the host."""
    folder = str(shapes.folder_of("qwen2.5-0.5b", "float32", layers))
    blocks = (PROMPT + 2 * OWN) // BLOCK
    sizes: dict[str, Any] = {"max_num_seqs": 2, "max_model_len": PROMPT + 2 * OWN, "num_kv_blocks": blocks}
    first, random = SamplingParams(temperature=0.0, max_tokens=1), np.random.default_rng(0)
    computed, loaded = [], []
    with LLM(folder, dtype="float32", kv_offloading_size=1.0, precompile="covering", **sizes) as llm:
        compile_greedy(llm.engine, [], [16, 32, 64, 160])
        metrics = llm.engine.metrics
        known = random.integers(5, 1000, PROMPT).tolist()
        for number in range(rounds + 2):
            for times, prompt in ((loaded, known), (computed, random.integers(5, 1000, PROMPT).tolist())):
                before = metrics.loaded_tokens
                began = time.perf_counter()
                llm.generate(prompt + random.integers(5, 1000, OWN).tolist(), first, use_tqdm=False)
                took = time.perf_counter() - began
                if number > 1:  # the first evicts nothing, the second stores
                    times.append(took)
                    is_hit = metrics.loaded_tokens - before >= PROMPT - 4 * BLOCK  # the device has kept a few
                    if is_hit != (times is loaded):
                        raise RuntimeError("a prompt was loaded that must be computed, or the reverse")
                time.sleep(0.5)  # until the copies to the host have ended
    return statistics.median(computed), statistics.median(loaded)


def first_token_from_disk(layers: int | None, rounds: int) -> tuple[float, float]:
    """Return median seconds to the first token of a prompt, computed and read from disk (not its page cache)."""
    model = str(shapes.folder_of("qwen2.5-0.5b", "float32", layers))
    sizes: dict[str, Any] = {"max_num_seqs": 2, "max_model_len": PROMPT + 2 * OWN, "num_kv_blocks": 2 * PROMPT // BLOCK}
    first, random = SamplingParams(temperature=0.0, max_tokens=1), np.random.default_rng(0)
    known = random.integers(5, 1000, PROMPT).tolist()
    computed, read = [], []
    with (
        tempfile.TemporaryDirectory(dir=".") as disk,
        LLM(
            model, dtype="float32", kv_offloading_size=1.0, kv_offloading_disk=disk, precompile="covering", **sizes
        ) as llm,
    ):
        compile_greedy(llm.engine, [], [16, 32, 64, 160])
        metrics = llm.engine.metrics
        for number in range(rounds + 1):
            for times, prompt in ((read, known), (computed, random.integers(5, 1000, PROMPT).tolist())):
                _empty_page_cache(Path(disk))
                if not llm.reset_prefix_cache():
                    raise RuntimeError("the caches of device and host could not be cleared")
                before, stored = metrics.disk_read_blocks, metrics.disk_stored_blocks
                began = time.perf_counter()
                llm.generate(prompt + random.integers(5, 1000, OWN).tolist(), first, use_tqdm=False)
                took = time.perf_counter() - began
                blocks = metrics.disk_read_blocks - before
                if number:  # the first is computed, and written
                    times.append(took)
                    if blocks != (PROMPT // BLOCK if times is read else 0):
                        raise RuntimeError(f"{blocks} blocks were read from the disk")
                while not blocks and metrics.disk_stored_blocks < stored + PROMPT // BLOCK:
                    time.sleep(0.01)
    return statistics.median(computed), statistics.median(read)


def _empty_page_cache(folder: Path) -> None:
    for path in folder.glob("*/*/*"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, help="of the 0.5B shape (24)")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    without, with_tier = computed_again(0.0), computed_again(0.25)
    print(f"prompt tokens computed again: {without} without the host's tier, {with_tier} with it")
    require(with_tier <= COMPUTED_AGAIN * without, f"more than {COMPUTED_AGAIN:.0%} of them")
    computed, loaded = first_token_share(options.layers, options.rounds)
    print(f"first token of {PROMPT + OWN} tokens: computed {1000 * computed:.0f} ms, loaded {1000 * loaded:.0f} ms")
    require(loaded <= FIRST_TOKEN * computed, f"a hit takes more than {FIRST_TOKEN:.0%} of computing it")
    computed, read = first_token_from_disk(options.layers, options.rounds)
    print(f"first token of {PROMPT + OWN} tokens: computed {1000 * computed:.0f} ms, from disk {1000 * read:.0f} ms")
    require(read <= FIRST_TOKEN * computed, f"a hit on disk takes more than {FIRST_TOKEN:.0%} of computing it")


if __name__ == "__main__":
    main()
