"""Decode rows' keys divided among programs: each key once, in even pieces, or by the row's length alone."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention.division import Pieces, by_own_length, evenly

VISITED, LEAST = 32, 256


def check(pieces: Pieces, lengths: np.ndarray, window: int | None) -> Pieces:
    """Return the pieces in NumPy; assert that they cover each row's keys once, in order, in whole visits."""
    found = Pieces(*map(np.asarray, pieces))
    assert all(one.dtype == np.int32 for one in found)
    numbers = np.flatnonzero(found.row >= 0)
    np.testing.assert_array_equal(numbers, np.arange(found.count.sum()))
    np.testing.assert_array_equal(found.row[numbers], np.repeat(np.arange(len(lengths)), found.count))
    for row, length in enumerate(lengths):
        own = slice(found.first[row], found.first[row] + found.count[row])
        begin, end = found.begin[own], found.end[own]
        first = 0 if window is None else max(length - window, 0)
        assert begin[0] == first and end[-1] == length
        np.testing.assert_array_equal(begin[1:], end[:-1])
        assert ((begin - first) % VISITED == 0).all() and (len(begin) == 1 or (end > begin).all())
    return found


@pytest.mark.parametrize("window", [None, 100, 4096])
@pytest.mark.parametrize("seed", range(8))
def test_each_key_is_in_one_piece(seed, window):
    random = np.random.default_rng(seed)
    rows, programs = int(random.choice([1, 2, 33, 64, 256])), int(random.choice([1, 16, 66, 264]))
    lengths = (random.pareto(0.7, rows) * 100).clip(0, 40000).astype(np.int32)
    lengths[random.random(rows) < 0.2] = 0
    found = check(evenly(jnp.asarray(lengths), 40000, window, VISITED, programs, LEAST), lengths, window)
    keys = lengths if window is None else np.minimum(lengths, window)
    even = -(-int(keys.sum()) // programs)
    most = max(even + even // 16, LEAST)
    assert (found.end - found.begin).max() < most + VISITED
    found = check(by_own_length(jnp.asarray(lengths), window, VISITED, 8, LEAST), lengths, window)
    assert found.count.max() <= 8


def test_one_long_row_among_short_ones_keeps_no_program_longer_than_others():
    """66 programs per 8 heads run at once on an H200; undivided, the long row was 32,768 keys for one of them."""
    lengths = np.asarray([512] * 40 + [32768] + [512] * 23, np.int32)
    found = check(evenly(jnp.asarray(lengths), 32768, None, VISITED, 66, LEAST), lengths, None)
    assert (found.end - found.begin).max() <= 1056 and found.count[40] == 32
    assert (found.count[lengths == 512] == 1).all()
    equal = np.full(64, 1024, np.int32)
    assert (check(evenly(jnp.asarray(equal), 1024, None, VISITED, 66, LEAST), equal, None).count == 1).all()


def test_by_own_length_neighbours_change_nothing():
    lengths = np.asarray([700, 3000, 0, 9000], np.int32)
    alone = check(by_own_length(jnp.asarray(lengths[1:2]), None, VISITED, 8, LEAST), lengths[1:2], None)
    among = check(by_own_length(jnp.asarray(lengths), None, VISITED, 8, LEAST), lengths, None)
    own = among.row == 1
    np.testing.assert_array_equal(among.begin[own], alone.begin[: alone.count[0]])
    np.testing.assert_array_equal(among.end[own], alone.end[: alone.count[0]])


def test_no_more_pieces_are_provided_for_than_there_can_be():
    lengths = jnp.asarray([512] * 4, jnp.int32)
    for context, window, count in ((256, None, 4), (512, None, 8), (32768, None, 70), (32768, 224, 4)):
        assert len(evenly(lengths, context, window, VISITED, 66, LEAST).row) == count
