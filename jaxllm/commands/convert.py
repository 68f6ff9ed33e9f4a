"""`jaxllm convert`: write a model as an Orbax checkpoint."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from jaxllm.commands.arguments import Subparsers, new_command


def add(commands: Subparsers) -> None:
    parser = new_command(commands, "convert", run, "write a model as an Orbax checkpoint")
    parser.description = (
        "Write the model SRC into the new folder DST: an Orbax checkpoint, the configuration and the "
        "tokenizer. `--model DST` loads it onto any number of devices."
    )
    parser.add_argument("source", metavar="SRC", help="folder or hub id; jaxllm-embedded: the small model in jaxllm")
    parser.add_argument("target", metavar="DST", help="folder to create")
    parser.add_argument("--revision", metavar="NAME", help="branch, tag or commit of the hub repository")


def run(options: dict[str, Any]) -> int:
    os.environ["JAX_PLATFORMS"] = "cpu"  # Orbax initializes JAX, which would reserve GPU memory
    from jaxllm.commands.conversion import convert
    from jaxllm.text.tokenizer_files import has_tokenizer

    target = convert(options["source"], Path(options["target"]), options["revision"], progress=sys.stderr.isatty())
    if not has_tokenizer(target):
        print(f"jaxllm: warning: {options['source']} has no tokenizer; give one with --tokenizer", file=sys.stderr)
    print(f"{target} is ready: --model {target}")
    return 0
