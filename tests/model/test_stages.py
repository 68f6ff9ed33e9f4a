"""Layers are divided among pipeline stages that compute alike; a device holds its part of its stage."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh

from jaxllm.errors import UserError
from jaxllm.families.families import read_spec
from jaxllm.model import decoder, stages
from jaxllm.model.sharding import PIPELINE, RULES, Division, Layout
from jaxllm.model.spec import Spec
from jaxllm.runner import pipeline
from jaxllm.runner.batch import Shape
from tests.families.released import DEEPSEEK_V3, LLAMA_31_8B
from tests.support.paths import GOLDEN


def spec_of(kinds: str) -> Spec:
    spec, _ = read_spec(json.loads((GOLDEN / "llama" / "config.json").read_text()))
    windows = tuple(ord(kind) for kind in kinds)
    return replace(spec, num_layers=len(kinds), windows=windows, ropes=spec.ropes[:1] * len(kinds))


@pytest.mark.parametrize(
    ("kinds", "count", "bounds", "leading"),
    [
        ("aaaaa", 2, (0, 3, 5), 0),
        ("aaaaa", 4, (0, 2, 3, 4, 5), 0),
        ("aaaaa", 5, (0, 1, 2, 3, 4, 5), 0),
        ("ababab", 2, (0, 4, 6), 0),
        ("abbabbab", 3, (0, 3, 6, 8), 0),  # the last stage has no third layer
        ("aabbb" * 3, 2, (0, 10, 15), 0),
        ("bbaaaaaaa", 2, (0, 6, 9), 2),
    ],
)
def test_stages_compute_alike(kinds: str, count: int, bounds: tuple[int, ...], leading: int) -> None:
    division = stages.divide(spec_of(kinds), count)
    assert division == (bounds, leading)
    layout = _layout(2, division)
    places = [stages.place_of(layer, layout) for layer in range(len(kinds))]
    assert all(kinds[layer] == kinds[place] for layer, (_, place) in enumerate(places))
    ends = [1 + max(place for own, place in places if own == stage) for stage in range(count)]
    assert stages.ends(layout) == ends and max(ends) == ends[0] and ends[-1] > leading
    assert stages.place_of(len(kinds), layout) == (count - 1, ends[-1])
    values = [np.full(2, 1 + layer) for layer in range(len(kinds))]
    joined = np.stack(stages.join_on_host(values, layout))  # [places, stages · 2]
    assert sorted(joined[joined > 0]) == sorted(np.concatenate(values))
    assert all(
        (joined[place].reshape(count, 2)[stage] == 1 + layer).all() for layer, (stage, place) in enumerate(places)
    )


@pytest.mark.parametrize(
    ("kinds", "count", "why"),
    [
        ("aaa", 4, "it has 3 layers. Use at most 3"),
        ("ababab", 4, "it has 6 layers, which repeat after 2. Use at most 3"),
        ("abcdef", 2, "Use tensor_parallel_size instead"),
    ],
)
def test_stages_that_would_differ_are_refused(kinds: str, count: int, why: str) -> None:
    with pytest.raises(UserError, match=why):
        stages.divide(spec_of(kinds), count)


def test_the_first_layers_of_deepseek_are_in_the_first_stage() -> None:
    spec = read_spec(dict(DEEPSEEK_V3))[0]
    division = stages.divide(spec, 4)
    assert division == ((0, 18, 33, 47, 61), 3)
    one = stages.of_one(spec, _layout(2, division))
    assert one.experts and one.experts.layers == (False,) * 3 + (True,) * 15 and len(one.windows) == 18


def _layout(shards: int, division: Division) -> Layout:
    mesh = AbstractMesh((len(division.bounds) - 1, shards), (PIPELINE, "tp"))
    return Layout(mesh, {**RULES, "vocab": (PIPELINE, "tp")}, division)


def test_a_device_has_its_part_of_its_stage() -> None:
    """All of a model of 32 layers is divided by eight, but norms by four."""
    spec, _ = read_spec(dict(LLAMA_31_8B))
    layout = _layout(2, stages.divide(spec, 4))
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
    layout = _layout(1, Division((0, 2, 4)))
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
