"""The grammars of one engine: compiled with llguidance, kept, and turned into masks of the tokens that may come next.

Whatever cannot be followed exactly is refused when it is compiled, with a bound on the work; nothing is approximated.
Knows tokens; knows no request and no device.
"""

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
from jaxllm.structured_output.constraint import Constraint, Way, one_line
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
MAX_KEPT_CHARS = 2**20  # of their sources, all together
MAX_KEPT_BYTES = 2**28  # of their lexers, which grow while outputs are followed: one of few characters to 20 or 40 MB
# A lexer counts its work, and its states take 1 to 20 bytes for each unit of that, of 22 kinds of grammars; but 50,000
# states, the most, have a kilobyte each. Without states it has 0.1 to 0.3 MB.
_LEAST_BYTES = 2**18
_BYTES_A_UNIT = 20
_MOST_BYTES = 50 * 2**20
_WORK = re.compile(r'^  "lexer_cost": (\d+),$', re.MULTILINE)
_MANY_TOKENS = 2**31 - 1
_WEIGHED_SECONDS = 0.002  # of a step's masks: lexers that grow by 100 kB take that long
STEPS_UNWEIGHED = 32
# Requests that share one that is kept: states of its lexer are kept for all its outputs and count against their limit.
MAX_USES = 64
# A model that prefers whitespace to an end would write it for ever.
_WHITESPACE = r"[ \n\r\t]{1,8}"

_MOST_TEXT = 2**13  # characters of one choice: what must come next is tokenized anew in each step
_LONG_SECONDS = 0.001  # of a step's masks, after which the others are made on several threads
_NUM_TRIED = 3  # steps: JSON's bracket, what follows it, and one more

# Measured on one core of two, llguidance 1.9.1. Of 128,000 tokens: the first use 1.9 s and 86 MB; a schema of three
# properties compiles in 8 ms, a mask takes 13 µs at the median and 0.2 ms at p99, 2 to 6 ms for \w and choices. Of
# 1,536 tokens: 2 ms, 9 µs, 80 µs. 10,000 different schemas leave the process at 100 MB. What is largest and passes
# compiles in 0.2 to 0.5 s; a mask at its limit takes 10 ms, of an ambiguous grammar some 100.
_LIMITS = LLParserLimits(
    initial_lexer_fuel=500_000,  # a list of 25,000 short texts takes 300,000
    step_lexer_fuel=100_000,
    step_max_items=10_000,
    max_lexer_states=50_000,
    max_grammar_size=100_000,
    verbose_errors=True,  # for `_bytes_of`
)


@dataclass
class _Kept:
    matcher: LLMatcher
    num_bytes: int
    uses: int = 1


class Grammar:
    """A compiled constraint, shared by the outputs that obey it."""

    def __init__(self, matchers: Sequence[LLMatcher], way: Way, allowed: np.ndarray, vocabulary: Vocabulary) -> None:
        self._matchers = matchers
        self._way = way
        self._allowed = allowed
        self._vocabulary = vocabulary
        self._pace = Pace()

    def begin(self) -> Constraint:
        """Give the constraint of a new output."""
        vocabulary = self._vocabulary
        given = self._matchers, self._way, self._allowed, vocabulary.bytes_of, vocabulary.eos_ids
        return Constraint(*given, self._pace)


