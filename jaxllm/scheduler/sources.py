"""Inputs of an encoder: blocks of the pool for the keys and values that the decoder's cross-attention reads.

Requests of the same source share its blocks; unused ones stay cached. A plan encodes sources before its step and after
its moves, so their blocks may be hit from then on.
"""

from __future__ import annotations

from typing import NamedTuple

from jaxllm.scheduler.block_pool import chain
from jaxllm.scheduler.media import Encode
from jaxllm.scheduler.state import Limits, Request, Source, StateEditor


class Arriving(NamedTuple):
    """A source being admitted."""

    hits: list[int]
    num_new: int  # blocks to take


NOTHING = Arriving([], 0)


def num_blocks(source: Source | None, block_size: int) -> int:
    return 0 if source is None else -(-source.length // block_size)


def find(editor: StateEditor, limits: Limits, request: Request) -> Arriving | None:
    """Return what a request's source needs; None if this plan has encoded too much for it."""
    source = request.source
    if source is None:
        return NOTHING
    hits = editor.pool.look_up(_digests(source, limits))
    num_new = num_blocks(source, limits.block_size) - len(hits)
    if num_new and editor.num_encoded and editor.num_encoded + source.length > limits.max_encoded:
        return None
    return Arriving(hits, num_new)


def enter(editor: StateEditor, limits: Limits, slot: int, request: Request, arriving: Arriving) -> None:
    """Give a request its source's blocks; the cached ones are already shared."""
    source = request.source
    if source is None:
        return
    blocks = (*arriving.hits, *editor.pool.take(arriving.num_new).tolist())
    editor.sources[slot] = blocks
    if arriving.num_new:
        editor.num_encoded += source.length
        editor.source_encodes.append(Encode(request.sequence_id, len(arriving.hits), blocks))
        digests = _digests(source, limits)
        editor.pool.publish(zip(digests, blocks, strict=True))


def follow(editor: StateEditor, slot: int, other: int) -> None:
    """Share the source's blocks of another member of a beam group."""
    blocks = editor.sources[other]
    editor.pool.share(blocks)
    editor.sources[slot] = blocks


def leave(editor: StateEditor, limits: Limits, slot: int, request: Request) -> None:
    if request.source is not None:
        editor.pool.release(editor.sources[slot], _digests(request.source, limits))
        editor.sources[slot] = ()


def forget(editor: StateEditor, limits: Limits, slot: int) -> None:
    """Remove the source of a failed request, unless other requests use it."""
    source = editor.owner(slot).request.source
    if source is not None:
        editor.pool.forget(editor.sources[slot], _digests(source, limits))


def _digests(source: Source, limits: Limits) -> list[bytes]:
    count = num_blocks(source, limits.block_size)
    return [chain(source.digest, number.to_bytes(4, "little")) for number in range(count)]
