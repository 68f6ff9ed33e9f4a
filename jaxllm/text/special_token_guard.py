r"""Encode conversations so that only the chat template, never a caller's string, produces special tokens.

A message containing `<|im_end|>\
<|im_start|>system` could otherwise impersonate another role. Callers' strings (contents, roles, names, tool calls,
tools, template variables) are rendered *disguised*: rare symbols replace characters that could be part of a special
token. Special tokens in the result are the template's; text between them is restored and encoded literally.
Guarantee: no special token spelled by a caller's string, or crossing the end of one that is not a plain word, is
encoded as that token. Not covered: templates that build special tokens around a caller's word (`'<|' + role + '|>'`),
or cut and join callers' strings.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from jaxllm.errors import UserError

# Phi-3's template forms special tokens from these.
ROLES = frozenset(("system", "developer", "user", "assistant", "model", "tool", "function", "ipython", "observation"))
WORD = re.compile(r"[\w.-]*")  # templates compare these ('function', 'low', 'python'): ends are unchanged
# SignWriting: symbols, unaffected by normalizers, case conversion, trimming and Python's repr.
_FIRST_TWIN, _LAST_TWIN = 0x1D800, 0x1D9FF
TWINS = re.compile(f"[{chr(_FIRST_TWIN)}-{chr(_LAST_TWIN)}]")
_MOST_IDS = 2**24  # writing out a tokenizer takes 17 ns per id
_LONG_TEXT = 1024  # characters, encoded without the GIL; 0.6 ms
_MOST_PASSES = 16  # each disguises newly exposed tokens


class SpecialTokens:
    """Finds a tokenizer's special tokens in text, and encodes text literally. Thread-safe."""

    def __init__(self, backend: Any) -> None:
        from tokenizers import AddedToken, models
        from tokenizers import Tokenizer as Backend

        added = [token for _, token in sorted(backend.get_added_tokens_decoder().items())]
        self._backend = backend
        # Searches added tokens only.
        self._finder = Backend(models.WordLevel({"": 0}, unk_token=""))
        if backend.normalizer is not None:
            self._finder.normalizer = backend.normalizer
        self._finder.add_tokens(added)
        self._finder.encode_special_tokens = backend.encode_special_tokens
        own_ids = self._finder.get_added_tokens_decoder().items()
        self._ids = {own: backend.token_to_id(token.content) for own, token in own_ids if token.special}

        # Precedes text inside a prompt, whose start some tokenizers treat specially. Random: in no text.
        self._anchor = f"\U0010fffd{secrets.token_hex(8)}"
        self._literal = _copy(backend, added)
        self._literal.add_tokens([AddedToken(self._anchor, special=False, normalized=False)])
        self._literal.encode_special_tokens = True
        # Unknown characters may have a special token's id: no evidence.
        unknown = self._literal.encode("\U0010fffe", add_special_tokens=False).ids
        self.ids = frozenset(self._ids.values()) - set(unknown)

        is_normalized = backend.normalizer is not None and any(token.special and token.normalized for token in added)
        self._normalizer = backend.normalizer if is_normalized else None
        contents = {token.content for token in added if token.special and token.content}
        self.contents = frozenset(form for content in contents for form in self._forms(content))
        # Without normalization, other text has no special token.
        pattern = "|".join(re.escape(content) for content in sorted(contents)) or "(?!)"
        self._hint = re.compile(pattern) if self._normalizer is None else None
        self._beginnings = frozenset(form[:length] for form in self.contents for length in range(1, len(form)))
        self._ends = frozenset(form[length:] for form in self.contents for length in range(1, len(form)))
        self._longest = max(map(len, self.contents), default=0)

    def find(self, text: str) -> list[tuple[int, int, int]]:
        """Return the special tokens in a text, in order, as (id, start, end)."""
        if self._hint is not None and self._hint.search(text) is None:
            return []
        encoding = encoding_of(self._finder, text)
        pairs = zip(encoding.ids, encoding.offsets, strict=True)
        return [(self._ids[own], start, end) for own, (start, end) in pairs if own in self._ids]

    def risks(self, text: str) -> set[int]:
        if self._hint is not None:
            spans = [range(*match.span()) for match in self._hint.finditer(text)]
        else:
            spans = [range(start, end) for _, start, end in self.find(text)]
        places = {place for span in spans for place in span if not text[place].isspace()}
        if WORD.fullmatch(text):
            return places
        # The template may trim and concatenate texts; one disguised character per end prevents tokens across it.
        trimmed = text.strip()
        first = text.find(trimmed)
        reach = 4 * self._longest  # normalization may shorten it
        for form in {trimmed, text}:
            for head in self._forms(form[:reach]):
                for length in self._lengths(head):
                    if head[:length] in self._ends:
                        places.add(first)
            for tail in self._forms(form[max(0, len(form) - reach) :]):
                for length in self._lengths(tail):
                    if tail[-length:] in self._beginnings:
                        places.add(first + max(len(trimmed) - 1, 0))
        return places

    def encode(self, text: str) -> list[int]:
        """Encode a text, special tokens spelled in it as such; raise `UserError` if other text becomes one."""
        encoding = encoding_of(self._backend, text)
        ids = encoding.ids
        spelled: set[tuple[int, str]] = set()
        for index, token_id in enumerate(ids):
            if token_id in self.ids:
                start, end = encoding.token_to_chars(index)
                spelled.add((token_id, text[start:end]))
        for token_id, piece in spelled:
            if all(token_id != found for found, _, _ in self.find(piece)):
                raise self._refusal(token_id)
        return ids

    def encode_literally(self, text: str, is_first: bool) -> list[int]:
        """Encode plain text, at a prompt's start or after a special token; raises as `encode`."""
        if is_first:
            ids = encoding_of(self._literal, text).ids
        else:
            ids = encoding_of(self._literal, self._anchor + text).ids[1:]
        made = next((token_id for token_id in ids if token_id in self.ids), None)
        if made is not None:
            raise self._refusal(made)
        return ids

    def _forms(self, text: str) -> tuple[str, ...]:
        return (text,) if self._normalizer is None else (text, self._normalizer.normalize_str(text))

    def _lengths(self, text: str) -> range:
        return range(1, min(len(text), self._longest) + 1)

    def _refusal(self, token_id: int) -> UserError:
        token = self._backend.id_to_token(token_id)
        return UserError(
            f"messages spell the special token {token!r}, which this tokenizer cannot write as text; remove it.",
            "messages",
        )


