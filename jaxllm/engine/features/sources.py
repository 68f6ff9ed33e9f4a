"""Encoder prompts, encoded into blocks before the step that first reads them."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256
from typing import Any, NamedTuple

import numpy as np

from jaxllm import combinations
from jaxllm.beam_search_params import BeamSearchParams
from jaxllm.engine.accepted import Accepted
from jaxllm.engine.features.feature import Core, Feature
from jaxllm.engine.input_batch import blaming
from jaxllm.engine.sequence import Sequence, SequenceGroup
from jaxllm.outputs import RequestOutput
from jaxllm.runner.source_encoder import NewSource, Placed, SourceInputs
from jaxllm.runner.step_input import StepInput
from jaxllm.scheduler import scheduler
from jaxllm.scheduler.block_pool import content_root
from jaxllm.scheduler.state import Source


class RequestSource(NamedTuple):
    """A request's encoder prompt, its state."""

    prompt: str | None
    content: np.ndarray  # kept in case of preemption
    source: Source


class Sources(Feature):
    """Gives requests the keys and values of their encoder prompts."""

    name = "sources"

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        prompts = core.language.model.sources
        assert prompts is not None
        self._prompts = prompts

    def claim(self, accepted: Accepted) -> None:
        """Read both prompts; keep the decoder's."""
        if accepted.params.truncate_prompt_tokens is not None:
            raise combinations.refusal("truncate_prompt_tokens", combinations.SEQ2SEQ)
        given = accepted.given
        both = self._prompts.read(given)
        salt = {"cache_salt": given["cache_salt"]} if isinstance(given, Mapping) and "cache_salt" in given else {}
        accepted.given = {"prompt": both.decoder, "prompt_token_ids": both.decoder_ids, **salt}
        digest = sha256(np.ascontiguousarray(both.content).data).digest()
        accepted.states[self.name] = RequestSource(both.encoder, both.content, Source(digest, both.num_tokens))

    def accept(self, accepted: Accepted) -> None:
        """Refuse a request that cannot run alone with its source's blocks."""
        own: RequestSource = accepted.states[self.name]
        digest = content_root(salt=accepted.salt, content=own.source.digest)
        own = accepted.states[self.name] = own._replace(source=own.source._replace(digest=digest))
        accepted.content = digest
        width = accepted.asked.beam_width if isinstance(accepted.asked, BeamSearchParams) else 1
        num_prompt = len(accepted.prompt_token_ids)
        scheduler.check_fits(self.core.runner.limits, num_prompt, accepted.limit, width, own.source)

    def begin(self, accepted: Accepted, group: SequenceGroup) -> None:
        own: RequestSource = accepted.states[self.name]
        if not self.core.config.enable_prefix_caching:  # only outputs of one request share its source
            unique = content_root(salt=f"{group.sequences[0].sequence_id}".encode(), content=own.source.digest)
            own = own._replace(source=own.source._replace(digest=unique))
        group.states[self.name] = own

    def schedule(self, sequence: Sequence, fields: dict[str, Any]) -> None:
        fields["source"] = sequence.group.states[self.name].source

    def inputs(self, step: StepInput) -> None:
        """Send the sources that the plan encodes, and the blocks of admitted ones."""
        plan, sequences, blocks = step.plan, self.core.outputs.sequences, self.core.scheduler.state.sources
        new = []
        for each in plan.encodes:
            sequence = sequences[each.sequence_id]
            with blaming(sequence):
                new.append(NewSource(sequence.group.states[self.name].content, each.units, each.index))
        placed = [
            Placed(each.slot, each.request.source.length, blocks[each.slot])
            for each in plan.admitted
            if each.request.source is not None
        ]
        if placed:
            step.side["sources"] = SourceInputs(new, placed)
        self.core.metrics.sources_encoded += len(new)

    def show(self, group: SequenceGroup, output: RequestOutput) -> None:
        own: RequestSource = group.states[self.name]
        output.encoder_prompt = own.prompt
        output.encoder_prompt_token_ids = own.content.tolist() if own.content.ndim == 1 else []
