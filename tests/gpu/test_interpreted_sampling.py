"""The Triton sampling kernels, in Triton's interpreter, against the reference, which sorts."""

from __future__ import annotations

import os

import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels import Choice, Site, tuning
from tests.kernels.test_sample import FILTERS, Rows, random_rows

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1", allow_module_level=True)
pytest.importorskip("triton")

from pallas_kernels.sampling import triton_filters
from tests.gpu import traces

tl = pytest.importorskip("triton.language")
TRITON = Choice("triton", 90)


def assert_like_the_reference(rows: Rows, filters: tuple[str, ...]) -> np.ndarray:
    tokens, is_finite = (np.asarray(each) for each in rows.sample(filters, TRITON))
    expected, are_finite = (np.asarray(each) for each in rows.sample(filters, "xla"))
    np.testing.assert_array_equal(is_finite, are_finite)
    means = ~np.isnan(rows.logits).any(-1) & ~np.isposinf(rows.logits).any(-1)
    np.testing.assert_array_equal(tokens[means], expected[means])
    assert ((tokens >= 0) & (tokens < rows.logits.shape[1])).all()
    return tokens


OTHER_SIZES = ((9, 5), (1, 128), (5, 4099))


@pytest.mark.parametrize(
    ("kind", "count", "size"),
    [(kind, 9, 1000) for kind in ("spread", "tied", "flat", "huge", "banned", "broken")]
    + [("spread", *size) for size in OTHER_SIZES]
    + [pytest.param(kind, *size, marks=pytest.mark.slow) for kind in ("tied", "broken") for size in OTHER_SIZES],
)
def test_tokens_are_those_of_the_reference(kind: str, count: int, size: int):
    for number, filters in enumerate([None, *FILTERS]):
        rows = random_rows(count, size, kind, 100 * size + number)
        if filters is None:
            rows.temperature = None
        tokens = assert_like_the_reference(rows, filters or ())
        if size >= 1000 and kind in ("spread", "tied", "huge", "banned"):
            assert len(set(tokens.tolist())) > 1


def test_a_row_does_not_depend_on_its_neighbours():
    together = random_rows(9, 4099, "spread", 5)
    tokens = np.asarray(together.sample(FILTERS[-1], TRITON)[0])
    for row in (0, 4, 8):
        alone = together.at(slice(row, row + 1))
        assert np.asarray(alone.sample(FILTERS[-1], TRITON)[0]) == tokens[row : row + 1]


def test_large_vocabularies_are_searched_in_several_visits():
    """Flat enough that top_p keeps thousands, none of which may be lost between visits."""
    rows = random_rows(4, 30_000, "spread", 8)
    rows.logits *= 0.2
    rows.temperature = np.ones(4, np.float32)
    rows.top_k[:] = 0, 20_000, 20_000, 0
    rows.top_p[:] = 0.9, 0.9, 1.0, 0.9999
    rows.min_p[:] = 0, 0, 0, 0.1
    assert_like_the_reference(rows, FILTERS[-1])


@pytest.mark.parametrize("size", [2500, pytest.param(9000, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "kind", ["rounded", "close", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("peaked", "tied"))]
)
def test_limits_are_found_to_the_last_token(kind: str, size: int, monkeypatch: pytest.MonkeyPatch):
    """With any bins: few bins leave long lists, many hold a token or two. All rows are random."""
    rows = random_rows(8, size, kind, size)
    rows.temperature = np.random.default_rng(size).choice([0.3, 1.0, 3.0], 8).astype(np.float32)
    rows.top_k = np.array([0, 0, 0, 40, size // 2, size - 1, 40, 300], np.int32)
    rows.top_p = np.array([0.0, 0.95, np.nextafter(np.float32(1), np.float32(0)), 1, 0.9, 0.999, 0.5, 0.3], np.float32)
    for bins in (4, tuning.BINS):
        monkeypatch.setattr(tuning, "BINS", bins)
        assert_like_the_reference(rows, FILTERS[-1] if size > 2500 else ("top_k", "top_p"))


def test_programs_run_in_any_order(monkeypatch: pytest.MonkeyPatch):
    """Sums in bins and the list of undecided tokens are made by programs that do not wait for each other."""
    monkeypatch.setattr(tuning, "BINS", 8)
    rows = random_rows(4, 5000, "rounded", 1)
    rows.temperature = np.ones(4, np.float32)
    rows.top_k[:] = 0, 0, 100, 4000
    rows.top_p[:] = 0.5, 0.9, 0.9, 0.99
    with traces.recorded(seed=1) as launches:
        assert_like_the_reference(rows, ("top_k", "top_p"))
    assert {launch.kernel: launch.programs for launch in launches}["pick"] == 4 * 3


def test_bins_that_do_not_reach_far_enough_are_seen(monkeypatch: pytest.MonkeyPatch):
    rows = random_rows(8, 1000, "spread", 3)
    rows.temperature = np.full(8, 3, np.float32)
    rows.top_k[:], rows.top_p[:] = 0, 0.999
    assert_like_the_reference(rows, ("top_p",))
    monkeypatch.setattr(triton_filters, "FARTHEST", tl.constexpr(1.0))
    with pytest.raises(AssertionError):
        assert_like_the_reference(rows, ("top_p",))


def test_a_vocabulary_on_several_devices_is_refused():
    assert pallas_kernels.resolve("sample", Site("gpu", 90)).name == "triton"
    assert pallas_kernels.resolve("sample", Site("gpu", 90, shards=2)).name == "xla"
    with pytest.raises(ValueError, match="sample=triton: the vocabulary is divided among 2 devices"):
        pallas_kernels.resolve("sample", Site("gpu", 90, shards=2), "triton")


def test_noise_is_that_of_the_reference():
    """Keys and positions of all 32 bits: among equal logits the largest noise decides."""
    rng = np.random.default_rng(0)
    keys = rng.integers(0, 2**32, (9, 2), dtype=np.uint32)
    keys[0], keys[1] = 2**32 - 1, 0
    positions = rng.integers(0, 2**31 - 1, 9).astype(np.int32)
    arrays = (jnp.zeros((9, 3000)), jnp.ones(9), jnp.asarray(keys), jnp.asarray(positions))
    found, expected = (pallas_kernels.sample(*arrays, implementation=one)[0] for one in (TRITON, "xla"))
    np.testing.assert_array_equal(found, expected)
