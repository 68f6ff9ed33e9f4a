"""The grammars of one engine: compiled with llguidance, kept, and turned into masks of the tokens that may come next.

Whatever cannot be followed exactly is refused when it is compiled, with a bound on the work; nothing is approximated.
Knows tokens; knows no request and no device.
"""

from __future__ import annotations

import json
import os
import threading
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits
from llguidance.numpy import fill_next_token_bitmask, fill_next_token_bitmask_par

from jaxllm.errors import UserError
from jaxllm.structured_output.constraint import Constraint, one_line
from jaxllm.structured_output.ebnf import to_lark
from jaxllm.structured_output.expressions import translate, translate_whitespace
from jaxllm.structured_output.schemas import prepare
from jaxllm.structured_output.vocabulary import Vocabulary
from jaxllm.structured_outputs_params import StructuredOutputsParams
from jaxllm.text.tokenizer import Tokenizer

MAX_KEPT = 256  # grammars
MAX_KEPT_CHARS = 2**21  # of their sources, all together
# A model that prefers whitespace to an end would write it for ever.
_WHITESPACE = r"[ \n\r\t]{1,8}"

_LIMITS = LLParserLimits(verbose_errors=False)


class Grammar:
    """A compiled constraint, shared by the outputs that obey it."""

    def __init__(self, matcher: LLMatcher, begin_after: str | None, vocabulary: Vocabulary) -> None:
        self._matcher = matcher
        self._begin_after = begin_after
        self._vocabulary = vocabulary

    def begin(self) -> Constraint:
        """Give the constraint of a new output."""
        return Constraint(
            self._matcher.deep_copy(), self._begin_after, self._vocabulary.bytes_of, self._vocabulary.eos_ids
        )


class Grammars:
    """Compiles and follows the constraints of one engine. Costs nothing until the first use."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: Collection[int]) -> None:
        self._of_vocabulary = (tokenizer, vocab_size, eos_ids)
        self._lock = threading.Lock()
        self._made_vocabulary: Vocabulary | None = None
        self._executor: LLExecutor | None = None
        self._kept: OrderedDict[StructuredOutputsParams, LLMatcher] = OrderedDict()
        self._kept_chars = 0

    def compile(self, asked: StructuredOutputsParams) -> Grammar:
        """Compile a constraint, or find it among those that were; on any thread.

        Raises:
            UserError: for what cannot be read or followed, or takes too much work; it names what.
        """
        vocabulary = self._vocabulary()
        key = replace(asked, begin_after=None)
        with self._lock:
            matcher = self._kept.get(key)
            if matcher is not None:
                self._kept.move_to_end(key)
        if matcher is None:
            matcher = LLMatcher(vocabulary.for_llguidance, _source(asked), log_level=0, limits=_LIMITS)
            if matcher.is_error():
                raise UserError(f"{asked.kind} cannot be compiled: {one_line(matcher.get_error())}", _PARAMETER)
            self._keep(key, matcher)
        return Grammar(matcher, asked.begin_after, vocabulary)

    def fill(self, wanted: Sequence[tuple[Constraint, int]], masks: np.ndarray) -> None:
        """Write rows of int32[R, ceil(V/32)]: a bit for each token that may come next. One call a step.

        The row of a constraint in error, or that comes into error here, is all zeros.
        """
        computed: list[tuple[Constraint, int]] = []
        for constraint, row in wanted:
            if constraint.error is not None:
                masks[row] = 0
            elif not constraint.is_active:
                masks[row] = self._vocabulary().every
            else:
                computed.append((constraint, row))
        if len(computed) == 1:
            fill_next_token_bitmask(computed[0][0].matcher, masks, computed[0][1])
        elif computed:
            if self._executor is None:
                self._executor = LLExecutor(max(1, (os.cpu_count() or 1) - 1))
            pairs = [(constraint.matcher, row) for constraint, row in computed]
            fill_next_token_bitmask_par(self._executor, pairs, masks)
        for constraint, row in computed:
            constraint.check()
            masks[row] &= self._vocabulary().allowed
            if constraint.error is None and not masks[row].any():
                constraint.fail("The grammar allows no token here.")
            if constraint.error is not None:
                masks[row] = 0

    def _vocabulary(self) -> Vocabulary:
        if self._made_vocabulary is None:
            with self._lock:
                if self._made_vocabulary is None:
                    self._made_vocabulary = Vocabulary(*self._of_vocabulary)
        return self._made_vocabulary

    def _keep(self, key: StructuredOutputsParams, matcher: LLMatcher) -> None:
        with self._lock:
            if key not in self._kept:
                self._kept_chars += _num_chars(key)
            self._kept[key] = matcher
            while len(self._kept) > MAX_KEPT or self._kept_chars > MAX_KEPT_CHARS:
                oldest, _ = self._kept.popitem(last=False)
                self._kept_chars -= _num_chars(oldest)


_PARAMETER = "structured_outputs"


def _num_chars(asked: StructuredOutputsParams) -> int:
    value = getattr(asked, asked.kind)
    return len(value) if isinstance(value, str) else sum(map(len, value)) if isinstance(value, tuple) else 0


def _source(asked: StructuredOutputsParams) -> str:
    """Write what is asked for in llguidance's notation."""
    if asked.regex is not None:
        return LLMatcher.grammar_from_regex(translate(asked.regex))
    if asked.choice is not None:
        return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {' | '.join(map(_literal, asked.choice))}\n")
    if asked.grammar is not None:
        return LLMatcher.grammar_from_lark(to_lark(asked.grammar, lambda schema: _with_options(schema, asked)))
    schema = {"type": "object"} if asked.json_object else json.loads(asked.json)
    if isinstance(schema, bool):
        if not schema:
            raise UserError("json is false, which no output satisfies.", _PARAMETER)
        schema = {}
    return json.dumps({"grammars": [{"json_schema": _with_options(schema, asked)}]})


def _with_options(schema: dict, asked: StructuredOutputsParams) -> dict:
    """Return a schema with what its JSON may look like, where llguidance reads it: in the schema itself."""
    options = {"item_separator": ",", "key_separator": ":", "lenient": False, "coerce_one_of": False}
    if asked.disable_any_whitespace:
        options["whitespace_flexible"] = False
    else:
        pattern = asked.whitespace_pattern
        options["whitespace_pattern"] = _WHITESPACE if pattern is None else translate_whitespace(pattern)
    return {**prepare(schema, asked.disable_additional_properties), "x-guidance": options}


def _literal(text: str) -> str:
    """Write a text in Lark's notation: JSON's, which llguidance reads, but for the one character that it refuses."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
