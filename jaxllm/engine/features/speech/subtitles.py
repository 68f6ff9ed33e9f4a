"""Subtitles of a transcription: SubRip and WebVTT. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from jaxllm.engine.features.speech.transcription import Segment


def subtitles(segments: Sequence[Segment], form: str) -> str:
    """Return segments as SubRip ("srt") or WebVTT."""
    mark = "," if form == "srt" else "."
    lines = [] if form == "srt" else ["WEBVTT", ""]
    for number, each in enumerate(segments, 1):
        if form == "srt":
            lines.append(str(number))
        # An arrow would end the line of times, and an empty line the subtitle.
        words = " ".join(each.text.split()).replace("-->", "->")
        lines += [f"{clock(each.start, mark)} --> {clock(each.end, mark)}", words, ""]
    return "\n".join(lines)


def clock(seconds: float, mark: str) -> str:
    """Return a time of a subtitle.

    >>> clock(3661.5, ",")
    '01:01:01,500'
    """
    total = round(1000 * seconds)
    return f"{total // 3600000:02}:{total // 60000 % 60:02}:{total // 1000 % 60:02}{mark}{total % 1000:03}"
