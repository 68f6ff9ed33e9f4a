"""Spoken phrases with the times of their words, by espeak-ng, and windows of the recogniser's input with their labels.

Needs the shared library of the Debian package espeak-ng 1.51. One seed gives the same sound if a process draws the
same phrases in the same order. Sound is float32 at 16 kHz; times are in seconds.
"""

import argparse
import ctypes
import io
import itertools
import random
import wave
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy.signal import fftconvolve, resample_poly

from jaxllm.media.sound import HOP, RATE, LogMel
from training.phrases import Phrase, draw_phrase

NUM_MELS, NUM_FRAMES = 40, 400  # of a window, which has 4 s
POSITIONS = NUM_FRAMES // 2  # of the encoder
WINDOW_SECONDS = NUM_FRAMES * HOP / RATE
STEP_SECONDS = 2 * HOP / RATE  # of a position and of a timestamp
ACCENTS: tuple[str, ...] = (
    "gmw/en-US", "gmw/en-US", "gmw/en", "gmw/en-GB-x-rp", "gmw/en-GB-scotland", "gmw/en-GB-x-gbclan", "gmw/en-029",
    "gmw/en-US-nyc",
)  # fmt: skip
HELD_OUT_ACCENT = "gmw/en-GB-x-gbcwmd"
# Variants change the formants, the pitch, the breath and the tempo of an accent's voice; "" is the plain one.
SPEAKERS: tuple[str, ...] = (
    "", "m1", "m2", "m3", "m5", "m6", "m8", "f1", "f2", "f4", "adam", "Alex", "Alicia", "Andrea", "Annie", "antonio",
    "aunty", "benjamin", "boris", "caleb", "Diogo", "ed", "edward", "gustave", "grandma", "grandpa", "Henrique", "Hugo",
    "iven", "Jacky", "john", "kaukovalta", "klatt", "klatt3", "Lee", "linda", "Marco", "Mario", "max", "michel",
    "miguel", "Mike", "norbert", "pablo", "paul", "quincy", "rob", "robert", "sandro", "shelby", "steph2", "travis",
    "victor", "zac",
)  # fmt: skip
HELD_OUT_SPEAKERS: tuple[str, ...] = (
    "m4",
    "m7",
    "f3",
    "f5",
    "david",
    "belinda",
    "Michael",
    "marcelo",
    "steph",
    "pedro",
)
SPEEDS = (110, 220)  # words per minute
HELD_OUT_SPEEDS = (150, 165)
PITCHES = (25, 75)
PAUSES = (0.25, 1.2)  # between phrases
BLANK_SHARE = 0.04  # of the windows: no speech
SHORT_SHARE = 0.6  # of the recordings: one phrase that fits into a window

Callback = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p)
_RATE, _PITCH = 1, 3  # espeak_PARAMETER
_WORD = 1  # espeak_EVENT_TYPE
_SYNCHRONOUS, _CHARACTERS, _UTF8 = 2, 1, 1


class _Event(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int),
        ("identifier", ctypes.c_uint),
        ("text_position", ctypes.c_int),  # from 1
        ("length", ctypes.c_int),
        ("milliseconds", ctypes.c_int),
        ("sample", ctypes.c_int),
        ("user_data", ctypes.c_void_p),
        ("id", ctypes.c_int64),
    )


class Voice(NamedTuple):
    """An accent with a speaker, words per minute, and a pitch from 0 to 99."""

    accent: str
    speaker: str
    speed: int
    pitch: int


class Word(NamedTuple):
    """A spoken word, and its times."""

    text: str
    start: float
    end: float
    phrase: int = 0  # index within a recording


