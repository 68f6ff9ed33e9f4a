"""The engine: requests in, outputs out, one step at a time. Owns the clock, the queue of requests and their tokens.

The one place where the pure core meets the device: plan, run, commit, then turn sampled tokens into text. Knows neither
threads nor protocols: whoever calls `step` decides when.
"""

from __future__ import annotations

import logging
import signal
import threading
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, overload

import numpy as np

from jaxllm.config import EngineConfig, config_of
from jaxllm.engine.input_batch import VARIANTS, RequestFault, Seats, blaming
from jaxllm.engine.input_processor import Prompt, check_allows_a_token, read_bad_words, read_prompt
from jaxllm.engine.loader import Parts, load_parts
from jaxllm.engine.sequence import Group, Sample
from jaxllm.errors import EngineError, RequestIdInUseError, UserError, too_long
from jaxllm.metrics import Load, Metrics
from jaxllm.outputs import FinishReason, RequestMetrics, RequestOutput
from jaxllm.runner.model_runner import StepInFlight
from jaxllm.runner.profiling import DEFAULT_STEPS, Profile, span
from jaxllm.runner.step import Result
from jaxllm.sampling import sampler
from jaxllm.sampling_params import RequestOutputKind, SamplingParams, validate_for_model
from jaxllm.scheduler import scheduler
from jaxllm.scheduler.recorded import Core, Recorder
from jaxllm.scheduler.state import BlockEvent, Events, Plan, Request
from jaxllm.text import detokenizer
from jaxllm.text.repetition_detector import RepetitionDetector
from jaxllm.text.stop_strings import StopMatcher

MAX_FAILURES = 3  # steps in a row that may fail before the engine gives up
MAX_EXHAUSTED = 3  # as often in a row the largest request of a step that has no memory ends instead
FEW_STREAMS = 32  # running requests up to which every token is handed out by itself …
# … and from which on so many at once: a message costs 30 to 50 us, whatever it holds.
MANY_STREAMS_INTERVAL = 8


