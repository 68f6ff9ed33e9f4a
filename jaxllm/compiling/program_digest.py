"""Digests of everything that a compiled program depends on."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import pallas_kernels
from pallas_kernels.native import build

_SOURCES = (".py", ".json", ".cc", ".cu", ".h")
_PACKAGES = (
    *("jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "jax-cuda12-pjrt", "jax-cuda13-pjrt"),
    *("triton", "jax-triton", "flashinfer-python", "numpy", "ml-dtypes"),
)
_VARIABLES = ("XLA_FLAGS", "TF_XLA_", "TRITON_", "NVIDIA_TF32_OVERRIDE")  # prefixes
# Prefixes of JAX options that do not affect programs.
_WITHOUT_EFFECT = (
    *("jax_compilation_cache", "jax_persistent_cache", "jax_raise_persistent_cache", "jax_enable_compilation_cache"),
    *("jax_log", "jax_debug_log", "jax_explain", "jax_traceback", "jax_tracer_error", "jax_pprint", "jax_platforms"),
    *("jax_dump", "jax_include_debug_info", "jax_check_proxy", "jax_captured_constants"),
)


class NotDigestibleError(Exception):
    """A value of unknown type, which the message names."""


def digest(*values: Any) -> str:
    found = hashlib.sha256()
    _add(found, values)
    return found.hexdigest()


@functools.cache
def digest_source() -> str:
    found = hashlib.sha256()
    for root in (Path(__file__).parents[1], Path(str(pallas_kernels.__file__)).parent):
        for file in sorted(path for path in root.rglob("*") if path.suffix in _SOURCES):
            _add(found, (file.relative_to(root).as_posix(), file.read_bytes()))
    return found.hexdigest()


def digest_compiler(devices: tuple[Any, ...]) -> str:
    client = devices[0].client
    kinds = [
        (device.platform, device.device_kind, str(getattr(device, "compute_capability", ""))) for device in devices
    ]
    variables = {name: text for name, text in sorted(os.environ.items()) if name.startswith(_VARIABLES)}
    return digest(
        _versions(),
        variables,
        kinds,
        [device.id for device in devices],
        client.platform_version,
        len(client.devices()),
        host() if devices[0].platform == "cpu" else platform.machine(),
    )


def digest_options() -> str:
    """Return a digest of JAX's options in the calling thread that affect programs."""
    options: Any = jax.config
    values = options.values | {"jax_default_matmul_precision": options.jax_default_matmul_precision}
    return digest({name: repr(value) for name, value in values.items() if not name.startswith(_WITHOUT_EFFECT)})


@functools.cache
def _versions() -> dict[str, str]:
    found = {"python": sys.version}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


@functools.cache
def host() -> tuple[Any, ...]:
    """Return the processor's instruction sets, model, and cores available to XLA."""
    if sys.platform == "linux":
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        named = ("model name", "cpu family", "model\t", "CPU implementer", "CPU part", "Features")
        model = "\n".join(dict.fromkeys(line for line in lines if line.startswith(named)))
    else:
        model = repr(platform.uname()[2:])  # on a Mac the kernel version names the chip
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return sorted(build.processor()), model, cores


def cpu_name() -> str:
    _, model, cores = host()
    names = [line.partition(":")[2].strip() for line in model.splitlines() if line.startswith("model name")]
    return f"{names[0] if names else model}, {cores} cores"


def _add(found: Any, value: Any) -> None:
    """Add a value, its type and length, so that different values differ in bytes."""
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if value is None or isinstance(value, bool | int | float | complex | str):
        _add_bytes(found, kind, repr(value).encode())
    elif isinstance(value, Enum):
        _add_bytes(found, kind, value.name.encode())
    elif isinstance(value, bytes):
        _add_bytes(found, kind, value)
    elif isinstance(value, np.dtype | PartitionSpec) or isinstance(value, type):
        _add_bytes(found, kind, repr(value).encode())
    elif isinstance(value, np.ndarray | np.generic):
        if value.dtype.hasobject:
            raise NotDigestibleError(kind)
        _add_all(found, kind, (str(value.dtype), value.shape, value.tobytes()))
    elif isinstance(value, Mapping):
        _add_all(found, kind, [part for pair in value.items() for part in pair])
    elif isinstance(value, list | tuple):
        _add_all(found, kind, value)
    elif isinstance(value, frozenset | set):
        _add_all(found, kind, sorted(digest(part) for part in value))
    elif isinstance(value, Path):
        _add_bytes(found, kind, str(value).encode())
    elif isinstance(value, jax.ShapeDtypeStruct):
        _add_all(found, kind, (value.shape, value.dtype, value.sharding, bool(value.weak_type)))
    elif isinstance(value, NamedSharding):
        _add_all(found, kind, (value.mesh, value.spec, value.memory_kind))
    elif isinstance(value, Mesh):
        _add_all(found, kind, (value.axis_names, value.devices.shape, [each.id for each in value.devices.flat]))
    elif is_dataclass(value):
        _add_all(found, kind, [part for field in fields(value) for part in (field.name, getattr(value, field.name))])
    else:
        raise NotDigestibleError(kind)


def _add_all(found: Any, kind: str, parts: Any) -> None:
    parts = list(parts)
    _add_bytes(found, kind, str(len(parts)).encode())
    for part in parts:
        _add(found, part)


def _add_bytes(found: Any, kind: str, content: bytes) -> None:
    found.update(f"{kind}:{len(content)}:".encode())
    found.update(content)
