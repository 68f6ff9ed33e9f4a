"""The engine: requests in, outputs out, one step at a time. Owns the clock, the queue of requests and their tokens.

The one place where the pure core meets the device: plan, run, commit, then turn sampled tokens into text. Knows neither
threads nor protocols: whoever calls `step` decides when.
"""

from __future__ import annotations

import logging
import signal
import sys
import threading
import time
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

from jaxllm import detokenizer, sampling, scheduler
from jaxllm.config import EngineConfig
from jaxllm.errors import EngineError, RequestIdInUseError, UserError, too_long
from jaxllm.metrics import Load, Metrics
from jaxllm.phases import Phases, describe
from jaxllm.profiling import DEFAULT_STEPS, Profile, span
from jaxllm.prompts import Prompt, read_bad_words, read_prompt
from jaxllm.repetition import RepetitionDetector
from jaxllm.runner import Runner, StepInFlight
from jaxllm.samples import Group, Sample
from jaxllm.sampling import Variant
from jaxllm.setup import prepare
from jaxllm.state import BlockEvent, Events, Plan, Request, initial, take_block_events
from jaxllm.step import Result, Scored
from jaxllm.stop_strings import StopMatcher
from jaxllm.tokenizer import Tokenizer, load_tokenizer
from jaxllm.types import (
    FinishReason,
    RequestMetrics,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
    default_sampling_params,
    validate_for_model,
)

MAX_FAILURES = 3  # steps in a row that may fail before the engine gives up
FEW_STREAMS = 32  # running requests up to which every token is handed out by itself …
# … and from which on so many at once: a message costs 30 to 50 us, whatever it holds.
MANY_STREAMS_INTERVAL = 8
VARIANTS = tuple(Variant)


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

    def limit(self, max_model_len: int) -> int:
        """Return the most tokens that prompt and output can have together."""
        if self.params.max_tokens is None:
            return max_model_len
        return min(max_model_len, len(self.prompt_token_ids) + self.params.max_tokens)


