"""Write the result files and plots of benchmarks."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxllm.errors import UserError


def add_output(parser: argparse.ArgumentParser, has_plot: bool = True) -> None:
    parser.add_argument("--output-json", metavar="FILE", help="write the figures, their samples and the environment")
    if has_plot:
        parser.add_argument(
            "--plot", metavar="FILE", help="draw the samples into one file: .png or .html (needs jaxllm[bench])"
        )


def check_output(options: Mapping[str, Any]) -> None:
    """Raise `UserError` if the folder of results does not exist, or they cannot be plotted."""
    for name in ("output_json", "plot"):
        path = options.get(name)
        if path is not None and not Path(path).expanduser().absolute().parent.is_dir():
            raise UserError(f"{path}: its folder does not exist.", name)
    if options.get("plot") is not None:
        from jaxllm.bench.plot import check

        check(options["plot"])


def write(options: Mapping[str, Any], figures: Mapping[str, Any]) -> None:
    from jaxllm.bench import environment

    result = {**figures, "environment": environment.describe()}
    if options["output_json"] is not None:
        path = Path(options["output_json"]).expanduser()
        partial = path.with_name(path.name + ".partial")  # the final name is never truncated
        partial.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        os.replace(partial, path)
        print(f"The figures are in {path}.")
    if options.get("plot") is not None:
        from jaxllm.bench.plot import plot

        plot(result, options["plot"])
        print(f"The picture is in {options['plot']}.")


def add_number(parser: argparse.ArgumentParser, flag: str, default: int, text: str, least: int = 1) -> None:
    kind = positive if least else natural
    parser.add_argument(flag, type=kind, default=default, metavar="N", help=f"{text} (default: {default})")


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def natural(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(text)
