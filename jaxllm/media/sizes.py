"""Bounds of the sizes of pictures. No NumPy, for processes that start quickly."""

from __future__ import annotations

from jaxllm.errors import UserError

MOST_PIXELS = 1 << 25  # 100 MB as RGB
MOST_RATIO = 200  # of the longer to the shorter side


def check_size(size: tuple[int, int], name: str, parameter: str) -> None:
    width, height = size
    if not 1 <= width * height <= MOST_PIXELS:
        raise UserError(f"{name} has {width} × {height} pixels; an image may have {MOST_PIXELS}.", parameter)
    if max(size) > MOST_RATIO * min(size):
        raise UserError(
            f"{name} has {width} × {height} pixels; one side may be {MOST_RATIO} times the other.", parameter
        )
