"""Families that read images of one size."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from jaxllm.errors import UserError
from jaxllm.families.config_fields import Fields
from jaxllm.families.dense_families import DENSE
from jaxllm.families.family import LLAMA_TENSORS, Family, Images, named
from jaxllm.media.processor import read_processor
from jaxllm.model.spec import Spec
from jaxllm.model.vision import Activation, VisionSpec

_ACTIVATIONS: dict[str, Activation] = {
    **{"gelu": "gelu", "quick_gelu": "quick_gelu", "relu": "relu", "silu": "silu"},
    **dict.fromkeys(("gelu_new", "gelu_fast", "gelu_pytorch_tanh"), "gelu_tanh"),
}
# By model_type of a text_config: its architecture, and values that published files omit.
_LLAMA: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "max_position_embeddings": 2048,
    "vocab_size": 32000,
}
_TEXTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", _LLAMA),
    "mistral": (
        "MistralForCausalLM",
        _LLAMA | {"intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 131072},
    ),
    "qwen2": (
        "Qwen2ForCausalLM",
        _LLAMA | {"intermediate_size": 22016, "max_position_embeddings": 32768, "vocab_size": 151936},
    ),
}
_CLIP: dict[str, Any] = {
    **{"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12},
    **{"image_size": 224, "patch_size": 32, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5},
}
# By model_type of a vision_config.
TOWERS: dict[str, dict[str, Any]] = {
    "clip_vision_model": _CLIP,
    "siglip_vision_model": _CLIP | {"patch_size": 16, "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6},
}
TOWER_WITHOUT_EFFECT = frozenset(
    """
    model_type architectures dtype torch_dtype transformers_version _name_or_path attention_dropout dropout
    initializer_range initializer_factor projection_dim projection_size vocab_size vision_use_head use_cache
    bos_token_id eos_token_id pad_token_id return_dict output_attentions output_hidden_states torchscript
    chunk_size_feed_forward is_encoder_decoder is_decoder add_cross_attention id2label label2id problem_type
    _attn_implementation_autoset attn_implementation
    """.split()
)


def text_of(
    fields: Fields, kind: str = "llama", further: Mapping[str, Any] = MappingProxyType({})
) -> tuple[Fields, Callable[[Fields], Spec]]:
    """Return the fields of a model's decoder, and their reader; `kind` and `further` are defaults."""
    given = fields.raw("text_config")
    if not isinstance(given, Mapping):
        raise UserError(f"config.json: text_config must be an object, got {given!r:.80}.", "text_config")
    kind = given.get("model_type", kind)
    if kind not in _TEXTS:
        known = ", ".join(_TEXTS)
        raise UserError(f"config.json: text_config of type {kind!r:.80} is not supported, only {known}.", "text_config")
    architecture, defaults = _TEXTS[kind]
    tied = fields.take("tie_word_embeddings", bool, False) or bool(given.get("tie_word_embeddings", False))
    values = {**defaults, **further, **{key: value for key, value in given.items() if value is not None}}
    read = next(family.read for family in DENSE if architecture in family.architectures)
    assert read is not None
    values |= {"tie_word_embeddings": tied}
    return Fields(values, fields.max_model_len, "config.json, text_config"), read


def _llava(fields: Fields, width: int, vocab_size: int) -> Images:
    given = fields.inner("vision_config")
    kind = given.take("model_type", str, "clip_vision_model")
    if kind not in TOWERS:
        known = ", ".join(TOWERS)
        raise UserError(
            f"config.json: vision_config of type {kind!r:.80} is not supported, only {known}.", "vision_config"
        )
    is_clip = kind == "clip_vision_model"
    values = dict(fields.raw("vision_config") or {})
    if not values:  # the class's default
        values = {"image_size": 336, "patch_size": 14, "hidden_size": 1024, "intermediate_size": 4096}
        values |= {"num_hidden_layers": 24, "num_attention_heads": 16}
    own = Fields(
        TOWERS[kind] | {key: value for key, value in values.items() if value is not None},
        where="config.json, vision_config",
    )
    own.only("num_channels", 3)
    layers, side, patch = own.layers(), own.size("image_size"), own.size("patch_size")
    heads, size = own.size("num_attention_heads"), own.size("hidden_size")
    strategy = fields.take("vision_feature_select_strategy", str, "default")
    if strategy not in ("default", "full"):
        fields.only("vision_feature_select_strategy", "default", "full")
    if strategy == "default" and not is_clip:
        raise UserError(
            "config.json: vision_feature_select_strategy 'default' drops the class token, and SigLIP has none; set "
            "'full'.",
            "vision_feature_select_strategy",
        )
    if size % heads or side < patch:
        raise UserError(
            f"config.json: no tower has {heads} heads of {size} and patches of {patch} in {side} pixels.",
            "vision_config",
        )
    fields.raw("image_seq_length")  # follows from the tower
    fields.raw("ignore_index")  # of losses
    placeholder = fields.take("image_token_index", int, fields.take("image_token_id", int, 32000))
    if not 0 <= placeholder < vocab_size:
        message = f"config.json: image_token_index {placeholder} is beyond the vocabulary of {vocab_size}."
        raise UserError(message, "image_token_index")
    spec = VisionSpec(
        side=side,
        patch=patch,
        width=size,
        num_heads=heads,
        ffn_width=own.size("intermediate_size"),
        features=_features(fields.raw("vision_feature_layer"), layers),
        norm_eps=own.positive("layer_norm_eps"),
        activation=tower_activation(own, "hidden_act", "quick_gelu"),
        has_class=is_clip,
        drops_class=strategy == "default",
        pre_norm=is_clip,
        patch_bias=not is_clip,
        out_width=width,
        projector_activation=tower_activation(fields, "projector_hidden_act", "gelu"),
        projector_bias=fields.take("multimodal_projector_bias", bool, True),
    )
    own.finish(TOWER_WITHOUT_EFFECT)
    read = partial(read_processor, placeholder=placeholder, num_tokens=spec.num_tokens, side=side)
    return Images(spec, placeholder, tower_row(spec, layers), read)