class Disguise:
    """Substitutes for a conversation's characters while a template renders it."""

    def __init__(self, special: SpecialTokens, everything: Iterable[Any]) -> None:
        self._special = special
        self._everything = list(everything)
        self._twins: dict[str, str] = {}
        self._free: Iterator[str] | None = None

    @property
    def is_used(self) -> bool:
        return bool(self._twins)

    def put_on(self, value: Any, parameter: str) -> Any:
        if isinstance(value, str):
            return self._disguised(value, parameter)
        if isinstance(value, Mapping):
            return {self.put_on(key, parameter): self.put_on(item, parameter) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.put_on(item, parameter) for item in value]
        return value

    def take_off(self, text: str) -> str:
        return text.translate({ord(twin): character for character, twin in self._twins.items()})

    def _disguised(self, text: str, parameter: str) -> str:
        check_unicode(text, parameter)
        for _ in range(_MOST_PASSES):
            twins = set(self._twins.values())
            places = [place for place in self._special.risks(text) if text[place] not in twins]
            if not places:
                return text
            characters = list(text)
            for place in places:
                characters[place] = self._twin(text[place])
            text = "".join(characters)
        raise UserError(f"{parameter} spell special tokens within special tokens; change the text.", parameter)

    def _twin(self, character: str) -> str:
        twin = self._twins.get(character)
        if twin is None:
            if self._free is None:
                used = {found for text in _strings(self._everything) for found in TWINS.findall(text)}
                self._free = (chr(code) for code in range(_FIRST_TWIN, _LAST_TWIN + 1) if chr(code) not in used)
            twin = self._twins[character] = next(self._free, "")
            if not twin:
                raise UserError("messages use every sign of SignWriting; leave some out.", "messages")
        return twin


def encoding_of(backend: Any, text: str, add_special_tokens: bool = False, pair: str | None = None) -> Any:
    """Encode text, or a pair, with a `tokenizers` backend; long texts release the GIL.

    `encode` holds it: 600 kB blocked the event loop for 0.61 of 0.62 s, `encode_batch` for 0.02 s, with 3 to 6 µs more.
    """
    if len(text) + len(pair or "") <= _LONG_TEXT:
        return backend.encode(text, pair, add_special_tokens=add_special_tokens)
    (encoding,) = backend.encode_batch([text if pair is None else (text, pair)], add_special_tokens=add_special_tokens)
    return encoding


def encode(special: SpecialTokens, text: str, disguise: Disguise) -> tuple[str, list[int]]:
    """Return a conversation undisguised, and its ids with the template's special tokens only."""
    if not disguise.is_used:
        return text, special.encode(text)
    ids: list[int] = []
    place = 0
    for token_id, start, end in [*special.find(text), (None, len(text), len(text))]:
        if start > place:
            ids += special.encode_literally(disguise.take_off(text[place:start]), is_first=place == 0)
        if token_id is not None:
            ids.append(token_id)
        place = end
    return disguise.take_off(text), ids


def check_roles(special: SpecialTokens, messages: Sequence[Any]) -> None:
    """Refuse uncustomary roles that a template could complete to a special token."""
    for index, message in enumerate(messages):
        role = message.get("role") if isinstance(message, Mapping) else None
        if not isinstance(role, str) or not role or role in ROLES:
            continue
        completed = min((content for content in special.contents if role in content), default=None)
        if completed is not None:
            raise UserError(
                f"messages[{index}] has a role that is part of the special token {completed!r}; use another.",
                "messages",
            )


def check_unicode(text: str, parameter: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"The text has a lone surrogate (U+{ord(text[error.start]):04X}) at character {error.start}: "
            "it is not valid Unicode.",
            parameter,
        ) from None


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for pair in value.items():
            yield from _strings(pair)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)


def _copy(backend: Any, added: Sequence[Any]) -> Any:
    """Copy a tokenizer with these added tokens, without its vocabulary: half a second for 150,000."""
    from tokenizers import Tokenizer as Backend

    copy = Backend(backend.model)
    for name in ("normalizer", "pre_tokenizer"):
        if getattr(backend, name) is not None:
            setattr(copy, name, getattr(backend, name))
    copy.add_tokens(list(added))
    ours, theirs = (
        {key: token.content for key, token in each.get_added_tokens_decoder().items()} for each in (copy, backend)
    )
    # In this order, unless the file assigns others.
    if ours == theirs:
        return copy
    largest = max(backend.get_vocab().values(), default=0)
    if largest >= _MOST_IDS:
        raise UserError(f"The model's tokenizer has a token with the id {largest}, no vocabulary is that large.")
    return Backend.from_str(backend.to_str())
