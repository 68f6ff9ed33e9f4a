"""jinja2 as chat templates need it, in a sandbox that also bounds what a template can take of time and memory.

A template is foreign code. jinja2's immutable sandbox keeps it from the rest of the process; here every loop, call,
filter, comparison and operation that can make something large is metered as well, so that a template ends by itself,
without a thread or a signal: processor time, and characters and list elements made in all.

A single operation of Python cannot be stopped. So before one that may take long its operands are weighed, and what is
too heavy is refused: `[x, x]` of `[y, y]` and so on 60 times is small to hold, and 2^60 comparisons with another.
What templates may rely on is fixed by transformers (utils/chat_template_utils.py): the filter `tojson`,
`raise_exception`, `strftime_now`, `break` and `continue` in loops, and `{% generation %}` blocks.
"""

from __future__ import annotations

import functools
import json
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, Undefined, nodes, pass_context, pass_eval_context
from jinja2.compiler import CodeGenerator
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import LoopContext, markup_join, str_join
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from jaxllm.text.template_meter import ELEMENT, MAX_WEIGHT, NESTED, LimitError, Meter

MAX_WIDTH = 10_000  # that a text can be padded to
MAX_INTEGER_BITS = 4096
MAX_PAIRED_CHARACTERS = 1 << 28  # that `rfind` and `strip` compare, which take the product of both lengths
# Filters that neither write their argument out as text nor go through all of its parts.
_NOT_WRITING = frozenset(
    "length count first last list map select selectattr reject rejectattr default d sort unique groupby batch slice "
    "reverse sum min max items dictsort attr random abs round".split()
)
_PADDING = frozenset("center ljust rjust zfill expandtabs indent batch slice tojson round".split())
_REPEATING = frozenset("indent tojson wordwrap urlize".split())  # write an argument for every line, link or part
_ORDERING = frozenset("sort unique groupby dictsort min max".split())  # filters that compare what is in their argument
# Characters that a filter takes, of those that need a microsecond or more for each, or the square of them all: `title`
# took 7 s for 8 MB, `urlize` 6.6 s, `wordwrap(1)` more than 12 s.
_MAX_TEXT = {"title": 1 << 18, "wordcount": 1 << 20, "urlencode": 1 << 20} | dict.fromkeys(
    ("urlize", "wordwrap", "striptags", "xmlattr", "filesizeformat", "int", "float"), 1 << 16
)
_MAX_WEIGHT = {"pprint": 1 << 15} | dict.fromkeys((*_ORDERING, "tojson"), MAX_WEIGHT)
_COMPARING_TESTS = frozenset("== eq equalto != ne < lt lessthan <= le > gt greaterthan >= ge in".split())
_FROM_THE_END = frozenset("rfind rindex rsplit rpartition strip lstrip rstrip".split())
_UNSAFE = frozenset({"encode", "to_bytes"})  # bytes are not metered, and no text needs them
_VALUES = (str, int, float, type(None), Undefined, *NESTED)
_COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "lteq": operator.le,
    "gt": operator.gt,
    "gteq": operator.ge,
    "in": lambda left, right: left in right,
    "notin": lambda left, right: left not in right,
}
_WIDE = re.compile(
    rf"\*|\d{{{len(str(MAX_WIDTH))},}}|\{{[^}}]*\{{"
)  # a width in a format that is large, or an argument


class _GenerationBlock(Extension):
    """`{% generation %}` marks an assistant's words for training; here it only shows them."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own declaration

    def parse(self, parser: Parser) -> nodes.Node:
        """Keep the block's body."""
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


