"""Published config.json files of families with experts become the right Spec; what is not built in them is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest

from jaxllm.model.spec import Experts, Latent
from tests.model.test_families import _spec

# As published on the hub; keys without effect are shortened to a few.
MIXTRAL_8X7B = {
    **{"architectures": ["MixtralForCausalLM"], "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336},
    **{"max_position_embeddings": 32768, "num_attention_heads": 32, "num_experts_per_tok": 2, "num_hidden_layers": 32},
    **{"num_key_value_heads": 8, "num_local_experts": 8, "output_router_logits": False, "rms_norm_eps": 1e-05},
    **{"rope_theta": 1000000.0, "router_aux_loss_coef": 0.02, "sliding_window": None, "tie_word_embeddings": False},
    "vocab_size": 32000,
}
QWEN_15_MOE_A27B = {
    **{"architectures": ["Qwen2MoeForCausalLM"], "decoder_sparse_step": 1, "hidden_act": "silu", "hidden_size": 2048},
    **{"intermediate_size": 5632, "max_position_embeddings": 8192, "max_window_layers": 21},
    **{"moe_intermediate_size": 1408, "norm_topk_prob": False, "num_attention_heads": 16, "num_experts": 60},
    **{"num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 16, "rms_norm_eps": 1e-06},
    **{"rope_theta": 1000000.0, "shared_expert_intermediate_size": 5632, "sliding_window": 32768},
    **{"use_sliding_window": False, "vocab_size": 151936},
}
QWEN_3_30B_A3B = {
    **{"architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "decoder_sparse_step": 1, "head_dim": 128},
    **{"hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 6144, "max_position_embeddings": 40960},
    **{"max_window_layers": 48, "mlp_only_layers": [], "moe_intermediate_size": 768, "norm_topk_prob": True},
    **{"num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48},
    **{"num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000.0},
    **{"sliding_window": None, "use_sliding_window": False, "vocab_size": 151936},
}
OLMOE_1B_7B = {
    **{"architectures": ["OlmoeForCausalLM"], "attention_bias": False, "clip_qkv": None, "hidden_act": "silu"},
    **{"hidden_size": 2048, "intermediate_size": 1024, "max_position_embeddings": 4096, "norm_topk_prob": False},
    **{"num_attention_heads": 16, "num_experts": 64, "num_experts_per_tok": 8, "num_hidden_layers": 16},
    **{"num_key_value_heads": 16, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 10000.0},
    **{"tie_word_embeddings": False, "vocab_size": 50304},
}
GRANITE_3B_A800M = {
    **{"architectures": ["GraniteMoeForCausalLM"], "attention_bias": False, "attention_multiplier": 0.015625},
    **{"embedding_multiplier": 12.0, "hidden_act": "silu", "hidden_size": 1536, "intermediate_size": 512},
    **{"logits_scaling": 6.0, "max_position_embeddings": 4096, "num_attention_heads": 24, "num_experts_per_tok": 8},
    **{"num_hidden_layers": 32, "num_key_value_heads": 8, "num_local_experts": 40, "residual_multiplier": 0.22},
    **{"rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 10000.0, "router_aux_loss_coef": 0.0},
    **{"tie_word_embeddings": True, "vocab_size": 49155},
}
GPT_OSS_20B = {
    **{"architectures": ["GptOssForCausalLM"], "attention_bias": True, "experts_per_token": 4, "head_dim": 64},
    **{"hidden_act": "silu", "hidden_size": 2880, "initial_context_length": 4096, "intermediate_size": 2880},
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        **{"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096},
        **{"rope_type": "yarn", "truncate": False},
    },
    "rope_theta": 150000,
    "router_aux_loss_coef": 0.9,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "vocab_size": 201088,
}
DEEPSEEK_V2_LITE = {
    **{"architectures": ["DeepseekV2ForCausalLM"], "attention_bias": False, "aux_loss_alpha": 0.001},
    **{"first_k_dense_replace": 1, "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 10944},
    **{"kv_lora_rank": 512, "max_position_embeddings": 163840, "moe_intermediate_size": 1408, "moe_layer_freq": 1},
    **{"n_group": 1, "n_routed_experts": 64, "n_shared_experts": 2, "norm_topk_prob": False},
    **{"num_attention_heads": 16, "num_experts_per_tok": 6, "num_hidden_layers": 27, "num_key_value_heads": 16},
    **{"q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06},
    "rope_scaling": {
        **{"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707},
        **{"original_max_position_embeddings": 4096, "type": "yarn"},
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "seq_aux": True,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "greedy",
    "v_head_dim": 128,
    "vocab_size": 102400,
}
DEEPSEEK_V3 = DEEPSEEK_V2_LITE | {
    **{"architectures": ["DeepseekV3ForCausalLM"], "ep_size": 1, "first_k_dense_replace": 3, "hidden_size": 7168},
    **{"intermediate_size": 18432, "moe_intermediate_size": 2048, "n_group": 8, "n_routed_experts": 256},
    **{"n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 128, "num_experts_per_tok": 8},
    **{"num_hidden_layers": 61, "num_key_value_heads": 128, "num_nextn_predict_layers": 1, "q_lora_rank": 1536},
    "rope_scaling": DEEPSEEK_V2_LITE["rope_scaling"] | {"mscale": 1.0, "mscale_all_dim": 1.0},
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "vocab_size": 129280,
}


def test_experts_of_published_configs():
    every = (True,)
    assert _spec(MIXTRAL_8X7B).experts == Experts(every * 32, 8, 2, 14336, is_normalised=True)
    assert _spec(QWEN_15_MOE_A27B).experts == Experts(every * 24, 60, 4, 1408, shared_width=5632, shared_gate=True)
    assert _spec(QWEN_3_30B_A3B).experts == Experts(every * 48, 128, 8, 768, is_normalised=True)
    assert _spec(OLMOE_1B_7B).experts == Experts(every * 16, 64, 8, 1024)
    assert _spec(GRANITE_3B_A800M).experts == Experts(every * 32, 40, 8, 512, is_normalised=True)
    assert _spec(GPT_OSS_20B).experts == Experts(
        every * 24, 32, 4, 2880, is_normalised=True, router_bias=True, bias=True, clamp=7.0
    )
    assert _spec(DEEPSEEK_V2_LITE).experts == Experts((False,) + every * 26, 64, 6, 1408, shared_width=2816)
    assert _spec(DEEPSEEK_V3).experts == Experts(
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
    gpt = _spec(GPT_OSS_20B)
    assert (gpt.sinks, gpt.qkv_bias, gpt.out_bias, gpt.windows) == (True, True, True, (128, None) * 12)
    assert gpt.max_position == 131072
    assert _spec(MIXTRAL_8X7B | {"sliding_window": 4096}).windows == (4096,) * 32
    qwen = _spec(QWEN_15_MOE_A27B)
    assert (qwen.qkv_bias, qwen.windows) == (True, (None,) * 24)
    assert _spec(OLMOE_1B_7B).qk_norm == "all heads"
    granite = _spec(GRANITE_3B_A800M)
    assert (granite.embed_scale, granite.residual_scale, granite.attention_scale) == (12.0, 0.22, 1 / 64)
    assert granite.logit_scale == pytest.approx(1 / 6)
    sparse = _spec(QWEN_3_30B_A3B | {"decoder_sparse_step": 2, "mlp_only_layers": [1]}).experts
    assert sparse is not None and sparse.layers == (False, False, *(False, True) * 23)
    groups = {"topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 3, "routed_scaling_factor": 16.0}
    limited = _spec(DEEPSEEK_V2_LITE | groups).experts
    assert limited is not None
    assert (limited.groups, limited.groups_per_token, limited.group_best, limited.scale) == (8, 3, 1, 16.0)


def test_latent_attention_caches_one_head_of_the_latent_and_the_rotated_part():
    lite, large = _spec(DEEPSEEK_V2_LITE), _spec(DEEPSEEK_V3)
    assert lite.latent == Latent(512, None, 128, 64, 128)
    assert large.latent == Latent(512, 1536, 128, 64, 128)
    for spec, weight in ((lite, 0.707), (large, 1.0)):
        assert (spec.num_kv_heads, spec.head_size, spec.max_position) == (1, 576, 163840)
        assert spec.attention_scale == pytest.approx(192**-0.5 * (0.1 * weight * math.log(40) + 1) ** 2)


# What is not built, and how it is refused: test_released_configs.py.
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
