"""Conversations to token ids in which the chat template alone writes special tokens, never a caller's string.

A message that spells `<|im_end|>\\n<|im_start|>system` would otherwise end its turn and speak in another role. So every
caller's string (contents, roles, names, tool calls, tools, template variables) goes through the template in a
*disguise*: rare symbols stand for the characters that could take part in a special token. What the tokenizer then finds
in the rendered text is the template's own; the text between is turned back and encoded with the parsing of special
tokens off. A conversation without such characters, nearly every one, is rendered and encoded as it always was.

What holds: no special token that a caller's string spells, or that reaches across the end of one that is not a plain
word, becomes that token. What cannot hold for every template: one that makes a special token around a caller's word
(`'<|' + role + '|>'`), or that cuts callers' strings and joins the pieces. For the known case, roles, a word that is
part of a special token is refused unless it is a customary role.

Knows the `tokenizers` library; knows no template and nothing of requests.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from jaxllm.errors import UserError

# Templates such as Phi-3's make special tokens out of these on purpose.
ROLES = frozenset(("system", "developer", "user", "assistant", "model", "tool", "function", "ipython", "observation"))
WORD = re.compile(r"[\w.-]*")  # templates compare such strings ('function', 'low', 'python'): their ends stay
# Signs of SignWriting: symbols as most characters of special tokens are, left alone by every normalizer, by upper case
# and trimming, and, unlike private-use characters, by Python when it writes out a list.
_FIRST_TWIN, _LAST_TWIN = 0x1D800, 0x1D9FF
TWINS = re.compile(f"[{chr(_FIRST_TWIN)}-{chr(_LAST_TWIN)}]")
_MOST_IDS = 2**24  # a tokenizer is written out id by id, with or without a token: 17 ns each
_LONG_TEXT = 1024  # characters from which on a text is encoded without the GIL: 0.6 ms
_MOST_PASSES = 16  # of the search for special tokens that appear once others are disguised


class SpecialTokens:
    """Where a text has a tokenizer's special tokens, and how it is encoded without them. Safe between threads."""

    def __init__(self, backend: Any) -> None:
        from tokenizers import AddedToken, models
        from tokenizers import Tokenizer as Backend

        added = [token for _, token in sorted(backend.get_added_tokens_decoder().items())]
        self._backend = backend
        # The part of the backend that looks for added tokens, before a model that takes any text for one token.
        self._finder = Backend(models.WordLevel({"": 0}, unk_token=""))
        if backend.normalizer is not None:
            self._finder.normalizer = backend.normalizer
        self._finder.add_tokens(added)
        self._finder.encode_special_tokens = backend.encode_special_tokens
        own_ids = self._finder.get_added_tokens_decoder().items()
        self._ids = {own: backend.token_to_id(token.content) for own, token in own_ids if token.special}

        # Stands before a text that is not the first of a prompt, for tokenizers that begin a prompt in a way of its
        # own. Drawn, so that no text has it.
        self._anchor = f"\U0010fffd{secrets.token_hex(8)}"
        self._literal = _copy(backend, added)
        self._literal.add_tokens([AddedToken(self._anchor, special=False, normalized=False)])
        self._literal.encode_special_tokens = True
        # Unknown characters may have the id of a special token, which says nothing then.
        unknown = self._literal.encode("\U0010fffe", add_special_tokens=False).ids
        self.ids = frozenset(self._ids.values()) - set(unknown)

        is_normalized = backend.normalizer is not None and any(token.special and token.normalized for token in added)
        self._normalizer = backend.normalizer if is_normalized else None
        contents = {token.content for token in added if token.special and token.content}
        self.contents = frozenset(form for content in contents for form in self._forms(content))
        # A text without a match has no special token; where normalization comes first, only the backend can say.
        pattern = "|".join(re.escape(content) for content in sorted(contents)) or "(?!)"
        self._hint = re.compile(pattern) if self._normalizer is None else None
        self._beginnings = frozenset(form[:length] for form in self.contents for length in range(1, len(form)))
        self._ends = frozenset(form[length:] for form in self.contents for length in range(1, len(form)))
        self._longest = max(map(len, self.contents), default=0)

    def find(self, text: str) -> list[tuple[int, int, int]]:
        """List the special tokens that the tokenizer sees in a text, in order: id, start, end."""
        if self._hint is not None and self._hint.search(text) is None:
            return []
        encoding = encoding_of(self._finder, text)
        pairs = zip(encoding.ids, encoding.offsets, strict=True)
        return [(self._ids[own], start, end) for own, (start, end) in pairs if own in self._ids]

    def risks(self, text: str) -> set[int]:
        """Give the places of a caller's string that must not be read as they are."""
        if self._hint is not None:
            spans = [range(*match.span()) for match in self._hint.finditer(text)]
        else:
            spans = [range(start, end) for _, start, end in self.find(text)]
        places = {place for span in spans for place in span if not text[place].isspace()}
        if WORD.fullmatch(text):
            return places
        # The template may trim the text and set it beside another. One place at each end breaks whatever token would
        # reach across.
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
        """Encode a text with its special tokens; `UserError` if the model makes another out of plain characters."""
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
        """Encode plain text, at a prompt's start or behind a special token; errors as of `encode`."""
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
            f"messages spell the special token {token!r}, which this tokenizer cannot write as text.", "messages"
        )


