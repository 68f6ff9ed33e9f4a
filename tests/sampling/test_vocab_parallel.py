"""Sampling over shards gives the bits of one shard, with few and small collectives; its sums are exact."""

from __future__ import annotations

import functools
import json
import math
import re
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.config import EngineConfig
from jaxllm.errors import UserError
from jaxllm.model.sharding import Layout, make_layout
from jaxllm.sampling.sampler import (
    Extras,
    SamplingRows,
    Variant,
    all_logprobs,
    logprobs_of,
    pack_row,
    sample,
    unpack_rows,
)
from jaxllm.sampling.vocab_parallel import MOST_TOKENS, Vocabulary
from jaxllm.sampling_params import MAX_REPORTED_TOKENS, SamplingParams
from jaxllm.setup.model_setup import prepare
from pallas_kernels.sampling.xla import from_words, masses, words
from tests.support.checkpoints import CONFIG

ROWS = 48
HISTORY = 20
STOPS = (0, 7, 40)
BAD_WORDS = [[3], [1, 2], [4, 4, 50], [2, 90]]  # of those requests that have any


def favour(logits: jax.Array, arguments: jax.Array, positions: jax.Array) -> jax.Array:
    """A logits processor over the whole vocabulary: raises logits below the mean."""
    is_low = logits < jnp.mean(logits, axis=-1, keepdims=True)
    return jnp.where(is_low, logits + arguments[:, :1] * positions[:, None], logits)


def random_params(variant: Variant, vocab_size: int, rng: np.random.Generator) -> list[SamplingParams]:
    """Draw a request for each row: every parameter of the variant, alone and combined, and greedy ones."""
    params = []
    for _ in range(ROWS):
        arguments: dict = {"seed": int(rng.integers(2**62)), "temperature": float(rng.choice([0.0, 0.5, 1.0, 1.7]))}
        if variant is Variant.GREEDY:
            arguments["temperature"] = 0.0
        if variant in (Variant.FILTERED, Variant.FULL):
            choices = {
                "top_k": int(rng.choice([1, 3, 30, vocab_size])),
                "top_p": float(rng.choice([0.05, 0.5, 0.9, 0.999])),
                "min_p": float(rng.choice([1e-6, 0.05, 0.9])),
                "min_tokens": 15,
            }
            arguments |= {name: value for name, value in choices.items() if rng.random() < 0.5}
        if variant is Variant.FULL:
            ids = rng.permutation(vocab_size)[: rng.integers(0, 9)]
            arguments |= {
                "repetition_penalty": float(rng.uniform(0.7, 1.5)),
                "presence_penalty": float(rng.uniform(-1, 1)),
                "frequency_penalty": float(rng.uniform(-1, 1)),
                "logit_bias": {int(token): float(rng.uniform(-9, 9)) for token in ids},
            }
            choices = {
                "allowed_token_ids": [41, *rng.permutation(vocab_size)[: rng.integers(0, vocab_size)].tolist()],
                "bad_words": ["x"],
                "logprob_token_ids": rng.permutation(vocab_size)[:5].tolist(),
                "extra_args": {"favour": float(rng.uniform(0, 1))},
            }
            arguments |= {name: value for name, value in choices.items() if rng.random() < 0.5}
        params.append(SamplingParams(**arguments, max_tokens=99))
    return params


