"""`jaxllm bench serve`: load-test any server, with vLLM's flags, report and JSON."""

from __future__ import annotations

import json
import math
import os
import sys
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from jaxllm.bench.workload import DatasetOptions
from jaxllm.commands import bench_serve_flags as flags
from jaxllm.commands.arguments import Subparsers, new_command
from jaxllm.commands.bench_results import check_output
from jaxllm.commands.bench_workload import dataset_options
from jaxllm.commands.flags import add_flags
from jaxllm.errors import UserError

if TYPE_CHECKING:
    from jaxllm.bench.datasets import Coder
    from jaxllm.bench.serve import Measurement
    from jaxllm.bench.target import Target
    from jaxllm.bench.workload import Job

_OTHER_PROMPTS = 1 << 31  # added to the seed of uncached warm-up prompts

_WITH_LENGTHS = ("random", "sonnet", "prefix_repetition")  # that use --input-len
_CHANGE_LENGTHS = frozenset(("max_tokens", "max_completion_tokens", "truncate_prompt_tokens"))


def add(benchmarks: Subparsers) -> None:
    parser = new_command(benchmarks, "serve", run, "measure a server under load, over the OpenAI API or gRPC")
    parser.description = "Send requests to a server, over the OpenAI API or gRPC, and report latencies and throughput."
    add_flags(parser.add_argument_group("dataset"), DatasetOptions)
    flags.add_flags(parser)


def run(options: dict[str, Any]) -> int:
    options = flags.resolve(options)
    dataset = dataset_options(options)
    check_output(options)
    from jaxllm.bench import clients, discovery, serve
    from jaxllm.bench.workload import to_embed

    target = _target(options, dataset)
    clients.open_client(target)  # fails early without a library
    patience, root = options["ready_check_timeout_sec"], target.model
    if not target.model:
        name, root = discovery.wait_for(lambda: discovery.find_model(target), patience)
        target = replace(target, model=name)
    asked = options["tokenizer"] or (options["model"] if options["served_model_name"] else None)
    tokenizer, tokenizer_id = discovery.find_tokenizer(asked, target, root)
    warmups, jobs = _jobs(options, dataset, tokenizer)
    _check_context(target, dataset, jobs)
    if options["embeds"]:
        warmups, jobs = (to_embed(part, options["embed_batch_size"]) for part in (warmups, jobs))
    if options["lora_modules"]:
        random = Random(dataset.seed)
        warmups, jobs = (
            [replace(job, model=random.choice(options["lora_modules"])) for job in part] for part in (warmups, jobs)
        )
    # Only a default: dropped if the server refuses it.
    is_strict = flags.adds_ignore_eos(options, dataset.dataset_name) and discovery.refuses(target, "ignore_eos")
    if is_strict:
        target = replace(target, fields={name: value for name, value in target.fields.items() if name != "ignore_eos"})
    if patience:
        discovery.wait_for(lambda: discovery.check_answers(target, (warmups or jobs)[0]), patience)
    has_timeline = options["plot"] or options["save_detailed"] or options["metrics_url"]
    measurement = serve.measure(
        target,
        jobs,
        _arrivals(options, dataset, jobs),
        warmups=warmups,
        max_concurrency=options["max_concurrency"],
        num_processes=options["num_processes"] or serve.half_of_cpus(),
        fetch_metrics=discovery.metrics_fetcher(_metrics_url(options, target), target) if has_timeline else None,
        has_bar=sys.stderr.isatty() and not options["disable_tqdm"],
    )
    num_counted = serve.count_tokens(
        measurement.outcomes, lambda text: len(tokenizer.encode(text, add_special_tokens=False))
    )
    result = _result(options, dataset, target, tokenizer_id, measurement)
    result["warnings"] = list(
        serve.doubts(
            measurement.outcomes,
            result["client"],
            ignores_eos="ignore_eos" in target.fields,
            compares_prompts=target.backend != "openai-chat",  # chat templates add tokens
            num_counted=num_counted,
        )
    )
    if is_strict:
        result["warnings"].append("this server refuses ignore_eos: its answers may be shorter than requested")
    if dataset.dataset_name == "random" and not dataset.random_prefix_len:  # no common prefix
        result["warnings"] += serve.cache_doubt(measurement.counted)
    if has_timeline and measurement.timeline is None:
        result["warnings"].append("no timeline: the server has no metrics of jaxllm or vLLM; set --metrics-url")
    _tell(options, result, measurement)
    return 130 if measurement.was_interrupted else int(result["completed"] == 0)


