"""A resumable file of vectors, as .npy or JSON lines."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxllm.errors import UserError

_SAME = 1e-2  # relative to the largest component, float32 against bfloat16


class VectorFile:
    """A resumable file of vectors; `PATH.progress.json` counts complete rows."""

    def __init__(self, path: Path, job: Mapping[str, Any], first: np.ndarray) -> None:
        self.num_rows = 0
        self._path, self._job, self._first = path, job, first
        self._note = path.with_name(f"{path.name}.progress.json")
        self._is_binary = path.suffix == ".npy"
        size = 0
        if self._note.exists() and path.exists():
            self.num_rows, size = self._read_note()
        self._file = path.open("r+b" if size else "wb")
        self._file.truncate(size)
        if not size:
            self._save()

    def __enter__(self) -> VectorFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def append(self, numbers: Sequence[int], texts: Sequence[str], vectors: np.ndarray) -> None:
        """Append rows and sync them to disk.

        `numbers` are line numbers, from 1; .npy files omit these and the texts.
        """
        self._file.seek(0, os.SEEK_END)
        if self._is_binary:
            self._file.write(vectors.astype("<f4").tobytes())
        else:
            for number, text, vector in zip(numbers, texts, vectors, strict=True):
                # Nine digits round-trip float32; json would write twice as many.
                values = ", ".join(map("%.9g".__mod__, vector.tolist()))
                head = json.dumps({"index": number - 1, "text": text}, ensure_ascii=False)
                self._file.write(f'{head[:-1]}, "embedding": [{values}]}}\n'.encode())
        self.num_rows += len(vectors)
        self._save()

    def finish(self) -> None:
        self._note.unlink()

    def _save(self) -> None:
        if self._is_binary:
            header = io.BytesIO()
            shape = (self.num_rows, len(self._first))
            np.lib.format.write_array_header_1_0(header, {"descr": "<f4", "fortran_order": False, "shape": shape})
            self._file.seek(0)
            self._file.write(header.getvalue())
        self._file.flush()
        size = self._file.seek(0, os.SEEK_END)
        os.fsync(self._file.fileno())
        note = {**self._job, "first": self._first.tolist(), "rows": self.num_rows, "bytes": size}
        new = self._note.with_suffix(".new")
        new.write_text(json.dumps(note), encoding="utf-8")
        new.replace(self._note)

    def _read_note(self) -> tuple[int, int]:
        """Return complete rows and bytes of an existing note; raise `UserError` if texts or model have changed."""
        try:
            note = json.loads(self._note.read_text(encoding="utf-8"))
            changed = [name for name, value in self._job.items() if note[name] != value]
            first, rows, size = np.asarray(note["first"], np.float32), int(note["rows"]), int(note["bytes"])
        except (ValueError, KeyError, TypeError):
            raise UserError(f"{self._note} is damaged; remove it to start again.", "output") from None
        if self._path.stat().st_size < size:
            raise UserError(f"{self._path} is shorter than it was; remove {self._note} to start again.", "output")
        if first.shape != self._first.shape or np.abs(first - self._first).max() > _SAME * np.abs(first).max():
            changed.append("model")
        if changed:
            raise UserError(
                f"{self._path} was started with another {' and '.join(changed)}; remove {self._note} to start again.",
                "output",
            )
        return rows, size
