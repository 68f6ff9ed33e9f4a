"""`pallas_kernels.sample`: its reference, which sorts, against the engine's sampler, which searches."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from jaxllm.sampling import sampler
from jaxllm.sampling.sampler import Extras, Variant
from jaxllm.sampling.vocab_parallel import Vocabulary
from jaxllm.sampling_params import SamplingParams
from pallas_kernels import Choice, Site
from tests.support.draws import rows_of

NAMES = ("top_k", "top_p", "min_p")
FILTERS = [chosen for count in range(4) for chosen in itertools.combinations(NAMES, count)]
jitted = jax.jit(pallas_kernels.sample, static_argnames="implementation")


@dataclass
class Rows:
    """A batch with all filters that its rows may have."""

    logits: np.ndarray
    temperature: np.ndarray | None
    keys: np.ndarray
    positions: np.ndarray
    top_k: np.ndarray
    top_p: np.ndarray
    min_p: np.ndarray

    def sample(self, filters: tuple[str, ...], implementation: Any) -> tuple[jax.Array, jax.Array]:
        own = (self.temperature, self.keys, self.positions) if self.temperature is not None else ()
        given = {name: jnp.asarray(getattr(self, name)) for name in filters}
        return jitted(*map(jnp.asarray, (self.logits, *own)), **given, implementation=implementation)

    def at(self, rows: slice) -> Rows:
        return replace(self, **{name: array[rows] for name, array in vars(self).items()})


def random_rows(count: int, size: int, kind: str, seed: int) -> Rows:
    """Make a batch with every filter or a disabled one in each row; a third of the rows are greedy."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 3, (count, size)).astype(np.float32)
    if kind == "tied":
        logits = np.round(logits / 2) + rng.choice([0.0, -0.0], logits.shape).astype(np.float32)
    elif kind == "flat":
        logits[:] = rng.normal(0, 3, (count, 1))
    elif kind == "huge":
        logits *= 1e4
    elif kind == "banned":
        logits[rng.random(logits.shape) < 0.6] = -np.inf
        logits[:, rng.integers(size)] = 1.0
        logits[-1:] = -np.inf if count > 1 else logits[-1:]
    elif kind == "peaked":
        logits[np.arange(count)[:, None], rng.integers(0, size, (count, 20))] += 6 + rng.exponential(5, (count, 20))
    elif kind == "rounded":
        logits = np.asarray(jnp.asarray(logits).astype(jnp.bfloat16).astype(jnp.float32))
    elif kind == "close":
        logits /= 300
    elif kind == "broken":
        for row in range(0, count, 2):
            logits[row, rng.integers(size)] = rng.choice([np.nan, np.inf, -np.inf])
        logits[-1] = np.nan
    return Rows(
        logits=logits,
        temperature=rng.choice([0.0, 0.6, 1.0, 3.0], count).astype(np.float32),
        keys=rng.integers(0, 2**32, (count, 2), dtype=np.uint32),
        positions=rng.integers(0, 2**31 - 1, count).astype(np.int32),
        top_k=rng.choice([0, 1, 3, 40, size, size + 9], count).astype(np.int32),
        top_p=rng.choice([1e-30, 0.3, 0.9, 0.999, 1.0], count).astype(np.float32),
        min_p=rng.choice([0.0, 1e-6, 0.05, 1.0], count).astype(np.float32),
    )


@functools.cache
def engine(size: int, variant: Variant, kernel: Choice | None) -> Any:
    vocabulary = Vocabulary(size)
    return jax.jit(partial(sampler.sample, variant=variant, num_logprobs=1, vocabulary=vocabulary, kernel=kernel))


def by_engine(rows: Rows, filters: tuple[str, ...], variant: Variant, kernel: Choice | None = None) -> sampler.Sampled:
    """Sample with `jaxllm.sampling.sampler`, which keeps its filters in a state."""
    count, size = rows.logits.shape
    temperature = np.zeros(count, np.float32) if rows.temperature is None else rows.temperature
    given = {name: getattr(rows, name) for name in filters} | {"temperature": temperature, "key": rows.keys}
    state = rows_of([SamplingParams()] * count, vocab_size=size).replace(**given)
    extras = Extras(size)
    unpacked = extras.unpack(jnp.zeros((count, extras.width), jnp.int32))
    history = np.zeros((count, 4), np.int32)
    return engine(size, variant, kernel)(rows.logits, state, rows.positions, history, unpacked)


@pytest.mark.ci
@pytest.mark.parametrize("size", [5, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["spread", "tied", "flat", "huge", "broken"])
def test_the_reference_chooses_what_the_engine_does(size: int, kind: str):
    for number, filters in enumerate([None, *FILTERS]):
        rows = random_rows(100, size, kind, number)
        variant = Variant.FILTERED if filters else Variant.RANDOM
        if filters is None:
            rows.temperature, variant = None, Variant.GREEDY
        tokens, is_finite = map(np.asarray, rows.sample(filters or (), "xla"))
        expected = by_engine(rows, filters or (), variant)
        np.testing.assert_array_equal(is_finite, expected.is_finite)
        np.testing.assert_array_equal(tokens[is_finite], np.asarray(expected.tokens)[is_finite])


@pytest.mark.ci
@pytest.mark.parametrize("variant", Variant)
def test_a_kernel_takes_the_place_of_the_engines_own_choice(variant: Variant, monkeypatch: pytest.MonkeyPatch):
    """The reference replaces a kernel that runs on GPUs only; its arguments and all else stay the same."""
    real, seen = pallas_kernels.sample, []

    def stand_in(*arrays: Any, implementation: Choice) -> Any:
        seen.append((implementation, [array is not None for array in arrays]))
        return real(*arrays, implementation="xla")

    monkeypatch.setattr(pallas_kernels, "sample", stand_in)
    rows = random_rows(40, 24, "tied", 3)
    rows.logits[7, 3] = np.nan
    if variant is Variant.GREEDY:
        rows.temperature = None
    filters = NAMES if variant in (Variant.FILTERED, Variant.FULL) else ()
    kernel = Choice("triton", 90)
    expected = by_engine(rows, filters, variant)
    found = by_engine(rows, filters, variant, kernel)
    np.testing.assert_array_equal(found.is_finite, expected.is_finite)
    assert not found.is_finite[7] and np.asarray(found.is_finite).sum() == 39
    fine = np.asarray(found.is_finite)
    np.testing.assert_array_equal(np.asarray(found.tokens)[fine], np.asarray(expected.tokens)[fine])
    has_noise, has_filters = variant is not Variant.GREEDY, bool(filters)
    assert seen == [(kernel, [True, *[has_noise] * 3, *[has_filters] * 3])]


def test_what_does_not_go_together_is_said():
    rows, logits = jnp.ones(2), jnp.zeros((2, 5))
    with pytest.raises(ValueError, match="temperature, keys and positions together"):
        pallas_kernels.sample(logits, rows)
    with pytest.raises(ValueError, match="change nothing without a temperature"):
        pallas_kernels.sample(logits, top_p=rows)
    with pytest.raises(ValueError, match="must be float32, not bfloat16"):
        pallas_kernels.sample(logits.astype(jnp.bfloat16))
    with pytest.raises(ValueError, match="at most 1048575 tokens, not 1048576"):
        pallas_kernels.sample(jnp.zeros((1, 1 << 20)))
    assert pallas_kernels.resolve("sample", Site("cpu")).name == "xla"
    tokens, is_finite = pallas_kernels.sample(logits)
    assert tokens.tolist() == [0, 0] and is_finite.all()
