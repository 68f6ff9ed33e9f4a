"""Choosing tokens on NVIDIA GPUs, in Triton's language: two kernels, and no sort.

`survey` divides each row among programs: the likeliest token of a piece, or the largest sum with noise. `finish` has a
program a row, brings the pieces together, and does the whole of what rows with filters ask for. A filter keeps the
tokens from some logit up, so it is a search for that logit; bounds that are known beforehand leave few tokens to look
at, which are listed once, and the noise of those alone is made. Two launches, because a decode step of a small model
takes as long as launching its kernels does.

Integers, and so the order of tokens, counts and sums, are exact, as in the reference. Logarithms are CUDA's own,
exponentials, of which masses are made, the hardware's: last bits decide only between what is as good as equal.
Letters: V vocabulary, G groups of columns whose maximum is known, BN columns visited at once, BL of those listed.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jax import Array

from pallas_kernels import triton_bridge, tuning
from pallas_kernels.choice import Site
from pallas_kernels.triton_bridge import call

_IMPOSSIBLE = tl.constexpr(float("-inf"))
_LEAST_INT = tl.constexpr(-(2**31))
_MOST_INT = tl.constexpr(2**31 - 1)


def refusal(operation: str, site: Site) -> str | None:
    """Say why this cannot choose there; None where it can."""
    if site.shards > 1:
        return f"the vocabulary is divided among {site.shards} devices"
    return triton_bridge.refusal(site)


@triton.jit
def _mixed(x, y, TURN: tl.constexpr):
    """Do one round of threefry."""
    x += y
    return x, x ^ ((y << TURN) | (y >> (32 - TURN)))


@triton.jit
def _four(x, y, FIRST: tl.constexpr, SECOND: tl.constexpr, THIRD: tl.constexpr, FOURTH: tl.constexpr):
    """Do four rounds, between two of which the key is added."""
    x, y = _mixed(x, y, FIRST)
    x, y = _mixed(x, y, SECOND)
    x, y = _mixed(x, y, THIRD)
    return _mixed(x, y, FOURTH)


@triton.jit
def _threefry(key, other, x, y):
    """Encrypt words x and y: threefry2x32 in 20 rounds (Salmon et al. 2011), as JAX has it."""
    last = key ^ other ^ 0x1BD11BDA
    x += key
    y += other
    x, y = _four(x, y, 13, 15, 26, 6)
    x += other
    y += last + 1
    x, y = _four(x, y, 17, 29, 16, 24)
    x += last
    y += key + 2
    x, y = _four(x, y, 13, 15, 26, 6)
    x += key
    y += other + 3
    x, y = _four(x, y, 17, 29, 16, 24)
    x += other
    y += last + 4
    x, y = _four(x, y, 13, 15, 26, 6)
    return x + last, y + key + 5


@triton.jit
def _gumbel(keys, positions, row, ids):
    """Draw the noise of a row's tokens, see `xla_sampling.gumbel`."""
    position = tl.load(positions + row).to(tl.uint32)
    zero = position ^ position
    key, other = _threefry(tl.load(keys + 2 * row), tl.load(keys + 2 * row + 1), zero, position)
    counters = ids.to(tl.uint32)
    high, low = _threefry(key, other, counters ^ counters, counters)
    mantissa = ((high ^ low) >> 9) | 0x3F800000
    uniform = mantissa.to(tl.float32, bitcast=True) - 1.0
    return -tl.log(-tl.log(tl.maximum(uniform, 1.1754943508222875e-38)))


@triton.jit
def _ordered(x):
    """Map floats to int32 in the same order, equal floats to equal integers."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _scaled(logits, ids, mask, temperature):
    """Read a row's logits at ids and divide them; impossible where there is NaN, or no token."""
    x = tl.load(logits + ids, mask=mask, other=_IMPOSSIBLE)
    return tl.div_rn(tl.where(x == x, x, _IMPOSSIBLE), temperature)


@triton.jit
def _has_filters(temperature, top_k, top_p, min_p, row, V: tl.constexpr):
    count = tl.load(top_k + row)
    is_limited = ((count > 0) & (count < V)) | (tl.load(top_p + row) < 1.0) | (tl.load(min_p + row) > 0.0)
    return is_limited & (tl.load(temperature + row) > 0.0)


