"""The engine: requests in, outputs out, one step at a time. Owns the clock, the queue of requests and their tokens.

The one place where the pure core meets the device: plan, run, commit, then turn sampled tokens into text. Knows neither
threads nor protocols: whoever calls `step` decides when.
"""

from __future__ import annotations

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

from jaxllm import sampling, scheduler, tokenizer
from jaxllm.config import EngineConfig
from jaxllm.metrics import Metrics
from jaxllm.runner import Runner, prepare
from jaxllm.sampling import Variant
from jaxllm.state import Plan, Request, initial
from jaxllm.step import Result
from jaxllm.tokenizer import Detokenizer, StopMatcher, Tokenizer
from jaxllm.types import (
    CompletionOutput,
    EngineError,
    FinishReason,
    Logprob,
    RequestMetrics,
    RequestOutput,
    SamplingParams,
    UserError,
    default_sampling_params,
    validate_for_model,
)

Prompt = str | Sequence[int] | Mapping[str, Any]
MAX_FAILURES = 3  # steps in a row that may fail before the engine gives up
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
    wants_every_step: bool
    samples: list[Sample] = field(default_factory=list)
    num_cached_tokens: int | None = None

    @property
    def is_finished(self) -> bool:
        """Whether all samples have ended."""
        return all(sample.finish_reason is not None for sample in self.samples)


