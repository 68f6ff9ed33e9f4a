"""`Head`: the part of a model after its last layer, where that yields a vector instead of logits.

The decoder declares its weights, the loader reads them, front ends read its names; none of them calls it otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from jaxllm.model.parameters import Weight


@runtime_checkable
class Head(Protocol):
    """A head. Plain data that never changes."""

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of a vector's numbers; (): the vector is an embedding."""
        ...

    @property
    def dimensions(self) -> tuple[int, ...] | None:
        """The lengths that an embedding may be cut to; (): any; None: it may not be cut."""
        ...

    @property
    def reads_last(self) -> bool:
        """Whether a vector depends on the hidden state of the last token alone."""
        ...

    def size(self, width: int) -> int:
        """Return the numbers of a vector, where hidden states have `width`."""
        ...

    def declare(self, width: int) -> Mapping[str, Weight]:
        """List the weights."""
        ...

    def tensors(self) -> Mapping[str, str]:
        """Return the names of the weights' tensors; one in a folder within the model's begins with that and a "/"."""
        ...
