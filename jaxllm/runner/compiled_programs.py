"""Table of compiled programs, and the threads that compile them.

An engine serves once its *covering* programs are compiled, which can run any plan. On a CPU others are compiled in the
background on demand; on a GPU first, because loading one disturbs the others.
"""

from __future__ import annotations

import atexit
import logging
import math
import sys
import threading
import time
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from tqdm import tqdm

from jaxllm.compiling.compile_noise import hidden
from jaxllm.compiling.compile_threads import run_at_idle_priority
from jaxllm.compiling.kept_programs import KeptPrograms
from jaxllm.errors import is_exhaustion
from jaxllm.freed_memory import return_freed_memory
from jaxllm.metrics import Metrics
from jaxllm.runner import batch
from jaxllm.runner.batch import Shape
from jaxllm.runner.step import program_name
from jaxllm.sampling.sampler import Variant
from jaxllm.scheduler.state import Plan
from jaxllm.threads import start_thread

_log = logging.getLogger(__name__)
VARIANTS = tuple(Variant)
PAUSE = 14  # while steps run, seconds of rest per second of tracing
IDLE_SECONDS = 0.1  # without a step, before tracing
_MOST_TRIES = 2  # in the background, per program
RETRY_SECONDS = 30.0  # after running out of threads, memory or file descriptors
NOTE_SECONDS = 10.0  # between log lines
EXIT_SECONDS = 2.0  # at exit, before a line is printed


@dataclass(frozen=True, slots=True)
class Key:
    """The key of a program."""

    shape: Shape  # "sample" uses only `rows`
    variant: Variant | None  # None: no sampling
    part: Literal["step", "forward", "sample", "finish", "pool"] = "step"

    @property
    def name(self) -> str:
        if self.part == "sample" and self.variant is not None:
            return f"sample_{self.shape.rows}_{self.variant.value}"
        name = program_name(self.shape, self.variant, self.part)
        return f"finish_{name}" if self.part == "finish" else name

    def __str__(self) -> str:
        if self.part == "finish":
            return f"finish {self.shape}.{self.variant}"
        shape = f"sample[{self.shape.rows}]" if self.part == "sample" else str(self.shape)
        return f"{shape}.{self.part if self.variant is None else self.variant.value}"


ProgramKeys = tuple[Key, ...]  # one program, or a forward and a sampling program


def halves(shape: Shape, variant: Variant, drafts: bool = False) -> ProgramKeys:
    """Return the two programs of a step; with drafts the second, "finish", reads the batch again."""
    if drafts:
        return Key(shape, None, "forward"), Key(shape, variant, "finish")
    rows = Shape(tokens=shape.rows, rows=shape.rows, tiles=0, entries=0, sampling_fields=0)
    return Key(shape, None, "forward"), Key(rows, variant, "sample")


