"""The parts of the decoder against plain mathematics, and the decoder on several devices against one."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxllm.checkpoints import weights
from jaxllm.families.families import read_spec
from jaxllm.model import decoder, layers, sharding
from jaxllm.model.spec import BandScaling, LinearScaling, Rope, Spec
from pallas_kernels import rotate
from pallas_kernels.activations import activate
from tests.parity.driver import generate
from tests.support.checkpoints import CONFIG, write_checkpoint
from tests.support.heads import apart
from tests.support.layouts import layout_of
from tests.support.paths import GOLDEN


def _spec(**changes) -> Spec:
    sizes = {"num_layers": 2, "width": 32, "num_heads": 4, "num_kv_heads": 2, "head_size": 8, "ffn_width": 48}
    other = {"vocab_size": 64, "max_position": 64, "windows": (None, None), "attention_scale": 8**-0.5}
    other["ropes"] = (Rope(8),) * 2
    return Spec(**(sizes | other | changes))


def test_rotation_turns_each_pair_by_position_times_frequency():
    rope = Rope(8, theta=100.0)
    x = np.random.default_rng(0).standard_normal((5, 3, 8)).astype(np.float32)
    positions = np.asarray([0, 1, 7, 30, 2000])
    turned = np.asarray(rotate(jnp.asarray(x), *layers.rotation(rope, jnp.asarray(positions)), False))
    angles = positions[:, None, None] * 100.0 ** (-np.arange(4) / 4)
    expected = (x[..., :4] + 1j * x[..., 4:]) * np.exp(1j * angles)
    np.testing.assert_allclose(turned[..., :4] + 1j * turned[..., 4:], expected, atol=2e-4)


def test_scaled_frequencies():
    plain = layers.inverse_frequencies(Rope(64))
    linear = layers.inverse_frequencies(Rope(64, scaling=LinearScaling(4.0)))
    np.testing.assert_allclose(linear, plain / 4, rtol=1e-6)

    band = layers.inverse_frequencies(Rope(64, scaling=BandScaling(8.0, 1.0, 4.0, 64)))
    wavelengths = 2 * math.pi / plain
    is_short, is_long = wavelengths < 64 / 4, wavelengths > 64 / 1
    assert is_short.any() and is_long.any() and (~is_short & ~is_long).any()
    np.testing.assert_allclose(band[is_short], plain[is_short], rtol=1e-6)
    np.testing.assert_allclose(band[is_long], plain[is_long] / 8, rtol=1e-6)
    between = (band / plain)[~is_short & ~is_long]
    assert np.all((between > 1 / 8) & (between < 1)) and np.all(np.diff(between) < 0)


def test_norms():
    rng = np.random.default_rng(1)
    x = (3 * rng.standard_normal((4, 16)) + 1).astype(np.float32)
    scale, bias = rng.standard_normal((2, 16)).astype(np.float32)
    root = np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + 1e-3)
    np.testing.assert_allclose(layers.norm(x, scale, None, "rms", 1e-3), x / root * scale, atol=1e-5)
    np.testing.assert_allclose(layers.norm(x, scale, None, "rms+1", 1e-3), x / root * (1 + scale), atol=1e-5)
    centred = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.astype(np.float64).var(-1, keepdims=True) + 1e-3)
    np.testing.assert_allclose(layers.norm(x, scale, bias, "layer", 1e-3), centred * scale + bias, atol=1e-5)
    narrow = layers.norm(jnp.asarray(x, jnp.bfloat16), jnp.asarray(scale, jnp.bfloat16), None, "rms", 1e-3)
    assert narrow.dtype == jnp.bfloat16


def test_activations():
    x = np.linspace(-4, 4, 41, dtype=np.float32)
    error = np.asarray([math.erf(value / math.sqrt(2)) for value in x])
    cubic = np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))
    expected = {
        "silu": x / (1 + np.exp(-x)),
        "gelu": x * (1 + error) / 2,
        "gelu_tanh": x * (1 + cubic) / 2,
        "relu": np.maximum(x, 0),
    }
    for kind, values in expected.items():
        np.testing.assert_allclose(activate(jnp.asarray(x), kind), values, atol=1e-6)
    np.testing.assert_allclose(layers.softcap(jnp.asarray(x), 2.0), 2 * np.tanh(x / 2), atol=1e-6)


@pytest.mark.parametrize("rows", [1, 2, 5, 64, 65])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_linear_accumulates_in_float32(rows, dtype):
    rng = np.random.default_rng(2)
    x, weight = rng.standard_normal((rows, 300)).astype(dtype), rng.standard_normal((40, 300)).astype(dtype)
    bias = rng.standard_normal(40).astype(dtype)
    out = layers.linear(jnp.asarray(x), jnp.asarray(weight), jnp.asarray(bias))
    assert out.dtype == jnp.float32
    expected = x.astype(np.float64) @ weight.T.astype(np.float64) + bias.astype(np.float64)
    np.testing.assert_allclose(out, expected, atol=1e-4)


def test_one_row_does_not_convert_a_bfloat16_weight():
    """For a product with one row, XLA on a CPU would convert the whole weight to float32."""
    weight = jax.ShapeDtypeStruct((512, 2048), jnp.bfloat16)
    row = jax.ShapeDtypeStruct((1, 2048), jnp.bfloat16)
    temporary = jax.jit(layers.linear).lower(row, weight).compile().memory_analysis().temp_size_in_bytes
    assert temporary < 512 * 2048 / 4


@pytest.mark.parametrize("rows", [2, 64])
def test_a_product_of_few_float32_rows_is_the_other_way_round(rows: int):
    """The weight is the first factor, in its layout; XLA's simplifier would swap the two back."""
    weight, x = (jax.ShapeDtypeStruct((size, 2048), jnp.float32) for size in (512, rows))
    text = jax.jit(layers.linear).lower(x, weight).compile().as_text()
    assert f"f32[512,{rows}]" in text


