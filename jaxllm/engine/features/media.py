"""Images, videos and sounds in prompts: preprocessed when a request is checked, encoded before steps that read them.

Each pair of a video's frames is an image, see media/videos.py.

With rotary positions of three dimensions, those of tokens after images differ from places by `_shifts`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxllm import combinations
from jaxllm.beam_search_params import BeamSearchParams
from jaxllm.engine.accepted import Accepted
from jaxllm.engine.features.feature import Core, Feature
from jaxllm.engine.features.video_prompts import KEY, images_of, prepared_videos, videos_of
from jaxllm.engine.input_batch import blaming
from jaxllm.engine.prompts import checked_ids, parts_of
from jaxllm.engine.sequence import Sequence, SequenceGroup
from jaxllm.errors import UserError
from jaxllm.media.patches import PatchProcessor, video_processor
from jaxllm.media.placeholders import expanded, marked
from jaxllm.media.positions import Grid, positions_of, shift_of
from jaxllm.media.processor import ImageProcessor, Prepared
from jaxllm.media.sounds import SoundProcessor
from jaxllm.media.video_placeholders import grids_of, starts_of, with_frames
from jaxllm.media.videos import OPTIONS, Sampling, VideoProcessor
from jaxllm.runner.batch import token_places
from jaxllm.runner.step_input import StepInput
from jaxllm.scheduler.media import Segment
from jaxllm.scheduler.state import Plan


class RequestImages(NamedTuple):
    """A request's images, its state."""

    segments: tuple[Segment, ...]
    prepared: tuple[Prepared, ...]  # kept in case of preemption
    shift: int  # see `shift_of`
    turned: np.ndarray | None  # int32[3, prompt]: positions in three dimensions


class NoImages(Feature):
    """Refuses images and sounds to a model without a tower."""

    name = "media"

    def claim(self, accepted: Accepted) -> None:
        given = accepted.given
        if isinstance(given, Mapping) and given.get(KEY) is not None:
            raise UserError(f"{self.core.config.model} reads no images or sound; leave {KEY} out.", KEY)


