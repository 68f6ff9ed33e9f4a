"""Command line flags out of dataclasses: each field of `EngineConfig` and `SamplingParams` is one.

Knows names, types and defaults; the values are checked where the dataclasses are made.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Collection, Mapping
from dataclasses import MISSING, Field, fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

from jaxllm.config import EngineConfig
from jaxllm.types import SamplingParams

_ENGINE_HELP = {
    "tokenizer": "folder or hub id of the tokenizer (default: the model's)",
    "revision": "branch, tag or commit of the hub repository",
    "dtype": "of weights and computation; auto: the checkpoint's on a GPU, float32 on a CPU",
    "device": "where to run; auto: a GPU if JAX sees one",
    "seed": "of the seeds of requests that bring none",
    "max_model_len": "tokens of prompt and output together (default: the model's)",
    "block_size": "tokens per KV block",
    "enable_prefix_caching": "reuse the KV blocks of prompts that begin alike",
    "max_num_batched_tokens": "tokens a step (default: 512 on a CPU, 8192 on a GPU)",
    "max_num_seqs": "requests that run at once (default: 64 on a CPU, 256 on a GPU)",
    "tensor_parallel_size": "devices that share the model",
    "gpu_memory_utilization": "share of a GPU's memory to use",
    "kv_cache_memory_bytes": "bytes of KV blocks, instead of that share",
    "num_kv_blocks": "KV blocks, instead of both",
    "scheduling_policy": "which waiting request is next",
    "max_logprobs": "the most log-probabilities a request may ask for",
    "load_format": "dummy: random weights of the model's shapes",
    "precompile": "which programs are compiled before the first request",
    "compilation_cache_dir": "folder of compiled programs (default: $JAXLLM_CACHE_DIR or the user's cache folder)",
}
_SAMPLING_HELP = {
    "n": "outputs per prompt",
    "presence_penalty": "taken off the logit of a token that the output holds",
    "frequency_penalty": "taken off it once per occurrence",
    "repetition_penalty": "divides the logit of a token that prompt or output holds",
    "temperature": "0: always the likeliest token",
    "top_p": "sample from the likeliest tokens that hold this probability together",
    "top_k": "sample from this many likeliest tokens; 0: all",
    "min_p": "the least probability of a token, as a share of the likeliest one's",
    "seed": "for the same text again",
    "stop": "text that ends the output; may be repeated",
    "stop_token_ids": "token id that ends the output; may be repeated",
    "ignore_eos": "go on after the end-of-sequence token",
    "max_tokens": "the most tokens of an output; none: until the context is full",
    "min_tokens": "tokens before the output may end",
    "logprobs": "likeliest tokens to report for each token (with --json)",
    "skip_special_tokens": "leave special tokens out of the text",
}
_UNITS = {"": 1, **{letter: 1000 ** (power + 1) for power, letter in enumerate("kmgt")}}
_UNITS |= {letter: 1024 ** (power + 1) for power, letter in enumerate("KMGT")}
# What a model's generation_config.json may set (see `types.default_sampling_params`).
_OF_THE_MODEL = {"repetition_penalty", "temperature", "top_k", "top_p", "min_p"}


def add_engine_flags(group: argparse._ArgumentGroup) -> None:
    """Add a flag for every field of `EngineConfig` but the model."""
    _add_flags(group, EngineConfig, _ENGINE_HELP, skipped={"model"})


def add_sampling_flags(group: argparse._ArgumentGroup, max_tokens: int, skipped: Collection[str] = ()) -> None:
    """Add a flag for every field of `SamplingParams` but the skipped ones; `max_tokens` is the command's default."""
    _add_flags(group, SamplingParams, _SAMPLING_HELP, skipped, {"max_tokens": max_tokens})


def given(options: Mapping[str, Any], cls: type) -> dict[str, Any]:
    """Pick the fields of a class that were given as flags."""
    prefix = f"{cls.__name__}."
    return {name.removeprefix(prefix): value for name, value in options.items() if name.startswith(prefix)}


def _add_flags(
    group: argparse._ArgumentGroup,
    cls: type,
    texts: Mapping[str, str],
    skipped: Collection[str],
    defaults: Mapping[str, Any] | None = None,
) -> None:
    """Give every field a flag. One that is not given leaves nothing in the options, so that others' defaults hold."""
    kinds = get_type_hints(cls)
    for field in fields(cls):
        if field.name in skipped:
            continue
        default = (defaults or {}).get(field.name, field.default)
        text = texts[field.name]
        if default not in (None, (), MISSING) and "(default" not in text:
            shown = str(default).lower() if isinstance(default, bool) else default
            text += f" (default: the model's, else {shown})" if field.name in _OF_THE_MODEL else f" (default: {shown})"
        group.add_argument(
            _flag(cls, field),
            dest=f"{cls.__name__}.{field.name}",
            default=argparse.SUPPRESS,
            help=text.replace("%", "%%"),
            **_argument_of(kinds[field.name], field),
        )


def _flag(cls: type, field: Field[Any]) -> str:
    # Both classes have a seed; the one of the request is what a user means.
    name = "engine_seed" if cls is EngineConfig and field.name == "seed" else field.name
    return "--" + name.replace("_", "-")


def _argument_of(kind: Any, field: Field[Any]) -> dict[str, Any]:
    """Give argparse's settings for a type: a choice, a switch with its `--no-`, a list by repetition, or a value."""
    members = get_args(kind)
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction}
    if get_origin(kind) is Literal:
        return {"choices": members}
    if isinstance(field.default, tuple):
        return {"action": "append", "type": _integer if members[0] is int else str, "metavar": "X"}
    inner = next((member for member in members if member is not type(None)), kind)
    convert = {int: _integer, float: float, str: str}[inner]
    if type(None) in members and inner is int:
        return {"type": _integer_or_none, "metavar": "N"}
    return {"type": convert, "metavar": {int: "N", float: "X", str: "NAME"}[inner]}


def _integer(text: str) -> int:
    """Read an integer; 1k is 1000 and 1K is 1024, as in vLLM (k, m, g, t and K, M, G, T)."""
    match = re.fullmatch(r"([+-]?\d+)([kmgtKMGT]?)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer (1k is 1000, 1K is 1024)")
    return int(match[1]) * _UNITS[match[2]]


def _integer_or_none(text: str) -> int | None:
    """Read an integer, or "none" for no limit."""
    return None if text == "none" else _integer(text)
