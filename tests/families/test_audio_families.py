"""Configurations of models that read sound: published files, and refusals by key."""

from __future__ import annotations

from typing import Any

import pytest

from jaxllm.errors import UserError
from jaxllm.families.families import read_images, read_spec
from jaxllm.media.sounds import read_sounds
from jaxllm.model.sound_tower import SoundSpec
from tests.support.sound_models import extractor_settings, sound_config

# Qwen/Qwen2-Audio-7B-Instruct, which leaves out the defaults of its classes.
QWEN_2_AUDIO: dict[str, Any] = {
    **{"architectures": ["Qwen2AudioForConditionalGeneration"], "audio_token_index": 151646, "ignore_index": -100},
    **{"model_type": "qwen2_audio", "torch_dtype": "bfloat16", "transformers_version": "4.38.1", "vocab_size": 156032},
    "audio_config": {
        **{"model_type": "qwen2_audio_encoder", "num_mel_bins": 128, "encoder_layers": 32, "d_model": 1280},
        **{"encoder_attention_heads": 20, "encoder_ffn_dim": 5120, "encoder_layerdrop": 0.0, "dropout": 0.0},
        **{"attention_dropout": 0.0, "activation_function": "gelu", "activation_dropout": 0.0, "init_std": 0.02},
        **{"scale_embedding": False, "max_source_positions": 1500},
    },
    "text_config": {
        **{"bos_token_id": 151643, "eos_token_id": 151645, "intermediate_size": 11008, "model_type": "qwen2"},
        **{"max_position_embeddings": 8192, "rms_norm_eps": 1e-05, "rope_theta": 10000, "torch_dtype": "bfloat16"},
        **{"vocab_size": 156032, "sliding_window": 32768},
    },
}
# mistralai/Voxtral-Mini-3B-2507.
VOXTRAL: dict[str, Any] = {
    **{"architectures": ["VoxtralForConditionalGeneration"], "audio_token_id": 24, "hidden_size": 3072},
    **{"model_type": "voxtral", "projector_hidden_act": "gelu", "torch_dtype": "bfloat16", "vocab_size": 131072},
    "audio_config": {
        **{"activation_dropout": 0.0, "activation_function": "gelu", "attention_dropout": 0.0, "dropout": 0.0},
        **{"head_dim": 64, "hidden_size": 1280, "initializer_range": 0.02, "intermediate_size": 5120},
        **{"layerdrop": 0.0, "max_source_positions": 1500, "model_type": "voxtral_encoder", "num_attention_heads": 20},
        **{"num_hidden_layers": 32, "num_key_value_heads": 20, "num_mel_bins": 128, "scale_embedding": False},
        **{"vocab_size": 51866},
    },
    "text_config": {
        **{"attention_bias": False, "attention_dropout": 0.0, "head_dim": 128, "hidden_act": "silu"},
        **{"hidden_size": 3072, "initializer_range": 0.02, "intermediate_size": 8192, "mlp_bias": False},
        **{"max_position_embeddings": 131072, "model_type": "llama", "num_attention_heads": 32, "use_cache": True},
        **{"num_hidden_layers": 30, "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05},
        **{"rope_scaling": None, "rope_theta": 100000000.0, "vocab_size": 131072},
    },
}
TOWER = SoundSpec(
    num_mels=128,
    num_states=1500,
    width=1280,
    num_heads=20,
    num_layers=32,
    ffn_width=5120,
    activation="gelu",
    out_width=4096,
    joined=2,
    averages=True,
    reads_silence=False,
    projector_activation=None,
)
EXTRACTOR = {"feature_size": 128, "feature_extractor_type": "WhisperFeatureExtractor", "n_samples": 480000}


def sounds_of(config: dict[str, Any]) -> Any:
    return read_images(config, *read_spec(config))


def test_published_files_are_read() -> None:
    spec, _ = read_spec(QWEN_2_AUDIO)
    assert (spec.width, spec.num_layers, spec.num_kv_heads, spec.ffn_width) == (4096, 32, 32, 11008)
    found = sounds_of(QWEN_2_AUDIO)
    assert found.spec == TOWER and found.placeholder == 151646
    processor = found.processor(EXTRACTOR)
    assert (processor.most_tokens, processor.most_seconds) == (750, 30)
    assert found.spec.sizes(750) == (63, 127, 191, 255, 383, 511, 750)
    spec, _ = read_spec(VOXTRAL)
    assert (spec.width, spec.head_size, spec.num_kv_heads) == (3072, 128, 8)
    found = sounds_of(VOXTRAL)
    assert found.spec.joined == 4 and found.spec.reads_silence and found.spec.projector_activation == "gelu"
    processor = found.processor(EXTRACTOR)
    assert (processor.most_tokens, processor.most_seconds) == (375, 1800) and found.spec.sizes(375) == (375,)


@pytest.mark.parametrize(
    ("kind", "part", "changes", "key"),
    [
        ("qwen2_audio", "audio_config", {"scale_embedding": True}, "scale_embedding"),
        ("qwen2_audio", "audio_config", {"model_type": "whisper"}, "model_type"),
        ("qwen2_audio", "audio_config", {"encoder_attention_heads": 5}, "audio_config"),
        ("qwen2_audio", "audio_config", {"further": 1}, "further"),
        ("qwen2_audio", None, {"audio_token_index": 9999}, "audio_token_index"),
        ("qwen2_audio", None, {"text_config": None}, "text_config"),
        ("voxtral", "audio_config", {"intermediate_size": 100}, "audio_config"),
        ("voxtral", None, {"projector_hidden_act": "tanh"}, "projector_hidden_act"),
        ("voxtral", None, {"hidden_size": 99}, "hidden_size"),
    ],
)
def test_unsupported_values_are_refused(kind: str, part: str | None, changes: dict[str, Any], key: str) -> None:
    config = sound_config(kind)
    config = config | (changes if part is None else {part: config[part] | changes})
    with pytest.raises(UserError) as caught:
        sounds_of(config)
    assert caught.value.parameter == key


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("feature_size", 80), ("chunk_length", 30), ("sampling_rate", 8000), ("n_fft", 512), ("dither", 0.1)),
        *(("do_normalize", True), ("padding_side", "left"), ("further", 1)),
        ("feature_extractor_type", "SeamlessM4TFeatureExtractor"),
    ],
)
def test_unsupported_settings_are_refused(key: str, value: Any) -> None:
    sizes = {"placeholder": 9, "num_mels": 16, "num_states": 100, "joined": 2, "reads_silence": False}
    assert read_sounds(extractor_settings(), **sizes).most_tokens == 50
    with pytest.raises(UserError) as caught:
        read_sounds(extractor_settings() | {key: value}, **sizes)
    assert caught.value.parameter == key
