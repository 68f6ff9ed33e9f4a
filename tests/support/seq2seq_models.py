"""Random encoder-decoder models, written as published checkpoints. All follow from seeds."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from jaxllm.embedded import MODEL_DIR
from jaxllm.families.families import read_encoder, read_spec
from jaxllm.families.family import Family
from jaxllm.model import spectrogram
from jaxllm.model.decoder import Params, declare
from jaxllm.model.parameters import Weight

VOCABULARY = 1536  # of the included tokenizer
START, STOP = 3, 2
KINDS = ("bart", "mbart", "t5", "flan-t5", "whisper")
NUM_MELS, NUM_FRAMES = 16, 80


def seq2seq_config(kind: str = "bart") -> dict[str, Any]:
    """Return the config.json of a model with two layers in its decoder and three in its encoder."""
    ids: dict[str, Any] = {
        **{"is_encoder_decoder": True, "decoder_start_token_id": START, "vocab_size": VOCABULARY},
        **{"eos_token_id": STOP, "pad_token_id": 0},
    }
    if kind in ("t5", "flan-t5"):
        own: dict[str, Any] = {
            **{"d_model": 48, "d_kv": 10, "d_ff": 64, "num_layers": 3, "num_decoder_layers": 2, "num_heads": 4},
            **{"relative_attention_num_buckets": 8, "relative_attention_max_distance": 20, "n_positions": 96},
            **{"feed_forward_proj": "relu" if kind == "t5" else "gated-gelu", "tie_word_embeddings": kind == "t5"},
        }
        return {"architectures": ["T5ForConditionalGeneration"], "model_type": "t5", **ids, **own}
    if kind == "whisper":
        own = {
            **{"d_model": 48, "encoder_layers": 3, "decoder_layers": 2, "num_mel_bins": NUM_MELS},
            **{"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 64},
            **{"decoder_ffn_dim": 72, "max_source_positions": NUM_FRAMES // 2, "max_target_positions": 96},
        }
        return {"architectures": ["WhisperForConditionalGeneration"], "model_type": "whisper", **ids, **own}
    shared: dict[str, Any] = {
        **{"d_model": 48, "encoder_layers": 3, "decoder_layers": 2, "bos_token_id": 1, "num_beams": 4},
        **{"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 72},
        **{"activation_function": "gelu", "max_position_embeddings": 96, "scale_embedding": kind == "mbart"},
    }
    name = {"bart": "Bart", "mbart": "MBart"}[kind]
    return {"architectures": [f"{name}ForConditionalGeneration"], "model_type": kind, **ids, **shared}


def write_seq2seq(folder: Path, kind: str = "bart", **changes: Any) -> Path:
    """Write a random checkpoint with the included tokenizer; `changes` are of config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    config = seq2seq_config(kind) | changes
    (folder / "config.json").write_text(json.dumps(config))
    spec, family = read_spec(config)
    encoder = read_encoder(config, family)
    assert encoder is not None
    rng = np.random.default_rng(5)
    tensors = _random(declare(spec), family, rng, spec.attention_scale)
    own = declare(encoder.spec)
    for name in ("embed", "head"):
        own.top.pop(name, None)
    if kind == "whisper":
        own = replace(own, top=own.top | spectrogram.declare(spec.width, NUM_MELS))
    tensors |= _random(own, encoder.tensors, rng, spec.attention_scale)
    if kind in ("bart", "mbart"):
        tensors["final_logits_bias"] = np.zeros((1, VOCABULARY), np.float32)
    if not spec.tie_embeddings:  # transformers 5 ties them in any case
        tensors["lm_head.weight"] = tensors["shared.weight"]
    save_file(tensors, folder / "model.safetensors")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL_DIR / name, folder)
    return folder


