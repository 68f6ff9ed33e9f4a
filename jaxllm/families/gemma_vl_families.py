"""Gemma 3 with its vision tower."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from math import isqrt
from typing import Any

from jaxllm.errors import UserError
from jaxllm.families.config_fields import Fields
from jaxllm.families.dense_families import DENSE
from jaxllm.families.family import Family, Images
from jaxllm.families.vision_families import (
    PROJECTOR,
    RENAMED,
    TOWER,
    TOWER_TENSORS,
    TOWER_WITHOUT_EFFECT,
    TOWERS,
    tower_activation,
    tower_row,
)
from jaxllm.media.processor import read_gemma
from jaxllm.model.pooled_vision import PooledVisionSpec
from jaxllm.model.spec import Spec
from jaxllm.model.vision import VisionSpec

_TEXT = next(family for family in DENSE if "Gemma3ForCausalLM" in family.architectures)
# Values of transformers' Gemma3TextConfig, which published files leave out.
_TEXT_DEFAULTS: dict[str, Any] = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_hidden_layers": 26,
    "max_position_embeddings": 131072,
    "vocab_size": 262208,
}
_SIGLIP = TOWERS["siglip_vision_model"]
_IMAGE_TOKENS = {"boi_token_index": 255999, "image_token_index": 262144, "eoi_token_index": 256000}
_TENSORS = TOWER_TENSORS | {
    "post_norm": f"{TOWER}post_layernorm.weight",
    "post_norm_bias": f"{TOWER}post_layernorm.bias",
    "soft_norm": f"{PROJECTOR}mm_soft_emb_norm.weight",
    "project": f"{PROJECTOR}mm_input_projection_weight",
}


def _text_of(fields: Fields) -> tuple[Fields, Callable[[Fields], Spec]]:
    """Return the fields of the decoder, and their reader."""
    given = fields.raw("text_config")
    if not isinstance(given, Mapping) or given.get("model_type", "gemma3_text") != "gemma3_text":
        message = f"config.json: text_config must be an object of type gemma3_text, got {given!r:.80}."
        raise UserError(message, "text_config")
    tied = fields.take("tie_word_embeddings", bool, True)
    values = _TEXT_DEFAULTS | {key: value for key, value in given.items() if value is not None}
    if values.get("use_bidirectional_attention"):
        raise UserError(
            "config.json: use_bidirectional_attention is not supported for models with images.",
            "use_bidirectional_attention",
        )
    values |= {"tie_word_embeddings": tied}
    assert _TEXT.read is not None
    return Fields(values, fields.max_model_len, "config.json, text_config"), _TEXT.read


def _images(fields: Fields, width: int, vocab_size: int) -> Images:
    given = dict(fields.raw("vision_config") or {})
    own = Fields(
        _SIGLIP | {key: value for key, value in given.items() if value is not None}, where="config.json, vision_config"
    )
    own.only("model_type", "siglip_vision_model")
    own.only("num_channels", 3)
    layers, side, patch = own.layers(), own.size("image_size"), own.size("patch_size")
    heads, size = own.size("num_attention_heads"), own.size("hidden_size")
    if size % heads:
        raise UserError(f"config.json, vision_config: no tower has {heads} heads of {size}.", "num_attention_heads")
    num_tokens = fields.size("mm_tokens_per_image", 256)
    tokens, patches = isqrt(num_tokens), side // patch
    if tokens**2 != num_tokens or not patches or patches % tokens:
        raise UserError(
            f"config.json: mm_tokens_per_image {num_tokens} does not divide {patches} × {patches} patches evenly.",
            "mm_tokens_per_image",
        )
    tower = VisionSpec(
        side=side,
        patch=patch,
        width=size,
        num_heads=heads,
        ffn_width=own.size("intermediate_size"),
        features=(layers,),
        norm_eps=own.positive("layer_norm_eps"),
        activation=tower_activation(own, "hidden_act", "gelu_pytorch_tanh"),
        has_class=False,
        drops_class=False,
        pre_norm=False,
        patch_bias=True,
        out_width=width,
    )
    own.finish(TOWER_WITHOUT_EFFECT)
    ids = [fields.take(key, int, default) for key, default in _IMAGE_TOKENS.items()]
    for key, token in zip(_IMAGE_TOKENS, ids, strict=True):
        if not 0 <= token < vocab_size:
            raise UserError(f"config.json: {key} {token} is beyond the vocabulary of {vocab_size}.", key)
    start, placeholder, end = ids
    read = partial(read_gemma, placeholder=placeholder, marks=(start, end), num_tokens=num_tokens, side=side)
    row = replace(tower_row(tower, layers), tensors=_TENSORS, transposed=frozenset({"project"}))
    return Images(PooledVisionSpec(tower, tokens), placeholder, row, read, is_bidirectional=True)


GEMMA = Family(
    ("Gemma3ForConditionalGeneration",),
    None,
    _TEXT.tensors,
    heads=(TOWER, PROJECTOR),
    renamed=RENAMED,
    text_of=_text_of,
    images=_images,
)
