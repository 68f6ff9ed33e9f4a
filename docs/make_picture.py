"""Draws docs/running.svg, the picture in the README, from what the commands print: `python docs/make_picture.py`."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

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
        done = subprocess.run(
            command, shell=True, capture_output=True, text=True, check=True, env=os.environ | {"PATH": path}
        )
        for line in done.stdout.strip().splitlines()[:LINES]:
            console.print(Text(line))
        console.print()
    Path(__file__).with_name("running.svg").write_text(console.export_svg(title="jaxllm"))


if __name__ == "__main__":
    main()
