"""Encoder-decoder families."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any, cast

from jaxllm.families.config_fields import Fields, read_learned
from jaxllm.families.family import Encoder, Family, named
from jaxllm.model.spec import Activation, Spec

LOGIT_BIAS = "final_logits_bias"  # zeros, see checkpoints/described.py
# Keys of the other half, and of decoding.
_OF_HALVES = frozenset(
    {f"{side}_{key}" for side in ("encoder", "decoder") for key in ("attention_heads", "ffn_dim", "layers")}
    | {"encoder_layerdrop", "decoder_layerdrop", "num_hidden_layers", "classif_dropout"}
    | {"forced_bos_token_id", "forced_eos_token_id", "force_bos_token_to_be_generated"}
)


def _bart_half(fields: Fields, side: str, is_pre: bool, **further: Any) -> Spec:
    for key, value in (
        ("normalize_before", is_pre),
        ("add_final_layer_norm", is_pre),
        ("normalize_embedding", True),
        ("static_position_embeddings", False),
        ("add_bias_logits", False),
        ("extra_pos_embeddings", 2),
    ):
        fields.only(key, value)
    for key in _OF_HALVES:
        fields.raw(key)
    width = fields.size("d_model")
    return read_learned(
        fields,
        width=width,
        num_heads=fields.size(f"{side}_attention_heads"),
        num_layers=fields.layers(f"{side}_layers"),
        ffn_width=fields.size(f"{side}_ffn_dim"),
        max_position=fields.size("max_position_embeddings", 1024),
        position_offset=2,  # rows 0 and 1 were for padding (fairseq)
        norm_eps=1e-5,
        norm_place="pre" if is_pre else "after",
        embed_norm=True,
        keeps_first_norm=is_pre,
        final_norm=is_pre,
        embed_scale=math.sqrt(width) if fields.take("scale_embedding", bool, False) else 1.0,
        activation=fields.activation("activation_function", "gelu"),
        **dict.fromkeys(("qkv_bias", "out_bias", "mlp_bias"), True),
        **further,
    )


def _bart_decoder(fields: Fields, is_pre: bool) -> Spec:
    return _bart_half(fields, "decoder", is_pre, cross=True)


def _bart_encoder(fields: Fields, is_pre: bool) -> Encoder:
    spec = _bart_half(fields, "encoder", is_pre, is_causal=False)
    return Encoder(spec, _bart_row((), "encoder", is_pre))


def _bart_row(architectures: tuple[str, ...], side: str, is_pre: bool) -> Family:
    layer, place = f"{side}.layers.{{}}.", "norm" if is_pre else "post_norm"
    parts = ("q", "k", "v", "out")
    tensors = {
        "embed": "shared",
        "positions": f"{side}.embed_positions",
        "embed_norm": f"{side}.layernorm_embedding",
        "final_norm": f"{side}.layer_norm",
        "head": "lm_head",
        **{part: f"{layer}self_attn.{part}_proj" for part in parts},
        **{f"cross_{part}": f"{layer}encoder_attn.{part}_proj" for part in parts},
        f"attn_{place}": f"{layer}self_attn_layer_norm",
        f"cross_{place}": f"{layer}encoder_attn_layer_norm",
        f"mlp_{place}": f"{layer}final_layer_norm",
        "up": f"{layer}fc1",
        "down": f"{layer}fc2",
    }
    others = ("decoder.", "shared.") if side == "encoder" else ("encoder.", "decoder.embed_tokens.")
    return Family(
        architectures,
        partial(_bart_decoder, is_pre=is_pre) if side == "decoder" else None,
        named(tensors),
        ignored=(LOGIT_BIAS,),
        heads=(*others, "lm_head.", "encoder.embed_tokens."),
        encoder=partial(_bart_encoder, is_pre=is_pre),
    )


def _t5_half(fields: Fields, side: str, **further: Any) -> Spec:
    width, heads, size = fields.size("d_model"), fields.size("num_heads"), fields.size("d_kv")
    layers, of_decoder = fields.layers("num_layers"), fields.optional("num_decoder_layers", int)
    if side == "decoder" and of_decoder is not None:
        layers = fields.layers("num_decoder_layers")
    kind, _, name = fields.take("feed_forward_proj", str, "relu").rpartition("-")
    if kind not in ("", "gated") or name not in ("relu", "gelu", "silu"):
        fields.only("feed_forward_proj", "relu", "gated-gelu", "gated-silu")
    activation = "gelu_tanh" if (kind, name) == ("gated", "gelu") else name
    fields.only("is_gated_act", kind == "gated")
    fields.only("dense_act_fn", name, *(("gelu_new",) if activation == "gelu_tanh" else ()))
    tied = fields.take("tie_word_embeddings", bool, True)
    # Version 1.1 has a separate head, for which transformers does not scale outputs.
    is_scaled = fields.take("scale_decoder_outputs", bool, tied)
    return Spec(
        num_layers=layers,
        width=width,
        num_heads=heads,
        num_kv_heads=heads,
        head_size=size,
        ffn_width=fields.size("d_ff"),
        vocab_size=fields.size("vocab_size"),
        max_position=fields.size("n_positions", 512),
        windows=(None,) * layers,
        ropes=(None,) * layers,
        attention_scale=1.0,
        norm_eps=fields.positive("layer_norm_epsilon", 1e-6),
        logit_scale=width**-0.5 if is_scaled else 1.0,
        mlp_gated=kind == "gated",
        activation=cast(Activation, activation),
        tie_embeddings=tied,
        relative_buckets=fields.size("relative_attention_num_buckets", 32),
        relative_distance=fields.size("relative_attention_max_distance", 128),
        **further,
    )


def _t5_decoder(fields: Fields) -> Spec:
    for key in ("dropout_rate", "classifier_dropout", "output_past"):
        fields.raw(key)
    return _t5_half(fields, "decoder", cross=True)


def _t5_encoder(fields: Fields) -> Encoder:
    spec = _t5_half(fields, "encoder", is_causal=False)
    return Encoder(spec, _t5_row("encoder", spec))


def _t5_row(side: str, spec: Spec | None = None) -> Family:
    """Return the row of a half's tensors, whose names depend on the Spec."""
    is_gated = spec is not None and spec.mlp_gated
    own, cross = (f"{side}.block.{{}}.layer.{number}." for number in range(2))
    dense = f"{side}.block.{{}}.layer.{1 if side == 'encoder' else 2}."
    parts = {"q": "q", "k": "k", "v": "v", "out": "o"}
    tensors = {
        "embed": "shared",
        "relative_bias": f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias",
        "final_norm": f"{side}.final_layer_norm",
        "head": "lm_head",
        "attn_norm": f"{own}layer_norm",
        **{part: f"{own}SelfAttention.{name}" for part, name in parts.items()},
        "cross_norm": f"{cross}layer_norm",
        **{f"cross_{part}": f"{cross}EncDecAttention.{name}" for part, name in parts.items()},
        "mlp_norm": f"{dense}layer_norm",
        "gate": f"{dense}DenseReluDense.wi_0",
        "up": f"{dense}DenseReluDense.wi_1" if is_gated else f"{dense}DenseReluDense.wi",
        "down": f"{dense}DenseReluDense.wo",
    }
    others = ("decoder.", "shared.") if side == "encoder" else ("encoder.", "decoder.embed_tokens.")
    return Family(
        ("T5ForConditionalGeneration",) if side == "decoder" else (),
        _t5_decoder if side == "decoder" else None,
        named(tensors),
        "",
        # A bias that the first implementation never used.
        ignored=(".layer.1.EncDecAttention.relative_attention_bias.weight",),
        heads=(*others, "lm_head.", "encoder.embed_tokens."),
        encoder=_t5_encoder,
        of_spec=partial(_t5_row, "decoder"),
    )


