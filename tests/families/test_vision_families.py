"""Configurations of models that read images: a published file, defaults, and refusals by key."""

from __future__ import annotations

from typing import Any

import pytest

from jaxllm.errors import UserError
from jaxllm.families.families import read_images, read_spec
from jaxllm.model.spec import LinearScaling
from tests.support.vision_models import llava_config

# llava-hf/llava-1.5-7b-hf, which leaves out the defaults of its classes.
LLAVA_7B: dict[str, Any] = {
    "architectures": ["LlavaForConditionalGeneration"],
    "ignore_index": -100,
    "image_token_index": 32000,
    "model_type": "llava",
    "pad_token_id": 32001,
    "projector_hidden_act": "gelu",
    "text_config": {
        "_name_or_path": "lmsys/vicuna-7b-v1.5",
        "architectures": ["LlamaForCausalLM"],
        "max_position_embeddings": 4096,
        "model_type": "llama",
        "rms_norm_eps": 1e-05,
        "torch_dtype": "float16",
        "vocab_size": 32064,
    },
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "transformers_version": "4.36.0.dev0",
    "vision_config": {
        "hidden_size": 1024,
        "image_size": 336,
        "intermediate_size": 4096,
        "model_type": "clip_vision_model",
        "num_attention_heads": 16,
        "num_hidden_layers": 24,
        "patch_size": 14,
        "projection_dim": 768,
        "vocab_size": 32000,
    },
    "vision_feature_layer": -2,
    "vision_feature_select_strategy": "default",
}
# Qwen/Qwen2.5-VL-7B-Instruct, without a text_config.
QWEN_25_7B: dict[str, Any] = {
    **{"architectures": ["Qwen2_5_VLForConditionalGeneration"], "attention_dropout": 0.0, "bos_token_id": 151643},
    **{"eos_token_id": 151645, "vision_start_token_id": 151652, "vision_end_token_id": 151653},
    **{"vision_token_id": 151654, "image_token_id": 151655, "video_token_id": 151656, "hidden_act": "silu"},
    **{"hidden_size": 3584, "initializer_range": 0.02, "intermediate_size": 18944, "max_position_embeddings": 128000},
    **{"max_window_layers": 28, "model_type": "qwen2_5_vl", "num_attention_heads": 28, "num_hidden_layers": 28},
    **{"num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 32768},
    **{"tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.41.2", "use_cache": True},
    **{"use_sliding_window": False, "vocab_size": 152064},
    "vision_config": {
        **{"depth": 32, "hidden_act": "silu", "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16},
        **{"in_chans": 3, "out_hidden_size": 3584, "patch_size": 14, "spatial_merge_size": 2, "window_size": 112},
        **{"spatial_patch_size": 14, "fullatt_block_indexes": [7, 15, 23, 31], "tokens_per_second": 2},
        "temporal_patch_size": 2,
    },
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
}
# Qwen/Qwen3-VL-4B-Instruct.
QWEN_3_4B: dict[str, Any] = {
    **{"architectures": ["Qwen3VLForConditionalGeneration"], "image_token_id": 151655, "model_type": "qwen3_vl"},
    **{"tie_word_embeddings": True, "transformers_version": "4.57.0.dev0", "video_token_id": 151656},
    **{"vision_end_token_id": 151653, "vision_start_token_id": 151652},
    "text_config": {
        **{"attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 151643, "dtype": "bfloat16"},
        **{"eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2560},
        **{"initializer_range": 0.02, "intermediate_size": 9728, "max_position_embeddings": 262144},
        **{"model_type": "qwen3_vl_text", "num_attention_heads": 32, "num_hidden_layers": 36},
        **{"num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_theta": 5000000, "tie_word_embeddings": True},
        "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
        **{"use_cache": True, "vocab_size": 151936},
    },
    "vision_config": {
        **{"deepstack_visual_indexes": [5, 11, 17], "depth": 24, "hidden_act": "gelu_pytorch_tanh"},
        **{"hidden_size": 1024, "in_channels": 3, "initializer_range": 0.02, "intermediate_size": 4096},
        **{"model_type": "qwen3_vl", "num_heads": 16, "num_position_embeddings": 2304, "out_hidden_size": 2560},
        **{"patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2},
    },
}


# google/gemma-3-4b-it, which leaves out the defaults of its classes.
GEMMA_3_4B: dict[str, Any] = {
    **{"architectures": ["Gemma3ForConditionalGeneration"], "boi_token_index": 255999, "eoi_token_index": 256000},
    **{"eos_token_id": [1, 106], "image_token_index": 262144, "initializer_range": 0.02, "mm_tokens_per_image": 256},
    **{"model_type": "gemma3", "torch_dtype": "bfloat16", "transformers_version": "4.50.0.dev0"},
    "text_config": {
        **{"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34},
        **{"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024},
    },
    "vision_config": {
        **{"hidden_size": 1152, "image_size": 896, "intermediate_size": 4304, "model_type": "siglip_vision_model"},
        **{"num_attention_heads": 16, "num_hidden_layers": 27, "patch_size": 14, "vision_use_head": False},
    },
}


def images_of(config: dict[str, Any]) -> Any:
    return read_images(config, *read_spec(config))


def test_a_published_file_is_read() -> None:
    spec, _ = read_spec(LLAVA_7B)
    assert (spec.num_layers, spec.width, spec.ffn_width, spec.vocab_size) == (32, 4096, 11008, 32064)
    assert spec.max_position == 4096 and not spec.tie_embeddings
    images = images_of(LLAVA_7B)
    own = images.spec
    assert images.placeholder == 32000 and (own.num_tokens, own.num_layers, own.out_width) == (576, 23, 4096)
    assert own.drops_class and own.activation == "quick_gelu"


def test_a_published_file_of_gemma_is_read() -> None:
    spec, _ = read_spec(GEMMA_3_4B)
    assert (spec.num_layers, spec.width, spec.num_heads, spec.num_kv_heads, spec.head_size) == (34, 2560, 8, 4, 256)
    assert spec.windows[:12] == (*[1024] * 5, None) * 2 and spec.max_position == 131072 and spec.tie_embeddings
    whole, local = spec.ropes[5], spec.ropes[0]
    assert whole is not None and (whole.theta, whole.scaling) == (1e6, LinearScaling(8.0))
    assert local is not None and (local.theta, local.scaling) == (1e4, None)
    images = images_of(GEMMA_3_4B)
    tower = images.spec.tower
    assert (images.spec.num_tokens, images.spec.row_width, images.placeholder) == (256, 2560, 262144)
    assert images.is_bidirectional and (tower.num_patches, tower.num_layers, tower.activation) == (
        4096,
        27,
        "gelu_tanh",
    )


def test_published_files_of_models_for_any_size_are_read() -> None:
    spec, _ = read_spec(QWEN_25_7B)
    rope = spec.ropes[0]
    assert rope is not None and (rope.theta, [rope.axes.count(axis) for axis in range(3)]) == (1e6, [16, 24, 24])
    assert (spec.num_layers, spec.width, spec.qkv_bias, spec.max_position) == (28, 3584, True, 128000)
    tower = images_of(QWEN_25_7B).spec
    assert (tower.window, tower.block, tower.full_layers, tower.row_width) == (4, 64, (7, 15, 23, 31), 3584)
    assert tower.sizes(16384)[:4] == (64, 128, 256, 384) and tower.sizes(1280)[-1] == 1280
    spec, _ = read_spec(QWEN_3_4B)
    rope = spec.ropes[0]
    assert rope is not None and (rope.theta, rope.axes[:6], rope.axes[57:]) == (
        5e6,
        (0, 1, 2, 0, 1, 2),
        (0, 1, 2, 0, 0, 0, 0),
    )
    assert spec.tie_embeddings and spec.qk_norm == "each head" and spec.head_size == 128
    images = images_of(QWEN_3_4B)
    assert (images.spec.positions, images.spec.row_width, images.placeholder) == (48, 4 * 2560, 151655)


@pytest.mark.parametrize(
    ("config", "changes", "why"),
    [
        (QWEN_25_7B, {"rope_scaling": {"type": "mrope", "mrope_section": [16, 24]}}, "mrope_section"),
        (QWEN_25_7B, {"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 25]}}, "mrope_section"),
        (QWEN_25_7B, {"rope_scaling": {"type": "mrope", "mrope_interleaved": True}}, "mrope_interleaved"),
        (QWEN_25_7B, {"unheard_of": 1}, "unheard_of"),
        (QWEN_25_7B, {"vision_config": QWEN_25_7B["vision_config"] | {"out_hidden_size": 9}}, "out_hidden_size"),
        (QWEN_25_7B, {"vision_config": QWEN_25_7B["vision_config"] | {"window_size": 9}}, "window_size"),
        (QWEN_25_7B, {"vision_config": QWEN_25_7B["vision_config"] | {"fullatt_block_indexes": [40]}}, "beyond 32"),
        (QWEN_25_7B, {"image_token_id": 10**6}, "image_token_id"),
        (QWEN_25_7B, {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128}}, "with images"),
        (GEMMA_3_4B, {"unheard_of": 1}, "unheard_of"),
        (GEMMA_3_4B, {"mm_tokens_per_image": 255}, "mm_tokens_per_image"),
        (GEMMA_3_4B, {"mm_tokens_per_image": 49}, "mm_tokens_per_image"),
        (GEMMA_3_4B, {"boi_token_index": 10**6}, "boi_token_index"),
        (GEMMA_3_4B, {"text_config": {"model_type": "llama"}}, "gemma3_text"),
        (GEMMA_3_4B, {"text_config": {"use_bidirectional_attention": True}}, "use_bidirectional_attention"),
        (GEMMA_3_4B, {"vision_config": {"model_type": "clip_vision_model"}}, "model_type"),
        (GEMMA_3_4B, {"vision_config": GEMMA_3_4B["vision_config"] | {"num_attention_heads": 7}}, "7 heads"),
        (QWEN_3_4B, {"unheard_of": 1}, "unheard_of"),
        (QWEN_3_4B, {"text_config": 5}, "text_config"),
        (QWEN_3_4B, {"text_config": QWEN_3_4B["text_config"] | {"unheard_of": 1}}, "unheard_of"),
        (QWEN_3_4B, {"vision_config": QWEN_3_4B["vision_config"] | {"num_position_embeddings": 50}}, "not a square"),
        (QWEN_3_4B, {"vision_config": QWEN_3_4B["vision_config"] | {"deepstack_visual_indexes": [5, 5]}}, "ascending"),
        (QWEN_3_4B, {"architectures": ["Qwen3VLMoeForConditionalGeneration"]}, "Qwen3VLMoe"),
    ],
)
def test_what_is_not_understood_of_any_size_is_refused(
    config: dict[str, Any], changes: dict[str, Any], why: str
) -> None:
    with pytest.raises(UserError, match=why):
        images_of(config | changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"text_config": {"model_type": "opt"}},
        {"text_config": [1]},
        {"vision_config": {"model_type": "dinov2"}},
        {"vision_config": LLAVA_7B["vision_config"] | {"num_channels": 4}},
        {"vision_config": LLAVA_7B["vision_config"] | {"unheard_of": 1}},
        {"vision_config": LLAVA_7B["vision_config"] | {"num_attention_heads": 7}},
        {"vision_feature_layer": 99},
        {"vision_feature_layer": 0},
        {"vision_feature_select_strategy": "other"},
        {"image_token_index": 10**6},
        {"projector_hidden_act": "other"},
        {"image_grid_pinpoints": [[1, 2]]},
        {"quantization_config": {"quant_method": "fp8"}},
    ],
    ids=str,
)
def test_what_is_not_understood_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(UserError):
        images_of(LLAVA_7B | changes)


def test_layers_of_features_are_concatenated() -> None:
    found = images_of(llava_config() | {"vision_feature_layer": [1, -1]}).spec
    assert found.features == (1, 3) and found.num_layers == 3
    with pytest.raises(UserError, match="full"):
        images_of(llava_config("siglip") | {"vision_feature_select_strategy": "default"})
