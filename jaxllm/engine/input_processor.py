"""What callers give as a prompt or as words, checked and turned into token ids.

Pure functions over a tokenizer; knows no engine and no queue. Any thread may call them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from jaxllm.errors import UserError, too_long
from jaxllm.sampling_params import MAX_BAD_WORD_TOKENS, SamplingParams
from jaxllm.text.tokenizer import Tokenizer

Prompt = str | Sequence[int] | Mapping[str, Any]
_BAD_WORD_CHARACTERS = 32  # that a token of bad_words has at most, on the average


def read_prompt(
    prompt: Prompt, params: SamplingParams, tokenizer: Tokenizer, vocab_size: int, max_model_len: int
) -> tuple[str | None, list[int], bytes]:
    """Return a prompt's text, its checked token ids and its cache salt; what is wrong with it is a UserError.

    `prompt` is text, token ids, or a mapping with "prompt" or "prompt_token_ids" and perhaps "cache_salt". One that
    leaves no room for a token in `max_model_len` is refused, unless `truncate_prompt_tokens` cuts it.
    """
    salt = b""
    if isinstance(prompt, Mapping):
        unknown = set(prompt) - {"prompt", "prompt_token_ids", "cache_salt"}
        if unknown:
            raise UserError(f"{min(unknown)!r} is not something that a jaxllm prompt can have yet.", min(unknown))
        salt = _salt(prompt["cache_salt"]) if "cache_salt" in prompt else b""
        text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    elif isinstance(prompt, str):
        text, ids = prompt, None
    else:
        text, ids = None, prompt
    if ids is None:
        if not isinstance(text, str):
            raise UserError(f"A prompt is text or a list of token ids, not {type(text).__name__}.", "prompt")
        ids = tokenizer.encode(text_to_encode(text, params, tokenizer, max_model_len))
    if not isinstance(ids, Sequence | np.ndarray) or isinstance(ids, str | bytes):
        raise UserError(f"A prompt is text or a list of token ids, not {type(ids).__name__}.", "prompt")
    if not len(ids):
        raise UserError("The decoder prompt cannot be empty", "prompt")
    if (kept := _num_kept(params, max_model_len)) is not None:
        ids = ids[-kept:]
    if len(ids) >= max_model_len:
        raise too_long(max_model_len, len(ids), None)
    ids = _token_ids(ids, vocab_size)
    return text, ids, salt


def text_to_encode(text: str, params: SamplingParams, tokenizer: Tokenizer, max_model_len: int) -> str:
    """Return what of a prompt's text is to be tokenized: all of it, or where `truncate_prompt_tokens` cuts, its end.

    Cheap, unlike to tokenize what is not needed: 8 MiB to keep 8 tokens of took 5 s. A text that must be longer than
    the context is a ContextLengthError; `Tokenizer.end_of` says when a cut could be seen in the tokens.
    """
    kept = _num_kept(params, max_model_len)
    if kept is not None:
        return tokenizer.end_of(text, kept)
    tokenizer.check_length(text, max_model_len)
    return text


def _num_kept(params: SamplingParams, max_model_len: int) -> int | None:
    """Return how many of a prompt's tokens stay, the last ones; None for all. More than the context are refused."""
    asked = params.truncate_prompt_tokens
    if asked is not None and asked > max_model_len:
        message = f"truncate_prompt_tokens value ({asked}) is greater than max_model_len ({max_model_len})."
        raise UserError(f"{message} Please select a smaller truncation size.", "truncate_prompt_tokens", asked)
    if asked != -1:
        return asked
    return max(1, max_model_len - (params.max_tokens or 1))


def read_bad_words(words: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Return the token sequences that words must not become: each without and with a space before it.

    Unlike vLLM's, which drops the second where it has another number of tokens and so lets such a word through.
    """
    most = MAX_BAD_WORD_TOKENS
    names = {word.lstrip(" ") for word in words}
    sequences: tuple[tuple[int, ...], ...] | None = None
    if len(names) <= most and sum(map(len, names)) <= most * _BAD_WORD_CHARACTERS:  # before the time is spent
        texts = [text for name in sorted(names) for text in (name, " " + name)]
        spelled = dict.fromkeys(tuple(tokenizer.encode(text, add_special_tokens=False)) for text in texts)
        # One that ends with another cannot come where that one does not.
        sequences = tuple(one for one in spelled if one and not any(one[at:] in spelled for at in range(1, len(one))))
    if sequences is None or sum(map(len, sequences)) > most:
        raise UserError(
            f"bad_words may have at most {most} tokens together, each word counted with and without a space before it; "
            "give fewer.",
            "bad_words",
        )
    return sequences


def check_allows_a_token(
    params: SamplingParams, bad_words: Sequence[Sequence[int]], eos_token_ids: Collection[int]
) -> None:
    """Refuse parameters that forbid each of the allowed tokens already as the first one."""
    if params.allowed_token_ids is None:
        return
    left = set(params.allowed_token_ids).difference(word[0] for word in bad_words if len(word) == 1)
    if params.min_tokens > 0:
        left -= {*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)}
    if not left:
        raise UserError(
            "allowed_token_ids leave no token that can come first: bad_words, or min_tokens, forbid all of them.",
            "allowed_token_ids",
        )


def _salt(salt: Any) -> bytes:
    """Check a cache salt. An empty one would share blocks with those who gave none."""
    try:
        if isinstance(salt, str) and salt:
            return salt.encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        pass
    raise UserError("cache_salt must be a text that is not empty.", "cache_salt", salt)


def _token_ids(ids: Any, vocab_size: int) -> list[int]:
    """Check token ids as Python integers, before numpy could wrap 2**32 + 5 to a valid one."""
    plain = ids.tolist() if isinstance(ids, np.ndarray) else list(ids)
    if set(map(type, plain)) != {int}:
        for token in plain:
            if isinstance(token, bool) or not isinstance(token, int | np.integer):
                raise UserError(f"A token id is an integer, not {token!r}.", "prompt")
        plain = [int(token) for token in plain]
    if not 0 <= min(plain) <= max(plain) < vocab_size:
        outside = next(token for token in plain if not 0 <= token < vocab_size)
        raise UserError(f"Token id {outside} is out of vocabulary (0 to {vocab_size - 1})", "prompt")
    return plain
