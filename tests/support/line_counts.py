"""Counts lines of code, without blanks, comments and docstrings: `python -m tests.support.line_counts` (`make lines`).

Product code is the content of the wheel, without the stubs generated from proto/.
"""

from __future__ import annotations

import ast
import io
import subprocess
import tokenize
from collections import Counter

from tests.support.paths import ROOT

PRODUCT = ("jaxllm", "pallas_kernels", "server")
GENERATED = "jaxllm/v1/"
_NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def count(source: str) -> int:
    """Count the lines of a module that hold code."""
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            first = node.body[0]
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and type(first.value.value) is str:
                docstrings.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - docstrings)


def main() -> None:
    """Print the rooms with their lines, then the totals."""
    listed = subprocess.run(["git", "ls-files", "*.py"], capture_output=True, text=True, check=True, cwd=ROOT)
    rooms: Counter[str] = Counter()
    for name in listed.stdout.split():
        if not name.startswith(GENERATED) and (ROOT / name).exists():
            rooms[name.rpartition("/")[0]] += count((ROOT / name).read_text())
    for room, lines in sorted(rooms.items()):
        print(f"{lines:7,} {room}")
    for name, tops in (("product", PRODUCT), *((top, (top,)) for top in ("tests", "benchmarks", "training"))):
        print(f"{sum(lines for room, lines in rooms.items() if room.split('/')[0] in tops):7,} lines of {name}")


if __name__ == "__main__":
    main()