@dataclass(frozen=True, slots=True)
class Accepted:
    """A request that has passed every check."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    priority: int
    salt: bytes
    bad_words: tuple[tuple[int, ...], ...] = ()  # token sequences
    name: str = ""  # the caller's id, where `request_id` is another

    def limit(self, max_model_len: int) -> int:
        """Return the most tokens that prompt and output can have together."""
        if self.params.max_tokens is None:
            return max_model_len
        return min(max_model_len, len(self.prompt_token_ids) + self.params.max_tokens)


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
        progress: bool = False,
        metrics: Metrics | None = None,
        recorder: Recorder | None = None,
        parts: Parts | None = None,
    ) -> None:
        self.config = config
        self.metrics = Metrics() if metrics is None else metrics
        self.num_rows = 0  # requests that took part in the last step
        parts = load_parts(config, progress, self.metrics) if parts is None else parts
        self.tokenizer = parts.tokenizer
        self.generation_config = parts.generation_config
        self.default_params = parts.default_params
        self.eos_ids = parts.eos_ids
        self.runner = parts.runner
        self.vocab_size = parts.vocab_size
        self.max_model_len = parts.max_model_len
        self.start_phases = parts.start_phases
        self._clock = parts.clock
        self._limits = self.runner.limits
        self._core = Core(self._limits, recorder)
        self._random = np.random.default_rng(config.seed % 2**64)
        self._groups: dict[str, Group] = {}
        self._samples: dict[int, Sample] = {}
        self._seats = Seats(self._limits.num_slots, self.runner.num_logprobs)
        self._is_closed = False
        self._num_samples = 0
        self._num_failures = 0
        self._planned: Plan | None = None  # the step that is being made ready or waited for
        self._depth = 2 if config.async_scheduling else 1
        self._in_flight: deque[tuple[Plan, StepInFlight]] = deque()
        self._profile: Profile | None = None  # a trace that is being made

    @classmethod
    def from_engine_args(
        cls, engine_args: EngineConfig | str | None = None, *, progress: bool = False, **settings: Any
    ) -> LLMEngine:
        """Make an engine of `EngineArgs`, or of the arguments of `LLM`: a model and fields of `EngineConfig`."""
        return cls(config_of(engine_args, settings), progress)

    def add_request(
        self, request_id: str, prompt: Prompt, params: SamplingParams | None = None, priority: int = 0
    ) -> None:
        """Queue a request; what is wrong with it is a UserError and leaves the engine as it was."""
        self.add([self.accept(request_id, prompt, params, priority)])

    def accept(
        self, request_id: str, prompt: Prompt, params: SamplingParams | None = None, priority: int = 0
    ) -> Accepted:
        """Check a request and make its token ids; nothing is queued. Any thread may call this.

        `prompt` is text, token ids, or a mapping with "prompt" or "prompt_token_ids" and perhaps "cache_salt".
        """
        params = self.default_params if params is None else params
        if not isinstance(params, SamplingParams):
            raise UserError(f"Sampling parameters are a SamplingParams, not {type(params).__name__}.", "params")
        if isinstance(priority, bool) or not isinstance(priority, int | np.integer):
            raise UserError(f"priority must be an integer, got {priority!r}.", "priority")
        if priority and self.config.scheduling_policy != "priority":
            raise UserError(
                f"priority is {priority}, but scheduling_policy is {self.config.scheduling_policy!r}; "
                "start the engine with scheduling_policy='priority'.",
                "priority",
            )
        extras = self.runner.extras
        validate_for_model(params, self.vocab_size, self.config.max_logprobs, self.eos_ids, extras.processors)
        if params.stop and self.config.skip_tokenizer_init:
            raise UserError("stop needs the text, and skip_tokenizer_init left it out: use stop_token_ids.", "stop")
        bad_words = read_bad_words(params.bad_words, self.tokenizer)
        check_allows_a_token(params, bad_words, self.eos_ids)
        text, ids, salt = read_prompt(prompt, params, self.tokenizer, self.vocab_size, self.max_model_len)
        if len(ids) + params.min_tokens > self.max_model_len:
            raise too_long(self.max_model_len, len(ids), params.min_tokens)
        accepted = Accepted(request_id, text, tuple(ids), params, int(priority), salt, bad_words)
        scheduler.check_fits(self._limits, len(ids), accepted.limit(self.max_model_len))
        return accepted

    def add(self, requests: Sequence[Accepted]) -> None:
        """Queue requests that `accept` made; an id that is in use is a UserError, and then none is queued."""
        self._check_open()
        groups: dict[str, Group] = {}
        queued: list[Request] = []
        for accepted in requests:
            if accepted.request_id in self._groups or accepted.request_id in groups:
                raise RequestIdInUseError(f"request id {accepted.request_id!r} is in use.", "request_id")
            group, own = self._make_group(accepted)
            groups[accepted.request_id] = group
            queued += own
        for accepted, group in zip(requests, groups.values(), strict=True):
            # Drawn here, so that a request that was refused changes nothing for those after it.
            seed = accepted.params.seed
            if seed is None:
                # One that is drawn tells requests apart that are the same, by who came first.
                seed = self.config.seed if self.config.deterministic else int(self._random.integers(2**63))
            for sample in group.samples:
                self._pack(sample, (seed + sample.index) % 2**64, accepted.bad_words)
        self._core.add(queued)
        self._samples.update((sample.id, sample) for group in groups.values() for sample in group.samples)
        self._groups |= groups

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
        """Drop requests, each for a reason; return what those had that are known."""
        now = self._clock()
        reasons: dict[str, FinishReason] = dict(requests)
        going: list[tuple[Group, FinishReason]] = [
            (self._groups[name], reason) for name, reason in reasons.items() if name in self._groups
        ]
        samples: list[tuple[Sample, FinishReason]] = [
            (sample, reason) for group, reason in going for sample in group.samples if sample.finish_reason is None
        ]
        self._core.abort({sample.id: reason for sample, reason in samples})
        for sample, why in samples:
            if sample.finish_reason is not None:
                continue  # another of its request's samples has just failed
            try:
                sample.read(self.tokenizer)
                sample.flush(self.tokenizer)
            except Exception:  # of this request's text: the others are none of its business
                self._fail(sample.group)
            else:
                self._end(sample, why, None)
        return [self._finish(group, now) for group, _ in going]

    def take_block_events(self) -> tuple[BlockEvent, ...]:
        """Return what has entered and left the prefix cache since the last call, if that is recorded."""
        return self._core.take_block_events()

    def load(self) -> Load:
        """Say how busy the engine is; speeds are the caller's to measure."""
        state, metrics = self._core.state, self.metrics
        return Load(
            running=state.num_running,
            waiting=len(state.waiting),
            waiting_tokens=sum(entry.known for entry in state.waiting),
            kv_blocks_used=state.pool.num_blocks - state.pool.num_available,
            kv_blocks_total=state.pool.num_blocks,
            max_running=self._limits.num_slots,
            prefix_hit_rate=metrics.cached_tokens / metrics.prompt_tokens if metrics.prompt_tokens else 0.0,
        )

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has anything to do."""
        return bool(self._groups)

    def step(self) -> list[RequestOutput]:
        """Wait for one step and return the outputs that are due (see `SamplingParams.output_kind`).

        The next step is given to the device before that, so that it computes while the host reads, answers and plans
        again (`EngineConfig.async_scheduling`). What was planned for a request that has ended meanwhile is dropped.
        """
        self._check_open()
        if not self._groups:
            self._in_flight.clear()  # whoever they were for has ended or gone
            return []
        with _uninterrupted():
            with span("step", step_num=self.metrics.steps):
                outputs = self._step()
            if self._profile is not None:
                self._profile.note_step()
                self._profile = None if self._profile.path else self._profile
            return outputs

    def _step(self) -> list[RequestOutput]:
        try:
            while len(self._in_flight) < self._depth:
                issued = self._issue()
                if issued is None:
                    break
                self._in_flight.append(issued)
            if not self._in_flight:
                raise EngineError("requests wait, but none of them can be planned; please report this as a bug.")
            plan, flight = self._in_flight.popleft()
            self._planned = plan
            with span("wait"):
                result = flight.result()
        except Exception as error:
            return self._recover(error)
        self._num_failures = 0
        with span("commit"):
            events = self._core.commit(plan, result.tokens, result.is_finite)
        with span("output"):
            return self._take_in(plan, result, events)

    def _issue(self) -> tuple[Plan, StepInFlight] | None:
        """Plan a step and give it to the device; None where everything waits for tokens of steps in flight."""
        with span("plan"):
            plan = self._planned = self._core.plan(self._clock())
            history, extras = self._admit(plan)
        if not len(plan.slots):
            return None
        with span("pack"):
            scored = self._seats.scored(plan)
            variant = VARIANTS[-1] if scored else self._seats.variant(plan)
            chunks = self._seats.chunks(plan)
        return plan, self.runner.dispatch(plan, chunks, self._seats.rows, variant, history, extras, scored)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached blocks; refused (False) while requests run, because they hold some of them."""
        if self._core.state.num_running:
            return False
        self._in_flight.clear()  # whoever they were for has ended or gone, and a replay knows no plan across a reset
        self._core.reset()
        return True

    def start_profile(self, folder: str | Path, num_steps: int = DEFAULT_STEPS) -> Profile:
        """Begin a trace of the next `num_steps` steps, written into `folder` at their end; see profiling.py."""
        self._check_open()
        self._profile = Profile(folder, num_steps)
        return self._profile

    def close(self) -> None:
        """Stop background work and let go of the device's memory; to close twice does nothing."""
        self._is_closed = True
        if self._profile is not None:
            self._profile.stop()
        self._in_flight.clear()
        self._core.close()
        self.runner.close()

    def _check_open(self) -> None:
        if self._is_closed:
            raise EngineError("the engine is closed.")

    def _make_group(self, accepted: Accepted) -> tuple[Group, list[Request]]:
        """Make what the engine and what the scheduler keep of a request."""
        params, ids = accepted.params, accepted.prompt_token_ids
        metrics = RequestMetrics(self._clock())
        group = Group(accepted.request_id, accepted.prompt, ids, metrics, params.output_kind)
        group.num_prompt_logprobs = params.prompt_logprobs
        salt: bytes | None = accepted.salt
        if not self.config.enable_prefix_caching:
            # n samples of a prompt share its blocks all the same, under a name that nobody else has.
            salt = f"{self._num_samples}".encode() if params.n > 1 else None
        requests = []
        for index in range(params.n):
            sample = self._make_sample(group, index, params)
            stop_ids = tuple(sample.eos_ids) + tuple(set(params.stop_token_ids) - sample.eos_ids)
            limit = accepted.limit(self.max_model_len)
            group.samples.append(sample)
            # One of the samples computes the whole prompt for its log-probabilities.
            skips = params.prompt_logprobs is not None and index == 0
            if params.skip_reading_prefix_cache is not None:
                skips |= params.skip_reading_prefix_cache
            name = accepted.name or accepted.request_id
            name = f"{name}[{index}]" if params.n > 1 else name
            requests.append(
                Request(sample.id, sample.tokens, len(ids), limit, stop_ids, accepted.priority, salt, not skips, name)
            )
        return group, requests

    def _make_sample(self, group: Group, index: int, params: SamplingParams) -> Sample:
        self._num_samples += 1
        return Sample(
            id=self._num_samples,
            group=group,
            index=index,
            params=params,
            eos_ids=frozenset() if params.ignore_eos else self.eos_ids,
            variant=sampler.needs(params),
            tokens=array("i", group.prompt_token_ids),
            detokenizer=detokenizer.begin(self.tokenizer, group.prompt_token_ids, params.skip_special_tokens),
            matcher=StopMatcher.of(params.stop),
            repetition=RepetitionDetector(params.repetition_detection) if params.repetition_detection else None,
            logprobs=None if params.logprobs is None and params.logprob_token_ids is None else [],
        )

    def _pack(self, sample: Sample, seed: int, bad_words: Sequence[Sequence[int]]) -> None:
        """Write what the device is told of a sample once it gets a slot."""
        params, extras = sample.params, self.runner.extras
        stop_ids = sample.eos_ids | set(params.stop_token_ids)
        sample.seed = seed
        num_prompt, num_bad = len(sample.group.prompt_token_ids), sum(map(len, bad_words))
        sample.row = sampler.pack_row(params, seed, num_prompt, stop_ids, self.vocab_size, num_bad, extras.bits(params))
        sample.extras = extras.pack(params, bad_words)

    def _admit(self, plan: Plan) -> tuple[np.ndarray | None, list[tuple[int, np.ndarray]]]:
        """Prepare the slots of newly admitted requests.

        Returns what the device must be told ahead of the step: tokens, int32[·, 3], and the extras of slots.
        """
        self.metrics.preemptions += len(plan.preempted)
        history: list[tuple[int, int, int]] = []
        extras: list[tuple[int, np.ndarray]] = []
        for admission in plan.admitted:
            sample = self._samples[admission.request.id]
            with blaming(sample):
                self._seats.give(admission.slot, sample)
                self._note_admitted(sample.group, admission.num_cached, plan.now)
                if sample.extras is not None:
                    extras.append((admission.slot, sample.extras))
                if sampler.reads_history(sample.params):
                    known = sample.tokens[: admission.num_cached]
                    history += [(admission.slot, position, token) for position, token in enumerate(known)]
        return np.asarray(history, np.int32) if history else None, extras

    def _note_admitted(self, group: Group, num_cached: int, now: float) -> None:
        """Keep when a request was first admitted, and what was cached of it then."""
        if group.metrics.first_scheduled_time is None:
            group.metrics.first_scheduled_time = now
        if group.num_cached_tokens is None:
            group.num_cached_tokens = num_cached
            self.metrics.prompt_tokens += len(group.prompt_token_ids)
            self.metrics.cached_tokens += num_cached

    def _take_in(self, plan: Plan, result: Result, events: Events) -> list[RequestOutput]:
        """Turn what a step sampled, and the scheduler took, into text."""
        self.num_rows = len(plan.slots)
        now = self._clock()
        changed: dict[str, Group] = {}
        self.metrics.chunk_tokens += plan.num_tokens - plan.num_decodes
        self.metrics.generated_tokens += len(events.ids)
        for score in result.scores:
            sample = self._samples.get(score.of.request_id)
            if sample is None or score.of.position >= len(sample.group.prompt_token_ids):
                continue
            try:
                if np.isfinite(score.logprob):
                    sample.group.add_prompt_logprobs(self.tokenizer, score)
            except Exception:
                changed[sample.group.request_id] = sample.group
                self._fail(sample.group)
        for request_id, token, row in zip(
            events.ids.tolist(), events.tokens.tolist(), events.rows.tolist(), strict=True
        ):
            sample = self._samples.get(request_id)
            if sample is None:
                continue  # it has just failed
            changed[sample.group.request_id] = sample.group
            try:
                if sample.index == 0 and sample.group.misses_prompt_logprobs:
                    self._end_group(sample.group, "the logits of the prompt were not finite")
                    continue
                if sample.group.metrics.first_token_time is None:
                    sample.group.metrics.first_token_time = now
                sample.add_logprobs(self.tokenizer, token, result, row)
                end = sample.advance(self.tokenizer, token, events.finished.get(request_id))
                if end is not None:
                    if request_id not in events.finished:
                        self._core.abort({request_id: end[0]})
                    self._end(sample, *end)
            except Exception:  # of this request's text: the others of the step are none of its business
                self._fail(sample.group)
        for request_id in events.failed:
            sample = self._samples.get(request_id)
            if sample is None:
                continue
            changed[sample.group.request_id] = sample.group
            self._end(sample, "error", "no token could be sampled: the logits were not finite, or all were forbidden")
        return self._outputs(changed.values(), now)

    def _fail(self, group: Group) -> None:
        """End a request for which something could not be done, while the exception is being handled."""
        logging.getLogger(__name__).exception("request %s failed", group.request_id)
        self._end_group(group, "the engine could not go on with it")

    def _end_group(self, group: Group, why: str) -> None:
        """End all samples of a request as failed."""
        samples = [sample for sample in group.samples if sample.finish_reason is None]
        self._core.abort({sample.id: "error" for sample in samples})
        for sample in samples:
            self._end(sample, "error", why)

    def _end(self, sample: Sample, finish_reason: FinishReason, stop_reason: int | str | None) -> None:
        sample.finish_reason, sample.stop_reason = finish_reason, stop_reason
        del self._samples[sample.id]

    def _outputs(self, changed: Iterable[Group], now: float) -> list[RequestOutput]:
        """Make the caller's view of the requests for which one is due; forget the finished ones."""
        interval = 1 if self._core.state.num_running <= FEW_STREAMS else MANY_STREAMS_INTERVAL
        outputs = []
        for group in changed:
            try:
                output = self._output(group, interval, now)
            except Exception:
                self._fail(group)
                output = self._finish(group, now)
            if output is not None:
                outputs.append(output)
        return outputs

    def _output(self, group: Group, interval: int, now: float) -> RequestOutput | None:
        """Make the view of a request that is due now, if one is."""
        if not group.is_due(interval):
            return None
        if group.is_finished:
            return self._finish(group, now)
        for sample in group.samples:
            if sample.finish_reason is None and group.kind is not RequestOutputKind.FINAL_ONLY:
                sample.read(self.tokenizer)
        return group.show()

    def _finish(self, group: Group, now: float) -> RequestOutput:
        """Make the last view of a request and forget it."""
        group.metrics.finished_time = now
        try:
            output = group.show()
        except Exception:
            logging.getLogger(__name__).exception("request %s failed", group.request_id)
            output = group.show_failure("its output could not be made")
        del self._groups[group.request_id]
        # Counted here and not when a sample ends: what is counted is what was told.
        for sample in group.samples:
            self.metrics.note_finished(sample.finish_reason or "error")
        return output

    def _recover(self, error: Exception) -> list[RequestOutput]:
        """After a step that failed: the cache may be gone, so start an empty one and compute running requests again.

        The request that was to blame ends. Of a step for which there is no memory, time and again, it is the one with
        the most tokens: the others may well fit. Returns its last output.
        """
        plan, self._planned = self._planned, None
        self._in_flight.clear()
        self.runner.renew()
        self._core.reset()
        self.metrics.recoveries += 1
        if isinstance(error, RequestFault):
            self._fail(error.sample.group)
            return self._outputs([error.sample.group], self._clock())
        self._num_failures += 1
        if self._num_failures % MAX_FAILURES:
            return []
        largest = self._largest(plan) if plan is not None and _is_out_of_memory(error) else None
        if largest is None or self._num_failures >= MAX_EXHAUSTED * MAX_FAILURES:
            raise EngineError(f"{self._num_failures} steps in a row failed; the last one: {error}") from error
        self._fail(largest)
        return self._outputs([largest], self._clock())

    def _largest(self, plan: Plan) -> Group | None:
        """Find the request that has the most tokens in a step; of equals the last."""
        rows = zip(plan.lengths.tolist(), range(len(plan.slots)), plan.slots.tolist(), strict=True)
        for _, _, slot in sorted(rows, reverse=True):
            sample = self._seats.owner(slot)
            if sample.id in self._samples:
                return sample.group
        return None


def _is_out_of_memory(error: Exception) -> bool:
    """Whether the device, or the host, had no memory for a step. XLA says so in the text of its one exception."""
    return isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error)


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Put ^C off until the end of a step: in the middle of one, requests and device would not agree any more."""
    if threading.current_thread() is not threading.main_thread() or not callable(signal.getsignal(signal.SIGINT)):
        yield
        return
    noted: list[tuple[int, FrameType | None]] = []
    handler = signal.signal(signal.SIGINT, lambda number, frame: noted.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if noted and callable(handler):
            handler(*noted[0])
