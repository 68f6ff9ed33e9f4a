"""The tokenizer, the chat template and the training rows of the model of shapes."""

import itertools
import random
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from PIL.Image import Image
from tokenizers import Tokenizer
from tqdm import tqdm

from jaxllm.media.processor import ImageProcessor, read_processor
from training import picture_questions
from training.captioner import Shape
from training.corpus import END_OF_TEXT, TURN_END, TURN_START
from training.packing import train_bpe
from training.picture_questions import Turn
from training.scenes import COLOURS, KINDS, LARGE, Item, draw_items, picture

IMAGE = "<image>"
SPECIAL_TOKENS: tuple[str, ...] = (END_OF_TEXT, TURN_START, TURN_END, IMAGE)
END_OF_TEXT_ID, TURN_START_ID, TURN_END_ID, IMAGE_ID = range(4)
# The template writes a picture before the text of its message, and omits system messages: the training has none.
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] != 'system' %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] if part['type'] == 'image' %}{{ '<image>' }}{% endfor %}"
    "{% for part in message['content'] if part['type'] == 'text' %}{{ part['text'] }}{% endfor %}"
    "{% endif %}{{ '<|im_end|>' + '\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
USER, ASSISTANT = f"{TURN_START}user\n", f"{TURN_START}assistant\n"
MOST_TOKENS = 512


class Pool(NamedTuple):
    """Pictures of the training: pixels uint8[N, 3, side, side], labels of patches, and shapes."""

    pixels: np.ndarray
    patches: np.ndarray  # float32[N, patches, 5], see `at_patches`
    items: list[tuple[Item, ...]]


class Batch(NamedTuple):
    """N pictures, K chats about each, and K chats without a picture, of T tokens."""

    pixels: jax.Array  # uint8[N, 3, side, side]
    patches: jax.Array  # float32[N, patches, 5]
    chats: jax.Array  # int32[N * K, 2, T]: tokens after those of the picture, and weights of their losses
    blind: jax.Array  # int32[K, 2, T]


def processor_settings(shape: Shape) -> dict[str, object]:
    """Return preprocessor_config.json."""
    return {
        "image_processor_type": "SiglipImageProcessor",
        "size": {"height": shape.side, "width": shape.side},
        "resample": 3,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }


def make_processor(shape: Shape) -> ImageProcessor:
    """Return the engine's own preprocessing, so that the training has the same pixels."""
    return read_processor(processor_settings(shape), IMAGE_ID, shape.patches, shape.side)


def train_tokenizer(seed: int, pictures: int = 3000) -> Tokenizer:
    """Train a byte-level BPE on questions about pictures: each of their words becomes a token."""

    def texts() -> Iterator[str]:
        for number in range(pictures):
            rng = random.Random(f"tokenizer {seed} {number}")
            for turn in itertools.islice(
                picture_questions.turns(rng, draw_items(rng), picture_questions.FIRST_SHARES), 8
            ):
                if turn.kind != "others":
                    yield from ("user\n", turn.question, "assistant\n", turn.answer)
        for answer in (picture_questions.NO_PICTURE, picture_questions.OTHER, picture_questions.GREETING):
            yield from [answer] * 100

    return train_bpe(texts(), MOST_TOKENS, SPECIAL_TOKENS)


def at_patches(items: tuple[Item, ...], shape: Shape) -> np.ndarray:
    """Return float32[patches, 5] of the shapes with their centers at patches, 0 elsewhere.

    These are 1 + the number of the kind, the numbers of colour and place, and x and y from the picture's middle, in
    thirds of its sides.
    """
    count = shape.side // shape.patch
    found = np.zeros((count * count, 5), np.float32)
    for item in items:
        numbers = 1 + KINDS.index(item.kind), tuple(COLOURS).index(item.colour), item.place
        found[int(item.y * count) * count + int(item.x * count)] = *numbers, 3 * item.x - 1.5, 3 * item.y - 1.5
    return found


def draw_pool(seed: int, pictures: int, shape: Shape) -> Pool:
    """Draw pictures with the engine's own preprocessing."""
    processor = make_processor(shape)
    pixels = np.zeros((pictures, 3, shape.side, shape.side), np.uint8)
    drawn = (picture(seed, number, LARGE) for number in range(pictures))
    items = []
    for number, each in enumerate(tqdm(drawn, total=pictures, unit="picture", mininterval=5)):
        pixels[number] = levels(processor, each.image)
        items.append(each.items)
    return Pool(pixels, np.stack([at_patches(each, shape) for each in items]), items)


def levels(processor: ImageProcessor, image: Image) -> np.ndarray:
    """Return the integers of which the processor's pixels are `levels / 127.5 - 1`."""
    return np.rint((processor.pixels(image) + 1) * 127.5).astype(np.uint8)


def encode(tokenizer: Tokenizer, turns: Iterator[Turn], length: int, is_blind: bool = False) -> np.ndarray:
    """Return a chat's first tokens and the weights of their losses, int32[2, length]; answers alone have a weight.

    Unless `is_blind`, it begins after the picture, which follows the first tokens of the message.
    """
    tokens: list[int] = []
    weights: list[int] = []
    while len(tokens) < length:
        turn = next(turns, None)
        if turn is None:
            break
        begin = USER if tokens or is_blind else ""
        parts = (f"{begin}{turn.question}{TURN_END}\n{ASSISTANT}", f"{turn.answer}{TURN_END}", "\n")
        for weight, part in zip((0, 1, 0), parts, strict=True):
            ids = tokenizer.encode(part).ids
            tokens += ids
            weights += [weight] * len(ids)
    row = np.zeros((2, length), np.int32)
    row[:, : len(tokens)] = np.array([tokens, weights])[:, :length]
    return row


def batch_of(
    tokenizer: Tokenizer,
    pool: Pool,
    rng: random.Random,
    pictures: int,
    chats: int,
    length: int,
    shares: Mapping[str, float],
) -> Batch:
    """Draw pictures of the pool, with `chats` about each and the same number without any.

    `shares` are those of the kinds of questions.
    """
    numbers = rng.sample(range(len(pool.items)), pictures)
    items = [pool.items[number] for number in numbers]
    pairs = [(picture_questions.turns(rng, each, shares), False) for each in items for _ in range(chats)]
    pairs += [(picture_questions.blind_turns(rng, items[0]), True) for _ in range(chats)]
    rows = [encode(tokenizer, turns, length + 1, is_blind) for turns, is_blind in pairs]
    split, shape = pictures * chats, (-1, 2, length + 1)
    parts = (np.array(part, np.int32).reshape(shape) for part in (rows[:split], rows[split:]))
    return Batch(*map(jnp.asarray, (pool.pixels[numbers], pool.patches[numbers], *parts)))
