"""Random models that read sound, written as published checkpoints, and sounds of odd lengths. All follow from seeds."""

from __future__ import annotations

import io
import json
import wave
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from jaxllm.families.families import read_images, read_spec
from jaxllm.media.sound import RATE
from tests.support.checkpoints import random_tensors
from tests.support.vision_models import PLACEHOLDER, TEMPLATE, write_tokenizer

KINDS = ("qwen2_audio", "voxtral")
NUM_MELS, SECONDS = 16, 2  # of the longest input
AROUND = (PLACEHOLDER + 1, PLACEHOLDER + 2)  # of sounds
SOUND_TEMPLATE = TEMPLATE.replace("'image' else", "'audio' else").replace(
    "'<image>'", "'<|audio_bos|><image><|audio_eos|>'"
)
_NAMES = {"qwen2_audio": "Qwen2Audio", "voxtral": "Voxtral"}


def sound_config(kind: str) -> dict[str, Any]:
    """Return the config.json of a model of two layers, with a tower of two; a state is 20 ms."""
    is_voxtral = kind == "voxtral"
    text: dict[str, Any] = {
        **{"model_type": "llama" if is_voxtral else "qwen2", "hidden_size": 48, "intermediate_size": 64},
        **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12},
        **{"vocab_size": PLACEHOLDER + 4, "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_theta": 1000.0},
    }
    sizes = {"d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 128}
    names = dict.fromkeys(sizes, "")
    if is_voxtral:
        names = dict(
            zip(sizes, ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"), strict=True)
        )
    else:
        text.pop("head_dim")
    tower = {names[key] or key: value for key, value in sizes.items()}
    tower |= {"model_type": f"{kind}_encoder", "num_mel_bins": NUM_MELS, "max_source_positions": 50 * SECONDS}
    tower |= {"activation_function": "gelu", "scale_embedding": False, "dropout": 0.0}
    placeholder = {"audio_token_id" if is_voxtral else "audio_token_index": PLACEHOLDER}
    return {
        **{"architectures": [f"{_NAMES[kind]}ForConditionalGeneration"], "model_type": kind, **placeholder},
        **{"audio_config": tower, "text_config": text, "tie_word_embeddings": False, "eos_token_id": 2},
        **({"projector_hidden_act": "gelu", "hidden_size": 48} if is_voxtral else {"ignore_index": -100}),
    }


def extractor_settings() -> dict[str, Any]:
    """Return the preprocessor_config.json."""
    return {
        **{"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": NUM_MELS, "sampling_rate": RATE},
        **{"hop_length": 160, "n_fft": 400, "chunk_length": SECONDS, "n_samples": SECONDS * RATE, "dither": 0.0},
        **{"nb_max_frames": 100 * SECONDS, "padding_side": "right", "padding_value": 0.0},
        **{"return_attention_mask": True, "processor_class": "Qwen2AudioProcessor"},
    }


def write_sound_model(folder: Path, kind: str = "qwen2_audio", older_names: bool = True) -> Path:
    """Write a random checkpoint with a tokenizer and a chat template; published ones have the older names."""
    config = sound_config(kind)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if older_names:
        (folder / "preprocessor_config.json").write_text(json.dumps(extractor_settings()))
    else:
        (folder / "processor_config.json").write_text(json.dumps({"feature_extractor": extractor_settings()}))
    text = {key: value for key, value in config["text_config"].items() if key != "model_type"}
    architecture = "LlamaForCausalLM" if kind == "voxtral" else "Qwen2ForCausalLM"
    tensors = random_tensors(text | {"architectures": [architecture], "tie_word_embeddings": False})
    if older_names:
        tensors = {f"language_model.{name}": values for name, values in tensors.items()}
    else:
        tensors = {name.replace("model.", "model.language_model."): values for name, values in tensors.items()}
    images = read_images(config, *read_spec(config))
    assert images is not None
    rng, declared = np.random.default_rng(1), images.spec.declare()
    for layer, weights in [(None, declared.top), *enumerate(declared.layers)]:
        for name, weight in weights.items():
            place = ("" if older_names else "model.") + images.tensors.tensors[name].format(layer)
            tensors[place] = 0.3 * rng.standard_normal(weight.shape, np.float32)
    save_file(tensors, folder / "model.safetensors")
    write_tokenizer(folder, SOUND_TEMPLATE, ("<|audio_bos|>", "<|audio_eos|>"))
    return folder


def sound(seed: int, most: float = SECONDS) -> np.ndarray:
    """Return a sound of an odd number of samples at 16 kHz, a tone and noise that fades; seed 0 has `most` seconds."""
    rng = np.random.default_rng(seed)
    count = int(most * RATE) if seed == 0 else int(rng.integers(321, int(most * RATE))) | 1
    times = np.arange(count) / RATE
    tone = 0.3 * np.sin(2 * np.pi * rng.uniform(100, 3000) * times)
    return (tone + 0.2 * rng.standard_normal(count) * np.exp(-3 * times)).astype(np.float32)


def wav(seed: int) -> bytes:
    """Return a WAV file of 16 bits."""
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes((sound(seed) * 32767).astype("<i2").tobytes())
    return buffer.getvalue()


def prompts(kind: str = "qwen2_audio") -> list[Any]:
    """Return prompts with no sound, with one to three, and with sounds between turns."""
    most = 2.5 * SECONDS if kind == "voxtral" else SECONDS
    before, after = AROUND

    def mixed(*parts: int | str) -> dict[str, Any]:
        """Numbers are seeds of sounds, texts token ids."""
        ids = [
            token
            for part in parts
            for token in ([before, PLACEHOLDER, after] if isinstance(part, int) else map(int, part.split()))
        ]
        sounds = [(sound(part, most), RATE) for part in parts if isinstance(part, int)]
        return {"prompt_token_ids": ids, "multi_modal_data": {"audio": sounds}}

    return [
        mixed(1, "5 6 7"),
        mixed("5 6", 2, "9 10", 3, "11"),
        [4, 5, 6, 7, 8],
        mixed("1 20 30", 0, "2 40 50 60"),
        mixed("1 70 80", 4, "2 1 90", 1, "2 100", 5, "5"),
        mixed("7 " * 40, 6, "7 8 " * 20),
    ]
