"""Read the machine code of the Triton kernels without a GPU: `python -m tests.gpu.sass [name]`.

Widths of loads from memory, loads in flight while a loop multiplies, registers spilled to memory, the assembler's
messages about wgmma, and the programs that a device runs at once.
"""

from __future__ import annotations

import argparse
import functools
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
from tqdm import tqdm

from pallas_kernels import Choice, triton_bridge
from pallas_kernels.tuning import PROCESSORS, Tuning
from tests.gpu import resources

_TOOLS = resources.TOOL.parent
_INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P[0-9T]+\s+)?([A-Z][\w.]*)\s*([^;]*);", re.MULTILINE)
_MULTIPLIES = ("HMMA", "IMMA", "QMMA", "HGMMA", "IGMMA", "QGMMA", "UTC")
# Limits of a multiprocessor: registers, threads and programs, and by capability its shared memory, of which a program
# takes 1 KiB more than requested. CUDA C++ Programming Guide, "Technical Specifications per Compute Capability".
_REGISTERS, _WARPS, _PROGRAMS, _RESERVED = 65536, 64, 32, 1024
_SHARED = {80: 164 << 10, 90: 228 << 10, 100: 228 << 10}


class Launched(NamedTuple):
    """A kernel that a call launches."""

    name: str
    compiled: Any
    constants: dict[str, Any]
    grid: tuple[int, ...]
    tuning: Tuning

    @property
    def programs(self) -> int:
        found = 1
        for size in self.grid:
            found *= size
        return found


