"""Items of the Responses API: parsing, stored form (as OpenAI's lists), conversion to chat messages. Pure."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NoReturn

from jaxllm.errors import UnsupportedError, UserError
from jaxllm.media.image_part import NamedPart

Item = Mapping[str, Any]

RESPONSE_PREFIX = "resp_"
MOST_PARTS = 16_384  # of a conversation, as of a chat
_ROLES = ("user", "assistant", "system", "developer")
_PHASES = ("commentary", "final_answer")
_STATUSES = ("in_progress", "completed", "incomplete")
_LISTS = ("content", "output", "summary")
_IMAGE, _SOUND, _VIDEO = "input_image", "input_audio", "input_video"
_MEDIA: Mapping[str, str] = MappingProxyType({_IMAGE: "an image", _SOUND: "a sound", _VIDEO: "a video"})
_URLS: Mapping[str, str] = MappingProxyType({_IMAGE: "image_url", _VIDEO: "video_url"})
_DETAILS = ("auto", "low", "high", "original")
_PACKED = "jaxllm-1."
_SUMMARY = "Summary of the conversation so far:\n"
_SHOWN = 64  # characters


def response_id_of(own_id: str) -> str:
    """Return the id of the response that an item's id contains.

    >>> response_id_of(item_id("msg", "a_b", "2"))
    'resp_a_b'
    """
    return RESPONSE_PREFIX + own_id.partition("_")[2].rpartition("_")[0]


def item_id(prefix: str, request_id: str, number: str) -> str:
    return f"{prefix}_{request_id}_{number}"


def references_of(given: Any) -> set[str]:
    if not isinstance(given, list) or len(given) > MOST_PARTS:
        return set()
    return {item["id"] for item in given if _is_reference(item)}


def items_of(given: Any, request_id: str, kept: Mapping[str, Item] = MappingProxyType({})) -> list[Item]:
    """Parse `input`; `kept` are the stored items it references.

    Images, sounds and videos are read when the prompt is built. Raises UserError naming the item, or UnsupportedError
    for items and parts that no model here reads.
    """
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if not isinstance(given, list):
        raise UserError("input must be a text or a list of items.", "input")
    if len(given) > MOST_PARTS or num_parts(item for item in given if isinstance(item, Mapping)) > MOST_PARTS:
        raise UserError(f"input may hold at most {MOST_PARTS} items and parts of items.", "input")
    left = dict(kept)  # each at most once: a reference is smaller than its item
    return [_item_of(item, f"input[{index}]", request_id, str(index), left) for index, item in enumerate(given)]


def num_parts(items: Iterable[Item]) -> int:
    lists = ([item.get(name) for name in _LISTS] for item in items)
    return sum(1 + sum(len(each) for each in own if isinstance(each, list)) for own in lists)


def num_characters(items: Iterable[Item]) -> int:
    count = 0
    for item in items:
        texts = item.get("arguments", ""), item.get("encrypted_content", "")
        for value in (*texts, *(item.get(name, ()) for name in _LISTS)):
            count += len(value) if isinstance(value, str) else sum(map(_length_of, value))
    return count


def has_media(items: Iterable[Item]) -> bool:
    contents = (item.get(name) for item in items for name in ("content", "output"))
    return any(part["type"] in _MEDIA for parts in contents if isinstance(parts, list) for part in parts)


def messages_of(items: Iterable[Item], num_before: int = 0) -> list[dict[str, Any]]:
    """Convert items to chat messages; consecutive reasoning, text and calls become one message.

    The first `num_before` items are of earlier requests.
    """
    messages: list[dict[str, Any]] = []
    for index, item in enumerate(items, -num_before):
        path = f"input[{index}]" if index >= 0 else f"the stored item {item['id'][:_SHOWN]}"
        if item["type"] == "compaction":
            messages.append({"role": "assistant", "content": _SUMMARY + unpacked(item["encrypted_content"])})
        elif item["type"] == "function_call_output":
            content = _chat_content(item["output"], f"{path}.output")
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": content})
        elif item["type"] == "message" and item["role"] != "assistant":
            role = "system" if item["role"] == "developer" else item["role"]
            messages.append({"role": role, "content": _chat_content(item["content"], f"{path}.content")})
        else:
            _add_to_answer(messages, item)
    return messages


def continues_answer(items: Sequence[Item]) -> bool:
    """Return whether the last item is an incomplete answer to continue.

    As vLLM's entrypoints/openai/responses/utils.py, should_continue_final_message.
    """
    last = items[-1] if items else {}
    return last.get("type") == "message" and last["role"] == "assistant" and last["status"] != "completed"


def check_outputs(items: Iterable[Item]) -> None:
    """Require a call for each tool output, as OpenAI's server does."""
    called = set()
    for item in items:
        if item["type"] == "function_call":
            called.add(item["call_id"])
        elif item["type"] == "function_call_output" and item["call_id"] not in called:
            _refuse(f"No tool call found for function call output with call_id {item['call_id'][:_SHOWN]!r}.")