def _whisper_half(fields: Fields, side: str, **further: Any) -> Spec:
    for key in (*_OF_HALVES, *_OF_WHISPER):
        fields.raw(key)
    for key, value in (("scale_embedding", False), ("apply_spec_augment", False), ("use_weighted_layer_sum", False)):
        fields.only(key, value)
    width = fields.size("d_model")
    return read_learned(
        fields,
        width=width,
        num_heads=fields.size(f"{side}_attention_heads"),
        num_layers=fields.layers(f"{side}_layers"),
        ffn_width=fields.size(f"{side}_ffn_dim"),
        max_position=fields.size(*_WHISPER_POSITIONS[side]),
        norm_eps=1e-5,
        activation=fields.activation("activation_function", "gelu"),
        key_bias=False,
        **dict.fromkeys(("qkv_bias", "out_bias", "mlp_bias"), True),
        **further,
    )


_WHISPER_POSITIONS = {"encoder": ("max_source_positions", 1500), "decoder": ("max_target_positions", 448)}
_OF_WHISPER = (
    *("max_source_positions", "max_target_positions", "num_mel_bins"),
    # Of generation_config.json, of training, and of classifiers.
    *("suppress_tokens", "begin_suppress_tokens", "forced_decoder_ids", "median_filter_width", "classifier_proj_size"),
    *(f"mask_{of}_{key}" for of in ("time", "feature") for key in ("prob", "length", "min_masks")),
)


def _whisper_decoder(fields: Fields) -> Spec:
    fields.size("num_mel_bins", 80)
    return _whisper_half(fields, "decoder", cross=True)


def _whisper_encoder(fields: Fields) -> Encoder:
    spec = _whisper_half(fields, "encoder", is_causal=False)
    return Encoder(spec, _whisper_row((), "encoder"), fields.size("num_mel_bins", 80))


def _whisper_row(architectures: tuple[str, ...], side: str) -> Family:
    row = _bart_row(architectures, side, is_pre=True)
    convolutions = {f"convolution_{number}": f"encoder.conv{number}" for number in (1, 2)}
    tensors = {**row.tensors, **named({"embed": "decoder.embed_tokens", "head": "proj_out", **convolutions})}
    return replace(
        row,
        read=_whisper_decoder if side == "decoder" else None,
        tensors=tensors,
        heads=("decoder." if side == "encoder" else "encoder.", "proj_out."),
        encoder=_whisper_encoder,
    )


SEQ2SEQ: tuple[Family, ...] = (
    _bart_row(("BartForConditionalGeneration",), "decoder", is_pre=False),
    _bart_row(("MBartForConditionalGeneration",), "decoder", is_pre=True),
    _t5_row("decoder"),
    _whisper_row(("WhisperForConditionalGeneration",), "decoder"),
)
