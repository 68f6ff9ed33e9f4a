"""Draws docs/running.svg, the picture in the README: `python docs/make_picture.py` runs the commands in a terminal."""

from __future__ import annotations

import io
import os
import pty
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
        for line in shown(command, os.environ | {"PATH": path})[:LINES]:
            console.print(Text.from_ansi(line))
        console.print()
    Path(__file__).with_name("running.svg").write_text(console.export_svg(title="jaxllm"))


def shown(command: str, environment: dict[str, str]) -> list[str]:
    """Run a command in a terminal; return the lines that it leaves there, of both streams."""
    own, other = pty.openpty()
    process = subprocess.Popen(command, shell=True, stdout=other, stderr=other, env=environment)
    os.close(other)
    written = bytearray()
    try:
        while piece := os.read(own, 1 << 16):
            written += piece
    except OSError:  # Linux ends the reading of a closed terminal so
        pass
    os.close(own)
    if process.wait() != 0:
        raise subprocess.CalledProcessError(process.returncode, command)
    lines = written.decode().replace("\r\n", "\n").strip().split("\n")
    return [line.rpartition("\r")[2] for line in lines]


if __name__ == "__main__":
    main()
