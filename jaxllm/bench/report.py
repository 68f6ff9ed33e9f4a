"""Compute the figures of vLLM's `bench serve` from outcomes, with its report and JSON keys.

See vllm/benchmarks/serve.py (`calculate_metrics`, `process_one_metric`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxllm.bench.outcome import Outcome

METRICS: Mapping[str, tuple[str, str]] = {  # name: (abbreviation, title)
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "e2el": ("E2EL", "End-to-end Latency"),
    "client_queue_time": ("Client Queue Time", "Client Queue Time"),
}
WIDTH = 50
_MOST_KINDS = 5  # of errors


def summarize(
    outcomes: Sequence[Outcome],
    duration: float,
    percentile_metrics: Iterable[str] = ("ttft", "tpot", "itl"),
    percentiles: Iterable[float] = (99.0,),
    goodput: Mapping[str, float] | None = None,
    *,
    embeds: bool = False,
) -> dict[str, Any]:
    """Return the figures of a run of `duration` seconds, with vLLM's names.

    TPOT is (latency - TTFT) / (output tokens - 1) per request; ITL are all gaps between messages; goodput counts
    requests within all bounds of `goodput`, in ms. Latencies exclude failed requests. `embeds` counts texts instead of
    output tokens.
    """
    done = [outcome for outcome in outcomes if not outcome.error]
    num_in = sum(outcome.prompt_tokens for outcome in done)
    num_out = sum(outcome.output_tokens or 0 for outcome in done)
    num_texts = sum(outcome.num_vectors for outcome in done)
    values: dict[str, list[float]] = {
        "ttft": [outcome.ttft for outcome in done],
        "tpot": [_tpot(outcome) for outcome in done if (outcome.output_tokens or 0) > 1],
        "itl": [gap for outcome in done for gap in outcome.itls],
        "e2el": [outcome.latency for outcome in done],
        "client_queue_time": [outcome.sent_at - outcome.due_at for outcome in done],
    }
    figures: dict[str, Any] = {
        "duration": duration,
        "completed": len(done),
        "failed": len(outcomes) - len(done),
        "total_input_tokens": num_in,
        **({"total_texts": num_texts} if embeds else {"total_output_tokens": num_out}),
        "request_throughput": len(done) / duration,
        "request_goodput": sum(_is_good(outcome, goodput) for outcome in done) / duration if goodput else None,
        **({"text_throughput": num_texts / duration} if embeds else {"output_throughput": num_out / duration}),
        "total_token_throughput": (num_in + num_out) / duration,
        # A partial second may hide the peak.
        **({} if embeds else {"max_output_tokens_per_s": max(peak_tokens(done), num_out / duration)}),
        "max_concurrent_requests": peak_concurrency(done),
    }
    for name in percentile_metrics:
        figures.update(_distribution(name, values[name], percentiles))
    return figures


def peak_tokens(outcomes: Sequence[Outcome]) -> float:
    """Return the most output tokens in one second; messages share a request's evenly."""
    times = [moment for outcome in outcomes for moment in outcome.message_times]
    if not times:
        return 0.0
    shares = [
        (outcome.output_tokens or 0) / len(outcome.message_times)
        for outcome in outcomes
        for _ in range(len(outcome.message_times))
    ]
    start = min(outcome.sent_at for outcome in outcomes)
    return float(np.bincount((np.array(times) - start).astype(int), weights=shares).max())


def peak_concurrency(outcomes: Sequence[Outcome]) -> int:
    changes = sorted(
        change for outcome in outcomes for change in ((outcome.sent_at, 1), (outcome.sent_at + outcome.latency, -1))
    )
    return int(np.cumsum([step for _, step in changes]).max()) if changes else 0


