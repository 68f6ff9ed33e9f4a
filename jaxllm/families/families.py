"""The table of model families.

A key that the row's reader did not access is an error, unless it has no effect.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from jaxllm.errors import UserError
from jaxllm.families.audio_families import WITH_SOUND
from jaxllm.families.config_fields import Fields
from jaxllm.families.dense_families import DENSE
from jaxllm.families.encoder_families import ENCODERS
from jaxllm.families.family import Encoder, Family, Images
from jaxllm.families.gemma_vl_families import GEMMA
from jaxllm.families.moe_families import ROUTED
from jaxllm.families.qwen_vl_families import OF_ANY_SIZE
from jaxllm.families.seq2seq_families import SEQ2SEQ
from jaxllm.families.stored_formats import read_stored
from jaxllm.families.vision_families import WITH_IMAGES
from jaxllm.model.spec import Spec

FAMILIES: tuple[Family, ...] = (*DENSE, *ROUTED, *ENCODERS, *WITH_IMAGES, GEMMA, *OF_ANY_SIZE, *WITH_SOUND, *SEQ2SEQ)

# Keys without effect on the forward pass, or read elsewhere (token ids).
WITHOUT_EFFECT = frozenset(
    """
    architectures model_type torch_dtype dtype transformers_version use_cache _name_or_path _commit_hash tokenizer_class
    bos_token_id eos_token_id pad_token_id sep_token_id cls_token_id decoder_start_token_id prefix auto_map
    initializer_factor initializer_range init_std attention_dropout hidden_dropout activation_dropout dropout layerdrop
    embd_pdrop
    attn_pdrop resid_pdrop classifier_dropout residual_dropout embedding_dropout attention_probs_dropout_prob
    hidden_dropout_prob pretraining_tp gradient_checkpointing cache_implementation
    attn_implementation _attn_implementation_autoset _attn_implementation
    _flash_attn_2_enabled output_attentions output_hidden_states return_dict torchscript
    use_bfloat16 chunk_size_feed_forward is_decoder problem_type id2label label2id num_labels
    task_specific_params finetuning_task summary_type summary_use_proj summary_activation summary_proj_to_labels
    summary_first_dropout unsloth_version unsloth_fixed is_llama_config
    output_router_logits router_aux_loss_coef router_jitter_noise aux_loss_alpha seq_aux ep_size
    transformers.js_config custom_pipelines max_sequence_length n_special predict_special_tokens output_past _num_labels
    tf_legacy_loss do_sample max_length early_stopping num_beam_groups diversity_penalty length_penalty output_scores
    return_dict_in_generate remove_invalid_values sentence_transformers sbert_ce_default_activation_function
    matryoshka_dimensions is_matryoshka classifier_pooling classifier_bias classifier_activation qa_dropout
    seq_classif_dropout mlp_dropout decoder_bias deterministic_flash_attn sparse_prediction sparse_pred_ignore_index
    initializer_cutoff_factor reference_compile repad_logits_with_grad sinusoidal_pos_embds directionality
    pooler_fc_size pooler_num_attention_heads pooler_num_fc_layers pooler_size_per_head pooler_type tie_weights_
    """.split()
)
# Sampling settings, written here by transformers 4; these values change nothing.
SAMPLING: dict[str, Any] = {
    "min_length": 0,
    "num_beams": 1,
    "num_return_sequences": 1,
    "temperature": 1.0,
    "top_k": 50,
    "top_p": 1.0,
    "typical_p": 1.0,
    "repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
}


def read_spec(config: Mapping[str, Any], max_model_len: int | None = None) -> tuple[Spec, Family]:
    """Return the `Spec` and the row of a config.json's architecture.

    Some rotations depend on `max_model_len`, the requested length. Raises UserError, naming the key, for an unknown
    architecture or key, and for a missing or impossible value.
    """
    names = config.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UserError(f"config.json: architectures must be a list of names, got {names!r:.80}.", "architectures")
    known = {name: family for family in FAMILIES for name in family.architectures}
    family = next((known[name] for name in names if name in known), None)
    if family is None:
        said = ", ".join(map(str, names)) or "none"
        if "text_config" in config:
            raise UserError(
                f"config.json: {said} is not a model of text alone (it has a text_config); choose one that is.",
                said,
            )
        raise UserError(f"config.json: architecture {said} is not supported; supported: {', '.join(known)}.", said)
    stored = read_stored(config)
    if stored is not None and (family.images is not None or family.encoder is not None):
        kind = "models with images or sound" if family.encoder is None else "encoder-decoder models"
        raise UserError(
            f"config.json: quantization_config ({stored.method}) is not supported for {kind}; use an unquantized "
            "checkpoint.",
            "quantization_config",
        )
    if stored is not None:
        config = {key: value for key, value in config.items() if key != "quantization_config"}
        family = replace(family, stored=stored)
    fields = Fields(config, max_model_len)
    if family.text_of is not None:
        return read_fields(*family.text_of(fields)), family
    assert family.read is not None
    spec = read_fields(fields, family.read, family.encoder is not None)
    return spec, family if family.of_spec is None else family.of_spec(spec)


def read_images(config: Mapping[str, Any], spec: Spec, family: Family) -> Images | None:
    """Return how a model reads images, if it does; `spec` is its decoder's."""
    if family.images is None or family.text_of is None:
        return None
    fields = Fields(config)
    family.text_of(fields)
    found = family.images(fields, spec.width, spec.vocab_size)
    fields.finish(WITHOUT_EFFECT)
    return found


def read_encoder(config: Mapping[str, Any], family: Family) -> Encoder | None:
    """Return the encoder of an encoder-decoder model, None for others; the decoder's keys were checked."""
    return None if family.encoder is None else family.encoder(Fields(config))


def read_fields(fields: Fields, read: Callable[[Fields], Spec], has_encoder: bool = False) -> Spec:
    quantization = fields.raw("quantization_config")
    if quantization is not None:
        method = quantization.get("quant_method", "unknown") if isinstance(quantization, dict) else "unknown"
        raise UserError(
            f"config.json: quantization_config ({method!s:.80}) is not supported; use an unquantised checkpoint.",
            "quantization_config",
        )
    try:
        spec = read(fields)
    except (ArithmeticError, ValueError) as error:  # each valid, but not together
        if isinstance(error, UserError):
            raise
        raise UserError(f"config.json: its numbers make no model ({error}).", "model") from error
    if not spec.is_causal and (spec.latent or spec.sinks):
        what = "latent attention" if spec.latent else "attention sinks"
        raise UserError(f"config.json: is_causal = False is not supported for models with {what}.", "is_causal")
    fields.only("is_encoder_decoder", has_encoder)
    fields.only("add_cross_attention", False)
    fields.only("tie_encoder_decoder", False)
    fields.only("pruned_heads", {})
    for key, neutral in SAMPLING.items():
        if has_encoder:  # usual in these models' files
            fields.raw(key)
        elif (value := fields.raw(key)) not in (None, neutral):
            raise UserError(
                f"config.json: {key} = {value!r:.80} is for sampling; move it to generation_config.json.", key
            )
    fields.finish(WITHOUT_EFFECT)
    if spec.num_heads % spec.num_kv_heads != 0:
        raise UserError(
            f"config.json: {spec.num_heads} attention heads cannot share {spec.num_kv_heads} key-value heads evenly.",
            "num_key_value_heads",
        )
    return spec
