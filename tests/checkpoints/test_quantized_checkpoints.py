"""Quantized checkpoints: numbers from each format's packer, on any number of devices; wrong metadata is refused."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxllm import LLM, SamplingParams
from jaxllm.checkpoints import weights
from jaxllm.commands import cli
from jaxllm.config import EngineConfig
from jaxllm.errors import UserError
from jaxllm.families.families import read_spec
from jaxllm.lora_request import LoRARequest
from jaxllm.model import decoder, moe, quantized, sharding
from jaxllm.model.parameters import Scheme, Weight
from jaxllm.model.quantized import Quantized
from jaxllm.setup.model_setup import prepare
from pallas_kernels.linear.numbers import PACKED, dequantized
from tests.support.adapters import write_adapter
from tests.support.checkpoints import CONFIG, load, random_tensors, write_checkpoint
from tests.support.layouts import layout_of
from tests.support.paths import GOLDEN
from tests.support.quantized_checkpoints import FORMATS, mxfp4_model, quantized_model, write

LLAMA = CONFIG | {"vocab_size": 96, "num_key_value_heads": 4, "hidden_size": 64, "intermediate_size": 128}
QWEN3 = LLAMA | {"architectures": ["Qwen3ForCausalLM"]}


def _config(case: str) -> dict[str, Any]:
    return json.loads((GOLDEN / case / "config.json").read_text())


def _deepseek() -> dict[str, Any]:
    sizes = {"hidden_size": 64, "moe_intermediate_size": 32, "intermediate_size": 64, "vocab_size": 96} | {
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
    }
    return _config("deepseek-v3") | sizes


def _dequantized(leaf: Any) -> np.ndarray:
    """Return the weight from all devices, each part dequantized with its scales."""
    if not isinstance(leaf, Quantized):
        return np.asarray(leaf)
    width = 2 if leaf.scheme.kind in PACKED else 1
    whole = np.full((*leaf.values.shape[:-1], leaf.values.shape[-1] * width), np.nan, np.float32)
    arrays = [leaf.values, leaf.scales] + ([] if leaf.zeros is None else [leaf.zeros])
    for pieces in zip(*(array.addressable_shards for array in arrays), strict=True):
        *others, columns = pieces[0].index
        place = (*others, slice(*(bound and bound * width for bound in (columns.start, columns.stop))))
        values, scales = (np.asarray(piece.data) for piece in pieces[:2])
        zeros = np.asarray(pieces[2].data) if leaf.zeros is not None else None
        if values.ndim == 2:
            whole[place] = dequantized(values, scales, zeros, leaf.scheme.kind, np.float32, np)
        else:
            whole[place] = [
                dequantized(*one, None, leaf.scheme.kind, np.float32, np) for one in zip(values, scales, strict=True)
            ]
    return whole


def _assert_exact(config: dict[str, Any], stored: Any, plain: Any, folder: Path, shards: int, count: int) -> Any:
    """Compare every number with the model that the format's formula dequantized."""
    params = load(write(folder / "stored", config, stored), shards)
    config = {key: value for key, value in config.items() if key != "quantization_config"}
    exact = load(write(folder / "plain", config, plain), shards)
    is_leaf = lambda leaf: isinstance(leaf, Quantized)  # noqa: E731
    leaves, others = jax.tree.leaves(params, is_leaf=is_leaf), jax.tree.leaves(exact)
    for leaf, other in zip(leaves, others, strict=True):
        np.testing.assert_array_equal(_dequantized(leaf), other)
    assert sum(map(is_leaf, leaves)) == count
    return params, exact


def _described(folder: Path, params: Any, shards: int) -> None:
    """Compare the shapes of the programs, derived from config.json alone, with the weights."""
    spec, family = read_spec(weights.read_config(folder))
    layout = sharding.make_layout(jax.devices(), shards)
    described = weights.abstract(spec, layout, "float32", None, None, family)
    for made in (params, weights.load_random(spec, layout, "float32", 0, None, None, family)):
        assert jax.tree.structure(described) == jax.tree.structure(made)
        for one, other in zip(jax.tree.leaves(described), jax.tree.leaves(made), strict=True):
            assert (one.shape, one.dtype, one.sharding) == (other.shape, other.dtype, other.sharding)


@pytest.mark.parametrize("shards", [1, 2, 4])
@pytest.mark.parametrize("name", FORMATS)
def test_every_number_is_the_one_that_was_stored(tmp_path, name, shards):
    params, _ = _assert_exact(*quantized_model(name, QWEN3 if shards == 2 else LLAMA), tmp_path, shards, 8)
    if (name, shards) in (("w4a16-asymmetric", 2), ("fp8-blocks", 4)):
        _described(tmp_path / "stored", params, shards)


