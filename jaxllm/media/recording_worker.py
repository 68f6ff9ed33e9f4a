"""The process of recordings.py: decodes one file with PyAV, from standard input.

Must start quickly: no JAX, no NumPy.
"""

from __future__ import annotations

import io
import json
import os
import resource
import sys
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

from jaxllm.errors import UserError
from jaxllm.media.sizes import MOST_PIXELS, check_size

_CODECS = frozenset(("h264", "hevc", "vp8", "vp9", "av1", "libdav1d", "libaom-av1", "mpeg4", "mjpeg", "libvpx-vp9"))
_MOST_THREADS = 4  # each holds frames
FAILED, FRAME = b"E", b"F"


class Recording:
    """A file's first video stream.

    Raises UserError for files that are refused, and any exception for damaged ones.
    """

    def __init__(self, data: bytes, kind: str, most_frames: int, name: str, parameter: str) -> None:
        import av  # pyright: ignore[reportMissingImports]

        self._data, self._kind, self._name, self._parameter, self._av = data, kind, name, parameter, av
        with self._opened() as container:
            stream = container.streams.video[0]
            context = stream.codec_context
            if context.name not in _CODECS:
                raise UserError(f"{name} has the codec {context.name!r:.40}, which is not read.", parameter)
            self.size = (context.width, context.height)
            self.fps = float(stream.average_rate or stream.guessed_rate or 0)
            # Headers may be wrong, packets are there.
            self.total = 0
            for packet in container.demux(stream):
                self.total += bool(packet.size and not packet.is_discard)
                if self.total > most_frames:
                    break

    def frames(self, indices: Sequence[int]) -> Iterator[bytes]:
        """Yield RGB of `size` for ascending, different indices, until the file ends."""
        wanted = iter(indices)
        following = next(wanted, None)
        with self._opened() as container:
            stream = container.streams.video[0]
            stream.codec_context.options = {"max_pixels": str(MOST_PIXELS)}
            stream.thread_type = "AUTO"
            stream.codec_context.thread_count = min(_MOST_THREADS, os.cpu_count() or 1)
            for index, frame in enumerate(container.decode(stream)):
                if following is None:
                    return
                if following == index:
                    yield self._shown(frame)
                    following = next(wanted, None)

    def _opened(self) -> Any:
        return self._av.open(io.BytesIO(self._data), format=self._kind, options={"max_pixels": str(MOST_PIXELS)})

    def _shown(self, frame: Any) -> bytes:
        check_size((frame.width, frame.height), self._name, self._parameter)
        width, height = self.size
        (plane,) = frame.reformat(width=width, height=height, format="rgb24").planes
        values, step = memoryview(plane), plane.line_size
        if step == 3 * width:
            return bytes(values[: step * height])
        return b"".join(values[at * step : at * step + 3 * width] for at in range(height))


def main() -> None:
    tasks, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    for descriptor in (0, 1):
        os.dup2(2, descriptor)  # library output is not a result
    most_bytes, seconds = map(int, sys.argv[1:3])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_DATA, (most_bytes, most_bytes))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))  # the first one ends it by SIGXCPU
    try:
        head = json.loads(_taken(tasks))
        recording = Recording(_taken(tasks), **head)
        facts = {"size": recording.size, "total": recording.total, "fps": recording.fps}
        _give(answers, FRAME, json.dumps(facts).encode())
        for frame in recording.frames(json.loads(_taken(tasks))):
            _give(answers, FRAME, frame)
        _give(answers, FAILED, b"[]")
    except (MemoryError, ImportError):  # of a library without memory
        raise SystemExit(1) from None
    except UserError as error:
        _give(answers, FAILED, json.dumps([str(error), error.parameter]).encode())
    except Exception:
        _give(answers, FAILED, b"[]")


def _taken(tasks: BinaryIO) -> bytes:
    return tasks.read(int.from_bytes(tasks.read(8)))


def _give(answers: BinaryIO, kind: bytes, data: bytes) -> None:
    answers.write(kind + len(data).to_bytes(8))
    answers.write(data)
    answers.flush()
