"""Settings of speculative decoding, with vLLM's names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from jaxllm.errors import UserError

Method = Literal["ngram", "draft_model", "eagle3"]
MAX_DRAFTS = 16  # per row
MAX_MATCH = 16
_DEFAULT_MATCH = 5  # vLLM's, tokens


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """The draft method and its size. Outputs do not depend on it."""

    method: Method
    num_speculative_tokens: int  # most per row; the number verified adapts to acceptance
    model: str | None = None  # folder or hub id of a draft model or EAGLE-3 head
    prompt_lookup_min: int = _DEFAULT_MATCH  # ngram: trailing tokens to match
    prompt_lookup_max: int = _DEFAULT_MATCH  # ngram

    def __post_init__(self) -> None:
        if self.method not in get_args(Method):
            raise _error(f"method must be one of {', '.join(get_args(Method))}, got {self.method!r:.80}")
        for name, most in (
            ("num_speculative_tokens", MAX_DRAFTS),
            ("prompt_lookup_min", MAX_MATCH),
            ("prompt_lookup_max", MAX_MATCH),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
                raise _error(f"{name} must be an integer from 1 to {most}, got {value!r:.80}")
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise _error(
                f"prompt_lookup_min is {self.prompt_lookup_min}, and prompt_lookup_max {self.prompt_lookup_max}"
            )
        if self.method == "ngram" and self.model is not None:
            raise _error(f"ngram needs no model, got {self.model!r:.80}")
        if self.method != "ngram" and not (isinstance(self.model, str) and self.model):
            raise _error(f"{self.method} needs a model: a folder or a hub id")


def read(given: object) -> SpeculativeConfig:
    if isinstance(given, SpeculativeConfig):
        return given
    if not isinstance(given, Mapping):
        raise _error(f"it must be an object, got {given!r:.80}")
    table: dict[str, Any] = {str(name): value for name, value in given.items() if value is not None}
    table.pop("draft_tensor_parallel_size", None)  # drafts run on the model's devices
    if table.get("model") in ("ngram", "[ngram]"):  # vLLM's alternative
        table.setdefault("method", table.pop("model"))
        table["method"] = table["method"].strip("[]")
    names = [field.name for field in fields(SpeculativeConfig)]
    unknown = [name for name in table if name not in names]
    if unknown:
        raise _error(f"it has no {unknown[0]!r:.80}, only {', '.join(names)}")
    if "method" not in table:
        raise _error(f"method is missing: one of {', '.join(get_args(Method))}")
    if "num_speculative_tokens" not in table:
        raise _error("num_speculative_tokens is missing: drafts of a row at most")
    shorter, longer = table.get("prompt_lookup_min"), table.get("prompt_lookup_max")
    if (shorter is None) != (longer is None):
        table |= dict.fromkeys(("prompt_lookup_min", "prompt_lookup_max"), longer if shorter is None else shorter)
    return SpeculativeConfig(**table)


def _error(text: str) -> UserError:
    return UserError(f"speculative_config: {text}.", "speculative_config")
