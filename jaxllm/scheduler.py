"""The scheduler: pure functions from state and event to state and plan.

`add` and `abort` take requests in and out, `plan` says what the next step computes, `commit` takes in what it sampled.
Holds per slot a row of numpy columns that change every step, and per request an immutable record that is rebuilt only
when its blocks change; a record per request rebuilt each step costs several times as much (DECISIONS, "The scheduler's
state"). Knows token ids only as the content of blocks; knows no clock, device, text or sampling.

Letters: S slots, R rows of a plan, P tokens per block. "Issued" tokens are those whose keys and values are in the cache
once the steps planned so far have run; "known" tokens are those whose value the host has.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TypeVar

import numpy as np

from jaxllm import blocks
from jaxllm.blocks import Pool
from jaxllm.types import FinishReason, UserError

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Limits:
    """The budgets that no plan exceeds."""

    num_slots: int  # requests that run at once
    num_blocks: int  # of the pool
    block_size: int  # tokens per block, P
    max_step_tokens: int  # tokens computed in one step, at least num_slots
    max_step_chunks: int  # requests whose prompts are computed in one step


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """What the scheduler needs to know of a request; never rebuilt."""

    id: int
    prompt: np.ndarray  # int32, read-only
    limit: int  # the most tokens it may have, prompt included
    stop_ids: tuple[int, ...] = ()  # a sampled token among these ends it; the usual one first
    priority: int = 0  # lower goes first
    salt: bytes | None = b""  # blocks are shared only between requests of equal salt; None shares nothing


@dataclass(frozen=True, slots=True, eq=False)
class Waiting:
    """A request that has no slot: new, or preempted with the tokens it had."""

    request: Request
    order: int  # of arrival; a preempted request keeps its own
    known: int
    digests: tuple[bytes, ...]  # of the full blocks among the known tokens; empty where nothing is shared
    tail: np.ndarray  # int32: the known tokens after the last full block

    @property
    def rank(self) -> tuple[int, int]:
        """Who goes first: lower priority value, then earlier arrival."""
        return self.request.priority, self.order


@dataclass(frozen=True, slots=True, eq=False)
class Running:
    """What stays the same while a request owns a slot."""

    request: Request
    order: int
    digests: tuple[bytes, ...]  # of the full blocks that it brought; empty where nothing is shared

    @property
    def rank(self) -> tuple[int, int]:
        """Who goes first: lower priority value, then earlier arrival."""
        return self.request.priority, self.order


# A link of a persistent list: the tokens of a block that was filled by sampling, then the blocks filled before it. (A
# plain tuple: making a named one takes ten times as long, and this is done 62 times a step at 1,000 running requests.)
Filled = tuple[bytes, "Filled | None"]


@dataclass(frozen=True, slots=True)
class Slots:
    """What changes in every step: one row per slot, read-only, replaced as a whole."""

    epochs: np.ndarray  # int64[S]: number of the admission that owns the slot, 0 where it is free
    ids: np.ndarray  # int64[S]: the request's id
    given: np.ndarray  # int32[S]: tokens that the host gave at admission; later ones were sampled on the device
    issued: np.ndarray  # int32[S]: tokens in the cache once all planned steps have run
    length: np.ndarray  # int32[S]: tokens that exist once all planned steps have run
    known: np.ndarray  # int32[S]: tokens whose value the host has
    limit: np.ndarray  # int32[S]: the most tokens the request may have
    capacity: np.ndarray  # int32[S]: tokens that its blocks hold
    num_digests: np.ndarray  # int32[S]: blocks whose digests it brought; very many where nothing is shared
    stop_id: np.ndarray  # int32[S]: its usual stop token, the vocabulary's size or more where there is none
    has_more_stops: np.ndarray  # bool[S]: whether further stop tokens must be looked at
    recent: np.ndarray  # int32[S, 2P]: token i of the sequence stands at column i % 2P, the newest 2P of them


@dataclass(frozen=True, slots=True)
class State:
    """All that the scheduler knows."""

    waiting: tuple[Waiting, ...]  # by rank
    slots: Slots
    running: tuple[Running | None, ...]  # by slot
    tables: tuple[tuple[int, ...], ...]  # by slot: the blocks that it names, in order
    filled: tuple[Filled | None, ...]  # by slot: blocks filled by sampling, whose digests are made when it ends
    pool: Pool
    num_added: int = 0
    num_admitted: int = 0

    @property
    def num_running(self) -> int:
        """Requests that own a slot."""
        return int(np.count_nonzero(self.slots.epochs))


@dataclass(frozen=True, slots=True)
class Admission:
    """A request that got a slot in this plan."""

    slot: int
    request: Request
    num_known: int  # tokens it has; more than its prompt if it was preempted before
    num_cached: int  # tokens found in the prefix cache


@dataclass(frozen=True, slots=True)
class Plan:
    """What one step computes. Decode rows (one token, sampled on the device before) come first, then prompt chunks."""

    now: float  # the time that `plan` was given
    num_decodes: int
    slots: np.ndarray  # int32[R]
    epochs: np.ndarray  # int64[R]: tells a late result from one of the slot's next owner
    starts: np.ndarray  # int32[R]: position of the row's first token
    lengths: np.ndarray  # int32[R]: its tokens
    samples: np.ndarray  # bool[R]: whether the row reaches the end of its sequence, so that a token is sampled
    table: np.ndarray  # int32[U, 3]: slot, index in the block table, block
    admitted: tuple[Admission, ...] = ()
    preempted: tuple[int, ...] = ()  # ids

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step."""
        return int(self.lengths.sum())


