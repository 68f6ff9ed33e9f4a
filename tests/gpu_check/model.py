"""The 8B shape: a long prompt, steps and their floors, kernels by time, and requests from end to end."""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np

from benchmarks.bare import Packed, packed_steps, replay
from jaxllm import LLM, SamplingParams
from tests.gpu_check import by_time, shape8b
from tests.gpu_check.check import Check
from tests.gpu_check.shape8b import Shape

STEPS = ((1, 1024), (64, 1024), (16, 1024), (128, 1024), (256, 1024), (16, 8192))
DRY_STEPS = ((1, 48), (4, 48), (8, 48), (2, 160))
PROFILED, DRY_PROFILED = (1, 64, 256), (1, 8)  # rows, with the first context
PROMPTS, DRY_PROMPTS = (16, 512), (2, 60)  # prompts of a step, tokens of each
LONG, DRY_LONG = 8192, 200
REQUESTS, DRY_REQUESTS = (64, 256), (2, 8)
LONGEST, NEW = (512, 40), (128, 6)  # tokens in and out, on a GPU and dry
ALONE, ALONE_NEW = (512, 40), (64, 8)
COUNT = (20, 2)  # steps of a round
SHOWN = 14  # kernels
AIMS = {1: 1.2, 64: 1.18, 256: 1.3}  # times the floor, by rows, at the first context
REST_SECONDS = 100  # at most, for all other programs
NEEDED_AFTER = 35  # seconds for requests after those


def run(check: Check) -> None:
    shape = shape8b.write(check)
    with shape8b.start(check, shape) as llm:
        _measure(check, llm, shape)


def _measure(check: Check, llm: LLM, shape: Shape) -> None:
    """Measure everything in order of importance, compiling programs as needed."""
    steps = DRY_STEPS if check.is_dry else STEPS
    shape8b.compile_sizes(check, llm, [rows for rows, _ in steps], [shape.sizes["max_num_batched_tokens"]])
    with check.guarded("a long prompt", is_wrong=True):
        _long_prompt(check, llm)
    with check.guarded("prompts", is_wrong=True):
        _prompts(check, llm, shape)
    shape8b.fill(llm.engine)
    for rows, context in steps:
        with check.guarded(f"{rows} rows of {context}", is_wrong=True):
            _step(check, llm, shape, rows, context)
    llm.engine.runner.renew()
    with check.guarded("the other programs", is_wrong=True):
        shape8b.compile_rest(
            check, llm, 5.0 if check.is_dry else min(REST_SECONDS, max(5.0, check.left - NEEDED_AFTER))
        )
    with check.guarded("one request", is_wrong=True):
        _alone(check, llm)
    for count in DRY_REQUESTS if check.is_dry else REQUESTS:
        if not check.is_over(1 if check.is_dry else 12, f"{count} requests"):
            with check.guarded(f"{count} requests", is_wrong=True):
                _requests(check, llm, shape, count)


def generate(llm: LLM, lengths: list[int], new: int) -> tuple[float, list[Any]]:
    """Generate `new` tokens for each prompt of random tokens; return the seconds and the outputs."""
    random = np.random.default_rng(len(lengths))
    prompts: list[Any] = [{"prompt_token_ids": random.integers(3, 500, length).tolist()} for length in lengths]
    params = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False, logprobs=None)
    began = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - began
    for number, output in enumerate(outputs):
        found = output.outputs[0]
        if len(found.token_ids) != new or found.finish_reason != "length":
            raise RuntimeError(f"prompt {number} has {len(found.token_ids)} tokens and ended by {found.finish_reason}")
    return seconds, outputs


def _long_prompt(check: Check, llm: LLM) -> None:
    """Generate for a prompt of a whole step's tokens, or more."""
    length, new = (DRY_LONG if check.is_dry else LONG), 4
    generate(llm, [length], new)
    seconds, outputs = generate(llm, [length], new)
    check.measure(prompt_tokens=length, new_tokens=new, seconds=seconds, tokens=str(outputs[0].outputs[0].token_ids))


def _prompts(check: Check, llm: LLM, shape: Shape) -> None:
    """Measure the step of many prompts that fills the token budget."""
    count, length = DRY_PROMPTS if check.is_dry else PROMPTS
    engine, turns = llm.engine, 2 if check.is_dry else 3
    with packed_steps(engine) as steps:
        generate(llm, [length] * count, 2)
    ready = engine.runner.programs.ready()
    step = max((one for one in steps if one.key in ready and not one.key.shape.is_decode),
               key=lambda one: one.plan.num_tokens)  # fmt: skip
    taken = _seconds(llm, step, turns)
    tokens, rate = step.plan.num_tokens, check.ceilings()["flops_per_second"]
    done = 2 * shape.parameters * tokens / taken
    check.measure(
        prompts=f"{count} of {length}", program=str(step.key), milliseconds=1e3 * taken,
        tokens_per_second=tokens / taken, tflops=done / 1e12, share=done / rate,
    )  # fmt: skip
    _kernels(check, llm, step, f"{tokens} tokens of prompts", turns, {})


