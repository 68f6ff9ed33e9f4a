"""The expected output of each sample of a request: its tokens, its text and its end.

Everything here depends on the request only, not on other requests or faults, and the code is naive: text is decoded
from the beginning each time, and stop strings are searched in the whole text.
"""

from __future__ import annotations

import codecs
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from jaxllm.errors import UserError
from jaxllm.sampling.sampler import ROW_WIDTH
from jaxllm.sampling_params import SamplingParams
from jaxllm.structured_outputs_params import StructuredOutputsParams
from jaxllm.text.tokenizer import Decoding

EOS, BEGIN, BROKEN = 0, 1, 63
VOCABULARY = 64
NUM_LOGPROBS = 5  # likeliest tokens that a step reports
SPECIAL = frozenset((EOS, BEGIN))
_TEXTS = [b"</s>", b"<s>", *(bytes([letter]) for letter in b"ab .cdefghijklmnopqrstuvwxyz"), b"ab", b"ba", b"aba"]
_PARTS = [bytes([byte]) for byte in b"\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80\xff"]  # parts of characters in UTF-8
PIECES = (_TEXTS + _PARTS + [f"<{number}>".encode() for number in range(VOCABULARY)])[:VOCABULARY]
EVERY = _MASK = 2**64 - 1  # a bit for each token of the vocabulary
LONGEST_RUN = 20  # most tokens that a grammar forces at once
LEAST_FORCED = 2  # forced tokens in a row from which they are not sampled
_SPREAD = 0x9E3779B97F4A7C15


def _likely() -> tuple[int, ...]:
    """Return the 256 tokens among which a hash chooses: mostly a and b, so that stop strings and repetitions occur."""
    a, b = PIECES.index(b"a"), PIECES.index(b"b")
    e_acute = [PIECES.index(b"\xc3"), PIECES.index(b"\xa9")]
    usual = [a] * 60 + [b] * 50 + e_acute * 12 + [EOS] * 5 + [BEGIN] * 3
    return tuple((usual + list(range(2, VOCABULARY)) * 3)[:256])


LIKELY = _likely()
_LETTERS = sum(1 << PIECES.index(piece) for piece in (b"a", b"b", b" ", b"\xc3", b"\xa9"))
_USUAL = EVERY & ~sum(1 << token for token in SPECIAL)


def mix(value: int, token: int) -> int:
    """Return the next hash of a chain of hashes."""
    value = ((value ^ (token + 1)) * _SPREAD) & _MASK
    return value ^ (value >> 29)


def logprob(chain: int, token: int) -> float:
    """Return the log-probability of a token after a sequence with this hash; float32 represents it exactly."""
    return -(mix(chain, token) % 1000) / 64


class BrokenTextError(RuntimeError):
    """An injected error of the tokenizer."""


class Tokenizer:
    """A tokenizer whose tokens are bytes. If it `is_broken`, decoding the token `BROKEN` raises."""

    decoding = Decoding("level")
    special_ids = SPECIAL
    eos_token_id = EOS
    name = "simulated"
    confined = None
    has_chat_template = False
    vocab_size = VOCABULARY

    def __init__(self) -> None:
        self.is_broken = False
        self.num_failures = 0

    def piece(self, token_id: int) -> bytes:
        if token_id == BROKEN and self.is_broken:
            self.num_failures += 1
            raise BrokenTextError("no text")
        return PIECES[token_id]

    def is_special(self, text: str) -> bool:
        return False  # stop strings consist of letters

    def token_text(self, token_id: int) -> str:
        return PIECES[token_id].decode(errors="replace")

    def raw_bytes(self, token_id: int) -> bytes:
        return PIECES[token_id]

    def check_length(self, text: str, max_model_len: int) -> None:
        if len(text) > 8 * max_model_len:
            raise UserError("too long", "prompt")

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        if "\0" in text:
            self.num_failures += 1
            raise BrokenTextError("no tokens")
        return [BEGIN] * add_special_tokens + [PIECES.index(letter.encode()) for letter in text]


def row_of(params: SamplingParams, seed: int, num_prompt: int) -> np.ndarray:
    """Return the expected sampling row of a sample."""
    stops = set(params.stop_token_ids) | (set() if params.ignore_eos else {EOS})
    min_tokens = params.min_tokens if params.structured_outputs is None else 0  # masks enforce it then
    held = sorted(stops) if min_tokens else []
    floats = (
        *(params.temperature, params.top_p, params.min_p),
        *(params.repetition_penalty, params.presence_penalty, params.frequency_penalty),
    )
    integers = (
        *(params.top_k, num_prompt, num_prompt + min_tokens),
        *(len(params.logit_bias or ()), 0, params.allowed_token_ids is not None, 0),
    )
    head = struct.pack("<6f7i2I", *floats, *integers, seed >> 32 & 0xFFFFFFFF, seed & 0xFFFFFFFF)
    row = np.full(ROW_WIDTH, VOCABULARY, np.int32)
    row[:15] = np.frombuffer(head, np.int32)
    row[15 : 15 + len(held)] = held
    return row


