"""Mixture-of-experts families, some with latent attention."""

from __future__ import annotations

from typing import Any

from jaxllm.errors import UserError
from jaxllm.families.config_fields import (
    Fields,
    magnitude,
    read_decoder,
    read_multipliers,
    read_windows,
    rotary_settings,
)
from jaxllm.families.family import LLAMA_TENSORS, Family
from jaxllm.model.spec import Experts, Latent, Spec


def _all_layers(fields: Fields) -> tuple[bool, ...]:
    return (True,) * fields.layers()


def _sparse_layers(fields: Fields) -> tuple[bool, ...]:
    """Return which layers have experts: every `decoder_sparse_step`th, except `mlp_only_layers`."""
    stride, plain = fields.size("decoder_sparse_step", 1), fields.raw("mlp_only_layers") or []
    if not isinstance(plain, list) or not all(type(layer) is int for layer in plain):
        raise UserError(f"config.json: mlp_only_layers must be a list of layers, got {plain!r:.80}.", "mlp_only_layers")
    layers = fields.layers()
    return tuple(layer not in plain and (layer + 1) % stride == 0 for layer in range(layers))


def _experts(fields: Fields, width: str, layers: tuple[bool, ...], **further: Any) -> Experts:
    names = ("n_routed_experts", "num_experts", "num_local_experts")  # the last is transformers 5's name
    count = next((name for name in names if fields.has(name)), names[-1])
    experts, chosen = fields.size(count), fields.size("num_experts_per_tok")
    for name in names:
        fields.only(name, experts)
    groups, best = further.get("groups", 1), further.get("groups_per_token", 1)
    if experts % groups != 0 or best > groups or chosen > experts // groups * best:
        raise UserError(
            f"config.json: {chosen} of {experts} experts cannot be chosen from {best} of {groups} groups.", count
        )
    return Experts(layers=layers, count=experts, per_token=chosen, ffn_width=fields.size(width), **further)


def _mixtral(fields: Fields) -> Spec:
    layers = fields.layers()
    experts = _experts(fields, "intermediate_size", _all_layers(fields), is_normalised=True)
    window = fields.optional("sliding_window", int)
    return read_decoder(fields, theta=1e6, experts=experts, windows=read_windows(fields, window, (True,) * layers))


def _qwen2_moe(fields: Fields) -> Spec:
    layers, until = fields.layers(), fields.take("max_window_layers", int, 28)
    is_windowed = fields.take("use_sliding_window", bool, False)
    fields.raw("sliding_window")  # only with use_sliding_window
    window = fields.optional("sliding_window", int, 4096) if is_windowed else None
    return read_decoder(
        fields,
        qkv_bias=fields.take("qkv_bias", bool, True),
        windows=read_windows(fields, window, tuple(layer % 2 == 0 and layer < until for layer in range(layers))),
        experts=_experts(
            fields,
            "moe_intermediate_size",
            _sparse_layers(fields),
            is_normalised=fields.take("norm_topk_prob", bool, False),
            shared_width=fields.size("shared_expert_intermediate_size"),
            shared_gate=True,
        ),
    )


def _qwen3_moe(fields: Fields) -> Spec:
    fields.only("use_sliding_window", False)
    for key in ("sliding_window", "max_window_layers"):
        fields.raw(key)
    for key, value in (("use_qk_norm", True), ("qkv_bias", False), ("shared_expert_intermediate_size", 0)):
        fields.only(key, value)
    return read_decoder(
        fields,
        qk_norm="each head",
        **fields.attention_biases(),
        experts=_experts(
            fields,
            "moe_intermediate_size",
            _sparse_layers(fields),
            is_normalised=fields.take("norm_topk_prob", bool, False),
        ),
    )


def _olmoe(fields: Fields) -> Spec:
    fields.only("clip_qkv")
    return read_decoder(
        fields,
        eps=("rms_norm_eps", 1e-5),
        qk_norm="all heads",
        **fields.attention_biases(),
        experts=_experts(
            fields,
            "intermediate_size",
            _all_layers(fields),
            is_normalised=fields.take("norm_topk_prob", bool, False),
        ),
    )


