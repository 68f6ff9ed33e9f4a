"""The page at `/docs`: the description of the API as HTML, with a form for each route.

Self-contained: nothing is fetched from elsewhere, and its policy lets it speak to this server alone. Pure.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping
from hashlib import sha256
from html import escape
from typing import Any

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
details { border-bottom: 1px solid #ccc; padding: .4rem 0; } summary { cursor: pointer; }
code, pre, textarea { font: 13px/1.4 ui-monospace, monospace; } textarea { width: 100%; height: 7rem; }
td { padding: .1rem .8rem .1rem 0; vertical-align: top; } pre { white-space: pre-wrap; overflow-wrap: anywhere; }
"""
# Shows an answer as it comes, so that a stream is seen to be one.
_SCRIPT = """
for (const form of document.forms) form.onsubmit = async event => {
  event.preventDefault();
  const shown = form.querySelector("pre"), fields = form.elements, headers = {};
  const key = document.getElementById("key").value;
  if (key) headers.authorization = "Bearer " + key;
  if (fields.body) headers["content-type"] = "application/json";
  const path = fields.path.value.replace(/^[/]/, "");
  shown.textContent = "…";
  try {
    const answer = await fetch(path, { method: form.dataset.method, headers, body: fields.body && fields.body.value });
    shown.textContent = answer.status + " " + answer.statusText + "\\n";
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    for (let piece; !(piece = await reader.read()).done;) shown.append(piece.value);
  } catch (error) { shown.textContent = String(error); }
};
"""


def _source(text: str) -> str:
    return f"'sha256-{base64.b64encode(sha256(text.encode()).digest()).decode()}'"


HEADERS: Mapping[str, str] = {
    "content-security-policy": "; ".join(
        (
            "default-src 'none'",
            f"style-src {_source(_STYLE)}",
            f"script-src {_source(_SCRIPT)}",
            "connect-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        )
    ),
    "x-content-type-options": "nosniff",
}


def page_of(description: Mapping[str, Any]) -> bytes:
    """Write the page of a description that `openapi.py` made."""
    title = escape(description["info"]["title"])
    operations = [
        part
        for path, methods in description["paths"].items()
        for method, operation in methods.items()
        for part in _operation(path, method.upper(), operation, description["components"]["schemas"])
    ]
    page = (
        "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>",
        f"<title>{title}</title><style>{_STYLE}</style><h1>{title}</h1>",
        f"<p>{escape(description['info']['description'])} For tools: <a href=openapi.json>openapi.json</a>.",
        "<p><label>Key, where the server asks for one: <input id=key type=password autocomplete=off></label>",
        *operations,
        f"<script>{_SCRIPT}</script></html>",
    )
    return "\n".join(page).encode()


def _operation(
    path: str, method: str, operation: Mapping[str, Any], schemas: Mapping[str, Mapping[str, Any]]
) -> Iterator[str]:
    yield f"<details><summary><b>{method}</b> <code>{escape(path)}</code> {escape(operation['summary'])}</summary>"
    if "description" in operation:
        yield f"<p>{escape(operation['description'])}"
    content = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
    name = content.get("schema", {}).get("$ref", "").rpartition("/")[2]
    if name:
        required = schemas[name]["required"]
        yield "<table>"
        for field, schema in schemas[name]["properties"].items():
            mark = " *" if field in required else ""
            yield f"<tr><td><code>{escape(field)}</code>{mark}<td>{escape(_type_of(schema))}"
            yield f"<td>{escape(schema.get('description', ''))}"
        yield "</table>"
    yield f"<form data-method={method}><input name=path size=40 value='{escape(path, quote=True)}'>"
    if content:
        yield f"<textarea name=body>{escape(json.dumps(content.get('example', {}), indent=1))}</textarea>"
    yield "<button>Try it</button><pre></pre></form></details>"


def _type_of(schema: Mapping[str, Any]) -> str:
    """Say in a word or two what a field holds.

    >>> _type_of({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "integer"}}, {"type": "null"}]})
    'string or list of integer'
    """
    if "enum" in schema:
        return " or ".join(json.dumps(value) for value in schema["enum"] if value is not None)
    if "const" in schema:
        return json.dumps(schema["const"])
    if "anyOf" in schema:
        return " or ".join(filter(None, map(_type_of, schema["anyOf"])))
    kinds = schema.get("type", [])
    kind = next((each for each in ([kinds] if isinstance(kinds, str) else kinds) if each != "null"), "")
    return f"list of {_type_of(schema['items'])}" if kind == "array" else kind
