"""Prompts for fill-in-the-middle models, with marker tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from jaxllm.errors import UserError
from jaxllm.text.tokenizer import Tokenizer


class _Markers(NamedTuple):
    """Marker tokens as spelled in a vocabulary."""

    before: str
    behind: str
    middle: str | None  # generation begins; None: suffix first, generation continues the prefix


# From papers, model cards and llama.cpp.
_MARKERS = (
    _Markers("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma, Granite 4
    _Markers("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder 1 and 2, Granite Code
    _Markers("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    _Markers("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek-Coder
    _Markers("▁<PRE>", "▁<SUF>", "▁<MID>"),  # CodeLlama
    _Markers("[PREFIX]", "[SUFFIX]", None),  # Codestral
)
# Emitted after a filled hole; not always declared as end tokens.
_ENDS = (
    *("<|endoftext|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"),  # Qwen2.5-Coder
    *("<|file_separator|>", "<file_sep>", "<repo_name>"),  # CodeGemma, StarCoder2
    *("▁<EOT>", "<|EOT|>"),  # CodeLlama, DeepSeek-Coder
)
_ANCHOR = "☺"  # Meta's choice (codellama, llama/tokenizer.py)


def encode(
    tokenizer: Tokenizer, before: str | Sequence[int], behind: str, add_special_tokens: bool = True
) -> list[int]:
    """Return the ids of a prompt whose completion belongs between `before` and `behind`.

    Special tokens spelled in the texts are encoded as such. `add_special_tokens` adds the model's prompt start. Raises
    `UserError`, naming `suffix`, if the vocabulary lacks marker tokens.
    """
    markers = _markers_of(tokenizer)
    if markers is None:
        message = "This model cannot fill in the middle: its vocabulary has no tokens for that. Leave suffix out."
        raise UserError(message, "suffix")
    start = [tokenizer.bos_token_id] if tokenizer.bos_token_id is not None and add_special_tokens else []
    if start != tokenizer.encode("")[:1]:
        start = []
    first = tokenizer.encode(before, add_special_tokens=False) if isinstance(before, str) else before
    first = [_id(tokenizer, markers.before), *first]
    second = [_id(tokenizer, markers.behind), *_encode_behind(tokenizer, behind)]
    if markers.middle is None:
        return [*start, *second, *first]
    return [*start, *first, *second, _id(tokenizer, markers.middle)]


def stop_ids(tokenizer: Tokenizer) -> list[int]:
    names = [*(_markers_of(tokenizer) or ()), *_ENDS]
    ids = (tokenizer.token_id(name) for name in names if name is not None)
    return [token for token in ids if token is not None]


def _markers_of(tokenizer: Tokenizer) -> _Markers | None:
    for markers in _MARKERS:
        if all(tokenizer.token_id(marker) is not None for marker in markers if marker is not None):
            return markers
    return None


def _id(tokenizer: Tokenizer, token: str) -> int:
    token_id = tokenizer.token_id(token)
    assert token_id is not None
    return token_id


def _encode_behind(tokenizer: Tokenizer, text: str) -> list[int]:
    """Encode a text without the space that some tokenizers prepend.

    Among models of code, only byte-fallback tokenizers do; elsewhere a text could merge with the anchor.
    """
    ids = tokenizer.encode(text, add_special_tokens=False)
    puts_space = tokenizer.token(tokenizer.encode("a", add_special_tokens=False)[0]).startswith("▁")
    if not puts_space or tokenizer.decoding.byte_tokens != "fallback":
        return ids
    anchor = tokenizer.encode(_ANCHOR, add_special_tokens=False)
    anchored = tokenizer.encode(_ANCHOR + text, add_special_tokens=False)
    return anchored[len(anchor) :] if anchored[: len(anchor)] == anchor else ids
