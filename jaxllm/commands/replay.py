"""`jaxllm replay`: re-run and verify a recording of `jaxllm serve --record`."""

from __future__ import annotations

import json
import re
import sys
from argparse import ArgumentTypeError
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

from jaxllm.commands.arguments import Subparsers, UsageError, new_command
from jaxllm.errors import printable

if TYPE_CHECKING:
    from jaxllm.replay.replay import Moment, Replay
    from jaxllm.scheduler.block_pool import Pool
    from jaxllm.scheduler.state import Request, State


def add(commands: Subparsers) -> None:
    parser = new_command(commands, "replay", run, "run a recording of a server's scheduler, without its model")
    parser.description = (
        "Replay the scheduler's steps in a recording of `jaxllm serve --record FILE`, without the model or its "
        "device. The exit code is 1 if a replayed plan differs from the recorded one, or if the recording is truncated."
    )
    parser.add_argument("file", metavar="FILE", help="the recording")
    parser.add_argument("--plans", action="store_true", help="write a line for each plan")
    parser.add_argument(
        "--at", type=_place, metavar="PLAN", help="show the scheduler's state at this plan, or at a time such as 12.5s"
    )
    parser.add_argument("--request", metavar="ID", help="show the events of one request, by its id or X-Request-Id")
    parser.add_argument("--json", action="store_true", help="write events as lines of JSON")


def run(options: dict[str, Any]) -> int:
    """Print a recording's events; return 1 if a plan differs or the file is truncated."""
    from jaxllm.replay.replay import Replay

    replay = Replay(options["file"])
    try:
        difference = _show(replay, options)
    finally:
        sys.stdout.flush()
        if replay.cut is not None:
            print(printable(replay.cut), file=sys.stderr)
    if difference is not None:
        print(printable(difference), file=sys.stderr)
    return 1 if replay.cut is not None or difference is not None else 0


def _show(replay: Replay, options: Mapping[str, Any]) -> str | None:
    difference = None
    summary = Summary()
    story = Story(options["request"]) if options["request"] else None
    wanted: tuple[str, float] | None = options["at"]
    for moment in replay.moments():
        difference = moment.difference or difference
        summary.take(moment)
        is_there = wanted is not None and _is_at(wanted, moment)
        if story is not None:
            names = story.take(moment)
            if options["json"] and names:
                print(json.dumps(to_json(moment, names)))
        elif options["json"]:
            if wanted is None or is_there:
                print(json.dumps(to_json(moment)))
        elif options["plans"] and moment.plan is not None and moment.events is None:
            _write([plan_line(moment)])
        if is_there:
            if not options["json"] and story is None:
                _write(state_lines(moment))
            break
    else:
        if wanted is not None:
            raise UsageError(f"the recording ends before {wanted[0]} {wanted[1]:g}")
    if story is not None:
        if not story.lines:
            raise UsageError(_no_request(options["request"], summary, is_whole=options["at"] is None))
        if not options["json"]:
            _write(story.lines)
    elif not options["json"] and options["at"] is None:
        _write(header_lines(replay))
        if summary.num_plans or replay.cut is None:
            _write(summary.lines())
            if difference is None:
                print(f"all {summary.num_plans:,} plans are the same as the server's")
    return difference


def _no_request(name: str, summary: Summary, is_whole: bool) -> str:
    if is_whole:
        return f"the recording has no request {name}"
    return f"there is no request {name} at {summary.last:.6f} s; it may arrive later: remove --at"


def _write(lines: Iterable[str]) -> None:
    """Print lines with control characters escaped: clients supply names."""
    for line in lines:
        print(printable(line))


def _place(text: str) -> tuple[str, float]:
    match = re.fullmatch(r"(\d{1,15})|(\d{1,12}(?:\.\d{1,9})?)s", text)
    if match is None:
        raise ArgumentTypeError(f"{text!r} is neither a plan's number nor a time as 12.5s")
    return ("plan", int(match[1])) if match[1] else ("second", float(match[2]))


def _is_at(place: tuple[str, float], moment: Moment) -> bool:
    if moment.plan is None or moment.events is not None:
        return False
    return moment.plan.number >= place[1] if place[0] == "plan" else moment.time >= place[1]


class Summary:
    """Totals of a recording."""

    def __init__(self) -> None:
        self.num_plans = 0
        self._first: float | None = None
        self.last = 0.0
        self._counts: Counter[str] = Counter()
        self._most: Counter[str] = Counter()

    def take(self, moment: Moment) -> None:
        counts, state = self._counts, moment.state
        self._first = moment.time if self._first is None else self._first
        self.last = moment.time
        counts["requests"] += len(moment.added)
        counts["aborted"] += len(moment.aborted or ())
        counts["resets"] += moment.kind.name == "RESET"
        counts["beams moved"] += len(moment.forked)
        if moment.events is not None:
            counts["steps"] += 1
            counts["tokens sampled"] += len(moment.events.ids)
            counts["finished"] += len(moment.events.finished)
        elif moment.plan is not None:
            self.num_plans += 1
            counts["tokens computed"] += moment.plan.num_tokens
            counts["tokens cached"] += sum(one.num_cached for one in moment.plan.admitted)
            counts["preemptions"] += len(moment.plan.preempted)
            for name, value in _sizes(state).items():
                self._most[name] = max(self._most[name], value)

    def lines(self) -> list[str]:
        seconds = self.last - (self._first or 0.0)
        written = [f"{value:,} {name}" for name, value in self._counts.items() if value]
        most = [f"{value:,} {name}" for name, value in self._most.items()]
        lines = [f"{seconds:,.3f} s: {', '.join(written) or 'nothing happened'}"]
        return [*lines, f"at most {', '.join(most)}"] if most else lines


