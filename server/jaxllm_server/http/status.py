"""HTTP routes about the server.

Probes read the engine's state without waiting.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from jaxllm.version import __version__
from jaxllm_server.anthropic import models as anthropic
from jaxllm_server.http.answering import Answering
from jaxllm_server.http.answers import json_response
from jaxllm_server.http.bodies import DEAD
from jaxllm_server.http.error_bodies import nothing_at
from jaxllm_server.http.routes import GET, PLAIN, ApiRoute, Body
from jaxllm_server.ollama.models import SHOW_FIELDS, asked_name, ollama_details, ollama_model
from jaxllm_server.openai.replies import model_card, model_list

if TYPE_CHECKING:
    from jaxllm_server.observability.prometheus import PrometheusObserver

_SHOW = Body(
    "OllamaShow", "Describe a served name as Ollama does.", SHOW_FIELDS, ("model",), {"model": "jaxllm-embedded"}
)


class StatusEndpoints:
    """Handlers of models, state, load and metrics."""

    def __init__(self, answering: Answering, observer: PrometheusObserver | None) -> None:
        self._serving, self._options = answering.serving, answering.options
        self._bodies = answering.bodies
        self._observer = observer
        self._since = int(time.time())

    def routes(self) -> list[ApiRoute]:
        get = partial(ApiRoute, methods=GET, is_bounded=False)
        return [
            ApiRoute("/api/show", self.ollama_show, bodies=(_SHOW,)),
            get("/v1/models", self.models),
            get("/v1/models/{model:path}", self.model),
            get("/api/tags", self.ollama_models),
            get("/api/ps", self.ollama_models),
            get("/api/version", self.version),
            get("/health", self.health, media=()),
            get("/live", self.live, media=()),
            get("/ready", self.ready),
            get("/version", self.version),
            get("/load", self.load),
            get("/metrics", self.metrics, media=(PLAIN,)),
            ApiRoute("/ping", self.ping, ("GET", "POST"), is_bounded=False, media=()),
        ]

    async def models(self, request: Request) -> ASGIApp:
        """List the model's names and its adapters."""
        write = anthropic.model_list if _is_anthropics_client(request) else model_list
        return json_response(write(self._cards()))

    async def model(self, request: Request) -> ASGIApp:
        """Describe a model or adapter."""
        asked = request.path_params["model"]
        if not asked:  # "" would select the served model
            raise nothing_at(request.scope["path"])
        self._serving.check_model(asked)
        card = self._card(asked)
        return json_response(anthropic.model_info(card) if _is_anthropics_client(request) else card)

    def _cards(self) -> list[dict[str, Any]]:
        names = (*self._serving.names, *(served.name for served in self._serving.adapters))
        return [self._card(name) for name in names]

    def _card(self, name: str) -> dict[str, Any]:
        serving, length = self._serving, self._serving.engine.model.max_model_len
        if name in serving.adapters:
            return model_card(name, serving.adapters.find(name).source, self._since, length, serving.names[0])
        return model_card(name, serving.root, self._since, length)

    async def ollama_models(self, request: Request) -> ASGIApp:
        """List the models in Ollama's form."""
        return json_response({"models": [ollama_model(card) for card in self._cards()]})

    async def ollama_show(self, request: Request) -> ASGIApp:
        asked = asked_name(await self._bodies.json(request), self._options.unknown_fields)
        self._serving.check_model(asked)
        pools = self._serving.engine.model.pooler is not None
        return json_response(ollama_details(self._card(asked), self._options, pools))

    async def health(self, request: Request) -> ASGIApp:
        """Report whether the engine runs. Fails while the model is loading, as vLLM's clients expect."""
        return Response(status_code=503 if self._serving.engine.state in (*DEAD, "loading") else 200)

    async def ping(self, request: Request) -> ASGIApp:
        """Report whether the engine runs, as /health does, for SageMaker."""
        return await self.health(request)

    async def live(self, request: Request) -> ASGIApp:
        """Report whether the process works; a failure means that it needs a restart."""
        return Response(status_code=503 if self._serving.engine.state in DEAD else 200)

    async def ready(self, request: Request) -> ASGIApp:
        """Report whether new requests are accepted and, during loading, the number of programs ready."""
        state = self._serving.engine.state
        answer = {"state": state}
        if state == "loading" and (metrics := self._serving.engine.metrics).programs_awaited:
            answer["programs"] = f"{metrics.programs_compiled} of {metrics.programs_awaited}"
        return json_response(answer, 200 if state == "serving" else 503)

    async def version(self, request: Request) -> ASGIApp:
        """Return the server's version."""
        return json_response({"version": __version__})

    async def load(self, request: Request) -> ASGIApp:
        """Return the engine's load; `server_load` is vLLM's count of unfinished requests."""
        engine = self._serving.engine
        load = engine.get_load()
        answer = {"server_load": load.running + load.waiting, **load._asdict()}
        if len(engine.engines) > 1:
            answer["replicas"] = [{"state": each.state, **each.get_load()._asdict()} for each in engine.engines]
        return json_response(answer)

    async def metrics(self, request: Request) -> ASGIApp:
        """Return all metrics for Prometheus."""
        if self._observer is None:
            raise nothing_at("/metrics")
        return Response(self._observer.render(), media_type=self._observer.content_type)


def _is_anthropics_client(request: Request) -> bool:
    return "anthropic-version" in request.headers
