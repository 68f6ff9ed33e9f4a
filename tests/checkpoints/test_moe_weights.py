"""Loading experts and latent attention: each shard's part against the checkpoint's tensors, and refusals."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxllm.checkpoints import weights
from jaxllm.checkpoints.sources import Source
from jaxllm.commands.conversion import convert
from jaxllm.errors import UserError
from jaxllm.families.families import read_spec
from jaxllm.model import decoder, sharding
from jaxllm.runner import device_state
from jaxllm.sampling.sampler import Extras
from jaxllm.setup import kv_cache
from tests.support.checkpoints import load
from tests.support.layouts import layout_of
from tests.support.paths import GOLDEN
from tests.support.quantized_checkpoints import quantized_model, write


def _pieces(weight: jax.Array) -> list[np.ndarray]:
    return [np.asarray(piece.data) for piece in weight.addressable_shards]


def test_tensors_of_one_expert_each_are_stacked_and_split_by_width():
    tensors = load_file(GOLDEN / "mixtral" / "model.safetensors")
    layer = load(GOLDEN / "mixtral", shards=2).layers[1]
    for shard, (up, down) in enumerate(zip(_pieces(layer["expert_up"]), _pieces(layer["expert_down"]), strict=True)):
        inner = slice(8 * shard, 8 * shard + 8)
        for expert in range(8):
            name = f"model.layers.1.block_sparse_moe.experts.{expert}.w{{}}.weight"
            gate_and_up = [tensors[name.format(number)][inner] for number in (1, 3)]
            np.testing.assert_array_equal(up[expert], np.concatenate(gate_and_up))
            np.testing.assert_array_equal(down[expert], tensors[name.format(2)][:, inner])
    for router in _pieces(layer["router"]):
        np.testing.assert_array_equal(router, tensors["model.layers.1.block_sparse_moe.gate.weight"])


@pytest.mark.parametrize("case", ["mixtral", "gpt-oss", "deepseek-v3, fp8"])
def test_whole_experts_are_read_by_their_device_alone(tmp_path, monkeypatch, case):
    folder = GOLDEN / case
    if case.endswith("fp8"):
        config = json.loads((GOLDEN / "deepseek-v3" / "config.json").read_text()) | {"num_attention_heads": 8}
        sizes = {"hidden_size": 64, "moe_intermediate_size": 32, "intermediate_size": 64, "num_key_value_heads": 8}
        folder = write(tmp_path, *quantized_model("fp8-blocks", config | sizes)[:2])
    spec, family = read_spec(weights.read_config(folder))
    read: list[tuple[str, int | None, str, int]] = []
    give = Source.give

    def noted(source, side, width, start, *others):
        read.append((source.tensor.name, source.expert, side, source.at.first + start))
        return give(source, side, width, start, *others)

    monkeypatch.setattr(Source, "give", noted)
    layouts = [sharding.make_layout(jax.devices(), shards, divides_experts=True) for shards in (2, 1)]
    layer, due = (weights.load(folder, spec, family, layout, "float32").layers[1] for layout in layouts)
    experts = [each for each in read if "experts." in each[0] and "shared" not in each[0]]
    assert len(experts) == 2 * len({*experts}), "once by each of the two loads"
    for name in [name for name in layer if name.startswith("expert_")]:
        for piece, whole in zip(jax.tree.leaves(layer[name]), jax.tree.leaves(due[name]), strict=True):
            assert _pieces(piece)[0].shape == (len(whole) // 2, *whole.shape[1:])
            np.testing.assert_array_equal(np.asarray(piece).view(np.uint8), np.asarray(whole).view(np.uint8))


def test_a_tensor_of_all_experts_with_alternating_columns_is_taken_apart():
    tensors = load_file(GOLDEN / "gpt-oss" / "model.safetensors")
    layer = load(GOLDEN / "gpt-oss", shards=2).layers[0]
    start = "model.layers.0.mlp.experts."
    both, bias = tensors[f"{start}gate_up_proj"], tensors[f"{start}gate_up_proj_bias"]  # [E, D, 2 F] and [E, 2 F]
    for shard in range(2):
        gate, up = slice(16 * shard, 16 * shard + 16, 2), slice(16 * shard + 1, 16 * shard + 16, 2)
        expected = np.concatenate([both[:, :, gate], both[:, :, up]], axis=2).swapaxes(1, 2)
        np.testing.assert_array_equal(_pieces(layer["expert_up"])[shard], expected)
        expected = np.concatenate([bias[:, gate], bias[:, up]], axis=1)
        np.testing.assert_array_equal(_pieces(layer["expert_up_bias"])[shard], expected)
        expected = tensors[f"{start}down_proj"][:, 8 * shard : 8 * shard + 8].swapaxes(1, 2)
        np.testing.assert_array_equal(_pieces(layer["expert_down"])[shard], expected)
        np.testing.assert_array_equal(_pieces(layer["expert_down_bias"])[shard], tensors[f"{start}down_proj_bias"])
        heads = slice(3 * shard, 3 * shard + 3)
        np.testing.assert_array_equal(_pieces(layer["sinks"])[shard], tensors["model.layers.0.self_attn.sinks"][heads])


def test_a_tensor_of_all_experts_holds_gate_above_up():
    tensors = load_file(GOLDEN / "granite-moe" / "model.safetensors")
    layer = load(GOLDEN / "granite-moe", shards=2).layers[1]
    both = tensors["model.layers.1.block_sparse_moe.input_linear.weight"]  # [E, 2 F, D]
    down = tensors["model.layers.1.block_sparse_moe.output_linear.weight"]  # [E, D, F]
    for shard in range(2):
        inner = np.r_[8 * shard : 8 * shard + 8]
        np.testing.assert_array_equal(_pieces(layer["expert_up"])[shard], both[:, [*inner, *(16 + inner)]])
        np.testing.assert_array_equal(_pieces(layer["expert_down"])[shard], down[:, :, inner])


def test_key_and_value_matrices_of_the_latent_are_parted_head_by_head():
    tensors = load_file(GOLDEN / "deepseek-v3" / "model.safetensors")
    layer = load(GOLDEN / "deepseek-v3", shards=2).layers[1]
    both = tensors["model.layers.1.self_attn.kv_b_proj.weight"].reshape(6, 8 + 12, 24)
    for shard in range(2):
        heads = slice(3 * shard, 3 * shard + 3)
        np.testing.assert_array_equal(_pieces(layer["key"])[shard], both[heads, :8].reshape(-1, 24))
        np.testing.assert_array_equal(_pieces(layer["value"])[shard], both[heads, 8:].reshape(-1, 24))


def test_the_bias_of_the_choice_stays_float32():
    """In bfloat16 its steps of 0.001 would vanish in scores near 0.5."""
    layer = load(GOLDEN / "deepseek-v3", dtype="bfloat16").layers[1]
    assert {name for name, weight in layer.items() if weight.dtype != "bfloat16"} == {"choice_bias"}
    tensors = load_file(GOLDEN / "deepseek-v3" / "model.safetensors")
    stored = tensors["model.layers.1.mlp.gate.e_score_correction_bias"]
    np.testing.assert_array_equal(np.asarray(layer["choice_bias"]), stored)


@pytest.mark.parametrize(
    ("case", "name", "shape", "message"),
    [
        ("mixtral", "model.layers.1.block_sparse_moe.experts.7.w2.weight", None, "no tensor layers.1.block_sparse_moe"),
        ("mixtral", "model.layers.0.block_sparse_moe.experts.8.w1.weight", (16, 48), "experts.8.w1.weight is not part"),
        ("gpt-oss", "model.layers.0.mlp.experts.gate_up_proj", (8, 32, 48), "[8, 32, 48], config.json says [8, 48"),
        ("gpt-oss", "model.layers.0.mlp.experts.down_proj", (7, 16, 48), "[7, 16, 48], config.json says [8, 16, 48]"),
        ("deepseek-v2", "model.layers.0.self_attn.kv_b_proj.weight", (96, 24), "[96, 24], config.json says [120, 24]"),
        ("deepseek-v2", "model.layers.2.mlp.down_proj.weight", (48, 64), "layers.2.mlp.down_proj.weight is not part"),
    ],
)
def test_tensors_that_do_not_fit_are_named(tmp_path, case, name, shape, message):
    tensors = load_file(GOLDEN / case / "model.safetensors")
    tensors.pop(name, None)
    if shape is not None:
        tensors[name] = np.ones(shape, np.float32)
    shutil.copy(GOLDEN / case / "config.json", tmp_path)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=re.escape(message)):
        load(tmp_path)


def test_layers_that_guess_further_tokens_are_left_out(tmp_path):
    tensors = load_file(GOLDEN / "deepseek-v3" / "model.safetensors")
    tensors["model.layers.2.eh_proj.weight"] = np.ones((48, 96), np.float32)
    shutil.copy(GOLDEN / "deepseek-v3" / "config.json", tmp_path)
    save_file(tensors, tmp_path / "model.safetensors")
    assert len(load(tmp_path).layers) == 2


def test_devices_that_do_not_divide_an_expert_are_refused():
    config = json.loads((GOLDEN / "deepseek-v3" / "config.json").read_text()) | {"intermediate_size": 66}
    spec, whole_experts = read_spec(config | {"moe_intermediate_size": 18})[0], {**sharding.RULES, "experts": "tp"}
    decoder.check_shards(spec, layout_of(3))
    with pytest.raises(UserError, match=r"tensor_parallel_size 3 does not divide the model's \d+ experts"):
        decoder.check_shards(spec, replace(layout_of(3), rules=whole_experts))
    with pytest.raises(UserError, match="16 feed-forward columns"):
        decoder.check_shards(read_spec(config)[0], layout_of(3))


def test_a_block_of_latents_is_counted_once_and_is_whole_on_each_device():
    spec, _ = read_spec(weights.read_config(GOLDEN / "deepseek-v3"))
    dtype = np.dtype("bfloat16")
    geometry = kv_cache.Geometry(num_slots=2, num_blocks=5, block_size=16, max_model_len=64)
    for shards in (1, 2):
        assert kv_cache.block_bytes(spec, spec.num_layers, 16, dtype, shards) == 2 * 16 * (24 + 8) * 2
        layout = sharding.make_layout(jax.devices(), shards)
        state = device_state.abstract(spec, geometry, 32, Extras(spec.vocab_size), layout, dtype)
        held = [leaf.sharding.shard_shape(leaf.shape) for leaf in jax.tree.leaves(state.kv)]
        assert held == [(5, 1, 16, 32)] * 2


def test_random_experts_differ_from_each_other():
    spec, _ = read_spec(weights.read_config(GOLDEN / "mixtral"))
    params = weights.load_random(spec, sharding.make_layout(jax.devices(), 1), "float32", seed=3)
    up = np.asarray(params.layers[0]["expert_up"])
    assert len(np.unique(up)) > 0.99 * up.size
    assert abs(up.std() - 0.02) < 1e-3


@pytest.mark.ci
@pytest.mark.parametrize("divides_experts", [False, True])
@pytest.mark.parametrize("case", ["mixtral", "gpt-oss", "deepseek-v2"])
def test_a_converted_checkpoint_lands_on_two_devices_alike(tmp_path, case, divides_experts):
    layout = sharding.make_layout(jax.devices(), 2, divides_experts)
    folders = GOLDEN / case, convert(str(GOLDEN / case), tmp_path / "converted")
    plain, converted = (
        weights.load(folder, *read_spec(weights.read_config(folder)), layout, "float32") for folder in folders
    )
    for one, other in zip(jax.tree.leaves(plain), jax.tree.leaves(converted), strict=True):
        assert one.sharding == other.sharding
        for piece, same in zip(_pieces(one), _pieces(other), strict=True):
            np.testing.assert_array_equal(piece, same)
