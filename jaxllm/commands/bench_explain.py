"""`jaxllm bench explain`: break down the time of a step."""

from __future__ import annotations

from typing import Any

from jaxllm.commands.arguments import Subparsers, new_command
from jaxllm.commands.bench_engine import add_engine, check_context, read_engine
from jaxllm.commands.bench_results import add_number, write
from jaxllm.commands.session import add_verbose, open_llm

# Otherwise programs could be larger than steps need.
ENGINE_DEFAULTS = {"EngineConfig.precompile": "all"}


def add(benchmarks: Subparsers) -> None:
    parser = new_command(
        benchmarks, "explain", run, "split the time of a step: attention, matrix products, sampling, host, waiting"
    )
    parser.description = (
        "Run a batch under the profiler and split the time of its steps. By default all programs are compiled first."
    )
    add_number(parser, "--batch-size", 8, "concurrent requests")
    add_number(parser, "--input-len", 32, "tokens of a prompt")
    add_number(parser, "--num-skipped", 8, "steps before the trace; 0: trace the prompts too", least=0)
    add_number(parser, "--num-steps", 32, "steps in the trace")
    parser.add_argument("--profile", metavar="DIR", help="keep the trace here, for ui.perfetto.dev")
    add_engine(parser, ENGINE_DEFAULTS, has_plot=False)
    add_verbose(parser)


def run(options: dict[str, Any]) -> int:
    options, config = read_engine(options, ENGINE_DEFAULTS)
    from jaxllm.bench.explain import report
    from jaxllm.bench.traced import batch, trace

    num_steps = options["num_skipped"] + options["num_steps"]
    # A prompt chunk yields no token; the last step overlaps another.
    output_len = num_steps + 2
    check_context(config, options["input_len"], output_len)
    with open_llm(options) as llm:
        explanation = trace(
            llm.engine,
            batch(llm.engine.model.vocab_size, options["batch_size"], options["input_len"], output_len),
            options["num_skipped"],
            options["num_steps"],
            options["profile"],
        )
    print(report(explanation))
    settings = {name: options[name] for name in ("batch_size", "input_len", "num_skipped", "num_steps")}
    write(options, {"model_id": config.model, **settings, **explanation.as_json()})
    return 0
