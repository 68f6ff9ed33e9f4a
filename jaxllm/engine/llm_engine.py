"""The engine: requests in, outputs out, one step at a time.

Where the pure scheduler meets the device: plan, dispatch, commit, and then outputs. Knows neither threads nor
protocols: the caller of `step` decides when.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np

from jaxllm.config import EngineConfig, config_of
from jaxllm.engine.beam_searches import BeamSearches
from jaxllm.engine.constrained_rows import ConstrainedRows, Stuck
from jaxllm.engine.input_batch import VARIANTS, InputBatch, RequestFault, blaming
from jaxllm.engine.input_processor import Accepted, InputProcessor, Params, Prompt
from jaxllm.engine.interrupts import uninterrupted
from jaxllm.engine.loader import Parts, load_parts
from jaxllm.engine.model_info import ModelInfo
from jaxllm.engine.output_processor import OutputProcessor
from jaxllm.engine.recovery import FailedSteps
from jaxllm.engine.sequence import SequenceGroup
from jaxllm.errors import EngineError, RequestIdInUseError
from jaxllm.lora_request import LoRARequest
from jaxllm.metrics import Load, Metrics
from jaxllm.outputs import FinishReason, RequestOutput
from jaxllm.runner.model_runner import HeldStep, StepInFlight
from jaxllm.runner.pooling_runner import PooledInFlight, PoolingRunner
from jaxllm.runner.profiling import DEFAULT_STEPS, Profile, span
from jaxllm.sampling import sampler
from jaxllm.scheduler.admission import num_deferred
from jaxllm.scheduler.recorded import RecordedScheduler, Recorder
from jaxllm.scheduler.state import BlockEvent, Plan, Waiting

Flight = StepInFlight | HeldStep | PooledInFlight


class LLMEngine:
    """Continuous batching over one model. Not thread-safe: one thread adds, steps and aborts.

    engine = LLMEngine.from_engine_args("path/or/hub-id", dtype="bfloat16")
    engine.add_request("1", "Once upon a time", SamplingParams(max_tokens=64))
    while engine.has_unfinished_requests():
        for output in engine.step():
            print(output.outputs[0].text)
    """

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
        self.num_rows = 0  # sequences that took part in the last step
        self._clock = parts.clock
        limits = self.runner.limits
        self.scheduler = RecordedScheduler(limits, recorder)
        self.adapters = parts.adapters
        self.inputs = InputProcessor(
            config, self.adapters.language, limits, self.runner.extras, self.runner.num_logprobs
        )
        self.outputs = OutputProcessor(self.scheduler, self.metrics, self._clock, self.model.pooler)
        self._batch = InputBatch(limits.num_slots, self.runner.num_logprobs)
        self._constrained = ConstrainedRows(self._batch, self.adapters.language.grammars, self.model.vocab_size)
        self._beams = BeamSearches(self.scheduler, self.outputs, self._batch, self.metrics, self._clock)
        self._depth = 2 if config.async_scheduling else 1  # steps in flight
        # A step whose rows need masks waits for them between its halves, until the one before it is committed.
        self._in_flight: deque[tuple[Plan, Flight]] = deque()
        self._planned: Plan | None = None  # the step that is being dispatched or waited for
        self._failed_steps = FailedSteps()
        self._profile: Profile | None = None  # a trace that is being made
        self._counted: tuple[Waiting, ...] = ()  # the queue whose tokens `_waiting_tokens` are
        self._waiting_tokens = 0
        self._is_closed = False

    @classmethod
    def from_engine_args(
        cls, engine_args: EngineConfig | str | None = None, *, progress: bool = False, **settings: Any
    ) -> LLMEngine:
        """Make an engine of `EngineArgs`, or of the arguments of `LLM`: a model and fields of `EngineConfig`."""
        return cls(config_of(engine_args, settings), progress=progress)

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: Params | None = None,
        priority: int = 0,
        lora_request: LoRARequest | None = None,
    ) -> None:
        """Queue a request; a problem with it is a UserError and leaves the engine as it was."""
        self.add([self.accept(request_id, prompt, params, priority, lora_request)])

    def accept(
        self,
        request_id: str,
        prompt: Prompt,
        params: Params | None = None,
        priority: int = 0,
        lora_request: LoRARequest | None = None,
    ) -> Accepted:
        """Check a request and make its token ids, see `InputProcessor.accept`; nothing is queued.

        An adapter that is not in memory is read.
        """
        adapter = None if lora_request is None else self.adapters.get(lora_request)
        return self.inputs.accept(request_id, prompt, params, priority, adapter)

    def model_of(self, lora_request: LoRARequest | None) -> ModelInfo:
        """Return the model as a request sees it: with the tokenizer of its adapter, if that brings one."""
        return self.model if lora_request is None else self.adapters.get(lora_request).language.model

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Read an adapter ahead of the requests that name it; what is wrong with it is a UserError."""
        self.adapters.get(lora_request)
        return True

    def remove_lora(self, lora_id: int) -> bool:
        """Forget an adapter; whether it was known. Requests that have it end with it."""
        return self.adapters.remove(lora_id)

    def list_loras(self) -> set[int]:
        """Return the `lora_int_id` of adapters that were read and not removed."""
        return self.adapters.ids()

    def add(self, requests: Sequence[Accepted]) -> None:
        """Queue requests that `accept` made; an id that is in use is a UserError, and then none is queued."""
        self._check_open()
        ids = set(self.outputs.groups)
        for accepted in requests:
            if accepted.internal_id in ids:
                raise RequestIdInUseError(f"request id {accepted.request_id!r} is in use.", "request_id")
            ids.add(accepted.internal_id)
        made = [self.inputs.make_group(accepted, self._clock()) for accepted in requests]
        for accepted, (group, _) in zip(requests, made, strict=True):
            self.inputs.pack(accepted, group)
        self.scheduler.add([request for _, own in made for request in own])
        self.outputs.add([group for group, _ in made])

    @overload
    def abort_request(self, request_ids: str, reason: FinishReason = "abort") -> RequestOutput | None: ...
    @overload
    def abort_request(self, request_ids: Iterable[str], reason: FinishReason = "abort") -> list[RequestOutput]: ...
    def abort_request(
        self, request_ids: str | Iterable[str], reason: FinishReason = "abort"
    ) -> RequestOutput | list[RequestOutput] | None:
        """Drop a request, or several, in whatever phase it is and free its blocks; return what it had.

        Of an unknown id that is None, and of several ids it is a list of those that are known.
        """
        if not isinstance(request_ids, str):
            return self.abort_requests([(request_id, reason) for request_id in request_ids])
        outputs = self.abort_requests([(request_ids, reason)])
        return outputs[0] if outputs else None

    def abort_requests(self, requests: Sequence[tuple[str, FinishReason]]) -> list[RequestOutput]:
        """Drop requests by internal id, each for a reason; return the last outputs of those that are known."""
        return self.outputs.abort(requests)

    def take_block_events(self) -> tuple[BlockEvent, ...]:
        """Return what has entered and left the prefix cache since the last call, if that is recorded."""
        return self.scheduler.take_block_events()

    def load(self) -> Load:
        """Say how busy the engine is; speeds are the caller's to measure."""
        state, metrics = self.scheduler.state, self.metrics
        running: set[int] = set()
        waiting: set[int] = set()
        deferred = 0
        if state.waiting is not self._counted:  # few steps change it
            self._counted, self._waiting_tokens = state.waiting, sum(entry.known for entry in state.waiting)
        if self.config.enable_lora:
            deferred = num_deferred(state, self.scheduler.limits)
            running = {record.request.adapter for record in state.running if record is not None}
            waiting = {entry.request.adapter for entry in state.waiting}
        return Load(
            running=state.num_running,
            waiting=len(state.waiting),
            waiting_tokens=self._waiting_tokens,
            kv_blocks_used=state.pool.num_blocks - state.pool.num_available,
            kv_blocks_total=state.pool.num_blocks,
            max_running=self.scheduler.limits.num_slots,
            prefix_hit_rate=metrics.cached_tokens / metrics.prompt_tokens if metrics.prompt_tokens else 0.0,
            running_adapters=tuple(sorted(map(self.adapters.name_of, running - {0}))),
            waiting_adapters=tuple(sorted(map(self.adapters.name_of, waiting - {0}))),
            deferred=deferred,
        )

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has anything to do."""
        return bool(self.outputs.groups)

    def step(self) -> list[RequestOutput]:
        """Wait for one step and return the outputs that are due (see `SamplingParams.output_kind`).

        The next step is given to the device before that, so that it computes while the host reads, answers and plans
        again (`EngineConfig.async_scheduling`). What was planned for a request that has ended meanwhile is dropped.
        """
        self._check_open()
        if not self.has_unfinished_requests():
            self._in_flight.clear()  # their requests have finished or were aborted
            return []
        with uninterrupted():
            with span("step", step_num=self.metrics.steps):
                outputs = self._step()
            if self._profile is not None:
                self._profile.note_step()
                self._profile = None if self._profile.path else self._profile
            return outputs

    def _step(self) -> list[RequestOutput]:
        ended: list[SequenceGroup] = []  # by their grammars
        try:
            while len(self._in_flight) < self._depth:
                issued = self._issue()
                if issued is None:
                    break
                self._in_flight.append(issued)
                ended += self._end_stuck(self._sample_held())
            if not self._in_flight:
                raise EngineError("requests wait, but none of them can be planned; please report this as a bug.")
            plan, flight = self._in_flight.popleft()
            self._planned = plan
            assert isinstance(flight, StepInFlight | PooledInFlight)
            with span("wait"):
                result = flight.result()
            if result.counts is not None and result.drafted is not None:  # no row of it obeys a grammar
                tokens, counts = result.tokens, result.counts
                self.metrics.note_drafts(result.drafted.tolist(), counts.tolist())
            else:
                tokens, counts = self._constrained.take_in(self.scheduler.state, plan, result)
        except Exception as error:
            return [*self.outputs.due(ended, self._clock()), *self._recover(error)]
        self._failed_steps.reset()  # whatever becomes of the next one, a step has ended
        with span("commit"):
            events = self.scheduler.commit(plan, tokens, result.is_finite, counts, result.counts)
            if len(events.answered):
                ended += self._beams.take_in(plan, result, events)
        outputs: list[RequestOutput] = []
        stuck: Stuck = []
        try:
            stuck = self._sample_held()
        except Exception as error:
            outputs = self._recover(error)
        with span("output"):
            self.num_rows = len(plan.slots)
            self.metrics.chunk_tokens += plan.num_tokens - plan.num_decodes - plan.num_drafts
            self.metrics.generated_tokens += len(events.tokens)
            if result.counts is None:
                self.metrics.forced_tokens += max(0, len(events.tokens) - len(events.ids))
            outputs += self.outputs.take_in(result, events)
            try:
                ended += self._end_stuck(stuck)  # of those that did not end by their text just now
            except Exception as error:
                outputs += self._recover(error)
            return [*outputs, *self.outputs.due(ended, self._clock())] if ended else outputs

    def _issue(self) -> tuple[Plan, Flight] | None:
        """Plan a step and give it to the device; None if all requests wait for tokens of steps in flight."""
        with span("plan"):
            plan = self._planned = self.scheduler.plan(self._clock())
            history, extras = self._admit(plan)
            if self.runner.reads_ahead:
                history += self._batch.following(plan)
            if self.scheduler.state.gangs:
                history += self._beams.newest_tokens(plan)
            if plan.adapters:
                self._hold_adapters(plan)
        if not len(plan.slots):
            return None
        if isinstance(self.runner, PoolingRunner):
            with span("pack"):
                prompts, types = self._batch.chunks(plan), self._batch.token_types(plan)
            return plan, self.runner.pool(plan, prompts, types)
        with span("pack"):
            scored = self._batch.scored(plan)
            variant = VARIANTS[-1] if scored else self._batch.variant(plan)
            chunks = self._batch.chunks(plan)
            adapters = self._batch.adapters(plan) if plan.adapters else None
        dispatch = self.runner.dispatch_held if self._constrained.any(plan) else self.runner.dispatch
        ahead = np.asarray(history, np.int32) if history else None
        return plan, dispatch(plan, chunks, self._batch.rows, variant, ahead, extras, scored, adapters)

    def _sample_held(self) -> Stuck:
        """Let the next step in flight be sampled if it was held: all tokens before it are known now.

        Returns the sequences whose grammars cannot go on, and why.
        """
        if not self._in_flight:
            return []
        plan, held = self._in_flight[0]
        if not isinstance(held, HeldStep):
            return []
        self._planned = plan
        with span("masks"):
            masks = self._constrained.masks(self.scheduler.state, plan)
        self._in_flight[0] = plan, self.runner.sample(held, masks.words, masks.is_masked)
        return masks.stuck

    def _end_stuck(self, stuck: Stuck) -> list[SequenceGroup]:
        """End the requests whose grammars cannot go on, if they have not ended; return them."""
        ended = []
        for own, why in stuck:
            if own.finish_reason is None:
                self.outputs.end_group(own.group, f"its grammar cannot go on: {why}")
                ended.append(own.group)
        return ended

    def _admit(self, plan: Plan) -> tuple[list[tuple[int, int, int]], list[tuple[int, np.ndarray]]]:
        """Place newly admitted sequences into their slots.

        Returns what the device needs before the step: tokens by slot and position, and the extras of slots.
        """
        self.metrics.preemptions += len(plan.preempted)
        for sequence_id in plan.preempted:
            self.outputs.sequences[sequence_id].group.metrics.num_preemptions += 1
        history: list[tuple[int, int, int]] = []
        extras: list[tuple[int, np.ndarray]] = []
        for admission in plan.admitted:
            sequence = self.outputs.sequences[admission.request.sequence_id]
            with blaming(sequence):
                self._batch.place(admission.slot, sequence)
                self._note_admitted(sequence.group, admission.num_cached, plan.now)
                if sequence.extras is not None:
                    extras.append((admission.slot, sequence.extras))
                if sampler.reads_history(sequence.params):
                    known = sequence.tokens[: admission.num_cached]
                    history += [(admission.slot, position, token) for position, token in enumerate(known)]
        return history, extras

    def _hold_adapters(self, plan: Plan) -> None:
        """Have the adapters of a plan on the devices. A new one comes with a request that the plan admits."""
        sequences = self.outputs.sequences
        admitted = {each.request.adapter: each.request.sequence_id for each in plan.admitted if each.request.adapter}

        def weights(number: int) -> Any:
            adapter = sequences[admitted[number]].group.adapter
            assert adapter is not None
            return adapter.weights

        self.runner.hold_adapters(plan.adapters, weights)

    def _note_admitted(self, group: SequenceGroup, num_cached: int, now: float) -> None:
        """Keep when a request was first admitted, and how many of its tokens were cached then."""
        if group.metrics.first_scheduled_time is None:
            group.metrics.first_scheduled_time = now
        if group.num_cached_tokens is None:
            group.num_cached_tokens = num_cached
            self.metrics.prompt_tokens += len(group.prompt_token_ids)
            self.metrics.cached_tokens += num_cached

    def _recover(self, error: Exception) -> list[RequestOutput]:
        """After a step that failed: the cache may be lost, so start an empty one and compute running requests again.

        Ends the request that caused the failure, or the largest one if there is no memory; returns its last output.
        """
        plan, self._planned = self._planned, None
        self._in_flight.clear()
        self.runner.renew()
        self.scheduler.reset()
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

    def _end_failed(self, group: SequenceGroup) -> list[RequestOutput]:
        self.outputs.fail(group)
        return self.outputs.due([group], self._clock())

    def _largest(self, plan: Plan) -> SequenceGroup | None:
        """Find the request that has the most tokens in a step; of equals the last."""
        rows = zip(plan.lengths.tolist(), range(len(plan.slots)), plan.slots.tolist(), strict=True)
        for _, _, slot in sorted(rows, reverse=True):
            sequence = self._batch.owner(slot)
            if sequence.sequence_id in self.outputs.sequences:
                return sequence.group
        return None

    def reset_prefix_cache(self) -> bool:
        """Forget all cached blocks; refused (False) while requests run, because they hold some of them."""
        if self.scheduler.state.num_running:
            return False
        self._in_flight.clear()  # their requests have ended, and a replay knows no plan across a reset
        self.scheduler.reset()
        return True

    def start_profile(self, folder: str | Path, num_steps: int = DEFAULT_STEPS) -> Profile:
        """Begin a trace of the next `num_steps` steps, written into `folder` at their end; see profiling.py."""
        self._check_open()
        self._profile = Profile(folder, num_steps)
        return self._profile

    def program_texts(self, names: Collection[str]) -> dict[str, str]:
        """Return the HLO texts of programs, as a trace names them."""
        return self.runner.program_texts(names)

    def close(self) -> None:
        """Stop background work and free the device's memory; closing twice does nothing."""
        self._is_closed = True
        if self._profile is not None:
            self._profile.stop()
        self._in_flight.clear()
        self._constrained.close()
        self.scheduler.close()
        self.adapters.close()
        self.runner.close()

    def _check_open(self) -> None:
        if self._is_closed:
            raise EngineError("the engine is closed.")
