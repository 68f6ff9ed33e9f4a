"""Generates `/docs`: an HTML page with a form per route. Pure."""

from __future__ import annotations

import base64
import json
from collections.abc import Collection, Iterator, Mapping
from hashlib import sha256
from html import escape
from typing import Any

_STYLE = """
:root { color-scheme: light dark; --line: light-dark(#ccc, #444); --shown: light-dark(#f4f4f4, #1d1d1d); }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
details { border-bottom: 1px solid var(--line); padding: .4rem 0; } summary { cursor: pointer; }
code, pre, textarea { font: 13px/1.4 ui-monospace, monospace; } textarea { width: 100%; box-sizing: border-box; }
td { padding: .1rem .8rem .1rem 0; vertical-align: top; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; background: var(--shown); padding: .5rem; }
pre:empty { display: none; }
"""
_SCRIPT = """
const textOf = data => {
  const choice = data.choices && data.choices[0], delta = data.delta;
  if (choice) return choice.text ?? choice.delta?.reasoning ?? choice.delta?.content ?? "";
  if (typeof delta === "string") return data.type.endsWith("text.delta") ? delta : "";
  const text = delta?.text ?? delta?.thinking ?? data.message?.content ?? data.response;
  return typeof text === "string" ? text : "";
};
const eventOf = line => {
  try { return JSON.parse(line.replace(/^data: /, "")); } catch { return null; }
};
for (const form of document.forms) form.onsubmit = async event => {
  event.preventDefault();
  const [status, shown] = form.querySelectorAll("pre"), fields = form.elements, headers = {};
  const key = document.getElementById("key").value;
  if (key) headers.authorization = "Bearer " + key;
  if (fields.body) headers["content-type"] = "application/json";
  const path = fields.path.value.replace(/^[/]/, "");
  status.textContent = "…";
  shown.textContent = "";
  try {
    let body = fields.body && fields.body.value;
    if (fields.upload) (body = new FormData()).append("file", fields.upload.files[0]);
    const answer = await fetch(path, { method: form.dataset.method, headers, body });
    const streams = /event-stream|ndjson/.test(answer.headers.get("content-type") || "");
    status.textContent = answer.status + " " + answer.statusText + (streams ? ": the text of its events" : "");
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let text = "", rest = "";
    for (let piece; !(piece = await reader.read()).done;) {
      text += piece.value;
      if (!streams) continue;
      const lines = (rest + piece.value).split("\\n");
      rest = lines.pop();
      for (const data of lines.map(eventOf)) if (data) shown.append(data.error ? JSON.stringify(data) : textOf(data));
    }
    if (streams) return;
    const whole = eventOf(text);
    shown.textContent = whole === null ? text : JSON.stringify(whole, null, 2);
  } catch (error) { status.textContent = String(error); }
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


def page_of(description: Mapping[str, Any], served: Collection[str]) -> bytes:
    title = escape(description["info"]["title"])
    operations = [
        part
        for path, methods in description["paths"].items()
        if path in served
        for method, operation in methods.items()
        for part in _operation(path, method.upper(), operation, description["components"]["schemas"])
    ]
    page = (
        *_head(title),
        f"<p>{escape(description['info']['description'])} For tools: <a href=openapi.json>openapi.json</a>.",
        "<p><label>API key, if the server requires one: <input id=key type=password autocomplete=off></label>",
        *operations,
        f"<script>{_SCRIPT}</script></html>",
    )
    return "\n".join(page).encode()


def front_page(description: Mapping[str, Any], served: Collection[str]) -> bytes:
    paths = [path for path in description["paths"] if path in served]
    link = "<p>Try them at <a href=docs>/docs</a>. For tools: <a href=openapi.json>openapi.json</a>."
    listed = "".join(f"<li><code>{escape(path)}</code>" for path in paths)
    return "\n".join((*_head("jaxllm"), f"{link if '/docs' in paths else ''}<ul>{listed}</ul></html>")).encode()


def _head(title: str) -> Iterator[str]:
    yield "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>"
    yield f"<title>{title}</title><style>{_STYLE}</style><h1>{title}</h1>"


def _operation(
    path: str, method: str, operation: Mapping[str, Any], schemas: Mapping[str, Mapping[str, Any]]
) -> Iterator[str]:
    yield f"<details><summary><b>{method}</b> <code>{escape(path)}</code> {escape(operation['summary'])}</summary>"
    if "description" in operation:
        yield f"<p>{escape(operation['description'])}"
    if "101" in operation["responses"]:  # forms cannot use WebSockets
        yield "</details>"
        return
    yield f"<form data-method={method}><input name=path size=40 value='{escape(path, quote=True)}'>"
    yield "<button>Try it</button>"
    media, content = next(iter(operation.get("requestBody", {}).get("content", {"": {}}).items()))
    if media == "multipart/form-data":
        yield "<p><input name=upload type=file>"
    elif content:
        example = json.dumps(content.get("example", {}), indent=2)
        yield f"<textarea name=body rows={example.count(chr(10)) + 2}>{escape(example)}</textarea>"
    yield "<pre></pre><pre></pre>"
    name = content.get("schema", {}).get("$ref", "").rpartition("/")[2]
    if name:
        required = schemas[name]["required"]
        yield "<table>"
        for field, schema in schemas[name]["properties"].items():
            mark = " *" if field in required else ""
            yield f"<tr><td><code>{escape(field)}</code>{mark}<td>{escape(_type_of(schema))}"
            yield f"<td>{escape(schema.get('description', ''))}"
        yield "</table>"
    yield "</form></details>"


def _type_of(schema: Mapping[str, Any]) -> str:
    """Return a short description of a field's type.

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
