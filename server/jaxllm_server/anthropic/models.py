"""Model descriptions of `/v1/models` in Anthropic's form. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any


def model_info(card: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "type": "model",
        "id": card["id"],
        "display_name": card["id"],
        "created_at": datetime.fromtimestamp(card["created"], UTC).isoformat().replace("+00:00", "Z"),
        "lifecycle": "active",
        "max_input_tokens": card["max_model_len"],
        "max_tokens": card["max_model_len"],
    }


def model_list(cards: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {
        "data": [model_info(card) for card in cards],
        "has_more": False,
        "first_id": cards[0]["id"],
        "last_id": cards[-1]["id"],
    }
