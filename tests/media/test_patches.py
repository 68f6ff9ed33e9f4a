"""Images of any size: bounded tokens, positions that equal a loop over tokens, and settings that are refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.errors import UserError
from jaxllm.media.patches import read_patches
from jaxllm.media.positions import Grid, positions_of, shift_of

SIZES = st.tuples(st.integers(1, 4000), st.integers(1, 4000)).filter(lambda size: max(size) <= 200 * min(size))


@settings(deadline=None)
@given(SIZES, st.integers(1, 40), st.integers(1, 60))
def test_every_image_has_whole_tokens_within_bounds(size: tuple[int, int], fewest: int, further: int) -> None:
    """Test that the bound of tokens holds also where rounding exceeds the bounds of pixels."""
    bounds = {"min_pixels": 196 * fewest, "max_pixels": 196 * (fewest + further), "patch_size": 7}
    processor = read_patches(bounds, 9, None, 7, 2)
    wide, high = processor.resized(*size)
    assert wide % 14 == high % 14 == 0 and wide and high
    count, grid = processor.layout(size, "it", "messages")
    assert grid == (high // 14, wide // 14) and count == grid[0] * grid[1] <= processor.most_tokens
    narrow = replace(processor, context=count - 1)
    with pytest.raises(UserError, match=f"it has {count} tokens"):
        narrow.layout(size, "it", "messages")


def test_images_of_a_request_fit_into_the_context_together() -> None:
    processor = replace(read_patches({"patch_size": 7}, 9, None, 7, 2), context=60)
    picture = np.zeros((70, 42, 3), np.uint8)
    (prepared,) = processor.prepare([picture])
    with pytest.raises(UserError, match=f"it: images have {3 * prepared.num_tokens} tokens"):
        processor.prepare([picture, picture], "it", earlier=[prepared])


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 5), st.integers(1, 5)), max_size=4),
    st.integers(0, 9),
    st.data(),
)
def test_positions_equal_a_loop_over_tokens(images: list[tuple[int, int, int]], last: int, data: st.DataObject) -> None:
    """Test texts of some tokens, each followed by an image, and a text at the end; all chunks of them."""
    due: list[tuple[int, int, int]] = []
    grids, following = [], 0
    for before, rows, columns in images:
        due += [(following + at,) * 3 for at in range(before)]
        following += before
        grids.append(Grid(len(due), rows, columns))
        due += [(following, following + row, following + column) for row in range(rows) for column in range(columns)]
        following += max(rows, columns)
    due += [(following + at,) * 3 for at in range(last)]
    first = data.draw(st.integers(0, len(due)))
    count = data.draw(st.integers(0, len(due) - first))
    np.testing.assert_array_equal(
        positions_of(grids, first, count).T.reshape(-1, 3), np.reshape(due, (-1, 3))[first:][:count]
    )
    assert len(due) + shift_of(grids) == following + last


@pytest.mark.parametrize(
    "changes",
    [
        {"image_processor_type": "CLIPImageProcessor"},
        {"patch_size": 16},
        {"merge_size": 1},
        {"do_resize": False},
        {"size": {"height": 3, "width": 3}},
        {"size": 9},
        {"max_pixels": 100},
        {"max_pixels": 1 << 40},
        {"min_pixels": 10**6, "max_pixels": 10**5},
        {"min_pixels": "1"},
        {"fps": 2},
    ],
    ids=str,
)
def test_an_unknown_setting_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"preprocessor_config\.json"):
        read_patches(changes, 9, None, 14, 2)