def _random(
    declared: Params[Weight], family: Family, rng: np.random.Generator, attention_scale: float
) -> dict[str, np.ndarray]:
    """Return tensors of each part's name, with parts that are not zero or one."""
    made = {}
    for layer, weights in [(None, declared.top), *enumerate(declared.layers)]:
        for weight in weights.values():
            for part in weight.parts:
                values = rng.standard_normal((part.rows, *weight.shape[1:]), np.float32)
                scale = 0.4 if layer is None else 0.3
                if part.name in ("q", "cross_q"):
                    scale *= min(1.0, 0.25 / attention_scale)  # else rounding moves logits by more than 1e-4
                values = scale * values if values.ndim > 1 else 0.05 * values + (weight.initial == "ones")
                name = family.tensors[part.name].format(layer)
                made[name if name.startswith("lm_head") else family.prefix + name] = values
    return made


def prompts(kind: str = "bart") -> list[dict[str, Any]]:
    """Return encoder prompts of one token or sample to the longest, with decoder prompts or without."""
    rng = np.random.default_rng(9)
    made = []
    for length, given in ((1, 0), (5, 0), (16, 3), (17, 0), (33, 1), (95, 0), (96, 7), (40, 20)):
        ids = rng.integers(4, VOCABULARY, (length + given,)).tolist()
        decoder: dict[str, Any] = {"decoder_prompt": {"prompt_token_ids": ids[length:]}} if given else {}
        encoder: dict[str, Any] = {"prompt_token_ids": ids[:length]}
        if kind == "whisper":
            sound = 0.1 * rng.standard_normal(1 + (length - 1) * (160 * NUM_FRAMES - 1) // 95)
            encoder = {"multi_modal_data": {"audio": (sound.astype(np.float32), 16000)}}
        made.append({"encoder_prompt": encoder} | decoder)
    return made


# Of `write_whisper`, from VOCABULARY on: the end, the tokens of prompts, and timestamps of 0.02 s.
MARKERS = (
    *("<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|de|>", "<|translate|>", "<|transcribe|>"),
    *("<|startofprev|>", "<|nospeech|>", "<|notimestamps|>"),
)
ID_OF = {name: VOCABULARY + number for number, name in enumerate(MARKERS)}
FIRST_TIME = VOCABULARY + len(MARKERS)
SUPPRESSED = [*range(700), *(token for name, token in ID_OF.items() if name != "<|endoftext|>")]
WINDOW = 160 * NUM_FRAMES  # samples that the encoder reads


def write_whisper(folder: Path, times: float = 1.35, **changes: Any) -> Path:
    """Write a random Whisper with its decoding rules; `times` scales the embeddings of timestamps, None omits them."""
    names = [*MARKERS, *(f"<|{step * 0.02:.2f}|>" for step in range(NUM_FRAMES // 2 + 1))]
    end, start = ID_OF["<|endoftext|>"], ID_OF["<|startoftranscript|>"]
    ids = {"eos_token_id": end, "decoder_start_token_id": start, "bos_token_id": end}
    write_seq2seq(folder, "whisper", vocab_size=VOCABULARY + len(names), **ids)
    tensors = load_file(folder / "model.safetensors")
    embed = tensors["model.decoder.embed_tokens.weight"]
    embed[FIRST_TIME:] *= times
    embed[end] *= 1.5
    save_file(tensors, folder / "model.safetensors")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    shape = tokenizer["added_tokens"][0]
    for number, name in enumerate(names):
        own = {"id": VOCABULARY + number, "content": name, "special": VOCABULARY + number < FIRST_TIME}
        tokenizer["added_tokens"].append(shape | own)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = {
        **ids,
        "lang_to_id": {name: ID_OF[name] for name in ("<|en|>", "<|de|>")},
        "task_to_id": {name: ID_OF[f"<|{name}|>"] for name in ("transcribe", "translate")},
        "suppress_tokens": SUPPRESSED,
        "begin_suppress_tokens": [*range(700, 900), end],
        "no_timestamps_token_id": ID_OF["<|notimestamps|>"],
        "prev_sot_token_id": ID_OF["<|startofprev|>"],
        "max_initial_timestamp_index": 5,
        "is_multilingual": True,
        "alignment_heads": [[0, 1], [1, 0], [1, 3]],
        "pad_token_id": 0,
        "max_length": 96,
    } | changes
    settings = {name: value for name, value in settings.items() if value is not None}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    return folder
