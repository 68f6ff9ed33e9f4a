"""`python -m tests.fuzz.media_run`: hostile videos and sounds in processes, so that a crash of a library is found.

Each is read as a server does for a part of a message. It is taken or refused by an error that names the part, within
bounds of time and memory, without a connection, and leaves no file open.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import re
import resource
import select
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from tests.support.paths import ROOT
from tests.support.peak_memory import peak, start_peak

_SECONDS = 30.0  # of processors, for one input
_MEMORY = {"video": 2 << 30, "sound": 1 << 29}  # bytes, for one input; a decoder of videos may take the first
_CRASH = "crash"  # in a test; the seventh input of this medium ends the process
_MOST_MEMORY = 4 << 30  # of a process
_WAIT = 300.0  # of the clock, for one input
_IN_PROCESS = 200  # each file of such a number is decoded in another process, as in production


@dataclass
class Totals:
    """Results of many inputs."""

    outcomes: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    seconds: tuple[float, int] = (0.0, -1)  # longest, and the input's number
    memory: tuple[int, int] = (0, -1)
    count: int = 0

    def add(self, result: dict[str, Any]) -> None:
        number = result["number"]
        self.count += 1
        self.outcomes[result["outcome"]] += 1
        self.kinds[f"{result['kind']}, {'taken' if result['outcome'] == 'taken' else 'refused'}"] += 1
        self.seconds = max(self.seconds, (result["seconds"], number))
        self.memory = max(self.memory, (result["memory"], number))
        if result["failure"]:
            self.failures.append(f"input {number} ({result['kind']}): {result['failure']}")

    def lines(self) -> Iterator[str]:
        for table in (self.outcomes, self.kinds):
            yield from (f"{count:>9,}  {name}" for name, count in table.most_common(40))
            yield ""
        yield f"longest {self.seconds[0]:.2f} s of processors (input {self.seconds[1]})"
        yield f"most memory {self.memory[0] / 2**20:.0f} MiB (input {self.memory[1]})"
        yield from self.failures


def run(medium: str, start: int, stop: int, workers: int = 1, show: bool = False) -> Totals:
    """Read inputs by number, in processes."""
    totals, active, begun = Totals(), [], time.monotonic()
    for at in range(workers):
        first, end = (start + (stop - start) * (at + each) // workers for each in (0, 1))
        if first < end:
            active.append(_Worker(medium, first, end))
    try:
        while active:
            readable, _, _ = select.select(active, [], [], 1.0)
            for worker in readable:
                for result in worker.results():
                    totals.add(result)
            for worker in active:
                worker.check_time()
            active = [worker for worker in active if worker.is_running]
            if show:
                _show(totals, stop - start, time.monotonic() - begun)
    finally:
        for worker in active:
            worker.end()
    return totals


def _show(totals: Totals, count: int, seconds: float) -> None:
    part = totals.count / count
    left = seconds / part - seconds if part else 0.0
    bar = "#" * int(40 * part)
    text = f"[{bar:<40}] {totals.count:,} of {count:,}, {len(totals.failures)} failed, {left:.0f} s left"
    print(text, end="\r" if sys.stderr.isatty() else "\n", file=sys.stderr, flush=True)


class _Worker:
    """A process that reads inputs; it is started again after an input that ends it."""

    def __init__(self, medium: str, start: int, stop: int) -> None:
        self._medium, self._next, self._stop, self.is_running = medium, start, stop, True
        self._begin()

    def _begin(self) -> None:
        command = [sys.executable, "-m", "tests.fuzz.media_run", self._medium, "--worker"]
        command += [str(self._next), str(self._stop)]
        path = os.pathsep.join((str(ROOT), str(ROOT / "server")))
        settings = os.environ | {"PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1"}
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self._process = subprocess.Popen(command, cwd=ROOT, env=settings, **pipes)
        self._rest, self._since = b"", time.monotonic()

    def fileno(self) -> int:
        assert self._process.stdout is not None
        return self._process.stdout.fileno()

    def results(self) -> list[dict[str, Any]]:
        """Return results that are ready, or why the process has ended."""
        data = os.read(self.fileno(), 1 << 16)
        self._since = time.monotonic()
        *lines, self._rest = (self._rest + data).split(b"\n")
        found = [json.loads(line) for line in lines]
        if found:
            self._next = found[-1]["number"] + 1
        if not data:
            code = self._process.wait()
            assert self._process.stdout is not None
            self._process.stdout.close()
            if code or self._next < self._stop:
                why = f"the process ended with {code}"
                found.append(_result(self._next, "crash", why, 0.0, 0, why))
                self._next += 1
            self.is_running = self._next < self._stop
            if self.is_running:
                self._begin()
        return found

    def check_time(self) -> None:
        if time.monotonic() - self._since > _WAIT:
            self._process.kill()

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


def _result(number: int, kind: str, outcome: str, seconds: float, memory: int, failure: str) -> dict[str, Any]:
    return {
        "number": number,
        "kind": kind,
        "outcome": outcome,
        "seconds": seconds,
        "memory": memory,
        "failure": failure,
    }


def work(medium: str, start: int, stop: int) -> None:
    """Write a line for each input."""
    from tests.fuzz.media_draws import draw

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_DATA, (_MOST_MEMORY, _MOST_MEMORY))
    answers = os.fdopen(os.dup(1), "wb", 0)
    os.dup2(2, 1)  # output of libraries
    _forbid_connections()
    if medium == _CRASH:
        _crash(answers, start, stop)
    for each in (0, 1, 2):
        attempt(medium, *draw(medium, each)[:2])  # excludes work that is done once
    for number in range(start, stop):
        part, options, kind = draw(medium, number)
        files, before, begun = _open_files(), start_peak(), time.process_time()
        outcome, failure = attempt(medium, part, options, number)
        seconds, memory = time.process_time() - begun, peak() - before
        del part
        if not failure and seconds > _SECONDS:
            failure = f"{seconds:.1f} s"
        if not failure and memory > _MEMORY[medium]:
            failure = f"{memory >> 20} MiB"
        if not failure and _open_files() != files:
            failure = f"{_open_files() - files} files remain open"
        answers.write(_line(number, kind, outcome, seconds, memory, failure))


def _line(*result: Any) -> bytes:
    return json.dumps(_result(*result)).encode() + b"\n"


def _crash(answers: Any, start: int, stop: int) -> NoReturn:
    for number in range(start, stop):
        if number == 7:
            os.abort()
        answers.write(_line(number, _CRASH, "taken", 0.0, 0, ""))
    raise SystemExit


def _forbid_connections() -> None:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise AssertionError("a connection is made")

    for owner, name in (
        (socket, "getaddrinfo"),
        *((socket.socket, each) for each in ("connect", "connect_ex", "sendto")),
    ):
        setattr(owner, name, refuse)


def attempt(medium: str, part: dict[str, Any], options: dict[str, Any], number: int = 0) -> tuple[str, str]:
    """Read a part; return the outcome, and a defect."""
    from jaxllm.errors import MOST_MESSAGE, UserError
    from jaxllm.media import films, sound_files
    from jaxllm.media.decoders import RecordingProcess, SoundProcess
    from jaxllm_server.shared.error_table import row_of
    from tests.fuzz.videos import InProcess, SoundInProcess

    as_in_production = number % _IN_PROCESS == 0
    for module, owned, other in ((films, RecordingProcess, InProcess), (sound_files, SoundProcess, SoundInProcess)):
        setattr(module, owned.__name__, owned if as_in_production else other)
    try:
        _read(medium, [{"role": "user", "content": [{"type": "text", "text": "?"}, part]}], options, number)
    except UserError as error:
        said = str(error)
        if not (said.isprintable() and 0 < len(said) <= MOST_MESSAGE and 400 <= row_of(error).http < 500):
            return "wrong error", repr(error)
        if not said.startswith(("messages[0].content[1]", "mm_processor_kwargs")):
            return "unnamed part", said
        return _class_of(said), ""
    except BaseException as error:
        return "exception", f"{type(error).__name__}: {error!s:.300}"
    return "taken", ""


def _class_of(message: str) -> str:
    """Return a message without its part and its values."""
    rest = re.sub(r"^messages\[0\]\.content\[1\][\w.]*(, frame \d+)?:? ?", "", message)
    return re.sub(r"'[^']*'|[-\d.,×e]*\d", "…", rest)[:70]


def _read(medium: str, messages: list[Any], options: dict[str, Any], number: int) -> None:
    import numpy as np

    from jaxllm.media.messages import take_images
    from jaxllm.media.sources import Sources
    from jaxllm.media.video_messages import take_videos

    readers = _processors(medium)
    processor = readers[number % len(readers)]
    rest, videos = take_videos(messages, processor, Sources(), 4, options)
    _, others = take_images(rest, processor, Sources(), 4, videos)
    prepared = [pair for video in videos for pair in video.pairs] + others
    if medium == "video" and not (videos and all(map(np.isfinite, (*videos[0].seconds, videos[0].step)))):
        raise AssertionError("no video, or times that are not numbers")
    if not prepared:
        raise AssertionError("nothing was read")
    for each in prepared:
        most = processor.most_tokens * (len(each.pixels) if medium == "sound" and each.pixels.ndim == 3 else 1)
        if not (np.isfinite(each.pixels).all() and 0 < each.num_tokens <= most):
            raise AssertionError("values that are not numbers, or too many tokens")


@functools.cache
def _processors(medium: str) -> tuple[Any, ...]:
    if medium == "video":
        from tests.fuzz.videos import processors

        return processors()
    from jaxllm.media.sounds import SoundProcessor

    short = SoundProcessor(placeholder=9, num_mels=80, num_states=1500, joined=2, reads_silence=False)
    long = SoundProcessor(placeholder=9, num_mels=128, num_states=100, joined=4, reads_silence=True)
    return short, short, long.within(1 << 14)


def _open_files() -> int:
    return len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").is_dir() else 0


def main() -> int:
    """Run a medium's inputs, or one; return 1 if one failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.media_run", description=__doc__)
    parser.add_argument("medium", choices=(*_MEMORY, _CRASH))
    parser.add_argument("--count", type=int, default=100_000, help="inputs")
    parser.add_argument("--start", type=int, default=0, help="number of the first input")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--replay", type=int, metavar="NUMBER", help="run one input in this process")
    parser.add_argument("--worker", nargs=2, type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        work(given.medium, *given.worker)
        return 0
    if given.replay is not None:
        from tests.fuzz.media_draws import draw

        _forbid_connections()
        part, options, kind = draw(given.medium, given.replay)
        print(kind, str(part)[:300], options, flush=True)
        outcome, failure = attempt(given.medium, part, options, given.replay)
        print(outcome, failure)
        return 1 if failure else 0
    totals = run(given.medium, given.start, given.start + given.count, given.workers, show=True)
    print(f"\n{given.medium}: {totals.count:,} inputs, {len(totals.failures)} failed", *totals.lines(), sep="\n")
    return 1 if totals.failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
