"""Attribute the time of traced steps to attention, matrix products, sampling, host work and waiting.

Concurrent operations share device time evenly; other time is the engine thread's. The profiler adds half a microsecond
per operation on a CPU, and disables CUDA graphs on a GPU.
"""

from __future__ import annotations

import gzip
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

HOST = ("plan", "pack", "dispatch", "commit", "output")
OTHER_HOST, BETWEEN, WAITING = "other", "between steps", "wait"
DEVICE = ("matmul", "attention", "cache write", "sampling", "collectives", "other on the device")
_PRODUCTS = {"dot", "convolution", "ragged-dot"}
_LIBRARY_PRODUCT = re.compile(r'custom_call_target="[^"]*(gemm|matmul|dot|linear)', re.IGNORECASE)
_COLLECTIVES = ("all-reduce", "all-gather", "all-to-all", "reduce-scatter", "collective-permute")
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.-]+) = .*?\s([a-z][\w-]*)\(")
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.-]+) .*\{$")
_SCOPE = re.compile(r'op_name="([^"]*)"')
_CALLED = re.compile(r"calls=%?([\w.-]+)")


class Span(NamedTuple):
    """An activity of one thread, in microseconds."""

    start: float
    end: float
    part: str


@dataclass(frozen=True)
class Explanation:
    """Milliseconds per step, by part."""

    num_steps: int
    step_ms: float  # first step's start to last step's end
    device_ms: dict[str, float]  # while the device computed
    idle_ms: dict[str, float]  # while it was idle; both sum to `step_ms`
    host_ms: dict[str, float]  # regardless of the device; sums to `step_ms`
    programs: dict[str, int]
    unknown_ms: float  # in no program's text; part of "other on the device"

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def parts_of(program: str) -> dict[str, str]:
    computation, scopes, opcodes = "", {}, {}
    called: dict[str, str] = {}
    products: set[str] = set()
    for line in program.splitlines():
        if found := _INSTRUCTION.match(line):
            name, opcode = found.groups()
            scope = _SCOPE.search(line)
            scopes[name] = scope[1] if scope else ""
            opcodes[name] = opcode
            if inner := _CALLED.search(line):
                called[name] = inner[1]
            if opcode in _PRODUCTS or _LIBRARY_PRODUCT.search(line):
                products |= {name, computation}
        elif found := _COMPUTATION.match(line):
            computation = found[1]
    for name, inner in called.items():  # computations precede their callers
        if inner in products:
            products.add(name)
    return {name: _part(scope, opcodes[name], name in products) for name, scope in scopes.items()}


def _part(scope: str, opcode: str, is_product: bool) -> str:
    if opcode.startswith(_COLLECTIVES):
        return "collectives"
    for name, part in (("attend", "attention"), ("cache_write", "cache write"), ("sampling", "sampling")):
        if f"/{name}/" in f"{scope}/":
            return part
    return "matmul" if is_product else "other on the device"


def read_trace(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path, "rt", encoding="utf-8") as stream:
        events = json.load(stream)["traceEvents"]
    return [event for event in events if event.get("ph") == "X"]


def programs_in(events: Iterable[Mapping[str, Any]]) -> set[str]:
    modules = {event.get("args", {}).get("hlo_module", "") for event in events}
    return {module.removeprefix("jit_") for module in modules if module}


def explain(events: Sequence[Mapping[str, Any]], programs: Mapping[str, str]) -> Explanation:
    """Divide the time of a trace's steps among the host's phases and the parts of each program.

    `programs` are HLO texts by `step.program_name`. Raises `ValueError` without a step.
    """
    steps = sorted((event for event in events if event["name"] == "step"), key=lambda event: event["ts"])
    if not steps:
        raise ValueError("the trace has no steps")
    begin, end = steps[0]["ts"], max(event["ts"] + event["dur"] for event in steps)
    parts = {f"jit_{name}": parts_of(text) for name, text in programs.items()}
    on_host, on_device, runs = [], defaultdict(list), {}
    for event in events:
        start, stop = max(begin, event["ts"]), min(end, event["ts"] + event["dur"])
        arguments = event.get("args", {})
        if stop <= start:
            continue
        if "hlo_op" in arguments:
            module = arguments["hlo_module"]
            part = parts.get(module, {}).get(arguments["hlo_op"])
            span = Span(start, stop, part or "unknown")
            on_device[event["pid"], event["tid"]].append(span)
            runs[module, arguments.get("run_id")] = module.removeprefix("jit_")
        elif event["tid"] == steps[0]["tid"] and event["name"] in (*HOST, WAITING, "step"):
            name = OTHER_HOST if event["name"] == "step" else event["name"]
            on_host.append(Span(start, stop, name))
    host = list(_flat([Span(begin, end, BETWEEN), *on_host]))
    device = [span for spans in on_device.values() for span in _flat(spans)]
    busy, idle, whole = _shared(device, host)
    unit = 1e-3 / len(steps)
    unknown = busy.pop("unknown", 0.0)
    busy["other on the device"] += unknown
    return Explanation(
        num_steps=len(steps),
        step_ms=(end - begin) * unit,
        device_ms={part: busy[part] * unit for part in DEVICE},
        idle_ms={name: idle[name] * unit for name in (*HOST, OTHER_HOST, BETWEEN, WAITING)},
        host_ms={name: whole[name] * unit for name in (*HOST, OTHER_HOST, BETWEEN, WAITING)},
        programs=dict(Counter(runs.values())),
        unknown_ms=unknown * unit,
    )


def report(explanation: Explanation) -> str:
    whole = explanation.step_ms
    rows = [(part, milliseconds) for part, milliseconds in explanation.device_ms.items() if milliseconds]
    rows.sort(key=lambda row: -row[1])
    lines = [f"{'A step takes':<40} {'ms':>8} {'%':>6}"]
    lines += [_row(part, milliseconds, whole) for part, milliseconds in rows]
    for name in (*HOST, OTHER_HOST, BETWEEN):
        hidden = explanation.host_ms[name] - explanation.idle_ms[name]
        note = f"   (and {hidden:.3f} ms while the device computes)" if hidden >= 0.0005 else ""
        lines.append(_row(f"host: {name}", explanation.idle_ms[name], whole) + note)
    lines.append(_row("waiting: neither computes", explanation.idle_ms[WAITING], whole))
    lines.append(_row(f"in all, mean of {explanation.num_steps} steps", whole, whole))
    runs = sorted(explanation.programs.items(), key=lambda row: -row[1])
    lines.append("programs: " + ", ".join(f"{count} × {name}" for name, count in runs))
    if explanation.unknown_ms:
        lines.append(f"{explanation.unknown_ms:.3f} ms of it are operations of unknown programs")
    lines.append(
        "These times include the profiler's overhead: microseconds for each operation and each part of the host's work."
    )
    return "\n".join(lines)


def _row(name: str, milliseconds: float, whole: float) -> str:
    return f"{name:<40} {milliseconds:>8.3f} {100 * milliseconds / whole:>6.1f}"


def _flat(spans: Iterable[Span]) -> Iterator[Span]:
    """Divide nested spans into disjoint pieces of the innermost ones."""
    open_spans: list[Span] = []
    at = 0.0
    for span in sorted(spans, key=lambda span: (span.start, -span.end)):
        while open_spans and open_spans[-1].end <= span.start:
            last = open_spans.pop()
            if last.end > at:
                yield Span(at, last.end, last.part)
                at = last.end
        if open_spans and span.start > at:
            yield Span(at, span.start, open_spans[-1].part)
        at = max(at, span.start)
        open_spans.append(span)
    while open_spans:
        last = open_spans.pop()
        if last.end > at:
            yield Span(at, last.end, last.part)
            at = last.end


def _shared(device: Sequence[Span], host: Sequence[Span]) -> tuple[dict[str, float], ...]:
    """Return microseconds by device part, by host activity while idle, and by host activity.

    Device parts that run at once share the time evenly.
    """
    edges = [(span.start, 1, span.part) for span in device] + [(span.end, -1, span.part) for span in device]
    turns = [(span.start, 0, span.part) for span in host]
    running: Counter[str] = Counter()
    busy: dict[str, float] = defaultdict(float)
    idle: dict[str, float] = defaultdict(float)
    whole: dict[str, float] = defaultdict(float)
    current, before = host[0].part, host[0].start
    for at, change, part in [*sorted([*edges, *turns]), (host[-1].end, 0, "")]:
        passed = at - before
        if passed > 0:
            whole[current] += passed
            if count := sum(running.values()):
                for name, number in running.items():
                    busy[name] += passed * number / count
            else:
                idle[current] += passed
        before = at
        if change:
            running[part] += change
            if not running[part]:
                del running[part]
        else:
            current = part
    return busy, idle, whole
