"""How many drafted tokens a step verifies of each row. Integers in, integers out, so that a replay agrees.

The device drafts at the end of a step and verifies in the next one, before the host has read the step between: so the
host counts a row of d drafts as 1 + d tokens, a bound that `commit` makes exact. Verifying costs time per token. How
many drafts pay depends on how many of a request's last ones were kept.

Letters: R rows of a plan, S slots, K drafts of a row at most.
"""

from __future__ import annotations

from fractions import Fraction
from functools import lru_cache

import numpy as np

from jaxllm.scheduler.state import Limits, StateEditor

PRIOR = 1, 1  # drafts tried and kept of a request that begins, or that is to try again: all are verified once
WINDOW = 16  # drafts tried after which both counts are halved: what is long ago counts less
PROBE_ROWS = 64  # rows after which a request for which drafts did not pay tries again
_RATES = 32  # the share of drafts that are kept is rounded to one of so many


def begin(editor: StateEditor, slot: int, may_draft: bool) -> None:
    """Say of a request that is admitted whether it may have drafts."""
    own = editor.own_slots
    own.may_draft[slot] = may_draft
    own.tried[slot], own.kept[slot] = PRIOR


def columns(editor: StateEditor) -> tuple[np.ndarray, ...]:
    """Return the columns of slots that only drafts need, for writing."""
    own = editor.own_slots
    return own.may_draft, own.has_drafts, own.tried, own.kept


def wanted(editor: StateEditor, limits: Limits, rows: np.ndarray) -> np.ndarray:
    """Say how many drafts of each row of a step would pay, int32[R]; a slot whose time has come tries again."""
    slots = editor.slots
    by_rate = best(limits, len(rows))
    due = rows[slots.turn[rows] % PROBE_ROWS == 0]
    again = due[by_rate[_rate(editor, due)] == 0]
    if len(again):
        editor.own_slots.tried[again], editor.own_slots.kept[again] = PRIOR
    return by_rate[_rate(editor, rows)]


def issue(editor: StateEditor, limits: Limits, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Choose the drafts of decode rows, slots whose tokens of this step are issued, and count them as issued too.

    Returns drafts, int32[R], and the blocks that rows need for them, int32[R], which there are.
    """
    slots = editor.slots
    drafts = wanted(editor, limits, rows)
    lengths = slots.issued[rows]  # tokens that exist before this step
    proposes = bool(drafts.any())
    drafts *= slots.has_drafts[rows]
    if slots.has_drafts.any() or proposes:
        editor.own_slots.has_drafts[rows] = proposes
    # The last token that a request may have is sampled and never computed.
    np.minimum(drafts, slots.limit[rows] - lengths - 1, out=drafts)
    drafts[np.cumsum(drafts) > limits.max_verified - len(rows)] = 0
    room = slots.capacity[rows] - lengths
    blocks = np.maximum(0, -(-(drafts - room) // limits.block_size))
    # As for admissions, a block is left for each running request; and none is taken from others for a guess. Nor may
    # the next step need one for it: a row's bound, a token behind its drafts, must lie in the row's own blocks.
    available = editor.pool.num_available
    if limits.window:
        available = min(available, editor.window_pool.num_available)
    if drafts.any() and blocks.sum() > available - np.count_nonzero(slots.epochs):
        np.minimum(drafts, np.maximum(0, room - 1), out=drafts)
        blocks[:] = 0
    if drafts.any():
        editor.own_slots.issued[rows] += drafts
        editor.own_slots.length[rows] += drafts
    return drafts, blocks


def settle(editor: StateEditor, rows: np.ndarray, drafts: np.ndarray, sampled: np.ndarray) -> None:
    """Make the bounds of slots exact: of so many `drafts` the device has `sampled` - 1 kept, int32[R] each."""
    own = editor.own_slots
    own.issued[rows] -= drafts + 1 - sampled
    own.length[rows] -= drafts + 1 - sampled
    own.tried[rows] += np.minimum(sampled, drafts)  # up to the first that differs
    own.kept[rows] += sampled - 1
    old = rows[own.tried[rows] > WINDOW]
    own.tried[old] >>= 1
    own.kept[old] >>= 1


def _rate(editor: StateEditor, rows: np.ndarray) -> np.ndarray:
    return _RATES * editor.slots.kept[rows] // editor.slots.tried[rows]


@lru_cache(maxsize=4096)
def best(limits: Limits, num_rows: int) -> np.ndarray:
    """Return by rate of drafts kept how many a row should have in a step of so many rows, int32[rates + 1].

    With a rate a, d drafts yield 1 + a + … + a^d tokens. A step takes a fixed time and `token_cost` of that per token,
    so beside R rows a draft costs R · token_cost / (1 + R · token_cost) of it, and its drafting `draft_cost`.
    """
    tokens = limits.token_cost * num_rows
    step = 1000 + tokens  # the time of one without drafts
    each = tokens * 1000 + limits.draft_cost * step  # that a draft adds, a thousand times as large
    counts = range(limits.max_drafts + 1)

    def gain(rate: int, drafts: int) -> Fraction:
        tokens_expected = sum(rate**place * _RATES ** (drafts - place) for place in range(drafts + 1))
        return Fraction(tokens_expected, _RATES**drafts * (1000 * step + drafts * each))

    return np.array([max(counts, key=lambda drafts: gain(rate, drafts)) for rate in range(_RATES + 1)], np.int32)
