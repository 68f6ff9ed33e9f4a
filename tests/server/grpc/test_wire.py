"""All fields of a message are counted before parsing, nested ones too; the parser's worst case is refused."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from jaxllm import UserError
from jaxllm.v1 import control_pb2, inference_pb2
from jaxllm_server.grpc import wire

REQUESTS = [
    method.input_type
    for service in (
        *inference_pb2.DESCRIPTOR.services_by_name.values(),
        *control_pb2.DESCRIPTOR.services_by_name.values(),
    )
    for method in service.methods
]
MOST, LEVELS = 64, 12


def varint(value: int) -> bytes:
    written = b""
    while value > 127:
        written, value = written + bytes([value & 127 | 128]), value >> 7
    return written + bytes([value])


def held(number: int, value: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(value)) + value


def repeated(descriptor: Descriptor, path: tuple[FieldDescriptor, ...] = ()) -> Iterator[tuple[FieldDescriptor, ...]]:
    """Yield the paths of all repeated fields that are messages or texts, with one recursion into recursive messages."""
    if len(path) > LEVELS:
        return
    for field in descriptor.fields:
        kind = field.message_type
        if field.is_repeated and (kind is not None or field.cpp_type == field.CPPTYPE_STRING):
            yield (*path, field)
        if kind is not None and [each.message_type for each in path].count(kind) < 2:
            yield from repeated(kind, (*path, field))


PATHS = {(each, path) for each in REQUESTS for path in repeated(each)}


def test_all_that_repeats_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MOST_FIELDS", MOST)
    assert len(PATHS) > 30
    for descriptor, path in PATHS:
        for count, is_refused in ((MOST - len(path), False), (MOST + 1, True)):
            body = held(path[-1].number, b"") * count
            for field in reversed(path[:-1]):
                body = held(field.number, body)
            names = ".".join(field.name for field in path)
            if is_refused:
                with pytest.raises(UserError, match="fields"):
                    wire.check(body, descriptor)
                    pytest.fail(names)
            else:
                wire.check(body, descriptor)


def test_keys_that_share_a_bucket_are_not_parsed() -> None:
    """Multiples of a power of two, up to the largest key, all collide."""
    sampling = inference_pb2.GenerateRequest.DESCRIPTOR.fields_by_name["sampling"].number
    for step in (1 << 16, 1 << 20, 1 << 13, 1 << 10, 1 << 6):
        keys = range(0, min(step << 15, (1 << 32) - 1), step)
        entries = b"".join(held(10, b"\x08" + varint(key)) for key in keys)
        body = held(sampling, entries)
        began = time.thread_time()
        with pytest.raises(UserError, match="logit_bias has a key above"):
            wire.check(body, inference_pb2.GenerateRequest.DESCRIPTOR)
        allowed = b"".join(held(10, b"\x08" + varint(key)) for key in keys if key <= wire.LARGEST_KEY)
        wire.check(held(sampling, allowed), inference_pb2.GenerateRequest.DESCRIPTOR)
        began = time.thread_time()
        inference_pb2.GenerateRequest.FromString(held(sampling, allowed))
        assert time.thread_time() - began < 0.1


def test_honest_messages_and_noise_pass() -> None:
    request = inference_pb2.GenerateRequest(text="a")
    request.sampling.logit_bias.update(dict.fromkeys(range(20_000), 1.0))
    request.token_ids.ids.extend(range(300_000))
    request.extensions.update({"a": [{"b": [1.0, None, "c"]}] * 100})
    raw = request.SerializeToString()
    wire.check(raw, request.DESCRIPTOR)
    for end in range(0, 4000, 7):  # truncated messages pass: the parser refuses them
        wire.check(raw[len(raw) - end :], request.DESCRIPTOR)
        wire.check(raw[:end], request.DESCRIPTOR)
