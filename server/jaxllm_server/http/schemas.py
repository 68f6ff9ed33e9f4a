"""OpenAPI schemas of single fields, for several bodies."""

from __future__ import annotations

from typing import Any, TypeAlias

Schema: TypeAlias = dict[str, Any]
INTEGER, NUMBER, FLAG, TEXT = ({"type": kind} for kind in ("integer", "number", "boolean", "string"))
OBJECT: Schema = {"type": "object"}
IDS: Schema = {"type": "array", "items": INTEGER}
STRINGS: Schema = {"type": "array", "items": TEXT}
PROMPTS: Schema = {"anyOf": [TEXT, STRINGS, IDS, {"type": "array", "items": IDS}]}
IDLE: Schema = {"description": "Accepted; it changes nothing."}
