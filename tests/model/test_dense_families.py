"""The dense rows of the table: published config.json files become the right Spec, and what is not built is refused."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.model import layers
from jaxllm.model.families import read_spec
from jaxllm.model.spec import BandScaling, LinearScaling, PairScaling, Rope, Spec, YarnScaling
from pallas_kernels import rotate

# In the form of the hub; keys that all share, or that have no effect, are left out.
_SIZES: dict[str, Any] = {
    **{"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 16, "num_hidden_layers": 8},
    **{"num_key_value_heads": 4, "max_position_embeddings": 8192, "vocab_size": 50304},
}
GEMMA_3 = _SIZES | {
    **{"architectures": ["Gemma3ForCausalLM"], "attn_logit_softcapping": None, "head_dim": 256},
    **{"hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256, "rope_local_base_freq": 10000},
    **{"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "rope_theta": 1000000, "sliding_window": 512},
    "sliding_window_pattern": 6,
}
PHI_3 = _SIZES | {
    "architectures": ["Phi3ForCausalLM"],
    "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"},
    "max_position_embeddings": 131072,
    "original_max_position_embeddings": 4096,
    "partial_rotary_factor": 0.75,
    "resid_pdrop": 0.0,
    "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48},
    "sliding_window": 262144,
}
OLMO_2 = _SIZES | {"architectures": ["Olmo2ForCausalLM"], "rms_norm_eps": 1e-6, "rope_theta": 500000}
GRANITE = _SIZES | {
    "architectures": ["GraniteForCausalLM"],
    "attention_multiplier": 0.015625,
    "embedding_multiplier": 12.0,
    "logits_scaling": 8.0,
    "residual_multiplier": 0.22,
}
SMOLLM_3 = _SIZES | {
    **{"architectures": ["SmolLM3ForCausalLM"], "layer_types": ["full_attention"] * 8, "max_window_layers": 28},
    **{"no_rope_layers": [1, 1, 1, 0] * 2, "rope_theta": 5000000.0, "use_sliding_window": False},
}
STABLELM = _SIZES | {
    "architectures": ["StableLmForCausalLM"],
    "partial_rotary_factor": 0.25,
    "qk_layernorm": True,
    "use_parallel_residual": True,
}
STARCODER_2 = _SIZES | {
    "architectures": ["Starcoder2ForCausalLM"],
    "hidden_act": "gelu_pytorch_tanh",
    "norm_epsilon": 1e-5,
    "sliding_window": 4096,
    "use_bias": True,
}
PYTHIA = {key: value for key, value in _SIZES.items() if key != "num_key_value_heads"} | {
    "architectures": ["GPTNeoXForCausalLM"],
    "hidden_act": "gelu",
    "rotary_emb_base": 10000,
    "rotary_pct": 0.25,
    "use_parallel_residual": True,
}
COMMAND_R = _SIZES | {
    "architectures": ["CohereForCausalLM"],
    "logit_scale": 0.0625,
    "model_max_length": 131072,
    "rope_theta": 8000000.0,
}
COMMAND_R_7B = _SIZES | {
    **{"architectures": ["Cohere2ForCausalLM"], "layer_switch": 4, "order_of_interleaved_layers": "local_attn_first"},
    **{"position_embedding_type": "rope_gptj", "rope_theta": 50000, "sliding_window": 4096, "use_parallel_block": True},
}
GLM_4 = _SIZES | {
    "architectures": ["Glm4ForCausalLM"],
    "attention_bias": False,
    "head_dim": 128,
    "partial_rotary_factor": 0.5,
}
INTERNLM_3 = _SIZES | {
    **{"architectures": ["InternLM3ForCausalLM"], "bias": False, "head_dim": 128, "qkv_bias": True},
    **{"rope_scaling": {"factor": 6.0, "rope_type": "dynamic"}, "rope_theta": 50000000},
}
EXAONE_4 = _SIZES | {
    "architectures": ["Exaone4ForCausalLM"],
    "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 2,
    "sliding_window": 4096,
    "sliding_window_pattern": "LLLG",
}


def _spec(config: dict[str, Any], max_model_len: int | None = None) -> Spec:
    return read_spec(config, max_model_len)[0]


def test_what_sets_each_family_apart():
    gemma = _spec(GEMMA_3)
    whole, local = Rope(256, 1e6, LinearScaling(8.0)), Rope(256, 1e4)
    assert gemma.ropes == (local,) * 5 + (whole,) + (local,) * 2
    assert gemma.windows == (512,) * 5 + (None,) + (512,) * 2
    assert (gemma.norm_place, gemma.qk_norm, gemma.max_position) == ("sandwich", "each head", 8192)
    olmo = _spec(OLMO_2)
    assert (olmo.norm_place, olmo.qk_norm, olmo.norm_eps) == ("post", "all heads", 1e-6)
    granite = _spec(GRANITE)
    assert (granite.embed_scale, granite.attention_scale, granite.logit_scale) == (12.0, 1 / 64, 1 / 8)
    assert granite.residual_scale == 0.22
    smol = _spec(SMOLLM_3)
    assert [rope is not None for rope in smol.ropes] == [True, True, True, False] * 2
    assert smol.tie_embeddings
    stable = _spec(STABLELM)
    assert (stable.residual, stable.qk_norm, stable.norm_bias) == ("parallel, one norm", "own per head", True)
    assert _spec(STABLELM | {"use_parallel_residual": False}).residual == "serial"
    star = _spec(STARCODER_2)
    assert (star.windows, star.mlp_gated, star.activation, star.out_bias) == ((4096,) * 8, False, "gelu_tanh", True)
    neox = _spec(PYTHIA)
    assert (neox.residual, neox.ropes[0], neox.num_kv_heads) == ("parallel", Rope(32), 16)
    command = _spec(COMMAND_R)
    assert (command.max_position, command.norm, command.norm_bias) == (131072, "layer", False)
    assert command.ropes == (Rope(128, 8e6, is_interleaved=True),) * 8
    command = _spec(COMMAND_R_7B)
    assert [window is not None for window in command.windows] == [True, True, True, False] * 2
    assert [rope is not None for rope in command.ropes] == [True, True, True, False] * 2
    glm = _spec(GLM_4)
    assert (glm.ropes[0], glm.qkv_bias, glm.norm_place) == (Rope(64, is_interleaved=True), False, "sandwich")
    intern = _spec(INTERNLM_3)
    assert (intern.qkv_bias, intern.out_bias, intern.mlp_bias) == (True, False, False)
    exaone = _spec(EXAONE_4)
    assert [rope is not None for rope in exaone.ropes] == [True, True, True, False] * 2
    full = _spec(EXAONE_4 | {"sliding_window": None, "sliding_window_pattern": None, "layer_types": None})
    assert (full.windows, full.ropes) == ((None,) * 8, (Rope(128),) * 8)


def test_longrope_is_chosen_by_the_length_that_was_asked_for():
    amplitude = math.sqrt(1 + math.log(32) / math.log(4096))
    long, short = (Rope(96, 1e4, PairScaling((factor,) * 48), amplitude) for factor in (2.0, 1.0))
    assert _spec(PHI_3).ropes == _spec(PHI_3, 4097).ropes == (long,) * 8
    assert _spec(PHI_3, 4096).ropes == (short,) * 8
    assert _spec(PHI_3, 4096).max_position == 131072


def test_dynamic_rotation_is_the_plain_one_up_to_the_models_own_length():
    plain = (Rope(128, 5e7),) * 8
    assert _spec(INTERNLM_3).ropes == _spec(INTERNLM_3, 8192).ropes == plain
    assert _spec(INTERNLM_3).max_position == 8192
    longer = _spec(INTERNLM_3, 16384)
    assert longer.max_position == 16384
    rope = longer.ropes[0]
    assert rope is not None
    assert rope.theta == pytest.approx(5e7 * (6 * 2 - 5) ** (128 / 126))
    assert _spec(INTERNLM_3, 10**6).max_position == 6 * 8192


def test_yarn_lengthens_the_context_and_sharpens_the_scores():
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}
    spec = _spec(_SIZES | {"architectures": ["Qwen2ForCausalLM"], "rope_scaling": scaling})
    assert spec.ropes[0] == Rope(128, 1e4, YarnScaling(4.0, 8192), pytest.approx(0.1 * math.log(4) + 1))
    assert spec.max_position == 32768


def test_scaled_pairs():
    plain = layers.inverse_frequencies(Rope(64))
    paired = layers.inverse_frequencies(Rope(64, scaling=PairScaling(tuple(range(1, 33)))))
    np.testing.assert_allclose(paired, plain / np.arange(1, 33), rtol=1e-6)
    turns = 512 * plain / (2 * math.pi)
    yarn = layers.inverse_frequencies(Rope(64, scaling=YarnScaling(8.0, 512)))
    np.testing.assert_allclose(yarn[turns > 40], plain[turns > 40], rtol=1e-6)
    np.testing.assert_allclose(yarn[turns < 0.7], plain[turns < 0.7] / 8, rtol=1e-6)
    between = (yarn / plain)[(turns < 20) & (turns > 1.5)]
    assert np.all((between > 1 / 8) & (between < 1)) and np.all(np.diff(between) < 0)


@pytest.mark.parametrize(("size", "is_interleaved"), [(8, False), (6, False), (8, True), (4, True)])
def test_scores_depend_on_the_distance_and_the_rest_of_a_head_stays(size, is_interleaved):
    rope = Rope(size, 100.0, is_interleaved=is_interleaved)
    q, k = np.random.default_rng(0).standard_normal((2, 1, 2, 8)).astype(np.float32)

    def turned(x: np.ndarray, position: int) -> np.ndarray:
        return np.asarray(rotate(jnp.asarray(x), *layers.rotation(rope, np.asarray([position])), is_interleaved))

    near, far = (np.sum(turned(q, 5 + shift) * turned(k, 2 + shift), -1) for shift in (0, 90))
    np.testing.assert_allclose(near, far, atol=1e-4)
    np.testing.assert_array_equal(turned(q, 7)[..., size:], q[..., size:])
    first, second = (q[..., 0], q[..., 1]) if is_interleaved else (q[..., 0], q[..., size // 2])
    angle = complex(math.cos(7), math.sin(7))  # the first pair turns by one radian a position
    pair = turned(q, 7)[..., [0, size // 2]]
    np.testing.assert_allclose(pair[..., 0] + 1j * pair[..., 1], (first + 1j * second) * angle, atol=1e-5)


# What is not built, and how it is refused: test_released_configs.py.
REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (GEMMA_3, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
    (GEMMA_3, {"rope_scaling": None, "rope_parameters": {"full_attention": {"beta": 1}}}, "beta"),
    (PHI_3, {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}}, "short_factor"),
    (PHI_3, {"partial_rotary_factor": 2.0}, "256 coordinates"),
    (PHI_3, {"mlp_bias": True}, "mlp_bias"),
    (SMOLLM_3, {"no_rope_layers": [1, 0]}, "no_rope_layers"),
    (STABLELM, {"rotary_scaling_factor": 2.0}, "rotary_scaling_factor"),
    (STARCODER_2, {"norm_type": "rms"}, "norm_type"),
    (PYTHIA, {"partial_rotary": 1}, "partial_rotary"),
    (COMMAND_R_7B, {"layer_switch": 3}, "layer_switch"),
    (COMMAND_R_7B, {"use_gated_activation": False}, "use_gated_activation"),
    (EXAONE_4, {"sliding_window_pattern": "LG" * 2}, "LGLG"),
    (INTERNLM_3, {"rope_scaling": {"rope_type": "dynamic", "factor": 0.5}}, "0.5"),
    (OLMO_2, {"clip_qkv": 8.0}, "clip_qkv"),
]


def test_band_scaling_goes_with_any_family():
    scaling = {"rope_type": "llama3", "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    spec = _spec(EXAONE_4 | {"rope_scaling": scaling | {"original_max_position_embeddings": 8192}})
    assert spec.ropes[0] == Rope(128, 1e4, BandScaling(16.0, 1.0, 4.0, 8192))
