"""A digest of everything that the content of a KV block depends on except tokens, adapters and salts."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax

from jaxllm.compiling.program_digest import digest, digest_compiler
from jaxllm.config import EngineConfig
from jaxllm.setup.model_setup import Setup

SAMPLES, SAMPLE_BYTES = 16, 4096  # of each file of weights


def fingerprint(config: EngineConfig, setup: Setup, rows: Sequence[Sequence[jax.ShapeDtypeStruct]]) -> str:
    """Return 32 hexadecimal digits; `rows` has the arrays of a block by group.

    Engines with other numbers of shards share blocks, so their content may differ in rounding, except in deterministic
    mode.
    """
    is_random = config.load_format == "dummy"
    exact: tuple[Any, ...] = ()
    if config.deterministic:
        kernels = sorted((operation, choice.name) for operation, choice in setup.kernels.items())
        sizes = setup.max_num_batched_tokens, setup.max_num_seqs, config.tensor_parallel_size
        exact = (sizes, kernels, digest_compiler(tuple(setup.layout.devices)))
    return digest(
        setup.spec,
        config.seed % 2**32 if is_random else identity(setup.folder),
        None if setup.draft is None or is_random else identity(setup.draft.folder),
        config.quantization,
        (setup.platform, setup.dtype, setup.cache_dtype, setup.float8),
        config.block_size,
        [[(shape.shape, str(shape.dtype)) for shape in row] for row in rows],
        exact,
    )[:32]


def identity(folder: Path) -> str:
    """Return a digest of a model's files: names, sizes, times of change, and samples of the content.

    Weights that are copied without their times count as others: reading them whole would take seconds a gigabyte.
    """
    found = hashlib.sha256()
    for file in _files(folder):
        status = file.stat()
        found.update(f"{file.relative_to(folder)}:{status.st_size}:{status.st_mtime_ns}:".encode())
        with file.open("rb") as stream:
            for number in range(SAMPLES):
                stream.seek(number * status.st_size // SAMPLES)
                found.update(stream.read(SAMPLE_BYTES))
    return found.hexdigest()


def _files(folder: Path) -> Iterable[Path]:
    weights = sorted(folder.glob("*.safetensors"))
    if weights:
        return [*weights, *folder.glob("config.json")]
    return sorted(path for path in folder.rglob("*") if path.is_file())
