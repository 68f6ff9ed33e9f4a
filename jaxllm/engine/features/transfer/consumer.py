"""The consumer of KV transfer: pulls a prompt's blocks in a thread, until a deadline; heartbeats renew its leases."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from jaxllm.engine.features.transfer import frames
from jaxllm.engine.features.transfer.frames import FRAME_BYTES, PULL, RELEASE, RENEW, Block, Fingerprint, FrameError
from jaxllm.engine.features.transfer.params import Remote
from jaxllm.errors import RequestFailedError, UserError
from jaxllm.kv_transfer_config import KvTransferConfig
from jaxllm.runner.row_layout import Row, RowLayout

_log = logging.getLogger(__name__)
PULLS = 32  # further ones wait, within their deadlines
MOST_CHANNELS = 64
CALL_SECONDS = 2.0  # heartbeat or release
BEATS = 3  # heartbeats of a lease
WARN_SECONDS = 1.0


@dataclass(eq=False)
class Pull:
    """A pull; `future` has the blocks that arrived by the deadline, and cancelling it ends the pull."""

    remote: Remote
    blocks: Sequence[Block]
    deadline: float
    future: Future[Mapping[Block, Row]] = field(default_factory=Future)
    call: Any = None


class Consumer:
    """Pulls blocks from producers."""

    def __init__(self, config: KvTransferConfig, fingerprint: Fingerprint, layouts: Sequence[RowLayout]) -> None:
        options = config.kv_connector_extra_config
        self._fingerprint, self._layouts = fingerprint, layouts
        self._sizes = [layout.sizes() for layout in layouts]
        self._timeout = options.timeout
        self._must_load = config.kv_load_failure_policy == "fail"
        self._metadata = () if options.api_key is None else (("authorization", f"Bearer {options.api_key}"),)
        self._credentials = None
        if options.tls_ca is not None:
            try:
                self._credentials = grpc.ssl_channel_credentials(Path(options.tls_ca).read_bytes())
            except OSError as error:
                message = f"kv_transfer_config: cannot read tls_ca {options.tls_ca}: {error.strerror}."
                raise UserError(message, "kv_transfer_config") from error
        self._channels: OrderedDict[str, grpc.Channel] = OrderedDict()
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(PULLS, "jaxllm-kv-pulls")
        self._warned = -WARN_SECONDS
        self._calls: set[Any] = set()  # gRPC cancels calls without references
        self._live: dict[Pull, None] = {}
        self._closed = threading.Event()
        self._heart = threading.Thread(
            target=self._beat, args=(options.lease / BEATS,), name="jaxllm-kv-beats", daemon=True
        )

    @property
    def num_live(self) -> int:
        return len(self._live)

    def pull(self, remote: Remote, blocks: Sequence[Block]) -> Future[Mapping[Block, Row]]:
        """Begin to pull blocks. The future raises RequestFailedError if one that must be loaded is missing."""
        asked = Pull(remote, blocks, time.monotonic() + self._timeout)
        asked.future.add_done_callback(lambda _: asked.call is not None and asked.call.cancel())
        with self._lock:
            self._live[asked] = None
            if self._heart.ident is None:
                self._heart.start()
        try:
            self._threads.submit(self._run, asked)
        except RuntimeError:  # closed
            asked.future.cancel()
        return asked.future

    def release(self, remote: Remote) -> None:
        """End a lease at its producer, without waiting."""
        self._send(remote.target, RELEASE, remote.lease.encode(errors="replace"))

    def close(self) -> None:
        """End all pulls. Idempotent."""
        self._closed.set()
        self._threads.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            channels, self._channels = [*self._channels.values()], OrderedDict()
        for channel in channels:
            channel.close()

    def _beat(self, seconds: float) -> None:
        """Renew the leases of live pulls until the end."""
        while not self._closed.wait(seconds):
            now, leases = time.monotonic(), dict[str, list[str]]()
            with self._lock:
                waiting = [asked for asked in self._live if asked.deadline > now and not asked.future.cancelled()]
            for asked in waiting:
                leases.setdefault(asked.remote.target, []).append(asked.remote.lease)
            for target, names in leases.items():
                self._send(target, RENEW, frames.pack_names(names))

    def _send(self, target: str, method: str, content: bytes) -> None:
        """Begin a call, without waiting; if it fails, leases end by themselves."""
        with suppress(Exception):
            channel = self._channel(target)
            call = channel.unary_unary(method).future(content, timeout=CALL_SECONDS, metadata=self._metadata)
            self._calls.add(call)
            call.add_done_callback(self._calls.discard)

    def _run(self, asked: Pull) -> None:
        received: dict[Block, Row] = {}
        try:
            if not asked.future.cancelled():
                self._receive(asked, received)
        except grpc.RpcError as error:
            if not asked.future.cancelled():
                details = error.details() if isinstance(error, grpc.Call) else str(error)
                self._warn("KV blocks of %s did not arrive: %s", asked.remote.target, details)
        except Exception:
            _log.exception("KV blocks could not be received")
        self.release(asked.remote)
        missing = len(asked.blocks) - len(received)
        with self._lock:
            self._live.pop(asked, None)
        with suppress(InvalidStateError):
            if missing and self._must_load:
                message = f"{missing} KV blocks did not arrive, and kv_load_failure_policy is fail."
                asked.future.set_exception(RequestFailedError(message))
            else:
                asked.future.set_result(received)

    def _receive(self, asked: Pull, received: dict[Block, Row]) -> None:
        wanted = {*asked.blocks}
        names = [(block.group, block.digest.hex()) for block in asked.blocks]
        request = frames.PullRequest(lease=asked.remote.lease, model=self._fingerprint.model.hex(), blocks=names)
        method = self._channel(asked.remote.target).unary_stream(PULL)
        seconds = max(0.0, asked.deadline - time.monotonic())
        asked.call = call = method(request.pack(), timeout=seconds, metadata=self._metadata)
        if asked.future.cancelled():
            call.cancel()
        for frame in call:
            try:
                block, content, has_drafts = frames.unpack(frame, self._fingerprint, self._sizes)
            except FrameError as error:
                self._warn("a KV block of %s is refused: %s", asked.remote.target, error)
                continue
            if block in wanted:
                wanted.remove(block)
                received[block] = self._layouts[block.group].unpack(content, has_drafts)

    def _channel(self, target: str) -> grpc.Channel:
        with self._lock:
            channel = self._channels.get(target)
            if channel is None:
                most = FRAME_BYTES + max(sum(sizes) for sizes in self._sizes)
                options = (
                    # Twice: a producer may have a draft model.
                    ("grpc.max_receive_message_length", 2 * most + (1 << 20)),
                    ("grpc.max_send_message_length", -1),
                    ("grpc.initial_reconnect_backoff_ms", 200),
                    ("grpc.max_reconnect_backoff_ms", 3_000),
                    ("grpc.enable_http_proxy", 0),
                )
                if self._credentials is None:
                    channel = grpc.insecure_channel(target, options)
                else:
                    channel = grpc.secure_channel(target, self._credentials, options)
                self._channels[target] = channel
            self._channels.move_to_end(target)
            if len(self._channels) > MOST_CHANNELS:
                self._channels.popitem(last=False)[1].close()
            return channel

    def _warn(self, text: str, target: str, why: object) -> None:
        now = time.monotonic()
        if now - self._warned >= WARN_SECONDS:
            self._warned = now
            _log.warning(text, target, why)
