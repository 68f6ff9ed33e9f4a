"""Read a model folder's small files in bounded time and memory.

Links out of the folder are refused: their content could leak into prompts and messages.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tqdm import tqdm

from jaxllm.errors import UserError

MOST_BYTES = 64 * 2**20  # the largest published index, of 91,000 tensors, has 9 MB
MOST_TEMPLATE_BYTES = 2**20


def reading_bar(num_bytes: int, progress: bool) -> tqdm[Any]:
    return tqdm(
        total=num_bytes,
        unit="B",
        unit_scale=True,
        unit_divisor=1024,
        desc="reading weights",
        disable=not progress,
        leave=False,
    )


def inside(folder: Path, name: str, parameter: str = "model") -> Path:
    """Return the path of a file; raise UserError if a link leads outside the folder, except into the hub's cache."""
    path = folder / name
    try:
        root, real = folder.resolve(), path.resolve()
    except (OSError, RuntimeError):  # circular links
        raise UserError(f"{path} cannot be found: its links lead nowhere.", parameter) from None
    if root.parent.name == "snapshots" and real.is_relative_to(root.parent.parent / "blobs"):
        return path
    if not real.is_relative_to(root):
        raise UserError(f"{path} is a link to a file outside of the model's folder; copy the file there.", parameter)
    return path


def read_object(folder: Path, name: str, parameter: str = "model") -> dict[str, Any] | None:
    """Read a JSON object from a file; return None if it is missing, raise UserError for other content."""
    return _read_json(folder, name, parameter, parse_object)


def read_objects(folder: Path, name: str, parameter: str = "model") -> list[dict[str, Any]] | None:
    return _read_json(folder, name, parameter, parse_objects)


def _read_json(folder: Path, name: str, parameter: str, parse: Callable[[bytes], Any]) -> Any:
    path = inside(folder, name, parameter)
    raw = _read(path, MOST_BYTES, parameter)
    if raw is None:
        return None
    try:
        return parse(raw)
    except ValueError as error:
        raise UserError(f"{path} {error}.", parameter) from None


def read_template(folder: Path, name: str) -> str | None:
    path = inside(folder, name, "tokenizer")
    raw = _read(path, MOST_TEMPLATE_BYTES, "tokenizer")
    try:
        return None if raw is None else raw.decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 (byte {error.start}).", "tokenizer") from None


def parse_object(raw: bytes) -> dict[str, Any]:
    """Parse a JSON object; raise ValueError for other content and for repeated keys."""
    value = _parse(raw)
    if not isinstance(value, dict):
        raise ValueError(f"must hold a JSON object, not {type(value).__name__}")
    return value


def parse_objects(raw: bytes) -> list[dict[str, Any]]:
    value = _parse(raw)
    if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
        raise ValueError("must hold a list of JSON objects")
    return value


def _parse(raw: bytes) -> Any:
    try:
        return json.loads(raw.decode(), object_pairs_hook=_unique)
    except UnicodeDecodeError as error:
        raise ValueError(f"is not UTF-8 (byte {error.start})") from None
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"is not valid JSON: {error}") from None


def _read(path: Path, most: int, parameter: str) -> bytes | None:
    try:
        if not path.exists():
            return None
        if not path.is_file():  # reading a pipe may block
            raise UserError(f"{path} is not a file.", parameter)
        with path.open("rb") as stream:
            raw = stream.read(most + 1)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.", parameter) from None
    if len(raw) > most:
        raise UserError(f"{path} is too large: more than {most} bytes.", parameter)
    return raw


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        twice, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"names {twice[:64]!r} twice in one object")
    return found
