"""Compile and cache grammars with llguidance, and compute masks of allowed tokens."""

from __future__ import annotations

import json
import math
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits
from llguidance.numpy import fill_next_token_bitmask, fill_next_token_bitmask_par

from jaxllm.errors import UserError
from jaxllm.structured_output.constraint import Constraint, Preamble, consume_released, one_line
from jaxllm.structured_output.ebnf import of_the_server, to_lark
from jaxllm.structured_output.exactness import exact
from jaxllm.structured_output.expressions import translate, translate_whitespace
from jaxllm.structured_output.schemas import check_size, prepare
from jaxllm.structured_output.slow_masks import NUM_THREADS, SLOW_SECONDS, Pace
from jaxllm.structured_output.vocabulary import Vocabulary
from jaxllm.structured_outputs_params import StructuredOutputsParams
from jaxllm.text.tokenizer import Tokenizer
from jaxllm.threads import start_thread

MAX_KEPT = 64  # grammars
MAX_KEPT_CHARS = 2**20  # of all sources
MAX_KEPT_BYTES = 2**28  # of lexers, which grow in use: to 20 or 40 MB for small sources
# Lexer memory: 1 to 20 bytes per unit of work in 22 kinds of grammars, at most 1 kB for each of 50,000 states.
_LEAST_BYTES = 2**18
_BYTES_A_UNIT = 20
_MOST_BYTES = 50 * 2**20
_WORK = re.compile(r'^  "lexer_cost": (\d+),$', re.MULTILINE)
_MANY_TOKENS = 2**31 - 1
_WEIGHED_SECONDS = 0.002  # weigh after longer masks: lexers grow 100 kB in that time
STEPS_UNWEIGHED = 32
# Then recompile: lexer states accumulate against the limit.
MAX_USES = 64
# Bounded: a model may prefer whitespace to an end forever.
_WHITESPACE = r"[ \n\r\t]{1,8}"

_MOST_TEXT = 2**13  # as schemas.MAX_TEXT
_LONG_SECONDS = 0.001  # on one thread; further masks use several
_NUM_TRIED = 3  # steps: JSON's bracket and two more

# llguidance 1.9.1, one core of two. 128,000 tokens: first use 1.9 s, 86 MB; compiling three properties 8 ms; a mask 13
# µs (median), 0.2 ms (p99), 2 to 6 ms for \w and choices. Largest grammars: compiling 0.2 to 0.5 s, a mask 10 ms, about
# 100 if ambiguous.
_LIMITS = LLParserLimits(
    initial_lexer_fuel=500_000,  # 25,000 short choices take 300,000
    step_lexer_fuel=100_000,
    step_max_items=10_000,
    max_lexer_states=50_000,
    max_grammar_size=100_000,
    verbose_errors=True,
)


@dataclass
class _Kept:
    matcher: LLMatcher
    num_bytes: int
    pace: Pace  # shared with its lexer
    uses: int = 1


class Grammar:
    """A compiled constraint, shared by outputs."""

    def __init__(
        self, matchers: Sequence[LLMatcher], way: Preamble, allowed: np.ndarray, vocabulary: Vocabulary, pace: Pace
    ) -> None:
        self._matchers = matchers
        self._way = way
        self._allowed = allowed
        self._vocabulary = vocabulary
        self._pace = pace

    def begin(self) -> Constraint:
        vocabulary = self._vocabulary
        given = self._matchers, self._way, self._allowed, vocabulary.bytes_of, vocabulary.eos_ids
        return Constraint(*given, self._pace)


