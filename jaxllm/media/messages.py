"""Take images out of chat messages, for a chat template that writes placeholders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxllm.errors import UserError
from jaxllm.media.image_part import ImagePart, path_of
from jaxllm.media.images import decode
from jaxllm.media.placeholders import expanded
from jaxllm.media.processor import Prepared, Processor
from jaxllm.media.sources import Sources

_KINDS = ("image_url", "image")


def take_images(
    messages: Sequence[Any], processor: Processor | None, sources: Sources, most: int
) -> tuple[list[Any], list[Prepared]]:
    """Return messages with an `ImagePart` for each image, and the preprocessed images, in order.

    An image is a content part {"type": "image_url", "image_url": {"url": …}} ("detail" is ignored), or {"type":
    "image", "image": …} with a PIL image or a file's bytes. Decoding one after the other bounds the memory. Raises
    UserError, naming the part, for invalid ones and more than `most`.
    """
    images: list[Prepared] = []
    if processor is None:
        return list(messages), images
    found: list[Any] = []
    for index, message in enumerate(messages):
        content = message.get("content") if isinstance(message, Mapping) else None
        parts = list(content) if isinstance(content, list | tuple) else []
        for at, part in enumerate(parts):
            if not isinstance(part, Mapping) or part.get("type") not in _KINDS:
                continue
            name = path_of(part, f"messages[{index}].content[{at}]")
            if len(images) == most:
                raise UserError(f"{name}: a request may have {most} images (limit_mm_per_prompt).", "messages")
            images += processor.prepare([_image_of(part, name, sources)], name, "messages", images)
            parts[at] = ImagePart()
        found.append({**message, "content": parts} if any(isinstance(part, ImagePart) for part in parts) else message)
    return found, images


def with_images(prompt: dict[str, Any], images: Sequence[Prepared], processor: Processor | None) -> dict[str, Any]:
    """Return a prompt of token ids with images, each placeholder repeated for its image's embeddings."""
    if not images or processor is None:
        return prompt
    lengths = [each.num_tokens for each in images]
    ids, _ = expanded(prompt["prompt_token_ids"], processor.placeholder, lengths)
    return prompt | {"prompt_token_ids": ids, "multi_modal_data": {"image": list(images)}}


def _image_of(part: Mapping[str, Any], name: str, sources: Sources) -> Any:
    if part["type"] == "image" and part.get("image") is not None:
        image = part["image"]
        return decode(image, name) if isinstance(image, bytes) else image
    given = part.get("image_url")
    return sources.read(given.get("url") if isinstance(given, Mapping) else given, f"{name}.image_url")
