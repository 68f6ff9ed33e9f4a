"""Command line flags out of dataclasses: each field of `EngineConfig` and `SamplingParams` is one.

Knows names, types and defaults; the values are checked where the dataclasses are made.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, Field, fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

from jaxllm.config import DTYPE_NAMES, NOT_BUILT, WITHOUT_EFFECT, EngineConfig
from jaxllm.errors import UserError
from jaxllm.sampling_params import SamplingParams

_ENGINE_HELP = {
    "tokenizer": "folder or hub id of the tokenizer (default: the model's)",
    "skip_tokenizer_init": "load no tokenizer: prompts are token ids, and every text is empty",
    "revision": "branch, tag or commit of the hub repository",
    "dtype": "of weights and computation; auto: the checkpoint's on a GPU, float32 on a CPU",
    "quantization": "int8: round matrices, and what is multiplied with them, to 8 bits: a quarter of float32's memory",
    "device": "where to run; auto: a GPU if JAX sees one",
    "seed": "of the seeds of requests that bring none; with --deterministic it is their seed",
    "max_model_len": "tokens of prompt and output together, as 4096, 4k or auto (default: the model's, or what fits)",
    "block_size": "tokens per KV block",
    "enable_prefix_caching": "reuse the KV blocks of prompts that begin alike",
    "max_num_batched_tokens": "tokens a step (default: 160 on a CPU, 8192 on a GPU; with --deterministic 32 and 256; "
    "and twice --max-num-seqs at least)",
    "max_num_seqs": "requests that run at once (default: 64 on a CPU, 256 on a GPU; with --deterministic 16 and 128)",
    "tensor_parallel_size": "devices that share the model",
    "gpu_memory_utilization": "share of a GPU's memory to use",
    "kv_cache_memory_bytes": "bytes of KV blocks, instead of that share",
    "num_kv_blocks": "KV blocks, instead of both",
    "scheduling_policy": "which waiting request is next",
    "async_scheduling": "plan and start a step before the tokens of the one before it are read",
    "deterministic": "same bits for the same request, whatever runs beside it; every step costs as much as a full one",
    "enable_kv_cache_events": "tell which blocks enter and leave the prefix cache (StreamKvEvents)",
    "max_logprobs": "the most log-probabilities a request may ask for; -1: as many as the vocabulary has",
    "logits_processors": "function that requests may name, as package.module:function; may be repeated",
    "kernels": "operation=implementation, as paged_decode=xla; may be repeated (default: the best, see jaxllm doctor)",
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
    "logprobs": "likeliest tokens to report for each token (with --json); -1: all",
    "prompt_logprobs": "the same for each token of the prompt (with --json)",
    "logprob_token_ids": "token id whose log-probability to report for each token (with --json); may be repeated",
    "allowed_token_ids": "token id that may be sampled, where others may not; may be repeated",
    "bad_words": "text that the output must not hold; may be repeated",
    "skip_reading_prefix_cache": "compute the whole prompt, whatever of it is cached",
    "skip_special_tokens": "leave special tokens out of the text",
    "include_stop_str_in_output": "let the text end with the stop string that ended it",
    "truncate_prompt_tokens": "keep this many tokens of the prompt's end; -1: as many as the model holds",
}
_SERVER_HELP = {
    "host": "address of both front ends; 0.0.0.0: every interface",
    "port": "of HTTP; none: off",
    "uds": "Unix socket for HTTP instead of a port",
    "grpc_port": "of gRPC; none: off",
    "grpc_uds": "Unix socket for gRPC instead of a port",
    "served_model_name": "name that clients may use; may be repeated; answers give the first (default: the model's)",
    "chat_template": "file that replaces the model's own template",
    "default_chat_template_kwargs": "JSON object: variables of every chat template",
    "response_role": "role of the answers to a chat",
    "tool_call_parser": "how the model writes tool calls: hermes or llama3_json; without it tools are refused",
    "reasoning_parser": "how the model writes its reasoning: qwen3 or deepseek_r1; without it, it is content",
    "return_tokens_as_token_ids": "write token_id:N for a token's text in log-probabilities",
    "enable_prompt_tokens_details": "tell how many prompt tokens were cached",
    "enable_force_include_usage": "end every HTTP stream with its usage",
    "enable_request_id_headers": "send x-request-id with every HTTP response",
    "api_key": "key that clients must send, over HTTP to every path but /health, /live and /ready, "
    "over gRPC to all but health; may be repeated: any of them opens",
    "admin_api_key": "key for what shows or ends the work of all: /metrics (Prometheus has to send it) and /load over "
    "HTTP, gRPC's control service; may be repeated; without any, these open with an only --api-key, not with several",
    "ssl_keyfile": "private key, for TLS on both front ends",
    "ssl_certfile": "certificate, for TLS on both front ends",
    "ssl_ca_certs": "certificates that sign those of clients",
    "ssl_client_auth": "refuse clients without such a certificate",
    "share_prefix_cache": "let API keys find each other's prompts in the cache; else each of several has its own",
    "allowed_origins": "origin of browsers that may call (CORS); may be repeated",
    "allowed_hosts": "Host header taken on loopback beside its own names; may be repeated",
    "root_path": "prefix that a proxy in front strips",
    "max_body_bytes": "of an HTTP request",
    "max_header_bytes": "of all headers of an HTTP request",
    "max_headers": "of an HTTP request",
    "max_json_depth": "of an HTTP body",
    "max_prompts": "in one completions call",
    "max_n": "outputs per prompt",
    "max_sequences": "outputs of one call: n times its prompts",
    "max_stops": "stop strings of a request",
    "max_stop_chars": "characters of a stop string",
    "max_stop_token_ids": "stop token ids of a request",
    "max_tools": "tools of a request",
    "max_request_id_chars": "characters of a request id or cache salt",
    "grpc_max_message_bytes": "of a gRPC request",
    "max_queued_requests": "that may wait for a slot (default: 4 for each slot)",
    "max_queued_tokens": "of the prompts that wait (default: 16 contexts, at least 65,536)",
    "max_sequences_per_client": "outputs under way of one API key, or of one address where there are no keys",
    "max_receiving_bytes": "of HTTP bodies that are not read yet, all together; one client may have half of it",
    "max_rpcs": "calls at once, on each front end; what comes on top is told to try again",
    "request_timeout": "seconds after which a request fails; 0: never",
    "stall_timeout": "after which a request that has not come whole, or a stream that is not read, is ended; 0: never",
    "shutdown_timeout": "seconds that streams may go on after SIGTERM or ^C",
    "drain_delay": 'seconds between "not ready" and refusing work',
    "hang_timeout": 'seconds of one step after which the server is "not ready"',
    "log_stats_interval": "seconds between two lines of statistics; 0: none",
    "enable_log_requests": "write a line for each request",
    "otlp_traces_endpoint": "where OpenTelemetry traces go, as http://localhost:4318/v1/traces",
    "enable_channelz": "gRPC's own debugging service",
    "profile": "write a trace of the first steps into this folder, for ui.perfetto.dev; streams wait meanwhile",
    "profile_steps": "steps of that trace",
    "record": "write every call of the scheduler into this file, for `jaxllm replay`",
    "record_redacted": "write pseudonyms in place of tokens",
    "record_max_bytes": "of the recording, at least 1M; it ends there",
}
# Fields of the server and the engine that most who serve a model set.
COMMON = (
    *("host", "port", "grpc_port", "api_key", "served_model_name", "chat_template", "dtype", "quantization"),
    *("max_model_len", "max_num_seqs", "gpu_memory_utilization", "tensor_parallel_size"),
)
IDLE = "without_effect"  # the key under which parsed options list the given flags that change nothing
_NO_FLAGS = {"detokenize", "output_kind", "stream_interval"}  # of a program that reads outputs
_NO_FLAGS |= {"logit_bias", "extra_args", "repetition_detection"}  # tables
_SHORT = {"tensor_parallel_size": ("-tp",), "n": ("-n",)}
_SHORT |= {"pipeline_parallel_size": ("-pp",), "data_parallel_size": ("-dp",)}
_UNITS = {"": 1, **{letter: 1000 ** (power + 1) for power, letter in enumerate("kmgt")}}
_UNITS |= {letter: 1024 ** (power + 1) for power, letter in enumerate("KMGT")}
# What a model's generation_config.json may set (see `types.default_sampling_params`).
_OF_THE_MODEL = {"repetition_penalty", "temperature", "top_k", "top_p", "min_p"}


_METAVARS = {
    **dict.fromkeys(("model", "tokenizer", "compilation_cache_dir"), "PATH"),
    **dict.fromkeys(("uds", "grpc_uds"), "PATH"),
    "profile": "DIR",
    "record": "FILE",
    "record_max_bytes": "BYTES",
    **dict.fromkeys(("chat_template", "ssl_keyfile", "ssl_certfile", "ssl_ca_certs"), "FILE"),
    **dict.fromkeys(("kv_cache_memory_bytes", "max_body_bytes", "max_header_bytes", "grpc_max_message_bytes"), "BYTES"),
    "max_receiving_bytes": "BYTES",
    **dict.fromkeys(("request_timeout", "stall_timeout", "shutdown_timeout", "drain_delay", "hang_timeout"), "SECONDS"),
    **dict.fromkeys(("max_model_len", "max_num_batched_tokens", "max_tokens", "min_tokens"), "TOKENS"),
    **dict.fromkeys(("port", "grpc_port"), "PORT"),
    **dict.fromkeys(("api_key", "admin_api_key"), "KEY"),
    **dict.fromkeys(("allowed_token_ids", "logprob_token_ids"), "ID"),
    "bad_words": "TEXT",
    "logits_processors": "FUNCTION",
    "kernels": "OPERATION=NAME",
    "log_stats_interval": "SECONDS",
    "host": "ADDRESS",
    "allowed_hosts": "HOST",
    "allowed_origins": "ORIGIN",
    "root_path": "PREFIX",
    "default_chat_template_kwargs": "JSON",
    "otlp_traces_endpoint": "URL",
    "gpu_memory_utilization": "SHARE",
    "stop": "TEXT",
    "stop_token_ids": "ID",
}


def flag_of(field: str, cls: type, has_sampling: bool = False) -> str:
    """Name the flag of a field; `has_sampling` as in `add_engine_flags`."""
    name = "engine_seed" if has_sampling and (cls, field) == (EngineConfig, "seed") else field
    return "--" + name.replace("_", "-")


def add_engine_flags(
    group: argparse._ArgumentGroup,
    has_sampling: bool = True,
    skipped: Collection[str] = (),
    defaults: Mapping[str, Any] | None = None,
) -> None:
    """Add a flag for every other field of `EngineConfig` but the model; `has_sampling`: `--seed` is a request's.

    `defaults` are the command's, where it has others.
    """
    _add_flags(group, EngineConfig, _ENGINE_HELP, {"model", *skipped}, defaults, has_sampling)
    for name, taken in NOT_BUILT.items():
        if name not in skipped:
            _add_hidden(group, name, _NotBuilt, taken)
    for name, default in WITHOUT_EFFECT.items():
        if name not in skipped:
            _add_hidden(group, name, _WithoutEffect, (default,))


def add_server_flags(group: argparse._ArgumentGroup, cls: type) -> None:
    """Add a flag for every field of the server's options but those of `COMMON`."""
    _add_flags(group, cls, _SERVER_HELP, skipped=COMMON)


