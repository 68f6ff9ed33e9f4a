"""The flags of `bench serve`."""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from jaxllm.commands.arguments import UsageError
from jaxllm.commands.constraint_flags import schema_of
from jaxllm.sampling_fields import declaration_of
from jaxllm.sampling_params import SamplingParams
from jaxllm.structured_outputs_params import StructuredOutputsParams

METRICS = ("ttft", "tpot", "itl", "e2el", "client_queue_time")
GOODPUT = ("ttft", "tpot", "e2el")
ENDPOINTS = {
    "openai": "/v1/completions",
    "openai-chat": "/v1/chat/completions",
    "openai-embeddings": "/v1/embeddings",
    "grpc": "",
}
_EMBEDS = ("embeddings", "/v1/embeddings")
_EMBED_METRICS = ("e2el", "client_queue_time")
SAMPLING = {own.name: type(own.default) for own in fields(SamplingParams) if declaration_of(own).shapes_distribution}
HTTP_PORT, GRPC_PORT = 8000, 50051
_KEYS = ("OPENAI_API_KEY", "JAXLLM_API_KEY")  # of the environment
RAMP = ("ramp_up_strategy", "ramp_up_start_rps", "ramp_up_end_rps")


def add_flags(parser: argparse.ArgumentParser) -> None:
    _add_server_flags(parser.add_argument_group("server"))
    _add_load_flags(parser.add_argument_group("load"))
    _add_request_flags(parser.add_argument_group("requests"))
    _add_result_flags(parser.add_argument_group("result"))


def resolve(options: Mapping[str, Any]) -> dict[str, Any]:
    embeds = options["backend"] == "openai-embeddings" or options["endpoint"] in _EMBEDS
    derived = {"embeds": embeds}
    if embeds:
        _check_embeds(options)
        derived |= {
            "backend": "grpc" if options["backend"] == "grpc" else "openai-embeddings",
            "endpoint": None if options["endpoint"] in _EMBEDS else options["endpoint"],
            "embed_batch_size": 1 if options["embed_batch_size"] is None else options["embed_batch_size"],
        }
    elif options["embed_batch_size"] is not None:
        raise UsageError("--embed-batch-size requires --endpoint embeddings")
    derived["percentile_metrics"] = options["percentile_metrics"] or (("e2el",) if embeds else METRICS[:3])
    _check(resolved := {**options, **derived})
    return resolved


def _check_embeds(options: Mapping[str, Any]) -> None:
    if options["backend"] == "openai-chat":
        raise UsageError("--backend openai-chat is not allowed with --endpoint embeddings, which generates nothing")
    for name in (*SAMPLING, "ignore_eos", "logprobs", "json_schema_path", "lora_modules"):
        if options[name] is not None:
            raise UsageError(
                f"--{name.replace('_', '-')} is not allowed with --endpoint embeddings, which generates nothing"
            )
    for name in (*(options["percentile_metrics"] or ()), *dict(options["goodput"])):
        if name not in _EMBED_METRICS:
            raise UsageError(f"--endpoint embeddings has no metric {name}; choose from {', '.join(_EMBED_METRICS)}")


def _check(options: Mapping[str, Any]) -> None:
    is_timed = options.get("DatasetOptions.dataset_name") == "timed_trace"
    ramp = [options[name] is not None for name in RAMP]
    if any(ramp) and not all(ramp):
        raise UsageError("--ramp-up-strategy, --ramp-up-start-rps and --ramp-up-end-rps must be given together")
    if any(ramp) and options["request_rate"] is not None:
        raise UsageError("--request-rate is not allowed with --ramp-up-strategy; remove one of them")
    if is_timed and (any(ramp) or options["request_rate"] is not None):
        raise UsageError("--dataset-name timed_trace sets the arrival times; remove --request-rate and --ramp-up-*")
    least_of = {"num_warmups": 0, "max_concurrency": 1, "ready_check_timeout_sec": 0, "logprobs": 0}
    for name, least in {**least_of, "embed_batch_size": 1}.items():
        value = options[name]
        if value is not None and not value >= least:
            raise UsageError(f"--{name.replace('_', '-')} must be at least {least}, got {value}")
    for name in ("request_rate", "burstiness"):
        if options[name] is not None and not options[name] > 0:
            raise UsageError(f"--{name.replace('_', '-')} must be above 0, got {options[name]}")
    if options["backend"] == "openai-chat" and options["prompts"] == "ids":
        raise UsageError("--prompts ids is not allowed with --backend openai-chat, which sends text")
    if options["backend"] == "grpc":
        for name in ("endpoint", "insecure"):
            if options[name]:
                raise UsageError(f"--{name} applies to HTTP only; remove it or --backend grpc")
    for name in ("append_result", "result_dir", "result_filename"):
        if options[name] and not (options["save_result"] or options["save_detailed"]):
            raise UsageError(f"--{name.replace('_', '-')} needs --save-result")


