"""HTTP routes of adapters."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp

from jaxllm_server.http.answering import Answering
from jaxllm_server.http.guard import CLIENT
from jaxllm_server.http.routes import PLAIN, ApiRoute, Body
from jaxllm_server.http.schemas import FLAG, IDLE, TEXT
from jaxllm_server.openai import adapters

_SHAPES = {"lora_name": TEXT, "lora_path": TEXT, "load_inplace": FLAG, "lora_int_id": IDLE}
_POET = {"lora_name": "poet"}
_LOAD = Body(
    "LoadAdapter",
    "Load an adapter under a name.",
    adapters.LOAD_FIELDS,
    ("lora_name", "lora_path"),
    {**_POET, "lora_path": "poet"},
    adapters.UNBUILT,
    shapes=_SHAPES,
)
_UNLOAD = Body("UnloadAdapter", "Take an adapter away.", adapters.UNLOAD_FIELDS, ("lora_name",), _POET, shapes=_SHAPES)


def routes(answering: Answering) -> list[ApiRoute]:
    served, bodies = answering.serving.adapters, answering.bodies
    is_offered = answering.options.lora_root is not None

    async def load(request: Request) -> ASGIApp:
        name, path, in_place = await bodies.read(request, adapters.load_request_of)
        await served.load(name, path, in_place=in_place, client=request.scope[CLIENT])
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    async def unload(request: Request) -> ASGIApp:
        name = await bodies.read(request, adapters.unload_request_of)
        served.unload(name)
        return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")

    rows = ("/v1/load_lora_adapter", load, _LOAD), ("/v1/unload_lora_adapter", unload, _UNLOAD)
    return [ApiRoute(path, run, bodies=(body,), media=(PLAIN,), is_offered=is_offered) for path, run, body in rows]
