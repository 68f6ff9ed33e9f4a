"""Configurations of models that read images: a published file, defaults, and refusals by key."""

from __future__ import annotations

from typing import Any

import pytest

from jaxllm.errors import UserError
from jaxllm.families.families import read_images, read_spec
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
