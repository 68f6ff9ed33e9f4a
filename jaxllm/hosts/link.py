"""A connection between the leader and a follower, after proofs of the group's key.

A frame is a length of four bytes and a msgpack value, never decoded into classes. The key does not encrypt: like NCCL
and gloo, a group needs a private network.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
import threading
from contextlib import suppress
from typing import Any

import msgpack

from jaxllm.version import __version__

MOST_BYTES = 1 << 30
MOST_GREETING = 1024  # before the proof
GREETING_SECONDS = 10.0
_PROOF_BYTES = 32
_LENGTH = struct.Struct("!I")
_PROTOCOL = "jaxllm hosts 1"


class RefusedError(Exception):
    """The other end is not of this group."""


class Link:
    """A connected socket. Any thread may send; one receives."""

    def __init__(self, peer: socket.socket) -> None:
        self._socket = peer
        self._lock = threading.Lock()
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        peer.settimeout(GREETING_SECONDS)

    def greeted(self, silence: float) -> None:
        """Receive without time limit from now on; send within `silence` seconds."""
        self._socket.settimeout(None)
        whole, part = divmod(silence, 1.0)
        limit = struct.pack("ll", int(whole), int(part * 1e6))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    def send(self, *message: Any) -> None:
        """Send, or raise OSError."""
        frame = _frame(message)
        with self._lock:
            self._socket.sendall(frame)

    def try_send(self, *message: Any) -> None:
        """Send unless another thread is sending; ignore a lost connection."""
        if self._lock.acquire(blocking=False):
            try:
                with suppress(OSError):
                    self._socket.sendall(_frame(message))
            finally:
                self._lock.release()

    def receive(self, most: int = MOST_BYTES) -> list[Any]:
        """Wait for a message; raise EOFError at the connection's end, OSError, or ValueError for other data."""
        (size,) = _LENGTH.unpack(self._read(_LENGTH.size))
        if size > most:
            raise ValueError(f"a frame of {size} bytes")
        message = msgpack.unpackb(self._read(size), strict_map_key=False)
        if not isinstance(message, list) or not message:
            raise ValueError("a frame that is no message")
        return message

    def close(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _read(self, size: int) -> bytes:
        data = bytearray(size)
        view, at = memoryview(data), 0
        while at < size:
            count = self._socket.recv_into(view[at:])
            if not count:
                raise EOFError("the connection was closed")
            at += count
        return bytes(data)


def _frame(message: Any) -> bytes:
    packed = msgpack.packb(message)
    assert packed is not None
    return _LENGTH.pack(len(packed)) + packed


def greet(link: Link, key: bytes, rank: int, num_hosts: int) -> None:
    """Prove the key as a follower, and check the leader's proof; raise RefusedError, EOFError, OSError, ValueError."""
    (leaders,) = link.receive(MOST_GREETING)
    if not isinstance(leaders, bytes):
        raise ValueError("a greeting that is no challenge")
    own = secrets.token_bytes(_PROOF_BYTES)
    link.send(__version__, rank, num_hosts, own, _proof(key, leaders, rank))
    answer = link.receive(MOST_GREETING)
    if answer[0] == "refused":
        raise RefusedError(str(answer[1]))
    if not isinstance(answer[1], bytes) or not hmac.compare_digest(answer[1], _proof(key, own, 0)):
        raise RefusedError("the leader has another JAXLLM_HOSTS_KEY")


def accept(link: Link, key: bytes, num_hosts: int) -> int:
    """Check a follower's proof as the leader, and return its rank; raise as `greet`."""
    own = secrets.token_bytes(_PROOF_BYTES)
    link.send(own)
    version, rank, its_hosts, challenge, proof = link.receive(MOST_GREETING)
    why = ""
    if not all(isinstance(each, bytes) and len(each) == _PROOF_BYTES for each in (challenge, proof)):
        raise ValueError("a greeting that is no proof")
    if not isinstance(rank, int) or not hmac.compare_digest(proof, _proof(key, own, rank)):
        why = "it has another JAXLLM_HOSTS_KEY"
    elif version != __version__:
        why = f"it runs jaxllm {version!s:.20}, the leader {__version__}"
    elif its_hosts != num_hosts or not 0 < rank < num_hosts:
        why = f"it is rank {rank} of {its_hosts!s:.9} hosts, the leader is rank 0 of {num_hosts}"
    if why:
        link.send("refused", why)
        raise RefusedError(why)
    link.send("welcome", _proof(key, challenge, 0))
    return rank


def _proof(key: bytes, challenge: bytes, rank: int) -> bytes:
    return hmac.digest(key, f"{_PROTOCOL} {rank} ".encode() + challenge, "sha256")
