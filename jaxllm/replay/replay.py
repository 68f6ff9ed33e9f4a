"""Runs a recording: the pure core over every event that a server wrote down, without a device or weights.

The same calls on the same state make the same plans; `replay` says where they do not. Files may be anything: whatever
is wrong with one is a UserError.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgpack
import numpy as np

from jaxllm.errors import UserError
from jaxllm.replay.recording import FORMAT, MAGIC, NUM_PIECES, Kind, describe, piece_path
from jaxllm.replay.snapshot import pack_request, pack_state, unpack_limits, unpack_request, unpack_state
from jaxllm.scheduler.recorded import Core
from jaxllm.scheduler.state import Events, Plan, Request, State

MAX_ENTRY = 1 << 30  # bytes of one value in a recording
END_OF_TIME = 253_402_300_800.0  # seconds from 1970 to the year 10000, which no date has
_KINDS = {int(kind): kind for kind in Kind}


@dataclass(frozen=True)
class Header:
    """What a piece says of itself."""

    run: str  # the process that wrote it
    jaxllm: str
    started: float  # seconds since 1970
    is_redacted: bool
    limits: Mapping[str, Any]
    about: Mapping[str, Any]


class Moment(NamedTuple):
    """An event, and the state behind it."""

    number: int  # of events, from 0
    time: float  # seconds since the recorded process began
    kind: Kind
    state: State
    plan: Plan | None = None  # that was made, or whose tokens came
    events: Events | None = None  # of a commit
    added: tuple[Request, ...] = ()
    aborted: Mapping[int, str] | None = None
    difference: str | None = None  # between what was recorded and what was made


class Cut(UserError):
    """A file ends where more must follow, as where its process was killed while it wrote."""


def pieces_of(path: Path) -> list[Path]:
    """List the files of a recording, the oldest first; a piece that is named itself is alone."""
    if not path.is_file():
        raise UserError(f"there is no file {path}.", "file")
    found = [piece for number in range(NUM_PIECES) if (piece := piece_path(path, number)).is_file()]
    return found[::-1]


class Replay:
    """One recording being run. Iterate `moments` once; `headers` has the pieces that it has come to."""

    def __init__(self, path: str | Path) -> None:
        self.pieces = pieces_of(Path(path))
        self.headers: list[Header] = []
        self.cuts: list[str] = []  # where pieces break off, a line each
        self._is_at_header = True
        self._core: Core | None = None
        self._plans: dict[int, Plan] = {}

    @property
    def header(self) -> Header:
        """The newest piece's."""
        return self.headers[-1]

    @property
    def core(self) -> Core:
        """The core as it is now."""
        if self._core is None:
            raise UserError("the recording is empty.", "file")
        return self._core

    def moments(self) -> Iterator[Moment]:
        """Give event after event. It ends behind the first plan that differs: from there on nothing would fit.

        Where a piece breaks off (`cuts`), the next one goes on with the state that it begins with.
        """
        count = 0
        for piece in self.pieces:
            if piece.stat().st_size == 0:
                continue
            self._is_at_header = True
            last = "before its first plan"
            with piece.open("rb") as file:
                try:
                    for entry in _entries(file, piece):
                        moment = self._take(entry, count)
                        if moment is not None:
                            yield moment
                            count += 1
                            if moment.difference is not None:
                                return
                            if moment.kind is Kind.PLAN and moment.plan is not None:
                                last = f"after plan {moment.plan.number} at {moment.time:.6f} s"
                except Cut as cut:
                    self.cuts.append(f"{cut}, {last}; the rest of it is lost")
                    self._core = None
                except UserError:
                    raise
                except (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError) as error:
                    what = f": {error}" if isinstance(error, ValueError) else ""  # others speak of Python's classes
                    raise UserError(f"{piece} is damaged at event {count}{what}.", "file") from error
                except RuntimeError as error:  # what must always hold in the core does not
                    raise UserError(f"{piece}: the core fails at event {count}: {error}.", "file") from error
        if not self.headers:
            raise UserError(
                self.cuts.pop() if self.cuts else f"{self.pieces[-1]} is empty: nothing was recorded.", "file"
            )

    def _take(self, entry: list[Any], number: int) -> Moment | None:
        if self._is_at_header:
            self._is_at_header = False
            self._begin(entry)
            return None
        kind, time = _KINDS[entry[0]], entry[1] / 1e6
        if kind is Kind.SNAPSHOT:
            return self._snapshot(entry[2], number, time)
        core = self.core
        if kind is Kind.ADD:
            requests = tuple(map(unpack_request, entry[2]))
            core.add(requests)
            return Moment(number, time, kind, core.state, added=requests)
        if kind is Kind.ABORT:
            reasons = {int(request_id): str(reason) for request_id, reason in entry[2].items()}
            core.abort(reasons)
            return Moment(number, time, kind, core.state, aborted=reasons)
        if kind is Kind.RESET:
            self._plans.clear()
            core.reset()
            return Moment(number, time, kind, core.state)
        if kind is Kind.PLAN:
            plan = core.plan(time)
            self._plans[plan.number] = plan
            return Moment(number, time, kind, core.state, plan, difference=_difference(entry[2:], plan))
        plan = self._plans.pop(entry[2])
        for older in [older for older in self._plans if older < plan.number]:
            del self._plans[older]  # empty, or of requests that have all ended
        events = self._commit(plan, *entry[3:])
        return Moment(number, time, kind, core.state, plan, events)

    def _begin(self, entry: list[Any]) -> None:
        if len(entry) != 3 or entry[0] != MAGIC:
            raise UserError("this is not a recording of `jaxllm serve --record`.", "file")
        if entry[1] != FORMAT:
            raise UserError(f"the recording is of format {entry[1]}, this jaxllm reads {FORMAT}.", "file")
        self.headers.append(_read_header(entry[2]))

    def _snapshot(self, data: Mapping[str, Any], number: int, time: float) -> Moment | None:
        """Begin with a piece's state, or compare it with what the piece before it has led to."""
        limits = unpack_limits(self.header.limits)
        if self._core is not None and self.headers[-2].run == self.header.run:
            made = self._pack()
            differing = [name for name in data if data[name] != made[name]]
            if differing:
                text = f"the state at the beginning of the next piece differs in {', '.join(differing)}"
                return Moment(number, time, Kind.SNAPSHOT, self.core.state, difference=text)
            return None
        state, plans, requests = unpack_state(
            data, limits
        )  # first: it finds out whether there is as much as limits say
        self._core = core = Core(limits)
        core.state = state
        core.requests.update(requests)
        self._plans = {plan.number: plan for plan in plans}
        return Moment(number, time, Kind.SNAPSHOT, core.state)

    def _pack(self) -> dict[str, Any]:
        core = self.core
        requests = [pack_request(request, request.digests) for request in core.requests.values()]
        plans = [plan for plan in self._plans.values() if len(plan.slots)]
        return pack_state(core.state, plans, requests, bytes)

    def _commit(self, plan: Plan, known: Any, failed: list[int] | None, grown: Mapping[int, Any] | None) -> Events:
        tokens = np.frombuffer(known, np.int32) if grown is None else np.full(len(plan.slots), -1, np.int32)
        if grown is not None:
            for row, token in known.items():
                tokens[row] = token
        if len(tokens) != len(plan.slots):
            raise ValueError("a step has another number of tokens")
        is_finite = None
        if failed is not None:
            is_finite = np.ones(len(tokens), np.bool_)
            is_finite[failed] = False
        events = self.core.commit(plan, tokens, is_finite)
        for request_id, digests in (grown or {}).items():
            request = self.core.requests[request_id]
            if request.digests is not None:
                request.digests.extend(digests)
        return events


