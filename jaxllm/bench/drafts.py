"""Speculative decoding figures, with vLLM's names."""

from __future__ import annotations

from typing import Any, NamedTuple

from jaxllm.metrics import Metrics


class Drafts(NamedTuple):
    """Cumulative counts; `rows` verified drafts."""

    rows: int = 0
    tokens: int = 0
    accepted: int = 0


def counted(metrics: Metrics) -> Drafts:
    return Drafts(metrics.drafting_rows, metrics.draft_tokens, sum(metrics.accepted_tokens))


def report(before: Drafts, after: Drafts) -> tuple[str, dict[str, Any]]:
    rows, tokens, accepted = (now - then for then, now in zip(before, after, strict=True))
    if not tokens:
        return "", {}
    rate, length = 100 * accepted / tokens, 1 + accepted / rows
    lines = (
        f"Acceptance rate (%):      {rate:.2f}",
        f"Acceptance length:        {length:.2f}",
        f"Drafts:                   {rows}",
        f"Draft tokens:             {tokens}",
        f"Accepted tokens:          {accepted}",
    )
    figures = {
        "spec_decode_acceptance_rate": rate,
        "spec_decode_acceptance_length": length,
        "spec_decode_num_drafts": rows,
        "spec_decode_draft_tokens": tokens,
        "spec_decode_accepted_tokens": accepted,
    }
    return "\n" + "\n".join(lines), figures
