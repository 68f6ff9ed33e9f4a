"""Entry of a request into a slot and exit from it: columns, blocks, and the prefix index."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from jaxllm.scheduler import beam_groups, block_pool, drafting, media, sources, windowed
from jaxllm.scheduler.state import Limits, Request, Running, StateEditor, Waiting

NO_TOKEN = np.iinfo(np.int32).max


def occupy(
    editor: StateEditor, limits: Limits, slot: int, entry: Waiting, num_cached: int, owned: tuple[int, ...]
) -> None:
    request, own = entry.request, editor.own_slots
    editor.num_admitted += 1
    editor.running[slot] = Running(request, entry.order, entry.digests)
    editor.tables[slot] = owned
    own.epochs[slot] = editor.num_admitted
    own.ids[slot] = request.sequence_id
    own.num_prefill[slot] = own.length[slot] = own.num_tokens[slot] = entry.num_tokens
    own.num_computed[slot] = num_cached
    own.limit[slot] = request.limit
    own.capacity[slot] = len(owned) * limits.block_size
    own.stop_id[slot] = request.stop_ids[0] if request.stop_ids else NO_TOKEN
    own.has_more_stops[slot] = len(request.stop_ids) > 1
    if limits.max_drafts:
        drafting.begin(editor, slot, request.may_draft)


def requeue(editor: StateEditor, limits: Limits, slot: int) -> None:
    """Queue a running request again with its known tokens; `vacate` must follow."""
    record = editor.owner(slot)
    num_tokens = (
        int(editor.slots.num_tokens[slot]) or record.request.num_prompt
    )  # 0: member of a beam group before its first row
    digests = digests_of(record.request, limits, record.digests, num_tokens)
    editor.enqueue([Waiting(record.request, record.order, num_tokens, digests)])


def vacate(
    editor: StateEditor, limits: Limits, slots: Sequence[int], may_publish: bool = True, is_preempted: bool = False
) -> None:
    """Empty slots, index the full blocks of sampled tokens, and release all blocks.

    Blocks that steps in flight may have written are not indexed. Indexing waits until here because digests cost 2 us a
    block, 62 blocks a step at 1,000 requests.
    """
    for slot in slots:
        record, table = editor.owner(slot), editor.tables[slot]
        written = int(editor.slots.num_computed[slot])
        first = min(len(record.digests), written // limits.block_size)
        digests = digests_of(record.request, limits, record.digests[:first], written)
        if may_publish:
            editor.describe(record.request, digests, range(first, len(digests)), limits.block_size)
            editor.pool.publish(zip(digests[first:], table[first:], strict=False))
        if is_preempted and limits.swaps:
            swap = partial(editor.host.keep, editor.num_planned + 1, limits.max_stores, record.request.sequence_id)
            swap(0, digests, table)
            if limits.window:
                swap(windowed.GROUP, digests[int(editor.slots.num_freed[slot]) :], editor.window_tables[slot])
        named = max(digests, record.digests, key=len)
        editor.pool.release(table, named)
        if limits.window:
            if may_publish:
                windowed.publish(editor, slot, digests, range(first, len(digests)))
            windowed.leave(editor, slot, named)
        if limits.max_source:
            sources.leave(editor, limits, slot, record.request)
        editor.running[slot], editor.tables[slot] = None, ()
    if editor.beam_groups:
        beam_groups.disband(editor, slots)
    editor.rank_adapters()
    # With limit and length 0, no column test finds work.
    own = editor.own_slots
    columns = (
        own.epochs,
        own.num_prefill,
        own.num_computed,
        own.length,
        own.num_tokens,
        own.num_sampled,
        own.num_returned,
        own.limit,
        own.capacity,
    )
    columns += drafting.columns(editor) if limits.max_drafts else ()
    columns += (own.num_freed,) if limits.window else ()
    for column in columns:
        column[list(slots)] = 0


def publish_prompt(editor: StateEditor, limits: Limits, slot: int, start: int, length: int) -> None:
    """Index the blocks that a chunk completes, which later rows of the step may hit: each layer writes before any row
    attends.
    """
    record, table = editor.owner(slot), editor.tables[slot]
    digests = record.digests
    full = slice(start // limits.block_size, min((start + length) // limits.block_size, len(digests)))
    editor.describe(record.request, digests, range(full.start, full.stop), limits.block_size)
    editor.pool.publish(zip(digests[full], table[full], strict=True))
    if limits.stores_prompts and full.stop > full.start:
        editor.host.note_due(0, zip(digests[full], table[full], strict=True))
    if limits.window:
        windowed.publish(editor, slot, digests, range(full.start, full.stop))
        if limits.stores_prompts and full.stop > full.start:
            editor.host.note_due(windowed.GROUP, windowed.contents(editor, slot, digests, range(full.start, full.stop)))


def digests_of(request: Request, limits: Limits, first: Sequence[bytes], num_tokens: int) -> tuple[bytes, ...]:
    """Extend the digests `first` of leading blocks to all full blocks of the first `num_tokens`."""
    if request.root is None:
        return ()
    size = limits.block_size
    tokens = request.tokens[len(first) * size : num_tokens // size * size].tobytes()
    parent = first[-1] if first else request.root
    if request.media:
        return (*first, *media.chained(parent, tokens, size, request.media, len(first)))
    return (*first, *block_pool.chained(parent, tokens, size))


def reach(editor: StateEditor, limits: Limits, request: Request, start: int, length: int) -> int:
    """Encode a chunk's images; return its length before an image that does not fit.

    With `whole_image` the chunk also ends before an image that exceeds it.
    """
    if not request.media:
        return length
    if limits.whole_image:
        length = media.whole(request.media, start, length)
    return editor.media.reach(request.sequence_id, request.media, start, length, limits.max_encoded, limits.media_unit)
