"""The input of a step, one packed int32 buffer, and the table of program sizes. Pure.

A *decode* step has one token per row, already on the device. A *ragged* step is a flat run of tokens: decode rows, then
prompt chunks, cut into tiles except in deterministic mode.

Y tiles, U block-table entries, F numbers of a sampling row.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from jaxllm.scheduler.state import Plan

# int32 numbers: Triton needs addresses that are multiples of 16 bytes.
ALIGNMENT = 32
TILE = 32  # queries of a sequence that attend together
MASK_COLUMNS = ("row_slot", "row_position", "samples", "is_masked")  # before the words of the mask


@dataclass(frozen=True, slots=True)
class Shape:
    """The static sizes of a program."""

    tokens: int  # T; equals R in a decode program
    rows: int  # R
    tiles: int  # Y, 0 if tokens attend one by one; of an encoder: bins
    entries: int  # U
    sampling_fields: int  # F; 0 in a decode program
    bin_tokens: int = 0
    adapters: int = 0
    # K per row, to verify and to make. If set, every token is sampled, and row fields have an entry per token.
    drafts: int = 0
    media: int = 0  # rows of embeddings
    looks_ahead: bool = False  # tokens of images see all of their image; of ragged programs
    axes: int = 0  # of rotary positions, if these are not places in the sequence; 1 in a decode program

    @property
    def sampled(self) -> int:
        return self.tokens if self.drafts else self.rows

    @property
    def is_decode(self) -> bool:
        """Whether every row is one token, already on the device."""
        return self.sampling_fields == 0 and not self.bin_tokens

    def __str__(self) -> str:
        if self.bin_tokens:
            return f"encode[{self.tiles} × {self.bin_tokens}]"
        kind = f"decode[{self.rows}]" if self.is_decode else f"ragged[{self.tokens}]"
        kind += f"×{self.drafts}" if self.drafts else ""
        return f"{kind}+{self.adapters}" if self.adapters else kind


class Extent(NamedTuple):
    """The sizes of a plan, which select its shape."""

    tokens: int
    rows: int
    tiles: int  # 0: a decode step
    adapters: int = 0
    proposes: bool = False


def decode_shapes(num_slots: int, smallest: int = 1, platform: str = "cpu") -> list[Shape]:
    """Return the decode programs: 1, 2, 4, 8, 12, 16, 24, 32 rows, then four sizes per doubling, up to all slots.

    On a GPU 2, 16 and 64, then two per doubling. All tables are the coarsest with less than 12 % of padding
    (benchmarks/padding.py; DECISIONS, "Programs have flat tokens and a coarse table of sizes").
    """
    if platform == "cpu":
        sizes = _sizes(1, num_slots, {1: 1, 8: 2, 32: 4})
    else:
        sizes = sorted({min(size, num_slots) for size in (2, 16, *_sizes(64, max(64, num_slots), {128: 2}))})
    rows = sorted({max(smallest, size) for size in sizes})
    return [Shape(tokens=size, rows=size, tiles=0, entries=size, sampling_fields=0) for size in rows]


def verifying_shapes(max_tokens: int, num_slots: int, drafts: int) -> list[Shape]:
    """Return programs for `drafts` drafts per row: 1, 2, 4, … rows, with none, half or all verified."""
    shapes = {
        Shape(
            tokens=min(rows * (1 + count), max(rows, max_tokens)),
            rows=rows,
            tiles=0,
            entries=2 * rows,
            sampling_fields=0,
            drafts=drafts,
        )
        for rows in _sizes(1, num_slots, {1: 1})
        for count in (0, drafts // 2, drafts)
    }
    return sorted(shapes, key=lambda shape: (shape.rows, shape.tokens))


def ragged_shapes(
    max_tokens: int, num_slots: int, block_size: int, sampling_fields: int, platform: str = "cpu"
) -> list[Shape]:
    """Return the ragged programs: 16, 32 and 64 tokens, then two sizes per doubling, up to the token budget.

    Above 1,024 four per doubling from 128 to 1,024, where most steps are. On a GPU 64 and 256, then two.
    """
    if platform == "cpu":
        sizes = _sizes(16, max_tokens, {64: 2, 128: 4, 1024: 2} if max_tokens > 1024 else {64: 2})
    else:
        sizes = sorted({min(size, max_tokens) for size in (64, *_sizes(256, max(256, max_tokens), {256: 2}))})
    shapes = []
    for size in sizes:
        rows, chunks = min(size, num_slots), max_chunks(size, num_slots)
        shapes.append(
            Shape(
                tokens=size,
                rows=rows,
                tiles=-(-size // TILE) + chunks,
                entries=rows + chunks + size // block_size,
                sampling_fields=sampling_fields,
            )
        )
    return shapes


def uniform_shape(max_tokens: int, num_slots: int, block_size: int, sampling_fields: int, drafts: int = 0) -> Shape:
    """Return the only ragged program of deterministic mode, without tiles.

    A product's bits depend on its number of rows, tiled attention's on the start of chunks.
    """
    return Shape(
        tokens=max_tokens,
        rows=min(max_tokens, num_slots),
        tiles=0,
        entries=2 * num_slots + max_tokens // block_size,
        sampling_fields=sampling_fields,
        drafts=drafts,
    )


def of_two_groups(shapes: Sequence[Shape]) -> list[Shape]:
    """Triple the block-table entries, for windowed layers."""
    return [replace(shape, entries=3 * shape.entries) for shape in shapes]


def coarser(shapes: Sequence[Shape], factor: int = 2) -> list[Shape]:
    step = factor.bit_length() - 1
    powers = {1 << power for power in range(0, 64, step)}
    return [shape for shape in shapes if shape.tokens == shapes[-1].tokens or shape.tokens in powers]


def _sizes(first: int, last: int, parts: Mapping[int, int]) -> list[int]:
    """Return sizes up to `last`, with `parts[start]` sizes per doubling from each `start` on."""
    sizes, size = set(), first
    while size < last:
        count = parts[max((start for start in parts if start <= size), default=0)] if size >= min(parts) else 1
        sizes |= {size + size * part // count for part in range(count)}
        size *= 2
    return sorted({min(size, last) for size in sizes} | {last})


def max_chunks(tokens: int, num_slots: int) -> int:
    """Return the most prompt chunks in a step, of half a tile or more on average."""
    return min(num_slots, max(1, 2 * tokens // TILE))


def extent(plan: Plan, num_adapters: int = 0) -> Extent:
    num_rows = len(plan.slots)
    if num_rows == plan.num_decodes:
        return Extent(plan.num_tokens, num_rows, 0, num_adapters, plan.proposes)
    tiles = int((-(-plan.lengths[plan.num_decodes :] // TILE)).sum())
    return Extent(plan.num_tokens, num_rows, tiles, num_adapters)


def fits(size: Extent, shape: Shape) -> bool:
    """Whether a shape holds a plan; excess block-table entries are sent separately."""
    if size.adapters > shape.adapters:
        return False
    if shape.is_decode:
        is_narrow = size.rows <= shape.rows and size.tokens <= shape.tokens
        return is_narrow and not size.tiles and size.proposes == (shape.drafts > 0)
    has_tiles = not shape.tiles or size.tiles <= shape.tiles
    return size.tokens <= shape.tokens and size.rows <= shape.rows and has_tiles


@lru_cache(maxsize=1024)
def fields(shape: Shape) -> Mapping[str, tuple[int, tuple[int, ...]]]:
    table = {"table": (shape.entries, 3)}
    names = ("row_slot", "row_position", *(("row_offset", "row_drafts", "row_capacity") if shape.drafts else ()))
    rows = dict.fromkeys(names, (shape.sampled,))
    if shape.is_decode:
        sizes = rows | table
    else:
        sizes = {
            "num_decodes": (1,),
            "tokens": (shape.tokens,),
            "token_slot": (shape.tokens,),
            "token_position": (shape.tokens,),
            "tile_slot": (shape.tiles,),
            "tile_start": (shape.tiles,),
            "tile_length": (shape.tiles,),
            "tile_position": (shape.tiles,),
            **({"token_media": (shape.tokens,)} if shape.media else {}),
            **({"token_last_seen": (shape.tokens,)} if shape.looks_ahead else {}),
            **rows,
            "row_last": (shape.sampled,),
            "row_samples": (shape.sampled,),
            "sampling": (shape.sampled, shape.sampling_fields),
            **table,
        }
    sizes |= {"token_adapter": (shape.tokens,)} if shape.adapters else {}
    return placed(sizes | ({"turned": (shape.axes, shape.tokens)} if shape.axes else {}))


def placed(sizes: Mapping[str, tuple[int, ...]]) -> Mapping[str, tuple[int, tuple[int, ...]]]:
    table, offset = {}, 0
    for name, size in sizes.items():
        table[name] = (offset, size)
        offset += -(-math.prod(size) // ALIGNMENT) * ALIGNMENT
    return table


@lru_cache(maxsize=1024)
def buffer_size(shape: Shape) -> int:
    return size_of(fields(shape))


def stride(shape: Shape) -> int:
    """Return the distance between the batches of a tick's buffer, in int32."""
    return -(-buffer_size(shape) // ALIGNMENT) * ALIGNMENT


def sent_size(shape: Shape, num_ticks: int) -> int:
    """Return the length of a step's or tick's buffer, in int32."""
    return buffer_size(shape) if num_ticks == 1 else num_ticks * stride(shape)


def size_of(table: Mapping[str, tuple[int, tuple[int, ...]]]) -> int:
    """Return the length of a packed buffer, in int32."""
    offset, size = list(table.values())[-1]
    return offset + math.prod(size)


def views(buffer: np.ndarray, table: Mapping[str, tuple[int, tuple[int, ...]]]) -> dict[str, np.ndarray]:
    return {name: buffer[offset : offset + math.prod(size)].reshape(size) for name, (offset, size) in table.items()}


def pack(
    plan: Plan,
    shape: Shape,
    num_slots: int,
    chunks: Sequence[np.ndarray] = (),
    sampling: np.ndarray | None = None,
    adapters: np.ndarray | None = None,
    media: np.ndarray | None = None,
    turned: np.ndarray | None = None,
    last_seen: np.ndarray | None = None,
) -> np.ndarray:
    """Pack a plan as int32[buffer_size(shape)]; padding has slot S, which is dropped.

    `chunks`: token ids of the rows after the decode rows; `sampling`: int32[S, F]; `adapters`: int32[R], numbers in the
    program, or `shape.adapters`; `media`: int32[tokens], rows of embeddings, or `shape.media`; `turned`: int32[axes,
    tokens], rotary positions, by default places in the sequence; differences from them if the device drafts;
    `last_seen`: int32[tokens], the last places that tokens attend to, by default their own.
    """
    buffer = np.zeros(buffer_size(shape), np.int32)
    view = views(buffer, fields(shape))
    num_rows = len(plan.slots)
    at = places(plan, shape.drafts > 0)
    used = len(at.slots)
    view["row_slot"][:used] = at.slots
    view["row_slot"][used:] = num_slots
    view["row_position"][:used] = at.positions
    if at.offsets is not None:
        assert plan.capacity is not None
        view["row_offset"][:used], view["row_drafts"][:used] = at.offsets, at.drafts
        view["row_capacity"][:used] = np.repeat(plan.capacity, plan.lengths)
    table = plan.table[: shape.entries]
    view["table"][: len(table)] = table
    view["table"][len(table) :, 0] = num_slots
    if shape.adapters:
        view["token_adapter"][:] = shape.adapters
        if adapters is not None:
            view["token_adapter"][: plan.num_tokens] = np.repeat(adapters, plan.lengths)
    num_tokens = plan.num_tokens
    if shape.axes:
        view["turned"][:, :num_tokens] = token_places(plan) if turned is None else turned
    if shape.is_decode:
        return buffer

    assert sampling is not None
    first_tokens = np.cumsum(plan.lengths) - plan.lengths
    view["num_decodes"][0] = plan.num_decodes + plan.num_drafts
    if shape.media:
        view["token_media"][:] = shape.media
        if media is not None:
            view["token_media"][:num_tokens] = media
    if shape.looks_ahead:
        view["token_last_seen"][:num_tokens] = token_places(plan) if last_seen is None else last_seen
    if chunks:
        view["tokens"][plan.num_decodes : num_tokens] = np.concatenate(chunks)
    view["token_slot"][:num_tokens] = np.repeat(plan.slots, plan.lengths)
    view["token_slot"][num_tokens:] = num_slots
    view["token_position"][:num_tokens] = token_places(plan)
    view["row_last"][:used] = first_tokens + plan.lengths - 1 if at.offsets is None else np.arange(used)
    view["row_samples"][:used] = at.samples
    view["sampling"][:used] = sampling[at.slots]
    if not shape.tiles:
        return buffer

    rows = slice(plan.num_decodes, num_rows)
    counts = -(-plan.lengths[rows] // TILE)
    num_tiles = int(counts.sum())
    inside = TILE * (np.arange(num_tiles) - np.repeat(np.cumsum(counts) - counts, counts))
    view["tile_slot"][:num_tiles] = np.repeat(plan.slots[rows], counts)
    view["tile_slot"][num_tiles:] = num_slots
    view["tile_start"][:num_tiles] = np.repeat(first_tokens[rows], counts) + inside
    view["tile_length"][:num_tiles] = np.minimum(TILE, np.repeat(plan.lengths[rows], counts) - inside)
    view["tile_position"][:num_tiles] = np.repeat(plan.starts[rows], counts) + inside
    return buffer


def token_places(plan: Plan) -> np.ndarray:
    first_tokens = np.cumsum(plan.lengths) - plan.lengths
    return np.arange(plan.num_tokens) + np.repeat(plan.starts - first_tokens, plan.lengths)


def pack_masks(
    plan: Plan, num_places: int, num_slots: int, masks: np.ndarray, is_masked: np.ndarray, of_tokens: bool = False
) -> np.ndarray:
    """Pack the input of a step's second part, int32[num_places, columns + V / 32].

    `masks`, int32[R, V / 32], have a bit per allowed token; valid where `is_masked`, bool[R]. With `of_tokens` each
    token has a place, and a row's mask is at its last.
    """
    at = places(plan, of_tokens)
    buffer = np.zeros((num_places, len(MASK_COLUMNS) + masks.shape[1]), np.int32)
    used = len(at.slots)
    buffer[used:, 0] = num_slots
    for column, values in enumerate((at.slots, at.positions, at.samples)):
        buffer[:used, column] = values
    last = np.cumsum(plan.lengths) - 1 if of_tokens else np.arange(used)
    buffer[last, len(MASK_COLUMNS) - 1] = is_masked
    buffer[last, len(MASK_COLUMNS) :] = masks
    return buffer


class SamplePositions(NamedTuple):
    """The tokens after which a step samples: each row's last, or all to verify drafts."""

    slots: np.ndarray  # int[·]
    positions: np.ndarray  # int[·]: the last possible if drafts are not yet counted
    samples: np.ndarray  # bool[·]
    offsets: np.ndarray | None = None  # int[·]: in the row; -1: not sampled
    drafts: np.ndarray | None = None  # int[·]


def places(plan: Plan, of_tokens: bool) -> SamplePositions:
    if not of_tokens:
        return SamplePositions(plan.slots, plan.starts + plan.lengths - 1, plan.samples)
    offsets = np.arange(plan.num_tokens) - np.repeat(np.cumsum(plan.lengths) - plan.lengths, plan.lengths)
    slots, starts = np.repeat(plan.slots, plan.lengths), np.repeat(plan.starts, plan.lengths)
    samples, drafts = np.ones(len(slots), np.bool_), np.repeat(plan.lengths - 1, plan.lengths)
    chunks = slice(len(slots) if plan.num_drafts else plan.num_decodes, None)
    is_last = offsets[chunks] == drafts[chunks]
    samples[chunks] = is_last & np.repeat(plan.samples, plan.lengths)[chunks]
    positions = starts + offsets
    offsets[chunks] = is_last - 1
    drafts[chunks] = 0
    return SamplePositions(slots, positions, samples, offsets, drafts)
