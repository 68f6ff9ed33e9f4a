"""OpenAPI schemas of common field types."""

from __future__ import annotations

from typing import Any, TypeAlias

Schema: TypeAlias = dict[str, Any]
INTEGER, NUMBER, FLAG, TEXT = ({"type": kind} for kind in ("integer", "number", "boolean", "string"))
OBJECT: Schema = {"type": "object"}
FILE: Schema = {"type": "string", "contentMediaType": "application/octet-stream"}
IDS: Schema = {"type": "array", "items": INTEGER}
STRINGS: Schema = {"type": "array", "items": TEXT}
PROMPTS: Schema = {"anyOf": [TEXT, STRINGS, IDS, {"type": "array", "items": IDS}]}
IDLE: Schema = {"description": "Accepted; it changes nothing."}
