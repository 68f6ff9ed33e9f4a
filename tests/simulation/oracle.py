"""What each sample of a request must be, whatever happens around it: its tokens, its text and its end.

Everything here is a function of the request alone, and written as simply as it can be: text is decoded from the
beginning each time, stop strings are looked for in the whole text.
"""

from __future__ import annotations

import codecs
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
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
_PARTS = [bytes([byte]) for byte in b"\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80\xff"]  # of characters
PIECES = (_TEXTS + _PARTS + [f"<{number}>".encode() for number in range(VOCABULARY)])[:VOCABULARY]
EVERY = _MASK = 2**64 - 1  # a bit for each token of the vocabulary
LONGEST_RUN = 20  # tokens that a grammar forces at once
LEAST_FORCED = 2  # tokens that a grammar must force to be taken unsampled
_SPREAD = 0x9E3779B97F4A7C15


def _likely() -> tuple[int, ...]:
    """Make the 256 tokens among which a hash chooses: few letters, so that stop strings and repetitions come about."""
    a, b = PIECES.index(b"a"), PIECES.index(b"b")
    e_acute = [PIECES.index(b"\xc3"), PIECES.index(b"\xa9")]
    usual = [a] * 60 + [b] * 50 + e_acute * 12 + [EOS] * 5 + [BEGIN] * 3
    return tuple((usual + list(range(2, VOCABULARY)) * 3)[:256])


LIKELY = _likely()
_LETTERS = sum(1 << PIECES.index(piece) for piece in (b"a", b"b", b" ", b"\xc3", b"\xa9"))
_USUAL = EVERY & ~sum(1 << token for token in SPECIAL)


def mix(value: int, token: int) -> int:
    """Continue a chain of hashes."""
    value = ((value ^ (token + 1)) * _SPREAD) & _MASK
    return value ^ (value >> 29)


def logprob(chain: int, token: int) -> float:
    """The log-probability of a token behind a sequence; a float32 holds it exactly."""
    return -(mix(chain, token) % 1000) / 64


class BrokenTextError(RuntimeError):
    """What the tokenizer raises for what it is made to fail at."""


class Tokenizer:
    """Every token is bytes. One of them, if it `is_broken`, has no text: asking for it raises."""

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
        return False  # its stop strings are drawn from letters

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
    """Write what the device must be told of a sample."""
    stops = set(params.stop_token_ids) | (set() if params.ignore_eos else {EOS})
    min_tokens = params.min_tokens if params.structured_outputs is None else 0  # the masks see to that
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
    """How far an output has come in a grammar: all of that is a hash of the grammar and of the output's tokens."""

    number: int  # the hash since the grammar began; its lowest bits are the grammar's
    forced: tuple[int, ...] = ()  # tokens that must come next
    marker: int | None = None  # it constrains nothing before this token
    has_failed: bool = False

    @classmethod
    def begin(cls, asked: StructuredOutputsParams) -> Place:
        """Return where an output begins."""
        if asked.begin_after is not None:
            return cls(seed_of(asked), marker=PIECES.index(asked.begin_after.encode()))
        return cls._reach(_continued(seed_of(asked), 0))

    @classmethod
    def _reach(cls, number: int, last: int = EOS) -> Place:
        """Decide by the hash alone what comes next; some grammars often fail behind what most stop strings end in."""
        draw = mix(number, VOCABULARY + 1) >> 16
        if draw % 256 == 1 or (last == PIECES.index(b"b") and not number & 3 and draw >> 16 & 1):
            return cls(number, has_failed=True)
        if draw % 8:
            return cls(number)
        run = (LIKELY[mix(draw, at) >> 16 & 255] for at in range(1 + (draw >> 8) % LONGEST_RUN))
        return cls(number, tuple(PIECES.index(b"b") if token in SPECIAL else token for token in run))

    def after(self, token: int) -> Place:
        """Return where the output is behind one more token."""
        if self.has_failed:
            return self
        if self.marker is not None:
            return self._reach(_continued(self.number, 0)) if token == self.marker else self
        if not self.allowed() >> token & 1:
            return self._replace(has_failed=True)
        number = _continued(self.number, token)
        return Place(number, self.forced[1:]) if len(self.forced) > 1 else self._reach(number, token)

    def allowed(self) -> int:
        """Return the tokens that may come next, a bit for each; none where the output cannot go on."""
        if self.has_failed:
            return 0
        if self.marker is not None:
            return EVERY
        if self.forced:
            return 1 << self.forced[0]
        draw = mix(self.number, VOCABULARY) >> 16
        kind, end = draw % 32, int(draw >> 8 & 7 == 0) << EOS
        if kind == 0:  # the end must come; or nothing can
            return 0 if draw >> 16 & 3 == 0 else 1 << EOS
        if kind < 14:
            return _USUAL | end
        return end | (_LETTERS if kind < 24 else mix(draw, 1) & mix(draw, 2) & _USUAL)


