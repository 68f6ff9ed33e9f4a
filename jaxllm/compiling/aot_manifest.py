"""The manifest of ahead-of-time compiled programs.

A start with the same folder takes unset sizes from it; the number of KV blocks would otherwise depend on free memory.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxllm.errors import UserError
from jaxllm.model.spec import Spec


def read(folder: Path, spec: Spec) -> dict[str, Any]:
    file = path(folder, spec)
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except ValueError as error:
        raise UserError(f"{file} is not valid JSON; run `jaxllm compile` again.", "compilation_cache_dir") from error
    if not isinstance(record, dict):
        raise UserError(f"{file} must hold an object; run `jaxllm compile` again.", "compilation_cache_dir")
    return record


def write(folder: Path, spec: Spec, record: Mapping[str, Any]) -> Path:
    file = path(folder, spec)
    file.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return file


def difference(recorded: Mapping[str, Any], actual: Mapping[str, Any]) -> str:
    """Return in one line why a start cannot use the compiled programs; "" if it can.

    >>> difference({"jax": "0.11.2", "num_kv_blocks": 400}, {"jax": "0.12.0", "num_kv_blocks": 400})
    "jax is '0.12.0', not '0.11.2'"
    """
    names = [name for name in recorded if recorded[name] != actual.get(name)]
    return "; ".join(f"{name} is {actual.get(name)!r}, not {recorded[name]!r}" for name in names)


def path(folder: Path, spec: Spec) -> Path:
    digest = hashlib.sha256(repr(spec).encode()).hexdigest()
    return folder / f"jaxllm-{digest[:16]}.json"
