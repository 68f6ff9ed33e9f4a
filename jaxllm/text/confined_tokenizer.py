"""Adapters' tokenizers, run in another process.

`piece` is a table lookup, safe in engine steps. Methods that encode or render call the process: not for an event loop.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from jaxllm.media.image_part import places_of
from jaxllm.text.confinement import Confinement, Source
from jaxllm.text.template_shapes import Shape
from jaxllm.text.tokenizer import Decoding, Piece, Tokenizer


class ConfinedTemplates(Tokenizer):
    """The model's tokenizer with an adapter's chat templates, rendered in another process."""

    def __init__(
        self, own: Tokenizer, templates: Mapping[str, str], confinement: Confinement, key: bytes, source: Source
    ) -> None:
        vars(self).update(vars(own))
        self.confined = key
        self.chat_templates = dict(templates)
        self._confinement, self._source = confinement, source
        self._shape_of = functools.lru_cache(maxsize=16)(self._ask_shape)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        **named: Any,
    ) -> str:
        template = self._template_source(chat_template, tools)
        if not self._is_foreign(template):
            return super().apply_chat_template(messages, tools=tools, chat_template=template, **named)
        return self._ask("apply_chat_template", messages, tools=tools, chat_template=template, **named)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        **named: Any,
    ) -> tuple[str, list[int]]:
        template = self._template_source(chat_template, tools)
        if not self._is_foreign(template):
            return super().encode_chat(messages, tools=tools, chat_template=template, **named)
        own = messages, places_of(messages)  # JSON has no `ImagePart`
        text, ids = self._ask("encode_chat", *own, tools=tools, chat_template=template, **named)
        return text, ids

    def template_shape(self, chosen: str | None, tools: Sequence[Mapping[str, Any]] | None) -> Shape:
        template = self._template_source(chosen, tools)
        return self._shape_of(template) if self._is_foreign(template) else super().template_shape(template, tools)

    def _is_foreign(self, template: str) -> bool:
        return template in self.chat_templates.values()

    def _ask(self, method: str, *arguments: Any, **named: Any) -> Any:
        return self._confinement.call(self._source, method, *arguments, **named)

    def _ask_shape(self, template: str) -> Shape:
        told: dict[str, Any] = self._ask("shape", template)
        fields: dict[str, Any] = {
            name: frozenset(value) if isinstance(value, list) else value for name, value in told.items()
        }
        return Shape(**fields)


class ConfinedTokenizer(ConfinedTemplates):
    """An adapter's tokenizer."""

    def __init__(
        self,
        templates: Mapping[str, str],
        confinement: Confinement,
        source: Source,
        vocab_size: int,
        told: Mapping[str, Any],
    ) -> None:
        vars(self).update(
            name=source.folder,
            confined=source.digest,
            decoding=Decoding(**told["decoding"]),
            added_ids=frozenset(told["added_ids"]),
            special_ids=frozenset(told["special_ids"]),
            _named_tokens=told["named_tokens"],
            _most_characters=told["lengths"][0],
            _longest_token=told["lengths"][1],
        )
        super().__init__(self, templates, confinement, source.digest, source)
        self._vocab_size = vocab_size
        self._tokens: list[str] = told["tokens"]
        self._table: list[Piece] = [tuple(each) if isinstance(each, list) else each for each in told["pieces"]]

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    def token_id(self, token: str) -> int | None:
        return self._ids_by_token.get(token)

    def token(self, token_id: int) -> str:
        return self._tokens[token_id] if 0 <= token_id < len(self._tokens) else ""

    def piece(self, token_id: int) -> Piece:
        return self._table[token_id] if 0 <= token_id < len(self._table) else b""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self._ask("encode", text, add_special_tokens)

    def encode_first(self, text: str, most: int) -> list[int]:
        return self._ask("encode_first", text, most)

    def encode_last(self, text: str, most: int) -> list[int]:
        return self._ask("encode_last", text, most)

    def encode_pair(self, first: str, second: str) -> tuple[list[int], list[int]]:
        ids, types = self._ask("encode_pair", first, second)
        return ids, types

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return self._ask("decode", list(ids), skip_special_tokens)

    def added_tokens(self) -> dict[str, dict[str, Any]]:
        return self._ask("added_tokens")

    @functools.cached_property
    def _ids_by_token(self) -> dict[str, int]:
        return {token: token_id for token_id, token in enumerate(self._tokens) if token}

    def _named_id(self, name: str) -> int | None:
        token = self._named_tokens.get(name)
        return None if token is None else self.token_id(token)

    def _is_foreign(self, template: str) -> bool:
        return True  # this tokenizer encodes the model's template too