@pytest.mark.parametrize("shards", [1, 4])
def test_experts_and_latent_attention_in_blocks(tmp_path, shards):
    """DeepSeek-V3 as published: all products in FP8 blocks; absorbed weights of latent attention are dequantized."""
    config, stored, plain = quantized_model("fp8-blocks", _deepseek())
    params, exact = _assert_exact(config, stored, plain, tmp_path, shards, _products(config))
    if shards == 1:
        _assert_same_experts(config, params, exact)
    else:
        _described(tmp_path / "stored", params, shards)


@pytest.mark.parametrize("shards", [1, 2])
def test_experts_in_mxfp4(tmp_path, shards):
    """GPT-OSS as published: alternating rows of gate and up, and blocks of 32 divided over two devices."""
    config = _config("gpt-oss") | {"hidden_size": 64, "intermediate_size": 32}
    rng, tensors = np.random.default_rng(0), random_tensors(config)
    shapes = {
        "gate_up_proj": (64, 2 * 32),
        "gate_up_proj_bias": (2 * 32,),
        "down_proj": (32, 64),
        "down_proj_bias": (64,),
    }
    for layer in range(2):
        for name, shape in shapes.items():
            values = rng.standard_normal((config["num_local_experts"], *shape), np.float32)
            tensors[f"model.layers.{layer}.mlp.experts.{name}"] = values
    params, exact = _assert_exact(*mxfp4_model(config, tensors), tmp_path, shards, 4)
    if shards == 1:
        _assert_same_experts(config, params, exact)
    else:
        _described(tmp_path / "stored", params, shards)


def _products(config: dict[str, Any]) -> int:
    spec, _ = read_spec({key: value for key, value in config.items() if key != "quantization_config"})
    declared = decoder.declare(spec)
    return sum(weight.is_product for layer in declared.layers for weight in layer.values())


def _assert_same_experts(config: dict[str, Any], params: Any, exact: Any) -> None:
    """Compare the three ways of multiplying with experts to the results with floats."""
    spec, _ = read_spec(config)
    assert spec.experts is not None
    layer = spec.experts.layers.index(True)
    rng = np.random.default_rng(1)
    x = jax.numpy.asarray(rng.standard_normal((5, spec.width)), jax.numpy.float32)
    ways = (lambda *args: moe.by_tiles(*args, skips=True), moe.by_gathering, moe.by_all)

    def run(own: dict[str, Any]) -> list[jax.Array]:
        routed = {name: weight for name, weight in own.items() if name.startswith("expert_")}
        chosen = moe.route(spec.experts, own, x)
        return [way(spec, spec.experts, routed, x, *chosen) for way in ways]

    both = [jax.jit(run)(own) for own in (params.layers[layer], exact.layers[layer])]
    for one, other in zip(*both, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-4 * np.abs(other).max())


SETTINGS: dict[str, Any] = {
    **{"skip_tokenizer_init": True, "max_num_seqs": 2, "max_num_batched_tokens": 8, "num_kv_blocks": 8},
    **{"precompile": "covering", "enable_lora": True, "max_loras": 1},
}
ENGINES = [
    pytest.param("w4a16-asymmetric", QWEN3, 2, marks=pytest.mark.ci),
    *(pytest.param(name, QWEN3, 1, marks=pytest.mark.slow) for name in FORMATS),
    pytest.param("fp8-blocks", _deepseek(), 1, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("name", "config", "shards"), ENGINES)
def test_an_engine_answers_as_the_dequantized_model(tmp_path, name, config, shards):
    """With an adapter too, if the model supports it."""
    config, stored, plain = quantized_model(name, config)
    exact = {key: value for key, value in config.items() if key != "quantization_config"}
    folders = write(tmp_path / "stored", config, stored), write(tmp_path / "plain", exact, plain)
    adapter = LoRARequest("a", 1, str(write_adapter(tmp_path / "adapter", folders[1])))
    adapters = [None] if "kv_lora_rank" in config else [None, adapter]
    settings = SETTINGS | {"enable_lora": len(adapters) > 1}
    greedy = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=1)
    found = []
    for folder in folders:
        with LLM(str(folder), tensor_parallel_size=shards, **settings) as llm:
            prompts = [[5, 6, 7, 8, 9]] * len(adapters)
            outputs = llm.generate(prompts, greedy, lora_request=adapters, use_tqdm=False)
        found.append([output.outputs[0] for output in outputs])
    for one, other in zip(*found, strict=True):
        assert one.token_ids == other.token_ids
        assert abs(one.cumulative_logprob - other.cumulative_logprob) < 1e-3


