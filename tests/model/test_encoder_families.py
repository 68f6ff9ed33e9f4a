"""Published config.json files of models that embed and classify become the right Spec and pooler."""

from __future__ import annotations

from typing import Any

import pytest

from jaxllm.model import decoder
from jaxllm.model.families import read_spec
from jaxllm.model.pooler import Dense, Pooler
from jaxllm.model.pooler_files import read_pooler
from jaxllm.model.spec import Rope, Spec
from tests.model.test_families import LLAMA_2_7B, QWEN_3_06B

BERT: dict[str, Any] = {
    **{"architectures": ["BertForMaskedLM"], "attention_probs_dropout_prob": 0.1, "gradient_checkpointing": False},
    **{"hidden_act": "gelu", "hidden_dropout_prob": 0.1, "hidden_size": 768, "initializer_range": 0.02},
    **{"intermediate_size": 3072, "layer_norm_eps": 1e-12, "max_position_embeddings": 512, "model_type": "bert"},
    **{"num_attention_heads": 12, "num_hidden_layers": 12, "pad_token_id": 0, "position_embedding_type": "absolute"},
    **{"transformers_version": "4.6.0.dev0", "type_vocab_size": 2, "use_cache": True, "vocab_size": 30522},
}
MULTILINGUAL_BERT = BERT | {
    **{"directionality": "bidi", "pooler_fc_size": 768, "pooler_num_attention_heads": 12, "pooler_num_fc_layers": 3},
    **{"pooler_size_per_head": 128, "pooler_type": "first_token_transform", "vocab_size": 119547},
}
MINILM = BERT | {
    **{"_name_or_path": "nreimers/MiniLM-L6-H384-uncased", "architectures": ["BertModel"], "hidden_size": 384},
    **{"intermediate_size": 1536, "num_hidden_layers": 6},
}
MS_MARCO = MINILM | {
    **{"architectures": ["BertForSequenceClassification"], "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}},
    "sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity",
    "sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity", "version": "4.0.1"},
}
MPNET = {
    **{"architectures": ["MPNetForMaskedLM"], "attention_probs_dropout_prob": 0.1, "bos_token_id": 0},
    **{"eos_token_id": 2, "hidden_act": "gelu", "hidden_dropout_prob": 0.1, "hidden_size": 768},
    **{"initializer_range": 0.02, "intermediate_size": 3072, "layer_norm_eps": 1e-05, "model_type": "mpnet"},
    **{"max_position_embeddings": 514, "num_attention_heads": 12, "num_hidden_layers": 12, "pad_token_id": 1},
    **{"relative_attention_num_buckets": 32, "vocab_size": 30527},
}
BGE_M3 = BERT | {
    **{"architectures": ["XLMRobertaModel"], "bos_token_id": 0, "classifier_dropout": None, "eos_token_id": 2},
    **{"hidden_size": 1024, "intermediate_size": 4096, "layer_norm_eps": 1e-05, "max_position_embeddings": 8194},
    **{"num_attention_heads": 16, "num_hidden_layers": 24, "output_past": True, "pad_token_id": 1},
    **{"torch_dtype": "float32", "type_vocab_size": 1, "vocab_size": 250002},
}
DISTILBERT_SST2 = {
    **{"activation": "gelu", "architectures": ["DistilBertForSequenceClassification"], "attention_dropout": 0.1},
    **{"dim": 768, "dropout": 0.1, "finetuning_task": "sst-2", "hidden_dim": 3072, "initializer_range": 0.02},
    **{"id2label": {"0": "NEGATIVE", "1": "POSITIVE"}, "label2id": {"NEGATIVE": 0, "POSITIVE": 1}},
    **{"max_position_embeddings": 512, "model_type": "distilbert", "n_heads": 12, "n_layers": 6, "output_past": True},
    **{"pad_token_id": 0, "qa_dropout": 0.1, "seq_classif_dropout": 0.2, "sinusoidal_pos_embds": False},
    **{"tie_weights_": True, "vocab_size": 30522},
}
MODERNBERT = {
    **{"architectures": ["ModernBertForMaskedLM"], "attention_bias": False, "attention_dropout": 0.0},
    **{"bos_token_id": 50281, "classifier_activation": "gelu", "classifier_bias": False, "classifier_dropout": 0.0},
    **{"classifier_pooling": "mean", "cls_token_id": 50281, "decoder_bias": True, "deterministic_flash_attn": False},
    **{
        "embedding_dropout": 0.0,
        "eos_token_id": 50282,
        "global_attn_every_n_layers": 3,
        "gradient_checkpointing": False,
    },
    **{"global_rope_theta": 160000.0, "hidden_activation": "gelu", "hidden_size": 768, "initializer_range": 0.02},
    **{"initializer_cutoff_factor": 2.0, "intermediate_size": 1152, "layer_norm_eps": 1e-05, "local_attention": 128},
    **{"local_rope_theta": 10000.0, "max_position_embeddings": 8192, "mlp_bias": False, "mlp_dropout": 0.0},
    **{"model_type": "modernbert", "norm_bias": False, "norm_eps": 1e-05, "num_attention_heads": 12},
    **{"num_hidden_layers": 22, "pad_token_id": 50283, "position_embedding_type": "absolute", "sep_token_id": 50282},
    **{"tie_word_embeddings": True, "torch_dtype": "float32", "vocab_size": 50368},
}
NOMIC = {
    **{"activation_function": "swiglu", "architectures": ["NomicBertModel"], "attn_pdrop": 0.0, "bos_token_id": None},
    **{"auto_map": {"AutoModel": "nomic-ai/nomic-bert-2048--modeling_hf_nomic_bert.NomicBertModel"}, "causal": False},
    **{"dense_seq_output": True, "embd_pdrop": 0.0, "eos_token_id": None, "fused_bias_fc": True},
    **{"fused_dropout_add_ln": True, "initializer_range": 0.02, "layer_norm_epsilon": 1e-12, "mlp_fc1_bias": False},
    **{"max_trained_positions": 2048, "mlp_fc2_bias": False, "model_type": "nomic_bert", "n_embd": 768, "n_head": 12},
    **{"n_inner": 3072, "n_layer": 12, "n_positions": 8192, "pad_vocab_size_multiple": 64, "parallel_block": False},
    **{"parallel_block_tied_norm": False, "prenorm": False, "qkv_proj_bias": False, "reorder_and_upcast_attn": False},
    **{"resid_pdrop": 0.0, "rotary_emb_base": 1000, "rotary_emb_fraction": 1.0, "rotary_emb_interleaved": False},
    **{"rotary_emb_scale_base": None, "rotary_scaling_factor": None, "scale_attn_by_inverse_layer_idx": False},
    **{"scale_attn_weights": True, "summary_activation": None, "summary_first_dropout": 0.0, "use_cache": True},
    **{"summary_proj_to_labels": True, "summary_type": "cls_index", "summary_use_proj": True, "type_vocab_size": 2},
    **{"use_flash_attn": True, "use_rms_norm": False, "use_xentropy": True, "vocab_size": 30528},
}
QWEN_3_EMBEDDING = QWEN_3_06B | {"max_position_embeddings": 32768, "vocab_size": 151669}
EMBEDDING_GEMMA = {
    **{"_sliding_window_pattern": 6, "architectures": ["Gemma3TextModel"], "attention_bias": False},
    **{"attn_logit_softcapping": None, "bos_token_id": 2, "dtype": "float32", "eos_token_id": 1, "head_dim": 256},
    **{"final_logit_softcapping": None, "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 768},
    **{"intermediate_size": 1152, "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 4},
    **{"max_position_embeddings": 2048, "model_type": "gemma3_text", "num_attention_heads": 3, "num_hidden_layers": 24},
    **{"num_key_value_heads": 1, "pad_token_id": 0, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06},
    **{"rope_local_base_freq": 10000.0, "rope_scaling": None, "rope_theta": 1000000.0, "sliding_window": 512},
    **{"use_bidirectional_attention": True, "vocab_size": 262144},
}
REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (BERT, {"position_embedding_type": "relative_key"}, "relative_key"),
    (BERT, {"is_decoder": True}, "is_decoder"),
    (BERT, {"num_attention_heads": 11}, "11 heads"),
    (BGE_M3, {"max_position_embeddings": 2}, "max_position_embeddings"),
    (BGE_M3, {"pad_token_id": -7}, "max_position_embeddings"),
    (MPNET, {"relative_attention_num_buckets": 16}, "relative_attention_num_buckets"),
    (MODERNBERT, {"norm_bias": True}, "norm_bias"),
    (MODERNBERT, {"layer_norm_eps": 1e-6}, "layer_norm_eps"),
    (MODERNBERT, {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_scaling"),
    (NOMIC, {"prenorm": True}, "prenorm"),
    (NOMIC, {"num_experts": 8}, "num_experts"),
    (NOMIC, {"activation_function": "gelu"}, "activation_function"),
]


def _spec(config: dict[str, Any], max_model_len: int | None = None) -> Spec:
    return read_spec(config, max_model_len)[0]


def _pooler(config: dict[str, Any], tmp_path: Any, runner: str = "auto") -> Pooler | None:
    return read_pooler(tmp_path, config, *read_spec(config), runner)


def test_what_sets_each_family_apart():
    bert = _spec(BERT)
    assert (bert.is_causal, bert.norm_place, bert.embed_norm, bert.final_norm) == (False, "after", True, False)
    assert (bert.learned_positions, bert.token_types, bert.norm_eps, bert.activation) == (True, 2, 1e-12, "gelu")
    assert _spec(MULTILINGUAL_BERT).vocab_size == 119547
    assert (_spec(MINILM).head_size, _spec(MINILM).num_layers) == (32, 6)
    bge = _spec(BGE_M3)
    assert (bge.max_position, bge.position_offset, bge.token_types) == (8192, 2, 1)
    mpnet = _spec(MPNET)
    assert (mpnet.max_position, mpnet.position_offset, mpnet.token_types, mpnet.relative_buckets) == (512, 2, 0, 32)
    distil = _spec(DISTILBERT_SST2)
    assert (distil.ffn_width, distil.token_types, distil.norm_eps) == (3072, 0, 1e-12)
    modern = _spec(MODERNBERT)
    assert (modern.is_causal, modern.norm_place, modern.final_norm, modern.mlp_gated) == (False, "pre", True, True)
    assert modern.windows == ((None, 65, 65) * 8)[:22]
    assert modern.ropes[:2] == (Rope(64, 160000.0), Rope(64, 10000.0))
    gemma = _spec(EMBEDDING_GEMMA)
    assert (gemma.is_causal, gemma.windows) == (False, ((257,) * 5 + (None,)) * 4)


def test_a_layer_behind_the_norm_of_embeddings_has_none():
    first, second, *_ = decoder.declare(_spec(MODERNBERT)).layers
    assert second.keys() - first.keys() == {"attn_norm"}
    assert decoder.declare(_spec(BERT)).layers[0].keys() == decoder.declare(_spec(BERT)).layers[1].keys()


def test_nomics_rotation_is_that_of_the_length_asked_for():
    nomic = _spec(NOMIC)
    assert (nomic.max_position, nomic.ropes[0], nomic.mlp_gated) == (8192, Rope(64, 1000.0), True)
    scaled = NOMIC | {"rotary_scaling_factor": 2}
    assert (_spec(scaled).max_position, _spec(scaled).ropes[0]) == (2048, Rope(64, 1000.0))
    assert _spec(scaled, 4096).ropes[0] == Rope(64, 1000.0 * (2 * 4096 / 2048 - 1) ** (64 / 62))


def test_how_released_models_pool(tmp_path):
    def pooler(config: dict[str, Any], runner: str = "auto") -> Pooler | None:
        return _pooler(config, tmp_path, runner)

    assert pooler(MINILM) == pooler(BERT) == pooler(BGE_M3) == pooler(MODERNBERT) == pooler(NOMIC) == Pooler("cls")
    assert pooler(QWEN_3_EMBEDDING) is None
    bare, both_sides = LLAMA_2_7B | {"architectures": ["LlamaModel"]}, QWEN_3_EMBEDDING | {"is_causal": False}
    for decoder_pooler in (
        pooler(QWEN_3_EMBEDDING, "pooling"),
        pooler(bare),
        pooler(both_sides),
        pooler(EMBEDDING_GEMMA),
    ):
        assert decoder_pooler == Pooler("last")
    head = (Dense(384, activation="tanh", stem="pooler.dense"), Dense(1, stem="classifier"))
    assert pooler(MS_MARCO) == Pooler("cls", head, ("LABEL_0",), "none", normalize=False)
    sentiment = pooler(DISTILBERT_SST2)
    assert sentiment is not None
    assert (sentiment.labels, sentiment.activation) == (("NEGATIVE", "POSITIVE"), "softmax")
    modern = pooler(MODERNBERT | {"architectures": ["ModernBertForSequenceClassification"]})
    assert modern is not None
    assert (modern.pooling, modern.layers[0].bias, modern.layers[0].norm) == ("mean", False, True)


@pytest.mark.parametrize(
    ("change", "activation"),
    [
        ({}, "softmax"),
        ({"problem_type": "multi_label_classification"}, "sigmoid"),
        ({"problem_type": "regression"}, "none"),
        ({"id2label": {"0": "score"}}, "sigmoid"),
        ({"id2label": None, "num_labels": 1}, "sigmoid"),
        ({"sbert_ce_default_activation_function": "torch.nn.modules.activation.Sigmoid"}, "sigmoid"),
    ],
)
def test_what_becomes_of_a_classifiers_numbers(change, activation, tmp_path):
    pooler = _pooler(DISTILBERT_SST2 | change, tmp_path)
    assert pooler is not None and pooler.activation == activation