def _step(check: Check, llm: LLM, shape: Shape, rows: int, context: int) -> None:
    """Measure a decode step and its kernels, and compare with the time of reading its bytes."""
    engine, count = llm.engine, COUNT[check.is_dry]
    if rows * -(-context // shape8b.BLOCK) > shape.sizes["num_kv_blocks"]:
        check.skip(f"{rows} rows of {context}: their keys and values do not fit")
        return
    step = shape8b.decode_step(engine, rows, context)
    replay(engine, [step] * 3)  # the first run of a program has no graph, the second one makes it
    taken = _seconds(llm, step, count)
    floor = shape.floor(rows, context, check.ceilings()["read_bytes_per_second"])
    check.measure(
        rows=rows, context=context, program=str(step.key), milliseconds=1e3 * taken, tokens_per_second=rows / taken,
        floor_milliseconds=1e3 * floor, times=taken / floor,
        dispatch_milliseconds=1e3 * shape8b.dispatch_seconds(engine, step, count),
    )  # fmt: skip
    first = (DRY_STEPS if check.is_dry else STEPS)[0][1]
    if context == first and rows in AIMS:
        check.target(f"{rows} rows of {context}, times the floor", taken / floor, AIMS[rows], is_least=False)
    if rows in (DRY_PROFILED if check.is_dry else PROFILED) and context == first:
        itemsize = shape.weights // shape.parameters
        embeddings = llm.engine.runner.setup.spec.vocab_size * llm.engine.runner.setup.spec.width * itemsize
        known = {
            "multiply_fused": (shape.weights - embeddings) // (4 * shape.layers),  # the mean of a layer's four
            "attend": rows * context * shape.per_token // shape.layers,
        }
        _kernels(check, llm, step, f"decode, {rows} rows of {context}", 5, known)


def _kernels(check: Check, llm: LLM, step: Packed, what: str, steps: int, known: dict[str, int]) -> None:
    """Note the kernels of a step by duration."""
    with check.guarded(f"kernels of {what}"):
        kernels = by_time.measure(lambda: replay(llm.engine, [step] * steps), steps)
        products = by_time.product_bytes(llm.engine.runner.programs[step.key].as_text())
        total = sum(one.microseconds for one in kernels)
        check.measure(kernels_of=what, busy_milliseconds=total / 1e3, launches=sum(one.launches for one in kernels))
        for one in kernels[:SHOWN]:
            each = one.microseconds / one.launches
            size = by_time.bytes_of(one.name, products, known)
            speed = "" if size is None or not each else f"{size / each / 1e6:.2f}"
            check.measure(
                step=what, kernel=one.name[:70], launches=one.launches, microseconds_each=each,
                microseconds=one.microseconds, terabytes_per_second=speed,
            )  # fmt: skip


def _seconds(llm: LLM, step: Packed, count: int) -> float:
    """Return the seconds of a step, the median of three rounds."""
    replay(llm.engine, [step] * 2)
    return statistics.median(replay(llm.engine, [step] * count) for _ in range(3)) / count


def _alone(check: Check, llm: LLM) -> None:
    """Measure one request: time to first token, and time per further token."""
    length, new = ALONE[check.is_dry], ALONE_NEW[check.is_dry]
    generate(llm, [length], new + 1)  # makes graphs
    first, whole = generate(llm, [length], 1)[0], generate(llm, [length], new + 1)[0]
    each = 1e3 * (whole - first) / new
    check.measure(one_request=length, first_token_milliseconds=1e3 * first, token_milliseconds=each)


def _requests(check: Check, llm: LLM, shape: Shape, count: int) -> None:
    """Measure parallel requests of several lengths, and compare with the floor given by the ceilings."""
    longest, new = LONGEST[check.is_dry], NEW[check.is_dry]
    lengths = np.random.default_rng(0).integers(longest // 4, longest + 1, count).tolist()
    taken = []
    for number in range(2):
        if number and check.is_over(1 if check.is_dry else 1.5 * taken[0], f"{count} requests again"):
            break
        taken.append(generate(llm, lengths, new)[0])
    given, seconds, ceilings = sum(lengths), min(taken), check.ceilings()
    floor = 2 * shape.parameters * given / ceilings["flops_per_second"]
    floor += new * shape.floor(count, given / count + new / 2, ceilings["read_bytes_per_second"])
    check.measure(
        requests=count, prompt_tokens=given, new_tokens=count * new, seconds=seconds,
        new_tokens_per_second=count * new / seconds, all_tokens_per_second=(given + count * new) / seconds,
        first_run_seconds=taken[0], times=seconds / floor,
    )  # fmt: skip
