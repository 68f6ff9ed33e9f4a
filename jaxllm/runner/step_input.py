"""A step's inputs from the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxllm.media.processor import Prepared
from jaxllm.runner.compiled_programs import ProgramKeys
from jaxllm.runner.source_encoder import SourceInputs
from jaxllm.sampling.sampler import Variant
from jaxllm.scheduler.state import Plan


@dataclass(slots=True)
class StepInput:
    """A plan and its arrays. F numbers of a sampling row."""

    plan: Plan
    sampling: np.ndarray  # int32[S, F]
    chunks: Sequence[np.ndarray] = ()  # token ids of rows after the decode rows, int32[·] each
    variant: Variant = Variant.FULL
    is_held: bool = False  # sampled later, by `Runner.sample`
    tokens: list[tuple[int, int, int]] = field(default_factory=list)  # slot, position, token; written before the step
    extras: list[tuple[int, np.ndarray]] = field(default_factory=list)  # slot, packed `sampler.Extras`
    side: dict[str, Any] = field(default_factory=dict)  # arrays and lists of features, by name


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedStep:
    """The programs and host arrays of a step, for each process of an engine."""

    plan: Plan
    way: ProgramKeys  # of the program, or of a held step's two halves
    buffer: np.ndarray  # int32[·], see batch.py
    table: np.ndarray  # int32[·, 3]: block-table entries written before the step
    tokens: np.ndarray | None  # int32[·, 3] of slot, position, token
    extras: Sequence[tuple[int, np.ndarray]]
    moves: np.ndarray  # as `Plan.moves`
    adapters: tuple[int, ...]  # in argument order
    scored: Sequence[Any]
    encodes: Sequence[tuple[Prepared, np.ndarray]] = ()  # images, and the rows of their tokens
    sources: SourceInputs | None = None
