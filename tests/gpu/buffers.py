"""Read XLA's dumps: the buffers of a CUDA graph's commands, and the sizes and operands of Triton calls.

XLA keeps 16 sets of buffer addresses for a call through its FFI. With a new set the call is recorded into the graph
again, which hashes all PTX: 20 to 50 us per call. Addresses of weights, donated state and constants are constant; the
sent batch and the returned results have new ones at each step. A call that reads part of an array is inside a fusion.
"""

from __future__ import annotations

import re
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

_ALLOCATION = re.compile(r"^allocation (\d+): size \d+, (.*)")
_VALUE = re.compile(r"^ value: <\d+ (\S+) @\d+>")
_INSTRUCTION = re.compile(r"^  (?:ROOT )?%(\S+) = (?:\(.*?\)|\S+) ([a-z][\w-]*)\((.*?)\)(?:, |$)")
_COMPUTATION = re.compile(r"^%(\S+) \(.*?\n}", re.MULTILINE | re.DOTALL)
_CALL = "triton_kernel_call_ffi"
_NO_COMMANDS = ("parameter", "constant", "bitcast", "get-tuple-element", "tuple")
_PARAMETER = re.compile(r" parameter\((\d+)\).*?op_name=\"(\w+)")
_KEPT = ("params_leaves", "behind")  # constant at each step: weights and adapters
CHANGING = {"sent", "returned"}
_BEGINS = re.compile(r"^(?:ENTRY )?%(\S+) \(.*\{$")
_DEFINED = re.compile(r"^  (?:ROOT )?%(\S+) = (\(.*?\)|\S+) ([a-z][\w-]*)\((.*?)\)(?:, (.*)|$)")
_ARRAY = re.compile(r"^([a-z]+)(\d*)\w*\[([\d,]*)\](?:\{([\d,]*))?")
ALIGNED = 16  # bytes: the alignment promised for each operand's address


@dataclass(frozen=True)
class _Instruction:
    kind: str  # its type
    operation: str
    operands: tuple[str, ...]
    rest: str  # attributes


@dataclass(frozen=True)
class Buffers:
    """The buffers of a program's commands: weights, state, constants, temporaries, sent and returned arrays."""

    allocations: Counter[str]  # used by commands, by kind
    commands: Counter[str]  # by the kind of buffers used
    traced: Counter[str]  # those of Triton kernels

    @property
    def changing(self) -> tuple[int, int]:
        """Return the number of commands, and of Triton calls among them, with new addresses at each step."""
        return self.commands["changing"], self.traced["changing"]


def read(assignment: str, optimized: str) -> Buffers:
    """Read XLA's dumps of a program: the buffer assignment and the optimized HLO."""
    entry = optimized[optimized.index("\nENTRY") :]
    places = _places(assignment, {int(number): name for number, name in _PARAMETER.findall(entry)})
    own: dict[str, list[str]] = {}
    for value in places:
        own.setdefault(value.partition("{")[0], []).append(value)
    calling = {found[1] for found in _COMPUTATION.finditer(optimized) if _CALL in found[0]}
    sources: dict[str, str] = {}  # of reshaped views
    allocations, commands, traced = {}, Counter(), Counter()
    for line in entry.splitlines():
        if not (found := _INSTRUCTION.match(line)):
            continue
        name, operation, operands = map(str, found.groups())
        given = [sources.get(one) or str(one) for one in re.findall(r"%([\w.#-]+)", operands)]
        if operation == "bitcast":
            sources[name] = given[0]
        if operation in _NO_COMMANDS:
            continue
        touched = {places[value] for value in (*map(_value, given), *own.get(name, ())) if value in places}
        allocations |= dict(touched)
        kinds = {kind for _, kind in touched}
        kinds |= {"changing"} if kinds & CHANGING else set()
        commands.update(kinds)
        computation = re.search(r" calls=%([\w.-]+)", line)
        if _CALL in line or (computation and computation[1] in calling):
            traced.update(kinds)
    return Buffers(Counter(allocations.values()), commands, traced)


def _places(assignment: str, parameters: dict[int, str]) -> dict[str, tuple[int, str]]:
    """Return the allocation of each value, as number and kind; `parameters` are the names of arguments."""
    found: dict[str, tuple[int, str]] = {}
    number, described, kind = 0, "", ""
    for line in assignment.splitlines():
        if begun := _ALLOCATION.match(line):
            number, described, kind = int(begun[1]), begun[2], ""
        elif (value := _VALUE.match(line)) and "thread-local" not in described:
            kind = kind or _kind(described, parameters)
            if not value[1].endswith("{}"):  # the table of the others
                found[value[1]] = number, kind
    return found


