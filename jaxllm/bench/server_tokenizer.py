"""A server's own tokenizer, asked over its protocol: for prompts of a model whose files are not on this machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jaxllm.bench.datasets import poem

_LINES = 40  # of text, whose tokens are the ones to draw from: there is no list of all to ask for


class ServerTokenizer:
    """The tokenizer that prompts are made with (`datasets.Coder`), each call a request to the server."""

    def __init__(self, encode: Callable[[str, bool], list[int]], decode: Callable[[Sequence[int]], str]) -> None:
        self._encode, self._decode = encode, decode
        lines = list(poem())
        shown = lines[:: len(lines) // _LINES]
        self.ids: Sequence[int] = sorted({token for line in shown for token in encode(line, False)})

    def is_text(self, token_id: int) -> bool:
        """Whether a token is a text of its own: all of plain words are."""
        return True

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Give the token ids of a text, by default with those that the model expects around it."""
        return self._encode(text, add_special_tokens)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Give the text of token ids; the server shows special tokens, of which `ids` has none."""
        return self._decode(ids)
