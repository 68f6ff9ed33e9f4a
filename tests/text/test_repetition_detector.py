"""Repetition as defined: the output ends with one pattern, `min_count` times in a row."""

from __future__ import annotations

import numpy as np
import pytest

from jaxllm import SamplingParams, UserError
from jaxllm.sampling_params import RepetitionDetectionParams
from jaxllm.text.repetition_detector import RepetitionDetector


def repeats(tokens: list[int], params: RepetitionDetectionParams) -> bool:
    """Return by the definition whether `tokens` end in a repetition."""
    for size in range(max(1, params.min_pattern_size), params.max_pattern_size + 1):
        pattern = tokens[-size:]
        if len(pattern) == size and tokens[-size * params.min_count :] == pattern * params.min_count:
            return True
    return False


@pytest.mark.parametrize("seed", range(20))
def test_it_is_found_at_the_token_where_the_definition_holds_first(seed: int) -> None:
    random = np.random.default_rng(seed)
    longest = int(random.integers(1, 9))
    params = RepetitionDetectionParams(
        max_pattern_size=longest,
        min_pattern_size=int(random.integers(0, longest + 1)),
        min_count=int(random.integers(2, 5)),
    )
    detector, tokens = RepetitionDetector(params), []
    for token in random.integers(0, 2, 300).tolist():  # of two tokens, so that repetitions begin and end
        tokens.append(token)
        assert detector.push(token) == repeats(tokens, params), (params, tokens)


def test_a_long_pattern_is_found_as_soon_as_it_is_whole() -> None:
    pattern = list(range(1024))
    detector = RepetitionDetector(RepetitionDetectionParams(max_pattern_size=1024, min_count=2))
    assert [at for at, token in enumerate(pattern * 2) if detector.push(token)] == [2047]


def test_what_looks_for_nothing_is_none() -> None:
    assert SamplingParams(repetition_detection={}).repetition_detection is None
    assert SamplingParams(repetition_detection=RepetitionDetectionParams(min_count=3)).repetition_detection is None
    given = {"max_pattern_size": 3, "min_count": 2}
    assert SamplingParams(repetition_detection=given).repetition_detection == RepetitionDetectionParams(3, 0, 2)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_pattern_size": -1}, "max_pattern_size, min_pattern_size must be >=0, with min_pattern_size"),
        ({"max_pattern_size": 2, "min_pattern_size": 3, "min_count": 2}, "with min_pattern_size <= max_pattern_size"),
        ({"max_pattern_size": 2, "min_count": 1}, "min_count must be >= 2 to detect repetitive patterns"),
        ({"max_pattern_size": 1025, "min_count": 2}, "max_pattern_size must be at most 1024, got 1025."),
        ({"max_pattern": 2}, "repetition_detection has no 'max_pattern'; it has max_pattern_size"),
        ({"max_pattern_size": 1.5}, "repetition_detection must be an integer, got 1.5."),
    ],
)
def test_what_makes_no_sense_is_refused(given: dict, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        SamplingParams(repetition_detection=given)
    assert caught.value.parameter == "repetition_detection"
