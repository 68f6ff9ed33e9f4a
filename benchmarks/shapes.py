"""Models of well-known shapes with random weights: `python -m benchmarks.shapes qwen2.5-0.5b DIR`.

A step's cost depends on a model's shape, not on its weights, so these need no download. The folder has the files of a
released model (config.json, tokenizer.json, model.safetensors), so that any engine can load it.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tqdm import tqdm

from jaxllm.embedded import MODEL_DIR
from tests.support import paths

FOLDER = paths.ROOT / ".cache" / "shapes"
SHAPES: dict[str, dict[str, Any]] = {
    "qwen2.5-0.5b": {
        **{"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 896, "num_hidden_layers": 24},
        **{"num_attention_heads": 14, "num_key_value_heads": 2, "intermediate_size": 4864, "vocab_size": 151936},
        **{"max_position_embeddings": 32768, "rope_theta": 1000000.0, "rms_norm_eps": 1e-06, "hidden_act": "silu"},
        "tie_word_embeddings": True,
    },
    "llama-3.2-1b": {
        **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 2048, "num_hidden_layers": 16},
        **{"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 8192},
        **{"vocab_size": 128256, "max_position_embeddings": 131072, "rope_theta": 500000.0, "rms_norm_eps": 1e-05},
        **{"hidden_act": "silu", "tie_word_embeddings": True},
    },
}
SHAPES["llama-3.1-8b"] = SHAPES["llama-3.2-1b"] | {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "head_dim": 128,
    "intermediate_size": 14336,
    "tie_word_embeddings": False,
}
# From llama2.c: large enough to be bound by the device, small enough for minutes on a laptop.
SHAPES["stories42M"] = SHAPES["llama-3.2-1b"] | {
    **{"hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 8},
    **{"intermediate_size": 1376, "vocab_size": 32000, "max_position_embeddings": 1024, "rope_theta": 10000.0},
}
# With fewer layers than the published ones; all layers have the same kernels.
WITH_IMAGES: dict[str, dict[str, Any]] = {
    "qwen2.5-vl-7b": {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl",
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "num_hidden_layers": 4,  # of 28: each has the same kernels
        "vocab_size": 152064,
        "max_position_embeddings": 128000,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        "tie_word_embeddings": False,
        "image_token_id": 151655,
        "video_token_id": 151656,
        "vision_config": {
            "depth": 8,  # of 32
            "hidden_size": 1280,
            "intermediate_size": 3420,
            "num_heads": 16,
            "out_hidden_size": 3584,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "window_size": 112,
            "fullatt_block_indexes": [7],  # of 7, 15, 23 and 31
            "hidden_act": "silu",
        },
    },
    "llava-1.5-7b": {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "image_token_index": 32000,
        "projector_hidden_act": "gelu",
        "vision_feature_layer": -2,
        "vision_feature_select_strategy": "default",
        "text_config": {
            "model_type": "llama",
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "num_hidden_layers": 4,  # of 32
            "vocab_size": 32064,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
        },
        "vision_config": {
            "model_type": "clip_vision_model",
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_attention_heads": 16,
            "num_hidden_layers": 24,
            "image_size": 336,
            "patch_size": 14,
            "projection_dim": 768,
            "vocab_size": 32000,
        },
    },
}
DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a model of a well-known shape with random weights.")
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    options = parser.parse_args()
    write(options.shape, options.folder, options.dtype)


def folder_of(model: str, dtype: str, layers: int | None = None) -> Path:
    """Return the folder of the embedded model, or of a shape, which is written if missing.

    `layers`: a smaller number of layers, which compiles faster.
    """
    if model == "embedded":
        return MODEL_DIR
    depth = "" if layers is None else f"-{layers}-layers"
    return write(model, FOLDER / f"{model}{depth}-{dtype}", dtype, layers)


def write(shape: str, folder: Path, dtype: str = "bfloat16", layers: int | None = None) -> Path:
    """Write the model, unless `folder` already holds it; return the folder."""
    if (folder / "model.safetensors").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    config = SHAPES[shape] | {"torch_dtype": dtype, "bos_token_id": None, "eos_token_id": None}
    config["num_hidden_layers"] = layers or config["num_hidden_layers"]
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    tokenizer(config["vocab_size"]).save(str(folder / "tokenizer.json"))
    random = np.random.default_rng(0)
    tensors = {}
    for name, dims in tqdm(list(weights_of(config)), desc=f"{shape}, {dtype}", disable=None):
        if len(dims) == 1:
            tensor = np.full(dims, 0.0 if name.endswith("bias") else 1.0, np.float32)
        else:
            tensor = random.standard_normal(dims, np.float32) * 0.02
        tensors[name] = tensor.astype(DTYPES[dtype])
    unfinished = folder / "model.safetensors.part"
    save_file(tensors, str(unfinished), metadata={"format": "pt"})
    unfinished.rename(folder / "model.safetensors")
    return folder


def weights_of(config: dict[str, Any]) -> list[tuple[str, tuple[int, ...]]]:
    """Return every tensor of a Llama or Qwen2 checkpoint with its shape, named as by Hugging Face."""
    width, inner = config["hidden_size"], config["intermediate_size"]
    size = config.get("head_dim", width // config["num_attention_heads"])
    heads, shared = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    found: list[tuple[str, tuple[int, ...]]] = [("model.embed_tokens.weight", (config["vocab_size"], width))]
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for part, rows in (("q", heads), ("k", shared), ("v", shared)):
            found.append((f"{prefix}self_attn.{part}_proj.weight", (rows, width)))
            if config["model_type"] == "qwen2":
                found.append((f"{prefix}self_attn.{part}_proj.bias", (rows,)))
        found += [
            (f"{prefix}self_attn.o_proj.weight", (width, heads)),
            (f"{prefix}mlp.gate_proj.weight", (inner, width)),
            (f"{prefix}mlp.up_proj.weight", (inner, width)),
            (f"{prefix}mlp.down_proj.weight", (width, inner)),
            (f"{prefix}input_layernorm.weight", (width,)),
            (f"{prefix}post_attention_layernorm.weight", (width,)),
        ]
    return [*found, ("model.norm.weight", (width,))]


def tokenizer(size: int) -> Tokenizer:
    """Return a byte-level BPE of `size` tokens that joins pairs of earlier ones, so that every id has a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary, merges = {token: number for number, token in enumerate(alphabet)}, []
    texts = list(alphabet)
    for left in texts:  # grows during the loop
        for right in alphabet[:64]:
            joined = left + right
            if len(vocabulary) < size and joined not in vocabulary:
                vocabulary[joined] = len(vocabulary)
                merges.append((left, right))
                texts.append(joined)
        if len(vocabulary) == size:
            break
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return made


if __name__ == "__main__":
    main()
