"""Tokenizers from the files of an adapter: they work in another process, and are used like any other.

A step of the engine looks the text of a token up in a table, which that process makes once. Methods that read a text or
render a template are tasks of that process (confinement.py), so they must not be called on an event loop.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from jaxllm.text.confinement import Confinement, Source
from jaxllm.text.template_shapes import Shape
from jaxllm.text.tokenizer import Decoding, Piece, Tokenizer


class ConfinedTemplates(Tokenizer):
    """The model's own tokenizer with the chat templates of an adapter, which are rendered elsewhere."""

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
        """Write a conversation as `Tokenizer.apply_chat_template` does."""
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
        """Return a conversation's text and its token ids as `Tokenizer.encode_chat` does."""
        template = self._template_source(chat_template, tools)
        if not self._is_foreign(template):
            return super().encode_chat(messages, tools=tools, chat_template=template, **named)
        text, ids = self._ask("encode_chat", messages, tools=tools, chat_template=template, **named)
        return text, ids

    def template_shape(self, chosen: str | None, tools: Sequence[Mapping[str, Any]] | None) -> Shape:
        """Return the shape in which the template that `encode_chat` would choose takes messages."""
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
    """A tokenizer that an adapter brings."""

    def __init__(
        self,
        templates: Mapping[str, str],
        confinement: Confinement,
        source: Source,
        vocab_size: int,
        told: Mapping[str, Any],
    ) -> None:
        """`told` describes the vocabulary, as the process made it."""
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
        """The number of tokens, added ones included."""
        return self._vocab_size

    def token_id(self, token: str) -> int | None:
        """Return the id of a token as the vocabulary spells it, None for an unknown one."""
        return self._ids_by_token.get(token)

    def token(self, token_id: int) -> str:
        """Return a token as the vocabulary spells it; "" for an id it does not know."""
        return self._tokens[token_id] if 0 <= token_id < len(self._tokens) else ""

    def piece(self, token_id: int) -> Piece:
        """Return a token's share of the text."""
        return self._table[token_id] if 0 <= token_id < len(self._table) else b""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text as `Tokenizer.encode` does."""
        return self._ask("encode", text, add_special_tokens)

    def encode_first(self, text: str, most: int) -> list[int]:
        """Return the ids of a text's first tokens as `Tokenizer.encode_first` does."""
        return self._ask("encode_first", text, most)

    def encode_last(self, text: str, most: int) -> list[int]:
        """Return the ids of a text's last tokens as `Tokenizer.encode_last` does."""
        return self._ask("encode_last", text, most)

    def encode_pair(self, first: str, second: str) -> tuple[list[int], list[int]]:
        """Return the ids of two texts as `Tokenizer.encode_pair` does."""
        ids, types = self._ask("encode_pair", first, second)
        return ids, types

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of token ids as `Tokenizer.decode` does."""
        return self._ask("decode", list(ids), skip_special_tokens)

    def added_tokens(self) -> dict[str, dict[str, Any]]:
        """Return the added tokens by id, with their flags."""
        return self._ask("added_tokens")

    @functools.cached_property
    def _ids_by_token(self) -> dict[str, int]:
        return {token: token_id for token_id, token in enumerate(self._tokens) if token}

    def _named_id(self, name: str) -> int | None:
        token = self._named_tokens.get(name)
        return None if token is None else self.token_id(token)

    def _is_foreign(self, template: str) -> bool:
        return True  # the model's own template too: this tokenizer reads its text