class Images(Feature):
    """Gives the decoder images' embeddings in place of placeholders."""

    name = "media"
    sends = (ImageProcessor, PatchProcessor, SoundProcessor, VideoProcessor, Sampling)

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        encoder = core.runner.encoder
        assert encoder is not None
        self._encoder = encoder
        self._most = core.config.most_media(encoder.processor.kind)
        self._most_videos = core.config.most_videos
        self._has_images = np.zeros(core.runner.limits.num_slots, np.bool_)  # by slot
        self._turns = np.zeros_like(self._has_images)
        self._shifts = np.zeros(core.runner.limits.num_slots, np.int32)  # by slot, see `shift_of`

    def claim(self, accepted: Accepted) -> None:
        """Preprocess the images of a request and repeat their placeholders."""
        given = accepted.given
        if not isinstance(given, Mapping) or KEY not in given:
            return
        rest = {name: value for name, value in given.items() if name not in (KEY, OPTIONS)}
        model, processor = accepted.language.model, self._encoder.processor
        of_videos = video_processor(processor)
        images, videos = images_of(given[KEY], processor), videos_of(given[KEY])
        accepted.given = rest
        if not images and not videos:
            return
        if isinstance(accepted.asked, BeamSearchParams):
            raise combinations.refusal("beam_width", KEY)
        if accepted.params.truncate_prompt_tokens is not None:
            raise combinations.refusal("truncate_prompt_tokens", KEY)
        for noun, own, most in ((processor.noun, images, self._most), ("video", videos, self._most_videos)):
            if len(own) > most:
                raise UserError(f"A request may have {most} {noun}s (limit_mm_per_prompt), not {len(own)}.", KEY)
        text, ids, _ = parts_of(rest)
        if ids is None:
            assert text is not None
            model.tokenizer.check_length(text, model.max_model_len)
            ids = model.tokenizer.encode(marked(text, model.image_marks))
        ids = checked_ids(ids, model.vocab_size) if len(ids) else []
        shown = prepared_videos(videos, of_videos, given.get(OPTIONS))
        prepared = processor.prepare(images, other=sum(video.num_tokens for video in shown))
        if shown and of_videos is not None:
            ids = with_frames(ids, of_videos, shown, model.tokenizer)
        found, starts = expanded(ids, processor.placeholder, [each.num_tokens for each in prepared], processor.noun)
        accepted.given = rest | {"prompt_token_ids": found}
        placed = [
            (start + first, piece)
            for start, each in zip(starts, prepared, strict=True)
            for first, piece in processor.pieces(each)
        ]
        grids = [Grid(start, *each.grid) for start, each in placed if each.grid is not None]
        if shown and of_videos is not None:
            starts = starts_of(found, of_videos, shown)
            placed += zip(starts, (pair for video in shown for pair in video.pairs), strict=True)
            placed.sort(key=lambda each: each[0])
            grids = sorted(grids + grids_of(starts, of_videos, shown))
        accepted.states[self.name] = RequestImages(
            tuple(Segment(start, each.num_tokens, each.digest) for start, each in placed),
            tuple(each for _, each in placed),
            shift_of(grids),
            positions_of(grids, 0, len(found)) if grids else None,
        )

    def accept(self, accepted: Accepted) -> None:
        """Refuse placeholders without images or videos."""
        own, state = self._encoder.processor, accepted.states.get(self.name)
        covered = 0 if state is None else sum(segment.length for segment in state.segments)
        tokens = accepted.prompt_token_ids
        if tokens.count(own.placeholder) + (0 if own.video is None else tokens.count(own.video)) == covered:
            return
        if own.video is not None and own.video in accepted.prompt_token_ids:
            why = "has no videos" if video_processor(own) is not None else "may have none here (limit_mm_per_prompt)"
            raise UserError(f"The prompt has a video placeholder (token {own.video}) and {KEY} {why}.", KEY)
        raise UserError(
            f"The prompt has {own.noun} placeholders (token {own.placeholder}) and {KEY} has no {own.noun}s.", KEY
        )

    def begin(self, accepted: Accepted, group: SequenceGroup) -> None:
        if self.name in accepted.states:
            group.states[self.name] = accepted.states[self.name]

    def schedule(self, sequence: Sequence, fields: dict[str, Any]) -> None:
        images: RequestImages | None = sequence.group.states.get(self.name)
        if images is not None:
            fields["media"] = images.segments

    def place(self, slot: int, sequence: Sequence) -> None:
        images: RequestImages | None = sequence.group.states.get(self.name)
        self._has_images[slot] = images is not None
        self._turns[slot] = images is not None and images.turned is not None
        self._shifts[slot] = 0 if images is None else images.shift

    def inputs(self, step: StepInput) -> None:
        """Send images to encode, the rows of placeholders, and positions."""
        plan = step.plan
        encodes: list[tuple[Prepared, np.ndarray]] = []
        for each in plan.encodes:
            own = self.core.outputs.sequences[each.sequence_id]
            with blaming(own):
                images: RequestImages = own.group.states[self.name]
                rows = self._rows(each.units)[: images.segments[each.index].length]
                encodes.append((images.prepared[each.index], rows))
        if encodes:
            step.side["encodes"] = encodes
        first = plan.num_decodes
        turned = self._turned(plan)
        if turned is not None:
            step.side["turned"] = turned
        if not self._has_images[plan.slots[first:]].any():
            return
        places = np.full(plan.num_tokens, self._encoder.num_rows, np.int32)
        last_seen = token_places(plan).astype(np.int32) if self._encoder.whole_image else None
        cache = self.core.scheduler.state.media
        assert cache is not None
        units = dict(cache.entries)
        offset = int(plan.lengths[:first].sum())
        chunks = (each[first:].tolist() for each in (plan.slots, plan.starts, plan.lengths))
        for slot, start, length in zip(*chunks, strict=True):
            if self._has_images[slot]:
                own = self.core.batch.owner(slot)
                with blaming(own):
                    images = own.group.states[self.name]
                    self._place(places[offset : offset + length], start, images, units)
                    if last_seen is not None:
                        _see_whole(last_seen[offset : offset + length], start, images.segments)
                    if turned is not None and images.turned is not None:
                        own_turns = images.turned[:, start : start + length]  # a repeated output follows the prompt
                        turned[:, offset : offset + own_turns.shape[1]] = own_turns
            offset += length
        step.side["media"] = places
        if last_seen is not None:
            step.side["last_seen"] = last_seen

    def _turned(self, plan: Plan) -> np.ndarray | None:
        """Return rotary positions of tokens after images, int32[3, T], or [1, T] of decodes; None: all equal places."""
        if not self._turns[plan.slots].any():
            return None
        own = token_places(plan) + np.repeat(self._shifts[plan.slots], plan.lengths)
        is_decode = len(plan.slots) == plan.num_decodes
        return np.tile(own.astype(np.int32), (1 if is_decode else 3, 1))

    def _place(
        self, places: np.ndarray, start: int, images: RequestImages, units: Mapping[bytes, tuple[int, ...]]
    ) -> None:
        for segment in images.segments:
            if segment.start >= start + len(places):
                break
            low, high = max(segment.start, start), min(segment.end, start + len(places))
            if low < high:
                rows = self._rows(units[segment.digest])
                places[low - start : high - start] = rows[low - segment.start : high - segment.start]

    def _rows(self, units: tuple[int, ...]) -> np.ndarray:
        unit = self._encoder.unit
        return (np.asarray(units, np.int32)[:, None] * unit + np.arange(unit, dtype=np.int32)).ravel()


def _see_whole(last_seen: np.ndarray, start: int, segments: tuple[Segment, ...]) -> None:
    """Let tokens of images in a chunk from position `start` see all of their image."""
    for segment in segments:
        if segment.end > start:
            last_seen[max(0, segment.start - start) : segment.end - start] = segment.end - 1
