"""Requirements of draft models for speculative decoding."""

from __future__ import annotations

from jaxllm.errors import UserError
from jaxllm.model.spec import Spec


def check(draft: Spec, target: Spec) -> None:
    """Refuse a draft model that is not causal or has another vocabulary; raises UserError."""
    if draft.vocab_size != target.vocab_size:
        raise UserError(
            f"the draft model has a vocabulary of {draft.vocab_size} tokens, and the model's has {target.vocab_size}; "
            "choose a draft model of the same tokenizer.",
            "speculative_config",
        )
    if not draft.is_causal:
        raise UserError(
            "the draft model's tokens see those behind them, so it cannot draft; choose one that generates.",
            "speculative_config",
        )
