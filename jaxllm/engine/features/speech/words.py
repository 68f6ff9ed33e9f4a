"""The times of words: dynamic time warping of attention weights, as transformers' `return_token_timestamps`. Pure.

A heads, T tokens, L positions of the encoder, 0.02 s each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxllm.text.tokenizer import Tokenizer

STEP_SECONDS = 0.02
_MEDIAN = 7  # positions of the filter, Whisper's default
_OPENING = "\"'“¿([{-"  # belongs to the word after it
_WITHOUT_SPACES = frozenset(("zh", "ja", "th", "lo", "my", "yue"))


class Word(NamedTuple):
    """A word, and its times in seconds."""

    text: str
    start: float
    end: float


def token_times(weights: np.ndarray) -> np.ndarray:
    """Return the seconds at which each token begins, float64[T], of attention weights, float32[A, T, L]."""
    from scipy.ndimage import median_filter

    if not weights.shape[1]:
        return np.zeros(0)
    deviation = weights.std(axis=1, keepdims=True)
    normal = (weights - weights.mean(axis=1, keepdims=True)) / np.where(deviation > 0, deviation, 1.0)
    if normal.shape[2] > _MEDIAN // 2:
        normal = median_filter(normal, size=(1, 1, _MEDIAN), mode="mirror")
    tokens, positions = warped(-normal.mean(axis=0))
    return positions[np.diff(tokens, prepend=-1) > 0] * STEP_SECONDS


def warped(costs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the cheapest monotonic path through costs [T, L]: its rows and columns."""
    num_rows, num_columns = costs.shape
    total = np.full((num_rows + 1, 3), np.inf, np.float32)  # by row, of the last three diagonals
    steps = np.full((num_rows + 1, num_columns + 1), -1, np.int8)  # 0: from both, 1: from the row before, 2: column
    total[0, 0] = 0.0
    for diagonal in range(1, num_rows + num_columns + 1):
        now, last, before = (total[:, (diagonal - back) % 3] for back in range(3))
        now[:] = np.inf
        rows = np.arange(max(1, diagonal - num_columns), min(num_rows, diagonal - 1) + 1)
        if not len(rows):
            continue
        both, row, column = before[rows - 1], last[rows - 1], last[rows]
        step = np.where((both < row) & (both < column), 0, np.where((row < both) & (row < column), 1, 2))
        cost = np.choose(step, (both, row, column))
        now[rows] = costs[rows - 1, diagonal - rows - 1] + cost
        steps[rows, diagonal - rows] = step
    steps[0], steps[:, 0] = 2, 1
    row, column, path = num_rows, num_columns, list[tuple[int, int]]()
    while row > 0 or column > 0:
        path.append((row - 1, column - 1))
        step = steps[row, column]
        row, column = row - (step != 2), column - (step != 1)
    found = np.array(path[::-1])
    return found[:, 0], found[:, 1]


def words_of(
    tokenizer: Tokenizer, ids: Sequence[int], times: Sequence[float], language: str | None, end: float
) -> list[Word]:
    """Return the words of text tokens, which begin at `times`; the last one lasts until `end`."""
    words: list[Word] = []
    held, start = list[int](), 0.0
    for at, (token, time) in enumerate(zip(ids, times, strict=True)):
        start = start if held else time
        held.append(token)
        text = tokenizer.decode(held)
        if text.endswith("\ufffd"):  # a character of several tokens
            continue
        until = times[at + 1] if at + 1 < len(times) else end
        is_new = not words or text[:1].isspace() or language in _WITHOUT_SPACES
        if (words and words[-1].text.strip() in _OPENING) or not is_new or not any(map(str.isalnum, text)):
            before = words.pop() if words else Word("", start, until)
            words.append(Word(before.text + text.strip(), before.start, until))
        else:
            words.append(Word(text, start, until))
        held = []
    return [Word(word.text.strip(), word.start, word.end) for word in words if word.text.strip()]
