"""Validates beam searches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from jaxllm.beam_search_params import BeamSearchParams
from jaxllm.errors import UnsupportedError, UserError
from jaxllm.sampling_params import RequestOutputKind, SamplingParams
from jaxllm_server.generation.calls import Call, is_forced

_SHARED = ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens")
_KNOWN = frozenset(("n", "temperature", "max_tokens", *_SHARED))


def check(call: Call, given: Mapping[str, Any]) -> None:
    """Refuse options that a beam search lacks, unless neutral."""
    if call.stream:
        raise UserError(
            "A beam search cannot stream, as its outputs are only known at the end; remove stream.", "stream"
        )
    if is_forced(call.tool_choice):
        raise UnsupportedError("tool_choice with a beam search is not supported by jaxllm yet.", "tool_choice")
    neutral = SamplingParams()
    for name, value in given.items():
        if name not in _KNOWN and value != getattr(neutral, name, None) and value not in ([], {}):
            raise UnsupportedError(f"{name} with a beam search is not supported by jaxllm yet.", name, value)


def sampling_of(given: Mapping[str, Any]) -> SamplingParams:
    """Return greedy parameters for a beam search's outputs; beams are chosen elsewhere."""
    shared = {name: given[name] for name in ("max_tokens", *_SHARED) if name in given}
    return SamplingParams(temperature=0.0, output_kind=RequestOutputKind.FINAL_ONLY, **shared)


def beams_of(call: Call, params: SamplingParams, longest: int) -> BeamSearchParams | None:
    if call.beams is None:
        return None
    shared = {name: getattr(params, name) for name in _SHARED}
    with blaming_n():
        return BeamSearchParams(
            beam_width=call.sampling.get("n", 1),
            max_tokens=longest if params.max_tokens is None else params.max_tokens,
            temperature=call.sampling.get("temperature", 0.0),
            **shared,
            **call.beams,
        )


@contextmanager
def blaming_n() -> Iterator[None]:
    try:
        yield
    except UserError as error:
        if error.parameter != "beam_width":
            raise
        raise type(error)(str(error), "n", error.value) from error
