"""Replay a recording on the scheduler alone; report the first plan that differs."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgpack
import numpy as np

from jaxllm.errors import UserError
from jaxllm.replay.recording import FORMAT, MAGIC, Kind, describe
from jaxllm.scheduler.host_tier import Landed
from jaxllm.scheduler.media import Segment
from jaxllm.scheduler.recorded import RecordedScheduler
from jaxllm.scheduler.state import Events, Fork, Limits, Plan, Request, Source, State
from jaxllm.speculative_config import MAX_DRAFTS

MAX_ENTRY = 1 << 30  # bytes of a value
END_OF_TIME = 253_402_300_800.0  # year 10000, beyond dates
_KINDS = {int(kind): kind for kind in Kind}


@dataclass(frozen=True)
class Header:
    """A recording's header."""

    jaxllm: str
    started: float  # seconds since 1970
    is_redacted: bool
    limits: Mapping[str, Any]
    about: Mapping[str, Any]


class Moment(NamedTuple):
    """An event, and the state after it."""

    number: int
    time: float  # since the engine's start
    kind: Kind
    state: State
    plan: Plan | None = None  # computed, or being committed
    events: Events | None = None
    added: tuple[Request, ...] = ()
    aborted: Mapping[int, str] | None = None
    forked: tuple[Fork, ...] = ()
    difference: str | None = None  # between the recorded and the computed plan


class Replayer:
    """A scheduler that repeats recorded calls."""

    def __init__(self, limits: Limits) -> None:
        self.core = RecordedScheduler(limits)
        self.plans: dict[int, Plan] = {}

    def take(self, entry: list[Any], number: int) -> Moment:
        """Repeat the call of an entry other than END."""
        core, kind, time = self.core, _KINDS[entry[0]], entry[1] / 1e6
        if kind is Kind.ADD:
            requests = tuple(map(_read_request, entry[2]))
            names = {request.sequence_id for request in requests}
            if len(names) < len(requests) or names & core.requests.keys():
                raise ValueError("a request is added twice")
            core.add(requests)
            return Moment(number, time, kind, core.state, added=requests)
        if kind is Kind.ABORT:
            reasons = {int(request_id): str(reason) for request_id, reason in entry[2].items()}
            core.abort(reasons)
            return Moment(number, time, kind, core.state, aborted=reasons)
        if kind is Kind.RESET:
            self.plans.clear()
            core.reset()
            return Moment(number, time, kind, core.state)
        if kind is Kind.LANDED:
            core.land([Landed(int(plan), int(group), int(at), bool(ok)) for plan, group, at, ok in entry[2]])
            return Moment(number, time, kind, core.state)
        if kind is Kind.RECEIVED:
            core.receive(int(entry[2]), [(int(group), int(index)) for group, index in entry[3]])
            return Moment(number, time, kind, core.state)
        if kind is Kind.PASSED_OVER:
            core.pass_over([int(request_id) for request_id in entry[2]])
            return Moment(number, time, kind, core.state)
        if kind is Kind.FORK:
            moves = tuple(Fork(*map(int, move)) for move in entry[2])
            core.fork(moves)
            return Moment(number, time, kind, core.state, forked=moves)
        if kind is Kind.PLAN:
            plan = core.plan(time)
            self.plans[plan.number] = plan
            return Moment(number, time, kind, core.state, plan, difference=_difference(entry[2:], plan))
        plan = self.plans.pop(entry[2])
        for older in [older for older in self.plans if older < plan.number]:
            del self.plans[older]  # empty or ended
        events = self._commit(plan, *entry[3:])
        return Moment(number, time, kind, core.state, plan, events)

    def _commit(
        self, plan: Plan, known: bytes, failed: list[int] | None, lengths: bytes | None, sampled_lengths: bytes | None
    ) -> Events:
        num_rows, tokens, counts, sampled = len(plan.slots), np.frombuffer(known, np.int32), None, None
        if lengths is not None:
            counts = np.frombuffer(lengths, np.int32)
            tokens = tokens.reshape(num_rows, -1)
            if not (len(counts) == num_rows and (0 <= counts).all() and (counts <= tokens.shape[1]).all()):
                raise ValueError("a step has another number of tokens")
            if sampled_lengths is not None:
                sampled = np.frombuffer(sampled_lengths, np.int32)
                if not (len(sampled) == num_rows and (1 <= sampled).all() and (sampled <= plan.lengths).all()):
                    raise ValueError("a step has sampled another number of tokens")
        if len(tokens) != num_rows:
            raise ValueError("a step has another number of tokens")
        is_finite = None
        if failed is not None:
            is_finite = np.ones(len(tokens), np.bool_)
            is_finite[failed] = False
        return self.core.commit(plan, tokens, is_finite, counts, sampled)


