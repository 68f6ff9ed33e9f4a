"""Take videos out of chat messages, for a chat template that writes placeholders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxllm.errors import UserError
from jaxllm.media.films import Film, film_of, read_film, read_stills
from jaxllm.media.image_part import ImagePart, VideoPart, path_of
from jaxllm.media.patches import video_processor
from jaxllm.media.processor import Processor
from jaxllm.media.sources import Sources
from jaxllm.media.video_placeholders import TextEncoder, with_frames
from jaxllm.media.videos import PreparedVideo, check_used

_KINDS = ("video_url", "video")


def take_videos(
    messages: Sequence[Any], processor: Processor | None, sources: Sources, most: int, options: Mapping[str, Any]
) -> tuple[list[Any], list[PreparedVideo]]:
    """Return messages with a `VideoPart` for each video, and the preprocessed videos, in order.

    A video is a content part {"type": "video_url", "video_url": {"url": …}}, or {"type": "video", "video": …} with what
    `film_of` takes. `options` are the request's `mm_processor_kwargs`. Raises UserError, naming the part, for invalid
    ones and more than `most`.
    """
    videos: list[PreparedVideo] = []
    own = video_processor(processor)
    if own is None:
        check_used(options, 0)
        return list(messages), videos
    found: list[Any] = []
    for index, message in enumerate(messages):
        content = message.get("content") if isinstance(message, Mapping) else None
        parts = list(content) if isinstance(content, list | tuple) else []
        for at, part in enumerate(parts):
            if not isinstance(part, Mapping) or part.get("type") not in _KINDS or isinstance(part, ImagePart):
                continue
            name = path_of(part, f"messages[{index}].content[{at}]")
            if len(videos) == most:
                raise UserError(f"{name}: a request may have {most} videos (limit_mm_per_prompt).", "messages")
            earlier = sum(video.num_tokens for video in videos)
            film = _film(part, name, sources)
            videos.append(own.prepare(film, options, name, "messages", earlier))
            parts[at] = VideoPart()
        found.append({**message, "content": parts} if any(isinstance(part, VideoPart) for part in parts) else message)
    check_used(options, len(videos))
    return found, videos


def with_videos(
    prompt: dict[str, Any],
    videos: Sequence[PreparedVideo],
    processor: Processor | None,
    tokenizer: TextEncoder,
) -> dict[str, Any]:
    """Return a prompt of token ids with videos, each placeholder repeated for its video's embeddings."""
    own = video_processor(processor)
    if not videos or own is None:
        return prompt
    ids = with_frames(prompt["prompt_token_ids"], own, videos, tokenizer)
    media = {**prompt.get("multi_modal_data", {}), "video": list(videos)}
    return prompt | {"prompt_token_ids": ids, "multi_modal_data": media}


def _film(part: Mapping[str, Any], name: str, sources: Sources) -> Film:
    if part["type"] == "video" and part.get("video") is not None:
        return film_of(part["video"], name, "messages")
    given = part.get("video_url")
    found = sources.read_video(given.get("url") if isinstance(given, Mapping) else given, f"{name}.video_url")
    if isinstance(found, bytes):
        return read_film(found, f"{name}.video_url")
    return read_stills(found, f"{name}.video_url")
