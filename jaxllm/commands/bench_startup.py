"""`jaxllm bench startup`: time cold and warm starts."""

from __future__ import annotations

import sys
from typing import Any

from jaxllm.commands.arguments import Subparsers, add_model, engine_config, new_command
from jaxllm.commands.bench_results import add_number, add_output, check_output, write
from jaxllm.commands.flags import add_engine_flags, given
from jaxllm.config import EngineConfig
from jaxllm.errors import EngineError


def add(benchmarks: Subparsers) -> None:
    parser = new_command(benchmarks, "startup", run, "measure starts, cold and warm")
    parser.description = (
        "Measure the time from the start of the process until the engine is ready, until the first token, and "
        "until all programs are compiled: cold with an empty cache of programs, warm with that of a cold start. With "
        "--compilation-cache-dir, only warm starts with that cache."
    )
    add_number(parser, "--num-iters", 3, "starts of each kind")
    parser.add_argument("--all-programs", action="store_true", help="wait for all programs (minutes in a cold start)")
    for kind in ("cold", "warm"):
        parser.add_argument(
            f"--limit-{kind}",
            type=float,
            metavar="SECONDS",
            help=f"fail if the first token of {kind} starts takes longer",
        )
    add_model(parser)
    add_output(parser, has_plot=False)
    add_engine_flags(parser.add_argument_group("engine"), skipped={"logits_processors"})


def run(options: dict[str, Any]) -> int:
    config = engine_config(options)
    check_output(options)
    from tqdm import tqdm

    from jaxllm.bench import startup

    settings = {"model": config.model, **given(options, EngineConfig)}
    cache = settings.pop("compilation_cache_dir", None)
    num_iters = options["num_iters"]
    with tqdm(total=num_iters * (1 if cache else 2), unit="start", disable=not sys.stderr.isatty()) as bar:
        starts = startup.measure(settings, num_iters, options["all_programs"], cache, lambda _: bar.update())
    print(startup.report(starts))
    figures = startup.summary(starts)
    write(options, {"model_id": config.model, **figures})
    for kind in ("cold", "warm"):
        limit, found = options[f"limit_{kind}"], figures.get(f"{kind}_first_token_s")
        if limit is not None and found is not None and found > limit:
            raise EngineError(f"the first token of a {kind} start took {found:.1f} s; the limit is {limit:g} s.")
    return 0
