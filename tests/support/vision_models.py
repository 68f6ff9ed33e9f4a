"""Random models that read images, written as published checkpoints, and images of odd sizes. All follow from seeds."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from safetensors.numpy import save_file

from jaxllm.embedded import MODEL_DIR
from jaxllm.families.families import read_images, read_spec
from jaxllm.model import vision
from tests.support.checkpoints import random_tensors

PLACEHOLDER = 1536  # the token after those of the included tokenizer
SIDE, PATCH = 28, 7  # 16 patches
TOWERS = ("clip", "siglip")
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% for part in message['content'] %}"
    "{{ '<image>' if part['type'] == 'image' else part['text'] }}"
    "{% endfor %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def llava_config(tower: str = "clip", text: str = "llama") -> dict[str, Any]:
    """Return the config.json of a model of two layers, with a tower of three."""
    is_clip = tower == "clip"
    text_config: dict[str, Any] = {
        **{"model_type": text, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": PLACEHOLDER + 4},
        **{"max_position_embeddings": 512, "rms_norm_eps": 1e-5, "tie_word_embeddings": False},
    }
    vision_config: dict[str, Any] = {
        **{"model_type": f"{tower}_vision_model", "hidden_size": 32, "intermediate_size": 48},
        **{"num_attention_heads": 4, "num_hidden_layers": 3, "image_size": SIDE, "patch_size": PATCH},
        **({"projection_dim": 16} if is_clip else {"vision_use_head": False}),
    }
    return {
        **{"architectures": ["LlavaForConditionalGeneration"], "model_type": "llava", "image_token_index": PLACEHOLDER},
        **{"text_config": text_config, "vision_config": vision_config, "projector_hidden_act": "gelu"},
        **{"vision_feature_select_strategy": "default" if is_clip else "full", "vision_feature_layer": -2},
        **{"tie_word_embeddings": False, "eos_token_id": 2},
    }


def processor_settings(tower: str = "clip") -> dict[str, Any]:
    """Return the preprocessor_config.json."""
    square = {"height": SIDE, "width": SIDE}
    if tower == "clip":
        return {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": SIDE}, "crop_size": square}
    return {"image_processor_type": "SiglipImageProcessor", "size": square}


def write_llava(folder: Path, tower: str = "clip", text: str = "llama", older_names: bool = False) -> Path:
    """Write a random checkpoint with a tokenizer and a chat template; `older_names` are those before transformers 5."""
    config = llava_config(tower, text)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps(processor_settings(tower)))
    architecture = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2"}[text]
    own = {key: value for key, value in config["text_config"].items() if key != "model_type"}
    tensors = random_tensors(own | {"architectures": [f"{architecture}ForCausalLM"]})
    tensors = {f"language_model.{name}": values for name, values in tensors.items()}
    spec, family = read_spec(config)
    images = read_images(config | {"vision_feature_layer": -1}, spec, family)  # with all layers
    assert images is not None
    rng = np.random.default_rng(1)
    declared = vision.declare(images.spec)
    for layer, weights in [(None, declared.top), *enumerate(declared.layers)]:
        for name, weight in weights.items():
            place = images.tensors.tensors[name].format(layer)
            if older_names:
                place = place.replace("vision_tower.", "vision_tower.vision_model.")
            tensors[place] = 0.3 * rng.standard_normal(weight.shape, np.float32)
    stem = "vision_tower.vision_model." if older_names else "vision_tower."
    for name in ("post_layernorm.weight", "post_layernorm.bias"):
        tensors[stem + name] = np.ones(32, np.float32)
    save_file(tensors, folder / "model.safetensors")
    _write_tokenizer(folder)
    return folder


def _write_tokenizer(folder: Path) -> None:
    tokenizer = json.loads((MODEL_DIR / "tokenizer.json").read_text())
    image = tokenizer["added_tokens"][0] | {"id": PLACEHOLDER, "content": "<image>"}
    tokenizer["added_tokens"].append(image)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = json.loads((MODEL_DIR / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": TEMPLATE}))
    shutil.copy(MODEL_DIR / "generation_config.json", folder)


def image(seed: int) -> Image.Image:
    """Return an image of random pixels and an odd size, from one pixel to more than the tower's side."""
    rng = np.random.default_rng(seed)
    height, width = (int(size) for size in rng.integers(1, 99, 2))
    coarse = rng.integers(0, 256, (4, 5, 3), np.uint8)
    return Image.fromarray(coarse).resize((width, height), resample=Image.Resampling.BILINEAR)


def prompts() -> list[Any]:
    """Return prompts with no image, with one to four, and with images between turns."""

    def mixed(*parts: int | str) -> dict[str, Any]:
        """Numbers are seeds of images, texts token ids."""
        ids = [
            token for part in parts for token in ([PLACEHOLDER] if isinstance(part, int) else map(int, part.split()))
        ]
        return {
            "prompt_token_ids": ids,
            "multi_modal_data": {"image": [image(part) for part in parts if isinstance(part, int)]},
        }

    return [
        mixed(1, "5 6 7"),
        mixed("5 6", 2, "9 10", 3, "11"),
        [4, 5, 6, 7, 8],
        mixed(4, 5, 6, "1 20 30", 7, "2 40 50 60"),
        mixed("1 70 80", 8, "2 1 90", 1, "2 100", 3, "5"),
        mixed("7 " * 40, 9, "7 8 " * 20),
    ]
