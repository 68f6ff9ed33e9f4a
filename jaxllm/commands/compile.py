"""`jaxllm compile`: compile a model's programs into a folder."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from jaxllm.commands.arguments import Subparsers, add_model, engine_config, errors_by_flags, new_command
from jaxllm.commands.flags import add_engine_flags
from jaxllm.config import EngineConfig


def add(commands: Subparsers) -> None:
    parser = new_command(commands, "compile", run, "compile a model's programs into a folder, for quick starts")
    parser.description = (
        "Compile all programs of a model into a folder, on the kind of device that will serve it. The "
        "weights are not needed. A start with --compilation-cache-dir DIR then compiles nothing, and takes the "
        "defaults of flags such as --max-num-seqs from the folder."
    )
    parser.add_argument("model_tag", nargs="?", metavar="MODEL", help="folder or hub id, as --model")
    parser.add_argument("--out", required=True, metavar="DIR", help="folder for the programs")
    add_model(parser)
    skipped = {"precompile", "compilation_cache_dir", "load_format", "skip_tokenizer_init"}
    add_engine_flags(parser.add_argument_group("engine"), has_sampling=False, skipped=skipped)


def run(options: dict[str, Any]) -> int:
    config = engine_config({**options, "model": options["model_tag"] or options["model"]})
    from jaxllm.runner.aot_compile import compile_ahead

    folder = Path(options["out"]).expanduser()
    with errors_by_flags(EngineConfig):
        count = compile_ahead(config, folder, progress=sys.stderr.isatty())
    print(f"{count} programs in {folder}; start with --compilation-cache-dir {folder}")
    return 0
