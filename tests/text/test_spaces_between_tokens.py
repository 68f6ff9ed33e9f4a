"""`spaces_between_special_tokens` against the decoders of huggingface/tokenizers, with vLLM's rule applied to them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend

from jaxllm.sampling_params import SamplingParams
from jaxllm.text.detokenizer import advance, begin, finish
from jaxllm.text.tokenizer import Tokenizer
from tests.fuzz.doors import Doors
from tests.support.tokenizer_kinds import KINDS, build

SPACED = SamplingParams(skip_special_tokens=False)
JOINED = SamplingParams(skip_special_tokens=False, spaces_between_special_tokens=False)


def made(kind: str) -> tuple[Backend, Tokenizer]:
    """Make a tokenizer with two special tokens and one added token that is not special."""
    backend = build(kind)
    backend.add_special_tokens(["<|end|>", "<|call|>"])
    backend.add_tokens(["<tool>"])
    return backend, Tokenizer(backend, {}, {}, kind)


MADE = {kind: made(kind) for kind in KINDS}


def streamed(tokenizer: Tokenizer, prompt: Sequence[int], output: Sequence[int], params: SamplingParams) -> str:
    state, text = begin(tokenizer, prompt, params), ""
    for token in output:
        state, delta = advance(state, tokenizer, [token])
        text += delta
    whole, at_once = advance(begin(tokenizer, prompt, params), tokenizer, output)
    text += finish(state, tokenizer)
    assert text == at_once + finish(whole, tokenizer)
    return text


def expected(backend: Backend, prompt: Sequence[int], output: Sequence[int]) -> str:
    """Decode token by token; an added token that follows another in the output is written as spelled."""
    added, text = backend.get_added_tokens_decoder(), ""
    for end in range(len(output)):
        before, after = ([*prompt, *output[:stop]] for stop in (end, end + 1))
        delta = backend.decode(after, False)[len(backend.decode(before, False)) :]
        is_joined = end > 0 and output[end] in added and output[end - 1] in added
        text += added[output[end]].content if is_joined else delta
    return text


numbers = st.lists(st.one_of(st.integers(0, 5), st.integers(0, 400)), max_size=8)


def added_first(backend: Backend, numbers: Sequence[int], with_bytes: bool) -> list[int]:
    """Return tokens by number; the lowest numbers are added tokens."""
    added = sorted(backend.get_added_tokens_decoder())
    usual = [own for token, own in backend.get_vocab().items() if with_bytes or not re.fullmatch("<0x..>", token)]
    ids = [*added, *sorted({*usual} - {*added})]
    return [ids[number % len(ids)] for number in numbers]


@settings(max_examples=100, deadline=None)
@given(numbers, numbers)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "byte_level"])
def test_spaces_are_left_out_between_added_tokens_only(kind: str, prompt: list[int], output: list[int]) -> None:
    backend, tokenizer = MADE[kind]
    # Without byte tokens, because their text depends on the next token.
    before, after = added_first(backend, prompt, False), added_first(backend, output, False)
    assert streamed(tokenizer, before, after, JOINED) == expected(backend, before, after)


@pytest.mark.parametrize("kind", ["wordpiece", "no_decoder"])
def test_it_changes_what_a_decoder_with_spaces_writes(kind: str) -> None:
    backend, tokenizer = MADE[kind]
    ids = [backend.token_to_id(token) for token in ("the", "<|end|>", "<tool>", "<|call|>", "the", "<|end|>")]
    assert streamed(tokenizer, [], ids, SPACED) == "the <|end|> <tool> <|call|> the <|end|>"
    assert streamed(tokenizer, [], ids, JOINED) == "the <|end|><tool><|call|> the <|end|>"
    assert streamed(tokenizer, ids[:2], ids[2:4], JOINED) == " <tool><|call|>", "a space after the prompt is kept"


def test_it_reaches_the_outputs_of_an_engine() -> None:
    backend, tokenizer = MADE["no_decoder"]
    inputs, ids = Doors().llm.engine.inputs, added_first(backend, [0, 1, 9, 0, 2], False)
    language: Any = SimpleNamespace(model=SimpleNamespace(tokenizer=tokenizer, eos_ids=frozenset()))
    texts = {}
    for params in (SPACED, JOINED):
        accepted = inputs.accept("r", {"prompt_token_ids": ids}, params, 0, {})
        accepted.language = language
        group, _ = inputs.make_group(accepted, 0.0)
        group.sequences[0].tokens.extend(ids)
        group.sequences[0].advance(tokenizer, len(ids), "length")
        texts[params] = group.show().outputs[0].text
        assert texts[params] == streamed(tokenizer, ids, ids, params)
    assert texts[JOINED] != texts[SPACED]


@settings(max_examples=100, deadline=None)
@given(numbers, numbers)
@pytest.mark.parametrize("kind", KINDS)
def test_it_changes_nothing_where_special_tokens_are_skipped_or_tokens_are_bytes(
    kind: str, prompt: list[int], output: list[int]
) -> None:
    backend, tokenizer = MADE[kind]
    before, after = added_first(backend, prompt, True), added_first(backend, output, True)
    for skip in (True, False) if kind == "byte_level" else (True,):
        joined = SamplingParams(skip_special_tokens=skip, spaces_between_special_tokens=False)
        spaced = SamplingParams(skip_special_tokens=skip)
        assert streamed(tokenizer, before, after, joined) == streamed(tokenizer, before, after, spaced)
