"""The scheduler's data: requests, slots, plans, events; and the editor that makes the next state.

Objects made every step are named tuples, which take a fifth of the time of frozen dataclasses (DECISIONS, "The
scheduler is a pure function over columns").

Letters: S slots, R rows of a plan, U block-table entries. While a step that verifies drafts is in flight,
`num_computed` and `length` assume that all drafts are accepted.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, cast

import numpy as np

from jaxllm.outputs import FinishReason
from jaxllm.scheduler import block_pool, host_tier, media
from jaxllm.scheduler.adapter_places import AdapterPlaces, idle_first
from jaxllm.scheduler.block_pool import Pool, PoolEditor
from jaxllm.scheduler.host_tier import Host, HostEditor
from jaxllm.scheduler.media import Encode, EncoderCache, EncoderEditor, Segment


@dataclass(frozen=True, slots=True)
class Limits:
    """The budgets of plans."""

    num_slots: int  # most running requests
    num_blocks: int  # of the pool
    block_size: int  # tokens per block, P
    max_step_tokens: int  # computed in one step, at least num_slots
    max_step_chunks: int  # prompts computed in one step
    records_blocks: bool = False  # states have `block_events`
    whole_prompts: bool = False  # no chunks of prompts; `max_step_tokens` holds the longest
    max_adapters: int = 0  # distinct ones of running requests, resident on the device
    max_drafts: int = 0  # per row, K; 0: no drafting
    max_verified: int = 0  # tokens of a step that verifies drafts
    token_cost: int = 0  # time of a further token in a decode step, in thousandths of the step's fixed time
    draft_cost: int = 0  # … of drafting a token
    window: int = 0  # tokens visible to queries in the layers of a second group of blocks, see windowed.py; 0: no group
    num_window_blocks: int = 0  # of that group's pool
    num_host_blocks: int = 0  # of the host's tier, see host_tier.py; 0: no such tier
    num_host_window_blocks: int = 0
    max_stores: int = 0  # concurrent copies to the host, of each group
    swaps: bool = False  # hold a preempted request's blocks in the host's tier until it runs again
    stores_prompts: bool = False  # copy the blocks of prompts to the host's tier when computed, not when evicted
    num_media_units: int = 0  # of the encoder's cache, see media.py; 0: no encoder
    media_unit: int = 1  # embeddings of a unit
    max_encoded: int = 0  # tokens of images or sources that a plan encodes, except for its first one
    whole_image: int = 0  # tokens of the longest image, if no chunk may end inside one; 0: chunks may
    max_source: int = 0  # most tokens of an encoder's input, see sources.py; 0: no encoder-decoder model

    @property
    def num_groups(self) -> int:
        """Groups of blocks: of layers without windows, or all; and of windowed layers."""
        return 2 if self.window else 1

    @property
    def host_blocks(self) -> tuple[int, ...]:
        return (self.num_host_blocks, self.num_host_window_blocks)[: self.num_groups]


class Source(NamedTuple):
    """An encoder's input, which the decoder attends to."""

    digest: bytes  # of all that its keys and values depend on
    length: int  # tokens


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Request:
    """One sequence of a request; immutable."""

    sequence_id: int
    tokens: array[int]  # of prompt and output, int32; the caller of `commit` appends results
    num_prompt: int
    limit: int  # most tokens, including the prompt; `num_prompt`: computed without yielding a token
    stop_ids: tuple[int, ...] = ()  # sampling one ends it; the usual one first
    priority: int = 0  # lower first
    root: bytes | None = b""  # only requests of equal root share blocks; None: not shared
    adapter: int = 0  # its adapter's number, 0 for none
    may_draft: bool = True  # steps with it may verify drafts
    reads_cache: bool = True  # use cached blocks; its blocks are cached in any case
    beam_group: int = 0  # `sequence_id` of its beam group's leader, see beam groups.py; 0: no beam group
    name: str = ""  # for logs and recordings
    media: tuple[Segment, ...] = ()  # its images, in order
    source: Source | None = None  # of an encoder-decoder model


@dataclass(frozen=True, slots=True, eq=False)
class Waiting:
    """A request without a slot: new, or preempted with its tokens."""

    request: Request
    order: int  # of arrival; kept when preempted
    num_tokens: int
    digests: tuple[bytes, ...]  # of the full blocks of known tokens; empty if nothing is shared

    @property
    def rank(self) -> tuple[int, int]:
        return self.request.priority, self.order


