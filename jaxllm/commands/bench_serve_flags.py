"""The flags of `bench serve`, what they turn into, and which do not go together. Loads nothing."""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Mapping
from typing import Any

from jaxllm.commands.arguments import Usage
from jaxllm.commands.constraint_flags import schema_of

METRICS = ("ttft", "tpot", "itl", "e2el", "client_queue_time")
GOODPUT = ("ttft", "tpot", "e2el")
ENDPOINTS = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions", "grpc": ""}
SAMPLING = {
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "presence_penalty": float,
    "frequency_penalty": float,
    "repetition_penalty": float,
}
HTTP_PORT, GRPC_PORT = 8000, 50051
_KEYS = ("OPENAI_API_KEY", "JAXLLM_API_KEY")  # where a key may be, first come first served
RAMP = ("ramp_up_strategy", "ramp_up_start_rps", "ramp_up_end_rps")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add all but those of the dataset."""
    _add_server_flags(parser.add_argument_group("server"))
    _add_load_flags(parser.add_argument_group("load"))
    _add_request_flags(parser.add_argument_group("requests"))
    _add_result_flags(parser.add_argument_group("result"))


def check(options: Mapping[str, Any]) -> None:
    """Refuse values, and flags that do not go together."""
    is_timed = options.get("DatasetOptions.dataset_name") == "timed_trace"
    ramp = [options[name] is not None for name in RAMP]
    if any(ramp) and not all(ramp):
        raise Usage("--ramp-up-strategy, --ramp-up-start-rps and --ramp-up-end-rps go together")
    if any(ramp) and options["request_rate"] is not None:
        raise Usage("--request-rate is given by the ramp; leave one of them out")
    if is_timed and (any(ramp) or options["request_rate"] is not None):
        raise Usage("--dataset-name timed_trace has times of its own; leave --request-rate and the ramp out")
    for name, least in (("num_warmups", 0), ("max_concurrency", 1), ("ready_check_timeout_sec", 0), ("logprobs", 0)):
        value = options[name]
        if value is not None and not value >= least:
            raise Usage(f"--{name.replace('_', '-')} must be at least {least}, got {value}")
    for name in ("request_rate", "burstiness"):
        if options[name] is not None and not options[name] > 0:
            raise Usage(f"--{name.replace('_', '-')} must be above 0, got {options[name]}")
    if options["backend"] == "openai-chat" and options["prompts"] == "ids":
        raise Usage("--prompts ids: a conversation is sent as text")
    if options["backend"] == "grpc":
        for name in ("endpoint", "insecure"):
            if options[name]:
                raise Usage(f"--{name} is of HTTP")
    for name in ("append_result", "result_dir", "result_filename"):
        if options[name] and not (options["save_result"] or options["save_detailed"]):
            raise Usage(f"--{name.replace('_', '-')} needs --save-result")


def base_of(options: Mapping[str, Any]) -> str:
    """Return the server's address: a URL without a path, or gRPC's target."""
    is_grpc = options["backend"] == "grpc"
    if options["base_url"]:
        base = options["base_url"].rstrip("/")
        if is_grpc:
            return base.removeprefix("http://").removeprefix("grpc://")
        if not base.startswith(("http://", "https://")):
            raise Usage(f"--base-url must begin with http:// or https://, got {base}")
        return base
    port = options["port"] or (GRPC_PORT if is_grpc else HTTP_PORT)
    return f"{options['host']}:{port}" if is_grpc else f"http://{options['host']}:{port}"


def headers_of(options: Mapping[str, Any]) -> dict[str, str]:
    """Return the headers of every request, with the key of the environment unless a header has another."""
    given = dict(options["header"])
    key = next((os.environ[name] for name in _KEYS if os.environ.get(name)), None)
    if key is None or any(name.lower() == "authorization" for name in given):
        return given
    return {"Authorization": f"Bearer {key}", **given}


def fields_of(options: Mapping[str, Any], ignores_eos: bool) -> dict[str, Any]:
    """Return what every request says beside its prompt and length."""
    fields: dict[str, Any] = {name: options[name] for name in SAMPLING if options[name] is not None}
    if options["json_schema_path"]:
        schema = schema_of(options["json_schema_path"]).json
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
    """Whether requests over HTTP say so by default."""
    return options["ignore_eos"] is None and options["backend"] != "grpc" and ignores_eos(options, dataset_name)


def ignores_eos(options: Mapping[str, Any], dataset_name: str) -> bool:
    """Whether answers go on after the model's end: by default where their lengths are drawn and no schema ends them."""
    if options["ignore_eos"] is not None:
        return options["ignore_eos"]
    return dataset_name in ("random", "prefix_repetition") and not options["json_schema_path"]


