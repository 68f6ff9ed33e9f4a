"""Text to token ids and back: the model's tokenizer and chat template.

Knows nothing of requests, schedulers or devices; the files are read by tokenizer_files.py, the text of an output that
grows is detokenizer.py's.

`tokenizer.json` is read with the `tokenizers` library and the chat template rendered with jinja2, both directly:
measured on two cores, that is ready in 0.05 s (0.15 s with a template) where `transformers.AutoTokenizer` takes 1.9 to
3.1 s. `transformers` is imported only to convert a folder that has no `tokenizer.json`.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

from jaxllm.errors import UserError, too_long
from jaxllm.text import special_token_guard
from jaxllm.text.chat_template import RESERVED, compile_template, render
from jaxllm.text.message_forms import ReadArguments, read_json, shaped
from jaxllm.text.special_token_guard import Disguise, SpecialTokens
from jaxllm.text.template_shapes import Shape
from jaxllm.text.tokenizer_files import read_tokenizer_files, typed_errors

_ANCHOR = "a"  # a token text that no decoder changes: stands for "some text came before"
_MANY_IDS = 4096  # from which on ids are decoded without the GIL, which `decode` holds: 0.5 ms (measured)
TOKENS_AT_A_CUT = 64  # that are kept besides, because a cut changes the tokens next to it
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")

# A token's share of the text: bytes that are characters only together with their neighbours, or its text when it is
# the first of all and its text after another token.
Piece = bytes | tuple[str, str]


def _byte_level_alphabet() -> dict[str, int]:
    """Give the byte each character of a byte-level vocabulary stands for.

    GPT-2's table (openai/gpt-2, encoder.py): printable Latin-1 characters stand for themselves, the other bytes in
    order for the characters from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_level_alphabet()


def load_tokenizer(folder_or_id: str | Path, revision: str | None = None) -> Tokenizer:
    """Read the tokenizer of a local folder or of a hub repository (`revision`: its branch, tag or commit).

    Raises `UserError` when there is none, or when it has a decoder that cannot be streamed exactly.
    """
    files = read_tokenizer_files(folder_or_id, revision)
    return Tokenizer(
        files.backend,
        files.named_tokens,
        files.chat_templates,
        str(folder_or_id),
        has_types=files.has_types,
        adds_eos=files.adds_eos,
    )


_CHARACTERS = 16  # a token of a long text has fewer, as a rule


