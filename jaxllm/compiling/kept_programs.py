"""A cache of compiled programs that a later start reads without tracing.

A `.program` file is named after a digest of the program's text, the compiler and its options; a `.key` file, named
after a digest of tracing's inputs, contains the text's digest. Deserializing uses pickle, which can run code: folder
and file must belong to this user or root and be writable by no other.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import stat
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable
from jax.tree_util import PyTreeDef, default_registry

from jaxllm.compiling.program_digest import NotDigestibleError, digest, digest_options

_MAGIC = b"jaxllm program 1\n"
_HEADER = struct.Struct(f"<{len(_MAGIC)}s32s32sQ")  # magic, digest, SHA-256 of the payload, payload bytes
_SIZES = struct.Struct("<3Q")  # bytes of the executable, argument tree and result tree
_UNFINISHED = ".part"
_ABANDONED = 3600.0  # seconds after which an unfinished file is deleted
_log = logging.getLogger(__name__)


class KeptPrograms:
    """An engine's cache of compiled programs. Thread-safe."""

    def __init__(
        self, folder: Path, most_bytes: int, depends: Callable[[], tuple[str, str]], devices: Sequence[Any]
    ) -> None:
        """Cache at most `most_bytes` in `folder`; 0 disables the cache.

        `depends` returns digests of the inputs of tracing, and of the compiler, its options and `devices`. If it raises
        `NotDigestibleError`, the cache is disabled.
        """
        self.num_read, self.seconds = 0, 0.0
        self._folder, self._most_bytes, self._devices = folder, most_bytes, devices
        self._lock = threading.Lock()
        self._depends = ("", "")
        self.is_on = False
        if most_bytes:
            try:
                self._depends = depends()
                self.is_on = _is_ours(folder)
            except NotDigestibleError as kind:
                _log.info("programs are not kept whole: they depend on a %s, whose content is unknown", kind)

    def make(self, name: str, key: Any, lower: Callable[[], jax.stages.Lowered]) -> Any:
        program = self.read(name, key)
        return self.compile(name, key, lower()) if program is None else program

    def read(self, name: str, key: Any) -> Any | None:
        if not self.is_on:
            return None
        text = self._content(*self._key_file(name, key))
        return None if text is None else self._program(name, text)

    def has(self, name: str, key: Any) -> bool:
        return self.is_on and self._key_file(name, key)[0].exists()

    def compile(self, name: str, key: Any, lowered: jax.stages.Lowered) -> Any:
        if not self.is_on:
            return lowered.compile()
        # Unused arguments are not in the text: models with other numbers of layers have the same for `score`.
        text = bytes.fromhex(digest(self._depends[1], digest_options(), str(lowered.in_tree), lowered.as_text()))
        program = self._program(name, text)
        if program is None:
            program, is_new = _compiled(lowered)
            if not is_new or not self._keep(name, self._program_file(name, text), lambda: _payload(program)):
                return program
        self._keep(name, self._key_file(name, key), lambda: text)
        return program

    def _key_file(self, name: str, key: Any) -> tuple[Path, bytes]:
        own = digest(self._depends, digest_options(), name, key)
        return self._folder / f"{name}-{own[:32]}.key", bytes.fromhex(own)

    def _program_file(self, name: str, text: bytes) -> tuple[Path, bytes]:
        return self._folder / f"{name}-{text.hex()[:32]}.program", text

    def _program(self, name: str, text: bytes) -> Any | None:
        began = time.perf_counter()
        program = self._content(*self._program_file(name, text), self._load)
        if program is not None:
            with self._lock:
                self.num_read += 1
                self.seconds += time.perf_counter() - began
        return program

    def _load(self, payload: memoryview) -> Any:
        sizes = _SIZES.unpack_from(payload)
        ends = list(accumulate(sizes, initial=_SIZES.size))
        executable, *trees = (bytes(payload[start:end]) for start, end in pairwise(ends))
        in_tree, out_tree = (PyTreeDef.deserialize_using_proto(default_registry, tree) for tree in trees)
        client = self._devices[0].client
        return serialize_executable.deserialize_and_load(executable, in_tree, out_tree, client, self._devices)

    def _content(self, file: Path, own: bytes, load: Callable[[memoryview], Any] = bytes) -> Any | None:
        try:
            content = load(_checked(_read(file), own))
        except FileNotFoundError:
            return None
        except Exception as failure:
            reason = " ".join(str(failure).split()) or type(failure).__name__
            _log.warning("%s is ignored and its program compiled anew: %.300s", file, reason)
            return None
        with suppress(OSError):
            os.utime(file)
        return content

    def _keep(self, name: str, place: tuple[Path, bytes], pack: Callable[[], bytes]) -> bool:
        try:
            payload = pack()
            if len(payload) > self._most_bytes:
                return False
            _write(place[0], _HEADER.pack(_MAGIC, place[1], hashlib.sha256(payload).digest(), len(payload)), payload)
            with self._lock:
                _trim(self._folder, self._most_bytes)
        except Exception as failure:  # full disk, or a program with host callbacks
            _log.info("program %s is not kept whole: %.300s", name, " ".join(str(failure).split()))
            return False
        return True


