"""Samples have exactly the distribution of the parameters, against numpy versions of every rule."""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.errors import EngineError
from jaxllm.sampling import sampler
from jaxllm.sampling.sampler import (
    ROW_WIDTH,
    Variant,
    kept_tokens,
    needs,
    pack_row,
    penalized,
    reads_history,
    sample,
    unpack_rows,
)
from jaxllm.sampling.vocab_parallel import Vocabulary
from jaxllm.sampling_params import MAX_MASKED_STOP_IDS, SamplingParams
from pallas_kernels import Choice
from tests.support.draws import HISTORY, MANY, WHOLE, V, draw, naive_penalized, random_logits, rows_of

WITH_FILTERS = (Variant.FILTERED, Variant.FULL)
TWO_GREEDY = rows_of([SamplingParams(temperature=0.0)] * 2)

jitted_kept = jax.jit(lambda logits, rows: kept_tokens(logits, 1.0, rows, WHOLE))


# Packing


def test_a_packed_row_gives_back_its_numbers():
    params = SamplingParams(
        temperature=0.7,
        top_p=0.9,
        min_p=0.05,
        top_k=40,
        repetition_penalty=1.1,
        presence_penalty=-0.5,
        frequency_penalty=0.25,
        min_tokens=4,
        logit_bias={5: 1.0, 9: -2.0},
    )
    row = pack_row(params, 5, 11, (7, 3), 1000)
    assert row.dtype == np.int32 and row.shape == (ROW_WIDTH,)
    state = unpack_rows(jnp.asarray(row)[None])
    for name in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"):
        assert getattr(state, name)[0] == np.float32(getattr(params, name)), name
    assert (state.top_k[0], state.prompt_length[0], state.min_length[0], state.num_biased[0]) == (40, 11, 15, 2)
    assert state.stop_ids.tolist() == [[3, 7] + [1000] * (MAX_MASKED_STOP_IDS - 2)]


@pytest.mark.parametrize("seed", [0, 1, -1, 2**32, 2**63 - 1, -(2**63), 0x0123456789ABCDEF])
def test_a_key_holds_all_64_bits_of_its_seed(seed: int):
    state = unpack_rows(jnp.asarray(pack_row(SamplingParams(), seed, 1, (), V))[None])
    assert np.asarray(state.key)[0].astype(">u4").tobytes() == seed.to_bytes(8, "big", signed=True)


def test_numbers_outside_float32_and_int32_stay_usable():
    params = SamplingParams(
        temperature=1e300,
        top_p=1e-300,
        repetition_penalty=1e300,
        top_k=2**31 - 1,
        min_tokens=2**31 - 1,
        max_tokens=None,
    )
    state = unpack_rows(jnp.asarray(pack_row(params, 0, 100, (), V))[None])
    assert all(np.isfinite(column).all() for column in jax.tree.leaves(state))
    assert state.top_p[0] > 0 and state.min_length[0] == 2**31 - 1 and state.top_k[0] == V
    assert unpack_rows(pack_row(SamplingParams(repetition_penalty=1e-300), 0, 1, (), V)[None]).repetition_penalty[0] > 0


def test_too_many_ids_to_hold_back_are_an_engine_error():
    ids = tuple(range(MAX_MASKED_STOP_IDS + 1))
    with pytest.raises(EngineError, match="33 stop ids"):
        pack_row(SamplingParams(min_tokens=1), 0, 1, ids, 100)
    assert (pack_row(SamplingParams(), 0, 1, ids, 100)[-MAX_MASKED_STOP_IDS:] == 100).all()


# Variants


