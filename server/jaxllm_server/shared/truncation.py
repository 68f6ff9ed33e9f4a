"""Which of a prompt's tokens stay where `truncate_prompt_tokens` cuts it."""

from __future__ import annotations

from collections.abc import Sequence


def cut_ids(ids: Sequence[int], kept: int | None, side: str) -> Sequence[int]:
    """Return the first `kept` token ids, or of the side "left" the last ones; None keeps all."""
    if kept is None or len(ids) <= kept:
        return ids
    return ids[:kept] if side == "right" else ids[len(ids) - kept :]
