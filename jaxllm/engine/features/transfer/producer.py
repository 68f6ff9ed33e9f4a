"""The producer of KV transfer: keeps the blocks of prompts, and sends them over gRPC."""

from __future__ import annotations

import hmac
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import grpc

from jaxllm.engine.features.transfer import frames
from jaxllm.engine.features.transfer.frames import (
    PULL,
    RELEASE,
    RENEW,
    SERVICE,
    Block,
    Fingerprint,
    FrameError,
    PullRequest,
)
from jaxllm.engine.features.transfer.leases import Lease, Leases
from jaxllm.errors import UserError
from jaxllm.kv_transfer_config import KvTransferConfig
from jaxllm.runner.row_layout import Row, RowLayout

_log = logging.getLogger(__name__)
PULLS = 16  # further ones wait
SHORT_CALLS = 2  # heartbeats and releases
SWEEP_SECONDS = 1.0
CLOSE_SECONDS = 2.0
_OPTIONS = (
    ("grpc.so_reuseport", 0),
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", 128 << 20),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
)


class Producer:
    """A buffer of blocks, the thread that fills it, and the service that sends them."""

    def __init__(
        self,
        config: KvTransferConfig,
        fingerprint: Fingerprint,
        layouts: Sequence[RowLayout],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        options = config.kv_connector_extra_config
        self._fingerprint, self._layouts, self._key = fingerprint, layouts, options.api_key
        self._sizes = [layout.sizes() for layout in layouts]
        self.leases = Leases(int(options.buffer_gib * (1 << 30)), options.lease, clock)
        self._asked: SimpleQueue[tuple[Lease, Mapping[Block, Row]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._copy, name="jaxllm-kv-copies", daemon=True)
        self._server = grpc.server(ThreadPoolExecutor(PULLS, "jaxllm-kv-pulls"), options=_OPTIONS)
        self._short = ThreadPoolExecutor(SHORT_CALLS, "jaxllm-kv-leases")
        handlers = {
            PULL.rpartition("/")[2]: grpc.unary_stream_rpc_method_handler(self._pull),
            RENEW.rpartition("/")[2]: grpc.unary_unary_rpc_method_handler(_run_in(self._short, self._renew)),
            RELEASE.rpartition("/")[2]: grpc.unary_unary_rpc_method_handler(_run_in(self._short, self._release)),
        }
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        self.port = self._listen(config)
        self._server.start()
        self._thread.start()
        _log.info("KV blocks are sent from %s:%d", config.kv_ip, self.port)

    def keep(self, rows: Mapping[Block, Row]) -> str | None:
        """Keep blocks for a pull; return the lease's name, None if the buffer is full."""
        lease = self.leases.open(sum(sum(self._sizes[block.group]) for block in rows))
        if lease is None:
            _log.warning("the buffer of KV blocks is full (buffer_gib): a prompt will be computed twice")
            return None
        self._asked.put((lease, rows))
        return lease.name

    def close(self) -> None:
        """End all pulls and leases. Idempotent."""
        self._asked.put(None)
        self._server.stop(0).wait(CLOSE_SECONDS)
        self._short.shutdown(wait=False)
        self._thread.join(CLOSE_SECONDS)

    def _listen(self, config: KvTransferConfig) -> int:
        options, host = config.kv_connector_extra_config, config.kv_ip
        address = f"[{host}]:{config.kv_port}" if ":" in host else f"{host}:{config.kv_port}"
        try:
            if options.tls_certificate is None or options.tls_key is None:
                port = self._server.add_insecure_port(address)
            else:
                pair = Path(options.tls_key).read_bytes(), Path(options.tls_certificate).read_bytes()
                port = self._server.add_secure_port(address, grpc.ssl_server_credentials([pair]))
        except (OSError, RuntimeError) as error:
            raise UserError(
                f"kv_transfer_config: cannot listen on {address}: {error}.", "kv_transfer_config"
            ) from error
        return port

    def _copy(self) -> None:
        while True:
            try:
                asked = self._asked.get(timeout=SWEEP_SECONDS)
            except Empty:
                self.leases.sweep()
                continue
            if asked is None:
                return
            lease, rows = asked
            try:
                packed = {block: self._layouts[block.group].pack(row) for block, row in rows.items()}
            except Exception:  # the consumer computes the prompt
                _log.exception("the KV blocks of a prompt could not be copied")
                packed = {}
            del asked, rows
            self.leases.fill(lease, packed)

    def _pull(self, packed: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        self._check(context)
        try:
            asked = PullRequest.unpack(packed)
        except FrameError as error:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        if asked.model != self._fingerprint.model.hex():
            context.abort(
                grpc.StatusCode.FAILED_PRECONDITION, "the engines differ in model, type, block size or version"
            )
        lease = self.leases.find(asked.lease)
        if lease is None:
            context.abort(grpc.StatusCode.NOT_FOUND, "the lease has ended")
        lease.is_filled.wait(context.time_remaining())
        for group, digest in asked.blocks:
            block = Block(group, bytes.fromhex(digest))
            content = lease.blocks.get(block)
            if content is not None and context.is_active():
                self.leases.find(lease.name)
                yield frames.pack(self._fingerprint, block, content, self._sizes[group][0])

    def _renew(self, packed: bytes, context: grpc.ServicerContext) -> bytes:
        self._check(context)
        try:
            names = frames.unpack_names(packed)
        except FrameError as error:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        for name in names:
            self.leases.find(name)
        return b""

    def _release(self, name: bytes, context: grpc.ServicerContext) -> bytes:
        self._check(context)
        self.leases.release(name.decode(errors="replace"))
        return b""

    def _check(self, context: grpc.ServicerContext) -> None:
        if self._key is None:
            return
        given: dict[str, Any] = dict(context.invocation_metadata())
        if not hmac.compare_digest(str(given.get("authorization", "")).encode(), f"Bearer {self._key}".encode()):
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "the api_key is missing or wrong")


def _run_in(pool: ThreadPoolExecutor, behavior: Callable[[bytes, grpc.ServicerContext], bytes]) -> Any:
    """Return `behavior` as a function that gRPC runs in `pool`, not in the server's."""

    def answer(packed: bytes, context: grpc.ServicerContext) -> bytes:
        return behavior(packed, context)

    vars(answer)["experimental_thread_pool"] = pool
    return answer
