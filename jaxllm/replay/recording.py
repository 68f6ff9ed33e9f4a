"""The recorder: every call of the core with its time and the tokens that came, in a log that `jaxllm replay` can run.

A recording is a few files of bounded size, FILE the newest and FILE.1, FILE.2 … before it. Each is a run of msgpack
values: a header, a snapshot of the scheduler's state, then events. A piece can be replayed by itself, and a process
that dies loses at most the step that it was in. A disk that is full ends the recording, and nothing else.
"""

from __future__ import annotations

import io
import logging
import os
import secrets
import time
import uuid
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from enum import IntEnum
from hashlib import blake2b
from pathlib import Path
from typing import Any, cast

import msgpack
import numpy as np

from jaxllm.errors import UserError
from jaxllm.replay.snapshot import pack_request, pack_state
from jaxllm.scheduler.recorded import Core
from jaxllm.scheduler.scheduler import digests_of
from jaxllm.scheduler.state import Events, Plan, Request
from jaxllm.version import __version__

MAGIC = "jaxllm recording"
FORMAT = 1
NUM_PIECES = 4
MIN_BYTES = 1 << 20
_log = logging.getLogger(__name__)


class Kind(IntEnum):
    """What an entry of a recording is; its fields follow, the first of them its time in microseconds."""

    SNAPSHOT = 0  # the state
    ADD = 1  # requests
    ABORT = 2  # reasons by id
    RESET = 3
    PLAN = 4  # number, decodes, rows, tokens, check
    COMMIT = 5  # number, tokens, rows that were not finite, new digests by id


