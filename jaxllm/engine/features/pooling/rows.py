"""The pooling feature: requests that yield a vector."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxllm.engine.accepted import Accepted
from jaxllm.engine.features.feature import Core, Feature
from jaxllm.engine.features.pooling import prompts
from jaxllm.engine.sequence import End, Sequence, SequenceGroup
from jaxllm.model.pooler import Dense, Pooler, finish
from jaxllm.outputs import CompletionOutput, FinishReason
from jaxllm.pooling_params import PoolingParams
from jaxllm.runner.results import StepOutput
from jaxllm.runner.step_input import StepInput


@dataclass(slots=True, eq=False)
class PooledOutput(Sequence):
    """The result of a pooled prompt: a vector, no tokens."""

    not_finite = "its vector was not finite"

    pooler: Pooler | None = None
    pooling: PoolingParams | None = None
    token_types: np.ndarray | None = None  # int32; None: zeros
    pooled: np.ndarray | None = None

    def take_in(
        self, result: StepOutput, row: int, count: int, finish_reason: FinishReason | None
    ) -> tuple[int, End | None]:
        assert self.pooler is not None and self.pooling is not None
        self.pooled = finish(self.pooler, result.side["pooled"][row], self.pooling)
        return len(self.tokens), ("stop", None)

    def show(self, is_delta: bool) -> CompletionOutput:
        output = Sequence.show(self, is_delta)
        output.pooled = self.pooled
        return output


class Pooling(Feature):
    """Handles every request of a pooling model."""

    name = "pooling"
    takes = (PoolingParams,)
    sends = (PoolingParams, Pooler, Dense)

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        pooler = core.language.model.pooler
        assert isinstance(pooler, Pooler)
        self._pooler = pooler

    def claim(self, accepted: Accepted) -> None:
        model, asked = self.core.language.model, accepted.asked
        prompts.check_kind(asked, model, self.core.config.model)
        if not isinstance(asked, PoolingParams):
            return
        read = prompts.read(accepted.given, asked, model)
        accepted.params, accepted.sequence_type = prompts.SAMPLING, PooledOutput
        accepted.prompt, accepted.prompt_token_ids, accepted.salt = read.text, read.token_ids, read.salt
        accepted.limit = len(read.token_ids)
        accepted.states[self.name] = asked, read.token_types

    def begin(self, accepted: Accepted, group: SequenceGroup) -> None:
        (sequence,) = group.sequences
        assert isinstance(sequence, PooledOutput)
        sequence.pooler, sequence.row = self._pooler, prompts.ROW
        sequence.pooling, token_types = accepted.states[self.name]
        sequence.token_types = None if token_types is None else np.asarray(token_types, np.int32)

    def schedule(self, sequence: Sequence, fields: dict[str, Any]) -> None:
        """Read the prefix cache for last-token pooling only: a mean needs all hidden states."""
        fields["reads_cache"] &= self._pooler.pooling == "last"

    def inputs(self, step: StepInput) -> None:
        owners = [self.core.batch.owner(slot) for slot in step.plan.slots.tolist()]
        step.side["token_types"] = [sequence.token_types for sequence in owners if isinstance(sequence, PooledOutput)]


class NoPooling(Feature):
    """Refuses pooling requests to a generating model."""

    name = "pooling"
    takes = (PoolingParams,)

    def claim(self, accepted: Accepted) -> None:
        prompts.check_kind(accepted.asked, accepted.language.model, self.core.config.model)
