"""Extract the values underlying a result's figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Groups = Sequence[Sequence[float]]  # per request or iteration


def read_samples(result: Mapping[str, Any]) -> dict[str, Groups]:
    """Return the values of each kind (`ttft_ms`, `latency` in seconds …) by successful request."""
    kinds: dict[str, Groups] = {
        name: [[value] for value in values] for name, values in result.get("samples", {}).items()
    }
    if "ttfts" in result and "itls" in result:
        errors = result.get("errors") or [""] * len(result["ttfts"])
        rows = list(zip(result["ttfts"], result["itls"], result["output_lens"], errors, strict=True))
        done = [(1e3 * first, [1e3 * gap for gap in gaps], length) for first, gaps, length, error in rows if not error]
        kinds["ttft_ms"] = [[first] for first, _, _ in done]
        kinds["tpot_ms"] = [[sum(gaps) / (length - 1)] if length > 1 else [] for _, gaps, length in done]
        kinds["itl_ms"] = [gaps for _, gaps, _ in done]
        kinds["e2el_ms"] = [[first + sum(gaps)] for first, gaps, _ in done]
    elif "e2els" in result:
        rows = zip(result["e2els"], result["errors"], strict=True)
        kinds["e2el_ms"] = [[1e3 * seconds] for seconds, error in rows if not error]
    elif "latencies" in result:
        kinds["latency"] = [[value] for value in result["latencies"]]
    return {name: groups for name, groups in kinds.items() if any(groups)}
