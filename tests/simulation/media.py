"""Images in the simulation: their drawing, their content, the naive cache of the encoder, and a processor.

An image is a number; its content in the cache, and in the hashes of sequences, follows from number and place.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxllm.config import MOST_MEDIA
from jaxllm.media.processor import Prepared
from jaxllm.scheduler.media import Encode, EncoderCache
from tests.simulation.oracle import VOCABULARY, mix

PLACEHOLDER = 62
NOTHING = 2**64 - 1  # content of a row before it is written

Image = tuple[int, int, int]  # first position, tokens, number


def draw_media(chance: random.Random, longest: int) -> dict[str, Any]:
    """Draw the settings of an encoder: none in most traces, or a small cache and budget."""
    unit = chance.choice((1, 2, 3, 8))
    most = max(1, longest // 3)  # tokens of an image
    least = -(-most // unit)
    return {
        "media_unit": unit,
        "media_units": chance.choice((0, least, least, least + 1, 2 * least, 6 * least)) if longest > 8 else 0,
        "media_longest": most,
        "max_encoded": chance.choice((1, most, 2 * most, 1000)),
        "whole_images": chance.random() < 0.5,  # no chunk ends inside an image
    }


def fit_whole_images(setting: dict[str, Any]) -> None:
    """Raise the tokens of a step and the blocks of windowed layers to the needs of the longest image."""
    if whole := whole_image(setting):
        size, window = setting["block_size"], setting["window"]
        setting["max_step_tokens"] = max(setting["max_step_tokens"], setting["num_slots"] + whole)
        if window:
            need = -(-(window - 1) // size) + 1 + -(-max(2, whole) // size)
            setting["num_window_blocks"] = max(setting["num_window_blocks"], min(setting["num_blocks"], need))


def whole_image(setting: Mapping[str, Any]) -> int:
    """Return the tokens of the longest image, if no chunk may end inside an image, else 0."""
    return setting["media_longest"] if setting.get("whole_images") and setting["media_units"] else 0


def has_axes(setting: Mapping[str, Any]) -> bool:
    """Return whether rotary positions have three dimensions."""
    return bool(setting["media_units"] and setting.get("axes"))


def place_images(chance: random.Random, request: dict[str, Any], setting: Mapping[str, Any]) -> None:
    """Put images into most prompts that are long enough; equal numbers and lengths occur often."""
    ids = request["ids"]
    if not setting["media_units"] or "text" in request or "beams" in request["params"] or chance.random() < 0.3:
        return
    images, at = [], chance.choice((0, 0, 1, 2, 3))
    while len(images) < MOST_MEDIA and chance.random() < 0.8:
        length = chance.choice((1, 2, setting["media_longest"], chance.randint(1, setting["media_longest"])))
        if at + length > len(ids) - 4:
            break
        images.append([at, length, chance.randint(1, 4)])
        at += length + chance.choice((0, 1, 1, 5))
    if images:
        request["images"] = images
        request["ids"] = list(ids)
        for start, length, _ in images:
            request["ids"][start : start + length] = [PLACEHOLDER] * length


def content(number: int, length: int, offset: int) -> int:
    """Return the content of an image's embedding."""
    return mix(mix(mix(1 << 40, number), length), offset)


def contents(images: Iterable[Sequence[int]]) -> dict[int, int]:
    """Return the contents of the placeholders of a prompt, by position."""
    return {
        start + offset: content(number, length, offset) for start, length, number in images for offset in range(length)
    }


def last_places(images: Iterable[Sequence[int]]) -> dict[int, int]:
    """Return the last position of its image for each placeholder of a prompt."""
    return {at: start + length - 1 for start, length, _ in images for at in range(start, start + length)}


def grid(length: int, number: int) -> tuple[int, int]:
    """Return the rows and columns of an image."""
    columns = max(count for count in range(1, number + 2) if length % count == 0)
    return length // columns, columns


