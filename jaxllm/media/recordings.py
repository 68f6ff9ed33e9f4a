"""Decode recordings in processes, because a file can crash a decoder, or let one packet of it decode for minutes.

A thousand hidden frames of 33 million pixels take 27 kB in H.264.
"""

from __future__ import annotations

import json
import time
import weakref
from collections.abc import Iterator, Sequence

from jaxllm.errors import UserError
from jaxllm.limited_process import TOO_MUCH_TIME, LimitedProcess
from jaxllm.media.recording_worker import FAILED

MOST_MEMORY = 2 << 30  # bytes
SECONDS = 30  # of processors, for a file
_WAIT_FACTOR = 10  # of the clock, per second of processors


class DamagedError(Exception):
    """A file cannot be decoded, or ends early."""


class RecordingProcess:
    """A file's first video stream, in a process that ends with this object.

    Raises UserError for files that are refused or exceed a limit.
    """

    def __init__(self, data: bytes, kind: str, most_frames: int, name: str, parameter: str) -> None:
        self._name, self._parameter = name, parameter
        self._process = LimitedProcess("jaxllm.media.recording_worker", str(MOST_MEMORY), str(SECONDS))
        weakref.finalize(self, LimitedProcess.end, self._process)
        head = {"kind": kind, "most_frames": most_frames, "name": name, "parameter": parameter}
        facts = json.loads(self._asked(json.dumps(head).encode(), data))
        self.size: tuple[int, int] = tuple(facts["size"])
        self.total, self.fps = int(facts["total"]), float(facts["fps"])

    def frames(self, indices: Sequence[int]) -> Iterator[bytes | bytearray]:
        """Yield RGB of `size` for ascending, different indices, until the file ends; once."""
        asked = [json.dumps(list(indices)).encode()]
        for _ in indices:
            yield self._asked(*asked)
            asked = []

    def end(self) -> None:
        self._process.end()

    def _asked(self, *sent: bytes) -> bytearray:
        """Send and return the answer."""
        give_up = time.monotonic() + _WAIT_FACTOR * SECONDS
        try:
            for data in sent:
                self._process.write(len(data).to_bytes(8))
                self._process.write(data)
            kind, length = self._process.read(1, give_up), self._process.read(8, give_up)
            answer = self._process.read(int.from_bytes(length), give_up)
        except (BrokenPipeError, EOFError):
            raise self._exceeded(self._process.why_ended()) from None
        except TimeoutError:
            raise self._exceeded(TOO_MUCH_TIME) from None
        if kind != FAILED:
            return answer
        refused = json.loads(answer)
        raise UserError(*refused) if refused else DamagedError

    def _exceeded(self, why: str) -> UserError:
        return UserError(
            f"{self._name} {why}: a video may take {SECONDS} s of a processor and {MOST_MEMORY >> 30} GiB; send a "
            "shorter or smaller one.",
            self._parameter,
        )
