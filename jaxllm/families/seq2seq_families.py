"""Encoder-decoder families: config readers of decoder and encoder, and tensor names."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from jaxllm.families.config_fields import Fields, read_learned
from jaxllm.families.family import Encoder, Family, named
from jaxllm.model.spec import Spec

LOGIT_BIAS = "final_logits_bias"  # zeros, see checkpoints/described.py
# Keys of one half, which the other half's reader does not need, and of decoding.
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
        position_offset=2,  # rows 0 and 1 of the table were for padding (fairseq)
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


SEQ2SEQ: tuple[Family, ...] = (
    _bart_row(("BartForConditionalGeneration",), "decoder", is_pre=False),
    _bart_row(("MBartForConditionalGeneration",), "decoder", is_pre=True),
)
