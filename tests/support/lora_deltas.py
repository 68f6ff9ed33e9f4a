"""The change that an adapter makes to a model's weights, compared with a merged checkpoint."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from jaxllm.checkpoints.lora_files import LoraFiles
from jaxllm.checkpoints.weights import read_config
from jaxllm.families.families import read_spec
from jaxllm.model.decoder import declare
from jaxllm.model.parameters import Weight
from tests.support.checkpoints import load
from tests.support.layouts import layout_of


def assert_merged(read: LoraFiles, base: Path, merged: Path, shards: int) -> None:
    """Assert that every weight of `merged`, over the shards, is that of `base` plus the adapter's change."""
    spec, _ = read_spec(read_config(base))
    before, after = load(base, shards), load(merged, shards)
    for layer, (declared, pairs) in enumerate(zip(declare(spec, layout_of(shards)).layers, read.weights, strict=True)):
        for name, weight in declared.items():
            old, new = (np.asarray(each.layers[layer][name], np.float64) for each in (before, after))
            added = _product(*pairs[name], weight, shards) if name in pairs else np.zeros(())
            atol = 1e-6 * (1 + np.abs(added).max())
            np.testing.assert_allclose(new - old, np.broadcast_to(added, new.shape), rtol=0, atol=atol)


def _product(a: np.ndarray, b: tuple[np.ndarray, ...], weight: Weight, shards: int) -> np.ndarray:
    """Multiply each part's B with its A; the parts are consecutive in every shard of the weight."""
    pieces = layout_of(shards).shards(weight.axes[0])
    of_parts = a.astype(np.float64).reshape(len(b), -1, a.shape[1])
    products = [np.split(own.astype(np.float64) @ of_parts[number], pieces) for number, own in enumerate(b)]
    return np.concatenate([own[piece] for piece in range(pieces) for own in products])
