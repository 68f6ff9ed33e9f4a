"""The bytes in log-probabilities concatenate to the UTF-8 of the text, for tokenizers of every kind."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.engine.sequence import logprob_of
from jaxllm.outputs import Logprob
from jaxllm.sampling_params import SamplingParams
from jaxllm.text import detokenizer
from jaxllm.text.tokenizer import Tokenizer
from jaxllm_server.openai.chat import logprobs_of
from jaxllm_server.openai.completions import Offset, columns_of
from jaxllm_server.requests.form import Form
from tests.support.tokenizer_kinds import KINDS, TEXT, build

TOKENIZERS = {kind: Tokenizer(build(kind), {}, {}, kind) for kind in KINDS}
FORM = Form(
    stream=False,
    include_usage=False,
    continuous_usage=False,
    return_token_ids=False,
    tokens_as_ids=False,
    num_logprobs=1,
    shows_prompt_logprobs=False,
    shows_cached=False,
    shows_reasoning=False,
)
_TEXTS = st.lists(
    st.sampled_from([*TEXT, "😀日", "é", "the ", " a", "\u0000", "𝒳", "ing"]) | st.characters(codec="utf-8")
)


def _completion(entries: list[dict[int, Logprob]]) -> dict[str, list[Any]]:
    written = columns_of(entries, Offset(0), FORM, None)
    assert written is not None
    return written


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [40, pytest.param(1000, marks=pytest.mark.slow)])
def test_the_bytes_of_all_tokens_are_the_texts(kind: str, count: int) -> None:
    settings(max_examples=count, deadline=None)(given(text=_TEXTS.map("".join))(lambda text: check(kind, text)))()


def check(kind: str, text: str) -> None:
    tokenizer = TOKENIZERS[kind]
    prompt, ids = tokenizer.encode("the", False), tokenizer.encode(text, False)
    state = detokenizer.begin(tokenizer, prompt, SamplingParams(skip_special_tokens=False))
    state, shown = detokenizer.advance(state, tokenizer, ids)
    shown += detokenizer.finish(state, tokenizer)
    entries = [{token: logprob_of(tokenizer, token, -1.0, 1)} for token in ids]
    written = logprobs_of(entries, FORM)
    assert written is not None
    pieces = [bytes(entry["bytes"]) for entry in written["content"]]
    joined = b"".join(pieces)
    assert joined.decode(errors="replace") == shown
    if "\ufffd" in shown and "\ufffd" not in text:
        return  # an added token that the tokenizer's own decoder reads as a byte
    assert joined == shown.encode()
    before = b""
    for piece, offset in zip(pieces, _completion(entries)["text_offset"], strict=True):
        finished = before.decode(errors="ignore")
        assert offset == len(finished) and shown.startswith(finished)
        before += piece


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_tokens_inside_a_character(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]
    ids = tokenizer.encode("😀日", False)
    entry = {token: logprob_of(tokenizer, token, -1.0 - at, at + 1) for at, token in enumerate(ids)}
    assert len(ids) > 2 and len(entry) == len(ids)
    written = logprobs_of([entry], FORM)
    assert written is not None
    first = written["content"][0]
    spelled = "".join(f"\\x{byte:02x}" for byte in first["bytes"])
    assert first["token"] == spelled and "😀".encode().startswith(bytes(first["bytes"]))
    completion = _completion([entry])
    assert completion["tokens"] == [f"bytes:{spelled}"]
    assert list(completion["top_logprobs"][0].values()) == [-1.0 - at for at in range(len(ids))]


def test_alternatives_that_read_alike_are_all_there() -> None:
    entry = {5: Logprob(-1.0, 1, "a"), 7: Logprob(-2.0, 2, "a"), 9: Logprob(-3.0, 3, "b")}
    assert _completion([entry])["top_logprobs"] == [{"a": -1.0, "token_id:7": -2.0, "b": -3.0}]