def _checked(content: bytes, expected: bytes) -> memoryview:
    if len(content) < _HEADER.size:
        raise ValueError("it is cut short")
    magic, key, checksum, size = _HEADER.unpack_from(content)
    payload = memoryview(content)[_HEADER.size :]
    if magic != _MAGIC:
        raise ValueError("it has another format")
    if key != expected:
        raise ValueError("it is another program's")
    if size != len(payload) or hashlib.sha256(payload).digest() != checksum:
        raise ValueError("it is damaged")
    return payload


def _compiled(lowered: jax.stages.Lowered) -> tuple[Any, bool]:
    """Compile, bypassing JAX's cache if possible; return the program, and whether it is new.

    A CPU program from JAX's cache breaks when serialized again (jaxlib 0.10 to 0.12).
    """
    hits = _hits()
    hits.count = 0
    with ExitStack() as entered:
        with suppress(ImportError, AttributeError):  # private; without it JAX also caches the program
            from jax._src.config import persistent_cache_min_compile_time_secs as least

            entered.enter_context(least(float("inf")))
        program = lowered.compile()
    return program, hits.count == 0


@functools.cache
def _hits() -> threading.local:
    hits = threading.local()

    def listen(event: str, **_: str | int) -> None:
        if event == "/jax/compilation_cache/cache_hits":
            hits.count = getattr(hits, "count", 0) + 1

    jax.monitoring.register_event_listener(listen)
    return hits


def _payload(program: Any) -> bytes:
    unloaded = getattr(program._executable, "_unloaded_executable", None)
    if getattr(unloaded, "host_callbacks", None):
        raise ValueError("it calls back to this process")
    executable, *trees = serialize_executable.serialize(program)
    parts = [executable, *(tree.serialize_using_proto() for tree in trees)]
    return _SIZES.pack(*map(len, parts)) + b"".join(parts)


def _is_ours(folder: Path) -> bool:
    """Create a folder if missing; warn and return False if that fails or other users could write its files."""
    try:
        if not hasattr(os, "getuid"):
            raise ValueError("this system does not say whose a file is")
        folder.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            folder.mkdir(mode=0o755)
        status = folder.lstat()
        if not stat.S_ISDIR(status.st_mode):
            raise ValueError("it is not a folder")
        _check_owner(status)
    except (OSError, ValueError) as failure:
        reason = failure.strerror if isinstance(failure, OSError) else failure
        _log.warning("programs are not kept whole: %s: %s", folder, reason)
        return False
    return True


def _check_owner(status: os.stat_result) -> None:
    if status.st_uid not in (os.getuid(), 0):
        raise ValueError("it belongs to another user")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ValueError("other users may write it")


def _read(file: Path) -> bytes:
    with open(os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as stream:
        status = os.fstat(stream.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("it is not a file")
        _check_owner(status)
        return stream.read()


def _write(file: Path, *parts: bytes) -> None:
    descriptor, unfinished = tempfile.mkstemp(_UNFINISHED, file.stem, file.parent)
    try:
        with open(descriptor, "wb") as stream:
            os.fchmod(descriptor, 0o644)  # root's programs serve other users
            stream.writelines(parts)
        os.replace(unfinished, file)
    except BaseException:
        with suppress(OSError):
            os.unlink(unfinished)
        raise


def _trim(folder: Path, most_bytes: int) -> None:
    kept, now = [], time.time()
    for entry in os.scandir(folder):
        with suppress(FileNotFoundError):
            status = entry.stat(follow_symlinks=False)
            if entry.name.endswith((".key", ".program")):
                kept.append((status.st_mtime, status.st_size, entry.path))
            elif entry.name.endswith(_UNFINISHED) and now - status.st_mtime > _ABANDONED:
                os.unlink(entry.path)
    total = sum(size for _, size, _ in kept)
    for _, size, path in sorted(kept):
        if total <= most_bytes:
            break
        with suppress(FileNotFoundError):
            os.unlink(path)
        total -= size
