"""The blocks of a waiting request that must be fetched to the host's tier."""

from __future__ import annotations

from collections.abc import Callable

from jaxllm.scheduler import windowed
from jaxllm.scheduler.state import Limits, State, StateEditor, Waiting

ELSEWHERE = 1 << 30  # among found blocks
MOST_HELD = 0.5  # share of the host's blocks, for requests that do not run yet


def wanted(
    state: State, limits: Limits, entry: Waiting, is_elsewhere: Callable[[int, bytes], bool]
) -> list[tuple[int, int]]:
    """Return the blocks, (group, index), that would extend the cached prefix of a waiting request if fetched.

    `is_elsewhere` finds a block by group and digest.
    """
    if not entry.digests or not entry.request.reads_cache or entry.request.beam_group:
        return []
    editor = StateEditor(state)

    def find(group: int, digest: bytes) -> int | None:
        block = editor.host.find(editor.window_pool if group else editor.pool, group, digest)
        return ELSEWHERE if block is None and is_elsewhere(group, digest) else block

    hits: list[int] = []
    for digest in entry.digests[: (entry.num_tokens - 1) // limits.block_size]:
        block = find(0, digest)
        if block is None:
            break
        hits.append(block)
    found = [hits]
    if limits.window:
        found = [*windowed.cut(limits, entry.digests, hits, lambda digest: find(windowed.GROUP, digest))]
    end = len(found[0])
    return [
        (group, end - len(blocks) + at)
        for group, blocks in enumerate(found)
        for at, block in enumerate(blocks)
        if block == ELSEWHERE
    ]


def room(state: State, limits: Limits) -> list[int]:
    """Return the number of further blocks, by group, that may be fetched."""
    assert state.host is not None
    held = [sum(each.group == group for each in state.host.held) for group in range(limits.num_groups)]
    return [int(MOST_HELD * count) - own for count, own in zip(limits.host_blocks, held, strict=True)]