@dataclass(frozen=True, slots=True, eq=False)
class Running:
    """A request with a slot."""

    request: Request
    order: int
    digests: tuple[bytes, ...]  # of its full blocks on admission; empty if nothing is shared

    @property
    def rank(self) -> tuple[int, int]:
        return self.request.priority, self.order


class Slots(NamedTuple):
    """Columns that change every step: one row per slot, read-only, replaced as a whole."""

    epochs: np.ndarray  # int64[S]: number of the admission to the slot, 0 if free
    ids: np.ndarray  # int64[S]
    num_prefill: np.ndarray  # int32[S]: tokens that are computed in chunks; the device samples the later ones
    num_computed: np.ndarray  # int32[S]: tokens with keys and values once all planned steps have run
    length: np.ndarray  # int32[S]: tokens that exist once all planned steps have run
    num_tokens: np.ndarray  # int32[S]: tokens whose values are on the host
    num_sampled: np.ndarray  # int32[S]: planned rows with a wanted result …
    num_returned: np.ndarray  # int32[S]: … those with results, or not wanted any more
    limit: np.ndarray  # int32[S]: most tokens
    capacity: np.ndarray  # int32[S]: tokens that its blocks hold
    stop_id: np.ndarray  # int32[S]: its usual stop token; without one, at least the vocabulary's size
    has_more_stops: np.ndarray  # bool[S]: further stop tokens must be checked
    may_draft: np.ndarray  # bool[S]: its rows may verify drafts; for this and the next columns see drafting.py
    has_drafts: np.ndarray  # bool[S]: the device has drafts for it once all planned steps have run
    num_drafted: np.ndarray  # int32[S]: its recent drafts that were verified …
    num_accepted: np.ndarray  # int32[S]: … and accepted
    num_freed: np.ndarray  # int32[S]: blocks of windowed layers, from the first token on, that were freed


class Fork(NamedTuple):
    """A fork of one member of a beam group: it continues as a child of another, or of itself."""

    target: int  # ids
    source: int
    token: int  # the child's newest, after its parent's


class BlockStored(NamedTuple):
    """A block added to the prefix index."""

    digest: bytes
    parent: bytes | None  # of the previous block, None for the first
    tokens: tuple[int, ...]
    adapter: int = 0  # of the request that computed it; others with equal content share the block


class BlockRemoved(NamedTuple):
    """A block removed from the prefix index."""

    digest: bytes


class AllBlocksCleared(NamedTuple):
    """All blocks removed from the prefix index."""


BlockEvent = BlockStored | BlockRemoved | AllBlocksCleared


