"""Check which models may draft for another."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jaxllm.errors import UserError
from jaxllm.families.families import read_spec
from jaxllm.model import draft_model
from tests.support.checkpoints import CONFIG


def test_a_draft_model_needs_the_same_vocabulary_and_nothing_else_of_the_model() -> None:
    target, _ = read_spec(CONFIG)
    smaller = replace(target, num_layers=1, width=8, num_heads=2, num_kv_heads=1, ffn_width=8, max_position=16)
    draft_model.check(smaller, target)
    for unfit, message in (
        (replace(smaller, vocab_size=96), "a vocabulary of 96 tokens, and the model's has 97"),
        (replace(smaller, is_causal=False), "see those behind them"),
    ):
        with pytest.raises(UserError, match=message) as caught:
            draft_model.check(unfit, target)
        assert caught.value.parameter == "speculative_config"