def _target(options: Mapping[str, Any], dataset: DatasetOptions) -> Target:
    from jaxllm.bench.target import Target

    endpoint = options["endpoint"] or flags.ENDPOINTS[options["backend"]]
    return Target(
        backend=options["backend"],
        base=flags.base_of(options),
        endpoint=endpoint if not endpoint or endpoint.startswith("/") else f"/{endpoint}",
        model=options["served_model_name"] or options["model"] or "",
        fields=flags.fields_of(options, flags.ignores_eos(options, dataset.dataset_name)),
        extra=options["extra_body"],
        headers=flags.headers_of(options),
        request_id_prefix=options["request_id_prefix"] or f"bench-{uuid.uuid4().hex[:8]}-",
        is_insecure=options["insecure"],
        embeds=options["embeds"],
    )


def _jobs(options: Mapping[str, Any], dataset: DatasetOptions, tokenizer: Coder) -> tuple[list[Job], list[Job]]:
    from jaxllm.bench.datasets import make_jobs

    as_text = (options["prompts"] or ("ids" if options["backend"] == "grpc" else "text")) == "text"
    jobs = make_jobs(dataset, tokenizer, as_text)
    count = options["num_warmups"]
    if not count:
        return [], jobs
    other = replace(dataset, seed=dataset.seed + _OTHER_PROMPTS, num_prompts=count, no_oversample=False)
    return make_jobs(other, tokenizer, as_text), jobs


def _check_context(target: Target, dataset: DatasetOptions, jobs: Sequence[Job]) -> None:
    from jaxllm.bench import discovery

    if dataset.dataset_name not in _WITH_LENGTHS or not _CHANGE_LENGTHS.isdisjoint(target.extra):
        return
    lengths = [(job.prompt_tokens, 0 if target.embeds else job.max_tokens) for job in jobs]
    num_in, num_out = max(lengths, key=sum)
    context = discovery.find_context(target)
    if context is not None and num_in + num_out > context:
        raise UserError(
            f"a prompt of {num_in} tokens with an output of {num_out} is longer than the server's context of "
            f"{context}; lower --input-len or --output-len."
        )


def _arrivals(options: Mapping[str, Any], dataset: DatasetOptions, jobs: Sequence[Job]) -> list[float]:
    from jaxllm.bench.arrivals import arrival_times, ramped_times

    if dataset.dataset_name == "timed_trace":
        return [job.arrival_s or 0.0 for job in jobs]
    shape, seed = options["burstiness"], dataset.seed
    if options["ramp_up_strategy"] is None:
        return arrival_times(len(jobs), options["request_rate"] or math.inf, shape, seed).tolist()
    ends = options["ramp_up_start_rps"], options["ramp_up_end_rps"]
    return ramped_times(len(jobs), *ends, options["ramp_up_strategy"], shape, seed).tolist()


def _metrics_url(options: Mapping[str, Any], target: Target) -> str:
    if options["metrics_url"]:
        return options["metrics_url"]
    return f"http://{options['host']}:{flags.HTTP_PORT}/metrics" if target.is_grpc else f"{target.base}/metrics"


