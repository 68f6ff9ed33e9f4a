"""From sampled tokens to outputs: the requests that run, their text as it grows, and the outputs that are due.

An exception on behalf of one request ends that request only. Knows the scheduler, to take out sequences that end by
their text; knows no device.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from jaxllm.engine import sequence
from jaxllm.engine.beams import Ended
from jaxllm.engine.sequence import SequenceGroup
from jaxllm.metrics import Metrics
from jaxllm.model.pooler import Pooler, finish
from jaxllm.outputs import FinishReason, RequestOutput
from jaxllm.runner.results import Result, Score
from jaxllm.sampling_params import RequestOutputKind
from jaxllm.scheduler.recorded import RecordedScheduler
from jaxllm.scheduler.state import Events

FEW_STREAMS = 32  # running sequences up to which every token is an output of its own …
# … and from which on so many tokens are one: an output costs 30 to 50 us, however many tokens it has.
MANY_STREAMS_INTERVAL = 8
_NOT_FINITE = "no token could be sampled: the logits were not finite, or all were forbidden"
_log = logging.getLogger(__name__)


class OutputProcessor:
    """The requests of one engine that have not finished, and their sequences that have not ended."""

    def __init__(
        self,
        scheduler: RecordedScheduler,
        metrics: Metrics,
        clock: Callable[[], float],
        pooler: Pooler | None = None,
    ) -> None:
        self.groups: dict[str, SequenceGroup] = {}  # by internal id
        self.sequences: dict[int, sequence.Sequence] = {}  # by sequence id
        self._scheduler = scheduler
        self._metrics = metrics
        self._clock = clock
        self._pooler = pooler

    def add(self, groups: Sequence[SequenceGroup]) -> None:
        """Take in requests that were queued."""
        self.sequences.update((own.sequence_id, own) for group in groups for own in group.sequences)
        self.groups.update((group.internal_id, group) for group in groups)

    def abort(self, requests: Sequence[tuple[str, FinishReason]]) -> list[RequestOutput]:
        """End requests by internal id, each for a reason; return the last outputs of those that run."""
        now = self._clock()
        reasons: dict[str, FinishReason] = dict(requests)
        going: list[tuple[SequenceGroup, FinishReason]] = [
            (self.groups[name], reason) for name, reason in reasons.items() if name in self.groups
        ]
        ending: list[tuple[sequence.Sequence, FinishReason]] = [
            (own, reason) for group, reason in going for own in group.sequences if own.finish_reason is None
        ]
        self._scheduler.abort({own.sequence_id: reason for own, reason in ending})
        for own, reason in ending:
            if own.finish_reason is not None:
                continue  # another sequence of its request has just failed
            try:
                own.read(own.group.tokenizer)
                own.flush(own.group.tokenizer)
            except Exception:  # in this request's text: other requests are unaffected
                self.fail(own.group)
            else:
                self._end(own, reason, None)
        return [self._finish(group, now) for group, _ in going]

    def take_in(self, result: Result, events: Events) -> list[RequestOutput]:
        """Append what a step sampled, as far as the scheduler accepted it; return the outputs that are due."""
        now = self._clock()
        changed: dict[str, SequenceGroup] = {}
        for score in result.scores:
            own = self.sequences.get(score.of.sequence_id)
            if own is None or score.of.position >= len(own.group.prompt_token_ids):
                continue
            try:
                self._add_score(own.group, score)
            except Exception:  # in this request's text: the others of the step are unaffected
                changed[own.group.internal_id] = own.group
                self.fail(own.group)
        columns = events.ids, events.counts, events.rows
        for sequence_id, count, row in zip(*(column.tolist() for column in columns), strict=True):
            own = self.sequences.get(sequence_id)
            if own is None:
                continue  # it has just failed
            changed[own.group.internal_id] = own.group
            try:
                self._append(own, count, row, result, events, now)
            except Exception:  # in this request's text: the others of the step are unaffected
                self.fail(own.group)
        for sequence_id in events.failed:
            own = self.sequences.get(sequence_id)
            if own is None:
                continue
            changed[own.group.internal_id] = own.group
            self._end(own, "error", _NOT_FINITE if own.pooling is None else "its vector was not finite")
        return self.due(changed.values(), now)

    def fail(self, group: SequenceGroup) -> None:
        """End a request for which something raised, while the exception is being handled."""
        _log.exception("request %s failed", group.request_id)
        self.end_group(group, "the engine could not go on with it")

    def due(self, changed: Iterable[SequenceGroup], now: float) -> list[RequestOutput]:
        """Make the outputs that are due of requests that have changed; forget those that have finished."""
        interval = 1 if self._scheduler.state.num_running <= FEW_STREAMS else MANY_STREAMS_INTERVAL
        outputs = []
        for group in changed:
            try:
                output = self._output(group, interval, now)
            except Exception:
                self.fail(group)
                output = self._finish(group, now)
            if output is not None:
                outputs.append(output)
        return outputs

    def _add_score(self, group: SequenceGroup, score: Score) -> None:
        """Take in the log-probability of a token of a prompt."""
        if np.isfinite(score.logprob):
            group.add_prompt_logprobs(group.tokenizer, score)

    def _append(self, own: sequence.Sequence, count: int, row: int, result: Result, events: Events, now: float) -> None:
        """Take in the newest `count` tokens of a sequence, which may end it."""
        if own.index == 0 and own.group.misses_prompt_logprobs:
            self.end_group(own.group, "the logits of the prompt were not finite")
            return
        if own.group.metrics.first_token_time is None:
            own.group.metrics.first_token_time = now
        if own.pooling is not None and self._pooler is not None and result.pooled is not None:
            own.pooled = finish(self._pooler, result.pooled[row], own.pooling)
            self._end(own, "stop", None)
            return
        start = len(own.tokens) - count
        length, end = own.advance(own.group.tokenizer, count, events.finished.get(own.sequence_id))
        if own.logprobs is not None:  # then all of them were sampled
            first = row if result.places is None else int(result.places[row])
            for place, token in enumerate(own.tokens[start:length]):
                own.add_logprobs(own.group.tokenizer, token, result, first + place)
        if end is not None:
            if own.sequence_id not in events.finished:
                self._scheduler.abort({own.sequence_id: end[0]})
            del own.tokens[length:]  # which the scheduler still knew: so does a replay, which reads no text
            self._end(own, *end)

    def end_group(self, group: SequenceGroup, why: str) -> None:
        """End all sequences of a request as failed."""
        ending = [own for own in group.sequences if own.finish_reason is None]
        self._scheduler.abort({own.sequence_id: "error" for own in ending})
        for own in ending:
            self._end(own, "error", why)

    def end_search(self, group: SequenceGroup, ended: Sequence[Ended]) -> None:
        """End a beam search with its outputs, the best first."""
        self._scheduler.abort({own.sequence_id: "stop" for own in group.sequences})
        for own, each in zip(group.sequences, ended, strict=True):
            own.end_as(group.tokenizer, each, group.shows_stop)
        for own, each in zip(group.sequences, ended, strict=True):
            self._end(own, "stop" if each.is_stopped else "length", None)

    def _end(self, own: sequence.Sequence, finish_reason: FinishReason, stop_reason: int | str | None) -> None:
        own.finish_reason, own.stop_reason = finish_reason, stop_reason
        del self.sequences[own.sequence_id]

    def _output(self, group: SequenceGroup, interval: int, now: float) -> RequestOutput | None:
        """Make a request's output if one is due."""
        if not group.is_due(interval):
            return None
        if group.is_finished:
            return self._finish(group, now)
        for own in group.sequences:
            if own.finish_reason is None and group.kind is not RequestOutputKind.FINAL_ONLY:
                own.read(own.group.tokenizer)
        return group.show()

    def _finish(self, group: SequenceGroup, now: float) -> RequestOutput:
        """Make the last output of a request and forget the request."""
        group.metrics.finished_time = now
        try:
            output = group.show()
        except Exception:
            _log.exception("request %s failed", group.request_id)
            output = group.show_failure("its output could not be made")
        del self.groups[group.internal_id]
        # Counted here and not in `_end`: the last output may have failed, and the count follows what it reports.
        for own in group.sequences:
            self._metrics.note_finished(own.finish_reason or "error")
        return output