def packed(summary: str) -> str:
    """Encode a summary as a compaction's content, in base64.

    >>> unpacked(packed("Sum up."))
    'Sum up.'
    """
    return _PACKED + base64.urlsafe_b64encode(summary.encode()).decode("ascii")


def unpacked(content: str) -> str:
    """Return a summary's text; raise ValueError if another server created it."""
    if not content.startswith(_PACKED):
        raise ValueError("another server's")
    return base64.b64decode(content.removeprefix(_PACKED), altchars=b"-_", validate=True).decode()


def _is_reference(item: Any) -> bool:
    if not isinstance(item, Mapping) or not isinstance(item.get("id"), str):
        return False
    kind = item.get("type")
    return kind == "item_reference" or (kind is None and "role" not in item)


def _item_of(item: Any, path: str, request_id: str, number: str, kept: dict[str, Item]) -> Item:
    if not isinstance(item, Mapping):
        _refuse(f"{path} must be an object.")
    if _is_reference(item):
        if item["id"] not in kept:
            _refuse(f"{path}: an item with the id {item['id'][:_SHOWN]!r} is not stored here, or is referenced twice.")
        return kept.pop(item["id"])
    kind = item.get("type", "message")
    if not isinstance(kind, str) or kind not in _READERS:
        shown = str(kind)[:_SHOWN]
        message = f"{path} is of type {shown!r}; jaxllm takes {', '.join(_READERS)} and item_reference."
        raise UnsupportedError(message, "input")
    prefix, read = _READERS[kind]
    given_id = item.get("id")
    if not isinstance(given_id, str | None):
        _refuse(f"{path}.id must be a string.")
    status = item.get("status") or "completed"
    if status not in _STATUSES:
        _refuse(f"{path}.status must be one of {', '.join(_STATUSES)}.")
    head = {"id": given_id or item_id(prefix, request_id, f"in{number}"), "type": kind, "status": status}
    return head | read(item, path)


def _message(item: Item, path: str) -> dict[str, Any]:
    role = item.get("role")
    if role not in _ROLES:
        _refuse(f"{path}.role must be one of {', '.join(_ROLES)}.")
    read = {"role": role, "content": _parts_of(item.get("content"), f"{path}.content", role == "assistant")}
    if item.get("phase") is None:
        return read
    if item["phase"] not in _PHASES:
        _refuse(f"{path}.phase must be one of {', '.join(_PHASES)}.")
    return read | {"phase": item["phase"]}


def _call(item: Item, path: str) -> dict[str, Any]:
    return {name: _text_of(item, name, path) for name in ("call_id", "name", "arguments")}


def _call_output(item: Item, path: str) -> dict[str, Any]:
    call_id, output = _text_of(item, "call_id", path), item.get("output")
    return {
        "call_id": call_id,
        "output": output if isinstance(output, str) else _parts_of(output, f"{path}.output", False),
    }


def _reasoning(item: Item, path: str) -> dict[str, Any]:
    """Validate a reasoning item; return its `summary` and `content` parts.

    Raises UnsupportedError for encrypted content alone.
    """
    content, summary = (
        [] if item.get(name) is None else _texts_of(item[name], f"{path}.{name}") for name in ("content", "summary")
    )
    if item.get("encrypted_content") and not content and not summary:
        message = f"{path}.encrypted_content was created by another server; give the reasoning in content."
        raise UnsupportedError(message, "input")
    return {
        "summary": [{"type": "summary_text", "text": text} for text in summary],
        "content": [{"type": "reasoning_text", "text": text} for text in content],
    }


def _compaction(item: Item, path: str) -> dict[str, Any]:
    content = _text_of(item, "encrypted_content", path)
    try:
        unpacked(content)
    except (ValueError, binascii.Error) as error:
        message = f"{path}.encrypted_content is not a compaction created by jaxllm, or is truncated."
        raise UserError(message, "input") from error
    return {"encrypted_content": content}


_READERS: Mapping[str, tuple[str, Callable[[Item, str], dict[str, Any]]]] = MappingProxyType(
    {
        "message": ("msg", _message),
        "function_call": ("fc", _call),
        "function_call_output": ("fco", _call_output),
        "reasoning": ("rs", _reasoning),
        "compaction": ("cmp", _compaction),
    }
)


def _parts_of(content: Any, path: str, is_answer: bool) -> list[dict[str, Any]]:
    parts = [{"text": content}] if isinstance(content, str) else content
    if is_answer:
        texts = _texts_of(parts, path)
        return [{"type": "output_text", "text": text, "annotations": [], "logprobs": []} for text in texts]
    return [_input_part(part, at) for at, part in _named(parts, path)]


