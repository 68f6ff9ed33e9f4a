"""Published config.json files of families with experts become the right Spec; unsupported ones are refused."""

from __future__ import annotations

import math
from typing import Any

import pytest

from jaxllm.model.spec import Experts, Latent
from tests.families.released import (
    DEEPSEEK_V2_LITE,
    DEEPSEEK_V3,
    GPT_OSS_20B,
    GRANITE_3B_A800M,
    MIXTRAL_8X7B,
    OLMOE_1B_7B,
    QWEN_3_30B_A3B,
    QWEN_15_MOE_A27B,
    spec_of,
)


def test_experts_of_published_configs():
    every = (True,)
    assert spec_of(MIXTRAL_8X7B).experts == Experts(every * 32, 8, 2, 14336, is_normalised=True)
    assert spec_of(QWEN_15_MOE_A27B).experts == Experts(every * 24, 60, 4, 1408, shared_width=5632, shared_gate=True)
    assert spec_of(QWEN_3_30B_A3B).experts == Experts(every * 48, 128, 8, 768, is_normalised=True)
    assert spec_of(OLMOE_1B_7B).experts == Experts(every * 16, 64, 8, 1024)
    assert spec_of(GRANITE_3B_A800M).experts == Experts(every * 32, 40, 8, 512, is_normalised=True)
    assert spec_of(GPT_OSS_20B).experts == Experts(
        every * 24, 32, 4, 2880, is_normalised=True, router_bias=True, bias=True, clamp=7.0
    )
    assert spec_of(DEEPSEEK_V2_LITE).experts == Experts((False,) + every * 26, 64, 6, 1408, shared_width=2816)
    assert spec_of(DEEPSEEK_V3).experts == Experts(
        (False,) * 3 + every * 58,
        256,
        8,
        2048,
        scores="sigmoid",
        is_normalised=True,
        scale=2.5,
        choice_bias=True,
        groups=8,
        groups_per_token=4,
        group_best=2,
        shared_width=2048,
    )


def test_what_else_sets_these_families_apart():
    gpt = spec_of(GPT_OSS_20B)
    assert (gpt.sinks, gpt.qkv_bias, gpt.out_bias, gpt.windows) == (True, True, True, (128, None) * 12)
    assert gpt.max_position == 131072
    assert spec_of(MIXTRAL_8X7B | {"sliding_window": 4096}).windows == (4096,) * 32
    qwen = spec_of(QWEN_15_MOE_A27B)
    assert (qwen.qkv_bias, qwen.windows) == (True, (None,) * 24)
    assert spec_of(OLMOE_1B_7B).qk_norm == "all heads"
    granite = spec_of(GRANITE_3B_A800M)
    assert (granite.embed_scale, granite.residual_scale, granite.attention_scale) == (12.0, 0.22, 1 / 64)
    assert granite.logit_scale == pytest.approx(1 / 6)
    sparse = spec_of(QWEN_3_30B_A3B | {"decoder_sparse_step": 2, "mlp_only_layers": [1]}).experts
    assert sparse is not None and sparse.layers == (False, False, *(False, True) * 23)
    groups = {"topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 3, "routed_scaling_factor": 16.0}
    limited = spec_of(DEEPSEEK_V2_LITE | groups).experts
    assert limited is not None
    assert (limited.groups, limited.groups_per_token, limited.group_best, limited.scale) == (8, 3, 1, 16.0)


def test_latent_attention_caches_one_head_of_the_latent_and_the_rotated_part():
    lite, large = spec_of(DEEPSEEK_V2_LITE), spec_of(DEEPSEEK_V3)
    assert lite.latent == Latent(512, None, 128, 64, 128)
    assert large.latent == Latent(512, 1536, 128, 64, 128)
    for spec, weight in ((lite, 0.707), (large, 1.0)):
        assert (spec.num_kv_heads, spec.head_size, spec.max_position) == (1, 576, 163840)
        assert spec.attention_scale == pytest.approx(192**-0.5 * (0.1 * weight * math.log(40) + 1) ** 2)


# Configs to refuse, with the text that the error must contain; tested in test_released_configs.py.
REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (MIXTRAL_8X7B, {"num_local_experts": None}, "num_local_experts"),
    (MIXTRAL_8X7B, {"num_experts_per_tok": 9}, "9 of 8 experts"),
    (QWEN_15_MOE_A27B, {"mlp_only_layers": 3}, "mlp_only_layers"),
    (QWEN_3_30B_A3B, {"use_sliding_window": True}, "use_sliding_window"),
    (QWEN_3_30B_A3B, {"num_local_experts": 64}, "num_local_experts"),
    (OLMOE_1B_7B, {"clip_qkv": 8.0}, "clip_qkv"),
    (GPT_OSS_20B, {"quantization_config": {"quant_method": "mxfp8"}}, "mxfp8"),
    (GPT_OSS_20B, {"experts_per_token": 2}, "experts_per_token"),
    (DEEPSEEK_V2_LITE, {"norm_topk_prob": True}, "norm_topk_prob"),
    (DEEPSEEK_V2_LITE, {"scoring_func": "sigmoid"}, "scoring_func"),
    (DEEPSEEK_V2_LITE, {"num_key_value_heads": 4}, "num_key_value_heads"),
    (DEEPSEEK_V2_LITE, {"attention_bias": True}, "attention_bias"),
    (DEEPSEEK_V2_LITE, {"qk_rope_head_dim": 63}, "63"),
    (DEEPSEEK_V3, {"topk_method": "greedy"}, "topk_method"),
    (DEEPSEEK_V3, {"n_group": 7}, "256 experts cannot be chosen from 4 of 7 groups"),
    (DEEPSEEK_V3, {"quantization_config": {"quant_method": "fp8", "fmt": "e5m2"}}, "fmt = 'e5m2'"),
]