class ProgramTable:
    """A table from `Key` to compiled program, filled while the engine serves."""

    def __init__(
        self, covering: Sequence[Key], all_keys: Iterable[Key], lower: Callable[[Key], Any], metrics: Metrics
    ) -> None:
        """Take the `covering` programs, which `begin` compiles first; others are compiled on demand."""
        self.covering = list(covering)
        self.rest = sorted((key for key in dict.fromkeys(all_keys) if key not in self.covering), key=_urgency)
        self.kept: KeptPrograms | None = None
        self.platform = "cpu"
        self._lower = lower
        self._tracing = threading.Lock()
        self._traced_for = self._compiled_until = 0.0
        self._last_step = 0.0
        self._is_closed = threading.Event()
        self._metrics = metrics
        self._ready: dict[Key, Any] = {}
        self._lock = threading.Lock()
        self._queue: list[Key] = []
        self._wanted: set[Key] = set()
        self._failures: Counter[Key] = Counter()
        self._rests_until: dict[Key, float] = {}
        self._followers = self._max_followers = 0  # background threads
        self._only_when_idle = False
        self._failure: BaseException | None = None
        self._threads: list[threading.Thread] = []

    def __getitem__(self, key: Key) -> Any:
        return self._ready[key]

    def __len__(self) -> int:
        return len(self._ready)

    def ready(self) -> dict[Key, Any]:
        with self._lock:
            return dict(self._ready)

    @property
    def num_compiling(self) -> int:
        return self._followers

    @property
    def num_all(self) -> int:
        return len(self.covering) + len(self.rest)

    def first_ready(self, ways: Iterable[ProgramKeys]) -> ProgramKeys | None:
        """Return the first ready way of `ways`, ordered by cost, or None; queue a cheaper one."""
        self._last_step = time.monotonic()
        is_wanted = True
        for way in ways:
            missing = [key for key in way if key not in self._ready]
            if not missing:
                return way
            if is_wanted and all(self._may_try(key) for key in missing):
                for key in missing:
                    self.want(key)
                is_wanted = False
        return None

    def _may_try(self, key: Key) -> bool:
        return self._failures[key] < _MOST_TRIES and self._last_step >= self._rests_until.get(key, 0.0)

    def begin_kept(self, num_threads: int) -> None:
        """Begin to load the stored programs."""
        kept = self.kept
        if kept is not None:
            self.begin([key for key in self.rest if kept.has(key.name, key)], num_threads)

    def begin(self, keys: Sequence[Key], num_threads: int) -> None:
        if not self._threads:
            # Creates weakref's exit hook before `_join`, to run after it: it frees JAX's traced constants, after which
            # tracing fails.
            weakref.finalize(self, self._is_closed.set)
            # A thread in XLA aborts the process at exit. Weak, so that the engine can be collected.
            atexit.register(_join, weakref.WeakMethod(self.join))
        self._metrics.programs_awaited += len(keys)
        with self._lock:
            self._queue += keys
            self._wanted.update(keys)
        for _ in range(min(num_threads, len(keys))):
            self._start(in_background=False)

    def follow(self, num_threads: int, only_when_idle: bool = False) -> None:
        """Compile queued programs in `num_threads` background threads from now on; if `only_when_idle`, while no step
        runs.

        Each takes 20 to 90 MiB of host memory for a deep model (DECISIONS, "Three programs exist before the first
        request").
        """
        self._max_followers = num_threads
        self._only_when_idle = only_when_idle

    def want(self, key: Key) -> None:
        """Queue a program first for the background; ignored before `follow`."""
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
        except RuntimeError as failure:  # steps use the ready programs
            with self._lock:
                self._followers -= 1
            self._put_off(key)
            warnings.warn(f"nothing can be compiled: {failure}", stacklevel=1)

    def wait(self, progress: bool = False) -> None:
        """Wait for the programs passed to `begin`; raise the first failure."""
        noted = time.monotonic()
        total = self._metrics.programs_awaited
        with tqdm(total=total, desc="compiling programs", disable=not progress, leave=False) as bar:
            for thread in self._threads:
                while thread.is_alive():
                    thread.join(0.5)
                    bar.update(len(self) - bar.n)
                    if not progress and time.monotonic() - noted > NOTE_SECONDS:
                        noted = time.monotonic()
                        _log.info("%d of %d programs are ready", len(self), self._metrics.programs_awaited)
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Drop queued compilations; running ones continue."""
        self._is_closed.set()
        with self._lock:
            self._queue.clear()

    def join(self, seconds: float | None = None) -> bool:
        self.close()
        end = None if seconds is None else time.monotonic() + seconds
        for thread in self._threads:
            thread.join(None if end is None else max(0.0, end - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    @property
    def _is_over(self) -> bool:
        """Whether `close` was called, or the interpreter exits, when threads cannot start."""
        return self._is_closed.is_set() or not threading.main_thread().is_alive()

    def _start(self, in_background: bool) -> None:
        with self._lock:  # for `join`
            thread = start_thread(lambda: self._work(in_background), "jaxllm-compile")
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
                program = self._make(key, in_background)
                if program is None:
                    continue
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
            if not in_background or not self._queue:  # takes 30 ms and blocks allocations
                return_freed_memory()

    def _note_failure(self, key: Key, failure: Exception) -> None:
        if self._is_over:
            return
        self._metrics.programs_failed += 1
        if is_exhaustion(failure):
            self._put_off(key)
            _log.warning("program %s could not be compiled for now: %.300s", key, failure)
            return
        self._failures[key] += 1
        if self._failures[key] < _MOST_TRIES:
            _log.info("program %s could not be compiled and is tried again", key, exc_info=failure)
            with self._lock:
                self._queue.append(key)
        else:
            warnings.warn(f"program {key} could not be compiled: {failure}", stacklevel=1)

    def _put_off(self, key: Key) -> None:
        with self._lock:
            self._rests_until[key] = time.monotonic() + RETRY_SECONDS
            self._wanted.discard(key)
            self._queue[:] = [other for other in self._queue if other != key]

    def _make(self, key: Key, in_background: bool) -> Any:
        kept = self.kept
        if kept is not None:
            if in_background and self._only_when_idle and not self._rest(math.inf):
                return None
            program = kept.read(key.name, key)
            if program is not None:
                return program
        lowered = self._trace(key, in_background)
        if lowered is None:
            return None
        compiling = lowered.compile if kept is None else partial(kept.compile, key.name, key, lowered)
        with hidden(self.platform):
            return run_at_idle_priority(compiling) if in_background else compiling()

    def _rest(self, until: float) -> bool:
        """Wait until that time or until no step runs; return False after `close`."""
        while time.monotonic() < min(until, self._last_step + IDLE_SECONDS):
            if self._is_closed.wait(IDLE_SECONDS):
                break
        return not self._is_over

    def _trace(self, key: Key, in_background: bool) -> Any:
        """Trace a program; return None after `close`. In the background rest first: tracing holds the GIL."""
        with self._tracing:  # parallel tracing gains nothing
            if in_background:
                rested = math.inf if self._only_when_idle else self._compiled_until + PAUSE * self._traced_for
                if not self._rest(rested):
                    return None
            start = time.monotonic()
            lowered = self._lower(key)
            self._traced_for = time.monotonic() - start
            self._metrics.trace_seconds += self._traced_for
        return None if in_background and self._is_over else lowered


class Programs(ProgramTable):
    """The programs of a generating engine."""

    def __init__(
        self,
        decode: Sequence[Shape],
        ragged: Sequence[Shape],
        lower: Callable[[Key], Any],
        metrics: Metrics,
        variants: Sequence[Variant] = VARIANTS,
        max_adapters: int = 0,
        verifying: Sequence[Shape] = (),
        drafts: bool = False,
        coarse_factor: int = 2,
    ) -> None:
        """List the programs. Without `decode` shapes ragged programs run every plan.

        `variants` are for one-program steps; `verifying` shapes verify or make drafts. Rare variants have decode sizes
        of powers of `coarse_factor`.
        """
        widest = VARIANTS[-1]
        # The widest sampling, two-part steps and adapters are rare and get fewer sizes. Not verifying shapes, whose
        # sampling takes 4 of the 9 ms of a step of the 0.5B shape.
        ragged, decode, verifying = (
            with_adapters(shapes, max_adapters, not variants) for shapes in (ragged, decode, verifying)
        )
        split = partial(halves, drafts=drafts)
        largest = [split(shapes[-1], widest) for shapes in (ragged, decode) if shapes]
        coarse = [*batch.coarser(ragged), *batch.coarser(decode, coarse_factor)]
        ways: list[ProgramKeys] = []
        for variant in variants:
            ways += [(Key(shape, variant),) for shape in (coarse if variant is widest else [*ragged, *decode])]
            ways += [(Key(shape, variant),) for shape in verifying]
        if variants:
            ways += [split(shape, variant) for shape in coarse for variant in VARIANTS[1:]]
        else:
            ways += [split(shape, widest) for shape in [*ragged, *decode]]
        largest += [(Key(shape, widest),) for shape in verifying[-1:]]
        covering = dict.fromkeys(key for way in largest for key in way)
        super().__init__(list(covering), (key for way in ways for key in way), lower, metrics)
        # The variant's lookup took half the time of `choose`.
        self._by_cost = {
            is_decode: [
                (VARIANTS.index(way[-1].variant), way)
                for way in sorted(ways, key=_cost)
                if way[0].shape in shapes and way[-1].variant is not None
            ]
            for is_decode, shapes in ((True, [*verifying, *(decode or ragged)]), (False, ragged))
        }

    def choose(self, plan: Plan, variant: Variant, is_held: bool = False, num_adapters: int = 0) -> ProgramKeys:
        """Return the cheapest ready way to run a plan with `variant` or a wider one; in two parts if `is_held`."""
        return self.choose_for(batch.extent(plan, num_adapters), variant, is_held)

    def choose_for(self, size: batch.Extent, variant: Variant, is_held: bool) -> ProgramKeys:
        least = VARIANTS.index(variant)
        fitting = (
            way
            for width, way in self._by_cost[not size.tiles]
            if width >= least and not (is_held and len(way) == 1) and batch.fits(size, way[0].shape)
        )
        way = self.first_ready(fitting)
        if way is None:
            raise RuntimeError(f"no program holds {size.rows} rows of {size.tokens} tokens")
        return way


def _join(join: weakref.WeakMethod[Callable[..., bool]]) -> None:
    method = join()
    if method is not None and not method(EXIT_SECONDS):
        print("jaxllm: waiting for a running compilation before the process ends", file=sys.stderr, flush=True)
        method()


def with_adapters(shapes: Sequence[Shape], most: int, only_most: bool) -> list[Shape]:
    """Add shapes with 1, 2, 4, … `most` adapters, the largest last; give all shapes `most` if `only_most`."""
    if only_most or not most or not shapes:
        return [replace(shape, adapters=most) for shape in shapes]
    counts = [1 << power for power in range(most.bit_length()) if 1 << power < most] + [most]
    return [*shapes, *(replace(shape, adapters=count) for count in counts for shape in batch.coarser(shapes))]


def _cost(way: ProgramKeys) -> tuple[int, ...]:
    variant, shape = way[-1].variant, way[0].shape
    return shape.tokens, shape.rows, shape.adapters, -1 if variant is None else VARIANTS.index(variant), len(way)


def _urgency(key: Key) -> tuple[bool, int, int, int]:
    variant, shape = key.variant, key.shape
    return key.part != "step", -1 if variant is None else VARIANTS.index(variant), shape.adapters, -shape.tokens