def _continued(number: int, token: int) -> int:
    """Continue a hash that keeps its two lowest bits."""
    return mix(number, token) & ~3 | number & 3


def seed_of(asked: StructuredOutputsParams) -> int:
    """Return which toy is asked for."""
    assert asked.regex is not None
    return int(asked.regex.removeprefix("toy"))


@dataclass(frozen=True)
class Outcome:
    """How a sample ends if nothing happens to it."""

    tokens: tuple[int, ...]
    text: str
    reason: str
    stop_reason: int | str | None


class Truth:
    """One sample. `root` names those with whom it may share blocks; `weights` is the content of its adapter, 0: none.

    Both stand before every link of its chain, so that neither a token nor a place of the cache is that of another's.
    """

    version = 0  # grows when it becomes another sequence, as a beam does

    def __init__(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        seed: int,
        root: int,
        limit: int,
        is_broken: bool,
        weights: int = 0,
    ) -> None:
        self.params = params
        self.weights = weights
        self.prompt = tuple(prompt)
        self.seed = seed
        self.limit = limit
        self.num_prompt = len(self.prompt)
        self.row_bytes = row_of(params, seed, self.num_prompt).tobytes()
        asked = params.structured_outputs
        # A grammar's end is an end even where `ignore_eos` is: it comes only where nothing else may.
        self._ignores_eos = params.ignore_eos and asked is None
        self.stop_ids = frozenset(params.stop_token_ids) | (frozenset() if self._ignores_eos else {EOS})
        self.has_extras = bool(params.logit_bias or params.allowed_token_ids)
        self.reads_history = bool(
            params.repetition_penalty != 1.0 or params.presence_penalty or params.frequency_penalty
        )
        penalized = self.has_extras or self.reads_history
        filtered = params.top_k or params.top_p < 1 or params.min_p or params.min_tokens or params.logprobs is not None
        self.variant = 3 if penalized else 2 if filtered else int(params.temperature > 0)
        self.may_fail = False  # a fault has touched it
        self.tokens = np.zeros(limit + 2, np.int32)
        self.tokens[: self.num_prompt] = self.prompt
        self.chain = np.zeros(limit + 2, np.uint64)
        self._is_broken = is_broken
        self._allowed = sorted(params.allowed_token_ids or ())
        self._allowed_mask = sum(1 << token for token in self._allowed) or EVERY
        self._place = None if asked is None else Place.begin(asked)
        self._forced: tuple[int, ...] = ()  # tokens that come next, and are not sampled
        self.masks: list[int] = []  # by output token: among which it is sampled
        self._forced_at: set[int] = set()  # output tokens that are perhaps not sampled
        self.fails_at: int | None = None  # the position where no token can be sampled
        self.has_lost_grammar = False  # a fault has ended its constraint
        bias = repr(sorted((params.logit_bias or {}).items())).encode()
        self._salted = zlib.crc32(self.row_bytes) | zlib.crc32(bias) << 32
        self._last = mix(root, VOCABULARY + weights) if weights else root  # no token's link
        links = []
        for token in self.prompt:
            self._last = mix(self._last, token)
            links.append(self._last)
        self.chain[: self.num_prompt] = links
        self.length = self.num_prompt  # tokens made so far
        self._outcome: Outcome | None = None
        self._tail: bytes | None = None  # the character that the prompt has begun and not ended

    def ensure(self, length: int) -> None:
        """Make the sequence so long."""
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
        """Whether a token of the output is given by the grammar, and perhaps not sampled."""
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
        """Choose among the tokens that the grammar allows, or take the one that it forces."""
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
            return EOS  # no request gets it: with nothing allowed it fails
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
        """Run the sample alone."""
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
        """Return after how many tokens of the output its text cannot be made; None: always can."""
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
        """Return what can be shown of `count` tokens, and the stop string that ended it.

        If final, all of it; else without what later tokens may change.
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
        """Return the text of tokens behind the prompt."""
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
                text = text[1:]  # the prompt's own
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
