"""Record each scheduler call, with time and sampled tokens, for `jaxllm replay`.

A recording is a file of msgpack values: header, calls, end mark. A killed process loses at most its current step and
the mark.
"""

from __future__ import annotations

import io
import logging
import os
import secrets
import time
import zlib
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from enum import IntEnum
from hashlib import blake2b
from pathlib import Path
from typing import Any, cast

import msgpack
import numpy as np

from jaxllm.errors import UserError
from jaxllm.scheduler.host_tier import Landed
from jaxllm.scheduler.recorded import RecordedScheduler
from jaxllm.scheduler.state import Events, Fork, Plan, Request
from jaxllm.version import __version__

MAGIC = "jaxllm recording"
FORMAT = 10
MIN_BYTES = 1 << 20
_PSEUDONYM = 1 << 30  # above all vocabularies, so never a stop token
_log = logging.getLogger(__name__)


class Kind(IntEnum):
    """The type of an entry; its fields follow, first the time in microseconds."""

    ADD = 0
    ABORT = 1  # reasons by id
    RESET = 2
    PLAN = 3  # number, decodes, rows, tokens, checksum
    # Number, tokens, rows with non-finite logits; per row the tokens kept and sampled (None: one each).
    COMMIT = 4
    END = 5
    FORK = 6  # target, source and token of each move
    LANDED = 7  # plan, group and block of each ended copy, and whether it succeeded
    RECEIVED = 8  # id; group and index of each fetched block
    PASSED_OVER = 9  # ids


class EventRecorder(ABC):
    """Makes an entry of each call, on the engine's thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, pseudonyms: Pseudonyms | None = None) -> None:
        """`clock` is the engine's; `pseudonyms` replace tokens."""
        self._clock = clock
        self._pseudonyms = pseudonyms
        self._start = 0.0

    @property
    def is_on(self) -> bool:
        return True

    @abstractmethod
    def write(self, entry: list[Any]) -> None:
        """Write plain data with msgpack."""

    def begin(self, core: RecordedScheduler) -> None:
        self._start = self._clock()

    def added(self, requests: Sequence[Request]) -> None:
        if self.is_on:
            self.write([Kind.ADD, self._now(), [pack_request(request, self._pseudonyms) for request in requests]])

    def aborted(self, reasons: Mapping[int, str]) -> None:
        if self.is_on and reasons:
            self._forget(reasons)
            self.write([Kind.ABORT, self._now(), dict(reasons)])

    def was_reset(self) -> None:
        if self.is_on:
            self.write([Kind.RESET, self._now()])

    def landed(self, landed: Sequence[Landed]) -> None:
        if self.is_on:
            self.write([Kind.LANDED, self._now(), [list(each) for each in landed]])

    def received(self, owner: int, blocks: Sequence[tuple[int, int]], places: Sequence[int]) -> None:
        if self.is_on:
            self.write([Kind.RECEIVED, self._now(), owner, [list(each) for each in blocks]])

    def passed_over(self, request_ids: Collection[int]) -> None:
        if self.is_on:
            self.write([Kind.PASSED_OVER, self._now(), list(request_ids)])

    def planned(self, plan: Plan) -> None:
        """Record sizes and checksum; a replay recomputes the plan."""
        if self.is_on:
            self.write([Kind.PLAN, self._microseconds(plan.now), *describe(plan)])

    def committed(
        self,
        plan: Plan,
        tokens: np.ndarray,
        is_finite: np.ndarray | None,
        counts: np.ndarray | None,
        sampled: np.ndarray | None,
        events: Events,
    ) -> None:
        if not self.is_on:
            return
        failed = None if is_finite is None or is_finite.all() else np.flatnonzero(~is_finite).tolist()
        # Other rows hold arbitrary values.
        known = (tokens.T * plan.samples).T.astype(np.int32)
        if self._pseudonyms is not None:
            known = self._disguised(tokens, events, self._pseudonyms)
            self._forget((*events.finished, *events.failed))
        lengths = (None if each is None else each.astype(np.int32).tobytes() for each in (counts, sampled))
        self.write([Kind.COMMIT, self._now(), plan.number, known.tobytes(), failed, *lengths])

    def _disguised(self, tokens: np.ndarray, events: Events, pseudonyms: Pseudonyms) -> np.ndarray:
        known = np.full(tokens.shape, _PSEUDONYM, np.int32)
        sequences = np.repeat(events.ids, events.counts)
        hidden = np.asarray(pseudonyms.extend(sequences.tolist(), events.tokens.tolist()), np.int32)
        ends = np.cumsum(events.counts)
        for sequence, reason in events.finished.items():
            if reason == "stop":  # blocks with this token are never shared
                last = ends[events.ids == sequence] - 1
                hidden[last] = events.tokens[last]
        places = np.arange(len(hidden)) - np.repeat(ends - events.counts, events.counts)
        known.reshape(len(known), -1)[np.repeat(events.rows, events.counts), places] = hidden
        return known

    def forked(self, moves: Sequence[Fork]) -> None:
        if self.is_on:
            hidden = moves if self._pseudonyms is None else self._pseudonyms.fork(moves)
            self.write([Kind.FORK, self._now(), [list(move) for move in hidden]])

    @abstractmethod
    def close(self) -> None:
        """End the entries."""

    def _forget(self, sequences: Iterable[int]) -> None:
        if self._pseudonyms is not None:
            self._pseudonyms.forget(sequences)

    def _now(self) -> int:
        return self._microseconds(self._clock())

    def _microseconds(self, now: float) -> int:
        return int((now - self._start) * 1e6)