@dataclass(frozen=True, slots=True)
class Events:
    """What a step did to the requests: a token for each of `ids`, and how some of them ended."""

    rows: np.ndarray  # of the plan, for what else the step returned
    ids: np.ndarray  # int64
    tokens: np.ndarray  # int32
    finished: dict[int, FinishReason] = field(default_factory=dict)
    failed: tuple[int, ...] = ()  # ended without a token: their logits were not finite


def initial(limits: Limits) -> State:
    """Return the state without requests."""
    num_slots = limits.num_slots

    def zeros(*shape: int, dtype: type = np.int32) -> np.ndarray:
        return _frozen(np.zeros(shape, dtype))

    slots = Slots(
        epochs=zeros(num_slots, dtype=np.int64),
        ids=zeros(num_slots, dtype=np.int64),
        given=zeros(num_slots),
        issued=zeros(num_slots),
        length=zeros(num_slots),
        known=zeros(num_slots),
        limit=zeros(num_slots),
        capacity=zeros(num_slots),
        num_digests=zeros(num_slots),
        stop_id=zeros(num_slots),
        has_more_stops=zeros(num_slots, dtype=np.bool_),
        recent=zeros(num_slots, 2 * limits.block_size),
    )
    return State(
        waiting=(),
        slots=slots,
        running=(None,) * num_slots,
        tables=((),) * num_slots,
        filled=(None,) * num_slots,
        pool=blocks.make_pool(limits.num_blocks),
    )


