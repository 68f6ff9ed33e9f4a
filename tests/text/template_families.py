"""Small chat templates in the shape of published families: the same inputs, the same failures.

The families' templates belong to their makers; `test_template_shapes.py` reads those from a folder. Line breaks in
`templates/*.jinja` are inside tags, where they are not part of the text.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Family:
    """A template and the form of conversations that it takes; fields are those of `conversations.Form`."""

    source: str
    joined: str = "user system assistant tool caller"  # roles that do not accept parts
    more: dict[str, Any] = field(default_factory=dict[str, Any])
    with_tools: bool = True
    thought: str = ""  # the name of the field that the template reads


def _family(name: str, **own: Any) -> Family:
    return Family((Path(__file__).parent / "templates" / f"{name}.jinja").read_text().removesuffix("\n"), **own)


_OWN: dict[str, dict[str, Any]] = {
    "qwen2.5": dict(more={"blank": "missing"}),
    "qwen3": dict(thought="reasoning_content"),
    "deepseek_v3": dict(more={"arguments": "text", "blank": "null", "empty_is_null": True}),
    "deepseek_r1": dict(more={"arguments": "text", "blank": "null"}),
    "deepseek_v3.1": dict(more={"arguments": "text"}),
    "gpt-oss": dict(thought="thinking"),
    "glm4.5": dict(joined="tool", thought="reasoning_content"),
    "kimi_k2": dict(joined="caller"),
    "mistral": dict(more={"short_ids": True}),
    "ministral_reasoning": dict(joined="tool", thought="part"),
    "llama3.1": {},
    "smollm3": dict(more={"arguments": "text"}),
    "gemma2": dict(with_tools=False),
    "gemma4": dict(joined="", thought="reasoning"),
    "seed_oss": dict(thought="reasoning_content"),
    "minimax_m2": dict(joined=""),
    "command-r": {},
    "phi3": dict(with_tools=False),
    "hermes": {},
    "step3.5": dict(joined="", thought="reasoning_content"),
    "functionary": dict(more={"arguments": "text"}),
    "llava": dict(joined="", more={"listed": True}, with_tools=False),
}
FAMILIES = {name: _family(name, **own) for name, own in _OWN.items()}
