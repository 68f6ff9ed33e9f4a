"""uvicorn's server on listening sockets."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import Any, cast

import uvicorn

from jaxllm_server.access.listener import Listener


class HttpServer(uvicorn.Server):
    """uvicorn's server on listening sockets, without its signal handling."""

    def __init__(self, config: uvicorn.Config, handshake_seconds: float | None = None) -> None:
        super().__init__(config)
        self._handshake_seconds = handshake_seconds

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the caller."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=[])
        make = cast(Any, self.config.http_protocol_class)
        loop = asyncio.get_running_loop()

        def make_protocol() -> asyncio.BaseProtocol:
            return make(config=self.config, server_state=self.server_state, app_state=self.lifespan.state, _loop=loop)

        for each in sockets or ():
            self.servers.append(cast(Any, Listener(each, make_protocol, self.config.ssl, self._handshake_seconds)))
