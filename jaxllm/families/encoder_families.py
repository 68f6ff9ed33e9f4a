"""Bidirectional families for embedding and classification."""

from __future__ import annotations

from typing import Any

from jaxllm.errors import UserError
from jaxllm.families.config_fields import Fields, parse_rope, read_decoder, read_learned, read_two_ropes, read_windows
from jaxllm.families.family import LLAMA_TENSORS, Family, named
from jaxllm.families.pooled_heads import two_products
from jaxllm.model.pooler import Dense, Pooler, Pooling
from jaxllm.model.spec import Spec

_ENCODER: dict[str, Any] = {"is_causal": False, "norm_place": "after", "embed_norm": True, "final_norm": False}
_BIASES = dict.fromkeys(("qkv_bias", "out_bias", "mlp_bias"), True)


def _bert(fields: Fields, position_offset: int = 0, eps: float = 1e-12, **further: Any) -> Spec:
    fields.only("position_embedding_type", "absolute")
    fields.only("is_decoder", False)
    positions = fields.size("max_position_embeddings", 512)
    if not 0 <= position_offset < positions:
        message = f"config.json: max_position_embeddings {positions} leaves no position behind padding's."
        raise UserError(message, "max_position_embeddings")
    if "token_types" not in further:
        further["token_types"] = fields.size("type_vocab_size", 2)
    return read_learned(
        fields,
        width=fields.size("hidden_size"),
        num_heads=fields.size("num_attention_heads"),
        num_layers=fields.layers(),
        ffn_width=fields.size("intermediate_size"),
        max_position=positions - position_offset,
        position_offset=position_offset,
        norm_eps=fields.positive("layer_norm_eps", eps),
        activation=fields.activation("hidden_act", "gelu"),
        **_ENCODER,
        **_BIASES,
        **further,
    )


def _roberta(fields: Fields) -> Spec:
    # Rows up to the padding id were for padding (fairseq).
    return _bert(fields, position_offset=fields.take("pad_token_id", int, 1) + 1)


def _mpnet(fields: Fields) -> Spec:
    buckets = 32
    fields.only("relative_attention_num_buckets", buckets)  # transformers always computes with 32
    return _bert(fields, position_offset=2, token_types=0, relative_buckets=buckets)


def _distilbert(fields: Fields) -> Spec:
    return read_learned(
        fields,
        width=fields.size("dim"),
        num_heads=fields.size("n_heads"),
        num_layers=fields.layers("n_layers"),
        ffn_width=fields.size("hidden_dim"),
        max_position=fields.size("max_position_embeddings", 512),
        norm_eps=1e-12,
        activation=fields.activation("activation", "gelu"),
        **_ENCODER,
        **_BIASES,
    )


def _modernbert(fields: Fields) -> Spec:
    fields.only("position_embedding_type", "absolute", "sans_pos")  # no effect: positions are rotary
    fields.only("norm_bias", False)
    fields.only("layer_norm_eps", fields.take("norm_eps", float, 1e-5))
    fields.only("rope_scaling")
    every = fields.size("global_attn_every_n_layers", 3)
    reach = fields.size("local_attention", 128) // 2 + 1  # the file gives both sides together
    windows = read_windows(fields, reach, tuple(layer % every != 0 for layer in range(fields.layers())))
    thetas = fields.positive("global_rope_theta", 160000.0), fields.positive("local_rope_theta", 10000.0)
    size, positions = (
        fields.size("hidden_size") // fields.size("num_attention_heads"),
        fields.size("max_position_embeddings"),
    )
    return read_decoder(
        fields,
        tied=True,
        eps=("norm_eps", 1e-5),
        windows=windows,
        ropes=read_two_ropes(fields, windows, size, positions, thetas),
        norm="layer",
        is_causal=False,
        embed_norm=True,
        activation=fields.activation("hidden_activation", "gelu"),
        **fields.attention_biases(),
        mlp_bias=fields.take("mlp_bias", bool, False),
    )


def _modernbert_head(fields: Fields, width: int, labels: int) -> Pooler:
    fields.only("classifier_pooling", "cls", "mean")
    inner = Dense(
        width,
        bias=fields.take("classifier_bias", bool, False),
        activation=fields.activation("classifier_activation", "gelu"),
        norm=True,
        norm_eps=fields.positive("norm_eps", 1e-5),
        stem="head.dense",
        norm_stem="head.norm",
    )
    pooling: Pooling = "mean" if fields.raw("classifier_pooling") == "mean" else "cls"
    return Pooler(pooling, (inner, Dense(labels, stem="classifier")))


