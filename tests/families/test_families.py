"""The table of families: published config.json files become the right Spec, and nothing in one is silently ignored."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest

from jaxllm.checkpoints.pooler_files import GENERATING
from jaxllm.families.families import FAMILIES, read_spec
from jaxllm.model.spec import BandScaling, LinearScaling, Rope, Spec, heads_per_shard
from tests.families.released import (
    CONFIGS,
    GEMMA_2_2B,
    GPT_2,
    LLAMA_2_7B,
    LLAMA_31_8B,
    MISTRAL_7B,
    OPT_125M,
    QWEN_3_06B,
    QWEN_25_05B,
    spec_of,
)
from tests.support.paths import GOLDEN, GOLDEN_POOLED, ROOT


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_published_configs_are_read(config):
    spec, family = read_spec(config)
    assert config["architectures"][0] in family.architectures
    layers = next(config[key] for key in ("num_hidden_layers", "n_layer", "n_layers") if key in config)
    assert spec.num_layers == len(spec.windows) == layers
    assert spec.num_heads % spec.num_kv_heads == 0
    assert hash(spec) == hash(spec_of(dict(reversed(config.items()))))


def test_llama_3_1():
    assert spec_of(LLAMA_31_8B) == Spec(
        num_layers=32,
        width=4096,
        num_heads=32,
        num_kv_heads=8,
        head_size=128,
        ffn_width=14336,
        vocab_size=128256,
        max_position=131072,
        windows=(None,) * 32,
        ropes=(Rope(128, 500000.0, BandScaling(8.0, 1.0, 4.0, 8192)),) * 32,
        attention_scale=128**-0.5,
        norm_eps=1e-5,
    )


def test_what_sets_the_other_families_apart():
    assert spec_of(MISTRAL_7B).windows == (4096,) * 32
    assert spec_of(MISTRAL_7B | {"sliding_window": None}).windows == (None,) * 32
    qwen = spec_of(QWEN_25_05B)
    assert (qwen.qkv_bias, qwen.out_bias, qwen.tie_embeddings, qwen.windows) == (True, False, True, (None,) * 24)
    windowed = spec_of(QWEN_25_05B | {"use_sliding_window": True, "max_window_layers": 20})
    assert windowed.windows == (None,) * 20 + (32768,) * 4
    qwen = spec_of(QWEN_3_06B)
    assert (qwen.qk_norm, qwen.head_size, qwen.qkv_bias) == ("each head", 128, False)
    gemma = spec_of(GEMMA_2_2B)
    assert gemma.windows == (4096, None) * 13
    assert (gemma.norm, gemma.norm_place, gemma.embed_scale) == ("rms+1", "sandwich", 48.0)
    assert (gemma.attention_softcap, gemma.logit_softcap, gemma.attention_scale) == (50.0, 30.0, 1 / 16)
    assert (gemma.activation, gemma.tie_embeddings) == ("gelu_tanh", True)
    gpt = spec_of(GPT_2)
    assert (gpt.norm, gpt.learned_positions, gpt.position_offset, gpt.ffn_width) == ("layer", True, 0, 3072)
    assert (gpt.mlp_gated, gpt.activation, gpt.mlp_bias, gpt.tie_embeddings) == (False, "gelu_tanh", True, True)
    opt = spec_of(OPT_125M)
    assert (opt.position_offset, opt.activation, opt.max_position, opt.norm_eps) == (2, "relu", 2048, 1e-5)


def test_both_spellings_of_the_rotary_settings_say_the_same():
    for older in (LLAMA_31_8B, LLAMA_2_7B, QWEN_3_06B):
        newer = {key: value for key, value in older.items() if key not in ("rope_theta", "rope_scaling")}
        scaling = older.get("rope_scaling") or {"rope_type": "default"}
        newer["rope_parameters"] = scaling | {"rope_theta": older.get("rope_theta", 10000.0)}
        assert spec_of(newer) == spec_of(older)


def test_linear_scaling_lengthens_the_context():
    spec = spec_of(LLAMA_2_7B | {"rope_scaling": {"type": "linear", "factor": 4.0}})
    assert spec.ropes == (Rope(128, scaling=LinearScaling(4.0)),) * 32
    assert spec.max_position == 16384


def test_keys_without_effect_and_empty_ones_are_accepted():
    assert spec_of(LLAMA_2_7B | {"torch_dtype": "float16", "some_day": None}) == spec_of(LLAMA_2_7B)


# Unsupported configs, with the text of their error; tested in test_released_configs.py.
REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (LLAMA_2_7B, {"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM"),
    (LLAMA_2_7B, {"architectures": None}, "none"),
    (LLAMA_2_7B, {"attention_sinks": 4}, "attention_sinks"),
    (LLAMA_2_7B, {"some_day": False}, "some_day"),
    (LLAMA_2_7B, {"quantization_config": {"quant_method": "quark"}}, "quark"),
    (LLAMA_2_7B, {"hidden_size": None}, "hidden_size"),
    (LLAMA_2_7B, {"hidden_size": "4096"}, "hidden_size"),
    (LLAMA_2_7B, {"num_hidden_layers": True}, "num_hidden_layers"),
    (LLAMA_2_7B, {"vocab_size": 0}, "vocab_size"),
    (LLAMA_2_7B, {"hidden_size": 4100}, "hidden_size"),
    (LLAMA_2_7B, {"head_dim": 127}, "127"),
    (LLAMA_2_7B, {"num_key_value_heads": 5}, "5 key-value heads"),
    (LLAMA_2_7B, {"hidden_act": "mish"}, "hidden_act"),
    (LLAMA_2_7B, {"rope_interleaved": True}, "rope_interleaved"),
    (LLAMA_2_7B, {"sliding_window": 4096}, "sliding_window"),
    (LLAMA_2_7B, {"rope_scaling": {"type": "proportional", "factor": 2.0}}, "proportional"),
    (LLAMA_2_7B, {"rope_scaling": {"rope_type": "linear", "factor": 0.5}}, "0.5"),
    (LLAMA_2_7B, {"rope_scaling": {"rope_type": "linear"}}, "factor"),
    (LLAMA_2_7B, {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "beta": 1}}, "beta"),
    (LLAMA_2_7B, {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    (LLAMA_31_8B, {"rope_parameters": {"rope_type": "default"}}, "contradict"),
    (QWEN_25_05B, {"use_mrope": True}, "use_mrope"),
    (QWEN_25_05B, {"layer_types": ["linear_attention"] * 24}, "linear_attention"),
    (QWEN_25_05B, {"layer_types": ["full_attention"] * 23}, "23"),
    (MISTRAL_7B, {"sliding_window": 0}, "sliding_window"),
    (GEMMA_2_2B, {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    (GEMMA_2_2B, {"sliding_window_size": 2048}, "sliding_window_size"),
    (GPT_2, {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
    (GPT_2, {"add_cross_attention": True}, "add_cross_attention"),
    (GPT_2, {"n_head": 7}, "7 heads"),
    (OPT_125M, {"do_layer_norm_before": False}, "do_layer_norm_before"),
    (OPT_125M, {"word_embed_proj_dim": 512}, "word_embed_proj_dim"),
]


def test_heads_are_divided_and_then_copied():
    spec = spec_of(LLAMA_31_8B)
    assert [heads_per_shard(spec, shards) for shards in (1, 4, 8, 16)] == [(32, 8), (8, 2), (4, 1), (2, 1)]


def test_only_the_table_knows_family_names():
    kinds = {
        folder: {json.loads(path.read_text())["model_type"] for path in folder.glob("*/config.json")}
        for folder in (GOLDEN, GOLDEN_POOLED)
    }
    families = {re.match(r"[a-z]+", name).group() for names in kinds.values() for name in names}
    assert {"llama", "gemma", "gpt", "opt", "bert", "modernbert"} <= families
    of_text = [family for family in FAMILIES if family.images is None and family.encoder is None]
    assert len([family for family in of_text if family.architectures[0].endswith(GENERATING)]) == len(kinds[GOLDEN])
    rooms = [ROOT / "jaxllm" / room for room in ("model", "checkpoints", "families")]
    modules = {path.relative_to(ROOT / "jaxllm").as_posix() for room in rooms for path in room.glob("*.py")}
    names = ("families", "dense_families", "moe_families", "encoder_families", "vision_families", "qwen_vl_families")
    names += ("gemma_vl_families", "audio_families", "seq2seq_families")
    table = {f"families/{name}.py" for name in names}
    assert table < modules
    for module in modules - table:
        said = {word for word in _words_of_code(ROOT / "jaxllm" / module) if word in families}
        if module in ("checkpoints/eagle_files.py", "families/config_fields.py", "families/family.py"):
            said -= {"llama"}  # a kind of rotary scaling, and the usual names of tensors
        if module == "checkpoints/pooler_files.py":
            said -= {"bert"}  # in the name of a configuration file of any model
        assert not said, f"{module} names {said}"


def _words_of_code(module: Path) -> set[str]:
    """Return the lower-case words in a module's names and strings, without docstrings and comments."""
    tree = ast.parse(module.read_text())
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    docstrings = {ast.get_docstring(node, clean=False) for node in ast.walk(tree) if isinstance(node, documented)}
    said: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value not in docstrings:
            said.append(node.value)
        said += [getattr(node, field) for field in ("id", "attr", "name", "arg") if hasattr(node, field)]
    words = (re.findall(r"[A-Z]?[a-z]+", text) for text in said if isinstance(text, str))
    return {word.lower() for found in words for word in found}