class FileRecorder:
    """Writes a recording. Belongs to the engine's thread; see `core.Recorder` for what it is told."""

    def __init__(
        self,
        path: str | Path,
        max_bytes: int = 256 << 20,
        is_redacted: bool = False,
        about: Mapping[str, Any] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Record into `path`, all pieces together at most `max_bytes`; what is there already is kept as older pieces.

        Of a redacted recording nobody can tell prompts or outputs: blocks of tokens are keyed hashes, the key of which
        is written nowhere. `about` is told to who reads it; `clock` is the engine's.
        """
        if max_bytes < MIN_BYTES:
            raise UserError(f"record_max_bytes must be at least {MIN_BYTES}.", "record_max_bytes")
        self.path = Path(path)
        self._piece_bytes = max_bytes // NUM_PIECES
        self._about = dict(about or {})
        self._clock = clock
        self._key = secrets.token_bytes(32) if is_redacted else None
        self._file: io.FileIO | None = None
        self._size = 0
        self._run = uuid.uuid4().hex
        self._plans: dict[int, Plan] = {}  # whose tokens are still to come
        self._digests: dict[int, list[bytes]] = {}  # of redacted requests' full blocks, by id
        try:  # where nothing can be written is told before a model is loaded
            self.path.parent.mkdir(parents=True, exist_ok=True)
            _open(self.path, os.O_APPEND).close()
        except OSError as error:
            raise UserError(f"record: cannot write {path}: {error.strerror}.", "record") from error

    def begin(self, core: Core) -> None:
        """Write the first piece's header and state."""
        self._core = core
        self._start, self._start_unix = self._clock(), time.time()
        self._begin_piece()

    def added(self, requests: Sequence[Request]) -> None:
        """Note new requests."""
        if self._file is None:
            return
        if self._key is not None:
            limits = self._core.limits
            for request in requests:
                self._digests[request.id] = list(digests_of(request, limits, (), request.num_prompt))
        self._write([Kind.ADD, self._now(), list(map(self._pack_request, requests))])

    def aborted(self, reasons: Mapping[int, str]) -> None:
        """Note who was taken out."""
        if self._file is not None and reasons:
            self._forget(reasons)
            self._write([Kind.ABORT, self._now(), dict(reasons)])

    def was_reset(self) -> None:
        """Note that the cache was forgotten."""
        if self._file is not None:
            self._plans.clear()
            self._write([Kind.RESET, self._now()])

    def planned(self, plan: Plan) -> None:
        """Note a plan by its sizes and a checksum: a replay makes it again."""
        if self._file is None:
            return
        if len(plan.slots):
            self._plans[plan.number] = plan
        self._write([Kind.PLAN, self._microseconds(plan.now), *describe(plan)])

    def committed(self, plan: Plan, tokens: np.ndarray, is_finite: np.ndarray | None, events: Events) -> None:
        """Note what a step sampled; begin the next piece if this one is full."""
        if self._file is None:
            return
        for number in [number for number in self._plans if number <= plan.number]:
            del self._plans[number]
        failed = None if is_finite is None or is_finite.all() else np.flatnonzero(~is_finite).tolist()
        if self._key is None:
            # A row that samples nothing may hold anything.
            known: Any = np.where(plan.samples, tokens, 0).astype(np.int32).tobytes()
            grown = None
        else:
            known, grown = self._redacted(plan, events)
            self._forget((*events.finished, *events.failed))
        self._write([Kind.COMMIT, self._now(), plan.number, known, failed, grown])
        if self._size >= self._piece_bytes:
            self._begin_piece()

    def close(self) -> None:
        """End the recording; what is told from now on is not written."""
        if self._file is not None:
            file, self._file = self._file, None
            with suppress(OSError):
                file.close()

    def _redacted(self, plan: Plan, events: Events) -> tuple[dict[int, int], dict[int, list[bytes]]]:
        """Return what a replay needs of a step's tokens: stop tokens by row, and blocks that are full now by id.

        Most rows give neither, and are not looked at one by one: 5 us for 64 rows where that took 14.
        """
        stops = {
            int(events.rows[at]): int(events.tokens[at])
            for request_id, reason in events.finished.items()
            if reason == "stop"
            for at in np.flatnonzero(events.ids == request_id)
        }
        grown: dict[int, list[bytes]] = {}
        limits = self._core.limits
        lengths = (plan.starts + plan.lengths)[events.rows] + 1  # of the sequences, with what was sampled
        for request_id in events.ids[lengths % limits.block_size == 0].tolist():
            request = self._core.requests.get(request_id)
            if request is not None:
                before = self._digests[request_id]
                self._digests[request_id] = list(digests_of(request, limits, before, len(request.tokens)))
                grown[request_id] = list(map(self._hide, self._digests[request_id][len(before) :]))
        return stops, grown

    def _forget(self, request_ids: Iterable[int]) -> None:
        for request_id in request_ids:
            self._digests.pop(request_id, None)

    def _hide(self, digest: bytes) -> bytes:
        """Return what is written of a block's digest: it can be guessed by who guesses the block's tokens."""
        return digest if self._key is None else blake2b(digest, key=self._key, digest_size=16).digest()

    def _pack_request(self, request: Request) -> dict[str, Any]:
        if self._key is None:
            return pack_request(request, None)
        return pack_request(request, list(map(self._hide, self._digests[request.id])))

    def _begin_piece(self) -> None:
        """Put the older pieces one further, and write into a new one."""
        core = self._core
        header = {
            "run": self._run,
            "jaxllm": __version__,
            "started": self._start_unix,
            "is_redacted": self._key is not None,
            "limits": asdict(core.limits),
            "about": self._about,
        }
        requests = list(map(self._pack_request, core.requests.values()))
        state = pack_state(core.state, self._plans.values(), requests, self._hide)
        self.close()
        try:
            pieces = [piece_path(self.path, number) for number in range(NUM_PIECES)]
            if pieces[0].exists() and pieces[0].stat().st_size:
                for older, newer in zip(pieces[:0:-1], pieces[-2::-1], strict=True):
                    if newer.exists():
                        newer.replace(older)
            self._file, self._size = _open(self.path, os.O_TRUNC), 0
        except OSError as error:
            _log.error("the recording ends: %s: %s", self.path, error.strerror)
            return
        self._write([MAGIC, FORMAT, header])
        self._write([Kind.SNAPSHOT, self._now(), state])

    def _write(self, entry: list[Any]) -> None:
        """Append an entry. A call of the system for each costs 2 us, and nothing is lost with the process."""
        if self._file is None:
            return
        data = cast(bytes, msgpack.packb(entry))
        try:
            self._file.write(data)
        except OSError as error:
            _log.error("the recording ends: %s: %s", self.path, error.strerror)
            self.close()
        else:
            self._size += len(data)

    def _now(self) -> int:
        return self._microseconds(self._clock())

    def _microseconds(self, now: float) -> int:
        return int((now - self._start) * 1e6)


def describe(plan: Plan) -> list[int]:
    """Return a plan's number, decode rows, rows, tokens, and a checksum of all that it says."""
    check = 0
    for column in (plan.slots, plan.starts, plan.lengths, plan.samples, plan.table):
        check = zlib.crc32(column.tobytes(), check)
    for one in plan.admitted:
        numbers = np.asarray([one.slot, one.request.id, one.num_known, one.num_cached], np.int64)
        check = zlib.crc32(numbers.tobytes(), check)
    if plan.preempted:
        check = zlib.crc32(np.asarray(plan.preempted, np.int64).tobytes(), check)
    num_rows = len(plan.slots)
    num_tokens = num_rows if num_rows == plan.num_decodes else plan.num_tokens
    return [plan.number, plan.num_decodes, num_rows, num_tokens, check]


def piece_path(path: Path, number: int) -> Path:
    """Name a piece of a recording; 0 is the newest."""
    return path.with_name(f"{path.name}.{number}") if number else path


def _open(path: Path, flags: int) -> io.FileIO:
    """Open a file for its owner alone: a recording holds what people wrote."""
    return io.FileIO(os.open(path, os.O_WRONLY | os.O_CREAT | flags, 0o600), "w")
