"""Converts sampled tokens to outputs; an exception ends only its request."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence

from jaxllm.engine import sequence
from jaxllm.engine.sequence import SequenceGroup
from jaxllm.metrics import Metrics
from jaxllm.outputs import FinishReason, RequestOutput
from jaxllm.runner.results import StepOutput
from jaxllm.sampling_params import RequestOutputKind
from jaxllm.scheduler.recorded import RecordedScheduler
from jaxllm.scheduler.state import Events

FEW_STREAMS = 32  # sequences; up to this number each token is an output
# Tokens per output with more: an output costs 30 to 50 us.
MANY_STREAMS_INTERVAL = 8
_log = logging.getLogger(__name__)


class OutputProcessor:
    """The unfinished requests of an engine and their sequences."""

    def __init__(self, scheduler: RecordedScheduler, metrics: Metrics, clock: Callable[[], float]) -> None:
        self.groups: dict[str, SequenceGroup] = {}
        self.sequences: dict[int, sequence.Sequence] = {}
        self._scheduler = scheduler
        self._metrics = metrics
        self._clock = clock
        self.withholds: Sequence[Callable[[SequenceGroup], bool]] = ()
        self.shows: Sequence[Callable[[SequenceGroup, RequestOutput], None]] = ()
        self.forgets: Sequence[Callable[[SequenceGroup], None]] = ()

    def add(self, groups: Sequence[SequenceGroup]) -> None:
        self.sequences.update((own.sequence_id, own) for group in groups for own in group.sequences)
        self.groups.update((group.internal_id, group) for group in groups)

    def abort(self, requests: Sequence[tuple[str, FinishReason]]) -> list[RequestOutput]:
        """End requests by internal id, each for a reason; return their last outputs. Unknown ids are ignored."""
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
                continue  # failed with another sequence
            try:
                own.read(own.group.tokenizer)
                own.flush(own.group.tokenizer)
            except Exception:  # other requests are unaffected
                self.fail(own.group)
            else:
                self._end(own, reason, None)
        return [self._finish(group, now) for group, _ in going]

    def take_in(self, result: StepOutput, events: Events) -> list[RequestOutput]:
        now = self._clock()
        changed: dict[str, SequenceGroup] = {}
        columns = events.ids, events.counts, events.rows
        for sequence_id, count, row in zip(*(column.tolist() for column in columns), strict=True):
            own = self.sequences.get(sequence_id)
            if own is None:
                continue
            changed[own.group.internal_id] = own.group
            try:
                self._append(own, count, row, result, events, now)
            except Exception:  # other requests are unaffected
                self.fail(own.group)
        for sequence_id in events.failed:
            own = self.sequences.get(sequence_id)
            if own is None:
                continue
            changed[own.group.internal_id] = own.group
            self._end(own, "error", own.not_finite)
        return self.due(changed.values(), now)

    def fail(self, group: SequenceGroup) -> None:
        _log.exception("request %s failed", group.request_id)
        self.end_group(group, "the engine could not go on with it")

    def due(self, changed: Iterable[SequenceGroup], now: float) -> list[RequestOutput]:
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

    def _append(
        self, own: sequence.Sequence, count: int, row: int, result: StepOutput, events: Events, now: float
    ) -> None:
        if own.group.metrics.first_token_time is None:
            own.group.metrics.first_token_time = now
        length, end = own.take_in(result, row, count, events.finished.get(own.sequence_id))
        if end is not None:
            if own.sequence_id not in events.finished:
                self._scheduler.abort({own.sequence_id: end[0]})
            del own.tokens[length:]  # after `abort`, which records all of them
            self._end(own, *end)

    def end_group(self, group: SequenceGroup, why: str) -> None:
        ending = [own for own in group.sequences if own.finish_reason is None]
        self._scheduler.abort({own.sequence_id: "error" for own in ending})
        for own in ending:
            self._end(own, "error", why)

    def end_all(self, group: SequenceGroup, reasons: Sequence[FinishReason]) -> None:
        self._scheduler.abort({own.sequence_id: "stop" for own in group.sequences})
        for own, reason in zip(group.sequences, reasons, strict=True):
            self._end(own, reason, None)

    def _end(self, own: sequence.Sequence, finish_reason: FinishReason, stop_reason: int | str | None) -> None:
        own.finish_reason, own.stop_reason = finish_reason, stop_reason
        del self.sequences[own.sequence_id]

    def _output(self, group: SequenceGroup, interval: int, now: float) -> RequestOutput | None:
        if not group.is_due(interval):
            return None
        if group.is_finished:
            return self._finish(group, now)
        if any(withholds(group) for withholds in self.withholds):
            return None
        for own in group.sequences:
            if own.finish_reason is None and group.kind is not RequestOutputKind.FINAL_ONLY:
                own.read(own.group.tokenizer)
        return self._show(group)

    def _show(self, group: SequenceGroup) -> RequestOutput:
        output = group.show()
        for show in self.shows:
            show(group, output)
        return output

    def _finish(self, group: SequenceGroup, now: float) -> RequestOutput:
        group.metrics.finished_time = now
        try:
            output = self._show(group)
        except Exception:
            _log.exception("request %s failed", group.request_id)
            output = group.show_failure("its output could not be made")
        del self.groups[group.internal_id]
        for forget in self.forgets:
            forget(group)
        # Last, because making the output may change a finish reason to "error".
        for own in group.sequences:
            self._metrics.note_finished(own.finish_reason or "error")
        return output