@pytest.mark.parametrize(
    ("arguments", "variant"),
    [
        ({"temperature": 0}, Variant.GREEDY),
        ({"temperature": 0, "top_k": 3, "top_p": 0.5}, Variant.GREEDY),
        ({}, Variant.RANDOM),
        ({"top_k": 1}, Variant.FILTERED),
        ({"top_p": 0.99}, Variant.FILTERED),
        ({"min_p": 0.01}, Variant.FILTERED),
        ({"temperature": 0, "logprobs": 0}, Variant.FILTERED),
        ({"temperature": 0, "min_tokens": 1}, Variant.FILTERED),
        ({"repetition_penalty": 0.9}, Variant.FULL),
        ({"presence_penalty": 0.1}, Variant.FULL),
        ({"temperature": 0, "frequency_penalty": -0.1}, Variant.FULL),
        ({"temperature": 0, "logit_bias": {3: 1.0}}, Variant.FULL),
        ({"temperature": 0, "logit_bias": {}}, Variant.GREEDY),
        ({"temperature": 0, "allowed_token_ids": [1]}, Variant.FULL),
        ({"temperature": 0, "bad_words": ["a"]}, Variant.FULL),
        ({"temperature": 0, "logprob_token_ids": [1]}, Variant.FULL),
        ({"temperature": 0, "extra_args": {"scale": 2}}, Variant.FULL),
    ],
)
def test_a_request_needs_the_cheapest_variant(arguments: dict, variant: Variant):
    params = SamplingParams(**arguments)
    assert needs(params) is variant
    assert reads_history(params) == ("penalty" in "".join(arguments) or "bad_words" in arguments)


@pytest.mark.ci
def test_wider_variants_give_the_same_tokens():
    count = 1000
    logits = random_logits(count, 1)
    history = np.random.default_rng(2).integers(0, V, (count, 8)).astype(np.int32)

    def tokens(params: SamplingParams, variant: Variant) -> list[int]:
        rows = rows_of([SamplingParams(**{**vars(params), "seed": row}) for row in range(count)])
        return draw(logits, rows, variant, history=history).tokens.tolist()

    greedy, random, filtered = (
        SamplingParams(temperature=0),
        SamplingParams(temperature=0.8),
        SamplingParams(temperature=1.3, top_k=6, top_p=0.8, min_p=0.02),
    )
    assert tokens(greedy, Variant.GREEDY) == logits.argmax(-1).tolist()
    for variant in (Variant.RANDOM, *WITH_FILTERS):
        assert tokens(greedy, variant) == tokens(greedy, Variant.GREEDY)
    for variant in WITH_FILTERS:
        assert tokens(random, variant) == tokens(random, Variant.RANDOM)
    assert tokens(filtered, Variant.FULL) == tokens(filtered, Variant.FILTERED)


@pytest.mark.ci
def test_variants_without_logprobs_make_none():
    for variant in Variant:
        sampled = draw(random_logits(2), TWO_GREEDY, variant)
        made = [part is not None for part in (sampled.logprob, sampled.rank, sampled.top_logprobs, sampled.top_ids)]
        assert made == [variant in WITH_FILTERS] * 4


# Filters


def naive_kept(scaled: np.ndarray, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """Return the kept tokens of one row in float64, by the definitions of the three rules in order."""
    probability = np.exp(scaled.astype(np.float64) - scaled.max())
    probability /= probability.sum()
    left = {token for token in range(len(scaled)) if probability[token] >= min_p * probability.max()}
    if top_k > 0:
        last = sorted((scaled[token] for token in range(len(scaled))), reverse=True)[min(top_k, len(scaled)) - 1]
        left = {token for token in left if scaled[token] >= last}
    if top_p < 1.0:
        total, mass = sum(probability[token] for token in left), 0.0
        for last in sorted({scaled[token] for token in left}, reverse=True):
            equals = [token for token in left if scaled[token] == last]
            for token in equals:
                mass += probability[token]
            if mass >= top_p * total:
                break
        left = {token for token in left if scaled[token] >= last}
    return np.isin(np.arange(len(scaled)), list(left))


FILTERS = [
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": V},
    {"top_k": V + 7},
    {"top_p": 1e-300},
    {"top_p": 0.5},
    {"top_p": 0.999},
    {"min_p": 1e-12},
    {"min_p": 0.2},
    {"min_p": 1.0},
    {"top_k": 7, "top_p": 0.8},
    {"top_k": 10, "top_p": 0.9, "min_p": 0.03},
    {"top_k": 3, "min_p": 0.6},
    {},
]


@pytest.mark.parametrize("kind", ["spread", "tied", "negative", "huge", "flat"])
def test_filters_keep_what_their_definitions_say(kind: str):
    each = 40
    logits = random_logits(each * len(FILTERS), 3)
    logits = {
        "spread": logits,
        "tied": np.round(logits / 2.0) + 0.0,
        "negative": logits - 50.0,
        "huge": logits * 1e4,
        "flat": np.zeros_like(logits),
    }[kind].astype(np.float32)
    filters = [arguments for arguments in FILTERS for _ in range(each)]
    rows = rows_of([SamplingParams(**arguments) for arguments in filters])
    kept = np.asarray(jitted_kept(logits, rows))
    for row, arguments in enumerate(filters):
        given = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, **arguments}
        assert kept[row].tolist() == naive_kept(logits[row], **given).tolist(), (arguments, logits[row])
        assert kept[row, logits[row].argmax()]


