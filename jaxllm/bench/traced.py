"""Run an engine's steps under the profiler and explain them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from jaxllm.bench.explain import Explanation, explain, programs_in, read_trace
from jaxllm.sampling_params import SamplingParams
from pallas_kernels.own_folders import OwnFolder

if TYPE_CHECKING:
    from jaxllm.engine.engine_client import SteppedEngine
    from jaxllm.engine.prompts import Prompt


def trace(
    engine: SteppedEngine,
    requests: Sequence[tuple[Prompt, SamplingParams]],
    num_skipped: int,
    num_steps: int,
    folder: str | None = None,
) -> Explanation:
    """Explain `num_steps` steps after `num_skipped`, and abort the rest.

    Programs should be compiled, and no other requests running.
    """
    accepted = [engine.accept(f"traced-{number}", *request) for number, request in enumerate(requests)]
    engine.add(accepted)
    try:
        for _ in range(num_skipped):
            engine.step()
        with nullcontext(folder) if folder is not None else OwnFolder() as place:
            profile = engine.start_profile(str(place), num_steps)
            try:
                for _ in range(num_steps):
                    engine.step()
            finally:
                path = profile.stop()
            return _explain(engine, path)
    finally:
        for request in accepted:
            engine.abort_request(request.request_id)


def batch(vocab_size: int, batch_size: int, input_len: int, output_len: int) -> list[tuple[Prompt, SamplingParams]]:
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=output_len)
    prompts = [[(7 * number + index) % vocab_size for index in range(input_len)] for number in range(batch_size)]
    return [(prompt, params) for prompt in prompts]


def _explain(engine: SteppedEngine, path: Path) -> Explanation:
    events = read_trace(path)
    return explain(events, engine.program_texts(programs_in(events)))
