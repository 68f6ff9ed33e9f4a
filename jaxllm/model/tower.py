"""The interface of vision towers."""

from __future__ import annotations

from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from jax import Array

from jaxllm.media.processor import Prepared
from jaxllm.model.decoder import Params
from jaxllm.model.parameters import Weight


class Arranged(NamedTuple):
    """An image as a tower's program takes it."""

    arrays: tuple[np.ndarray, ...]
    order: np.ndarray | None  # of the image's tokens in the result, int[tokens]; None: unchanged


@runtime_checkable
class Tower(Protocol):
    """A vision tower with its projector: static settings."""

    @property
    def row_width(self) -> int:
        """Return the numbers of a token: its embedding, and the vectors added after the decoder's first layers."""
        ...

    def declare(self) -> Params[Weight]:
        """Return the weights; matrices are [out, in]."""
        ...

    def sizes(self, most: int) -> tuple[int, ...]:
        """Return the ascending sizes of programs, in tokens; the last one holds an image of `most`."""
        ...

    def inputs(self, size: int) -> tuple[tuple[tuple[int, ...], type], ...]:
        """Return the shapes and types of an image's arrays for the program of a size."""
        ...

    def arrange(self, image: Prepared, size: int) -> Arranged:
        """Return an image's arrays for the program of a size."""
        ...

    def encode(self, params: Params[Array], *arrays: Array) -> Array:
        """Return the rows of an image's tokens, [size, row_width]; those after the image's are arbitrary."""
        ...
