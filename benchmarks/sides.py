"""The sides of a comparison: processes that each hold a model and run jobs, alternating with the others.

`python -m benchmarks.sides jaxllm|transformers FOLDER DTYPE [JSON]` reads one job per line, such as {"rows": 1,
"prompt": 128, "new": 32}, generates greedily, and answers with its time: {"seconds": …}.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from tests.support.paths import ROOT

if TYPE_CHECKING:
    from jaxllm import LLM

ROWS, TOKENS = (1, 2, 16), (16, 128, 512)  # sizes of the programs that jobs use
# Shared by all benchmarks of a model, so that they share compiled programs.
GEOMETRY: dict[str, Any] = {
    "max_model_len": 1024,
    "max_num_seqs": 16,
    "num_kv_blocks": 256,
    "max_num_batched_tokens": TOKENS[-1],  # only whole prompts are measured here
    "enable_prefix_caching": False,
}
Job = TypeVar("Job")
Generate = Callable[[int, int, int], float]  # (rows, prompt tokens, new tokens) to seconds


class Side:
    """One engine in a separate process."""

    def __init__(
        self, engine: str, folder: Path, dtype: str, python: str = sys.executable, name: str = "", **settings: Any
    ) -> None:
        self.name = name or engine
        command = [python, "-m", "benchmarks.sides", engine, str(folder), dtype, json.dumps(settings)]
        environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'server'}", "JAX_PLATFORMS": "cpu"}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment
        )
        self._answer()

    def __enter__(self) -> Side:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    def run(self, rows: int, prompt: int, new: int) -> float:
        """Generate `new` tokens for `rows` prompts of `prompt` tokens; return the seconds."""
        return self._ask({"rows": rows, "prompt": prompt, "new": new})["seconds"]

    def decode(self, rows: int, prompt: int, new: int) -> float:
        """Return the seconds of one decode step of `rows` sequences: the time of `new` tokens less that of one."""
        first = self.run(rows, prompt, 1)
        return (self.run(rows, prompt, new) - first) / (new - 1)

    def peak_mib(self) -> float:
        """Return the peak memory of the process."""
        return self._ask({})["peak_mib"]

    def _ask(self, job: dict[str, int]) -> dict[str, float]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, float]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"the process of {self.name} ended early; its output is above")
        return json.loads(line)


def medians(rounds: int, jobs: dict[Job, Callable[[], float]]) -> dict[Job, float]:
    """Measure jobs alternately, so that other load affects all alike; the first round warms up."""
    taken: dict[Job, list[float]] = {name: [] for name in jobs}
    for _ in range(rounds + 1):
        for name, measure in jobs.items():
            taken[name].append(measure())
    return {name: statistics.median(figures[1:]) for name, figures in taken.items()}


def prompts_of(rows: int, length: int) -> list[list[int]]:
    """Return prompts without a common prefix, of ids that every vocabulary has."""
    return [[5 + (7 * row + 13 * position) % 1000 for position in range(length)] for row in range(rows)]


def open_jaxllm(folder: str, dtype: str, settings: dict[str, Any]) -> Generate:
    from benchmarks.bare import compile_greedy
    from jaxllm import LLM

    llm = LLM(folder, dtype=dtype, precompile="covering", **GEOMETRY | settings)
    compile_greedy(llm.engine, ROWS, TOKENS)
    return functools.partial(generate, llm)


def generate(llm: LLM, rows: int, prompt: int, new: int) -> float:
    """Generate `new` tokens greedily for `rows` prompts of `prompt` tokens; return the seconds."""
    from jaxllm import SamplingParams

    params, prompts = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True), prompts_of(rows, prompt)
    began = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - began
    assert all(len(output.outputs[0].token_ids) == new for output in outputs), "an output has another length"
    return seconds


def open_transformers(folder: str, dtype: str, _settings: dict[str, Any]) -> Generate:
    import torch  # pyright: ignore[reportMissingImports]
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)

    def generate(rows: int, prompt: int, new: int) -> float:
        ids = torch.tensor(prompts_of(rows, prompt))
        began = time.perf_counter()
        with torch.inference_mode():
            found = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=new,
                min_new_tokens=new,
                pad_token_id=0,
            )
        assert found.shape == (rows, prompt + new), "an output has another length"
        tokenizer.batch_decode(found[:, prompt:])
        return time.perf_counter() - began

    return generate


def peak_mib() -> float:
    """Return the peak memory of this program; `ru_maxrss` would include the parent process."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) / 1024


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("engine", choices=("jaxllm", "transformers"))
    parser.add_argument("folder")
    parser.add_argument("dtype")
    parser.add_argument("settings", nargs="?", type=json.loads, default={})
    options = parser.parse_args(arguments)
    opened = {"jaxllm": open_jaxllm, "transformers": open_transformers}[options.engine]
    with contextlib.redirect_stdout(sys.stderr):
        run = opened(options.folder, options.dtype, options.settings)
    print("{}", flush=True)  # ready
    for line in sys.stdin:
        job = json.loads(line)
        answer = {"seconds": run(job["rows"], job["prompt"], job["new"])} if job else {"peak_mib": peak_mib()}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
