"""How many log-probabilities an answer may hold, which is known before any is computed.

An answer stands whole in memory, as numbers, as plain data and as bytes: 10,000,000 log-probabilities took 1 GB.
"""

from __future__ import annotations

from jaxllm.errors import UserError

MOST_VALUES = 2**20  # 30 to 75 MB of JSON
_LIKELIEST = 21  # a token and the 20 likeliest, which one whole context may have whatever its length


class AnswerSize:
    """The log-probabilities of all calls of one request. `copies` is how often each prompt's are written."""

    def __init__(self, copies: int = 1) -> None:
        self.copies = copies
        self._num_values = 0

    def left(self, prompt: int, max_model_len: int) -> int:
        """Return how many the outputs of a call may have, after its prompt's and those of earlier calls."""
        return _most(max_model_len) - self._num_values - self.copies * prompt

    def add(self, prompt: int, output: int, max_model_len: int) -> None:
        """Count a call's, of its prompt and of its outputs together; UserError for too many."""
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
