"""The table of families: published config.json files become the right Spec, and nothing in one is silently ignored."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest

import jaxllm.model
from jaxllm.model.families import FAMILIES, read_spec
from jaxllm.model.pooler_files import GENERATING
from jaxllm.model.spec import BandScaling, LinearScaling, Rope, Spec, heads_per_shard
from tests.support.paths import GOLDEN, GOLDEN_POOLED

# As published on the hub, in the form of transformers 4; keys without effect are shortened to one of each kind.
LLAMA_31_8B = {
    **{"architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0},
    **{"bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009], "hidden_act": "silu", "hidden_size": 4096},
    **{"initializer_range": 0.02, "intermediate_size": 14336, "max_position_embeddings": 131072, "mlp_bias": False},
    **{"model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8},
    **{"pretraining_tp": 1, "rms_norm_eps": 1e-05},
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.42.3",
    "use_cache": True,
    "vocab_size": 128256,
}
LLAMA_2_7B = {
    **{"architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 11008},
    **{"max_position_embeddings": 4096, "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32},
    **{"rms_norm_eps": 1e-05, "rope_scaling": None, "tie_word_embeddings": False, "vocab_size": 32000},
}
MISTRAL_7B = LLAMA_2_7B | {
    **{"architectures": ["MistralForCausalLM"], "intermediate_size": 14336, "max_position_embeddings": 32768},
    **{"num_key_value_heads": 8, "rope_theta": 10000.0, "sliding_window": 4096},
}
QWEN_25_05B = {
    **{"architectures": ["Qwen2ForCausalLM"], "hidden_act": "silu", "hidden_size": 896, "intermediate_size": 4864},
    **{"max_position_embeddings": 32768, "max_window_layers": 24, "num_attention_heads": 14, "num_hidden_layers": 24},
    **{"num_key_value_heads": 2, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 32768},
    **{"tie_word_embeddings": True, "use_mrope": False, "use_sliding_window": False, "vocab_size": 151936},
}
QWEN_3_06B = {
    **{"architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "head_dim": 128, "hidden_act": "silu"},
    **{"hidden_size": 1024, "intermediate_size": 3072, "max_position_embeddings": 40960, "max_window_layers": 28},
    **{"num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8, "rms_norm_eps": 1e-06},
    **{"rope_scaling": None, "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": True},
    **{"use_sliding_window": False, "vocab_size": 151936},
}
GEMMA_2_2B = {
    **{"architectures": ["Gemma2ForCausalLM"], "attention_bias": False, "attn_logit_softcapping": 50.0},
    **{"cache_implementation": "hybrid", "final_logit_softcapping": 30.0, "head_dim": 256},
    **{"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 2304},
    **{"intermediate_size": 9216, "max_position_embeddings": 8192, "num_attention_heads": 8, "num_hidden_layers": 26},
    **{"num_key_value_heads": 4, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_theta": 10000.0},
    **{"sliding_window": 4096, "vocab_size": 256000},
}
GPT_2 = {
    **{"activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1},
    **{"layer_norm_epsilon": 1e-05, "n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024},
    "summary_first_dropout": 0.1,
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
    "vocab_size": 50257,
}
OPT_125M = {
    **{"_remove_final_layer_norm": False, "activation_dropout": 0.0, "activation_function": "relu"},
    **{"architectures": ["OPTForCausalLM"], "do_layer_norm_before": True, "ffn_dim": 3072, "hidden_size": 768},
    **{"init_std": 0.02, "max_position_embeddings": 2048, "num_attention_heads": 12, "num_hidden_layers": 12},
    **{"prefix": "</s>", "vocab_size": 50272, "word_embed_proj_dim": 768},
}
PUBLISHED = [LLAMA_31_8B, LLAMA_2_7B, MISTRAL_7B, QWEN_25_05B, QWEN_3_06B, GEMMA_2_2B, GPT_2, OPT_125M]


def _spec(config: dict) -> Spec:
    return read_spec(config)[0]


@pytest.mark.parametrize("config", PUBLISHED, ids=lambda config: config["architectures"][0])
def test_published_configs_are_read(config):
    spec, family = read_spec(config)
    assert config["architectures"][0] in family.architectures
    assert spec.num_layers == len(spec.windows) == config.get("num_hidden_layers", config.get("n_layer"))
    assert spec.num_heads % spec.num_kv_heads == 0
    assert hash(spec) == hash(_spec(dict(reversed(config.items()))))


def test_llama_3_1():
    assert _spec(LLAMA_31_8B) == Spec(
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
    assert _spec(MISTRAL_7B).windows == (4096,) * 32
    assert _spec(MISTRAL_7B | {"sliding_window": None}).windows == (None,) * 32
    qwen = _spec(QWEN_25_05B)
    assert (qwen.qkv_bias, qwen.out_bias, qwen.tie_embeddings, qwen.windows) == (True, False, True, (None,) * 24)
    windowed = _spec(QWEN_25_05B | {"use_sliding_window": True, "max_window_layers": 20})
    assert windowed.windows == (None,) * 20 + (32768,) * 4
    qwen = _spec(QWEN_3_06B)
    assert (qwen.qk_norm, qwen.head_size, qwen.qkv_bias) == ("each head", 128, False)
    gemma = _spec(GEMMA_2_2B)
    assert gemma.windows == (4096, None) * 13
    assert (gemma.norm, gemma.norm_place, gemma.embed_scale) == ("rms+1", "sandwich", 48.0)
    assert (gemma.attention_softcap, gemma.logit_softcap, gemma.attention_scale) == (50.0, 30.0, 1 / 16)
    assert (gemma.activation, gemma.tie_embeddings) == ("gelu_tanh", True)
    gpt = _spec(GPT_2)
    assert (gpt.norm, gpt.learned_positions, gpt.position_offset, gpt.ffn_width) == ("layer", True, 0, 3072)
    assert (gpt.mlp_gated, gpt.activation, gpt.mlp_bias, gpt.tie_embeddings) == (False, "gelu_tanh", True, True)
    opt = _spec(OPT_125M)
    assert (opt.position_offset, opt.activation, opt.max_position, opt.norm_eps) == (2, "relu", 2048, 1e-5)


def test_both_spellings_of_the_rotary_settings_say_the_same():
    for older in (LLAMA_31_8B, LLAMA_2_7B, QWEN_3_06B):
        newer = {key: value for key, value in older.items() if key not in ("rope_theta", "rope_scaling")}
        scaling = older.get("rope_scaling") or {"rope_type": "default"}
        newer["rope_parameters"] = scaling | {"rope_theta": older.get("rope_theta", 10000.0)}
        assert _spec(newer) == _spec(older)


def test_linear_scaling_lengthens_the_context():
    spec = _spec(LLAMA_2_7B | {"rope_scaling": {"type": "linear", "factor": 4.0}})
    assert spec.ropes == (Rope(128, scaling=LinearScaling(4.0)),) * 32
    assert spec.max_position == 16384


def test_keys_without_effect_and_empty_ones_are_accepted():
    assert _spec(LLAMA_2_7B | {"torch_dtype": "float16", "some_day": None}) == _spec(LLAMA_2_7B)


# What is not built, and how it is refused: test_released_configs.py.
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
    spec = _spec(LLAMA_31_8B)
    assert [heads_per_shard(spec, shards) for shards in (1, 4, 8, 16)] == [(32, 8), (8, 2), (4, 1), (2, 1)]


def test_only_the_table_knows_family_names():
    kinds = {
        folder: {json.loads(path.read_text())["model_type"] for path in folder.glob("*/config.json")}
        for folder in (GOLDEN, GOLDEN_POOLED)
    }
    families = {re.match(r"[a-z]+", name).group() for names in kinds.values() for name in names}
    assert {"llama", "gemma", "gpt", "opt", "bert", "modernbert"} <= families
    assert len([family for family in FAMILIES if family.architectures[0].endswith(GENERATING)]) == len(kinds[GOLDEN])
    folder = Path(jaxllm.model.__file__).parent
    table = {folder / f"{name}.py" for name in ("families", "dense_families", "moe_families", "encoder_families")}
    for module in sorted(set(folder.glob("*.py")) - table):
        said = {word for word in _words_of_code(module) if word in families}
        if module.name in ("config_fields.py", "eagle_files.py", "family.py"):
            # A way to scale rotations is called so, and so are heads of any model and the names that most tensors have.
            said -= {"llama"}
        if module.name == "pooler_files.py":
            said -= {"bert"}  # a file is called so, whatever the model
        assert not said, f"{module.name} names {said}"


def _words_of_code(module: Path) -> set[str]:
    """The lower-case words in a module's names and strings, those of docstrings and comments aside."""
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
