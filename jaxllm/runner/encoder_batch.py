"""The packed input of encoder models: each prompt in one bin of fixed length, because attention is bidirectional.
Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np

from jaxllm.runner.batch import Shape, placed, size_of, views
from jaxllm.scheduler.state import Plan

SMALLEST_BIN = 32  # tokens
# Cost of a token without attention, in tokens of its bin: 12 D² multiplications against 2 D each, D = 384.
_PLAIN_COST = 2304


def bin_lengths(max_model_len: int) -> list[int]:
    """Return the bin lengths: powers of two and midpoints (without these 60 prompts of 1 to 200 tokens had 39 % of
    padding).
    """
    longest = max(SMALLEST_BIN, -(-max_model_len // 8) * 8)  # matrix products prefer multiples of 8
    doubled = [SMALLEST_BIN << power for power in range(longest.bit_length())]
    return sorted({min(longest, size + extra) for size in doubled for extra in (0, size // 2)})


def shapes(max_tokens: int, num_slots: int, max_model_len: int) -> list[Shape]:
    """Return the programs, cheapest first: for each length 1, 2, 3, 4, 6, 8, 12, … bins, up to twice a step's tokens.

    They hold every plan: first-fit packing, longest first, leaves at most one bin half empty.
    """
    made = []
    for length in bin_lengths(max_model_len):
        most = 2 * max_tokens // length + 1
        doubled = [1 << power for power in range(most.bit_length())]
        for count in sorted({min(most, size + extra) for size in doubled for extra in (0, size // 2)}):
            tokens = count * length
            made.append(
                Shape(tokens, min(tokens, num_slots), tiles=count, entries=0, sampling_fields=0, bin_tokens=length)
            )
    return sorted(made, key=lambda shape: shape.tokens * (_PLAIN_COST + shape.bin_tokens))


def covering(made: Sequence[Shape]) -> list[Shape]:
    longest = max(shape.bin_tokens for shape in made)
    largest = max((shape for shape in made if shape.bin_tokens == longest), key=lambda shape: shape.tokens)
    alone = sorted((shape for shape in made if shape.tiles == 1), key=lambda shape: shape.tokens)
    return [largest, *(shape for shape in alone[::2] if shape is not largest)]


def place(lengths: np.ndarray, shape: Shape) -> np.ndarray | None:
    """Return the prompts' starts in a program, int32[R]; None if they do not fit."""
    if len(lengths) > shape.rows or lengths.sum() > shape.tokens or lengths.max() > shape.bin_tokens:
        return None
    starts, open_bins, num_bins = np.zeros(len(lengths), np.int32), [], 0
    for row in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[row])
        found = next((each for each in open_bins if each[1] >= length), None)
        if found is None:
            if num_bins == shape.tiles:
                return None
            found = [num_bins * shape.bin_tokens, shape.bin_tokens]
            num_bins += 1
            open_bins.append(found)
        starts[row] = found[0]
        found[0], found[1] = found[0] + length, found[1] - length
        if found[1] == 0:
            open_bins.remove(found)
    return starts


@lru_cache(maxsize=1024)
def fields(shape: Shape) -> Mapping[str, tuple[int, tuple[int, ...]]]:
    tokens, rows = (shape.tokens,), (shape.rows,)
    return placed(
        {
            **dict.fromkeys(("tokens", "token_row", "token_position", "token_types"), tokens),
            **dict.fromkeys(("row_first", "row_length"), rows),
        }
    )


def pack(
    plan: Plan, shape: Shape, prompts: Sequence[np.ndarray], token_types: Sequence[np.ndarray | None]
) -> np.ndarray:
    """Pack a plan as int32[·]; `prompts`: token ids by row, `token_types`: None for zeros. Padding has row R."""
    starts = place(plan.lengths, shape)
    if starts is None:
        raise RuntimeError(f"a program of {shape} does not hold {len(plan.slots)} prompts")
    table = fields(shape)
    buffer = np.zeros(size_of(table), np.int32)
    view = views(buffer, table)
    view["token_row"][:] = shape.rows
    used = len(starts)
    view["row_first"][:used], view["row_length"][:used] = starts, plan.lengths
    for row, (start, prompt, types) in enumerate(zip(starts.tolist(), prompts, token_types, strict=True)):
        own = slice(start, start + len(prompt))
        view["tokens"][own], view["token_row"][own] = prompt, row
        view["token_position"][own] = np.arange(len(prompt))
        if types is not None:
            view["token_types"][own] = types
    return buffer
