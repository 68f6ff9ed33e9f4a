"""jinja2 as chat templates need it, in a sandbox that also bounds what a template can take of time and memory.

A template is foreign code. jinja2's immutable sandbox keeps it from the rest of the process; here every loop, call,
filter and operation that can make something large is metered as well, so that a template ends by itself, without a
thread or a signal: processor time, and characters and list elements made in all.

Not metered are single operations of Python on what a template has built, as the comparison of two nests of lists.
What templates may rely on is fixed by transformers (utils/chat_template_utils.py): the filter `tojson`,
`raise_exception`, `strftime_now`, `break` and `continue` in loops, and `{% generation %}` blocks.
"""

from __future__ import annotations

import functools
import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, Undefined, nodes, pass_context, pass_eval_context
from jinja2.compiler import CodeGenerator
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import markup_join, str_join
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_SECONDS = 1.0  # of the thread's processor time, so that a busy machine refuses nothing
LEAST_BUDGET = 32 << 20  # characters and elements made on the way, whatever the conversation's size …
BUDGET_PER_CHARACTER = 64  # … and for each of its characters: a template may copy a text several times
MAX_WIDTH = 10_000  # that a text can be padded to
MAX_INTEGER_BITS = 4096
_STEPS_PER_LOOK = 32  # at the clock, which costs 0.3 µs
# Filters that neither write their argument out as text nor go through all of its parts.
_NOT_WRITING = frozenset(
    "length count first last list map select selectattr reject rejectattr default d sort unique groupby batch slice "
    "reverse sum min max items dictsort attr random abs round".split()
)
_PADDING = frozenset("center ljust rjust zfill expandtabs indent batch slice tojson".split())
_WIDE = re.compile(
    rf"\*|\d{{{len(str(MAX_WIDTH))},}}|\{{[^}}]*\{{"
)  # a width in a format that is large, or an argument


class LimitError(Exception):
    """A template takes more than it may."""


class Meter(threading.local):
    """What the template that a thread is rendering may still take."""

    steps = 0
    left = LEAST_BUDGET
    deadline = 0.0

    def begin(self, num_characters: int) -> None:
        """Start with a conversation of this size."""
        self.left = LEAST_BUDGET + BUDGET_PER_CHARACTER * num_characters
        self.deadline = time.thread_time() + MAX_SECONDS

    def step(self) -> None:
        """Count a turn of a loop, or a call."""
        self.steps += 1
        if self.steps % _STEPS_PER_LOOK == 0 and time.thread_time() > self.deadline:
            raise LimitError(f"it takes more than {MAX_SECONDS:g} s")

    def take(self, amount: int) -> None:
        """Count characters or elements."""
        self.left -= amount
        if self.left < 0:
            raise LimitError("it writes too much")

    def take_parts(self, value: Any) -> None:
        """Count a value as long as its text is."""
        if isinstance(value, str):
            self.take(len(value))
        elif isinstance(value, dict):
            for pair in value.items():
                self.take_parts(pair)
        elif isinstance(value, list | tuple | set | frozenset):
            self.step()
            self.take(1 + len(value))
            for item in value:
                self.take_parts(item)


class _GenerationBlock(Extension):
    """`{% generation %}` marks an assistant's words for training; here it only shows them."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own declaration

    def parse(self, parser: Parser) -> nodes.Node:
        """Keep the block's body."""
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


class _Metering(NodeTransformer):
    """Leads every loop and every `~` through a filter, where they are counted."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = _filter(node, node.iter, "metered_loop")
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        parts = nodes.List(node.nodes, lineno=node.lineno, environment=node.environment)
        return _filter(node, parts, "metered_concat")


def _filter(node: nodes.Node, argument: Any, name: str) -> nodes.Filter:
    return nodes.Filter(argument, name, [], [], None, None, lineno=node.lineno, environment=node.environment)


class _Generator(CodeGenerator):
    def visit_Template(self, node: nodes.Template, frame: Any = None) -> None:
        super().visit_Template(_Metering().visit(node), frame)


class _Missing(Undefined):
    """A value that is not there; jinja2's own words for it name the class of what should have had it."""

    @property
    def _undefined_message(self) -> str:
        return self._undefined_hint or f"there is no {self._undefined_name!r}"