class Replay:
    """A replay of one recording. Iterate `moments` once."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            raise UserError(f"there is no file {path}.", "file")
        self.header: Header | None = None
        self.end = ""  # "" without an end mark
        self.cut: str | None = None  # where an entry is truncated
        self._replayer: Replayer | None = None

    @property
    def core(self) -> RecordedScheduler:
        if self._replayer is None:
            raise UserError("the recording is empty.", "file")
        return self._replayer.core

    def moments(self) -> Iterator[Moment]:
        count, last = 0, "before its first plan"
        with self.path.open("rb") as file:
            try:
                for entry in self._entries(file):
                    moment = self._take(entry, count)
                    if moment is None:
                        continue
                    yield moment
                    count += 1
                    if moment.difference is not None:
                        return
                    if moment.kind is Kind.PLAN and moment.plan is not None:
                        last = f"after plan {moment.plan.number} at {moment.time:.6f} s"
            except UserError:
                raise
            except (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError) as error:
                what = f": {error}" if isinstance(error, ValueError) else ""  # others name Python classes
                raise UserError(f"{self.path} is damaged at event {count}{what}.", "file") from error
            except RuntimeError as error:  # violated invariant
                raise UserError(f"{self.path}: the scheduler fails at event {count}: {error}.", "file") from error
        if self.header is None:
            what, self.cut = self.cut or f"{self.path} is empty: nothing was recorded", None
            raise UserError(f"{what}.", "file")
        if self.cut is not None:
            self.cut += f", {last}; the rest of it is lost"

    def _take(self, entry: list[Any], number: int) -> Moment | None:
        if self._replayer is None:
            self.header = _read_header(entry)
            self._replayer = Replayer(_read_limits(self.header.limits))
            return None
        if _KINDS[entry[0]] is Kind.END:
            self.end = str(entry[2])
            return None
        return self._replayer.take(entry, number)

    def _entries(self, file: BinaryIO) -> Iterator[list[Any]]:
        """Yield entries; raise UserError if damaged. Sets `cut` if the file is truncated."""
        path, size = self.path, self.path.stat().st_size
        unpacker = msgpack.Unpacker(file, strict_map_key=False, max_buffer_size=min(size + 1, MAX_ENTRY))
        while True:
            place = unpacker.tell()
            try:
                entry = unpacker.unpack()
            except msgpack.OutOfData:
                if place != size:
                    self.cut = f"{path} breaks off at byte {size}"
                return
            except (ValueError, msgpack.UnpackException, RecursionError) as error:
                what = f": {error}" if str(error) else ""
                raise UserError(f"{path} is damaged at byte {place}{what}.", "file") from error
            if not isinstance(entry, list) or len(entry) < 2:
                raise UserError(f"{path} is no recording, or damaged at byte {place}.", "file")
            yield entry


def _read_header(entry: list[Any]) -> Header:
    if len(entry) != 3 or entry[0] != MAGIC:
        raise UserError("this is not a recording of `jaxllm serve --record`.", "file")
    if entry[1] != FORMAT:
        raise UserError(f"the recording is of format {entry[1]}, this jaxllm reads {FORMAT}.", "file")
    data = entry[2]
    if not isinstance(data, dict) or data.keys() != {field.name for field in fields(Header)}:
        raise ValueError("its header has other fields")
    for name, kind in (("jaxllm", str), ("is_redacted", bool), ("limits", dict), ("about", dict)):
        if not isinstance(data[name], kind):
            raise ValueError(f"its header's {name!r} is of another kind")
    started = data["started"]
    if type(started) not in (int, float) or not 0 <= started < END_OF_TIME:
        raise ValueError("its header's 'started' is no time")
    if not all(isinstance(text, str) for pair in data["about"].items() for text in pair):
        raise ValueError("its header's 'about' has what is no text")
    return Header(**data)


def _difference(recorded: list[int], plan: Plan) -> str | None:
    made = describe(plan)
    if recorded == made:
        return None
    names = ("number", "decode rows", "rows", "tokens", "checksum")
    written = ", ".join(
        f"{name} {was} and not {now}" for name, was, now in zip(names, recorded, made, strict=True) if was != now
    )
    return f"plan {plan.number} differs: recorded {written}"


def _read_limits(data: Mapping[str, Any]) -> Limits:
    known = asdict(Limits(num_slots=1, num_blocks=1, block_size=1, max_step_tokens=1, max_step_chunks=1))
    if data.keys() != known.keys():
        raise ValueError("the limits are those of another version")
    for name, value in data.items():
        if type(value) is not type(known[name]) or not 0 <= value <= 2**24:
            raise ValueError(f"{name} is {value!r}")
    if data["max_drafts"] > MAX_DRAFTS or data["max_verified"] > data["max_step_tokens"]:
        raise ValueError("there are more drafts than tokens")
    if not 1 <= data["num_slots"] <= 2**14 or not 1 <= data["block_size"] or not 1 <= data["num_blocks"]:
        raise ValueError("there are no slots or no blocks")
    if data["num_host_blocks"] and data["window"] and not data["num_host_window_blocks"]:
        raise ValueError("the host has blocks of some layers only")
    if data["num_media_units"] and not data["media_unit"]:
        raise ValueError("a unit of the encoder's cache has no embeddings")
    if not 1 <= data["num_ticks"] <= 1024:
        raise ValueError("a plan's tokens come in no tick, or in one too far")
    return Limits(**{**data, "records_blocks": False})


def _read_request(fields: Mapping[str, Any]) -> Request:
    return Request(
        sequence_id=int(fields["id"]),
        tokens=array("i", fields["tokens"]),
        num_prompt=int(fields["num_prompt"]),
        limit=int(fields["limit"]),
        stop_ids=tuple(map(int, fields["stop_ids"])),
        priority=int(fields["priority"]),
        root=fields["root"],
        adapter=int(fields["adapter"]),
        may_draft=bool(fields["may_draft"]),
        beam_group=int(fields["beam_group"]),
        media=tuple(Segment(int(start), int(length), digest) for start, length, digest in fields["media"]),
        source=None if fields["source"] is None else Source(fields["source"][0], int(fields["source"][1])),
        reads_cache=bool(fields["reads_cache"]),
        name=str(fields["name"]),
    )


if sys.byteorder != "little":
    raise ImportError("recordings are little-endian")
