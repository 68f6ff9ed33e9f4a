"""Changes of CUDA graphs during decoding: updates, and calls that are captured again.

A graph with other buffer addresses than in the previous step is updated before its launch; a call with buffers outside
the sixteen sets that XLA remembers is captured again, 20 to 50 us each. XLA reports both only in its log, which is read
here.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from benchmarks.bare import replay
from jaxllm import LLM
from tests.gpu_check import shape8b
from tests.gpu_check.check import Check

LAUNCHED, CHANGED = "Execute command buffer", r"Updated command buffer in (\d+)"
CAPTURED = "Command buffer trace cache create new item"


class Graphs(NamedTuple):
    """Counts of CUDA graph events in XLA's log."""

    launched: int
    changed: int
    captured: int  # kernel calls, again
    microseconds: float  # per update

    @classmethod
    def of(cls, log: str) -> Graphs:
        """Count the events in a log."""
        changes = [int(taken) for taken in re.findall(CHANGED, log)]
        taken = sum(changes) / max(len(changes), 1)
        return cls(log.count(LAUNCHED), len(changes), log.count(CAPTURED), taken)


ROWS, DRY_ROWS = (1, 64), (1, 8)
CONTEXT, DRY_CONTEXT = 1024, 48
STEPS = 16


def run(check: Check) -> None:
    shape = shape8b.write(check)
    all_rows, context = (DRY_ROWS, DRY_CONTEXT) if check.is_dry else (ROWS, CONTEXT)
    with shape8b.start(check, shape) as llm:
        shape8b.compile_sizes(check, llm, all_rows, [shape.sizes["max_num_batched_tokens"]])
        for rows in all_rows:
            with check.guarded(f"{rows} rows", is_wrong=True):
                _count(check, llm, rows, context)


def _count(check: Check, llm: LLM, rows: int, context: int) -> None:
    """Run decode steps and count the graphs in XLA's log."""
    step = shape8b.decode_step(llm.engine, rows, context)
    replay(llm.engine, [step] * 4)  # the first run of a program is without a graph, the second one makes it
    with tempfile.TemporaryFile("w+") as log, written_to(log.fileno()):
        replay(llm.engine, [step] * STEPS)
        log.seek(0)
        text = log.read()
    note(check, rows, Graphs.of(text), len(text))


def note(check: Check, rows: int, found: Graphs, characters: int) -> None:
    """Record the counts of a log; a CPU has no graphs, and its log is empty."""
    if not found.launched and not check.is_dry:
        check.fail(f"{rows} rows: XLA's log, {characters} characters, has no CUDA graph that was launched")
        return
    captured = found.captured / STEPS
    check.measure(
        rows=rows,
        steps=STEPS,
        launched=found.launched / STEPS,
        changed=found.changed / STEPS,
        change_microseconds=found.microseconds,
        captured_again=captured,
    )
    check.target(f"{rows} rows, calls captured again in a step", captured, 0.0, is_least=False)


@contextmanager
def written_to(descriptor: int) -> Iterator[None]:
    """Redirect this process's standard error, in any language, to a file."""
    kept = os.dup(2)
    os.dup2(descriptor, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