def _kind(described: str, parameters: dict[int, str]) -> str:
    if parameter := re.search(r"parameter (\d+)", described):
        name = parameters[int(parameter[1])]
        if name in _KEPT:
            return "weights"
        # The batch is a new array at each step, even if it also holds the results.
        return "state" if "maybe-live-out" in described and name == "state_leaves" else "sent"
    if "maybe-live-out" in described:
        return "returned"
    return "constants" if "constant" in described else "temporary"


def _value(operand: str) -> str:
    """Return an operand's name in the assignment, where fusion#1, the second result of a fusion, is fusion{1}."""
    name, _, index = operand.partition("#")
    return f"{name}{{{index}}}" if index else name


def payloads(optimized: str) -> Iterator[bytes]:
    """Yield the unpacked payload of each Triton call, mostly PTX."""
    for found in re.finditer(_CALL + r'".*?opaque = "((?:[^"\\]|\\.)*)"', optimized):
        packed = re.sub(rb"\\([0-9A-F]{2}|.)", _unescaped, found[1].encode("latin-1"))
        yield zlib.decompress(packed)


def _unescaped(found: re.Match[bytes]) -> bytes:
    code = found[1]
    return bytes.fromhex(code.decode()) if len(code) == 2 else {b"n": b"\n", b"t": b"\t", b"r": b"\r"}.get(code, code)


def misaligned(optimized: str) -> list[str]:
    """Return the operands of Triton calls that begin at an unaligned offset of a buffer.

    XLA fuses a call with the slices that it reads, and passes addresses inside their buffers.
    """
    computations = _computations(optimized)
    callers: dict[str, tuple[str, _Instruction]] = {}
    for name, own in computations.items():
        for one in own.values():
            if called := re.search(r"calls=%([\w.-]+)", one.rest):
                callers[called[1]] = name, one
    found = []
    for name, own in computations.items():
        for result, call in own.items():
            if "triton_kernel_call_ffi" in call.rest:
                for number, operand in enumerate(call.operands):
                    offset = _offset(computations, callers, name, operand)
                    if offset is None or offset % ALIGNED:
                        where = "at bytes that only the device knows" if offset is None else f"at byte {offset}"
                        found.append(f"operand {number} of {result} in {name} begins {where} of its buffer")
    return found


def _computations(optimized: str) -> dict[str, dict[str, _Instruction]]:
    """Return the instructions of each computation, by name."""
    found: dict[str, dict[str, _Instruction]] = {}
    own: dict[str, _Instruction] = {}
    for line in optimized.splitlines():
        if begun := _BEGINS.match(line):
            own = found.setdefault(begun[1], {})
        elif made := _DEFINED.match(line):
            name, kind, operation, given, rest = made.groups()
            operands = (given,) if operation in ("parameter", "constant") else re.findall(r"%([\w.#-]+)", given)
            own[name] = _Instruction(kind, operation, tuple(operands), rest or "")
    return found


def _offset(
    computations: dict[str, dict[str, _Instruction]],
    callers: dict[str, tuple[str, _Instruction]],
    name: str,
    operand: str,
) -> int | None:
    """Return the byte offset of a value that is a slice of a buffer; None if it is not constant."""
    one = computations[name].get(operand)
    if one is None:  # an element of a tuple: a separate buffer
        return 0
    if one.operation == "parameter" and name in callers:
        caller, call = callers[name]
        return _offset(computations, callers, caller, call.operands[int(one.operands[0])])
    if one.operation not in ("bitcast", "slice", "dynamic-slice"):
        return 0
    before = _offset(computations, callers, name, one.operands[0])
    source = computations[name].get(one.operands[0])
    if one.operation == "bitcast" or before is None:
        return before
    if source is None:
        return None
    if one.operation == "slice":
        inside = re.search(r"slice=\{(.*?)\}", one.rest)
        starts = [int(start) for start in re.findall(r"\[(\d+):", inside[1] if inside else "")]
    else:
        given = [computations[name].get(index) for index in one.operands[1:]]
        if any(index is None or index.operation != "constant" for index in given):
            return None
        starts = [int(index.operands[0]) for index in given if index is not None]
    return before + _bytes_to(source.kind, starts)


def _bytes_to(kind: str, starts: list[int]) -> int:
    """Return the byte offset of an element in an array; the braces of its HLO type order dimensions, fastest first."""
    array = _ARRAY.match(kind)
    assert array is not None, kind
    letters, bits, dims, layout = array.groups()
    sizes = [int(size) for size in dims.split(",") if size]
    order = [int(axis) for axis in layout.split(",")] if layout else list(reversed(range(len(sizes))))
    stride, place = 1, 0
    for axis in order:
        place += starts[axis] * stride
        stride *= sizes[axis]
    return place * (8 if letters == "pred" else int(bits)) // 8