class Grammars:
    """Compiles and follows the constraints of one engine. Costs nothing until the first use."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: Collection[int]) -> None:
        self._of_vocabulary = (tokenizer, vocab_size, eos_ids)
        self._lock = threading.Lock()
        self._made_vocabulary: Vocabulary | None = None
        self._refused: str | None = None  # why this model's vocabulary cannot follow grammars
        self._executor: LLExecutor | None = None
        self._kept: OrderedDict[StructuredOutputsParams | str, _Kept] = OrderedDict()
        self._kept_chars = self._kept_bytes = 0
        self._num_fills = 0

    def compile(self, asked: StructuredOutputsParams) -> Grammar:
        """Compile a constraint, or find it among those that were; on any thread.

        Raises:
            UserError: for what cannot be read or followed, or takes too much work; it names what.
        """
        vocabulary = self._vocabulary()
        own = asked.alone()
        matchers = [self._matcher(own, lambda: _source(own), own.kind)]
        others = [
            *([] if asked.or_grammar is None else [asked.or_grammar]),
            *(each for _, each in asked.or_grammar_after),
        ]
        of_others = {text: self._matcher(text, partial(_of_the_server, text), "or_grammar") for text in others}
        if asked.or_grammar is not None:
            matchers.append(of_others[asked.or_grammar])
        marks = [(mark, tuple(matchers)) for mark in asked.marks]
        marks += [(mark, (of_others[text],)) for mark, text in asked.or_grammar_after]
        way = Way(
            tuple((mark.encode(), found) for mark, found in marks),
            tuple(each.encode() for each in asked.may_open_with) if marks else (),
        )
        for opening in way.openings:
            vocabulary.spelling(opening)  # the first call reads the whole vocabulary
        tokens = {int(each) for text in others for each in _TOKEN.findall(text)}
        allowed = vocabulary.with_tokens(tokens) if tokens else vocabulary.allowed
        return Grammar(matchers, way, allowed, vocabulary)

    def _matcher(self, key: StructuredOutputsParams | str, source: Callable[[], str], kind: str) -> LLMatcher:
        """Return a new matcher of a grammar, from the cache if possible."""
        with self._lock:
            kept = self._kept.get(key)
            if kept is not None:
                self._kept.move_to_end(key)
                kept.uses += 1
                if kept.uses == MAX_USES:
                    self._drop(key)
                return kept.matcher
        matcher = _compiled(self._vocabulary(), source(), kind)
        self._keep(key, matcher)
        return matcher

    def fill(self, wanted: Sequence[tuple[Constraint, int]], masks: np.ndarray, until: float = math.inf) -> list[int]:
        """Write rows of int32[R, ceil(V/32)]: a bit for each token that may be next.

        Begins no more of them once the time of `time.perf_counter` is `until`, but for the first ones; returns the rows
        that are left. The row of a constraint in error, or that fails here, is all zeros.
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
            # A call for several rows takes as long as ten short masks; after long ones more are likely.
            size = 1 if now - began < _LONG_SECONDS else NUM_THREADS
            some, before = work[at : at + size], now
            self._make(some, masks)
            at, now = at + len(some), time.perf_counter()
            seconds = now - before
            if seconds > SLOW_SECONDS and len(some) == 1:  # on a busy machine, perhaps, where no thread runs
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
        """Write rows for constraints that are active and in no error, as llguidance makes them."""
        if len(wanted) > 1:
            computed = [each for each in wanted if not each[0].openings and len(each[0].matchers) == 1]
            with suppress(Exception):  # of one of them, which is found below
                pairs = [(constraint.matchers[0], row) for constraint, row in computed]
                self._executor = self._executor or LLExecutor(NUM_THREADS)
                fill_next_token_bitmask_par(self._executor, pairs, masks)
                wanted = [each for each in wanted if each not in computed]
        for constraint, row in wanted:
            if constraint.openings or len(constraint.matchers) != 1:
                self._join(constraint, masks[row])
                continue
            try:
                fill_next_token_bitmask(constraint.matchers[0], masks, row)
            except Exception as error:
                constraint.fail(one_line(str(error)))

    def _check(self, made: Sequence[tuple[Constraint, int]], masks: np.ndarray) -> None:
        """Reduce rows to the tokens that constraints may allow, and end constraints that allow none."""
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
        """Write the union of the masks of several grammars and openings."""
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
        """Keep no grammar whose output came into error: outputs share its lexer, which may be what is full."""
        with self._lock:
            for key in [key for key, kept in self._kept.items() if kept.matcher in constraint.origins]:
                self._drop(key)

    def _weigh(self, constraints: Sequence[Constraint]) -> None:
        """Estimate the memory of the grammars of some outputs, and drop the least recently used above the bound."""
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
                if self._refused is not None:  # looking through a large vocabulary takes seconds
                    raise UserError(self._refused, _PARAMETER)
                if self._made_vocabulary is None:
                    try:
                        self._made_vocabulary = Vocabulary(*self._of_vocabulary)
                    except UserError as error:
                        self._refused = str(error)
                        raise
        return self._made_vocabulary

    def _keep(self, key: StructuredOutputsParams | str, matcher: LLMatcher) -> None:
        num_bytes = _bytes_of(matcher)
        with self._lock:
            if key in self._kept:
                self._drop(key)
            self._kept[key] = _Kept(matcher, num_bytes)
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
    """Compile a grammar and try its first steps: some that are too large for any step compile.

    On a thread with a stack of known size, because it recurses: 4,096 levels of 2 kB, and as much again for what is not
    known.
    """
    made: list[LLMatcher] = []

    def work() -> None:
        made.append(LLMatcher(vocabulary.for_llguidance, source, log_level=0, limits=_LIMITS))
        if not made[0].is_error():
            made.append(made[0].deep_copy())
            for _ in range(_NUM_TRIED):
                mask = np.frombuffer(made[1].compute_bitmask(), np.uint8)
                allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little"))
                made[1].try_consume_tokens([token for token in allowed[:1].tolist() if not made[1].is_error()])

    start_thread(work, "jaxllm-grammar").join()
    failed = next((matcher for matcher in made if matcher.is_error()), None)
    if failed is not None:
        said = one_line(failed.get_error()).replace("NoExtensionBias", "nothing can be its first token")
        raise UserError(f"{kind} cannot be compiled: {said}", _PARAMETER)
    return made[0]


def _bytes_of(matcher: LLMatcher) -> int:
    """Return about how much memory a grammar and its lexer take, rather too much; 60 µs, more for a long grammar."""
    copy = matcher.deep_copy()
    copy.rollback(_MANY_TOKENS)  # an error, which describes the lexer
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
    """Write what is asked for in llguidance's notation."""
    if asked.regex is not None:
        return LLMatcher.grammar_from_regex(translate(asked.regex))
    if asked.choice is not None:
        longest = max(map(len, asked.choice))
        if longest > _MOST_TEXT:
            message = f"choice has a text of {longest} characters; it may have {_MOST_TEXT}."
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
    """Return a schema with what its JSON may look like, where llguidance reads it: in the schema itself."""
    options: dict[str, Any] = {"item_separator": ",", "key_separator": ":", "lenient": False, "coerce_one_of": False}
    # Without "u": a name that a schema describes could be written with \u escapes as one that it does not describe.
    options["json_allowed_escapes"] = 'nrbtf\\"'
    if asked.disable_any_whitespace:
        options["whitespace_flexible"] = False
    else:
        pattern = asked.whitespace_pattern
        options["whitespace_pattern"] = _WHITESPACE if pattern is None else translate_whitespace(pattern)
    check_size(schema)
    return {**exact(prepare(schema, asked.disable_additional_properties)), "x-guidance": options}


def _literal(text: str) -> str:
    """Write a text in Lark's notation: JSON's, which llguidance reads, but for the one character that it refuses."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
