"""Towers of images that are too large for all scores at once."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from jaxllm.families.families import read_images, read_spec
from jaxllm.model import vision
from tests.support.vision_models import gemma_config


def test_queries_attend_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    config = gemma_config("gemma3")
    images: Any = read_images(config, *read_spec(config))
    tower, rng = images.spec.tower, np.random.default_rng(0)
    weights = {
        name: rng.standard_normal(weight.shape, np.float32) * 0.2
        for name, weight in images.spec.declare().layers[0].items()
    }
    states = rng.standard_normal((tower.num_patches, tower.width), np.float32)
    layer: Any = vision.tower_layer
    whole = layer(tower, weights, states)
    monkeypatch.setattr(vision, "MOST_SCORES", 5 * tower.num_heads * tower.num_patches)  # 4 of 64 queries
    parts = jax.jit(lambda *arrays: layer.__wrapped__(tower, *arrays))  # another function: traced again
    assert "while" in parts.lower(weights, states).as_text()
    np.testing.assert_allclose(parts(weights, states), whole, atol=1e-5)
