"""Incremental detokenization: text that later tokens cannot change. Steps are pure, so that an engine can roll back."""

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
    """The detokenization state of a request.

    Output text is the part of `decode(prompt + output)` not made of prompt tokens alone: with the space before the
    first word, and a character that the prompt began.
    """

    params: SamplingParams
    pending: bytes = b""  # of an incomplete character
    prompt_bytes: int = 0  # of `pending` or `run`, from the prompt
    is_start: bool = True
    is_broken: bool = False  # inside an invalid run of byte-fallback tokens
    run: tuple[bytes, ...] = ()  # valid run of byte-fallback tokens, with `pending` (`_longer`)
    follows_added: bool = False  # after an added token, where spaces are omitted


def begin(tokenizer: Tokenizer, prompt_ids: Sequence[int], params: SamplingParams) -> Detokenizer:
    """Return the state after a prompt; reads only last tokens, whose text can change."""
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
            break  # the most of an incomplete UTF-8 character
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
    """Process new output tokens; return the next state and the final text.

    The texts of all calls and of `finish` concatenate to the output's. Withholds incomplete characters, and valid runs
    of byte-fallback tokens: one invalid byte turns the whole run into U+FFFD.
    """
    skipped = _skipped(tokenizer, state.params)
    shown = [token_id for token_id in new_ids if token_id not in skipped]
    pieces = map(tokenizer.piece, shown)
    if tokenizer.decoding.byte_tokens == "level":
        return _advance_bytes(state, tokenizer.decoding, b"".join(pieces))  # type: ignore[arg-type]
    text: list[str] = []
    strip = tokenizer.decoding.strip
    # As in vLLM: between output tokens, for added ones, if special tokens are shown.
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
        # The text's start is stripped; tokens without text do not count.
        if state.is_start and not (strip and not piece[1]):
            state = Detokenizer(state.params, is_start=False)
        if state.follows_added != is_added:
            state = replace(state, follows_added=is_added)
    return state, "".join(text)


def finish(state: Detokenizer, tokenizer: Tokenizer) -> str:
    if tokenizer.decoding.byte_tokens == "level":
        return _UNKNOWN_CHARACTER if len(state.pending) > state.prompt_bytes else ""
    return _settle_run(state, tokenizer.decoding.strip)


def _skipped(tokenizer: Tokenizer, params: SamplingParams) -> frozenset[int]:
    return tokenizer.special_ids if params.skip_special_tokens else frozenset()


def _advance_bytes(state: Detokenizer, decoding: Decoding, new: bytes) -> tuple[Detokenizer, str]:
    """Do `advance` for byte-level vocabularies, where invalid bytes become U+FFFD."""
    if not new:
        return state, ""
    buffer = state.pending + new
    text, settled = _decode_settled(buffer)
    if state.prompt_bytes and _unfinished(buffer[: state.prompt_bytes + 1]) is None:
        text = text[1:]  # that U+FFFD is the prompt's
    if state.is_start and decoding.strip and text:
        text = text.removeprefix(decoding.strip)
    if settled == len(buffer) and not state.pending and not state.is_start:
        return state, text
    prompt_bytes = 0 if settled else state.prompt_bytes
    is_start = state.is_start and not settled
    return Detokenizer(state.params, buffer[settled:], prompt_bytes, is_start), text


def _extend_run(state: Detokenizer, piece: bytes) -> tuple[Detokenizer, str]:
    """Extend a run of byte-fallback tokens; its text is final only once it is invalid."""
    if state.is_broken:
        return state, _UNKNOWN_CHARACTER * len(piece)
    unfinished = _unfinished(state.pending + piece)
    if unfinished is None:
        broken = Detokenizer(state.params, is_start=False, is_broken=True)
        return broken, _UNKNOWN_CHARACTER * (sum(map(len, state.run)) + len(piece) - state.prompt_bytes)
    run = _longer(state.run, piece)
    return Detokenizer(state.params, unfinished, state.prompt_bytes, state.is_start, run=run), ""


def _longer(run: tuple[bytes, ...], piece: bytes) -> tuple[bytes, ...]:
    """Append to parts of decreasing length: each byte is copied O(log n) times."""
    while run and len(run[-1]) <= len(piece):
        run, piece = run[:-1], run[-1] + piece
    return (*run, piece) if piece else run


def _decode_settled(data: bytes) -> tuple[str, int]:
    text, settled = codecs.utf_8_decode(data, "replace", False)
    if _begins_surrogate(data[settled:]):
        return text + 2 * _UNKNOWN_CHARACTER, len(data)
    return text, settled


def _unfinished(data: bytes) -> bytes | None:
    try:
        _, settled = codecs.utf_8_decode(data, "strict", False)
    except UnicodeDecodeError:
        return None
    rest = data[settled:]
    return None if _begins_surrogate(rest) else rest


def _begins_surrogate(rest: bytes) -> bool:
    """Detect surrogates, which CPython treats as incomplete."""
    return rest[:1] == b"\xed" and rest[1:2] >= b"\xa0"


def _settle_run(state: Detokenizer, strip: str) -> str:
    """Return an ended run's text after the prompt's bytes; if it is not UTF-8, U+FFFD per byte, as `ByteFallback`."""
    run = b"".join(state.run)
    try:
        text = run.decode()
    except UnicodeDecodeError:
        return _UNKNOWN_CHARACTER * (len(run) - state.prompt_bytes)
    start = len(run[: state.prompt_bytes].decode(errors="ignore"))
    if state.is_start and strip and text.startswith(strip):
        start = max(start, 1)
    return text[start:]
