"""The feature: masks the tokens that the rules of a speech model forbid in a step."""

from __future__ import annotations

import logging

import numpy as np

from jaxllm.engine.accepted import Accepted
from jaxllm.engine.features.feature import Core, Feature, Masks
from jaxllm.engine.features.speech.rules import SpeechParams, rules_of
from jaxllm.engine.input_batch import blaming
from jaxllm.engine.sequence import Sequence, SequenceGroup
from jaxllm.errors import UserError
from jaxllm.outputs import RequestOutput
from jaxllm.runner.step_input import StepInput
from jaxllm.runner.timestamps import MASKED, TIMED
from jaxllm.sampling_params import SamplingParams
from jaxllm.scheduler import scheduler
from jaxllm.scheduler.state import Plan

_log = logging.getLogger(__name__)


class SpeechRows(Feature):
    """Restricts outputs of requests with `SpeechParams`, which are their state."""

    name = "speech"
    options = ("speech",)

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        rules = rules_of(core.language.model)
        assert rules is not None
        self._rules = rules
        self._num_words = -(-rules.vocab_size // 32)
        self._is_ruled = np.zeros(core.runner.limits.num_slots, np.bool_)  # by slot
        self._blocks: dict[int, list[int]] = {}  # of sources, by sequence whose attention is asked for

    def accept(self, accepted: Accepted) -> None:
        given = accepted.options.get(self.name)
        if given is None:
            return
        if not isinstance(given, SpeechParams) or not isinstance(accepted.asked, SamplingParams):
            raise UserError("speech takes a SpeechParams, and the request SamplingParams.", self.name)
        if given.timestamps and self._rules.first_timestamp is None:
            raise UserError("The model's generation_config.json has no no_timestamps_token_id.", "timestamps")
        sources = self.core.runner.sources
        if given.alignment is not None and (sources is None or sources.aligner is None):
            raise UserError(
                "The times of words need alignment_heads in generation_config.json, whole heads on each device, and a "
                "KV cache of the model's type.",
                "timestamp_granularities",
            )
        if given.alignment is not None and accepted.num_sequences > 1:
            raise UserError("The times of words are of one output: leave n out.", "n")
        accepted.states[self.name] = given

    def begin(self, accepted: Accepted, group: SequenceGroup) -> None:
        if self.name in accepted.states:
            group.states[self.name] = accepted.states[self.name]

    def place(self, slot: int, sequence: Sequence) -> None:
        self._is_ruled[slot] = self.name in sequence.group.states

    def inputs(self, step: StepInput) -> None:
        """Hold a step that samples such a row: its masks depend on the token before."""
        for each in step.plan.admitted:
            sequence = self.core.outputs.sequences[each.request.sequence_id]
            state: SpeechParams | None = sequence.group.states.get(self.name)
            if state is not None and state.alignment is not None:
                self._blocks[sequence.sequence_id] = list(self.core.scheduler.state.sources[each.slot])
        step.is_held |= bool((self._is_ruled[step.plan.slots] & step.plan.samples).any())

    def show(self, group: SequenceGroup, output: RequestOutput) -> None:
        """Compute the attention of a complete output; its source's blocks are not reused before the next dispatch."""
        state: SpeechParams | None = group.states.get(self.name)
        if state is None or state.alignment is None or not output.finished:
            return
        (sequence,) = group.sequences
        blocks = self._blocks.get(sequence.sequence_id)
        if blocks is None or sequence.finish_reason not in ("stop", "length"):
            return
        num_prompt, tokens = len(group.prompt_token_ids), sequence.tokens[:-1]
        try:
            state.alignment.weights = self.core.runner.source_weights(tokens, blocks)[:, num_prompt:]
        except Exception:  # fails this request only, see `Transcription`
            _log.exception("the attention of request %s could not be computed", group.request_id)

    def forget(self, group: SequenceGroup) -> None:
        for sequence in group.sequences:
            self._blocks.pop(sequence.sequence_id, None)

    def masks(self, plan: Plan) -> Masks:
        num_rows = len(plan.slots)
        words, kinds = np.zeros((num_rows, self._num_words), np.int32), np.zeros(num_rows, np.int8)
        live = self._is_ruled[plan.slots] & plan.samples & scheduler.is_live(self.core.scheduler.state, plan)
        for row in live.nonzero()[0].tolist():
            sequence = self.core.batch.owner(int(plan.slots[row]))
            with blaming(sequence):
                timed = sequence.group.states[self.name].timestamps
                written = sequence.tokens[len(sequence.group.prompt_token_ids) :]
                words[row] = self._rules.allowed(written, timed)
                kinds[row] = TIMED if timed else MASKED
        return Masks(words, kinds, [])
