"""The compiled programs: which there are, which are ready, and the threads that compile them.

An engine serves as soon as its *covering* programs exist: one decode and one ragged program, the largest of each with
the widest sampling, which between them can run any plan. Of the others those follow, in the background, that plans ask
for; until then a plan runs in the smallest ready program that holds it. In deterministic mode one program runs them
all. Knows shapes, and what traces a program; knows no weights and no state.
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import os
import sys
import threading
import time
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from jaxllm.metrics import Metrics
from jaxllm.runner import batch
from jaxllm.runner.batch import Shape
from jaxllm.sampling.sampler import Variant
from jaxllm.scheduler.state import Plan

_log = logging.getLogger(__name__)
VARIANTS = tuple(Variant)
STACK_BYTES = 64 << 20  # of a compiling thread; deep models overflow the usual 8 MiB (reference/peers.md §2)
_STARTING = threading.Lock()
PAUSE = 14  # seconds of rest after a program for each second that tracing it took, while steps run
IDLE_SECONDS = 0.1  # without a step, after which nobody is disturbed
_MOST_TRIES = 2  # to compile a program in the background
EXIT_SECONDS = 2.0  # that a process waits at its end for a program under way before it says so


@dataclass(frozen=True, slots=True)
class Key:
    """Names a program."""

    shape: Shape
    variant: Variant

    @property
    def cost(self) -> tuple[int, int]:
        """Orders programs that could serve the same plan: the fewest tokens first, then the narrowest sampling."""
        return self.shape.tokens, VARIANTS.index(self.variant)

    def __str__(self) -> str:
        return f"{self.shape}.{self.variant.value}"


class Programs:
    """A table from `Key` to compiled program that fills while the engine serves."""

    def __init__(
        self,
        decode: Sequence[Shape],
        ragged: Sequence[Shape],
        lower: Callable[[Key], Any],
        metrics: Metrics,
        variants: Sequence[Variant] = VARIANTS,
    ) -> None:
        """Without `decode` shapes ragged programs run every plan; of `variants`, in order, the last is the widest."""
        self.covering = [Key(shapes[-1], VARIANTS[-1]) for shapes in (ragged, decode) if shapes]
        everything = [Key(shape, variant) for variant in variants[:-1] for shape in [*ragged, *decode]]
        # The widest sampling is the rarest: a request with penalties finds a program of twice its size at most.
        everything += [Key(shape, VARIANTS[-1]) for shape in [*batch.coarser(ragged), *batch.coarser(decode)]]
        self.rest = sorted((key for key in everything if key not in self.covering), key=_urgency)
        # Each with the place of its variant: to look that up took as long as all else in `choose`.
        self._by_cost = {
            is_decode: [
                (VARIANTS.index(key.variant), key)
                for key in sorted(everything, key=lambda key: key.cost)
                if key.shape in shapes
            ]
            for is_decode, shapes in ((True, decode or ragged), (False, ragged))
        }
        self._lower = lower
        self._tracing = threading.Lock()
        self._traced_for = self._compiled_until = 0.0  # the last tracing's length, the last compilation's end
        self._last_step = 0.0  # when a plan last asked for a program
        self._is_closed = threading.Event()
        self._metrics = metrics
        self._ready: dict[Key, Any] = {}
        self._lock = threading.Lock()
        self._queue: list[Key] = []
        self._wanted: set[Key] = set()  # all that was ever asked for
        self._failures: Counter[Key] = Counter()
        self._followers = self._max_followers = 0  # threads that compile what plans ask for
        self._failure: BaseException | None = None
        self._threads: list[threading.Thread] = []

    def __getitem__(self, key: Key) -> Any:
        return self._ready[key]

    def __len__(self) -> int:
        return len(self._ready)

    def ready(self) -> dict[Key, Any]:
        """Return the programs that are compiled."""
        with self._lock:
            return dict(self._ready)

    @property
    def num_compiling(self) -> int:
        """Threads that compile in the background now."""
        return self._followers

    @property
    def num_all(self) -> int:
        """Programs there can be."""
        return len(self.covering) + len(self.rest)

    def choose(self, plan: Plan, variant: Variant) -> Key:
        """Name the cheapest ready program that holds the plan and samples as widely as `variant`.

        A cheaper one that is not ready yet is wanted from now on.
        """
        self._last_step = time.monotonic()
        size = batch.extent(plan)
        is_wanted = True
        least = VARIANTS.index(variant)
        for width, key in self._by_cost[not size.tiles]:
            if width < least or not batch.fits(size, key.shape):
                continue
            if key in self._ready:
                return key
            if is_wanted and self._failures[key] < _MOST_TRIES:
                self.want(key)
                is_wanted = False
        raise RuntimeError(f"no program holds {len(plan.slots)} rows of {plan.num_tokens} tokens")

    def begin(self, keys: Sequence[Key], num_threads: int) -> None:
        """Start to compile `keys`; `wait` ends it."""
        if not self._threads:
            # `atexit` calls in reverse order, and the first finalizer of a process registers one call that runs all of
            # them. JAX keeps the constants of a program that it traces by finalizers: if they ran before `_join`,
            # tracing would fail with the KeyError of a variable. So a finalizer is made before `_join` is registered.
            weakref.finalize(self, self._is_closed.set)
            # A thread must not be inside XLA while the interpreter goes down: it aborts the process. The method is held
            # weakly, so that an engine nobody refers to any more can go.
            atexit.register(_join, weakref.WeakMethod(self.join))
        with self._lock:
            self._queue += keys
            self._wanted.update(keys)
        for _ in range(min(num_threads, len(keys))):
            self._start(in_background=False)

    def follow(self, num_threads: int) -> None:
        """From now on compile what is wanted, in the time that serving leaves, in so many threads at once.

        Not the others: each keeps 20 to 90 MiB of a deep model's host for XLA's copy of it (DECISIONS.md, 58).
        """
        self._max_followers = num_threads

    def want(self, key: Key) -> None:
        """Have a program compiled next, where programs follow; one that fails is tried once more, and no more."""
        with self._lock:
            if not self._max_followers or key in self._wanted or self._is_closed.is_set():
                return
            self._wanted.add(key)
            self._queue.insert(0, key)
            if self._followers == self._max_followers:
                return
            self._followers += 1
        try:
            self._start(in_background=True)
        except RuntimeError as failure:  # no thread is to be had: steps go on in the programs that there are
            with self._lock:
                self._followers -= 1
            warnings.warn(f"nothing can be compiled: {failure}", stacklevel=1)

    def wait(self, progress: bool = False) -> None:
        """Wait until every program that was asked for is compiled; the first failure is raised here."""
        with tqdm(total=self.num_all, desc="programs", disable=not progress) as bar:
            for thread in self._threads:
                while thread.is_alive():
                    thread.join(0.5 if progress else None)
                    bar.update(len(self) - bar.n)
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Compile nothing more; what is being compiled is finished by its thread."""
        self._is_closed.set()
        with self._lock:
            self._queue.clear()

    def join(self, seconds: float | None = None) -> bool:
        """Compile nothing more, and wait for what is being compiled, `seconds` at most; return whether that is done."""
        self.close()
        end = None if seconds is None else time.monotonic() + seconds
        for thread in self._threads:
            thread.join(None if end is None else max(0.0, end - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    @property
    def _is_over(self) -> bool:
        """Whether nothing is to be compiled any more: closed, or the interpreter goes down and starts no threads."""
        return self._is_closed.is_set() or not threading.main_thread().is_alive()

    def _start(self, in_background: bool) -> None:
        with self._lock:  # which the thread needs first: nobody can miss it who joins
            thread = _start(lambda: self._work(in_background), "jaxllm-compile")
            self._threads = [*(other for other in self._threads if other.is_alive()), thread]

    def _work(self, in_background: bool) -> None:
        while True:
            with self._lock:
                if not self._queue:
                    self._followers -= in_background
                    return
                key = self._queue.pop(0)
            start = time.perf_counter()
            try:
                lowered = self._trace(key, in_background)
                if lowered is None:
                    continue  # closed meanwhile: the queue is empty
                program = _behind(lowered.compile) if in_background else lowered.compile()
            except Exception as failure:
                if in_background:
                    self._note_failure(key, failure)
                    continue
                self._failure = failure
                return
            self._compiled_until = time.monotonic()
            with self._lock:
                self._metrics.programs_compiled += 1
                self._metrics.compile_seconds += time.perf_counter() - start
                self._ready[key] = program
            del lowered
            if not in_background or not self._queue:  # it takes 30 ms, in which allocations wait
                _give_back()

    def _note_failure(self, key: Key, failure: Exception) -> None:
        """Try a program of the background once more; plans that it would serve go on in a larger one meanwhile."""
        if self._is_over:
            return  # it cannot be compiled because the process ends
        self._metrics.programs_failed += 1
        self._failures[key] += 1
        if self._failures[key] < _MOST_TRIES:
            _log.info("program %s could not be compiled and is tried again", key, exc_info=failure)
            with self._lock:
                self._queue.append(key)
        else:
            warnings.warn(f"program {key} could not be compiled: {failure}", stacklevel=1)

    def _trace(self, key: Key, in_background: bool) -> Any:
        """Trace a program: in the background after a rest, for tracing is Python, and so is what runs steps; None once
        nothing is to be compiled any more.

        Compiling is not, but shares caches and, where two processors are one core's threads, the core.
        """
        with self._tracing:  # threads that traced at once would only take turns
            if in_background:
                rested = self._compiled_until + PAUSE * self._traced_for
                while time.monotonic() < min(rested, self._last_step + IDLE_SECONDS):
                    if self._is_closed.wait(IDLE_SECONDS):
                        break
                if self._is_over:
                    return None
            start = time.monotonic()
            lowered = self._lower(key)
            self._traced_for = time.monotonic() - start
            self._metrics.trace_seconds += self._traced_for
        return None if in_background and self._is_over else lowered


def _start(work: Callable[[], None], name: str) -> threading.Thread:
    """Start a thread whose stack is large enough to compile on."""
    with _STARTING:  # the size is the interpreter's, for all threads that begin
        before = threading.stack_size(STACK_BYTES)
        try:
            thread = threading.Thread(target=work, name=name, daemon=True)
            thread.start()
        finally:
            threading.stack_size(before)
    return thread


def _behind(call: Callable[[], Any]) -> Any:
    """Return what `call` returns, from a thread that steps back; tracing does not.

    A thread that holds the interpreter and gets no processor time would stop the one that serves.
    """
    outcome: Future[Any] = Future()

    def work() -> None:
        try:
            _step_back()
            outcome.set_result(call())
        except BaseException as failure:
            outcome.set_exception(failure)

    _start(work, "jaxllm-compile-behind")
    return outcome.result()


def _step_back() -> None:
    """Let whoever serves go first: this thread, and those in which XLA's CPU back end runs LLVM.

    LLVM's threads are made once for a process, by its first compilation, and do two thirds of the work; the priority of
    a thread that asks them to compile is not theirs. They stay back, since to raise a thread may take privileges: a
    later engine of the process starts more slowly where other programs keep all cores busy (DECISIONS.md, 40).
    """
    if sys.platform != "linux":
        return
    threads = [threading.get_native_id()]
    for thread in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # it may end meanwhile
            if (thread / "comm").read_text().startswith("llvm-worker"):
                threads.append(int(thread.name))
    for thread in threads:
        with suppress(ProcessLookupError, PermissionError):  # a sandbox may forbid it; serving is slower then
            os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))


def _give_back() -> None:
    """Return the memory that compiling has freed to the system; glibc keeps it for the thread that freed it."""
    if sys.platform == "linux":
        with suppress(AttributeError):  # another C library
            ctypes.CDLL(None).malloc_trim(0)


def _join(join: weakref.WeakMethod[Callable[..., bool]]) -> None:
    """End the compilations of an object that may be gone, while the process ends."""
    method = join()
    if method is not None and not method(EXIT_SECONDS):
        print("jaxllm: the process ends as soon as a program under way is compiled", file=sys.stderr, flush=True)
        method()


def _urgency(key: Key) -> tuple[int, int]:
    """Order all that may be compiled: usual sampling first, then larger ones, which serve more plans."""
    return VARIANTS.index(key.variant), -key.shape.tokens
