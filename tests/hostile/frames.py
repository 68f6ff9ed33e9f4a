"""gRPC as single HTTP/2 frames, for tests of frames that gRPC libraries never send."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Callable
from typing import Any

import h2.config
import h2.connection
import h2.events
import h2.exceptions
import h2.settings

from jaxllm.v1 import inference_pb2 as pb

SERVICE = "/jaxllm.v1.InferenceService"


def framed(message: bytes) -> bytes:
    """Return a message in gRPC's framing."""
    return struct.pack(">BI", 0, len(message)) + message


class Frames:
    """One HTTP/2 connection to a gRPC server."""

    def __init__(self, target: str, **settings: int) -> None:
        host, _, port = target.rpartition(":")
        self.socket = socket.create_connection((host, int(port)), timeout=10)
        self.http = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding=None))
        self.http.initiate_connection()
        self.http.update_settings({getattr(h2.settings.SettingCodes, key): value for key, value in settings.items()})
        # The connection's window is wide, so that only a stream's window stops sending.
        self.http.increment_flow_control_window(2**31 - 1 - 65535)
        self.events: list[Any] = []
        self.is_open = True
        self.flush()

    def __enter__(self) -> Frames:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def flush(self, extra: bytes = b"") -> None:
        """Send pending data, and extra bytes."""
        try:
            self.socket.sendall(self.http.data_to_send() + extra)
        except OSError:
            self.is_open = False

    def ask(self, method: str = "StreamGenerate", text: str | None = "a", **fields: Any) -> int:
        """Begin a call with one request; return its stream."""
        return self.call(f"{SERVICE}/{method}", framed(pb.GenerateRequest(text=text, **fields).SerializeToString()))

    def call(self, path: str, data: bytes, *metadata: tuple[bytes, bytes], ends: bool = True) -> int:
        """Begin a call with these bytes; return its stream."""
        stream = self.http.get_next_available_stream_id()
        head = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", path.encode()), (b":authority", b"localhost")]
        head += [(b"content-type", b"application/grpc"), (b"te", b"trailers"), *metadata]
        self.http.send_headers(stream, head)
        self.http.send_data(stream, data, end_stream=ends)
        self.flush()
        return stream

    def pour(self, stream: int, num_bytes: int) -> int:
        """Send at most `num_bytes` zeros, within the windows; return the number sent."""
        num_bytes = sent = max(0, min(num_bytes, self.http.local_flow_control_window(stream)))
        while num_bytes:
            piece = bytes(min(num_bytes, self.http.max_outbound_frame_size))
            self.http.send_data(stream, piece)
            num_bytes -= len(piece)
        self.socket.settimeout(10.0)  # for `read`: half a frame would corrupt the connection
        self.flush()
        return sent

    def read(self, until: Callable[[list[Any]], object], seconds: float = 5.0) -> bool:
        """Read events until a condition holds for all of them, or the connection or the time ends."""
        end = time.monotonic() + seconds
        while not until(self.events):
            self.socket.settimeout(max(0.001, end - time.monotonic()))
            try:
                data = self.socket.recv(1 << 16)
            except TimeoutError:
                return False
            except OSError:
                data = b""
            if not data:
                self.is_open = False
                return bool(until(self.events))
            try:
                self.events += self.http.receive_data(data)
            except h2.exceptions.ProtocolError:  # caused by the test's changes to the state
                pass
            self.flush()
        return True

    def status(self, stream: int, seconds: float = 5.0) -> tuple[int | None, str]:
        """Return the gRPC status and details of a call that ends; the status may be None."""

        def ended(events: list[Any]) -> list[Any]:
            kinds = (h2.events.StreamEnded, h2.events.StreamReset)
            return [event for event in events if isinstance(event, kinds) and event.stream_id == stream]

        self.read(ended, seconds)
        found: dict[bytes, bytes] = {}
        for event in self.events:
            if isinstance(event, h2.events.ResponseReceived | h2.events.TrailersReceived) and event.stream_id == stream:
                found |= {bytes(name): bytes(value) for name, value in event.headers}
        code = found.get(b"grpc-status")
        return None if code is None else int(code), found.get(b"grpc-message", b"").decode()
