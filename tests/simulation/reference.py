"""The scheduler once more, as simply as it can be said: lists and dicts, everything looked at in every step.

It hears what the core is told (`jaxllm.scheduler.recorded.Recorder`), does the same by its own rules, and compares:
every plan row by row, every block that changes hands, and now and then the whole state. Blocks are named by the hash of
the sequence up to their end (`oracle.Truth.chain`), the least recently released cached block is evicted first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np

from jaxllm.scheduler import block_pool, drafting
from jaxllm.scheduler.recorded import RecordedScheduler
from jaxllm.scheduler.state import Events, Limits, Move, Plan, Request
from tests.simulation.adapters import Places
from tests.simulation.beams import BeamTruth
from tests.simulation.device import Violation
from tests.simulation.oracle import Truth

CHECK_EVERY = 16  # plans between two comparisons of the whole state
INDEX_EVERY = 128  # … and of the prefix index, of which production has a thousand parts


@dataclass(eq=False)
class Entry:
    """A request, waiting or running."""

    id: int
    truth: Truth
    order: int
    priority: int
    is_shared: bool  # may its blocks be found by others
    reads_cache: bool
    known: int
    adapter: int = 0  # its number, 0: none
    gang: int = 0  # id of the first beam of its search, 0: it is no beam
    is_idle: bool = False  # a beam that has no tokens of its own yet
    seen: int = 0  # of `known`, when it was last looked at whether its reader has them
    is_late: bool = False  # its last token is to be computed again
    brought: int = 0  # full blocks that it brought when it was queued
    slot: int = -1  # -1: waits, -2: has ended
    admission: int = 0  # counts those of this request
    given: int = 0
    issued: int = 0
    length: int = 0
    may_draft: bool = True
    has_drafts: bool = False
    tried: int = 0
    kept: int = 0
    unsettled: int = 0  # drafts in flight: by so many tokens `issued` and `length` may be too large
    turn: int = 0  # rows planned whose result is wanted
    done: int = 0  # of them, those whose result came or is wanted no more
    table: list[int] = field(default_factory=list)

    @property
    def rank(self) -> tuple[int, int]:
        return self.priority, self.order

    @property
    def limit(self) -> int:
        return self.truth.limit


def is_stuck(entry: Entry) -> bool:
    """Whether a request has come to where its grammar, or what else it asks for, allows no token."""
    return entry.truth.outcome().reason == "error" and entry.known == entry.truth.fails_at


def is_held(entry: Entry) -> bool:
    """Whether a beam waits for its search to choose its next token."""
    return bool(entry.gang) and entry.known < entry.length


class Reference:
    """The naive scheduler. `claim` gives the truth of a request that is queued, by its id."""

    def __init__(self, limits: Limits, claim: Callable[[Sequence[Request]], list[Entry]]) -> None:
        self.limits = limits
        self.core: RecordedScheduler | None = None  # that it is compared with
        # Rows by number: entry, turn, whether it samples, admission, drafts.
        self.plans: dict[int, list[tuple[Entry, int, bool, int, int]]] = {}
        self.by_id: dict[int, Entry] = {}
        self.waiting: list[Entry] = []
        self.running: dict[int, Entry] = {}  # by slot
        self.num_added = 0
        self.num_planned = 0
        self.num_generated = self.num_forced = 0
        self.late: Counter[str] = Counter()  # rows that were to be computed again, by the event before
        self.num_preempted = 0
        self.num_resets = self.num_skipped = 0
        self.drafting: Counter[str] = Counter()  # what has happened in it
        self.places = Places(limits.max_adapters)
        self._passed_over: tuple[Entry, int, set[tuple[int, int]]] | None = None  # see `_check_patience`
        self.gangs: dict[int, list[Entry]] = {}  # searches that run, by their first beam's id
        self.entries: list[tuple[Entry, int, int]] = []  # changes of block tables that the next plan sends
        self.copies: list[tuple[Entry, int]] = []  # whose next block is to be a copy, and of which
        self.num_readmitted = 0
        self._began: list[tuple[int, int]] = []  # of the beams of this plan that were admitted: tokens, and cached ones
        self._claim = claim
        self._forget_cache()

    def _forget_cache(self) -> None:
        self.references = [0] * self.limits.num_blocks
        self.free = set(range(self.limits.num_blocks))
        self.cached: dict[int, int] = {}  # block -> key, the first is evicted first
        self.index: dict[int, int] = {}  # key -> block

    @property
    def num_available(self) -> int:
        return len(self.free) + len(self.cached)

    # What the core is told.

    def begin(self, core: RecordedScheduler) -> None:
        self.core = core

    def close(self) -> None:
        """Nothing is kept."""

    def added(self, requests: Sequence[Request]) -> None:
        for entry in self._claim(requests):
            entry.order = self.num_added
            entry.brought = entry.known // self.limits.block_size
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
        self.places.settle(self.running.values())

    def was_reset(self) -> None:
        self.num_resets += 1
        for slot in sorted(self.running):
            entry = self.running.pop(slot)
            self._requeue(entry)
        self.gangs.clear()
        self.entries, self.copies = [], []
        self._forget_cache()
        self.plans.clear()
        self.places.clear()
        self._passed_over = None

    def planned(self, plan: Plan) -> None:
        size = self.limits.block_size
        new_blocks: list[tuple[int, int, int]] = []
        pairs = plan.table.tolist()
        preempted: list[int] = []
        while True:
            growing = [
                entry
                for _, entry in sorted(self.running.items())
                if entry.length > len(entry.table) * size and entry.length < entry.limit and not is_held(entry)
            ]
            counts = [-(-entry.length // size) - len(entry.table) for entry in growing]
            if sum(counts) <= self.num_available:
                break
            surely = [-(-(each.length - each.unsettled) // size) - len(each.table) for each in growing]
            if sum(max(0, count) for count in surely) <= self.num_available:
                raise Violation("I16: a request is preempted for a guess")
            victim = max(
                (
                    each
                    for each in self.running.values()
                    if not each.is_idle and (each.length < each.limit or each.issued < each.given)
                ),
                key=lambda each: each.rank,
            )
            before, slot = self.num_available, victim.slot
            victims = self.gangs.get(victim.gang, [victim])
            for each in list(victims):
                preempted.append(each.id)
                self.late["late_preempted"] += each.is_late
                each.is_late = False
                self._vacate(each)
                self._requeue(each)
            self.places.settle(self.running.values())
            if self.num_available <= before and not any(each in growing for each in victims):
                raise Violation(f"preempting the owner of slot {slot} gave no block")
        new_blocks += [(entry.slot, index, block) for entry, index, block in self.entries]
        for entry, count in zip(growing, counts, strict=True):
            new_blocks += [(entry.slot, len(entry.table) + number, -1) for number in range(count)]
        at = len(self.entries)
        self._hand_out(growing, counts, pairs[at : at + sum(counts)])
        at += sum(counts)
        moves = [[0, source, entry.table[-1]] for entry, source in self.copies]
        self.entries, self.copies = [], []

        rows: list[tuple[Entry, int, int]] = []
        works = [entry for _, entry in sorted(self.running.items()) if entry.issued < entry.length]
        decodes = [
            entry
            for entry in works
            if entry.issued >= entry.given and entry.length < entry.limit and not is_held(entry)
        ]
        rows += [(entry, entry.issued, 1) for entry in decodes]
        budget = self.limits.max_step_tokens - len(decodes)
        chunks: list[tuple[Entry, int, int]] = []
        for entry in sorted((entry for entry in works if entry.issued < entry.given), key=lambda entry: entry.rank):
            if budget and len(chunks) < self.limits.max_step_chunks:
                chunks.append((entry, entry.issued, min(entry.given - entry.issued, budget)))
                budget -= chunks[-1][2]
                self._publish_chunk(*chunks[-1])
        admitted: list[tuple[int, int, int, int]] = []
        before = {(entry.id, entry.admission): entry.adapter for entry in self.running.values()}
        residents = self.places.residents
        self.places.begin()
        self._began = []
        passed: set[int] = set()  # searches that were looked at
        for entry in [] if preempted else list(self.waiting):
            if entry.gang in passed:
                continue
            if not budget or len(chunks) == self.limits.max_step_chunks or len(self.running) == self.limits.num_slots:
                break
            if not self.places.admits(entry.adapter):
                self.num_skipped += 1
                passed |= {entry.gang} - {0}
                continue
            if self.limits.whole_prompts and entry.known > budget:
                break
            if entry.gang:
                passed.add(entry.gang)
                members = [each for each in self.waiting if each.gang == entry.gang]
                found = self._find(members)
                if found is None:
                    break
                self.places.enter(entry.adapter)
                at, budget = self._admit_gang(members, found, at, budget, pairs, chunks)
                new_blocks += [(each.slot, index, block) for each in members for index, block in enumerate(each.table)]
                admitted += [
                    (each.slot, each.id, known, start)
                    for each, (known, start) in zip(members, self._began[-len(members) :], strict=True)
                ]
                continue
            hits = self._hits(entry)
            num_new = -(-entry.known // size) - len(hits)
            idle = sum(self.references[block] == 0 for block in hits)
            if num_new > self.num_available - idle - len(self.running):
                break
            self.waiting.remove(entry)
            self.places.enter(entry.adapter)
            entry.slot = min(set(range(self.limits.num_slots)) - set(self.running))
            self.running[entry.slot] = entry
            entry.admission += 1
            for block in hits:
                self.references[block] += 1
                self.cached.pop(block, None)
            entry.table = list(hits)
            start = len(hits) * size
            entry.given = entry.length = entry.known
            entry.issued = start
            entry.has_drafts, entry.tried, entry.kept, entry.unsettled = False, 1, 1, 0
            at += len(hits)
            self._hand_out([entry], [num_new], pairs[at : at + num_new])
            at += num_new
            chunks.append((entry, start, min(entry.known - start, budget)))
            budget -= chunks[-1][2]
            self._publish_chunk(*chunks[-1])
            new_blocks += [(entry.slot, index, block) for index, block in enumerate(entry.table)]
            admitted.append((entry.slot, entry.id, entry.known, start))
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
                for entry, count in zip(decodes, blocks, strict=True):
                    new_blocks += [(entry.slot, len(entry.table) + number, -1) for number in range(count)]
                self._hand_out(decodes, blocks, pairs[at : at + sum(blocks)])

        expected: list[tuple[int, int, int, bool]] = []
        record: list[tuple[Entry, int, bool, int, int]] = []
        for (entry, start, length), count in zip(rows, drafts, strict=True):
            end = start + length
            samples = end == entry.length
            entry.issued = end + count
            entry.length += count + (samples and entry.length < entry.limit)
            entry.unsettled += count
            entry.turn += samples
            entry.is_late = False
            expected.append((entry.slot, start, length + count, samples))
            record.append((entry, entry.turn, samples, entry.admission, count))
        self.num_planned += 1
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
        if [(slot, index) for slot, index, _ in pairs] != [(slot, index) for slot, index, _ in new_blocks]:
            raise Violation("the plan's block table misses entries or has too many")
        for (_, _, block), (_, _, due) in zip(pairs, new_blocks, strict=True):
            if due >= 0 and block != due:
                raise Violation("the plan's block table names another block")
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
        fresh: dict[int, int] = {}  # tokens that a request got in this call
        reasons: dict[int, str] = {}
        ids: list[int] = []
        wanted = [
            (row, entry, turn, drafts)
            for row, (entry, turn, samples, admission, drafts) in enumerate(record)
            if samples and entry.slot >= 0 and entry.admission == admission and turn > entry.done
        ]
        if is_finite is not None:
            for _, entry, *_ in [each for each in wanted if not is_finite[each[0]]]:
                failed += [each for each in self.gangs.get(entry.gang, [entry]) if each not in failed]
        answered: list[int] = []
        for row, entry, turn, drafts in wanted:
            if entry in failed:
                continue
            entry.done = turn
            if entry.gang:
                answered.append(row)
                continue
            if counts is not None and not counts[row]:  # late: its last token is computed again
                entry.done, entry.length, entry.issued = entry.turn, entry.known, entry.known - 1
                entry.given = entry.known if self.limits.max_drafts else entry.issued
                entry.is_late = True
                continue
            given = [int(tokens[row])] if counts is None else tokens[row, : counts[row]].tolist()
            got, own = 0, 1 if sampled is None else int(sampled[row])
            if not 1 <= own <= 1 + drafts:
                raise Violation(f"request {entry.id} has sampled {own} tokens with {drafts} drafts")
            if drafts:
                self._settle(entry, drafts, own)
            for token in given[: entry.limit - entry.known]:
                entry.truth.ensure(entry.known + 1)
                if got >= own and not entry.truth.is_forced(entry.known):
                    raise Violation(f"request {entry.id} got a token that was neither sampled nor forced")
                if token != entry.truth.tokens[entry.known]:
                    raise Violation(f"I6: request {entry.id} got a token that is not its own")
                entry.known += 1
                got += 1
                if token in entry.truth.stop_ids:
                    reasons[entry.id] = "stop"
                    break
            self.num_generated += got
            self.num_forced += max(0, got - own)
            ids.append(entry.id)
            fresh[entry.id] = got
            if entry.id not in reasons and entry.known >= entry.limit:
                reasons[entry.id] = "length"
            if entry.id in reasons:
                ended.append(entry)
            elif got > own:  # those behind the sampled ones are to be computed, and what is in flight knew none of them
                entry.given = entry.length = entry.known
                entry.done = entry.turn
        touched = {record[row][0].gang for row in answered}
        complete = [gang for gang in self.gangs if gang in touched and self._has_answered(gang)]
        self.num_generated += sum(len(self.gangs[gang]) for gang in complete)
        if events.answered.tolist() != answered or events.complete != tuple(complete):
            raise Violation(f"the rows {events.answered} of beams have answered, where {answered} are due")
        for entry in failed:
            for index in range(min(entry.brought, len(entry.table))):
                block, key = entry.table[index], self._key(entry, index)
                if entry.is_shared and self.index.get(key) == block and self.references[block] == 1:
                    del self.index[key]
        for entry in failed:
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

    def forked(self, moves: Sequence[Move]) -> None:
        """Beams go on: each as its own child, or as another's."""
        size = self.limits.block_size
        gang = self.gangs[self.by_id[moves[0].target].gang]
        if sorted(move.target for move in moves) != sorted(each.id for each in gang):
            raise Violation("a fork moves others than the beams of one search")
        if not self._has_answered(gang[0].gang):
            raise Violation("a search goes on before all of its beams have answered")
        first = gang[0].truth
        assert isinstance(first, BeamTruth)
        issued, num_prompt = gang[0].issued, first.num_prompt
        old = {
            each.id: (each.table, each.brought, each.truth.tokens[: issued + 1].tolist(), each.truth.chain.tolist())
            for each in gang
        }
        becomes = [(*old[move.source][2][num_prompt:issued], move.token) for move in moves]
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
            shared = table if is_first else table[: issued // size]
            for block in shared:
                self.references[block] += 1
            target.table = list(shared)
            for index, block in enumerate(shared):
                if old[move.target][0][index : index + 1] != [block]:
                    self.entries.append((target, index, block))
            if issued % size and not is_first:
                self.copies.append((target, table[issued // size]))
        for move in moves:
            target = self.by_id[move.target]
            if move.target != move.source:
                self._release(target, old[move.target][0], target.brought)
        for move in moves:
            target = self.by_id[move.target]
            target.brought = old[move.source][1]
            assert isinstance(target.truth, BeamTruth)
            target.truth.become(old[move.source][2][:issued], old[move.source][3][:issued], move.token)
            if target.is_idle:
                target.is_idle, target.given = False, issued + 1
            target.issued, target.length, target.known = issued, issued + 1, issued + 1

    # Its own rules.

    def _has_answered(self, gang: int) -> bool:
        return all(
            each.is_idle or (each.issued == each.known and each.length == each.known + 1 and each.turn == each.done)
            for each in self.gangs[gang]
        )

    def _find(self, members: list[Entry]) -> list[tuple[list[int], Entry | None, int]] | None:
        """Say what blocks each beam finds, in the index or with one before it; None if they cannot all be admitted."""
        size = self.limits.block_size
        if len(members) > self.limits.num_slots - len(self.running):
            return None
        is_new = members[0].known == members[0].truth.num_prompt
        found: list[tuple[list[int], Entry | None, int]] = []
        num_new, idle = 0, set()
        for number, entry in enumerate(members):
            if is_new and number:
                num_new += 1  # for its first token
                continue
            hits, best = self._hits(entry), None
            most = len(hits)
            for other in members[:number]:
                pairs = zip(
                    (self._key(entry, index) for index in range((entry.known - 1) // size)),
                    (self._key(other, index) for index in range(other.known // size)),
                    strict=False,
                )
                count = next((at for at, (one, two) in enumerate(pairs) if one != two), (entry.known - 1) // size)
                if count > most:
                    most, best = count, other
            found.append(([], best, most) if best else (hits, None, most))
            idle |= {block for block in found[-1][0] if self.references[block] == 0}
            num_new += -(-entry.known // size) - most
        return found if num_new <= self.num_available - len(idle) - len(self.running) else None

    def _admit_gang(
        self,
        members: list[Entry],
        found: list[tuple[list[int], Entry | None, int]],
        at: int,
        budget: int,
        pairs: list[list[int]],
        chunks: list[tuple[Entry, int, int]],
    ) -> tuple[int, int]:
        """Give slots and blocks to all beams of a search; return what is left of the table's entries and tokens."""
        size = self.limits.block_size
        self.gangs[members[0].gang] = members
        self.num_readmitted += len(found) == len(members) > 1
        for hits, _, _ in found:
            for block in hits:
                self.references[block] += 1
                self.cached.pop(block, None)
        for number, entry in enumerate(members):
            self.waiting.remove(entry)
            entry.slot = min(set(range(self.limits.num_slots)) - set(self.running))
            self.running[entry.slot] = entry
            entry.admission += 1
            if number >= len(found):
                self._began.append((entry.known, 0))
                entry.is_idle, entry.table = True, []
                entry.given = entry.length = entry.known = entry.issued = 0
                continue
            hits, sibling, count = found[number]
            entry.table = list(hits if sibling is None else sibling.table[:count])
            if sibling is not None:
                for block in entry.table:
                    self.references[block] += 1
            start = count * size
            entry.given = entry.length = entry.known
            entry.issued = start
            self._began.append((entry.known, start))
            num_new = -(-entry.known // size) - count
            at += count
            self._hand_out([entry], [num_new], pairs[at : at + num_new])
            at += num_new
            if budget and len(chunks) < self.limits.max_step_chunks:
                chunks.append((entry, start, min(entry.known - start, budget)))
                budget -= chunks[-1][2]
                self._publish_chunk(*chunks[-1])
        return at, budget

    def _enqueue(self, entry: Entry) -> None:
        entry.slot = -1
        at = len(self.waiting)
        while at and self.waiting[at - 1].rank > entry.rank:
            at -= 1
        self.waiting.insert(at, entry)

    def _requeue(self, entry: Entry) -> None:
        entry.table = []
        entry.turn = entry.done = 0
        if entry.is_idle:
            entry.is_idle, entry.known = False, entry.truth.num_prompt
        entry.brought = entry.known // self.limits.block_size
        self._enqueue(entry)

    def _key(self, entry: Entry, index: int) -> int:
        return int(entry.truth.chain[(index + 1) * self.limits.block_size - 1])

    def _hits(self, entry: Entry) -> list[int]:
        hits: list[int] = []
        if entry.reads_cache and entry.is_shared:
            for index in range((entry.known - 1) // self.limits.block_size):
                block = self.index.get(self._key(entry, index))
                if block is None:
                    break
                hits.append(block)
        return hits

    def _draft(self, decodes: list[Entry]) -> tuple[list[int], list[int], bool]:
        """Say how many drafts of each row are verified, the blocks that they need, and whether others are drafted."""
        limits, size = self.limits, self.limits.block_size
        wanted: list[int] = []
        for entry in decodes:
            count = self._best(entry, len(decodes))
            if count == 0 and (entry.turn + 1) % drafting.PROBE_ROWS == 0:
                entry.tried, entry.kept = 1, 1
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
        # Those that run must be able to grow; where that is not sure, not even the bound goes beyond a row's blocks.
        if sum(blocks) > self.num_available - len(self.running):
            fewer = [min(count, max(0, room - 1)) for count, room in zip(drafts, rooms, strict=True)]
            self.drafting["draft_scarce"] += fewer != drafts
            drafts, blocks = fewer, [0] * len(decodes)
        self.drafting["draft_blocks"] += sum(blocks)
        for entry in decodes:
            entry.has_drafts = any(wanted)
        return drafts, blocks, any(wanted)

    def _best(self, entry: Entry, num_rows: int) -> int:
        """Say with how many drafts of each row a step yields the most tokens in its time."""
        rate = Fraction(32 * entry.kept // entry.tried, 32)  # that a draft is kept
        per_token, per_draft = Fraction(self.limits.token_cost, 1000), Fraction(self.limits.draft_cost, 1000)
        without = 1 + num_rows * per_token
        speeds = [
            sum(rate**kept for kept in range(drafts + 1))
            / (without + drafts * (num_rows * per_token + per_draft * without))
            for drafts in range(self.limits.max_drafts + 1)
        ]
        return speeds.index(max(speeds))

    def _settle(self, entry: Entry, drafts: int, own: int) -> None:
        """A row that verified drafts has sampled `own` tokens."""
        entry.unsettled -= drafts
        entry.issued -= drafts + 1 - own
        entry.length -= drafts + 1 - own
        entry.tried += min(own, drafts)
        entry.kept += own - 1
        if entry.tried > 16:
            entry.tried, entry.kept = entry.tried // 2, entry.kept // 2

    def _hand_out(self, entries: list[Entry], counts: list[int], pairs: list[list[int]]) -> None:
        """Give blocks: free ones first, of which production may choose; then the least recently released ones."""
        wanted = [entry for entry, count in zip(entries, counts, strict=True) for _ in range(count)]
        if len(pairs) != len(wanted):
            raise Violation("a plan hands out another number of blocks than is due")
        num_free = len(self.free)
        for number, (entry, (_, _, block)) in enumerate(zip(wanted, pairs, strict=True)):
            if number < num_free:
                if block not in self.free:
                    raise Violation(f"I1: block {block} is handed out, and is not free")
                self.free.remove(block)
            else:
                oldest = next(iter(self.cached))
                if block != oldest:
                    raise Violation(f"block {block} is evicted, where {oldest} is the least recently used")
                del self.index[self.cached.pop(block)]
            self.references[block] = 1
            entry.table.append(block)

    def _publish_chunk(self, entry: Entry, start: int, length: int) -> None:
        size = self.limits.block_size
        self._publish(entry, range(start // size, min((start + length) // size, entry.brought)))

    def _publish(self, entry: Entry, indices: range) -> None:
        if entry.is_shared:
            for index in indices:
                if index < len(entry.table):
                    self.index.setdefault(self._key(entry, index), entry.table[index])

    def _vacate(self, entry: Entry, publishes: bool = True, fresh: int = 0) -> None:
        """Empty a slot; `fresh` tokens of it are committed in this very call, and not the request's yet."""
        self.late["late_ended"] += entry.is_late
        entry.is_late = False
        written = min(entry.issued, entry.known - fresh)
        full = written // self.limits.block_size
        if publishes:
            self._publish(entry, range(min(entry.brought, full), full))
        self._release(entry, entry.table, max(full, entry.brought))
        del self.running[entry.slot]
        self.gangs.pop(entry.gang, None)
        self.entries = [each for each in self.entries if each[0] is not entry]
        self.copies = [each for each in self.copies if each[0] is not entry]
        entry.table = []
        entry.turn = entry.done = 0

    def _release(self, entry: Entry, table: list[int], full: int) -> None:
        """Give blocks back, of which the first `full` may be in the index."""
        for index in reversed(range(len(table))):
            block = table[index]
            self.references[block] -= 1
            if self.references[block]:
                continue
            key = self._key(entry, index) if index < full and entry.is_shared else None
            if key is not None and self.index.get(key) == block:
                self.cached[block] = key
            else:
                self.free.add(block)

    # Comparing.

    def _check_patience(self, before: Mapping[tuple[int, int], int], admitted: Collection[int]) -> None:
        """I15: who is passed over for want of a place for its adapter waits for one generation of requests at most.

        If the first in the queue was passed over, it waits only for the requests that run with the adapter longest in
        use: no request from further behind gets that adapter, and when they have ended the first in the queue is
        admitted before all others. `before` are the adapters of those who ran before this plan admitted.
        """
        first = self.waiting[0] if self.waiting else None
        kept, self._passed_over = self._passed_over, None
        is_passed = first is not None and any(self.by_id[each].rank > first.rank for each in admitted)
        if first is None or not (is_passed or (kept and kept[0] is first)):
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
            return  # one before it has taken the place
        joined = {(each.id, each.admission) for each in self.running.values() if each.adapter == oldest} - ahead
        behind = [each for each in self.running.values() if (each.id, each.admission) in joined]
        if any(each.rank > first.rank for each in behind):
            raise Violation("I15: a request joins an adapter that drains for one before it")
        if is_passed and not left:
            raise Violation("I15: a request is passed over although the place that it waits for is free")
        self._passed_over = first, oldest, ahead | joined

    def compare(self, with_index: bool = True) -> None:
        """Compare all that production's state holds."""
        assert self.core is not None
        state, size = self.core.state, self.limits.block_size
        pool = state.pool
        if [entry.request.sequence_id for entry in state.waiting] != [entry.id for entry in self.waiting]:
            raise Violation("the queue is not in order")
        if [entry.known for entry in state.waiting] != [entry.known for entry in self.waiting]:
            raise Violation("the queue holds other numbers of tokens")
        if state.adapters != self.places.residents:
            raise Violation("other adapters are resident than are due, or in another order")
        slots = state.slots
        names = ("ids", "given", "issued", "length", "known", "turn", "done", "limit", "capacity")
        names += ("may_draft", "has_drafts", "tried", "kept")
        columns = list(zip(*(getattr(slots, name).tolist() for name in names), strict=True))
        for slot in range(self.limits.num_slots):
            entry = self.running.get(slot)
            if (entry is None) != (slots.epochs[slot] == 0) or (entry is None) != (state.running[slot] is None):
                raise Violation(f"slot {slot} is taken, and not")
            if entry is None:
                if any(columns[slot][1:]) or state.tables[slot]:
                    raise Violation(f"slot {slot} is free and holds something")
                continue
            counts = entry.given, entry.issued, entry.length, entry.known, entry.turn, entry.done
            drafts = entry.may_draft, entry.has_drafts, entry.tried, entry.kept
            if not self.limits.max_drafts:
                drafts = False, False, 0, 0
            due = entry.id, *counts, entry.limit * (not entry.is_idle), len(entry.table) * size, *drafts
            if columns[slot] != due or list(state.tables[slot]) != entry.table:
                raise Violation(f"slot {slot} holds {columns[slot]}, where {due} is due")
        if state.gangs != tuple(tuple(each.slot for each in gang) for gang in self.gangs.values()):
            raise Violation("other searches run than are due")
        if state.entries != tuple((each.slot, index, block) for each, index, block in self.entries):
            raise Violation("forks have changed other entries of block tables than are due")
        if pool.references.tolist() != self.references:
            raise Violation("I2: a block is not named as often as tables name it")
        if sorted(pool.free.tolist()) != sorted(self.free):
            raise Violation("I1: the free blocks are not those that no request uses")
        if pool.num_cached != len(self.cached) or block_pool.cached_blocks(pool) != list(self.cached):
            raise Violation("I1: the cached blocks are not in order of their release")
        live = sum(1 for _ in self.cached)
        if len(pool.free) + live + sum(count > 0 for count in self.references) != self.limits.num_blocks:
            raise Violation("I1: a block is lost")
        if pool.num_entries > 2 * pool.num_cached + block_pool.MOST_STALE:
            raise Violation("I13: the queue of cached blocks grows")
        if with_index:
            found = sorted(pool.index.values())
            if found != sorted(self.index.values()):
                raise Violation("the prefix index holds other blocks")

    def loads(self) -> tuple[Any, ...]:
        """Say how busy the engine must be: running, waiting, tokens that wait, blocks in use."""
        used = self.limits.num_blocks - self.num_available
        return len(self.running), len(self.waiting), sum(entry.known for entry in self.waiting), used
