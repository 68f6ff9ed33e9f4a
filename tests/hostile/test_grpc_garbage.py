"""Invalid gRPC messages, and HTTP/2 frames that no library sends.

Each call gets a documented status and message; an attacker's connection costs less than a core, and other clients'
calls are still answered.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import grpc
import h2.events
import h2.exceptions
import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2

from jaxllm.v1 import control_pb2, inference_pb2
from tests.hostile.conftest import STALL_SECONDS
from tests.hostile.frames import SERVICE, Frames, framed
from tests.hostile.machine import processor_seconds, resident_bytes
from tests.server.grpc.test_wire import varint
from tests.support.failures import SECRETS
from tests.support.grpc_site import details_of
from tests.support.serving_process import ServingProcess

INFERENCE, CONTROL = "/jaxllm.v1.InferenceService", "/jaxllm.v1.ControlService"
REQUESTS: dict[str, type[Message]] = {
    **{
        f"/{service.full_name}/{method.name}": GetMessageClass(method.input_type)
        for file in (inference_pb2, control_pb2)
        for service in file.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    },
    "/grpc.health.v1.Health/Check": health_pb2.HealthCheckRequest,
    **{
        f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo": reflection_pb2.ServerReflectionRequest
        for version in ("v1", "v1alpha")
    },
}
STREAMED = ("ServerReflectionInfo", "StreamEmbed")  # methods that take a stream of requests
LONGEST_PATH = 6  # nested messages; Struct is recursive
BROKEN_TEXTS = (b"\xff", b"\xc0\xaf", b"\xed\xa0\x80", b"a\xe2\x82")


@pytest.fixture
def channel(fake: ServingProcess) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(fake.grpc, [("grpc.max_send_message_length", -1)]) as channel:
        yield channel


def field(number: int, payload: bytes) -> bytes:
    """Return a field of bytes in wire format."""
    return varint(number << 3 | 2) + varint(len(payload)) + payload


def text_fields(
    descriptor: Descriptor, path: tuple[FieldDescriptor, ...] = ()
) -> Iterator[tuple[FieldDescriptor, ...]]:
    """Yield the text fields of a message and its nested messages, as paths."""
    for own in descriptor.fields:
        if own.type == FieldDescriptor.TYPE_STRING:
            yield *path, own
        elif own.message_type is not None and len(path) < LONGEST_PATH and own not in path:
            yield from text_fields(own.message_type, (*path, own))


def refusal(channel: grpc.Channel, method: str, raw: bytes, metadata: Any = ()) -> tuple[str, str]:
    """Send bytes as the request of a call that must fail; return its code and its message, which must be ours."""
    if method.endswith(STREAMED):
        call = channel.stream_stream(method)(iter([raw]), timeout=20, metadata=metadata)
    elif "Stream" in method:
        call = channel.unary_stream(method)(raw, timeout=20, metadata=metadata)
    else:
        call = iter([channel.unary_unary(method).future(raw, timeout=20, metadata=metadata)])
    with pytest.raises(grpc.RpcError) as caught:
        for answer in call:
            if isinstance(answer, grpc.Future):
                answer.result()
    error: Any = caught.value
    words = (error.details() or "") + "".join(map(str, details_of(error).values()))
    assert SECRETS.search(words) is None and "rotobuf" not in words, words
    return error.code().name, error.details()


NO_MESSAGE = "The request is not a message of this method."


@pytest.mark.ci
@pytest.mark.parametrize("method", REQUESTS)
def test_no_text_field_takes_what_is_no_text(channel: grpc.Channel, method: str) -> None:
    paths = list(text_fields(REQUESTS[method].DESCRIPTOR))
    for number, path in enumerate(paths):
        raw = BROKEN_TEXTS[number % len(BROKEN_TEXTS)]
        for own in reversed(path):
            raw = field(own.number, raw)
        assert refusal(channel, method, raw) == ("INVALID_ARGUMENT", NO_MESSAGE), [own.name for own in path]
    if method.endswith("/Generate"):
        assert len(paths) > 25, [path[-1].full_name for path in paths]


GARBAGE = {
    "ones": b"\xff" * 40,
    "a length beyond the end": b"\x12\x7f",
    "a length of 2^63": b"\x12" + b"\xff" * 9 + b"\x7f",
    "a varint without end": b"\x08" + b"\x80" * 40,
    "a tag without end": b"\x80" * 40,
    "an end of a group": b"\x0c",
    "a group without end": b"\x0b" * 40,
    "wire type 6": b"\x0e\x01",
    "wire type 7": b"\x0f\x01",
    "groups 10,000 deep": b"\x0b" * 10_000 + b"\x0c" * 10_000,
}


@pytest.mark.parametrize("kind", GARBAGE)
def test_garbage_is_no_message_of_any_method(channel: grpc.Channel, kind: str) -> None:
    for method in REQUESTS:
        assert refusal(channel, method, GARBAGE[kind]) == ("INVALID_ARGUMENT", NO_MESSAGE), method


def test_fields_that_nobody_knows_are_refused_where_they_could_mean_something(channel: grpc.Channel) -> None:
    unknown = b"\xfa\x3e\x01a"  # field 1007
    told = refusal(channel, f"{INFERENCE}/Generate", unknown + field(2, b"a"))
    assert told[0] == "INVALID_ARGUMENT" and "1007" in told[1]
    told = refusal(channel, f"{INFERENCE}/Generate", field(2, b"a") + field(5, unknown))
    assert told[0] == "INVALID_ARGUMENT" and "sampling" in told[1]
    told = refusal(channel, f"{INFERENCE}/Tokenize", field(2, b"a") + unknown * 100_000)
    assert told[0] == "INVALID_ARGUMENT"


def test_messages_within_messages(channel: grpc.Channel) -> None:
    """Struct nests without bound; parsers have a limit."""
    for depth in (40, 60, 99, 1000, 10_000):
        value = b""
        for _ in range(depth):
            value = field(6, field(1, value))  # Value.list_value, ListValue.values
        for place in (
            field(15, field(1, field(1, b"k") + field(2, value))),  # extensions
            field(
                4, field(1, field(1, b"user") + field(2, b"a")) + field(3, field(1, field(1, b"k") + field(2, value)))
            ),
        ):
            assert refusal(channel, f"{INFERENCE}/Generate", field(2, b"a") + place)[0] == "INVALID_ARGUMENT", depth


def test_messages_that_are_large(fake: ServingProcess, channel: grpc.Channel) -> None:
    """Five MiB are below the limit, so they are read and refused by content; nine are not read."""
    before = resident_bytes(fake.process.pid)
    for raw in (b"\xff" * (5 << 20), field(1, b"m" * (5 << 20)), b"\xfa\x3e\x01a" * (5 << 18)):
        began = time.monotonic()
        assert refusal(channel, f"{INFERENCE}/Generate", raw + field(2, b"a"))[0] in ("INVALID_ARGUMENT", "NOT_FOUND")
        assert time.monotonic() - began < 2.0
    for method in (f"{INFERENCE}/Generate", f"{INFERENCE}/StreamGenerate", f"{CONTROL}/Abort"):
        code, words = refusal(channel, method, field(2, b"a" * (9 << 20)))
        assert code == "RESOURCE_EXHAUSTED" and "Received message larger than max" in words
    # 3.5 million nested messages.
    told = refusal(channel, f"{INFERENCE}/Generate", field(4, b"\x0a\x00" * 3_500_000))
    assert told[0] == "INVALID_ARGUMENT"
    assert resident_bytes(fake.process.pid) - before < 900 << 20


def test_metadata_of_all_kinds(fake: ServingProcess, channel: grpc.Channel) -> None:
    good = inference_pb2.GenerateRequest(text="a").SerializeToString()
    generate = channel.unary_unary(f"{INFERENCE}/Generate")
    for metadata in (
        (("x-request-id", "a b"),),
        (("x-request-id", "\x1b[31m"),),
        (("x-request-id", "a" * 4000),),
        (("x-request-id", "same"), ("x-request-id", "same")),
        (("x-request-id-bin", b"\xff\0"),),
        (("traceparent", "00-" + "f" * 32 + "-" + "f" * 16 + "-ff"),),
        (("traceparent", "garbage"),),
        (("grpc-timeout-x", "1"), ("user-agent", "x" * 1000)),
        (("authorization", "Bearer x"), ("authorization", "Basic y")),
        tuple((f"x-{number}", "y") for number in range(200)),
    ):
        try:
            generate(good, metadata=metadata, timeout=5)
        except grpc.RpcError as error:
            told: Any = error
            codes = ("INVALID_ARGUMENT", "INTERNAL", "RESOURCE_EXHAUSTED", "UNAUTHENTICATED")
            assert told.code().name in codes, (metadata, told)
            assert SECRETS.search(told.details() or "") is None
            # INTERNAL must be an error of the client library.
            assert told.code().name != "INTERNAL" or told.details() in ("Invalid metadata", "Illegal header value")
    with Frames(fake.grpc) as frames:
        for name, value in (
            (b"grpc-timeout", b"99999999999999H"),
            (b"grpc-timeout", b"-1S"),
            (b"grpc-timeout", b"abc"),
            (b"grpc-encoding", b"gzip"),
            (b"grpc-encoding", b"nothing"),
            (b"x-request-id", b"\xff\xfe"),
            (b"x-bin", b"%%%"),
            (b"content-length", b"-1"),
        ):
            stream = frames.call(f"{SERVICE}/Generate", framed(good), (name, value))
            code, words = frames.status(stream)
            assert SECRETS.search(words) is None, (name, value, code, words)
    assert generate(good, timeout=5)


# Frames.


@contextmanager
def unhurt(server: ServingProcess, calls: int = 30, most_mib: int = 100) -> Iterator[list[float]]:
    """Fail if another client's calls fail or are slow while the block runs, or if it costs a core; yield the times."""
    pid, end, times = server.process.pid, threading.Event(), []

    def ask() -> None:
        with grpc.insecure_channel(server.grpc) as channel:
            generate = channel.unary_unary(f"{INFERENCE}/Generate")
            while not end.is_set() or len(times) < calls:
                began = time.monotonic()
                generate(inference_pb2.GenerateRequest(text="a").SerializeToString(), timeout=10)
                times.append(time.monotonic() - began)
                time.sleep(0.01)

    thread = threading.Thread(target=ask)
    before, busy, began = resident_bytes(pid), processor_seconds(pid), time.monotonic()
    thread.start()
    try:
        yield times
    finally:
        end.set()
        thread.join(30)
    cores = (processor_seconds(pid) - busy) / (time.monotonic() - began)
    grown = (resident_bytes(pid) - before) / 2**20
    print(f"{cores:.2f} cores, median {1e3 * statistics.median(times):.1f} ms, {grown:.1f} MiB more")
    assert not thread.is_alive() and len(times) >= calls
    assert statistics.median(times) < 0.2 and grown < most_mib
    assert cores < 1.2, "more than a core"


