"""`BeamSearchParams`: parameters of a beam search, with vLLM's names, and transformers' rules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jaxllm import checks
from jaxllm.errors import UnsupportedError, UserError
from jaxllm.request_params import RequestParams

MOST_LENGTH_PENALTY = 10.0  # absolute; larger powers may overflow


@dataclass(frozen=True)
class BeamSearchParams(RequestParams):
    """Parameters for one prompt: the search returns the `beam_width` likeliest continuations.

    The score of a finished one is its log-probability divided by length ** length_penalty.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0  # must be 0
    length_penalty: float = 1.0  # above 0 favours longer outputs
    include_stop_str_in_output: bool = False  # the end-of-sequence token's text too
    # With `beam_width` outputs finished, True: stop. False: stop if the best running one, ended now, would score less.
    # "never": only if it could not score more at any length.
    early_stopping: bool | Literal["never"] = False
    skip_special_tokens: bool = True  # in the text of `CompletionOutput`

    @property
    def num_sequences(self) -> int:
        return self.beam_width

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
