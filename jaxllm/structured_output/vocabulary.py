"""The model's tokens for llguidance, with the bytes that our detokenizer produces.

llguidance reads tokenizer.json differently: every added "<...>" is special, and decoders are byte-level only.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import cached_property

import numpy as np
from llguidance import LLTokenizer

from jaxllm import combinations
from jaxllm.errors import UserError
from jaxllm.text.tokenizer import NoTokenizer, Tokenizer

_ANCHOR = "\n"  # prevents an added space
_PRINTABLE = [bytes([code]) for code in range(0x20, 0x7F)]


class Vocabulary:
    """A model's tokens and masks; construction reads every token."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: Collection[int]) -> None:
        if isinstance(tokenizer, NoTokenizer):
            raise combinations.refusal("structured_outputs", "skip_tokenizer_init")
        eos = sorted(token for token in eos_ids if 0 <= token < vocab_size)
        if not eos:
            raise combinations.refusal("structured_outputs", combinations.NO_END)
        self._tokenizer = tokenizer
        self.eos_ids = frozenset(eos)
        # Tokens without bytes are never allowed: special ones, so that no expression matches them. llguidance allows
        # ends by id.
        silent = tokenizer.special_ids.union(eos)
        texts = [b"" if token in silent else self.bytes_of(token) for token in range(vocab_size)]
        written = set(texts)
        missing = next((each for each in _PRINTABLE if each not in written), None)
        if missing is not None:  # a dead end
            raise UserError(
                "structured_outputs needs a tokenizer that can write any text, and this one has no "
                f"{missing.decode()!r} that stands alone; choose another model.",
                "structured_outputs",
            )
        self.for_llguidance = LLTokenizer(_Wrapper(self, texts, eos[0]), eos_token=eos)  # type: ignore[arg-type]
        self.vocab_size = vocab_size
        self.unended = _mask(~np.isin(np.arange(vocab_size), eos))
        self.allowed = _mask(np.array([bool(text) for text in texts]) | np.isin(np.arange(vocab_size), eos))

    def bytes_of(self, token: int) -> bytes:
        """Return a token's bytes within a text; special tokens as spelled."""
        piece = self._tokenizer.piece(token)
        return piece if isinstance(piece, bytes) else piece[1].encode()

    def with_tokens(self, ids: Collection[int]) -> np.ndarray:
        flags = np.zeros(self.vocab_size, bool)
        flags[[each for each in ids if each < self.vocab_size]] = True
        return self.allowed | _mask(flags)

    def spelling(self, text: bytes) -> list[int]:
        """Return all tokens, with special ones, that are prefixes of `text`."""
        return [token for end in range(1, len(text) + 1) for token in self._by_bytes.get(text[:end], ())]

    @cached_property
    def _by_bytes(self) -> dict[bytes, list[int]]:
        found: dict[bytes, list[int]] = {}
        for token in range(self.vocab_size):
            if token not in self.eos_ids:
                found.setdefault(self.bytes_of(token), []).append(token)
        return found

    def encode(self, text: str) -> list[int]:
        """Tokenize a text inside an output.

        Greedy longest match if the tokenizer would change the text, or is confined and so slow.
        """
        wanted = text.encode()
        for before in ("", _ANCHOR) if self._tokenizer.confined is None else ():
            try:
                ids = self._tokenizer.encode(before + text, add_special_tokens=False)
            except UserError:
                break
            num_before = len(self._tokenizer.encode(before, add_special_tokens=False)) if before else 0
            ids = ids[num_before:]
            usual = self._tokenizer.special_ids.isdisjoint(ids)
            if usual and b"".join(map(self.bytes_of, ids)) == wanted:
                return ids
        return self.for_llguidance.greedy_tokenize(text)


class _Wrapper:
    """The interface that LLTokenizer expects (llguidance/_tokenizer.py)."""

    is_tokenizer_wrapper = True
    bos_token_id = None
    special_token_ids: tuple[int, ...] = ()

    def __init__(self, vocabulary: Vocabulary, tokens: list[bytes], eos_token_id: int) -> None:
        self._vocabulary = vocabulary
        self.tokens = tokens
        self.eos_token_id = eos_token_id

    def __call__(self, text: str) -> list[int]:
        return self._vocabulary.encode(text)


def _mask(allowed: np.ndarray) -> np.ndarray:
    padded = np.zeros(-(-len(allowed) // 32) * 32, bool)
    padded[: len(allowed)] = allowed
    return np.packbits(padded, bitorder="little").view("<i4").astype(np.int32)
