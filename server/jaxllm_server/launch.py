"""`jaxllm serve`: one process, one event loop for gRPC and HTTP, one engine; from the first port to the last stream.

Owns the order of starting and stopping, signals and exit codes. Ports are open before the model is loaded, so that
probes are answered ("not ready") from the first second.

Exit codes: 0 after a signal and a drain, 1 when the engine could not start or has died; a second signal ends at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import stat
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxllm.async_engine import AsyncLLM
from jaxllm.config import EngineConfig
from jaxllm.errors import UserError
from jaxllm_server.options import ServerOptions

if TYPE_CHECKING:
    import uvicorn

    from jaxllm_server.grpc_server import GrpcServer

_log = logging.getLogger("jaxllm.server")
WATCH_SECONDS = 0.2  # between two looks at the engine's state
FAREWELL_SECONDS = 1.0  # for the last errors to reach their clients before the process ends
SECOND_SIGNAL = 130  # exit code, a shell's for ^C


def serve(config: EngineConfig, options: ServerOptions, progress: bool = False) -> int:
    """Serve a model until a signal or its death; return the exit code."""
    try:
        import uvicorn  # noqa: F401
        import uvloop

        import grpc  # noqa: F401  # isort: skip
    except ImportError as error:
        raise UserError(f"`jaxllm serve` needs {error.name}: pip install 'jaxllm[server]'") from error
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    return uvloop.run(Server(config, options, progress).run())


class Server:
    """One engine and its front ends."""

    def __init__(self, config: EngineConfig, options: ServerOptions, progress: bool = False) -> None:
        from jaxllm_server.auth import Keys
        from jaxllm_server.prometheus import PrometheusObserver
        from jaxllm_server.serving import Serving
        from jaxllm_server.tracing import Tracer

        self.options = options
        self.engine = AsyncLLM(
            progress=progress,
            max_queued_requests=options.max_queued_requests,
            max_queued_tokens=options.max_queued_tokens,
            hang_timeout=options.hang_timeout,
            **asdict(config),
        )
        self.serving = Serving(self.engine, options)
        self.observer = PrometheusObserver(self.engine, self.serving.names[0])
        self.engine.observer = self.observer
        self.tracer = Tracer.from_endpoint(options.otlp_traces_endpoint)
        self.keys = Keys(options.api_key, options.admin_api_key)
        self.grpc: GrpcServer | None = None
        self.http: uvicorn.Server | None = None
        self.http_port: int | None = None
        self._http_task: asyncio.Task[None] | None = None
        self._signalled = asyncio.Event()

    async def run(self) -> int:
        """Open the ports, load the model, serve until it ends."""
        self._handle_signals()
        began = time.monotonic()
        watching: list[asyncio.Task[Any]] = []
        try:
            await self.open()
            loading = asyncio.ensure_future(self.engine.start())
            watching.append(asyncio.ensure_future(self._watch()))
            signalled = asyncio.ensure_future(self._signalled.wait())
            await asyncio.wait([loading, signalled], return_when=asyncio.FIRST_COMPLETED)
            if not loading.done():
                return 0  # nobody is being served yet
            loading.result()  # what is wrong with the model
            _log.info("ready after %.1f s", time.monotonic() - began)
            watching.append(asyncio.ensure_future(self._log_stats()))
            died = asyncio.ensure_future(self.engine.wait_dead())
            await asyncio.wait([signalled, died], return_when=asyncio.FIRST_COMPLETED)
            if died.done():
                _log.error("the engine has died: %s", died.result(), exc_info=died.result())
                await self._close(FAREWELL_SECONDS)
                return 1
            died.cancel()
            await self._drain()
            return 0
        finally:
            for task in watching:
                task.cancel()

    async def open(self) -> None:
        """Open the ports; one that is taken is a UserError."""
        options = self.options
        if options.grpc_port is not None or options.grpc_uds is not None:
            from jaxllm_server.grpc_server import start_grpc

            self.grpc = await start_grpc(self.serving, options, self.keys, self.tracer, self.observer)
            _log.info("gRPC on %s", options.grpc_uds or f"{options.host}:{self.grpc.port}")
        if options.port is not None or options.uds is not None:
            self._open_http()
            _log.info("HTTP on %s", options.uds or f"{self._scheme}://{options.host}:{self.http_port}")

    @property
    def _scheme(self) -> str:
        return "http" if self.options.ssl_certfile is None else "https"

    def _open_http(self) -> None:
        import ssl

        import uvicorn

        from jaxllm_server.http_app import make_app
        from jaxllm_server.http_protocol import protocol_of

        class QuietServer(uvicorn.Server):
            """uvicorn without its own handling of signals."""

            @contextlib.contextmanager
            def capture_signals(self) -> Iterator[None]:
                yield

        options = self.options
        listener = _listen(options)
        self.http_port = None if options.uds else listener.getsockname()[1]
        self.http = QuietServer(
            uvicorn.Config(
                make_app(self.serving, options, self.observer, self.tracer),
                http=protocol_of(options),
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                date_header=False,
                backlog=2048,
                timeout_graceful_shutdown=1,
                root_path=options.root_path,
                ssl_keyfile=options.ssl_keyfile,
                ssl_certfile=options.ssl_certfile,
                ssl_ca_certs=options.ssl_ca_certs,
                ssl_cert_reqs=ssl.CERT_REQUIRED if options.ssl_client_auth else ssl.CERT_NONE,
            )
        )
        self._http_task = asyncio.ensure_future(self.http.serve(sockets=[listener]))

    def _handle_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)

    def _on_signal(self, number: int) -> None:
        if self._signalled.is_set():
            os._exit(SECOND_SIGNAL)
        _log.info("%s: draining for up to %g s", signal.Signals(number).name, self.options.shutdown_timeout)
        self._signalled.set()

    async def _watch(self) -> None:
        """Tell gRPC's health service what the engine is doing."""
        told = None
        while self.grpc is not None:
            state = "draining" if self._signalled.is_set() else self.engine.state
            if state != told:
                await self.grpc.set_state(state)
                told = state
            await asyncio.sleep(WATCH_SECONDS)

    async def _log_stats(self) -> None:
        from jaxllm_server.log_stats import log_stats

        if self.options.log_stats_interval > 0:
            await log_stats(self.engine, self.options.log_stats_interval, _log.info)

    async def _drain(self) -> None:
        """Say "not ready", refuse new work, let streams finish, close."""
        self.engine.announce_drain()
        if self.grpc is not None:
            await self.grpc.set_state("draining")
        await asyncio.sleep(self.options.drain_delay)
        is_through = await self.engine.drain(self.options.shutdown_timeout)
        _log.info("all requests are through" if is_through else "time is over: the remaining requests were failed")
        await self._close(FAREWELL_SECONDS)

    async def _close(self, grace: float) -> None:
        """Close the front ends, which have `grace` seconds to send what they hold, then the engine."""
        if self.http is not None and self._http_task is not None:
            self.http.should_exit = True
        if self.grpc is not None:
            await self.grpc.stop(grace)
        if self._http_task is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(grace + 2.0):
                    await self._http_task
        await asyncio.to_thread(self.tracer.close)
        await self.engine.close()


def _listen(options: ServerOptions) -> socket.socket:
    """Open the socket of the HTTP front end."""
    if options.uds is not None:
        path = Path(options.uds)
        if path.exists() and stat.S_ISSOCK(path.stat().st_mode):
            path.unlink()  # left over by a process that was killed
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        address: Any = options.uds
    else:
        family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        address = (options.host, options.port)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        where = options.uds or f"{options.host}:{options.port}"
        raise UserError(f"HTTP cannot listen on {where}: {error.strerror}. Choose another --port.", "port") from error
    if options.uds is not None:
        Path(options.uds).chmod(0o700)
    return listener
