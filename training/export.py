"""Writes the trained networks as Hugging Face folders."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors import safe_open
from safetensors.numpy import save_file
from tokenizers import Tokenizer

from jaxllm.media.sound import HOP, RATE, WINDOW
from training import captioner, corpus, dictation, encoder, recogniser, spoken, talks
from training.network import Llama, Shape, hugging_face_weights
from training.packing import END_OF_TEXT_ID, TURN_END_ID

# Rotary positions after the longest training row are untrained, so the model's limit is that length.
MAX_POSITIONS = 512
MAX_POSITIONS_WITH_PICTURE = 256  # the same for the model of shapes
TEMPERATURE = 0.5  # for generation_config.json: at it, sums are right and stories differ


def round_to_bfloat16(model: nnx.Module) -> None:
    """Round every weight to its stored precision, so that a later score is valid for the written folder."""
    for _, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        leaf[...] = leaf[...].astype(jnp.bfloat16).astype(jnp.float32)


def read_weights(model: Llama, folder: Path) -> None:
    """Load into the network the weights that `write_folder` wrote."""
    with safe_open(folder / "model.safetensors", "flax") as file:
        for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param)):
            name = ".".join(map(str, path))
            value = file.get_tensor(f"model.{name}" if name != "embed_tokens" else "model.embed_tokens.weight")
            turned = value.T if value.ndim == 2 and name != "embed_tokens" else value
            leaf[...] = turned.astype(jnp.float32)


def parameter_count(model: Llama) -> int:
    """Return the number of weights (the tied embedding counts once)."""
    return sum(weight.size for weight in hugging_face_weights(model).values())


def llama_config(shape: Shape) -> dict[str, Any]:
    """Return config.json of the network."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.width,
        "intermediate_size": shape.inner,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.key_heads,
        "head_dim": shape.head_width,
        "hidden_act": "silu",
        "max_position_embeddings": MAX_POSITIONS,
        "rms_norm_eps": shape.epsilon,
        "rope_theta": shape.rope_theta,
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "initializer_range": 0.02,
        "use_cache": True,
        "bos_token_id": END_OF_TEXT_ID,
        "eos_token_id": TURN_END_ID,
        "pad_token_id": END_OF_TEXT_ID,
        "torch_dtype": "bfloat16",
    }


