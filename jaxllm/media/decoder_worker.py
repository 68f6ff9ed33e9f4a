"""The process of decoders.py: decodes one file with PyAV or soundfile, from standard input.

Must start quickly: no JAX, and NumPy only for sound.
"""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, BinaryIO

from jaxllm.errors import UserError
from jaxllm.media.sizes import MOST_PIXELS, check_size

_CODECS = frozenset(("h264", "hevc", "vp8", "vp9", "av1", "libdav1d", "libaom-av1", "mpeg4", "mjpeg", "libvpx-vp9"))
_MOST_THREADS = 4  # each holds frames
_SOUNDS = frozenset(("WAV", "WAVEX", "RF64", "FLAC", "OGG", "MP3"))
MOST_CHANNELS = 32
FRAMES = 1 << 18  # of sound, decoded at once
UNKNOWN = "{} is not WAV, FLAC, OGG or MP3, or it is damaged: {}."
FOUND, FAILED = b"F", b"E"


class Recording:
    """A file's first video stream.

    Raises UserError for files that are refused, and any exception for damaged ones.
    """

    def __init__(self, data: bytes, container: str, most_frames: int, name: str, parameter: str) -> None:
        import av  # pyright: ignore[reportMissingImports]

        self._data, self._container, self._name, self._parameter, self._av = data, container, name, parameter, av
        with self._opened() as opened:
            stream = opened.streams.video[0]
            context = stream.codec_context
            if context.name not in _CODECS:
                raise UserError(f"{name} has the codec {context.name!r:.40}, which is not read.", parameter)
            self.size = (context.width, context.height)
            # A header may be wrong, so packets are counted.
            total = 0
            for packet in opened.demux(stream):
                total += bool(packet.size and not packet.is_discard)
                if total > most_frames:
                    break
            fps = float(stream.average_rate or stream.guessed_rate or 0)
        self.facts: dict[str, Any] = {"size": self.size, "total": total, "fps": fps}

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
        return self._av.open(io.BytesIO(self._data), format=self._container, options={"max_pixels": str(MOST_PIXELS)})

    def _shown(self, frame: Any) -> bytes:
        check_size((frame.width, frame.height), self._name, self._parameter)
        width, height = self.size
        (plane,) = frame.reformat(width=width, height=height, format="rgb24").planes
        values, step = memoryview(plane), plane.line_size
        if step == 3 * width:
            return bytes(values[: step * height])
        return b"".join(values[at * step : at * step + 3 * width] for at in range(height))


class Sound:
    """A file's samples; raises UserError for files that are refused or damaged."""

    def __init__(self, data: bytes, name: str, parameter: str) -> None:
        import soundfile  # pyright: ignore[reportMissingImports]

        self._name, self._parameter = name, parameter
        with self._explained():
            self._file = soundfile.SoundFile(io.BytesIO(data))
            if self._file.format not in _SOUNDS:
                raise ValueError("unknown format")
        self.facts: dict[str, Any] = {name: getattr(self._file, name) for name in ("frames", "samplerate", "channels")}
        if not 1 <= self._file.channels <= MOST_CHANNELS:
            raise UserError(f"{name} may have at most {MOST_CHANNELS} channels, got {self._file.channels}.", parameter)

    def blocks(self) -> Iterator[bytes]:
        """Yield float32 samples with channels averaged."""
        import numpy as np

        while True:
            with self._explained():
                block = self._file.read(FRAMES // self._file.channels, dtype="float32", always_2d=True)
            if not len(block):
                return
            yield np.clip(np.nan_to_num(block.mean(axis=1)), -1.0, 1.0).tobytes()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except MemoryError:
            raise
        except Exception as error:
            why = str(error).rpartition(": ")[2].rstrip(".") or "it ends early"
            raise UserError(UNKNOWN.format(self._name, why), self._parameter) from error


def main() -> None:
    import resource  # not on Windows

    tasks, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    for descriptor in (0, 1):
        os.dup2(2, descriptor)  # library output is not a result
    kind, most_bytes, seconds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_DATA, (most_bytes, most_bytes))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))  # the first one ends it by SIGXCPU
    try:
        settings = json.loads(_taken(tasks))
        found = (Recording if kind == "recording" else Sound)(_taken(tasks), **settings)
        _give(answers, FOUND, json.dumps(found.facts).encode())
        asked = json.loads(_taken(tasks))
        for piece in found.frames(asked) if isinstance(found, Recording) else found.blocks():
            _give(answers, FOUND, piece)
        _give(answers, FOUND, b"")
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
