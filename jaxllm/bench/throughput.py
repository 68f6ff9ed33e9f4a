"""Offline throughput of jaxllm, with the figures of vLLM's `bench throughput`."""

from __future__ import annotations

import asyncio
import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from tqdm import tqdm

from jaxllm.bench import drafts
from jaxllm.bench.drafts import Drafts, counted
from jaxllm.bench.timeline import Timeline
from jaxllm.bench.workload import Job
from jaxllm.errors import EngineError
from jaxllm.outputs import RequestOutput
from jaxllm.sampling_params import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from jaxllm.engine.async_llm import AsyncLLM
    from jaxllm.llm import LLM

WARM_UP_TOKENS = 4  # per output: a prefill and decode steps


class Served(NamedTuple):
    """The results of a run."""

    seconds: float  # first arrival to last end
    output_tokens: int
    samples: Mapping[str, Sequence[float]] = {}  # milliseconds by name
    timeline: Mapping[str, Sequence[float]] | None = None
    num_compiled: int = 0  # distorts `seconds`
    drafts: tuple[Drafts, Drafts] = (Drafts(), Drafts())  # before and after


def sampling_params(job: Job, n: int, detokenize: bool) -> SamplingParams:
    """Return a job's sampling parameters as in vLLM's benchmarks: temperature 1, exact length unless constrained."""
    return SamplingParams(
        n=n,
        temperature=1.0,
        ignore_eos=job.structured_outputs is None,
        structured_outputs=job.structured_outputs,
        max_tokens=job.max_tokens,
        detokenize=detokenize,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def requests(jobs: Sequence[Job], n: int, detokenize: bool) -> list[tuple[Any, SamplingParams]]:
    return [(_prompt(job), sampling_params(job, n, detokenize)) for job in jobs]


def warm_up_jobs(jobs: Sequence[Job], count: int) -> list[Job]:
    return [replace(job, max_tokens=min(job.max_tokens, WARM_UP_TOKENS)) for job in jobs[:count]]


def check_lengths(outputs: Sequence[RequestOutput], jobs: Sequence[Job], n: int) -> int:
    """Return the number of generated tokens; raise `EngineError` if an unconstrained output's length differs."""
    total = 0
    for number, (output, job) in enumerate(zip(outputs, jobs, strict=True)):
        lengths = [len(completion.token_ids) for completion in output.outputs]
        total += sum(lengths)
        if job.structured_outputs is None and lengths != [job.max_tokens] * n:
            raise EngineError(f"request {number} gave {lengths} tokens, {n} times {job.max_tokens} were requested.")
    return total


def run(llm: LLM, jobs: Sequence[Job], n: int = 1, detokenize: bool = True, num_warmups: int = 0) -> Served:
    """Submit all jobs at once and step until they end, after a warm-up that caches no blocks."""
    if num_warmups:
        warm = warm_up_jobs(jobs, num_warmups)
        params = [sampling_params(job, n, detokenize) for job in warm]
        llm.generate([_prompt(job) for job in warm], params, use_tqdm=False)
        llm.reset_prefix_cache()
    engine = llm.engine
    accepted = [
        engine.accept(f"bench-{number}", _prompt(job), sampling_params(job, n, detokenize))
        for number, job in enumerate(jobs)
    ]
    done: dict[str, RequestOutput] = {}
    compiled, before = engine.metrics.programs_compiled, counted(engine.metrics)
    timeline = Timeline(engine.metrics)
    with tqdm(total=len(jobs), desc="Processed prompts", disable=not sys.stderr.isatty(), dynamic_ncols=True) as bar:
        began = time.monotonic()
        engine.add(accepted)
        while engine.has_unfinished_requests():
            for output in engine.step():
                done[output.request_id] = output
                bar.update()
            if timeline.is_due():
                timeline.add(engine.load())
        seconds = time.monotonic() - began
    timeline.add(engine.load())
    outputs = [done[request.request_id] for request in accepted]
    return Served(
        seconds,
        check_lengths(outputs, jobs, n),
        _samples(outputs, began),
        timeline.lists(),
        engine.metrics.programs_compiled - compiled,
        (before, counted(engine.metrics)),
    )


def run_async(
    engine_args: Mapping[str, Any],
    jobs: Sequence[Job],
    n: int = 1,
    detokenize: bool = True,
    num_warmups: int = 0,
) -> Served:
    """Run the jobs as `run`, on an `AsyncLLM` with a reader per job."""
    return asyncio.run(_run_async(engine_args, jobs, n, detokenize, num_warmups))


async def _run_async(
    engine_args: Mapping[str, Any], jobs: Sequence[Job], n: int, detokenize: bool, num_warmups: int
) -> Served:
    from jaxllm.engine.async_llm import AsyncLLM

    async with AsyncLLM(
        **engine_args,
        progress=sys.stderr.isatty(),
        max_queued_requests=n * len(jobs),
        max_queued_tokens=n * sum(job.prompt_tokens for job in jobs),
        hang_timeout=math.inf,
    ) as llm:
        if num_warmups:
            warm = warm_up_jobs(jobs, num_warmups)
            await asyncio.gather(*(_one(llm, job, n, detokenize) for job in warm))
            await llm.reset_prefix_cache()
        compiled, before = llm.metrics.programs_compiled, counted(llm.metrics)
        timeline = Timeline(llm.metrics)
        watching = asyncio.create_task(_watch(llm, timeline))
        with tqdm(total=len(jobs), desc="Processed prompts", disable=not sys.stderr.isatty()) as bar:
            began = time.monotonic()
            outputs = await asyncio.gather(*(_one(llm, job, n, detokenize, bar) for job in jobs))
            seconds = time.monotonic() - began
        watching.cancel()
        timeline.add(llm.get_load())
        num_compiled = llm.metrics.programs_compiled - compiled
        own = before, counted(llm.metrics)
    lengths = check_lengths(outputs, jobs, n)
    return Served(seconds, lengths, _samples(outputs, began), timeline.lists(), num_compiled, own)


async def _one(llm: AsyncLLM, job: Job, n: int, detokenize: bool, bar: tqdm | None = None) -> RequestOutput:
    last = None
    async for output in llm.generate(_prompt(job), sampling_params(job, n, detokenize)):
        last = output
    if bar is not None:
        bar.update()
    if last is None:
        raise RuntimeError("a request ended with neither an output nor an exception")
    return last


async def _watch(llm: AsyncLLM, timeline: Timeline) -> None:
    while True:
        if timeline.is_due():
            timeline.add(llm.get_load())
        await asyncio.sleep(0.02)


def report(backend: str, jobs: Sequence[Job], served: Served) -> tuple[str, dict[str, Any]]:
    prompt_tokens = sum(job.prompt_tokens for job in jobs)
    total = prompt_tokens + served.output_tokens
    figures = {
        "backend": backend,
        "elapsed_time": served.seconds,
        "num_requests": len(jobs),
        "total_num_tokens": total,
        "requests_per_second": len(jobs) / served.seconds,
        "tokens_per_second": total / served.seconds,
        "output_tokens_per_second": served.output_tokens / served.seconds,
        "total_prompt_tokens": prompt_tokens,
        "total_output_tokens": served.output_tokens,
        "programs_compiled_meanwhile": served.num_compiled,
        "samples": dict(served.samples),
    }
    if served.timeline is not None:
        figures["timeline"] = dict(served.timeline)
    text = (
        f"Throughput: {len(jobs) / served.seconds:.2f} requests/s, {total / served.seconds:.2f} total tokens/s, "
        f"{served.output_tokens / served.seconds:.2f} output tokens/s\n"
        f"Total num prompt tokens:  {prompt_tokens}\n"
        f"Total num output tokens:  {served.output_tokens}"
    )
    lines, drafted = drafts.report(*served.drafts)
    return text + lines, figures | drafted


def _prompt(job: Job) -> Any:
    return job.prompt if isinstance(job.prompt, str) else {"prompt_token_ids": list(job.prompt)}


def _samples(outputs: Sequence[RequestOutput], began: float) -> dict[str, list[float]]:
    times = [output.metrics for output in outputs]
    samples: dict[str, list[float]] = {"ttft_ms": [], "tpot_ms": [], "e2el_ms": []}
    for output, when in zip(outputs, times, strict=True):
        if when is None or when.first_token_time is None or when.finished_time is None:
            raise EngineError(f"request {output.request_id} has no times of its tokens.")
        samples["ttft_ms"].append(1e3 * (when.first_token_time - began))
        samples["e2el_ms"].append(1e3 * (when.finished_time - began))
        length = len(output.outputs[0].token_ids)
        if len(output.outputs) == 1 and length > 1:
            samples["tpot_ms"].append(1e3 * (when.finished_time - when.first_token_time) / (length - 1))
    return {name: values for name, values in samples.items() if values}
