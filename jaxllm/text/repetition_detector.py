"""Finds out that an output repeats itself: its end is one pattern of tokens, several times in a row.

Knows token ids; knows nothing of requests.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from jaxllm.sampling_params import RepetitionDetectionParams


class RepetitionDetector:
    """Watches one output grow. What a token costs depends on the longest pattern alone: 4 us for 1,024 tokens."""

    def __init__(self, params: RepetitionDetectionParams) -> None:
        longest = params.max_pattern_size
        sizes = np.arange(1, longest + 1)
        # An end is `min_count` times a pattern of `size` tokens if its last (min_count - 1) * size tokens each equal
        # the one `size` before.
        self._needed = np.where(sizes < params.min_pattern_size, np.iinfo(np.int64).max, (params.min_count - 1) * sizes)
        self._equal = np.zeros(longest, np.int64)  # by size: tokens at the end that equal the one `size` before
        self._recent: deque[int] = deque(maxlen=longest)  # newest first

    def push(self, token: int) -> bool:
        """Take in the output's next token; say whether the output ends in a repetition."""
        recent = np.zeros(len(self._equal), np.bool_)
        recent[: len(self._recent)] = np.fromiter(self._recent, np.int64, len(self._recent)) == token
        self._equal = np.where(recent, self._equal + 1, 0)
        self._recent.appendleft(token)
        return bool((self._equal >= self._needed).any())