NUM_WATCHES = 20_000


NUM_PARCELS, PARCEL = 100, 8 << 20  # announced messages, and their bytes, the largest allowed


@pytest.mark.ci
@pytest.mark.parametrize(
    ("method", "most_mib", "codes"),
    [
        ("/grpc.health.v1.Health/Check", 300, {4}),  # 32 are received at once
        pytest.param("/grpc.health.v1.Health/Watch", 300, {4}, marks=pytest.mark.slow),
        pytest.param(f"{INFERENCE}/StreamEmbed", 850, {4}, marks=pytest.mark.slow),
        (f"{INFERENCE}/Generate", 850, {4}),  # needs a key, if keys are configured
    ],
)
def test_messages_that_never_come_whole(
    fake: ServingProcess, method: str, most_mib: int, codes: set[int | None]
) -> None:
    """On four connections, without the last byte: refused, or released in time with their memory."""
    pid, before, most = fake.process.pid, resident_bytes(fake.process.pid), 0
    with unhurt(fake) as times, ExitStack() as connections:
        attackers = [connections.enter_context(Frames(fake.grpc)) for _ in range(4)]
        left = {
            (number, attackers[number % 4].call(method, b"\0" + PARCEL.to_bytes(4, "big"), ends=False)): PARCEL - 1
            for number in range(NUM_PARCELS)
        }
        time.sleep(0.2)
        with grpc.insecure_channel(fake.grpc) as channel:  # all places are taken: the oldest is evicted
            health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=2)
        end = time.monotonic() + STALL_SECONDS + 8
        while left and time.monotonic() < end:
            for (number, stream), num_bytes in list(left.items()):
                try:
                    left[number, stream] -= attackers[number % 4].pour(stream, num_bytes)
                except h2.exceptions.StreamClosedError:  # it has a status
                    del left[number, stream]
            for attacker in attackers:
                attacker.read(lambda events: False, 0.002)
            most = max(most, resident_bytes(pid) - before)
        kinds = (h2.events.ResponseReceived, h2.events.TrailersReceived)  # StreamEmbed sends a head at once
        heads = [dict(own.headers) for one in attackers for own in one.events if isinstance(own, kinds)]
        found = Counter(int(head[b"grpc-status"]) for head in heads if b"grpc-status" in head)
        print(
            f"{most >> 20} MiB at most, statuses {dict(found)}, another's call took {1e3 * max(times):.0f} ms at most"
        )
        assert found.total() == NUM_PARCELS and found.keys() == codes
        assert resident_bytes(pid) - before < 100 << 20, "it is let go also where a connection lives on"
    assert most < most_mib << 20 and max(times) < 0.5