def base_of(options: Mapping[str, Any]) -> str:
    """Return a URL without a path, or a gRPC target."""
    is_grpc = options["backend"] == "grpc"
    if options["base_url"]:
        base = options["base_url"].rstrip("/")
        if is_grpc:
            return base.removeprefix("http://").removeprefix("grpc://")
        if not base.startswith(("http://", "https://")):
            raise UsageError(f"--base-url must begin with http:// or https://, got {base}")
        return base
    port = options["port"] or (GRPC_PORT if is_grpc else HTTP_PORT)
    return f"{options['host']}:{port}" if is_grpc else f"http://{options['host']}:{port}"


def headers_of(options: Mapping[str, Any]) -> dict[str, str]:
    """Return the headers of `--header`, with the environment's API key unless given."""
    given = dict(options["header"])
    key = next((os.environ[name] for name in _KEYS if os.environ.get(name)), None)
    if key is None or any(name.lower() == "authorization" for name in given):
        return given
    return {"Authorization": f"Bearer {key}", **given}


def schema_in(options: Mapping[str, Any]) -> StructuredOutputsParams | None:
    return schema_of(options["json_schema_path"]) if options["json_schema_path"] else None


def fields_of(options: Mapping[str, Any], ignores_eos: bool) -> dict[str, Any]:
    fields: dict[str, Any] = {name: options[name] for name in SAMPLING if options[name] is not None}
    if (constraint := schema_in(options)) is not None:
        schema = constraint.json
        if options["backend"] == "grpc":
            fields["structured_outputs"] = {"json": schema}
        else:
            form = {"name": "bench", "schema": json.loads(schema)}
            fields["response_format"] = {"type": "json_schema", "json_schema": form}
    if ignores_eos:
        fields["ignore_eos"] = True
    if options["logprobs"] is not None:
        is_chat = options["backend"] == "openai-chat"
        count = options["logprobs"]
        fields |= {"logprobs": True, "top_logprobs": count} if is_chat else {"logprobs": count}
    return fields


def adds_ignore_eos(options: Mapping[str, Any], dataset_name: str) -> bool:
    return (
        options["ignore_eos"] is None
        and options["backend"] in ("openai", "openai-chat")
        and ignores_eos(options, dataset_name)
    )


def ignores_eos(options: Mapping[str, Any], dataset_name: str) -> bool:
    if options["ignore_eos"] is not None or options["embeds"]:
        return bool(options["ignore_eos"])
    return dataset_name in ("random", "prefix_repetition") and not options["json_schema_path"]


def _add_server_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--backend",
        type=_backend,
        choices=tuple(ENDPOINTS),
        default="openai",
        help="API of the server (default: openai; vllm: the same)",
    )
    group.add_argument(
        "--base-url", metavar="URL", help="address, instead of host and port; https:// for TLS; gRPC: unix:/path"
    )
    group.add_argument("--host", default="127.0.0.1", help="host of the server (default: %(default)s)")
    group.add_argument("--port", type=int, help="port of the server (default: 8000; gRPC: 50051)")
    group.add_argument(
        "--endpoint", metavar="PATH",
        help="path (default: /v1/completions or /v1/chat/completions); embeddings: embed the prompts, over gRPC too",
    )  # fmt: skip
    group.add_argument("--model", "-m", help="name of the model in requests (default: the first that the server lists)")
    group.add_argument(
        "--served-model-name",
        metavar="NAME",
        help="name of the model in requests; --model then only selects the tokenizer",
    )
    group.add_argument(
        "--tokenizer", metavar="MODEL", help="folder or hub id (default: the model's, otherwise the server's)"
    )
    group.add_argument(
        "--header", nargs="*", type=_pair, default=[], metavar="KEY=VALUE",
        help=f"HTTP header or gRPC metadata (default: an Authorization with the key in ${' or $'.join(_KEYS)})",
    )  # fmt: skip
    group.add_argument("--trust-remote-code", action="store_true", help="no effect; accepted as in vLLM")
    group.add_argument("--insecure", action="store_true", help="do not check the server's certificate")
    group.add_argument(
        "--ready-check-timeout-sec", type=float, default=0.0, metavar="SECONDS",
        help="maximum seconds to wait until the server answers a test request (default: 0, no test)",
    )  # fmt: skip


def _add_load_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--request-rate", type=float, help="requests per second (default: inf, all at once)")
    group.add_argument(
        "--burstiness", type=float, default=1.0,
        help="distribution of arrivals: 1: a Poisson process; below 1: bursts; inf: constant intervals (default: 1)",
    )  # fmt: skip
    group.add_argument("--disable-tqdm", action="store_true", help="show no progress")
    group.add_argument("--max-concurrency", type=int, help="maximum concurrent requests; others wait in the client")
    group.add_argument("--ramp-up-strategy", choices=("linear", "exponential"), help="how the request rate grows")
    group.add_argument("--ramp-up-start-rps", type=float, help="request rate at the start")
    group.add_argument("--ramp-up-end-rps", type=float, help="request rate at the end")
    group.add_argument("--num-warmups", type=int, default=0, help="warm-up requests, not measured (default: 0)")
    group.add_argument(
        "--num-processes", type=_processes, default=1, metavar="N",
        help="processes that send requests; auto: half of the processors (default: 1)",
    )  # fmt: skip


