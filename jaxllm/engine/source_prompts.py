"""The two prompts of a request to an encoder-decoder model. Thread-safe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from jaxllm.engine.prompts import Prompt, checked_ids, parts_of
from jaxllm.errors import ContextLengthError, UserError
from jaxllm.media.sound import LogMel
from jaxllm.text.tokenizer import Tokenizer

ENCODER, DECODER, MEDIA = "encoder_prompt", "decoder_prompt", "multi_modal_data"


class BothPrompts(NamedTuple):
    """A request's prompts."""

    encoder: str | None
    content: np.ndarray  # token ids, int32[·], or a spectrogram, float32[M, F]
    num_tokens: int
    decoder: str | None
    decoder_ids: list[int]

    @property
    def encoder_ids(self) -> list[int]:
        return self.content.tolist() if self.content.ndim == 1 else []


@dataclass(frozen=True, kw_only=True)
class SourcePrompts:
    """How an encoder-decoder model reads prompts."""

    tokenizer: Tokenizer
    vocab_size: int
    longest: int  # tokens
    start: tuple[int, ...]  # default decoder prompt; all begin with its first token
    sound: LogMel | None = None

    def read(self, given: Prompt) -> BothPrompts:
        """Return both prompts; raise UserError if they are invalid.

        `given` is the encoder's prompt, a mapping with "encoder_prompt" and optionally "decoder_prompt", or the result
        of `mapping`. Sound is {"multi_modal_data": {"audio": samples, or (samples, rate)}}, as "encoder_prompt" or with
        a decoder prompt.
        """
        if isinstance(given, Mapping) and given.get(MEDIA) is not None and self.sound is not None:
            rest = {name: value for name, value in given.items() if name not in (MEDIA, "cache_salt")}
            given = {ENCODER: {MEDIA: given[MEDIA]}} | ({DECODER: rest} if rest else {})
        if not isinstance(given, Mapping) or ENCODER not in given:
            return BothPrompts(*self._encode(given), None, self._begin(None))
        known = {ENCODER, DECODER, "cache_salt", "prompt", "prompt_token_ids"}
        if unknown := given.keys() - known:
            raise UserError(f"A prompt has no field {min(unknown)!r} in jaxllm; leave it out.", min(unknown))
        encoded = self._encode(given[ENCODER])
        if given.get("prompt_token_ids") is not None:
            text, ids, _ = parts_of({name: given.get(name) for name in ("prompt", "prompt_token_ids")})
            return BothPrompts(*encoded, text, self._begin(ids))
        if given.get("prompt") is not None:
            raise UserError(f"A prompt with {ENCODER} has its text in {DECODER}, not in prompt.", "prompt")
        if given.get(DECODER) is None:
            return BothPrompts(*encoded, None, self._begin(None))
        decoder, decoder_ids, _ = parts_of(given[DECODER])
        if decoder_ids is None:
            assert decoder is not None
            decoder_ids = self.tokenizer.encode(decoder, add_special_tokens=False)
        return BothPrompts(*encoded, decoder, self._begin(decoder_ids))

    def mapping(self, given: Prompt) -> dict[str, Any]:
        """Return a prompt of text for the engine, with the decoder's ids in "prompt_token_ids"."""
        both = self.read(given)
        encoder = {"prompt": both.encoder, "prompt_token_ids": both.encoder_ids}
        return {ENCODER: encoder, "prompt": both.decoder, "prompt_token_ids": both.decoder_ids}

    def _encode(self, given: Prompt) -> tuple[str | None, np.ndarray, int]:
        if self.sound is not None:
            return None, self._hear(given), self.longest
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
        return text, np.asarray(checked_ids(ids, self.vocab_size), np.int32), len(ids)

    def _hear(self, given: Prompt) -> np.ndarray:
        assert self.sound is not None
        given = given if isinstance(given, Mapping) else {}
        media = given.get(MEDIA)
        if not isinstance(media, Mapping) or media.keys() != {"audio"}:
            raise UserError(
                "The model's encoder reads sound: give multi_modal_data = {'audio': (samples, rate)}.", MEDIA
            )
        if given.keys() - {MEDIA, "prompt"} or given.get("prompt"):
            raise UserError("An encoder prompt with sound has no text; give it as decoder_prompt.", ENCODER)
        sound = media["audio"]
        if isinstance(sound, list) and len(sound) == 1:
            sound = sound[0]
        return self.sound.spectrogram(sound)

    def _begin(self, given: Sequence[int] | np.ndarray | None) -> list[int]:
        if given is None:
            if not self.start:
                raise UserError(
                    f"The model names no decoder_start_token_id; give {DECODER}, which begins with it.", DECODER
                )
            return list(self.start)
        ids = checked_ids(given, self.vocab_size) if len(given) else []
        if self.sound is not None and self.start[:1] and self.start[0] in ids:  # after a text that precedes the sound
            return ids
        return ids if ids[:1] == list(self.start[:1]) else [*self.start[:1], *ids]
