"""Set protobuf fields to a caller's values, with type errors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.struct_pb2 import Struct

from jaxllm.errors import UserError


def set_field(message: Message, field: str, name: str, value: Any) -> None:
    """Set `field` (a path such as `sampling.top_p`); raise `UserError` for `name` if the type is wrong."""
    *path, leaf = field.split(".")
    for step in path:
        message = getattr(message, step)
    descriptor = message.DESCRIPTOR.fields_by_name[leaf]
    try:
        if not _fits(descriptor, value):
            raise TypeError(name)
        if descriptor.message_type is None and not descriptor.is_repeated:
            setattr(message, leaf, value)
        elif descriptor.message_type is Duration.DESCRIPTOR:
            getattr(message, leaf).FromNanoseconds(round(value * 1e9))
        elif descriptor.is_repeated and descriptor.message_type is None:
            getattr(message, leaf).extend(value)
        else:
            getattr(message, leaf).update(value)
    except (TypeError, ValueError, OverflowError, AttributeError) as error:
        raise UserError(f"{name} must be {_expected(descriptor)}, got {shown(value)}.", name, value) from error


def _fits(field: Any, value: Any) -> bool:
    """Check the type: protobuf accepts True as 1 and bytes as text."""
    if field.message_type is not None:
        is_mapping = field.is_repeated or field.message_type is Struct.DESCRIPTOR
        if not is_mapping:
            return not isinstance(value, bool)
        if not isinstance(value, Mapping) or field.message_type is Struct.DESCRIPTOR:
            return isinstance(value, Mapping)
        parts = [field.message_type.fields_by_name[part] for part in ("key", "value")]
        return all(_is_scalar(part, own) for item in value.items() for part, own in zip(parts, item, strict=True))
    if field.is_repeated:
        return not isinstance(value, str | bytes | Mapping) and all(_is_scalar(field, item) for item in value)
    return _is_scalar(field, value)


def _is_scalar(field: Any, value: object) -> bool:
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        return isinstance(value, bytes if field.type == FieldDescriptor.TYPE_BYTES else str)
    return isinstance(value, bool) == (field.cpp_type == FieldDescriptor.CPPTYPE_BOOL)


def _expected(field: Any) -> str:
    if field.message_type is Duration.DESCRIPTOR:
        return "a number of seconds"
    if field.message_type is Struct.DESCRIPTOR:
        return "a mapping of names to JSON values"
    if field.message_type is not None:
        return "a mapping of token ids to numbers"
    if field.type == FieldDescriptor.TYPE_BYTES:
        return "the bytes of a file"
    one, many = {
        FieldDescriptor.CPPTYPE_BOOL: ("True or False", "flags"),
        FieldDescriptor.CPPTYPE_DOUBLE: ("a number", "numbers"),
        FieldDescriptor.CPPTYPE_STRING: ("a valid text", "valid texts"),
        FieldDescriptor.CPPTYPE_UINT32: (f"an integer from 0 to {2**32 - 1}", f"integers from 0 to {2**32 - 1}"),
        FieldDescriptor.CPPTYPE_INT32: (f"an integer from {-(2**31)} to {2**31 - 1}", "integers"),
        FieldDescriptor.CPPTYPE_INT64: (f"an integer from {-(2**63)} to {2**63 - 1}", "integers"),
    }[field.cpp_type]
    return f"a list of {many}" if field.is_repeated else one


def number_of(name: str, value: object, choices: Mapping[str, int]) -> Any:
    if not isinstance(value, str) or value not in choices:
        expected = " or ".join(repr(choice) for choice in choices)
        raise UserError(f"{name} must be {expected}, got {shown(value)}.", name, value)
    return choices[value]


def as_json(name: str, value: object) -> str:
    try:
        return json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise UserError(f"{name} cannot be written as JSON: {error}", name, value) from error


def shown(value: object) -> str:
    try:
        text = " ".join(repr(value).split())
    except ValueError:  # too many digits for CPython
        return f"{type(value).__name__} too long to print"
    return text if len(text) <= 100 else f"{text[:97]}..."
