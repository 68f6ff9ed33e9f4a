"""Functions that read and change the inside of an engine, for tests and measurements.

`tests/test_source.py` keeps the product's private names out of all other tests, except for the few in its list.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax

from jaxllm.engine.async_llm import AsyncLLM
from jaxllm.engine.features.adapters.store import Adapters
from jaxllm.engine.input_batch import InputBatch
from jaxllm.engine.llm_engine import LLMEngine
from jaxllm.outputs import RequestOutput
from jaxllm.runner.compiled_programs import Key, Programs
from jaxllm.runner.model_runner import Runner
from jaxllm.scheduler.state import Plan
from jaxllm.structured_output.grammars import Grammars
from jaxllm.structured_output.slow_masks import SlowMasks

# The runner.


def params_of(runner: Runner) -> tuple[Any, ...]:
    """Return the weights as the programs take them."""
    return runner._params


def named_params_of(runner: Runner) -> Any:
    """Return the weights as the object that a step is traced with."""
    return jax.tree.unflatten(jax.tree.structure(runner._params_shapes), runner._params)


def set_params(runner: Runner, params: Any) -> None:
    """Give the programs other weights, in any tree."""
    runner._params = tuple(jax.tree.leaves(params))


def arrays_of(runner: Runner) -> tuple[Any, ...]:
    """Return the device's state as the programs take it."""
    return runner._state


def state_of(runner: Runner) -> Any:
    """Return the device's state as the object that a step is traced with."""
    return jax.tree.unflatten(jax.tree.structure(runner._state_shapes), runner._state)


def set_state(runner: Runner, state: Any) -> None:
    """Replace the device's state; None frees it."""
    runner._state = tuple(jax.tree.leaves(state))


def lose_state(runner: Runner) -> None:
    """Delete the donated state, as a failing program does."""
    for leaf in runner._state:
        leaf.delete()


def patch_tables(runner: Runner, table: Any) -> None:
    """Write entries of the block table, as an admission does."""
    runner._state = runner._small.patch(runner._state, table, None)


def fitted(runner: Runner, buffer: Any, key: Key) -> Any:
    """Return a packed step as the program's argument, with room for its results."""
    return runner._with_room(buffer, key)


def lowered(runner: Runner, key: Key) -> Any:
    """Trace a program."""
    return runner._lower(key)


def dispatch(runner: Runner, steps: Iterable[tuple[Any, Any]]) -> Any:
    """Dispatch programs with their buffers in order; return the last result."""
    joined = None
    for program, buffer in steps:
        runner._state, joined = program(runner._params, runner._state, buffer)
    return joined


def exchange_programs(programs: Programs, ready: dict[Key, Any]) -> None:
    """Replace compiled programs by other callables."""
    programs._ready.update(ready)


def drop_queue(programs: Programs) -> int:
    """Empty the queue of programs to compile; return its length."""
    with programs._lock:
        left = len(programs._queue)
        programs._queue.clear()
    return left


# The engine.


def batch_of(engine: LLMEngine) -> InputBatch:
    """Return the sequences by slot."""
    return engine._batch


def planned_by(engine: LLMEngine) -> Plan | None:
    """Return the plan that is being committed."""
    return engine._planned


def is_in_flight(engine: LLMEngine) -> bool:
    """Whether a step runs on the device."""
    return bool(engine._in_flight)


def set_depth(engine: LLMEngine, depth: int) -> int:
    """Set the number of steps in flight; return the former one."""
    before, engine._depth = engine._depth, depth
    return before


def random_state_of(engine: LLMEngine) -> Any:
    """Return the state of the generator that draws the seeds of requests."""
    return engine.inputs.random.bit_generator.state


def num_preparing(llm: AsyncLLM) -> int:
    """Count the sequences with prompts that are being made."""
    return llm._num_preparing


def readers_of(adapters: Adapters) -> dict[int, int]:
    """Count the requests that wait for adapters that are being read, by the caller's number."""
    return {number: len(readers) for number, readers in list(adapters._readers.items())}


def num_processes(adapters: Adapters) -> int:
    """Count the processes in which the tokenizers of adapters work."""
    return adapters._confinement.num_processes


def forgive(engine: LLMEngine) -> None:
    """Reset the count of failed steps."""
    engine._failed_steps.reset()


def set_recorder(engine: LLMEngine, recorder: Any) -> None:
    """Replace the recorder; None ends the recording."""
    engine.scheduler._recorder = recorder


def serve_without_a_device(llm: AsyncLLM, engine: LLMEngine, inbox: Any) -> None:
    """Let an engine accept requests without a start; `inbox` answers them."""
    llm._engine, llm._queue, llm._inbox = engine, inbox, inbox
    llm._life.on("ready")


def set_loop(llm: AsyncLLM, loop: Any) -> None:
    """Set the loop that outputs are delivered to."""
    llm._loop = loop


def deliver(llm: AsyncLLM, outputs: list[RequestOutput]) -> None:
    """Hand outputs to their readers, as the engine's thread does."""
    llm._deliver(outputs, None)


# Grammars.


def bytes_kept_by(grammars: Grammars) -> int:
    """Return the estimated memory of the grammars that are kept."""
    return grammars._kept_bytes


def unfinished(masks: SlowMasks) -> tuple[int, int, int]:
    """Count the queues of masks that wait, the masks that are not finished, and the threads."""
    with masks._changed:
        return len(masks._waiting), masks._num_undone, len(masks._threads)