class Instruction(NamedTuple):
    """A machine instruction."""

    address: int
    operation: str  # with its modifiers
    operands: str

    @property
    def is_load(self) -> bool:
        """Whether it loads from memory: into registers, or (LDGSTS) into shared memory."""
        return self.operation.startswith(("LDG.", "LDGSTS"))

    @property
    def width(self) -> int:
        """The bytes that a thread's load or store moves."""
        modifiers = self.operation.split(".")
        if "U8" in modifiers or "S8" in modifiers:
            return 1
        if "U16" in modifiers or "S16" in modifiers:
            return 2
        return next((bits // 8 for bits in (256, 128, 64) if str(bits) in modifiers), 4)


@dataclass(frozen=True)
class Loop:
    """The body of a loop."""

    body: tuple[Instruction, ...]
    threads: int

    @property
    def loaded(self) -> Counter[int]:
        """The bytes that all threads load per iteration, by the width of a load."""
        found: Counter[int] = Counter()
        for one in self.body:
            if one.is_load:
                found[one.width] += one.width * self.threads
        return found

    @property
    def multiplies(self) -> bool:
        return any(one.operation.startswith(_MULTIPLIES) for one in self.body)

    @property
    def under_way(self) -> int:
        """The most bytes in flight to shared memory during a multiplication.

        Loads end in order: DEPBAR.LE SB0, N waits until only N of the groups closed by LDGDEPBAR remain.
        """
        groups, own, most = [0], 0, 0
        for turn in range(3):  # the second iteration reaches the steady state
            for one in self.body:
                if one.operation.startswith("LDGSTS"):
                    own += one.width * self.threads
                elif one.operation.startswith("LDGDEPBAR"):
                    groups, own = [*groups, own], 0
                elif one.operation.startswith("DEPBAR") and (left := re.match(r"SB0, 0x([0-9a-f]+)", one.operands)):
                    groups = groups[-number:] if (number := int(left[1], 16)) else []
                elif turn == 2 and one.operation.startswith(_MULTIPLIES):
                    most = max(most, sum(groups) + own)
        return most


def launches(call: Any, arrays: tuple[Any, ...], capability: int) -> list[Launched]:
    """Compile the launches of a call, in order; `call` is one of `resources.calls()`."""
    found, given = [], {}
    compile_kernel, payload = triton_bridge.compile_kernel, triton_bridge.payload_of

    def compiling(kernel: Any, signature: Any, constants: Any, *own: Any) -> Any:
        result = compile_kernel(kernel, signature, constants, *own)
        given[id(result)] = dict(constants)
        return result

    def noting(name: str, compiled: Any, arrays: int, grid: Any, tuning: Tuning, capability: int) -> bytes:
        found.append(Launched(name, compiled, given[id(compiled)], grid, tuning))
        return payload(name, compiled, arrays, grid, tuning, capability)

    triton_bridge.compile_kernel, triton_bridge.payload_of = compiling, noting
    try:
        jax.eval_shape(partial(call, Choice("triton", capability)), *arrays)
    finally:
        triton_bridge.compile_kernel, triton_bridge.payload_of = compile_kernel, payload
    return found


def instructions(compiled: Any) -> tuple[Instruction, ...]:
    """Read a kernel's machine code."""
    return _instructions(compiled.asm["cubin"])


@functools.cache
def _instructions(cubin: bytes) -> tuple[Instruction, ...]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([_TOOLS / "cuobjdump", "-sass", file.name], capture_output=True, text=True, check=True)
    found = _INSTRUCTION.findall(text.stdout)
    return tuple(Instruction(int(address, 16), operation, rest.strip()) for address, operation, rest in found)


def loops(code: Sequence[Instruction], threads: int) -> Iterator[Loop]:
    """Yield the innermost loops in order, as the span of a backward branch."""
    spans = []
    for one in code:
        target = re.search(r"\b0x([0-9a-f]+)\s*$", one.operands) if one.operation.startswith("BRA") else None
        if target and int(target[1], 16) < one.address:
            spans.append((int(target[1], 16), one.address))
    for first, last in spans:
        if not any(first <= other and end < last for other, end in spans):
            yield Loop(tuple(one for one in code if first <= one.address <= last), threads)


def widths(code: Sequence[Instruction], kind: str = "LDG") -> dict[int, int]:
    """Count loads (LDG) or stores (STG) by the bytes of a thread."""
    names = ("LDG.", "LDGSTS") if kind == "LDG" else ("STG",)
    return dict(sorted(Counter(one.width for one in code if one.operation.startswith(names)).items(), reverse=True))


def spills(code: Sequence[Instruction]) -> int:
    """Count the instructions that move registers through memory."""
    return sum(one.operation.startswith(("LDL", "STL")) for one in code)


def complaints(ptx: str) -> list[str]:
    """Return the assembler's messages about wgmma: serialization, or waits that the PTX lacks.

    Triton drops these messages, which are numbered from C7510 on.
    """
    target = re.search(r"^\.target (\w+)", ptx, re.MULTILINE)
    with tempfile.NamedTemporaryFile(suffix=".ptx", mode="w") as file:
        file.write(ptx)
        file.flush()
        own = [_TOOLS / "ptxas", "-v", f"--gpu-name={target and target[1]}", file.name, "-o", "/dev/null"]
        said = subprocess.run(own, capture_output=True, text=True, check=True)
    return re.findall(r"\(C75[12]\d\).*", said.stdout + said.stderr)


def at_once(registers: int, shared: int, warps: int, capability: int) -> int:
    """Return the programs that a multiprocessor runs at once; registers are allocated to warps by 256."""
    of_a_warp = -(-registers * 32 // 256) * 256
    by_registers = _REGISTERS // of_a_warp // warps
    return min(by_registers, _SHARED[capability] // (shared + _RESERVED), _WARPS // warps, _PROGRAMS)


def waves(programs: int, at_once: int, capability: int) -> float:
    """Return how often `programs` fill a device; the fraction above a whole number runs beside idle places."""
    return programs / (at_once * PROCESSORS[capability])


def read(one: Launched) -> dict[str, Any]:
    """Return a kernel's row of the table: loads and stores by their bytes per thread, and more."""
    code = instructions(one.compiled)
    found = {"loads": widths(code), "stores": widths(code, "STG"), "spills": spills(code)}
    main = [loop for loop in loops(code, 32 * one.tuning.warps) if loop.multiplies]
    if main:  # the first is the one without masks
        loaded = {width: main[0].loaded[width] for width in sorted(main[0].loaded, reverse=True)}
        found |= {"a turn": loaded, "under way": main[0].under_way}
    return json.loads(json.dumps(found))


def everything(capability: int, name: str = "") -> dict[str, dict[str, Any]]:
    """Read the kernels of all calls with matching names."""
    chosen = {called: each for called, each in resources.calls().items() if re.search(name, called)}
    found = {}
    for called, (call, arrays) in tqdm(chosen.items(), desc=f"sm_{capability}", disable=not sys.stderr.isatty()):
        found |= {f"{one.name}: {called}": read(one) for one in launches(call, arrays, capability)}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", nargs="?", default="", help="a regular expression for names of calls")
    for name, row in everything(90, parser.parse_args().name).items():
        print(json.dumps({name: row}))


if __name__ == "__main__":
    main()
