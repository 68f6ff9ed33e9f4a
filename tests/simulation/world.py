"""Plays a trace against the production engine, in virtual time, and checks invariants after every turn.

In a turn the events of the trace happen, the event loop runs, the engine's thread does one iteration, and the event
loop delivers its outputs. The event loop may also run while a step is in flight. `AsyncLLM`, the thread's loop, the
engine, the scheduler and the runner are production code; the device's programs, the tokenizer, the clock and the event
loop are simulated.
"""

from __future__ import annotations

import asyncio
import zlib
from collections import Counter, deque
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from jaxllm.engine.accepted import Accepted
from jaxllm.engine.async_llm import AsyncLLM
from jaxllm.engine.features.adapters.rows import AdapterRows, AdapterTexts
from jaxllm.engine.features.table import FEATURES
from jaxllm.engine.input_batch import RequestFault
from jaxllm.engine.language import Language
from jaxllm.engine.llm_engine import LLMEngine
from jaxllm.engine.loader import Parts
from jaxllm.engine.model_info import ModelInfo
from jaxllm.engine.output_processor import FEW_STREAMS, MANY_STREAMS_INTERVAL
from jaxllm.engine.recovery import MAX_EXHAUSTED, MAX_FAILURES
from jaxllm.errors import (
    DeadlineError,
    DrainingError,
    EngineDeadError,
    RequestFailedError,
)
from jaxllm.metrics import StepReport
from jaxllm.outputs import RequestOutput
from jaxllm.sampling_params import RequestOutputKind, SamplingParams
from jaxllm.scheduler.state import Plan, Request
from jaxllm.setup.kv_cache import Geometry
from tests.simulation.adapters import Folders, Held, make_store
from tests.simulation.beams import BeamTruth
from tests.simulation.block_events import Follower
from tests.simulation.checks import ROUNDING, TICK, check_idle, check_over, check_turn
from tests.simulation.client import Client
from tests.simulation.device import SimulatedRunner, Violation
from tests.simulation.events import happen, resume
from tests.simulation.faults import HANG, StepFaults
from tests.simulation.grammars import Grammars
from tests.simulation.host import SlowCopies, SlowDisk
from tests.simulation.loop import Loop
from tests.simulation.media import contents, last_places
from tests.simulation.oracle import EOS, VOCABULARY, Tokenizer, Truth, mix
from tests.simulation.reference import Entry, is_stuck
from tests.simulation.sources import prompts_of, root_of
from tests.simulation.stand_ins import Condition, InjectedError, Recorder, SimulatedThread
from tests.simulation.trace import Trace

FIRST_MOMENT = 100_000.0


def _drafting(max_drafts: int) -> dict[str, Any] | None:
    return {"method": "ngram", "num_speculative_tokens": max_drafts} if max_drafts else None


