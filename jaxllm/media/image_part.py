"""The place of an image in the messages of a chat template. Standard library only."""

from __future__ import annotations


class ImagePart(dict[str, str]):
    """An image in messages: {"type": "image"}. No JSON makes one."""

    def __init__(self) -> None:
        super().__init__(type="image")