def _features(given: Any, layers: int) -> tuple[int, ...]:
    chosen = [-2] if given is None else given if isinstance(given, list) else [given]
    if not chosen or any(type(number) is not int or not -layers - 1 <= number <= layers for number in chosen):
        raise UserError(
            f"config.json: vision_feature_layer {given!r:.80} names no layers of {layers}.", "vision_feature_layer"
        )
    found = tuple(number % (layers + 1) for number in chosen)
    if not max(found):
        raise UserError("config.json: vision_feature_layer leaves out every layer.", "vision_feature_layer")
    return found


def tower_activation(fields: Fields, key: str, default: str) -> Activation:
    name = fields.take(key, str, default)
    if name not in _ACTIVATIONS:
        raise UserError(f"config.json: {key} = {name!r} is not one of {', '.join(_ACTIVATIONS)}.", key)
    return _ACTIVATIONS[name]


TOWER = "vision_tower."
PROJECTOR = "multi_modal_projector."
TOWER_TENSORS = LLAMA_TENSORS | named(
    {
        "patches": f"{TOWER}embeddings.patch_embedding",
        "positions": f"{TOWER}embeddings.position_embedding",
        "pre_norm": f"{TOWER}pre_layrnorm",
        "project_1": f"{PROJECTOR}linear_1",
        "project_2": f"{PROJECTOR}linear_2",
        "attn_norm": f"{TOWER}encoder.layers.{{}}.layer_norm1",
        "mlp_norm": f"{TOWER}encoder.layers.{{}}.layer_norm2",
        "up": f"{TOWER}encoder.layers.{{}}.mlp.fc1",
        "down": f"{TOWER}encoder.layers.{{}}.mlp.fc2",
        **{name: f"{TOWER}encoder.layers.{{}}.self_attn.{name}_proj" for name in ("q", "k", "v", "out")},
    }
)
TOWER_TENSORS["class"] = f"{TOWER}embeddings.class_embedding"
# Names of transformers 5, 4.52 and before.
RENAMED = (
    ("language_model.model.", ""),
    ("language_model.lm_head.", "lm_head."),
    ("model.language_model.", ""),
    ("model.vision_tower.vision_model.", TOWER),
    ("vision_tower.vision_model.", TOWER),
    ("model.vision_tower.", TOWER),
    ("model.multi_modal_projector.", PROJECTOR),
)


def tower_row(spec: VisionSpec, num_layers: int) -> Family:
    """Return the row of a tower's tensors, without later layers."""
    behind = tuple(f"{TOWER}encoder.layers.{layer}." for layer in range(spec.num_layers, num_layers))
    return Family(
        (),
        None,
        TOWER_TENSORS,
        "model.",
        ignored=(".position_ids",),
        heads=(
            "embed_tokens.",
            "norm.",
            "layers.",
            "lm_head.",
            f"{TOWER}post_layernorm.",
            f"{TOWER}head.",
            *behind,
        ),
        renamed=RENAMED,
    )


LLAVA = Family(
    ("LlavaForConditionalGeneration",),
    None,
    heads=(TOWER, PROJECTOR),
    renamed=RENAMED,
    text_of=text_of,
    images=_llava,
)
WITH_IMAGES: tuple[Family, ...] = (LLAVA,)