class LLMEngine:
    """Continuous batching over one model. Not thread-safe: one thread adds, steps and aborts."""

    def __init__(self, config: EngineConfig, progress: bool = False) -> None:
        self.config = config
        self.metrics = Metrics()
        # What can be wrong with a model comes before what takes long.
        setup = prepare(config)
        self.tokenizer: Tokenizer = tokenizer.load_tokenizer(config.tokenizer or setup.folder)
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
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | None = None,
        priority: int = 0,
        wants_every_step: bool = True,
    ) -> None:
        """Queue a request; what is wrong with it is a UserError and leaves the engine as it was.

        `prompt` is text, token ids, or a mapping with "prompt" or "prompt_token_ids" and perhaps "cache_salt". With
        `wants_every_step` false, `step` returns the request only once it has ended.
        """
        self._check_open()
        params = self.default_params if params is None else params
        if not isinstance(params, SamplingParams):
            raise UserError(f"Sampling parameters are a SamplingParams, not {type(params).__name__}.", "params")
        if request_id in self._groups:
            raise UserError(f"request id {request_id!r} is in use.", "request_id")
        if isinstance(priority, bool) or not isinstance(priority, int | np.integer):
            raise UserError(f"priority must be an integer, got {priority!r}.", "priority")
        if priority and self.config.scheduling_policy != "priority":
            raise UserError(
                f"priority is {priority}, but scheduling_policy is {self.config.scheduling_policy!r}; "
                "start the engine with scheduling_policy='priority'.",
                "priority",
            )
        validate_for_model(params, self.vocab_size, self.config.max_logprobs, self.eos_ids)
        text, ids, salt = self._read_prompt(prompt)
        group = Group(request_id, text, tuple(ids), RequestMetrics(time.monotonic()), wants_every_step)
        limit = self.max_model_len
        if params.max_tokens is not None:
            limit = min(limit, len(ids) + params.max_tokens)
        if not self.config.enable_prefix_caching:
            # n samples of a prompt share its blocks all the same, under a name that nobody else has.
            salt = f"{self._num_samples}".encode() if params.n > 1 else None
        state = self._state
        for index in range(params.n):
            sample = self._make_sample(group, index, params)
            stop_ids = tuple(sample.eos_ids) + tuple(set(params.stop_token_ids) - sample.eos_ids)
            request = Request(sample.id, sample.tokens, len(ids), limit, stop_ids, priority, salt)
            state = scheduler.add(state, self._limits, request)
            group.samples.append(sample)
        # Drawn last, so that a request that was refused changes nothing for those after it.
        seed = int(self._random.integers(2**63)) if params.seed is None else params.seed
        for sample in group.samples:
            sample.seed = (seed + sample.index) % 2**64
        self._state = state
        self._groups[request_id] = group
        self._samples.update((sample.id, sample) for sample in group.samples)

    def abort_request(self, request_id: str) -> None:
        """Drop a request in whatever phase it is and free its blocks; an unknown id changes nothing."""
        group = self._groups.pop(request_id, None)
        for sample in group.samples if group else ():
            if sample.finish_reason is None:
                self._state = scheduler.abort(self._state, self._limits, sample.id)
                self._end(sample, "abort", None)

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has anything to do."""
        return bool(self._groups)

    def step(self) -> list[RequestOutput]:
        """Compute one step and return the requests that it changed, with all of their text so far."""
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
        history = self._admit(plan)
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
        return plan, self.runner.run(plan, chunks, self._sampling, variant, history)

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

    def _read_prompt(self, prompt: Prompt) -> tuple[str | None, list[int], bytes]:
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
        if len(ids) >= self.max_model_len:
            raise UserError(
                f"The decoder prompt has {len(ids)} tokens and leaves no room for an output: the maximum model length "
                f"is {self.max_model_len}. Shorten the prompt or raise max_model_len.",
                "prompt",
            )
        return text, ids, salt

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
            detokenizer=tokenizer.begin(self.tokenizer, group.prompt_token_ids, params.skip_special_tokens),
            matcher=StopMatcher.of(params.stop),
            logprobs=None if params.logprobs is None else [],
        )

    def _owner(self, slot: int) -> Sample:
        sample = self._by_slot[slot]
        assert sample is not None
        return sample

    def _admit(self, plan: Plan) -> np.ndarray | None:
        """Prepare the slots of newly admitted requests; return the tokens that the device must be told, int32[·, 3]."""
        self.metrics.preemptions += len(plan.preempted)
        history: list[tuple[int, int, int]] = []
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
            if sample.variant is Variant.PENALIZED:
                known = sample.tokens[: admission.num_cached]
                history += [(slot, position, token) for position, token in enumerate(known)]
        return np.asarray(history, np.int32) if history else None

    def _take_in(self, plan: Plan, result: Result) -> list[RequestOutput]:
        """Commit what a step sampled and turn it into text."""
        self._state, events = scheduler.commit(self._state, self._limits, plan, result.tokens, result.is_finite)
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
                self._add_text(sample, token, events.finished.get(request_id))
            except Exception as error:  # of this request's text: the others of the step are none of its business
                self._state = scheduler.abort(self._state, self._limits, request_id)
                self._end(sample, "error", f"{type(error).__name__}: {error}")
        for request_id in events.failed:
            sample = self._samples[request_id]
            changed[sample.group.request_id] = sample.group
            self._end(sample, "error", "the model's logits were not finite")
        return self._outputs(changed, now)

    def _add_text(self, sample: Sample, token: int, finish_reason: FinishReason | None) -> None:
        """Append a token's text; end the sample at its stop token, its limit, or a stop string."""
        if finish_reason == "stop":
            self._flush(sample)
            self._end(sample, "stop", None if token in sample.eos_ids else token)
            return
        sample.detokenizer, delta = tokenizer.advance(sample.detokenizer, self.tokenizer, (token,))
        shown = delta
        if len(sample.tokens) - len(sample.group.prompt_token_ids) > sample.params.min_tokens:
            sample.matcher, shown = tokenizer.match_stops(sample.matcher, delta)  # text of min_tokens cannot end it
        sample.text.append(shown)
        if sample.matcher.matched is not None:
            if finish_reason is None:
                self._state = scheduler.abort(self._state, self._limits, sample.id)
            self._end(sample, "stop", sample.matcher.matched)
        elif finish_reason is not None:
            self._flush(sample)
            if sample.matcher.matched is not None:
                self._end(sample, "stop", sample.matcher.matched)
            else:
                self._end(sample, finish_reason, None)

    def _flush(self, sample: Sample) -> None:
        """Append the text that was held back, now that no token follows."""
        sample.matcher, shown = tokenizer.match_stops(
            sample.matcher, tokenizer.finish(sample.detokenizer, self.tokenizer)
        )
        sample.text.append(shown)
        if sample.matcher.matched is None:
            sample.text.append(sample.matcher.held)
            sample.matcher = replace(sample.matcher, held="")

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
        outputs = []
        for group in changed.values():
            is_finished = group.is_finished
            if is_finished:
                group.metrics.finished_time = now
                del self._groups[group.request_id]
            if is_finished or group.wants_every_step:
                outputs.append(_output(group, is_finished))
        return outputs

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


def _output(group: Group, is_finished: bool) -> RequestOutput:
    num_prompt = len(group.prompt_token_ids)
    return RequestOutput(
        request_id=group.request_id,
        prompt=group.prompt,
        prompt_token_ids=group.prompt_token_ids,
        outputs=[
            CompletionOutput(
                index=sample.index,
                text="".join(sample.text),
                token_ids=sample.tokens[num_prompt:].tolist(),
                cumulative_logprob=None if sample.logprobs is None else sample.cumulative_logprob,
                logprobs=None if sample.logprobs is None else list(sample.logprobs),
                finish_reason=sample.finish_reason,
                stop_reason=sample.stop_reason,
            )
            for sample in group.samples
        ],
        finished=is_finished,
        metrics=replace(group.metrics),
        num_cached_tokens=group.num_cached_tokens,
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