def render(result: Mapping[str, Any], percentile_metrics: Iterable[str], percentiles: Iterable[float]) -> str:
    lines = [" Serving Benchmark Result ".center(WIDTH, "=")]

    def add(name: str, value: Any, form: str = "") -> None:
        lines.append(f"{name:<40} {value:<10{form}}")

    add("Successful requests:", result["completed"])
    add("Failed requests:", result["failed"])
    if result["max_concurrency"] is not None:
        add("Maximum request concurrency:", result["max_concurrency"])
    if result["request_rate"] != "inf":
        add("Request rate configured (RPS):", result["request_rate"], ".2f")
    add("Benchmark duration (s):", result["duration"], ".2f")
    add("Total input tokens:", result["total_input_tokens"])
    if "total_texts" in result:
        add("Total texts:", result["total_texts"])
    else:
        add("Total generated tokens:", result["total_output_tokens"])
    add("Request throughput (req/s):", result["request_throughput"], ".2f")
    if result["request_goodput"] is not None:
        add("Request goodput (req/s):", result["request_goodput"], ".2f")
    if "total_texts" in result:
        add("Text throughput (texts/s):", result["text_throughput"], ".2f")
    else:
        add("Output token throughput (tok/s):", result["output_throughput"], ".2f")
        add("Peak output token throughput (tok/s):", result["max_output_tokens_per_s"], ".2f")
    add("Peak concurrent requests:", result["max_concurrent_requests"], ".2f")
    add("Total token throughput (tok/s):", result["total_token_throughput"], ".2f")
    for name in percentile_metrics:
        short, title = METRICS[name]
        lines.append(title.center(WIDTH, "-"))
        add(f"Mean {short} (ms):", result[f"mean_{name}_ms"], ".2f")
        add(f"Median {short} (ms):", result[f"median_{name}_ms"], ".2f")
        for percentile in percentiles:
            word = percentile_word(percentile)
            add(f"P{word} {short} (ms):", result[f"p{word}_{name}_ms"], ".2f")
    return "\n".join([*lines, "=" * WIDTH])


def details(outcomes: Sequence[Outcome], start: float, *, embeds: bool = False) -> dict[str, list[Any]]:
    common = {
        "input_lens": [outcome.prompt_tokens for outcome in outcomes],
        "start_times": [outcome.sent_at - start for outcome in outcomes],
        "errors": [outcome.error for outcome in outcomes],
    }
    if embeds:
        return {**common, "e2els": [outcome.latency for outcome in outcomes]}
    return {
        **common,
        "output_lens": [outcome.output_tokens or 0 for outcome in outcomes],
        "ttfts": [outcome.ttft for outcome in outcomes],
        "itls": [outcome.itls for outcome in outcomes],
        "generated_texts": [outcome.text for outcome in outcomes],
    }


def error_kinds(outcomes: Iterable[Outcome]) -> list[tuple[int, str]]:
    """Return the most frequent errors with counts, regardless of numbers and ids."""
    first: dict[str, str] = {}
    counts: Counter[str] = Counter()
    for outcome in outcomes:
        if outcome.error:
            kind = re.sub(r"[0-9a-f]*\d[0-9a-f-]*", "#", outcome.error)
            first.setdefault(kind, outcome.error)
            counts[kind] += 1
    return [(count, first[kind]) for kind, count in counts.most_common(_MOST_KINDS)]


def percentile_word(percentile: float) -> str:
    return str(int(percentile)) if percentile == int(percentile) else str(percentile)


def _tpot(outcome: Outcome) -> float:
    count = outcome.output_tokens or 0
    return (outcome.latency - outcome.ttft) / (count - 1) if count > 1 else 0.0


def _is_good(outcome: Outcome, goodput: Mapping[str, float]) -> bool:
    own = {"ttft": outcome.ttft, "tpot": _tpot(outcome), "e2el": outcome.latency}
    return all(own[name] * 1000 <= bound for name, bound in goodput.items())


def _distribution(name: str, values: Sequence[float], percentiles: Iterable[float]) -> dict[str, float]:
    milliseconds = np.array(values or [0.0]) * 1000
    return {
        f"mean_{name}_ms": float(milliseconds.mean()),
        f"median_{name}_ms": float(np.median(milliseconds)),
        f"std_{name}_ms": float(milliseconds.std()),
        **{
            f"p{percentile_word(percentile)}_{name}_ms": float(np.percentile(milliseconds, percentile))
            for percentile in percentiles
        },
    }
