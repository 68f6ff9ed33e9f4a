"""`StepInput`: the inputs of a step that are not on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxllm.sampling.sampler import Variant
from jaxllm.scheduler.state import Plan


@dataclass(slots=True)
class StepInput:
    """A plan with the arrays that go with it. Letters: R rows of the plan, S slots, F numbers of a sampling row."""

    plan: Plan
    sampling: np.ndarray  # int32[S, F]
    chunks: Sequence[np.ndarray] = ()  # token ids of the plan's rows after its decode rows, int32[·] each
    variant: Variant = Variant.FULL
    is_held: bool = False  # its rows are sampled later, by `Runner.sample`
    tokens: list[tuple[int, int, int]] = field(default_factory=list)  # slot, position, token: sent before the step
    extras: list[tuple[int, np.ndarray]] = field(default_factory=list)  # slot, packed `sampler.Extras`: sent before it
    side: dict[str, Any] = field(default_factory=dict)  # arrays and lists of features, by name
