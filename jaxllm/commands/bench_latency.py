"""`jaxllm bench latency`: time one batch."""

from __future__ import annotations

from typing import Any

from jaxllm.commands.arguments import Subparsers, new_command
from jaxllm.commands.bench_engine import add_engine, check_context, read_engine
from jaxllm.commands.bench_results import add_number, write
from jaxllm.commands.bench_trace import add_trace, check_trace, traced
from jaxllm.commands.session import add_verbose, open_llm

ENGINE_DEFAULTS = {"EngineConfig.precompile": "all", "EngineConfig.enable_prefix_caching": False}


def add(benchmarks: Subparsers) -> None:
    parser = new_command(benchmarks, "latency", run, "measure the time of one batch")
    parser.description = (
        "Measure the time of one batch, from its prompts (random tokens) to its last token, "
        "repeatedly. By default all programs are compiled first, and prompts are not cached."
    )
    add_number(parser, "--input-len", 32, "tokens of a prompt")
    add_number(parser, "--output-len", 128, "tokens of an output")
    add_number(parser, "--batch-size", 8, "concurrent prompts")
    add_number(parser, "--n", 1, "outputs per prompt")
    add_number(parser, "--num-iters", 30, "measured batches")
    add_number(parser, "--num-iters-warmup", 10, "warm-up batches, not measured", least=0)
    add_number(parser, "--seed", 0, "seed of the prompts", least=0)
    parser.add_argument("--disable-detokenize", action="store_true", help="generate tokens without text")
    add_trace(parser)
    add_engine(parser, ENGINE_DEFAULTS)
    add_verbose(parser)


def run(options: dict[str, Any]) -> int:
    options, config = read_engine(options, ENGINE_DEFAULTS)
    check_trace(options)
    check_context(config, options["input_len"], options["output_len"])
    from jaxllm.bench import drafts, latency
    from jaxllm.bench.traced import batch

    with open_llm(options) as llm:
        before = drafts.counted(llm.engine.metrics)
        latencies = latency.measure(
            llm,
            batch_size=options["batch_size"],
            input_len=options["input_len"],
            output_len=options["output_len"],
            n=options["n"],
            detokenize=not options["disable_detokenize"],
            num_warmups=options["num_iters_warmup"],
            num_iters=options["num_iters"],
            seed=options["seed"],
        )
        text, figures = latency.report(latencies)
        lines, drafted = drafts.report(before, drafts.counted(llm.engine.metrics))
        print(text + lines)
        figures |= drafted
        sizes = (
            llm.engine.model.vocab_size,
            options["batch_size"] * options["n"],
            options["input_len"],
            options["output_len"],
        )
        figures |= traced(llm, lambda: batch(*sizes), options)
    write(options, {"model_id": config.model, **figures})
    return 0
