"""Model families with dense feed-forwards, as differences from Llama's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jaxllm.errors import UserError
from jaxllm.families.config_fields import (
    Fields,
    read_decoder,
    read_learned,
    read_multipliers,
    read_two_ropes,
    read_windows,
    slides,
)
from jaxllm.families.family import LLAMA_TENSORS, Family, named
from jaxllm.model.spec import Spec

_BIASES = ("qkv_bias", "out_bias", "mlp_bias")


def _llama(fields: Fields) -> Spec:
    fields.only("rope_interleaved", False)
    return read_decoder(fields, **fields.attention_biases(), mlp_bias=fields.take("mlp_bias", bool, False))


def _mistral(fields: Fields) -> Spec:
    window = fields.optional("sliding_window", int, 4096)
    return read_decoder(fields, windows=read_windows(fields, window, slides(fields)))


def _qwen_windows(fields: Fields) -> tuple[int | None, ...]:
    layers, first = fields.layers(), fields.take("max_window_layers", int, 28)
    window = fields.optional("sliding_window", int, 4096)
    if not fields.take("use_sliding_window", bool, False):
        window = None
    return read_windows(fields, window, tuple(window is not None and layer >= first for layer in range(layers)))


def _qwen2(fields: Fields) -> Spec:
    fields.only("use_mrope", False)
    return read_decoder(fields, qkv_bias=True, windows=_qwen_windows(fields))


def _qwen3(fields: Fields) -> Spec:
    windows, biases = _qwen_windows(fields), fields.attention_biases()
    return read_decoder(fields, head_size=fields.size("head_dim", 128), qk_norm="each head", windows=windows, **biases)


def _gemma(fields: Fields, **further: Any) -> Spec:
    if "is_causal" not in further:
        fields.only("use_bidirectional_attention", False)
    for key in ("hidden_act", "hidden_activation"):  # an old name, and "gelu" an old value
        fields.only(key, "gelu", "gelu_pytorch_tanh")
    shared: dict[str, Any] = {
        "head_size": fields.size("head_dim", 256),
        "activation": "gelu_tanh",
        "norm": "rms+1",
        "embed_scale": fields.size("hidden_size") ** 0.5,
        **fields.attention_biases(),
    }
    return read_decoder(fields, tied=True, **(shared | further))


def _gemma2(fields: Fields, pattern: int = 2, **further: Any) -> Spec:
    window = fields.optional("sliding_window", int, 4096)
    fields.only("sliding_window_size", window)
    shared: dict[str, Any] = {
        "windows": read_windows(fields, window, slides(fields, pattern)),
        "attention_scale": fields.positive("query_pre_attn_scalar", 256.0) ** -0.5,
        "attention_softcap": fields.optional("attn_logit_softcapping", float, 50.0),
        "logit_softcap": fields.optional("final_logit_softcapping", float, 30.0),
        "norm_place": "sandwich",
    }
    return _gemma(fields, **(shared | further))


def _gemma3(fields: Fields) -> Spec:
    fields.only("attn_logit_softcapping")
    pattern = fields.size("sliding_window_pattern", fields.size("_sliding_window_pattern", 6))
    thetas = fields.positive("rope_theta", 1e6), fields.positive("rope_local_base_freq", 1e4)
    is_causal = not fields.take("use_bidirectional_attention", bool, False)
    spec = _gemma2(
        fields,
        pattern,
        qk_norm="each head",
        ropes=(),
        attention_softcap=None,
        logit_softcap=fields.optional("final_logit_softcapping", float),
        is_causal=is_causal,
    )
    # The file gives both sides together.
    windows = tuple(window if is_causal or window is None else window // 2 + 1 for window in spec.windows)
    ropes = read_two_ropes(fields, windows, spec.head_size, spec.max_position, thetas)
    return replace(spec, windows=windows, ropes=ropes)


def _phi3(fields: Fields) -> Spec:
    for key in ("attention_bias", "mlp_bias", "lm_head_bias"):
        fields.only(key, False)
    for key in ("full_attn_mod", "interpolate_factor"):
        fields.only(key, 1)
    windows = read_windows(fields, fields.optional("sliding_window", int), slides(fields))
    return read_decoder(fields, eps=("rms_norm_eps", 1e-5), partial=1.0, windows=windows)


def _olmo2(fields: Fields) -> Spec:
    biases = fields.attention_biases()
    return read_decoder(fields, eps=("rms_norm_eps", 1e-5), norm_place="post", qk_norm="all heads", **biases)


def _granite(fields: Fields) -> Spec:
    return replace(_llama(fields), **read_multipliers(fields))


def _smollm3(fields: Fields) -> Spec:
    layers, interval = fields.layers(), fields.size("no_rope_layer_interval", 4)
    rotates = slides(fields, interval)
    if fields.has("no_rope_layers"):  # 1 marks layers with rotation
        rotates = tuple(map(bool, fields.numbers("no_rope_layers", layers)))
    window = fields.optional("sliding_window", int)
    if not fields.take("use_sliding_window", bool, False):
        window = None
    fields.raw("max_window_layers")  # ignored by transformers
    return read_decoder(
        fields,
        tied=True,
        theta=2e6,
        rotates=rotates,
        windows=read_windows(fields, window, tuple(window is not None and not turned for turned in rotates)),
        **fields.attention_biases(),
        mlp_bias=fields.take("mlp_bias", bool, False),
    )


def _stablelm(fields: Fields) -> Spec:
    fields.only("num_heads", fields.size("num_attention_heads"))
    fields.only("rotary_scaling_factor", 1.0)
    # older synonyms
    fields.only("norm_eps", fields.take("layer_norm_eps", float, 1e-5))
    fields.only("rope_pct", fields.take("partial_rotary_factor", float, 0.25))
    return read_decoder(
        fields,
        eps=("layer_norm_eps", 1e-5),
        partial=0.25,
        norm="layer",
        norm_bias=True,
        residual="parallel, one norm" if fields.take("use_parallel_residual", bool, False) else "serial",
        qk_norm="own per head" if fields.take("qk_layernorm", bool, False) else None,
        qkv_bias=fields.take("use_qkv_bias", bool, False),
    )


def _starcoder2(fields: Fields) -> Spec:
    fields.only("mlp_type", "default")
    fields.only("norm_type", "layer_norm")
    fields.only("scale_attn_weights", True)
    fields.only("layer_norm_epsilon", fields.take("norm_epsilon", float, 1e-5))
    for key in ("activation_function", "attention_softmax_in_fp32", "scale_attention_softmax_in_fp32"):
        fields.raw(key)  # from the first StarCoder's file; scores are float32 here
    return read_decoder(
        fields,
        tied=True,
        eps=("norm_epsilon", 1e-5),
        windows=read_windows(fields, fields.optional("sliding_window", int), slides(fields)),
        norm="layer",
        norm_bias=True,
        mlp_gated=False,
        activation=fields.activation("hidden_act", "gelu_pytorch_tanh"),
        **dict.fromkeys(_BIASES, fields.take("use_bias", bool, True)),
    )


def _gpt_neox(fields: Fields) -> Spec:
    theta, share = fields.positive("rotary_emb_base", 10000.0), fields.take("rotary_pct", float, 0.25)
    if fields.has("rotary_emb_base"):  # transformers 4 wrote both names
        fields.only("rope_theta", theta)
    if fields.has("rotary_pct"):
        fields.only("partial_rotary_factor", share)
    return read_decoder(
        fields,
        eps=("layer_norm_eps", 1e-5),
        theta=theta,
        partial=share,
        norm="layer",
        norm_bias=True,
        residual="parallel" if fields.take("use_parallel_residual", bool, True) else "serial",
        mlp_gated=False,
        activation=fields.activation("hidden_act", "gelu"),
        **fields.attention_biases(default=True),
        mlp_bias=True,
    )


def _cohere(fields: Fields, theta: float = 500000.0, **further: Any) -> Spec:
    return read_decoder(
        fields,
        tied=True,
        eps=("layer_norm_eps", 1e-5),
        theta=theta,
        interleaved=True,
        norm="layer",
        residual="parallel, one norm",
        qk_norm="own per head" if fields.take("use_qk_norm", bool, False) else None,
        **fields.attention_biases(),
        logit_scale=fields.take("logit_scale", float, 0.0625),
        # Command R has 8192 positions and a length of 131072, which vLLM also uses.
        max_position=fields.size("model_max_length", fields.size("max_position_embeddings")),
        **further,
    )


def _cohere2(fields: Fields) -> Spec:
    pattern = fields.size("sliding_window_pattern", fields.size("_sliding_window_pattern", 4))
    fields.only("layer_switch", pattern)
    for key, value in (
        ("order_of_interleaved_layers", "local_attn_first"),
        ("position_embedding_type", "rope_gptj"),
        ("rotary_pct", 1.0),
        ("use_embedding_sharing", True),
        ("use_gated_activation", True),
        ("use_parallel_block", True),
        ("use_qk_norm", False),
    ):
        fields.only(key, value)
    fields.raw("use_parallel_embedding")  # training only
    windows = read_windows(fields, fields.optional("sliding_window", int, 4096), slides(fields, pattern))
    return _cohere(fields, 10000.0, windows=windows, rotates=tuple(window is not None for window in windows))


def _glm(fields: Fields, **further: Any) -> Spec:
    return read_decoder(
        fields,
        eps=("rms_norm_eps", 1.5625e-07),
        partial=0.5,
        interleaved=True,
        head_size=fields.size("head_dim", 128),
        num_kv_heads=fields.size("num_key_value_heads", 2),
        qkv_bias=fields.take("attention_bias", bool, True),
        **further,
    )


def _glm4(fields: Fields) -> Spec:
    return _glm(fields, norm_place="sandwich")


def _internlm3(fields: Fields) -> Spec:
    # The original code has "qkv_bias" and "bias", which includes the output's.
    rest = fields.take("bias", bool, fields.take("mlp_bias", bool, False))
    return read_decoder(
        fields,
        eps=("rms_norm_eps", 1e-5),
        head_size=fields.size("head_dim", 128),
        num_kv_heads=fields.size("num_key_value_heads", 2),
        qkv_bias=fields.take("qkv_bias", bool, fields.take("attention_bias", bool, False)),
        out_bias=rest,
        mlp_bias=rest,
    )


def _exaone4(fields: Fields) -> Spec:
    window, pattern = fields.optional("sliding_window", int, 4096), fields.raw("sliding_window_pattern")
    if isinstance(pattern, str) and pattern == "L" * (len(pattern) - 1) + "G":
        pattern = len(pattern)
    if pattern is not None and not (type(pattern) is int and pattern > 0):
        raise UserError(f"config.json: sliding_window_pattern {pattern!r} is not understood.", "sliding_window_pattern")
    windows = read_windows(fields, window, slides(fields, 4 if pattern is None else pattern))
    return read_decoder(
        fields,
        eps=("rms_norm_eps", 1e-5),
        norm_place="post",
        qk_norm="each head",
        windows=windows,
        # A model with windows does not rotate in full-attention layers.
        rotates=tuple(window is None or further is not None for further in windows),
    )


def _gpt2(fields: Fields) -> Spec:
    fields.only("scale_attn_weights", True)
    fields.only("scale_attn_by_inverse_layer_idx", False)
    fields.only("reorder_and_upcast_attn", False, True)  # scores are float32 here
    width, positions = fields.size("n_embd"), fields.size("n_positions", 1024)
    fields.only("n_ctx", positions)
    return read_learned(
        fields,
        width=width,
        num_heads=fields.size("n_head"),
        num_layers=fields.layers("n_layer"),
        ffn_width=fields.size("n_inner", 4 * width),
        max_position=positions,
        norm_eps=fields.positive("layer_norm_epsilon", 1e-5),
        activation=fields.activation("activation_function", "gelu_new"),
        **dict.fromkeys(_BIASES, True),
    )


def _opt(fields: Fields) -> Spec:
    width = fields.size("hidden_size")
    fields.only("do_layer_norm_before", True)
    fields.only("_remove_final_layer_norm", False)
    fields.only("layer_norm_elementwise_affine", True)
    fields.only("word_embed_proj_dim", width)
    return read_learned(
        fields,
        width=width,
        num_heads=fields.size("num_attention_heads"),
        num_layers=fields.layers(),
        ffn_width=fields.size("ffn_dim"),
        max_position=fields.size("max_position_embeddings"),
        position_offset=2,  # rows 0 and 1 were for padding (fairseq)
        norm_eps=1e-5,
        activation=fields.activation("activation_function", "relu"),
        **dict.fromkeys(_BIASES, fields.take("enable_bias", bool, True)),
    )


_POST_TENSORS = LLAMA_TENSORS | named(
    {
        "attn_post_norm": "layers.{}.post_attention_layernorm",
        "mlp_post_norm": "layers.{}.post_feedforward_layernorm",
    }
)
_GEMMA2_TENSORS = _POST_TENSORS | named({"mlp_norm": "layers.{}.pre_feedforward_layernorm"})
_GLM_TENSORS = LLAMA_TENSORS | named(
    {
        **dict.fromkeys(("gate", "up"), "layers.{}.mlp.gate_up_proj"),
        "attn_post_norm": "layers.{}.post_self_attn_layernorm",
        "mlp_post_norm": "layers.{}.post_mlp_layernorm",
    }
)
_PHI3_TENSORS = _GLM_TENSORS | named(dict.fromkeys(("q", "k", "v"), "layers.{}.self_attn.qkv_proj"))
_STABLELM_TENSORS = LLAMA_TENSORS | named(
    {
        "q_norm": "layers.{}.self_attn.q_layernorm.norms.{}",
        "k_norm": "layers.{}.self_attn.k_layernorm.norms.{}",
    }
)
_STARCODER2_TENSORS = LLAMA_TENSORS | named({"up": "layers.{}.mlp.c_fc", "down": "layers.{}.mlp.c_proj"})
_GPT_NEOX_TENSORS = LLAMA_TENSORS | named(
    {
        "embed": "embed_in",
        "final_norm": "final_layer_norm",
        "head": "embed_out",
        **dict.fromkeys(("q", "k", "v"), "layers.{}.attention.query_key_value"),
        "out": "layers.{}.attention.dense",
        "up": "layers.{}.mlp.dense_h_to_4h",
        "down": "layers.{}.mlp.dense_4h_to_h",
    }
)
_GPT2_TENSORS = named(
    {
        "embed": "wte",
        "positions": "wpe",
        "final_norm": "ln_f",
        "head": "lm_head",
        "attn_norm": "h.{}.ln_1",
        **dict.fromkeys(("q", "k", "v"), "h.{}.attn.c_attn"),
        "out": "h.{}.attn.c_proj",
        "mlp_norm": "h.{}.ln_2",
        "up": "h.{}.mlp.c_fc",
        "down": "h.{}.mlp.c_proj",
    }
)
_OPT_TENSORS = named(
    {
        "embed": "decoder.embed_tokens",
        "positions": "decoder.embed_positions",
        "final_norm": "decoder.final_layer_norm",
        "head": "lm_head",
        "attn_norm": "decoder.layers.{}.self_attn_layer_norm",
        **{part: f"decoder.layers.{{}}.self_attn.{part}_proj" for part in ("q", "k", "v", "out")},
        "mlp_norm": "decoder.layers.{}.final_layer_norm",
        "up": "decoder.layers.{}.fc1",
        "down": "decoder.layers.{}.fc2",
    }
)


def _with_poolers(name: str) -> tuple[str, ...]:
    return f"{name}ForCausalLM", f"{name}Model", f"{name}ForSequenceClassification"


DENSE: tuple[Family, ...] = (
    Family(_with_poolers("Llama"), _llama),
    Family(_with_poolers("Mistral"), _mistral),
    Family(_with_poolers("Qwen2"), _qwen2),
    Family(("Qwen2ForRewardModel",), _qwen2),
    Family(_with_poolers("Qwen3"), _qwen3),
    Family(_with_poolers("Gemma"), _gemma),
    Family(_with_poolers("Gemma2"), _gemma2, _GEMMA2_TENSORS),
    Family(("Gemma3ForCausalLM", "Gemma3TextModel", "Gemma3TextForSequenceClassification"), _gemma3, _GEMMA2_TENSORS),
    Family(_with_poolers("Phi3"), _phi3, _PHI3_TENSORS),
    Family(("Olmo2ForCausalLM",), _olmo2, _POST_TENSORS),
    Family(("GraniteForCausalLM",), _granite),
    Family(("SmolLM3ForCausalLM",), _smollm3),
    Family(("StableLmForCausalLM",), _stablelm, _STABLELM_TENSORS),
    Family(("Starcoder2ForCausalLM",), _starcoder2, _STARCODER2_TENSORS),
    Family(("CohereForCausalLM",), _cohere),
    Family(("Cohere2ForCausalLM",), _cohere2),
    Family(("GlmForCausalLM",), _glm, _GLM_TENSORS),
    Family(("Glm4ForCausalLM",), _glm4, _GLM_TENSORS),
    Family(("InternLM3ForCausalLM",), _internlm3),
    Family(("Exaone4ForCausalLM",), _exaone4, _POST_TENSORS),
    Family(
        ("GPTNeoXForCausalLM",),
        _gpt_neox,
        _GPT_NEOX_TENSORS,
        "gpt_neox.",
        alternating=frozenset({"q", "k", "v", "q_bias", "k_bias", "v_bias"}),
        ignored=(".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq"),
    ),
    Family(
        ("GPT2LMHeadModel",),
        _gpt2,
        _GPT2_TENSORS,
        "transformer.",
        transposed=frozenset({"q", "k", "v", "out", "up", "down"}),
        ignored=(".attn.bias", ".attn.masked_bias"),
    ),
    Family(("OPTForCausalLM",), _opt, _OPT_TENSORS),
)
