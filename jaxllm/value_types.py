"""Examine long lists without holding the interpreter. Standard library only."""

from __future__ import annotations

from collections.abc import Sequence

_PIECE = 1 << 15  # values; 0.5 ms


def types_of(values: Sequence[object]) -> set[type]:
    """Return the types of a sequence's values, in pieces: 4 million at once hold the GIL for 0.05 s.

    >>> types_of([1, True, 2]) == {int, bool}
    True
    """
    found = set[type]()
    for start in range(0, len(values), _PIECE):
        found.update(map(type, values[start : start + _PIECE]))
    return found
