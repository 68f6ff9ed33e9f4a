"""No gRPC message blocks the event loop for 50 ms after it is parsed, with any large field of any method.

gRPC parses a message in the loop: 8 MiB of numbers, the limit, take 30 to 60 ms, others a few. Methods and fields are
those of the protocol's descriptors. `held_loop.py` measures, on a server that generates text and on one that embeds.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from google.protobuf import descriptor, message_factory, struct_pb2

from jaxllm.v1 import control_pb2, inference_pb2
from tests.hostile.held_loop import MOST_SECONDS
from tests.support.pooling_models import bert
from tests.support.serving_process import QUICK, ServingProcess

LARGEST = 7_900_000  # bytes of one field
TRIES = 4  # the least of them is used
DEPTH = 3  # of nested messages
SERVICES = (inference_pb2.DESCRIPTOR.services_by_name["InferenceService"],
            control_pb2.DESCRIPTOR.services_by_name["ControlService"])  # fmt: skip
WITHOUT_FIELDS = ("StreamKvEvents", "PauseGeneration", "ResumeGeneration")
POOLING = ("Embed", "StreamEmbed", "Classify", "Score")


def largest(kind: descriptor.Descriptor, depth: int = DEPTH) -> Iterator[tuple[str, Any]]:
    """Yield a message for each field, nested ones included, with a large value of that field only."""
    make = message_factory.GetMessageClass(kind)
    for field in kind.fields:
        found, nested = make(), field.message_type
        if nested is not None and nested.GetOptions().map_entry:
            key, value = nested.fields
            for number in range(200_000):
                place = getattr(found, field.name)
                name = str(number) if key.type == key.TYPE_STRING else number
                if value.message_type is not None:
                    place[name].SetInParent()
                else:
                    place[name] = "x" if value.type == value.TYPE_STRING else 1
        elif nested is struct_pb2.Struct.DESCRIPTOR:
            getattr(found, field.name).update({str(number): 1 for number in range(200_000)})
        elif nested is not None:
            inner = largest(nested, depth - 1) if depth else iter(())
            for name, value in inner:
                found = make()
                place = getattr(found, field.name)
                (place.add() if field.is_repeated else place).CopyFrom(value)
                yield f"{field.name}.{name}", found
            found = make()
            if not field.is_repeated:
                continue
            getattr(found, field.name).extend([message_factory.GetMessageClass(nested)()] * 200_000)
        elif field.type in (field.TYPE_STRING, field.TYPE_BYTES):
            large: Any = "x" if field.type == field.TYPE_STRING else b"x"
            if field.is_repeated:
                getattr(found, field.name).extend([large] * 250_000)
            else:
                setattr(found, field.name, large * LARGEST)
        elif field.is_repeated:
            getattr(found, field.name).extend([1] * LARGEST)
        else:
            continue
        yield field.name, found


def requests(kind: str) -> Iterator[tuple[descriptor.MethodDescriptor, str, Any]]:
    """Yield the methods of a kind of model, field names and requests."""
    for service in SERVICES:
        for method in service.methods:
            if method.name in WITHOUT_FIELDS or (method.name in POOLING) != (kind == "embedder"):
                continue
            for name, request in largest(method.input_type):
                if "sampling" in request.DESCRIPTOR.fields_by_name:
                    if request.WhichOneof("prompt") is None:
                        request.text = "a"
                    if not name.startswith("stop"):
                        request.stop.max_tokens = 1
                yield method, name, request


def seconds_to_parse(request: Any, sent: bytes) -> float:
    started = time.perf_counter()
    type(request).FromString(sent)
    return time.perf_counter() - started


@pytest.mark.ci
@pytest.mark.parametrize("kind", ["generator", pytest.param("embedder", marks=pytest.mark.slow)])
def test_no_message_holds_the_loop(kind: str, tmp_path: Path) -> None:
    over, answered = {}, set()
    model = (str(bert(tmp_path, (), (8, 16))), "--load-format", "dummy") if kind == "embedder" else ()
    options = [("grpc.max_send_message_length", 64 << 20), ("grpc.max_receive_message_length", 64 << 20)]
    with (
        ServingProcess(*model, *QUICK, module="tests.hostile.held_loop") as server,
        httpx.Client(base_url=server.http, timeout=60.0) as http,
        grpc.insecure_channel(server.grpc, options) as channel,
    ):
        for method, name, request in requests(kind):
            path = f"/{method.containing_service.full_name}/{method.name}"
            call = channel.stream_stream(path) if method.client_streaming else channel.unary_stream(path)
            least, sent = float("inf"), request.SerializeToString()
            for _ in range(TRIES):
                http.get("/held")
                try:
                    answers = list(call(iter([sent]) if method.client_streaming else sent, timeout=60))
                    answered.add("OK" if answers else "nothing")
                except grpc.RpcError as error:
                    answered.add(error.code().name)  # type: ignore[attr-defined]
                least = min(least, float(http.get("/held").text) - seconds_to_parse(request, sent))
                if least < MOST_SECONDS:
                    break
            if least >= MOST_SECONDS:
                over[path, name, request.ByteSize()] = least
    assert not over
    assert answered <= {"OK", "INVALID_ARGUMENT", "FAILED_PRECONDITION", "NOT_FOUND", "RESOURCE_EXHAUSTED"}, answered
