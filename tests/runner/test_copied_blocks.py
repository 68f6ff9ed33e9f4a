"""Copies of blocks when a sequence forks: keys, values, and the scales of 8-bit caches."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from jaxllm.model.sharding import make_layout
from jaxllm.runner import step
from jaxllm.setup.kv_cache import KvLayer


def test_a_fork_copies_every_part_of_a_block() -> None:
    layout = make_layout(jax.devices(), 1)
    rng = np.random.default_rng(0)
    block, scales = (6, 2, 4, 8), (6, 2, 4)
    layers = []
    for latent in (False, True):
        held: list[Any] = [
            rng.integers(-127, 128, block).astype(np.int8),
            rng.integers(-127, 128, block).astype(np.int8),
        ]
        held += [rng.random(scales, np.float32), rng.random(scales, np.float32)]
        parts = [jax.device_put(each, layout.sharding()) for each in held]
        layers.append(KvLayer(parts[0], None, parts[2]) if latent else KvLayer(*parts))
    leaves = tuple(jax.tree.leaves(layers))
    before = [np.asarray(each) for each in leaves]
    copies = np.array([[0, 3], [4, 1], [2, 6], [5, 7]], np.int32)  # blocks 6 and 7 do not exist
    copied = jax.jit(step.build_copy(layout, leaves))(leaves, copies)
    assert len(copied) == len(leaves) == 6
    for old, new in zip(before, copied, strict=True):
        due = old.copy()
        due[3], due[1] = old[0], old[4]
        np.testing.assert_array_equal(np.asarray(new), due)
