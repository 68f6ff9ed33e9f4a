"""A digest of all that a KV block depends on except tokens, adapters and salts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from jaxllm.compiling.program_digest import digest, digest_compiler
from jaxllm.config import EngineConfig
from jaxllm.setup.model_files import identity
from jaxllm.setup.model_setup import Setup


def fingerprint(config: EngineConfig, setup: Setup, rows: Sequence[Sequence[jax.ShapeDtypeStruct]]) -> str:
    """Return 32 hexadecimal digits; `rows` has the arrays of a block by group.

    Engines with other numbers of shards share blocks, whose content may differ in rounding, except in deterministic
    mode.
    """
    is_random = config.load_format == "dummy"
    exact: tuple[Any, ...] = ()
    if config.deterministic:
        kernels = sorted((operation, choice.name) for operation, choice in setup.kernels.items())
        sizes = setup.max_num_batched_tokens, setup.max_num_seqs
        exact = (
            sizes,
            config.tensor_parallel_size,
            config.pipeline_parallel_size,
            kernels,
            digest_compiler(tuple(setup.layout.devices)),
        )
    return digest(
        setup.spec,
        config.seed % 2**32 if is_random else identity(setup.folder, with_times=True),
        None if setup.draft is None or is_random else identity(setup.draft.folder, with_times=True),
        config.quantization,
        (setup.platform, setup.dtype, setup.cache_dtype, setup.float8),
        config.block_size,
        [[(shape.shape, str(shape.dtype)) for shape in row] for row in rows],
        exact,
    )[:32]
