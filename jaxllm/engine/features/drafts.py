"""The feature of speculative decoding; see scheduler/drafting.py."""

from __future__ import annotations

from jaxllm.engine.features.feature import Feature, Yielded
from jaxllm.runner.results import StepOutput
from jaxllm.runner.step_input import StepInput
from jaxllm.scheduler.state import Plan


class Drafts(Feature):
    """Sends the tokens that drafting reads, and counts accepted drafts."""

    name = "drafts"

    def inputs(self, step: StepInput) -> None:
        """Send the token after each chunk that ends before its sequence, if the draft model reads it."""
        if not self.core.runner.reads_ahead:
            return
        plan, batch, first = step.plan, self.core.batch, step.plan.num_decodes
        ends = (plan.starts + plan.lengths)[first:].tolist()
        rows = zip(plan.slots[first:].tolist(), ends, plan.samples[first:].tolist(), strict=True)
        step.tokens += [(slot, end, batch.owner(slot).tokens[end]) for slot, end, samples in rows if not samples]

    def read(self, plan: Plan, result: StepOutput, yielded: Yielded) -> None:
        if result.counts is not None:
            yielded.counts = result.counts
            self.core.metrics.note_drafts(result.side["drafted"].tolist(), result.counts.tolist())
