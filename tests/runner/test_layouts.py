"""Meshes of two axes with other names: the same weights and tokens as on one axis."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, Mesh

from jaxllm import LLM, SamplingParams
from jaxllm.checkpoints import weights
from jaxllm.commands.conversion import convert
from jaxllm.embedded import ADAPTERS, HEADS, MODEL_DIR
from jaxllm.families.families import read_spec
from jaxllm.lora_request import LoRARequest
from jaxllm.model import stages
from jaxllm.model.sharding import RULES, Layout, make_layout
from jaxllm.setup import model_setup
from tests.support.checkpoints import write_checkpoint
from tests.support.paths import STORIES
from tests.support.sizes import FEW_SLOTS

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, logprobs=2, prompt_logprobs=1)
RANDOM = SamplingParams(temperature=1.0, top_p=0.9, seed=7, max_tokens=12, logprobs=2, repetition_penalty=1.1)


class Axes(NamedTuple):
    """The sizes of a mesh's axes, and the rules that are not "model"."""

    sizes: dict[str, int]
    rules: tuple[tuple[str, str | None], ...] = ()

    def layout(self) -> Layout:
        shape = tuple(self.sizes.values())
        devices = np.asarray(jax.devices()[: math.prod(shape)]).reshape(shape)
        return Layout(
            Mesh(devices, tuple(self.sizes)),
            {name: axis and "model" for name, axis in RULES.items()} | dict(self.rules),
        )


STAGE = Axes({"stage": 1, "model": 2})
REPLICATED = Axes({"model": 2, "data": 2})
TWO_DIVIDED = Axes({"rows": 2, "model": 2}, (("vocab", "rows"),))
LORA: dict[str, Any] = {"enable_lora": True, "max_loras": 2}
EAGLE: dict[str, Any] = {
    "speculative_config": {"method": "eagle3", "model": str(HEADS["jaxllm-eagle"]), "num_speculative_tokens": 2}
}
ENGINES: list[tuple[Axes, Path, dict[str, Any]]] = [
    (STAGE, STORIES, {}),
    (TWO_DIVIDED, STORIES, {}),
    (Axes({"model": 2, "stage": 1}), STORIES, {}),
    (REPLICATED, STORIES, {}),
    (REPLICATED, STORIES, {"quantization": "int8"}),
    (Axes({"rows": 2, "model": 2}, (("feed_forward", "rows"),)), STORIES, {}),
    (Axes({"model": 2}, (("vocab", None), ("feed_forward", None))), STORIES, {}),
    (TWO_DIVIDED, MODEL_DIR, LORA),
    (TWO_DIVIDED, MODEL_DIR, EAGLE),
]


def said(folder: Path, settings: dict[str, Any]) -> list[tuple[list[int], list[float]]]:
    """Generate with an engine on two shards; return each output's tokens and their log-probabilities."""
    adapter = LoRARequest("pirate", 1, str(ADAPTERS["pirate"])) if settings is LORA else None
    prompts = ["Once upon a time", "Tom had a dog, and"]
    with LLM(str(folder), tensor_parallel_size=2, **FEW_SLOTS | settings) as llm:
        outputs = llm.generate(prompts, [GREEDY, RANDOM], lora_request=adapter, use_tqdm=False)
    written = [output.outputs[0] for output in outputs]
    return [
        (list(each.token_ids), [top[token].logprob for token, top in zip(each.token_ids, each.logprobs, strict=True)])
        for each in written
    ]


