"""Images in prompts: preprocessed where a request is checked, encoded before the steps that read them.

A request's state is its `RequestImages`. scheduler/media.py decides when an image is encoded and where its embeddings
are on the device.
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
from jaxllm.media.placeholders import expanded
from jaxllm.media.processor import ImageProcessor, Prepared
from jaxllm.runner.step_input import StepInput
from jaxllm.scheduler.media import Segment

KEY = "multi_modal_data"


class RequestImages(NamedTuple):
    """A request's images."""

    segments: tuple[Segment, ...]
    pixels: tuple[np.ndarray, ...]  # float32[3, H, W] each; kept for a preempted request, which may need them again


class NoImages(Feature):
    """Refuses images to a model without a vision tower."""

    name = "media"

    def claim(self, accepted: Accepted) -> None:
        given = accepted.given
        if isinstance(given, Mapping) and given.get(KEY) is not None:
            raise UserError(f"{self.core.config.model} reads no images; leave {KEY} out.", KEY)


class Images(Feature):
    """Gives the decoder images' embeddings in place of their placeholders."""

    name = "media"
    sends = (ImageProcessor,)

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        encoder = core.runner.encoder
        assert encoder is not None
        self._encoder = encoder
        self._most = core.config.most_images
        self._has_images = np.zeros(core.runner.limits.num_slots, np.bool_)  # by slot

    def claim(self, accepted: Accepted) -> None:
        """Preprocess the images of a request and repeat their placeholders; this may take tens of milliseconds."""
        given = accepted.given
        if not isinstance(given, Mapping) or KEY not in given:
            return
        rest = {name: value for name, value in given.items() if name != KEY}
        images = _images_of(given[KEY])
        accepted.given = rest
        if not images:
            return
        if isinstance(accepted.asked, BeamSearchParams):
            raise combinations.refusal("beam_width", KEY)
        if accepted.params.truncate_prompt_tokens is not None:
            raise combinations.refusal("truncate_prompt_tokens", KEY)
        if len(images) > self._most:
            raise UserError(f"A request may have {self._most} images (limit_mm_per_prompt), not {len(images)}.", KEY)
        model, processor = accepted.language.model, self._encoder.processor
        text, ids, _ = parts_of(rest)
        if ids is None:
            assert text is not None
            model.tokenizer.check_length(text, model.max_model_len)
            ids = model.tokenizer.encode(text)
        ids = checked_ids(ids, model.vocab_size) if len(ids) else []
        prepared = processor.prepare(images)
        found, starts = expanded(ids, processor.placeholder, [each.num_tokens for each in prepared])
        accepted.given = rest | {"prompt_token_ids": found}
        segments = (Segment(start, each.num_tokens, each.digest) for start, each in zip(starts, prepared, strict=True))
        accepted.states[self.name] = RequestImages(tuple(segments), tuple(each.pixels for each in prepared))

    def accept(self, accepted: Accepted) -> None:
        """Refuse placeholders without images."""
        if self.name not in accepted.states and self._encoder.processor.placeholder in accepted.prompt_token_ids:
            raise UserError(
                f"The prompt has image placeholders (token {self._encoder.processor.placeholder}) and {KEY} has no "
                "images.",
                KEY,
            )

    def begin(self, accepted: Accepted, group: SequenceGroup) -> None:
        if self.name in accepted.states:
            group.states[self.name] = accepted.states[self.name]

    def schedule(self, sequence: Sequence, fields: dict[str, Any]) -> None:
        images: RequestImages | None = sequence.group.states.get(self.name)
        if images is not None:
            fields["media"] = images.segments

    def place(self, slot: int, sequence: Sequence) -> None:
        self._has_images[slot] = self.name in sequence.group.states

    def inputs(self, step: StepInput) -> None:
        """Send the images that the plan encodes, and the row of each placeholder that its chunks read."""
        plan = step.plan
        encodes: list[tuple[np.ndarray, np.ndarray]] = []
        for each in plan.encodes:
            own = self.core.outputs.sequences[each.sequence_id]
            with blaming(own):
                images: RequestImages = own.group.states[self.name]
                rows = self._rows(each.units)[: images.segments[each.index].length]
                encodes.append((images.pixels[each.index], rows))
        if encodes:
            step.side["encodes"] = encodes
        first = plan.num_decodes
        if not self._has_images[plan.slots[first:]].any():
            return
        places = np.full(plan.num_tokens, self._encoder.num_rows, np.int32)
        cache = self.core.scheduler.state.media
        assert cache is not None
        units = dict(cache.entries)
        offset = int(plan.lengths[:first].sum())
        chunks = (each[first:].tolist() for each in (plan.slots, plan.starts, plan.lengths))
        for slot, start, length in zip(*chunks, strict=True):
            if self._has_images[slot]:
                own = self.core.batch.owner(slot)
                with blaming(own):
                    self._place(places[offset : offset + length], start, own.group.states[self.name], units)
            offset += length
        step.side["media"] = places

    def _place(
        self, places: np.ndarray, start: int, images: RequestImages, units: Mapping[bytes, tuple[int, ...]]
    ) -> None:
        """Write the rows of the placeholders of a chunk from position `start`."""
        for segment in images.segments:
            low, high = max(segment.start, start), min(segment.end, start + len(places))
            if low < high:
                rows = self._rows(units[segment.digest])
                places[low - start : high - start] = rows[low - segment.start : high - segment.start]

    def _rows(self, units: tuple[int, ...]) -> np.ndarray:
        """Return the rows of an image's units, int32[·]."""
        unit = self._encoder.unit
        return (np.asarray(units, np.int32)[:, None] * unit + np.arange(unit, dtype=np.int32)).ravel()


def _images_of(given: Any) -> list[Any]:
    if not isinstance(given, Mapping) or given.keys() - {"image"}:
        raise UserError(f"{KEY} must be {{'image': an image or a list of images}}.", KEY)
    images = given.get("image")
    if images is None:
        return []
    is_list = isinstance(images, list | tuple) and not isinstance(images, Prepared)
    return list(images) if is_list else [images]
