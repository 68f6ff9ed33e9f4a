"""A naive second scheduler, with which the simulation compares the production scheduler.

It uses lists and dicts, and looks at every request in every step. As a `jaxllm.scheduler.recorded.Recorder` it receives
each call of the production scheduler, computes the result by simple rules, and compares: every plan row by row, every
block that is allocated, and at times the whole state. The key of a block's content is the hash of the sequence up to
the block's end (`oracle.Truth.chain`). The least recently released cached block is evicted first.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np

from jaxllm.scheduler import drafting
from jaxllm.scheduler.host_tier import DEVICE, Landed
from jaxllm.scheduler.recorded import RecordedScheduler
from jaxllm.scheduler.state import Events, Fork, Limits, Plan, Request
from tests.simulation.adapters import Places
from tests.simulation.beams import BeamTruth
from tests.simulation.blocks import Blocks
from tests.simulation.device import Violation
from tests.simulation.host import Tier
from tests.simulation.media import Encoder, Image
from tests.simulation.oracle import Truth
from tests.simulation.sources import Source, Sources

CHECK_EVERY = 16  # plans between two comparisons of the whole state
INDEX_EVERY = 128  # … and of the prefix index, which takes longer


@dataclass(eq=False)
class Entry:
    """A sequence, waiting or running: a sample of a request, or a beam. Most fields are those of `state.Slots`."""

    id: int
    truth: Truth
    order: int
    priority: int
    is_shared: bool  # other requests may use its blocks
    reads_cache: bool
    num_tokens: int  # tokens whose values are on the host
    adapter: int = 0  # number of its adapter, 0: no adapter
    beam_group: int = 0  # id of the first beam of its search, 0: not a beam
    is_idle: bool = False  # a beam without tokens: the first beam alone computes the prompt
    seen: int = 0  # `num_tokens` at the last check that its client received the tokens
    is_late: bool = False  # its mask was late: its last token must be computed again
    brought: int = 0  # full blocks of its tokens when it was queued
    slot: int = -1  # -1: waiting, -2: ended
    admission: int = 0  # number of times that it was admitted
    num_prefill: int = 0  # tokens that the host sends to the device
    num_computed: int = 0  # tokens in the cache once all planned steps have run
    length: int = 0  # tokens that exist once all planned steps have run
    may_draft: bool = True
    has_drafts: bool = False
    num_drafted: int = 0  # recent drafts that were compared …
    num_accepted: int = 0  # … and accepted
    unsettled: int = 0  # drafts in flight, which `num_computed` and `length` count as accepted
    num_sampled: int = 0  # planned rows with a wanted result …
    num_returned: int = 0  # … those with results, or not wanted any more
    table: list[int] = field(default_factory=list)
    window: dict[int, int] = field(default_factory=dict)  # blocks of windowed layers, by index in the sequence
    num_freed: int = 0  # index of the first of them: earlier blocks are released
    images: Sequence[Image] = ()
    source: Source | None = None
    source_blocks: list[int] = field(default_factory=list)

    @property
    def reach(self) -> int:
        """The index of the next block of windowed layers."""
        return self.num_freed + len(self.window)

    @property
    def rank(self) -> tuple[int, int]:
        return self.priority, self.order

    @property
    def limit(self) -> int:
        return self.truth.limit


def is_stuck(entry: Entry) -> bool:
    """Whether a request is at a position where its grammar and its parameters together allow no token."""
    return entry.truth.outcome().reason == "error" and entry.num_tokens == entry.truth.fails_at


def is_held(entry: Entry) -> bool:
    """Whether a beam waits for its search to choose its next token."""
    return bool(entry.beam_group) and entry.num_tokens < entry.length


class Reference:
    """The naive scheduler. `claim` makes the entries of requests that are queued."""

    def __init__(self, limits: Limits, claim: Callable[[Sequence[Request]], list[Entry]]) -> None:
        self.limits = limits
        self.core: RecordedScheduler | None = None  # the production scheduler
        # Rows by number: entry, turn, whether it samples, admission, drafts.
        self.plans: dict[int, list[tuple[Entry, int, bool, int, int]]] = {}
        self.by_id: dict[int, Entry] = {}
        self.waiting: list[Entry] = []
        self.running: dict[int, Entry] = {}  # by slot
        self.num_added = 0
        self.num_planned = 0
        self.num_generated = self.num_forced = 0
        self.late: Counter[str] = Counter()  # rows due for another computation that ended or were preempted first
        self.num_preempted = 0
        self.num_resets = self.num_skipped = 0
        self.drafting: Counter[str] = Counter()  # events, by name
        self.places = Places(limits.max_adapters)
        self._passed_over: tuple[Entry, int, set[tuple[int, int]]] | None = None  # see `_check_patience`
        self.beam_groups: dict[int, list[Entry]] = {}  # running beam searches, by the id of the first beam
        # For the next plan: entries of block tables (entry, index, group, block), and copies (group, entry, source).
        self.entries: list[tuple[Entry, int, int, int]] = []
        self.copies: list[tuple[int, Entry, int]] = []
        self.unread: deque[list[int]] = deque()  # entries of a plan's block table, not compared yet
        self.windows: Counter[str] = Counter()  # events of windowed layers' blocks, by name
        self.num_readmitted = 0
        # Of the last plans, the newest last: the entries that each samples, with their admissions.
        self.batches: deque[list[tuple[Entry, int]]] = deque([[]] * limits.num_ticks, limits.num_ticks)
        self.ticks: Counter[str] = Counter()  # events of batches in flight, by name
        self._began: list[tuple[int, int]] = []  # tokens and cached tokens of beams that this plan admits
        self._claim = claim
        self._forget_cache()

    def _forget_cache(self) -> None:
        self.blocks = Blocks(self.limits.num_blocks)
        self.windowed = Blocks(self.limits.num_window_blocks)
        self.encoder = Encoder(
            self.limits.num_media_units, self.limits.media_unit, self.limits.max_encoded, self.limits.whole_image > 0
        )
        self.sources = Sources(self.blocks, self.limits.block_size, self.limits.max_encoded)
        self.host = Tier(self.limits.host_blocks if self.limits.num_host_blocks else (), self.limits.max_stores)

    @property
    def num_available(self) -> int:
        return self.blocks.num_available

    # The calls of the production scheduler.

    def begin(self, core: RecordedScheduler) -> None:
        self.core = core

    def close(self) -> None:
        """Do nothing: no file is open."""

    def added(self, requests: Sequence[Request]) -> None:
        for entry in self._claim(requests):
            entry.order = self.num_added
            entry.brought = entry.num_tokens // self.limits.block_size
            self.num_added += 1
            self.by_id[entry.id] = entry
            self._enqueue(entry)

    def aborted(self, reasons: Mapping[int, str]) -> None:
        gone = [self.by_id.pop(each) for each in reasons if each in self.by_id]
        for entry in sorted(gone, key=lambda entry: entry.slot):
            if entry.slot < 0:
                self.waiting.remove(entry)
            else:
                self._vacate(entry)
        for entry in gone:
            entry.slot = -2
        self.host.let_go({entry.id for entry in gone})
        self.places.settle(self.running.values())

    def landed(self, landed: Sequence[Landed]) -> None:
        self.host.land(landed)

    def received(self, owner: int, blocks: Sequence[tuple[int, int]], places: Sequence[int]) -> None:
        entry, size = self.by_id.get(owner), self.limits.block_size
        is_due = entry is not None and entry.slot == -1 and entry.is_shared and bool(self.host.groups)
        contents, given = list[tuple[int, int]](), list[int]()
        for (group, index), place in zip(blocks, places, strict=True):
            if entry is not None and is_due and group < self.limits.num_groups and index < entry.num_tokens // size:
                contents.append((group, self._key(entry, index)))
                given.append(place)
            elif place != -1:
                raise Violation("a block gets a place in the host that no waiting request has")
        self.host.receive(owner, contents, given)

    def passed_over(self, request_ids: Collection[int]) -> None:
        waiting = {entry.id for entry in self.waiting if not entry.beam_group}
        if not waiting.issuperset(request_ids):
            raise Violation("a request is passed over that does not wait, or is a beam")
        self.host.fired["passed_over"] += len(self.host.passed_over - {*request_ids})
        self.host.passed_over = {*request_ids}

    def was_reset(self) -> None:
        self.num_resets += 1
        for slot in sorted(self.running):
            entry = self.running.pop(slot)
            self._requeue(entry)
        self.beam_groups.clear()
        self.entries, self.copies = [], []
        self._forget_cache()
        self.plans.clear()
        self.places.clear()
        self._passed_over = None

    def planned(self, plan: Plan) -> None:
        size = self.limits.block_size
        self.unread = deque(plan.table.tolist())
        self.host.begin(plan.moves.tolist())
        self.blocks.evicted, self.windowed.evicted = [], []
        self.host.store_due(self.num_planned + 1, [self.blocks.index, self.windowed.index])
        gone = [place for _, entry in sorted(self.running.items()) for place in self._give_back(entry)]
        preempted: list[int] = []
        while True:
            growing = [
                entry
                for _, entry in sorted(self.running.items())
                if entry.length > len(entry.table) * size and entry.length < entry.limit and not self._waits(entry)
            ]
            counts = [-(-entry.length // size) - len(entry.table) for entry in growing]
            lacking = {
                entry: count
                for _, entry in sorted(self.running.items())
                if self.limits.window and entry.num_computed < entry.num_prefill
                if (count := -(-self.encoder.least(entry.images, entry.num_computed) // size) - entry.reach) > 0
            }
            due = sum(
                count for entry, count in zip(growing, counts, strict=True) if entry.num_computed >= entry.num_prefill
            )
            fits = not self.limits.window or due + sum(lacking.values()) <= self.windowed.num_available
            self.windows["window_preempted"] += sum(counts) <= self.num_available and not fits
            if sum(counts) <= self.num_available and fits:
                break
            surely = [-(-(each.length - each.unsettled) // size) - len(each.table) for each in growing]
            if fits and sum(max(0, count) for count in surely) <= self.num_available:
                raise Violation("I16: a request is preempted for a guess")
            victim = max(
                (
                    each
                    for each in self.running.values()
                    if not each.is_idle and (each.length < each.limit or each.num_computed < each.num_prefill)
                ),
                key=lambda each: each.rank,
            )
            before, slot = self.num_available + self.windowed.num_available, victim.slot
            victims = self.beam_groups.get(victim.beam_group, [victim])
            for each in list(victims):
                preempted.append(each.id)
                self.late["late_preempted"] += each.is_late
                each.is_late = False
                self._vacate(each, is_preempted=True)
                self._requeue(each)
            self.places.settle(self.running.values())
            after = self.num_available + self.windowed.num_available
            if after <= before and not any(each in (*growing, *lacking) for each in victims):
                raise Violation(f"preempting the owner of slot {slot} gave no block")
        for entry, index, group, block in self.entries:  # without those of preempted requests
            self._read(entry.slot, index, group, block)
        for slot, index in gone:
            self._read(slot, index, 1, self.limits.num_window_blocks)
        self._hand_out(growing, counts)
        self._hand_out([*lacking], [*lacking.values()], windowed=True)
        moves = [
            [group, DEVICE, source, DEVICE, [*entry.window.values()][-1] if group else entry.table[-1]]
            for group, entry, source in self.copies
        ]
        self.entries, self.copies = [], []

        self.sources.begin(plan.encodes if self.limits.max_source else ())
        images = () if self.limits.max_source else plan.encodes
        self.encoder.begin(images, [(entry.images, entry.num_computed) for entry in self.running.values()])
        rows: list[tuple[Entry, int, int]] = []
        works = [entry for _, entry in sorted(self.running.items()) if entry.num_computed < entry.length]
        decodes = [
            entry
            for entry in works
            if entry.num_computed >= entry.num_prefill and entry.length < entry.limit and not self._waits(entry)
        ]
        decodes = self._shared(decodes)
        rows += [(entry, entry.num_computed, 1) for entry in decodes]
        budget = self.limits.max_step_tokens - len(decodes)
        chunks: list[tuple[Entry, int, int]] = []
        for entry in sorted(
            (entry for entry in works if entry.num_computed < entry.num_prefill), key=lambda entry: entry.rank
        ):
            if budget and len(chunks) < self.limits.max_step_chunks:
                length = min(entry.num_prefill - entry.num_computed, budget)
                length = self.encoder.reach(entry.id, entry.images, entry.num_computed, length, entry.adapter)
                if not length:
                    continue
                length = self._extend(entry, entry.num_computed, length, len(self.running))
                length = self.encoder.shortened(entry.images, entry.num_computed, length)
                if not length:
                    continue
                chunks.append((entry, entry.num_computed, length))
                budget -= chunks[-1][2]
                self._publish_chunk(*chunks[-1])
        admitted: list[tuple[int, int, int, int]] = []
        before = {(entry.id, entry.admission): entry.adapter for entry in self.running.values()}
        residents = self.places.residents
        self.places.begin()
        self._began = []
        passed: set[int] = set()  # beam searches that were considered
        for entry in [] if preempted else list(self.waiting):
            if entry.beam_group in passed:
                continue
            if not budget or len(chunks) == self.limits.max_step_chunks or len(self.running) == self.limits.num_slots:
                break
            if entry.id in self.host.passed_over:
                continue
            if not self.places.admits(entry.adapter):
                self.num_skipped += 1
                passed |= {entry.beam_group} - {0}
                continue
            if self.limits.whole_prompts and entry.num_tokens > budget:
                break
            if entry.beam_group:
                passed.add(entry.beam_group)
                members = [each for each in self.waiting if each.beam_group == entry.beam_group]
                found = self._find(members)
                if found is None:
                    break
                self.places.enter(entry.adapter)
                budget = self._admit_beam_group(members, found, budget, chunks)
                admitted += [
                    (each.slot, each.id, known, start)
                    for each, (known, start) in zip(members, self._began[-len(members) :], strict=True)
                ]
                continue
            hits = self._hits(entry, with_host=True)
            here = [block for block in hits if block >= 0]
            num_new = -(-entry.num_tokens // size) - len(hits)
            source = self.sources.find(entry)
            if source is None:
                break
            shared = [*here, *source[0]]
            if num_new + len(hits) - len(here) + source[1] > self.blocks.num_left(shared) - len(self.running):
                break
            near = self._near(entry, len(hits))
            near_here = [block for block in near.values() if block >= 0]
            least = self._least(entry, len(hits), near) + len(near) - len(near_here)
            if self.limits.window and least > self.windowed.num_left(near_here) - len(self.running):
                self.windows["window_waits"] += 1
                break
            start = len(hits) * size
            length = min(entry.num_tokens - start, budget)
            length = self.encoder.reach(entry.id, entry.images, start, length, entry.adapter)
            if not length:
                break
            self.waiting.remove(entry)
            self.places.enter(entry.adapter)
            entry.slot = min(set(range(self.limits.num_slots)) - set(self.running))
            self.running[entry.slot] = entry
            entry.admission += 1
            spare = len(self.running) - 1
            self.blocks.share(shared)
            self.windowed.share(near_here)
            self.sources.enter(entry, *source)
            entry.num_prefill = entry.length = entry.num_tokens
            entry.num_computed = start
            entry.has_drafts, entry.num_drafted, entry.num_accepted, entry.unsettled = False, 1, 1, 0
            self._enter(entry, hits, near, num_new)
            length = self.encoder.shortened(entry.images, start, self._extend(entry, start, length, spare))
            chunks.append((entry, start, length))
            if not chunks[-1][2]:
                raise Violation("a request is admitted that has no block for a token")
            budget -= chunks[-1][2]
            self._publish_chunk(*chunks[-1])
            admitted.append((entry.slot, entry.id, entry.num_tokens, start))
        self.host.let_go({each for _, each, _, _ in admitted})
        rows += chunks
        drafts = [0] * len(rows)
        proposes = False
        if self.limits.max_drafts:
            self.drafting["draft_waits"] += any(0 < each.unsettled and each.length >= each.limit for each in works)
            if chunks or not all(entry.may_draft for entry in decodes):
                for entry, *_ in rows:
                    entry.has_drafts = False
            else:
                drafts, blocks, proposes = self._draft(decodes)
                self._hand_out(decodes, blocks)

        expected: list[tuple[int, int, int, bool]] = []
        record: list[tuple[Entry, int, bool, int, int]] = []
        for (entry, start, length), count in zip(rows, drafts, strict=True):
            end = start + length
            samples = end == entry.length
            entry.num_computed = end + count
            entry.length += count + (samples and entry.length < entry.limit)
            entry.unsettled += count
            entry.num_sampled += samples
            entry.is_late = False
            expected.append((entry.slot, start, length + count, samples))
            record.append((entry, entry.num_sampled, samples, entry.admission, count))
        self.num_planned += 1
        self.ticks["empty_tick"] += self.limits.num_ticks > 1 and not rows and any(self._flying)
        self.batches.append([(entry, entry.admission) for entry, _, samples, *_ in record if samples])
        if self.host.groups:
            evicted = self.blocks.evicted, self.windowed.evicted
            moves = [*self.host.finish(self.num_planned, evicted[: self.limits.num_groups]), *moves]
        self.num_preempted += len(preempted)
        self.plans[plan.number] = record
        columns = plan.slots.tolist(), plan.starts.tolist(), plan.lengths.tolist(), plan.samples.tolist()
        if list(zip(*columns, strict=True)) != expected:
            raise Violation(f"a plan of rows {list(zip(*columns, strict=True))}, where {expected} is due")
        if plan.num_decodes != len(decodes) or plan.preempted != tuple(preempted):
            raise Violation("decodes or preemptions are not what is due")
        if [
            (each.slot, each.request.sequence_id, each.num_known, each.num_cached) for each in plan.admitted
        ] != admitted:
            raise Violation("admissions are not what is due")
        if self.unread:
            raise Violation("the plan's block table has too many entries")
        if self.encoder.has_unread or self.sources.has_unread:
            raise Violation("a plan encodes images or sources that no row reads")
        if plan.moves.tolist() != moves:
            raise Violation(f"a plan moves blocks {plan.moves.tolist()}, where {moves} are due")
        if plan.adapters != self.places.residents:
            raise Violation(f"adapters {plan.adapters} are resident, where {self.places.residents} are due")
        if len(plan.adapters) > self.limits.max_adapters or len({*plan.adapters} - {*residents}) > 1:
            raise Violation("I15: more adapters are resident than there are places, or more than one is new")
        if not {entry.adapter for entry, *_ in rows} <= {0, *plan.adapters}:
            raise Violation("I15: a request runs whose adapter is not resident")
        self._check_patience(before, {each.request.sequence_id for each in plan.admitted})
        if plan.num_drafts != sum(drafts) or plan.proposes != proposes:
            raise Violation("other drafts are verified or proposed than are due")
        num_tokens = sum(length for _, _, length in rows) + sum(drafts)
        if any(drafts) and (num_tokens > self.limits.max_verified or max(drafts) > self.limits.max_drafts):
            raise Violation("I5: more drafts than a step or a row may have")
        if plan.number != self.num_planned or num_tokens != plan.num_tokens or num_tokens > self.limits.max_step_tokens:
            raise Violation("I5: a plan beyond its budget, or counted wrongly")
        if self.num_planned % CHECK_EVERY == 0:
            self.compare(with_index=self.num_planned % INDEX_EVERY == 0)

    def committed(
        self,
        plan: Plan,
        tokens: np.ndarray,
        is_finite: np.ndarray | None,
        counts: np.ndarray | None,
        sampled: np.ndarray | None,
        events: Events,
    ) -> None:
        record = self.plans.pop(plan.number, [])
        failed: list[Entry] = []
        ended: list[Entry] = []
        fresh: dict[int, int] = {}  # new tokens of each request
        reasons: dict[int, str] = {}
        ids: list[int] = []
        wanted = [
            (row, entry, turn, drafts)
            for row, (entry, turn, samples, admission, drafts) in enumerate(record)
            if samples and entry.slot >= 0 and entry.admission == admission and turn > entry.num_returned
        ]
        if is_finite is not None:
            for _, entry, *_ in [each for each in wanted if not is_finite[each[0]]]:
                failed += [each for each in self.beam_groups.get(entry.beam_group, [entry]) if each not in failed]
        answered: list[int] = []
        for row, entry, turn, drafts in wanted:
            if entry in failed:
                continue
            entry.num_returned = turn
            if entry.beam_group:
                answered.append(row)
                continue
            if counts is not None and not counts[row]:  # the mask was late: the last token is computed again
                entry.num_returned, entry.length, entry.num_computed = (
                    entry.num_sampled,
                    entry.num_tokens,
                    entry.num_tokens - 1,
                )
                entry.num_prefill = entry.num_tokens if self.limits.max_drafts else entry.num_computed
                entry.is_late = True
                continue
            given = [int(tokens[row])] if counts is None else tokens[row, : counts[row]].tolist()
            got, own = 0, 1 if sampled is None else int(sampled[row])
            if not 1 <= own <= 1 + drafts:
                raise Violation(f"request {entry.id} has sampled {own} tokens with {drafts} drafts")
            if drafts:
                self._settle(entry, drafts, own)
            for token in given[: entry.limit - entry.num_tokens]:
                entry.truth.ensure(entry.num_tokens + 1)
                if got >= own and not entry.truth.is_forced(entry.num_tokens):
                    raise Violation(f"request {entry.id} got a token that was neither sampled nor forced")
                if token != entry.truth.tokens[entry.num_tokens]:
                    raise Violation(f"I6: request {entry.id} got a token that is not its own")
                entry.num_tokens += 1
                got += 1
                if token in entry.truth.stop_ids:
                    reasons[entry.id] = "stop"
                    break
            self.num_generated += got
            self.num_forced += max(0, got - own)
            ids.append(entry.id)
            fresh[entry.id] = got
            if entry.id not in reasons and entry.num_tokens >= entry.limit:
                reasons[entry.id] = "length"
            if entry.id in reasons:
                ended.append(entry)
            elif got > own:  # forced tokens must be computed; rows in flight lack them
                entry.num_prefill = entry.length = entry.num_tokens
                entry.num_returned = entry.num_sampled
        touched = {record[row][0].beam_group for row in answered}
        complete = [
            beam_group for beam_group in self.beam_groups if beam_group in touched and self._has_answered(beam_group)
        ]
        self.num_generated += sum(len(self.beam_groups[beam_group]) for beam_group in complete)
        if events.answered.tolist() != answered or events.complete != tuple(complete):
            raise Violation(f"the rows {events.answered} of beams have answered, where {answered} are due")
        for entry in failed:
            for index in range(min(entry.brought, len(entry.table))) if entry.is_shared else ():
                self.blocks.forget(self._key(entry, index), entry.table[index])
                if index in entry.window:
                    self.windowed.forget(self._key(entry, index), entry.window[index])
            for index in range(min(entry.brought, entry.num_freed)) if entry.is_shared else ():
                self.windowed.discard(self._key(entry, index))
            for index in range(entry.brought) if entry.is_shared else ():
                self.host.forget(self._key(entry, index))
        for entry in failed:
            self.sources.forget(entry)
        for entry in failed:
            self.encoder.forget(entry.images)
            self._vacate(entry, publishes=False)
        self.places.settle(self.running.values())
        for entry in ended:
            self._vacate(entry, fresh=fresh[entry.id])
        self.places.settle(self.running.values())
        if (
            events.finished != reasons
            or events.ids.tolist() != ids
            or events.counts.tolist() != [fresh[each] for each in ids]
            or events.failed != tuple(each.id for each in failed)
        ):
            raise Violation(f"a step gave {events}, where {ids}, {reasons} and {len(failed)} failures are due")
        for entry in (*failed, *ended):
            del self.by_id[entry.id]
            entry.slot = -2

    def forked(self, moves: Sequence[Fork]) -> None:
        """Continue each beam as a child of itself or of another beam."""
        size = self.limits.block_size
        beam_group = self.beam_groups[self.by_id[moves[0].target].beam_group]
        if sorted(move.target for move in moves) != sorted(each.id for each in beam_group):
            raise Violation("a fork moves others than the beams of one search")
        if not self._has_answered(beam_group[0].beam_group):
            raise Violation("a search goes on before all of its beams have answered")
        first = beam_group[0].truth
        assert isinstance(first, BeamTruth)
        end, num_prompt = beam_group[0].num_computed, first.num_prompt
        old = {
            each.id: (each.table, each.brought, each.truth.tokens[: end + 1].tolist(), each.truth.chain.tolist())
            for each in beam_group
        }
        windows = {each.id: (each.window, each.num_freed) for each in beam_group}
        copies: list[tuple[int, Entry, int]] = []
        entries: list[tuple[Entry, int, int, int]] = []
        becomes = [(*old[move.source][2][num_prompt:end], move.token) for move in moves]
        first.search.step()
        if first.search.is_over or sorted(becomes) != sorted(tokens for tokens, _, _ in first.search.running):
            raise Violation(f"the beams go on as {becomes}, where {first.search.running} are due")
        stays = {move.source for move in moves if move.source == move.target}
        for move in moves:
            target, table = self.by_id[move.target], old[move.source][0]
            if move.target == move.source:
                continue
            is_first = move.source not in stays
            stays.add(move.source)
            shared = table if is_first else table[: end // size]
            self.blocks.share(shared)
            target.table = list(shared)
            for index, block in enumerate(shared):
                if old[move.target][0][index : index + 1] != [block]:
                    self.entries.append((target, index, 0, block))
            (window, behind), (before, old_behind) = windows[move.source], windows[move.target]
            target.window = {at: block for at, block in window.items() if is_first or at < end // size}
            target.num_freed = behind
            self.windowed.share(target.window.values())
            nothing = self.limits.num_window_blocks
            for index in range(target.reach if self.limits.window else 0):
                block = target.window.get(index, nothing)
                if block != (nothing if index < old_behind else before.get(index)):
                    entries.append((target, index, 1, block))
            if end % size and not is_first:
                self.copies.append((0, target, table[end // size]))
                if self.limits.window:
                    copies.append((1, target, window[end // size]))
        self.entries += entries
        self.copies += copies
        for move in moves:
            target = self.by_id[move.target]
            if move.target != move.source:
                self._release(target, dict(enumerate(old[move.target][0])), target.brought, self.blocks)
                self._release(target, windows[move.target][0], target.brought, self.windowed)
        for move in moves:
            target = self.by_id[move.target]
            target.brought = old[move.source][1]
            assert isinstance(target.truth, BeamTruth)
            target.truth.become(old[move.source][2][:end], old[move.source][3][:end], move.token)
            if target.is_idle:
                target.is_idle, target.num_prefill = False, end + 1
            target.num_computed, target.length, target.num_tokens = end, end + 1, end + 1

    # The rules.

    @property
    def _flying(self) -> list[list[Entry]]:
        """The entries of each batch that is still in flight in the next plan's tick."""
        return [
            [
                entry
                for entry, admission in batch
                if entry.slot >= 0 and entry.admission == admission and entry.num_computed >= entry.num_prefill
            ]
            for batch in list(self.batches)[1:]
        ]

    def _waits(self, entry: Entry) -> bool:
        """Whether an entry cannot decode: its newest token is not chosen yet, or on its way through the stages."""
        return is_held(entry) or any(entry in batch for batch in self._flying)

    def _shared(self, decodes: list[Entry]) -> list[Entry]:
        """Return the rows of this tick, so that the rows of all ticks are as equal as they can be made by waiting."""
        if self.limits.num_ticks == 1 or not decodes:
            return decodes
        sizes = [len(decodes), *(sum(entry.length < entry.limit for entry in batch) for batch in self._flying)]
        sums = [sum(sizes[:at]) for at in range(len(sizes) + 1)]
        numbers = range(1, 1 + len(decodes))
        count = next(each for each in numbers if any(each * at >= sums[at] for at in range(1, len(sums))))
        back = [entry for entry, admission in self.batches[0] if entry.admission == admission]
        late = [entry for entry in decodes if entry not in back]
        self.ticks["left_for_later"] += count < len(decodes)
        self.ticks["waited_tick"] += bool(late)
        chosen = [*late, *(entry for entry in decodes if entry in back)][:count]
        return [entry for entry in decodes if entry in chosen]

    def _has_answered(self, beam_group: int) -> bool:
        return all(
            each.is_idle
            or (
                each.num_computed == each.num_tokens
                and each.length == each.num_tokens + 1
                and each.num_sampled == each.num_returned
            )
            for each in self.beam_groups[beam_group]
        )

    def _seen_from(self, entry: Entry) -> int:
        """Return the index of the first block of windowed layers that a later query of a request may see.

        The next query is at the next token, or at the last known token if that is computed again. The first token of
        its block counts, because another request that finds the prefix begins there. A request without work keeps its
        blocks, since a plan without rows is not sent.
        """
        size, window = self.limits.block_size, self.limits.window
        at = min(entry.num_computed, entry.num_tokens - 1)
        first = at - at % size - window + 1  # the first token that is seen from there
        works = entry.num_computed < entry.num_prefill or entry.num_computed < entry.length < entry.limit
        return max(entry.num_freed, first // size) if window and works and not self._waits(entry) else entry.num_freed

    def _give_back(self, entry: Entry) -> list[tuple[int, int]]:
        """Release the blocks that no later query sees; return pairs of their slot and index."""
        end = self._seen_from(entry)
        self.windows["window_given_back"] += end > entry.num_freed
        gone = {index: entry.window.pop(index) for index in range(entry.num_freed, end)}
        self._release(entry, gone, entry.brought, self.windowed)
        entry.num_freed = end
        self.entries = [each for each in self.entries if each[0] is not entry or not each[2] or each[1] not in gone]
        return [(entry.slot, index) for index in gone]

    def _near(self, entry: Entry, count: int) -> dict[int, int]:
        """Return the blocks of windowed layers that the first query after a hit of `count` blocks sees, by index."""
        size = self.limits.block_size
        first = max(0, (count * size - self.limits.window + 1) // size) if self.limits.window else count
        return {index: self._find_block(1, self._key(entry, index)) for index in range(first, count)}

    def _least(self, entry: Entry, count: int, near: Mapping[int, int]) -> int:
        """Return the number of new blocks of windowed layers that a request needs to be admitted."""
        size, window = self.limits.block_size, self.limits.window
        if not window:
            return 0
        least = min(-(-entry.num_tokens // size) - count, -(-(window - 1) // size) + 2 - len(near))
        return max(least, -(-self.encoder.least(entry.images, count * size) // size) - count)

    def _enter(self, entry: Entry, hits: Sequence[int], near: Mapping[int, int], num_new: int) -> None:
        """Start a request with the cached blocks that it hits and `num_new` new blocks."""
        entry.table, entry.window = list(hits), {}
        for index, block in enumerate(hits):
            entry.table[index] = self._use(entry, index, 0, block)
        self._hand_out([entry], [num_new], windowed=None)
        entry.window, entry.num_freed = dict(near), len(hits) - len(near) if self.limits.window else 0
        for index in range(len(hits) if self.limits.window else 0):
            block = self._use(entry, index, 1, near.get(index, self.limits.num_window_blocks))
            entry.window |= {index: block} if index in near else {}

    def _use(self, entry: Entry, index: int, group: int, found: int) -> int:
        """Use a cached block, `found`, of the device; or load block b of the host's tier, where `found` is ~b."""
        if found >= 0:
            return self._read(entry.slot, index, group, found)
        blocks, key = (self.blocks, self.windowed)[group], self._key(entry, index)
        block = self._read(entry.slot, index, group)
        blocks.take(block, bool(blocks.free))
        blocks.index[key] = block
        self.host.load(group, ~found, block, key)
        return block

    def _find_block(self, group: int, key: int, with_host: bool = True) -> Any:
        """Return the block with this content, ~b for block b of the host's tier, or None."""
        block = (self.blocks, self.windowed)[group].index.get(key)
        return self.host.find(group, key) if block is None and with_host else block

    def _extend(self, entry: Entry, start: int, length: int, spare: int) -> int:
        """Allocate available blocks of windowed layers for a chunk; return the number of tokens that fit."""
        if not self.limits.window:
            return length
        size = self.limits.block_size
        wanted = -(-(start + length) // size) - entry.reach
        count = max(0, min(wanted, self.windowed.num_available - spare))
        self._hand_out([entry], [count], windowed=True)
        self.windows["window_shortened"] += count < wanted
        return min(length, entry.reach * size - start)

    def _read(self, slot: int, index: int, group: int, due: int | None = None) -> int:
        """Read the next entry of the plan's block table, check its slot, index and group, and `due` if given."""
        groups = 2 if self.limits.window else 1
        if not self.unread or self.unread[0][:2] != [slot, groups * index + group]:
            raise Violation(f"the plan's block table misses an entry of slot {slot}: block {index} of {group}")
        block = self.unread.popleft()[2]
        if due is not None and block != due:
            raise Violation(f"the plan's block table names block {block}, where {due} is due")
        return block

    def _find(self, members: list[Entry]) -> list[tuple[list[int], Entry | None, int]] | None:
        """Return the blocks that each beam hits or shares with an earlier beam; None unless all can be admitted."""
        size = self.limits.block_size
        if len(members) > self.limits.num_slots - len(self.running):
            return None
        is_new = members[0].num_tokens == members[0].truth.num_prompt
        found: list[tuple[list[int], Entry | None, int]] = []
        num_new, num_windowed, shared, near = 0, 0, set(), set()
        for number, entry in enumerate(members):
            if is_new and number:
                num_new += 1  # for its first sampled token
                num_windowed += 1
                continue
            hits, best = self._hits(entry), None
            most = len(hits)
            for other in [] if self.limits.window else members[:number]:
                pairs = zip(
                    (self._key(entry, index) for index in range((entry.num_tokens - 1) // size)),
                    (self._key(other, index) for index in range(other.num_tokens // size)),
                    strict=False,
                )
                count = next((at for at, (one, two) in enumerate(pairs) if one != two), (entry.num_tokens - 1) // size)
                if count > most:
                    most, best = count, other
            found.append(([], best, most) if best else (hits, None, most))
            shared |= {*found[-1][0]}
            num_new += -(-entry.num_tokens // size) - most
            if self.limits.window:
                own = self._near(entry, most)
                near |= {*own.values()}
                num_windowed += self._least(entry, most, own)
        source = self.sources.find(members[0])
        if source is None:
            return None
        if num_new + source[1] > self.blocks.num_left(shared | {*source[0]}) - len(self.running):
            return None
        if self.limits.window and num_windowed > self.windowed.num_left(near) - len(self.running):
            self.windows["window_waits"] += 1
            return None
        return found

    def _admit_beam_group(
        self,
        members: list[Entry],
        found: list[tuple[list[int], Entry | None, int]],
        budget: int,
        chunks: list[tuple[Entry, int, int]],
    ) -> int:
        """Allocate slots and blocks for all beams of a search; return the remaining token budget."""
        size = self.limits.block_size
        self.beam_groups[members[0].beam_group] = members
        self.num_readmitted += len(found) == len(members) > 1
        nears = [self._near(entry, len(hits)) for entry, (hits, _, _) in zip(members, found, strict=False)]
        for (hits, _, _), near in zip(found, nears, strict=True):
            self.blocks.share(hits)
            self.windowed.share(near.values())
        source = self.sources.find(members[0])
        assert source is not None
        self.blocks.share(source[0])
        self.sources.enter(members[0], *source)
        spare = len(self.running)
        for number, entry in enumerate(members):
            self.waiting.remove(entry)
            if number:
                self.sources.follow(entry, members[0])
            entry.slot = min(set(range(self.limits.num_slots)) - set(self.running))
            self.running[entry.slot] = entry
            entry.admission += 1
            if number >= len(found):
                self._began.append((entry.num_tokens, 0))
                entry.is_idle, entry.table, entry.window, entry.num_freed = True, [], {}, 0
                entry.num_prefill = entry.length = entry.num_tokens = entry.num_computed = 0
                continue
            hits, sibling, count = found[number]
            if sibling is not None:
                hits = sibling.table[:count]
                self.blocks.share(hits)
            start = count * size
            entry.num_prefill = entry.length = entry.num_tokens
            entry.num_computed = start
            self._began.append((entry.num_tokens, start))
            self._enter(entry, hits, nears[number], -(-entry.num_tokens // size) - count)
            length = min(entry.num_tokens - start, budget) if len(chunks) < self.limits.max_step_chunks else 0
            length = self._extend(entry, start, length, spare)
            if length:
                chunks.append((entry, start, length))
                budget -= length
                self._publish_chunk(*chunks[-1])
        return budget

    def _enqueue(self, entry: Entry) -> None:
        entry.slot = -1
        at = len(self.waiting)
        while at and self.waiting[at - 1].rank > entry.rank:
            at -= 1
        self.waiting.insert(at, entry)

    def _requeue(self, entry: Entry) -> None:
        entry.table, entry.source_blocks = [], []
        entry.num_sampled = entry.num_returned = 0
        if entry.is_idle:
            entry.is_idle, entry.num_tokens = False, entry.truth.num_prompt
        entry.brought = entry.num_tokens // self.limits.block_size
        self._enqueue(entry)

    def _key(self, entry: Entry, index: int) -> int:
        return int(entry.truth.chain[(index + 1) * self.limits.block_size - 1])

    def _hits(self, entry: Entry, with_host: bool = False) -> list[int]:
        hits: list[int] = []
        if entry.reads_cache and entry.is_shared:
            for index in range((entry.num_tokens - 1) // self.limits.block_size):
                block = self._find_block(0, self._key(entry, index), with_host)
                if block is None:
                    break
                hits.append(block)
        longest = len(hits)
        ends = {at for start, length, _ in entry.images for at in range(start + 1, start + length)}
        while len(hits) * self.limits.block_size in ends or not self._is_covered(entry, len(hits), with_host):
            hits.pop()
        self.windows["window_cuts"] += len(hits) < longest
        return hits

    def _is_covered(self, entry: Entry, count: int, with_host: bool) -> bool:
        """Whether the blocks of windowed layers that the first query after `count` blocks sees are cached."""
        size, window = self.limits.block_size, self.limits.window
        seen = range(max(0, count * size - window + 1), count * size) if window else ()
        return all(self._find_block(1, self._key(entry, token // size), with_host) is not None for token in seen)

    def _draft(self, decodes: list[Entry]) -> tuple[list[int], list[int], bool]:
        """Return the number of drafts to verify by row, the blocks that they need, and whether the step drafts."""
        limits, size = self.limits, self.limits.block_size
        wanted: list[int] = []
        for entry in decodes:
            count = self._best(entry, len(decodes))
            if count == 0 and (entry.num_sampled + 1) % drafting.PROBE_ROWS == 0:
                entry.num_drafted, entry.num_accepted = 1, 1
                count = self._best(entry, len(decodes))
                self.drafting["draft_probe"] += 1
            wanted.append(count)
        drafts: list[int] = []
        left = limits.max_verified - len(decodes)
        for entry, most in zip(decodes, wanted, strict=True):
            count = min(most, entry.limit - entry.length - 1) if entry.has_drafts else 0
            self.drafting["draft_limited"] += count < most and entry.has_drafts
            self.drafting["draft_budget"] += count > left >= 0
            left -= count
            drafts.append(count if left >= 0 else 0)
        rooms = [len(entry.table) * size - entry.length for entry in decodes]
        blocks = [max(0, -(-(count - room) // size)) for count, room in zip(drafts, rooms, strict=True)]
        # Running requests must be able to grow: with few blocks, drafts and the next token stay in a row's blocks.
        available = [self.num_available, self.windowed.num_available][: 2 if self.limits.window else 1]
        if sum(blocks) > min(available) - len(self.running):
            fewer = [min(count, max(0, room - 1)) for count, room in zip(drafts, rooms, strict=True)]
            self.drafting["draft_scarce"] += fewer != drafts
            drafts, blocks = fewer, [0] * len(decodes)
        self.drafting["draft_blocks"] += sum(blocks)
        for entry in decodes:
            entry.has_drafts = any(wanted)
        return drafts, blocks, any(wanted)

    def _best(self, entry: Entry, num_rows: int) -> int:
        """Return the number of drafts per row at which a step yields the most tokens in a time."""
        rate = Fraction(32 * entry.num_accepted // entry.num_drafted, 32)  # at which drafts are accepted
        per_token, per_draft = Fraction(self.limits.token_cost, 1000), Fraction(self.limits.draft_cost, 1000)
        without = 1 + num_rows * per_token
        speeds = [
            sum(rate**kept for kept in range(drafts + 1))
            / (without + drafts * (num_rows * per_token + per_draft * without))
            for drafts in range(self.limits.max_drafts + 1)
        ]
        return speeds.index(max(speeds))

    def _settle(self, entry: Entry, drafts: int, own: int) -> None:
        """Take in the result of a row that verified drafts and sampled `own` tokens."""
        entry.unsettled -= drafts
        entry.num_computed -= drafts + 1 - own
        entry.length -= drafts + 1 - own
        entry.num_drafted += min(own, drafts)
        entry.num_accepted += own - 1
        if entry.num_drafted > 16:
            entry.num_drafted, entry.num_accepted = entry.num_drafted // 2, entry.num_accepted // 2

    def _hand_out(self, entries: list[Entry], counts: list[int], windowed: bool | None = False) -> None:
        """Allocate blocks: free ones first, in the order that production chose; then the least recently released.

        `windowed`: None for the first group alone, True for the second alone, False for both.
        """
        wanted = [entry for entry, count in zip(entries, counts, strict=True) for _ in range(count)]
        for group, blocks in enumerate((self.blocks, self.windowed)):
            if group and windowed is False:  # chunks of prompts get these in `_extend`
                wanted = [entry for entry in wanted if entry.num_computed >= entry.num_prefill]
            if (windowed and not group) or (group and (windowed is None or not self.limits.window)):
                continue
            num_free = len(blocks.free)
            for number, entry in enumerate(wanted):
                index = entry.reach if group else len(entry.table)
                block = self._read(entry.slot, index, group)
                blocks.take(block, number < num_free)
                if group:
                    entry.window[index] = block
                else:
                    entry.table.append(block)

    def _publish_chunk(self, entry: Entry, start: int, length: int) -> None:
        size = self.limits.block_size
        full = range(start // size, min((start + length) // size, entry.brought))
        self._publish(entry, full)
        if self.limits.stores_prompts and entry.is_shared:
            self.host.due += [(0, self._key(entry, index), entry.table[index]) for index in full]
            self.host.due += [(1, self._key(entry, at), entry.window[at]) for at in full if at in entry.window]

    def _publish(self, entry: Entry, indices: range) -> None:
        if entry.is_shared:
            for index in indices:
                if index < len(entry.table):
                    self.blocks.index.setdefault(self._key(entry, index), entry.table[index])
                if index in entry.window:
                    self.windowed.index.setdefault(self._key(entry, index), entry.window[index])

    def _vacate(self, entry: Entry, publishes: bool = True, fresh: int = 0, is_preempted: bool = False) -> None:
        """Free a slot. `fresh` of its tokens are committed in this call, and are not in the cache yet."""
        self.late["late_ended"] += entry.is_late
        entry.is_late = False
        written = min(entry.num_computed, entry.num_tokens - fresh)
        full = written // self.limits.block_size
        if publishes:
            self._publish(entry, range(min(entry.brought, full), full))
        if is_preempted and self.limits.swaps and entry.is_shared:
            for group, own in enumerate((dict(enumerate(entry.table)), entry.window)[: self.limits.num_groups]):
                contents = [(self._key(entry, index), block) for index, block in own.items() if index < full]
                self.host.hold(self.num_planned + 1, entry.id, group, contents)
        self._release(entry, dict(enumerate(entry.table)), max(full, entry.brought), self.blocks)
        self._release(entry, entry.window, max(full, entry.brought), self.windowed)
        self.sources.leave(entry)
        del self.running[entry.slot]
        self.beam_groups.pop(entry.beam_group, None)
        self.entries = [each for each in self.entries if each[0] is not entry]
        self.copies = [each for each in self.copies if each[1] is not entry]
        entry.table, entry.window, entry.num_freed = [], {}, 0
        entry.num_sampled = entry.num_returned = 0

    def _release(self, entry: Entry, table: Mapping[int, int], full: int, blocks: Blocks) -> None:
        """Release blocks by index in the sequence; the first `full` of the sequence may be in the prefix index."""
        for index in sorted(table, reverse=True):
            blocks.release(table[index], self._key(entry, index) if index < full and entry.is_shared else None)

    # Comparison with the production scheduler.

    def _check_patience(self, before: Mapping[tuple[int, int], int], admitted: Collection[int]) -> None:
        """I15: a request that is skipped because its adapter has no place waits for one generation of requests at most.

        If the first request of the queue was skipped, it waits only for the running requests of the adapter longest in
        use: no later request of the queue gets that adapter, and when they have ended the first request is admitted
        before all others. `before` has the adapters of the requests that ran before this plan's admissions.
        """
        first = self.waiting[0] if self.waiting else None
        kept, self._passed_over = self._passed_over, None
        is_passed = first is not None and any(self.by_id[each].rank > first.rank for each in admitted)
        if first is None or first.id in self.host.passed_over or not (is_passed or (kept and kept[0] is first)):
            return
        if kept is None or kept[0] is not first:
            oldest = next(iter(self.places.in_use), 0)
            ahead = {each for each, adapter in before.items() if adapter == oldest}
            ahead |= {(each.id, each.admission) for each in self.running.values() if each.adapter == oldest}
            self._passed_over = first, oldest, ahead
            return
        _, oldest, ahead = kept
        left = {each for each, adapter in before.items() if adapter == oldest and each in ahead}
        if not left and any(one.adapter and one.rank < first.rank for one in map(self.by_id.__getitem__, admitted)):
            return  # a request of higher rank has taken the place
        joined = {(each.id, each.admission) for each in self.running.values() if each.adapter == oldest} - ahead
        behind = [each for each in self.running.values() if (each.id, each.admission) in joined]
        if any(each.rank > first.rank for each in behind):
            raise Violation("I15: a request joins an adapter that drains for one before it")
        if is_passed and not left:
            raise Violation("I15: a request is passed over although the place that it waits for is free")
        self._passed_over = first, oldest, ahead | joined

    def compare(self, with_index: bool = True) -> None:
        """Compare the whole state of the production scheduler."""
        assert self.core is not None
        state, size = self.core.state, self.limits.block_size
        if [entry.request.sequence_id for entry in state.waiting] != [entry.id for entry in self.waiting]:
            raise Violation("the queue is not in order")
        if [entry.num_tokens for entry in state.waiting] != [entry.num_tokens for entry in self.waiting]:
            raise Violation("the queue holds other numbers of tokens")
        if state.adapters != self.places.residents:
            raise Violation("other adapters are resident than are due, or in another order")
        slots = state.slots
        names = ("ids", "num_prefill", "num_computed", "length", "num_tokens", "num_sampled", "num_returned")
        names += ("limit", "capacity", "may_draft", "has_drafts", "num_drafted", "num_accepted", "num_freed")
        columns = list(zip(*(getattr(slots, name).tolist() for name in names), strict=True))
        for slot in range(self.limits.num_slots):
            entry = self.running.get(slot)
            if (entry is None) != (slots.epochs[slot] == 0) or (entry is None) != (state.running[slot] is None):
                raise Violation(f"slot {slot} is taken, and not")
            if entry is None:
                if any(columns[slot][1:]) or state.tables[slot]:
                    raise Violation(f"slot {slot} is free and holds something")
                continue
            counts = (
                entry.num_prefill,
                entry.num_computed,
                entry.length,
                entry.num_tokens,
                entry.num_sampled,
                entry.num_returned,
            )
            drafts = entry.may_draft, entry.has_drafts, entry.num_drafted, entry.num_accepted
            if not self.limits.max_drafts:
                drafts = False, False, 0, 0
            due = (
                entry.id,
                *counts,
                entry.limit * (not entry.is_idle),
                len(entry.table) * size,
                *drafts,
                entry.num_freed,
            )
            window = [*entry.window.values()]
            if [*entry.window] != [*range(entry.num_freed, entry.reach)]:
                raise Violation(f"I17: slot {slot} has blocks {[*entry.window]} behind {entry.num_freed}")
            if self.limits.max_source and list(state.sources[slot]) != entry.source_blocks:
                raise Violation(f"slot {slot} has a source in {state.sources[slot]}, not {entry.source_blocks}")
            if columns[slot] != due or list(state.tables[slot]) != entry.table:
                raise Violation(f"slot {slot} holds {columns[slot]}, where {due} is due")
            if self.limits.window and list(state.window_tables[slot]) != window:
                raise Violation(f"slot {slot} has other blocks of windowed layers than are due")
        if state.beam_groups != tuple(
            tuple(each.slot for each in beam_group) for beam_group in self.beam_groups.values()
        ):
            raise Violation("other searches run than are due")
        groups = 2 if self.limits.window else 1
        due_entries = tuple((each.slot, index * groups + group, block) for each, index, group, block in self.entries)
        if state.entries != due_entries:
            raise Violation("forks have changed other entries of block tables than are due")
        self.blocks.compare(state.pool, with_index)
        if state.window_pool is not None:
            self.windowed.compare(state.window_pool, with_index)
        self.host.compare(state.host, with_index)
        self.encoder.compare(state.media)

    def loads(self) -> tuple[Any, ...]:
        """Return the expected load: running and waiting requests, waiting tokens, blocks in use."""
        used = self.blocks.num_used
        if self.limits.window:
            used = max(used, -(-self.windowed.num_used * self.limits.num_blocks // self.limits.num_window_blocks))
        return len(self.running), len(self.waiting), sum(entry.num_tokens for entry in self.waiting), used
