"""Properties for any input: the same verdict through every interface, and texts equal to naive references.

Few examples by default, always the same; thousands in the slow tests.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxllm.errors import UserError
from jaxllm.sampling_params import SamplingParams
from jaxllm.text.detokenizer import advance, begin, finish
from jaxllm.text.stop_strings import StopMatcher, match_stops
from tests.fuzz import FEW, MANY, texts
from tests.fuzz.doors import doors
from tests.fuzz.fields import BASE, NAMES, VALUES
from tests.fuzz.targets import TARGETS, check_verdicts
from tests.support.linear import is_linear

pytestmark = pytest.mark.filterwarnings("ignore:temperature is less than")
COUNTS = pytest.mark.parametrize("count", [FEW, pytest.param(MANY, marks=pytest.mark.slow)])


def hold(count: int, check: Callable[..., object], **strategies: st.SearchStrategy[Any]) -> None:
    """Check `count` examples, always the same."""
    health = [HealthCheck.too_slow, HealthCheck.data_too_large]
    chosen = settings(max_examples=count, derandomize=True, database=None, deadline=None, suppress_health_check=health)
    chosen(given(**strategies)(check))()


# Inputs.

FIELDS = st.lists(st.sampled_from(NAMES), min_size=1, max_size=3, unique=True).flatmap(
    lambda names: st.fixed_dictionaries({name: st.sampled_from(VALUES[name]) for name in names})
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@COUNTS
def test_the_verdict_is_the_same_over_every_way_in(count: int) -> None:
    verdicts: set[str | None] = set()

    def check(fields: dict[str, Any]) -> None:
        verdicts.add(check_verdicts({**BASE, **fields}))

    hold(5 * count, check, fields=FIELDS)
    assert "accepted" in verdicts and len(verdicts) > 15  # parameters refused by name


def test_every_value_alone_has_the_same_verdict_over_every_way_in() -> None:
    for name, values in VALUES.items():
        for value in values:
            check_verdicts({**BASE, name: value})


@pytest.mark.ci
@COUNTS
@pytest.mark.parametrize("route", ["completions", "chat", "tokenize", "detokenize"])
def test_any_json_is_answered_or_refused(count: int, route: str) -> None:
    names = sorted({*NAMES, "messages", "tools", "tokens", "stream", "stream_options", "echo", "chat_template_kwargs"})

    def check(body: Any) -> None:
        try:
            doors().http(route, json.dumps(body).encode())
        except UserError as error:
            assert str(error).isprintable()

    hold(count, check, body=st.dictionaries(st.sampled_from(names), JSON, max_size=5) | JSON)


@COUNTS
@pytest.mark.parametrize("name", ["http", "grpc"])
def test_any_bytes_are_answered_or_refused(count: int, name: str) -> None:
    def check(data: bytes) -> None:
        TARGETS[name].check(data)

    hold(count, check, data=st.binary(max_size=60))


# Outputs.


@COUNTS
@pytest.mark.parametrize("kind", texts.TOKENIZERS)
def test_a_stream_of_any_ids_is_the_full_decode_wherever_the_prompt_ends(count: int, kind: str) -> None:
    last = texts.tokenizer_of(kind).vocab_size + 2
    ids = st.lists(st.integers(0, last), max_size=16)

    def check(prompt: list[int], output: list[int], skip: bool, sizes: list[int]) -> None:
        texts.check_stream(kind, prompt, output, skip, itertools.cycle(sizes))
        texts.check_stream(kind, [], [*prompt, *output], skip, itertools.cycle(sizes))

    sizes = st.lists(st.integers(1, 4), min_size=1, max_size=4)
    hold(count, check, prompt=ids, output=ids, skip=st.booleans(), sizes=sizes)


@pytest.mark.ci
@COUNTS
@pytest.mark.parametrize("kind", ["embedded", "byte_fallback", "stories260K"])
def test_a_sample_ends_where_the_naive_search_says(count: int, kind: str) -> None:
    """With any ids, and texts with stop strings across tokens, in the prompt's tail and within characters."""
    tokenizer = texts.tokenizer_of(kind)
    words = ["Once", " upon", "\n", "日本", "🎉", "é", "e\u0301", "ab", "a", "User:", "<|im_end|>", "</s>", " "]
    stop = st.lists(st.sampled_from(words), min_size=1, max_size=3).map("".join) | st.text(min_size=1, max_size=3)
    given_text = st.lists(st.sampled_from(words), max_size=9).map("".join)

    def check(text: str, ids: list[int], cut: int, stops: list[str], flags: tuple[bool, bool], least: int) -> None:
        tokens = (tokenizer.encode(text, add_special_tokens=False) + ids)[:24]
        cut = min(cut, len(tokens))
        given = {"stop": stops, "include_stop_str_in_output": flags[0], "skip_special_tokens": flags[1]}
        given |= {"min_tokens": least, "max_tokens": 1000}
        texts.check_sample(kind, tokens[:cut], tokens[cut:], given)

    hold(
        2 * count,
        check,
        text=given_text,
        ids=st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=6),
        cut=st.integers(0, 12),
        stops=st.lists(stop, max_size=4).filter(lambda stops: all(_is_text(each) for each in stops)),
        flags=st.tuples(st.booleans(), st.booleans()),
        least=st.sampled_from([0, 0, 0, 1, 5]),
    )


def _is_text(stop: str) -> bool:
    try:
        return bool(stop.encode())
    except UnicodeEncodeError:
        return False


@COUNTS
def test_any_model_text_splits_the_same_however_it_is_cut(count: int) -> None:
    soup = st.lists(st.sampled_from(texts.MODEL_WORDS), max_size=20).map("".join)
    hold(2 * count, lambda text: texts.check_parsers(text, random.Random(len(text))), text=soup)


# Linear time.


@pytest.mark.parametrize("piece", [1, 7, 2**20])
@pytest.mark.parametrize("repeated", ["a", "ab", "User", "\n", "aaaaaaab", "e\u0301"])
def test_text_without_its_stop_strings_takes_linear_time(repeated: str, piece: int) -> None:
    stops = ["a" * 255 + "b", "ab" * 127 + "c", "a" * 128 + "b" + "a" * 127, "User:" * 51, "\n\n\n!"]
    stops += ["a" * length + "b" for length in (200, 201)]

    def prepare(size: int) -> Callable[[], object]:
        text = repeated * (size // len(repeated))

        def work() -> None:
            matcher = StopMatcher.of(stops)
            for at in range(0, len(text), piece):
                matcher, _ = match_stops(matcher, text[at : at + piece])

        return work

    assert is_linear(prepare, 2**14)


@pytest.mark.parametrize("kind", ["embedded", "byte_fallback", "stripping"])
@pytest.mark.parametrize("byte", [0x41, 0x80, 0xC3, 0xF0, 0xE2])
def test_a_run_of_broken_bytes_takes_linear_time(kind: str, byte: int) -> None:
    tokenizer = texts.tokenizer_of(kind)
    token = next(token for token in range(tokenizer.vocab_size) if tokenizer.piece(token) == bytes([byte]))

    def prepare(size: int) -> Callable[[], object]:
        def work() -> None:
            state = begin(tokenizer, [token] * (size // 8), SamplingParams())
            for _ in range(size):
                state, _ = advance(state, tokenizer, [token])
            finish(state, tokenizer)

        return work

    assert is_linear(prepare, 2**13)
