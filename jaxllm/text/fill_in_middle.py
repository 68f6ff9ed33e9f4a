"""Prompts of models of code that fill a hole: the text before it and behind it, between tokens of their vocabulary.

What a vocabulary has is all that is looked at: a model whose tokenizer has the tokens, without having been trained on
them, fills badly. Knows nothing of requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from jaxllm.errors import UserError
from jaxllm.text.tokenizer import Tokenizer


class _Markers(NamedTuple):
    """Tokens as a vocabulary spells them."""

    before: str  # precedes the text before the hole
    behind: str  # precedes the text behind it
    middle: str | None  # the model goes on here; None: the text behind comes first, and it goes on with the one before


# Followed: the papers and model cards of these, and for the spellings llama.cpp's src/llama-vocab.cpp.
_MARKERS = (
    _Markers("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma, Granite 4
    _Markers("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder 1 and 2, Granite Code
    _Markers("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    _Markers("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek-Coder
    _Markers("▁<PRE>", "▁<SUF>", "▁<MID>"),  # CodeLlama
    _Markers("[PREFIX]", "[SUFFIX]", None),  # Codestral
)
# What such models write behind a filled hole, beside their markers; not all name it as their end of a sequence.
_ENDS = (
    *("<|endoftext|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"),  # Qwen2.5-Coder
    *("<|file_separator|>", "<file_sep>", "<repo_name>"),  # CodeGemma, StarCoder2
    *("▁<EOT>", "<|EOT|>"),  # CodeLlama, DeepSeek-Coder
)
_ANCHOR = "☺"  # Meta's own choice (codellama, llama/tokenizer.py)


def encode(
    tokenizer: Tokenizer, before: str | Sequence[int], behind: str, add_special_tokens: bool = True
) -> list[int]:
    """Give the token ids of a prompt whose answer belongs between two texts; the first may be token ids.

    Special tokens spelled out in the texts become those tokens, as in other prompts: the files of a repository are
    told apart by them. `add_special_tokens`: begin as the model expects a prompt to.

    Raises:
        UserError: naming `suffix`, if the vocabulary has no tokens for this.
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
    """Return the tokens that end what a model writes into a hole, beside its ends of a sequence."""
    names = [*(_markers_of(tokenizer) or ()), *_ENDS]
    ids = (tokenizer.token_id(name) for name in names if name is not None)
    return [token for token in ids if token is not None]


def _markers_of(tokenizer: Tokenizer) -> _Markers | None:
    """Return the first markers of which a vocabulary has all."""
    for markers in _MARKERS:
        if all(tokenizer.token_id(marker) is not None for marker in markers if marker is not None):
            return markers
    return None


def _id(tokenizer: Tokenizer, token: str) -> int:
    token_id = tokenizer.token_id(token)
    assert token_id is not None
    return token_id


def _encode_behind(tokenizer: Tokenizer, text: str) -> list[int]:
    """Give the ids of a text that begins in the middle of one: without the space that some tokenizers put before it.

    Only those with tokens for bytes do so in models of code; with others a text could melt into the anchor.
    """
    ids = tokenizer.encode(text, add_special_tokens=False)
    puts_space = tokenizer.token(tokenizer.encode("a", add_special_tokens=False)[0]).startswith("▁")
    if not puts_space or tokenizer.decoding.byte_tokens != "fallback":
        return ids
    anchor = tokenizer.encode(_ANCHOR, add_special_tokens=False)
    anchored = tokenizer.encode(_ANCHOR + text, add_special_tokens=False)
    return anchored[len(anchor) :] if anchored[: len(anchor)] == anchor else ids
