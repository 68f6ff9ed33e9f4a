"""config.json files from transformers and the hub are read, and each of their keys is handled.

`tests/families/test_families.py` and similar tests check the values; this one checks for unknown keys.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import transformers

from jaxllm.errors import UserError
from jaxllm.families.families import FAMILIES, SAMPLING, WITHOUT_EFFECT, read_encoder, read_spec
from jaxllm.model.spec import Rope
from tests.families import test_dense_families, test_encoder_families, test_families, test_moe_families
from tests.families.released import (
    GPT_2,
    GRANITE_3B_A800M,
    LLAMA_2_7B,
    LLAMA_31_8B,
    MISTRAL_7B,
    PHI_3,
    PYTHIA,
    QWEN_3_06B,
    QWEN_3_30B_A3B,
    SMOLLM_3,
    STABLELM,
)

_CLASSES = {"Gemma3ForCausalLM": "Gemma3TextConfig", "GPT2LMHeadModel": "GPT2Config"}
_ARCHITECTURES = [family.architectures[0] for family in FAMILIES if family.images is None]
# Keys without effect, given the other keys of their default file.
_SILENT = {
    "use_sliding_window",  # without a size
    "sliding_window",  # unless it is used
    "max_window_layers",
    "sliding_window_pattern",  # layer_types replaces it
    "_sliding_window_pattern",
    "no_rope_layer_interval",  # no_rope_layers replaces it
    "original_max_position_embeddings",  # without a scaling
    "reorder_and_upcast_attn",  # precision only
    "num_nextn_predict_layers",  # layers after the last
    "n_group",  # for a topk_method without groups
    "topk_group",
    "local_attention",  # an odd number, after its even one
    "dropout_rate",  # of training
    "encoder_layerdrop",
    "decoder_layerdrop",
    "forced_eos_token_id",  # outputs end by length
    *("suppress_tokens", "begin_suppress_tokens", "median_filter_width", "classifier_proj_size"),
    *(f"mask_{of}_{key}" for of in ("time", "feature") for key in ("prob", "length", "min_masks")),  # of training
}


def _defaults(architecture: str) -> dict[str, Any]:
    """Return the config.json that transformers writes for the class's defaults."""
    name = _CLASSES.get(
        architecture, re.sub("For(CausalLM|RewardModel|ConditionalGeneration)|Model", "Config", architecture)
    )
    if not hasattr(transformers, name):
        pytest.skip(f"this transformers has no {name}")
    written = getattr(transformers, name)().to_dict() | {"architectures": [architecture]}
    if "num_experts_per_tok" in written:
        written["num_experts_per_tok"] = written["num_experts_per_tok"] or 2  # one class has no default
    return written


def _other_values(value: Any) -> list[Any]:
    match value:
        case bool():
            return [not value]
        case int():
            return [value + 1]
        case float():
            return [value * 1.5 + 0.25]
        case str():
            return ["something else"]
        case list():
            return [value[:-1] if value else [0]]
        case dict():
            return [value | {"surely_unknown": 1}]
        case _:
            return [True, 3, 0.5, "something"]


def read_all(config: dict[str, Any]) -> Any:
    """Return a config's decoder, and its encoder's if it has one."""
    spec, family = read_spec(config)
    encoder = read_encoder(config, family)
    return spec, encoder and (encoder.spec, encoder.num_mels)


@pytest.mark.parametrize("architecture", _ARCHITECTURES)
def test_what_transformers_writes_is_read_and_every_key_of_it_counts(architecture):
    written = _defaults(architecture)
    spec, _ = read_spec(written)
    width = next(written[key] for key in ("d_model", "hidden_size", "n_embd", "dim") if key in written)
    assert (spec.vocab_size, spec.width) == (written["vocab_size"], width)
    assert spec.tie_embeddings == written.get("tie_word_embeddings", True)
    passed_over = set()
    for key in written.keys() - WITHOUT_EFFECT:
        for other in _other_values(written[key]):
            try:
                if read_all(written | {key: other}) == read_all(written):
                    passed_over.add(key)
            except UserError:
                pass
    assert passed_over <= _SILENT


