"""Admission of waiting requests to slots and blocks, by rank. S slots, R rows of a plan."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from jaxllm.scheduler import beam_groups, media, occupancy, sources, windowed
from jaxllm.scheduler.state import Admission, Limits, StateEditor, Waiting
from jaxllm.scheduler.windowed import Entering


def admit(
    editor: StateEditor,
    limits: Limits,
    rows: list[tuple[int, int, int]],
    budget: int,
    admitted: list[Admission],
    table: list[np.ndarray],
) -> None:
    """Admit waiting requests by rank while tokens, slots and blocks suffice for the first.

    Skips those that lack only a place for an adapter, or wait for blocks. Adds to `rows`, whose tokens count against
    `budget`, to `admitted` and to `table`.
    """
    budget -= sum(length for _, _, length in rows)
    free_slots = (editor.slots.epochs == 0).nonzero()[0].tolist()[::-1]
    num_running = limits.num_slots - len(free_slots)
    places = editor.places(limits) if free_slots else None
    has_host = limits.num_host_blocks > 0
    passed_over = editor.host.passed_over if has_host else frozenset()
    skipped: list[Waiting] = []
    for place, entry in enumerate(editor.waiting):
        if place < len(skipped) + len(admitted):  # in the beam group of an earlier entry
            continue
        if not free_slots or budget == 0 or len(rows) == limits.max_step_chunks:
            break
        if passed_over and entry.request.sequence_id in passed_over:
            skipped.append(entry)
            continue
        if places is not None:
            adapter = entry.request.adapter
            if adapter in places.closed or not places.admits(adapter):
                skipped += beam_groups.queued(editor.waiting, place) if entry.request.beam_group else (entry,)
                continue
        if limits.whole_prompts and entry.num_tokens > budget:
            break
        if entry.request.beam_group:
            members = beam_groups.queued(editor.waiting, place)
            num_tokens = _admit_beam_group(
                editor, limits, members, free_slots, num_running, rows, budget, admitted, table
            )
            if num_tokens is None:
                break
            if places is not None:
                places.enter(entry.request.adapter)
            budget -= num_tokens
            num_running += len(members)
            continue
        readable = (entry.num_tokens - 1) // limits.block_size if entry.request.reads_cache else 0
        digests = entry.digests[:readable]
        hits = editor.host.look_up(editor.pool, 0, digests) if has_host else editor.pool.look_up(digests)
        images = entry.request.media
        if images:
            hits = hits[: media.cut(images, len(hits), limits.block_size)]
        if limits.window:
            find = partial(_find_windowed, editor, limits)
            hits, near = windowed.cut(limits, entry.digests, hits, find)
            while images and (kept := media.cut(images, len(hits), limits.block_size)) < len(hits):
                hits, near = windowed.cut(limits, entry.digests, hits[:kept], find)
            first_end = len(hits) * limits.block_size + 1
            if limits.whole_image:
                first_end = media.next_end(images, first_end - 1)
            entering = Entering(entry.num_tokens, len(hits), near, first_end)
            if not windowed.has_room(editor, limits, [entering], num_running):
                break
        else:
            entering = None
        here = [block for block in hits if block >= 0] if has_host else hits
        num_blocks = -(-entry.num_tokens // limits.block_size)
        source = sources.find(editor, limits, entry.request)
        if source is None:
            break
        # One block per running request stays free, or the next step would undo this.
        available = editor.pool.num_available - editor.pool.num_idle([*here, *source.hits])
        if num_blocks - len(here) + source.num_new > available - num_running:
            break
        start = len(hits) * limits.block_size
        length = min(entry.num_tokens - start, budget)
        if images:
            length = occupancy.reach(editor, limits, entry.request, start, length)
            if not length:
                break
        slot = free_slots.pop()
        if places is not None:
            places.enter(entry.request.adapter)
        editor.pool.share([*here, *source.hits])
        sources.enter(editor, limits, slot, entry.request, source)
        if len(here) < len(hits):
            hits = _load(editor, limits, entry, 0, hits)
        owned = (*hits, *editor.pool.take(num_blocks - len(hits)).tolist())
        occupancy.occupy(editor, limits, slot, entry, start, owned)
        table.append(_entries(limits, slot, owned))
        if entering is not None:
            editor.window_pool.share([block for block in entering.near if block >= 0])
            if has_host:
                near = _load(editor, limits, entry, windowed.GROUP, entering.near, len(hits) - len(entering.near))
                entering = entering._replace(near=near)
            windowed.enter(editor, limits, slot, entering, table)
            length = windowed.extend(editor, limits, slot, start, length, num_running, table)
            if limits.whole_image:
                length = media.whole(images, start, length)
        occupancy.publish_prompt(editor, limits, slot, start, length)
        budget -= length
        num_running += 1
        rows.append((slot, start, length))
        admitted.append(Admission(slot, entry.request, entry.num_tokens, start))
    if admitted:
        if has_host:
            editor.host.let_go({each.request.sequence_id for each in admitted})
        rest = editor.waiting[len(skipped) + len(admitted) :]
        editor.waiting = (*skipped, *rest) if skipped else rest
    if places is not None:
        editor.adapters = places.residents


def _admit_beam_group(
    editor: StateEditor,
    limits: Limits,
    members: Sequence[Waiting],
    free_slots: list[int],
    num_running: int,
    rows: list[tuple[int, int, int]],
    budget: int,
    admitted: list[Admission],
    table: list[np.ndarray],
) -> int | None:
    """Give slots and blocks to a beam group; return the tokens of its rows, or None if it does not fit."""
    if len(members) > len(free_slots):
        return None
    found = beam_groups.find(editor, limits, members)
    total = [-(-entry.num_tokens // limits.block_size) for entry in members[: len(found)]]
    num_new = [count - max(len(part.hits), part.count) for count, part in zip(total, found, strict=True)]
    source = sources.find(editor, limits, members[0].request)
    if source is None:
        return None
    hits = list({*(block for part in found for block in part.hits), *source.hits})
    # One block stays free per running request, and per member without a row yet.
    if source.num_new + sum(num_new) + len(members) - len(found) > (
        editor.pool.num_available - editor.pool.num_idle(hits) - num_running
    ):
        return None
    entering = [
        Entering(entry.num_tokens, len(part.hits), part.near) for entry, part in zip(members, found, strict=False)
    ]
    if limits.window and not windowed.has_room(editor, limits, entering, num_running + len(members) - len(found)):
        return None
    slots, num_tokens = [free_slots.pop() for _ in members], 0
    for part in found:
        editor.pool.share(part.hits)
        if part.near:
            editor.window_pool.share(part.near)
    editor.pool.share(source.hits)
    sources.enter(editor, limits, slots[0], members[0].request, source)
    for number, (slot, entry) in enumerate(zip(slots, members, strict=True)):
        if number and entry.request.source is not None:
            sources.follow(editor, slot, slots[0])
        if number >= len(found):
            occupancy.occupy(editor, limits, slot, entry, 0, ())
            own = editor.own_slots  # no column test finds work for it
            own.num_prefill[slot] = own.length[slot] = own.num_tokens[slot] = own.limit[slot] = 0
            admitted.append(Admission(slot, entry.request, entry.num_tokens, 0))
            continue
        shared = tuple(found[number].hits)
        if found[number].count:
            shared = editor.tables[slots[found[number].sibling]][: found[number].count]
            editor.pool.share(shared)
        owned = (*shared, *editor.pool.take(num_new[number]).tolist())
        start = len(shared) * limits.block_size
        occupancy.occupy(editor, limits, slot, entry, start, owned)
        length = min(entry.num_tokens - start, budget - num_tokens) if len(rows) < limits.max_step_chunks else 0
        table.append(_entries(limits, slot, owned))
        if limits.window:
            windowed.enter(editor, limits, slot, entering[number], table)
            length = windowed.extend(editor, limits, slot, start, length, num_running, table)
        if length:
            occupancy.publish_prompt(editor, limits, slot, start, length)
            rows.append((slot, start, length))
            num_tokens += length
        admitted.append(Admission(slot, entry.request, entry.num_tokens, start))
    editor.beam_groups = (*editor.beam_groups, tuple(slots))
    return num_tokens


def _find_windowed(editor: StateEditor, limits: Limits, digest: bytes) -> int | None:
    pool = editor.window_pool
    return editor.host.find(pool, windowed.GROUP, digest) if limits.num_host_blocks else pool.find(digest)


def _load(
    editor: StateEditor, limits: Limits, entry: Waiting, group: int, found: Sequence[int], first: int = 0
) -> list[int]:
    """Load the host's blocks among `found`, which begin at block `first` of the sequence."""
    for place, block in enumerate(found, first):
        if block < 0 and not group:
            editor.describe(entry.request, entry.digests, range(place, place + 1), limits.block_size)
    pool = editor.window_pool if group else editor.pool
    return editor.host.load(pool, group, entry.digests[first : first + len(found)], found)


def _entries(limits: Limits, slot: int, owned: Sequence[int]) -> np.ndarray:
    columns = range(0, len(owned) * limits.num_groups, limits.num_groups)
    return np.array(([slot] * len(owned), columns, owned), np.int32).T