class World:
    """A trace that is played. `play` raises `Violation`, or the error of the engine."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.setting = trace.setting
        self.max_model_len: int = trace.setting["max_model_len"]
        self.now = FIRST_MOMENT
        self.turn = 0
        self.frozen_until = -1
        self.num_steps = 0  # of all engines of the trace
        self.digest = 0
        self.fired: Counter[str] = Counter()
        self.loop = Loop(lambda: self.now)
        self.faults = StepFaults(self)
        self.tokenizer = Tokenizer()
        self.tokenizer.is_broken = trace.setting["broken_text"]
        self.submitting: Client | None = None
        self.num_seeds = self.num_roots = 0
        self.files: dict[tuple[int, bytes], Any] = {}  # blocks on disk
        self.folders = Folders(trace.setting["num_adapters"])
        self.params: dict[str, SamplingParams] = {}
        self._events: dict[int, list[list[Any]]] = {}
        for event in trace.events:
            self._events.setdefault(event[0], []).append(event)
        self.begin()

    # Start and stop of an engine.

    def begin(self) -> None:
        """Start an engine, with the state of the checks reset."""
        setting = self.setting
        geometry = Geometry(
            num_slots=setting["num_slots"],
            num_blocks=setting["num_blocks"],
            block_size=setting["block_size"],
            max_model_len=setting["max_model_len"],
            window=setting["window"],
            num_window_blocks=setting["num_window_blocks"],
        )
        self.live: dict[str, Client] = {}
        self.clients: list[Client] = []  # not ended
        self.submitted: deque[Client] = deque()  # not yet read by the engine's thread
        self.client_of: dict[int, Client] = {}  # by the id of a sample
        self.was_admitted: set[Client] = set()
        self.cached_of: dict[str, int] = {}  # by name: cached tokens at the first admission
        self.prompt_tokens = self.cached_tokens = 0
        self.counted: list[tuple[int, Client, int]] = []  # first admissions of the last plan
        self.num_told = 0  # tokens that the observer received
        self.is_deaf = False  # the observer has raised, and so missed other requests of that delivery
        self.last_interval = 1  # tokens between outputs, when outputs were last made
        self.due_to_tell = 0  # tokens that the observer must receive
        self.shown: dict[tuple[str, int], int] = {}  # tokens by key and sample, in outputs
        self.reported = [0, 0]  # sums of step reports: all tokens, and output tokens
        self.is_asleep = True  # whether the engine's thread waits to be woken
        self.is_held = False  # whether a call of `pause` has returned, without a later resume
        self.num_resumed = 0
        self.pausing = 0  # calls of `pause` that have not returned
        self.turns_pausing = 0  # consecutive turns in which such calls had nothing to wait for
        self.drain_until = 0.0
        self.most_failures = MAX_FAILURES
        self.reasons: Counter[str] = Counter()  # ended samples by finish reason, in the engine's outputs
        self.told: dict[str, set[int]] = {}  # by key: samples with a finish reason in an output
        self.finished_keys: set[str] = set()
        self.armed: dict[str, Any] = {}
        self.failures = 0  # consecutive failed steps
        self.num_recoveries = 0
        self.is_recovering = False
        self.left: list[tuple[int, Client]] = []  # ended clients, with the turn of their end
        self.unexpected: Exception | None = None  # error of a step that was not injected
        self.takes_until_refusal = 0
        self.mid: list[list[Any]] = []  # events of this turn that wait for a step in flight
        self.plans: deque[Plan] = deque(maxlen=8)
        self.last_commit: Any = None
        self.is_paused = self.is_draining = self.is_dead = self.is_hung = False
        self.has_died = False  # from failures
        self.resume_at: int | None = None
        self.draining: asyncio.Task[bool] | None = None
        self.num_drain_failures = 0
        self.num_cut_off = 0  # clients that got EngineDeadError during a drain
        self.tasks: list[asyncio.Task[Any]] = []
        self.random = np.random.default_rng(setting["seed"])
        self.llm = llm = AsyncLLM(
            "simulated",
            thread_type=SimulatedThread,
            max_queued_requests=setting["most_queued"],
            max_queued_tokens=setting["most_queued_tokens"],
            hang_timeout=HANG,
            observer=self,
            block_size=setting["block_size"],
            enable_prefix_caching=setting["prefix_caching"],
            async_scheduling=setting["async_scheduling"],
            scheduling_policy=setting["policy"],
            enable_kv_cache_events=setting["block_events"],
            enable_lora=setting["max_adapters"] > 0,
            max_loras=setting["max_adapters"] or 1,
            max_cpu_loras=setting["max_kept"] or None,
            speculative_config=_drafting(setting["max_drafts"]),
            seed=setting["seed"],
            max_logprobs=5,
        )
        self.folders.contents.clear()  # a new engine numbers its adapters from 1
        self.held = Held(self.faults.before_put)
        disk = SlowDisk(setting, self.files, self.fired) if setting["has_disk"] else None
        self.runner = SimulatedRunner(
            llm.config,
            geometry,
            setting["max_step_tokens"],
            llm.metrics,
            self.faults,
            self.held,
            setting,
            SlowCopies(setting, disk),
            disk,
        )
        self.reference = llm._recorder = Recorder(self.runner.limits, self._claim)
        self.reference.world = self
        rest = self.runner.programs.rest
        for key in rest[: int(len(rest) * setting["compiled"])]:
            self.runner.compile(key)
        model = ModelInfo(
            tokenizer=self.tokenizer,  # type: ignore[arg-type]
            generation_config={},
            default_params=SamplingParams(),
            eos_ids=frozenset((EOS,)),
            vocab_size=VOCABULARY,
            max_model_len=self.max_model_len,
            sources=prompts_of(setting, self.tokenizer),
        )
        grammars: Any = Grammars(self.faults)
        adapters = AdapterRows if setting["max_adapters"] else AdapterTexts
        llm._parts = Parts(
            model=model,
            runner=self.runner,
            language=Language(model=model, grammars=grammars),
            features={**FEATURES, "adapters": lambda core: adapters(core, lambda core: make_store(self, core))},
            clock=lambda: self.now,
        )
        llm._clock = llm._parts.clock
        self.condition = llm._inbox._changed = Condition()  # type: ignore[assignment]
        add = llm._inbox.add

        def noted(accepted: Accepted) -> None:
            add(accepted)
            client = self.submitting
            assert client is not None
            client.is_submitted = True
            client.adapter, client.weights = self.folders.note(client.folder or 0, accepted.states.get("adapters"))
            self.submitted.append(client)

        llm._inbox.add = noted  # type: ignore[method-assign]
        self.loop.create_task(llm.start())
        self.loop.run()
        self.thread = llm._thread
        assert isinstance(self.thread, SimulatedThread)
        self.thread.world = self
        if llm.state != "loading":
            raise Violation("an engine is ready before it is there")
        next(self.thread.running)
        self.loop.run()
        self.engine = llm.engine
        self.engine._recover = self._recover  # type: ignore[method-assign]
        due = self.engine.outputs.due

        def make(changed: Collection[Any], now: float) -> list[RequestOutput]:
            if not all(group.is_finished for group in changed):  # finished groups are shown at once
                self.last_interval = self.interval
            return due(changed, now)

        self.engine.outputs.due = make  # type: ignore[method-assign]
        self.follower = Follower(llm, setting, self.client_of, self.folders.contents, self.loop.failures)
        self.following = self.loop.create_task(self.follower.run()) if setting["block_events"] else None

    def end(self) -> None:
        """Close the engine and check that it left nothing."""
        self.is_dead = True
        closing = self.loop.create_task(self.llm.close())
        self.loop.run()
        self._drop_all()
        if not closing.done() or not closing.result():
            raise Violation("the engine does not close")
        check_over(self)

    # Callbacks of the engine, the scheduler and the clients.

    def _recover(self, error: Exception) -> list[RequestOutput]:
        """Let the engine recover from an injected fault; raise any other error, which is a bug."""
        blamed: list[Entry] = []
        if isinstance(error, RequestFault) and isinstance(error.__cause__, InjectedError):
            blamed = [self.reference.by_id[error.sequence.sequence_id]]
        elif not isinstance(error, InjectedError):
            self.unexpected = error
            raise error
        elif "RESOURCE_EXHAUSTED" in str(error) and not self.failures % MAX_FAILURES:
            if self.failures < MAX_EXHAUSTED * MAX_FAILURES:
                blamed = self._largest()
                self.most_failures += MAX_FAILURES * bool(blamed)
        for entry in blamed:
            for truth in self.client_of[entry.id].truths:
                truth.may_fail = True
        self.is_recovering = True
        try:
            outputs = LLMEngine._recover(self.engine, error)
        finally:
            self.is_recovering = False
        if any(entry.slot > -2 for entry in blamed) or len(outputs) != len(blamed):
            raise Violation("a step failed because of a request that goes on, or ended another")
        return outputs

    def _largest(self) -> list[Entry]:
        """Return the request with the most tokens in the failed step, of equals the last; an empty list without one."""
        plan = self.engine._planned
        rows = self.reference.plans.get(plan.number, []) if plan is not None else []
        living = [(int(plan.lengths[at]), at, row[0]) for at, row in enumerate(rows) if row[0].slot > -2]
        return [max(living)[2]] if living else []

    def _claim(self, requests: Sequence[Request]) -> list[Entry]:
        """Find the clients of requests that the engine queues; return entries with the expected outputs."""
        entries: list[Entry] = []
        while len(entries) < len(requests):
            client = self.submitted.popleft()
            if client.is_unreadable:
                self._note_refused(client)
                continue
            params = client.params
            seed = int(self.random.integers(2**63)) if params.seed is None else params.seed
            is_cached: bool = self.setting["prefix_caching"]
            self.num_roots += 1
            root = zlib.crc32(client.salt.encode()) if is_cached else mix(self.num_roots, 0)
            root = root_of(root, client.source)
            leader = requests[len(entries)].sequence_id if client.beams is not None else 0
            for index in range(params.n):
                given = client.ids, params, seed + index, root, client.limit, self.tokenizer.is_broken, client.weights
                given += (contents(client.images),)
                if client.beams is None:
                    truth = Truth(*given)
                else:
                    first = client.truths[0] if index else None
                    truth = BeamTruth(first.search if isinstance(first, BeamTruth) else None, client.beams, *given)
                truth.source = client.source
                truth.last_places, truth.pictures = last_places(client.images), client.images
                client.truths.append(truth)
                self.runner.device.truths[(seed + index) % 2**64] = truth
                request = requests[len(entries)]
                self.client_of[request.sequence_id] = client
                skips = bool(params.skip_reading_prefix_cache) or (params.prompt_logprobs is not None and index == 0)
                entries.append(
                    Entry(
                        id=request.sequence_id,
                        truth=truth,
                        order=0,
                        priority=client.priority,
                        is_shared=is_cached or params.n > 1 or client.beams is not None,
                        reads_cache=not skips,
                        num_tokens=len(client.ids),
                        adapter=client.adapter,
                        may_draft=params.structured_outputs is None,
                        beam_group=leader,
                        images=client.images,
                        source=client.source,
                    )
                )
                if request.may_draft != entries[-1].may_draft:
                    raise Violation("a request may have drafts, and must not, or the reverse")
                client.entries.append(entries[-1])
        return entries

    def _note_refused(self, client: Client) -> None:
        """Count a request that the engine could not queue; raise `Violation` if it is readable."""
        if not client.is_unreadable:
            raise Violation(f"{client.name} was not taken in")
        self.reasons["error"] += client.params.n

    def note_outputs(self, outputs: list[RequestOutput]) -> None:
        """Count finish reasons and tokens of outputs before clients receive them."""
        for output in outputs:
            key = output.internal_id
            if key in self.finished_keys:
                raise Violation("I9: an output after the last one")
            told = self.told.setdefault(key, set())
            stream = self.llm._streams.of_internal_id(key)
            for part in output.outputs:
                before = self.shown.get((key, part.index), 0)
                is_delta = stream is not None and stream.params.output_kind is RequestOutputKind.DELTA
                new = len(part.token_ids) - (0 if is_delta else before)
                self.shown[key, part.index] = before + new
                self.due_to_tell += new if stream is not None else 0
            if stream is not None:
                reader = self.live[stream.request_id]
                reader.enough = min(reader.enough, self.last_interval)
            if output.finished and stream is not None and stream._error is None:
                self.live[stream.request_id].has_end = all(each.finish_reason != "error" for each in output.outputs)
            for part in output.outputs:
                if part.finish_reason is not None and part.index not in told:
                    told.add(part.index)
                    self.reasons[part.finish_reason] += 1
            if output.finished:
                self.finished_keys.add(key)
                del self.told[key]

    def note_over(self, client: Client) -> None:
        """Remove a client that has ended; raise `Violation` if its error has no reason."""
        if self.live.get(client.name) is client:
            del self.live[client.name]
        if client in self.clients:
            self.clients.remove(client)
            self.left.append((self.turn, client))
        ends = sorted(client.ends.items()), [client.tokens[index] for index in sorted(client.tokens)]
        self.digest = zlib.crc32(f"{client.name}{ends}{client.texts}{type(client.error)}".encode(), self.digest)
        error = client.error
        if error is None or not client.is_submitted:
            return
        may = {
            RequestFailedError: client.is_unreadable
            or any(truth.may_fail or truth.breaks_at() is not None for truth in client.truths)
            or any(map(is_stuck, client.entries)),
            DeadlineError: client.timeout is not None
            and max(self.now, client.latest) >= client.arrival + client.timeout - ROUNDING,
            EngineDeadError: self.is_dead,
            DrainingError: self.is_draining and max(self.now, client.latest) >= self.drain_until - ROUNDING,
        }
        if client.has_end:
            raise Violation(f"I7: {client.name} failed with {error!r} behind its end")
        if not may.get(type(error), False):  # type: ignore[call-overload]
            raise Violation(f"I7: {client.name} failed with {error!r} for no reason")
        if isinstance(error, DrainingError):
            self.num_drain_failures += 1
        self.num_cut_off += self.is_draining and isinstance(error, EngineDeadError)
        self.fired["stuck"] += isinstance(error, RequestFailedError) and any(map(is_stuck, client.entries))
        if isinstance(error, DeadlineError):
            self.fired["deadline"] += 1
        if isinstance(error, RequestFailedError) and any(truth.breaks_at() is not None for truth in client.truths):
            self.fired["detokenizer_error"] += 1

    # The observer of the production engine.

    def step(self, report: StepReport) -> None:
        """Add the report of a step."""
        self.reported[0] += report.num_tokens
        self.reported[1] += report.num_sampled

    def tokens(self, seconds: float, count: int, is_first: bool) -> None:
        """Count tokens."""
        self.num_told += count

    def finished(self, output: RequestOutput, params: SamplingParams) -> None:
        """Check the summary of a request that has ended, even if its client has not read all outputs."""
        try:
            self._check_summary(self.live[output.request_id], output)
        except Exception as error:  # production catches errors of observers
            self.loop.failures.append(error)
        if self.setting["seed"] % 5 == 0:
            self.is_deaf = True
            raise InjectedError("an observer fails")

    def _check_summary(self, client: Client, output: RequestOutput) -> None:
        if len(output.outputs) < len(client.truths):
            return  # samples without a token are missing
        for part, truth in zip(output.outputs, client.truths, strict=True):
            if isinstance(truth, BeamTruth):
                due = truth.search.outcome()[part.index].tokens
                if part.finish_reason in ("stop", "length") and tuple(part.token_ids) != due:
                    raise Violation(f"I8: the summary of {client.name} is not what it found")
                continue
            if part.finish_reason is None or tuple(part.token_ids) != truth.output(len(part.token_ids)):
                raise Violation(f"I8: the summary of {client.name} is not what it got")
            if part.finish_reason in ("stop", "length", "repetition"):
                due = truth.outcome()
                if (tuple(part.token_ids), part.finish_reason) != (due.tokens, due.reason):
                    raise Violation(f"I8: the summary of {client.name} ends with {part.finish_reason}, not as {due}")

    @property
    def interval(self) -> int:
        """The number of tokens between outputs of a request without `stream_interval`."""
        return 1 if len(self.reference.running) <= self.few_streams else MANY_STREAMS_INTERVAL

    @property
    def few_streams(self) -> int:
        """The most running requests with an output for every token; small in some worlds, so that more run."""
        return 3 if self.setting["seed"] % 4 == 0 else FEW_STREAMS

    # Turns.

    def play(self) -> None:
        """Play all turns, let all requests end, and check that nothing is left."""
        try:
            with self.faults.patched():
                for turn in range(self.trace.num_turns):
                    self.turn = turn
                    self._turn(self._events.get(turn, ()))
                self._settle()
                self.end()
        except BaseException:
            self._abandon()
            raise

    def _abandon(self) -> None:
        """Cancel the remaining tasks after a violation, and ignore their errors."""
        self.note_over = lambda client: None  # type: ignore[method-assign]
        for task in asyncio.all_tasks(self.loop):  # type: ignore[arg-type]
            task.cancel()
        for _ in range(1000):
            with suppress(BaseException):
                self.loop.run()
                break

    def _turn(self, events: Collection[list[Any]]) -> None:
        for event in events:
            if event[1] in ("disconnect", "abort") and event[3] and self.engine.has_unfinished_requests():
                self.mid.append(event)
            else:
                happen(self, event[1], event[2:])
        if self.resume_at is not None and self.turn >= self.resume_at:
            resume(self)
        began = self.now
        self.loop.run()
        self._serve()
        self.loop.run()
        for event in self.mid:  # no step was in flight
            happen(self, event[1], event[2:])
        self.mid = []
        check_turn(self, began)
        if self.is_dead:
            self.fired["engine_died"] += 1
            self._drop_all()
            for client in self.clients:
                raise Violation(f"I7: {client.name} was not told that the engine is dead")
            self.end()
            self.begin()
        elif self.draining is not None and self.draining.done():
            self._finish_drain()
        if self.turn >= self.frozen_until:
            self.now += TICK
        if self.turn % 64 == 63:
            missing = [key for key in self.runner.programs.rest if key not in self.runner.programs._ready]
            if missing:
                self.runner.compile(missing[self.turn % len(missing)])

    def _serve(self) -> None:
        """Run an iteration of the engine's thread, unless it would sleep."""
        inbox, served = self.llm._inbox, self.engine
        has_news = bool(inbox._added or inbox._aborted or inbox._calls or inbox._is_stopped)
        works = served.has_unfinished_requests() and not self.is_held
        if (has_news or (works and self.is_asleep)) and not self.condition.is_notified:
            raise Violation("the engine's thread was not woken")
        self.condition.is_notified = False
        if not has_news and not works:
            return
        steps, recoveries = self.runner.device.num_steps, self.num_recoveries
        is_held, committed = self.is_held, self.last_commit
        waits = bool(served._in_flight and self.reference.beam_groups)
        try:
            next(self.thread.running)
            while self.submitted:  # the engine refused these
                self._note_refused(self.submitted.popleft())
        except StopIteration:
            self.is_asleep = False
            if self.unexpected is not None:
                raise self.unexpected from None
            if self.failures < self.most_failures and self.llm.state != "stopped":
                self.loop.run()
                death = self.llm._death
                if death is not None and death.done():
                    raise death.result() from None
                raise Violation("the engine has stopped") from None
            self.is_dead = True
            self.has_died = self.failures >= self.most_failures
            return
        self.is_asleep = inbox._is_paused or not served.has_unfinished_requests()
        if len(served._in_flight) > int(self.setting["async_scheduling"]):
            raise Violation("steps are given to the device ahead of time")
        if self.failures >= self.most_failures:
            raise Violation("the engine goes on although every step fails")
        if is_held and self.runner.device.num_steps > steps:
            raise Violation("a paused engine computes")
        if works and served.has_unfinished_requests():
            self.num_steps += 1
            has_run = self.runner.device.num_steps > steps or self.num_recoveries > recoveries
            has_run |= self.last_commit is not committed  # a row at its limit may have waited for this commit
            # With only beams in flight, nothing can be planned before their results arrive.
            if not has_run and not waits and not served._in_flight and self.reference.running:
                raise Violation("there is work, and no step computes anything")

    def _settle(self) -> None:
        """Play turns without faults until all requests have ended; raise `Violation` beyond a bound."""
        self.armed.clear()
        self.takes_until_refusal = 0
        self.frozen_until = -1
        if self.is_paused:
            resume(self)
        for client in list(self.clients):
            if client.pause is not None and client.task is not None:
                client.task.cancel()
                client.pause = None
            client.reads = None
        entries = [*self.reference.waiting, *self.reference.running.values()]
        pending = sum(client.params.n * client.limit for client in self.submitted)
        bound = 20 + pending + sum(entry.limit for entry in entries) * 2
        bound += 10 * (len(entries) + len(self.submitted)) * self.setting["has_disk"]
        for _ in range(bound):
            if not self.clients and not self.engine.has_unfinished_requests():
                break
            self.turn += 1
            self._turn(())
        else:
            raise Violation("I7: requests do not end, although nothing is in their way")
        self._turn(())
        check_idle(self)

    def _finish_drain(self) -> None:
        assert self.draining is not None
        if self.draining.result() and self.num_drain_failures:
            raise Violation("a drain says that all were through, and some were not")
        self.end()
        self.begin()

    def _drop_all(self) -> None:
        """End clients that have stopped reading: one with a final output reads it, others are cancelled."""
        for client in list(self.clients):
            if client.pause is not None and client.task is not None:
                self.fired["stopped_reader"] += (client.reads or 0) < 0
                if client.has_end and not client.pause.done():
                    client.reads = None
                    client.pause.set_result(None)
                else:
                    client.task.cancel()
        self.loop.run()