class Sandbox(ImmutableSandboxedEnvironment):
    """Compiles templates; `meter` is to begin before one is compiled or rendered."""

    code_generator_class = _Generator
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        self.meter = Meter()
        super().__init__(
            undefined=_Missing,
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationBlock, loopcontrols],
            finalize=self._count_output,
        )
        self.concat = self._concat
        del self.globals["lipsum"]
        self.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": lambda form: datetime.now().strftime(form),
        }
        self.filters["tojson"] = _to_json
        for name, function in self.filters.items():
            self.filters[name] = self._metered(name, function)
        self.filters |= {"metered_loop": self._loop(), "metered_concat": self._join()}

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Call something for a template."""
        __self.meter.step()
        method = getattr(__obj, "__wrapped__", __obj)  # jinja2 wraps `str.format`
        owner, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
        if isinstance(owner, str):
            __self._check_text(name, owner, args, kwargs)
        result = super().call(__context, __obj, *args, **kwargs)
        __self._take_result(result)
        return result

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Compute `left operator right` for a template."""
        self.meter.step()
        if operator == "%" and isinstance(left, str):
            self._check_format(left, right)
        elif operator == "+" and isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple):
            self.meter.take(len(left) + len(right))
        elif operator == "*":
            for value, times in ((left, right), (right, left)):
                if isinstance(value, str | list | tuple) and isinstance(times, int):
                    self.meter.take(len(value) * max(times, 0))
        if operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
            if bits > MAX_INTEGER_BITS:
                raise LimitError("it computes an integer that is too large")
        return super().call_binop(context, operator, left, right)

    def _metered(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a filter."""

        @functools.wraps(function)  # with jinja2's marks: which of its own arguments the function wants first
        def run(*args: Any, **kwargs: Any) -> Any:
            self.meter.step()
            if name == "join":  # what a generator would give has to be counted first
                args = tuple(list(value) if isinstance(value, Iterator) else value for value in args)
            self._check_filter(name, [*args, *kwargs.values()])
            result = function(*args, **kwargs)
            self._take_result(result)
            return result

        return run

    def _check_filter(self, name: str, values: list[Any]) -> None:
        """Count what a filter is about to make, where that may be far more than its result."""
        texts = [value for value in values if isinstance(value, str)]
        if name in _PADDING:
            _check_widths(values)
        if name not in _NOT_WRITING:
            for value in values:
                if not isinstance(value, str):
                    self.meter.take_parts(value)
        if name == "format" and texts:
            self._check_format(texts[0], ())
        elif name == "replace" and len(texts) >= 3:
            self._check_text("replace", texts[0], texts[1:], {})
        elif name == "join" and texts:
            lengths = [len(value) for value in values if isinstance(value, list | tuple | dict)]
            self.meter.take(max(lengths, default=0) * max(map(len, texts)))
        elif name == "sum" and any(isinstance(value, list | tuple) for value in values[2:]):
            raise LimitError("it adds up lists")

    def _check_text(self, name: str, text: str, args: Any, kwargs: Any) -> None:
        """Count what a method of a text is about to make, where that may be far more than its arguments."""
        if name in _PADDING:
            _check_widths([*args, *kwargs.values()])
        elif name in ("format", "format_map"):
            self._check_format(text, [*args, *kwargs.values()])
        elif name == "join" and args and isinstance(args[0], list | tuple | dict | str):
            self.meter.take(len(text) * len(args[0]))
            self.meter.take_parts(list(args[0]))
        elif name == "join":
            raise LimitError("it joins what is not a list")
        elif name == "replace" and len(args) >= 2 and isinstance(args[0], str) and isinstance(args[1], str):
            self.meter.take(len(text) + text.count(args[0]) * len(args[1]))

    def _check_format(self, text: str, values: Any) -> None:
        if _WIDE.search(text):
            raise LimitError("it formats to a width that is too large or not fixed")
        self.meter.take(len(text))
        self.meter.take_parts(values)

    def _take_result(self, result: Any) -> None:
        if isinstance(result, str | list | tuple | dict):
            self.meter.take(len(result))

    def _count_output(self, value: Any) -> Any:
        """Count a value that is about to be written, if its text has yet to be made."""
        if isinstance(value, list | tuple | dict):
            self.meter.take_parts(value)
        return value

    def _concat(self, pieces: Iterable[str]) -> str:
        pieces = list(pieces)
        self.meter.take(sum(map(len, pieces)))
        return "".join(pieces)

    def _loop(self) -> Callable[..., Iterator[Any]]:
        @pass_context
        def metered_loop(context: Any, items: Iterable[Any]) -> Iterator[Any]:
            for item in items:
                self.meter.step()
                yield item

        return metered_loop

    def _join(self) -> Callable[..., str]:
        @pass_eval_context
        def metered_concat(evaluation: Any, parts: list[Any]) -> str:
            self.meter.step()
            for part in parts:
                self.meter.take_parts(part)
            return markup_join(parts) if evaluation.autoescape else str_join(parts)

        return metered_concat


def content_kinds(tree: nodes.Template) -> tuple[bool, bool]:
    """Say whether a template goes through the parts of a message's content, and whether it takes a text for one.

    As vLLM finds out a template's "content format": from loops over `content`, or over a variable it is assigned to.
    """

    def is_content(node: nodes.Node) -> bool:
        if isinstance(node, nodes.Filter) and node.node is not None:
            return is_content(node.node)
        if isinstance(node, nodes.Getitem):
            return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
        return (isinstance(node, nodes.Getattr) and node.attr == "content") or (
            isinstance(node, nodes.Name) and node.name in names
        )

    names: set[str] = set()
    for assignment in tree.find_all(nodes.Assign):
        if isinstance(assignment.target, nodes.Name) and is_content(assignment.node):
            names.add(assignment.target.name)
    takes_parts = any(is_content(loop.iter) for loop in tree.find_all(nodes.For))
    asks = any(test.name in ("string", "iterable", "sequence", "mapping") for test in tree.find_all(nodes.Test))
    return takes_parts, asks or not takes_parts


def _check_widths(values: Iterable[Any]) -> None:
    if any(isinstance(value, int) and abs(value) > MAX_WIDTH for value in values):
        raise LimitError("it pads text to a width that is too large")


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    # jinja2's own filter escapes for HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
