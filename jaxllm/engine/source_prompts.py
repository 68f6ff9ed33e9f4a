"""The two prompts of a request to an encoder-decoder model. Thread-safe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from jaxllm.engine.prompts import Prompt, checked_ids, parts_of
from jaxllm.errors import ContextLengthError, UserError
from jaxllm.text.tokenizer import Tokenizer

ENCODER, DECODER = "encoder_prompt", "decoder_prompt"


class BothPrompts(NamedTuple):
    """A request's prompts as token ids."""

    encoder: str | None  # text, if given
    encoder_ids: list[int]
    decoder: str | None
    decoder_ids: list[int]


@dataclass(frozen=True, kw_only=True)
class SourcePrompts:
    """How an encoder-decoder model reads prompts."""

    tokenizer: Tokenizer
    vocab_size: int
    longest: int  # tokens of an encoder prompt
    start: tuple[int, ...]  # a decoder prompt that is not given; others begin with the first of these

    def read(self, given: Prompt) -> BothPrompts:
        """Return both prompts; raise UserError if they are invalid.

        `given` is the encoder's prompt (text, token ids, or a mapping as in `prompts.parts_of`), or a mapping with
        "encoder_prompt" and optionally "decoder_prompt", each such a prompt; or the result of `mapping`.
        """
        if not isinstance(given, Mapping) or ENCODER not in given:
            text, ids = self._encode(given)
            return BothPrompts(text, ids, None, self._begin(None))
        known = {ENCODER, DECODER, "cache_salt", "prompt", "prompt_token_ids"}
        if unknown := given.keys() - known:
            raise UserError(f"A prompt has no field {min(unknown)!r} in jaxllm; leave it out.", min(unknown))
        text, ids = self._encode(given[ENCODER])
        if "prompt_token_ids" in given:
            return BothPrompts(text, ids, given.get("prompt"), checked_ids(given["prompt_token_ids"], self.vocab_size))
        if given.get(DECODER) is None:
            return BothPrompts(text, ids, None, self._begin(None))
        decoder, decoder_ids, _ = parts_of(given[DECODER])
        if decoder_ids is None:
            assert decoder is not None
            decoder_ids = self.tokenizer.encode(decoder, add_special_tokens=False)
        return BothPrompts(text, ids, decoder, self._begin(decoder_ids))

    def mapping(self, given: Prompt) -> dict[str, Any]:
        """Return a prompt for the engine with the decoder's token ids in the usual place."""
        both = self.read(given)
        encoder = {"prompt": both.encoder, "prompt_token_ids": both.encoder_ids}
        return {ENCODER: encoder, "prompt": both.decoder, "prompt_token_ids": both.decoder_ids}

    def _encode(self, given: Prompt) -> tuple[str | None, list[int]]:
        text, ids, _ = parts_of(given)
        if ids is None:
            assert text is not None
            self.tokenizer.check_length(text, self.longest)
            ids = self.tokenizer.encode(text)
        if not len(ids):
            raise UserError("The encoder prompt cannot be empty.", "prompt")
        if len(ids) > self.longest:
            raise ContextLengthError(
                f"The encoder prompt has {len(ids)} tokens, and the encoder reads at most {self.longest}. Shorten it.",
                len(ids),
                self.longest,
            )
        return text, checked_ids(ids, self.vocab_size)

    def _begin(self, given: Sequence[int] | np.ndarray | None) -> list[int]:
        if given is None:
            if not self.start:
                raise UserError(
                    f"The model names no decoder_start_token_id; give {DECODER}, which begins with it.", DECODER
                )
            return list(self.start)
        ids = checked_ids(given, self.vocab_size) if len(given) else []
        return ids if ids[:1] == list(self.start[:1]) else [*self.start[:1], *ids]