class State(NamedTuple):
    """The scheduler's state."""

    waiting: tuple[Waiting, ...]  # by rank
    slots: Slots
    running: tuple[Running | None, ...]  # by slot
    tables: tuple[tuple[int, ...], ...]  # by slot: its blocks in order
    pool: Pool
    num_added: int = 0
    num_admitted: int = 0
    num_planned: int = 0
    # Numbers of resident adapters: idle ones first, least recently used first; then those in use, longest in use first.
    adapters: tuple[int, ...] = ()
    block_events: tuple[BlockEvent, ...] | None = None  # since they were taken; None: not recorded
    beam_groups: tuple[tuple[int, ...], ...] = ()  # slots of each running beam group, the leader's first
    # Changes by forks, for the next plan: entries of block tables as in `Plan.table`; copies (group, slot, block), of
    # which the slot's next block must be a copy.
    entries: tuple[tuple[int, int, int], ...] = ()
    copies: tuple[tuple[int, int, int], ...] = ()
    # Of windowed layers with a separate pool:
    window_tables: tuple[tuple[int, ...], ...] = ()  # by slot: its blocks from `Slots.num_freed` on
    window_pool: Pool | None = None
    host: Host | None = None
    media: EncoderCache | None = None
    sources: tuple[tuple[int, ...], ...] = ()  # by slot: blocks of its source, of an encoder-decoder model

    @property
    def num_running(self) -> int:
        return int(np.count_nonzero(self.slots.epochs))

    @property
    def num_blocks_used(self) -> int:
        """Used blocks of `pool`; the windowed layers' share of them if larger."""
        pool, other = self.pool, self.window_pool
        used = pool.num_blocks - pool.num_available
        if other is None:
            return used
        return max(used, -(-(other.num_blocks - other.num_available) * pool.num_blocks // other.num_blocks))

    def num_deferred(self, limits: Limits) -> int:
        if not limits.max_adapters or self.num_running == limits.num_slots:
            return 0
        places = AdapterPlaces(self.adapters, _adapters_of(self.running), limits.max_adapters)
        return sum(not places.admits(entry.request.adapter) for entry in self.waiting)


def _adapters_of(running: Iterable[Running | None]) -> set[int]:
    return {record.request.adapter for record in running if record is not None}


@dataclass(frozen=True, slots=True)
class Admission:
    """A request that got a slot in this plan."""

    slot: int
    request: Request
    num_known: int  # more than its prompt if it was preempted before
    num_cached: int  # tokens in the prefix cache


NO_MOVES = host_tier.as_array(())
NO_MOVES.flags.writeable = False


class Plan(NamedTuple):
    """One step: decode rows, then prompt chunks.

    A decode row has one token, sampled on the device, and drafts after it in a step without chunks. While earlier
    drafts are uncounted only the device has the row's start: `starts` is its maximum.
    """

    now: float  # argument of `plan`
    num_decodes: int
    slots: np.ndarray  # intp[R]: numpy converts other index types
    epochs: np.ndarray  # int64[S]: the column at that time, which identifies results of earlier owners
    starts: np.ndarray  # int32[R]: position of the row's first token
    lengths: np.ndarray  # int32[R]: tokens
    samples: np.ndarray  # bool[R]: the row reaches the end of its sequence, and its result is wanted
    sample_numbers: np.ndarray  # int32[R]: `Slots.num_sampled` of the row, which identifies unwanted results
    # int32[U, 3]: slot, column of its block table, block. With G groups, index i of a group is in column i · G + group.
    table: np.ndarray
    admitted: tuple[Admission, ...] = ()
    preempted: tuple[int, ...] = ()  # ids
    number: int = 0  # of the plan
    adapters: tuple[int, ...] = ()  # resident in this step; the previous plan's object if unchanged
    num_drafts: int = 0  # of all rows
    proposes: bool = False  # the device drafts for the next step
    capacity: np.ndarray | None = None  # int32[R]: tokens that the row's blocks hold; of an engine that drafts
    # int32[·, 5]: copies before any write, in this order: group, then tier and block of source and of target (see
    # host_tier.py).
    moves: np.ndarray = NO_MOVES
    encodes: tuple[Encode, ...] = ()  # before the step

    @property
    def num_tokens(self) -> int:
        num_rows = len(self.slots)
        return num_rows + self.num_drafts if num_rows == self.num_decodes else int(self.lengths.sum())


NO_ROWS = np.zeros(0, np.intp)
NO_ROWS.flags.writeable = False


class Events(NamedTuple):
    """The results of a step: tokens for each of `ids`, and finished requests."""

    rows: np.ndarray  # of the plan
    ids: np.ndarray  # int64
    counts: np.ndarray  # int32: tokens of each row, 0 for none
    tokens: np.ndarray  # int32: of all rows, concatenated
    finished: dict[int, FinishReason]
    failed: tuple[int, ...] = ()  # ended without a token: their logits were not finite
    answered: np.ndarray = NO_ROWS  # intp[·]: the plan's rows of beam groups, whose tokens `fork` sets
    complete: tuple[int, ...] = ()  # leaders' ids of the beam groups with all results


def initial(limits: Limits) -> State:
    num_slots = limits.num_slots

    def zeros(size: int, dtype: type = np.int32) -> np.ndarray:
        column = np.zeros(size, dtype)
        column.flags.writeable = False
        return column

    slots = Slots(
        epochs=zeros(num_slots, dtype=np.int64),
        ids=zeros(num_slots, dtype=np.int64),
        num_prefill=zeros(num_slots),
        num_computed=zeros(num_slots),
        length=zeros(num_slots),
        num_tokens=zeros(num_slots),
        num_sampled=zeros(num_slots),
        num_returned=zeros(num_slots),
        limit=zeros(num_slots),
        capacity=zeros(num_slots),
        stop_id=zeros(num_slots),
        has_more_stops=zeros(num_slots, dtype=np.bool_),
        may_draft=zeros(num_slots, dtype=np.bool_),
        has_drafts=zeros(num_slots, dtype=np.bool_),
        num_drafted=zeros(num_slots),
        num_accepted=zeros(num_slots),
        num_freed=zeros(num_slots),
    )
    return State(
        waiting=(),
        slots=slots,
        running=(None,) * num_slots,
        tables=((),) * num_slots,
        pool=block_pool.make_pool(limits.num_blocks),
        block_events=() if limits.records_blocks else None,
        window_tables=((),) * num_slots if limits.window else (),
        window_pool=block_pool.make_pool(limits.num_window_blocks) if limits.window else None,
        host=host_tier.make_host(limits.host_blocks) if limits.num_host_blocks else None,
        media=media.make_cache(limits.num_media_units) if limits.num_media_units else None,
        sources=((),) * num_slots if limits.max_source else (),
    )


def take_block_events(state: State) -> tuple[State, tuple[BlockEvent, ...]]:
    events = state.block_events
    return (state._replace(block_events=()), events) if events else (state, ())


class _Columns:
    """The newest columns of `Slots`: the state's, or their replacements."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots

    def __getattr__(self, name: str) -> np.ndarray:
        return getattr(self._slots, name)


class _OwnColumns:
    """The columns of an editor for writing in place: each is copied at its first use."""

    def __init__(self, columns: _Columns) -> None:
        self._columns = columns

    def __getattr__(self, name: str) -> np.ndarray:
        own = vars(self._columns)
        if name not in own:
            own[name] = getattr(own["_slots"], name).copy()
        return own[name]


class StateEditor:
    """The next value of a state, within one call; each part is copied when it first changes.

    `slots` has the columns for reading, `own_slots` for writing in place. The lists by slot and the pool are copied at
    first use.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self._columns = _Columns(state.slots)
        self.slots = cast(Slots, self._columns)  # gives type checkers the columns' names
        self.own_slots = cast(Slots, _OwnColumns(self._columns))
        self._parts: dict[str, Any] = {}
        self.num_added = state.num_added
        self.num_admitted = state.num_admitted
        self.num_planned = state.num_planned
        self.waiting = state.waiting
        self.adapters = state.adapters
        self.beam_groups = state.beam_groups
        self.entries = state.entries
        self.copies = state.copies
        self.source_encodes: list[Encode] = []
        self.num_encoded = 0  # tokens of `source_encodes`
        self._was_cleared = False
        self._described: dict[bytes, BlockStored] = {}

    def issue(self, *, num_computed: np.ndarray, length: np.ndarray, num_sampled: np.ndarray) -> None:
        vars(self._columns).update(num_computed=num_computed, length=length, num_sampled=num_sampled)

    @property
    def pool(self) -> PoolEditor:
        if "pool" not in self._parts:
            self._parts["pool"] = PoolEditor(self._state.pool, self._state.block_events is not None)
        return self._parts["pool"]

    @property
    def window_pool(self) -> PoolEditor:
        if "window_pool" not in self._parts:
            assert self._state.window_pool is not None
            self._parts["window_pool"] = PoolEditor(self._state.window_pool)
        return self._parts["window_pool"]

    @property
    def host(self) -> HostEditor:
        if "host" not in self._parts:
            assert self._state.host is not None
            self._parts["host"] = HostEditor(self._state.host)
        return self._parts["host"]

    @property
    def media(self) -> EncoderEditor:
        if "media" not in self._parts:
            assert self._state.media is not None
            owners = (self.owner(slot).request.media for slot in self.slots.epochs.nonzero()[0].tolist())
            num_computed = self.slots.num_computed[self.slots.epochs.nonzero()[0]].tolist()
            kept = [digest for own in map(media.held, owners, num_computed) for digest in own]
            self._parts["media"] = EncoderEditor(self._state.media, kept)
        return self._parts["media"]

    @property
    def encodes(self) -> tuple[Encode, ...]:
        return tuple(self.media.encodes) if "media" in self._parts else tuple(self.source_encodes)

    @property
    def running(self) -> list[Running | None]:
        return self._list("running")

    @property
    def tables(self) -> list[tuple[int, ...]]:
        return self._list("tables")

    @property
    def window_tables(self) -> list[tuple[int, ...]]:
        return self._list("window_tables")

    @property
    def sources(self) -> list[tuple[int, ...]]:
        return self._list("sources")

    def owner(self, slot: int) -> Running:
        record = (self._parts.get("running") or self._state.running)[slot]
        if record is None:
            raise RuntimeError(f"slot {slot} has a row in the columns and no record")
        return record

    def places(self, limits: Limits) -> AdapterPlaces | None:
        most = limits.max_adapters
        return AdapterPlaces(self.adapters, _adapters_of(self.running), most) if most else None

    def rank_adapters(self) -> None:
        if self.adapters:
            self.adapters = idle_first(self.adapters, _adapters_of(self.running))

    def enqueue(self, entries: Sequence[Waiting]) -> None:
        together = (*self.waiting, *entries)
        # Entries usually belong at the end; checking every rank of a long queue would add up.
        first = max(0, len(self.waiting) - 1)
        is_sorted = all(one.rank <= other.rank for one, other in pairwise(together[first:]))
        self.waiting = together if is_sorted else tuple(sorted(together, key=lambda entry: entry.rank))

    def forget_cache(self, limits: Limits) -> None:
        self._parts["pool"] = PoolEditor(block_pool.make_pool(limits.num_blocks), self._state.block_events is not None)
        if limits.window:
            self._parts["window_pool"] = PoolEditor(block_pool.make_pool(limits.num_window_blocks))
        if limits.num_host_blocks:
            self._parts["host"] = HostEditor(host_tier.make_host(limits.host_blocks))
        if limits.num_media_units:
            self._parts["media"] = EncoderEditor(media.make_cache(limits.num_media_units), ())
        self._was_cleared = True

    def describe(self, request: Request, digests: Sequence[bytes], full: range, block_size: int) -> None:
        """Record the contents of a request's blocks `full`, being indexed, for `block_events`."""
        if self._state.block_events is None:
            return
        for index in full:
            parent = digests[index - 1] if index else None
            tokens = tuple(request.tokens[index * block_size : (index + 1) * block_size])
            self._described[digests[index]] = BlockStored(digests[index], parent, tokens, request.adapter)

    def done(self) -> State:
        old = self._state
        columns: dict[str, Any] = vars(self._columns)
        new_slots: Slots = columns.pop("_slots")
        if columns:
            for column in columns.values():
                column.setflags(write=False)
            new_slots = Slots(*map(columns.get, Slots._fields, new_slots))  # a third of the time of `_replace`
        pool = self._parts.get("pool")
        events = old.block_events
        if events is not None and pool is not None:
            events = (*events, *([AllBlocksCleared()] if self._was_cleared else ()), *self._changes(pool))
        lists = {name: tuple(part) for name, part in self._parts.items() if isinstance(part, list)}
        state = State(
            waiting=self.waiting,
            slots=new_slots,
            running=lists.get("running", old.running),
            tables=lists.get("tables", old.tables),
            pool=old.pool if pool is None else pool.done(),
            num_added=self.num_added,
            num_admitted=self.num_admitted,
            num_planned=self.num_planned,
            adapters=self.adapters,
            block_events=events,
            beam_groups=self.beam_groups,
            entries=self.entries,
            copies=self.copies,
        )
        if old.host is not None:
            host = self._parts.get("host")
            state = state._replace(host=old.host if host is None else host.done())
        if old.media is not None:
            cache = self._parts.get("media")
            state = state._replace(media=old.media if cache is None else cache.done())
        if "sources" in lists:
            state = state._replace(sources=lists["sources"])
        elif old.sources:
            state = state._replace(sources=old.sources)
        if old.window_pool is None:
            return state
        window_pool = self._parts.get("window_pool")
        return state._replace(
            window_tables=lists.get("window_tables", old.window_tables),
            window_pool=old.window_pool if window_pool is None else window_pool.done(),
        )

    def _changes(self, pool: PoolEditor) -> Iterator[BlockEvent]:
        for is_stored, digest in pool.changes:
            yield self._described[digest] if is_stored else BlockRemoved(digest)

    def _list(self, name: str) -> list[Any]:
        part = self._parts.get(name)
        if part is None:
            part = self._parts[name] = list(getattr(self._state, name))
        return part
