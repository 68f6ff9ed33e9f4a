"""The images and videos of a prompt, as callers give them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxllm.errors import UserError
from jaxllm.media.films import film_of
from jaxllm.media.patches import video_processor
from jaxllm.media.processor import Processor
from jaxllm.media.videos import OPTIONS, PreparedVideo, VideoProcessor, check_used

KEY = "multi_modal_data"


def images_of(given: Any, processor: Processor) -> list[Any]:
    """Return a prompt's images or sounds; raise UserError for media that the model does not read."""
    kind = processor.kind
    kinds = (kind,) if video_processor(processor) is None else (kind, "video")
    if not isinstance(given, Mapping):
        raise UserError(f"{KEY} must be {{{kind!r}: one {processor.noun} or a list}}.", KEY)
    others = [str(name) for name in given if name not in kinds]
    if others:
        known = " and ".join(map(repr, kinds))
        raise UserError(f"{KEY} has {', '.join(others):.80}, and only {known} is supported; leave it out.", KEY)
    images = given.get(kind)
    return [] if images is None else processor.listed(images)


def videos_of(given: Mapping[str, Any]) -> list[Any]:
    """Return a prompt's videos: each is frames, (frames, metadata), bytes or prepared."""
    videos = given.get("video")
    if videos is None:
        return []
    if isinstance(videos, bytes | tuple) or not isinstance(videos, list | np.ndarray):  # a PreparedVideo is a tuple
        return [videos]
    if isinstance(videos, np.ndarray):
        return list(videos) if videos.ndim == 5 else [videos]
    are_frames = all(not _is_video(each) for each in videos)
    return [videos] if videos and are_frames else list(videos)


def prepared_videos(videos: Sequence[Any], processor: VideoProcessor | None, options: Any) -> list[PreparedVideo]:
    """Preprocess videos, except prepared ones; `options` are the prompt's `mm_processor_kwargs`."""
    if not isinstance(options, Mapping | None):
        raise UserError(f"{OPTIONS} must be an object, got {options!r:.80}.", OPTIONS)
    check_used(options or {}, len(videos))
    if processor is None:
        return []
    found: list[PreparedVideo] = []
    for video in videos:
        if not isinstance(video, PreparedVideo):
            name = KEY if len(videos) == 1 else f"{KEY}, video {len(found)}"
            earlier = sum(each.num_tokens for each in found)
            video = processor.prepare(film_of(video, name, KEY), options or {}, name, KEY, earlier)
        found.append(video)
    return found


def _is_video(given: Any) -> bool:
    return isinstance(given, bytes | list | tuple) or (isinstance(given, np.ndarray) and given.ndim == 4)
