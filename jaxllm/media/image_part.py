"""Images in the messages of chats. Standard library only."""

from __future__ import annotations

from typing import Any


class ImagePart(dict[str, str]):
    """An image in messages: {"type": "image"}. No JSON makes one."""

    def __init__(self) -> None:
        super().__init__(type="image")


class NamedPart(dict[str, Any]):
    """A content part with its path in the request, for errors."""

    def __init__(self, path: str, **fields: Any) -> None:
        super().__init__(fields)
        self.path = path


def path_of(part: Any, default: str) -> str:
    return part.path if isinstance(part, NamedPart) else default
