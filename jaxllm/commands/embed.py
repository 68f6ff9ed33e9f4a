"""`jaxllm embed`: write the embeddings of a file's texts, or search them, in constant memory."""

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

from jaxllm.commands.arguments import Subparsers, UsageError, add_model, engine_config, new_command
from jaxllm.commands.flags import add_engine_flags
from jaxllm.commands.session import add_verbose, open_llm
from jaxllm.embedded import EMBEDDER_DIR
from jaxllm.errors import EngineError, UserError
from jaxllm.pooling_params import PoolingParams

if TYPE_CHECKING:
    import numpy as np

    from jaxllm.llm import LLM


class Line(NamedTuple):
    """A text and its line number."""

    number: int
    text: str


def add(commands: Subparsers) -> None:
    parser = new_command(commands, "embed", run, "embed the texts of a file, or search them")
    parser.description = (
        "Write the embeddings of the texts in INPUT, in order, to OUTPUT.npy (float32) or OUTPUT.jsonl. If a run is "
        "interrupted, the same command continues it. With --query, show the most similar texts instead."
    )
    parser.add_argument(
        "input",
        nargs="?",
        default="-",
        metavar="INPUT",
        help="file with one text per line, or JSON lines; '-': standard input",
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("-o", "--output", type=Path, metavar="OUTPUT", help="file to write, ending with .npy or .jsonl")
    what.add_argument("--query", metavar="TEXT", help="show the five lines whose embeddings are nearest to this text's")
    parser.add_argument("--field", metavar="NAME", help="field of each JSON line with the text (default: text)")
    parser.add_argument("--dimensions", type=int, metavar="N", help="keep the first N numbers of each embedding")
    parser.add_argument(
        "--no-normalize", dest="normalize", action="store_const", const=False, help="do not normalize embeddings"
    )
    parser.add_argument(
        "--truncate", action="store_true", help="truncate texts that are too long, instead of refusing them"
    )
    parser.add_argument("--skip-empty", action="store_true", help="skip empty lines, instead of refusing them")
    parser.add_argument(
        "--batch-size", type=int, default=1024, metavar="N", help="texts to embed and write at once (default: 1024)"
    )
    add_model(parser, "the small embedder in jaxllm")
    add_verbose(parser)
    add_engine_flags(parser.add_argument_group("engine"), has_sampling=False)


def run(options: dict[str, Any]) -> int:
    """Write or search embeddings; return 130 after ^C, keeping the rows written."""
    options["model"] = options["model"] or str(EMBEDDER_DIR)
    engine_config(options)
    output: Path | None = options["output"]
    if output is not None and output.suffix not in (".npy", ".jsonl"):
        raise UsageError(f"{output} must end with .npy or .jsonl")
    if options["batch_size"] < 1:
        raise UsageError("--batch-size must be at least 1")
    if options["input"] == "-" and sys.stdin.isatty():
        raise UsageError("no texts: give a file, or texts on standard input")
    with _opened(options["input"]) as file:
        name = "standard input" if options["input"] == "-" else options["input"]
        lines = _reader(file, name, options["field"], options["skip_empty"])
        digest = hashlib.sha256()
        count = sum(1 for _ in lines(digest.update))  # fails before the model loads
        if not count:
            raise UserError(f"{name} holds no text.", "input")
        with open_llm(options) as llm:
            embed = _Embed(llm, options, count)
            if output is None:
                _show_nearest(embed, lines(), options["query"])
                return 0
            settings = {name: options[name] for name in ("field", "truncate", "skip_empty", "dimensions", "normalize")}
            engine = {name: value for name, value in options.items() if name.startswith("EngineConfig.")}
            settings["engine flags"] = json.dumps(engine, sort_keys=True, default=str)
            return _write(embed, lines, output, {"input": digest.hexdigest(), **settings})


@contextmanager
def _opened(name: str) -> Iterator[IO[bytes]]:
    """Open a file, or standard input ("-") as a temporary copy, to be read twice."""
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
    """Return a function `lines(see)` that yields the texts from the beginning at each call.

    `see` receives raw lines. `field` is the text's key in JSON lines; None: "text" in JSON lines, else whole lines.
    Iteration raises `UserError` for an invalid line, or an empty one unless `skip_empty`.
    """
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
                raise UserError(f"{name}, line {number} is empty; --skip-empty skips such lines.", "input")

    return lines


def _text_of(line: str, field: str) -> str:
    try:
        record = json.loads(line)
    except RecursionError:
        raise UserError("its lists and objects are nested too deeply") from None
    if not isinstance(record, dict) or not isinstance(record.get(field), str):
        raise UserError(f'expected an object with a text in "{field}"; --field names another')
    return record[field]


class _Embed:
    def __init__(self, llm: LLM, options: Mapping[str, Any], count: int) -> None:
        self.size, self._llm, self._count = options["batch_size"], llm, count
        self._params = PoolingParams(
            dimensions=options["dimensions"],
            normalize=options["normalize"],
            truncate_prompt_tokens=-1 if options["truncate"] else None,
        )

    def vectors(self, lines: Sequence[Line]) -> np.ndarray:
        import numpy as np

        try:
            texts = [line.text for line in lines]
            outputs = self._llm.encode(texts, self._params, pooling_task="embed", use_tqdm=False)
        except (UserError, EngineError) as error:
            is_refused = isinstance(error, UserError)
            if is_refused and error.parameter != "prompt":
                raise
            if len(lines) > 1:
                return np.concatenate([self.vectors([line]) for line in lines])
            where = f"line {lines[0].number}" if lines[0].number else "--query"
            raise (UserError if is_refused else EngineError)(f"{where}: {error}") from error
        return np.stack([output.outputs.data for output in outputs])

    def batches(self, lines: Iterator[Line], done: int = 0) -> Iterator[tuple[list[Line], np.ndarray]]:
        from tqdm import tqdm

        lines = islice(lines, done, None)
        with tqdm(total=self._count, initial=done, unit="text", disable=not sys.stderr.isatty()) as bar:
            while batch := list(islice(lines, self.size)):
                yield batch, self.vectors(batch)
                bar.update(len(batch))


def _write(embed: _Embed, lines: Lines, path: Path, job: Mapping[str, Any]) -> int:
    from jaxllm.commands.vector_file import VectorFile

    (first,) = embed.vectors([next(lines())])
    with VectorFile(path, job, first) as file:
        try:
            for batch, vectors in embed.batches(lines(), file.num_rows):
                file.append([line.number for line in batch], [line.text for line in batch], vectors)
        except KeyboardInterrupt:
            print(f"{path} holds {file.num_rows} vectors; repeat the command to continue", file=sys.stderr)
            return 130
        file.finish()
    print(f"{path} holds {file.num_rows} vectors of {len(first)} numbers")
    return 0


def _show_nearest(embed: _Embed, lines: Iterator[Line], query: str, most: int = 5) -> None:
    import numpy as np

    (asked,) = embed.vectors([Line(0, query)])
    best: list[tuple[float, int, str]] = []
    for batch, vectors in embed.batches(lines):
        cosines = vectors @ asked / np.maximum(np.linalg.norm(vectors, axis=1) * np.linalg.norm(asked), 1e-12)
        found = [(cosine, -line.number, line.text) for cosine, line in zip(cosines.tolist(), batch, strict=True)]
        best = heapq.nlargest(most, best + found)
    for cosine, _, text in best:
        print(f"{cosine:6.3f}  {text}")
