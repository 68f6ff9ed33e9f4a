"""The engine: requests in, outputs out, one step at a time. Owns the clock, the queue of requests and their tokens.

The one place where the pure core meets the device: plan, run, commit, then turn sampled tokens into text. Knows neither
threads nor protocols: whoever calls `step` decides when.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any

import numpy as np

from jaxllm import detokenizer, sampling, scheduler
from jaxllm.config import EngineConfig
from jaxllm.detokenizer import Detokenizer
from jaxllm.errors import ContextLengthError, EngineError, RequestIdInUseError, UserError
from jaxllm.metrics import Load, Metrics
from jaxllm.runner import Runner, prepare
from jaxllm.sampling import Variant
from jaxllm.state import BlockEvent, Plan, Request, initial, take_block_events
from jaxllm.step import Result
from jaxllm.stop_strings import StopMatcher, match_stops
from jaxllm.tokenizer import Tokenizer, load_tokenizer
from jaxllm.types import (
    CompletionOutput,
    FinishReason,
    Logprob,
    RequestMetrics,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
    default_sampling_params,
    validate_for_model,
)

Prompt = str | Sequence[int] | Mapping[str, Any]
MAX_FAILURES = 3  # steps in a row that may fail before the engine gives up
FEW_STREAMS = 32  # running requests up to which every token is handed out by itself …
MANY_STREAMS_INTERVAL = (
    4  # … and from which on this many at once: a message costs 25 us, whatever it holds (grpc.md §3)
)
VARIANTS = tuple(Variant)


@dataclass(slots=True, eq=False)
class Sample:
    """One output of a request while it is being made."""

    id: int
    group: Group
    index: int
    params: SamplingParams
    eos_ids: frozenset[int]
    variant: Variant
    tokens: array[int]  # of prompt and output, int32; only ever appended to
    detokenizer: Detokenizer
    matcher: StopMatcher
    seed: int = 0
    text: list[str] = field(default_factory=list)
    num_read: int = 0  # output tokens that `text` is made of
    num_shown: int = 0  # output tokens that were handed out, where an output is what is new …
    text_shown: int = 0  # … and pieces of the text
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float = 0.0
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True, eq=False)
class Group:
    """A request as the caller knows it: a prompt and `n` samples of its continuation."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    metrics: RequestMetrics
    kind: RequestOutputKind
    samples: list[Sample] = field(default_factory=list)
    num_cached_tokens: int | None = None

    @property
    def is_finished(self) -> bool:
        """Whether all samples have ended."""
        return all(sample.finish_reason is not None for sample in self.samples)