class Espeak:
    """The library of espeak-ng, once per process."""

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL("libespeak-ng.so.1")
        except OSError as error:
            raise SystemExit("espeak-ng is missing: apt-get install espeak-ng") from error
        self._rate = self._library.espeak_Initialize(_SYNCHRONOUS, 0, None, 0)
        self._pieces: list[np.ndarray] = []
        self._events: list[tuple[int, int]] = []  # characters before a word, and milliseconds
        self._callback = Callback(self._take)  # must outlive the calls
        self._library.espeak_SetSynthCallback(self._callback)

    def _take(self, samples: Any, count: int, events: int) -> int:
        if samples and count:
            self._pieces.append(np.ctypeslib.as_array(samples, (count,)).copy())
        at, size = events, ctypes.sizeof(_Event)
        while (event := _Event.from_address(at)).type:
            if event.type == _WORD:
                self._events.append((event.text_position - 1, event.milliseconds))
            at += size
        return 0

    def say(self, phrase: Phrase, voice: Voice) -> tuple[np.ndarray, list[Word]]:
        """Return the sound of a phrase without the silence around it, and its words."""
        library, name = self._library, f"{voice.accent}+{voice.speaker}" if voice.speaker else voice.accent
        if library.espeak_SetVoiceByName(name.encode()):
            raise SystemExit(f"espeak-ng has no voice {name}")
        library.espeak_SetParameter(_RATE, voice.speed, 0)
        library.espeak_SetParameter(_PITCH, voice.pitch, 0)
        ctypes.CDLL(None).srand(1)  # of breath
        self._pieces.clear()
        self._events.clear()
        data = phrase.text.encode() + b"\0"
        if library.espeak_Synth(data, len(data), 0, _CHARACTERS, 0, _UTF8, None, None):
            raise SystemExit(f"espeak-ng could not speak {phrase.text!r}")
        samples = np.concatenate(self._pieces).astype(np.float32) / 32768
        loud = np.flatnonzero(np.abs(samples) > 0.02 * np.abs(samples).max())
        first, last = loud[0], loud[-1] + 1
        words = _words(phrase, self._events, (last - first) / self._rate, first / self._rate)
        return np.asarray(resample_poly(samples[first:last], RATE, self._rate), np.float32), words


def _words(phrase: Phrase, events: list[tuple[int, int]], seconds: float, before: float) -> list[Word]:
    """Return the words of events; those that espeak-ng joins to the word before divide its time."""
    found = dict(events)
    starts, at, position = [], 0, 0
    for word in phrase.words:
        starts.append(found[position] / 1000 - before if position in found else None)
        position += len(word) + 1
    starts[0] = 0.0
    known = [number for number, start in enumerate(starts) if start is not None] + [len(starts)]
    times = [*starts, seconds]
    for at, until in itertools.pairwise(known):
        first, last = times[at], times[until]
        assert first is not None and last is not None
        for number in range(at, until):
            times[number] = first + (last - first) * (number - at) / (until - at)
    bounds = np.clip(np.array(times, float), 0, seconds).tolist()
    return [Word(text, *bounds[number : number + 2]) for number, text in enumerate(phrase.words)]


def draw_voice(
    rng: random.Random, accents: tuple[str, ...] = ACCENTS, speakers: tuple[str, ...] = SPEAKERS, is_paced: bool = False
) -> Voice:
    """Return a voice; with `is_paced`, of the held-out speeds, else of the others."""
    low, high = HELD_OUT_SPEEDS
    if is_paced:
        speed = rng.randrange(low, high)
    else:
        speed = rng.choice([speed for speed in range(*SPEEDS) if not low <= speed < high])
    return Voice(rng.choice(accents), rng.choice(speakers), speed, rng.randint(*PITCHES))


class Recorded(NamedTuple):
    """A recording, and the words in it."""

    samples: np.ndarray
    words: list[Word]


def join(parts: list[tuple[np.ndarray, list[Word]]], silences: list[float]) -> Recorded:
    """Return phrases with silences, in seconds, before each and after the last."""
    pieces, words, at = [], [], 0
    for number, ((samples, own), silence) in enumerate(zip(parts, silences, strict=False)):
        gap = np.zeros(int(silence * RATE), np.float32)
        at += len(gap)
        start = at / RATE
        words += [word._replace(start=start + word.start, end=start + word.end, phrase=number) for word in own]
        pieces += [gap, samples]
        at += len(samples)
    pieces.append(np.zeros(int(silences[-1] * RATE), np.float32))
    return Recorded(np.concatenate(pieces), words)


