"""The engine's step loop: plan, dispatch, commit, and make outputs."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import CancelledError
from contextlib import suppress
from pathlib import Path
from typing import Any, overload

from jaxllm.config import EngineConfig
from jaxllm.engine.accepted import Accepted
from jaxllm.engine.features.feature import Core, Features, Masks, Yielded, both
from jaxllm.engine.fetches import Fetches
from jaxllm.engine.input_batch import InputBatch, RequestFault, blaming
from jaxllm.engine.input_processor import InputProcessor
from jaxllm.engine.interrupts import uninterrupted
from jaxllm.engine.loader import Parts, load_parts
from jaxllm.engine.output_processor import OutputProcessor
from jaxllm.engine.prompts import Prompt
from jaxllm.engine.recovery import FailedSteps
from jaxllm.engine.sequence import Sequence as Output
from jaxllm.engine.sequence import SequenceGroup
from jaxllm.errors import EngineError, RequestIdInUseError
from jaxllm.metrics import Load, Metrics
from jaxllm.outputs import FinishReason, RequestOutput
from jaxllm.request_params import RequestParams
from jaxllm.runner.model_runner import Flight, HeldStep, PendingResult
from jaxllm.runner.profiling import DEFAULT_STEPS, Profile, span
from jaxllm.runner.results import StepOutput
from jaxllm.runner.step_input import StepInput
from jaxllm.sampling import sampler
from jaxllm.sampling.sampler import Variant
from jaxllm.scheduler.recorded import RecordedScheduler, Recorder
from jaxllm.scheduler.state import BlockEvent, Events, Plan, Waiting

_log = logging.getLogger(__name__)
StuckSequences = list[tuple[Output, str]]  # with the reason


class EngineCore:
    """Continuous batching for one model. Not thread-safe."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        progress: bool = False,
        metrics: Metrics | None = None,
        recorder: Recorder | None = None,
        parts: Parts | None = None,
    ) -> None:
        self.config = config
        self.metrics = Metrics() if metrics is None else metrics
        parts = load_parts(config, progress, self.metrics) if parts is None else parts
        self.model = parts.model
        self.runner = parts.runner
        self.start_phases = parts.start_phases
        self.num_rows = 0
        self._clock = parts.clock
        limits = self.runner.limits
        self.scheduler = RecordedScheduler(limits, recorder)
        source = self.runner.block_source
        self._fetches = None if source is None else Fetches(source, self.scheduler, self.runner, self._clock)
        self.outputs = OutputProcessor(self.scheduler, self.metrics, self._clock)
        self._batch = InputBatch(limits.num_slots)
        core = Core(
            config=config,
            language=parts.language,
            runner=self.runner,
            scheduler=self.scheduler,
            outputs=self.outputs,
            batch=self._batch,
            metrics=self.metrics,
            clock=self._clock,
        )
        made = (make(core) for make in parts.features.values())
        self.features = Features([feature for feature in made if feature is not None])
        self.outputs.withholds = self.features.withholds
        self.outputs.shows, self.outputs.forgets = self.features.show, self.features.forget
        self.inputs = InputProcessor(config, parts.language, limits, self.runner.extras, self.features)
        self._depth = 2 if config.async_scheduling else 1
        # The second may be a `HeldStep` until the first is committed.
        self._in_flight: deque[tuple[Plan, Flight]] = deque()
        self._planned: Plan | None = None
        self._failed_steps = FailedSteps()
        self.held: str | None = None  # why no step may run
        self._profile: Profile | None = None
        self._counted: tuple[Waiting, ...] = ()
        self._waiting_tokens = 0
        self._is_closed = False

    def accept(
        self, request_id: str, prompt: Prompt, params: RequestParams | None = None, priority: int = 0, **options: Any
    ) -> Accepted:
        return self.inputs.accept(request_id, prompt, params, priority, options)

    def add(self, requests: Sequence[Accepted]) -> None:
        """Queue requests; raise RequestIdInUseError, without queuing any, if an id is in use."""
        self._check_open()
        ids = set(self.outputs.groups)
        for accepted in requests:
            if accepted.internal_id in ids:
                raise RequestIdInUseError(
                    f"request id {accepted.request_id!r} is in use; choose another.", "request_id"
                )
            ids.add(accepted.internal_id)
        needed = [future for needs in self.features.needs for each in requests if (future := needs(each)) is not None]
        for future in needed:
            with suppress(CancelledError):
                future.result()
        made = [self.inputs.make_group(accepted, self._clock()) for accepted in requests]
        for accepted, (group, _) in zip(requests, made, strict=True):
            self.inputs.pack(accepted, group)
        self.scheduler.add([request for _, own in made for request in own])
        self.outputs.add([group for group, _ in made])
        for added in self.features.added:
            for accepted, (group, _) in zip(requests, made, strict=True):
                try:
                    added(accepted, group)
                except Exception:
                    _log.exception("a feature could not handle request %s", accepted.request_id)

    @overload
    def abort_request(self, request_ids: str, reason: FinishReason = "abort") -> RequestOutput | None: ...
    @overload
    def abort_request(self, request_ids: Iterable[str], reason: FinishReason = "abort") -> list[RequestOutput]: ...
    def abort_request(
        self, request_ids: str | Iterable[str], reason: FinishReason = "abort"
    ) -> RequestOutput | list[RequestOutput] | None:
        """Abort requests and free their blocks; return the last output, or None for an unknown id.

        Several ids give a list.
        """
        if not isinstance(request_ids, str):
            return self.abort_requests([(request_id, reason) for request_id in request_ids])
        outputs = self.abort_requests([(request_ids, reason)])
        return outputs[0] if outputs else None

    def abort_requests(self, requests: Sequence[tuple[str, FinishReason]]) -> list[RequestOutput]:
        return self.outputs.abort(requests)

    @property
    def unfinished(self) -> Collection[str]:
        """The internal ids of requests."""
        return self.outputs.groups

    def take_block_events(self) -> tuple[BlockEvent, ...]:
        return self.scheduler.take_block_events()

    def load(self) -> Load:
        state, metrics = self.scheduler.state, self.metrics
        if state.waiting is not self._counted:
            self._counted, self._waiting_tokens = state.waiting, sum(entry.num_tokens for entry in state.waiting)
        further: dict[str, Any] = {}
        for load in self.features.load:
            further |= load(state)
        return Load(
            running=state.num_running,
            waiting=len(state.waiting),
            waiting_tokens=self._waiting_tokens,
            kv_blocks_used=state.num_blocks_used,
            kv_blocks_total=state.pool.num_blocks,
            max_running=self.scheduler.limits.num_slots,
            prefix_hit_rate=metrics.cached_tokens / metrics.prompt_tokens if metrics.prompt_tokens else 0.0,
            **further,
        )

    def has_unfinished_requests(self) -> bool:
        return self.held is None and bool(self.unfinished)

    def step(self) -> list[RequestOutput]:
        """Complete one step and return the due outputs (see `SamplingParams.output_kind`).

        With `EngineConfig.async_scheduling` the next step is dispatched first.
        """
        self._check_open()
        if self.held is not None:
            return []
        if not self.has_unfinished_requests():
            self._in_flight.clear()
            return []
        with uninterrupted():
            with span("step", step_num=self.metrics.steps):
                outputs = self._step()
            if self._profile is not None:
                self._profile.note_step()
                self._profile = None if self._profile.path else self._profile
            return outputs

    def _step(self) -> list[RequestOutput]:
        ended: list[SequenceGroup] = []
        try:
            while len(self._in_flight) < self._depth:
                issued = self._issue()
                if issued is None:
                    break
                self._in_flight.append(issued)
                ended += self._end_stuck(self._sample_held())
            if not self._in_flight:
                if self._fetches is not None and self._fetches.wait():
                    self.num_rows = 0
                    return self.outputs.due(ended, self._clock())
                raise EngineError("requests wait, but none of them can be planned; please report this as a bug.")
            plan, flight = self._in_flight.popleft()
            self._planned = plan
            if isinstance(flight, HeldStep):
                raise RuntimeError("a step is waited for that has not been sampled")
            result, yielded = self._read(plan, flight)
        except Exception as error:
            return [*self.outputs.due(ended, self._clock()), *self._recover(error)]
        self._failed_steps.reset()
        with span("commit"):
            events = self._commit(plan, result, yielded)
            ended += self._take_in(plan, result, events)
        outputs: list[RequestOutput] = []
        stuck: StuckSequences = []
        try:
            stuck = self._sample_held()
        except Exception as error:
            outputs = self._recover(error)
        with span("output"):
            outputs += self._show(plan, result, events)
            try:
                ended += self._end_stuck(stuck)  # text ended the others
            except Exception as error:
                outputs += self._recover(error)
            return [*outputs, *self.outputs.due(ended, self._clock())] if ended else outputs

    def _read(self, plan: Plan, flight: PendingResult) -> tuple[StepOutput, Yielded]:
        """Wait for a step's result."""
        with span("wait"):
            result = flight.result()
        yielded = Yielded(result.tokens)
        for read in self.features.read:
            read(plan, result, yielded)
        return result, yielded

    def _commit(self, plan: Plan, result: StepOutput, yielded: Yielded) -> Events:
        before = self.scheduler.state
        events = self.scheduler.commit(plan, yielded.tokens, result.is_finite, yielded.counts, result.counts)
        if events.failed and self._fetches is not None:
            self._fetches.forget(before, events.failed)
        return events

    def _show(self, plan: Plan, result: StepOutput, events: Events) -> list[RequestOutput]:
        self.num_rows = len(plan.slots)
        self.metrics.chunk_tokens += plan.num_tokens - plan.num_decodes - plan.num_drafts
        self.metrics.generated_tokens += len(events.tokens)
        return self.outputs.take_in(result, events)

    def _take_in(self, plan: Plan, result: StepOutput, events: Events) -> list[SequenceGroup]:
        """Pass a committed step to features; if one raises, end those of its requests that the feature serves."""
        ended: list[SequenceGroup] = []
        for feature in self.features.taking_in:
            try:
                ended += feature.take_in(plan, result, events)
            except Exception:
                _log.exception("%s could not take in a step", feature.name)
                groups = {id(own.group): own.group for own in map(self._batch.owner, plan.slots.tolist())}
                for group in groups.values():
                    if feature.name in group.states and not group.is_finished:
                        self.outputs.fail(group)
                        ended.append(group)
        return ended

    def _issue(self) -> tuple[Plan, Flight] | None:
        """Plan and dispatch a step; return None if all requests wait for tokens in flight.

        With batches in flight, dispatch until one leaves, and return its plan.
        """
        while True:
            issued = self._dispatch_next()
            if issued is None or len(issued[0].slots):
                return issued

    def _dispatch_next(self) -> tuple[Plan, Flight] | None:
        with span("plan"):
            if landed := self.runner.landed():
                self.scheduler.land(landed)
            if self._fetches is not None:
                self._fetches.update()
            plan = self._planned = self.scheduler.plan(self._clock())
            if self._fetches is not None:
                self._fetches.expect(plan)
            step = StepInput(plan, self._batch.rows)
            self._admit(step)
        if len(plan.slots):
            with span("pack"):
                step.variant, step.chunks = self._batch.variant(plan), self._batch.chunks(plan)
                for add_inputs in self.features.inputs:
                    add_inputs(step)
        elif (carried := self.runner.carried) is not None:
            self._planned, step.variant = carried, Variant.GREEDY
        else:
            if len(plan.moves):
                self.runner.move(plan)
            return None
        issued = self.runner.dispatch(step)
        return self.runner.sampled_in(plan), issued

    def _sample_held(self) -> StuckSequences:
        """Sample the next step in flight if it is held; return the sequences that cannot continue."""
        if not self._in_flight:
            return []
        plan, held = self._in_flight[0]
        if not isinstance(held, HeldStep):
            return []
        self._planned = plan
        with span("masks"):
            masks = self._masks(plan)
        self._in_flight[0] = plan, self.runner.sample(held, masks.words, masks.is_masked)
        return masks.stuck

    def _masks(self, plan: Plan) -> Masks:
        found = (make(plan) for make in self.features.masks)
        return both([each for each in found if each is not None])

    def _end_stuck(self, stuck: StuckSequences) -> list[SequenceGroup]:
        ended = []
        for own, why in stuck:
            if own.finish_reason is None:
                self.outputs.end_group(own.group, why)
                ended.append(own.group)
        return ended

    def _admit(self, step: StepInput) -> None:
        plan = step.plan
        self.metrics.preemptions += len(plan.preempted)
        for sequence_id in plan.preempted:
            self.outputs.sequences[sequence_id].group.metrics.num_preemptions += 1
        for admission in plan.admitted:
            sequence = self.outputs.sequences[admission.request.sequence_id]
            with blaming(sequence):
                self._batch.place(admission.slot, sequence)
                for place in self.features.place:
                    place(admission.slot, sequence)
                self._note_admitted(sequence.group, admission.num_cached, plan.now)
                if sequence.extras is not None:
                    step.extras.append((admission.slot, sequence.extras))
                if sampler.reads_history(sequence.params):
                    known = sequence.tokens[: admission.num_cached]
                    step.tokens += [(admission.slot, position, token) for position, token in enumerate(known)]

    def _note_admitted(self, group: SequenceGroup, num_cached: int, now: float) -> None:
        if group.metrics.first_scheduled_time is None:
            group.metrics.first_scheduled_time = now
        if group.num_cached_tokens is None:
            group.num_cached_tokens = num_cached
            self.metrics.prompt_tokens += len(group.prompt_token_ids)
            self.metrics.cached_tokens += num_cached

    def _recover(self, error: Exception) -> list[RequestOutput]:
        """Restart with an empty cache after a failed step, recomputing running requests.

        Ends the request at fault, or the largest if memory is exhausted, and returns its last output.
        """
        plan, self._planned = self._planned, None
        self._restart()
        self.metrics.recoveries += 1
        if isinstance(error, RequestFault):
            return self._end_failed(error.sequence.group)
        action = self._failed_steps.add(error)
        if action == "retry":
            return []
        largest = self._largest(plan) if plan is not None and action == "end_largest" else None
        if largest is None:
            raise EngineError(f"{self._failed_steps.count} steps in a row failed; the last one: {error}") from error
        return self._end_failed(largest)

    def _restart(self) -> None:
        self._drop_flights()
        self.runner.renew()
        self.scheduler.reset()

    def _end_failed(self, group: SequenceGroup) -> list[RequestOutput]:
        self.outputs.fail(group)
        return self.outputs.due([group], self._clock())

    def _largest(self, plan: Plan) -> SequenceGroup | None:
        rows = zip(plan.lengths.tolist(), range(len(plan.slots)), plan.slots.tolist(), strict=True)
        for _, _, slot in sorted(rows, reverse=True):
            sequence = self._batch.owner(slot)
            if sequence.sequence_id in self.outputs.sequences:
                return sequence.group
        return None

    def reset_prefix_cache(self) -> bool:
        """Clear the prefix cache; return False, without clearing, while requests run."""
        if self.scheduler.state.num_running:
            return False
        self.recompute()
        return True

    def recompute(self) -> None:
        self._drop_flights()  # a replay cannot apply a plan across a reset
        self.scheduler.reset()

    def _drop_flights(self) -> None:
        self._in_flight.clear()
        self.runner.drop_batches()

    def start_profile(self, folder: str | Path, num_steps: int = DEFAULT_STEPS) -> Profile:
        self._check_open()
        self._profile = Profile(folder, num_steps)
        return self._profile

    def program_texts(self, names: Collection[str]) -> dict[str, str]:
        return self.runner.program_texts(names)

    def close(self) -> None:
        """Stop background work and free device memory. Idempotent."""
        self._is_closed = True
        if self._profile is not None:
            self._profile.stop()
        self._in_flight.clear()
        for close in self.features.close:
            close()
        self.scheduler.close()
        self.runner.close()

    def _check_open(self) -> None:
        if self._is_closed:
            raise EngineError("the engine is closed; create a new one.")