@dataclass(frozen=True, slots=True)
class Accepted:
    """A request that has passed every check."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    priority: int
    salt: bytes

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
        setup = prepare(config)
        self.tokenizer: Tokenizer = load_tokenizer(config.tokenizer or setup.folder)
        self.generation_config = setup.generation_config
        self.default_params = default_sampling_params(setup.generation_config)
        self.eos_ids = _eos_ids(self.tokenizer, setup.generation_config)
        self.runner = Runner(config, setup, self.metrics, progress)
        self.vocab_size = setup.spec.vocab_size
        self.max_model_len = self.runner.geometry.max_model_len
        self._limits = self.runner.limits
        self._state = initial(self._limits)
        self._random = np.random.default_rng(config.seed % 2**64)
        self._groups: dict[str, Group] = {}
        self._samples: dict[int, Sample] = {}
        self._by_slot: list[Sample | None] = [None] * self._limits.num_slots
        self._variants = np.zeros(self._limits.num_slots, np.int8)  # index into VARIANTS, by slot
        self._sampling = np.zeros((self._limits.num_slots, sampling.ROW_WIDTH), np.int32)  # packed rows, by slot
        self._is_closed = False
        self._num_samples = 0
        self._num_failures = 0

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
        validate_for_model(params, self.vocab_size, self.config.max_logprobs, self.eos_ids)
        text, ids, salt = self._read_prompt(prompt, params)
        accepted = Accepted(request_id, text, tuple(ids), params, int(priority), salt)
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
        self._state = scheduler.add(self._state, self._limits, queued)
        for group in groups.values():
            # Drawn last, so that a request that was refused changes nothing for those after it.
            given = group.samples[0].params.seed
            seed = int(self._random.integers(2**63)) if given is None else given
            for sample in group.samples:
                sample.seed = (seed + sample.index) % 2**64
                self._samples[sample.id] = sample
        self._groups |= groups

    def abort_request(self, request_id: str, reason: FinishReason = "abort") -> RequestOutput | None:
        """Drop a request in whatever phase it is and free its blocks; return what it had, None for an unknown id."""
        group = self._groups.get(request_id)
        if group is None:
            return None
        going = [sample for sample in group.samples if sample.finish_reason is None]
        self._state = scheduler.abort(self._state, self._limits, [sample.id for sample in going])
        for sample in going:
            self._read(sample)
            self._flush(sample)
            self._end(sample, reason, None)
        return self._finish(group, time.monotonic())

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
        """Compute one step and return the outputs that are due (see `SamplingParams.output_kind`)."""
        self._check_open()
        if not self._groups:
            return []
        with _uninterrupted():
            return self._step()

    def _step(self) -> list[RequestOutput]:
        before = self._state
        try:
            plan, result = self._run()
        except Exception as error:
            self._state = before  # what was planned was never written
            self._recover(error)
            return []
        self._num_failures = 0
        return self._take_in(plan, result)

    def _run(self) -> tuple[Plan, Result]:
        """Plan a step and run it."""
        self._state, plan = scheduler.plan(self._state, self._limits, time.monotonic())
        history, biases = self._admit(plan)
        if not len(plan.slots):
            raise EngineError("requests wait, but none of them can be planned; please report this as a bug.")
        variant = VARIANTS[int(self._variants[plan.slots].max())]
        chunks = [
            np.asarray(self._owner(slot).tokens[start : start + length], np.int32)
            for slot, start, length in zip(
                plan.slots[plan.num_decodes :].tolist(),
                plan.starts[plan.num_decodes :].tolist(),
                plan.lengths[plan.num_decodes :].tolist(),
                strict=True,
            )
        ]
        return plan, self.runner.run(plan, chunks, self._sampling, variant, history, biases)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached blocks; refused (False) while requests run, because they hold some of them."""
        if self._state.num_running:
            return False
        self._state = scheduler.reset(self._state, self._limits)
        return True

    def close(self) -> None:
        """Stop background work and let go of the device's memory; to close twice does nothing."""
        self._is_closed = True
        self.runner.close()

    def _check_open(self) -> None:
        if self._is_closed:
            raise EngineError("the engine is closed.")

    def _read_prompt(self, prompt: Prompt, params: SamplingParams) -> tuple[str | None, list[int], bytes]:
        """Return a prompt's text, its checked token ids and its cache salt."""
        salt = b""
        if isinstance(prompt, Mapping):
            unknown = set(prompt) - {"prompt", "prompt_token_ids", "cache_salt"}
            if unknown:
                raise UserError(f"{min(unknown)!r} is not something that a jaxllm prompt can have yet.", min(unknown))
            if not isinstance(prompt.get("cache_salt", ""), str):
                raise UserError("cache_salt must be text.", "cache_salt")
            salt = prompt.get("cache_salt", "").encode()
            text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
        elif isinstance(prompt, str):
            text, ids = prompt, None
        else:
            text, ids = None, prompt
        if ids is None:
            if not isinstance(text, str):
                raise UserError(f"A prompt is text or a list of token ids, not {type(text).__name__}.", "prompt")
            ids = self.tokenizer.encode(text)
        ids = _token_ids(ids, self.vocab_size)
        if params.truncate_prompt_tokens is not None:
            room = max(1, self.max_model_len - (params.max_tokens or 1))
            ids = ids[-(room if params.truncate_prompt_tokens == -1 else params.truncate_prompt_tokens) :]
        if len(ids) >= self.max_model_len:
            raise too_long(self.max_model_len, len(ids), None)
        return text, ids, salt

    def _make_group(self, accepted: Accepted) -> tuple[Group, list[Request]]:
        """Make what the engine and what the scheduler keep of a request."""
        params, ids = accepted.params, accepted.prompt_token_ids
        metrics = RequestMetrics(time.monotonic())
        group = Group(accepted.request_id, accepted.prompt, ids, metrics, params.output_kind)
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
            requests.append(Request(sample.id, sample.tokens, len(ids), limit, stop_ids, accepted.priority, salt))
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
            logprobs=None if params.logprobs is None else [],
        )

    def _owner(self, slot: int) -> Sample:
        sample = self._by_slot[slot]
        assert sample is not None
        return sample

    def _admit(self, plan: Plan) -> tuple[np.ndarray | None, list[tuple[int, np.ndarray]]]:
        """Prepare the slots of newly admitted requests.

        Returns what the device must be told ahead of the step: tokens, int32[·, 3], and the biases of slots.
        """
        self.metrics.preemptions += len(plan.preempted)
        history: list[tuple[int, int, int]] = []
        biases: list[tuple[int, np.ndarray]] = []
        for admission in plan.admitted:
            slot, sample = admission.slot, self._samples[admission.request.id]
            group = sample.group
            self._by_slot[slot] = sample
            self._variants[slot] = VARIANTS.index(sample.variant)
            stop_ids = sample.eos_ids | set(sample.params.stop_token_ids)
            self._sampling[slot] = sampling.pack_row(
                sample.params, sample.seed, len(group.prompt_token_ids), stop_ids, self.vocab_size
            )
            if group.metrics.first_scheduled_time is None:
                group.metrics.first_scheduled_time = plan.now
            if group.num_cached_tokens is None:
                group.num_cached_tokens = admission.num_cached
                self.metrics.prompt_tokens += len(group.prompt_token_ids)
                self.metrics.cached_tokens += admission.num_cached
            if sample.params.logit_bias:
                biases.append((slot, sampling.pack_bias(sample.params.logit_bias)))
            if sampling.reads_history(sample.params):
                known = sample.tokens[: admission.num_cached]
                history += [(slot, position, token) for position, token in enumerate(known)]
        return np.asarray(history, np.int32) if history else None, biases

    def _take_in(self, plan: Plan, result: Result) -> list[RequestOutput]:
        """Commit what a step sampled and turn it into text."""
        self._state, events = scheduler.commit(self._state, self._limits, plan, result.tokens, result.is_finite)
        self.num_rows = len(plan.slots)
        now = time.monotonic()
        changed: dict[str, Group] = {}
        self.metrics.generated_tokens += len(events.ids)
        for request_id, token, row in zip(
            events.ids.tolist(), events.tokens.tolist(), events.rows.tolist(), strict=True
        ):
            sample = self._samples[request_id]
            changed[sample.group.request_id] = sample.group
            sample.tokens.append(token)
            if sample.group.metrics.first_token_time is None:
                sample.group.metrics.first_token_time = now
            try:
                if sample.logprobs is not None:
                    self._add_logprobs(sample, token, result, row)
                self._advance(sample, token, events.finished.get(request_id))
            except Exception:  # of this request's text: the others of the step are none of its business
                logging.getLogger(__name__).exception("request %s failed", sample.group.request_id)
                self._state = scheduler.abort(self._state, self._limits, [request_id])
                self._end(sample, "error", "its text could not be made")
        for request_id in events.failed:
            sample = self._samples[request_id]
            changed[sample.group.request_id] = sample.group
            self._end(sample, "error", "the model's logits were not finite")
        return self._outputs(changed, now)

    def _advance(self, sample: Sample, token: int, finish_reason: FinishReason | None) -> None:
        """Take in a sampled token; end the sample at its stop token, its limit, or a stop string."""
        if finish_reason == "stop":
            self._read(sample, len(sample.tokens) - 1)
            self._flush(sample)
            self._end(sample, "stop", None if token in sample.eos_ids else token)
            return
        if finish_reason is None and not sample.params.stop:
            return  # nobody needs its text now
        self._read(sample)
        if finish_reason is not None:
            self._flush(sample)
        if sample.matcher.matched is not None:
            if finish_reason is None:
                self._state = scheduler.abort(self._state, self._limits, [sample.id])
            self._end(sample, "stop", sample.matcher.matched)
        elif finish_reason is not None:
            self._end(sample, finish_reason, None)

    def _read(self, sample: Sample, end: int | None = None) -> None:
        """Append the text of the tokens before `end` that have not been read yet."""
        num_prompt, params = len(sample.group.prompt_token_ids), sample.params
        if not params.detokenize:
            return
        tokens = sample.tokens[num_prompt + sample.num_read : end]
        sample.num_read += len(tokens)
        sample.detokenizer, delta = detokenizer.advance(sample.detokenizer, self.tokenizer, tokens)
        if sample.num_read > params.min_tokens:
            sample.matcher, delta = match_stops(sample.matcher, delta)  # text of min_tokens cannot end it
        self._show(sample, delta)

    def _show(self, sample: Sample, text: str) -> None:
        """Append text that is certain, with the stop string that ended it where that was asked for."""
        if sample.matcher.matched is not None and sample.params.include_stop_str_in_output:
            text += sample.matcher.matched
        if text:
            sample.text.append(text)

    def _flush(self, sample: Sample) -> None:
        """Append the text that was held back, now that no token follows."""
        if sample.matcher.matched is not None or not sample.params.detokenize:
            return
        rest = detokenizer.finish(sample.detokenizer, self.tokenizer)
        sample.matcher, delta = match_stops(sample.matcher, rest)
        if sample.matcher.matched is None:
            delta += sample.matcher.held
            sample.matcher = replace(sample.matcher, held="")
        self._show(sample, delta)

    def _add_logprobs(self, sample: Sample, token: int, result: Result, row: int) -> None:
        assert sample.logprobs is not None and sample.params.logprobs is not None
        assert result.logprob is not None and result.rank is not None
        assert result.top_ids is not None and result.top_logprobs is not None
        count = sample.params.logprobs
        value = float(result.logprob[row])
        entry = {token: Logprob(value, int(result.rank[row]), self.tokenizer.token_text(token))}
        top = zip(result.top_ids[row, :count].tolist(), result.top_logprobs[row, :count].tolist(), strict=True)
        for rank, (other, logprob) in enumerate(top, 1):
            if other not in entry:
                entry[other] = Logprob(logprob, rank, self.tokenizer.token_text(other))
        sample.logprobs.append(entry)
        sample.cumulative_logprob += value

    def _end(self, sample: Sample, finish_reason: FinishReason, stop_reason: int | str | None) -> None:
        sample.finish_reason, sample.stop_reason = finish_reason, stop_reason
        self.metrics.finished[finish_reason] = self.metrics.finished.get(finish_reason, 0) + 1
        del self._samples[sample.id]

    def _outputs(self, changed: Mapping[str, Group], now: float) -> list[RequestOutput]:
        """Make the caller's view of the requests that changed; forget the finished ones."""
        interval = 1 if self._state.num_running <= FEW_STREAMS else MANY_STREAMS_INTERVAL
        outputs = []
        for group in changed.values():
            if group.is_finished:
                outputs.append(self._finish(group, now))
            elif group.kind is not RequestOutputKind.FINAL_ONLY and any(
                _is_due(sample, interval) for sample in group.samples
            ):
                outputs.append(self._output(group, is_finished=False))
        return outputs

    def _finish(self, group: Group, now: float) -> RequestOutput:
        """Make the last view of a request and forget it."""
        group.metrics.finished_time = now
        del self._groups[group.request_id]
        return self._output(group, is_finished=True)

    def _output(self, group: Group, is_finished: bool) -> RequestOutput:
        is_delta = group.kind is RequestOutputKind.DELTA
        samples = [sample for sample in group.samples if not is_delta or _has_news(sample)]
        for sample in samples:
            if sample.finish_reason is None:
                self._read(sample)
        return RequestOutput(
            request_id=group.request_id,
            prompt=group.prompt,
            prompt_token_ids=group.prompt_token_ids,
            outputs=[_completion(sample, is_delta) for sample in samples],
            finished=is_finished,
            metrics=replace(group.metrics),
            num_cached_tokens=group.num_cached_tokens,
        )

    def _recover(self, error: Exception) -> None:
        """After a step that failed: the cache may be gone, so start an empty one and compute running requests again."""
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


