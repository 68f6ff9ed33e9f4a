"""The compiled programs: which there are, which are ready, and the threads that compile them.

An engine serves as soon as its *covering* programs exist: one decode and one ragged program, the largest of each with
the widest sampling, which between them can run any plan. The others follow in the background; a plan runs in the
smallest ready program that holds it. Knows shapes and how to call `compile`; knows no weights and no state.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jaxllm import batch
from jaxllm.batch import Shape
from jaxllm.metrics import Metrics
from jaxllm.sampling import Variant
from jaxllm.scheduler import Plan

VARIANTS = tuple(Variant)
STACK_BYTES = 64 << 20  # of a compiling thread; deep models overflow the usual 8 MiB (reference/peers.md §2)


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
        compile_one: Callable[[Key], Any],
        metrics: Metrics,
    ) -> None:
        self.covering = [Key(ragged[-1], VARIANTS[-1]), Key(decode[-1], VARIANTS[-1])]
        everything = [Key(shape, variant) for variant in VARIANTS for shape in [*ragged, *decode]]
        # Larger programs serve more while they are the only ones; among equals, the usual sampling comes first.
        self.rest = sorted((key for key in everything if key not in self.covering), key=_urgency)
        self._compile_one = compile_one
        self._metrics = metrics
        self._ready: dict[Key, Any] = {}
        self._order: dict[bool, list[Key]] = {True: [], False: []}  # of the ready ones, by is_decode and cost
        self._lock = threading.Lock()
        self._queue: deque[Key] = deque()
        self._failure: BaseException | None = None
        self._threads: list[threading.Thread] = []

    def __getitem__(self, key: Key) -> Any:
        return self._ready[key]

    def __len__(self) -> int:
        return len(self._ready)

    @property
    def num_all(self) -> int:
        """Programs there will be in the end."""
        return len(self.covering) + len(self.rest)

    def choose(self, plan: Plan, variant: Variant) -> Key:
        """Name the cheapest ready program that holds the plan and samples as widely as `variant`."""
        is_decode = plan.num_decodes == len(plan.slots)
        for key in self._order[is_decode]:
            if VARIANTS.index(key.variant) >= VARIANTS.index(variant) and batch.fits(plan, key.shape):
                return key
        raise AssertionError(f"no program holds {len(plan.slots)} rows of {plan.num_tokens} tokens")

    def begin(self, keys: Sequence[Key], num_threads: int) -> None:
        """Start to compile `keys`; `wait` ends it."""
        self._start(keys, num_threads)

    def compile(self, keys: Sequence[Key], num_threads: int) -> None:
        """Compile `keys` and wait for them; the first failure is raised here."""
        self._start(keys, num_threads)
        self.wait()

    def compile_in_background(self, num_threads: int) -> None:
        """Compile the rest while the engine serves; a failure is kept for `wait`, what is ready goes on serving."""
        self._start(self.rest, num_threads)
        # A thread must not be inside XLA while the interpreter goes down: stop at exit, after the current program.
        atexit.register(self.close)

    def wait(self) -> None:
        """Wait until every program that was asked for is compiled."""
        for thread in self._threads:
            thread.join()
        self._threads.clear()
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Compile nothing more; returns once the programs being compiled are done."""
        self._queue.clear()
        for thread in self._threads:
            thread.join()
        atexit.unregister(self.close)

    def _start(self, keys: Sequence[Key], num_threads: int) -> None:
        self._queue.extend(keys)
        before = threading.stack_size(STACK_BYTES)
        try:
            for number in range(min(num_threads, len(keys))):
                thread = threading.Thread(target=self._work, name=f"jaxllm-compile-{number}", daemon=True)
                self._threads.append(thread)
                thread.start()
        finally:
            threading.stack_size(before)

    def _work(self) -> None:
        while self._failure is None:
            try:
                key = self._queue.popleft()
            except IndexError:
                return
            start = time.perf_counter()
            try:
                program = self._compile_one(key)
            except Exception as failure:
                self._failure = failure
                return
            with self._lock:
                self._metrics.programs_compiled += 1
                self._metrics.compile_seconds += time.perf_counter() - start
                self._ready[key] = program
                # A new list, so that `choose` never walks one that is being changed.
                ordered = sorted([*self._order[key.shape.is_decode], key], key=lambda other: other.cost)
                self._order[key.shape.is_decode] = ordered


def _urgency(key: Key) -> tuple[int, int]:
    return VARIANTS.index(key.variant), -key.shape.tokens
