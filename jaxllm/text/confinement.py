"""Run adapters' tokenizers and chat templates, which may loop or exhaust memory, in resource-limited processes.

A process runs one task at a time; the system kills it above its memory or CPU time.
"""

from __future__ import annotations

import json
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import msgpack

from jaxllm import errors
from jaxllm.errors import EngineError, UserError
from jaxllm.limited_process import TOO_MUCH_MEMORY, LimitedProcess

MOST_PROCESSES = 4
MOST_BYTES = 768 * 2**20  # a tokenizer of 262,000 tokens takes 300 MB
MOST_KEPT = 2  # tokenizers per process
SECONDS = 1.0  # CPU time per task, plus len(frame) / BYTES_A_SECOND
BYTES_A_SECOND = 100_000  # tokenizing reaches 500,000 characters a second
LOAD_SECONDS = 20.0  # CPU time to read a tokenizer
MOST_ANSWER = 64 * 2**20
TOO_DEEP = "messages, tools or chat_template_kwargs are nested too deeply."
_WAIT_FACTOR = 10  # wall-clock per CPU time


class ConfinedError(UserError):
    """An adapter's tokenizer or chat template exceeded a limit."""


def exceeded(what: str) -> ConfinedError:
    return ConfinedError(f"The adapter's tokenizer or chat template {what}.", "model")


class Source(NamedTuple):
    """A tokenizer's folder, and its files' digest; b"" for the model's."""

    folder: str
    digest: bytes = b""


class Confinement:
    """A pool of worker processes, started on demand. Thread-safe."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._changed = threading.Condition()
        self.idle: list[Process] = []  # most recent last
        self._alive: set[Process] = set()
        self._num_starting = 0
        self._is_closed = False
        weakref.finalize(self, _end_all, self._alive)

    @property
    def num_processes(self) -> int:
        return len(self._alive)

    def call(self, source: Source, method: str, *arguments: Any, **named: Any) -> Any:
        """Call a tokenizer method, or one of `confined_worker.FUNCTIONS`.

        Raises `ConfinedError` above a limit, `UserError` as the method, `EngineError` after `close`.
        """
        frame = _framed([source.folder, source.digest.hex(), method, arguments, named])
        seconds = SECONDS + len(frame) / BYTES_A_SECOND
        if method in ("identity", "vocabulary"):
            seconds += LOAD_SECONDS
        process = self._take(source)
        is_usable = False
        try:
            has_others = process.note(source)
            answer = process.ask(frame, seconds)
            if has_others and answer.get("failed", "").startswith(TOO_MUCH_MEMORY):
                process = self._renewed(process)  # others may use its memory
                process.note(source)
                answer = process.ask(frame, seconds)
            is_usable = "failed" not in answer
        finally:
            self._give_back(process, is_usable)
        if "failed" in answer:
            raise exceeded(answer["failed"])
        if "error" in answer:
            raise _rebuilt(*answer["error"])
        return answer["value"]

    def close(self) -> None:
        """End idle processes now, others after their task; refuse new tasks."""
        with self._changed:
            self._is_closed = True
            idle, self.idle = self.idle, []
            self._alive.difference_update(idle)
            self._changed.notify_all()
        _end_all(idle)

    def _take(self, source: Source) -> Process:
        """Return an idle process: with the tokenizer, else with room, else a new one, else any."""
        with self._changed:
            while True:
                if self._is_closed:
                    raise EngineError("the engine is closed; create a new one.")
                self._alive.difference_update([each for each in self.idle if not each.is_alive])
                self.idle = [each for each in self.idle if each.is_alive]
                may_start = len(self._alive) + self._num_starting < MOST_PROCESSES
                fit = [each for each in self.idle if source in each.sources]
                fit = fit or [each for each in reversed(self.idle) if len(each.sources) < MOST_KEPT]
                if fit or (self.idle and not may_start):
                    process = fit[0] if fit else self.idle[0]
                    self.idle.remove(process)
                    return process
                if may_start:
                    self._num_starting += 1
                    break
                self._changed.wait()
        process = None
        try:
            process = Process(self._most_bytes)
            return process
        finally:
            with self._changed:
                self._num_starting -= 1
                if process is None:
                    self._changed.notify()
                else:
                    self._alive.add(process)

    def _renewed(self, process: Process) -> Process:
        process.end()
        new = Process(self._most_bytes)
        with self._changed:
            self._alive.discard(process)
            self._alive.add(new)
        return new

    def _give_back(self, process: Process, is_usable: bool) -> None:
        with self._changed:
            is_usable = is_usable and not self._is_closed
            if is_usable:
                self.idle.append(process)
                self._changed.notify()
        if not is_usable:
            process.end()
            with self._changed:
                self._alive.discard(process)
                self._changed.notify()


class Process(LimitedProcess):
    """A worker process, and the tokenizers that it keeps."""

    def __init__(self, most_bytes: int) -> None:
        super().__init__("jaxllm.text.confined_worker", str(most_bytes))
        self.sources: OrderedDict[Source, None] = OrderedDict()

    def note(self, source: Source) -> bool:
        """Record a tokenizer of the process; return whether it caches others."""
        self.sources[source] = None
        self.sources.move_to_end(source)
        if len(self.sources) > MOST_KEPT:
            self.sources.popitem(last=False)
        return len(self.sources) > 1

    def ask(self, frame: bytes, seconds: float) -> dict[str, Any]:
        """Send a task and return its answer, or why it "failed"; `seconds` of CPU time exclude reading tokenizers."""
        give_up = time.monotonic() + _WAIT_FACTOR * (seconds + LOAD_SECONDS)
        try:
            self.write(len(frame).to_bytes(8) + int(1000 * seconds).to_bytes(8) + frame)
            length = int.from_bytes(self.read(8, give_up))
            if length > MOST_ANSWER:
                raise exceeded("makes too long a text")
            return msgpack.unpackb(self.read(length, give_up), unicode_errors="surrogatepass", strict_map_key=False)
        except TimeoutError:
            raise exceeded("takes too long") from None
        except (BrokenPipeError, EOFError):
            return {"failed": self.why_ended()}


def _framed(task: list[Any]) -> bytes:
    """Encode a task as JSON; raise `UserError` for other types or deep nesting."""
    try:
        return json.dumps(task, ensure_ascii=False, default=_mapping).encode("utf-8", "surrogatepass")
    except RecursionError:
        raise UserError(TOO_DEEP, "messages") from None
    except (TypeError, ValueError) as error:
        raise UserError("messages may hold text, numbers, lists and objects only.", "messages") from error


def _mapping(value: Any) -> dict[Any, Any]:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} is not JSON")


def _end_all(processes: Iterable[Process]) -> None:
    for process in processes:
        process.end()


def _rebuilt(name: str, message: str, attributes: dict[str, Any]) -> UserError:
    kind = getattr(errors, name, None)
    if not (isinstance(kind, type) and issubclass(kind, UserError)):
        kind = UserError
    error = kind.__new__(kind, message)
    ValueError.__init__(error, message)
    vars(error).update({"parameter": None, "value": None, **attributes})
    return error
