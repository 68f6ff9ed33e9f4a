"""Check running totals of the product against fresh sums after every call that may change them.

`watch` wraps the methods of the classes in `ACCOUNTS` for the whole run. A difference raises an exception and is added
to `differences`, which `conftest.py` checks after every test, because some callers only log exceptions. The sum over no
objects is zero, so a total that does not return to zero is found as well.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np

Account = tuple[str, Any, Any]  # name, value, expected sum
differences: list[str] = []
_watched: set[str] = set()
_calls = threading.local()
_unsettled: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()  # requests by inbox


def _of_inbox(inbox: Any) -> Iterator[Account]:
    own = _unsettled.get(inbox, ())
    yield "sequences", inbox._num_sequences, sum(each.num_sequences for each in own)
    yield "tokens", inbox._num_tokens, sum(each.num_sequences * len(each.prompt_token_ids) for each in own)


def _of_streams(table: Any) -> Iterator[Account]:
    streams = [*table._by_internal_id.values()]
    awaited = sum(not stream.is_over for stream in streams)
    yield "streams awaited", table._num_awaited, awaited
    yield "whether none is awaited", table._quiet.is_set(), not awaited
    yield "whether all readers have gone", table._idle.is_set(), not streams
    yield "streams by the caller's id", sum(map(len, table._by_id.values())), len(streams)


def _of_blocks(log: Any) -> Iterator[Account]:
    yield "events", log._num_events, sum(len(batch.events) for batch in log._batches)


def _of_threads(threads: Any) -> Iterator[Account]:
    running = sum(threads._running.values())
    yield "free and running threads", threads._num_free + running, threads._pool._max_workers
    yield "clients without a running thread", [name for name, count in threads._running.items() if count < 1], []
    yield "clients without a turn", [name for name, turns in threads._waiting.items() if not turns], []


def _of_replica(replica: Any) -> Iterator[Account]:
    yield "tokens", replica.num_tokens, sum(live.num_tokens for live in replica.live.values())


def _of_bound(bound: Any) -> Iterator[Account]:
    yield "what is under way", bound.total, sum(bound.held.values())
    yield "holders of nothing, or less", [name for name, count in bound.held.items() if count < 1], []


def _of_store(store: Any) -> Iterator[Account]:
    due = {client: sum(each.size for each in kept.values()) for client, kept in store.kept.items()}
    yield "bytes", store.num_bytes, sum(due.values())
    yield "bytes by client", store.held, {client: count for client, count in due.items() if count}


def _of_grammars(grammars: Any) -> Iterator[Account]:
    num_chars = sys.modules["jaxllm.structured_output.grammars"]._num_chars
    with grammars._lock:
        yield "characters", grammars._kept_chars, sum(map(num_chars, grammars._kept))
        yield "bytes", grammars._kept_bytes, sum(kept.num_bytes for kept in grammars._kept.values())


def _of_masks(masks: Any) -> Iterator[Account]:
    with masks._changed:
        queued = sum(map(len, masks._waiting.values()))
        yield "masks being made", 0 <= masks._num_undone - queued <= len(masks._threads), True


def _of_scheduler(core: Any) -> Iterator[Account]:
    state = core.state
    for pool, tables in ((state.pool, (*state.tables, *state.sources)), (state.window_pool, state.window_tables)):
        if pool is None:
            continue
        named = [block for table in tables for block in table]
        counts = np.bincount(np.asarray(named, np.int64), minlength=pool.num_blocks)
        yield "references of blocks", bool((pool.references == counts).all()), True
        yield "cached blocks and free ones", pool.num_cached + len(pool.free), int(np.count_nonzero(counts == 0))
    yield "requests", len(core.requests), len(state.waiting) + state.num_running
    if state.num_running:
        sizes = np.fromiter(map(len, state.tables), np.int64, len(state.tables)) * core.limits.block_size
        yield "room of slots", bool((state.slots.capacity == sizes).all()), True


def _of_engine(engine: Any) -> Iterator[Account]:
    for rank in getattr(engine, "ranks", (engine,)):
        state = rank.scheduler.state
        if rank._counted is state.waiting:
            yield "waiting tokens", rank._waiting_tokens, sum(entry.num_tokens for entry in state.waiting)
        own = [each.sequence_id for group in rank.outputs.groups.values() for each in group.sequences]
        yield "sequences without a request", sorted({*rank.outputs.sequences} - {*own}), []


ACCOUNTS: dict[str, Callable[[Any], Iterator[Account]]] = {
    "jaxllm.engine.inbox.Inbox": _of_inbox,
    "jaxllm.engine.output_streams.StreamTable": _of_streams,
    "jaxllm.engine.kv_events.BlockLog": _of_blocks,
    "jaxllm.engine.fair_threads.FairThreads": _of_threads,
    "jaxllm.engine.engine_core.EngineCore": _of_engine,
    "jaxllm.fleet.replica.Replica": _of_replica,
    "jaxllm.scheduler.recorded.RecordedScheduler": _of_scheduler,
    "jaxllm.structured_output.grammars.Grammars": _of_grammars,
    "jaxllm.structured_output.slow_masks.SlowMasks": _of_masks,
    "jaxllm_server.access.client_quota.Bound": _of_bound,
    "jaxllm_server.responses.store.ResponseStore": _of_store,
}


def watch() -> None:
    """Wrap the methods of all classes imported so far."""
    for name in ACCOUNTS.keys() - _watched:
        module, _, kind = name.rpartition(".")
        if module in sys.modules and hasattr(sys.modules[module], kind):
            _watched.add(name)
            _wrap(getattr(sys.modules[module], kind), ACCOUNTS[name])


def _wrap(kind: type, accounts: Callable[[Any], Iterator[Account]]) -> None:
    for name, function in [*vars(kind).items()]:
        is_plain = inspect.isfunction(function) and not inspect.iscoroutinefunction(inspect.unwrap(function))
        if is_plain and not inspect.isgeneratorfunction(inspect.unwrap(function)) and not name.startswith("__"):
            setattr(kind, name, _watching(function, accounts))


def _watching(function: Callable[..., Any], accounts: Callable[[Any], Iterator[Account]]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(self: Any, *args: Any, **options: Any) -> Any:
        inside: set[int] = _calls.__dict__.setdefault("inside", set())
        if id(self) in inside:  # a nested call: the outer method has not finished
            return function(self, *args, **options)
        inside.add(id(self))
        is_put = accounts is _of_inbox and function.__name__ in ("add", "settle")
        with self._changed if is_put else nullcontext():
            try:
                result = function(self, *args, **options)
            finally:
                inside.remove(id(self))
            if is_put:
                _note_put(self, function.__name__, args[0])
            due_now = [*accounts(self)] if is_put or accounts is not _of_inbox else []
        wrong = [f"{name}: {kept}, where {due} is due" for name, kept, due in due_now if kept != due]
        if wrong:
            differences.append(f"{type(self).__name__} after {function.__name__}: {'; '.join(wrong)}")
            raise AssertionError(differences[-1])
        return result

    return call


def _note_put(inbox: Any, name: str, given: Any) -> None:
    """Record the requests in an inbox until they are settled."""
    own = _unsettled.setdefault(inbox, [])
    own[:] = [*own, given] if name == "add" else [each for each in own if all(each is not one for one in given)]