class Place(NamedTuple):
    """The state of a grammar after an output: a hash of the grammar and of the output's tokens decides all of it."""

    number: int  # hash since the grammar began; its two lowest bits never change
    forced: tuple[int, ...] = ()  # the next tokens, all of them forced
    marker: int | None = None  # the grammar begins after this token
    has_failed: bool = False

    @classmethod
    def begin(cls, asked: StructuredOutputsParams) -> Place:
        """Return the state before the first token."""
        if asked.begin_after is not None:
            return cls(seed_of(asked), marker=PIECES.index(asked.begin_after.encode()))
        return cls._reach(_continued(seed_of(asked), 0))

    @classmethod
    def _reach(cls, number: int, last: int = EOS) -> Place:
        """Return a state by its hash: failed, with forced tokens, or neither; some grammars often fail after a "b"."""
        draw = mix(number, VOCABULARY + 1) >> 16
        if draw % 256 == 1 or (last == PIECES.index(b"b") and not number & 3 and draw >> 16 & 1):
            return cls(number, has_failed=True)
        if draw % 8:
            return cls(number)
        run = (LIKELY[mix(draw, at) >> 16 & 255] for at in range(1 + (draw >> 8) % LONGEST_RUN))
        return cls(number, tuple(PIECES.index(b"b") if token in SPECIAL else token for token in run))

    def after(self, token: int) -> Place:
        """Return the state after one more token."""
        if self.has_failed:
            return self
        if self.marker is not None:
            return self._reach(_continued(self.number, 0)) if token == self.marker else self
        if not self.allowed() >> token & 1:
            return self._replace(has_failed=True)
        number = _continued(self.number, token)
        return Place(number, self.forced[1:]) if len(self.forced) > 1 else self._reach(number, token)

    def allowed(self) -> int:
        """Return the mask of the allowed next tokens, a bit for each; 0 where the output cannot continue."""
        if self.has_failed:
            return 0
        if self.marker is not None:
            return EVERY
        if self.forced:
            return 1 << self.forced[0]
        draw = mix(self.number, VOCABULARY) >> 16
        kind, end = draw % 32, int(draw >> 8 & 7 == 0) << EOS
        if kind == 0:  # only the end is allowed, or no token
            return 0 if draw >> 16 & 3 == 0 else 1 << EOS
        if kind < 14:
            return _USUAL | end
        return end | (_LETTERS if kind < 24 else mix(draw, 1) & mix(draw, 2) & _USUAL)


def _continued(number: int, token: int) -> int:
    """Return the next hash of a chain, with the two lowest bits unchanged."""
    return mix(number, token) & ~3 | number & 3


def seed_of(asked: StructuredOutputsParams) -> int:
    """Return the number of the requested toy grammar."""
    assert asked.regex is not None
    return int(asked.regex.removeprefix("toy"))


@dataclass(frozen=True)
class Outcome:
    """The end of a sample without faults."""

    tokens: tuple[int, ...]
    text: str
    reason: str
    stop_reason: int | str | None


