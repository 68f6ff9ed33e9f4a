"""Tokenizer, limits and defaults of a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxllm.engine.source_prompts import SourcePrompts
from jaxllm.errors import UserError
from jaxllm.media.processor import Processor
from jaxllm.model.head import Head
from jaxllm.pooling_params import PoolingTask
from jaxllm.sampling_params import SamplingParams
from jaxllm.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """A loaded model's properties."""

    tokenizer: Tokenizer
    generation_config: Mapping[str, Any]
    default_params: SamplingParams
    eos_ids: frozenset[int]
    vocab_size: int
    max_model_len: int  # tokens
    max_num_seqs: int = 0
    max_num_batched_tokens: int = 0
    block_size: int = 0  # tokens
    num_kv_blocks: int = 0
    dtype: str = ""
    device_kind: str = ""
    pooler: Head | None = None
    pooled_size: int = 0  # of a result
    num_token_types: int = 0
    processor: Processor | None = None
    sources: SourcePrompts | None = None  # of an encoder-decoder model

    @property
    def image_marks(self) -> tuple[str, str, str] | None:
        """Return the texts of the tokens before, for and after an image, for `placeholders.marked`.

        Raises UserError if the tokenizer lacks one.
        """
        if self.processor is None or self.processor.marks is None:
            return None
        before, after = self.processor.marks
        texts = [self.tokenizer.token(token) for token in (before, self.processor.placeholder, after)]
        if not all(texts):
            raise UserError("The tokenizer lacks tokens around images that config.json names.", "tokenizer")
        return texts[0], texts[1], texts[2]

    @property
    def tasks(self) -> tuple[PoolingTask, ...]:
        """The tasks of a pooling model; only one with a single label scores."""
        if self.pooler is None:
            return ()
        if not self.pooler.labels:
            return ("embed",)
        return ("classify", "score") if len(self.pooler.labels) == 1 else ("classify",)

    def pair(self, first: str, second: str, most: int | None = None) -> dict[str, Any]:
        """Return a cross-encoder's prompt for two texts, the second cut to fit `most` tokens; raise UserError if none
        fits.
        """
        ids, types = self.tokenizer.encode_pair(first, second)
        over = 0 if most is None else len(ids) - most
        if over > 0:
            if over >= len(self.tokenizer.encode(second, add_special_tokens=False)):
                message = (
                    f"The first text is never cut, and leaves no room for the second in {most} tokens; shorten it."
                )
                raise UserError(message, "truncate_prompt_tokens")
            (last,) = self.tokenizer.encode("a", add_special_tokens=False)[-1:]
            end = len(ids) - self.tokenizer.encode_pair("a", "a")[0][::-1].index(last)
            ids, types = ([*values[: end - over], *values[end:]] for values in (ids, types))
        return {"prompt_token_ids": ids} | ({"token_type_ids": types} if self.num_token_types else {})
