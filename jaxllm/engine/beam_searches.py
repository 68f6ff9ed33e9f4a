"""The beam searches of an engine: its requests with `BeamSearchParams`, each a gang of sequences that fork.

What a step says of their next tokens comes in here; once all beams of a search have answered, `beams.choose` decides,
and the scheduler forks. An exception on behalf of one search ends its request only. Knows plans, sequences and the
scheduler; knows no device.
"""

from __future__ import annotations

from collections.abc import Callable

from jaxllm.engine.beams import Child, choose
from jaxllm.engine.input_batch import InputBatch
from jaxllm.engine.output_processor import OutputProcessor
from jaxllm.engine.sequence import SequenceGroup
from jaxllm.metrics import Metrics
from jaxllm.runner.results import Result
from jaxllm.scheduler.recorded import RecordedScheduler
from jaxllm.scheduler.state import Events, Move, Plan


class BeamSearches:
    """Follows the searches among the requests that run."""

    def __init__(
        self,
        scheduler: RecordedScheduler,
        outputs: OutputProcessor,
        batch: InputBatch,
        metrics: Metrics,
        clock: Callable[[], float],
    ) -> None:
        self._scheduler = scheduler
        self._outputs = outputs
        self._batch = batch
        self._metrics = metrics
        self._clock = clock

    def newest_tokens(self, plan: Plan) -> list[tuple[int, int, int]]:
        """List the tokens that a plan's decode rows begin with and that the host has chosen: slot, position, token."""
        slots = plan.slots[: plan.num_decodes]
        rows = self._batch.is_beam[slots].nonzero()[0].tolist()
        places = [(int(slots[row]), int(plan.starts[row])) for row in rows]
        return [(slot, position, self._batch.owner(slot).tokens[position]) for slot, position in places]

    def take_in(self, plan: Plan, result: Result, events: Events) -> list[SequenceGroup]:
        """Take in what a step that was just committed says of beams; return the requests that have ended."""
        assert result.top_ids is not None and result.top_logprobs is not None
        for row in events.answered.tolist():
            own = self._batch.owner(int(plan.slots[row]))
            assert own.group.search is not None
            own.group.search.likeliest[own.index] = result.top_ids[row].tolist(), result.top_logprobs[row].tolist()
        ended = []
        for leader in events.complete:
            group = self._outputs.sequences[leader].group
            try:
                self._go_on(group)
            except Exception:  # in this request: the others of the step are unaffected
                self._outputs.fail(group)
            if group.is_finished:
                ended.append(group)
        return ended

    def _go_on(self, group: SequenceGroup) -> None:
        """Let a search go on with what all of its beams have answered, or end."""
        search = group.search
        assert search is not None
        if group.metrics.first_token_time is None:
            group.metrics.first_token_time = self._clock()
        self._metrics.generated_tokens += search.rules.width
        num_prompt = len(group.prompt_token_ids)
        outputs = [own.tokens[num_prompt:] for own in group.sequences]
        search.state, children = choose(search.state, search.rules, outputs, search.likeliest)
        search.likeliest = {}
        if search.state.is_over:
            self._outputs.end_search(group, search.state.ended)
        else:
            self._scheduler.fork([_move(group, child) for child in children])


def _move(group: SequenceGroup, child: Child) -> Move:
    target, source = (group.sequences[member].sequence_id for member in (child.member, child.parent))
    return Move(target, source, child.token)