@pytest.mark.parametrize(
    ("axes", "folder", "settings"),
    [*(pytest.param(*one, marks=[pytest.mark.ci] * (one is not ENGINES[1])) for one in ENGINES)],
    ids=str,
)
def test_engines_write_the_same(
    axes: Axes, folder: Path, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, layout, made = said(folder, settings), axes.layout(), []
    monkeypatch.setattr(model_setup, "make_layout", lambda *_: made.append(layout) or layout)
    found = said(folder, settings)
    assert made
    for (tokens, logprobs), (due, values) in zip(found, expected, strict=True):
        assert tokens == due
        np.testing.assert_allclose(logprobs, values, rtol=0, atol=1e-4)


@pytest.mark.parametrize("quantization", [None, pytest.param("int8", marks=pytest.mark.ci), "int4"])
@pytest.mark.parametrize("is_orbax", [False, pytest.param(True, marks=pytest.mark.ci)])
def test_each_device_has_its_piece_of_the_weights(is_orbax: bool, quantization: str | None, tmp_path: Path) -> None:
    """Each device has its part of the weights; with two key-value heads, some devices hold copies."""
    folder = write_checkpoint(tmp_path / "stored")
    folder = convert(str(folder), tmp_path / "converted") if is_orbax else folder
    spec, family = read_spec(weights.read_config(folder))
    for sizes in ({"stage": 1, "model": 4}, {"model": 4, "stage": 1}, {"model": 2, "data": 2}, {"data": 2, "model": 2}):
        layout, plain = Axes(sizes).layout(), make_layout(jax.devices(), sizes["model"])
        found, due = (
            weights.load(folder, spec, family, one, "float32", False, quantization) for one in (layout, plain)
        )
        described = weights.abstract(spec, layout, "float32", quantization)
        for leaf, other, shape in zip(*map(jax.tree.leaves, (found, due, described)), strict=True):
            assert (leaf.shape, leaf.dtype, leaf.sharding) == (shape.shape, shape.dtype, shape.sharding)
            assert len(leaf.addressable_shards) == math.prod(sizes.values())
            whole = np.asarray(other)
            for shard in leaf.addressable_shards:
                np.testing.assert_array_equal(shard.data, whole[shard.index])


@pytest.mark.parametrize("is_orbax", [False, pytest.param(True, marks=pytest.mark.ci)])
def test_each_stage_has_its_layers(is_orbax: bool, tmp_path: Path) -> None:
    """The last of two stages has two of five layers, and zeros in its last place."""
    folder = convert(str(STORIES), tmp_path / "converted") if is_orbax else STORIES
    spec, family = read_spec(weights.read_config(folder))
    layout, plain = make_layout(jax.devices(), 2, False, stages.divide(spec, 2)), make_layout(jax.devices(), 2)
    found, due = (weights.load(folder, spec, family, one, "float32", False, "int8") for one in (layout, plain))
    described = weights.abstract(spec, layout, "float32", "int8")
    for leaf, shape in zip(*map(jax.tree.leaves, (found, described)), strict=True):
        assert (leaf.shape, leaf.dtype, leaf.sharding) == (shape.shape, shape.dtype, shape.sharding)
    for place, layer in enumerate(found.layers):
        assert {shard.device for leaf in jax.tree.leaves(layer) for shard in leaf.addressable_shards} == {
            *layout.devices
        }
        for stage, first in enumerate(layout.bounds[:-1]):
            expected = jax.tree.map(np.asarray, due.layers[first + place] if first + place < 5 else due.layers[0])
            for leaf, other in zip(*map(jax.tree.leaves, (layer, expected)), strict=True):
                np.testing.assert_array_equal(np.split(leaf, 2)[stage], other if first + place < 5 else 0 * other)


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"heads": "b"}, "heads and kv_heads must be divided by the same mesh axis"),
        ({"vocab": "c"}, "the mesh has the axes"),
        ({"experts": "b"}, "experts must be divided by the mesh axis of feed_forward"),
        ({"stages": "b"}, "rules are for heads, kv_heads, feed_forward, vocab, experts, ranks, not for"),
    ],
)
def test_rules_that_cannot_be_obeyed_are_refused(rules: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Layout(AbstractMesh((2, 2), ("a", "b")), dict.fromkeys(RULES, "a") | {"ranks": None} | rules)