@triton.jit
def survey(
    logits,
    temperature,
    keys,
    positions,
    top_k,
    top_p,
    min_p,
    best,
    ids,
    is_finite,
    tops,
    V: tl.constexpr,
    BN: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Look at BN columns of a row: the best score, its id, whether all are finite; grid (rows, pieces).

    Where there are filters: the largest logits of GROUP columns each, too; the best score is of rows without any.
    """
    row = tl.program_id(0)
    piece = tl.program_id(1)
    part = row * tl.num_programs(1) + piece
    columns = piece * BN + tl.arange(0, BN)
    is_token = columns < V
    x = tl.load(logits + row.to(tl.int64) * V + columns, mask=is_token, other=0.0)
    tl.store(is_finite + part, tl.min((tl.abs(x) < float("inf")).to(tl.int32), 0))
    scores = tl.where(is_token & (x == x), x, _IMPOSSIBLE)
    if temperature is not None:
        warmth = tl.load(temperature + row)
        is_noisy = warmth > 0.0
        if top_k is not None:
            groups = tl.max(tl.reshape(scores, (BN // GROUP, GROUP)), 1)
            tl.store(tops + part.to(tl.int64) * (BN // GROUP) + tl.arange(0, BN // GROUP), groups)
            is_noisy = is_noisy & (_has_filters(temperature, top_k, top_p, min_p, row, V) == 0)
        if is_noisy:
            scores = tl.div_rn(scores, warmth) + _gumbel(keys, positions, row, columns)
    highest = tl.max(scores, 0)
    tl.store(best + part, highest)
    tl.store(ids + part, tl.min(tl.where(scores == highest, columns, _MOST_INT), 0))


@triton.jit
def finish(
    best,
    ids,
    are_finite,
    tops,
    logits,
    temperature,
    keys,
    positions,
    top_k,
    top_p,
    min_p,
    tokens,
    is_finite,
    listed,
    V: tl.constexpr,
    PIECES: tl.constexpr,
    PP: tl.constexpr,
    G: tl.constexpr,
    GP: tl.constexpr,
    BN: tl.constexpr,
    BL: tl.constexpr,
):
    """Bring the pieces of a row together; grid (rows). PP and GP are PIECES and G, padded to powers of two."""
    row = tl.program_id(0)
    pieces = tl.arange(0, PP)
    is_there = pieces < PIECES
    part = row * PIECES + pieces
    tl.store(is_finite + row, tl.min(tl.load(are_finite + part, mask=is_there, other=1), 0))
    scores = tl.load(best + part, mask=is_there, other=_IMPOSSIBLE)
    found = tl.load(ids + part, mask=is_there, other=_MOST_INT)
    token = tl.min(tl.where(scores == tl.max(scores, 0), found, _MOST_INT), 0)
    if top_k is not None:
        if _has_filters(temperature, top_k, top_p, min_p, row, V):
            at = row.to(tl.int64)
            token = _filtered(
                tops + at * G, logits + at * V, temperature, keys, positions, top_k, top_p, min_p, listed + at * V, row,
                V, G, GP, BN, BL,
            )  # fmt: skip
    tl.store(tokens + row, token)


@triton.jit
def _filtered(
    tops,
    logits,
    temperature,
    keys,
    positions,
    top_k,
    top_p,
    min_p,
    listed,
    row,
    V: tl.constexpr,
    G: tl.constexpr,
    GP: tl.constexpr,
    BN: tl.constexpr,
    BL: tl.constexpr,
):
    """Choose the token of a row with filters; `tops`, `logits` and `listed` are the row's own."""
    warmth = tl.load(temperature + row)
    count = tl.load(top_k + row)
    share = tl.load(top_p + row)
    least = tl.load(min_p + row)
    is_counted = (count > 0) & (count < V)
    is_shared = share < 1.0
    groups = tl.arange(0, GP)
    maxima = _scaled(tops, groups, groups < G, warmth)
    highest = tl.max(maxima, 0)
    end = _ordered(highest).to(tl.int64) + 1

    # The top_k-th largest of the groups' maxima is no larger than that of all tokens.
    low = tl.full((), _LEAST_INT, tl.int64)
    if is_counted & (count <= G):
        ranks = _ordered(maxima)
        high = end
        while high - low > 1:
            middle = (low + high) >> 1
            holds = tl.sum((ranks >= middle.to(tl.int32)).to(tl.int32), 0) >= count
            low = tl.where(holds, middle, low)
            high = tl.where(holds, high, middle)
    # Tokens lighter than this have a quarter of what top_p leaves out at most, all together, or masses of 0.
    floor = least
    if is_shared & (is_counted == 0):
        shares = tl.exp(maxima - highest)
        known = tl.sum(tl.where(shares >= least, shares, 0.0), 0)
        floor = tl.maximum(least, (1.0 - share) * known * (1.0 / (8 * V)))

    num_listed = 0
    lowest = tl.full((BN,), _MOST_INT, tl.int32)
    first_words = tl.zeros((BN,), tl.int32)
    second_words = tl.zeros((BN,), tl.int32)
    third_words = tl.zeros((BN,), tl.int32)
    for at in range(0, V, BN):
        columns = at + tl.arange(0, BN)
        x = _scaled(logits, columns, columns < V, warmth)
        order = _ordered(x)
        weights = tl.exp(x - highest)
        is_listed = (columns < V) & (weights >= floor) & (order >= low)
        one = is_listed.to(tl.int32)
        tl.store(listed + num_listed + tl.cumsum(one, 0) - one, columns, mask=is_listed)
        num_listed += tl.sum(one, 0)
        lowest = tl.minimum(lowest, tl.where(is_listed, order, _MOST_INT))
        # As `xla_sampling.words` adds weights up; a lane has less than 2**31.
        weights *= 4096.0
        whole = tl.floor(weights)
        first_words += whole.to(tl.int32)
        weights = (weights - whole) * 4096.0
        whole = tl.floor(weights)
        second_words += whole.to(tl.int32)
        third_words += ((weights - whole) * 4096.0).to(tl.int32)
    tl.debug_barrier()  # the list is read by other threads than wrote it

    bound = tl.minimum(tl.min(lowest, 0).to(tl.int64), end - 1)
    if is_counted:
        wanted = count.to(tl.float32)
        bound = _searched(logits, listed, num_listed, warmth, highest, bound, end, wanted, 0.0, False, BL)
    if is_shared:
        first = tl.sum(first_words.to(tl.int64), 0).to(tl.float32)
        second = tl.sum(second_words.to(tl.int64), 0).to(tl.float32)
        third = tl.sum(third_words.to(tl.int64), 0).to(tl.float32)
        total = (first + (second + third * (1.0 / 4096)) * (1.0 / 4096)) * (1.0 / 4096)
        # Of `xla_sampling.masses`: the power of two that brings the total below 2**30.
        scale = ((2 * 127 + 29 - (total.to(tl.int32, bitcast=True) >> 23)) << 23).to(tl.float32, bitcast=True)
        # What top_k leaves is in the list; without it the tokens that are not listed have some mass, too.
        num_seen = tl.where(is_counted, num_listed, V)
        sums = tl.zeros((BN,), tl.int32)
        for at in range(0, num_seen, BN):
            places = at + tl.arange(0, BN)
            is_there = places < num_seen
            columns = tl.load(listed + places, mask=is_there & is_counted, other=0)
            columns = tl.where(is_counted, columns, places)
            x = _scaled(logits, columns, is_there, warmth)
            weights = tl.exp(x - highest)
            is_kept = is_there & (weights >= least) & ((_ordered(x) >= bound) | (is_counted == 0))
            sums += tl.where(is_kept, _masses(weights, scale), 0)
        wanted = share * tl.sum(sums, 0).to(tl.float32)
        bound = _searched(logits, listed, num_listed, warmth, highest, bound, end, wanted, scale, True, BL)

    best = tl.full((BN,), _IMPOSSIBLE, tl.float32)
    ids = tl.full((BN,), _MOST_INT, tl.int32)
    for at in range(0, num_listed, BN):
        places = at + tl.arange(0, BN)
        is_there = places < num_listed
        columns = tl.load(listed + places, mask=is_there, other=0)
        x = _scaled(logits, columns, is_there, warmth)
        scores = tl.where(_ordered(x) >= bound, x + _gumbel(keys, positions, row, columns), _IMPOSSIBLE)
        is_better = scores > best  # ids rise along the list
        best = tl.where(is_better, scores, best)
        ids = tl.where(is_better, columns, ids)
    token = tl.min(tl.where(best == tl.max(best, 0), ids, _MOST_INT), 0)
    return tl.where(token < V, token, 0)  # nothing is kept where nothing is finite


@triton.jit
def _searched(
    logits,
    listed,
    num_listed,
    temperature,
    highest,
    low,
    high,
    wanted,
    scale,
    BY_MASS: tl.constexpr,
    BL: tl.constexpr,
):
    """Find the largest bound from `low` on, below `high`, with so much above it as is `wanted`: tokens, or mass.

    That of `low` is known to be enough, that of `high` not to be. 15 bounds at a time, evenly spaced: 8 turns at most.
    """
    while high - low > 1:
        step = (high - low + 15) >> 4
        tried = tl.minimum(low + step * tl.arange(0, 16).to(tl.int64), high).to(tl.int32)
        measured = tl.zeros((16,), tl.int32)
        for at in range(0, num_listed, BL):
            places = at + tl.arange(0, BL)
            is_there = places < num_listed
            x = _scaled(logits, tl.load(listed + places, mask=is_there, other=0), is_there, temperature)
            if BY_MASS:
                amounts = _masses(tl.exp(x - highest), scale)
            else:
                amounts = is_there.to(tl.int32)
            is_above = is_there[:, None] & (_ordered(x)[:, None] >= tried[None, :])
            measured += tl.sum(tl.where(is_above, amounts[:, None], 0), 0)
        # The first of them is `low`, whatever rounding has made of it.
        enough = tl.maximum(tl.sum((measured.to(tl.float32) >= wanted).to(tl.int32), 0) - 1, 0).to(tl.int64)
        low += enough * step
        high = tl.minimum(high, low + step)
    return low


@triton.jit
def _masses(weights, scale):
    return (weights * scale + 0.5).to(tl.int32)


def sample(
    logits: Array,
    temperature: Array | None,
    keys: Array | None,
    positions: Array | None,
    top_k: Array | None,
    top_p: Array | None,
    min_p: Array | None,
    *,
    capability: int | None,
) -> tuple[Array, Array]:
    """See `pallas_kernels.sample`."""
    rows, size = logits.shape
    has_filters = any(one is not None for one in (top_k, top_p, min_p))
    if has_filters:
        top_k = jnp.zeros(rows, jnp.int32) if top_k is None else top_k
        top_p = jnp.ones(rows, jnp.float32) if top_p is None else top_p
        min_p = jnp.zeros(rows, jnp.float32) if min_p is None else min_p
    own = (temperature, keys, positions, top_k, top_p, min_p)
    pieces = -(-size // tuning.SURVEYED)
    groups = pieces * (tuning.SURVEYED // tuning.GROUPED)
    outputs = [jax.ShapeDtypeStruct((rows, pieces), dtype) for dtype in (jnp.float32, jnp.int32, jnp.int32)]
    outputs += [jax.ShapeDtypeStruct((rows, groups), jnp.float32)] * has_filters
    best, ids, are_finite, *tops = call(
        survey,
        (logits, *own),
        outputs,
        (rows, pieces),
        tuning.SURVEY,
        capability,
        **({} if has_filters else {"tops": None}),
        V=size,
        BN=tuning.SURVEYED,
        GROUP=tuning.GROUPED,
    )
    outputs = [jax.ShapeDtypeStruct((rows,), jnp.int32)] * 2
    outputs += [jax.ShapeDtypeStruct((rows, size), jnp.int32)] * has_filters
    tokens, is_finite, *_ = call(
        finish,
        (best, ids, are_finite, *(tops or [None]), *((logits, *own) if has_filters else (None,) * 7)),
        outputs,
        (rows,),
        tuning.FINISH_FILTERED if has_filters else tuning.FINISH,
        capability,
        **({} if has_filters else {"listed": None}),
        V=size,
        PIECES=pieces,
        PP=triton.next_power_of_2(pieces),
        G=groups,
        GP=triton.next_power_of_2(groups),
        BN=tuning.VISITED,
        BL=tuning.SEARCHED,
    )
    return tokens, is_finite != 0
