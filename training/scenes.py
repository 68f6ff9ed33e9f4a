"""Pictures of coloured shapes: their content and their drawing. Each follows from a seed and a number.

Lengths are fractions of the picture's sides; x runs to the right and y down.
"""

import argparse
import itertools
import math
import random
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw

from training.holdout import picture_held_out

Color = tuple[float, float, float]

KINDS: tuple[str, ...] = ("circle", "square", "triangle")
# A shape has a colour between the two.
COLOURS: dict[str, tuple[Color, Color]] = {
    "red": ((255, 0, 0), (205, 35, 45)),
    "orange": ((255, 165, 0), (240, 120, 20)),
    "yellow": ((255, 255, 0), (245, 215, 50)),
    "green": ((0, 128, 0), (60, 220, 70)),
    "blue": ((0, 0, 255), (50, 115, 235)),
    "purple": ((128, 0, 128), (165, 75, 220)),
}
BACKGROUNDS: tuple[Color, ...] = (
    (255, 255, 255), (255, 255, 255), (235, 235, 235), (250, 240, 225), (225, 235, 245), (170, 170, 170),
    (90, 90, 90), (30, 30, 35), (0, 0, 0),
)  # fmt: skip
PLACES: tuple[str, ...] = (
    "at the top left", "at the top", "at the top right",
    "on the left", "in the middle", "on the right",
    "at the bottom left", "at the bottom", "at the bottom right",
)  # fmt: skip
MOST_SHAPES = 5
SMALLEST, LARGEST = 0.11, 0.42  # radius of the circle around a shape
LARGE = 0.3  # share of the pictures that may have a large shape
GAP = 0.02  # between two of these circles, and to the picture's edges
MARGIN = 0.06  # between a center and the borders of the nine places
PIXELS = (128, 225)  # range of a picture's sides


class Item(NamedTuple):
    """A shape: its colour, kind, center, and the radius of the circle around it."""

    colour: str
    kind: str
    x: float
    y: float
    radius: float

    @property
    def place(self) -> int:
        """The number of its place in `PLACES`."""
        return 3 * int(self.y * 3) + int(self.x * 3)


class Picture(NamedTuple):
    """A picture and its shapes, in the order of their places. A place has one shape at most."""

    items: tuple[Item, ...]
    image: Image.Image


def draw_items(rng: random.Random, large: float = 0.0) -> tuple[Item, ...]:
    """Return one to five shapes that do not overlap, in the order of their places.

    A share `large` of the draws has one or two, of which the first is in the middle and may be large.
    """
    is_large = large > 0 and rng.random() < large
    centers = _centers(rng, rng.randint(1, 2 if is_large else MOST_SHAPES), is_large)
    distances = [[math.dist(one, other) for other in centers] for one in centers]
    radii = [SMALLEST] * len(centers)
    for number in range(len(centers)) if is_large else rng.sample(range(len(centers)), len(centers)):
        x, y = centers[number]
        others = (distances[number][other] - radii[other] for other in range(len(centers)) if other != number)
        most = min(x, y, 1 - x, 1 - y, *others, LARGEST + GAP) - GAP
        radii[number] = rng.uniform(SMALLEST, max(most, SMALLEST))
    items = [
        Item(rng.choice(tuple(COLOURS)), rng.choice(KINDS), x, y, radius)
        for (x, y), radius in zip(centers, radii, strict=True)
    ]
    return tuple(sorted(items, key=lambda item: item.place))


def _centers(rng: random.Random, count: int, begins_in_middle: bool) -> list[tuple[float, float]]:
    """Draw points in different places, far enough from each other for the smallest shapes."""
    while True:
        points, middle = [], PLACES.index("in the middle")
        places = rng.sample(range(9), count)
        if begins_in_middle:
            places = [middle, *(place for place in places if place != middle)][:count]
        for place in places:
            row, column = divmod(place, 3)
            point = tuple(
                rng.uniform(max(part / 3 + MARGIN, SMALLEST + GAP), min((part + 1) / 3 - MARGIN, 1 - SMALLEST - GAP))
                for part in (column, row)
            )
            points.append((point[0], point[1]))
        if all(math.dist(a, b) >= 2 * SMALLEST + GAP for a, b in itertools.combinations(points, 2)):
            return points


def arrangement(items: tuple[Item, ...]) -> str:
    """Return the colours, kinds and places of shapes, without their sizes and exact centers."""
    return ",".join(f"{item.colour} {item.kind} {item.place}" for item in items)


def picture(seed: int, number: int, large: float = 0.0, held_out: bool = False) -> Picture:
    """Return a picture of the training or, with `held_out`, of the evaluation; their arrangements are disjoint.

    A share `large` of the pictures may have a large shape.
    """
    rng = random.Random(f"picture {seed} {number}")
    while True:
        items = draw_items(rng, large)
        if picture_held_out(arrangement(items)) == held_out:
            return Picture(items, render(items, np.random.default_rng(rng.getrandbits(32))))


def held_out_picture(seed: int, number: int) -> Picture:
    """Return a picture of the evaluation."""
    return picture(seed, number, LARGE, held_out=True)


def render(items: tuple[Item, ...], rng: np.random.Generator) -> Image.Image:
    """Draw shapes on a background that is not quite even, with noise in half of the pictures."""
    width, height = (int(side) for side in rng.integers(*PIXELS, 2))
    base = np.array(BACKGROUNDS[rng.integers(len(BACKGROUNDS))])
    corners = np.clip(base + rng.integers(-12, 13, (2, 2, 1)) + rng.integers(-4, 5, (2, 2, 3)), 0, 255)
    image = Image.fromarray(corners.astype(np.uint8)).resize((width, height), Image.Resampling.BILINEAR)
    canvas = ImageDraw.Draw(image)
    for item in items:
        first, second = (np.array(color) for color in COLOURS[item.colour])
        color = np.clip(first + (second - first) * rng.random() + rng.integers(-10, 11, 3), 0, 255)
        fill = tuple(int(part) for part in color)
        x, y, radius = item.x * width, item.y * height, item.radius * min(width, height)
        if item.kind == "circle":
            canvas.ellipse((x - radius, y - radius, x + radius, y + radius), fill=fill)
            continue
        count, turn = (4, 0.125) if item.kind == "square" else (3, rng.choice((0.25, 0.25, 0.25, 0.75)))
        angles = 2 * np.pi * (np.arange(count) / count + turn + rng.uniform(-0.03, 0.03))
        canvas.polygon(
            [(x + radius * float(np.cos(angle)), y - radius * float(np.sin(angle))) for angle in angles],
            fill=fill,
        )
    most = int(rng.integers(-24, 25))
    if most <= 0:
        return image
    noise = rng.integers(-most, most + 1, (height, width, 3), np.int8)
    return Image.fromarray(np.clip(np.asarray(image, np.int16) + noise, 0, 255).astype(np.uint8))


def main() -> None:
    """Write held-out pictures to a folder."""
    parser = argparse.ArgumentParser(prog="python -m training.scenes", description="Draw held-out pictures.")
    parser.add_argument("--out", type=Path, required=True, help="folder to write PNG files to")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=10)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for number in range(options.count):
        held_out_picture(options.seed, number).image.save(options.out / f"{number}.png")


if __name__ == "__main__":
    main()