def _read_header(data: Any) -> Header:
    """Read what a piece says of itself; ValueError where that is not of the kind that it must be."""
    if not isinstance(data, dict) or data.keys() != {field.name for field in fields(Header)}:
        raise ValueError("its header has other fields")
    for name, kind in (("run", str), ("jaxllm", str), ("is_redacted", bool), ("limits", dict), ("about", dict)):
        if not isinstance(data[name], kind):
            raise ValueError(f"its header's {name!r} is of another kind")
    started = data["started"]
    if type(started) not in (int, float) or not 0 <= started < END_OF_TIME:  # nor is NaN
        raise ValueError("its header's 'started' is no time")
    if not all(isinstance(text, str) for pair in data["about"].items() for text in pair):
        raise ValueError("its header's 'about' has what is no text")
    return Header(**data)


def _difference(recorded: list[int], plan: Plan) -> str | None:
    made = describe(plan)
    if recorded == made:
        return None
    names = ("number", "decode rows", "rows", "tokens", "checksum")
    told = ", ".join(
        f"{name} {was} and not {now}" for name, was, now in zip(names, recorded, made, strict=True) if was != now
    )
    return f"plan {plan.number} differs: recorded {told}"


def _entries(file: BinaryIO, path: Path) -> Iterator[list[Any]]:
    """Read entry after entry; UserError with the place for what is none, Cut where the file ends too early."""
    size = path.stat().st_size
    unpacker = msgpack.Unpacker(file, strict_map_key=False, max_buffer_size=min(size + 1, MAX_ENTRY))
    for num_entries in itertools.count():
        place = unpacker.tell()
        try:
            entry = unpacker.unpack()
        except msgpack.OutOfData:
            if place == size and num_entries != 1:  # behind a header comes a state
                return
            raise Cut(f"{path} breaks off at byte {size}", "file") from None
        except (ValueError, msgpack.UnpackException, RecursionError) as error:
            what = f": {error}" if str(error) else ""
            raise UserError(f"{path} is damaged at byte {place}{what}.", "file") from error
        if not isinstance(entry, list) or len(entry) < 2:
            raise UserError(f"{path} is no recording, or damaged at byte {place}.", "file")
        yield entry
