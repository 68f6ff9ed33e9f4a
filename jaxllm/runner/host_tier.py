"""The host's tier of KV blocks: programs that read and write blocks, and a thread for copies to the host.

A step overwrites evicted blocks of the donated cache, so a program reads them into new arrays first.

A row is the content of a block: one array per kind of leaf (shape and type), stacked over the kind's leaves. Rows are
immutable: a host block may be evicted during its load. B blocks of one call, n leaves of a kind.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from queue import SimpleQueue
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxllm.metrics import Metrics
from jaxllm.model.spec import Spec
from jaxllm.runner.device_state import DeviceState
from jaxllm.runner.row_layout import Row
from jaxllm.runner.step_model import Leaves, StepModel
from jaxllm.scheduler.host_tier import HOST, Landed
from jaxllm.setup.kv_cache import MOST_LOADED, Geometry, host_memory_kind, leaves_by_group

MOVED_BLOCKS = 16  # B
STORE_PROGRAMS = ("store_blocks", "store_windowed_blocks")  # by group
LOAD_PROGRAMS = ("load_blocks", "load_windowed_blocks")
CLOSE_SECONDS = 10.0
Key = tuple[int, int, int]  # of a store: plan, group, block of the host
_log = logging.getLogger(__name__)


class Copied(NamedTuple):
    """A finished copy."""

    key: Key
    row: Row | None  # in the host's memory; None: failed


class Copies(Protocol):
    """Asynchronous copies of rows to the host; no method blocks."""

    def begin(self, copies: Sequence[tuple[Key, Row]]) -> None:
        """Start copying rows to the host."""

    def ended(self) -> Sequence[Copied]:
        """Return the copies that ended since the last call."""
        ...

    def close(self) -> None:
        """End the thread."""


class ThreadedCopies:
    """Copies rows in one thread, in order."""

    def __init__(self, copied: Callable[[Key, Row], None] | None = None) -> None:
        """`copied` is called in the thread after each success."""
        self._copied = copied
        self._asked: SimpleQueue[Sequence[tuple[Key, Row]] | None] = SimpleQueue()
        self._ended: deque[Copied] = deque()
        self._thread = threading.Thread(target=self._run, name="jaxllm-host-tier", daemon=True)
        self._thread.start()

    def begin(self, copies: Sequence[tuple[Key, Row]]) -> None:
        self._asked.put(copies)

    def ended(self) -> Sequence[Copied]:
        return [self._ended.popleft() for _ in range(len(self._ended))]

    def close(self) -> None:
        self._asked.put(None)
        self._thread.join(CLOSE_SECONDS)

    def _run(self) -> None:
        while (copies := self._asked.get()) is not None:
            keys = [key for key, _ in copies]
            try:
                rows = jax.block_until_ready(to_host([row for _, row in copies]))
                self._ended.extend(map(Copied, keys, rows))
                if self._copied is not None:
                    for key, row in zip(keys, rows, strict=True):
                        self._copied(key, row)
            except Exception as error:  # a later hit recomputes these blocks
                _log.warning("%d KV blocks could not be copied to the host: %s", len(keys), error)
                self._ended.extend(Copied(key, None) for key in keys)


def to_host(rows: Sequence[Row]) -> list[Row]:
    return jax.device_put(list(rows), jax.tree.map(on_host, list(rows)))


def on_host(array: jax.Array | jax.ShapeDtypeStruct) -> NamedSharding:
    assert isinstance(array.sharding, NamedSharding)
    (device, *_) = array.sharding.device_set
    return array.sharding.with_memory_kind(host_memory_kind(device))


def to_device(rows: Sequence[Row]) -> list[Row]:
    def here(array: jax.Array) -> NamedSharding:
        assert isinstance(array.sharding, NamedSharding)
        return array.sharding.with_memory_kind("device")

    return jax.device_put(list(rows), jax.tree.map(here, list(rows)))


class HostTier:
    """Moves blocks between device and host. `kv` has each group's indices of leaves in the state."""

    def __init__(
        self,
        programs: Mapping[str, Callable[..., Any]],
        kv: Sequence[Sequence[int]],
        geometry: Geometry,
        copies: Copies,
        metrics: Metrics,
        put: Callable[[Sequence[Row]], Sequence[Row]] | None = None,
    ) -> None:
        self._programs = programs
        self._kv = kv
        self._geometry = geometry
        self._copies = copies
        self._metrics = metrics
        self._put = put
        self._rows: dict[tuple[int, int], Row] = {}  # by group and host block
        self._newest: dict[tuple[int, int], int] = {}  # plan of the block's last store

    def move(self, state: Leaves, moves: np.ndarray, plan: int) -> Leaves:
        """Dispatch a plan's copies, stores before loads; return the device's new state."""
        stores = moves[moves[:, 3] == HOST]
        for group, own in enumerate(self._kv):
            pairs = stores[stores[:, 0] == group][:, [2, 4]]
            for start in range(0, len(pairs), MOVED_BLOCKS):
                piece = pairs[start : start + MOVED_BLOCKS].tolist()
                blocks = np.zeros(MOVED_BLOCKS, np.int32)
                blocks[: len(piece)] = [block for block, _ in piece]
                rows = self._programs[STORE_PROGRAMS[group]](tuple(state[at] for at in own), blocks)
                for _, there in piece:
                    self._rows.pop((group, there), None)
                    self._newest[group, there] = plan
                self._copies.begin([((plan, group, there), row) for (_, there), row in zip(piece, rows, strict=False)])
        loads = moves[moves[:, 1] == HOST]
        return self._load(state, loads) if len(loads) else state

    def landed(self) -> list[Landed]:
        """Return the stores that ended since the last call, whose blocks can be loaded now."""
        landed: list[Landed] = []
        for (plan, group, there), row in self._copies.ended():
            # After a reset the block may have a newer store.
            if row is not None and self._newest.get((group, there)) == plan:
                self._rows[group, there] = row
            landed.append(Landed(plan, group, there, row is not None))
            self._metrics.offloaded_blocks += row is not None
            self._metrics.offload_failures += row is None
        return landed

    def forget(self) -> None:
        """Free all rows, and drop copies in progress; the scheduler's record of them must be reset."""
        self.landed()
        self._rows.clear()
        self._newest.clear()

    def receive(self, group: int, there: int, row: Row) -> None:
        """Put content from elsewhere into a host block."""
        self._rows[group, there] = row
        self._newest.pop((group, there), None)  # a copy from before a reset must not replace it

    def close(self) -> None:
        self._copies.close()
        self._rows.clear()

    def _load(self, state: Leaves, loads: np.ndarray) -> Leaves:
        leaves = list(state)
        for group, own in enumerate(self._kv):
            pairs = loads[loads[:, 0] == group][:, [2, 4]]
            for start in range(0, len(pairs), MOVED_BLOCKS):
                piece = pairs[start : start + MOVED_BLOCKS].tolist()
                targets = self._geometry.array_blocks(group) + np.arange(MOVED_BLOCKS, dtype=np.int32)
                targets[: len(piece)] = [block for _, block in piece]
                rows = list((self._put or to_device)([self._rows[group, there] for there, _ in piece]))
                rows += rows[:1] * (MOVED_BLOCKS - len(rows))
                written = self._programs[LOAD_PROGRAMS[group]](tuple(leaves[at] for at in own), targets, tuple(rows))
                for at, leaf in zip(own, written, strict=True):
                    leaves[at] = leaf
                if (start + MOVED_BLOCKS) % MOST_LOADED == 0:  # bounds the rows on the device
                    jax.block_until_ready([leaves[at] for at in own[:1]])
        self._metrics.loaded_tokens += int(np.count_nonzero(loads[:, 0] == 0)) * self._geometry.block_size
        return tuple(leaves)


