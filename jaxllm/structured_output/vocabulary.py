"""A model's tokens as llguidance reads them: each with the bytes that our detokenizer gives for it.

llguidance can read a tokenizer.json by itself, but reads some otherwise: it takes every added token as "<...>" for
special, and knows no decoder without bytes. A constraint would then hold for another text than the reader's.

Knows the tokenizer; knows no grammar.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from llguidance import LLTokenizer

from jaxllm.errors import UserError
from jaxllm.text.tokenizer import NoTokenizer, Tokenizer

_ANCHOR = "\n"  # before a text, so that a tokenizer puts no space before the text itself


class Vocabulary:
    """The tokens of a model. Making it reads all of them, once."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: Collection[int]) -> None:
        if isinstance(tokenizer, NoTokenizer):
            raise UserError(
                "structured_outputs needs the tokenizer that skip_tokenizer_init left out.", "structured_outputs"
            )
        eos = sorted(token for token in eos_ids if 0 <= token < vocab_size)
        if not eos:
            raise UserError(
                "structured_outputs needs a token that ends an output, and this model names none.", "structured_outputs"
            )
        self._tokenizer = tokenizer
        self.eos_ids = frozenset(eos)
        # A token without bytes is never allowed. So are special ones: no expression can take one for text, not even a
        # negated one. llguidance allows those that end an output by their id.
        silent = tokenizer.special_ids.union(eos)
        texts = [b"" if token in silent else self.bytes_of(token) for token in range(vocab_size)]
        self.for_llguidance = LLTokenizer(_Wrapper(self, texts, eos[0]), eos_token=eos)  # type: ignore[arg-type]
        self.every = _mask(np.ones(vocab_size, bool))
        self.allowed = _mask(np.array([bool(text) for text in texts]) | np.isin(np.arange(vocab_size), eos))

    def bytes_of(self, token: int) -> bytes:
        """Give what a token reads as after other text; special ones spelled out."""
        piece = self._tokenizer.piece(token)
        return piece if isinstance(piece, bytes) else piece[1].encode()

    def encode(self, text: str) -> list[int]:
        """Give the tokens of a text in the middle of an output, as the tokenizer would write it.

        Where that is not the same text, as with one that a normalizer changes or that spells a special token, the
        longest token first.
        """
        wanted = text.encode()
        for before in ("", _ANCHOR):
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
    """What LLTokenizer asks of a tokenizer that is not its own (llguidance/_tokenizer.py)."""

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
    """Pack flags into words of 32 bits, the first token in the lowest bit."""
    padded = np.zeros(-(-len(allowed) // 32) * 32, bool)
    padded[: len(allowed)] = allowed
    return np.packbits(padded, bitorder="little").view("<i4").astype(np.int32)