def _num_tokens(sample: Sample) -> int:
    return len(sample.tokens) - len(sample.group.prompt_token_ids)


def _has_news(sample: Sample) -> bool:
    """Whether anything came or happened since the last output; an end is told once."""
    return sample.num_shown >= 0 and (_num_tokens(sample) > sample.num_shown or sample.finish_reason is not None)


def _is_due(sample: Sample, interval: int) -> bool:
    """Whether an output is to be made now: for a first token, an end, or enough of them."""
    new = _num_tokens(sample) - sample.num_shown
    first_or_last = sample.num_shown == 0 or sample.finish_reason is not None
    return _has_news(sample) and (first_or_last or new >= (sample.params.stream_interval or interval))


def _completion(sample: Sample, is_delta: bool) -> CompletionOutput:
    """Show a sample: all of it, or what is new since this was last called."""
    num_prompt = len(sample.group.prompt_token_ids)
    start, text_start = (sample.num_shown, sample.text_shown) if is_delta else (0, 0)
    sample.num_shown, sample.text_shown = _num_tokens(sample), len(sample.text)
    shown = CompletionOutput(
        index=sample.index,
        text="".join(sample.text[text_start:]),
        token_ids=sample.tokens[num_prompt + start :].tolist(),
        cumulative_logprob=None if sample.logprobs is None else sample.cumulative_logprob,
        logprobs=None if sample.logprobs is None else sample.logprobs[start:],
        finish_reason=sample.finish_reason,
        stop_reason=sample.stop_reason,
        seed=None if sample.params.temperature == 0.0 else _signed(sample.seed),
    )
    if sample.finish_reason is not None:
        sample.num_shown = -1
    return shown


