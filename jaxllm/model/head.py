"""The part of a pooling model after its last layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from jaxllm.model.parameters import Weight


@runtime_checkable
class Head(Protocol):
    """The head of a pooling model. Immutable."""

    @property
    def labels(self) -> tuple[str, ...]:
        """The labels of a classifier, by number of the vector; () for embeddings."""
        ...

    @property
    def dimensions(self) -> tuple[int, ...] | None:
        """The lengths to which embeddings may be cut; (): any; None: not."""
        ...

    @property
    def reads_last(self) -> bool:
        """Whether a vector depends on the last token's hidden state only."""
        ...

    def size(self, width: int) -> int: ...

    def declare(self, width: int) -> Mapping[str, Weight]: ...

    def tensors(self) -> Mapping[str, str]:
        """Return each weight's tensor name, after its folder and "/" if in one."""
        ...
