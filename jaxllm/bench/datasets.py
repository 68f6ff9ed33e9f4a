"""Make the prompts of a benchmark from random tokens or a file, reproducibly by seed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from jaxllm.bench.workload import DatasetOptions, Job
from jaxllm.errors import UserError

_ATTEMPTS = 10
# vLLM's `is_valid_sequence` (vllm/benchmarks/datasets.py).
_SHAREGPT_LEAST, _SHAREGPT_MOST_PROMPT, _SHAREGPT_MOST = 4, 1024, 2048
_SONNET_BEGIN = "Pick as many lines as you can from these poem lines:\n"


class Coder(Protocol):
    """The tokenizer for prompts: a model's, or a server's."""

    @property
    def ids(self) -> Sequence[int]: ...

    def is_text(self, token_id: int) -> bool: ...

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...


def make_jobs(options: DatasetOptions, tokenizer: Coder, as_text: bool) -> list[Job]:
    """Make the jobs of a dataset, with prompts as text or ids; raise `UserError` if the file is unusable."""
    writer = _Writer(tokenizer, np.random.default_rng(options.seed), as_text)
    return DATASETS[options.dataset_name](options, writer)


class _Writer:
    def __init__(self, tokenizer: Coder, rng: np.random.Generator, as_text: bool) -> None:
        self._tokenizer, self.rng, self._as_text = tokenizer, rng, as_text
        self._num_around = len(tokenizer.encode("")) if as_text else 0

    def draw(self, count: int, rng: np.random.Generator | None = None) -> list[int]:
        """Draw token ids that are text: neither special nor partial characters."""
        rng = self.rng if rng is None else rng
        ids: list[int] = []
        known = self._tokenizer.ids
        while len(ids) < count:
            drawn = rng.integers(len(known), size=count - len(ids)).tolist()
            ids += [known[place] for place in drawn if self._tokenizer.is_text(known[place])]
        return ids

    def count(self, text: str) -> int:
        return len(self._tokenizer.encode(text))

    def count_answer(self, text: str) -> int:
        return len(self._tokenizer.encode(text, add_special_tokens=False))

    def from_text(self, text: str, max_tokens: int) -> Job:
        ids = self._tokenizer.encode(text)
        return Job(text if self._as_text else tuple(ids), len(ids), max_tokens)

    def from_tokens(
        self, shared: Sequence[int], unshared: Sequence[int], max_tokens: int, arrival_s: float | None = None
    ) -> Job:
        """Return a job with the prompt `shared` + `unshared`; as text, `unshared` is adjusted to its length."""
        ids = [*shared, *unshared]
        if not self._as_text:
            return Job(tuple(ids), len(ids), max_tokens, arrival_s)
        wanted = len(ids)
        del ids[max(len(shared), wanted - self._num_around) :]
        text = ""
        for _ in range(_ATTEMPTS):
            text = self._tokenizer.decode(ids, skip_special_tokens=False)
            excess = self.count(text) - wanted
            if excess == 0:
                break
            if excess > 0:
                del ids[max(len(shared), len(ids) - excess) :]
            else:
                ids += self.draw(-excess)
        return Job(text, self.count(text), max_tokens, arrival_s)


def _random(options: DatasetOptions, writer: _Writer) -> list[Job]:
    prefix = writer.draw(options.random_prefix_len)
    num_in, num_out = options.input_len or options.random_input_len, options.output_len or options.random_output_len
    lengths = [
        writer.rng.integers(*_range(length, options.random_range_ratio), size=options.num_prompts)
        for length in (num_in, num_out)
    ]
    return [
        writer.from_tokens(prefix, writer.draw(int(own)), int(max_tokens))
        for own, max_tokens in zip(*lengths, strict=True)
    ]


def _range(length: int, ratio: float) -> tuple[int, int]:
    return max(1, int(np.floor(length * (1 - ratio)))), int(np.ceil(length * (1 + ratio))) + 1


def _prefix_repetition(options: DatasetOptions, writer: _Writer) -> list[Job]:
    num_prefix, num_suffix = options.prefix_repetition_prefix_len, options.prefix_repetition_suffix_len
    if options.input_len is not None:
        num_suffix = options.input_len - num_prefix
        if num_suffix < 1:
            raise UserError(f"input_len must be above prefix_repetition_prefix_len, {num_prefix}.")
    count = min(options.prefix_repetition_num_prefixes, options.num_prompts)
    prefixes = [writer.draw(num_prefix) for _ in range(count)]
    order = np.arange(options.num_prompts) % count
    if not options.disable_shuffle:
        writer.rng.shuffle(order)
    max_tokens = options.output_len or options.prefix_repetition_output_len
    return [writer.from_tokens(prefixes[number], writer.draw(num_suffix), max_tokens) for number in order]


def _sharegpt(options: DatasetOptions, writer: _Writer) -> list[Job]:
    path = Path(str(options.dataset_path))
    records = _read_json(path)
    if not isinstance(records, list):
        raise UserError(f"{path}: expected a JSON list of objects with conversations.")
    max_tokens = options.output_len or options.sharegpt_output_len
    jobs: list[Job] = []
    for index in _order(len(records), options, writer):
        if len(jobs) == options.num_prompts:
            break
        turns = _turns(path, index, records[index])
        if turns is None:
            continue
        num_prompt, num_answer = writer.count(turns[0]), max_tokens or writer.count_answer(turns[1])
        if num_prompt < _SHAREGPT_LEAST or (max_tokens is None and num_answer < _SHAREGPT_LEAST):
            continue
        if num_prompt > _SHAREGPT_MOST_PROMPT or num_prompt + num_answer > _SHAREGPT_MOST:
            continue
        jobs.append(writer.from_text(turns[0], num_answer))
    return _filled(jobs, options, writer)


def _turns(path: Path, index: int, record: object) -> tuple[str, str] | None:
    turns = record.get("conversations") if isinstance(record, Mapping) else None
    if not isinstance(turns, list):
        raise UserError(f'{path}: record {index} has no list "conversations".')
    if len(turns) < 2:
        return None
    texts = [turn.get("value") if isinstance(turn, Mapping) else None for turn in turns[:2]]
    if not all(isinstance(text, str) for text in texts):
        raise UserError(f'{path}: a turn of record {index} has no text "value".')
    return str(texts[0]), str(texts[1])


def _sonnet(options: DatasetOptions, writer: _Writer) -> list[Job]:
    num_in, num_out = options.input_len or options.sonnet_input_len, options.output_len or options.sonnet_output_len
    lines = list(poem()) if options.dataset_path is None else _read_lines(Path(options.dataset_path))
    begin = writer.count(_SONNET_BEGIN)
    per_line = sum(writer.count_answer(line) for line in lines) / len(lines)
    if num_in <= begin + per_line:
        raise UserError(f"sonnet_input_len must be above {begin + per_line:.0f}, a request with one line.")
    num_lines = max(1, round((num_in - begin) / per_line))
    shared = lines[: max(0, min(num_lines - 1, round((options.sonnet_prefix_len - begin) / per_line)))]
    jobs = []
    for _ in range(options.num_prompts):
        own = [lines[int(i)] for i in writer.rng.integers(len(lines), size=num_lines - len(shared))]
        while len(own) > 1 and writer.count(_SONNET_BEGIN + "".join(shared + own)) > num_in:
            own.pop()
        jobs.append(writer.from_text(_SONNET_BEGIN + "".join(shared + own), num_out))
    return jobs


def poem() -> Iterator[str]:
    for when in ("At dawn", "By noon", "At dusk", "All night"):
        for who in ("the ferry", "a heron", "my brother", "the miller", "a lantern", "the orchard"):
            for does in ("waits", "leans", "wakes", "turns"):
                for where in (
                    "beside the shallow water,", "where the hedges end,", "beneath a quiet hill,",
                    "and counts the passing carts,", "until the bells are done.",
                ):  # fmt: skip
                    yield f"{when} {who} {does} {where}\n"


def _custom(options: DatasetOptions, writer: _Writer) -> list[Job]:
    path = Path(str(options.dataset_path))
    default = options.output_len or options.custom_output_len
    records = list(_read_records(path))
    jobs = []
    for index in _order(len(records), options, writer)[: options.num_prompts]:
        line, record = records[index]
        prompt, num_out = record.get("prompt"), record.get("output_tokens", default)
        if not isinstance(prompt, str) or not prompt:
            raise UserError(f'{path}, line {line}: expected an object with a text "prompt".')
        if not isinstance(num_out, int) or isinstance(num_out, bool) or num_out < 1:
            raise UserError(f"{path}, line {line}: output_tokens must be a whole number above 0, got {num_out!r}.")
        jobs.append(writer.from_text(prompt, num_out))
    return _filled(jobs, options, writer)


def _timed_trace(options: DatasetOptions, writer: _Writer) -> list[Job]:
    """Read a trace in Mooncake's format: a number in `hash_ids` per block of 512 tokens, equal for equal prefixes."""
    path = Path(str(options.dataset_path))
    size = options.timed_trace_block_size
    scale = 1e-3 if options.timed_trace_unit == "ms" else 1.0
    jobs: list[Job] = []
    start = 0.0
    for line, record in _read_records(path):
        if len(jobs) == options.num_prompts:
            break
        when = _number(path, line, record, "timestamp", float, 0) * scale
        num_in, num_out = (_number(path, line, record, name, int, 1) for name in ("input_length", "output_length"))
        start = when if not jobs else start
        if jobs and when - start < float(jobs[-1].arrival_s or 0):
            raise UserError(f"{path}, line {line}: its timestamp is before that of the line above.")
        hashes = record.get("hash_ids") or []
        if not isinstance(hashes, list) or not all(isinstance(number, int) and number >= 0 for number in hashes):
            raise UserError(f"{path}, line {line}: hash_ids must be a list of whole numbers.")
        blocks = [writer.draw(size, np.random.default_rng([options.seed, number])) for number in hashes]
        ids = [token for block in blocks for token in block][:num_in]
        ids += writer.draw(num_in - len(ids))
        num_shared = (num_in - 1) // size * size
        jobs.append(writer.from_tokens(ids[:num_shared], ids[num_shared:], num_out, when - start))
    if not jobs:
        raise UserError(f"{path} has no requests.")
    return jobs


