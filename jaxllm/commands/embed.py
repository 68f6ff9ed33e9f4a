"""`jaxllm embed`: the texts of a file become vectors in another, or the lines that are nearest to a question are shown.

Knows what it reads; texts stream through in windows, so that memory does not grow with the file.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from jaxllm.commands.arguments import Subparsers, Usage, add_model, engine_config, new_command
from jaxllm.commands.flags import add_engine_flags
from jaxllm.commands.session import open_llm
from jaxllm.embedded import EMBEDDER_DIR
from jaxllm.errors import EngineError, UserError
from jaxllm.pooling_params import PoolingParams

if TYPE_CHECKING:
    import numpy as np
    from tqdm import tqdm

    from jaxllm.engine.llm import LLM

WINDOW = 4096  # texts that are read and written at once; sorted by length, since a step takes as long as its longest


class Line(NamedTuple):
    """A text, and where it stands."""

    number: int
    text: str


def add(commands: Subparsers) -> None:
    """Describe the command."""
    parser = new_command(commands, "embed", run, "texts to vectors, or the lines nearest to a question")
    parser.description = (
        "Write the embedding of each text of INPUT, in its order: to OUTPUT.npy, float32, or OUTPUT.jsonl. What was "
        "broken off goes on when the command is given again. Or show the lines that are nearest to a question."
    )
    parser.add_argument(
        "input", nargs="?", default="-", metavar="INPUT", help="a text a line, or JSON lines; '-': standard input"
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("-o", "--output", type=Path, metavar="OUTPUT", help="file that ends with .npy or .jsonl")
    what.add_argument("--query", metavar="TEXT", help="show the five lines that are nearest to this")
    parser.add_argument("--field", metavar="NAME", help="of each JSON line (default: text)")
    parser.add_argument("--dimensions", type=int, metavar="N", help="keep the first N numbers of each vector")
    parser.add_argument(
        "--no-normalize", dest="normalize", action="store_const", const=False, help="leave vectors as long as they are"
    )
    parser.add_argument("--truncate", action="store_true", help="cut texts that are too long, instead of refusing them")
    parser.add_argument("--skip-empty", action="store_true", help="leave empty lines out, instead of refusing them")
    parser.add_argument(
        "--batch-size", type=int, default=512, metavar="N", help="texts that the engine is given at once (default: 512)"
    )
    add_model(parser, "the small embedder within jaxllm")
    add_engine_flags(parser.add_argument_group("engine"), has_sampling=False)


def run(options: dict[str, Any]) -> int:
    """Embed the texts; 130 after ^C, when what has been written stays."""
    options["model"] = options["model"] or str(EMBEDDER_DIR)
    engine_config(options)
    output: Path | None = options["output"]
    if output is not None and output.suffix not in (".npy", ".jsonl"):
        raise Usage(f"{output} must end with .npy or .jsonl")
    if options["batch_size"] < 1:
        raise Usage("--batch-size must be at least 1")
    if options["input"] == "-" and sys.stdin.isatty():
        raise Usage("no texts: give a file, or texts on standard input")
    with _opened(options["input"]) as file:
        name = "standard input" if options["input"] == "-" else options["input"]
        lines = _reader(file, name, options["field"], options["skip_empty"])
        digest = hashlib.sha256()
        count = sum(1 for _ in lines(digest.update))  # whatever is wrong with a line is said before the model loads
        if not count:
            raise UserError(f"{name} holds no text.", "input")
        with open_llm(options) as llm:
            embed = _Embed(llm, options)
            if output is None:
                _show_nearest(embed, lines(), options["query"], count)
                return 0
            settings = {name: options[name] for name in ("field", "truncate", "skip_empty")}
            return _write(embed, lines, output, count, {"input": digest.hexdigest(), **settings})


@contextmanager
def _opened(name: str) -> Iterator[IO[bytes]]:
    """Open the input; standard input is copied, because it is read twice."""
    if name != "-":
        with open(name, "rb") as file:
            yield file
        return
    with tempfile.TemporaryFile() as file:
        while block := sys.stdin.buffer.read(2**20):
            file.write(block)
        yield file


Lines = Callable[..., Iterator[Line]]


def _reader(file: IO[bytes], name: str, field: str | None, skip_empty: bool) -> Lines:
    """Give what reads the lines of a file from its beginning, and passes each one as it is to `see`."""
    file.seek(0)
    is_json = field is not None or name.endswith(".jsonl") or file.readline().lstrip().startswith(b"{")

    def lines(see: Callable[[bytes], object] = len) -> Iterator[Line]:
        file.seek(0)
        for number, raw in enumerate(file, 1):
            see(raw)
            try:
                text = raw.decode().rstrip("\r\n")
                text = _text_of(text, field or "text") if is_json and text.strip() else text
            except ValueError as error:
                raise UserError(f"{name}, line {number}: {error}", "input") from None
            if text.strip():
                yield Line(number, text)
            elif not skip_empty:
                raise UserError(f"{name}, line {number} is empty; --skip-empty leaves such lines out.", "input")

    return lines


def _text_of(line: str, field: str) -> str:
    """Read the text of a JSON line."""
    try:
        record = json.loads(line)
    except RecursionError:
        raise UserError("its lists and objects are nested too deeply") from None
    if not isinstance(record, dict) or not isinstance(record.get(field), str):
        raise UserError(f'expected an object with a text in "{field}"; --field names another')
    return record[field]


class _Embed:
    """Embeds lines with a model, in batches of like length."""

    def __init__(self, llm: LLM, options: Mapping[str, Any]) -> None:
        self._llm, self._size = llm, options["batch_size"]
        self._params = PoolingParams(
            dimensions=options["dimensions"],
            normalize=options["normalize"],
            truncate_prompt_tokens=-1 if options["truncate"] else None,
        )

    def __call__(self, lines: Sequence[Line], bar: tqdm[Any] | None = None) -> np.ndarray:
        """Return the vectors of lines, float32[N, D]."""
        import numpy as np

        order = sorted(range(len(lines)), key=lambda index: -len(lines[index].text))
        found: list[Any] = [None] * len(lines)
        for start in range(0, len(order), self._size):
            some = order[start : start + self._size]
            for index, vector in zip(some, self._vectors([lines[index] for index in some]), strict=True):
                found[index] = vector
            if bar is not None:
                bar.update(len(some))
        return np.asarray(found, np.float32)

    def _vectors(self, lines: Sequence[Line]) -> Iterator[Any]:
        try:
            outputs = self._llm.encode(
                [line.text for line in lines], self._params, pooling_task="embed", use_tqdm=False
            )
        except UserError as error:
            if len(lines) == 1:
                raise UserError(f"line {lines[0].number}: {error}", error.parameter) from None
            for line in lines:  # one of them is refused, the longest first
                yield from self._vectors([line])
            return
        for line, output in zip(lines, outputs, strict=True):
            if output.outputs.finish_reason != "stop":
                raise EngineError(f"line {line.number}: {output.outputs.stop_reason}")
            yield output.outputs.data


def _progress(count: int, done: int) -> tqdm[Any]:
    from tqdm import tqdm

    return tqdm(total=count, initial=done, unit="text", disable=not sys.stderr.isatty())


def _windows(lines: Iterator[Line]) -> Iterator[list[Line]]:
    while window := list(islice(lines, WINDOW)):
        yield window


def _write(embed: _Embed, lines: Lines, path: Path, count: int, job: Mapping[str, Any]) -> int:
    """Write the vectors that are not there yet."""
    from jaxllm.commands.vector_file import VectorFile

    (first,) = embed([next(lines())])
    file = VectorFile(path, job, first)
    try:
        with file, _progress(count, file.num_rows) as bar:
            for window in _windows(islice(lines(), file.num_rows, None)):
                file.append([line.number for line in window], [line.text for line in window], embed(window, bar))
            file.finish()
    except KeyboardInterrupt:
        print(f"{file.num_rows} of {count} texts are in {path}; the same command goes on", file=sys.stderr)
        return 130
    print(f"{path} holds {count} vectors of {len(first)} numbers")
    return 0


def _show_nearest(embed: _Embed, lines: Iterator[Line], query: str, count: int, most: int = 5) -> None:
    """Show the lines whose vectors point most in the direction of the query's."""
    import numpy as np

    (asked,) = embed([Line(0, query)])
    best: list[tuple[float, int, str]] = []
    with _progress(count, 0) as bar:
        for window in _windows(lines):
            vectors = embed(window, bar)
            cosines = vectors @ asked / np.maximum(np.linalg.norm(vectors, axis=1) * np.linalg.norm(asked), 1e-12)
            found = [(cosine, -line.number, line.text) for cosine, line in zip(cosines.tolist(), window, strict=True)]
            best = heapq.nlargest(most, best + found)
    for cosine, _, text in best:
        print(f"{cosine:6.3f}  {text}")
