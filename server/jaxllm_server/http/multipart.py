"""Reads forms with files (multipart/form-data, RFC 7578). Pure.

The body is in memory, bounded by the server's limits.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jaxllm.errors import UserError

MOST_PARTS = 64
_PIECE = 1 << 21  # bytes searched at once: 5 ms
_MOST_HEAD, _MOST_TEXT = 4096, 1 << 16  # bytes of a part's head, and of a field of text
_BOUNDARY = re.compile(r"""boundary=(?:"([^"]{1,70})"|([^\s;"]{1,70}))""", re.IGNORECASE)
_PARAMETER = re.compile(r"""(?<![\w*])(filename|name)=(?:"((?:\\.|[^"\\])*)"|([^\s;"]+))""", re.IGNORECASE)
_NO_FORM = "The form could not be read: {}"


class Form(NamedTuple):
    """The parts of a form."""

    texts: Mapping[str, Sequence[str]]  # by name; several of equal names in order
    files: Mapping[str, bytes]


def boundary_of(content_type: str) -> bytes | None:
    """Return the boundary that a Content-Type header names; None if it is not of a form."""
    if content_type.partition(";")[0].strip().lower() != "multipart/form-data":
        return None
    match = _BOUNDARY.search(content_type)
    return None if match is None else (match[1] or match[2]).encode("latin-1")


def read_form(body: bytes | bytearray, boundary: bytes) -> Form:
    """Return a form's parts; raise UserError if it is malformed."""
    texts: dict[str, list[str]] = {}
    files: dict[str, bytes] = {}
    line = b"--" + boundary
    at = 0 if body.startswith(line) else _find(body, b"\r\n" + line, 0) + 2
    if at == 1:
        raise UserError(_NO_FORM.format("its boundary is not there."))
    for _ in range(MOST_PARTS + 1):
        at += len(line)
        if body[at : at + 2] == b"--":
            return Form(texts, files)
        if body[at : at + 2] != b"\r\n":
            raise UserError(_NO_FORM.format("a boundary has no end of line."))
        head_end = body.find(b"\r\n\r\n", at, at + _MOST_HEAD)
        end = _find(body, b"\r\n" + line, head_end + 2)
        if head_end < 0 or end < 0:
            raise UserError(_NO_FORM.format("a part has no end."))
        name, is_file = _name_of(bytes(body[at + 2 : head_end]))
        content = bytes(memoryview(body)[head_end + 4 : end])
        if is_file:
            if name in files:
                raise UserError(f"The form has two files {name!r}.", name)
            files[name] = content
        else:
            texts.setdefault(name, []).append(_text_of(name, content))
        at = end + 2
    raise UserError(f"A form may have at most {MOST_PARTS} parts.")


def _find(body: bytes | bytearray, wanted: bytes, start: int) -> int:
    """Return `body.find(wanted, start)`, releasing the interpreter between pieces."""
    for first in range(start, len(body), _PIECE):
        found = body.find(wanted, first, first + _PIECE + len(wanted) - 1)
        if found >= 0:
            return found
    return -1


def _name_of(head: bytes) -> tuple[str, bool]:
    for line in head.decode("utf-8", "replace").split("\r\n"):
        header, _, value = line.partition(":")
        if header.strip().lower() == "content-disposition":
            found = {match[1].lower(): match[2] or match[3] or "" for match in _PARAMETER.finditer(value)}
            if "name" in found:
                return found["name"][:128], "filename" in found
    raise UserError(_NO_FORM.format("a part has no name."))


def _text_of(name: str, content: bytes) -> str:
    if len(content) > _MOST_TEXT:
        raise UserError(f"{name} may have at most {_MOST_TEXT} bytes.", name)
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        raise UserError(f"{name} must be text in UTF-8.", name) from None