class FileRecorder(EventRecorder):
    """Writes a recording."""

    def __init__(
        self,
        path: str | Path,
        max_bytes: int = 256 << 20,
        is_redacted: bool = False,
        about: Mapping[str, Any] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Record into `path`, at most `max_bytes`; an existing file is renamed to `path`.old.

        With `is_redacted`, tokens are replaced by keyed hashes; the key is not stored. `about` is shown to readers.
        """
        super().__init__(clock, Pseudonyms() if is_redacted else None)
        if max_bytes < MIN_BYTES:
            raise UserError(f"record_max_bytes must be at least {MIN_BYTES}.", "record_max_bytes")
        self.path = Path(path)
        self._max_bytes = max_bytes
        self._about = dict(about or {})
        self.size = 0
        try:  # before the model is loaded
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if self.path.exists() and self.path.stat().st_size:
                self.path.replace(f"{self.path}.old")
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
            self.file: io.FileIO | None = io.FileIO(os.open(self.path, flags, 0o600), "w")  # users' texts
        except OSError as error:
            raise UserError(f"record: cannot write {path}: {error.strerror}.", "record") from error

    @property
    def is_on(self) -> bool:
        return self.file is not None

    def begin(self, core: RecordedScheduler) -> None:
        super().begin(core)
        header = {
            "jaxllm": __version__,
            "started": time.time(),
            "is_redacted": self._pseudonyms is not None,
            "limits": asdict(core.limits),
            "about": self._about,
        }
        self.write([MAGIC, FORMAT, header])

    def close(self) -> None:
        """End the recording; later calls are ignored."""
        self._end("the engine has ended")

    def _end(self, why: str) -> None:
        if self.file is not None:
            file, self.file = self.file, None
            with suppress(OSError):
                file.write(cast(bytes, msgpack.packb([Kind.END, self._now(), why])))
                file.close()

    def write(self, entry: list[Any]) -> None:
        """Append an entry unbuffered, to survive a crash: 2 us."""
        if self.file is None:
            return
        data = cast(bytes, msgpack.packb(entry))
        self.size += len(data)
        if self.size > self._max_bytes:
            _log.warning("the recording ends: %s has %d bytes (--record-max-bytes)", self.path, self._max_bytes)
            self._end("the file is full")
            return
        try:
            self.file.write(data)
        except OSError as error:
            _log.error("the recording ends: %s: %s", self.path, error.strerror)
            self._end("the file cannot be written")


class Pseudonyms:
    """Pseudonyms of tokens: keyed hashes of the sequence up to each."""

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)
        self._states: dict[int, bytes] = {}  # hash of key and tokens

    def begin(self, sequence: int, tokens: Sequence[int]) -> array[int]:
        self._states[sequence] = self._key
        return array("i", self.extend([sequence] * len(tokens), tokens))

    def extend(self, sequences: Sequence[int], tokens: Sequence[int]) -> list[int]:
        states, hidden = self._states, []
        for sequence, token in zip(sequences, tokens, strict=True):
            state = states[sequence] = blake2b(states[sequence] + token.to_bytes(4, "little"), digest_size=32).digest()
            hidden.append(_PSEUDONYM | int.from_bytes(state[:4], "little") >> 2)
        return hidden

    def fork(self, moves: Sequence[Fork]) -> list[Fork]:
        parents = {move.source: self._states[move.source] for move in moves}
        self._states.update((move.target, parents[move.source]) for move in moves)
        hidden = self.extend([move.target for move in moves], [move.token for move in moves])
        return [move._replace(token=token) for move, token in zip(moves, hidden, strict=True)]

    def of_bytes(self, value: bytes) -> bytes:
        return blake2b(value, key=self._key, digest_size=16).digest()

    def forget(self, sequences: Iterable[int]) -> None:
        for sequence in sequences:
            self._states.pop(sequence, None)


def pack_request(request: Request, pseudonyms: Pseudonyms | None = None) -> dict[str, Any]:
    tokens, root = request.tokens, request.root
    hidden = bytes if pseudonyms is None else pseudonyms.of_bytes
    if pseudonyms is not None:
        tokens = pseudonyms.begin(request.sequence_id, tokens)
        root = root and pseudonyms.of_bytes(root)
    return {
        "id": request.sequence_id,
        "name": request.name,
        "num_prompt": request.num_prompt,
        "limit": request.limit,
        "stop_ids": list(request.stop_ids),
        "priority": request.priority,
        "reads_cache": request.reads_cache,
        "root": root,
        "adapter": request.adapter,
        "may_draft": request.may_draft,
        "beam_group": request.beam_group,
        "media": [[each.start, each.length, hidden(each.digest)] for each in request.media],
        "source": None if request.source is None else [hidden(request.source.digest), request.source.length],
        "tokens": tokens.tobytes(),
    }


def describe(plan: Plan) -> list[int]:
    """Return a plan's sizes, and a checksum of its columns."""
    check = 0
    for column in (plan.slots, plan.starts, plan.lengths, plan.samples, plan.table, plan.moves):
        check = zlib.crc32(column.tobytes(), check)
    for one in plan.admitted:
        numbers = np.asarray([one.slot, one.request.sequence_id, one.num_known, one.num_cached], np.int64)
        check = zlib.crc32(numbers.tobytes(), check)
    encoded = [number for each in plan.encodes for number in (each.sequence_id, each.index, *each.units)]
    for numbers in (plan.preempted, plan.adapters, (1,) * plan.proposes, encoded):
        if numbers:
            check = zlib.crc32(np.asarray(numbers, np.int64).tobytes(), check)
    return [plan.number, plan.num_decodes, len(plan.slots), plan.num_tokens, check]
