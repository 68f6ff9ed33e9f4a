"""Identify a folder's model."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

SAMPLES, SAMPLE_BYTES = 64, 4096  # of each file, evenly spaced


def identity(folder: Path, with_times: bool = False) -> str:
    """Return 32 hexadecimal digits of the names, sizes and samples of config.json and the files of weights.

    Reading weights whole would take seconds a gigabyte. `with_times` includes the times of change, to find other
    changes.
    """
    found = hashlib.sha256()
    for file in _files(folder):
        status = file.stat()
        time = status.st_mtime_ns if with_times else 0
        found.update(f"{file.relative_to(folder).as_posix()}\n{status.st_size}\n{time}\n".encode())
        with file.open("rb") as stream:
            for number in range(SAMPLES):
                stream.seek(max(0, status.st_size - SAMPLE_BYTES) * number // (SAMPLES - 1))
                found.update(stream.read(SAMPLE_BYTES))
    return found.hexdigest()[:32]


def _files(folder: Path) -> Iterable[Path]:
    weights = sorted(folder.glob("*.safetensors"))
    if weights:
        return [*folder.glob("config.json"), *weights]
    files = (file for file in folder.rglob("*") if file.is_file())
    return sorted(file for file in files if not any(name.startswith(".") for name in file.relative_to(folder).parts))
