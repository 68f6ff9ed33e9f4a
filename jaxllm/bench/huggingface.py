"""Throughput of `transformers`' `generate` on torch for the same jobs.

Batches as vLLM's `hf` backend: in order, left-padded.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

from tqdm import tqdm

from jaxllm.bench.throughput import Served, warm_up_jobs
from jaxllm.bench.workload import Job
from jaxllm.errors import EngineError, UserError


def check() -> None:
    try:
        import torch  # noqa: F401  # pyright: ignore[reportMissingImports]
        import transformers  # noqa: F401
    except ImportError as error:
        raise UserError(f"--backend hf needs {error.name}: pip install torch transformers", "backend") from error


class HuggingFace:
    """A model in transformers, with random weights if it has none.

    `dtype` "auto" is float32 on a CPU, else the checkpoint's.
    """

    def __init__(self, model: str, dtype: str = "auto", revision: str | None = None, has_weights: bool = True) -> None:
        check()
        import torch  # pyright: ignore[reportMissingImports]
        from transformers import AutoConfig, AutoModelForCausalLM

        self.torch: Any = torch
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        try:
            config = AutoConfig.from_pretrained(model, revision=revision)
            if dtype == "auto":
                dtype = "float32" if self.device == "cpu" else str(config.dtype or "bfloat16").removeprefix("torch.")
            kind = getattr(torch, dtype)
            if has_weights:
                network: Any = AutoModelForCausalLM.from_pretrained(model, revision=revision, dtype=kind)
            else:
                network = AutoModelForCausalLM.from_config(config, dtype=kind)
        except (OSError, ValueError) as error:
            raise UserError(f"transformers cannot load {model}: {str(error).splitlines()[0]}", "model") from error
        network.generation_config.eos_token_id = None
        self.max_model_len: int | None = getattr(config, "max_position_embeddings", None)
        self.network = network.eval().to(self.device)

    def run(self, jobs: Sequence[Job], n: int, max_batch_size: int, num_warmups: int = 0) -> Served:
        longest = max(job.prompt_tokens + job.max_tokens for job in jobs)
        if self.max_model_len is not None and longest > self.max_model_len:
            raise UserError(
                f"a request of {longest} tokens is longer than the model's context of {self.max_model_len}."
            )
        if num_warmups:
            self._generate(warm_up_jobs(jobs, min(num_warmups, max_batch_size)), n)
        ends: list[float] = []
        with tqdm(
            total=len(jobs), desc="Processed prompts", disable=not sys.stderr.isatty(), dynamic_ncols=True
        ) as bar:
            began = time.monotonic()
            for start in range(0, len(jobs), max_batch_size):
                batch = jobs[start : start + max_batch_size]
                self._generate(batch, n)
                ends += [1e3 * (time.monotonic() - began)] * len(batch)
                bar.update(len(batch))
            seconds = time.monotonic() - began
        return Served(seconds, n * sum(job.max_tokens for job in jobs), {"e2el_ms": ends})

    def _generate(self, batch: Sequence[Job], n: int) -> None:
        torch = self.torch
        longest, num_new = max(job.prompt_tokens for job in batch), max(job.max_tokens for job in batch)
        ids = torch.zeros((len(batch), longest), dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, job in enumerate(batch):
            ids[row, longest - job.prompt_tokens :] = torch.tensor(job.prompt, dtype=torch.long)
            mask[row, longest - job.prompt_tokens :] = 1
        with torch.inference_mode():
            output = self.network.generate(
                input_ids=ids.to(self.device),
                attention_mask=mask.to(self.device),
                max_new_tokens=num_new,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                num_return_sequences=n,
                pad_token_id=0,
                use_cache=True,
            ).cpu()
        made, wanted = tuple(output.shape), (n * len(batch), longest + num_new)
        if made != wanted:
            raise EngineError(f"transformers made {made} tokens with the prompts, {wanted} were requested.")