def _result(
    options: Mapping[str, Any], dataset: DatasetOptions, target: Target, tokenizer_id: str, measurement: Measurement
) -> dict[str, Any]:
    from jaxllm.bench import environment, report, serve

    embeds = target.embeds
    figures = report.summarize(
        measurement.outcomes,
        measurement.duration,
        options["percentile_metrics"],
        options["metric_percentiles"],
        dict(options["goodput"]),
        embeds=embeds,
    )
    num_tokens = figures["total_input_tokens" if embeds else "total_output_tokens"]
    rate = options["request_rate"] or math.inf
    ramp = {name: options[name] for name in flags.RAMP if options[name] is not None}
    return {
        "date": datetime.now().strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": options["backend"],
        "backend": options["backend"],
        "label": options["label"],
        "model_id": target.model,
        "tokenizer_id": tokenizer_id,
        "num_prompts": len(measurement.outcomes),
        **dict(options["metadata"]),
        "request_rate": rate if rate < math.inf else "inf",
        "burstiness": options["burstiness"] if options["burstiness"] < math.inf else "inf",
        "max_concurrency": options["max_concurrency"],
        **ramp,
        **({"lora_modules": options["lora_modules"]} if options["lora_modules"] else {}),
        **({"embed_batch_size": options["embed_batch_size"]} if embeds else {}),
        **figures,
        **(report.details(measurement.outcomes, measurement.start, embeds=embeds) if _is_detailed(options) else {}),
        "dataset_name": dataset.dataset_name,
        "seed": dataset.seed,
        "num_warmups": options["num_warmups"],
        "was_interrupted": measurement.was_interrupted,
        "error_kinds": [{"count": count, "error": error} for count, error in report.error_kinds(measurement.outcomes)],
        "client": serve.client_cost(measurement.costs, num_tokens),
        "timeline": measurement.timeline,
        "environment": environment.describe(),
    }


def _is_detailed(options: Mapping[str, Any]) -> bool:
    return bool(options["save_detailed"] or options["plot"])


def _tell(options: Mapping[str, Any], result: dict[str, Any], measurement: Measurement) -> None:
    from jaxllm.bench import plot, report

    print(report.render(result, options["percentile_metrics"], options["metric_percentiles"]))
    sys.stdout.flush()
    client = result["client"]
    notes = [
        f"client: {client['processes']} process(es), {client['microseconds_per_message']:.0f} µs of CPU a message, "
        f"{client['tokens_per_message']:.1f} tokens a message, "
        f"the busiest at {client['busiest_core_share']:.0%} of a core",
        *(f"{kind['count']} failed: {kind['error']}{_cure(kind['error'])}" for kind in result["error_kinds"]),
        *(f"warning: {doubt}" for doubt in result["warnings"]),
    ]
    if measurement.was_interrupted:
        notes.append("interrupted: these are the results of the finished requests")
    print("\n".join(notes), file=sys.stderr)
    if options["plot"]:
        plot.plot(result, options["plot"])
        print(f"wrote {options['plot']}", file=sys.stderr)
    if options["save_result"] or options["save_detailed"]:
        _save(options, result)


def _cure(error: str) -> str:
    if "HTTP 429" in error or "queue is full" in error.lower():
        return " (limit with --max-concurrency, or serve with --max-queued-requests)"
    return ""


def _save(options: Mapping[str, Any], result: Mapping[str, Any]) -> None:
    cap = "" if result["max_concurrency"] is None else f"-concurrency{result['max_concurrency']}"
    label, model = result["label"] or result["backend"], str(result["model_id"]).split("/")[-1]
    name = options["result_filename"] or f"{label}-{result['request_rate']}qps{cap}-{model}-{result['date']}.json"
    path = Path(options["result_dir"] or ".").expanduser() / name
    kept = result if options["save_detailed"] else {key: value for key, value in result.items() if key not in _DETAILS}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        begin = "\n" if options["append_result"] and _lacks_end(path) else ""
        with path.open("a" if options["append_result"] else "w", encoding="utf-8") as file:
            file.write(f"{begin}{json.dumps(kept, allow_nan=False)}\n")
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from error
    print(f"wrote {path}", file=sys.stderr)


def _lacks_end(path: Path) -> bool:
    if not path.is_file() or not path.stat().st_size:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


_DETAILS = (
    *("input_lens", "output_lens", "ttfts", "itls", "e2els", "start_times", "generated_texts", "errors", "timeline"),
)