def _add_request_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--ignore-eos", action=argparse.BooleanOptionalAction, default=None,
        help="generate exactly the requested number of tokens (default: for random and prefix_repetition)",
    )  # fmt: skip
    group.add_argument("--prompts", choices=("text", "ids"), help="how prompts are sent (default: text; gRPC: ids)")
    for name, kind in SAMPLING.items():
        group.add_argument(f"--{name.replace('_', '-')}", type=kind, help="sampling parameter (default: the server's)")
    group.add_argument("--logprobs", type=int, help="log-probabilities to request for each token")
    group.add_argument(
        "--json-schema-path", metavar="FILE", help="constrain every answer to the JSON schema in this file"
    )
    group.add_argument(
        "--extra-body", type=_json_object, default={}, metavar="JSON",
        help="fields of every request (gRPC: options of the client); null removes a field",
    )  # fmt: skip
    group.add_argument(
        "--lora-modules", nargs="+", metavar="NAME", help="LoRA adapters of the server; each request uses one of them"
    )
    group.add_argument(
        "--embed-batch-size", type=int, metavar="N", help="prompts per request of --endpoint embeddings (default: 1)"
    )
    group.add_argument("--request-id-prefix", help="prefix of request ids (default: bench- and random characters)")


def _add_result_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--percentile-metrics", type=_metrics, metavar="NAMES",
        help=f"metrics to report, from {','.join(METRICS)} (default: ttft,tpot,itl; embeddings: e2el)",
    )  # fmt: skip
    group.add_argument(
        "--metric-percentiles",
        type=_percentiles,
        default=(99.0,),
        metavar="P,P",
        help="percentiles to report (default: 99)",
    )
    group.add_argument(
        "--goodput", nargs="+", type=_bound, default=[], metavar="NAME:MS",
        help="count the requests within these limits, such as ttft:200 tpot:30 e2el:5000",
    )  # fmt: skip
    group.add_argument("--save-result", action="store_true", help="write the result as JSON")
    group.add_argument(
        "--save-detailed", action="store_true", help="write the result with each request's times, text and error"
    )
    group.add_argument(
        "--append-result", action="store_true", help="append the result to an existing file, as another line"
    )
    group.add_argument("--result-dir", metavar="DIR", help="folder of the result (default: the current one)")
    group.add_argument(
        "--result-filename", metavar="NAME", help="file name of the result (default: from label, rate, model and time)"
    )
    group.add_argument(
        "--metadata", nargs="*", type=_pair, default=[], metavar="KEY=VALUE", help="further entries of the result"
    )
    group.add_argument("--label", help="label of the result (default: the backend)")
    group.add_argument("--plot", metavar="FILE", help="draw latencies and the server's timeline, .png or .html")
    group.add_argument(
        "--metrics-url",
        metavar="URL",
        help="metrics for the timeline (default: the server's /metrics; gRPC: on port 8000)",
    )


def _backend(text: str) -> str:
    return "openai" if text == "vllm" else text


def _processes(text: str) -> int | None:
    if text == "auto":
        return None
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number above 0 or auto, got {text}")
    return int(text)


def _pair(text: str) -> tuple[str, str]:
    name, has_value, value = text.partition("=")
    if not has_value or not name.strip():
        raise argparse.ArgumentTypeError("expected KEY=VALUE")  # omits the text, perhaps a key
    return name.strip(), value.strip()


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"{error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("expected a JSON object")
    return value


def _metrics(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    unknown = next((name for name in names if name not in METRICS), None)
    if unknown is not None:
        raise argparse.ArgumentTypeError(f"unknown metric {unknown}; choose from {', '.join(METRICS)}")
    return names


def _percentiles(text: str) -> tuple[float, ...]:
    try:
        values = tuple(float(value) for value in text.split(","))
    except ValueError:
        values = ()
    if not values or not all(0 <= value <= 100 for value in values):
        raise argparse.ArgumentTypeError(f"expected numbers from 0 to 100, separated by commas, got {text}")
    return values


def _bound(text: str) -> tuple[str, float]:
    name, _, value = text.partition(":")
    try:
        bound = float(value)
    except ValueError:
        bound = math.nan
    if name not in GOODPUT or not bound >= 0:
        raise argparse.ArgumentTypeError(f"expected {'|'.join(GOODPUT)}:MILLISECONDS, got {text}")
    return name, bound
