"""The forms of a prompt, and their checks. Thread-safe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxllm.errors import UserError
from jaxllm.value_types import types_of

Prompt = str | Sequence[int] | Mapping[str, Any]


def parts_of(prompt: Prompt, also: str | None = None) -> tuple[str | None, Sequence[int] | np.ndarray | None, bytes]:
    """Return a prompt's text, token ids and cache salt; text and ids are not both None.

    `prompt` is text, token ids, or a mapping with "prompt" or "prompt_token_ids", optionally "cache_salt" and `also`;
    else raises UserError.
    """
    salt = b""
    if isinstance(prompt, Mapping):
        unknown = set(prompt) - {"prompt", "prompt_token_ids", "cache_salt", also}
        if unknown:
            raise UserError(f"A prompt has no field {min(unknown)!r} in jaxllm; leave it out.", min(unknown))
        salt = _salt(prompt["cache_salt"]) if "cache_salt" in prompt else b""
        text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    elif isinstance(prompt, str):
        text, ids = prompt, None
    else:
        text, ids = None, prompt
    if ids is None and not isinstance(text, str):
        raise UserError(f"A prompt must be text or a list of token ids, got {type(text).__name__}.", "prompt")
    if ids is not None and (not isinstance(ids, Sequence | np.ndarray) or isinstance(ids, str | bytes)):
        raise UserError(f"A prompt must be text or a list of token ids, got {type(ids).__name__}.", "prompt")
    return text, ids, salt


def _salt(salt: Any) -> bytes:
    """Encode a salt; refuse None, and an empty text, which would share unsalted blocks."""
    try:
        if isinstance(salt, str) and salt:
            return salt.encode()
    except UnicodeEncodeError:  # a lone surrogate
        pass
    raise UserError("cache_salt must be a text that is not empty.", "cache_salt", salt)


def checked_ids(ids: Any, vocab_size: int) -> list[int]:
    """Return valid ids as a list; raise UserError before numpy could wrap 2**32 + 5 to a valid id."""
    plain = ids.tolist() if isinstance(ids, np.ndarray) else list(ids)
    if types_of(plain) != {int}:
        for token in plain:
            if isinstance(token, bool) or not isinstance(token, int | np.integer):
                raise UserError(f"A token id must be an integer, got {token!r}.", "prompt")
        plain = [int(token) for token in plain]
    if not 0 <= min(plain) <= max(plain) < vocab_size:
        outside = next(token for token in plain if not 0 <= token < vocab_size)
        raise UserError(f"Token id {outside} is out of vocabulary (0 to {vocab_size - 1})", "prompt")
    return plain
