"""Refuses or ignores unknown fields, by `--unknown-fields`. Pure.

Misspelt fields, other routes' fields, and those that determine an answer's content are refused.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from jaxllm.errors import UserError

_SHOWN = 64
_MOST_STRANGE = 16  # unlisted fields per request; each search for a similar name takes up to 1 ms
_MISSPELT = 0.74  # similarity: "sotp" has 0.75, "user_id" 0.73
_MOST_HEADER = 1024  # characters; clients accept some KiB

# Harmless fields of other servers: llama.cpp tools/server/README.md, SGLang entrypoints/openai/protocol.py,
# text-generation-webui extensions/openai/typing.py, TGI's GenerateParameters, Ollama docs/api.md, OpenRouter, LiteLLM.
FOREIGN = frozenset(
    (
        # Sampling filters and penalties
        *("typical_p", "typical", "tfs_z", "tfs", "top_a", "top_n_sigma", "nsigma", "epsilon_cutoff", "eta_cutoff"),
        *("mirostat", "mirostat_mode", "mirostat_tau", "mirostat_eta", "xtc_probability", "xtc_threshold"),
        *("dynamic_temperature", "dynatemp_range", "dynatemp_exponent", "dynatemp_low", "dynatemp_high"),
        *("dry_multiplier", "dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers"),
        *("smoothing_factor", "smoothing_curve", "temperature_last", "sampler_priority", "samplers", "min_keep"),
        *("repeat_penalty", "repeat_last_n", "repetition_penalty_range", "encoder_repetition_penalty", "penalize_nl"),
        *("no_repeat_ngram_size", "guidance_scale", "negative_prompt", "penalty_alpha", "do_sample", "random_seed"),
        *("watermark", "custom_logit_processor", "custom_params", "n_indent"),
        # Thinking
        *("enable_thinking", "think", "thinking", "thinking_budget", "reasoning", "reasoning_format"),
        *("separate_reasoning", "stream_reasoning", "parse_tool_calls"),
        # Execution on the server
        *("keep_alive", "options", "raw", "preset", "num_ctx", "num_keep", "n_keep", "cache_prompt", "n_cache_reuse"),
        *("id_slot", "slot_id", "t_max_predict_ms", "t_max_prompt_ms", "sse_ping_interval", "ttl", "draft_model"),
        *("prompt_lookup_num_tokens", "ngram_corpus_id", "rid", "session_params", "extra_key", "custom_labels"),
        *("data_parallel_rank", "routed_dp_rank", "disagg_prefill_dp_rank", "no_stop_trim", "nvext"),
        *("bootstrap_host", "bootstrap_port", "bootstrap_room", "truncate", "truncation_length", "add_bos_token"),
        *("auto_max_new_tokens", "max_tokens_second", "images_config"),
        # Details to report
        *("n_probs", "post_sampling_probs", "timings_per_token", "return_progress", "return_tokens", "response_fields"),
        *("details", "decoder_input_details", "top_n_tokens", "return_full_text", "return_hidden_states"),
        *("return_routed_experts", "routed_experts_start_len", "return_cached_tokens_details", "return_meta_info"),
        *("return_prompt_token_ids", "incremental_output", "result_format", "usage", "debug"),
        # Gateways between client and model
        *("provider", "providerOptions", "route", "models", "fallbacks", "transforms", "trace", "tags", "guardrails"),
        *("num_retries", "timeout", "caching", "cache", "cache_control", "drop_params", "additional_drop_params"),
        *("allowed_openai_params", "litellm_metadata", "client_metadata", "litellm_call_id", "custom_llm_provider"),
        *("safe_prompt", "safety_settings", "prompt_mode", "prompt_truncate_len", "request_timeout", "user_id"),
        *("tool_stream", "clear_thinking", "min_tokens_to_keep", "repetition_penalty_sustain"),
        *("return_logprob", "logprob_start_len", "top_logprobs_num", "extra_headers", "extra_body"),
        # Embeddings and ranking
        *("input_type", "prompt_name", "late_chunking", "truncation", "truncation_direction", "embedding_type"),
    )
)
# Fields that determine the content -> this server's.
MEANINGFUL: Mapping[str, str] = {
    # Form of the output
    **dict.fromkeys(("grammar", "grammar_string", "ebnf", "regex"), "structured_outputs"),
    **dict.fromkeys(("json_schema", "format", "schema", "response_schema"), "response_format"),
    "custom_token_bans": "bad_words",
    "echo_last": "echo",
    # Length and number of outputs
    **dict.fromkeys(("max_new_tokens", "max_length", "max_output_tokens", "n_predict", "num_predict"), "max_tokens"),
    **dict.fromkeys(("stop_sequences", "stop_words", "stop_regex"), "stop"),
    **{"ban_eos_token": "ignore_eos", "min_new_tokens": "min_tokens", "n_cmpl": "n"},
    # Subject
    **dict.fromkeys(("system", "system_prompt", "template", "instruction_template", "character"), "messages"),
    **dict.fromkeys(("instruction_template_str", "chat_template_str"), ""),
    **dict.fromkeys(("images", "videos", "image_data", "audio_data", "video_data", "context", "data_sources"), ""),
    **dict.fromkeys(("input_embeds", "plugins", "enable_search", "search_parameters", "impersonate"), ""),
    **dict.fromkeys(("mm_payload", "late_chunking_params"), ""),
    **dict.fromkeys(("input_prefix", "inputs"), "prompt"),
    **dict.fromkeys(("input_suffix", "input_extra"), "suffix"),
    **{"input_ids": "prompt_token_ids", "continue_": "continue_final_message"},
    # Of the Responses API
    **{"instructions": "messages", "previous_response_id": "", "conversation": "", "text": "response_format"},
    # Model and dimensions
    **dict.fromkeys(("lora", "lora_path", "adapter_id"), "model"),
    **{"output_dimension": "dimensions", "embedding_types": "encoding_format"},
}
# Never ignored.
OF_OTHER_ROUTES = frozenset(
    (
        *("prompt", "messages", "input", "tokens", "suffix", "echo", "best_of", "prompt_embeds", "prompt_token_ids"),
        *("add_generation_prompt", "continue_final_message", "chat_template", "chat_template_kwargs"),
        *("tools", "tool_choice", "parallel_tool_calls", "functions", "function_call", "web_search_options"),
        *("max_completion_tokens", "top_logprobs", "include_reasoning", "reasoning_effort", "verbosity"),
        *("modalities", "audio", "prediction", "mm_processor_kwargs", "documents", "return_token_strs"),
        *("task", "dimensions", "normalize", "use_activation", "encoding_format", "embed_dtype", "endianness"),
        *("padding", "text_1", "text_2", "data_1", "data_2", "queries", "items", "query", "top_n"),
        *("return_documents", "rank_fields", "instruction", "relevant_spans", "return_embeddings"),
        *("max_tokens_per_query", "max_tokens_per_doc", "max_chunks_per_doc"),
    )
)


def check(body: Mapping[str, Any], known: Collection[str], ours: Collection[str], policy: str) -> list[str]:
    """Return non-empty unknown fields, which are ignored; `ours` are the fields of all routes.

    Raises UserError for the first field that `policy` refuses, with the nearest name.
    """
    passed: list[str] = []
    num_strange = 0
    for name in body:
        if name in known or policy == "ignore":
            continue
        asks = body[name] is not None and body[name] not in ("", False, [], {})
        is_meant = name in MEANINGFUL or name in ours
        if policy == "refuse" or (is_meant and asks):
            raise _refusal(name, _nearest(name, known))
        if name not in FOREIGN and not is_meant:
            nearest = _nearest(name, known, _MISSPELT)
            if nearest:
                raise _refusal(name, nearest)
            num_strange += 1
            if num_strange > _MOST_STRANGE:
                message = f"A body may have at most {_MOST_STRANGE} fields that this request does not have."
                raise UserError(message, name[:_SHOWN])
        if asks and not is_meant:
            passed.append(name[:_SHOWN])
    return passed


def warnings_of(names: Iterable[str]) -> bytes:
    told = "ignored fields: " + ", ".join(map(ascii, names))
    return (told if len(told) <= _MOST_HEADER else f"{told[: _MOST_HEADER - 4]} ...").encode("ascii")


def _nearest(name: str, known: Collection[str], least: float = 0.6) -> str:
    """Return the most similar known field, "" below similarity `least` (0 to 1)."""
    if name in MEANINGFUL:
        return MEANINGFUL[name] if MEANINGFUL[name] in known else ""
    near = difflib.get_close_matches(name, known, n=1, cutoff=least) if len(name) <= _SHOWN else []
    return near[0] if near else ""


def _refusal(name: str, nearest: str) -> UserError:
    hint = f" Did you mean {nearest!r}?" if nearest else ""
    return UserError(f"{name[:_SHOWN]!r} is not a field of this request.{hint}", name[:_SHOWN])
