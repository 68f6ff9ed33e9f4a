"""Runs the process of `filter.py`."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from tempfile import gettempdir, mkdtemp
from typing import TYPE_CHECKING, Any

from jaxllm.errors import UserError
from jaxllm_server.grpc.filter import CORE, Settings

if TYPE_CHECKING:
    from jaxllm_server.shared.options import ServerOptions

_log = logging.getLogger("jaxllm.server.grpc")
RESTART_SECONDS = 1.0
_END_SECONDS = 4.0
_LONGEST_DIR = 30  # a Unix socket's path has at most 103 bytes on some systems, with an IPv6 address
_MORE_BLOCK_BYTES = 64 << 10  # above max_header_bytes; gRPC's core refuses these with a status


class FilterProcess:
    """The proxy process of a core, which must listen at `address` first."""

    def __init__(self, listening: Sequence[socket.socket], options: ServerOptions) -> None:
        self._listening = listening
        try:
            self.folder = mkdtemp(prefix="jaxllm-grpc-", dir=None if len(gettempdir()) < _LONGEST_DIR else "/tmp")
        except OSError as error:
            message = f"gRPC's sockets need a folder for temporary files ({error.strerror}), or --no-grpc-filter."
            raise UserError(message, "grpc_filter") from error
        self.address = f"unix:{self.folder}/{CORE}"
        self._given: dict[str, Any] = {
            "folder": self.folder,
            "max_block_bytes": options.max_header_bytes + _MORE_BLOCK_BYTES,
            "stall_seconds": options.stall_timeout or None,
            "certfile": options.ssl_certfile,
            "keyfile": options.ssl_keyfile,
            "ca_certs": options.ssl_ca_certs,
            "client_auth": options.ssl_client_auth,
        }
        self.process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._restarting: asyncio.TimerHandle | None = None
        try:
            Settings(listening=(), control=-1, **self._given).tls()
        except OSError as error:
            self._forget()
            where = f"{error.filename}: " if error.filename else ""
            message = f"ssl_keyfile, ssl_certfile or ssl_ca_certs cannot be used: {where}{error.strerror}."
            raise UserError(message, "ssl_certfile") from error

    def start(self) -> None:
        self._restarting = None
        self._control, control = socket.socketpair()
        with control:
            listening = tuple(each.fileno() for each in self._listening)
            settings = Settings(listening=listening, control=control.fileno(), **self._given)
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "jaxllm_server.grpc.filter", settings.to_json()],
                pass_fds=(*settings.listening, settings.control),
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        asyncio.get_running_loop().add_reader(self._control, self._on_death)

    def close_listener(self) -> None:
        if not self._listening:
            return
        for each in self._listening:
            each.close()
        self._listening = ()
        if self._restarting is not None:
            self._restarting.cancel()
        if self._control is not None:
            asyncio.get_running_loop().remove_reader(self._control)
            try:
                self._control.send(b"\0")
            except OSError:
                pass

    async def end(self) -> None:
        """Stop once clients have read everything, or after `_END_SECONDS`."""
        process, self.process = self.process, None
        if process is not None and self._control is not None:
            self._control.close()
            await asyncio.to_thread(self._wait, process)
        self._forget()

    def _on_death(self) -> None:
        assert self._control is not None and self.process is not None
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._control)
        self._control.close()
        self._wait(self.process, 0.1)
        self._control = self.process = None
        _log.error("the process that accepts gRPC connections died; they are lost, and it is restarted")
        self._restarting = loop.call_later(RESTART_SECONDS, self._restart)

    def _restart(self) -> None:
        try:
            self.start()
        except OSError as error:
            if self._control is not None:
                self._control.close()
                self._control = None
            _log.error("the process for gRPC's connections cannot be started (%s); trying again", error.strerror)
            self._restarting = asyncio.get_running_loop().call_later(RESTART_SECONDS, self._restart)

    def _wait(self, process: subprocess.Popen[bytes], seconds: float = _END_SECONDS) -> None:
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _forget(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