def disturb(samples: np.ndarray, rng: np.random.Generator, noise: float = 0.6) -> np.ndarray:
    """Return the sound with another loudness, an echo, a duller or thinner tone, and noise, each in a part of cases.

    A share `noise` has noise of 8 to 40 dB below the loudest 0.1 s.
    """
    sound = samples.astype(np.float64)
    if rng.random() < 0.3:  # a room
        count = int(RATE * rng.uniform(0.05, 0.25))
        echo = rng.standard_normal(count) * np.exp(-6 * np.arange(count) / count) * rng.uniform(0.02, 0.12)
        echo[0] = 1.0
        sound = fftconvolve(sound, echo)[: len(samples)]
    if rng.random() < 0.5:  # a tone: one coefficient of the sample before
        sound[1:] = sound[1:] + rng.uniform(-0.6, 0.6) * sound[:-1]
    step = RATE // 10
    cut = np.pad(sound, (0, -len(sound) % step)).reshape(-1, step)
    loudest = max(float(np.sqrt((cut**2).mean(axis=1).max())), 1e-4)
    if rng.random() < noise:
        hiss = rng.standard_normal(len(sound) + 64)
        width = int(rng.choice((1, 2, 8, 32)))  # white to dull
        hiss = np.convolve(hiss, np.ones(width), "same")[: len(sound)]
        sound = sound + hiss / hiss.std() * loudest * 10 ** (-rng.uniform(8, 40) / 20)
    peak = max(float(np.abs(sound).max()), 1e-4)
    return (sound / peak * 10 ** (-rng.uniform(0.5, 26) / 20)).astype(np.float32)


class Window(NamedTuple):
    """The input of the recogniser and the words in it, with times from the window's beginning."""

    bands: np.ndarray  # float16[NUM_MELS, NUM_FRAMES]
    words: list[Word]  # that end within it
    cut: Word | None  # that the window's end divides
    is_cut: bool  # whether its last phrase goes on after it


class Speaker:
    """Draws recordings and windows."""

    def __init__(self, espeak: Espeak) -> None:
        self._espeak, self._mel = espeak, LogMel(NUM_MELS, NUM_FRAMES)

    def recording(
        self, rng: random.Random, voice: Voice, draw: Callable[[random.Random], Phrase], count: int
    ) -> Recorded:
        """Return `count` phrases of one voice, with pauses."""
        parts = [self._espeak.say(draw(rng), voice) for _ in range(count)]
        return join(parts, [rng.uniform(0.02, 0.5), *(rng.uniform(*PAUSES) for _ in parts)])

    def short(self, rng: random.Random, voice: Voice, draw: Callable[[random.Random], Phrase]) -> Recorded:
        """Return a phrase in a recording of at most a window's length."""
        while True:
            samples, words = self._espeak.say(draw(rng), voice)
            room = WINDOW_SECONDS - len(samples) / RATE - 0.02
            if room >= 0:
                before = rng.uniform(0, min(0.5, room)) if rng.random() < 0.7 else rng.uniform(0, room)
                return join([(samples, words)], [before, rng.uniform(0.0, min(0.6, room - before))])

    def windows(self, seed: int) -> Iterator[Window]:
        """Yield windows of training without end."""
        number = 0
        while True:
            rng = random.Random(f"spoken {seed} {number}")
            noise = np.random.default_rng(rng.getrandbits(32))
            voice, number = draw_voice(rng), number + 1
            kind = rng.random()
            if kind < BLANK_SHARE:
                level = noise.choice((0.0, 1e-4, 1e-3, 1e-2))
                samples = noise.standard_normal(int(RATE * rng.uniform(0.1, WINDOW_SECONDS))) * level
                yield next(windows_of(self._mel, Recorded(samples.astype(np.float32), []), rng))
                continue
            if kind < BLANK_SHARE + SHORT_SHARE:
                recorded = self.short(rng, voice, draw_phrase)
            else:
                recorded = self.recording(rng, voice, draw_phrase, rng.randint(2, 4))
            yield from windows_of(self._mel, recorded._replace(samples=disturb(recorded.samples, noise)), rng)


