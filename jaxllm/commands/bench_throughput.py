"""`jaxllm bench throughput`: time requests offline, with jaxllm or transformers."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from jaxllm.bench.workload import DatasetOptions
from jaxllm.commands.arguments import Subparsers, UsageError, new_command
from jaxllm.commands.bench_engine import add_engine, check_context, read_engine
from jaxllm.commands.bench_results import add_number, positive, write
from jaxllm.commands.bench_serve_flags import schema_in
from jaxllm.commands.bench_trace import add_trace, check_trace, traced
from jaxllm.commands.bench_workload import dataset_options
from jaxllm.commands.flags import add_flags, flag_of, given
from jaxllm.commands.session import add_verbose, open_llm
from jaxllm.config import EngineConfig

if TYPE_CHECKING:
    from jaxllm.bench.throughput import Served
    from jaxllm.bench.workload import Job

ENGINE_DEFAULTS = {"EngineConfig.precompile": "all"}
READ_BY_HF = {"dtype", "revision", "load_format", "tokenizer"}


def add(benchmarks: Subparsers) -> None:
    parser = new_command(benchmarks, "throughput", run, "measure many requests at once, offline")
    parser.description = (
        "Measure the throughput of many requests that are submitted at once, without a server. Outputs have "
        "exactly the lengths of the dataset. By default all programs are compiled first."
    )
    parser.add_argument(
        "--backend", choices=("jaxllm", "hf"), default="jaxllm", help="engine to measure; hf: transformers on torch"
    )
    add_number(parser, "--n", 1, "outputs per prompt")
    add_number(parser, "--num-warmups", 8, "warm-up requests, of 4 tokens", least=0)
    parser.add_argument("--async-engine", action="store_true", help="use AsyncLLM, with a reader for each request")
    parser.add_argument("--disable-detokenize", action="store_true", help="generate tokens without text")
    parser.add_argument(
        "--json-schema-path",
        metavar="FILE",
        help="constrain every output to the JSON schema in this file, within its length",
    )
    parser.add_argument("--hf-max-batch-size", type=positive, metavar="N", help="prompts in a batch of --backend hf")
    add_trace(parser)
    add_flags(parser.add_argument_group("dataset"), DatasetOptions)
    add_engine(parser, ENGINE_DEFAULTS)
    add_verbose(parser)


def run(options: dict[str, Any]) -> int:
    _check_backend(options)
    check_trace(options)
    options, config = read_engine(options, ENGINE_DEFAULTS)
    asked = given(options, DatasetOptions)
    dataset = dataset_options(options, "sharegpt" if "dataset_path" in asked else "random")
    if asked.keys().isdisjoint(("dataset_name", "dataset_path")):
        print("No --dataset-path: prompts are random tokens (--dataset-name random).", file=sys.stderr)
    constraint = schema_in(options)
    from jaxllm.bench import throughput
    from jaxllm.bench.datasets import make_jobs
    from jaxllm.text.tokenizer import load_tokenizer

    jobs = make_jobs(dataset, load_tokenizer(config.tokenizer or config.model, config.revision), as_text=False)
    if constraint is not None:
        jobs = [replace(job, structured_outputs=constraint) for job in jobs]
    explained: dict[str, Any] = {}
    if options["backend"] == "hf":
        served = _with_transformers(config, options, jobs)
    else:
        longest = max(jobs, key=lambda job: job.prompt_tokens + job.max_tokens)
        check_context(config, longest.prompt_tokens, longest.max_tokens)
        served, explained = _with_jaxllm(options, jobs)
    text, figures = throughput.report(options["backend"], jobs, served)
    figures |= explained
    print(text)
    if served.num_compiled:
        print(
            f"jaxllm: {served.num_compiled} programs were compiled during the measurement, which includes that time.",
            file=sys.stderr,
        )
    write(options, {"model_id": config.model, "dataset_name": dataset.dataset_name, "n": options["n"], **figures})
    return 0


def _check_backend(options: Mapping[str, Any]) -> None:
    is_traced = options["explain"] or options["profile"] is not None
    if is_traced and (options["backend"] == "hf" or options["async_engine"]):
        raise UsageError("--explain and --profile require --backend jaxllm without --async-engine")
    if options["backend"] == "jaxllm":
        if options["hf_max_batch_size"] is not None:
            raise UsageError("--hf-max-batch-size requires --backend hf")
        return
    if options["hf_max_batch_size"] is None:
        raise UsageError("--backend hf requires --hf-max-batch-size")
    for name in ("async_engine", "disable_detokenize", "json_schema_path"):
        if options[name]:
            raise UsageError(f"--{name.replace('_', '-')} requires --backend jaxllm")
    for name in given(options, EngineConfig):
        if name not in READ_BY_HF:
            raise UsageError(f"{flag_of(name, EngineConfig, has_sampling=True)} requires --backend jaxllm")
    from jaxllm.bench import huggingface

    huggingface.check()


def _with_jaxllm(options: Mapping[str, Any], jobs: Sequence[Job]) -> tuple[Served, dict[str, Any]]:
    from jaxllm.bench import throughput

    settings = (options["n"], not options["disable_detokenize"], options["num_warmups"])
    if options["async_engine"]:
        return throughput.run_async({"model": options["model"], **given(options, EngineConfig)}, jobs, *settings), {}
    with open_llm(options) as llm:
        served = throughput.run(llm, jobs, *settings)
        llm.reset_prefix_cache()
        return served, traced(llm, lambda: throughput.requests(jobs, *settings[:2]), options)


def _with_transformers(config: EngineConfig, options: Mapping[str, Any], jobs: Sequence[Job]) -> Served:
    from jaxllm.bench.huggingface import HuggingFace

    model = HuggingFace(config.model, config.dtype, config.revision, has_weights=config.load_format != "dummy")
    return model.run(jobs, options["n"], options["hf_max_batch_size"], options["num_warmups"])