@pytest.mark.parametrize("shards", [1, 4])
@pytest.mark.parametrize(("kind", "error"), [("fp8", 1 / 16), ("int4", 1 / 14)])
def test_rounding_at_load_is_to_the_nearest_number(tmp_path, kind, error, shards):
    """FP8 keeps three bits of mantissa; int4 is within half a step, a seventh of its group's largest."""
    folder = write_checkpoint(tmp_path, LLAMA)
    plain, params = load(folder, shards), load(folder, shards, quantization=kind)
    count = 0
    for name, weight in params.layers[0].items():
        if isinstance(weight, Quantized):
            exact, count = np.asarray(plain.layers[0][name]), count + 1
            made = _dequantized(weight)
            groups = np.abs(exact).reshape(len(exact), -1, weight.scheme.group or exact.shape[1] // shards)
            largest = np.repeat(groups.max(2), groups.shape[2], axis=1)
            bound = np.maximum(error * np.abs(exact), largest / 448 / 512) if kind == "fp8" else error * largest
            assert np.all(np.abs(made - exact) <= bound * 1.001) and np.any(made != exact)
    assert count == 4
    spec, _ = read_spec(LLAMA)
    described = weights.abstract(spec, sharding.make_layout(jax.devices(), shards), "float32", kind)
    assert [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(described)] == [
        (leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(params)
    ]


@pytest.mark.parametrize("kind", ["int8", "float8", "int4", "float4"])
def test_both_namespaces_round_to_the_same_bits(kind):
    x = np.random.default_rng(1).standard_normal((40, 64)).astype(np.float32)
    scheme = Scheme(kind, 32)
    for here, there in zip(
        quantized.rounded(x, scheme, np), jax.jit(lambda x: quantized.rounded(x, scheme))(x), strict=True
    ):
        np.testing.assert_array_equal(here, there)


def test_groups_go_with_the_columns_of_a_device():
    weight = Weight((8, 96), ("width", "feed_forward"), ())
    fitted = [quantized.fitted(Scheme("int4", 128), weight, layout_of(shards)) for shards in (1, 2, 3)]
    assert [scheme.group for scheme in fitted] == [32, 16, 32]
    with pytest.raises(UserError, match="int4 do not fill a byte in rows of 3 columns"):
        quantized.fitted(Scheme("int4", 128), weight, layout_of(32))
    assert quantized.describe(weight, layout_of(2), "float32").sharding.spec == PartitionSpec(None, "tp")


def _spoilt() -> Any:
    """Damage each tensor of a matrix in every format: its shape, its type, or its presence."""
    for name in FORMATS:
        config, stored, _ = quantized_model(name, LLAMA)
        for tensor, value in stored.items():
            if "layers.1.mlp.up_proj" in tensor and not tensor.endswith(("input_scale", "g_idx")):
                wrong = value[..., :-1] if value.size > 1 else np.ones((3, 3), value.dtype)
                yield name, config, stored | {tensor: wrong}
                yield name, config, stored | {tensor: value.astype(np.float64)}
                yield name, config, {key: one for key, one in stored.items() if key != tensor}
                if value.ndim == 2 and min(value.shape) > 1 and value.shape[0] != value.shape[1]:
                    yield name, config, stored | {tensor: value.T}


def test_what_does_not_fit_is_refused_in_one_line(tmp_path):
    count = 0
    for name, config, tensors in _spoilt():
        folder = write(tmp_path / "one", config, tensors)
        with pytest.raises(UserError) as refusal:
            load(folder)
        assert "\n" not in str(refusal.value) and "up_proj" in str(refusal.value), name
        count += 1
    assert count > 100


def _changed(config: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    config = copy.deepcopy(config)
    *steps, last = path.split(".")
    inner = config["quantization_config"]
    for step in steps:
        inner = inner[step]
    inner[last] = value
    return config


LIES = [
    ("w4a16", "config_groups.group_0.weights.group_size", 32, "has shape"),
    ("w4a16", "config_groups.group_0.weights.group_size", 0, "group_size"),
    ("w4a16", "config_groups.group_0.weights.num_bits", 3, "num_bits"),
    ("w4a16", "config_groups.group_0.weights.num_bits", 8, "has shape"),
    ("w4a16", "config_groups.group_0.weights.symmetric", False, "lacks the tensor"),
    ("w4a16", "config_groups.group_0.targets", ["re:("], "targets"),
    ("w4a16", "config_groups", {}, "config_groups"),
    ("w4a16", "format", "marlin-24", "marlin-24"),
    ("w4a16", "ignore", ["re:.*up_proj"], "but not"),
    ("w4a16", "ignore", ["re:.*down_proj"], "says the opposite"),
    ("w4a16", "ignore", [], "lm_head.weight is not quantized"),
    ("w4a16", "ignore", ["re:" + "a" * 501], "longer than"),
    ("w4a16", "quantization_status", "frozen", "quantization_status"),
    ("w4a16", "transform_config", {"a": 1}, "transform_config"),
    ("gptq", "bits", 2, "bits"),
    ("gptq", "dynamic", {"a": 1}, "dynamic"),
    ("gptq-asymmetric", "sym", True, "symmetric"),
    ("gptq", "group_size", "many", "group_size"),
    ("awq", "version", "gemv", "gemv"),
    ("awq", "bits", 8, "bits"),
    ("fp8-blocks", "weight_block_size", [16, 0], "weight_block_size"),
    ("fp8-blocks", "weight_block_size", [8, 16], "has shape"),
    *(("awq", "quant_method", method, method) for method in ("bitsandbytes", "quark", "hqq", "x" * 99)),
]


@pytest.mark.parametrize(("name", "path", "value", "said"), LIES)
def test_a_config_that_lies_is_refused_in_one_line(tmp_path, name, path, value, said):
    config, stored, _ = quantized_model(name, LLAMA)
    folder = write(tmp_path, _changed(config, path, value), stored)
    with pytest.raises(UserError, match=re.escape(said[:80])) as refusal:
        load(folder)
    assert "\n" not in str(refusal.value) and len(str(refusal.value)) < 400


@pytest.mark.parametrize("name", FORMATS)
def test_no_refusal_contradicts_the_config(tmp_path, name):
    """Remove one tensor of a matrix in every format, with and without a quantization_config."""
    config, stored, _ = quantized_model(name, LLAMA)
    plain = {key: value for key, value in config.items() if key != "quantization_config"}
    for tensor in [each for each in stored if "layers.1.mlp.up_proj" in each and not each.endswith("input_scale")]:
        rest = {key: value for key, value in stored.items() if key != tensor}
        for own, has_config in ((config, True), (plain, False)):
            try:
                load(write(tmp_path / "one", own, rest))
            except UserError as error:
                said = str(error)
            else:
                assert tensor.endswith("g_idx")
                continue
            assert not has_config or "has no quantization_config" not in said
            assert not re.search("says the opposite|leaves it out|does not say", said)
            if "fp8" in name and "scale" in tensor:
                reason = f"lacks {tensor.removeprefix('model.')}" if has_config else "has no quantization_config"
                assert reason in said


def test_a_tensor_that_the_config_leaves_out_or_that_is_never_quantized(tmp_path):
    config, stored, _ = quantized_model("fp8-blocks", LLAMA)
    ignored = _changed(config, "modules_to_not_convert", ["down_proj"])
    lone = {key: value for key, value in stored.items() if not key.endswith("down_proj.weight_scale_inv")}
    with pytest.raises(UserError, match=r"type F8_E4M3, but quantization_config in config.json .fp8. leaves it out"):
        load(write(tmp_path / "one", ignored, lone))
    one = next(value for key, value in stored.items() if key.endswith("up_proj.weight"))
    for key, value in {"lm_head.weight": one, "model.embed_tokens.weight": one}.items():
        whole = stored[key]
        codes = np.resize(value, whole.shape)
        with pytest.raises(UserError, match=r"but of fp8 it is read unquantized only"):
            load(write(tmp_path / "two", config, stored | {key: codes}))
    del config["quantization_config"]["quant_method"]
    with pytest.raises(UserError, match="quantization_config has no quant_method"):
        load(write(tmp_path / "three", config, stored))


def test_columns_in_another_order_are_refused_by_name(tmp_path):
    config, stored, _ = quantized_model("gptq", LLAMA)
    stored = {name: value[::-1] if name.endswith("g_idx") else value for name, value in stored.items()}
    with pytest.raises(UserError, match=r"g_idx puts columns in another order .desc_act"):
        load(write(tmp_path, config, stored))


def test_a_quantization_asked_for_must_be_the_stored_one(tmp_path, capfd):
    config, stored, _ = quantized_model("awq", LLAMA)
    folder = str(write(tmp_path, config, stored))
    assert prepare(EngineConfig(model=folder, quantization="int4")).family.stored.method == "awq"
    with pytest.raises(UserError, match=r"quantization fp8 is not possible: .* .awq, int4.") as refusal:
        prepare(EngineConfig(model=folder, quantization="fp8"))
    assert refusal.value.parameter == "quantization"
    assert cli.main(["doctor", "--model", folder, "--skip-tokenizer-init", "--json"]) == 0
    said = json.loads(capfd.readouterr().out)["model"]["quantization"]
    assert said == {"value": "awq, int4", "why": "how the checkpoint is stored"}
