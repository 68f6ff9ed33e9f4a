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
from tests.support.checkpoints import random_tensors

PLACEHOLDER = 1536  # the token after those of the included tokenizer
SIDE, PATCH = 28, 7  # 16 patches
TOWERS = ("clip", "siglip")
ANY_SIZE = ("qwen2_5_vl", "qwen3_vl")  # models that read images of any size
BIDIRECTIONAL = ("gemma3", "gemma3_deep")  # of two layers, and of six in the published pattern
AROUND = (PLACEHOLDER + 1, PLACEHOLDER + 2)  # of their images
VIDEO = PLACEHOLDER + 3
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% for part in message['content'] %}"
    "{{ '<image>' if part['type'] == 'image' else part['text'] }}"
    "{% endfor %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


GEMMA_TEMPLATE = TEMPLATE.replace("'<image>'", "'<|image_start|>'")
ANY_SIZE_TEMPLATE = TEMPLATE.replace(
    "'<image>' if",
    "'<|vision_start|><|video_pad|><|vision_end|>' if part['type'] == 'video' else "
    "'<|vision_start|><image><|vision_end|>' if",
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
    declared = images.spec.declare()
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
    write_tokenizer(folder)
    return folder


def any_size_config(kind: str, is_flat: bool = False) -> dict[str, Any]:
    """Return the config.json of a model of two layers, with a tower of three; `is_flat`: without a text_config."""
    is_windowed = kind == "qwen2_5_vl"
    rope = {"type": "mrope", "mrope_section": [2, 2, 2]}
    if not is_windowed:
        rope = {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [3, 2, 1]}
    text = {
        **{"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
        **{"num_key_value_heads": 2, "vocab_size": PLACEHOLDER + 4, "max_position_embeddings": 512},
        **{"rms_norm_eps": 1e-6, "rope_theta": 1000.0, "rope_scaling": rope, "hidden_act": "silu"},
        **({"use_sliding_window": False} if is_windowed else {"head_dim": 12, "attention_bias": False}),
    }
    tower: dict[str, Any] = {
        **{"model_type": kind, "depth": 3, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4},
        **{"patch_size": PATCH, "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 48},
    }
    if is_windowed:
        tower |= {"window_size": 28, "fullatt_block_indexes": [1], "hidden_act": "silu"}
    else:
        tower |= {"num_position_embeddings": 25, "deepstack_visual_indexes": [0, 1]}
        tower |= {"hidden_act": "gelu_pytorch_tanh"}
    name = {"qwen2_5_vl": "Qwen2_5_VL", "qwen3_vl": "Qwen3VL"}[kind]
    return {
        **{"architectures": [f"{name}ForConditionalGeneration"], "model_type": kind, "vision_config": tower},
        **{"image_token_id": PLACEHOLDER, "video_token_id": VIDEO, "vision_start_token_id": AROUND[0]},
        **{"vision_end_token_id": AROUND[1], "tie_word_embeddings": False, "eos_token_id": 2},
        **(text if is_flat else {"text_config": text | {"model_type": f"{kind}_text"}}),
    }


def any_size_settings(kind: str) -> dict[str, Any]:
    """Return the preprocessor_config.json: an image has 2 to 24 tokens."""
    least, most = 2 * (2 * PATCH) ** 2, 24 * (2 * PATCH) ** 2
    bounds: dict[str, Any] = {"min_pixels": least, "max_pixels": most}
    if kind == "qwen3_vl":
        bounds = {"size": {"shortest_edge": least, "longest_edge": most}, "image_mean": [0.5] * 3}
    shared = {"patch_size": PATCH, "merge_size": 2, "temporal_patch_size": 2}
    return {"image_processor_type": "Qwen2VLImageProcessorFast", **bounds, **shared}


def video_settings(kind: str) -> dict[str, Any]:
    """Return the video_preprocessor_config.json: a pair of frames has 2 to 24 tokens."""
    frames = 2 if kind == "qwen3_vl" else 1
    bounds = {"shortest_edge": 2 * frames * (2 * PATCH) ** 2, "longest_edge": 24 * frames * (2 * PATCH) ** 2}
    name = {"qwen2_5_vl": "Qwen2VLVideoProcessor", "qwen3_vl": "Qwen3VLVideoProcessor"}[kind]
    shared = {"patch_size": PATCH, "merge_size": 2, "temporal_patch_size": 2}
    return {"video_processor_type": name, "size": bounds, "do_sample_frames": False, **shared}


def write_any_size(folder: Path, kind: str, is_flat: bool = False) -> Path:
    """Write a random checkpoint with a tokenizer and a chat template; `is_flat`: as Qwen2.5-VL is published."""
    config = any_size_config(kind, is_flat)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps(any_size_settings(kind)))
    (folder / "video_preprocessor_config.json").write_text(json.dumps(video_settings(kind)))
    nested = any_size_config(kind)["text_config"]
    text = {key: value for key, value in nested.items() if key not in ("model_type", "rope_scaling")}
    architecture = {"qwen2_5_vl": "Qwen2ForCausalLM", "qwen3_vl": "Qwen3ForCausalLM"}[kind]
    tensors = random_tensors(text | {"architectures": [architecture], "tie_word_embeddings": False})
    if not is_flat:
        tensors = {name.replace("model.", "model.language_model."): values for name, values in tensors.items()}
    images = read_images(config, *read_spec(config))
    assert images is not None
    rng = np.random.default_rng(1)
    declared = images.spec.declare()
    for layer, weights in [(None, declared.top), *enumerate(declared.layers)]:
        for name, weight in weights.items():
            place = ("" if is_flat else "model.") + images.tensors.tensors[name].format(layer)
            tensors[place] = 0.3 * rng.standard_normal(weight.shape, np.float32)
    save_file(tensors, folder / "model.safetensors")
    write_tokenizer(folder, ANY_SIZE_TEMPLATE, ("<|vision_start|>", "<|vision_end|>", "<|video_pad|>"))
    return folder


def gemma_config(kind: str) -> dict[str, Any]:
    """Return the config.json of Gemma 3 with a tower of three layers; an image has 4 × 4 tokens."""
    text = {
        **{"model_type": "gemma3_text", "hidden_size": 48, "intermediate_size": 64, "num_attention_heads": 4},
        **{"num_hidden_layers": 2 if kind == "gemma3" else 6, "num_key_value_heads": 2, "head_dim": 12},
        **{"vocab_size": PLACEHOLDER + 4, "max_position_embeddings": 512, "query_pre_attn_scalar": 12},
        **{"sliding_window": 12, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "rope_theta": 1000.0},
        **({"sliding_window_pattern": 2} if kind == "gemma3" else {}),
    }
    tower: dict[str, Any] = {
        **{"model_type": "siglip_vision_model", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3},
        **{"num_attention_heads": 4, "image_size": 2 * SIDE, "patch_size": PATCH, "vision_use_head": False},
    }
    return {
        **{"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "mm_tokens_per_image": 16},
        **{"image_token_index": PLACEHOLDER, "boi_token_index": AROUND[0], "eoi_token_index": AROUND[1]},
        **{"text_config": text, "vision_config": tower, "eos_token_id": 2},
    }


def gemma_settings() -> dict[str, Any]:
    """Return the preprocessor_config.json."""
    unused = dict.fromkeys(("do_pan_and_scan", "pan_and_scan_max_num_crops", "do_convert_rgb"))
    size = {"height": 2 * SIDE, "width": 2 * SIDE}
    return {"image_processor_type": "Gemma3ImageProcessor", "size": size, "resample": 2, **unused}


def write_gemma(folder: Path, kind: str, older_names: bool = True) -> Path:
    """Write a random checkpoint; published ones have the older names."""
    config = gemma_config(kind)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps(gemma_settings()))
    text = {key: value for key, value in config["text_config"].items() if key != "model_type"}
    tensors = random_tensors(text | {"architectures": ["Gemma3ForCausalLM"]})
    tensors["model.embed_tokens.weight"] *= 0.05  # else a token's likeliest successor is itself
    if older_names:
        tensors = {f"language_model.{name}": values for name, values in tensors.items()}
    else:
        tensors = {name.replace("model.", "model.language_model."): values for name, values in tensors.items()}
    images = read_images(config, *read_spec(config))
    assert images is not None
    rng, declared = np.random.default_rng(1), images.spec.declare()
    for layer, weights in [(None, declared.top), *enumerate(declared.layers)]:
        for name, weight in weights.items():
            place = images.tensors.tensors[name].format(layer)
            place = place.replace("vision_tower.", "vision_tower.vision_model.") if older_names else f"model.{place}"
            values = 0.3 * rng.standard_normal(weight.shape, np.float32)
            tensors[place] = np.ascontiguousarray(values.T) if name == "project" else values
    save_file(tensors, folder / "model.safetensors")
    write_tokenizer(folder, GEMMA_TEMPLATE, ("<|image_start|>", "<|image_end|>", "<|video_pad|>"))
    return folder


def write_model(folder: Path, kind: str) -> Path:
    """Write a random checkpoint of a tower of `TOWERS`, or of a model of `ANY_SIZE` or `BIDIRECTIONAL`."""
    if kind in BIDIRECTIONAL:
        return write_gemma(folder, kind)
    return write_any_size(folder, kind) if kind in ANY_SIZE else write_llava(folder, kind)


def write_tokenizer(folder: Path, template: str = TEMPLATE, further: tuple[str, ...] = ()) -> None:
    """Write the included tokenizer with the placeholder of images and `further` tokens after it."""
    tokenizer = json.loads((MODEL_DIR / "tokenizer.json").read_text())
    first = tokenizer["added_tokens"][0]
    names = enumerate(("<image>", *further), PLACEHOLDER)
    tokenizer["added_tokens"] += [first | {"id": number, "content": name} for number, name in names]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = json.loads((MODEL_DIR / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": template}))
    shutil.copy(MODEL_DIR / "generation_config.json", folder)


def image(seed: int) -> Image.Image:
    """Return an image of random pixels and an odd size, from one pixel to more than the tower's side."""
    rng = np.random.default_rng(seed)
    height, width = (int(size) for size in rng.integers(1, 99, 2))
    coarse = rng.integers(0, 256, (4, 5, 3), np.uint8)
    return Image.fromarray(coarse).resize((width, height), resample=Image.Resampling.BILINEAR)


def video(seed: int, frames: int | None = None) -> np.ndarray:
    """Return a video of an odd size and 2 to 7 frames, uint8[T, H, W, 3]; each frame is another part of a picture."""
    rng = np.random.default_rng(seed)
    height, width, count = (int(size) for size in rng.integers((15, 15, 2), (80, 80, 8)))
    picture = np.asarray(image(seed).resize((2 * width, height)))
    return np.stack([picture[:, at : at + width] for at in rng.integers(0, width, frames or count)])


def around(kind: str) -> tuple[int, ...]:
    """Return the tokens before and after each image in prompts of a model; none for LLaVA."""
    return AROUND if kind in (*ANY_SIZE, *BIDIRECTIONAL) else ()


def video_prompts() -> list[Any]:
    """Return prompts for models of `ANY_SIZE`: with one video, several, images among them, and none."""

    def mixed(*parts: int | str) -> dict[str, Any]:
        """Numbers from 100 on are seeds of videos, others of images; texts are token ids."""
        ids: list[int] = []
        for part in parts:
            if isinstance(part, str):
                ids += map(int, part.split())
            else:
                ids += [AROUND[0], VIDEO if part >= 100 else PLACEHOLDER, AROUND[1]]
        seeds = [part for part in parts if isinstance(part, int)]
        films = [(video(seed), {"fps": 2.0 + seed % 3}) for seed in seeds if seed >= 100]
        media = {"video": films, "image": [image(seed) for seed in seeds if seed < 100]}
        return {"prompt_token_ids": ids, "multi_modal_data": media}

    return [
        mixed("5 6 7", 100, "8 9"),
        mixed(101, 2, "9 10", 102, "11"),
        [4, 5, 6, 7, 8],
        mixed("5 6", 3, "1 20 30", 103, "2 40 50 60"),
        prompts("qwen2_5_vl")[0],
    ]


def prompts(kind: str = "clip") -> list[Any]:
    """Return prompts with no image, with one to four, and with images between turns."""
    before, after = list(around(kind)[:1]), list(around(kind)[1:])

    def mixed(*parts: int | str) -> dict[str, Any]:
        """Numbers are seeds of images, texts token ids."""
        ids = [
            token
            for part in parts
            for token in ([*before, PLACEHOLDER, *after] if isinstance(part, int) else map(int, part.split()))
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
