"""The tokenizer of the recogniser, and its training rows of tokens."""

import itertools
import random
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import AddedToken, Tokenizer

from training.packing import train_bpe
from training.phrases import WORDS
from training.recogniser import MOST_WORDS
from training.spoken import NUM_FRAMES, NUM_MELS, POSITIONS, STEP_SECONDS, Window, Word

END, START, LANGUAGE, TASK, NO_SPEECH, NO_TIMES = MARKERS = (
    "<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|transcribe|>", "<|nospeech|>", "<|notimestamps|>",
)  # fmt: skip
MOST_TOKENS = 4096
TIMED_SHARE = 0.5
_NUMBER_OF = {word: number for number, word in enumerate(WORDS)}
_NEAR = 3  # positions around a timestamp that the attention may have


def train_tokenizer() -> Tokenizer:
    """Train a byte-level BPE in which each word, with the space before it, is a token; then markers and timestamps."""
    tokenizer = train_bpe((f" {word}" for word in WORDS), MOST_TOKENS, ())
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in MARKERS])
    times = [f"<|{step * STEP_SECONDS:.2f}|>" for step in range(POSITIONS + 1)]
    tokenizer.add_tokens([AddedToken(name, special=False, normalized=False) for name in times])
    return tokenizer


class Ids:
    """The tokens of words and markers."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.end, self.start, self.language, self.task, self.no_speech, self.no_times = map(self._of, MARKERS)
        self.first_time = self.no_times + 1

    def _of(self, name: str) -> int:
        found = self._tokenizer.token_to_id(name)
        if found is None:
            raise ValueError(f"the tokenizer has no {name}")
        return found

    @cached_property
    def words(self) -> dict[str, int]:
        found = {word: self._tokenizer.encode(f" {word}", add_special_tokens=False).ids for word in WORDS}
        return {word: token for word, (token,) in found.items()}

    def prompt(self, timed: bool) -> list[int]:
        return [self.start, self.language, self.task] + ([] if timed else [self.no_times])

    def time(self, seconds: float) -> int:
        """Return the timestamp that is nearest to a time."""
        return self.first_time + min(max(round(seconds / STEP_SECONDS), 0), POSITIONS)


class Row(NamedTuple):
    """The decoder's input and output for a window, of T tokens."""

    inputs: np.ndarray  # int32[T]
    targets: np.ndarray  # int32[T]; -1 has no loss
    spans: np.ndarray  # int32[T, 2]: positions of the encoder at which the target is spoken; two zeros: nowhere


def written(window: Window, timed: bool) -> list[Word | float]:
    """Return the words and times that a window should give, as Whisper's training has them.

    With times, each phrase is between two. One that the window's end divides is left to the next window, except for its
    beginning; of the window's only one, the whole words are written.
    """
    if not timed:
        return list(window.words)
    phrases = [list(own) for _, own in itertools.groupby(window.words, key=lambda word: word.phrase)]
    following = window.cut.start if window.cut is not None else None
    if window.is_cut and len(phrases) > 1:
        following = phrases.pop()[0].start
    made: list[Word | float] = []
    for own in phrases:
        made += [own[0].start, *own, max(own[-1].end, own[0].start + STEP_SECONDS)]
    if not phrases:
        return [0.0]
    if following is not None and (window.is_cut or following < POSITIONS * STEP_SECONDS):
        made.append(following)
    return made