def add_common_flags(parser: argparse.ArgumentParser, server: type) -> None:
    """Add the flags of `COMMON`, those of the server's options first."""
    for cls, texts in ((server, _SERVER_HELP), (EngineConfig, _ENGINE_HELP)):
        others = {field.name for field in fields(cls)} - set(COMMON)
        _add_flags(parser, cls, texts, skipped=others)


def add_sampling_flags(group: argparse._ArgumentGroup, max_tokens: int, skipped: Collection[str] = ()) -> None:
    """Add a flag for every field of `SamplingParams` but the skipped ones; `max_tokens` is the command's default."""
    skipped = {*skipped, *_NO_FLAGS}
    _add_flags(group, SamplingParams, _SAMPLING_HELP, skipped, {"max_tokens": max_tokens})


def given(options: Mapping[str, Any], cls: type) -> dict[str, Any]:
    """Pick the fields of a class that were given as flags."""
    prefix = f"{cls.__name__}."
    return {name.removeprefix(prefix): value for name, value in options.items() if name.startswith(prefix)}


def _add_hidden(group: argparse._ArgumentGroup, name: str, action: type[argparse.Action], taken: Sequence[Any]) -> None:
    """Add a flag of vLLM that is no field here; `taken` are values, the default first, that say what kind it is of."""
    flag = flag_of(name, EngineConfig)
    is_switch = isinstance(taken[0], bool)
    names = (flag, "--no-" + flag[2:]) if is_switch else (*_SHORT.get(name, ()), flag)
    group.add_argument(
        *names,
        action=action,
        const=taken,
        nargs=0 if is_switch else None,
        dest=IDLE,
        default=argparse.SUPPRESS,
        help=argparse.SUPPRESS,
    )