def _add_server_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--backend", type=_backend, choices=tuple(ENDPOINTS), default="openai", help="(default: openai; also vllm)"
    )
    group.add_argument("--base-url", metavar="URL", help="instead of host and port; https:// for TLS; gRPC: unix:/path")
    group.add_argument("--host", default="127.0.0.1", help="(default: %(default)s)")
    group.add_argument("--port", type=int, help="(default: 8000; gRPC: 50051)")
    group.add_argument("--endpoint", metavar="PATH", help="(default: /v1/completions or /v1/chat/completions)")
    group.add_argument("--model", "-m", help="name of the model in requests (default: the first that the server lists)")
    group.add_argument(
        "--served-model-name", metavar="NAME", help="name of the model in requests; --model names its tokenizer then"
    )
    group.add_argument(
        "--tokenizer", metavar="MODEL", help="folder or hub id (default: the model's, else the server's own)"
    )
    group.add_argument(
        "--header", nargs="*", type=_pair, default=[], metavar="KEY=VALUE",
        help=f"HTTP header or gRPC metadata; without an Authorization, the key is that of ${' or $'.join(_KEYS)}",
    )  # fmt: skip
    group.add_argument("--trust-remote-code", action="store_true", help="no effect; as in vLLM's command lines")
    group.add_argument("--insecure", action="store_true", help="do not check the server's certificate")
    group.add_argument(
        "--ready-check-timeout-sec", type=float, default=0.0, metavar="SECONDS",
        help="wait so long for the server to answer a test request (default: 0, no test)",
    )  # fmt: skip


def _add_load_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--request-rate", type=float, help="requests a second (default: inf, all at once)")
    group.add_argument(
        "--burstiness", type=float, default=1.0,
        help="of arrivals: 1 is a Poisson process, less comes in bursts, inf is even (default: 1)",
    )  # fmt: skip
    group.add_argument("--disable-tqdm", action="store_true", help="show no progress")
    group.add_argument("--max-concurrency", type=int, help="requests under way at most; others wait in the client")
    group.add_argument("--ramp-up-strategy", choices=("linear", "exponential"), help="a rate that grows")
    group.add_argument("--ramp-up-start-rps", type=float, help="its rate at the start")
    group.add_argument("--ramp-up-end-rps", type=float, help="its rate at the end")
    group.add_argument("--num-warmups", type=int, default=0, help="requests before, not measured (default: 0)")
    group.add_argument(
        "--num-processes", type=_processes, default=1, metavar="N",
        help="that send; auto: half of the processors (default: 1)",
    )  # fmt: skip


def _add_request_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--ignore-eos", action=argparse.BooleanOptionalAction, default=None,
        help="have answers be as long as asked for (default: with random and prefix_repetition)",
    )  # fmt: skip
    group.add_argument("--prompts", choices=("text", "ids"), help="how prompts are sent (default: text; gRPC: ids)")
    for name, kind in SAMPLING.items():
        group.add_argument(f"--{name.replace('_', '-')}", type=kind, help="(default: the server's)")
    group.add_argument("--logprobs", type=int, help="likeliest tokens to ask for")
    group.add_argument("--json-schema-path", metavar="FILE", help="have every answer be JSON after this schema")
    group.add_argument(
        "--extra-body", type=_json_object, default={}, metavar="JSON",
        help="fields of every request (gRPC: options of the client); null takes one out",
    )  # fmt: skip
    group.add_argument("--request-id-prefix", help="(default: bench- and a word of chance)")


def _add_result_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--percentile-metrics", type=_metrics, default=METRICS[:3], metavar="NAMES",
        help=f"of {','.join(METRICS)} (default: ttft,tpot,itl)",
    )  # fmt: skip
    group.add_argument("--metric-percentiles", type=_percentiles, default=(99.0,), metavar="P,P", help="(default: 99)")
    group.add_argument(
        "--goodput", nargs="+", type=_bound, default=[], metavar="NAME:MS",
        help="count requests that are quick enough, as ttft:200 tpot:30 e2el:5000",
    )  # fmt: skip
    group.add_argument("--save-result", action="store_true", help="write the result as JSON")
    group.add_argument("--save-detailed", action="store_true", help="with each request's times, text and error")
    group.add_argument("--append-result", action="store_true", help="add it to a file that is there, as another line")
    group.add_argument("--result-dir", metavar="DIR", help="(default: the current one)")
    group.add_argument("--result-filename", metavar="NAME", help="(default: made of label, rate, model and time)")
    group.add_argument("--metadata", nargs="*", type=_pair, default=[], metavar="KEY=VALUE", help="more for the JSON")
    group.add_argument("--label", help="of the result (default: the backend)")
    group.add_argument("--plot", metavar="FILE", help="draw latencies and the server's timeline, .png or .html")
    group.add_argument(
        "--metrics-url", metavar="URL", help="of the timeline (default: the server's /metrics; gRPC: on port 8000)"
    )


def _backend(text: str) -> str:
    """Read a backend: vLLM's name for the completions of OpenAI's API is one, too."""
    return "openai" if text == "vllm" else text


def _processes(text: str) -> int | None:
    """Read a number of processes; None is auto."""
    if text == "auto":
        return None
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number above 0 or auto, got {text}")
    return int(text)


def _pair(text: str) -> tuple[str, str]:
    name, has_value, value = text.partition("=")
    if not has_value or not name.strip():
        raise argparse.ArgumentTypeError("expected KEY=VALUE")  # without what was typed: it may be a key
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
        raise argparse.ArgumentTypeError(f"{unknown} is none of {', '.join(METRICS)}")
    return names


def _percentiles(text: str) -> tuple[float, ...]:
    try:
        values = tuple(float(value) for value in text.split(","))
    except ValueError:
        values = ()
    if not values or not all(0 <= value <= 100 for value in values):
        raise argparse.ArgumentTypeError(f"expected numbers from 0 to 100 with commas between, got {text}")
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
