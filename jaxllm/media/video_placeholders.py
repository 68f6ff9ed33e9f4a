"""Repeat the placeholders of videos in a prompt, and write the times of Qwen3-VL's pairs of frames."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from jaxllm.errors import UserError
from jaxllm.media.placeholders import expanded
from jaxllm.media.positions import Grid
from jaxllm.media.videos import PreparedVideo, VideoProcessor


class TextEncoder(Protocol):
    """A tokenizer."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...


def with_frames(
    ids: Sequence[int], processor: VideoProcessor, videos: Sequence[PreparedVideo], tokenizer: TextEncoder
) -> list[int]:
    """Return token ids with a placeholder for each embedding.

    `ids` have one placeholder for each video, or are a result of this function. Raises UserError for other numbers.
    """
    placeholder = processor.placeholder
    count, total = sum(token == placeholder for token in ids), sum(video.num_tokens for video in videos)
    lengths = [video.num_tokens for video in videos]
    if not processor.is_stamped or count not in (len(videos), total):
        return expanded(ids, placeholder, lengths, "video")[0]
    (first, last), left = processor.around, iter(videos)
    times = [
        [[*tokenizer.encode(f"<{seconds:.1f} seconds>", add_special_tokens=False), first] for seconds in video.seconds]
        for video in videos
    ]
    at = list(ids).index(placeholder)
    if count == total and (count != len(videos) or list(ids[max(0, at - len(times[0][0])) : at]) == times[0][0]):
        return list(ids)
    found, texts = [], iter(times)
    for token in ids:
        if token != placeholder:
            found.append(token)
            continue
        # As in transformers, the tokens around the placeholder remain, too.
        for pair, text in zip(next(left).pairs, next(texts), strict=True):
            found += [*text, *[placeholder] * pair.num_tokens, last]
    return found


def starts_of(ids: Sequence[int], processor: VideoProcessor, videos: Sequence[PreparedVideo]) -> list[int]:
    """Return the first position of each pair; raise UserError if its placeholders do not follow each other."""
    lengths = [pair.num_tokens for video in videos for pair in video.pairs]
    if sum(token == processor.placeholder for token in ids) != sum(lengths):
        raise UserError("The placeholders of a video must be those of its frames.", "multi_modal_data")
    return expanded(ids, processor.placeholder, lengths, "video")[1]


def grids_of(starts: Sequence[int], processor: VideoProcessor, videos: Sequence[PreparedVideo]) -> list[Grid]:
    """Return the grids of videos: one each, or one for each pair that a text precedes."""
    found: list[Grid] = []
    at = 0
    for video in videos:
        own = starts[at : at + len(video.pairs)]
        at += len(video.pairs)
        grid = video.pairs[0].grid
        assert grid is not None
        rows, columns = grid
        if processor.is_stamped:
            found += [Grid(start, rows, columns) for start in own]
            continue
        if own[-1] - own[0] != (len(own) - 1) * rows * columns:
            raise UserError("The placeholders of a video must follow each other.", "multi_modal_data")
        found.append(Grid(own[0], rows, columns, len(own), video.step))
    return found
