"""Take images and sounds out of chat messages, for a chat template that writes placeholders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxllm.errors import UserError
from jaxllm.media.image_part import ImagePart, path_of
from jaxllm.media.placeholders import expanded
from jaxllm.media.processor import Prepared, Processor
from jaxllm.media.sounds import SoundProcessor, sound_of
from jaxllm.media.sources import Sources, read_image
from jaxllm.media.videos import PreparedVideo

# Types of parts, by `Processor.kind`.
_TYPES = {"image": ("image_url", "image"), "audio": ("input_audio", "audio_url", "audio")}


def take_images(
    messages: Sequence[Any],
    processor: Processor | None,
    sources: Sources,
    most: int,
    videos: Sequence[PreparedVideo] = (),
) -> tuple[list[Any], list[Prepared]]:
    """Return messages with an `ImagePart` for each image or sound, and these, preprocessed, in order.

    An image is a content part {"type": "image_url", "image_url": {"url": …}} ("detail" is ignored), or {"type":
    "image", "image": …} with a PIL image or a file's bytes; see `sound_of` for sounds. Decoding one after the other
    bounds the memory; `videos` are in the same request. Raises UserError, naming the part, for invalid ones and more
    than `most`.
    """
    images: list[Prepared] = []
    if processor is None:
        return list(messages), images
    types, noun = _TYPES[processor.kind], processor.noun
    found: list[Any] = []
    other = sum(video.num_tokens for video in videos)
    for index, message in enumerate(messages):
        content = message.get("content") if isinstance(message, Mapping) else None
        parts = list(content) if isinstance(content, list | tuple) else []
        for at, part in enumerate(parts):
            if not isinstance(part, Mapping) or part.get("type") not in types:
                continue
            name = path_of(part, f"messages[{index}].content[{at}]")
            if len(images) == most:
                raise UserError(f"{name}: a request may have {most} {noun}s (limit_mm_per_prompt).", "messages")
            given = _given_in(part, name, sources, processor)
            images += processor.prepare([given], name, "messages", images, other)
            parts[at] = ImagePart(processor.kind)
        found.append({**message, "content": parts} if any(isinstance(part, ImagePart) for part in parts) else message)
    return found, images


def with_images(prompt: dict[str, Any], images: Sequence[Prepared], processor: Processor | None) -> dict[str, Any]:
    """Return a prompt of token ids with images or sounds, each placeholder repeated for its embeddings."""
    if not images or processor is None:
        return prompt
    lengths = [each.num_tokens for each in images]
    ids, _ = expanded(prompt["prompt_token_ids"], processor.placeholder, lengths, processor.noun)
    return prompt | {"prompt_token_ids": ids, "multi_modal_data": {processor.kind: list(images)}}


def _given_in(part: Mapping[str, Any], name: str, sources: Sources, processor: Processor) -> Any:
    is_sound = isinstance(processor, SoundProcessor)
    return sound_of(part, name, sources, processor) if is_sound else _image_of(part, name, sources)


def _image_of(part: Mapping[str, Any], name: str, sources: Sources) -> Any:
    if part["type"] == "image" and part.get("image") is not None:
        image = part["image"]
        return read_image(image, name) if isinstance(image, bytes) else image
    given = part.get("image_url")
    return sources.read(given.get("url") if isinstance(given, Mapping) else given, f"{name}.image_url")
