"""The beam search feature: runs the beams of each search as a group of sequences.

After a step of all beams, `rules.choose` selects the next ones and the scheduler forks.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxllm import combinations
from jaxllm.beam_search_params import BeamSearchParams
from jaxllm.engine.accepted import Accepted
from jaxllm.engine.features.beams.rules import BeamSearch, Child, Ended, Rules, choose, num_needed
from jaxllm.engine.features.feature import Core, Feature
from jaxllm.engine.sequence import Sequence, SequenceGroup
from jaxllm.errors import UserError
from jaxllm.outputs import CompletionOutput
from jaxllm.runner.results import StepOutput
from jaxllm.runner.step_input import StepInput
from jaxllm.sampling_params import RequestOutputKind, SamplingParams
from jaxllm.scheduler import scheduler
from jaxllm.scheduler.block_pool import content_root
from jaxllm.scheduler.state import Events, Fork, Plan


@dataclass(slots=True, eq=False)
class BeamOutput(Sequence):
    """An output of a beam search; until the end, the tokens of one beam."""

    score: float | None = None

    def end_as(self, ended: Ended, shows_stop: bool) -> None:
        """Become the output of an ended beam; with `shows_stop` the text includes the stop token."""
        tokenizer = self.group.tokenizer
        self.tokens = array("i", (*self.group.prompt_token_ids, *ended.tokens))
        self.cumulative_logprob, self.score = ended.logprob, ended.score
        self.read(tokenizer, len(self.tokens) - ended.is_stopped)
        self.flush(tokenizer)
        if ended.is_stopped and shows_stop and self.params.detokenize:
            self.text.append(tokenizer.token_text(ended.tokens[-1]))

    def show(self, is_delta: bool) -> CompletionOutput:
        output = Sequence.show(self, is_delta)
        output.score = self.score
        if self.score is not None:
            output.cumulative_logprob = self.cumulative_logprob
        return output


class BeamSearches(Feature):
    """Runs beam searches. A request's state is its `BeamSearch`."""

    name = "beams"
    takes = (BeamSearchParams,)
    sends = (BeamSearchParams,)

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        self._is_beam = np.zeros(core.runner.limits.num_slots, np.bool_)  # by slot

    def claim(self, accepted: Accepted) -> None:
        """Set the parameters of a search's beams; refuse one that is too wide."""
        beams, model = accepted.asked, accepted.language.model
        if not isinstance(beams, BeamSearchParams):
            return
        if self.core.config.speculative_config is not None:
            raise combinations.refusal("beam_width", "speculative_config")
        num_slots, num_logprobs = self.core.runner.limits.num_slots, self.core.runner.num_logprobs
        num_stops, width = 0 if beams.ignore_eos else len(model.eos_ids), beams.beam_width
        needed = num_needed(width, num_stops)
        most = min(num_logprobs - num_stops, num_slots)
        if needed > num_logprobs or width > num_slots:
            message = (
                f"beam_width may be at most {max(most, 0)} here, got {width}: a step reports {num_logprobs} "
                f"tokens of a beam (max_logprobs), of which {num_stops} may end it, and the beams of a search run "
                f"together in {num_slots} slots (max_num_seqs)."
            )
            raise UserError(message, "beam_width", width)
        accepted.params = SamplingParams(
            temperature=0.0,
            max_tokens=beams.max_tokens,
            ignore_eos=beams.ignore_eos,
            skip_special_tokens=beams.skip_special_tokens,
            logprobs=needed,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def accept(self, accepted: Accepted) -> None:
        beams = accepted.asked
        if not isinstance(beams, BeamSearchParams):
            return
        num_prompt, width = len(accepted.prompt_token_ids), beams.beam_width
        scheduler.check_fits(self.core.runner.limits, num_prompt, accepted.limit, width)
        accepted.num_sequences, accepted.sequence_type = width, BeamOutput
        accepted.states[self.name] = Rules(
            width=width,
            most_tokens=accepted.limit - num_prompt,
            stop_ids=frozenset() if beams.ignore_eos else accepted.language.model.eos_ids,
            length_penalty=beams.length_penalty,
            early_stopping=beams.early_stopping,
        )

    def begin(self, accepted: Accepted, group: SequenceGroup) -> None:
        beams = accepted.asked
        if isinstance(beams, BeamSearchParams):
            shows_stop = beams.include_stop_str_in_output
            group.states[self.name] = BeamSearch(accepted.states[self.name], shows_stop)
            for sequence in group.sequences:
                sequence.logprobs = None

    def schedule(self, sequence: Sequence, fields: dict[str, Any]) -> None:
        if self.name in sequence.group.states:
            leader = sequence.group.sequences[0].sequence_id
            fields["beam_group"] = leader
            if fields["root"] is None:
                fields["root"] = content_root(salt=f"{leader - 1}".encode())  # as for n outputs of a prompt

    def place(self, slot: int, sequence: Sequence) -> None:
        self._is_beam[slot] = self.name in sequence.group.states

    def inputs(self, step: StepInput) -> None:
        plan, batch = step.plan, self.core.batch
        if not self.core.scheduler.state.beam_groups:
            return
        slots = plan.slots[: plan.num_decodes]
        rows = self._is_beam[slots].nonzero()[0].tolist()
        places = [(int(slots[row]), int(plan.starts[row])) for row in rows]
        step.tokens += [(slot, position, batch.owner(slot).tokens[position]) for slot, position in places]

    def take_in(self, plan: Plan, result: StepOutput, events: Events) -> list[SequenceGroup]:
        if not len(events.answered):
            return []
        assert result.top_ids is not None and result.top_logprobs is not None
        for row in events.answered.tolist():
            sequence = self.core.batch.owner(int(plan.slots[row]))
            likeliest = result.top_ids[row].tolist(), result.top_logprobs[row].tolist()
            self._search(sequence.group).likeliest[sequence.index] = likeliest
        ended = []
        for leader in events.complete:
            group = self.core.outputs.sequences[leader].group
            try:
                self._go_on(group)
            except Exception:  # other requests are unaffected
                self.core.outputs.fail(group)
            if group.is_finished:
                ended.append(group)
        return ended

    def _search(self, group: SequenceGroup) -> BeamSearch:
        return group.states[self.name]

    def _go_on(self, group: SequenceGroup) -> None:
        search = self._search(group)
        if group.metrics.first_token_time is None:
            group.metrics.first_token_time = self.core.clock()
        self.core.metrics.generated_tokens += search.rules.width
        num_prompt = len(group.prompt_token_ids)
        outputs = [sequence.tokens[num_prompt:] for sequence in group.sequences]
        search.state, children = choose(search.state, search.rules, outputs, search.likeliest)
        search.likeliest = {}
        if search.state.is_over:
            self._end(group, search)
        else:
            self.core.scheduler.fork([_move(group, child) for child in children])

    def _end(self, group: SequenceGroup, search: BeamSearch) -> None:
        ended = search.state.ended
        for sequence, each in zip(group.sequences, ended, strict=True):
            assert isinstance(sequence, BeamOutput)
            sequence.end_as(each, search.shows_stop)
        self.core.outputs.end_all(group, ["stop" if each.is_stopped else "length" for each in ended])


def _move(group: SequenceGroup, child: Child) -> Fork:
    target, source = (group.sequences[member].sequence_id for member in (child.member, child.parent))
    return Fork(target, source, child.token)
