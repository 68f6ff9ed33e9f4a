"""The flags `--explain` and `--profile`, which trace an engine's steps."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jaxllm.commands.arguments import UsageError, add_profile

if TYPE_CHECKING:
    from jaxllm.llm import LLM
    from jaxllm.sampling_params import SamplingParams


def add_trace(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--explain",
        action="store_true",
        help="split the time of a step: repeat the first steps under the profiler",
    )
    add_profile(parser, "these steps")


def check_trace(options: Mapping[str, Any]) -> None:
    if options["profile_steps"] < 1:
        raise UsageError("--profile-steps must be at least 1")


def traced(
    llm: LLM, requests: Callable[[], Sequence[tuple[Any, SamplingParams]]], options: Mapping[str, Any]
) -> dict[str, Any]:
    """Profile the first steps of `requests` if asked; return entries of the result file."""
    if not options["explain"] and options["profile"] is None:
        return {}
    from jaxllm.bench.explain import report
    from jaxllm.bench.traced import trace

    explanation = trace(llm.engine, requests(), 0, options["profile_steps"], options["profile"])
    if options["profile"] is not None:
        print(f"The trace is in {options['profile']}: open perfetto_trace.json.gz at https://ui.perfetto.dev.")
    if not options["explain"]:
        return {}
    print(report(explanation))
    return {"explanation": explanation.as_json()}
