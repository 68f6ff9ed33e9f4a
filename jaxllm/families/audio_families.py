"""Families that read sound: Qwen2-Audio and Voxtral."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from jaxllm.errors import UserError
from jaxllm.families.config_fields import Fields
from jaxllm.families.family import LLAMA_TENSORS, Family, Images, named
from jaxllm.families.vision_families import PROJECTOR, TOWER_WITHOUT_EFFECT, text_of, tower_activation
from jaxllm.media.sounds import read_sounds
from jaxllm.model.sound_tower import SoundSpec
from jaxllm.model.spec import Spec

# Values of transformers' encoders, which published files may omit; in Voxtral's files the keys are the second ones.
_KEYS = {
    "d_model": ("hidden_size", 1280),
    "encoder_layers": ("num_hidden_layers", 32),
    "encoder_attention_heads": ("num_attention_heads", 20),
    "encoder_ffn_dim": ("intermediate_size", 5120),
}
_WITHOUT_EFFECT = TOWER_WITHOUT_EFFECT | {"activation_dropout", "encoder_layerdrop", "layerdrop", "init_std"}
_TOWER = "audio_tower."
_TENSORS = {
    "convolution_1": "conv1",
    "convolution_2": "conv2",
    "positions": "embed_positions",
    "post_norm": "layer_norm",
    "attn_norm": "layers.{}.self_attn_layer_norm",
    "mlp_norm": "layers.{}.final_layer_norm",
    "up": "layers.{}.fc1",
    "down": "layers.{}.fc2",
    **{name: f"layers.{{}}.self_attn.{name}_proj" for name in ("q", "k", "v", "out")},
}
_PROJECTORS = {"project": "linear", "project_1": "linear_1", "project_2": "linear_2"}
_ALL_TENSORS = LLAMA_TENSORS | named(
    {name: f"{_TOWER}{stem}" for name, stem in _TENSORS.items()}
    | {name: f"{PROJECTOR}{stem}" for name, stem in _PROJECTORS.items()}
)
# Names of published files and of transformers 5.
_RENAMED = (
    ("language_model.model.", ""),
    ("language_model.lm_head.", "lm_head."),
    ("model.language_model.", ""),
    (f"model.{_TOWER}", _TOWER),
    (f"model.{PROJECTOR}", PROJECTOR),
)
_ROW = Family(
    (), None, _ALL_TENSORS, "model.", heads=("embed_tokens.", "norm.", "layers.", "lm_head."), renamed=_RENAMED
)


def _sounds(
    fields: Fields, width: int, vocab_size: int, *, kind: str, token: tuple[str, int], is_averaged: bool
) -> Images:
    """Return how a model reads sound; `token` is the key of the placeholder, and its default."""
    own = fields.inner("audio_config")
    own.only("model_type", kind)
    own.only("scale_embedding", False)
    size, layers, heads, inner = (
        own.size(key if own.has(key) else other, default) for key, (other, default) in _KEYS.items()
    )
    own.only("num_key_value_heads", heads)
    own.only("head_dim", size // heads)
    num_states = own.size("max_source_positions", 1500)
    joined = 2 if is_averaged else inner // size
    if size % heads or not joined or num_states < joined or (not is_averaged and (inner % size or num_states % joined)):
        raise UserError(
            f"config.json, audio_config: no tower has {heads} heads of {size}, {inner} numbers of a token, and "
            f"{num_states} states.",
            "audio_config",
        )
    key, default = token
    placeholder = fields.take(key, int, default)
    if not 0 <= placeholder < vocab_size:
        raise UserError(f"config.json: {key} {placeholder} is beyond the vocabulary of {vocab_size}.", key)
    fields.raw("ignore_index")  # of losses
    fields.only("hidden_size", width)  # written by transformers for other classes
    fields.only("vocab_size", vocab_size)
    spec = SoundSpec(
        num_mels=own.size("num_mel_bins", 128),
        num_states=num_states,
        width=size,
        num_heads=heads,
        num_layers=layers,
        ffn_width=inner,
        activation=tower_activation(own, "activation_function", "gelu"),
        out_width=width,
        joined=joined,
        averages=is_averaged,
        reads_silence=not is_averaged,
        projector_activation=None if is_averaged else tower_activation(fields, "projector_hidden_act", "gelu"),
    )
    own.finish(_WITHOUT_EFFECT)
    read = partial(
        read_sounds,
        placeholder=placeholder,
        num_mels=spec.num_mels,
        num_states=num_states,
        joined=joined,
        reads_silence=spec.reads_silence,
    )
    return Images(spec, placeholder, _ROW, read, section="feature_extractor")


def _row(architecture: str, text: Callable[[Fields], tuple[Fields, Callable[[Fields], Spec]]], **sounds: Any) -> Family:
    return Family(
        (architecture,),
        None,
        heads=(_TOWER, PROJECTOR),
        renamed=_RENAMED,
        text_of=text,
        images=partial(_sounds, **sounds),
    )


# Values of transformers' VoxtralConfig.
_VOXTRAL_TEXT: Mapping[str, Any] = {
    "vocab_size": 131072,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 30,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000000.0,
    "head_dim": 128,
}

WITH_SOUND: tuple[Family, ...] = (
    _row(
        "Qwen2AudioForConditionalGeneration",
        partial(text_of, kind="qwen2"),
        kind="qwen2_audio_encoder",
        token=("audio_token_index", 151646),
        is_averaged=True,
    ),
    _row(
        "VoxtralForConditionalGeneration",
        partial(text_of, kind="llama", further=_VOXTRAL_TEXT),
        kind="voxtral_encoder",
        token=("audio_token_id", 24),
        is_averaged=False,
    ),
)
