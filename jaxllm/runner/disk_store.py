"""Files of KV blocks in a folder that the engines of a machine share, bounded in bytes and safe after kill -9.

    ROOT/lock                              bytes in use, int64; locked (flock) during every write and removal
    ROOT/unfinished                        the file that the holder of the lock writes, then renames
    ROOT/kv1-FINGERPRINT/ab/DIGEST.GROUP   a block: a header with a checksum, and its content

A block's name is the digest of its tokens and all before them. The fingerprint names everything else that its content
depends on, so a file is never changed. The least recently read or written files of all fingerprints are removed first.
The bytes in use are raised before a file is written: after kill -9 they are too many, until the next start or trim
counts the files again.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import stat
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxllm.errors import UserError

MAGIC = b"jaxllmKV"
LAYOUT = "kv1"  # of folders, headers and rows
PAGE = 4096  # bytes; a file takes whole pages
LOCK_SECONDS = 1.0  # a write that waits longer is dropped
TRIMMED = 0.9  # share of the bound that a trim leaves, so that trims are rare
_HEADER = struct.Struct("<8s16s32sBQ16s")  # magic, fingerprint, digest, group, bytes of the content, checksum
_USED = struct.Struct("<q")
_FOLDER = re.compile(r"kv1-[0-9a-f]{32}")
_FILE = re.compile(r"([0-9a-f]{64})\.([0-9])")
_log = logging.getLogger(__name__)
Name = tuple[int, bytes]  # group, digest


class DamagedError(Exception):
    """A file that is not the block of its name."""


class Listing(NamedTuple):
    """The files of a part of a folder."""

    names: set[Name]
    stamp: int  # time of the part's last change, ns; 0: unknown


class DiskStore:
    """Blocks of one fingerprint, 32 hexadecimal digits. One thread calls `write` and `remove`; any thread may read."""

    def __init__(self, root: Path, most_bytes: int, fingerprint: str) -> None:
        """Remove leftovers of killed engines; raise UserError if the folder cannot be used."""
        self.root = root
        self.folder = root / f"{LAYOUT}-{fingerprint}"
        self._most_bytes = most_bytes
        self._fingerprint = bytes.fromhex(fingerprint)
        self._is_stuck = False
        try:
            import fcntl  # not on Windows

            self._flock = fcntl.flock
            self._exclusive, self._unlock = fcntl.LOCK_EX | fcntl.LOCK_NB, fcntl.LOCK_UN
            root.mkdir(parents=True, exist_ok=True, mode=0o700)
            self.folder.mkdir(exist_ok=True, mode=0o700)
            status = self.folder.lstat()
            if not stat.S_ISDIR(status.st_mode):
                raise PermissionError(0, "it is not a folder")
            if status.st_uid not in (os.getuid(), 0) or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                raise PermissionError(0, "other users may write it")
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            self._lock = os.open(root / "lock", flags, 0o600)
        except (OSError, ImportError) as error:
            reason = error.strerror if isinstance(error, OSError) else "this system has no flock"
            raise UserError(
                f"kv_offloading_disk: {self.folder} cannot be used: {reason}; name another folder.",
                "kv_offloading_disk",
            ) from error
        with self.locked() as is_locked:
            if is_locked:
                self._set_used(self._trim(most_bytes))

    def path(self, group: int, digest: bytes) -> Path:
        name = digest.hex()
        return self.folder / name[:2] / f"{name}.{group}"

    def write(self, group: int, digest: bytes, parts: Sequence[np.ndarray]) -> bool:
        """Write a block, whole even if killed, unless it exists; return whether it does now. Raises OSError."""
        size = sum(part.nbytes for part in parts)
        needed = _on_disk(size)
        if needed > self._most_bytes:
            return False
        path = self.path(group, digest)
        with self.locked() as is_locked:
            if not is_locked:
                return False
            if path.exists():
                return True
            used = self.used()
            if used + needed > self._most_bytes:
                used = self._trim(int(TRIMMED * self._most_bytes) - needed)
            self._set_used(used + needed)
            unfinished = self.root / "unfinished"
            try:
                path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                with open(
                    os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600), "wb"
                ) as file:
                    file.write(self._header(group, digest, size, self._checksum(group, digest, size, parts)))
                    for part in parts:
                        file.write(part.data)
                os.replace(unfinished, path)
            except BaseException:
                with suppress(OSError):
                    unfinished.unlink()
                self._set_used(used)
                raise
        return True

    def read(self, group: int, digest: bytes, size: int) -> np.ndarray | None:
        """Return a block, uint8[size]; None if it is missing, or damaged and removed. Raises OSError."""
        path = self.path(group, digest)
        try:
            with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb", buffering=0) as file:
                status = os.fstat(file.fileno())
                if not stat.S_ISREG(status.st_mode):
                    raise DamagedError("it is not a file")
                if status.st_size != _HEADER.size + size:
                    raise DamagedError(f"it has {status.st_size} bytes, not {_HEADER.size + size}")
                header, content = file.read(_HEADER.size), np.empty(size, np.uint8)
                view, at = content.data, 0
                while at < size and (count := file.readinto(view[at:])):
                    at += count
                if at < size or header != self._header(
                    group, digest, size, self._checksum(group, digest, size, [content])
                ):
                    raise DamagedError("its checksum or name differs")
                with suppress(OSError):
                    os.utime(file.fileno())
                return content
        except FileNotFoundError:
            return None
        except DamagedError as error:
            _log.warning("KV block %s is removed: %s", path, error)
            with suppress(OSError):
                path.unlink()
            return None

    def remove(self, group: int, digest: bytes) -> None:
        with suppress(OSError):
            self.path(group, digest).unlink()

    def listed(self, part: int, stamp: int) -> Listing | None:
        """Return the blocks with digests that begin with the byte `part`; None if unchanged since `stamp`."""
        folder = self.folder / f"{part:02x}"
        try:
            changed = folder.stat().st_mtime_ns
            if changed == stamp:
                return None
            found = (_FILE.fullmatch(name) for name in os.listdir(folder))
            names = {(int(each[2]), bytes.fromhex(each[1])) for each in found if each}
        except OSError:
            return Listing(set(), 0)
        # A file added in the same tick of the file system's clock does not change the stamp.
        return Listing(names, changed if time.time_ns() - changed > 10**9 else 0)

    def close(self) -> None:
        os.close(self._lock)

    @contextmanager
    def locked(self) -> Iterator[bool]:
        """Hold the lock, which the end of a process releases; yield False after `LOCK_SECONDS` without it."""
        deadline = time.monotonic() + (0.0 if self._is_stuck else LOCK_SECONDS)
        while True:
            try:
                self._flock(self._lock, self._exclusive)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    if not self._is_stuck:
                        _log.warning("another process keeps %s locked: KV blocks are not written", self.root / "lock")
                    self._is_stuck = True
                    yield False
                    return
                time.sleep(0.002)
        self._is_stuck = False
        try:
            yield True
        finally:
            self._flock(self._lock, self._unlock)

    def used(self) -> int:
        """Return the bytes in use, perhaps too many after a kill. Needs the lock."""
        data = os.pread(self._lock, _USED.size, 0)
        used = _USED.unpack(data)[0] if len(data) == _USED.size else -1
        return used if used >= 0 else self._trim(self._most_bytes)

    def _set_used(self, used: int) -> None:
        os.pwrite(self._lock, _USED.pack(used), 0)

    def _trim(self, most_bytes: int) -> int:
        """Remove other files, then least recently used blocks beyond `most_bytes`; return the bytes left. Needs the
        lock.
        """
        with suppress(OSError):
            (self.root / "unfinished").unlink()
        kept: list[tuple[int, int, str]] = []
        for folder in self.root.iterdir():
            if not _FOLDER.fullmatch(folder.name) or folder.is_symlink():
                continue
            for part in [*folder.iterdir()]:
                if part.is_symlink() or not part.is_dir():
                    _discard(part)
                    continue
                for entry in os.scandir(part):
                    with suppress(OSError):
                        status = entry.stat(follow_symlinks=False)
                        if not _FILE.fullmatch(entry.name) or not stat.S_ISREG(status.st_mode):
                            _discard(Path(entry.path))
                        else:
                            kept.append((status.st_mtime_ns, _on_disk(status.st_size - _HEADER.size), entry.path))
                with suppress(OSError):
                    part.rmdir()
            if folder != self.folder:
                with suppress(OSError):
                    folder.rmdir()
        total = sum(size for _, size, _ in kept)
        for _, size, path in sorted(kept):
            if total <= most_bytes:
                break
            with suppress(FileNotFoundError):
                os.unlink(path)
            total -= size
        return total

    def _header(self, group: int, digest: bytes, size: int, checksum: bytes) -> bytes:
        return _HEADER.pack(MAGIC, self._fingerprint, digest, group, size, checksum)

    def _checksum(self, group: int, digest: bytes, size: int, parts: Sequence[np.ndarray]) -> bytes:
        found = hashlib.blake2b(self._header(group, digest, size, b""), digest_size=16)
        for part in parts:
            found.update(part.data)
        return found.digest()


def _on_disk(size: int) -> int:
    return -(-(_HEADER.size + size) // PAGE) * PAGE


def _discard(path: Path) -> None:
    try:
        path.unlink()
    except OSError as error:
        _log.warning("%s is no KV block, and cannot be removed: %s", path, error.strerror)
    else:
        _log.warning("%s is no KV block, and is removed", path)
