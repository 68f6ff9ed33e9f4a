"""A tokenizer that calls a server's API, for models without local files."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jaxllm.bench.datasets import poem

_LINES = 40  # of text, since servers list no vocabulary


class ServerTokenizer:
    """A `datasets.Coder` that calls the server."""

    def __init__(self, encode: Callable[[str, bool], list[int]], decode: Callable[[Sequence[int]], str]) -> None:
        self._encode, self._decode = encode, decode
        lines = list(poem())
        shown = lines[:: len(lines) // _LINES]
        self.ids: Sequence[int] = sorted({token for line in shown for token in encode(line, False)})

    def is_text(self, token_id: int) -> bool:
        return True

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self._encode(text, add_special_tokens)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return self._decode(ids)
