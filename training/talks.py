"""The tokenizer, the chat template and the training rows of the model of shapes."""

import itertools
import random
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer

from jaxllm.media.processor import ImageProcessor, read_processor
from training import picture_questions
from training.captioner import Shape
from training.corpus import END_OF_TEXT, TURN_END, TURN_START
from training.packing import train_bpe
from training.picture_questions import SHARES, Turn
from training.scenes import COLOURS, KINDS, Item, draw_items, picture

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


class Batch(NamedTuple):
    """Pictures and chats about them: N pictures, K chats about each, B chats without a picture, T tokens."""

    pixels: jax.Array  # float32[N, 3, side, side]
    classes: jax.Array  # int32[N, patches, 2]
    chats: jax.Array  # int32[N * K, 2, T]: tokens after those of the picture, and weights of their losses
    blind: jax.Array  # int32[B, 2, T]


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
            for turn in itertools.islice(picture_questions.turns(rng, draw_items(rng)), 8):
                if turn.kind != "others":
                    yield from ("user\n", turn.question, "assistant\n", turn.answer)
        for answer in (picture_questions.NO_PICTURE, picture_questions.OTHER, picture_questions.GREETING):
            yield from [answer] * 100

    return train_bpe(texts(), MOST_TOKENS, SPECIAL_TOKENS)


def patch_classes(items: tuple[Item, ...], shape: Shape) -> np.ndarray:
    """Return int32[patches, 2], 0 for background: the shape at a patch's middle, and that with its center there."""
    count = shape.side // shape.patch
    y, x = np.divmod(np.arange(count * count), count)
    classes = np.zeros((count * count, 2), np.int32)
    for item in items:
        number = 1 + KINDS.index(item.kind) * len(COLOURS) + tuple(COLOURS).index(item.colour)
        distances = np.hypot((x + 0.5) / count - item.x, (y + 0.5) / count - item.y)
        classes[distances < 0.75 * item.radius, 0] = number
        classes[int(item.y * count) * count + int(item.x * count), 1] = number
    return classes


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


def batches(
    tokenizer: Tokenizer,
    shape: Shape,
    seed: int,
    first: int,
    pictures: int,
    chats: int,
    length: int,
    large: float,
    shares: Mapping[str, float] = SHARES,
) -> Iterator[Batch]:
    """Yield batches of pictures, numbered from `first`, with `chats` about each and the same number without any.

    A share `large` of the pictures may have a large shape; `shares` are those of the kinds of questions.
    """
    processor = make_processor(shape)
    for start in itertools.count(first, pictures):
        drawn = [picture(seed, number, large) for number in range(start, start + pictures)]
        rng = random.Random(f"chats {seed} {start}")
        pairs = [(picture_questions.turns(rng, each.items, shares), False) for each in drawn for _ in range(chats)]
        pairs += [(picture_questions.blind_turns(rng, drawn[0].items), True) for _ in range(chats)]
        rows = [encode(tokenizer, turns, length + 1, is_blind) for turns, is_blind in pairs]
        split = pictures * chats
        yield Batch(
            jnp.asarray(np.stack([processor.pixels(each.image) for each in drawn])),
            jnp.asarray(np.stack([patch_classes(each.items, shape) for each in drawn])),
            jnp.asarray(np.array(rows[:split], np.int32).reshape(-1, 2, length + 1)),
            jnp.asarray(np.array(rows[split:], np.int32).reshape(-1, 2, length + 1)),
        )