def _nomic(fields: Fields) -> Spec:
    shared: dict[str, Any] = {"norm": "layer", "norm_bias": True, "token_types": fields.size("type_vocab_size", 2)}
    if not fields.has("n_embd"):
        return read_decoder(
            fields,
            tied=True,
            eps=("layer_norm_eps", 1e-12),
            theta=1000.0,
            **shared,
            **_ENCODER,
        )
    for key, value in (
        ("causal", False),
        ("parallel_block", False),
        ("prenorm", False),
        ("qkv_proj_bias", False),
        ("mlp_fc1_bias", False),
        ("mlp_fc2_bias", False),
        ("rotary_emb_fraction", 1.0),
        ("rotary_emb_interleaved", False),
        ("scale_attn_by_inverse_layer_idx", False),
        ("scale_attn_weights", True),
        ("use_rms_norm", False),
        ("activation_function", "swiglu"),
        ("rotary_emb_scale_base", None),
    ):
        fields.only(key, value)
    for key in (
        "dense_seq_output",  # training, or the kernels used
        "fused_bias_fc",
        "fused_dropout_add_ln",
        "pad_vocab_size_multiple",
        "parallel_block_tied_norm",
        "reorder_and_upcast_attn",
        "use_flash_attn",
        "use_xentropy",
    ):
        fields.raw(key)
    width, heads, layers = fields.size("n_embd"), fields.size("n_head"), fields.layers("n_layer")
    positions, factor = fields.size("n_positions", 2048), fields.take("rotary_scaling_factor", float, 1.0)
    settings: dict[str, Any] = {"rope_theta": fields.positive("rotary_emb_base", 10000.0)}
    trained = fields.size("max_trained_positions", 2048)
    if factor > 1.0:
        settings |= {"rope_type": "dynamic", "factor": factor}
        positions = trained
    rope, positions = parse_rope(Fields(settings, fields.max_model_len), width // heads, positions, None, 10000.0)
    return read_learned(
        fields,
        width=width,
        num_heads=heads,
        num_layers=layers,
        ffn_width=fields.size("n_inner", 4 * width),
        max_position=positions,
        ropes=(rope,) * layers,
        norm_eps=fields.positive("layer_norm_epsilon", 1e-5),
        learned_positions=False,
        mlp_gated=True,
        **shared,
        **_ENCODER,
    )


_BERT_TENSORS = named(
    {
        "embed": "embeddings.word_embeddings",
        "positions": "embeddings.position_embeddings",
        "token_types": "embeddings.token_type_embeddings",
        "embed_norm": "embeddings.LayerNorm",
        "head": "cls.predictions.decoder",
        "q": "encoder.layer.{}.attention.self.query",
        "k": "encoder.layer.{}.attention.self.key",
        "v": "encoder.layer.{}.attention.self.value",
        "out": "encoder.layer.{}.attention.output.dense",
        "attn_post_norm": "encoder.layer.{}.attention.output.LayerNorm",
        "up": "encoder.layer.{}.intermediate.dense",
        "down": "encoder.layer.{}.output.dense",
        "mlp_post_norm": "encoder.layer.{}.output.LayerNorm",
    }
)
_MPNET_TENSORS = _BERT_TENSORS | named(
    {
        "relative_bias": "encoder.relative_attention_bias",
        **{part: f"encoder.layer.{{}}.attention.attn.{part}" for part in ("q", "k", "v")},
        "out": "encoder.layer.{}.attention.attn.o",
        "attn_post_norm": "encoder.layer.{}.attention.LayerNorm",
    }
)
_DISTILBERT_TENSORS = _BERT_TENSORS | named(
    {
        **{part: f"transformer.layer.{{}}.attention.{part}_lin" for part in ("q", "k", "v", "out")},
        "attn_post_norm": "transformer.layer.{}.sa_layer_norm",
        "up": "transformer.layer.{}.ffn.lin1",
        "down": "transformer.layer.{}.ffn.lin2",
        "mlp_post_norm": "transformer.layer.{}.output_layer_norm",
    }
)
_MODERNBERT_TENSORS = LLAMA_TENSORS | named(
    {
        "embed": "embeddings.tok_embeddings",
        "embed_norm": "embeddings.norm",
        "final_norm": "final_norm",
        "attn_norm": "layers.{}.attn_norm",
        **dict.fromkeys(("q", "k", "v"), "layers.{}.attn.Wqkv"),
        "out": "layers.{}.attn.Wo",
        "mlp_norm": "layers.{}.mlp_norm",
        **dict.fromkeys(("gate", "up"), "layers.{}.mlp.Wi"),
        "down": "layers.{}.mlp.Wo",
    }
)
_NOMIC_TENSORS = _BERT_TENSORS | named(
    {
        "embed_norm": "emb_ln",
        **dict.fromkeys(("q", "k", "v"), "encoder.layers.{}.attn.Wqkv"),
        "out": "encoder.layers.{}.attn.out_proj",
        "attn_post_norm": "encoder.layers.{}.norm1",
        "gate": "encoder.layers.{}.mlp.fc12",
        "up": "encoder.layers.{}.mlp.fc11",
        "down": "encoder.layers.{}.mlp.fc2",
        "mlp_post_norm": "encoder.layers.{}.norm2",
    }
)


def _architectures(name: str, *others: str) -> tuple[str, ...]:
    return tuple(f"{name}{kind}" for kind in ("Model", "ForSequenceClassification", "ForMaskedLM", *others))


_IGNORED = (".position_ids", ".token_type_ids")
_ROBERTA_HEAD = two_products("cls", "classifier.dense", "tanh", "classifier.out_proj")
_ROBERTA: dict[str, Any] = {"ignored": _IGNORED, "heads": ("lm_head.", "pooler."), "head": _ROBERTA_HEAD}

ENCODERS: tuple[Family, ...] = (
    Family(
        _architectures("Bert", "ForPreTraining"),
        _bert,
        _BERT_TENSORS,
        "bert.",
        ignored=_IGNORED,
        heads=("cls.", "pooler."),
        head=two_products("cls", "pooler.dense", "tanh", "classifier"),
    ),
    Family(
        (*_architectures("Roberta"), *_architectures("XLMRoberta")), _roberta, _BERT_TENSORS, "roberta.", **_ROBERTA
    ),
    Family(
        _architectures("DistilBert"),
        _distilbert,
        _DISTILBERT_TENSORS,
        "distilbert.",
        heads=("vocab_",),
        head=two_products("cls", "pre_classifier", "relu", "classifier"),
    ),
    Family(_architectures("MPNet"), _mpnet, _MPNET_TENSORS, "mpnet.", **_ROBERTA),
    Family(
        _architectures("ModernBert"),
        _modernbert,
        _MODERNBERT_TENSORS,
        heads=("head.", "decoder."),
        head=_modernbert_head,
    ),
    Family(("NomicBertModel",), _nomic, _NOMIC_TENSORS, "bert.", heads=("cls.", "pooler.")),
)