def test_zeros_of_either_sign_tie():
    logits = np.full((2, V), -1.0, np.float32)
    logits[0, [4, 5]] = 0.0, -0.0
    logits[1, [4, 5]] = -0.0, 0.0
    kept = np.asarray(jitted_kept(logits, rows_of([SamplingParams(top_k=1)] * 2)))
    assert [np.flatnonzero(row).tolist() for row in kept] == [[4, 5]] * 2


def test_top_p_is_exact_over_a_large_vocabulary():
    logits = np.random.default_rng(5).normal(0, 1, (2, 50_000)).astype(np.float32)
    params = [SamplingParams(top_p=0.95), SamplingParams(top_k=1234)]
    kept = np.asarray(
        jax.jit(kept_tokens, static_argnums=3)(logits, 1.0, rows_of(params, vocab_size=50_000), Vocabulary(50_000))
    )
    falling = np.sort(logits[0].astype(np.float64))[::-1]
    share = np.exp(falling).cumsum() / np.exp(falling).sum()
    # each of 50,000 masses is rounded to 2**-29 of their sum or less: the edge may move by one token
    assert abs(kept[0].sum() - (np.searchsorted(share, 0.95) + 1)) <= 1
    assert set(np.flatnonzero(kept[1])) == set(np.argsort(logits[1])[-1234:])


@pytest.mark.parametrize("platform", ["cuda", "cpu"])
def test_the_search_is_a_loop_on_a_cpu_only(platform: str):
    lowered = jitted_kept.trace(jnp.zeros((2, V)), TWO_GREEDY).lower(lowering_platforms=(platform,))
    assert ("stablehlo.while" in lowered.as_text()) == (platform == "cpu")


def test_no_branch_is_left_in_the_program():
    compiled = jitted_kept.lower(jnp.zeros((2, V)), TWO_GREEDY).compile()
    assert "conditional(" not in compiled.as_text()


# Penalties and stop ids


PENALTIES = [
    SamplingParams(repetition_penalty=1.5),
    SamplingParams(repetition_penalty=0.5),
    SamplingParams(presence_penalty=2.0),
    SamplingParams(frequency_penalty=0.7),
    SamplingParams(repetition_penalty=1.2, presence_penalty=-1.0, frequency_penalty=0.3),
    SamplingParams(),
]


