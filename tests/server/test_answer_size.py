"""Log-probabilities of an answer are limited before computation, and large answers are written in pieces."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm import SamplingParams, UserError
from jaxllm_server.generation.answer_size import MOST_VALUES, AnswerSize
from jaxllm_server.generation.calls import Call
from jaxllm_server.http import sse
from jaxllm_server.shared.repeated import Continued, Repeated
from tests.server.test_serving import serving

PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-9, 9)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=9) | st.dictionaries(st.text(max_size=3), inner, max_size=4),
    max_leaves=60,
)


@given(PLAIN)
@settings(deadline=None, max_examples=200)
def test_an_answer_in_pieces_is_the_same_bytes(value: object) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sse, "FEW", 3)
        assert sse.dumps_large(value) == sse.dumps(value)


@given(st.lists(PLAIN, max_size=9), st.lists(PLAIN, max_size=9))
@settings(deadline=None, max_examples=100)
def test_what_answers_repeat_is_the_same_bytes_and_is_written_once(beginning: list[Any], rest: list[Any]) -> None:
    repeated = Repeated(beginning)
    value = {"choices": [{"own": repeated, "all": Continued(repeated, rest)}, {"all": Continued(repeated, [])}] * 2}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sse, "FEW", 3)
        assert sse.dumps_large(value) == sse.dumps(value)
        written = repeated.json
        assert sse.dumps_large(value) == sse.dumps(value) and repeated.json is written


def test_no_piece_is_large() -> None:
    """Writing a piece holds the interpreter, so pieces must be short."""
    entries = [{f"token {number}": -0.5 * number for number in range(21)} for _ in range(3000)]
    answer = {"choices": [{"text": "a", "logprobs": {"tokens": ["a"] * 3000, "top_logprobs": entries}}] * 3}
    pieces = list(sse.pieces_of(answer))
    assert json.loads(b"".join(pieces)) == answer
    assert max(map(len, pieces)) < 200_000


def test_all_calls_of_a_request_are_counted_together() -> None:
    size = AnswerSize(copies=128)
    calls = 0
    with pytest.raises(UserError, match="ask for fewer"):
        while calls < 8:
            size.add(300 * 21, 128 * 16 * 21, 2048)
            calls += 1
    assert calls == 1
    for context in (2048, 131_072):  # one full context of any length, with all log-probabilities
        AnswerSize().add(21 * context, 0, context)
        AnswerSize().add(0, 21 * context, context)
    with pytest.raises(UserError):
        AnswerSize().add(0, 128 * 21 * 2048, 2048)
    AnswerSize().add(MOST_VALUES, 0, 1)


@pytest.mark.parametrize("length", [2048, 131_072])
def test_outputs_whose_length_nobody_named_end_when_their_answer_is_full(length: int) -> None:
    own: Any = serving()
    own.engine.model = SimpleNamespace(max_model_len=length, vocab_size=1536)
    values = max(MOST_VALUES, 21 * length)
    for n in (1, 2, 40, 128):
        asked = SamplingParams(n=n, logprobs=20, max_tokens=None)
        most = min(length - 9, values // (21 * n))
        assert own.bounded(Call(), asked, 9).max_tokens in (most, None if most == length - 9 else most)
        assert own.bounded(Call(stream=True), asked, 9) is asked
        named = Call(sampling={"max_tokens": length - 9})
        if most < length - 9:
            with pytest.raises(UserError):
                own.bounded(named, SamplingParams(n=n, logprobs=20, max_tokens=length - 9), 9)