def add(state: State, limits: Limits, request: Request) -> State:
    """Queue a request. One that could not run even alone in the pool raises UserError."""
    needed = -(-(request.limit - 1) // limits.block_size)  # the last token is sampled, never computed
    if needed > limits.num_blocks:
        raise UserError(
            f"The request may reach {request.limit} tokens and would need {needed} KV blocks of {limits.block_size} "
            f"tokens, but the whole pool has {limits.num_blocks}. Lower max_tokens, or raise num_kv_blocks.",
            "max_tokens",
        )
    num_full = len(request.prompt) // limits.block_size * limits.block_size
    entry = Waiting(
        request=request,
        order=state.num_added,
        known=len(request.prompt),
        digests=_prompt_digests(request, limits.block_size),
        tail=request.prompt[num_full:],
    )
    return replace(state, waiting=_queued(state.waiting, entry), num_added=state.num_added + 1)


def abort(state: State, limits: Limits, request_id: int) -> State:
    """Take a request out, in whatever phase it is, and give its blocks back; an unknown id changes nothing."""
    for position, entry in enumerate(state.waiting):
        if entry.request.id == request_id:
            return replace(state, waiting=state.waiting[:position] + state.waiting[position + 1 :])
    for slot, record in enumerate(state.running):
        if record is not None and record.request.id == request_id:
            return _vacate(state, limits, [slot])
    return state


def reset(state: State, limits: Limits) -> State:
    """Forget the cache: what ran goes back to the queue's head with its tokens, the pool is new, what waited stays.

    For a device whose cache was lost, as after a step that failed once its input had been donated.
    """
    slots = [slot for slot, record in enumerate(state.running) if record is not None]
    for slot in slots:
        state = _requeue(state, limits, slot)
    return replace(_vacate(state, limits, slots), pool=blocks.make_pool(limits.num_blocks))


def plan(state: State, limits: Limits, now: float) -> tuple[State, Plan]:
    """Say what the next step computes: decodes, then chunks of running prompts, then admissions, in one token budget."""
    state, table, preempted = _grow(state, limits)
    slots = state.slots
    works = (slots.issued < slots.length) & (slots.length < slots.limit)
    chunks = works & (slots.issued < slots.given)
    decodes = works ^ chunks
    row_slots = np.flatnonzero(decodes).astype(np.int32)
    num_decodes = len(row_slots)
    budget = limits.max_step_tokens - num_decodes
    starts = slots.issued[row_slots]
    lengths = np.ones(num_decodes, np.int32)
    samples = np.ones(num_decodes, np.bool_)
    state = _with_slots(state, issued=slots.issued + decodes, length=slots.length + decodes)

    rows: list[tuple[int, int, int]] = []  # slot, start, length of each chunk
    for slot in sorted(np.flatnonzero(chunks).tolist(), key=lambda slot: _running(state, slot).rank):
        if budget == 0 or len(rows) == limits.max_step_chunks:
            break
        start = int(slots.issued[slot])
        rows.append((slot, start, min(int(slots.given[slot]) - start, budget)))
        budget -= rows[-1][2]
        state = _publish_prompt(state, limits, *rows[-1])
    admitted: list[Admission] = []
    if state.waiting and not preempted:
        state = _admit(state, limits, budget, rows, admitted, table)
    if rows:
        chunk_slots, chunk_starts, chunk_lengths = np.asarray(rows, np.int32).T
        issued, length = state.slots.issued.copy(), state.slots.length.copy()
        issued[chunk_slots] += chunk_lengths
        reaches_end = issued[chunk_slots] == length[chunk_slots]
        length[chunk_slots] += reaches_end
        state = _with_slots(state, issued=issued, length=length)
        row_slots = np.concatenate([row_slots, chunk_slots])
        starts = np.concatenate([starts, chunk_starts])
        lengths = np.concatenate([lengths, chunk_lengths])
        samples = np.concatenate([samples, reaches_end])
    return state, Plan(
        now=now,
        num_decodes=num_decodes,
        slots=row_slots,
        epochs=state.slots.epochs[row_slots],
        starts=starts,
        lengths=lengths,
        samples=samples,
        table=np.concatenate(table) if table else np.zeros((0, 3), np.int32),
        admitted=tuple(admitted),
        preempted=preempted,
    )


def commit(
    state: State, limits: Limits, step: Plan, tokens: np.ndarray, is_finite: np.ndarray | None = None
) -> tuple[State, Events]:
    """Take in the tokens that a step sampled, int32[R], one per row of its plan; rows that sample nothing are ignored.

    A result whose request has gone, or was preempted since, is dropped: the request samples that token again, and gets
    the same one because randomness depends on its seed and position only. A row whose logits were not finite ends its
    request.
    """
    slots = state.slots
    ends = step.starts + step.lengths
    live = step.samples & (slots.epochs[step.slots] == step.epochs) & (slots.known[step.slots] == ends)
    failed_slots: list[int] = []
    if is_finite is not None and not is_finite.all():
        failed_slots = step.slots[live & ~is_finite].tolist()
        live &= is_finite
    rows = np.flatnonzero(live)
    row_slots, sampled = step.slots, tokens
    if len(rows) < len(row_slots):
        row_slots, ends, sampled = row_slots[rows], ends[rows], sampled[rows]

    known, recent = slots.known.copy(), slots.recent.copy()
    known[row_slots] += 1
    recent[row_slots, ends % (2 * limits.block_size)] = sampled
    state = _with_slots(state, known=known, recent=recent)

    stopped = sampled == slots.stop_id[row_slots]
    for row in np.flatnonzero(slots.has_more_stops[row_slots]).tolist():
        stopped[row] = int(sampled[row]) in _running(state, int(row_slots[row])).request.stop_ids
    ended = stopped | (ends + 1 >= slots.limit[row_slots])
    ids = slots.ids[row_slots]
    finished: dict[int, FinishReason] = {}
    for row in np.flatnonzero(ended).tolist():
        finished[int(ids[row])] = "stop" if stopped[row] else "length"
    failed = tuple(slots.ids[failed_slots].tolist())
    if finished or failed:
        state = _vacate(state, limits, row_slots[ended].tolist() + failed_slots)
    return state, Events(rows=rows, ids=ids, tokens=sampled, finished=finished, failed=failed)


def _grow(state: State, limits: Limits) -> tuple[State, list[np.ndarray], tuple[int, ...]]:
    """Give a block to every decoding slot whose blocks are full; preempt the last in rank until there are enough."""
    preempted: list[int] = []
    while True:
        slots = state.slots
        growing = np.flatnonzero((slots.issued >= slots.capacity) & (slots.length < slots.limit) & (slots.epochs > 0))
        if len(growing) <= state.pool.num_available:
            break
        victim = max(
            (slot for slot, record in enumerate(state.running) if record is not None),
            key=lambda slot: _running(state, slot).rank,
        )
        preempted.append(_running(state, victim).request.id)
        state = _vacate(_requeue(state, limits, victim), limits, [victim])
    if not len(growing):
        return state, [], tuple(preempted)
    pool, taken = blocks.take(state.pool, len(growing))
    index = slots.capacity[growing] // limits.block_size
    tables, filled = list(state.tables), list(state.filled)
    for slot, block in zip(growing.tolist(), taken.tolist(), strict=True):
        tables[slot] += (block,)
    shared = growing[index > slots.num_digests[growing]]
    for slot, tokens in zip(shared.tolist(), _newest_full_blocks(slots, limits, shared), strict=True):
        filled[slot] = (tokens, filled[slot])
    capacity = slots.capacity.copy()
    capacity[growing] += limits.block_size
    state = replace(
        state,
        slots=replace(slots, capacity=_frozen(capacity)),
        tables=tuple(tables),
        filled=tuple(filled),
        pool=pool,
    )
    return state, [np.array((growing, index, taken), np.int32).T], tuple(preempted)


def _admit(
    state: State,
    limits: Limits,
    budget: int,
    rows: list[tuple[int, int, int]],
    admitted: list[Admission],
    table: list[np.ndarray],
) -> State:
    """Give slots and blocks to waiting requests while there are tokens, slots and blocks for the first in rank."""
    free_slots = np.flatnonzero(state.slots.epochs == 0).tolist()[::-1]
    num_running = limits.num_slots - len(free_slots)
    for entry in state.waiting:
        if not free_slots or budget == 0 or len(rows) == limits.max_step_chunks:
            break
        # The last known token is always computed: its logits are what the next token is sampled from.
        hits = blocks.look_up(state.pool, entry.digests[: (entry.known - 1) // limits.block_size])
        num_new = -(-entry.known // limits.block_size) - len(hits)
        # A block is left for each running request, or the next step would undo the admission.
        spare = state.pool.num_available - blocks.num_idle(state.pool, hits) - num_running
        if num_new > (spare if num_running else spare + num_running):
            break
        slot = free_slots.pop()
        pool, new = blocks.take(blocks.share(state.pool, hits), num_new)
        owned = (*hits, *new.tolist())
        table.append(np.asarray([(slot, index, block) for index, block in enumerate(owned)], np.int32))
        start = len(hits) * limits.block_size
        length = min(entry.known - start, budget)
        state = replace(
            state,
            running=_with_item(state.running, slot, Running(entry.request, entry.order, entry.digests)),
            tables=_with_item(state.tables, slot, owned),
            slots=_occupied(state.slots, limits, slot, entry, start, len(owned), state.num_admitted + 1),
            pool=pool,
            num_admitted=state.num_admitted + 1,
        )
        state = _publish_prompt(state, limits, slot, start, length)
        budget -= length
        num_running += 1
        rows.append((slot, start, length))
        admitted.append(Admission(slot, entry.request, entry.known, start))
    return replace(state, waiting=state.waiting[len(admitted) :])


def _occupied(
    slots: Slots, limits: Limits, slot: int, entry: Waiting, num_cached: int, num_blocks: int, epoch: int
) -> Slots:
    """Fill a slot's row for a request that is admitted to it."""
    request = entry.request
    recent = np.zeros(2 * limits.block_size, np.int32)
    first = entry.known - len(entry.tail)
    recent[np.arange(first, entry.known) % len(recent)] = entry.tail
    return _with_rows(
        slots,
        slot,
        epochs=epoch,
        ids=request.id,
        given=entry.known,
        issued=num_cached,
        length=entry.known,
        known=entry.known,
        limit=request.limit,
        capacity=num_blocks * limits.block_size,
        num_digests=np.iinfo(np.int32).max if request.salt is None else len(entry.digests),
        stop_id=request.stop_ids[0] if request.stop_ids else np.iinfo(np.int32).max,
        has_more_stops=len(request.stop_ids) > 1,
        recent=recent,
    )


def _requeue(state: State, limits: Limits, slot: int) -> State:
    """Queue a running request again with the tokens it has; its slot and blocks are still to be given back."""
    record = _running(state, slot)
    known = int(state.slots.known[slot])
    tail = np.arange(known - known % limits.block_size, known) % (2 * limits.block_size)
    entry = Waiting(
        request=record.request,
        order=record.order,
        known=known,
        digests=_digests(state, limits, slot, known),
        tail=state.slots.recent[slot, tail],
    )
    return replace(state, waiting=_queued(state.waiting, entry))


def _vacate(state: State, limits: Limits, slots: Sequence[int]) -> State:
    """Empty slots, index the blocks that sampled tokens have filled, and give all blocks back.

    They are indexed here, not as they fill: a conversation's next turn comes when this one has ended, and the digests
    cost 2 us a block (62 of them a step at 1,000 running requests).
    """
    running, tables, filled = list(state.running), list(state.tables), list(state.filled)
    pool = state.pool
    for slot in slots:
        record, table = _running(state, slot), state.tables[slot]
        written = min(int(state.slots.issued[slot]), int(state.slots.known[slot]))
        digests = _digests(state, limits, slot, written)
        first = len(record.digests)
        pool = blocks.publish(pool, zip(digests[first:], table[first:], strict=False))
        pool = blocks.release(pool, table, digests)
        running[slot], tables[slot], filled[slot] = None, (), None
    # A free slot has limit and length 0, so that no column test takes it for one with work to do.
    columns = dict.fromkeys(("epochs", "given", "issued", "length", "known", "limit", "capacity"), 0)
    cleared = _with_rows(state.slots, slots, **columns)
    return replace(
        state, slots=cleared, running=tuple(running), tables=tuple(tables), filled=tuple(filled), pool=pool
    )


def _publish_prompt(state: State, limits: Limits, slot: int, start: int, length: int) -> State:
    """Index the blocks that a chunk completes: later rows of this very step may hit them.

    A step writes all its keys and values of a layer before any row attends, so a block can be read in the step that
    writes it.
    """
    digests, table = _running(state, slot).digests, state.tables[slot]
    full = range(start // limits.block_size, min((start + length) // limits.block_size, len(digests)))
    entries = [(digests[index], table[index]) for index in full]
    return replace(state, pool=blocks.publish(state.pool, entries)) if entries else state


def _digests(state: State, limits: Limits, slot: int, num_tokens: int) -> tuple[bytes, ...]:
    """Return the digests of the full blocks among a running request's first tokens."""
    record = _running(state, slot)
    if record.request.salt is None:
        return ()
    tokens: list[bytes] = []
    link = state.filled[slot]
    while link is not None:
        tokens.append(link[0])
        link = link[1]
    tokens.reverse()
    num_full = num_tokens // limits.block_size
    if num_full > len(record.digests) + len(tokens):
        tokens += _newest_full_blocks(state.slots, limits, np.asarray([slot]))
    digests = [*record.digests]
    for block_tokens in tokens:
        digests.append(blocks.chain(digests[-1] if digests else _root(record.request), block_tokens))
    return tuple(digests[:num_full])


def _newest_full_blocks(slots: Slots, limits: Limits, rows: np.ndarray) -> list[bytes]:
    """Return the tokens of each row's newest full block, as the bytes that its digest is made of."""
    size = limits.block_size
    halves = slots.recent.reshape(len(slots.recent), 2, size)[rows, (slots.known[rows] // size - 1) % 2]
    joined = halves.astype("<i4", copy=False).tobytes()
    return [joined[start : start + 4 * size] for start in range(0, len(joined), 4 * size)]


def _prompt_digests(request: Request, block_size: int) -> tuple[bytes, ...]:
    """Return the chained digests of the prompt's full blocks; none where nothing may be shared."""
    if request.salt is None:
        return ()
    tokens = np.ascontiguousarray(request.prompt, "<i4").tobytes()
    digests = [_root(request)]
    for start, end in pairwise(range(0, len(request.prompt) + 1, block_size)):
        digests.append(blocks.chain(digests[-1], tokens[4 * start : 4 * end]))
    return tuple(digests[1:])


def _root(request: Request) -> bytes:
    """Return what stands before a sequence's first block in the chain of digests."""
    return blocks.chain(b"", request.salt or b"")


def _running(state: State, slot: int) -> Running:
    record = state.running[slot]
    assert record is not None, "a row of the columns and its record belong together"
    return record


def _queued(waiting: tuple[Waiting, ...], entry: Waiting) -> tuple[Waiting, ...]:
    """Insert by rank."""
    position = bisect(waiting, entry.rank, key=lambda other: other.rank)
    return (*waiting[:position], entry, *waiting[position:])


def _with_item(items: tuple[Item, ...], position: int, item: Item) -> tuple[Item, ...]:
    return (*items[:position], item, *items[position + 1 :])


def _with_slots(state: State, **columns: np.ndarray) -> State:
    """Replace whole columns."""
    return replace(state, slots=replace(state.slots, **{name: _frozen(column) for name, column in columns.items()}))


def _with_rows(slots: Slots, rows: int | Sequence[int], **values: int | bool | np.ndarray) -> Slots:
    """Set columns of some rows."""
    columns = {}
    for name, value in values.items():
        column = getattr(slots, name).copy()
        column[rows] = value
        columns[name] = _frozen(column)
    return replace(slots, **columns)


def _frozen(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array