class Truth:
    """The expected sequence of one sample.

    Only requests of equal `root` share blocks; `weights` is the content of the adapter, 0 without one. Both enter every
    hash of `chain`, so that tokens and contents of the cache differ between different roots or adapters.
    """

    version = 0  # number of times that the sequence was replaced, as a fork does to a beam

    def __init__(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        seed: int,
        root: int,
        limit: int,
        is_broken: bool,
        weights: int = 0,
        images: Mapping[int, int] = MappingProxyType({}),
    ) -> None:
        """`images`: contents of images' placeholders, by position; they enter the hashes."""
        self.params = params
        self.weights = weights
        self.root = root
        self.source: tuple[int, int] | None = None  # number and length, of an encoder-decoder model
        self.images = images
        self.last_places: Mapping[int, int] = {}  # of the image of each placeholder
        self.pictures: Sequence[Sequence[int]] = ()  # as `media.Image`
        self.prompt = tuple(prompt)
        self.seed = seed
        self.limit = limit
        self.num_prompt = len(self.prompt)
        self.row_bytes = row_of(params, seed, self.num_prompt).tobytes()
        asked = params.structured_outputs
        # With a grammar, EOS ends the output in spite of `ignore_eos`: it is sampled only if no other token is allowed.
        self._ignores_eos = params.ignore_eos and asked is None
        self.stop_ids = frozenset(params.stop_token_ids) | (frozenset() if self._ignores_eos else {EOS})
        self.has_extras = bool(params.logit_bias or params.allowed_token_ids)
        self.reads_history = bool(
            params.repetition_penalty != 1.0 or params.presence_penalty or params.frequency_penalty
        )
        penalized = self.has_extras or self.reads_history
        filtered = params.top_k or params.top_p < 1 or params.min_p or params.min_tokens or params.logprobs is not None
        self.variant = 3 if penalized else 2 if filtered else int(params.temperature > 0)
        self.may_fail = False  # a fault may have ended it
        self.tokens = np.zeros(limit + 2, np.int32)
        self.tokens[: self.num_prompt] = self.prompt
        self.chain = np.zeros(limit + 2, np.uint64)
        self._is_broken = is_broken
        self._allowed = sorted(params.allowed_token_ids or ())
        self._allowed_mask = sum(1 << token for token in self._allowed) or EVERY
        self._place = None if asked is None else Place.begin(asked)
        self._forced: tuple[int, ...] = ()  # the next tokens, which are not sampled
        self.masks: list[int] = []  # by output token: the tokens among which it is sampled
        self._forced_at: set[int] = set()  # indices of output tokens that may be forced instead of sampled
        self.fails_at: int | None = None  # the position where no token can be sampled
        self.has_lost_grammar = False  # a fault has ended its constraint
        bias = repr(sorted((params.logit_bias or {}).items())).encode()
        self._salted = zlib.crc32(self.row_bytes) | zlib.crc32(bias) << 32
        self._last = mix(root, VOCABULARY + weights) if weights else root  # hash before the first token
        links = []
        for position, token in enumerate(self.prompt):
            self._last = mix(self._last, token)
            self._last = mix(self._last, images[position]) if position in images else self._last
            links.append(self._last)
        self.chain[: self.num_prompt] = links
        self.length = self.num_prompt  # tokens computed so far
        self._outcome: Outcome | None = None
        self._tail: bytes | None = None  # bytes of an incomplete character at the end of the prompt

    def ensure(self, length: int) -> None:
        """Compute the sequence up to `length` tokens."""
        while self.length < length:
            token = self._next()
            self.tokens[self.length] = token
            self._last = mix(self._last, token)
            self.chain[self.length] = self._last
            self.length += 1

    @property
    def is_constrained(self) -> bool:
        return self._place is not None

    def is_forced(self, position: int) -> bool:
        """Whether the grammar forces the token at a position, so that it may be accepted without sampling."""
        return position - self.num_prompt in self._forced_at

    def _next(self) -> int:
        number = mix(self._last ^ self._salted, self.length)
        if self._place is not None:
            return self._follow(self._place, number)
        if self._allowed:
            return self._allowed[number % len(self._allowed)]
        token = LIKELY[number & 255]
        if self.length < self.num_prompt + self.params.min_tokens:
            while token in self.stop_ids:
                token = (token + 1) % VOCABULARY
        return token

    def _follow(self, place: Place, number: int) -> int:
        """Return the next token: the one that the grammar forces, or a choice among those that it allows."""
        if self._forced:
            token, *rest = self._forced
            self._forced, self._place = tuple(rest), place.after(token)
            self._forced_at.add(len(self.masks))
            self.masks.append(1 << token)
            return token
        params = self.params
        held = self.stop_ids if len(self.masks) < params.min_tokens else frozenset()
        held |= {EOS} if params.ignore_eos else frozenset()
        mask = place.allowed()
        mask = mask & ~sum(1 << token for token in held) or mask
        self.masks.append(mask)
        choices = mask & self._allowed_mask
        if not choices:
            self.fails_at = self.length if self.fails_at is None else self.fails_at
            return EOS  # never returned: the request fails here
        token = next(each for at in range(256) if choices >> (each := LIKELY[(number + at) & 255]) & 1)
        self._place = place = place.after(token)
        if token not in self.stop_ids and params.logprobs is None and place.marker is None and not place.has_failed:
            stops = [at for at, each in enumerate(place.forced) if each in self.stop_ids]
            run = place.forced[: stops[0]] if stops else place.forced
            self._forced = run if len(run) >= LEAST_FORCED else ()
        return token

    def output(self, count: int) -> tuple[int, ...]:
        """Return the first `count` tokens of the output."""
        self.ensure(self.num_prompt + count)
        return tuple(self.tokens[self.num_prompt : self.num_prompt + count].tolist())

    def outcome(self) -> Outcome:
        """Return the end of the sample without faults."""
        if self._outcome is None:
            self._outcome = self._alone()
        return self._outcome

    def _alone(self) -> Outcome:
        params, most = self.params, self.limit - self.num_prompt
        tokens: list[int] = []
        for count in range(1, most + 1):
            self.ensure(self.num_prompt + count)
            if self.fails_at == self.num_prompt + count - 1:
                return self._ended(tokens, "error", None)
            token = int(self.tokens[self.num_prompt + count - 1])
            tokens.append(token)
            if token in self.stop_ids:
                is_end = token == EOS and not self._ignores_eos
                return self._ended(tokens, "stop", None if is_end else token, skip_last=True)
            if count == most:
                return self._ended(tokens, "length", None)
            repeats = count >= params.min_tokens and _repeats(tokens, params)
            if params.stop:
                text, matched = self.text(count, is_final=repeats)
                if matched is not None:
                    return Outcome(tuple(tokens), text, "stop", matched)
            if repeats:
                return self._ended(tokens, "repetition", "repetition_detected")
        raise AssertionError("a limit leaves room for a token")

    def _ended(self, tokens: list[int], reason: str, stop: int | str | None, skip_last: bool = False) -> Outcome:
        if reason == "error":
            return Outcome(tuple(tokens), "", reason, stop)
        text, matched = self.text(len(tokens) - skip_last, is_final=True)
        if matched is not None and not skip_last:
            reason, stop = "stop", matched
        return Outcome(tuple(tokens), text, reason, stop)

    def breaks_at(self) -> int | None:
        """Return the number of output tokens after which decoding raises; None if it never does."""
        if not self._is_broken or not self.params.detokenize:
            return None
        outcome = self.outcome()
        is_read = (
            outcome.tokens[:-1]
            if outcome.reason == "stop" and not isinstance(outcome.stop_reason, str)
            else outcome.tokens
        )
        return is_read.index(BROKEN) + 1 if BROKEN in is_read else None

    def text(self, count: int, is_final: bool) -> tuple[str, str | None]:
        """Return the text of `count` tokens that is shown, and the stop string that ended it.

        Unless `is_final`, the text leaves out characters that later tokens may change or make part of a stop string.
        """
        params = self.params
        if not params.detokenize:
            return "", None
        least = min(params.min_tokens, count)
        free = self._decoded(least, is_final and count <= least)
        whole = self._decoded(count, is_final)
        rest = whole[len(free) :]
        if not params.stop:
            return whole, None
        found = [(rest.find(stop) + len(stop), rest.find(stop), stop) for stop in params.stop if stop in rest]
        if found:
            _, start, stop = min(found)
            return free + rest[:start] + (stop if params.include_stop_str_in_output else ""), stop
        if not is_final:
            held = max(
                (size for stop in params.stop for size in range(len(stop)) if rest.endswith(stop[:size])), default=0
            )
            rest = rest[: len(rest) - held]
        return free + rest, None

    def _decoded(self, count: int, is_final: bool) -> str:
        return self.decoded(self.output(count), is_final)

    def decoded(self, tokens: Sequence[int], is_final: bool) -> str:
        """Return the text of tokens after the prompt."""
        skipped = SPECIAL if self.params.skip_special_tokens else frozenset()
        new = b"".join([PIECES[token] for token in tokens if token not in skipped])
        if not new:
            return ""
        if self._tail is None:
            decoder = codecs.getincrementaldecoder("utf-8")("replace")
            decoder.decode(b"".join([PIECES[token] for token in self.prompt if token not in skipped]))
            self._tail = decoder.getstate()[0]
        tail = self._tail
        text = codecs.getincrementaldecoder("utf-8")("replace").decode(tail + new, is_final)
        if tail:
            try:
                codecs.getincrementaldecoder("utf-8")("strict").decode(tail + new[:1])
            except UnicodeDecodeError:
                text = text[1:]  # the incomplete character of the prompt
        return text


def _repeats(tokens: list[int], params: SamplingParams) -> bool:
    rule = params.repetition_detection
    if rule is None:
        return False
    for size in range(max(1, rule.min_pattern_size), rule.max_pattern_size + 1):
        end = tokens[-size * rule.min_count :]
        if len(end) == size * rule.min_count and end == end[-size:] * rule.min_count:
            return True
    return False