def leaves_of(spec: Spec, geometry: Geometry, state: DeviceState[Any]) -> list[list[int]]:
    """Return each group's indices of KV leaves in the state; a draft model's are in the first group."""
    numbered = jax.tree.unflatten(jax.tree.structure(state), range(len(jax.tree.leaves(state))))
    own = jax.tree.leaves(numbered.kv)
    groups = [[own[at] for at in places] for places in leaves_by_group(spec, geometry, state.kv)]
    groups[0] += [] if numbered.drafted is None else jax.tree.leaves(numbered.drafted.kv)
    return groups


def compile_moves(model: StepModel, make: Callable[..., Any]) -> dict[str, Any]:
    """Compile the tier's programs, by name; `make` is that of `small_programs.compile_all`."""
    layout, leaves = model.layout, jax.tree.leaves(model.state)
    blocks = jax.ShapeDtypeStruct((MOVED_BLOCKS,), jnp.int32, sharding=layout.sharding())
    made: dict[str, Any] = {}
    for group, (own, row) in enumerate(
        zip(leaves_of(model.spec, model.geometry, model.state), row_shapes(model), strict=True)
    ):
        cache = tuple(leaves[at] for at in own)
        kinds = _kinds(cache)
        specs, row_specs = tuple(leaf.sharding.spec for leaf in cache), tuple(each.sharding.spec for each in row)
        rows, rows_specs = (row,) * MOVED_BLOCKS, (row_specs,) * MOVED_BLOCKS
        store = layout.shard_map(_store(kinds, STORE_PROGRAMS[group]), (specs, layout.spec()), rows_specs)
        load = layout.shard_map(_load(kinds, LOAD_PROGRAMS[group]), (specs, layout.spec(), rows_specs), specs)
        made[STORE_PROGRAMS[group]] = make(STORE_PROGRAMS[group], store, (), cache, blocks)
        made[LOAD_PROGRAMS[group]] = make(LOAD_PROGRAMS[group], load, (0,), cache, blocks, rows)
    return made