class Story:
    """The events of a request, identified by a prefix of its id or X-Request-Id."""

    def __init__(self, name: str) -> None:
        self._names = (name, name.removeprefix("cmpl-").removeprefix("chatcmpl-"))
        self.lines: list[str] = []
        self._slots: dict[int, Request] = {}
        self._ids: dict[int, str] = {}
        self._decoded: dict[int, list[float]] = {}

    def take(self, moment: Moment) -> dict[int, str]:
        """Add a moment's events to `lines`; return the names of sequences concerned, by id."""
        written: dict[int, str] = {}

        def note(request_id: int, text: str) -> None:
            self._flush(request_id)
            written[request_id] = self._ids[request_id]
            self.lines.append(f"{moment.time:12.6f} s  {self._ids[request_id]}  {text}")

        for request in self._own(moment.added):
            note(request.sequence_id, f"arrives: {request.num_prompt} tokens, may reach {request.limit}")
        for request_id, reason in (moment.aborted or {}).items():
            if request_id in self._ids:
                note(request_id, f"is ended: {reason}")
        for move in moment.forked:
            if move.target in self._ids:
                parent = "itself" if move.source == move.target else self._ids.get(move.source, str(move.source))
                note(move.target, f"goes on from {parent} with token {move.token}")
        plan, events = moment.plan, moment.events
        if plan is not None and events is None:
            for request_id in plan.preempted:
                if request_id in self._ids:
                    note(request_id, f"is preempted in plan {plan.number}")
            for one in plan.admitted:
                if one.request.sequence_id in self._ids:
                    cached = f"{one.num_cached} of {one.num_known} tokens are cached"
                    note(one.request.sequence_id, f"gets slot {one.slot} in plan {plan.number}: {cached}")
            for row in range(plan.num_decodes, len(plan.slots)):
                record = moment.state.running[int(plan.slots[row])]
                if record is not None and record.request.sequence_id in self._ids:
                    start, length = int(plan.starts[row]), int(plan.lengths[row])
                    text = f"plan {plan.number} computes tokens {start} to {start + length - 1}"
                    note(record.request.sequence_id, text)
        if events is not None:
            for request_id in events.ids.tolist():
                if request_id in self._ids:
                    self._decoded.setdefault(request_id, []).append(moment.time)
                    written[request_id] = self._ids[request_id]
            for request_id, reason in events.finished.items():
                if request_id in self._ids:
                    note(request_id, f"ends: {reason}")
            for request_id in events.failed:
                if request_id in self._ids:
                    note(request_id, "fails: its logits were not finite")
        return written

    def _own(self, requests: Any) -> Iterator[Request]:
        for request in requests:
            _, _, clients = request.name.partition(" (")
            if any(text.startswith(self._names) for text in (request.name, clients)):
                self._ids[request.sequence_id] = request.name
                yield request

    def _flush(self, request_id: int) -> None:
        times = self._decoded.pop(request_id, [])
        if not times:
            return
        gaps = [later - earlier for earlier, later in pairwise(times)]
        longest = f", at most {max(gaps) * 1e3:.1f} ms apart" if gaps else ""
        text = f"{len(times)} tokens until {times[-1]:.6f} s{longest}"
        self.lines.append(f"{times[0]:12.6f} s  {self._ids[request_id]}  {text}")


def _sizes(state: State) -> dict[str, int]:
    pool = state.pool
    return {
        "running": state.num_running,
        "waiting": len(state.waiting),
        "blocks in use": pool.num_blocks - pool.num_available,
    }


def header_lines(replay: Replay) -> list[str]:
    header = replay.header
    assert header is not None
    started = datetime.fromtimestamp(header.started, UTC).strftime("%Y-%m-%d %H:%M:%S")
    end = "" if replay.end else ", no end mark: its process was killed, or still runs"
    hidden = ", tokens as pseudonyms" if header.is_redacted else ""
    about = "".join(f", {name} {value}" for name, value in header.about.items())
    limits = ", ".join(f"{name} {value}" for name, value in header.limits.items())
    return [f"jaxllm {header.jaxllm}{about}, started {started} UTC{hidden}{end}", limits]