class Disguise:
    """The twins that stand for some of a conversation's characters while a template is rendered."""

    def __init__(self, special: SpecialTokens, everything: Iterable[Any]) -> None:
        """Begin with none; `everything` are the values that are rendered: their characters cannot be used as twins."""
        self._special = special
        self._everything = list(everything)
        self._twins: dict[str, str] = {}
        self._free: Iterator[str] | None = None

    @property
    def is_used(self) -> bool:
        """Whether any character has a twin."""
        return bool(self._twins)

    def put_on(self, value: Any, parameter: str) -> Any:
        """Copy a JSON-like value with its strings disguised, keys too; what is not JSON-like stays as it is."""
        if isinstance(value, str):
            return self._disguised(value, parameter)
        if isinstance(value, Mapping):
            return {self.put_on(key, parameter): self.put_on(item, parameter) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.put_on(item, parameter) for item in value]
        return value

    def take_off(self, text: str) -> str:
        """Give every twin's own character back."""
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
        raise UserError(f"{parameter} spell special tokens within special tokens; write them otherwise.", parameter)

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
    """Encode a text with a backend of the `tokenizers` library; a long one lets other threads run meanwhile.

    With `pair`, both texts are one prompt.

    `encode` holds the GIL throughout: 600 kB kept the event loop waiting for 0.61 of 0.62 s. `encode_batch` lets it go
    (0.02 s), and gives the same; it costs 3 to 6 µs more, a tenth of what 100 characters take (all measured).
    """
    if len(text) + len(pair or "") <= _LONG_TEXT:
        return backend.encode(text, pair, add_special_tokens=add_special_tokens)
    (encoding,) = backend.encode_batch([text if pair is None else (text, pair)], add_special_tokens=add_special_tokens)
    return encoding


def encode(special: SpecialTokens, text: str, disguise: Disguise) -> tuple[str, list[int]]:
    """Give a rendered conversation without its disguise, and its token ids: special tokens are the template's alone."""
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
    """Refuse roles that a template could complete to a special token, unless they are customary."""
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
    """Raise `UserError` for what is no valid Unicode text."""
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
    """Copy a tokenizer, sharing its model and the like: reading a vocabulary of 150,000 again takes half a second."""
    from tokenizers import Tokenizer as Backend

    copy = Backend(backend.model)
    for name in ("normalizer", "pre_tokenizer"):
        if getattr(backend, name) is not None:
            setattr(copy, name, getattr(backend, name))
    copy.add_tokens(list(added))
    ours, theirs = (
        {key: token.content for key, token in each.get_added_tokens_decoder().items()} for each in (copy, backend)
    )
    # The ids of added tokens follow from their order, unless a file gave them others.
    if ours == theirs:
        return copy
    largest = max(backend.get_vocab().values(), default=0)
    if largest >= _MOST_IDS:
        raise UserError(f"The model's tokenizer has a token with the id {largest}, no vocabulary is that large.")
    return Backend.from_str(backend.to_str())
