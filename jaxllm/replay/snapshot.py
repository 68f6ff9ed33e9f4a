"""A state of the scheduler as plain data that msgpack can write, and back: the beginning of a piece of a recording.

Arrays are bytes, little-endian. Where prompts must not be told, a request's tokens are left out and digests are given
as `hide` returns them.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from jaxllm.scheduler import block_pool
from jaxllm.scheduler.block_pool import Cached, Pool
from jaxllm.scheduler.state import Limits, Plan, Request, Running, Slots, State, Waiting, initial

PLAN_COLUMNS: dict[str, Any] = {"slots": np.intp, "epochs": np.int64, "starts": np.int32, "lengths": np.int32}
PLAN_COLUMNS["samples"] = np.bool_
_LARGEST_BLOCK = 256  # tokens: `EngineConfig.block_size`
Hide = Callable[[bytes], bytes]


def pack_request(request: Request, digests: Sequence[bytes] | None) -> dict[str, Any]:
    """Write a request; with `digests` of its full blocks in place of its tokens."""
    fields: dict[str, Any] = {
        "id": request.id,
        "name": request.name,
        "num_prompt": request.num_prompt,
        "limit": request.limit,
        "stop_ids": list(request.stop_ids),
        "priority": request.priority,
        "reads_cache": request.reads_cache,
    }
    if digests is None:
        return fields | {"salt": request.salt, "tokens": request.tokens.tobytes()}
    return fields | {"is_shared": request.salt is not None, "size": len(request.tokens), "digests": list(digests)}


def unpack_request(fields: Mapping[str, Any]) -> Request:
    """Read what `pack_request` wrote. Tokens that are not told are zeros."""
    digests: list[bytes] | None = None
    if "tokens" in fields:
        tokens, salt = array("i", fields["tokens"]), fields["salt"]
    else:
        size, digests = int(fields["size"]), list(fields["digests"])
        if not 0 <= size < (len(digests) + 1) * _LARGEST_BLOCK:  # of blocks that are not full there is one at most
            raise ValueError("a request has more tokens than its blocks hold")
        tokens = array("i", bytes(4 * size))
        salt = str(fields["id"]).encode() if fields["is_shared"] else None  # which requests share, digests tell
    return Request(
        id=int(fields["id"]),
        tokens=tokens,
        num_prompt=int(fields["num_prompt"]),
        limit=int(fields["limit"]),
        stop_ids=tuple(map(int, fields["stop_ids"])),
        priority=int(fields["priority"]),
        salt=salt,
        reads_cache=bool(fields["reads_cache"]),
        name=str(fields["name"]),
        digests=digests,
    )


def pack_state(
    state: State, plans: Iterable[Plan], requests: Sequence[Mapping[str, Any]], hide: Hide
) -> dict[str, Any]:
    """Write a state, the plans whose tokens are still to come, and the requests that it names, already packed."""
    pool = state.pool
    index = sorted(((hide(digest), block) for digest, block in pool.index.items()), key=lambda entry: entry[1])
    cached = list(block_pool.cached_entries(pool))
    return {
        "requests": list(requests),
        "waiting": [[w.request.id, w.order, w.known, list(map(hide, w.digests))] for w in state.waiting],
        "running": [r and [r.request.id, r.order, list(map(hide, r.digests))] for r in state.running],
        "slots": {name: column.tobytes() for name, column in state.slots._asdict().items()},
        "tables": [_bytes(table) for table in state.tables],
        "references": pool.references.tobytes(),
        "stamps": pool.stamps.tobytes(),
        "free": pool.free.tobytes(),
        "index": [b"".join(digest for digest, _ in index), _bytes([block for _, block in index])],
        "cached": [
            _bytes([entry.block for entry in cached]),
            b"".join(hide(entry.digest) for entry in cached),
            _bytes([entry.stamp for entry in cached]),
        ],
        "counts": [state.num_added, state.num_admitted, state.num_planned],
        "plans": [
            {"number": plan.number, "num_decodes": plan.num_decodes}
            | {name: getattr(plan, name).astype(kind).tobytes() for name, kind in PLAN_COLUMNS.items()}
            for plan in plans
        ],
    }


def unpack_state(data: Mapping[str, Any], limits: Limits) -> tuple[State, list[Plan], dict[int, Request]]:
    """Read what `pack_state` wrote; ValueError or KeyError for what cannot be one."""
    _array(data["references"], np.int16, limits.num_blocks)  # before anything of a size that a file only claims
    requests = {request.id: request for request in map(unpack_request, data["requests"])}
    empty = initial(limits)
    columns = {
        name: _array(data["slots"][name], column.dtype, len(column)) for name, column in empty.slots._asdict().items()
    }
    slots = Slots(**columns)
    pool = _unpack_pool(data, limits)
    num_added, num_admitted, num_planned = map(int, data["counts"])
    state = State(
        waiting=tuple(
            Waiting(requests[number], order, known, tuple(digests)) for number, order, known, digests in data["waiting"]
        ),
        slots=slots,
        running=tuple(entry and Running(requests[entry[0]], entry[1], tuple(entry[2])) for entry in data["running"]),
        tables=tuple(tuple(_array(table, np.int32).tolist()) for table in data["tables"]),
        pool=pool,
        num_added=num_added,
        num_admitted=num_admitted,
        num_planned=num_planned,
    )
    taken = [record is not None for record in state.running]
    if (
        len(taken) != limits.num_slots
        or len(state.tables) != limits.num_slots
        or (slots.epochs != 0).tolist() != taken
        or any(not 0 <= block < limits.num_blocks for table in state.tables for block in table)
    ):
        raise ValueError("the slots do not fit together")
    plans = []
    for plan in data["plans"]:
        arrays: dict[str, Any] = {name: _array(plan[name], kind) for name, kind in PLAN_COLUMNS.items()}
        table = np.zeros((0, 3), np.int32)
        plans.append(Plan(now=0.0, num_decodes=plan["num_decodes"], table=table, number=plan["number"], **arrays))
    return state, plans, requests


def _unpack_pool(data: Mapping[str, Any], limits: Limits) -> Pool:
    num_blocks = limits.num_blocks
    digests, numbers = data["index"][0], _array(data["index"][1], np.int32)
    cached, cached_digests, stamps = data["cached"]
    entries = tuple(
        Cached(block, digest, stamp)
        for block, digest, stamp in zip(
            _array(cached, np.int32).tolist(),
            _cut(cached_digests, len(cached) // 4),
            _array(stamps, np.int32).tolist(),
            strict=True,
        )
    )
    free = _array(data["free"], np.int32)
    for some in (free, numbers, np.asarray([entry.block for entry in entries], np.int32)):
        if len(some) > num_blocks or (len(some) and not 0 <= int(some.min()) <= int(some.max()) < num_blocks):
            raise ValueError("a block is not of the pool")
    return Pool(
        references=_array(data["references"], np.int16, num_blocks),
        stamps=_array(data["stamps"], np.int32, num_blocks),
        free=free,
        num_cached=len(entries),
        num_entries=len(entries),
        oldest=block_pool.make_queue(entries),
        newest=None,
        shards=block_pool.make_shards(zip(_cut(digests, len(numbers)), numbers.tolist(), strict=True), num_blocks),
    )


def unpack_limits(data: Mapping[str, Any]) -> Limits:
    """Read the limits of a recording; ValueError where a number is none or out of range."""
    known = asdict(Limits(num_slots=1, num_blocks=1, block_size=1, max_step_tokens=1, max_step_chunks=1))
    if data.keys() != known.keys():
        raise ValueError("the limits are those of another version")
    for name, value in data.items():
        if type(value) is not type(known[name]) or not 0 <= value <= 2**24:
            raise ValueError(f"{name} is {value!r}")
    if not 1 <= data["num_slots"] <= 2**14 or not 1 <= data["block_size"] or not 1 <= data["num_blocks"]:
        raise ValueError("there are no slots or no blocks")
    # What has entered and left the prefix cache is of no use here, and nobody would take it.
    return Limits(**{**data, "records_blocks": False})


def _bytes(numbers: Sequence[int]) -> bytes:
    return np.asarray(numbers, np.int32).tobytes()


def _array(data: bytes, kind: Any, size: int | None = None) -> np.ndarray:
    """Read an array, which nobody can write to; ValueError where it has another size."""
    read = np.frombuffer(data, np.dtype(kind))
    if size is not None and len(read) != size:
        raise ValueError("an array has another size")
    return read


def _cut(joined: bytes, count: int) -> list[bytes]:
    """Divide digests that were written end to end."""
    if not count:
        return []
    size, rest = divmod(len(joined), count)
    if rest or size < 2:
        raise ValueError("digests have no size")
    return [joined[start : start + size] for start in range(0, len(joined), size)]


if sys.byteorder != "little":  # every machine that JAX runs on
    raise ImportError("recordings are little-endian")