class LLMEngine:
    """Continuous batching over one model. Not thread-safe: one thread adds, steps and aborts."""

    def __init__(self, config: EngineConfig, progress: bool = False, metrics: Metrics | None = None) -> None:
        self.config = config
        self.metrics = Metrics() if metrics is None else metrics
        self.num_rows = 0  # requests that took part in the last step
        # What can be wrong with a model comes before what takes long.
        phases = Phases()
        with phases.phase("setup") as causes:
            setup = prepare(config)
            causes.append(f"config.json, {len(setup.devices)} × {setup.devices[0].device_kind}")
        with phases.phase("tokenizer"):
            self.tokenizer: Tokenizer = load_tokenizer(config.tokenizer or setup.folder)
        self.generation_config = setup.generation_config
        self.default_params = default_sampling_params(setup.generation_config)
        self.eos_ids = _eos_ids(self.tokenizer, setup.generation_config)
        self.runner = Runner(config, setup, self.metrics, progress, phases=phases)
        self.vocab_size = setup.spec.vocab_size
        self.max_model_len = self.runner.geometry.max_model_len
        self._limits = self.runner.limits
        self._state = initial(self._limits)
        self._random = np.random.default_rng(config.seed % 2**64)
        self._groups: dict[str, Group] = {}
        self._samples: dict[int, Sample] = {}
        self._by_slot: list[Sample | None] = [None] * self._limits.num_slots
        self._variants = np.zeros(self._limits.num_slots, np.int8)  # index into VARIANTS, by slot
        self._is_scored = np.zeros(self._limits.num_slots, np.bool_)  # by slot: whether `_scored` may list it
        self._sampling = np.zeros((self._limits.num_slots, sampling.ROW_WIDTH), np.int32)  # packed rows, by slot
        self._is_closed = False
        self._num_samples = 0
        self._num_failures = 0
        self._depth = 2 if config.async_scheduling else 1
        self._in_flight: deque[tuple[Plan, StepInFlight]] = deque()
        self._profile: Profile | None = None  # a trace that is being made
        self.start_phases = phases.finished()  # how long the start took, and why
        text = describe(self.start_phases)
        if progress:
            print(text, file=sys.stderr)
        else:
            logging.getLogger(__name__).info("%s", text)

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
        bad_words = read_bad_words(params.bad_words, self.tokenizer)
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
        state = scheduler.add(self._state, self._limits, queued)
        for accepted, group in zip(requests, groups.values(), strict=True):
            # Drawn last, so that a request that was refused changes nothing for those after it.
            given = accepted.params.seed
            seed = int(self._random.integers(2**63)) if given is None else given
            for sample in group.samples:
                self._pack(sample, (seed + sample.index) % 2**64, accepted.bad_words)
        self._state = state
        self._samples.update((sample.id, sample) for group in groups.values() for sample in group.samples)
        self._groups |= groups

    def abort_request(self, request_id: str, reason: FinishReason = "abort") -> RequestOutput | None:
        """Drop a request in whatever phase it is and free its blocks; return what it had, None for an unknown id."""
        outputs = self.abort_requests([(request_id, reason)])
        return outputs[0] if outputs else None

    def abort_requests(self, requests: Sequence[tuple[str, FinishReason]]) -> list[RequestOutput]:
        """Drop requests, each for a reason; return what those had that are known."""
        now = time.monotonic()
        reasons: dict[str, FinishReason] = dict(requests)
        going: list[tuple[Group, FinishReason]] = [
            (self._groups[name], reason) for name, reason in reasons.items() if name in self._groups
        ]
        samples: list[tuple[Sample, FinishReason]] = [
            (sample, reason) for group, reason in going for sample in group.samples if sample.finish_reason is None
        ]
        self._state = scheduler.abort(self._state, self._limits, [sample.id for sample, _ in samples])
        for sample, why in samples:
            try:
                sample.read(self.tokenizer)
                sample.flush(self.tokenizer)
            except Exception:
                self._fail(sample)
            else:
                self._end(sample, why, None)
        return [self._finish(group, now) for group, _ in going]

    def take_block_events(self) -> tuple[BlockEvent, ...]:
        """Return what has entered and left the prefix cache since the last call, if that is recorded."""
        self._state, events = take_block_events(self._state)
        return events

    def load(self) -> Load:
        """Say how busy the engine is; speeds are the caller's to measure."""
        state, metrics = self._state, self.metrics
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
            with span("wait"):
                result = flight.result()
        except Exception as error:
            self._recover(error)
            return []
        self._num_failures = 0
        with span("commit"):
            self._state, events = scheduler.commit(self._state, self._limits, plan, result.tokens, result.is_finite)
        with span("output"):
            return self._take_in(plan, result, events)

    def _issue(self) -> tuple[Plan, StepInFlight] | None:
        """Plan a step and give it to the device; None where everything waits for tokens of steps in flight."""
        with span("plan"):
            self._state, plan = scheduler.plan(self._state, self._limits, time.monotonic())
            history, extras = self._admit(plan)
        if not len(plan.slots):
            return None
        with span("pack"):
            scored = self._scored(plan)
            variant = VARIANTS[-1] if scored else VARIANTS[int(self._variants[plan.slots].max())]
            chunks = [
                np.asarray(self._owner(slot).tokens[start : start + length], np.int32)
                for slot, start, length in zip(
                    plan.slots[plan.num_decodes :].tolist(),
                    plan.starts[plan.num_decodes :].tolist(),
                    plan.lengths[plan.num_decodes :].tolist(),
                    strict=True,
                )
            ]
        return plan, self.runner.dispatch(plan, chunks, self._sampling, variant, history, extras, scored)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached blocks; refused (False) while requests run, because they hold some of them."""
        if self._state.num_running:
            return False
        self._state = scheduler.reset(self._state, self._limits)
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
        self.runner.close()

    def _check_open(self) -> None:
        if self._is_closed:
            raise EngineError("the engine is closed.")

    def _make_group(self, accepted: Accepted) -> tuple[Group, list[Request]]:
        """Make what the engine and what the scheduler keep of a request."""
        params, ids = accepted.params, accepted.prompt_token_ids
        metrics = RequestMetrics(time.monotonic())
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
            requests.append(
                Request(sample.id, sample.tokens, len(ids), limit, stop_ids, accepted.priority, salt, not skips)
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
            variant=sampling.needs(params),
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
        sample.row = sampling.pack_row(
            params, seed, num_prompt, stop_ids, self.vocab_size, num_bad, extras.bits(params)
        )
        sample.extras = extras.pack(params, bad_words)

    def _owner(self, slot: int) -> Sample:
        sample = self._by_slot[slot]
        assert sample is not None
        return sample

    def _admit(self, plan: Plan) -> tuple[np.ndarray | None, list[tuple[int, np.ndarray]]]:
        """Prepare the slots of newly admitted requests.

        Returns what the device must be told ahead of the step: tokens, int32[·, 3], and the extras of slots.
        """
        self.metrics.preemptions += len(plan.preempted)
        history: list[tuple[int, int, int]] = []
        extras: list[tuple[int, np.ndarray]] = []
        for admission in plan.admitted:
            slot, sample = admission.slot, self._samples[admission.request.id]
            group = sample.group
            self._by_slot[slot] = sample
            self._variants[slot] = VARIANTS.index(sample.variant)
            wants_prompt = sample.index == 0 and group.num_prompt_logprobs is not None
            self._is_scored[slot] = wants_prompt or self._is_whole(sample.params.logprobs)
            assert sample.row is not None, "a sample is packed before it is queued"
            self._sampling[slot] = sample.row
            if group.metrics.first_scheduled_time is None:
                group.metrics.first_scheduled_time = plan.now
            if group.num_cached_tokens is None:
                group.num_cached_tokens = admission.num_cached
                self.metrics.prompt_tokens += len(group.prompt_token_ids)
                self.metrics.cached_tokens += admission.num_cached
            if sample.extras is not None:
                extras.append((slot, sample.extras))
            if sampling.reads_history(sample.params):
                known = sample.tokens[: admission.num_cached]
                history += [(slot, position, token) for position, token in enumerate(known)]
        return np.asarray(history, np.int32) if history else None, extras

    def _scored(self, plan: Plan) -> list[Scored]:
        """List what of a step is to be scored by itself: tokens of prompts, and rows of more than a step reports."""
        scored: list[Scored] = []
        if not self._is_scored[plan.slots].any():
            return scored
        offset = 0
        for slot, start, length, samples in zip(
            plan.slots.tolist(), plan.starts.tolist(), plan.lengths.tolist(), plan.samples.tolist(), strict=True
        ):
            sample = self._owner(slot)
            group, end = sample.group, start + length
            if sample.index == 0 and group.misses_prompt_logprobs:
                is_whole = self._is_whole(group.num_prompt_logprobs)
                scored += [
                    Scored(
                        sample.id, position, offset + position - start - 1, group.prompt_token_ids[position], is_whole
                    )
                    for position in range(start + 1, min(end + 1, len(group.prompt_token_ids)))
                ]
            if samples and self._is_whole(sample.params.logprobs):
                scored.append(Scored(sample.id, end, offset + length - 1, 0, True))
            offset += length
        return scored

    def _is_whole(self, count: int | None) -> bool:
        """Whether so many log-probabilities are more than a step reports."""
        return count is not None and not 0 <= count <= self.runner.num_logprobs

    def _take_in(self, plan: Plan, result: Result, events: Events) -> list[RequestOutput]:
        """Turn what a step sampled, and the scheduler took, into text."""
        self.num_rows = len(plan.slots)
        now = time.monotonic()
        changed: dict[str, Group] = {}
        self.metrics.generated_tokens += len(events.ids)
        for score in result.scores:
            sample = self._samples.get(score.of.request_id)
            if sample is not None and score.of.position < len(sample.group.prompt_token_ids):
                if np.isfinite(score.logprob):
                    sample.group.add_prompt_logprobs(self.tokenizer, score)
        for request_id, token, row in zip(
            events.ids.tolist(), events.tokens.tolist(), events.rows.tolist(), strict=True
        ):
            sample = self._samples.get(request_id)
            if sample is None:
                continue  # it has just failed
            changed[sample.group.request_id] = sample.group
            if sample.index == 0 and sample.group.misses_prompt_logprobs:  # one was not finite
                self._fail_group(sample.group)
                continue
            sample.tokens.append(token)
            if sample.group.metrics.first_token_time is None:
                sample.group.metrics.first_token_time = now
            try:
                sample.add_logprobs(self.tokenizer, token, result, row)
                end = sample.advance(self.tokenizer, token, events.finished.get(request_id))
            except Exception:  # of this request's text: the others of the step are none of its business
                self._fail(sample)
                continue
            if end is not None:
                if request_id not in events.finished:
                    self._state = scheduler.abort(self._state, self._limits, [request_id])
                self._end(sample, *end)
        for request_id in events.failed:
            sample = self._samples.get(request_id)
            if sample is None:
                continue
            changed[sample.group.request_id] = sample.group
            self._end(sample, "error", "no token could be sampled: the logits were not finite, or all were forbidden")
        return self._outputs(changed.values(), now)

    def _fail(self, sample: Sample) -> None:
        """End a sample whose text could not be made, while the exception is being handled."""
        logging.getLogger(__name__).exception("request %s failed", sample.group.request_id)
        self._state = scheduler.abort(self._state, self._limits, [sample.id])
        self._end(sample, "error", "its text could not be made")

    def _fail_group(self, group: Group) -> None:
        """End all samples of a request whose prompt the model cannot score."""
        samples = [sample for sample in group.samples if sample.finish_reason is None]
        self._state = scheduler.abort(self._state, self._limits, [sample.id for sample in samples])
        for sample in samples:
            self._end(sample, "error", "the logits of the prompt were not finite")

    def _end(self, sample: Sample, finish_reason: FinishReason, stop_reason: int | str | None) -> None:
        sample.finish_reason, sample.stop_reason = finish_reason, stop_reason
        self.metrics.finished[finish_reason] = self.metrics.finished.get(finish_reason, 0) + 1
        del self._samples[sample.id]

    def _outputs(self, changed: Iterable[Group], now: float) -> list[RequestOutput]:
        """Make the caller's view of the requests for which one is due; forget the finished ones."""
        interval = 1 if self._state.num_running <= FEW_STREAMS else MANY_STREAMS_INTERVAL
        outputs = []
        for group in changed:
            if not group.is_due(interval):
                continue
            for sample in group.samples:
                if sample.finish_reason is None and group.kind is not RequestOutputKind.FINAL_ONLY:
                    try:
                        sample.read(self.tokenizer)
                    except Exception:
                        self._fail(sample)
            outputs.append(self._finish(group, now) if group.is_finished else group.show())
        return outputs

    def _finish(self, group: Group, now: float) -> RequestOutput:
        """Make the last view of a request and forget it."""
        group.metrics.finished_time = now
        del self._groups[group.request_id]
        return group.show()

    def _recover(self, error: Exception) -> None:
        """After a step that failed: the cache may be gone, so start an empty one and compute running requests again."""
        self._in_flight.clear()
        self.runner.renew()
        self._state = scheduler.reset(self._state, self._limits)
        self._num_failures += 1
        self.metrics.recoveries += 1
        if self._num_failures >= MAX_FAILURES:
            raise EngineError(f"{MAX_FAILURES} steps in a row failed; the last one: {error}") from error


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


def _eos_ids(model_tokenizer: Tokenizer, generation_config: Mapping[str, Any]) -> frozenset[int]:
    """Return the tokens that end a text: the tokenizer's, and those of the model's generation_config.json."""
    named = generation_config.get("eos_token_id")
    ids: set[int] = {named} if isinstance(named, int) else set(named or ())
    if not all(isinstance(token, int) for token in ids):
        raise UserError(f"eos_token_id of the model is {named!r}; it must be a token id or a list of them.", "model")
    if model_tokenizer.eos_token_id is not None:
        ids.add(model_tokenizer.eos_token_id)
    return frozenset(ids)
