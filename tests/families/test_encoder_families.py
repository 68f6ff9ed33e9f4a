"""Published config.json files of models that embed and classify become the right Spec and pooler."""

from __future__ import annotations

from typing import Any

import pytest

from jaxllm.checkpoints.pooler_files import read_pooler
from jaxllm.families.families import read_spec
from jaxllm.model import decoder
from jaxllm.model.pooler import Dense, Pooler
from jaxllm.model.spec import Rope
from tests.families.released import (
    BERT,
    BGE_M3,
    DISTILBERT_SST2,
    EMBEDDING_GEMMA,
    LLAMA_2_7B,
    MINILM,
    MODERNBERT,
    MPNET,
    MS_MARCO,
    MULTILINGUAL_BERT,
    NOMIC,
    QWEN_3_EMBEDDING,
    spec_of,
)

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


def _pooler(config: dict[str, Any], tmp_path: Any, runner: str = "auto") -> Pooler | None:
    return read_pooler(tmp_path, config, *read_spec(config), runner)


def test_what_sets_each_family_apart():
    bert = spec_of(BERT)
    assert (bert.is_causal, bert.norm_place, bert.embed_norm, bert.final_norm) == (False, "after", True, False)
    assert (bert.learned_positions, bert.token_types, bert.norm_eps, bert.activation) == (True, 2, 1e-12, "gelu")
    assert spec_of(MULTILINGUAL_BERT).vocab_size == 119547
    assert (spec_of(MINILM).head_size, spec_of(MINILM).num_layers) == (32, 6)
    bge = spec_of(BGE_M3)
    assert (bge.max_position, bge.position_offset, bge.token_types) == (8192, 2, 1)
    mpnet = spec_of(MPNET)
    assert (mpnet.max_position, mpnet.position_offset, mpnet.token_types, mpnet.relative_buckets) == (512, 2, 0, 32)
    distil = spec_of(DISTILBERT_SST2)
    assert (distil.ffn_width, distil.token_types, distil.norm_eps) == (3072, 0, 1e-12)
    modern = spec_of(MODERNBERT)
    assert (modern.is_causal, modern.norm_place, modern.final_norm, modern.mlp_gated) == (False, "pre", True, True)
    assert modern.windows == ((None, 65, 65) * 8)[:22]
    assert modern.ropes[:2] == (Rope(64, 160000.0), Rope(64, 10000.0))
    gemma = spec_of(EMBEDDING_GEMMA)
    assert (gemma.is_causal, gemma.windows) == (False, ((257,) * 5 + (None,)) * 4)


def test_a_layer_behind_the_norm_of_embeddings_has_none():
    first, second, *_ = decoder.declare(spec_of(MODERNBERT)).layers
    assert second.keys() - first.keys() == {"attn_norm"}
    assert decoder.declare(spec_of(BERT)).layers[0].keys() == decoder.declare(spec_of(BERT)).layers[1].keys()


def test_nomics_rotation_is_that_of_the_length_asked_for():
    nomic = spec_of(NOMIC)
    assert (nomic.max_position, nomic.ropes[0], nomic.mlp_gated) == (8192, Rope(64, 1000.0), True)
    scaled = NOMIC | {"rotary_scaling_factor": 2}
    assert (spec_of(scaled).max_position, spec_of(scaled).ropes[0]) == (2048, Rope(64, 1000.0))
    assert spec_of(scaled, 4096).ropes[0] == Rope(64, 1000.0 * (2 * 4096 / 2048 - 1) ** (64 / 62))


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
