"""What becomes of CUDA graphs while a model decodes: how often one is changed, and how often a call is captured again.

A graph whose buffers have other addresses than in the step before is changed before it is launched; a call whose
buffers are not among the sixteen sets that XLA remembers is captured anew, 20 to 50 us each. XLA tells neither but in
its log, which is what is read here.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from jaxllm.config import EngineArgs
from jaxllm.engine.llm_engine import LLMEngine
from tests.benchmarks import overlap
from tests.benchmarks.bare import compile_greedy, packed_steps, replay
from tests.gpu_check import models
from tests.gpu_check.check import Check

# Read by the CUDA plugin when it is loaded, which is when JAX first looks for devices.
VERBOSE = {
    "TF_CPP_MIN_LOG_LEVEL": "0",
    "TF_CPP_VMODULE": "command_buffer_thunk=3,command_buffer_cmd=6,command=6,traced_command_buffer=6",
}
LAUNCHED, CHANGED = "Execute command buffer on device", r"Updated command buffer in (\d+)"
CAPTURED = "Command buffer trace cache create new item"


class Graphs(NamedTuple):
    """What XLA's log says of CUDA graphs."""

    launched: int
    changed: int
    captured: int  # calls of kernels, again
    microseconds: float  # that a change took

    @classmethod
    def of(cls, log: str) -> Graphs:
        """Count lines of a log."""
        changes = [int(taken) for taken in re.findall(CHANGED, log)]
        taken = sum(changes) / max(len(changes), 1)
        return cls(log.count(LAUNCHED), len(changes), log.count(CAPTURED), taken)


def run(check: Check) -> None:
    os.environ.update(VERBOSE)  # of this part's own process
    for name in ("Llama-3.1-8B",) if check.is_dry else ("Llama-3.1-8B", "Qwen2.5-0.5B"):
        if check.is_over(30, name):
            continue
        with check.guarded(name), tempfile.TemporaryDirectory() as folder:
            _measure(check, name, Path(folder))


def _measure(check: Check, name: str, folder: Path) -> None:
    config = models.tiny(models.CONFIGS[name]) if check.is_dry else models.CONFIGS[name]
    dtype = "float32" if check.is_dry else "bfloat16"
    models.write_config(config, folder, dtype)
    settings: dict[str, Any] = {"max_model_len": 512, "max_num_seqs": overlap.ROWS, "num_kv_blocks": 4096}
    engine = LLMEngine(
        EngineArgs(model=str(folder), dtype=dtype, load_format="dummy", precompile="covering", **settings)
    )
    try:
        compile_greedy(engine, [overlap.ROWS], [])
        with packed_steps() as steps:
            overlap.measure(engine, bare=0.0)
        decodes = [step for step in steps if step.key.shape.is_decode and len(step.plan.slots) == overlap.ROWS]
        replay(engine, decodes[:8])  # the first one of a program runs without a graph, the second one makes it
        with tempfile.TemporaryFile("w+") as log, written_to(log.fileno()):
            replay(engine, decodes)
            log.seek(0)
            found = Graphs.of(log.read())
    finally:
        engine.close()
    if check.is_dry:
        return  # a CPU has no graphs
    if not found.launched:
        check.fail(f"{name}: XLA's log tells of no CUDA graph that was launched, so none is counted")
        return
    count = len(decodes)
    check.measure(
        graphs=name,
        steps=count,
        launched=found.launched / count,
        changed=found.changed / count,
        change_microseconds=found.microseconds,
        captured_again=found.captured / count,
    )
    check.target(f"{name}, calls captured again in a step", found.captured / count, 0.0, is_least=False)


@contextmanager
def written_to(descriptor: int) -> Iterator[None]:
    """Have what this process writes to its standard error, in any language, go to a file."""
    kept = os.dup(2)
    os.dup2(descriptor, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
