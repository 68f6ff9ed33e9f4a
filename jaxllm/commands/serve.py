"""`jaxllm serve`: convert flags to settings, then run `jaxllm_server`."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from jaxllm.commands.arguments import (
    Subparsers,
    UsageError,
    add_model,
    build,
    engine_config,
    errors_by_flags,
    new_command,
)
from jaxllm.commands.flags import COMMON, add_common_flags, add_engine_flags, add_flags
from jaxllm.config import EngineConfig
from jaxllm_server.shared.options import ServerOptions


def add(commands: Subparsers) -> None:
    parser = new_command(commands, "serve", run, "serve a model over gRPC and OpenAI-compatible HTTP")
    parser.usage = "%(prog)s [MODEL] [FLAG ...]"  # not 40 lines of flags
    parser.description = (
        "Serve a model over gRPC and OpenAI-compatible HTTP. Only this machine can connect unless --host is given."
    )
    parser.add_argument("model_tag", nargs="?", metavar="MODEL", help="folder or hub id, as --model")
    add_model(parser)
    add_common_flags(parser, ServerOptions)
    parser.add_argument(
        "--config", metavar="FILE", help="YAML file of flags; flags of the command line take precedence"
    )
    server = parser.add_argument_group("server")
    add_flags(server, ServerOptions, skipped=COMMON)
    _add_habits(server)
    skipped = {*COMMON, "disable_log_stats", "disable_log_requests"}  # the last two have an effect
    add_engine_flags(parser.add_argument_group("engine"), has_sampling=False, skipped=skipped)


def _add_habits(group: argparse._ArgumentGroup) -> None:
    """Accept flags of vLLM that ask for a default here, or set another flag's field."""
    hidden: dict[str, Any] = {"default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
    group.add_argument(
        "--enable-auto-tool-choice",
        action="store_true",
        help="no effect: the model always chooses tools, as in vLLM with this flag",
    )
    for flag, field, value in (
        ("--disable-log-requests", "enable_log_requests", False),
        ("--disable-log-stats", "log_stats_interval", 0.0),
    ):
        group.add_argument(flag, action="store_const", const=value, dest=f"ServerOptions.{field}", **hidden)


def run(options: dict[str, Any]) -> int:
    config = engine_config({**options, "model": options["model_tag"] or options["model"]})
    server = build(
        ServerOptions, {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}
    )
    if options["enable_auto_tool_choice"] and server.tool_call_parser is None:
        raise UsageError("--enable-auto-tool-choice requires --tool-call-parser")
    from jaxllm_server import launch

    if server.restart:
        from jaxllm.hosts import restart

        if not restart.is_child():
            launch.configure_logging()
            return restart.keep_running([sys.executable, "-m", "jaxllm", *sys.argv[1:]], server.hang_timeout)
        restart.end_with_parent()
    if server.num_hosts > 1:
        with errors_by_flags(ServerOptions, EngineConfig):
            run_host = launch.new_host(config, server, progress=sys.stderr.isatty())
        return run_host()
    if server.headless:
        with errors_by_flags(ServerOptions, EngineConfig):
            return launch.be_replica(config, server)
    if not config.is_fleet:  # else each replica does; this process must not use devices
        _check(config, server)
    with errors_by_flags(ServerOptions, EngineConfig):
        made = launch.new_server(config, server, progress=sys.stderr.isatty())
    return launch.serve(made)


def _check(config: EngineConfig, options: ServerOptions) -> None:
    """Refuse a missing model, one that does not fit the devices, or invalid adapters, before listening.

    Reads no weights but adapters'; fetches only small files from the hub.
    """
    from jaxllm.engine.features.adapters import store
    from jaxllm.model import decoder
    from jaxllm.setup.model_setup import free_bytes, plan_memory, prepare
    from jaxllm_server.adapters import requests_of

    with errors_by_flags(ServerOptions):
        modules = requests_of(options.lora_modules) if config.enable_lora else ()
    with errors_by_flags(EngineConfig):
        setup = prepare(config, needs_weights=False)
        decoder.check_shards(setup.spec, setup.layout)
        plan_memory(config, setup, free_bytes(setup))
        read = store.weights_reader(setup, config)
        for request in modules:
            with store.naming(request):
                read(store.folder_of(request))