class Grammars:
    """An engine's grammars. Reads the vocabulary at first use."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: Collection[int]) -> None:
        self._of_vocabulary = (tokenizer, vocab_size, eos_ids)
        self._lock = threading.Lock()
        self._made_vocabulary: Vocabulary | None = None
        self._refused: str | None = None  # reason
        self._executor: LLExecutor | None = None
        self._kept: OrderedDict[StructuredOutputsParams | str, _Kept] = OrderedDict()
        self._kept_chars = self._kept_bytes = 0
        self._num_fills = 0

    def compile(self, asked: StructuredOutputsParams) -> Grammar:
        """Compile a constraint, or find it in the cache; raise UserError if it is refused. Thread-safe."""
        vocabulary = self._vocabulary()
        own = asked.alone()
        matcher, pace = self._matcher(own, lambda: _source(own), own.kind)
        matchers = [matcher]
        others = [
            *([] if asked.or_grammar is None else [asked.or_grammar]),
            *(grammar for _, grammar in asked.or_grammar_after),
        ]
        of_others = {text: self._matcher(text, partial(_of_the_server, text), "or_grammar")[0] for text in others}
        if asked.or_grammar is not None:
            matchers.append(of_others[asked.or_grammar])
        marks = [(mark, tuple(matchers)) for mark in asked.marks]
        marks += [(mark, (of_others[text],)) for mark, text in asked.or_grammar_after]
        way = Preamble(
            tuple((mark.encode(), found) for mark, found in marks),
            tuple(opening.encode() for opening in asked.may_open_with) if marks else (),
        )
        for opening in way.openings:
            vocabulary.spelling(opening)
        tokens = {int(token) for text in others for token in _TOKEN.findall(text)}
        allowed = vocabulary.with_tokens(tokens) if tokens else vocabulary.allowed
        return Grammar(matchers, way, allowed, vocabulary, pace)

    def _matcher(
        self, key: StructuredOutputsParams | str, source: Callable[[], str], kind: str
    ) -> tuple[LLMatcher, Pace]:
        with self._lock:
            kept = self._kept.get(key)
            if kept is not None:
                self._kept.move_to_end(key)
                kept.uses += 1
                if kept.uses == MAX_USES:
                    self._drop(key)
                return kept.matcher, kept.pace
        matcher, pace = _compiled(self._vocabulary(), source(), kind), Pace()
        self._keep(key, matcher, pace)
        return matcher, pace

    def fill(self, wanted: Sequence[tuple[Constraint, int]], masks: np.ndarray, until: float = math.inf) -> list[int]:
        """Write masks into rows of int32[R, ceil(V/32)], a bit per allowed token; return the rows not written.

        No mask but the first begins after `until`, in `time.perf_counter`; a failed constraint's is zero.
        """
        work: list[tuple[Constraint, int]] = []
        for constraint, row in wanted:
            if constraint.error is not None:
                masks[row] = 0
            elif not constraint.is_active:
                masks[row] = self._vocabulary().unended
            elif constraint.expected:
                masks[row] = 0
                masks[row].view(np.uint32)[constraint.expected[0] // 32] = 1 << constraint.expected[0] % 32
            else:
                work.append((constraint, row))
        work.sort(key=lambda each: each[0].turn)
        at, began, used = 0, time.perf_counter(), time.thread_time()
        now = began
        while at < len(work) and (not at or now < until):
            # A parallel call costs ten short masks.
            size = 1 if now - began < _LONG_SECONDS else NUM_THREADS
            some, before = work[at : at + size], now
            self._make(some, masks)
            at, now = at + len(some), time.perf_counter()
            seconds = now - before
            if seconds > SLOW_SECONDS and len(some) == 1:  # without other processes
                used, before_used = time.thread_time(), used
                seconds = min(seconds, used - before_used)
            for constraint, _ in some:
                constraint.note_filled(seconds)
        self._check(work[:at], masks)
        for constraint, _ in work[at:]:
            constraint.num_late += 1
        for constraint, _ in wanted:
            if constraint.error is not None:
                self._forget(constraint)
        self._num_fills += 1
        if now - began > _WEIGHED_SECONDS or not self._num_fills % STEPS_UNWEIGHED:
            self._weigh([constraint for constraint, _ in work[:at] if constraint.error is None])
        return [row for _, row in work[at:]]

    def _make(self, wanted: Sequence[tuple[Constraint, int]], masks: np.ndarray) -> None:
        if len(wanted) > 1:
            computed = [pair for pair in wanted if not pair[0].openings and len(pair[0].matchers) == 1]
            with suppress(Exception):
                pairs = [(constraint.matchers[0], row) for constraint, row in computed]
                self._executor = self._executor or LLExecutor(NUM_THREADS)
                fill_next_token_bitmask_par(self._executor, pairs, masks)
                wanted = [pair for pair in wanted if pair not in computed]
        for constraint, row in wanted:
            if constraint.openings or len(constraint.matchers) != 1:
                self._join(constraint, masks[row])
                continue
            try:
                fill_next_token_bitmask(constraint.matchers[0], masks, row)
            except Exception as error:
                constraint.fail(one_line(str(error)))

    def _check(self, made: Sequence[tuple[Constraint, int]], masks: np.ndarray) -> None:
        for constraint, row in made:
            if not constraint.openings:
                masks[row] &= constraint.allowed
        rows = [row for _, row in made]
        for (constraint, row), allows in zip(made, np.asarray(masks[rows].any(axis=1)).tolist(), strict=True):
            constraint.check()
            if constraint.error is None and not allows:
                constraint.fail("The grammar allows no token here.")
            if constraint.error is not None:
                masks[row] = 0

    def _join(self, constraint: Constraint, mask: np.ndarray) -> None:
        mask[:] = 0
        words = np.zeros((1, len(mask)), np.int32)
        for matcher in constraint.matchers:
            try:
                fill_next_token_bitmask(matcher, words, 0)
            except Exception as error:
                constraint.fail(one_line(str(error)))
            mask |= 0 if matcher.is_error() else words[0]
        mask &= constraint.allowed
        for opening in constraint.openings:
            for token in self._vocabulary().spelling(opening):
                mask.view(np.uint32)[token // 32] |= np.uint32(1 << token % 32)

    def _forget(self, constraint: Constraint) -> None:
        """Evict the grammars of a failed output: their lexer may be full."""
        with self._lock:
            for key in [key for key, kept in self._kept.items() if kept.matcher in constraint.origins]:
                self._drop(key)

    def _weigh(self, constraints: Sequence[Constraint]) -> None:
        found: dict[int, int] = {}
        for constraint in constraints:
            if any(id(origin) not in found for origin in constraint.origins):
                num_bytes = max(map(_bytes_of, constraint.matchers), default=0)
                for origin in constraint.origins:
                    found[id(origin)] = max(num_bytes, found.get(id(origin), 0))
        with self._lock:
            for kept in self._kept.values():
                more = found.get(id(kept.matcher), 0) - kept.num_bytes
                if more > 0:
                    kept.num_bytes += more
                    self._kept_bytes += more
            self._drop_oldest()

    def _vocabulary(self) -> Vocabulary:
        if self._made_vocabulary is None:
            with self._lock:
                if self._refused is not None:  # takes seconds
                    raise UserError(self._refused, _PARAMETER)
                if self._made_vocabulary is None:
                    try:
                        self._made_vocabulary = Vocabulary(*self._of_vocabulary)
                    except UserError as error:
                        self._refused = str(error)
                        raise
        return self._made_vocabulary

    def _keep(self, key: StructuredOutputsParams | str, matcher: LLMatcher, pace: Pace) -> None:
        num_bytes = _bytes_of(matcher)
        with self._lock:
            if key in self._kept:
                self._drop(key)
            self._kept[key] = _Kept(matcher, num_bytes, pace)
            self._kept_chars += _num_chars(key)
            self._kept_bytes += num_bytes
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        while len(self._kept) > MAX_KEPT or self._kept_chars > MAX_KEPT_CHARS or self._kept_bytes > MAX_KEPT_BYTES:
            self._drop(next(iter(self._kept)))

    def _drop(self, key: StructuredOutputsParams | str) -> None:
        self._kept_bytes -= self._kept.pop(key).num_bytes
        self._kept_chars -= _num_chars(key)


_PARAMETER = "structured_outputs"
_TOKEN = re.compile(r"<\[(\d{1,9})\]>")  # a token id in a grammar


def _compiled(vocabulary: Vocabulary, source: str, kind: str) -> LLMatcher:
    """Compile a grammar and try its first steps, which may exceed limits too.

    Runs on a thread with a large stack: 4,096 levels of 2 kB, doubled.
    """
    made: list[LLMatcher] = []

    def work() -> None:
        made.append(LLMatcher(vocabulary.for_llguidance, source, log_level=0, limits=_LIMITS))
        if not made[0].is_error():
            made.append(made[0].deep_copy())
            for _ in range(_NUM_TRIED):
                mask = np.frombuffer(made[1].compute_bitmask(), np.uint8)
                allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little"))
                if len(allowed) and not made[1].is_error():
                    consume_released([made[1]], int(allowed[0]))

    start_thread(work, "jaxllm-grammar").join()
    failed = next((matcher for matcher in made if matcher.is_error()), None)
    if failed is not None:
        said = one_line(failed.get_error()).replace("NoExtensionBias", "it allows no first token")
        raise UserError(f"{kind} cannot be compiled: {said}", _PARAMETER)
    return made[0]


def _bytes_of(matcher: LLMatcher) -> int:
    copy = matcher.deep_copy()
    copy.rollback(_MANY_TOKENS)  # the error's message describes the lexer
    work = max(map(int, _WORK.findall(copy.get_error())), default=_MOST_BYTES)
    return _LEAST_BYTES + min(_MOST_BYTES, _BYTES_A_UNIT * work)


def _num_chars(asked: StructuredOutputsParams | str) -> int:
    if isinstance(asked, str):
        return len(asked)
    value = getattr(asked, asked.kind)
    return len(value) if isinstance(value, str) else sum(map(len, value)) if isinstance(value, tuple) else 0


def _of_the_server(grammar: str) -> str:
    plain = StructuredOutputsParams(json_object=True)
    return LLMatcher.grammar_from_lark(of_the_server(grammar, lambda schema: _with_options(schema, plain)))


def _source(asked: StructuredOutputsParams) -> str:
    if asked.regex is not None:
        return LLMatcher.grammar_from_regex(translate(asked.regex))
    if asked.choice is not None:
        longest = max(map(len, asked.choice))
        if longest > _MOST_TEXT:
            message = f"choice has a text of {longest} characters; the limit is {_MOST_TEXT}."
            raise UserError(message, _PARAMETER)
        return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {' | '.join(map(_literal, asked.choice))}\n")
    if asked.grammar is not None:
        return LLMatcher.grammar_from_lark(to_lark(asked.grammar, lambda schema: _with_options(schema, asked)))
    schema = {"type": "object"} if asked.json_object else json.loads(asked.json)
    if isinstance(schema, bool):
        if not schema:
            raise UserError("json is false, which no output satisfies.", _PARAMETER)
        schema = {}
    return json.dumps({"grammars": [{"json_schema": _with_options(schema, asked)}]})


def _with_options(schema: dict[str, Any], asked: StructuredOutputsParams) -> dict[str, Any]:
    options: dict[str, Any] = {"item_separator": ",", "key_separator": ":", "lenient": False, "coerce_one_of": False}
    # "u" could spell a described property name as an undescribed one.
    options["json_allowed_escapes"] = 'nrbtf\\"'
    if asked.disable_any_whitespace:
        options["whitespace_flexible"] = False
    else:
        pattern = asked.whitespace_pattern
        options["whitespace_pattern"] = _WHITESPACE if pattern is None else translate_whitespace(pattern)
    check_size(schema)
    return {**exact(prepare(schema, asked.disable_additional_properties)), "x-guidance": options}


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
