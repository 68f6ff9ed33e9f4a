"""jinja2 as chat templates need it: sandboxed, with the filter, functions and tags that transformers gives them.

See `_compile_jinja_template` in transformers (utils/chat_template_utils.py). A template is part of a model's folder and
as trusted as its weights; the sandbox keeps a careless one away from the process.
"""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, Undefined, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class _GenerationBlock(Extension):
    """`{% generation %}` marks an assistant's words for training; here its body is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own declaration

    def parse(self, parser: Parser) -> nodes.Node:
        """Keep the block's body."""
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


class _Missing(Undefined):
    """A missing value; jinja2's own message names Python classes."""

    @property
    def _undefined_message(self) -> str:
        return self._undefined_hint or f"there is no {self._undefined_name!r}"


def make_environment() -> ImmutableSandboxedEnvironment:
    """Make an environment for chat templates."""
    environment = ImmutableSandboxedEnvironment(
        undefined=_Missing, trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": lambda form: datetime.now().strftime(form),
    }
    environment.filters["tojson"] = _to_json
    return environment


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    # jinja2's own filter escapes for HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
