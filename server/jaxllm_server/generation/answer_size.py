"""Limits an answer's log-probabilities before any is computed: 10,000,000 took 1 GB."""

from __future__ import annotations

from jaxllm.errors import UserError

MOST_VALUES = 2**20  # 30 to 75 MB of JSON
_LIKELIEST = 21  # a token and 20 alternatives, always allowed for one context


class AnswerSize:
    """Counts a request's log-probabilities; a prompt's are written `copies` times."""

    def __init__(self, copies: int = 1) -> None:
        self.copies = copies
        self._num_values = 0

    def left(self, prompt: int, max_model_len: int) -> int:
        return _most(max_model_len) - self._num_values - self.copies * prompt

    def add(self, prompt: int, output: int, max_model_len: int) -> None:
        """Add numbers of log-probabilities, of a call's prompt and all outputs; raise UserError beyond the limit."""
        self._num_values += self.copies * prompt + output
        most = _most(max_model_len)
        if self._num_values > most:
            raise UserError(
                f"The answer could hold {self._num_values} log-probabilities; it may hold {most}: "
                "ask for fewer prompts, outputs (n), tokens (max_tokens) or log-probabilities.",
                "logprobs",
            )


def _most(max_model_len: int) -> int:
    return max(MOST_VALUES, _LIKELIEST * max_model_len)