class _NotBuilt(argparse.Action):
    """Takes a flag of `NOT_BUILT` with the values that change nothing, and refuses all else."""

    def __call__(self, parser: object, namespace: object, values: Any, option_string: str | None = None) -> None:
        given, taken = str(option_string), self.const
        if isinstance(taken[0], bool):
            is_taken = taken[0] is not given.startswith("--no-")
        else:
            is_taken = values.lower() in [str(value).lower() for value in taken]
            given += f" {values}"
        if not is_taken:
            raise argparse.ArgumentError(None, f"{given} is not supported by jaxllm yet; leave it out")


class _WithoutEffect(argparse.Action):
    """Takes a flag of `WITHOUT_EFFECT` and notes it, for one warning of all of them."""

    def __call__(self, parser: object, namespace: Any, values: Any, option_string: str | None = None) -> None:
        setattr(namespace, IDLE, [*getattr(namespace, IDLE, ()), str(option_string)])


def _add_flags(
    group: argparse._ActionsContainer,
    cls: type,
    texts: Mapping[str, str],
    skipped: Collection[str],
    defaults: Mapping[str, Any] | None = None,
    has_sampling: bool = False,
) -> None:
    """Give every field a flag. One that is not given leaves nothing in the options, so that others' defaults hold."""
    kinds = get_type_hints(cls)
    for field in fields(cls):
        if field.name in skipped:
            continue
        default = (defaults or {}).get(field.name, field.default)
        text = texts[field.name]
        if default not in (None, (), "", MISSING) and "(default" not in text:
            shown = str(default).lower() if isinstance(default, bool) else default
            text += f" (default: the model's, else {shown})" if field.name in _OF_THE_MODEL else f" (default: {shown})"
        group.add_argument(
            *_SHORT.get(field.name, ()),
            flag_of(field.name, cls, has_sampling),
            dest=f"{cls.__name__}.{field.name}",
            default=argparse.SUPPRESS,
            help=text.replace("%", "%%"),
            **_argument_of(kinds[field.name], field),
        )