def plan_line(moment: Moment) -> str:
    plan = moment.plan
    assert plan is not None
    chunks = len(plan.slots) - plan.num_decodes
    parts = [f"{moment.time:12.6f} s  plan {plan.number:<8} {plan.num_decodes:4} decodes"]
    parts.append(f"{chunks} chunks of {plan.num_tokens - plan.num_decodes} tokens" if chunks else "")
    if plan.admitted:
        parts.append("admits " + " ".join(one.request.name for one in plan.admitted))
    if plan.preempted:
        parts.append("preempts " + " ".join(map(str, plan.preempted)))
    parts.append(", ".join(f"{value} {name}" for name, value in _sizes(moment.state).items()))
    return "  ".join(part for part in parts if part)


def _blocks(table: Sequence[int]) -> str:
    return f"{len(table)} blocks {' '.join(map(str, table[:8]))}{' …' if len(table) > 8 else ''}"


def _counts(pool: Pool) -> str:
    used = pool.num_blocks - pool.num_available
    return f"{len(pool.free)} free, {pool.num_cached} cached, {used} in use"


def state_lines(moment: Moment) -> list[str]:
    state, plan = moment.state, moment.plan
    assert plan is not None
    rows = {
        slot: f"computes {start} to {start + length - 1}" + (", samples" if samples else "")
        for slot, start, length, samples in zip(
            plan.slots.tolist(), plan.starts.tolist(), plan.lengths.tolist(), plan.samples.tolist(), strict=True
        )
    }
    lines = [plan_line(moment)]
    for slot, record in enumerate(state.running):
        if record is None:
            continue
        slots, table = state.slots, state.tables[slot]
        counts = f"{slots.num_tokens[slot]} tokens, {slots.num_computed[slot]} computed, of at most {slots.limit[slot]}"
        blocks = _blocks(table)
        if state.window_tables:
            blocks += f", of windowed layers {_blocks(state.window_tables[slot])} from {slots.num_freed[slot]} on"
        lines.append(f"  slot {slot:<4} {_named(record.request)}  {counts}  {blocks}  {rows.get(slot, 'waits')}")
    for place, entry in enumerate(state.waiting):
        request = entry.request
        lines.append(f"  waits {place:<3} {_named(request)}  {entry.num_tokens} tokens, priority {request.priority}")
    pool = state.pool
    lines.append(f"  blocks: {_counts(pool)}")
    if state.window_pool is not None:
        lines.append(f"  blocks of windowed layers: {_counts(state.window_pool)}")
    if state.adapters:
        lines.append(f"  adapters, the next one to go first: {' '.join(map(str, state.adapters))}")
    return lines


def _named(request: Request) -> str:
    return f"{request.name}, adapter {request.adapter}" if request.adapter else request.name


def to_json(moment: Moment, names: Mapping[int, str] | None = None) -> dict[str, Any]:
    plan, events = moment.plan, moment.events

    def is_shown(request_id: int) -> bool:
        return names is None or request_id in names

    written: dict[str, Any] = {"event": moment.kind.name.lower(), "time": moment.time}
    if moment.added:
        written["requests"] = [
            {
                "id": request.sequence_id,
                **{name: getattr(request, name) for name in ("name", "num_prompt", "limit", "priority", "adapter")},
            }
            for request in moment.added
            if is_shown(request.sequence_id)
        ]
    if moment.aborted is not None:
        written["reasons"] = {
            str(request_id): reason for request_id, reason in moment.aborted.items() if is_shown(request_id)
        }
    if moment.forked:
        written["moves"] = [move._asdict() for move in moment.forked if is_shown(move.target)]
    if plan is not None:
        written["plan"] = plan.number
    if events is not None:
        counts = events.counts.tolist()
        columns = zip(events.ids.tolist(), counts, accumulate(counts), strict=True)
        written["tokens"] = {
            str(request_id): events.tokens[end - count : end].tolist()
            for request_id, count, end in columns
            if is_shown(request_id)
        }
        written["finished"] = {
            str(request_id): reason for request_id, reason in events.finished.items() if is_shown(request_id)
        }
        written["failed"] = [request_id for request_id in events.failed if is_shown(request_id)]
    elif plan is not None:
        owners = [record and record.request.sequence_id for record in moment.state.running]
        written["rows"] = [
            {"id": owners[slot], "slot": slot, "start": start, "length": length}
            for slot, start, length in zip(
                plan.slots.tolist(), plan.starts.tolist(), plan.lengths.tolist(), strict=True
            )
            if is_shown(owners[slot] or 0)
        ]
        written["admitted"] = [
            {
                "id": admission.request.sequence_id,
                "slot": admission.slot,
                "num_known": admission.num_known,
                "num_cached": admission.num_cached,
            }
            for admission in plan.admitted
            if is_shown(admission.request.sequence_id)
        ]
        written["preempted"] = [request_id for request_id in plan.preempted if is_shown(request_id)]
    if names is None:
        written |= {name.replace(" ", "_"): value for name, value in _sizes(moment.state).items()}
    if moment.difference is not None:
        written["difference"] = moment.difference
    return written