@pytest.mark.ci
def test_thousands_of_watches(fake: ServingProcess) -> None:
    """They need no key and stay open: a connection has a limited number of them."""
    import hpack

    before, most = resident_bytes(fake.process.pid), 0
    head = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/grpc.health.v1.Health/Watch")]
    head += [(b":authority", b"localhost"), (b"content-type", b"application/grpc"), (b"te", b"trailers")]
    with unhurt(fake) as times, Frames(fake.grpc) as frames:
        frames.read(lambda events: False, 0.2)
        encoder, calls = hpack.Encoder(), b""
        for number in range(NUM_WATCHES):  # without h2, which would take as long as the server
            block = encoder.encode(head)
            stream = (2 * number + 1).to_bytes(4, "big")
            calls += len(block).to_bytes(3, "big") + b"\1\4" + stream + block + b"\0\0\5\0\1" + stream + framed(b"")
        frames.socket.settimeout(1.0)
        frames.socket.sendall(calls)
        with suppress(TimeoutError):  # until it is silent
            while frames.socket.recv(1 << 20):
                most = max(most, resident_bytes(fake.process.pid) - before)
        held = resident_bytes(fake.process.pid) - before
    print(
        f"{most >> 20} MiB at most, {held >> 20} MiB in the end, another's call took {1e3 * max(times):.0f} ms at most"
    )
    assert held < 50 << 20 and most < 200 << 20 and max(times) < 0.5


