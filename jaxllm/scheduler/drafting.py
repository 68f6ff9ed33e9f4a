"""The number of drafts that a step verifies in each row, in integers so that replays agree.

The device drafts at the end of a step and verifies in the next, before the host has read the first. So the host counts
a row of d drafts as 1 + d tokens, a bound that `commit` makes exact.

R rows, S slots, K most drafts of a row.
"""

from __future__ import annotations

from fractions import Fraction
from functools import lru_cache

import numpy as np

from jaxllm.scheduler.state import Limits, StateEditor

PRIOR = 1, 1  # drafts verified and accepted, at first: all are verified once
WINDOW = 16  # drafts verified before both counts are halved
PROBE_ROWS = 64  # rows until a request without profitable drafts retries
_RATES = 32


def begin(editor: StateEditor, slot: int, may_draft: bool) -> None:
    own = editor.own_slots
    own.may_draft[slot] = may_draft
    own.num_drafted[slot], own.num_accepted[slot] = PRIOR


def columns(editor: StateEditor) -> tuple[np.ndarray, ...]:
    own = editor.own_slots
    return own.may_draft, own.has_drafts, own.num_drafted, own.num_accepted


def wanted(editor: StateEditor, limits: Limits, rows: np.ndarray) -> np.ndarray:
    """Return the best number of drafts of each row, int32[R]; restart the trials that are due."""
    slots = editor.slots
    by_rate = best(limits, len(rows))
    due = rows[slots.num_sampled[rows] % PROBE_ROWS == 0]
    again = due[by_rate[_rate(editor, due)] == 0]
    if len(again):
        editor.own_slots.num_drafted[again], editor.own_slots.num_accepted[again] = PRIOR
    return by_rate[_rate(editor, rows)]


def issue(editor: StateEditor, limits: Limits, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Choose and plan the drafts of decode rows.

    Returns the numbers of drafts, int32[R], and of blocks for them, int32[R], all available.
    """
    slots = editor.slots
    drafts = wanted(editor, limits, rows)
    lengths = slots.num_computed[rows]  # before this step
    proposes = bool(drafts.any())
    drafts *= slots.has_drafts[rows]
    if slots.has_drafts.any() or proposes:
        editor.own_slots.has_drafts[rows] = proposes
    # The last token is never computed.
    np.minimum(drafts, slots.limit[rows] - lengths - 1, out=drafts)
    drafts[np.cumsum(drafts) > limits.max_verified - len(rows)] = 0
    room = slots.capacity[rows] - lengths
    blocks = np.maximum(0, -(-(drafts - room) // limits.block_size))
    # Drafts never preempt: one block stays free per running request, and the row's bound, one token after its drafts,
    # must be in its blocks.
    available = editor.pool.num_available
    if limits.window:
        available = min(available, editor.window_pool.num_available)
    if drafts.any() and blocks.sum() > available - np.count_nonzero(slots.epochs):
        np.minimum(drafts, np.maximum(0, room - 1), out=drafts)
        blocks[:] = 0
    if drafts.any():
        editor.own_slots.num_computed[rows] += drafts
        editor.own_slots.length[rows] += drafts
    return drafts, blocks


def settle(editor: StateEditor, rows: np.ndarray, drafts: np.ndarray, sampled: np.ndarray) -> None:
    """Make the bounds of slots exact after a step that accepted `sampled` - 1 of `drafts`, int32[R] each."""
    own = editor.own_slots
    own.num_computed[rows] -= drafts + 1 - sampled
    own.length[rows] -= drafts + 1 - sampled
    own.num_drafted[rows] += np.minimum(sampled, drafts)
    own.num_accepted[rows] += sampled - 1
    old = rows[own.num_drafted[rows] > WINDOW]
    own.num_drafted[old] >>= 1
    own.num_accepted[old] >>= 1


def _rate(editor: StateEditor, rows: np.ndarray) -> np.ndarray:
    return _RATES * editor.slots.num_accepted[rows] // editor.slots.num_drafted[rows]


@lru_cache(maxsize=4096)
def best(limits: Limits, num_rows: int) -> np.ndarray:
    """Return the best number of drafts by acceptance rate in a step of `num_rows`, int32[rates + 1].

    At rate a, d drafts yield 1 + a + … + a^d tokens. With R rows a draft costs R · token_cost / (1 + R · token_cost) of
    the step, and its drafting `draft_cost`.
    """
    tokens = limits.token_cost * num_rows
    step = 1000 + tokens  # time without drafts
    draft_time = tokens * 1000 + limits.draft_cost * step  # time of a draft, times 1,000
    counts = range(limits.max_drafts + 1)

    def gain(rate: int, drafts: int) -> Fraction:
        tokens_expected = sum(rate**place * _RATES ** (drafts - place) for place in range(drafts + 1))
        return Fraction(tokens_expected, _RATES**drafts * (1000 * step + drafts * draft_time))

    return np.array([max(counts, key=lambda drafts: gain(rate, drafts)) for rate in range(_RATES + 1)], np.int32)