def _input_part(part: Any, path: str) -> dict[str, Any]:
    kind = _kind_of(part)
    if kind in _MEDIA:
        return (_sound_part if kind == _SOUND else _url_part)(part, path)
    for own, name in _URLS.items():
        if kind == name:
            _refuse(f"{path}: {kind} is a part of chat completions; in the Responses API it is {own}.")
    return {"type": "input_text", "text": _part_text(part, path)}


def _kind_of(part: Any) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    return kind if isinstance(kind, str) else ""


def _url_part(part: Mapping[str, Any], path: str) -> dict[str, Any]:
    kind, name = part["type"], _URLS[part["type"]]
    if part.get("file_id") is not None:
        raise UnsupportedError(f"{path}.file_id: files are not stored here; give {name}.", "input")
    if not isinstance(part.get(name), str):
        _refuse(f"{path}.{name} must be a text: a data: URL, or one that the server may read.")
    if kind == _VIDEO:
        return {"type": kind, name: part[name]}
    detail = part.get("detail")
    if detail is not None and detail not in _DETAILS:
        _refuse(f"{path}.detail must be one of {', '.join(_DETAILS)}.")
    return {"type": kind, name: part[name], "detail": detail or "auto", "file_id": None}


def _sound_part(part: Mapping[str, Any], path: str) -> dict[str, Any]:
    given = part.get(_SOUND)
    fields = {name: given.get(name) for name in ("data", "format")} if isinstance(given, Mapping) else {}
    if not fields or not all(isinstance(value, str) for value in fields.values()):
        _refuse(f"{path}.{_SOUND} must be an object with a file's data in base64 and its format.")
    return {"type": _SOUND, _SOUND: fields}


def _texts_of(parts: Any, path: str) -> list[str]:
    return [_part_text(part, at) for at, part in _named(parts, path)]


def _named(parts: Any, path: str) -> Iterator[tuple[str, Any]]:
    if not isinstance(parts, list):
        _refuse(f"{path} must be a text or a list of parts.")
    return ((f"{path}[{index}]", part) for index, part in enumerate(parts))


def _part_text(part: Any, path: str) -> str:
    kind = _kind_of(part)
    if kind == "input_file":
        message = f"{path}: {kind} is not supported; models here read texts, images, videos and sound."
        raise UnsupportedError(message, "input")
    if kind in _MEDIA:
        raise UnsupportedError(f"{path}: {_MEDIA[kind]} is accepted in messages and outputs of tools only.", "input")
    text = part.get("refusal" if kind == "refusal" else "text") if isinstance(part, Mapping) else None
    if not isinstance(text, str):
        _refuse(f"{path} must be a part with a text.")
    return text


def _text_of(item: Item, name: str, path: str) -> str:
    if not isinstance(item.get(name), str):
        _refuse(f"{path}.{name} must be a string.")
    return item[name]


def _refuse(message: str) -> NoReturn:
    raise UserError(message, "input")


def _chat_content(parts: str | list[dict[str, Any]], path: str = "") -> str | list[dict[str, Any]]:
    """Return parts as a chat message's content; a single text becomes a string, for all templates."""
    if isinstance(parts, str):
        return parts
    if not parts or (len(parts) == 1 and parts[0]["type"] not in _MEDIA):
        return "".join(part["text"] for part in parts)
    return [_chat_part(part, at) for at, part in _named(parts, path)]


def _chat_part(part: Mapping[str, Any], path: str) -> dict[str, Any]:
    kind = part["type"]
    if kind in _URLS:
        return NamedPart(path, type=_URLS[kind], **{_URLS[kind]: part[_URLS[kind]]})
    if kind == _SOUND:
        return NamedPart(path, type=kind, **{kind: part[kind]})
    return {"type": "text", "text": part["text"]}


def _length_of(part: Mapping[str, Any]) -> int:
    if part["type"] == _SOUND:
        return len(part[_SOUND]["data"])
    return len(part[_URLS.get(part["type"], "text")])


# Must be absent: the order is reasoning, content, calls.
_COMES_BEFORE: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "reasoning": ("reasoning_content", "content", "tool_calls"),
        "message": ("content", "tool_calls"),
        "function_call": (),
    }
)


def _add_to_answer(messages: list[dict[str, Any]], item: Item) -> None:
    kind = item["type"]
    is_answer = bool(messages) and messages[-1]["role"] == "assistant"
    if not is_answer or any(messages[-1].get(name) for name in _COMES_BEFORE[kind]):
        messages.append({"role": "assistant", "content": ""})
    last = messages[-1]
    if kind == "reasoning":  # else summary, as in vLLM
        last["reasoning_content"] = "".join(part["text"] for part in item["content"] or item["summary"])
    elif kind == "message":
        last["content"] = _chat_content(item["content"])
    else:
        function = {"name": item["name"], "arguments": item["arguments"]}
        call = {"id": item["call_id"], "type": "function", "function": function}
        last.setdefault("tool_calls", []).append(call)
