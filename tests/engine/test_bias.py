"""`logit_bias` changes the logits of its tokens only, before penalties, with up to the maximum number of entries."""

from __future__ import annotations

from functools import partial

import jax
import numpy as np
import pytest

from jaxllm.sampling.sampler import Extras, Variant, biased
from jaxllm.sampling.vocab_parallel import Vocabulary
from jaxllm.sampling_params import MAX_BIASED_TOKENS, SamplingParams
from tests.support.draws import EXTRAS, HISTORY, WHOLE, V, draw, naive_penalized, random_logits, rows_of


def packed_extras(params: list[SamplingParams], garbage: int = 0, layout: Extras = EXTRAS) -> np.ndarray:
    """Pack extras as on the device: all columns that a row does not use hold `garbage` from an earlier request."""
    packed = np.full((len(params), layout.width), garbage, np.int32)
    at, shape = layout.fields["bias"]
    bias = slice(at, at + int(np.prod(shape)))
    for row, each in enumerate(params):
        own = layout.pack(each, ())
        if own is not None:
            used = len(each.logit_bias or ())
            packed[row, bias].reshape(shape)[:, :used] = own[bias].reshape(shape)[:, :used]
    return packed


def packed_biases(params: list[SamplingParams], garbage: int = 0, layout: Extras = EXTRAS) -> np.ndarray:
    return np.asarray(layout.unpack(packed_extras(params, garbage, layout))["bias"])


@pytest.mark.parametrize("garbage", [0, 1, V - 1, V, -1, 2**31 - 1, -(2**31), int(np.float32("nan").view(np.int32))])
def test_a_bias_is_added_to_its_tokens_alone(garbage: int):
    random = np.random.default_rng(41)
    params = [SamplingParams(logit_bias=dict(zip(*each, strict=True))) for each in (
        (random.permutation(V)[:count].tolist(), random.uniform(-100, 100, count).tolist()) for count in range(V + 1)
    )]  # fmt: skip
    logits = random_logits(len(params), 42)
    expected = logits.copy()
    for row, each in enumerate(params):
        for token, value in (each.logit_bias or {}).items():
            expected[row, token] += np.float32(value)
    result = np.asarray(
        jax.jit(partial(biased, vocabulary=WHOLE))(logits, rows_of(params), packed_biases(params, garbage))
    )
    np.testing.assert_array_equal(result, expected)


def test_a_bias_has_room_for_the_most_entries():
    vocabulary = MAX_BIASED_TOKENS + 7
    params = SamplingParams(logit_bias={token: token / 10 for token in range(MAX_BIASED_TOKENS)})
    rows = rows_of([params], vocab_size=vocabulary)
    run = jax.jit(partial(biased, vocabulary=Vocabulary(vocabulary)))
    result = run(np.zeros((1, vocabulary), np.float32), rows, packed_biases([params], layout=Extras(vocabulary)))
    expected = [token / 10 for token in range(MAX_BIASED_TOKENS)] + [0.0] * 7
    np.testing.assert_allclose(result, [np.minimum(expected, 100.0)], rtol=1e-6)


@pytest.mark.ci
def test_a_bias_of_100_picks_and_of_minus_100_bans():
    logits = random_logits(V, 43)
    best = logits.argmax(-1)
    wanted = [SamplingParams(temperature=0, logit_bias={token: 100}) for token in range(V)]
    sampled = draw(logits, rows_of(wanted), Variant.FULL, extras=packed_extras(wanted))
    assert sampled.tokens.tolist() == list(range(V))
    banned = [SamplingParams(temperature=0, logit_bias={str(token): -100}) for token in best]
    sampled = draw(logits, rows_of(banned), Variant.FULL, extras=packed_extras(banned))
    assert sampled.tokens.tolist() == np.argsort(logits, axis=-1)[:, -2].tolist()


def test_a_recycled_slot_does_not_see_the_former_bias():
    logits = random_logits(V, 44)
    former = packed_extras([SamplingParams(logit_bias={token: 100, 3: 50}) for token in range(V)])
    rows = rows_of([SamplingParams(temperature=0)] * V)  # only its row is written when a slot gets a new request
    assert draw(logits, rows, Variant.FULL, extras=former).tokens.tolist() == logits.argmax(-1).tolist()


def test_a_bias_comes_before_penalties_and_leaves_the_raw_logprobs():
    count = 60
    random = np.random.default_rng(45)
    arguments = {"temperature": 0, "logprobs": 5, "repetition_penalty": 1.7, "presence_penalty": 0.5}
    params = [
        SamplingParams(
            **arguments, logit_bias={int(token): float(random.normal(0, 4)) for token in random.integers(0, V, 8)}
        )
        for _ in range(count)
    ]
    logits = random_logits(count, 46)
    history = random.integers(0, V, (count, HISTORY)).astype(np.int32)
    rows, extras = rows_of(params), packed_extras(params, 3)
    sampled = draw(logits, rows, Variant.FULL, history=history, extras=extras)
    raw = logits.astype(np.float64) - np.log(np.exp(logits.astype(np.float64)).sum(-1, keepdims=True))
    for row, each in enumerate(params):
        expected = logits[row].astype(np.float64)
        for token, value in (each.logit_bias or {}).items():
            expected[token] += value
        expected = naive_penalized(expected, each, history[row, :3].tolist(), history[row, 3:6].tolist())
        assert sampled.tokens[row] == expected.argmax()
        np.testing.assert_allclose(sampled.logprob[row], raw[row, expected.argmax()], atol=1e-5)
        np.testing.assert_allclose(sampled.top_logprobs[row], np.sort(raw[row])[::-1][:5], atol=1e-5)


def test_a_bias_does_not_free_what_min_tokens_holds_back():
    params = SamplingParams(temperature=0, min_tokens=9, logit_bias={2: 100})
    sampled = draw(random_logits(3), rows_of([params] * 3, 3, (2,)), Variant.FULL, extras=packed_extras([params] * 3))
    assert 2 not in sampled.tokens