class _Metering(NodeTransformer):
    """Leads every loop, every `~`, every comparison and every key through a filter, where they are counted."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = _filter(node, node.iter, "metered_loop")
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        parts = nodes.List(node.nodes, lineno=node.lineno, environment=node.environment)
        return _filter(node, parts, "metered_concat")

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        """Of `a < b < c` all three are computed, which Python may not do: only what fails to be computed shows that."""
        self.generic_visit(node)
        operands = [value for each in node.ops for value in (nodes.Const(each.op), each.expr)]
        return _filter(node, node.expr, "metered_compare", operands)

    def visit_Pair(self, node: nodes.Pair) -> nodes.Node:
        self.generic_visit(node)
        node.key = _metered_key(node.key)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        if not isinstance(node.arg, nodes.Slice):
            node.arg = _metered_key(node.arg)
        return node


def _metered_key(node: nodes.Expr) -> nodes.Expr:
    return node if isinstance(node, nodes.Const) else _filter(node, node, "metered_key")


def _filter(node: nodes.Node, argument: Any, name: str, others: Sequence[nodes.Expr] = ()) -> nodes.Filter:
    return nodes.Filter(argument, name, [*others], [], None, None, lineno=node.lineno, environment=node.environment)


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
    intercepted_binops = frozenset({"+", "-", "*", "**", "%"})

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
        self.filters |= {
            "metered_loop": self._loop(),
            "metered_concat": self._join(),
            "metered_compare": self._compare,
            "metered_key": self._key,
        }
        for name in _COMPARING_TESTS:
            self.tests[name] = self._metered_test(name, self.tests[name])
        for name in ("upper", "lower"):
            self.tests[name] = self._metered_writing(self.tests[name])

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Whether a template may have an attribute."""
        return attr not in _UNSAFE and super().is_safe_attribute(obj, attr, value)

    def unsafe_undefined(self, obj: Any, attribute: str) -> Undefined:
        """Make what fails when a template uses an attribute that it may not have."""
        return self.undefined(f"access to attribute {attribute!r} is not allowed.", name=attribute, exc=SecurityError)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Call something for a template."""
        __self.meter.step()
        method = getattr(__obj, "__wrapped__", __obj)  # jinja2 wraps `str.format`
        owner, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
        if isinstance(owner, str):
            __self.meter.step(len(owner) // 1024)
            __self._check_text(name, owner, args, kwargs)
        elif isinstance(owner, list | tuple) and name in ("count", "index"):
            __self.meter.check_pairs(args[:1], owner)
        elif isinstance(owner, (*NESTED, LoopContext)) or owner is dict or __obj is dict or __obj is Namespace:
            __self.meter.weigh(args)  # may become keys, or be compared with what `loop.changed` had before
            if isinstance(owner, Set):
                __self.meter.weigh(owner)
        result = super().call(__context, __obj, *args, **kwargs)
        __self._take_result(result)
        return result

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Compute `left operator right` for a template."""
        self.meter.step()
        if operator == "%" and isinstance(left, str):
            self._check_format(left, right)
        elif operator == "+" and isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple):
            self.meter.take((len(left) + len(right)) * _cost(left))
        elif operator == "-":
            self.meter.check_comparison(left, right)
        elif operator == "*":
            for value, times in ((left, right), (right, left)):
                if isinstance(value, str | list | tuple) and isinstance(times, int):
                    self.meter.take(len(value) * max(times, 0) * _cost(value))
        if operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
            if bits > MAX_INTEGER_BITS:
                raise LimitError("it computes an integer that is too large")
        return super().call_binop(context, operator, left, right)

    def _metered(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a filter."""

        @functools.wraps(function)  # with jinja2's marks: which of its own arguments the function wants first
        def run(*args: Any, **kwargs: Any) -> Any:
            self.meter.look()
            if name == "join" or name in _ORDERING:  # what a generator would give has to be counted first
                args = tuple(list(value) if isinstance(value, Iterator) else value for value in args)
            self._check_filter(name, [*args, *kwargs.values()])
            result = function(*args, **kwargs)
            self._take_result(result)
            return result

        return run

    def _check_filter(self, name: str, values: list[Any]) -> None:
        """Count what a filter is about to make, where that may be far more than its result."""
        texts = [value for value in values if isinstance(value, str)]
        if texts and len(texts[0]) > _MAX_TEXT.get(name, len(texts[0])):
            raise LimitError(f"it gives {name!r} a text that is too long")
        for value in values:
            if name in _MAX_WEIGHT:
                self.meter.weigh(value, _MAX_WEIGHT[name])
            elif isinstance(value, tuple):  # `attribute` may be one
                self.meter.weigh(value)
            if name in _ORDERING and isinstance(value, list | tuple):
                if not all(isinstance(item, _VALUES) for item in value):
                    raise LimitError("it orders what is not a value")  # and may hide something in an attribute
        if name in _PADDING:
            _check_widths(values)
        if name not in _NOT_WRITING:
            numbers = [value for value in values[1:] if isinstance(value, int)]
            repeated = max([*numbers, *map(len, texts[1:])], default=0) if name in _REPEATING else 0
            for value in values:
                if not isinstance(value, str):
                    self.meter.take_parts(value, repeated)
            if repeated and texts:
                lines = len(texts[0].splitlines()) if name == "indent" else len(texts[0])
                self.meter.take(lines * repeated)
        if name == "format" and texts:
            self._check_format(texts[0], [value for value in values if value is not texts[0]])
        elif name == "trim" and len(texts) > 1:
            self._check_text("strip", texts[0], texts[1:], {})
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
            if name == "expandtabs":
                self.meter.take(text.count("\t") * max([8, *(value for value in (*args, *kwargs.values()) if value)]))
        elif name in _FROM_THE_END and args and isinstance(args[0], str):
            if len(text) * len(args[0]) > MAX_PAIRED_CHARACTERS:
                raise LimitError("it looks for a text that is too long")
            self.meter.step(len(text) * len(args[0]) // 4096)
        elif name in ("startswith", "endswith"):
            self.meter.weigh(args)
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
        before = self.meter.left
        self.meter.take_parts(values)
        num_fields = text.count("%") + text.count("{")  # each of which may be all of the values
        self.meter.take(len(text) + (before - self.meter.left) * max(0, num_fields - 1))

    def _take_result(self, result: Any) -> None:
        if isinstance(result, str | list | tuple | dict):
            self.meter.take(len(result) * _cost(result))

    def _compare(self, left: Any, *rest: Any) -> bool:
        """Compare a value with the first of `rest`, this with the next, and so on; each stands behind its operator."""
        for name, right in zip(rest[::2], rest[1::2], strict=True):
            if name in ("in", "notin"):
                right = self._check_in(left, right)
            else:
                self.meter.check_comparison(left, right)
            if not _COMPARE[name](left, right):
                return False
            left = right
        return True

    def _check_in(self, value: Any, items: Any) -> Any:
        """Weigh what `value in items` is to compare; return the items, as a list where they come from a generator."""
        if isinstance(items, str):
            self.meter.step(1 + len(items) // 1024)
            return items
        if isinstance(items, Iterator):
            items = list(items)
        if isinstance(items, NESTED):
            self.meter.check_pairs(value, items)
        return items

    def _key(self, value: Any) -> Any:
        """Weigh what is about to be hashed."""
        if isinstance(value, tuple):
            self.meter.weigh(value)
        return value

    def _metered_test(self, name: str, function: Callable[..., bool]) -> Callable[..., bool]:
        """Wrap a test that compares."""

        def run(left: Any, right: Any) -> bool:
            if name == "in":
                right = self._check_in(left, right)
            else:
                self.meter.check_comparison(left, right)
            return function(left, right)

        return run

    def _metered_writing(self, function: Callable[[Any], bool]) -> Callable[[Any], bool]:
        """Wrap a test that looks at the text of its argument."""

        def run(value: Any) -> bool:
            self.meter.take_parts(value)
            return function(value)

        return run

    def _count_output(self, value: Any) -> Any:
        """Count a value that is about to be written, if its text has yet to be made."""
        if isinstance(value, NESTED) or type(value) is Namespace:
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


def _cost(value: Any) -> int:
    """Say what a part of a text, list or the like is counted as."""
    return 1 if isinstance(value, str) else ELEMENT


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