class Tokenizer:
    """A model's tokenizer. Safe to share between threads; build it with `load_tokenizer`."""

    # Of one that works in another process (confined_tokenizer.py), and must not be called on an event loop: the digest
    # of its files.
    confined: bytes | None = None

    def __init__(
        self,
        backend: Any,
        named_tokens: Mapping[str, str],
        chat_templates: Mapping[str, str],
        name: str,
        has_types: bool = True,
        adds_eos: bool = False,
    ) -> None:
        self.backend = backend  # a tokenizers.Tokenizer; not named as a type to keep the import lazy
        self._named_tokens = dict(named_tokens)
        self._adds_eos = adds_eos
        self._appended: int | None = None  # a token that ends every text
        self.chat_templates: Mapping[str, str] = dict(chat_templates)  # by name
        compile_own = functools.partial(compile_template, variables=named_tokens)
        self._compile = functools.lru_cache(maxsize=16)(compile_own)
        self._pieces: dict[int, Piece] = {}
        self.name = name
        self._has_types = has_types
        decoder = backend.decoder
        self._decode_tokens: Callable[[list[str]], str] = " ".join if decoder is None else decoder.decode
        self.decoding = _decoding_of(None if decoder is None else json.loads(decoder.__getstate__()), name)
        added = backend.get_added_tokens_decoder()
        self.added_ids: frozenset[int] = frozenset(added)
        self.special_ids: frozenset[int] = frozenset(token_id for token_id, token in added.items() if token.special)

    @property
    def vocab_size(self) -> int:
        """The number of tokens, added ones included. A model's logits may be wider."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    @property
    def ids(self) -> Sequence[int]:
        """All token ids."""
        return range(self.vocab_size)

    @property
    def bos_token_id(self) -> int | None:
        """The id of the beginning-of-sequence token, if the tokenizer names one."""
        return self._named_id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        """The id of the end-of-sequence token, if the tokenizer names one. A generation config may list more."""
        return self._named_id("eos_token")

    @property
    def named_tokens(self) -> Mapping[str, str]:
        """The special tokens that have names, as "eos_token": "</s>"."""
        return self._named_tokens

    def with_chat_templates(self, templates: Mapping[str, str]) -> Tokenizer:
        """Return the same tokenizer with other chat templates."""
        other = copy(self)
        other.chat_templates = dict(templates)
        return other

    @property
    def has_chat_template(self) -> bool:
        """Whether conversations can be written without a template from elsewhere."""
        return bool(self.chat_templates)

    def config(self) -> dict[str, Any]:
        """Return what a tokenizer_config.json says of it: named and added tokens, chat templates."""
        config: dict[str, Any] = dict(self._named_tokens)
        config["added_tokens_decoder"] = self.added_tokens()
        config["tokenizer_class"] = "PreTrainedTokenizerFast"  # which reads any tokenizer.json
        if self.chat_templates:
            listed = [{"name": name, "template": text} for name, text in self.chat_templates.items()]
            config["chat_template"] = listed[0]["template"] if len(listed) == 1 else listed
        return config

    def added_tokens(self) -> dict[str, dict[str, Any]]:
        """Return the added tokens by id, with their flags."""
        flags = ("content", "lstrip", "normalized", "rstrip", "single_word", "special")
        return {
            str(token_id): {name: getattr(token, name) for name in flags}
            for token_id, token in self.backend.get_added_tokens_decoder().items()
        }

    def fingerprint(self) -> bytes:
        """Return a digest of the tokenizer without its name and chat templates."""
        beside = [self._named_tokens, self._has_types, self._adds_eos, self.backend.encode_special_tokens]
        return hashlib.sha256(json.dumps(beside, sort_keys=True).encode() + self.backend.to_str().encode()).digest()

    def lengths(self) -> tuple[int, int | None]:
        """Return the characters of the longest token, and the most characters of a text for one token."""
        return self._most_characters, self._longest_token

    def token_id(self, token: str) -> int | None:
        """Return the id of a token as the vocabulary spells it, None if it has none."""
        return self.backend.token_to_id(token)

    def token(self, token_id: int) -> str:
        """Return a token as the vocabulary spells it, as "Ġhello", "▁the" or "<0x0A>"; "" for an id it does not know.

        What it reads as in a text is `token_text`.
        """
        return self.backend.id_to_token(token_id) or ""

    def is_special(self, token: str) -> bool:
        """Whether a token is special, so that it is left out of texts that skip such tokens."""
        return self.token_id(token) in self.special_ids

    def _refusal(self, said: str) -> UserError:
        return UserError(f"The model's tokenizer cannot read this: {said}", "prompt")

    def _named_id(self, name: str) -> int | None:
        token = self._named_tokens.get(name)
        return None if token is None else self.backend.token_to_id(token)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Give the token ids of a text, by default with what the model expects around a prompt (often a BOS).

        Special tokens spelled out in the text become those tokens, unless the tokenizer's config says
        `split_special_tokens`. Raises `UserError` for what is no valid Unicode text.
        """
        ids = self.encoding_of(text, add_special_tokens).ids
        return self._ended(ids) if add_special_tokens else ids

    def _ended(self, ids: list[int]) -> list[int]:
        """Append what `obey_add_eos_token` asks for."""
        return ids if self._appended is None or ids[-1:] == [self._appended] else [*ids, self._appended]

    def obey_add_eos_token(self) -> None:
        """End texts with the end-of-sequence token where tokenizer_config.json asks for it and tokenizer.json does not.

        E5-Mistral pools that token. Where a text is to be continued it would be wrong, so transformers 5 ignores it.
        """
        self._appended = self.eos_token_id if self._adds_eos else None

    def encode_first(self, text: str, most: int) -> list[int]:
        """Give the ids of a text's first tokens: at most `most`, with what the model expects around a prompt."""
        head, tail, room = self._around_most(most)
        # Not by the library's own truncation, which makes an object of every `room` tokens behind.
        ids = self.encode(self.beginning_of(text, room), add_special_tokens=False)
        return [*head, *ids[:room], *tail]

    def encode_last(self, text: str, most: int) -> list[int]:
        """Give the ids of a text's last tokens: at most `most`, with what the model expects around a prompt."""
        head, tail, room = self._around_most(most)
        ids = self.encode(self.end_of(text, room), add_special_tokens=False)
        return [*head, *ids[max(0, len(ids) - room) :], *tail]

    def _around_most(self, most: int) -> tuple[list[int], list[int], int]:
        """Return what the model expects before and after a prompt, and how many of `most` tokens that leaves."""
        head, tail = self._around[0], self._ended(self._around[1])
        room = most - len(head) - len(tail)
        if room < 0:
            raise UserError(
                f"A prompt of {most} tokens has no room for the {most - room} that the model puts around it.",
                "truncate_prompt_tokens",
                most,
            )
        return head, tail, room

    def beginning_of(self, text: str, num_tokens: int) -> str:
        """Return a part of a long text that has its first `num_tokens` tokens, and more than those if it has more.

        To tokenize all of 8 MiB took 18 s and 1.5 GiB.
        """
        most = num_tokens + TOKENS_AT_A_CUT
        length = _CHARACTERS * most
        while length < len(text) and len(self.encode(text[:length], add_special_tokens=False)) <= most:
            length *= 2  # long words, or characters that are no token
        return text[:length]

    def encode_pair(self, first: str, second: str) -> tuple[list[int], list[int]]:
        """Give the ids of two texts in one prompt, and the type of each token: 1 for the second text.

        All types are 0 where the model is not told them.
        """
        encoding = self.encoding_of(first, True, second)
        return encoding.ids, encoding.type_ids if self._has_types else [0] * len(encoding.ids)

    def encoding_of(self, text: str, add_special_tokens: bool, pair: str | None = None) -> Any:
        """Encode one or two texts with the backend; another value is a UserError."""
        for one in (text,) if pair is None else (text, pair):
            if not isinstance(one, str):
                raise UserError(f"A text must be a string, got {type(one).__name__}.", "prompt")
            special_token_guard.check_unicode(one, "prompt")
        with typed_errors(self._refusal):
            return special_token_guard.encoding_of(self.backend, text, add_special_tokens, pair)

    def check_length(self, text: str, max_model_len: int, most_tokens: int | None = None) -> None:
        """Refuse a text that must be longer than the context, without tokenizing it: that takes 2 s a megabyte.

        `most_tokens` may be given for a text of which the context need not hold all.
        """
        most = max_model_len if most_tokens is None else most_tokens
        if self._longest_token is not None and len(text) > most * self._longest_token:
            raise too_long(max_model_len, -(-len(text) // self._longest_token), None, is_bound=True)

    def end_of(self, text: str, num_tokens: int) -> str:
        """Return the end of a text from which its last `num_tokens` tokens follow, without tokenizing it.

        It has the characters of so many of the longest tokens, and of 64 more: a cut changes the tokens next to it,
        which are dropped later. The last tokens differ, or are fewer, only where
        - a word is longer than those 64 tokens, or
        - any number of characters make one token or none: those that a normalizer removes or joins, unknown ones,
          spaces beside an added token.
        """
        most = (num_tokens + TOKENS_AT_A_CUT) * self._most_characters
        return text[-most:]

    @functools.cached_property
    def _most_characters(self) -> int:
        """The characters of the longest token, as the vocabulary spells it."""
        return max(map(len, self.backend.get_vocab()), default=1)

    @functools.cached_property
    def _longest_token(self) -> int | None:
        """The most characters of a text that one token can stand for, None where nothing bounds them.

        Nothing does where unknown characters melt into one token or vanish, where a normalizer may shorten the text, or
        where an added token takes the space around it.
        """
        if self.decoding.byte_tokens == "none" or self.backend.normalizer is not None:
            return None
        if any(token.lstrip or token.rstrip for token in self.backend.get_added_tokens_decoder().values()):
            return None
        return self._most_characters

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Give the text of token ids exactly as the tokenizer's own decoder does; ids it does not know are left out.

        `clean_up_tokenization_spaces` of the config is not applied: transformers 5 ignores it for BPE tokenizers, since
        it removes spaces that belong to the text, and no other kind of tokenizer that sets it is in use for generation.
        """
        with typed_errors(self._refusal):
            try:
                if len(ids) <= _MANY_IDS:
                    return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
                (text,) = self.backend.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)
                return text
            except (OverflowError, TypeError) as error:
                raise UserError(f"Token ids must be integers from 0 to {2**32 - 1}: {error}.", "ids") from None

    def token_text(self, token_id: int) -> str:
        """Give one token's text as it reads after other text: with its leading space, special tokens spelled out.

        Bytes that are no whole character read U+FFFD; an id the tokenizer does not know reads as nothing.
        """
        piece = self.piece(token_id)
        return piece.decode(errors="replace") if isinstance(piece, bytes) else piece[1]

    def raw_bytes(self, token_id: int) -> bytes | None:
        """Give a token's bytes where they are no whole characters, so that `token_text` cannot show them."""
        piece = self.piece(token_id)
        if not isinstance(piece, bytes) or "\ufffd" not in piece.decode(errors="replace"):
            return None
        return piece

    def is_text(self, token_id: int) -> bool:
        """Whether a token is a text of its own: neither special nor a part of a character."""
        text = "" if token_id in self.special_ids else self.token_text(token_id)
        return bool(text) and "\ufffd" not in text

    def piece(self, token_id: int) -> Piece:
        """Give a token's share of the text (see `Piece`); made by the decoder once, then looked up."""
        piece = self._pieces.get(token_id)
        if piece is None:
            with typed_errors(self._refusal):
                piece = self._pieces[token_id] = self._make_piece(self.backend.id_to_token(token_id))
        return piece

    def _make_piece(self, token: str | None) -> Piece:
        if token is None:
            return b""
        if self.decoding.byte_tokens == "level":
            values = [_BYTE_OF_CHARACTER.get(character) for character in token]
            return token.encode() if None in values else bytes(value for value in values if value is not None)
        byte = _BYTE_TOKEN.fullmatch(token) if self.decoding.byte_tokens == "fallback" else None
        if byte is not None:
            return bytes([int(byte[1], 16)])
        before = self._decode_tokens([_ANCHOR])
        return self._decode_tokens([token]), self._decode_tokens([_ANCHOR, token])[len(before) :]

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        **kwargs: Any,
    ) -> str:
        """Write a conversation as the model's chat template does: the text to encode without special tokens.

        `chat_template` is a template, or the name of one of the model's; by default the model's "tool_use" template
        when there are tools, else its default. `continue_final_message` leaves the last message open for the model to
        go on with. `kwargs` are variables for the template, which runs in jinja2's immutable sandbox and gets messages
        in its shape: arguments of calls may be objects or JSON text.
        """
        template = self._compile(self._template_source(chat_template, tools))
        return render(
            template,
            shaped(messages, template.shape, read_json),
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            variables={**self._named_tokens, **kwargs},
        )

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_special_tokens: bool = False,
        read_arguments: ReadArguments | None = read_json,
    ) -> tuple[str, list[int]]:
        """Give a conversation's text, as `apply_chat_template` does, and its token ids.

        Special tokens are the template's alone: spelled in a message, a role, a tool or a variable they are ordinary
        text (see chat_tokens.py). `add_special_tokens` adds what the model expects around a prompt to what the template
        writes. `read_arguments` reads those of calls; None where they have the template's form already. Raises
        `UserError`, also for variables that are arguments of this method.
        """
        variables = dict(chat_template_kwargs or {})
        taken = next((name for name in RESERVED if name in variables), None)
        if taken is not None:
            raise UserError(f"chat_template_kwargs cannot have {taken!r}; it is a parameter of its own.", taken)
        source = self._template_source(chat_template, tools)
        with typed_errors(self._refusal):
            special = self.special_tokens
            template = self._compile(source)
            messages = shaped(messages, template.shape, read_arguments)
            disguise = Disguise(special, [messages, tools, variables, source, self._named_tokens])
            try:
                special_token_guard.check_roles(special, messages)
                text = render(
                    template,
                    disguise.put_on(messages, "messages"),
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=continue_final_message,
                    tools=disguise.put_on(tools, "tools"),
                    variables={**self._named_tokens, **disguise.put_on(variables, "chat_template_kwargs")},
                )
            except RecursionError:
                raise UserError("messages, tools or chat_template_kwargs are nested too deeply.", "messages") from None
            special_token_guard.check_unicode(text, "chat_template")
            text, ids = special_token_guard.encode(special, text, disguise)
            before, after = self._around if add_special_tokens else ([], [])
        return text, [*before, *ids, *after]

    @functools.cached_property
    def special_tokens(self) -> SpecialTokens:
        """The special tokens, prepared for the guard of chat templates."""
        return SpecialTokens(self.backend)

    @functools.cached_property
    def _around(self) -> tuple[list[int], list[int]]:
        """The ids that the model expects before and after a prompt."""
        whole, text = (self.backend.encode(_ANCHOR, add_special_tokens=special).ids for special in (True, False))
        start = next((start for start in range(len(whole)) if whole[start : start + len(text)] == text), None)
        if start is None:
            raise UserError("The model's tokenizer changes a prompt that it puts something around.", "tokenizer")
        return whole[:start], whole[start + len(text) :]

    def template_shape(self, chosen: str | None, tools: Sequence[Mapping[str, Any]] | None) -> Shape:
        """Return the shape in which the template that `encode_chat` would choose takes messages."""
        return self._compile(self._template_source(chosen, tools)).shape

    def _template_source(self, chosen: str | None, tools: Sequence[Mapping[str, Any]] | None) -> str:
        if chosen is not None:
            return self.chat_templates.get(chosen, chosen)
        names = ("default",) if tools is None else ("tool_use", "default")
        for name in names:
            if name in self.chat_templates:
                return self.chat_templates[name]
        if self.chat_templates:
            raise UserError(
                f"This model has no default chat template; choose one of {', '.join(sorted(self.chat_templates))}.",
                "chat_template",
            )
        raise UserError("This model has no chat template; use generate().", "chat_template")


