"""Token ids to text as they come: what no later token can change, and what must be held back.

A pure step over a frozen state, so that an engine can keep one state per request and roll back. Knows what tokens and
decoder of a tokenizer give (tokenizer.py); of a request it uses the sampling parameters only.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxllm.sampling_params import SamplingParams
    from jaxllm.text.tokenizer import Decoding, Tokenizer

_UNKNOWN_CHARACTER = "\ufffd"


@dataclass(frozen=True, slots=True)
class Detokenizer:
    """Where the text of a request stands: what `advance` needs to know of the tokens before.

    The text of an output is what a reader sees grow behind the prompt: of `decode(prompt + output)`, every character
    that is not made of the prompt's tokens alone. So the space before a first word is kept, and a character begun by
    the prompt and completed by the output belongs to the output.
    """

    params: SamplingParams
    pending: bytes = b""  # of a character that is not finished
    prompt_bytes: int = 0  # how many of them, or of the run, are the prompt's
    is_start: bool = True  # nothing of the whole text has been decided yet
    is_broken: bool = False  # within a run of byte-fallback tokens that can no longer be valid
    run: tuple[bytes, ...] = ()  # the bytes of such a run that is still valid, with those that are pending (`_longer`)
    follows_added: bool = False  # the last token of the output was an added one; known where spaces are left out


def begin(tokenizer: Tokenizer, prompt_ids: Sequence[int], params: SamplingParams) -> Detokenizer:
    """Return the state after a prompt. Reads back only as far as the prompt's end is undecided: a token or two."""
    decoding, skipped = tokenizer.decoding, _skipped(tokenizer, params)
    tail: list[bytes] = []
    is_start = True
    for token_id in reversed(prompt_ids):
        piece = b"" if token_id in skipped else tokenizer.piece(token_id)
        if not isinstance(piece, bytes):
            if decoding.strip and not piece[1]:
                continue
            is_start = False
            break
        tail.append(piece)
        if decoding.byte_tokens == "level" and sum(map(len, tail)) >= 3:
            break  # a UTF-8 character has four bytes: an unfinished one at most three
    joined = b"".join(reversed(tail))
    if decoding.byte_tokens == "level":
        pending = joined[-3:]
        pending = pending[_decode_settled(pending)[1] :]
        return Detokenizer(params, pending, len(pending), is_start=not joined)
    unfinished = _unfinished(joined)
    if unfinished is None:
        return Detokenizer(params, is_start=False, is_broken=True)
    return Detokenizer(params, unfinished, len(joined), is_start, run=_longer((), joined))


def advance(state: Detokenizer, tokenizer: Tokenizer, new_ids: Iterable[int]) -> tuple[Detokenizer, str]:
    """Take in new output tokens; give the next state and the text that no later token can change.

    The texts of all calls and of `finish` together are the output's text, for any ids whatever. Held back are only: an
    unfinished character; and with byte-fallback tokens the current run of them while it is valid, because one invalid
    byte turns all of a run into U+FFFD. The cost of a token does not depend on the text's length: 1 to 4 µs on one
    core, measured.
    """
    skipped = _skipped(tokenizer, state.params)
    shown = [token_id for token_id in new_ids if token_id not in skipped]
    pieces = map(tokenizer.piece, shown)
    if tokenizer.decoding.byte_tokens == "level":
        return _advance_bytes(state, tokenizer.decoding, b"".join(pieces))  # type: ignore[arg-type]
    text: list[str] = []
    strip = tokenizer.decoding.strip
    # As in vLLM, for any added token, between tokens of the output only, and only where special ones are shown.
    spaced = state.params.spaces_between_special_tokens or state.params.skip_special_tokens
    for token_id, piece in zip(shown, pieces, strict=True):
        if isinstance(piece, bytes):
            state, delta = _extend_run(state, piece)
            text.append(delta)
            continue
        if state.run or state.is_broken:
            text.append(_settle_run(state, strip))
            state = Detokenizer(state.params, is_start=False)
        is_added = not spaced and token_id in tokenizer.added_ids
        if is_added and state.follows_added:
            text.append(tokenizer.token(token_id))
        else:
            text.append(piece[0] if state.is_start else piece[1])
        # The decoder strips the text, not the first token: one without text leaves that to the next.
        if state.is_start and not (strip and not piece[1]):
            state = Detokenizer(state.params, is_start=False)
        if state.follows_added != is_added:
            state = replace(state, follows_added=is_added)
    return state, "".join(text)


