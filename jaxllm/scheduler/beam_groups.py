"""Beam groups: requests of one prompt that run together and fork, for example the beams of a search.

Members are consecutive in rank, and are admitted, preempted and removed together. Until the first fork only the leader,
the first in rank, computes. Members wait until all have results and `fork` has chosen the sequences to continue.

A child shares its parent's full blocks. A partial last block stays with one child; the others get copies in the next
plan (`Plan.moves`), so a fork takes no blocks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain, takewhile
from typing import NamedTuple

import numpy as np

from jaxllm.scheduler import windowed
from jaxllm.scheduler.host_tier import DEVICE, as_array
from jaxllm.scheduler.state import Fork, Limits, Plan, Request, Running, StateEditor, Waiting


class Found(NamedTuple):
    """The cached part of a member being admitted: indexed blocks, or those of an earlier member."""

    hits: list[int]
    sibling: int = 0  # number of an earlier member …
    count: int = 0  # … and how many of its first blocks to share
    near: Sequence[int] = ()  # windowed layers' blocks in the window


def blocks_needed(limits: Limits, num_prompt: int, limit: int, width: int) -> int:
    """Return the most blocks of a beam group, which shares the prompt's full blocks, but not windowed ones."""
    size = limits.block_size
    shared = 0 if limits.window else num_prompt // size
    return shared + width * max(1, -(-max(num_prompt, limit - 1) // size) - shared)


def check(requests: Sequence[Request]) -> None:
    """Raise ValueError if members are not consecutive or differ in prompt."""
    for at, request in enumerate(requests):
        if not request.beam_group:
            continue
        leader = requests[at] if request.beam_group == request.sequence_id else requests[at - 1] if at else None
        if leader is None or request.root is None or _nature(leader) != _nature(request):
            raise ValueError(f"request {request.name!r:.80} is not of the beam group of those before it")


def _nature(request: Request) -> tuple[object, ...]:
    content = request.root, request.tokens, request.adapter, request.source
    return request.beam_group, request.limit, request.priority, *content


def queued(waiting: Sequence[Waiting], at: int) -> Sequence[Waiting]:
    beam_group = waiting[at].request.beam_group
    end = next((end for end in range(at, len(waiting)) if waiting[end].request.beam_group != beam_group), len(waiting))
    return waiting[at:end]


def closure(requests: Iterable[Request], ids: Collection[int]) -> frozenset[int]:
    kept = list(requests)
    gone = {request.beam_group for request in kept if request.beam_group and request.sequence_id in ids}
    return frozenset(ids).union(request.sequence_id for request in kept if request.beam_group in gone)


def members(beam_groups: Sequence[tuple[int, ...]], slot: int) -> tuple[int, ...]:
    return next((beam_group for beam_group in beam_groups if slot in beam_group), (slot,))


def with_members(beam_groups: Sequence[tuple[int, ...]], slots: Sequence[int]) -> list[int]:
    return list(dict.fromkeys(chain.from_iterable(members(beam_groups, slot) for slot in slots)))


def find(editor: StateEditor, limits: Limits, entries: Sequence[Waiting]) -> list[Found]:
    """Return the cached part of each member of a waiting beam group.

    Of a new group only the leader has one. In a preempted group a member shares an earlier member's full blocks up to
    their first difference, even if not computed yet, since chunks are planned by rank. Windowed blocks are not shared:
    the earlier member may lack them.
    """
    if entries[0].num_tokens == entries[0].request.num_prompt:
        entries = entries[:1]
    found: list[Found] = []
    for number, entry in enumerate(entries):
        readable = (entry.num_tokens - 1) // limits.block_size
        digests = entry.digests[:readable]
        hits = editor.pool.look_up(digests) if entry.request.reads_cache else []
        if limits.window:
            hits, near = windowed.cut(limits, digests, hits, editor.window_pool.find)
            found.append(Found(hits, near=near))
            continue
        common = [_num_equal(digests, other.digests) for other in entries[:number]]
        most = max(common, default=0)
        found.append(Found([], common.index(most), most) if most > len(hits) else Found(hits))
    return found


def _num_equal(one: Sequence[bytes], other: Sequence[bytes]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def held(editor: StateEditor) -> np.ndarray:
    """Return the slots of members whose newest token is not chosen yet, intp[·]."""
    slots = _all_slots(editor)
    return slots[editor.slots.num_tokens[slots] < editor.slots.length[slots]]


def take_answers(editor: StateEditor, step: Plan, live: np.ndarray) -> tuple[np.ndarray, tuple[int, ...]]:
    """Remove the rows of beam groups from `live`, bool[R], and count their results.

    Returns these rows, and the leaders of groups with all results.
    """
    rows = (live & np.isin(step.slots, _all_slots(editor))).nonzero()[0]
    slots = step.slots[rows]
    live[rows] = False
    editor.own_slots.num_returned[slots] = step.sample_numbers[rows]
    touched = set(slots.tolist())
    complete = [
        beam_group
        for beam_group in editor.beam_groups
        if touched.intersection(beam_group) and _has_answered(editor, beam_group)
    ]
    return rows, tuple(int(editor.slots.ids[beam_group[0]]) for beam_group in complete)


def fork(editor: StateEditor, limits: Limits, moves: Sequence[Fork]) -> None:
    """Continue each member of a beam group as a child of one of them.

    Raises ValueError unless all have results, are below their limit, and have one move.
    """
    slots, own = editor.slots, editor.own_slots
    targets = {move.target for move in moves}
    message = "a fork moves all members of one beam group, when all have answered"
    found = [beam_group for beam_group in editor.beam_groups if int(slots.ids[beam_group[0]]) in targets]
    if len(found) != 1:
        raise ValueError(message)
    (beam_group,) = found
    slot_of = {int(slots.ids[slot]): slot for slot in beam_group}
    if targets != slot_of.keys() or len(moves) != len(beam_group) or not _has_answered(editor, beam_group):
        raise ValueError(message)
    pairs = [(slot_of[move.target], slot_of[move.source]) for move in moves]
    num_computed, limit = int(slots.num_computed[beam_group[0]]), editor.owner(beam_group[0]).request.limit
    if num_computed + 1 >= limit or any(slots.num_tokens[source] == 0 for _, source in pairs):
        raise ValueError("a fork needs parents that have tokens, and children that may have more")
    keepers: dict[int, int] = {}
    for target, source in sorted(pairs, key=lambda pair: pair[0] != pair[1]):
        keepers.setdefault(source, target)
    records = {slot: editor.owner(slot) for slot in beam_group}
    for group in range(limits.num_groups):
        _inherit(editor, limits, group, pairs, keepers, num_computed)
    num_freed = slots.num_freed.tolist()
    for target, source in pairs:
        if target == source:
            continue
        # Indexed blocks keep their digests: the tokens were the parent's.
        editor.running[target] = Running(records[target].request, records[target].order, records[source].digests)
        if num_freed[target] != num_freed[source]:
            own.num_freed[target] = num_freed[source]
    for slot in beam_group:
        if not slots.num_tokens[slot]:  # its first row: a chunk of one token
            own.num_prefill[slot] = num_computed + 1
            own.limit[slot] = limit
        own.num_computed[slot] = num_computed
        own.length[slot] = own.num_tokens[slot] = num_computed + 1
        own.capacity[slot] = len(editor.tables[slot]) * limits.block_size


def _inherit(
    editor: StateEditor,
    limits: Limits,
    group: int,
    pairs: Sequence[tuple[int, int]],
    keepers: Mapping[int, int],
    num_computed: int,
) -> None:
    """Replace each child's blocks of a group by its parent's; copy a partial last one that another child keeps.

    `pairs`: slots of child and parent; `keepers`: by parent.
    """
    pool, tables = (editor.window_pool, editor.window_tables) if group else (editor.pool, editor.tables)
    num_full, num_partial = divmod(num_computed, limits.block_size)
    begins = dict.fromkeys(chain.from_iterable(pairs), 0)
    if group:
        begins = {slot: int(editor.slots.num_freed[slot]) for slot in begins}
    parents = {slot: tables[slot] for slot in begins}
    children = [(target, source) for target, source in pairs if target != source]
    for target, source in children:
        begin = begins[source]
        blocks = parents[source] if keepers[source] == target else parents[source][: num_full - begin]
        pool.share(blocks)
        tables[target] = blocks
        named = (*(limits.num_window_blocks,) * begin, *blocks)
        before = (*(limits.num_window_blocks,) * begins[target], *parents[target], *(None,) * len(named))
        editor.entries += tuple(
            (target, index * limits.num_groups + group, block)
            for index, (block, old) in enumerate(zip(named, before, strict=False))
            if block != old
        )
        if num_partial and keepers[source] != target:
            editor.copies += ((group, target, parents[source][num_full - begin]),)
    for target, _ in children:
        pool.release(parents[target], editor.owner(target).digests[begins[target] :])


def take_changes(editor: StateEditor) -> tuple[np.ndarray, np.ndarray]:
    """Return and clear the changes by forks, as `Plan.table` and `Plan.moves`, after a plan's allocation."""
    moves = [
        (group, DEVICE, source, DEVICE, (editor.window_tables if group else editor.tables)[slot][-1])
        for group, slot, source in editor.copies
    ]
    entries = np.array(editor.entries, np.int32).reshape(-1, 3)
    editor.entries, editor.copies = (), ()
    return entries, as_array(moves)


def disband(editor: StateEditor, slots: Collection[int]) -> None:
    gone = set(slots)
    editor.beam_groups = tuple(beam_group for beam_group in editor.beam_groups if gone.isdisjoint(beam_group))
    editor.entries = tuple(entry for entry in editor.entries if entry[0] not in gone)
    editor.copies = tuple(copy for copy in editor.copies if copy[1] not in gone)


def _all_slots(editor: StateEditor) -> np.ndarray:
    return np.fromiter(chain.from_iterable(editor.beam_groups), np.intp)


def _has_answered(editor: StateEditor, beam_group: Sequence[int]) -> bool:
    slots = editor.slots
    own = [slot for slot in beam_group if slots.num_tokens[slot]]
    columns = (
        column[own]
        for column in (slots.num_tokens, slots.num_computed, slots.length, slots.num_sampled, slots.num_returned)
    )
    num_tokens, num_computed, length, num_sampled, num_returned = columns
    return bool(own) and bool(
        ((num_computed == num_tokens) & (length == num_tokens + 1) & (num_sampled == num_returned)).all()
    )
