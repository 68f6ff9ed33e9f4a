"""Compare rarely used parameters with plain code: bad words, allowed ids, logits processors, reported token ids."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm import UserError
from jaxllm.runner.step import patch_extras
from jaxllm.sampling.logits_processors import load_processors
from jaxllm.sampling.sampler import Extras, Sampled, SamplingRows, Variant, pack_row, sample, unpack_rows
from jaxllm.sampling.vocab_parallel import Vocabulary
from jaxllm.sampling_params import MAX_BAD_WORD_TOKENS, MAX_PROCESSOR_ARGUMENTS, SamplingParams

V = 70  # more than two words of 32 bits, and not a multiple of 32
LENGTH = 12
PROMPT = 3

Words = list[list[int]]


def scale(logits: jax.Array, arguments: jax.Array, positions: jax.Array) -> jax.Array:
    return logits * arguments[:, :1] + positions[:, None] * arguments[:, 1:2]


def ban_below(logits: jax.Array, arguments: jax.Array, positions: jax.Array) -> jax.Array:
    del positions
    return jnp.where(jnp.arange(logits.shape[-1]) < arguments[:, :1], -jnp.inf, logits)


LAYOUT = Extras(V, ("scale", "ban_below"))
run = jax.jit(
    partial(sample, variant=Variant.FULL, num_logprobs=4, vocabulary=Vocabulary(V), processors=(scale, ban_below))
)


def draw(
    logits: np.ndarray,
    params: list[SamplingParams],
    words: list[Words] | None = None,
    history: np.ndarray | None = None,
    positions: np.ndarray | None = None,
    garbage: int = 0,
) -> Sampled:
    """Sample; places that a request does not use hold `garbage`, like those of an earlier request of the slot."""
    words = [[]] * len(params) if words is None else words
    packed = np.full((len(params), LAYOUT.width), garbage, np.int32)
    for row, (each, own) in enumerate(zip(params, words, strict=True)):
        extras = LAYOUT.pack(each, own)
        if extras is not None:
            packed[row] = extras
            offset, (_, most) = LAYOUT.fields["bad_words"]
            for part in (offset, offset + most):
                packed[row, part + sum(map(len, own)) : part + most] = garbage
    history = np.zeros((len(params), LENGTH), np.int32) if history is None else history
    positions = np.full(len(params), LENGTH - 2, np.int32) if positions is None else positions
    rows = rows_of(params, words)
    return jax.tree.map(np.asarray, run(logits, rows, positions, history, LAYOUT.unpack(jnp.asarray(packed))))


def rows_of(params: list[SamplingParams], words: list[Words]) -> SamplingRows:
    packed = [
        pack_row(each, each.seed or 0, PROMPT, (), V, sum(map(len, own)), LAYOUT.bits(each))
        for each, own in zip(params, words, strict=True)
    ]
    return unpack_rows(jnp.asarray(np.stack(packed)))


def random_logits(num_rows: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(0.0, 2.0, (num_rows, V)).astype(np.float32)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    exact = logits.astype(np.float64)
    return exact - np.log(np.exp(exact).sum(-1, keepdims=True))


def is_banned(token: int, words: Words, output: list[int]) -> bool:
    """Return whether the output with this token appended ends with a bad word."""
    ending = [*output, token]
    return any(len(word) <= len(ending) and ending[-len(word) :] == word for word in words)


@pytest.mark.ci
@pytest.mark.parametrize("garbage", [0, -1, 1, 2**31 - 1, -(2**31)])
def test_a_bad_word_cannot_be_completed(garbage: int) -> None:
    random, count = np.random.default_rng(1), 300
    history = random.integers(0, 3, (count, LENGTH)).astype(np.int32)  # only three tokens, so that words often begin
    words: list[Words] = [
        [random.integers(0, 3, random.integers(1, 5)).tolist() for _ in range(random.integers(0, 8))]
        for _ in range(count)
    ]
    positions = random.integers(PROMPT, LENGTH + 1, count).astype(np.int32)
    logits = random_logits(count, 2)
    logits[:, :3] += 20.0  # one of them would be chosen
    params = [SamplingParams(temperature=0, bad_words=["x"] if own else []) for own in words]
    sampled = draw(logits, params, words, history, positions, garbage)
    for row, own in enumerate(words):
        output = history[row, PROMPT : positions[row]].tolist()
        allowed = [token for token in range(V) if not is_banned(token, own, output)]
        assert sampled.tokens[row] == max(allowed, key=lambda token: logits[row, token]), (own, output)


@pytest.mark.ci
def test_there_is_room_for_the_most_bad_words() -> None:
    word = [7] * (MAX_BAD_WORD_TOKENS - 1)
    params = [SamplingParams(temperature=0, bad_words=["x"])] * 2
    logits = random_logits(2, 3)
    logits[:, 5] += 100.0
    sampled = draw(logits, params, [[word, [5]], [[5], word]])
    assert 5 not in sampled.tokens


@pytest.mark.parametrize("garbage", [0, -1, 2**31 - 1])
@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_only_allowed_tokens_are_sampled(garbage: int, temperature: float) -> None:
    random = np.random.default_rng(4)
    sets = [random.choice(V, random.integers(1, V + 1), replace=False).tolist() for _ in range(200)]
    sets += [[token] for token in range(V)]
    params = [SamplingParams(temperature=temperature, seed=row, allowed_token_ids=ids) for row, ids in enumerate(sets)]
    params += [SamplingParams(temperature=temperature, seed=1)] * 30  # unrestricted requests in the same batch
    logits = random_logits(len(params), 5)
    sampled = draw(logits, params, garbage=garbage)
    for row, ids in enumerate(sets):
        assert sampled.tokens[row] in ids
        if temperature == 0.0:
            assert sampled.tokens[row] == max(ids, key=lambda token: logits[row, token])
    if temperature == 0.0:
        assert sampled.tokens[len(sets) :].tolist() == logits[len(sets) :].argmax(-1).tolist()


@pytest.mark.ci
def test_a_row_that_may_sample_nothing_is_flagged_alone() -> None:
    params = [SamplingParams(temperature=0, allowed_token_ids=[3], bad_words=["x"]), SamplingParams(temperature=0)]
    sampled = draw(random_logits(2, 6), params, [[[3]], []])
    assert sampled.is_finite.tolist() == [False, True]


@pytest.mark.ci
def test_processors_change_the_rows_that_asked() -> None:
    asked: list[dict | None] = [None, {"scale": -1.0}, {"ban_below": 60}, {"scale": [-1, 0.5], "ban_below": (30.0,)}]
    params = [SamplingParams(temperature=0, extra_args=asked[row % 4]) for row in range(80)]
    logits = random_logits(80, 7)
    sampled = draw(logits, params, garbage=-1)
    for row, each in enumerate(params):
        expected = logits[row].astype(np.float64)
        given = each.extra_args or {}
        if "scale" in given:
            expected = expected * given["scale"][0]
        expected[: int(given.get("ban_below", [0])[0])] = -np.inf
        assert sampled.tokens[row] == expected.argmax()
        np.testing.assert_allclose(sampled.logprob[row], log_softmax(logits[row])[sampled.tokens[row]], atol=1e-5)


def test_a_processor_that_bans_all_or_returns_nan_fails_its_row_alone() -> None:
    params = [SamplingParams(temperature=0, extra_args=given) for given in ({"ban_below": V}, None)]
    assert draw(random_logits(2, 8), params).is_finite.tolist() == [False, True]
    huge = SamplingParams(temperature=0, extra_args={"scale": [0.0, 3e38]})  # overflows when multiplied
    assert draw(random_logits(2, 9), [huge, params[1]]).is_finite.tolist() == [True, True]


def test_reported_ids_have_their_raw_logprobs() -> None:
    random = np.random.default_rng(10)
    ids = [random.choice(V, count, replace=False).tolist() for count in (1, 5, V)]
    params = [SamplingParams(logprob_token_ids=own, logit_bias={3: 50}, seed=1) for own in ids]
    logits = random_logits(3, 11)
    sampled = draw(logits, params)
    assert sampled.reported is not None
    for row, own in enumerate(ids):
        np.testing.assert_allclose(sampled.reported[row, : len(own)], log_softmax(logits[row])[own], atol=1e-5)


def test_extras_are_written_into_their_slots_alone() -> None:
    slots = 6
    before = np.random.default_rng(47).integers(-9, 9, (slots, LAYOUT.width)).astype(np.int32)
    asked = {4: SamplingParams(logit_bias={7: 1.5}), 1: SamplingParams(allowed_token_ids=list(range(V)))}
    new = {slot: LAYOUT.pack(params, ()) for slot, params in asked.items()}
    changes = np.full((5, 1 + LAYOUT.width), slots, np.int32)  # unused entries have slot S
    for change, (slot, packed) in zip(changes, new.items(), strict=False):
        change[:] = [slot, *packed]
    after = np.asarray(jax.jit(patch_extras)(before, changes))
    for slot in range(slots):
        np.testing.assert_array_equal(after[slot], new.get(slot, before[slot]))


# Registration.


def test_processors_are_found_by_path_and_by_function() -> None:
    found = load_processors((scale, f"{__name__}:ban_below"), V)
    assert list(found) == ["scale", "ban_below"]
    logits = jnp.arange(2.0 * V).reshape(2, V)
    for name, processor in (("scale", scale), ("ban_below", ban_below)):
        given = logits, jnp.full((2, MAX_PROCESSOR_ARGUMENTS), 2.0), jnp.zeros(2, jnp.int32)
        np.testing.assert_array_equal(found[name](*given), processor(*given))


@dataclass
class Minus:
    """A JAX function with a number: equal to one with the same number, and not hashable."""

    number: float
    __name__ = "minus"

    def __call__(self, logits: jax.Array, arguments: jax.Array, positions: jax.Array) -> jax.Array:
        del arguments, positions
        return logits - self.number


def test_what_is_traced_of_a_processor_is_its_engines_own() -> None:
    """JAX caches traces by function; another engine must not reuse the trace of a function that has changed since."""
    minus, logits = Minus(1.0), jnp.zeros((2, V))
    traced = jax.jit(lambda processor, given: processor(given, given, given), static_argnums=0)
    for number in (1.0, 5.0):
        minus.number = number
        assert traced(load_processors((minus,), V)["minus"], logits)[0, 0] == -number


def wrong_shape(logits: jax.Array, arguments: jax.Array, positions: jax.Array) -> jax.Array:
    del arguments, positions
    return logits[:, 1:]


def not_traceable(logits: jax.Array, arguments: jax.Array, positions: jax.Array) -> jax.Array:
    del arguments, positions
    return logits if logits[0, 0] > 0 else -logits


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("jaxllm.nowhere:scale", "'jaxllm.nowhere:scale' cannot be imported as package.module:function"),
        ("jaxllm.sampling_params:nothing", "cannot be imported"),
        ("nothing", "cannot be imported"),
        ("jaxllm.checks:INT32_MAX", "must hold named functions"),
        (lambda logits, arguments, positions: logits, "must hold named functions"),
        (wrong_shape, "wrong_shape must return floats of the logits' shape"),
        (not_traceable, "not_traceable cannot be traced by JAX"),
    ],
)
def test_what_is_no_processor_is_refused_at_the_start(given: object, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        load_processors((given,), V)  # pyright: ignore[reportArgumentType]
    assert caught.value.parameter == "logits_processors"


def test_two_of_one_name_are_refused() -> None:
    with pytest.raises(UserError, match="two functions that are called 'scale'"):
        load_processors((scale, scale), V)
