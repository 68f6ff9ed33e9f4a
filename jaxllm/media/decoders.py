"""Decode files in processes: a file can crash a library, let it write lines, or keep one call of it busy for minutes.

A thousand hidden frames of 33 million pixels take 27 kB in H.264.
"""

from __future__ import annotations

import json
import time
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

from jaxllm.errors import UserError
from jaxllm.limited_process import TOO_MUCH_TIME, LimitedProcess
from jaxllm.media.decoder_worker import FAILED

MOST_MEMORY = 2 << 30  # bytes
SECONDS = 30  # of processors, for a file
WAIT_FACTOR = 10  # of the clock, per second of processors


class DamagedError(Exception):
    """A file cannot be decoded, or ends early."""


class _Decoder:
    """A process that decodes a file, and ends with this object.

    Raises UserError for files that are refused or exceed a limit, and DamagedError.
    """

    def __init__(self, kind: str, data: bytes, settings: dict[str, Any], seconds: int) -> None:
        self._name, self._parameter, self._seconds = settings["name"], settings["parameter"], seconds
        self._process = LimitedProcess("jaxllm.media.decoder_worker", kind, str(MOST_MEMORY), str(seconds))
        weakref.finalize(self, LimitedProcess.end, self._process)
        self.facts: dict[str, Any] = json.loads(self._asked(json.dumps(settings).encode(), data))

    def end(self) -> None:
        self._process.end()

    def _asked(self, *sent: bytes) -> bytearray:
        """Send and return the next answer, an empty one at the end."""
        give_up = time.monotonic() + WAIT_FACTOR * self._seconds
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
            f"{self._name} {why}: it may take {self._seconds} s of a processor and {MOST_MEMORY >> 30} GiB; send a "
            "shorter or smaller one.",
            self._parameter,
        )


class RecordingProcess(_Decoder):
    """A file's first video stream."""

    def __init__(self, data: bytes, container: str, most_frames: int, name: str, parameter: str) -> None:
        settings = {"container": container, "most_frames": most_frames, "name": name, "parameter": parameter}
        super().__init__("recording", data, settings, SECONDS)

    def frames(self, indices: Sequence[int]) -> Iterator[bytes | bytearray]:
        """Yield RGB of the file's size for ascending, different indices, until the file ends; once."""
        sent = [json.dumps(list(indices)).encode()]
        for _ in indices:
            frame = self._asked(*sent)
            if not frame:
                return
            yield frame
            sent = []


class SoundProcess(_Decoder):
    """A file of sound that soundfile reads."""

    def __init__(self, data: bytes, name: str, parameter: str, more_seconds: int) -> None:
        super().__init__("sound", data, {"name": name, "parameter": parameter}, SECONDS + more_seconds)

    def blocks(self) -> Iterator[bytes | bytearray]:
        """Yield float32 samples with channels averaged; once."""
        sent = [b"[]"]
        while block := self._asked(*sent):
            yield block
            sent = []
