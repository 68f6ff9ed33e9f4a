"""Images and sounds in prompts: preprocessed when a request is checked, encoded before the steps that read them.

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
from jaxllm.engine.input_batch import blaming
from jaxllm.engine.prompts import checked_ids, parts_of
from jaxllm.engine.sequence import Sequence, SequenceGroup
from jaxllm.errors import UserError
from jaxllm.media.patches import PatchProcessor
from jaxllm.media.placeholders import expanded, marked
from jaxllm.media.positions import Grid, positions_of, shift_of
from jaxllm.media.processor import ImageProcessor, Prepared, Processor
from jaxllm.media.sounds import SoundProcessor
from jaxllm.runner.batch import token_places
from jaxllm.runner.step_input import StepInput
from jaxllm.scheduler.media import Segment
from jaxllm.scheduler.state import Plan

KEY = "multi_modal_data"


class RequestImages(NamedTuple):
    """A request's images, its state."""

    segments: tuple[Segment, ...]
    prepared: tuple[Prepared, ...]  # kept in case of preemption
    grids: tuple[Grid, ...]  # with positions in two dimensions


class NoImages(Feature):
    """Refuses images without a tower."""

    name = "media"

    def claim(self, accepted: Accepted) -> None:
        given = accepted.given
        if isinstance(given, Mapping) and given.get(KEY) is not None:
            raise UserError(f"{self.core.config.model} reads no images or sound; leave {KEY} out.", KEY)


class Images(Feature):
    """Gives the decoder images' embeddings in place of placeholders."""

    name = "media"
    sends = (ImageProcessor, PatchProcessor, SoundProcessor)

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        encoder = core.runner.encoder
        assert encoder is not None
        self._encoder = encoder
        self._most = core.config.most_media(encoder.processor.kind)
        self._has_images = np.zeros(core.runner.limits.num_slots, np.bool_)  # by slot
        self._has_grids = np.zeros_like(self._has_images)
        self._shifts = np.zeros(core.runner.limits.num_slots, np.int32)  # by slot, see `shift_of`

    def claim(self, accepted: Accepted) -> None:
        given = accepted.given
        if not isinstance(given, Mapping) or KEY not in given:
            return
        rest = {name: value for name, value in given.items() if name != KEY}
        model, processor = accepted.language.model, self._encoder.processor
        images = _images_of(given[KEY], processor)
        accepted.given = rest
        if not images:
            return
        if isinstance(accepted.asked, BeamSearchParams):
            raise combinations.refusal("beam_width", KEY)
        if accepted.params.truncate_prompt_tokens is not None:
            raise combinations.refusal("truncate_prompt_tokens", KEY)
        if len(images) > self._most:
            most = f"{self._most} {processor.noun}s"
            raise UserError(f"A request may have {most} (limit_mm_per_prompt), not {len(images)}.", KEY)
        text, ids, _ = parts_of(rest)
        if ids is None:
            assert text is not None
            model.tokenizer.check_length(text, model.max_model_len)
            ids = model.tokenizer.encode(marked(text, model.image_marks))
        ids = checked_ids(ids, model.vocab_size) if len(ids) else []
        prepared = processor.prepare(images)
        found, starts = expanded(ids, processor.placeholder, [each.num_tokens for each in prepared], processor.noun)
        accepted.given = rest | {"prompt_token_ids": found}
        placed = [
            (start + first, piece)
            for start, each in zip(starts, prepared, strict=True)
            for first, piece in processor.pieces(each)
        ]
        accepted.states[self.name] = RequestImages(
            tuple(Segment(start, each.num_tokens, each.digest) for start, each in placed),
            tuple(piece for _, piece in placed),
            tuple(Grid(start, *each.grid) for start, each in placed if each.grid is not None),
        )

    def accept(self, accepted: Accepted) -> None:
        """Refuse placeholders of videos, and image placeholders without images."""
        video = self._encoder.processor.video
        if video is not None and video in accepted.prompt_token_ids:
            raise UserError(
                f"The prompt has a video placeholder (token {video}), and videos are not supported; send frames as "
                "images.",
                KEY,
            )
        processor = self._encoder.processor
        if self.name not in accepted.states and processor.placeholder in accepted.prompt_token_ids:
            noun = processor.noun
            raise UserError(
                f"The prompt has {noun} placeholders (token {processor.placeholder}) and {KEY} has no {noun}s.", KEY
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
        grids = () if images is None else images.grids
        self._has_grids[slot], self._shifts[slot] = bool(grids), shift_of(grids)

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
                    if turned is not None and images.grids:
                        turned[:, offset : offset + length] = positions_of(images.grids, start, length)
            offset += length
        step.side["media"] = places
        if last_seen is not None:
            step.side["last_seen"] = last_seen

    def _turned(self, plan: Plan) -> np.ndarray | None:
        """Return rotary positions of tokens after images, int32[3, T], or [1, T] of decodes; None: all equal places."""
        if not self._has_grids[plan.slots].any():
            return None
        own = token_places(plan) + np.repeat(self._shifts[plan.slots], plan.lengths)
        is_decode = len(plan.slots) == plan.num_decodes
        return np.tile(own.astype(np.int32), (1 if is_decode else 3, 1))

    def _place(
        self, places: np.ndarray, start: int, images: RequestImages, units: Mapping[bytes, tuple[int, ...]]
    ) -> None:
        for segment in images.segments:
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


def _images_of(given: Any, processor: Processor) -> list[Any]:
    kind = processor.kind
    if not isinstance(given, Mapping):
        raise UserError(f"{KEY} must be {{{kind!r}: one {processor.noun} or a list}}.", KEY)
    others = [str(name) for name in given if name != kind]
    if others:
        raise UserError(f"{KEY} has {', '.join(others):.80}, and only {kind!r} is supported; leave it out.", KEY)
    images = given.get(kind)
    return [] if images is None else processor.listed(images)
