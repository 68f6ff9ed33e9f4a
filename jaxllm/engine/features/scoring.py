"""Log-probabilities of prompt tokens, and of more tokens than a step reports."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxllm.engine.accepted import Accepted
from jaxllm.engine.features.feature import Core, Feature
from jaxllm.engine.input_batch import blaming
from jaxllm.engine.sequence import Sequence, SequenceGroup, entry_of, logprob_of
from jaxllm.outputs import Logprob, RequestOutput
from jaxllm.runner.results import MOST_LOGPROBS, Score, Scored, StepOutput
from jaxllm.runner.step_input import StepInput
from jaxllm.sampling.sampler import Variant
from jaxllm.sampling_params import RequestOutputKind
from jaxllm.scheduler.state import Events, Plan


@dataclass(slots=True)
class PromptScores:
    """The log-probabilities of a prompt, of its first sequence."""

    count: int  # likeliest tokens per position; -1: all
    by_position: dict[int, dict[int, Logprob]] = field(default_factory=dict)
    were_shown: bool = False

    def are_missing(self, group: SequenceGroup) -> bool:
        return len(self.by_position) < len(group.prompt_token_ids) - 1

    def add(self, group: SequenceGroup, score: Score) -> None:
        if np.isfinite(score.logprob):
            chosen = logprob_of(group.tokenizer, score.of.token, score.logprob, score.rank)
            self.by_position[score.of.position] = entry_of(
                group.tokenizer, score.of.token, chosen, self.count, score.top_ids, score.top_logprobs
            )


class Scoring(Feature):
    """Lists the positions to score in a step, and collects scores."""

    name = "scoring"

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        self._num_logprobs = core.runner.num_logprobs
        num_slots = core.runner.limits.num_slots
        self._is_scored = np.zeros(num_slots, np.bool_)  # by slot
        self._scores_prompt = np.zeros(num_slots, np.bool_)  # by slot

    def begin(self, accepted: Accepted, group: SequenceGroup) -> None:
        count = accepted.params.prompt_logprobs
        if count is not None:
            group.states[self.name] = PromptScores(count)

    def schedule(self, sequence: Sequence, fields: dict[str, Any]) -> None:
        """Disable cached prefixes of scored prompts, and drafts of rows that report more than a step does."""
        if self.name in sequence.group.states and not sequence.index:
            fields["reads_cache"] = False
        if not 0 <= (sequence.params.logprobs or 0) <= MOST_LOGPROBS:
            fields["may_draft"] = False

    def place(self, slot: int, sequence: Sequence) -> None:
        self._scores_prompt[slot] = self.name in sequence.group.states and not sequence.index
        self._is_scored[slot] = self._scores_prompt[slot] or self._is_whole(sequence.params.logprobs)

    def inputs(self, step: StepInput) -> None:
        scored = self._scored(step.plan)
        if scored:
            step.side["scored"], step.variant = scored, Variant.FULL

    def take_in(self, plan: Plan, result: StepOutput, events: Events) -> list[SequenceGroup]:
        """Collect scores; end a request if its prompt's logits were not finite, or its first sequence failed."""
        ended: list[SequenceGroup] = []
        outputs = self.core.outputs
        for score in result.side.get("scored", ()):
            sequence = outputs.sequences.get(score.of.sequence_id)
            if sequence is None:
                continue
            if score.of.position >= len(sequence.group.prompt_token_ids):
                result.side.setdefault("whole", {})[sequence.sequence_id] = score
                continue
            try:
                self._scores(sequence.group).add(sequence.group, score)
            except Exception:  # other requests are unaffected
                outputs.fail(sequence.group)
                ended.append(sequence.group)
        slots = plan.slots[events.rows]
        owners = map(self.core.batch.owner, slots[self._scores_prompt[slots]].tolist())
        failed = (outputs.sequences.get(sequence_id) for sequence_id in events.failed)
        for sequence in (*owners, *(each for each in failed if each is not None and not each.index)):
            group = sequence.group
            scores: PromptScores | None = group.states.get(self.name)
            if scores is not None and scores.are_missing(group) and not group.is_finished:
                outputs.end_group(group, "the logits of the prompt were not finite")
                ended.append(group)
        return ended

    def withholds(self, group: SequenceGroup) -> bool:
        """Return whether the first output, which has the scores, must wait for them."""
        scores: PromptScores | None = group.states.get(self.name)
        return scores is not None and scores.are_missing(group)

    def show(self, group: SequenceGroup, output: RequestOutput) -> None:
        """Add prompt log-probabilities to an output once complete; to one delta only."""
        scores: PromptScores | None = group.states.get(self.name)
        if scores is None or scores.are_missing(group):
            return
        if group.kind is RequestOutputKind.DELTA and scores.were_shown:
            return
        scores.were_shown = True
        output.prompt_logprobs = [scores.by_position.get(at) for at in range(len(group.prompt_token_ids))]

    def _scores(self, group: SequenceGroup) -> PromptScores:
        return group.states[self.name]

    def _scored(self, plan: Plan) -> list[Scored]:
        scored: list[Scored] = []
        if not self._is_scored[plan.slots].any():
            return scored
        offset = 0
        for slot, start, length, samples in zip(
            plan.slots.tolist(), plan.starts.tolist(), plan.lengths.tolist(), plan.samples.tolist(), strict=True
        ):
            sequence = self.core.batch.owner(slot)
            if self._is_scored[slot]:
                with blaming(sequence):
                    scored += self._scored_of(sequence, start, length, samples, offset)
            offset += length
        return scored

    def _scored_of(self, sequence: Sequence, start: int, length: int, samples: bool, offset: int) -> list[Scored]:
        group, end = sequence.group, start + length
        scored: list[Scored] = []
        scores: PromptScores | None = group.states.get(self.name)
        if scores is not None and not sequence.index and scores.are_missing(group):
            is_whole = self._is_whole(scores.count)
            scored += [
                Scored(
                    sequence.sequence_id,
                    position,
                    offset + position - start - 1,
                    group.prompt_token_ids[position],
                    is_whole,
                )
                for position in range(start + 1, min(end + 1, len(group.prompt_token_ids)))
            ]
        if samples and self._is_whole(sequence.params.logprobs):
            scored.append(Scored(sequence.sequence_id, end, offset + length - 1, 0, True))
        return scored

    def _is_whole(self, count: int | None) -> bool:
        return count is not None and not 0 <= count <= self._num_logprobs
