"""Truncates token ids to `truncate_prompt_tokens`."""

from __future__ import annotations

from collections.abc import Sequence


def cut_ids(ids: Sequence[int], kept: int | None, side: str) -> Sequence[int]:
    if kept is None or len(ids) <= kept:
        return ids
    return ids[:kept] if side == "right" else ids[len(ids) - kept :]