def rotary(images: Iterable[Sequence[int]], position: int) -> list[int]:
    """Return the rotary positions of a token in time, row and column: text continues after an image's longest side."""
    at, end = 0, 0  # the rotary position of the place `end`, after the images so far
    for start, length, number in images:
        if position < start:
            break
        at += start - end
        rows, columns = grid(length, number)
        if position < start + length:
            return [at, at + (position - start) // columns, at + (position - start) % columns]
        at, end = at + max(rows, columns), start + length
    return [at + position - end] * 3


def splits(images: Iterable[Image], end: int) -> bool:
    """Return whether a chunk to before `end` ends inside an image."""
    return any(end in range(start + 1, start + length) for start, length, _ in images)


class Encoder:
    """The naive cache: every image with its units, least recently used first."""

    def __init__(self, num_units: int, unit: int, budget: int, is_whole: bool) -> None:
        self._num_units, self._unit, self._budget, self._is_whole = num_units, unit, budget, is_whole
        self.held: dict[tuple[int, int], tuple[int, ...]] = {}  # by number and length
        self._readers: dict[tuple[int, int], int] = {}  # the adapter of each image's last reader
        self.fired: Counter[str] = Counter()  # events, by name

    def begin(self, encodes: Sequence[Encode], running: Iterable[tuple[Sequence[Image], int]]) -> None:
        """Begin a plan. `running` has the images and the computed tokens of each running request."""
        self._encodes = [*encodes]
        self._num_encoded = 0
        self._kept = {
            (number, length)
            for images, issued in running
            for start, length, number in images
            if start < issued < start + length
        }

    def reach(self, request: int, images: Sequence[Image], start: int, length: int, adapter: int) -> int:
        """Return the length of a chunk: it ends before an image that cannot be encoded in this plan.

        With whole images it does not end inside one either. Requests of all adapters share embeddings.
        """
        length = self.shortened(images, start, length)
        for index, (first, size, number) in enumerate(images):
            reads = first < start + length and first + size > start
            if reads and not self._bring(request, index, (number, size)):
                self.fired["image_cut"] += 1
                return max(first - start, 0)
            if reads:
                self.fired["image_of_adapters"] += self._readers.get((number, size), adapter) != adapter
                self._readers[number, size] = adapter
        return length

    def shortened(self, images: Sequence[Image], start: int, length: int) -> int:
        """Return the length of a chunk that may not end inside an image."""
        while self._is_whole and length and splits(images, start + length):
            self.fired["image_whole"] += 1
            length -= 1
        return length

    def least(self, images: Sequence[Image], start: int) -> int:
        """Return the end of the shortest chunk."""
        end = start + 1
        while self._is_whole and splits(images, end):
            end += 1
        return end

    def _bring(self, request: int, index: int, image: tuple[int, int]) -> bool:
        if image in self.held:
            self.fired["image_hit"] += 1
            self.held[image] = self.held.pop(image)
            self._kept.add(image)
            return True
        if self._num_encoded and self._num_encoded + image[1] > self._budget:
            return False
        wanted = -(-image[1] // self._unit)
        evicted = []
        for other in self.held:
            if self._num_free + sum(len(self.held[each]) for each in evicted) >= wanted:
                break
            if other not in self._kept:
                evicted.append(other)
        if self._num_free + sum(len(self.held[each]) for each in evicted) < wanted:
            return False
        self._readers.pop(image, None)
        for other in evicted:
            del self.held[other]
            self.fired["image_evicted"] += 1
        due = self._encodes.pop(0) if self._encodes else None
        taken = {unit for units in self.held.values() for unit in units}
        if due is None or due[:2] != (request, index) or len({*due.units} - taken) != wanted:
            raise AssertionError(f"a plan encodes {due}, where image {index} of request {request} is due")
        self.held[image] = due.units
        self.fired["image_encoded"] += 1
        self._num_encoded += image[1]
        self._kept.add(image)
        return True

    def forget(self, images: Iterable[Image]) -> None:
        """Drop the images of a failed request."""
        for _, length, number in images:
            self.held.pop((number, length), None)

    @property
    def has_unread(self) -> bool:
        """Whether the plan encodes further images, which are not due."""
        return bool(self._encodes)

    @property
    def _num_free(self) -> int:
        return self._num_units - sum(map(len, self.held.values()))

    def compare(self, cache: EncoderCache | None) -> None:
        """Compare the production scheduler's cache."""
        if cache is None:
            assert not self.held
            return
        if [each.units for each in cache.entries] != [*self.held.values()] or len(cache.free) != self._num_free:
            raise AssertionError("the encoder's cache holds other images than are due, or in another order")
        used = [unit for each in cache.entries for unit in each.units] + [*cache.free]
        if sorted(used) != list(range(self._num_units)):
            raise AssertionError("a unit of the encoder's cache is lost, or used twice")


class Processor:
    """A simulated image processor: an image is a pair of its tokens and its number."""

    kind = noun = "image"
    placeholder = PLACEHOLDER
    video = None

    def __init__(self, has_axes: bool) -> None:
        self._has_axes = has_axes

    def listed(self, given: Any) -> list[Any]:
        return list(given)

    def pieces(self, image: Prepared) -> Iterator[tuple[int, Prepared]]:
        yield 0, image

    def prepare(self, images: Sequence[Any], other: int = 0) -> list[Prepared]:
        """Return the images with their digests."""
        return [
            Prepared(
                f"{number} {length}".encode(),
                length,
                np.array([number]),
                grid(length, number) if self._has_axes else None,
            )
            for length, number in images
        ]


class Rows:
    """The device's array of embeddings, and the program that encodes."""

    def __init__(self, setting: Mapping[str, Any]) -> None:
        self.processor = Processor(has_axes(setting))
        self.unit = setting["media_unit"]
        self.num_units = setting["media_units"]
        self.budget = setting["max_encoded"]
        self.whole_image = whole_image(setting)
        self.num_encoded = 0
        self.renew()

    @property
    def num_rows(self) -> int:
        return self.unit * self.num_units

    def renew(self) -> None:
        self.rows = np.full(self.num_rows + 1, NOTHING, np.uint64)

    def encode(self, state: Any, images: Sequence[tuple[Prepared, np.ndarray]]) -> Any:
        """Write the embeddings of images into rows."""
        for image, rows in images:
            values = [content(int(image.pixels[0]), len(rows), offset) for offset in range(len(rows))]
            self.rows[rows] = values
            self.num_encoded += 1
        return state

    def count(self, metrics: Any, num_encoded: int) -> None:
        metrics.images_encoded += num_encoded


assert PLACEHOLDER < VOCABULARY