def finish(state: Detokenizer, tokenizer: Tokenizer) -> str:
    """Give the text that was held back, now that no token follows."""
    if tokenizer.decoding.byte_tokens == "level":
        return _UNKNOWN_CHARACTER if len(state.pending) > state.prompt_bytes else ""
    return _settle_run(state, tokenizer.decoding.strip)


def _skipped(tokenizer: Tokenizer, params: SamplingParams) -> frozenset[int]:
    return tokenizer.special_ids if params.skip_special_tokens else frozenset()


def _advance_bytes(state: Detokenizer, decoding: Decoding, new: bytes) -> tuple[Detokenizer, str]:
    """`advance` where every token is bytes of UTF-8 and invalid bytes read U+FFFD."""
    if not new:
        return state, ""
    buffer = state.pending + new
    text, settled = _decode_settled(buffer)
    if state.prompt_bytes and _unfinished(buffer[: state.prompt_bytes + 1]) is None:
        text = text[1:]  # the output broke the prompt's last character: that U+FFFD is the prompt's
    if state.is_start and decoding.strip and text:
        text = text.removeprefix(decoding.strip)
    if settled == len(buffer) and not state.pending and not state.is_start:
        return state, text
    prompt_bytes = 0 if settled else state.prompt_bytes
    is_start = state.is_start and not settled
    return Detokenizer(state.params, buffer[settled:], prompt_bytes, is_start), text


def _extend_run(state: Detokenizer, piece: bytes) -> tuple[Detokenizer, str]:
    """Add to a run of byte-fallback tokens. Only a run that cannot become valid any more has a certain text."""
    if state.is_broken:
        return state, _UNKNOWN_CHARACTER * len(piece)
    unfinished = _unfinished(state.pending + piece)
    if unfinished is None:
        broken = Detokenizer(state.params, is_start=False, is_broken=True)
        return broken, _UNKNOWN_CHARACTER * (sum(map(len, state.run)) + len(piece) - state.prompt_bytes)
    run = _longer(state.run, piece)
    return Detokenizer(state.params, unfinished, state.prompt_bytes, state.is_start, run=run), ""


def _longer(run: tuple[bytes, ...], piece: bytes) -> tuple[bytes, ...]:
    """Add to a run that is kept in parts of falling length, so that a byte is copied a logarithmic number of times.

    As one string all of it was copied with every token: 6 µs of a token's time behind 64,000 and not 2.
    """
    while run and len(run[-1]) <= len(piece):
        run, piece = run[:-1], run[-1] + piece
    return (*run, piece) if piece else run


def _decode_settled(data: bytes) -> tuple[str, int]:
    """Decode UTF-8 up to an unfinished last character; give the text and the number of bytes it is made of."""
    text, settled = codecs.utf_8_decode(data, "replace", False)
    if _begins_surrogate(data[settled:]):
        return text + 2 * _UNKNOWN_CHARACTER, len(data)
    return text, settled


def _unfinished(data: bytes) -> bytes | None:
    """Give the unfinished character at the end of UTF-8, or None where no more bytes can make it valid."""
    try:
        _, settled = codecs.utf_8_decode(data, "strict", False)
    except UnicodeDecodeError:
        return None
    rest = data[settled:]
    return None if _begins_surrogate(rest) else rest


def _begins_surrogate(rest: bytes) -> bool:
    """Recognize the one kind of rest that CPython takes for unfinished although no third byte makes it valid UTF-8."""
    return rest[:1] == b"\xed" and rest[1:2] >= b"\xa0"


def _settle_run(state: Detokenizer, strip: str) -> str:
    """Give the output's part of a finished run of byte-fallback tokens.

    All or nothing, as the decoder `ByteFallback` of huggingface/tokenizers does it: the run is valid UTF-8, or each of
    its bytes becomes one U+FFFD.
    """
    run = b"".join(state.run)
    try:
        text = run.decode()
    except UnicodeDecodeError:
        return _UNKNOWN_CHARACTER * (len(run) - state.prompt_bytes)
    start = len(run[: state.prompt_bytes].decode(errors="ignore"))
    if state.is_start and strip and text.startswith(strip):
        start = max(start, 1)
    return text[start:]
