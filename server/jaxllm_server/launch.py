"""`jaxllm serve`: run the front ends and the engine on one event loop.

Ports open before the model is loaded, for probes. Exit codes: 0 after a signal and a drain, 1 if the engine failed to
start or died. A second signal exits at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import ssl
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxllm import combinations
from jaxllm.config import EngineConfig
from jaxllm.engine.async_llm import AsyncLLM
from jaxllm.engine.engine_client import EngineClient
from jaxllm.errors import UserError
from jaxllm.file_limit import raise_file_limit
from jaxllm.kv_transfer_config import KvTransferConfig, secured
from jaxllm.log_lines import LineFormatter
from jaxllm.replay.recording import FileRecorder
from jaxllm_server.access.sockets import listen
from jaxllm_server.observability.log_limit import RateLimitFilter
from jaxllm_server.shared import garbage
from jaxllm_server.shared.options import ServerOptions

if TYPE_CHECKING:
    from jaxllm.hosts.settings import HostSettings
    from jaxllm_server.grpc.server import GrpcServer
    from jaxllm_server.http.server import HttpServer

_log = logging.getLogger("jaxllm.server")
WATCH_SECONDS = 0.2
CLOSE_SECONDS = 3.0
FAREWELL_SECONDS = 1.0  # to deliver the last errors
SECOND_SIGNAL = 130  # the shell's exit code for ^C


def new_server(config: EngineConfig, options: ServerOptions, progress: bool = False) -> Server:
    """Make a server, not yet started, and configure logging and the limit of open files.

    Raises UserError for missing packages or impossible options.
    """
    try:
        import uvicorn  # noqa: F401
        import uvloop  # noqa: F401

        import grpc  # noqa: F401  # isort: skip
    except ModuleNotFoundError as error:  # not a broken package's ImportError
        raise UserError(f"`jaxllm serve` needs {error.name}: pip install 'jaxllm[server]'") from error
    configure_logging()
    raise_file_limit()
    return Server(config, options, progress)


def serve(server: Server) -> int:
    """Run a server until it stops; return the exit code."""
    import uvloop

    return uvloop.run(server.run())


def configure_logging() -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(
        RateLimitFilter("uvicorn.error", "jaxllm.server.http", "jaxllm.server.listener")
    )  # any connection can cause these
    handler.setFormatter(LineFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    logging.getLogger("jax._src.xla_bridge").setLevel(logging.WARNING)  # logs every missing backend
    logging.getLogger("jax._src.compilation_cache").setLevel(logging.WARNING)
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)  # duplicates our messages
    # gRPC logs invalid UTF-8 in metadata, perhaps a key, with a traceback.
    logging.getLogger("grpc._cython.cygrpc").addFilter(lambda record: "Invalid encoding" not in str(record.msg))


class Server:
    """An engine and its front ends."""

    def __init__(self, config: EngineConfig, options: ServerOptions, progress: bool = False) -> None:
        from jaxllm_server.access.auth import Keys
        from jaxllm_server.observability.fleet_metrics import observer_of
        from jaxllm_server.observability.tracing import Tracer
        from jaxllm_server.serving import Serving

        self.options = options
        self.engine = _engine(config, options, progress)
        self.serving = Serving(self.engine, options)
        self.observer = observer_of(self.engine, self.serving.names[0], self.serving.adapters)
        self.observer.held_bytes = self.serving.ledger.accounts
        self.tracer = Tracer.from_endpoint(options.otlp_traces_endpoint)
        self.keys = Keys(options.api_key, options.admin_api_key)
        self.grpc: GrpcServer | None = None
        self.http: HttpServer | None = None
        self.http_port: int | None = None
        self._http_task: asyncio.Task[None] | None = None
        self._signalled = asyncio.Event()

    async def run(self) -> int:
        self._handle_signals()
        began = time.monotonic()
        watching: list[asyncio.Task[Any]] = []
        try:
            await self.open()
            loading = asyncio.ensure_future(self.engine.start())
            watching.append(asyncio.ensure_future(self._watch()))
            signalled = asyncio.ensure_future(self._signalled.wait())
            ends = [signalled, *([self._http_task] if self._http_task else [])]
            await asyncio.wait([loading, *ends], return_when=asyncio.FIRST_COMPLETED)
            self._check_http()
            if not loading.done():
                return 0
            loading.result()
            self.serving.forms.choose()
            garbage.keep_loaded_objects()
            watching.append(asyncio.ensure_future(garbage.collect()))
            _log.info("ready after %.1f s", time.monotonic() - began)
            if self.options.profile is not None:
                await self.engine.start_profile(self.options.profile, self.options.profile_steps)
            watching.append(asyncio.ensure_future(self._log_stats()))
            died = asyncio.ensure_future(self.engine.wait_dead())
            await asyncio.wait([died, *ends], return_when=asyncio.FIRST_COMPLETED)
            if signalled.done() and not died.done():
                await self._drain()
            if died.done():
                _log.error("the engine died: %s", died.result(), exc_info=died.result())
                if self.grpc is not None:
                    await self.grpc.set_state("dead")
                await asyncio.sleep(FAREWELL_SECONDS)
            else:
                died.cancel()
            await self.close(FAREWELL_SECONDS)
            self._check_http()
            return 1 if died.done() and not died.cancelled() else 0
        finally:
            for task in watching:
                task.cancel()

    async def open(self) -> None:
        options = self.options
        if options.grpc_port is not None or options.grpc_uds is not None:
            from jaxllm_server.grpc.server import start_grpc

            self.grpc = await start_grpc(self.serving, options, self.keys, self.tracer, self.observer)
            _log.info("gRPC on %s", options.grpc_uds or f"{options.host}:{self.grpc.port}")
        if options.port is not None or options.uds is not None:
            self._open_http()
            _log.info("HTTP on %s", options.uds or f"{self._scheme}://{options.host}:{self.http_port}")

    @property
    def _scheme(self) -> str:
        return "http" if self.options.ssl_certfile is None else "https"

    def _open_http(self) -> None:
        from jaxllm_server.http.app import make_app
        from jaxllm_server.http.protocol import server_config
        from jaxllm_server.http.server import HttpServer

        options = self.options
        listening = listen(options.host, options.port, options.uds, ("HTTP", "port", "uds"))
        self.http_port = None if options.uds else listening[0].getsockname()[1]
        config = server_config(make_app(self.serving, options, self.observer, self.tracer), options)
        try:
            config.load()
        except (OSError, ValueError) as error:  # or ssl.SSLError
            for each in listening:
                each.close()
            raise UserError(f"ssl_certfile and ssl_keyfile cannot be used: {error}", "ssl_certfile") from error
        self.http = HttpServer(config, options.stall_timeout or None)
        self._http_task = asyncio.ensure_future(self.http.serve(sockets=listening))

    def _handle_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)

    def _on_signal(self, number: int) -> None:
        if self._signalled.is_set():
            _log.warning("second signal: exiting at once, %d requests are aborted", self.engine.num_live)
            os._exit(SECOND_SIGNAL)
        name, state = signal.Signals(number).name, self.engine.state
        what = (
            f"draining for up to {self.options.shutdown_timeout:g} s"
            if state == "serving"
            else f"stopping while {state}"
        )
        _log.info("%s: %s", name, what)
        self._signalled.set()

    async def _watch(self) -> None:
        reported = None
        while self.grpc is not None:
            state = "draining" if self._signalled.is_set() else self.engine.state
            if state != reported:
                await self.grpc.set_state(state)
                reported = state
            await asyncio.sleep(WATCH_SECONDS)

    async def _log_stats(self) -> None:
        from jaxllm_server.observability.log_stats import log_stats

        if self.options.log_stats_interval > 0:
            await log_stats(self.engine, self.options.log_stats_interval, _log.info)

    async def _drain(self) -> None:
        self.engine.announce_drain()
        if self.grpc is not None:
            await self.grpc.set_state("draining")
        await asyncio.sleep(self.options.drain_delay)
        is_through = await self.engine.drain(self.options.shutdown_timeout)
        if self.engine.state != "dead":
            _log.info(
                "all requests have finished" if is_through else "shutdown timeout: the remaining requests were aborted"
            )

    def _check_http(self) -> None:
        if self._http_task is not None and self._http_task.done():
            self._http_task.result()

    async def close(self, grace: float) -> None:
        """Close the front ends, within `grace` seconds, then the engine."""
        if self.http is not None and self._http_task is not None:
            self.http.should_exit = True
        if self.grpc is not None:
            await self.grpc.stop(grace)
        if self._http_task is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(grace + 2.0):
                    await asyncio.wait([self._http_task])
        if self.options.uds is not None:
            Path(self.options.uds).unlink(missing_ok=True)
        await asyncio.to_thread(self.tracer.close)
        if not await self.engine.close(CLOSE_SECONDS):
            _log.warning("the engine's thread did not stop: a step hangs")


def _engine(config: EngineConfig, options: ServerOptions, progress: bool) -> EngineClient:
    from jaxllm_server.adapters import requests_of

    bounds: dict[str, Any] = {
        "max_queued_requests": options.max_queued_requests,
        "max_queued_tokens": options.max_queued_tokens,
        "hang_timeout": options.hang_timeout,
    }
    if options.num_hosts > 1:
        from jaxllm.hosts.group_llm import GroupLLM

        del bounds["hang_timeout"]
        if options.record is not None:
            raise combinations.refusal("record", combinations.HOSTS)
        adapters = requests_of(options.lora_modules)
        return GroupLLM(config, _host_settings(options), progress=progress, adapters=adapters, **bounds)
    if not config.is_fleet:
        for name in ("data_parallel_address", "data_parallel_size_local"):
            if getattr(options, name) is not None:
                if config.shares_experts:
                    raise combinations.refusal(name, combinations.RANKS)
                raise UserError(f"{name} requires a data_parallel_size above 1.", name)
        if options.record is not None and config.shares_experts:
            raise combinations.refusal("record", combinations.RANKS)
        adapters = requests_of(options.lora_modules)
        if isinstance(config.kv_transfer_config, KvTransferConfig):
            key = options.api_key[0] if options.api_key else None
            transfer = secured(config.kv_transfer_config, key, options.ssl_certfile, options.ssl_keyfile)
            config = replace(config, kv_transfer_config=transfer)
        return AsyncLLM(config, progress=progress, recorder=recorder_of(config, options), adapters=adapters, **bounds)
    if options.record is not None:
        raise combinations.refusal("record", combinations.FLEET)
    from jaxllm.fleet.fleet_llm import FleetLLM
    from jaxllm.fleet.replica_listener import ReplicaAddress

    address = None
    if options.data_parallel_address is not None:
        tls = None
        if options.ssl_certfile is not None:
            tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            tls.load_cert_chain(options.ssl_certfile, options.ssl_keyfile)
        address = ReplicaAddress(options.data_parallel_address, options.admin_api_key[0], tls)
    return FleetLLM(config, num_local=options.data_parallel_size_local, address=address, **bounds)


def new_host(config: EngineConfig, options: ServerOptions, progress: bool = False) -> Callable[[], int]:
    """Return a function that runs a host of a group and returns its exit code."""
    if not options.headless:
        return partial(serve, new_server(config, options, progress))
    from jaxllm.hosts import agreement
    from jaxllm.hosts.follower import Follower

    configure_logging()
    agreement.check(config)
    return partial(Follower(_host_settings(options)).run, config)


def _host_settings(options: ServerOptions) -> HostSettings:
    from jaxllm.hosts.settings import HostSettings

    assert options.coordinator is not None
    return HostSettings(
        num_hosts=options.num_hosts,
        rank=options.host_rank,
        coordinator=options.coordinator,
        silence=options.hang_timeout,
    )


def be_replica(config: EngineConfig, options: ServerOptions) -> int:
    """Run a replica for another machine's server; return 1 if the connection was lost."""
    from jaxllm.fleet import node

    configure_logging()
    assert options.data_parallel_address is not None
    engine = asdict(config) | {"enable_kv_cache_events": config.enable_prefix_caching}
    settings = node.Settings(
        engine=engine | {"data_parallel_size": 1},
        address=options.data_parallel_address,
        key=options.admin_api_key[0],
        ca=options.data_parallel_ca_certs,
        observes=True,
        hang_timeout=options.hang_timeout,
    )
    _log.info("running as a replica of the server at %s", options.data_parallel_address)
    if asyncio.run(node.run(settings)):
        return 0
    _log.error("lost the connection to the server at %s", options.data_parallel_address)
    return 1


def recorder_of(config: EngineConfig, options: ServerOptions) -> FileRecorder | None:
    if options.record is None:
        return None
    _log.info("recording into %s%s", options.record, ", redacted" if options.record_redacted else "")
    about = {"model": (*options.served_model_name, config.model)[0]}
    if config.kv_cache_dtype != "auto":
        about["kv_cache_dtype"] = config.kv_cache_dtype
    return FileRecorder(options.record, options.record_max_bytes, options.record_redacted, about)