def _granite_moe(fields: Fields) -> Spec:
    fields.only("position_embedding_type", "rope")
    experts = _experts(fields, "intermediate_size", _all_layers(fields), is_normalised=True)
    return read_decoder(fields, experts=experts, **fields.attention_biases(), **read_multipliers(fields))


def _gpt_oss(fields: Fields) -> Spec:
    layers = fields.layers()
    chosen = fields.size("num_experts_per_tok")
    fields.only("experts_per_token", chosen)
    fields.raw("initial_context_length")  # also in the rotary settings
    fields.only("hidden_act", "silu")  # the next two keys define the activation
    return read_decoder(
        fields,
        theta=150000.0,
        head_size=fields.size("head_dim", 64),
        windows=read_windows(
            fields, fields.optional("sliding_window", int, 128), tuple(layer % 2 == 0 for layer in range(layers))
        ),
        eps=("rms_norm_eps", 1e-5),
        **fields.attention_biases(default=True),
        sinks=True,
        experts=_experts(
            fields,
            "intermediate_size",
            _all_layers(fields),
            is_normalised=True,
            router_bias=True,
            bias=True,
            clamp=fields.take("swiglu_limit", float, 7.0),
            clamp_slope=fields.take("swiglu_alpha", float, 1.702),
        ),
    )


def _deepseek(fields: Fields, interleaved: bool, **routing: Any) -> Spec:
    """Read fields common to DeepSeek V2 and V3."""
    layers = fields.layers()
    latent = Latent(
        rank=fields.size("kv_lora_rank"),
        q_rank=fields.optional("q_lora_rank", int, 1536),
        plain_size=fields.size("qk_nope_head_dim"),
        rope_size=fields.size("qk_rope_head_dim"),
        value_size=fields.size("v_head_dim"),
    )
    if latent.rope_size % 2 != 0:
        raise UserError(f"config.json: {latent.rope_size} coordinates cannot be rotated.", "qk_rope_head_dim")
    for key, value in (
        ("num_key_value_heads", fields.size("num_attention_heads")),
        ("head_dim", latent.rope_size),  # as transformers writes it
        ("qk_head_dim", latent.plain_size + latent.rope_size),
        ("attention_bias", False),
        ("mlp_bias", False),
        ("moe_layer_freq", 1),
    ):
        fields.only(key, value)
    scale = (latent.plain_size + latent.rope_size) ** -0.5
    settings = rotary_settings(fields)
    if settings.take("rope_type", str, settings.take("type", str, "default")) != "default":
        scale *= magnitude(settings.positive("factor"), settings.take("mscale_all_dim", float, 0.0)) ** 2
    first = fields.take("first_k_dense_replace", int)
    width = fields.size("moe_intermediate_size")
    experts = _experts(
        fields,
        "moe_intermediate_size",
        tuple(layer >= first for layer in range(layers)),
        scale=fields.take("routed_scaling_factor", float),
        shared_width=fields.size("n_shared_experts") * width,
        **routing,
    )
    return read_decoder(
        fields,
        head_size=latent.rank + latent.rope_size,
        turned_size=latent.rope_size,
        interleaved=interleaved,
        num_kv_heads=1,
        attention_scale=scale,
        latent=latent,
        experts=experts,
    )


def _deepseek2(fields: Fields) -> Spec:
    fields.only("scoring_func", "softmax")
    fields.only("norm_topk_prob", False)  # no longer read by transformers
    fields.only("topk_method", "greedy", "group_limited_greedy")
    groups = {"groups": fields.size("n_group", 1), "groups_per_token": fields.size("topk_group", 1)}
    is_grouped = fields.raw("topk_method") == "group_limited_greedy"
    return _deepseek(fields, interleaved=True, **(groups if is_grouped else {}))