def test_heads_that_grow_when_unpacked(fake: ServingProcess) -> None:
    """Four kilobytes are put into HPACK's table once; each further byte refers to all of them."""
    import hpack

    with unhurt(fake), Frames(fake.grpc) as frames:
        encoder = hpack.Encoder()
        entry = [(b"x", b"a" * 3900)]
        block = encoder.encode([(b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/a"), *entry])
        bomb = encoder.encode(entry)
        assert len(bomb) == 1
        for number in range(50):
            if not frames.is_open:
                break
            whole = block + bomb * 16_000
            head = len(whole).to_bytes(3, "big") + b"\1\5" + (2 * number + 1).to_bytes(4, "big")
            frames.flush(head + whole)
            block = encoder.encode([(b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/a"), *entry])
            frames.read(lambda events: any(isinstance(own, h2.events.ConnectionTerminated) for own in events), 0.02)


@pytest.mark.parametrize(
    "sent",
    [
        b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 1000,
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500),
        bytes(1000),
    ],
    ids=["HTTP/1.1", "no frames", "TLS", "zeros"],
)
def test_what_is_no_http2(fake: ServingProcess, sent: bytes) -> None:
    import socket

    host, _, port = fake.grpc.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=STALL_SECONDS + 5) as connection:
        connection.sendall(sent)
        answer = b""
        try:
            while piece := connection.recv(65536):
                answer += piece
        except ConnectionError:
            pass
    assert SECRETS.search(answer.decode("latin-1")) is None
