"""A second group of blocks, for layers that see only the last W tokens in models with other layers.

A slot frees a block once later queries cannot see it, and a prompt gets its blocks per chunk, not at admission. A
cached prefix is usable if the first group's index has all its blocks, and the second's those in the window; else it is
cut.

The device may load blocks before the window, with weight 0: there the table has block `Limits.num_window_blocks`, of
zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from jaxllm.scheduler import media
from jaxllm.scheduler.state import Limits, StateEditor

GROUP = 1


class Entering(NamedTuple):
    """A request being admitted."""

    num_tokens: int
    num_hits: int  # cached leading blocks in the first group …
    near: Sequence[int]  # … the last of them in the second
    first_end: int = 0  # of its shortest first chunk, in tokens


def covered(limits: Limits) -> int:
    """Return the most blocks that a block's first query sees before it."""
    return -(-(limits.window - 1) // limits.block_size)


def most(window: int, block_size: int, whole_image: int = 0) -> int:
    """Return the blocks of a running request: its window, its token, and two steps in flight or an image."""
    return -(-(window - 1) // block_size) + 1 + -(-max(2, whole_image) // block_size)


def columns(limits: Limits, indices: range) -> range:
    groups = limits.num_groups
    return range(indices.start * groups + GROUP, indices.stop * groups + GROUP, groups)


def cut(
    limits: Limits, digests: Sequence[bytes], hits: list[int], find: Callable[[bytes], int | None]
) -> tuple[list[int], list[int]]:
    """Cut a cached prefix until the second group has the blocks in its window; return the first group's, and those."""
    wanted, end = covered(limits), len(hits)
    near: list[int] = []
    at = end
    while at and len(near) < wanted:
        at -= 1
        block = find(digests[at])
        if block is None:
            near, end = [], at
        else:
            near.append(block)
    return hits[:end], near[::-1]


def has_room(editor: StateEditor, limits: Limits, entering: Sequence[Entering], spare: int) -> bool:
    """Return whether the pool of windowed layers has room for `entering` and `spare` further blocks."""
    found = list({block for each in entering for block in each.near if block >= 0})
    needed = sum(
        max(
            min(-(-each.num_tokens // limits.block_size) - each.num_hits, covered(limits) + 2 - len(each.near)),
            -(-each.first_end // limits.block_size) - each.num_hits,
        )
        + sum(block < 0 for block in each.near)  # in the host
        for each in entering
    )
    pool = editor.window_pool
    return needed <= pool.num_available - pool.num_idle(found) - spare


def enter(editor: StateEditor, limits: Limits, slot: int, entering: Entering, table: list[np.ndarray]) -> None:
    """Give a slot its request's cached blocks, already shared; add entries to `table`."""
    begin = entering.num_hits - len(entering.near)
    editor.own_slots.num_freed[slot] = begin
    editor.window_tables[slot] = tuple(entering.near)
    blocks = [limits.num_window_blocks] * begin + [*entering.near]
    _add_entries(limits, table, slot, range(entering.num_hits), blocks)


def extend(
    editor: StateEditor, limits: Limits, slot: int, start: int, length: int, spare: int, table: list[np.ndarray]
) -> int:
    """Allocate the blocks of a chunk if `spare` are left over; return the tokens that fit."""
    end = int(editor.slots.num_freed[slot]) + len(editor.window_tables[slot])
    count = -(-(start + length) // limits.block_size) - end
    count = max(0, min(count, editor.window_pool.num_available - spare))
    if count:
        hand_out(editor, limits, [slot], [count], table)
    return min(length, (end + count) * limits.block_size - start)


def hand_out(
    editor: StateEditor, limits: Limits, slots: Sequence[int], counts: Sequence[int], table: list[np.ndarray]
) -> None:
    if not slots:
        return
    tables, at = editor.window_tables, 0
    taken = editor.window_pool.take(sum(counts)).tolist()
    for slot, count in zip(slots, counts, strict=True):
        end = int(editor.slots.num_freed[slot]) + len(tables[slot])
        blocks = taken[at : at + count]
        tables[slot] += tuple(blocks)
        _add_entries(limits, table, slot, range(end, end + count), blocks)
        at += count


def lacking(editor: StateEditor, limits: Limits) -> dict[int, int]:
    """Return the blocks that slots with a prompt to continue lack for their shortest chunk, a token or an image."""
    slots, tables = editor.slots, editor.window_tables
    found: dict[int, int] = {}
    for slot in (slots.num_computed < slots.num_prefill).nonzero()[0].tolist():
        end = int(slots.num_computed[slot]) + 1
        if limits.whole_image:
            end = media.next_end(editor.owner(slot).request.media, end - 1)
        count = -(-end // limits.block_size) - int(slots.num_freed[slot]) - len(tables[slot])
        if count > 0:
            found[slot] = count
    return found


def can_grow(editor: StateEditor, growing: np.ndarray, counts: np.ndarray, lacking: Mapping[int, int]) -> bool:
    is_decode = editor.slots.num_computed[growing] >= editor.slots.num_prefill[growing]
    return int(counts[is_decode].sum()) + sum(lacking.values()) <= editor.window_pool.num_available


def grow(
    editor: StateEditor,
    limits: Limits,
    growing: np.ndarray,
    counts: np.ndarray,
    lacking: Mapping[int, int],
    table: list[np.ndarray],
) -> None:
    """Allocate the second group's blocks for a step; add them to `table`.

    Decoding slots among `growing` get `counts`, prompts in `lacking` the number there.
    """
    is_decode = editor.slots.num_computed[growing] >= editor.slots.num_prefill[growing]
    hand_out(editor, limits, growing[is_decode].tolist(), counts[is_decode].tolist(), table)
    hand_out(editor, limits, [*lacking], [*lacking.values()], table)


def give_back(editor: StateEditor, limits: Limits, table: list[np.ndarray], held: np.ndarray) -> None:
    """Free the blocks that no later query sees; add entries of the block of zeros to `table`.

    The next query is at `num_computed`, or at the last known token if recomputed. Its window counts from the first
    token of its block, so that the prefix can be hit again. Slots without work keep theirs.
    """
    slots = editor.slots
    begins = np.minimum(slots.num_computed, slots.num_tokens - 1) // limits.block_size - covered(limits)
    works = (slots.num_computed < slots.num_prefill) | (
        (slots.num_computed < slots.length) & (slots.length < slots.limit)
    )
    works[held] = False
    for slot in ((begins > slots.num_freed) & works).nonzero()[0].tolist():
        old, new = int(slots.num_freed[slot]), int(begins[slot])
        _release(editor, slot, new - old)
        editor.own_slots.num_freed[slot] = new
        _add_entries(limits, table, slot, range(old, new), [limits.num_window_blocks] * (new - old))
        if editor.entries:
            gone = columns(limits, range(old, new))
            editor.entries = tuple(each for each in editor.entries if each[0] != slot or each[1] not in gone)


def publish(editor: StateEditor, slot: int, digests: Sequence[bytes], full: range) -> None:
    """Index a slot's blocks `full` except freed ones; `digests` are those of all its blocks."""
    editor.window_pool.publish(contents(editor, slot, digests, full))


def contents(editor: StateEditor, slot: int, digests: Sequence[bytes], full: range) -> Iterator[tuple[bytes, int]]:
    """Return digests and blocks of a slot's blocks `full` except freed ones."""
    num_freed = int(editor.slots.num_freed[slot])
    first = max(full.start, num_freed)
    table = editor.window_tables[slot]
    return zip(digests[first : full.stop], table[first - num_freed :], strict=False)


def leave(editor: StateEditor, slot: int, digests: Sequence[bytes]) -> None:
    """Release a slot's blocks of windowed layers; `digests` are those of the leading blocks."""
    editor.window_pool.release(editor.window_tables[slot], digests[int(editor.slots.num_freed[slot]) :])
    editor.window_tables[slot] = ()


def forget(editor: StateEditor, slot: int) -> None:
    """Remove a slot's blocks from the index, including freed ones, unless other slots use them."""
    num_freed, digests = int(editor.slots.num_freed[slot]), editor.owner(slot).digests
    editor.window_pool.forget(editor.window_tables[slot], digests[num_freed:])
    editor.window_pool.discard(digests[:num_freed])


def _release(editor: StateEditor, slot: int, count: int) -> None:
    table, num_freed = editor.window_tables[slot], int(editor.slots.num_freed[slot])
    editor.window_pool.release(table[:count], editor.owner(slot).digests[num_freed : num_freed + count])
    editor.window_tables[slot] = table[count:]


def _add_entries(limits: Limits, table: list[np.ndarray], slot: int, indices: range, blocks: Iterable[int]) -> None:
    entries = [(slot, column, block) for column, block in zip(columns(limits, indices), blocks, strict=True)]
    table.append(np.array(entries, np.int32).reshape(-1, 3))
