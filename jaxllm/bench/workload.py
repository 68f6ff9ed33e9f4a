"""What a benchmark asks for: one request of a workload. Knows neither where prompts come from nor where they go."""

from __future__ import annotations

from dataclasses import dataclass

from jaxllm.structured_outputs_params import StructuredOutputsParams


@dataclass(frozen=True, slots=True)
class Job:
    """One request: a text or token ids, how many tokens those are, and how many to answer with.

    `prompt_tokens` counts what the model sees, with the special tokens that a server puts around a text. `arrival_s`
    is when a timed trace has it arrive, in seconds after the first; None where a rate decides. `structured_outputs` is
    what its answer has to look like, which may then be shorter.
    """

    prompt: str | tuple[int, ...]
    prompt_tokens: int
    max_tokens: int
    arrival_s: float | None = None
    structured_outputs: StructuredOutputsParams | None = None