def row_layout(cache: Sequence[jax.ShapeDtypeStruct]) -> tuple[list[jax.ShapeDtypeStruct], list[tuple[int, int]]]:
    """Return the arrays of a row in the host's memory, and each leaf's array and index in it."""
    kinds = _kinds(cache)
    places = {at: (kind, number) for kind, own in enumerate(kinds) for number, at in enumerate(own)}
    arrays: list[jax.ShapeDtypeStruct] = []
    for each in _row_of(cache, kinds):
        assert isinstance(each.sharding, NamedSharding)
        kind = host_memory_kind(next(iter(each.sharding.device_set)))
        arrays.append(jax.ShapeDtypeStruct(each.shape, each.dtype, sharding=each.sharding.with_memory_kind(kind)))
    return arrays, [places[at] for at in range(len(cache))]


def read_blocks(program: Callable[..., Any], leaves: Leaves, blocks: Sequence[int]) -> list[Row]:
    """Copy blocks to the host's memory in the device's order; the copies may still run."""
    rows: list[Row] = []
    for start in range(0, len(blocks), MOVED_BLOCKS):
        piece = blocks[start : start + MOVED_BLOCKS]
        padded = np.zeros(MOVED_BLOCKS, np.int32)
        padded[: len(piece)] = piece
        rows += to_host(program(leaves, padded)[: len(piece)])
        if (start + MOVED_BLOCKS) % MOST_LOADED == 0:  # bounds the rows on the device
            jax.block_until_ready(rows[-1])
    return rows


def row_shapes(model: StepModel) -> list[Row]:
    leaves = jax.tree.leaves(model.state)
    caches = [[leaves[at] for at in own] for own in leaves_of(model.spec, model.geometry, model.state)]
    return [_row_of(cache, _kinds(cache)) for cache in caches]


def _row_of(cache: Sequence[jax.ShapeDtypeStruct], kinds: Sequence[Sequence[int]]) -> Row:
    def described(leaf: jax.ShapeDtypeStruct, count: int) -> jax.ShapeDtypeStruct:
        assert isinstance(leaf.sharding, NamedSharding)
        sharding = NamedSharding(leaf.sharding.mesh, _row_spec(leaf))
        stages = leaf.shape[0] // leaf.sharding.shard_shape(leaf.shape)[0]
        return jax.ShapeDtypeStruct((stages * count, *leaf.shape[1:]), leaf.dtype, sharding=sharding)

    return tuple(described(cache[places[0]], len(places)) for places in kinds)


def _kinds(cache: Sequence[jax.ShapeDtypeStruct]) -> list[list[int]]:
    kinds: dict[Any, list[int]] = {}
    for place, leaf in enumerate(cache):
        kinds.setdefault((leaf.shape[1:], leaf.dtype, _row_spec(leaf)), []).append(place)
    return list(kinds.values())


def _row_spec(leaf: jax.ShapeDtypeStruct) -> PartitionSpec:
    assert isinstance(leaf.sharding, NamedSharding)
    return PartitionSpec(*leaf.sharding.spec)  # stages each have the rows of their layers


def _store(kinds: Sequence[Sequence[int]], name: str) -> Callable[[Leaves, jax.Array], tuple[Row, ...]]:
    """Return a function that reads blocks: (KV leaves, int32[B]) -> B rows."""

    def store(leaves: Leaves, blocks: jax.Array) -> tuple[Row, ...]:
        read = [jnp.stack([leaves[at][blocks] for at in places], 1) for places in kinds]  # [B, n, …] each
        return tuple(tuple(each[at] for each in read) for at in range(MOVED_BLOCKS))

    store.__name__ = name
    return store


def _load(kinds: Sequence[Sequence[int]], name: str) -> Callable[[Leaves, jax.Array, Sequence[Row]], Leaves]:
    """Return a function that writes blocks, dropping those out of range: (KV leaves, int32[B], B rows) -> KV leaves."""

    def load(leaves: Leaves, blocks: jax.Array, rows: Sequence[Row]) -> Leaves:
        written = list(leaves)
        for kind, places in enumerate(kinds):
            for number, at in enumerate(places):
                content = jnp.stack([row[kind][number] for row in rows])
                written[at] = written[at].at[blocks].set(content, mode="drop", unique_indices=True)
        return tuple(written)

    load.__name__ = name
    return load
