"""Published config.json files of dense families become the right Spec; unsupported ones are refused."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.model import layers
from jaxllm.model.spec import BandScaling, LinearScaling, PairScaling, Rope, YarnScaling
from pallas_kernels import rotate
from tests.families.released import (
    COMMAND_R,
    COMMAND_R_7B,
    EXAONE_4,
    GEMMA_3,
    GLM_4,
    GRANITE,
    INTERNLM_3,
    OLMO_2,
    PHI_3,
    PYTHIA,
    SMOLLM_3,
    STABLELM,
    STARCODER_2,
    spec_of,
)


def test_what_sets_each_family_apart():
    gemma = spec_of(GEMMA_3)
    whole, local = Rope(256, 1e6, LinearScaling(8.0)), Rope(256, 1e4)
    assert gemma.ropes == (local,) * 5 + (whole,) + (local,) * 2
    assert gemma.windows == (512,) * 5 + (None,) + (512,) * 2
    assert (gemma.norm_place, gemma.qk_norm, gemma.max_position) == ("sandwich", "each head", 8192)
    olmo = spec_of(OLMO_2)
    assert (olmo.norm_place, olmo.qk_norm, olmo.norm_eps) == ("post", "all heads", 1e-6)
    granite = spec_of(GRANITE)
    assert (granite.embed_scale, granite.attention_scale, granite.logit_scale) == (12.0, 1 / 64, 1 / 8)
    assert granite.residual_scale == 0.22
    smol = spec_of(SMOLLM_3)
    assert [rope is not None for rope in smol.ropes] == [True, True, True, False] * 2
    assert smol.tie_embeddings
    stable = spec_of(STABLELM)
    assert (stable.residual, stable.qk_norm, stable.norm_bias) == ("parallel, one norm", "own per head", True)
    assert spec_of(STABLELM | {"use_parallel_residual": False}).residual == "serial"
    star = spec_of(STARCODER_2)
    assert (star.windows, star.mlp_gated, star.activation, star.out_bias) == ((4096,) * 8, False, "gelu_tanh", True)
    neox = spec_of(PYTHIA)
    assert (neox.residual, neox.ropes[0], neox.num_kv_heads) == ("parallel", Rope(32), 16)
    command = spec_of(COMMAND_R)
    assert (command.max_position, command.norm, command.norm_bias) == (131072, "layer", False)
    assert command.ropes == (Rope(128, 8e6, is_interleaved=True),) * 8
    command = spec_of(COMMAND_R_7B)
    assert [window is not None for window in command.windows] == [True, True, True, False] * 2
    assert [rope is not None for rope in command.ropes] == [True, True, True, False] * 2
    glm = spec_of(GLM_4)
    assert (glm.ropes[0], glm.qkv_bias, glm.norm_place) == (Rope(64, is_interleaved=True), False, "sandwich")
    intern = spec_of(INTERNLM_3)
    assert (intern.qkv_bias, intern.out_bias, intern.mlp_bias) == (True, False, False)
    exaone = spec_of(EXAONE_4)
    assert [rope is not None for rope in exaone.ropes] == [True, True, True, False] * 2
    full = spec_of(EXAONE_4 | {"sliding_window": None, "sliding_window_pattern": None, "layer_types": None})
    assert (full.windows, full.ropes) == ((None,) * 8, (Rope(128),) * 8)


def test_longrope_is_chosen_by_the_length_that_was_asked_for():
    amplitude = math.sqrt(1 + math.log(32) / math.log(4096))
    long, short = (Rope(96, 1e4, PairScaling((factor,) * 48), amplitude) for factor in (2.0, 1.0))
    assert spec_of(PHI_3).ropes == spec_of(PHI_3, 4097).ropes == (long,) * 8
    assert spec_of(PHI_3, 4096).ropes == (short,) * 8
    assert spec_of(PHI_3, 4096).max_position == 131072


def test_dynamic_rotation_is_the_plain_one_up_to_the_models_own_length():
    plain = (Rope(128, 5e7),) * 8
    assert spec_of(INTERNLM_3).ropes == spec_of(INTERNLM_3, 8192).ropes == plain
    assert spec_of(INTERNLM_3).max_position == 8192
    longer = spec_of(INTERNLM_3, 16384)
    assert longer.max_position == 16384
    rope = longer.ropes[0]
    assert rope is not None
    assert rope.theta == pytest.approx(5e7 * (6 * 2 - 5) ** (128 / 126))
    assert spec_of(INTERNLM_3, 10**6).max_position == 6 * 8192


def test_yarn_lengthens_the_context_and_sharpens_the_scores():
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}
    spec = spec_of(OLMO_2 | {"architectures": ["Qwen2ForCausalLM"], "rope_theta": 1e4, "rope_scaling": scaling})
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
    angle = complex(math.cos(7), math.sin(7))  # the first pair turns by one radian per position
    pair = turned(q, 7)[..., [0, size // 2]]
    np.testing.assert_allclose(pair[..., 0] + 1j * pair[..., 1], (first + 1j * second) * angle, atol=1e-5)


# Configs to refuse, with the text that the error must contain; tested in test_released_configs.py.
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
    spec = spec_of(EXAONE_4 | {"rope_scaling": scaling | {"original_max_position_embeddings": 8192}})
    assert spec.ropes[0] == Rope(128, 1e4, BandScaling(16.0, 1.0, 4.0, 8192))