def _signed(seed: int) -> int:
    """Write a seed of 64 bits as a request can have it."""
    return seed - 2**64 if seed >= 2**63 else seed


def too_long(max_model_len: int, num_prompt: int, num_output: int | None) -> ContextLengthError:
    """Say that a prompt, with its output where that is known, is too long; proxies look for these first words."""
    request = f"your prompt contains {num_prompt} input tokens"
    if num_output is not None:
        request = f"you requested {num_output} output tokens and {request}"
    return ContextLengthError(
        f"This model's maximum context length is {max_model_len} tokens. However, {request}. Shorten the prompt or "
        "ask for fewer tokens.",
        num_prompt,
        max_model_len,
    )


def _token_ids(ids: Any, vocab_size: int) -> list[int]:
    """Check token ids as Python integers, before numpy could wrap 2**32 + 5 to a valid one."""
    if not isinstance(ids, Sequence | np.ndarray) or isinstance(ids, str | bytes):
        raise UserError(f"A prompt is text or a list of token ids, not {type(ids).__name__}.", "prompt")
    if not len(ids):
        raise UserError("The decoder prompt cannot be empty", "prompt")
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int | np.integer):
            raise UserError(f"A token id is an integer, not {token!r}.", "prompt")
        if not 0 <= token < vocab_size:
            raise UserError(f"Token id {token} is out of vocabulary (0 to {vocab_size - 1})", "prompt")
    return [int(token) for token in ids]


def _eos_ids(model_tokenizer: Tokenizer, generation_config: Mapping[str, Any]) -> frozenset[int]:
    """Return the tokens that end a text: the tokenizer's, and those of the model's generation_config.json."""
    named = generation_config.get("eos_token_id")
    ids: set[int] = {named} if isinstance(named, int) else set(named or ())
    if not all(isinstance(token, int) for token in ids):
        raise UserError(f"eos_token_id of the model is {named!r}; it must be a token id or a list of them.", "model")
    if model_tokenizer.eos_token_id is not None:
        ids.add(model_tokenizer.eos_token_id)
    return frozenset(ids)