def windows_of(mel: LogMel, recorded: Recorded, rng: random.Random) -> Iterator[Window]:
    """Yield a recording's windows: each begins, as those of the engine, at the end of the phrase that is written last.

    Later windows begin up to 0.06 s earlier or later, as the engine's do after a wrong timestamp.
    """
    made, at = mel.recording(recorded.samples), 0
    while at < made.num_frames:
        start, end = at * HOP / RATE, (at + NUM_FRAMES) * HOP / RATE
        inside = [word for word in recorded.words if word.end <= end and word.start + word.end > 2 * start]
        cut = next((word for word in recorded.words if word.end > end), None)
        is_cut = cut is not None and bool(inside) and cut.phrase == inside[-1].phrase
        own = [_moved(word, start) for word in inside]
        bands = made.window(at).bands.astype(np.float16)
        if own or cut is None or cut.start >= end:
            yield Window(bands, own, None if cut is None else _moved(cut, start), is_cut)
        if cut is None:
            return
        phrases = {word.phrase for word in inside}
        whole = [word for word in inside if not (is_cut and word.phrase == cut.phrase and len(phrases) > 1)]
        until = whole[-1].end if whole else max(start, cut.start - rng.uniform(0.1, 0.3))
        at = max(at + 1, round((until + rng.uniform(-0.04, 0.06)) * RATE / HOP))


def _moved(word: Word, start: float) -> Word:
    return word._replace(start=max(0.0, word.start - start), end=word.end - start)


class Spoken(NamedTuple):
    """A recording of the evaluation, and its phrase's kind."""

    kind: str
    recorded: Recorded

    @property
    def text(self) -> str:
        return " ".join(word.text for word in self.recorded.words)


def held_out(
    seed: int,
    count: int,
    accents: tuple[str, ...] = ACCENTS,
    speakers: tuple[str, ...] = HELD_OUT_SPEAKERS,
    noise: float = 0.6,
    phrases: int = 1,
) -> Iterator[Spoken]:
    """Yield recordings of held-out phrases at held-out speeds, disturbed as those of the training.

    With `phrases`, each has that number of phrases, with pauses, and may be longer than a window.
    """
    speaker = Speaker(Espeak())
    for number in range(count):
        rng = random.Random(f"held out {seed} {number}")
        draws, kinds = np.random.default_rng(rng.getrandbits(32)), list[str]()

        def draw(rng: random.Random, kinds: list[str] = kinds) -> Phrase:
            phrase = draw_phrase(rng, held_out=True)
            kinds.append(phrase.kind)
            return phrase

        voice = draw_voice(rng, accents, speakers, is_paced=True)
        if phrases == 1:
            recorded = speaker.short(rng, voice, draw)
        else:
            recorded = speaker.recording(rng, voice, draw, phrases)
        yield Spoken(kinds[-1], recorded._replace(samples=disturb(recorded.samples, draws, noise)))


def held_out_windows(seed: int, count: int) -> list[Window]:
    """Return the windows of held-out recordings."""
    mel = LogMel(NUM_MELS, NUM_FRAMES)
    return [next(windows_of(mel, each.recorded, random.Random(0))) for each in held_out(seed, count)]


def wav_of(samples: np.ndarray) -> bytes:
    """Return a WAV file of 8 bits, the smallest that the engine reads."""
    file = io.BytesIO()
    with wave.open(file, "wb") as written:
        written.setnchannels(1)
        written.setsampwidth(1)
        written.setframerate(RATE)
        written.writeframes(np.clip(np.rint(samples * 128 + 128), 0, 255).astype(np.uint8).tobytes())
    return file.getvalue()


def main() -> None:
    """Write held-out recordings, and their texts, to a folder."""
    parser = argparse.ArgumentParser(prog="python -m training.spoken", description="Speak held-out phrases.")
    parser.add_argument("--out", type=Path, required=True, help="folder to write WAV and text files to")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=10)
    parser.add_argument("--phrases", type=int, default=1, help="of a recording, with pauses (default: 1)")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for number, each in enumerate(held_out(options.seed, options.count, phrases=options.phrases)):
        (options.out / f"{number}.wav").write_bytes(wav_of(each.recorded.samples))
        (options.out / f"{number}.txt").write_text(f"{each.text}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