def _deepseek3(fields: Fields) -> Spec:
    fields.only("scoring_func", "sigmoid")
    fields.only("topk_method", "noaux_tc")
    for key in ("num_nextn_predict_layers", "num_mtp_layers"):
        fields.raw(key)  # multi-token prediction layers
    return _deepseek(
        fields,
        interleaved=fields.take("rope_interleave", bool, True),
        scores="sigmoid",
        choice_bias=True,
        is_normalised=fields.take("norm_topk_prob", bool, True),
        groups=fields.size("n_group", 8),
        groups_per_token=fields.size("topk_group", 4),
        group_best=2,
    )


_MIXTRAL_TENSORS = LLAMA_TENSORS | {
    "router": "layers.{}.block_sparse_moe.gate.weight",
    "expert_gate": "layers.{}.block_sparse_moe.experts.{}.w1.weight",
    "expert_up": "layers.{}.block_sparse_moe.experts.{}.w3.weight",
    "expert_down": "layers.{}.block_sparse_moe.experts.{}.w2.weight",
}
_GRANITE_TENSORS = LLAMA_TENSORS | {
    "router": "layers.{}.block_sparse_moe.router.layer.weight",
    **{part: "layers.{}.block_sparse_moe.input_linear.weight" for part in ("expert_gate", "expert_up")},
    "expert_down": "layers.{}.block_sparse_moe.output_linear.weight",
}
_GPT_OSS_TENSORS = LLAMA_TENSORS | {
    "sinks": "layers.{}.self_attn.sinks",
    "router": "layers.{}.mlp.router.weight",
    "router_bias": "layers.{}.mlp.router.bias",
    **{part: "layers.{}.mlp.experts.gate_up_proj" for part in ("expert_gate", "expert_up")},
    **{part: "layers.{}.mlp.experts.gate_up_proj_bias" for part in ("expert_gate_bias", "expert_up_bias")},
    "expert_down": "layers.{}.mlp.experts.down_proj",
    "expert_down_bias": "layers.{}.mlp.experts.down_proj_bias",
}
_DEEPSEEK_TENSORS = LLAMA_TENSORS | {
    "q_latent": "layers.{}.self_attn.q_a_proj.weight",
    "q_norm": "layers.{}.self_attn.q_a_layernorm.weight",
    "q_up": "layers.{}.self_attn.q_b_proj.weight",
    "latent": "layers.{}.self_attn.kv_a_proj_with_mqa.weight",
    "latent_norm": "layers.{}.self_attn.kv_a_layernorm.weight",
    **{part: "layers.{}.self_attn.kv_b_proj.weight" for part in ("key", "value")},
    "choice_bias": "layers.{}.mlp.gate.e_score_correction_bias",
    **{f"shared_{part}": f"layers.{{}}.mlp.shared_experts.{part}_proj.weight" for part in ("gate", "up", "down")},
}

ROUTED: tuple[Family, ...] = (
    Family(("MixtralForCausalLM",), _mixtral, _MIXTRAL_TENSORS),
    Family(("Qwen2MoeForCausalLM",), _qwen2_moe),
    Family(("Qwen3MoeForCausalLM",), _qwen3_moe),
    Family(("OlmoeForCausalLM",), _olmoe),
    Family(("GraniteMoeForCausalLM",), _granite_moe, _GRANITE_TENSORS),
    Family(
        ("GptOssForCausalLM",),
        _gpt_oss,
        _GPT_OSS_TENSORS,
        transposed=frozenset({"expert_gate", "expert_up", "expert_down"}),
        alternating=frozenset({"expert_gate", "expert_up", "expert_gate_bias", "expert_up_bias"}),
    ),
    Family(("DeepseekV2ForCausalLM",), _deepseek2, _DEEPSEEK_TENSORS),
    Family(("DeepseekV3ForCausalLM",), _deepseek3, _DEEPSEEK_TENSORS, has_layers_behind=True),
)
