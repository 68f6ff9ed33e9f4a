"""Images, videos and sounds in the messages of chats. Standard library only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxllm.errors import UnsupportedError

VIDEO_APIS = "send it as video_url to /v1/chat/completions, as input_video to /v1/responses, or as video over gRPC"
_VIDEOS = ("video", "videos", "video_url", "input_video")


class ImagePart(dict[str, str]):
    """An image or sound in messages: {"type": "image"} or {"type": "audio"}. No JSON makes one."""

    def __init__(self, kind: str = "image") -> None:
        super().__init__(type=kind)


class VideoPart(ImagePart):
    """A video in messages: {"type": "video"}."""

    def __init__(self) -> None:
        super().__init__("video")


class NamedPart(dict[str, Any]):
    """A content part with its path in the request, for errors."""

    def __init__(self, path: str, **fields: Any) -> None:
        super().__init__(fields)
        self.path = path


def refuse_video(kind: Any, path: str, parameter: str) -> None:
    """Raise UnsupportedError if a part or field of an API without videos is one by its type or name, `kind`."""
    if kind in _VIDEOS:
        raise UnsupportedError(f"{path}: this API takes no videos; {VIDEO_APIS}.", parameter)


def path_of(part: Any, default: str) -> str:
    return part.path if isinstance(part, NamedPart) else default


def places_of(messages: Any) -> list[tuple[int, int]]:
    """Return the indices of messages with an `ImagePart`, and of these parts; `marked_parts` reverses it."""
    return [
        (index, at)
        for index, parts in _contents(messages)
        for at, part in enumerate(parts)
        if isinstance(part, ImagePart)
    ]


def marked_parts(messages: Any, places: Sequence[Sequence[int]]) -> Any:
    """Change parts of messages that came from another process back to `ImagePart`s."""
    contents = dict(_contents(messages))
    for index, at in places:
        contents[index][at] = ImagePart(contents[index][at]["type"])
    return messages


def _contents(messages: Any) -> Iterator[tuple[int, Any]]:
    for index, message in enumerate(messages if isinstance(messages, list | tuple) else ()):
        content = message.get("content") if isinstance(message, Mapping) else None
        if isinstance(content, list | tuple):
            yield index, content