def _order(count: int, options: DatasetOptions, writer: _Writer) -> list[int]:
    order = np.arange(count)
    if not options.disable_shuffle:
        writer.rng.shuffle(order)
    return order.tolist()


def _filled(jobs: list[Job], options: DatasetOptions, writer: _Writer) -> list[Job]:
    if not jobs:
        raise UserError(f"{options.dataset_path}: it has no usable prompt.")
    if options.no_oversample:
        return jobs
    drawn = writer.rng.integers(len(jobs), size=options.num_prompts - len(jobs))
    return jobs + [jobs[int(i)] for i in drawn]


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: it is not UTF-8 text.") from error


def _read_json(path: Path) -> object:
    try:
        return json.loads(_read_text(path))
    except json.JSONDecodeError as error:
        raise UserError(f"{path}: {error}.") from error


def _read_lines(path: Path) -> list[str]:
    lines = [f"{line}\n" for line in _read_text(path).splitlines() if line.strip()]
    if not lines:
        raise UserError(f"{path}: it has no lines of text.")
    return lines


def _read_records(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for number, line in enumerate(_read_text(path).splitlines(), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(f"{path}, line {number}: {error}.") from error
        if not isinstance(record, Mapping):
            raise UserError(f"{path}, line {number}: expected a JSON object.")
        yield number, record


def _number(path: Path, line: int, record: Mapping[str, Any], name: str, kind: type, least: int) -> Any:
    value = record.get(name)
    allowed = (int, float) if kind is float else int
    if not isinstance(value, allowed) or isinstance(value, bool) or value < least:
        raise UserError(f"{path}, line {line}: {name} must be a number not below {least}, got {value!r}.")
    return kind(value)


DATASETS: Mapping[str, Callable[[DatasetOptions, _Writer], list[Job]]] = {
    "random": _random,
    "sharegpt": _sharegpt,
    "sonnet": _sonnet,
    "prefix_repetition": _prefix_repetition,
    "custom": _custom,
    "timed_trace": _timed_trace,
}
