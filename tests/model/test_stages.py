"""Layers are divided among pipeline stages that compute alike; a device holds its part of its stage."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh

from jaxllm.errors import UserError
from jaxllm.families.families import read_spec
from jaxllm.model import decoder, stages
from jaxllm.model.sharding import PIPELINE, RULES, Layout
from jaxllm.model.spec import Spec
from jaxllm.runner import pipeline
from jaxllm.runner.batch import Shape
from tests.families.released import DEEPSEEK_V3, LLAMA_31_8B
from tests.support.paths import GOLDEN

KINDS = {"a": None, "b": 64}  # of layers: windows


def spec_of(kinds: str) -> Spec:
    spec, _ = read_spec(json.loads((GOLDEN / "llama" / "config.json").read_text()))
    windows = tuple(KINDS[kind] for kind in kinds)
    return replace(spec, num_layers=len(kinds), windows=windows, ropes=spec.ropes[:1] * len(kinds))


@pytest.mark.parametrize(
    ("kinds", "count", "bounds"),
    [
        ("aaaaa", 1, ()),
        ("aaaaa", 2, (0, 3, 5)),
        ("aaaaa", 4, (0, 2, 3, 4, 5)),
        ("aaaaa", 5, (0, 1, 2, 3, 4, 5)),
        ("ababab", 2, (0, 4, 6)),
        ("abbabbab", 3, (0, 3, 6, 8)),  # the last stage has no third layer
        ("aabbb" * 3, 2, (0, 10, 15)),
    ],
)
def test_stages_begin_alike(kinds: str, count: int, bounds: tuple[int, ...]) -> None:
    assert stages.bounds(spec_of(kinds), count) == bounds
    each = [kinds[first:end] for first, end in pairwise(bounds)]
    assert all(each[0].startswith(stage) for stage in each)
    layout = _layout(2, bounds)
    for layer in range(len(kinds)) if bounds else ():
        stage, place = stages.place_of(layer, layout)
        assert bounds[stage] + place == layer and place < len(each[stage])
    if bounds:
        assert stages.place_of(len(kinds), layout) == (count - 1, len(each[-1]))


@pytest.mark.parametrize(
    ("config", "count", "why"),
    [
        (LLAMA_31_8B, 33, "it has 32 layers. Use at most 32"),
        (DEEPSEEK_V3, 2, "its 61 layers differ. Use tensor_parallel_size instead"),
    ],
)
def test_stages_that_would_differ_are_refused(config: dict[str, Any], count: int, why: str) -> None:
    with pytest.raises(UserError, match=why):
        stages.bounds(read_spec(dict(config))[0], count)
    with pytest.raises(UserError, match="its 6 layers repeat after 2"):
        stages.bounds(spec_of("ababab"), 4)


def _layout(shards: int, bounds: tuple[int, ...]) -> Layout:
    mesh = AbstractMesh((max(1, len(bounds) - 1), shards), (PIPELINE, "tp"))
    return Layout(mesh, {**RULES, "vocab": (PIPELINE, "tp")}, bounds)


def test_a_device_has_its_part_of_its_stage() -> None:
    """All of a model of 32 layers is divided by eight, but norms by four."""
    spec, _ = read_spec(dict(LLAMA_31_8B))
    layout = _layout(2, stages.bounds(spec, 4))
    declared = decoder.declare(spec, layout)
    described = stages.describe(
        [{name: _described(weight.shape, layout.sharding(*weight.axes)) for name, weight in layer.items()}
         for layer in declared.layers], layout
    )  # fmt: skip
    held = sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in jax.tree.leaves(described))
    whole = [weight.shape for layer in declared.layers for weight in layer.values()]
    assert held == sum(math.prod(shape) // (8 if len(shape) > 1 else 4) for shape in whole)
    assert len(described) == stages.of_one(spec, layout).num_layers == 8
    assert layout.padded("vocab", 1001) == 1008


def _described(shape: tuple[int, ...], sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=sharding)


def test_the_first_difference_of_weights_is_named() -> None:
    layout = _layout(1, (0, 2, 4))
    layers = [{"up": _described((4 + (layer == 3), 2), layout.sharding())} for layer in range(4)]
    with pytest.raises(UserError, match="the weights of layers 1 and 3 differ"):
        stages.describe(layers, layout)


def test_stages_idle_at_the_start_and_the_end_of_prompts() -> None:
    """At most 5 % of the stage-ticks of 8,192 tokens on two stages; a decode step has one micro-batch."""
    prompts = Shape(tokens=8192, rows=256, tiles=768, entries=1, sampling_fields=1)
    decodes = Shape(tokens=256, rows=256, tiles=0, entries=1, sampling_fields=0)
    assert pipeline.ticks(prompts, 2) == (64, 66)
    assert pipeline.ticks(prompts, 4) == (128, 140)
    assert pipeline.ticks(decodes, 4) == (4, 16)