def _argument_of(kind: Any, field: Field[Any]) -> dict[str, Any]:
    """Give argparse's settings for a type: a choice, a switch with its `--no-`, a list by repetition, or a value."""
    members = get_args(kind)
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction}
    if get_origin(kind) is tuple:
        # One value each: with more, a model's name behind them would be taken for another key.
        return {"action": "append", "metavar": _METAVARS.get(field.name, "NAME")}
    if isinstance(field.default, tuple):
        return {"action": "append", "type": _integer if members[0] is int else str, "metavar": _METAVARS[field.name]}
    inner = next((member for member in members if member is not type(None)), kind)
    for literal in (kind, inner):  # a choice, or a choice or None
        if get_origin(literal) is Literal:
            return {"choices": get_args(literal)} | ({"type": _dtype} if field.name == "dtype" else {})
    if inner is bool:
        return {"action": argparse.BooleanOptionalAction}
    if get_origin(inner) is Sequence:
        convert = _integer if get_args(inner)[0] is int else str
        return {"action": "append", "type": convert, "metavar": _METAVARS[field.name]}
    convert = {int: _integer, float: float, str: str}[inner]
    if type(None) in members and inner is int:
        convert = _integer_or_none
    return {"type": convert, "metavar": _METAVARS.get(field.name, {int: "N", float: "X", str: "NAME"}[inner])}


def _dtype(text: str) -> str:
    """Read a type of numbers: vLLM's other names are taken, too."""
    return DTYPE_NAMES.get(text, text)


def _integer(text: str) -> int:
    """Read an integer; 1k is 1000 and 1K is 1024, as in vLLM (k, m, g, t and K, M, G, T)."""
    match = re.fullmatch(r"([+-]?\d+)([kmgtKMGT]?)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer (1k is 1000, 1K is 1024)")
    return int(match[1]) * _UNITS[match[2]]


def _integer_or_none(text: str) -> int | None:
    """Read an integer, or "none" or "auto" for what is chosen without one."""
    return None if text in ("none", "auto") else _integer(text)


def read_config_file(path: str, arguments: Sequence[str]) -> list[str]:
    """Read a YAML file of flags, as `max-model-len: 4k`; return those that `arguments` do not give, as arguments."""
    import yaml

    try:
        with open(path, encoding="utf-8") as stream:
            settings = yaml.safe_load(stream) or {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not valid YAML: {' '.join(str(error).split())}", "config") from error
    if not isinstance(settings, dict):
        raise UserError(f"{path} must hold names of flags and their values.", "config")
    given = {argument.split("=")[0] for argument in arguments}
    read: list[str] = []
    for key, value in settings.items():
        flag = "--" + str(key).replace("_", "-")
        if given & {flag, "--no-" + flag[2:]}:
            continue
        if isinstance(value, bool):
            read.append(flag if value else "--no-" + flag[2:])
        elif isinstance(value, list):
            read += [f"{flag}={item}" for item in value]
        elif isinstance(value, dict):
            read.append(f"{flag}={json.dumps(value)}")
        elif value is not None or flag in ("--port", "--grpc-port"):
            read.append(f"{flag}={'none' if value is None else value}")
    return read
