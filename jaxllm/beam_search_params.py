"""`BeamSearchParams`: what a caller may ask of a beam search.

Names are vLLM's, and `early_stopping` is that of transformers, whose rules the search follows. Standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jaxllm import checks
from jaxllm.errors import UnsupportedError, UserError

MOST_LENGTH_PENALTY = 10.0  # either way: a length to a larger power may be no number


@dataclass(frozen=True)
class BeamSearchParams:
    """One prompt's parameters. The search keeps the `beam_width` likeliest continuations, and returns as many.

    A finished one is scored with its log-probability divided by its length to the power of `length_penalty`.

    Raises:
        UserError: naming the parameter, for a wrong type or a number out of range.
    """

    beam_width: int
    max_tokens: int  # of an output
    ignore_eos: bool = False  # go on after the end-of-sequence token
    temperature: float = 0.0  # 0 only: nothing is drawn
    length_penalty: float = 1.0  # above 0: longer outputs score higher
    include_stop_str_in_output: bool = False  # let the text end with the end-of-sequence token that ended it
    # When there are `beam_width` finished outputs. True: end. False: end once the best running one, ended now, would
    # score less than all of them. "never": once it could not score more at any length.
    early_stopping: bool | Literal["never"] = False
    skip_special_tokens: bool = True  # leave special tokens out of the text of a `CompletionOutput`

    def __post_init__(self) -> None:
        for name in ("beam_width", "max_tokens"):
            value = checks.integer(name, getattr(self, name))
            if value < 1:
                raise UserError(f"{name} must be at least 1, got {value}.", name, value)
            object.__setattr__(self, name, value)
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            checks.flag(name, getattr(self, name))
        for name in ("temperature", "length_penalty"):
            object.__setattr__(self, name, checks.number(name, getattr(self, name)))
        if self.temperature != 0.0:
            message = f"A beam search draws nothing: temperature must be 0, got {self.temperature}."
            raise UnsupportedError(message, "temperature", self.temperature)
        if abs(self.length_penalty) > MOST_LENGTH_PENALTY:
            message = f"length_penalty must be in [-{MOST_LENGTH_PENALTY:g}, {MOST_LENGTH_PENALTY:g}]"
            raise UserError(f"{message}, got {self.length_penalty}.", "length_penalty", self.length_penalty)
        if type(self.early_stopping) is not bool and self.early_stopping != "never":
            message = f"early_stopping must be True, False or 'never', got {checks.shown(self.early_stopping)}."
            raise UserError(message, "early_stopping", self.early_stopping)