@pytest.mark.parametrize(
    ("config", "leftovers"),
    [
        # SmolLM2 and SmolLM3
        (LLAMA_31_8B, {"transformers.js_config": {"kv_cache_dtype": {"fp16": "float16"}}, "is_llama_config": True}),
        (SMOLLM_3, {"transformers.js_config": {"dtype": "q4f16"}, "pretraining_tp": 2, "no_rope_layer_interval": 4}),
        (LLAMA_2_7B, {"max_sequence_length": 2048, "pad_token_id": 0}),  # the first Llama
        # a file that transformers 4 wrote whole
        (LLAMA_2_7B, dict(SAMPLING) | {"do_sample": False, "max_length": 20, "pruned_heads": {}}),
        (MISTRAL_7B, {"_flash_attn_2_enabled": False}),
        # GPT-2 medium, large and XL; DistilGPT-2
        (GPT_2, {"n_special": 0, "predict_special_tokens": True, "output_past": True, "_num_labels": 1}),
        (PYTHIA, {"rope_theta": 10000, "partial_rotary_factor": 0.25}),
        (PYTHIA, {"custom_pipelines": {"text-generation": {"impl": "x.py"}}}),  # Dolly
        (STABLELM, {"num_heads": 16, "rope_pct": 0.25, "norm_eps": 1e-5, "rotary_scaling_factor": 1.0}),
        (PHI_3, {"full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False, "mlp_bias": False}),  # Phi-4-mini
        # Qwen3-Coder
        (QWEN_3_30B_A3B, {"qkv_bias": False, "use_qk_norm": True, "shared_expert_intermediate_size": 0}),
        (QWEN_3_30B_A3B, {"num_local_experts": 128}),
        (GRANITE_3B_A800M, {"position_embedding_type": "rope"}),
    ],
)
def test_what_stands_in_released_files_and_changes_nothing_is_accepted(config, leftovers):
    assert read_spec(config | leftovers) == read_spec(config)


@pytest.mark.parametrize(
    ("config", "change", "named"),
    [
        (LLAMA_2_7B, {"temperature": 0.6}, "move it to generation_config.json"),
        (LLAMA_2_7B, {"pruned_heads": {"0": [1]}}, "pruned_heads"),
        (STABLELM, {"rope_pct": 0.5}, "rope_pct"),
        (STABLELM, {"norm_eps": 1e-3}, "norm_eps"),
        (PYTHIA, {"rope_theta": 20000}, "rope_theta"),
        (PYTHIA, {"partial_rotary_factor": 1.0}, "partial_rotary_factor"),
        (QWEN_3_30B_A3B, {"qkv_bias": True}, "qkv_bias"),
        (QWEN_3_30B_A3B, {"shared_expert_intermediate_size": 768}, "shared_expert_intermediate_size"),
        (QWEN_3_30B_A3B, {"num_local_experts": 64}, "num_local_experts"),
        (GRANITE_3B_A800M, {"position_embedding_type": "nope"}, "position_embedding_type"),
        # Llama 4
        (
            {"architectures": ["Llama4ForConditionalGeneration"], "text_config": {}, "vision_config": {}},
            {},
            "not a model of text alone",
        ),
        # Qwen2.5 of a million tokens
        (QWEN_3_06B, {"dual_chunk_attention_config": {"chunk_size": 262144}}, "dual_chunk_attention_config"),
        *(
            case
            for module in (test_families, test_dense_families, test_moe_families, test_encoder_families)
            for case in module.REFUSED
        ),
    ],
)
def test_what_is_not_built_or_would_change_something_is_refused_by_name(config, change, named):
    with pytest.raises(UserError, match=re.escape(named)) as refusal:
        read_spec(config | change)
    assert "\n" not in str(refusal.value)


def test_yarns_amplitude_is_undone_where_the_file_says_so():
    scaling = {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32768,
        "attn_factor": 0.8782488562869419,  # DeepSeek-R1-0528-Qwen3-8B
    }
    rope = read_spec(QWEN_3_06B | {"rope_scaling": scaling, "max_position_embeddings": 131072})[0].ropes[0]
    assert isinstance(rope, Rope)
    assert rope.amplitude == pytest.approx(1.0)
