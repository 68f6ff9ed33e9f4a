"""Record the bytes that each program of a Triton kernel reads and writes in Triton's interpreter, and check them.

Addresses are the same on every GPU. They determine the memory sectors that a call reads, that no access is out of
bounds, and that no two programs, which run in any order, access a number that one of them writes.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from triton.runtime import interpreter

from pallas_kernels import triton_bridge

SECTOR = 32  # bytes: the smallest read of an NVIDIA GPU
_ALIGNED = 256  # bytes: alignment of XLA's buffers
_GUARD = 1 << 20  # bytes around an array, to detect accesses out of bounds
_NOBODY, _SEVERAL = -1, -2


@dataclass
class Buffer:
    """An array of a launch, with the program that read and wrote each number."""

    name: str
    address: int
    num_bytes: int
    width: int  # bytes of a number
    moved: int = 0  # bytes of the sectors of all loads and stores
    reader: np.ndarray = field(init=False)
    writer: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.reader, self.writer = (np.full(self.num_bytes // self.width, _NOBODY, np.int32) for _ in range(2))

    def note(self, program: int, addresses: np.ndarray, width: int, is_store: bool) -> bool:
        """Record one program's access; return whether it writes a number that another program wrote."""
        own = self.writer if is_store else self.reader
        first = (addresses.astype(np.int64) - self.address) // self.width
        clashes = False
        for further in range(max(1, width // self.width)):
            before = own[first + further]
            is_others = (before != _NOBODY) & (before != program)
            own[first + further] = np.where(is_others, _SEVERAL, program)
            clashes |= is_store and bool(is_others.any())
        return clashes

    @property
    def is_exchanged(self) -> bool:
        """Whether a program read a number that another one wrote in the same launch."""
        return bool(((self.writer != _NOBODY) & (self.reader != _NOBODY) & (self.writer != self.reader)).any())


@dataclass
class Launch:
    """One call of a kernel."""

    kernel: str
    buffers: list[Buffer]
    programs: int = 0
    outside: list[str] = field(default_factory=list)
    clashes: set[str] = field(default_factory=set)  # arrays with a number written by two programs
    atomics: Counter[str] = field(default_factory=Counter)  # by array
    own: Counter[tuple[str, int]] = field(default_factory=Counter)  # bytes of sectors by array and program

    @property
    def moved(self) -> Counter[str]:
        """Bytes of the sectors of all loads and stores, by array."""
        return Counter({buffer.name: buffer.moved for buffer in self.buffers if buffer.moved})

    def violations(self, exchanged: frozenset[str] = frozenset()) -> list[str]:
        """Return the errors in any order of programs; arrays `exchanged` are passed on by atomic operations."""
        found = [f"{self.kernel}: {one}" for one in self.outside]
        found += [f"{self.kernel}: two programs write one number of {name}" for name in sorted(self.clashes)]
        for buffer in self.buffers:
            if buffer.is_exchanged and not (buffer.name in exchanged and self.atomics):
                found.append(f"{self.kernel}: a program reads what another writes to {buffer.name}")
        return found


@contextlib.contextmanager
def recorded(seed: int | None = None) -> Iterator[list[Launch]]:
    """Record the launches inside; with a `seed` their programs run in a shuffled order."""
    launches: list[Launch] = []
    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    rng = np.random.default_rng(seed)
    order: Iterator[Any] = iter(())
    own: dict[str, Any] = {}

    def begin(self: Any, arrays: Any, constants: Any) -> Any:
        named = zip(self.arg_names, arrays, strict=False)
        given = [(name, one.array) for name, one in named if isinstance(one, triton_bridge._Tensor)]
        buffers = [Buffer(name, one.ctypes.data, one.nbytes, one.itemsize) for name, one in given]
        launches.append(Launch(self.fn.__name__, sorted(buffers, key=lambda each: each.address)))
        return own["_init_args_hst"](self, arrays, constants)

    def set_dim(self: Any, *size: int) -> None:
        nonlocal order
        every = list(itertools.product(*map(range, size)))
        order = iter(every if seed is None else [every[place] for place in rng.permutation(len(every))])
        own["set_grid_dim"](self, *size)

    def set_index(self: Any, *_: int) -> None:
        launches[-1].programs += 1
        own["set_grid_idx"](self, *next(order))

    def load(self: Any, pointers: Any, mask: Any, *given: Any) -> Any:
        inside = _note(launches[-1], self, "load", pointers, mask)
        return own["create_masked_load"](self, pointers, inside, *given)

    def store(self: Any, pointers: Any, value: Any, mask: Any, *given: Any) -> Any:
        inside = _note(launches[-1], self, "store", pointers, mask)
        return own["create_masked_store"](self, pointers, value, inside, *given)

    def change(self: Any, operation: Any, pointers: Any, value: Any, mask: Any, *given: Any) -> Any:
        inside = _note(launches[-1], self, "atomic", pointers, mask)
        return own["create_atomic_rmw"](self, operation, pointers, value, inside, *given)

    def exchange(self: Any, pointers: Any, *given: Any) -> Any:
        everywhere = interpreter.TensorHandle(np.ones_like(pointers.data, dtype=bool), interpreter.tl.int1)
        _note(launches[-1], self, "atomic", pointers, everywhere)
        return own["create_atomic_cas"](self, pointers, *given)

    replaced = [
        (executor, "_init_args_hst", begin),
        (builder, "set_grid_dim", set_dim),
        (builder, "set_grid_idx", set_index),
        (builder, "create_masked_load", load),
        (builder, "create_masked_store", store),
        (builder, "create_atomic_rmw", change),
        (builder, "create_atomic_cas", exchange),
        (triton_bridge, "_Tensor", _Guarded),
    ]
    own |= {name: getattr(where, name) for where, name, _ in replaced}
    try:
        for where, name, new in replaced:
            setattr(where, name, new)
        yield launches
    finally:
        for where, name, _ in replaced:
            setattr(where, name, own[name])


def _note(launch: Launch, builder: Any, kind: str, pointers: Any, mask: Any) -> Any:
    """Record one operation of one program; return the mask without accesses out of bounds."""
    chosen = np.broadcast_to(mask.data, pointers.data.shape).astype(bool)  # the interpreter's `&` makes integers
    addresses = pointers.data[chosen].astype(np.int64)
    if not addresses.size:
        return mask
    width = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
    x, y, z = builder.grid_idx
    program = (x * builder.grid_dim[1] + y) * builder.grid_dim[2] + z
    starts = np.array([buffer.address for buffer in launch.buffers])
    ends = starts + [buffer.num_bytes for buffer in launch.buffers]
    places = np.maximum(np.searchsorted(starts, addresses, "right") - 1, 0)
    is_inside = (addresses >= starts[places]) & (addresses + width <= ends[places])
    if not is_inside.all():
        first, more = int(addresses[~is_inside][0]), int((~is_inside).sum()) - 1
        nearest = min(launch.buffers, key=lambda one: max(one.address - first, first - one.address - one.num_bytes))
        launch.outside.append(
            f"program {(x, y, z)} does a {kind} outside of {nearest.name} of {nearest.num_bytes} bytes: "
            f"at byte {first - nearest.address}, and {more} more"
        )
    for place in np.unique(places[is_inside]):
        buffer, own = launch.buffers[place], addresses[is_inside & (places == place)]
        if kind == "atomic":
            launch.atomics[buffer.name] += own.size
            continue
        touched = np.unique(np.concatenate([own, own + width - 1]) // SECTOR)
        buffer.moved += SECTOR * len(touched)
        launch.own[buffer.name, program] += SECTOR * len(touched)
        if buffer.note(program, own, width, kind == "store"):
            launch.clashes.add(buffer.name)
    if is_inside.all():
        return mask
    kept = chosen.copy()
    kept[chosen] = is_inside
    return interpreter.TensorHandle(kept, mask.dtype)


class _Guarded(triton_bridge._Tensor):
    """An array at an address that XLA could use, with no other array of the launch near it."""

    def __init__(self, array: np.ndarray) -> None:
        super().__init__(array)
        whole = np.empty(array.nbytes + 2 * _GUARD + _ALIGNED, np.uint8)
        start = -(-(whole.ctypes.data + _GUARD) // _ALIGNED) * _ALIGNED - whole.ctypes.data
        own = whole[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
        own[...] = array
        self.array = own
