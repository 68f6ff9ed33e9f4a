"""A digest of a model's files, in milliseconds: names, sizes, and samples of the content."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

SAMPLES = 16  # of a file, evenly spaced, the first at its beginning, the last at its end
SAMPLE_BYTES = 1 << 16
_TEXTS = {".md", ".txt", ".json", ".jinja", ".model", ".py"}  # besides config.json, without influence on the cache


def digest_of_files(folder: Path) -> str:
    found = sha256()
    for file in sorted(folder.rglob("*")):
        name = file.relative_to(folder)
        is_hidden = any(part.startswith(".") for part in name.parts)
        if is_hidden or not file.is_file() or (file.suffix in _TEXTS and str(name) != "config.json"):
            continue
        size = file.stat().st_size
        found.update(f"{name.as_posix()}\n{size}\n".encode())
        with file.open("rb") as opened:
            for number in range(SAMPLES):
                opened.seek(number * max(0, size - SAMPLE_BYTES) // (SAMPLES - 1))
                found.update(opened.read(SAMPLE_BYTES))
    return found.hexdigest()
