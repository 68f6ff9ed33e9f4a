"""Draws docs/running.svg, the picture in the README: `python -m docs.make_picture` runs the commands in a terminal."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

from tests.support.terminal import lines_at_terminal

COMMANDS = (
    'jaxllm generate "Once upon a time" --max-tokens 40 --seed 3',
    'echo "What is 47 + 38?" | jaxllm chat',
    "jaxllm bench throughput --num-prompts 64 --input-len 32 --output-len 32",
)
LINES = 12  # of each command's output


def main() -> None:
    """Run the commands and write the picture."""
    console = Console(record=True, width=100, force_terminal=True, file=io.StringIO())
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    for command in COMMANDS:
        console.print(Text.assemble(("$ ", "green"), (command, "bold")))
        for line in lines_at_terminal(command, os.environ | {"PATH": path})[:LINES]:
            console.print(Text.from_ansi(line))
        console.print()
    Path(__file__).with_name("running.svg").write_text(console.export_svg(title="jaxllm"))


if __name__ == "__main__":
    main()
