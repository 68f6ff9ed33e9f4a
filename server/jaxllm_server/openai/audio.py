"""`/v1/audio/transcriptions` and `/v1/audio/translations`: forms to calls, transcriptions to answers. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from jaxllm.engine.features.speech.subtitles import subtitles
from jaxllm.engine.features.speech.transcription import Asked, Segment, Transcription
from jaxllm.errors import UserError
from jaxllm_server.requests.fields import Body, integer, one_of, text
from jaxllm_server.requests.shared_fields import given
from jaxllm_server.shared.options import ServerOptions
from jaxllm_server.speech.service import Progress, SpeechCall

FORMATS = ("json", "text", "srt", "vtt", "verbose_json")
GRANULARITIES = ("segment", "word")
_TIMED = ("srt", "vtt", "verbose_json")
_LISTS = ("timestamp_granularities", "include")  # sent as `name[]`, once for each item


class TranscriptionReply:
    """A request for a transcription, and the conversion of its text."""

    id_prefix = "transcribe-"
    names: Mapping[str, str] = {"task": "model", "timestamps": "response_format"}
    task: ClassVar[str] = "transcribe"
    fields = frozenset(
        {*("file", "model", "language", "prompt", "response_format", "temperature", "seed", "stream", *_LISTS)}
        | {*("chunking_strategy", "request_id", "priority")}
    )
    unbuilt: ClassVar[Mapping[str, tuple[Any, ...]]] = {"include": ([],), "chunking_strategy": ("auto",)}

    def __init__(self, body: Body, options: ServerOptions, request_id: str) -> None:
        """`body` has texts, lists of texts, and the bytes of the file; see `values_of`."""
        self.ignored: list[str] = []
        fields = given(body, self.fields, self.unbuilt, options.unknown_fields, self.ignored)
        sound = fields.get("file")
        if not isinstance(sound, bytes):
            raise UserError("file is missing: send a file of sound as a part of the form.", "file")
        if len(sound) > options.max_audio_bytes:
            raise UserError(f"file may have at most {options.max_audio_bytes} bytes, got {len(sound)}.", "file")
        self.format = one_of(fields, "response_format", FORMATS) or "json"
        self.is_stream = _flag(fields, "stream")
        if self.is_stream and self.format not in ("json", "text"):
            raise UserError(f"A stream has no response_format {self.format}; leave one of them out.", "stream")
        self._granularities = _strings(fields, "timestamp_granularities")
        self._check_granularities(self._granularities)
        own_id = text(fields, "request_id")
        self.request_id = request_id if own_id is None else own_id
        seed = _number(fields, "seed", int)
        asked = Asked(
            task=self.task,
            language=text(fields, "language") or None,
            timestamps=self.format in _TIMED,
            words="word" in self._granularities,
            scores=self.format == "verbose_json",
            temperature=_number(fields, "temperature", float) or 0.0,
            seed=None if seed is None else int(seed),
        )
        self.calls: Sequence[SpeechCall] = [
            SpeechCall(
                model=text(fields, "model") or "",
                sound=sound,
                asked=asked,
                before=text(fields, "prompt") or "",
                stream=self.is_stream,
                request_id=self.request_id,
                priority=integer({"priority": _number(fields, "priority", int) or 0}, "priority", 0),
            )
        ]
        self._sent = ""

    def _check_granularities(self, asked: Sequence[str]) -> None:
        for each in asked:
            if each not in GRANULARITIES:
                raise UserError(
                    f"timestamp_granularities may hold segment and word, got {each[:32]!r}.", "timestamp_granularities"
                )
        if asked and self.format != "verbose_json":
            raise UserError("timestamp_granularities needs response_format=verbose_json.", "timestamp_granularities")

    @property
    def media_type(self) -> str:
        """The type of a complete answer."""
        return "text/plain; charset=utf-8" if self.format in ("text", "srt", "vtt") else "application/json"

    def response(self, made: Transcription) -> dict[str, Any] | str:
        """Return the complete answer: an object, or a text."""
        if self.format == "text":
            return f"{made.text}\n"
        if self.format in ("srt", "vtt"):
            return subtitles(made.segments, self.format)
        usage = {"type": "duration", "seconds": math.ceil(made.seconds)}
        if self.format == "json":
            return {"text": made.text, "usage": usage}
        return {
            "task": self.task,
            "language": made.language or "en",
            "duration": round(made.seconds, 2),
            "text": made.text,
            **self._parts(made),
            "usage": usage,
        }

    def _parts(self, made: Transcription) -> dict[str, Any]:
        asked = self._granularities or ("segment",)
        parts: dict[str, Any] = {}
        if "word" in asked:
            parts["words"] = [
                {"word": each.text, "start": round(each.start, 2), "end": round(each.end, 2)} for each in made.words
            ]
        if "segment" in asked:
            parts["segments"] = [_segment(number, each) for number, each in enumerate(made.segments)]
        return parts

    def events(self, progress: Progress) -> list[dict[str, Any]]:
        """Return the events of new text."""
        events: list[dict[str, Any]] = []
        new = progress.text[len(self._sent) :]
        if new and progress.text.startswith(self._sent):
            self._sent = progress.text
            events.append({"type": "transcript.text.delta", "delta": new})
        if progress.is_last:
            made = progress.transcription
            counts = made.num_prompt_tokens, made.num_output_tokens
            usage = {"type": "tokens", "input_tokens": counts[0], "output_tokens": counts[1]}
            usage["total_tokens"] = sum(counts)
            events.append({"type": "transcript.text.done", "text": progress.text, "usage": usage})
        return events


class TranslationReply(TranscriptionReply):
    """A request for the words in English."""

    id_prefix = "translate-"
    task = "translate"


def _strings(fields: Body, name: str) -> Sequence[str]:
    found = fields.get(name, [])
    if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
        raise UserError(f"{name} must be a list of strings.", name)
    return found


def values_of(texts: Mapping[str, Sequence[str]], files: Mapping[str, bytes]) -> dict[str, Any]:
    """Return a form's values by field; raise UserError for fields that are given twice."""
    values: dict[str, Any] = {}
    for name, found in texts.items():
        field = name.removesuffix("[]")
        if field in _LISTS:
            values[field] = [*values.get(field, []), *found]
        elif len(found) > 1:
            raise UserError(f"{name[:64]} is given {len(found)} times.", name[:64])
        else:
            values[name] = found[0]
    for name, content in files.items():
        if name in values:
            raise UserError(f"{name[:64]} is given as a text and as a file.", name[:64])
        values[name] = content
    return values


def _segment(number: int, segment: Segment) -> dict[str, Any]:
    scores = {
        "avg_logprob": segment.avg_logprob,
        "compression_ratio": segment.compression_ratio,
        "no_speech_prob": segment.no_speech_prob,
    }
    return {
        "id": number,
        "seek": segment.seek,
        "start": round(segment.start, 2),
        "end": round(segment.end, 2),
        "text": segment.text,
        "tokens": list(segment.ids),
        "temperature": segment.temperature,
        **{name: 0.0 if value is None or not math.isfinite(value) else value for name, value in scores.items()},
    }


def _flag(fields: Body, name: str) -> bool:
    value = (text(fields, name) or "false").lower()
    if value not in ("true", "false", "1", "0"):
        raise UserError(f"{name} must be true or false.", name)
    return value in ("true", "1")


def _number(fields: Body, name: str, kind: type[int | float]) -> float | None:
    value = text(fields, name)
    if not value:
        return None
    try:
        return kind(value[:64])
    except ValueError:
        shown = "an integer" if kind is int else "a number"
        raise UserError(f"{name} must be {shown}, got {value[:32]!r}.", name) from None