def tokenizer_config() -> dict[str, Any]:
    """Return tokenizer_config.json: the special tokens and the chat template; no token is added to a plain text."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": corpus.END_OF_TEXT,
        "eos_token": corpus.TURN_END,
        "pad_token": corpus.END_OF_TEXT,
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": MAX_POSITIONS,
        "chat_template": corpus.CHAT_TEMPLATE,
    }


def write_folder(model: Llama, tokenizer: Tokenizer, folder: Path) -> None:
    """Write config, weights in bfloat16 and tokenizer to the folder."""
    _write_weights(hugging_face_weights(model), tokenizer, folder)
    generation = {
        "bos_token_id": END_OF_TEXT_ID,
        "eos_token_id": [TURN_END_ID, END_OF_TEXT_ID],
        "pad_token_id": END_OF_TEXT_ID,
        "temperature": TEMPERATURE,
    }
    write_json(folder / "config.json", llama_config(model.shape))
    write_json(folder / "tokenizer_config.json", tokenizer_config())
    write_json(folder / "generation_config.json", generation)


def write_embedder(model: encoder.Encoder, tokenizer: Tokenizer, sizes: Sequence[int], folder: Path) -> None:
    """Write the encoder in the format of sentence-transformers; `sizes` are the supported truncated sizes.

    The weights are stored as float16 and, as config.json specifies, computed in float32.
    """
    (folder / "1_Pooling").mkdir(parents=True, exist_ok=True)
    shape, name = model.shape, "sentence_transformers.models."
    weights = {name: np.asarray(value, np.float16) for name, value in encoder.hugging_face_weights(model).items()}
    save_file({name: np.ascontiguousarray(value) for name, value in weights.items()}, folder / "model.safetensors")
    (folder / "model.safetensors").chmod(0o644)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "architectures": ["BertModel"],
        "model_type": "bert",
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.width,
        "intermediate_size": shape.inner,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "hidden_act": "gelu",
        "max_position_embeddings": shape.positions,
        "type_vocab_size": 2,
        "layer_norm_eps": shape.epsilon,
        "pad_token_id": 0,
        "matryoshka_dimensions": list(sizes),
        "torch_dtype": "float32",
    }
    tokens = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    modules = (("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize"))
    pooling = {"word_embedding_dimension": shape.width, "pooling_mode_mean_tokens": True}
    for path, value in {
        "config.json": config,
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": shape.positions, **tokens,
        },
        "modules.json": [
            {"idx": idx, "name": str(idx), "path": path, "type": name + kind}
            for idx, (kind, path) in enumerate(modules)
        ],
        "1_Pooling/config.json": pooling,
        "sentence_bert_config.json": {"max_seq_length": shape.positions, "do_lower_case": False},
    }.items():  # fmt: skip
        write_json(folder / path, value)


def captioner_config(model: captioner.Captioner) -> dict[str, Any]:
    """Return config.json of the network."""
    tower, text = model.vision.shape, llama_config(model.decoder.shape)
    text["max_position_embeddings"] = MAX_POSITIONS_WITH_PICTURE
    return {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "text_config": {key: value for key, value in text.items() if key not in ("architectures", "torch_dtype")},
        "vision_config": {
            "model_type": "siglip_vision_model",
            "image_size": tower.side,
            "patch_size": tower.patch,
            "hidden_size": tower.width,
            "intermediate_size": tower.inner,
            "num_hidden_layers": tower.layers,
            "num_attention_heads": tower.heads,
            "hidden_act": "gelu_pytorch_tanh",
            "layer_norm_eps": tower.epsilon,
            "vision_use_head": False,
        },
        "image_token_index": talks.IMAGE_ID,
        "image_seq_length": tower.patches,
        "projector_hidden_act": "gelu",
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
        "tie_word_embeddings": True,
        "bos_token_id": talks.END_OF_TEXT_ID,
        "eos_token_id": talks.TURN_END_ID,
        "pad_token_id": talks.END_OF_TEXT_ID,
        "torch_dtype": "bfloat16",
    }


def write_captioner(model: captioner.Captioner, tokenizer: Tokenizer, folder: Path) -> None:
    """Write config, weights in bfloat16, tokenizer and preprocessing to the folder."""
    _write_weights(captioner.hugging_face_weights(model), tokenizer, folder)
    length = {"model_max_length": MAX_POSITIONS_WITH_PICTURE}
    own = tokenizer_config() | length | {"chat_template": talks.CHAT_TEMPLATE}
    processor = {"processor_class": "LlavaProcessor", "image_token": talks.IMAGE}
    processor |= {"patch_size": model.vision.shape.patch, "vision_feature_select_strategy": "full"}
    generation = {"bos_token_id": talks.END_OF_TEXT_ID, "eos_token_id": [talks.TURN_END_ID, talks.END_OF_TEXT_ID]}
    write_json(folder / "config.json", captioner_config(model))
    write_json(folder / "tokenizer_config.json", own)
    write_json(folder / "preprocessor_config.json", talks.processor_settings(model.vision.shape))
    write_json(folder / "processor_config.json", processor)
    write_json(folder / "generation_config.json", generation | {"temperature": 0.0})


def recogniser_config(shape: recogniser.Shape, ids: dictation.Ids) -> dict[str, Any]:
    """Return config.json of the network."""
    return {
        "architectures": ["WhisperForConditionalGeneration"],
        "model_type": "whisper",
        "vocab_size": shape.vocabulary,
        "num_mel_bins": shape.mels,
        "d_model": shape.width,
        "encoder_layers": shape.encoder_layers,
        "encoder_attention_heads": shape.heads,
        "encoder_ffn_dim": shape.inner,
        "decoder_layers": shape.decoder_layers,
        "decoder_attention_heads": shape.heads,
        "decoder_ffn_dim": shape.inner,
        "max_source_positions": shape.positions,
        "max_target_positions": shape.tokens,
        "activation_function": "gelu",
        "scale_embedding": False,
        "is_encoder_decoder": True,
        "tie_word_embeddings": True,
        "use_cache": True,
        "decoder_start_token_id": ids.start,
        "bos_token_id": ids.end,
        "eos_token_id": ids.end,
        "pad_token_id": ids.end,
        "torch_dtype": "bfloat16",
    }


def write_recogniser(model: recogniser.Recogniser, tokenizer: Tokenizer, folder: Path) -> None:
    """Write config, weights in bfloat16, tokenizer and preprocessing to the folder."""
    _write_weights(recogniser.hugging_face_weights(model), tokenizer, folder)
    shape, ids = model.encoder.shape, dictation.Ids(tokenizer)
    tokens = {
        "tokenizer_class": "WhisperTokenizer",
        **{f"{name}_token": dictation.END for name in ("bos", "eos", "unk", "pad")},
        "additional_special_tokens": list(dictation.MARKERS),
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": shape.tokens,
        "processor_class": "WhisperProcessor",
    }
    generation = {
        "bos_token_id": ids.end,
        "eos_token_id": ids.end,
        "pad_token_id": ids.end,
        "decoder_start_token_id": ids.start,
        "is_multilingual": True,
        "lang_to_id": {dictation.LANGUAGE: ids.language},
        "task_to_id": {"transcribe": ids.task},
        "no_timestamps_token_id": ids.no_times,
        "suppress_tokens": [ids.start, ids.language, ids.task, ids.no_speech],
        "begin_suppress_tokens": [],
        "alignment_heads": [[shape.decoder_layers - 1, recogniser.READ_HEAD]],
        "return_timestamps": False,
        "max_length": shape.tokens,
    }
    preprocessing = {
        "feature_extractor_type": "WhisperFeatureExtractor",
        "processor_class": "WhisperProcessor",
        "feature_size": shape.mels,
        "sampling_rate": RATE,
        "hop_length": HOP,
        "n_fft": WINDOW,
        "chunk_length": int(spoken.WINDOW_SECONDS),
        "n_samples": spoken.NUM_FRAMES * HOP,
        "nb_max_frames": spoken.NUM_FRAMES,
        "padding_side": "right",
        "padding_value": 0.0,
        "return_attention_mask": False,
    }
    write_json(folder / "config.json", recogniser_config(shape, ids))
    write_json(folder / "generation_config.json", generation)
    write_json(folder / "preprocessor_config.json", preprocessing)
    write_json(folder / "tokenizer_config.json", tokens)


def _write_weights(weights: Mapping[str, jax.Array], tokenizer: Tokenizer, folder: Path) -> None:
    """Write weights in bfloat16 and a tokenizer to the folder, which is made."""
    folder.mkdir(parents=True, exist_ok=True)
    stored = {name: np.ascontiguousarray(value.astype(jnp.bfloat16)) for name, value in weights.items()}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    tokenizer.save(str(folder / "tokenizer.json"))


def write_json(path: Path, value: Any) -> None:
    """Write the value as indented JSON."""
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
