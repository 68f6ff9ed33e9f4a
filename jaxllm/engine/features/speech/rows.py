"""The feature: masks the tokens that the rules of a speech model forbid in a step."""

from __future__ import annotations

import numpy as np

from jaxllm.engine.accepted import Accepted
from jaxllm.engine.features.feature import Core, Feature, Masks
from jaxllm.engine.features.speech.rules import SpeechParams, rules_of
from jaxllm.engine.input_batch import blaming
from jaxllm.engine.sequence import Sequence, SequenceGroup
from jaxllm.errors import UserError
from jaxllm.runner.step_input import StepInput
from jaxllm.runner.timestamps import MASKED, TIMED
from jaxllm.sampling_params import SamplingParams
from jaxllm.scheduler import scheduler
from jaxllm.scheduler.state import Plan


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

    def accept(self, accepted: Accepted) -> None:
        given = accepted.options.get(self.name)
        if given is None:
            return
        if not isinstance(given, SpeechParams) or not isinstance(accepted.asked, SamplingParams):
            raise UserError("speech takes a SpeechParams, and the request SamplingParams.", self.name)
        if given.timestamps and self._rules.first_timestamp is None:
            raise UserError("The model's generation_config.json has no no_timestamps_token_id.", "timestamps")
        accepted.states[self.name] = given

    def begin(self, accepted: Accepted, group: SequenceGroup) -> None:
        if self.name in accepted.states:
            group.states[self.name] = accepted.states[self.name]

    def place(self, slot: int, sequence: Sequence) -> None:
        self._is_ruled[slot] = self.name in sequence.group.states

    def inputs(self, step: StepInput) -> None:
        """Hold a step that samples such a row: its masks depend on the token before."""
        step.is_held |= bool((self._is_ruled[step.plan.slots] & step.plan.samples).any())

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