def row_of(ids: Ids, window: Window, timed: bool, length: int) -> Row:
    """Return the row of a window; raise ValueError if it has more than `length` tokens."""
    prompt = ids.prompt(timed)
    tokens, spans = list(prompt), [(0, 0)] * len(prompt)
    for each in written(window, timed):
        if isinstance(each, Word):
            tokens.append(ids.words[each.text])
            first = int(each.start / STEP_SECONDS)
            spans.append((first, max(first + 1, -int(-each.end // STEP_SECONDS))))
        else:
            tokens.append(ids.time(each))
            at = tokens[-1] - ids.first_time
            spans.append((max(0, at - _NEAR), min(POSITIONS, at + _NEAR)))
    targets = [*tokens[1:], ids.end]
    if not window.words and window.cut is None:
        targets[0] = ids.no_speech
    missing = length - len(tokens)
    if missing < 0:
        raise ValueError(f"a window has {len(tokens)} tokens, more than {length}")
    return Row(
        np.array(tokens + [ids.end] * missing, np.int32),
        np.array(targets + [-1] * missing, np.int32),
        np.array([*spans[1:], (0, 0)] + [(0, 0)] * missing, np.int32),
    )


def labels_of(words: Sequence[Word]) -> np.ndarray:
    """Return uint8[2, POSITIONS]: 1 + the number of the word at each position, or 0, and its index in the window."""
    found = np.zeros((2, POSITIONS), np.uint8)
    for index, word in enumerate(words):
        first = int(word.start / STEP_SECONDS)
        last = max(int(word.end / STEP_SECONDS), first + 1)
        found[:, first:last] = [[1 + _NUMBER_OF[word.text]], [min(index, MOST_WORDS - 1)]]
    return found


class Batch(NamedTuple):
    """N windows with T tokens."""

    bands: jax.Array  # float32[N, NUM_MELS, NUM_FRAMES]
    labels: jax.Array  # uint8[N, 2, POSITIONS]
    inputs: jax.Array  # int32[N, T]
    targets: jax.Array  # int32[N, T]
    spans: jax.Array  # int32[N, T, 2]


class Pool(NamedTuple):
    """N windows of training."""

    bands: np.ndarray  # float16[N, NUM_MELS, NUM_FRAMES]
    labels: np.ndarray  # uint8[N, 2, POSITIONS]
    rows: np.ndarray  # int32[N, 2, 4, T]: without and with times: inputs, targets, both ends of spans


def draw_pool(ids: Ids, windows: Sequence[Window], length: int) -> Pool:
    """Return the windows with the rows that fit into `length` tokens."""
    bands, labels, rows = [], [], []
    for window in windows:
        try:
            own = [row_of(ids, window, timed, length) for timed in (False, True)]
        except ValueError:
            continue
        spoken = [*window.words, *([window.cut] if window.cut is not None else [])]
        bands.append(window.bands)
        labels.append(labels_of(spoken))
        rows.append([[row.inputs, row.targets, *row.spans.T] for row in own])
    return Pool(np.stack(bands), np.stack(labels), np.array(rows, np.int32))


def batch_of(pool: Pool, rng: random.Random, count: int) -> Batch:
    """Draw windows of the pool, half of them with times, with warped and masked bands."""
    numbers = rng.sample(range(len(pool.bands)), count)
    timed = [int(rng.random() < TIMED_SHARE) for _ in numbers]
    bands = np.stack([_varied(pool.bands[number].astype(np.float32), rng) for number in numbers])
    inputs, targets, first, last = pool.rows[numbers, timed].swapaxes(0, 1)
    parts = (bands, pool.labels[numbers], inputs, targets, np.stack([first, last], -1))
    return Batch(*map(jnp.asarray, parts))


def _varied(bands: np.ndarray, rng: random.Random) -> np.ndarray:
    """Return bands as of another throat: stretched by up to a tenth, with another tone, some of them masked."""
    at = np.clip(np.arange(NUM_MELS) * rng.uniform(0.92, 1.08), 0, NUM_MELS - 1)
    low = at.astype(int)
    share = (at - low).astype(np.float32)[:, None]
    high = np.minimum(low + 1, NUM_MELS - 1)
    made = bands[low] * (1 - share) + bands[high] * share
    made += np.linspace(-1, 1, NUM_MELS, dtype=np.float32)[:, None] * rng.uniform(-0.1, 0.1)
    if rng.random() < 0.5:
        width = rng.randint(1, 5)
        first = rng.randrange(NUM_MELS - width)
        made[first : first + width] = made.mean()
    if rng.random() < 0.3:
        width = rng.randint(1, 8)
        first = rng.randrange(NUM_FRAMES - width)
        made[:, first : first + width] = made.mean()
    return made