@pytest.mark.parametrize("garbage", [0, -1, V, 2**31 - 1])
def test_penalties_count_prompt_and_output(garbage: int):
    generator = np.random.default_rng(7)
    history = np.full((len(PENALTIES) * 4, 12), garbage, np.int32)
    logits = random_logits(len(history), 8)
    positions = np.array([3, 4, 9, 12] * len(PENALTIES), np.int32)
    params = [each for each in PENALTIES for _ in range(4)]
    for row, length in enumerate(positions):
        history[row, :length] = generator.integers(0, 6, length)  # few tokens, so that some repeat
    result = np.asarray(
        jax.jit(partial(penalized, vocabulary=WHOLE))(logits, rows_of(params, prompt_length=3), positions, history)
    )
    for row, length in enumerate(positions):
        prompt, output = history[row, :3].tolist(), history[row, 3:length].tolist()
        expected = naive_penalized(logits[row], params[row], prompt, output)
        np.testing.assert_allclose(result[row], expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("variant", WITH_FILTERS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_stop_ids_wait_for_min_tokens(variant: Variant, temperature: float):
    count = 300  # rows per position
    stops = (0, 5, V - 1)
    logits = np.zeros((3 * count, V), np.float32)
    logits[:, stops] = 8.0  # the stop ids take almost all of the probability
    params = SamplingParams(temperature=temperature, min_tokens=4, stop_token_ids=list(stops), max_tokens=99)
    rows = rows_of([SamplingParams(**{**vars(params), "seed": row}) for row in range(3 * count)], 3, stops)
    positions = np.repeat(np.array([3, 6, 7], np.int32), count)  # prompt of 3 and 4 tokens: free from position 7
    tokens = np.asarray(draw(logits, rows, variant, positions).tokens).reshape(3, count)
    assert not np.isin(tokens[:2], stops).any()
    assert np.isin(tokens[2], stops).mean() > 0.95


def test_unused_stop_columns_hold_nothing_back():
    logits = np.zeros((V, V), np.float32)
    np.fill_diagonal(logits, 5.0)
    rows = rows_of([SamplingParams(temperature=0, min_tokens=9)] * V, 3, ())
    assert draw(logits, rows, Variant.FILTERED).tokens.tolist() == list(range(V))


@pytest.mark.parametrize("temperature", [0.0, 0.01, 1e300])
@pytest.mark.parametrize("penalty", [1e-300, 1e300])
def test_absurd_penalties_do_not_overflow(temperature: float, penalty: float):
    params = SamplingParams(temperature=temperature, repetition_penalty=penalty, top_p=1e-300, min_tokens=5)
    logits = np.zeros((2, V), np.float32)
    logits[0, 0::2], logits[0, 1::2] = -20.0, 20.0
    history = np.tile(np.arange(HISTORY, dtype=np.int32), (2, 1))  # tokens 0 to 5 were seen, 1 is held back
    sampled = draw(logits, rows_of([params] * 2, 3, (1,)), Variant.FULL, history=history)
    assert sampled.is_finite.all() and 1 not in sampled.tokens
    if temperature < 1.0:
        assert sampled.tokens[0] in ({3, 5} if penalty < 1.0 else set(range(7, V, 2)))


# The distribution


def naive_distribution(
    logits: np.ndarray, params: SamplingParams, prompt: list[int], output: list[int], held_back: tuple[int, ...]
) -> np.ndarray:
    scaled = naive_penalized(logits, params, prompt, output)
    scaled[list(held_back)] = -np.inf
    scaled /= params.temperature
    kept = naive_kept(scaled, params.top_k, params.top_p, params.min_p)
    probability = np.where(kept, np.exp(scaled - scaled.max()), 0.0)
    return probability / probability.sum()


@pytest.mark.parametrize(
    ("arguments", "held_back"),
    [
        ({"temperature": 1.0}, ()),
        *(
            pytest.param(alone, (), marks=pytest.mark.ci)
            for alone in ({"temperature": 3.0}, {"top_k": 4}, {"top_p": 0.7}, {"min_p": 0.15})
        ),
        ({"temperature": 1.5, "top_k": 12, "top_p": 0.9, "min_p": 0.02}, ()),
        ({"temperature": 0.8, "repetition_penalty": 1.7, "presence_penalty": 0.5, "frequency_penalty": 0.4}, ()),
        ({"top_k": 8, "top_p": 0.85, "repetition_penalty": 1.3, "min_tokens": 9}, (2, 5)),
    ],
    ids=str,
)
@pytest.mark.parametrize("tied", [False, pytest.param(True, marks=pytest.mark.ci)], ids=["spread", "tied"])
def test_tokens_follow_the_exact_distribution(arguments: dict, held_back: tuple[int, ...], tied: bool):
    count = MANY
    logits = random_logits(1, 11)[0] * 0.7
    if tied:
        logits = np.round(logits).astype(np.float32)
    prompt, output = [1, 2, 3], [3, 4, 4]
    params = SamplingParams(**arguments)
    row = pack_row(params, 0, len(prompt), held_back, V)
    packed = np.tile(row, (count, 1))
    rows = unpack_rows(jnp.asarray(packed)).replace(
        key=jnp.stack([jnp.zeros(count, jnp.uint32), jnp.arange(count, dtype=jnp.uint32)], axis=-1)
    )
    history = np.tile(np.array([*prompt, *output, 9, 9], np.int32), (count, 1))
    sampled = draw(np.tile(logits, (count, 1)), rows, needs(params), history=history)
    observed = np.bincount(np.asarray(sampled.tokens), minlength=V)
    expected = count * naive_distribution(logits, params, prompt, output, held_back)
    assert observed[expected == 0].sum() == 0
    # Pearson's statistic over tokens expected often enough, the rest as one; rejects a true sampler once in 10,000
    rare = (expected > 0) & (expected < 10)
    observed = np.append(observed[expected >= 10], observed[rare].sum())
    expected = np.append(expected[expected >= 10], expected[rare].sum())
    observed, expected = observed[expected > 0], expected[expected > 0]
    statistic = ((observed - expected) ** 2 / expected).sum()
    freedom = max(len(expected) - 1, 1)
    # Wilson and Hilferty 1931: the cube root of a chi-square variable is nearly normal; 3.72 is its 0.9999 quantile
    bound = freedom * (1 - 2 / (9 * freedom) + 3.72 * math.sqrt(2 / (9 * freedom))) ** 3
    assert statistic < bound, (statistic, bound)


@pytest.mark.parametrize("seed", [0, 2**31])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_draws_are_those_of_jax_at_the_seed_and_position(seed: int, temperature: float):
    logits = random_logits(1000, 13)
    positions = np.arange(1000, dtype=np.int32) * 100
    rows = rows_of([SamplingParams(seed=seed, temperature=temperature)] * 1000)
    key = jax.random.key(np.uint32(seed), impl="threefry2x32")
    keys = jax.vmap(partial(jax.random.fold_in, key))(positions)
    expected = jax.vmap(jax.random.categorical)(keys, logits / np.float32(temperature))
    assert draw(logits, rows, Variant.RANDOM, positions).tokens.tolist() == expected.tolist()


@pytest.mark.parametrize(
    "variant", [*(pytest.param(one, marks=pytest.mark.ci) for one in (Variant.RANDOM, Variant.FILTERED)), Variant.FULL]
)
def test_a_row_does_not_depend_on_its_neighbours(variant: Variant):
    kinds: list[dict] = [{}, {"temperature": 0.4}, {"temperature": 0.0}]
    if variant is not Variant.RANDOM:
        kinds += [{"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.1, "top_k": 9}]
    params = [SamplingParams(**kinds[row % len(kinds)], seed=row) for row in range(24)]
    logits = random_logits(24, 17)
    positions = np.arange(24, dtype=np.int32) % 7 + 1
    history = np.random.default_rng(3).integers(0, V, (24, 8)).astype(np.int32)
    together = draw(logits, rows_of(params), variant, positions, history)
    order = np.random.default_rng(4).permutation(24)
    moved = draw(logits[order], rows_of([params[at] for at in order]), variant, positions[order], history[order])
    for one, other in zip(jax.tree.leaves(together), jax.tree.leaves(moved), strict=True):
        np.testing.assert_array_equal(np.asarray(one)[order], np.asarray(other))
    for row in range(0, 24, 5):
        alone = slice(row, row + 1)
        single = draw(logits[alone], rows_of([params[row]]), variant, positions[alone], history[alone], batch=1)
        assert single.tokens[0] == together.tokens[row]


def test_seeds_differ():
    logits = np.zeros((200, V), np.float32)
    tokens = np.asarray(
        draw(logits, rows_of([SamplingParams(seed=seed) for seed in range(200)]), Variant.RANDOM).tokens
    )
    high = [SamplingParams(seed=seed << 32) for seed in range(200)]
    assert len(set(tokens.tolist())) > V // 2
    assert (tokens != np.asarray(draw(logits, rows_of(high), Variant.RANDOM).tokens)).mean() > 0.8


@pytest.mark.parametrize("variant", Variant)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_is_flagged_alone(variant: Variant, bad: float):
    params = [SamplingParams(seed=row, temperature=float(row % 2)) for row in range(6)]
    if variant is Variant.GREEDY:
        params = [SamplingParams(temperature=0)] * 6
    logits = random_logits(6, 19)
    broken = logits.copy()
    broken[2, 7] = bad
    broken[5] = bad
    before, after = draw(logits, rows_of(params), variant), draw(broken, rows_of(params), variant)
    assert np.asarray(before.is_finite).all()
    assert after.is_finite.tolist() == [True, True, False, True, True, False]
    others = np.array([0, 1, 3, 4])
    for one, other in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        np.testing.assert_array_equal(np.asarray(one)[others], np.asarray(other)[others])
    assert ((np.asarray(after.tokens) >= 0) & (np.asarray(after.tokens) < V)).all()  # still an id, never an index error


# Log-probabilities


@pytest.mark.parametrize("variant", WITH_FILTERS)
def test_logprobs_are_those_of_the_raw_logits(variant: Variant):
    arguments = {"temperature": 1.8, "top_k": 9, "min_tokens": 7, "repetition_penalty": 1.4, "presence_penalty": 1.0}
    params = [SamplingParams(**arguments, seed=row) for row in range(50)]
    logits = random_logits(50, 23)
    logits[:10] = np.round(logits[:10])  # equal logits share a rank
    history = np.random.default_rng(5).integers(0, V, (50, 8)).astype(np.int32)
    sampled = draw(logits, rows_of(params, 3, (1, 2)), variant, history=history)
    assert sampled.rank is not None and sampled.top_ids is not None
    exact = logits.astype(np.float64)
    exact -= np.log(np.exp(exact).sum(-1, keepdims=True))
    for row, token in enumerate(np.asarray(sampled.tokens)):
        np.testing.assert_allclose(sampled.logprob[row], exact[row, token], atol=1e-5)
        assert sampled.rank[row] == 1 + sum(other > exact[row, token] for other in exact[row])
        np.testing.assert_allclose(sampled.top_logprobs[row], np.sort(exact[row])[::-1][:5], atol=1e-5)
        np.testing.assert_allclose(exact[row, np.asarray(sampled.top_ids[row])], sampled.top_logprobs[row], atol=1e-5)
        assert len(set(sampled.top_ids[row].tolist())) == 5


@pytest.mark.ci
def test_no_likeliest_tokens_can_be_asked_for():
    logits = random_logits(2)
    run = partial(sample, variant=Variant.FILTERED, num_logprobs=0, vocabulary=WHOLE)
    sampled = jax.jit(run)(logits, TWO_GREEDY, np.array([1, 1], np.int32), None, None)
    assert sampled.top_logprobs.shape == sampled.top_ids.shape == (2, 0)
    assert sampled.rank.tolist() == [1, 1]


@pytest.mark.parametrize("variant", [Variant.RANDOM, Variant.FILTERED])
def test_a_kernel_that_sees_banned_tokens_does_not_decide_whether_a_row_is_finite(
    variant: Variant, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels see the logits after masking, with infinities."""

    def kernel(logits, *_, implementation):
        return jnp.argmax(logits, axis=-1).astype(jnp.int32), jnp.all(jnp.isfinite(logits), axis=-1)

    monkeypatch.setattr(sampler.pallas_kernels, "sample", kernel)
    params = SamplingParams(temperature=0.0)
    row = sampler.unpack_rows(jnp.asarray(sampler.pack_row(params, 0, 1, (), 64))[None].repeat(2, axis=0))
    logits = jnp.stack([jnp.arange(64.0)] * 2)
    mask = jnp.array([[1 << 5, 1 << 1], [0, 0]], jnp.int32), jnp.array([1, 0], jnp.int32)
    vocabulary = Vocabulary(64)
    sampled = sampler.sample(
        logits, row, jnp.array([1, 1]), None, None, variant, 1, vocabulary, (), Choice("another"), mask
    )
    assert sampled.tokens.tolist() == [33, 63] and sampled.is_finite.tolist() == [True, True]
    none_left = jnp.zeros((2, 2), jnp.int32), jnp.array([1, 0], jnp.int32)
    sampled = sampler.sample(
        logits, row, jnp.array([1, 1]), None, None, variant, 1, vocabulary, (), Choice("another"), none_left
    )
    assert sampled.is_finite.tolist() == [False, True]