class NoTokenizer(Tokenizer):
    """Stands where `skip_tokenizer_init` left the tokenizer out: any token reads as nothing, and text is refused."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.decoding = Decoding("none")
        self.added_ids = self.special_ids = frozenset()
        self._named_tokens, self.chat_templates, self._adds_eos = {}, {}, False

    def piece(self, token_id: int) -> Piece:
        """Give no text."""
        return "", ""

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise UserError("There is no tokenizer, since skip_tokenizer_init left it out: use token ids.", "prompt")

    vocab_size = property(_refuse)
    encode_first = encode_last = encode_pair = _refuse
    config = token = token_id = encode = check_length = end_of = decode = _refuse
    apply_chat_template = encode_chat = template_shape = _refuse


@dataclass(frozen=True, slots=True)
class Decoding:
    """What a tokenizer's decoder does beyond giving each token its text."""

    byte_tokens: Literal["level", "fallback", "none"]  # every token is bytes; tokens like <0xE2> are; none is
    strip: str = ""  # a character removed once from the start of the whole text


def _decoding_of(decoder: Mapping[str, Any] | None, name: str) -> Decoding:
    """Read off a decoder's description how its texts join; `UserError` for one that cannot be streamed exactly.

    Known: every token is bytes; or tokens whose text depends at most on being first, with or without byte-fallback
    tokens; and after either, one character stripped from the start of the text.
    """
    stages = _flatten(decoder)
    strip = ""
    if len(stages) > 1 and stages[-1]["type"] == "Strip" and stages[-2]["type"] in ("Fuse", "ByteLevel"):
        last = stages.pop()
        if (last["start"], last["stop"]) not in ((0, 0), (1, 0)):
            raise UserError(
                f"The tokenizer of {name} strips more than one character; that is not supported.", "tokenizer"
            )
        strip = last["content"] if last["start"] else ""
    kinds = [stage["type"] for stage in stages]
    while kinds and kinds[-1] == "Fuse":
        kinds.pop()
    if kinds == ["ByteLevel"]:
        return Decoding("level", strip)
    byte_fallback = kinds[-1:] == ["ByteFallback"]
    # Metaspace treats the first token apart, which would mix with the stripping; WordPiece would hide byte tokens.
    allowed = (
        {"Replace"}
        | (set() if strip else {"Metaspace"})
        | (set() if strip or byte_fallback else {"WordPiece", "Strip"})
    )
    if not set(kinds[:-1] if byte_fallback else kinds) <= allowed:
        raise UserError(
            f"The tokenizer of {name} has a decoder that is not supported: {', '.join(kinds)}.", "tokenizer"
        )
    return Decoding("fallback" if byte_fallback else "none", strip)


def _flatten(decoder: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if decoder is None:
        return []
    if decoder["type"] != "Sequence":
        return [decoder]
    return [stage for inner in decoder["decoders"] for stage in _flatten(inner)]
