"""A server with an engine on an event loop in a thread of the test's process."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import uvloop

from jaxllm.config import EngineConfig
from jaxllm_server.launch import Server
from jaxllm_server.shared.options import ServerOptions


class ServerThread:
    """Serves until `close`."""

    def __init__(self, config: EngineConfig, options: ServerOptions) -> None:
        self.loop = uvloop.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()
        self.server = Server(config, options)
        self.run(self.server.open())
        self.run(self.server.engine.start())
        assert self.server.grpc is not None
        self.url, self.target = f"http://127.0.0.1:{self.server.http_port}", f"127.0.0.1:{self.server.grpc.port}"

    def run(self, coroutine: Any) -> Any:
        """Run a coroutine on the server's loop; return its result."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(60.0)

    def close(self) -> None:
        self.run(self.server.close(0.1))
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(10.0)
        self.loop.close()
