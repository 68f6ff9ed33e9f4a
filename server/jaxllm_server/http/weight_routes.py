"""HTTP routes, by vLLM's names, that pause an engine and update weights."""

from __future__ import annotations

import re
from typing import Any, cast

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from jaxllm.engine.life_cycle import PauseMode
from jaxllm.errors import UserError
from jaxllm_server.http.answering import Answering
from jaxllm_server.http.answers import json_response
from jaxllm_server.http.routes import GET, ApiRoute, Body, Run
from jaxllm_server.http.schemas import OBJECT, TEXT
from jaxllm_server.openai import weights
from jaxllm_server.shared import weight_calls

_INIT = Body(
    "InitWeightTransfer",
    "Check that updates of the weights can be received: their backend is safetensors.",
    weights.INIT_FIELDS,
    ("init_info",),
    {"init_info": {"backend": "safetensors"}},
    shapes={"init_info": OBJECT},
)
_UPDATE = Body(
    "UpdateWeights",
    "Replace the weights by those of a folder below --weights-root.",
    weights.UPDATE_FIELDS,
    ("update_info",),
    {"update_info": {"path": "step-100"}},
    shapes={"update_info": OBJECT},
)
_FINISH = Body(
    "FinishWeightUpdate",
    "End an update, and name the version of the weights.",
    weights.FINISH_FIELDS,
    (),
    {"weight_version": "step-100"},
    shapes={"weight_version": TEXT},
)


def routes(answering: Answering) -> list[ApiRoute]:
    handlers = WeightHandlers(answering)
    is_offered = answering.serving.engine.config.enable_sleep_mode

    def row(path: str, run: Run, *bodies: Body, **more: Any) -> ApiRoute:
        async def checked(request: Request) -> ASGIApp:
            handlers.check_enabled()
            return await run(request)

        checked.__doc__ = run.__doc__
        return ApiRoute(path, checked, bodies=bodies, is_offered=is_offered, **more)

    return [
        row("/sleep", handlers.sleep, media=()),
        row("/wake_up", handlers.wake_up, media=()),
        row("/is_sleeping", handlers.is_sleeping, methods=GET),
        row("/pause", handlers.pause),
        row("/resume", handlers.resume),
        row("/is_paused", handlers.is_paused, methods=GET),
        row("/init_weight_transfer_engine", handlers.init, _INIT),
        row("/start_weight_update", handlers.start),
        row("/update_weights", handlers.update, _UPDATE),
        row("/finish_weight_update", handlers.finish, _FINISH),
        row("/weight_info", handlers.info, methods=GET),
    ]


class WeightHandlers:
    """The handlers of these routes."""

    def __init__(self, answering: Answering) -> None:
        self._serving, self._bodies = answering.serving, answering.bodies
        self._options = answering.options

    def check_enabled(self) -> None:
        weight_calls.check_enabled(self._serving.engine.config)

    async def sleep(self, request: Request) -> ASGIApp:
        """Pause (`level` 0), move the weights to the host (1, the default) or drop them (2) with the KV cache.

        `tags`, repeated: weights, kv_cache (default: both). `mode`: as for /pause.
        """
        level = request.query_params.get("level", "1")
        if not re.fullmatch("[0-2]", level):
            raise UserError(f"level must be 0, 1 or 2, got {level!r:.80}.", "level")
        await self._serving.engine.sleep(int(level), _tags(request), mode=_mode(request))
        return Response()

    async def wake_up(self, request: Request) -> ASGIApp:
        """Bring the `tags` back, by default all; continue if all is awake."""
        await self._serving.engine.wake_up(_tags(request))
        return Response()

    async def is_sleeping(self, request: Request) -> ASGIApp:
        """Report whether weights or KV cache are asleep."""
        return json_response({"is_sleeping": await self._serving.engine.is_sleeping()})

    async def pause(self, request: Request) -> ASGIApp:
        """Refuse requests and compute nothing; `mode` aborts, awaits ("wait") or keeps the running requests."""
        mode, clear = _mode(request), request.query_params.get("clear_cache")
        if clear not in (None, "true", "false"):
            raise UserError(f"clear_cache must be true or false, got {clear!r:.80}.", "clear_cache")
        # Kept requests keep the cache, as in vLLM.
        await self._serving.engine.pause(mode, None if clear is None or mode == "keep" else clear == "true")
        return json_response({"status": "paused"})

    async def resume(self, request: Request) -> ASGIApp:
        """Continue after /pause."""
        await self._serving.engine.resume()
        return json_response({"status": "resumed"})

    async def is_paused(self, request: Request) -> ASGIApp:
        """Report whether requests are refused, after /pause or /sleep."""
        return json_response({"is_paused": self._serving.engine.is_paused})

    async def init(self, request: Request) -> ASGIApp:
        backend = await self._bodies.read(request, weights.init_request_of)
        await self._serving.engine.init_weight_transfer_engine(backend)
        return json_response({"message": "Weight transfer initialized"})

    async def start(self, request: Request) -> ASGIApp:
        """Hold the engine for an update of the weights: requests wait."""
        await self._serving.engine.start_weight_update()
        return json_response({"message": "Weight update started"})

    async def update(self, request: Request) -> ASGIApp:
        path, version = await self._bodies.read(request, weights.update_request_of)
        folder = weight_calls.weight_folder(self._options, path, "update_info")
        version = await self._serving.engine.update_weights(folder, weight_version=version)
        return json_response({"message": "Weights updated", "weight_version": version})

    async def finish(self, request: Request) -> ASGIApp:
        has_body = request.headers.get("content-length", "0") != "0" or "transfer-encoding" in request.headers
        version = await self._bodies.read(request, weights.finish_request_of) if has_body else None
        version = await self._serving.engine.finish_weight_update(version)
        return json_response({"message": "Weight update finished", "weight_version": version})

    async def info(self, request: Request) -> ASGIApp:
        """Return the version of the weights."""
        return json_response({"weight_version": await self._serving.engine.get_weight_version()})


def _tags(request: Request) -> list[str] | None:
    return request.query_params.getlist("tags") or None


def _mode(request: Request) -> PauseMode:
    mode = request.query_params.get("mode", "abort")
    if mode not in ("abort", "wait", "keep"):
        raise UserError(f"mode must be abort, wait or keep, got {mode!r:.80}.", "mode")
    return cast("PauseMode", mode)