def batch_of(
    variant: Variant, vocab_size: int, seed: int
) -> tuple[np.ndarray, SamplingRows, np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    """Make logits, rows, positions, history and extras of random requests; every third row's logits have many ties."""
    rng = np.random.default_rng(seed)
    params = random_params(variant, vocab_size, rng)
    logits = rng.normal(0, 3, (ROWS, vocab_size)).astype(np.float32)
    logits[::3] = np.round(logits[::3])
    logits[1] = 0.0
    layout = Extras(vocab_size, ("favour",))
    words = [BAD_WORDS if each.bad_words else [] for each in params]
    packed = [
        pack_row(each, each.seed or 0, 3, STOPS, vocab_size, sum(map(len, own)), layout.bits(each))
        for each, own in zip(params, words, strict=True)
    ]
    rows = unpack_rows(jnp.asarray(np.stack(packed)))
    positions = rng.integers(3, HISTORY, ROWS).astype(np.int32)
    history = rng.integers(0, vocab_size, (ROWS, HISTORY)).astype(np.int32)
    history[:, ::2] = rng.integers(0, 5, (ROWS, HISTORY // 2))
    extras = np.zeros((ROWS, layout.width), np.int32)
    for row, (each, own) in enumerate(zip(params, words, strict=True)):
        given = layout.pack(each, own)
        if given is not None:
            extras[row] = given
    return logits, rows, positions, history, jax.tree.map(np.asarray, layout.unpack(jnp.asarray(extras)))


def padded(logits: np.ndarray, shards: int, padding: float) -> np.ndarray:
    return np.pad(logits, ((0, 0), (0, -logits.shape[1] % shards)), constant_values=padding)


@functools.cache
def sampler(variant: Variant, vocab_size: int, shards: int | None, has_processor: bool = True) -> jax.stages.Compiled:
    """Compile `sample` for ROWS rows over some shards; None: without shard_map."""
    num_logprobs = min(7, vocab_size)
    vocabulary = Vocabulary(vocab_size) if shards is None else Vocabulary(vocab_size, over(shards))
    run = partial(
        sample, variant=variant, num_logprobs=num_logprobs, vocabulary=vocabulary, processors=(favour,) * has_processor
    )
    run = jax.jit(run) if shards is None else sharded(run, shards, 5)
    logits, *rest = batch_of(variant, vocab_size, 0)
    # Compiles in half of the time, and runs only a few times.
    return run.lower(padded(logits, shards or 1, 0.0), *rest).compile({"xla_backend_optimization_level": 0})


def over(shards: int) -> Layout:
    return make_layout(jax.devices(), shards)


def sharded(function: Callable, shards: int, arguments: int) -> jax.stages.Wrapped:
    """Map a function over shards: its first argument is split over the vocabulary, its result replicated."""
    layout = over(shards)
    specs = (layout.spec(None, "vocab"), *(layout.spec(),) * (arguments - 1))
    return jax.jit(layout.shard_map(function, specs, layout.spec()))


def assert_same_bits(one: object, other: object) -> None:
    for left, right in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert left.dtype == right.dtype
        np.testing.assert_array_equal(np.asarray(left).view(np.uint8), np.asarray(right).view(np.uint8))


@pytest.mark.ci
@pytest.mark.parametrize("variant", Variant)
def test_shards_do_not_change_a_bit(variant: Variant):
    """97 tokens leave padding on the last shard, with values that would win if they were read."""
    for seed in range(5):
        logits, *rest = batch_of(variant, 97, seed)
        alone = sampler(variant, 97, None)(logits, *rest)
        assert len(set(np.asarray(alone.tokens).tolist())) > 10
        for shards in (2, 4):
            assert_same_bits(sampler(variant, 97, shards)(padded(logits, shards, 1e30), *rest), alone)


@pytest.mark.ci
@pytest.mark.parametrize("padding", [np.nan, np.inf, 0.0])
def test_more_shards_than_some_have_tokens(padding: float):
    """Five tokens on four shards: two, two, one and zero; more top tokens are requested than a shard has."""
    logits, *rest = batch_of(Variant.GREEDY, 5, 3)
    split = sampler(Variant.FILTERED, 5, 4)(padded(logits, 4, padding), *rest)
    assert_same_bits(split, sampler(Variant.FILTERED, 5, None)(logits, *rest))
    assert np.asarray(split.is_finite).all() and sorted(np.asarray(split.top_ids)[0].tolist()) == list(range(5))


@pytest.mark.parametrize(
    "variant", [pytest.param(each, marks=[pytest.mark.ci] * (each is not Variant.FULL)) for each in Variant]
)
def test_what_is_not_finite_on_one_shard_is_known_on_all(variant: Variant):
    logits, *rest = batch_of(variant, 97, 5)
    for row, (token, bad) in enumerate([(0, np.nan), (30, np.inf), (60, -np.inf), (96, np.nan)]):
        logits[row, token] = bad
    sampled = sampler(variant, 97, 4)(padded(logits, 4, np.nan), *rest)
    assert np.asarray(sampled.is_finite).tolist() == [False] * 4 + [True] * (ROWS - 4)
    tokens = np.asarray(sampled.tokens)
    assert ((tokens >= 0) & (tokens < 97)).all()


@pytest.mark.parametrize("width", [1, 5, 127, 128, 129, 1000, 4096])
def test_the_largest_score_is_the_first_among_equals(width: int):
    """In both stages ties give the lower id, and a row of -inf gives a valid id."""
    random = np.random.default_rng(width)
    scores = random.integers(0, 40, (64, width)).astype(np.float32)  # ties in most rows
    scores[::3] = random.standard_normal((len(scores[::3]), width))
    scores[1], scores[2] = -np.inf, 7.0
    tokens, is_finite = jax.jit(Vocabulary(width).argmax)(scores, np.ones(64, np.bool_))
    assert tokens.tolist() == scores.argmax(-1).tolist() and is_finite.all()


def test_ids_are_local_where_they_are_and_dropped_elsewhere():
    layout = over(4)

    def columns(_: jax.Array) -> jax.Array:
        return Vocabulary(6, layout).local(jnp.array([0, 1, 2, 3, 4, 5, 6, 7, 8, -1, 2**31 - 1], jnp.int32), 2)[None]

    run = layout.shard_map(columns, layout.spec("vocab"), layout.spec("vocab"))
    found = np.asarray(jax.jit(run)(np.zeros(4)))
    expected = np.full((4, 11), 2)  # two columns each; the fourth shard holds only padding
    expected[0, :2], expected[1, 2:4], expected[2, 4:6] = (0, 1), (0, 1), (0, 1)
    np.testing.assert_array_equal(found, expected)


# Sums


def test_words_are_the_exact_sum_of_what_they_keep():
    rng = np.random.default_rng(0)
    weights = np.exp(rng.uniform(-30, 0, (3, 4000))).astype(np.float32)
    weights[1], weights[2, 1:] = 1.0, 0.0
    exact = [sum(Fraction(int(Fraction(float(weight)) * 2**36), 2**36) for weight in row) for row in weights]
    sums = np.asarray(jax.jit(words)(weights)).astype(object)
    assert [Fraction(int(a), 2**12) + Fraction(int(b), 2**24) + Fraction(int(c), 2**36) for a, b, c in sums] == exact
    np.testing.assert_array_equal(jax.jit(words)(weights[:, ::-1]), jax.jit(words)(weights))
    numbers = np.asarray(jax.jit(lambda each: from_words(words(each)))(weights))
    np.testing.assert_allclose(numbers[:, 0], [float(total) for total in exact], rtol=2e-7)


@pytest.mark.parametrize("kind", ["flat", "peaked", "spread"])
def test_masses_fill_their_integers_without_overflow(kind: str):
    weights = np.exp(np.random.default_rng(1).uniform(-20, 0, (1, 200_000))).astype(np.float32)
    weights[0, 0] = 1.0
    weights = {"flat": np.ones_like(weights), "peaked": weights**30, "spread": weights}[kind]
    mass = np.asarray(jax.jit(lambda each: masses(each, from_words(words(each))))(weights)).astype(np.int64)
    assert mass.min() >= 0 and 2**29 - 10**5 <= mass.sum() < 2**30 + 10**5
    share = weights.astype(np.float64) / weights.sum(dtype=np.float64)
    assert np.abs(mass / mass.sum() - share).max() < 2.0**-28
    assert np.abs(np.cumsum(mass[0]) / mass.sum() - np.cumsum(share[0])).max() < 1e-5


# Collectives

_SHAPE = re.compile(r"= (.*?) (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)(?:-start)?\(")


def collectives(compiled: jax.stages.Compiled) -> list[tuple[str, int]]:
    """List the collectives of a program with the numbers that each sends to a shard."""
    found = []
    for shapes, kind in _SHAPE.findall(compiled.as_text() or ""):
        sizes = [dims.split(",") if dims else [] for dims in re.findall(r"\[([\d,]*)\]", shapes)]
        found.append((kind, sum(math.prod(map(int, size)) for size in sizes)))
    return found


@pytest.mark.parametrize(
    ("variant", "expected"),
    [
        pytest.param(Variant.GREEDY, {"all-gather": 1}, marks=pytest.mark.ci),
        pytest.param(Variant.RANDOM, {"all-gather": 1}, marks=pytest.mark.ci),
        # the searches are loops on a CPU: one all-reduce is written for eight
        pytest.param(Variant.FILTERED, {"all-gather": 3, "all-reduce": 6}, marks=pytest.mark.ci),
        (Variant.FULL, {"all-gather": 3, "all-reduce": 6}),
    ],
)
def test_collectives_are_few_and_do_not_grow_with_the_vocabulary(variant: Variant, expected: dict[str, int]):
    found = collectives(sampler(variant, 97, 4, has_processor=False))
    assert Counter(kind for kind, _ in found) == expected
    # A row's 7 likeliest tokens of 4 shards, their ids and the largest; the 97 logits of a row are never sent. The
    # widest variant adds the logits of ids that requests name, which are zero on all shards but one.
    assert max(size for _, size in found if size <= ROWS * 97) <= ROWS * 4 * (1 + 2 * 7) < ROWS * 97
    assert max(size for _, size in found) <= ROWS * (4 + MAX_REPORTED_TOKENS)


@pytest.mark.ci
@pytest.mark.parametrize("variant", Variant)
def test_one_device_has_no_collectives(variant: Variant):
    given = batch_of(variant, 97, 0)
    run = partial(sample, variant=variant, num_logprobs=7, vocabulary=Vocabulary(97, over(1)))
    lowered = sharded(run, 1, len(given)).lower(*given).as_text()
    assert "stablehlo.reduce" in lowered and not re.search(r"all_reduce|all_gather|collective", lowered)


def executed(text: str, operation: str) -> int:
    """Count how often a lowered program runs an operation, including calls of functions that JAX writes once."""
    functions = {re.findall(r"@(\w+)", part)[0]: part for part in text.split("func.func ")[1:]}

    def within(name: str) -> int:
        calls = re.findall(r"\bcall @(\w+)", functions[name])
        return functions[name].count(f'"stablehlo.{operation}"') + sum(map(within, calls))

    return within("main")


def test_a_search_on_a_gpu_is_eight_all_reduces():
    """Unrolled for CUDA graphs: 2 searches of 8, and 4 others."""
    given = batch_of(Variant.FILTERED, 1024, 0)
    run = partial(sample, variant=Variant.FILTERED, num_logprobs=5, vocabulary=Vocabulary(1024, over(4)))
    lowered = sharded(run, 4, len(given)).trace(*given).lower(lowering_platforms=("cuda",)).as_text()
    assert (executed(lowered, "all_reduce"), executed(lowered, "all_gather")) == (20, 3)
    assert "stablehlo.while" not in lowered


def test_log_probabilities_of_given_tokens():
    rng = np.random.default_rng(2)
    logits = rng.normal(0, 3, (8, 1024)).astype(np.float32)
    tokens = rng.integers(0, 1024, 8).astype(np.int32)
    run = partial(logprobs_of, num_logprobs=4, vocabulary=Vocabulary(1024, over(4)))
    asked = np.tile(np.arange(0, 1024, 300, dtype=np.int32), (8, 1))
    logprob, rank, top, ids, reported = (np.asarray(each) for each in sharded(run, 4, 3)(logits, tokens, asked))
    exact = logits.astype(np.float64) - np.log(np.exp(logits.astype(np.float64)).sum(-1, keepdims=True))
    np.testing.assert_allclose(logprob, exact[np.arange(8), tokens], atol=2e-6)
    assert rank.tolist() == [1 + int((row > row[token]).sum()) for row, token in zip(exact, tokens, strict=True)]
    np.testing.assert_array_equal(ids, np.argsort(-logits, axis=-1, kind="stable")[:, :4])
    np.testing.assert_allclose(top, np.take_along_axis(exact, ids, axis=-1), atol=2e-6)
    np.testing.assert_allclose(reported, exact[:, ::300], atol=2e-6)
    layout = over(4)
    split = layout.spec(None, "vocab")
    run = partial(all_logprobs, vocabulary=Vocabulary(1024, layout))
    run = jax.jit(layout.shard_map(run, split, split))
    np.testing.assert_allclose(run(logits), exact, atol=2e-6)


def test_a_vocabulary_whose_sums_would_overflow_is_refused_before_anything_is_loaded(tmp_path: Path):
    config, file = EngineConfig(model=str(tmp_path)), tmp_path / "config.json"
    file.write_text(json.dumps({**CONFIG, "vocab_size": MOST_TOKENS}))
    assert prepare(config).spec.vocab_size == MOST_TOKENS
    file.write_text(json.dumps({**CONFIG, "vocab_size": MOST_TOKENS + 1}))
    with pytest.raises(UserError, match="vocab_size must be at most 1048575, got 1048576"):
        prepare(config)
