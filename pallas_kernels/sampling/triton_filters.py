"""Sampling with filters on NVIDIA GPUs in Triton: six kernels, each row divided among programs.

Bins are evenly spaced below the maximum: `measure` and `frame` place them; `fill` adds tokens with integer atomics,
exact in any order; `cut` finds the thresholds' bins; `pick` draws noise for tokens above and lists those of these bins;
`settle` finds the exact thresholds among them. Greedy rows and rows without filters need only `pick`.

Tokens more than 20.8 below the maximum have no mass, and noise spans at most 20.42: bins reach at most FARTHEST.

V vocabulary, G groups of columns, BN columns of a program, BL listed tokens and BD tokens with noise per
iteration.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jax import Array

from pallas_kernels import tuning
from pallas_kernels.sampling.triton_noise import gumbel
from pallas_kernels.triton_bridge import call

_IMPOSSIBLE = tl.constexpr(float("-inf"))
_INFINITE = tl.constexpr(float("inf"))
_LEAST_INT = tl.constexpr(-(2**31))
_MOST_INT = tl.constexpr(2**31 - 1)
FARTHEST = tl.constexpr(21.0)
# Fields of `frame`: maximal logit, depth below it, bins per unit of depth (0: no search), masses per weight.
_HIGHEST, _REACH, _SLOPE, _SCALE, _FRAME = (tl.constexpr(number) for number in (0, 1, 2, 3, 4))
# Fields of `cut`. Tokens above bin _SURE are kept. Bin _LIMIT contains top_k's threshold, bins _SURE to _UNTIL top_p's.
# _COUNT tokens with _MASS are above _LIMIT; _SURE_MASS is above _SURE. BINS and -1: none.
_SURE, _LIMIT, _UNTIL, _COUNT, _MASS, _SURE_MASS, _CUT = (tl.constexpr(number) for number in (0, 1, 2, 3, 4, 5, 8))


@triton.jit
def _ordered(x):
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _divisor(temperature, row):
    warmth = tl.load(temperature + row)
    return tl.where(warmth > 0.0, warmth, 1.0)


@triton.jit
def _scaled(logits, ids, mask, temperature, row):
    """Load logits at ids, divided by temperature (greedy rows by 1); NaN and masked ids as -inf."""
    x = tl.load(logits + ids, mask=mask, other=_IMPOSSIBLE)
    return tl.div_rn(tl.where(x == x, x, _IMPOSSIBLE), _divisor(temperature, row))


@triton.jit
def _masses(weights, scale):
    return (weights * scale + 0.5).to(tl.int32)


@triton.jit
def _is_counted(top_k, row, V: tl.constexpr):
    count = tl.load(top_k + row)
    return (count > 0) & (count < V)


@triton.jit
def _placed(x, frames, min_p, row, BINS: tl.constexpr):
    """Return whether tokens are eligible, their bins (never the last), and weights."""
    depth = tl.load(frames + row * _FRAME + _HIGHEST) - x
    weights = tl.exp(-depth)
    is_near = depth <= tl.load(frames + row * _FRAME + _REACH)
    bins = tl.where(is_near, depth, 0.0) * tl.load(frames + row * _FRAME + _SLOPE)
    return is_near & (weights >= tl.load(min_p + row)), tl.minimum(bins, BINS - 2).to(tl.int32), weights


@triton.jit
def measure(
    logits,
    temperature,
    highs,
    lows,
    sums,
    are_finite,
    tops,
    V: tl.constexpr,
    BN: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Reduce BN columns of a row: maximum, minimum, group maxima, sum of weights; grid (rows, pieces)."""
    row = tl.program_id(0)
    piece = tl.program_id(1)
    part = row * tl.num_programs(1) + piece
    columns = piece * BN + tl.arange(0, BN)
    is_token = columns < V
    x = tl.load(logits + row.to(tl.int64) * V + columns, mask=is_token, other=0.0)
    tl.store(are_finite + part, tl.min((tl.abs(x) < _INFINITE).to(tl.int32), 0))
    x = tl.where(is_token & (x == x), x, _IMPOSSIBLE)
    groups = tl.max(tl.reshape(x, (BN // GROUP, GROUP)), 1)
    tl.store(tops + part.to(tl.int64) * (BN // GROUP) + tl.arange(0, BN // GROUP), groups)
    highest = tl.max(groups, 0)
    is_possible = x > _IMPOSSIBLE
    tl.store(highs + part, highest)
    tl.store(lows + part, tl.min(tl.where(is_possible, x, _INFINITE), 0))
    weights = tl.exp((x - highest) * (1.0 / _divisor(temperature, row)))
    tl.store(sums + part, tl.sum(tl.where(is_possible, weights, 0.0), 0))


@triton.jit
def frame(
    highs,
    lows,
    sums,
    are_finite,
    tops,
    temperature,
    top_k,
    top_p,
    frames,
    is_finite,
    num_listed,
    counts,
    masses,
    V: tl.constexpr,
    PIECES: tl.constexpr,
    PP: tl.constexpr,
    G: tl.constexpr,
    GP: tl.constexpr,
    BINS: tl.constexpr,
):
    """Join a row's pieces into `frames`, which place its bins, and clear the bins; grid (rows).

    PP and GP are padded PIECES and G.
    """
    row = tl.program_id(0)
    bins = row * BINS + tl.arange(0, BINS)
    tl.store(counts + bins, tl.zeros((BINS,), tl.int32))
    tl.store(masses + bins, tl.zeros((BINS,), tl.int32))
    tl.store(num_listed + row, 0)
    pieces = tl.arange(0, PP)
    is_there = pieces < PIECES
    part = row * PIECES + pieces
    tl.store(is_finite + row, tl.min(tl.load(are_finite + part, mask=is_there, other=1), 0))
    divisor = _divisor(temperature, row)
    maxima = tl.load(highs + part, mask=is_there, other=_IMPOSSIBLE)
    top = tl.max(maxima, 0)
    highest = tl.div_rn(top, divisor)
    lowest = tl.div_rn(tl.min(tl.load(lows + part, mask=is_there, other=_INFINITE), 0), divisor)
    weights = tl.load(sums + part, mask=is_there, other=0.0) * tl.exp((maxima - top) * (1.0 / divisor))
    total = tl.sum(tl.where(maxima > _IMPOSSIBLE, weights, 0.0), 0)

    count = tl.load(top_k + row)
    share = tl.load(top_p + row)
    is_random = tl.load(temperature + row) > 0.0
    is_counted = _is_counted(top_k, row, V)
    is_searched = is_random & (is_counted | (share < 1.0)) & (lowest < highest)
    reach = tl.where(is_random, tl.minimum(highest - lowest, FARTHEST), 0.0)
    if is_searched:
        if is_counted:
            if count <= G:  # maxima bound the k-th largest token
                groups = tl.arange(0, GP)
                largest = _scaled(tops + row.to(tl.int64) * G, groups, groups < G, temperature, row)
                ranks = _ordered(largest)
                low = tl.full((), _LEAST_INT, tl.int64)
                high = _ordered(highest).to(tl.int64) + 1
                while high - low > 1:
                    middle = (low + high) >> 1
                    holds = tl.sum((ranks >= middle.to(tl.int32)).to(tl.int32), 0) >= count
                    low = tl.where(holds, middle, low)
                    high = tl.where(holds, high, middle)
                reach = tl.minimum(reach, highest - tl.min(tl.where(ranks >= low, largest, highest), 0))
        else:  # lighter tokens: at most a quarter of top_p's discarded mass
            reach = tl.minimum(reach, -tl.log((1.0 - share) * total * (1.0 / (8 * V))))
    # As `xla.masses`: a power of two.
    scale = ((2 * 127 + 29 - (total.to(tl.int32, bitcast=True) >> 23)) << 23).to(tl.float32, bitcast=True)
    own = frames + row * _FRAME
    tl.store(own + _HIGHEST, highest)
    tl.store(own + _REACH, reach)
    tl.store(own + _SLOPE, tl.where(is_searched, (BINS - 1) / tl.maximum(reach, 1e-30), 0.0))
    tl.store(own + _SCALE, scale)


@triton.jit
def fill(
    logits,
    temperature,
    top_k,
    top_p,
    min_p,
    frames,
    counts,
    masses,
    V: tl.constexpr,
    BN: tl.constexpr,
    BINS: tl.constexpr,
):
    """Add BN columns to the row's bins: counts for top_k, masses for top_p; grid (rows, pieces)."""
    row = tl.program_id(0)
    if tl.load(frames + row * _FRAME + _SLOPE) > 0.0:
        columns = tl.program_id(1) * BN + tl.arange(0, BN)
        x = _scaled(logits + row.to(tl.int64) * V, columns, columns < V, temperature, row)
        is_open, bins, weights = _placed(x, frames, min_p, row, BINS)
        is_counted = _is_counted(top_k, row, V)
        if is_counted:
            tl.atomic_add(counts + row * BINS + bins, 1, mask=is_open, sem="relaxed")
        if tl.load(top_p + row) < 1.0:
            amounts = _masses(weights, tl.load(frames + row * _FRAME + _SCALE))
            tl.atomic_add(masses + row * BINS + bins, amounts, mask=is_open & (amounts > 0), sem="relaxed")
            # Discarded, but without top_k part of top_p's total.
            is_far = (is_open == 0) & (weights >= tl.load(min_p + row))
            rest = tl.sum(tl.where(is_far, amounts, 0), 0)
            if (is_counted == 0) & (rest > 0):
                tl.atomic_add(masses + row * BINS + BINS - 1, rest, sem="relaxed")


@triton.jit
def cut(frames, counts, masses, top_k, top_p, cuts, V: tl.constexpr, BINS: tl.constexpr):
    row = tl.program_id(0)
    sure = tl.full((), BINS, tl.int32)
    limit = tl.full((), BINS, tl.int32)
    until = tl.full((), -1, tl.int32)
    fewer = tl.full((), 0, tl.int32)
    above = tl.full((), 0, tl.int32)
    sure_mass = tl.full((), 0, tl.int32)
    if tl.load(frames + row * _FRAME + _SLOPE) > 0.0:
        bins = tl.arange(0, BINS)
        heavier = tl.cumsum(tl.load(masses + row * BINS + bins), 0)
        if _is_counted(top_k, row, V):
            higher = tl.cumsum(tl.load(counts + row * BINS + bins), 0)
            limit = tl.sum((higher < tl.load(top_k + row)).to(tl.int32), 0)
            fewer = tl.max(tl.where(bins < limit, higher, 0), 0)
            sure = limit
        above = tl.max(tl.where(bins < limit, heavier, 0), 0)
        share = tl.load(top_p + row)
        if share < 1.0:
            # Bounds of top_k's mass: above its bin, and with it.
            least = share * above.to(tl.float32)
            most = share * tl.max(tl.where(bins <= limit, heavier, 0), 0).to(tl.float32)
            sure = tl.minimum(tl.sum((heavier.to(tl.float32) < least).to(tl.int32), 0), BINS - 2)
            until = tl.minimum(tl.sum((heavier.to(tl.float32) < most).to(tl.int32), 0), BINS - 2)
            sure_mass = tl.max(tl.where(bins < sure, heavier, 0), 0)
    own = cuts + row * _CUT
    tl.store(own + _SURE, sure)
    tl.store(own + _LIMIT, limit)
    tl.store(own + _UNTIL, until)
    tl.store(own + _COUNT, fewer)
    tl.store(own + _MASS, above)
    tl.store(own + _SURE_MASS, sure_mass)


@triton.jit
def _drawn(x, ids, temperature, keys, positions, row):
    is_random = tl.load(temperature + row) > 0.0
    return x + tl.where(is_random, gumbel(keys, positions, row, ids), 0.0)


@triton.jit
def pick(
    logits,
    temperature,
    keys,
    positions,
    min_p,
    frames,
    cuts,
    num_listed,
    best,
    ids,
    listed,
    kept,
    V: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
    BINS: tl.constexpr,
):
    """Choose among BN columns' certainly kept tokens, and list the undecided; grid (rows, pieces)."""
    row = tl.program_id(0)
    part = row * tl.num_programs(1) + tl.program_id(1)
    logits += row.to(tl.int64) * V
    start = tl.program_id(1) * BN
    within = tl.arange(0, BN)
    x = _scaled(logits, start + within, start + within < V, temperature, row)
    is_open, bins, _ = _placed(x, frames, min_p, row, BINS)
    sure = tl.load(cuts + row * _CUT + _SURE)
    is_within = (bins >= sure) & (bins <= tl.load(cuts + row * _CUT + _UNTIL))
    is_listed = is_open & (is_within | (bins == tl.load(cuts + row * _CUT + _LIMIT)))
    is_kept = is_open & (bins < sure)
    # In one integer: a program has at most 2**15 columns.
    one = is_kept.to(tl.int32) + (is_listed.to(tl.int32) << 16)
    both = tl.sum(one, 0)
    highest = tl.full((BD,), _IMPOSSIBLE, tl.float32)
    found = tl.full((BD,), _MOST_INT, tl.int32)
    if both > 0:
        before = tl.cumsum(one, 0) - one
        if both >> 16 > 0:
            at = tl.atomic_add(num_listed + row, both >> 16, sem="relaxed")
            tl.store(listed + row.to(tl.int64) * V + at + (before >> 16), start + within, mask=is_listed)
        own = kept + part.to(tl.int64) * BN
        tl.store(own + (before & 0xFFFF), within.to(tl.int16), mask=is_kept)
        tl.debug_barrier()  # other threads wrote it
        num_kept = both & 0xFFFF
        for at in range(0, num_kept, BD):
            places = at + tl.arange(0, BD)
            is_there = places < num_kept
            columns = start + tl.load(own + places, mask=is_there, other=0).to(tl.int32)
            known = _scaled(logits, columns, is_there, temperature, row)
            scores = _drawn(known, columns, temperature, keys, positions, row)
            is_better = scores > highest  # ids are ascending
            highest = tl.where(is_better, scores, highest)
            found = tl.where(is_better, columns, found)
    score = tl.max(highest, 0)
    tl.store(best + part, score)
    tl.store(ids + part, tl.min(tl.where(highest == score, found, _MOST_INT), 0))


@triton.jit
def settle(
    logits,
    temperature,
    keys,
    positions,
    top_k,
    top_p,
    min_p,
    frames,
    cuts,
    num_listed,
    best,
    ids,
    listed,
    tokens,
    V: tl.constexpr,
    PIECES: tl.constexpr,
    PP: tl.constexpr,
    BL: tl.constexpr,
    BINS: tl.constexpr,
):
    """Choose among the pieces' best and the listed tokens that pass; grid (rows)."""
    row = tl.program_id(0)
    pieces = tl.arange(0, PP)
    is_there = pieces < PIECES
    scores = tl.load(best + row * PIECES + pieces, mask=is_there, other=_IMPOSSIBLE)
    found = tl.load(ids + row * PIECES + pieces, mask=is_there, other=_MOST_INT)
    score = tl.max(scores, 0)
    token = tl.min(tl.where(scores == score, found, _MOST_INT), 0)
    number = tl.load(num_listed + row)
    if number > 0:
        logits += row.to(tl.int64) * V
        listed += row.to(tl.int64) * V
        limit = tl.load(cuts + row * _CUT + _LIMIT)
        until = tl.load(cuts + row * _CUT + _UNTIL)
        bound = tl.full((), _LEAST_INT, tl.int64)
        mass = tl.load(cuts + row * _CUT + _MASS)
        if limit < BINS:
            above = tl.load(cuts + row * _CUT + _COUNT)
            wanted = tl.load(top_k + row).to(tl.float32)
            bound, more = _searched(
                logits, listed, number, temperature, frames, min_p, row,
                limit, limit, bound, above, wanted, False, BL, BINS,
            )  # fmt: skip
            mass += more
        if until >= 0:
            above = tl.load(cuts + row * _CUT + _SURE_MASS)
            wanted = tl.maximum(tl.load(top_p + row) * mass.to(tl.float32), 1.0)
            bound, _ = _searched(
                logits, listed, number, temperature, frames, min_p, row,
                tl.load(cuts + row * _CUT + _SURE), until, bound, above, wanted, True, BL, BINS,
            )  # fmt: skip
        other, rival = _best(logits, listed, number, bound, temperature, keys, positions, row, BL)
        is_better = (other > score) | ((other == score) & (rival < token))
        token = tl.where(is_better, rival, token)
    tl.store(tokens + row, tl.where(token < V, token, 0))  # none passes if none is finite


@triton.jit
def _best(logits, listed, number, bound, temperature, keys, positions, row, BL: tl.constexpr):
    highest = tl.full((BL,), _IMPOSSIBLE, tl.float32)
    found = tl.full((BL,), _MOST_INT, tl.int32)
    for at in range(0, number, BL):
        places = at + tl.arange(0, BL)
        is_there = places < number
        columns = tl.load(listed + places, mask=is_there, other=0)
        x = _scaled(logits, columns, is_there, temperature, row)
        scores = _drawn(x, columns, temperature, keys, positions, row)
        scores = tl.where(is_there & (_ordered(x) >= bound), scores, _IMPOSSIBLE)
        is_better = (scores > highest) | ((scores == highest) & (columns < found))
        highest = tl.where(is_better, scores, highest)
        found = tl.where(is_better, columns, found)
    score = tl.max(highest, 0)
    return score, tl.min(tl.where(highest == score, found, _MOST_INT), 0)


@triton.jit
def _visited(
    logits, listed, at, number, temperature, frames, min_p, row, first, last, BL: tl.constexpr, BINS: tl.constexpr
):
    places = at + tl.arange(0, BL)
    is_there = places < number
    x = _scaled(logits, tl.load(listed + places, mask=is_there, other=0), is_there, temperature, row)
    is_open, bins, weights = _placed(x, frames, min_p, row, BINS)
    amounts = _masses(weights, tl.load(frames + row * _FRAME + _SCALE))
    return _ordered(x), amounts, is_open & (bins >= first) & (bins <= last)


@triton.jit
def _searched(
    logits,
    listed,
    number,
    temperature,
    frames,
    min_p,
    row,
    first,
    last,
    least,
    above,
    wanted,
    BY_MASS: tl.constexpr,
    BL: tl.constexpr,
    BINS: tl.constexpr,
):
    """Return the largest bound with at least `wanted` tokens or mass above it, and the listed mass above it.

    Searches tokens of bins `first` to `last` not below `least`, with `above` beyond these bins. With BY_MASS the mass
    is 0.
    """
    lowest = tl.full((BL,), _MOST_INT, tl.int32)
    highest = tl.full((BL,), _LEAST_INT, tl.int32)
    for at in range(0, number, BL):
        order, _, is_in = _visited(logits, listed, at, number, temperature, frames, min_p, row, first, last, BL, BINS)
        is_in &= order >= least
        lowest = tl.minimum(lowest, tl.where(is_in, order, _MOST_INT))
        highest = tl.maximum(highest, tl.where(is_in, order, _LEAST_INT))
    low = tl.min(lowest, 0).to(tl.int64)
    high = tl.max(highest, 0).to(tl.int64) + 1
    while high - low > 1:
        step = (high - low + 15) >> 4
        tried = tl.minimum(low + step * tl.arange(0, 16).to(tl.int64), high).to(tl.int32)
        measured = tl.zeros((16,), tl.int32)
        for at in range(0, number, BL):
            order, amounts, is_in = _visited(
                logits, listed, at, number, temperature, frames, min_p, row, first, last, BL, BINS
            )
            if not BY_MASS:
                amounts = is_in.to(tl.int32)
            is_above = is_in[:, None] & (order[:, None] >= tried[None, :])
            measured += tl.sum(tl.where(is_above, amounts[:, None], 0), 0)
        # `low` always satisfies the condition, despite rounding.
        enough = tl.maximum(tl.sum(((above + measured).to(tl.float32) >= wanted).to(tl.int32), 0) - 1, 0).to(tl.int64)
        low += enough * step
        high = tl.minimum(high, low + step)
    mass = tl.full((), 0, tl.int32)
    if not BY_MASS:
        for at in range(0, number, BL):
            order, amounts, is_in = _visited(
                logits, listed, at, number, temperature, frames, min_p, row, first, last, BL, BINS
            )
            mass += tl.sum(tl.where(is_in & (order >= low), amounts, 0), 0)
    return low, mass


def choose(
    logits: Array,
    temperature: Array,
    keys: Array,
    positions: Array,
    top_k: Array,
    top_p: Array,
    min_p: Array,
    capability: int | None,
) -> tuple[Array, Array]:
    """Return each row's token, and 1 if its logits are finite, else 0."""
    rows, size = logits.shape
    columns, bins = tuning.SURVEYED, tuning.BINS
    pieces = -(-size // columns)
    groups = pieces * (columns // tuning.GROUPED)
    grid = (rows, pieces)
    padded = {"PIECES": pieces, "PP": triton.next_power_of_2(pieces)}
    *measured, are_finite, tops = call(
        measure,
        (logits, temperature),
        [_floats(*grid)] * 3 + [_ints(*grid), _floats(rows, groups)],
        grid,
        tuning.SURVEY,
        capability,
        V=size,
        BN=columns,
        GROUP=tuning.GROUPED,
    )
    frames, is_finite, num_listed, counts, masses = call(
        frame,
        (*measured, are_finite, tops, temperature, top_k, top_p),
        [_floats(rows, _FRAME.value), _ints(rows), _ints(rows), _ints(rows, bins), _ints(rows, bins)],
        (rows,),
        tuning.FRAME,
        capability,
        **padded,
        V=size,
        G=groups,
        GP=triton.next_power_of_2(groups),
        BINS=bins,
    )
    counts, masses = call(
        fill,
        (logits, temperature, top_k, top_p, min_p, frames, counts, masses),
        [_ints(rows, bins)] * 2,
        grid,
        tuning.SURVEY,
        capability,
        {6: 0, 7: 1},
        V=size,
        BN=columns,
        BINS=bins,
    )
    (cuts,) = call(
        cut,
        (frames, counts, masses, top_k, top_p),
        [_ints(rows, _CUT.value)],
        (rows,),
        tuning.FRAME,
        capability,
        V=size,
        BINS=bins,
    )
    best, ids, listed, _, num_listed = call(
        pick,
        (logits, temperature, keys, positions, min_p, frames, cuts, num_listed),
        [
            _floats(*grid),
            _ints(*grid),
            _ints(rows, size),
            jax.ShapeDtypeStruct((*grid, columns), jnp.int16),
            _ints(rows),
        ],
        grid,
        tuning.SURVEY,
        capability,
        {7: 4},
        V=size,
        BN=columns,
        BD=tuning.DRAWN,
        BINS=bins,
    )
    (tokens,) = call(
        settle,
        (logits, temperature, keys, positions, top_k, top_p, min_p, frames, cuts, num_listed, best, ids, listed),
        [_ints(rows)],
        (rows,),
        tuning.SETTLE,
        capability,
        **padded,
        V=size,
        BL=tuning.SEARCHED,
        BINS=bins,
    )
    return tokens, is_finite


def _floats(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def _ints(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)
