"""The manifest of ahead-of-time compiled programs: the model, sizes, versions and devices they were compiled for.

A start with the same folder takes sizes that the user did not set from here, above all the number of KV blocks, which
otherwise depends on the free memory. So it needs no other program. Knows files and plain values, no device.
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
    """Return the manifest of a model in `folder`, {} if there is none."""
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
    """Write the manifest of a model into `folder`; return the file."""
    file = path(folder, spec)
    file.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return file


def difference(recorded: Mapping[str, Any], actual: Mapping[str, Any]) -> str:
    """Describe in one line why a start cannot use the prepared programs, "" if it can.

    >>> difference({"jax": "0.11.2", "num_kv_blocks": 400}, {"jax": "0.12.0", "num_kv_blocks": 400})
    "jax is '0.12.0', not '0.11.2'"
    """
    names = [name for name in recorded if recorded[name] != actual.get(name)]
    return "; ".join(f"{name} is {actual.get(name)!r}, not {recorded[name]!r}" for name in names)


def path(folder: Path, spec: Spec) -> Path:
    """Return the file of a model, named after a digest of the model's `Spec`."""
    digest = hashlib.sha256(repr(spec).encode()).hexdigest()
    return folder / f"jaxllm-{digest[:16]}.json"