@pytest.mark.parametrize(
    "case",
    [
        "gemma2",
        *(pytest.param(case, marks=pytest.mark.ci) for case in ("deepseek-v3", "gpt_neox", "gpt-oss", "qwen2-moe")),
        *(
            pytest.param(case, marks=pytest.mark.slow)
            for case in ("gpt2", "phi3", "olmo2", "cohere", "stablelm-parallel", "deepseek-v2")
        ),
    ],
)
def test_two_devices_compute_what_one_does(case):
    with np.load(GOLDEN / case / "golden.npz") as stored:
        prompt, expected = stored["prompt"].tolist(), stored["logits"]
    logits, _ = generate(GOLDEN / case, prompt, 1, shards=2, implementation="xla")
    np.testing.assert_allclose(logits, expected[: len(logits)], rtol=0, atol=1e-4)


@pytest.mark.ci
def test_more_devices_than_key_value_heads(tmp_path):
    """Two key-value heads on four devices, and a vocabulary of 97, which four does not divide."""
    folder = write_checkpoint(tmp_path, CONFIG)
    prompt = list(range(3, 60, 4))
    alone, _ = generate(folder, prompt, 1, implementation="xla")
    spread, _ = generate(folder, prompt, 1, shards=4, implementation="xla")
    assert alone.shape == spread.shape == (len(prompt), 97)
    assert alone.std() > 0.1
    np.testing.assert_allclose(spread, alone, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("shards", "expected"), [(1, 0), (4, 5)])
def test_two_all_reduces_a_layer_and_one_for_the_embedding(shards, expected):
    spec, _ = read_spec(CONFIG)
    layout = sharding.make_layout(jax.devices(), shards)
    params = weights.abstract(spec, layout, "float32")

    def hidden(params, tokens, positions):
        return decoder.forward(
            spec,
            params,
            tokens,
            decoder.Context(positions, lambda _, heads, *__: heads.qkv[:, : 8 // shards], layout=layout),
        )

    specs = jax.tree.map(lambda leaf: leaf.sharding.spec, params)
    whole = PartitionSpec()
    step = layout.shard_map(hidden, (specs, whole, whole), whole)
    tokens = jax.ShapeDtypeStruct((6,), jnp.int32)
    assert jax.jit(step).lower(params, tokens, tokens).compile().as_text().count(" all-reduce(") == expected


def test_layers_see_their_own_window_and_number():
    spec = _spec(windows=(7, None))
    params = weights.load_random(spec, sharding.make_layout(jax.devices(), 1), "bfloat16")
    calls = []

    def attend(layer, heads, window, sinks):
        assert sinks is None
        q, k, v = apart(heads, 4)
        calls.append((layer, q.shape, k.shape, v.shape, q.dtype, window))
        return q

    def hidden(params, tokens):
        return decoder.forward(spec, params, tokens, decoder.Context(tokens, attend))

    layout = sharding.make_layout(jax.devices(), 1)
    whole = PartitionSpec()
    step = layout.shard_map(hidden, (whole, whole), whole)
    out = jax.eval_shape(step, params, jax.ShapeDtypeStruct((6,), jnp.int32))
    assert (out.shape, out.dtype) == ((6, 32), jnp.bfloat16)
    shapes = ((6, 4, 8), (6, 2, 8), (6, 2, 8), jnp.bfloat16)
    assert calls == [(0, *shapes, 7), (1, *shapes, None)]


def test_the_declaration_gives_every_part_its_rows():
    for shards in (1, 2, 4):
        layout = layout_of(shards)
        declared = decoder.declare(
            _spec(qkv_bias=True, mlp_bias=True, norm="layer", norm_bias=True, vocab_size=65), layout
        )
        for weight in [*declared.top.values(), *declared.layers[0].values()]:
            assert len(weight.shape) == len(weight.axes)
            rows = sum(part.rows * part.copies for part in weight.parts)
            padding = -rows % shards if weight.axes[0] == "vocab" else 0
            assert weight.shape[0] == rows + padding
            assert layout.spec(*weight.axes) == PartitionSpec(*map(layout.axis, weight.axes))
    with pytest.raises(KeyError, match="'expert'"):
        layout.spec("expert")
