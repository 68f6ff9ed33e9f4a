"""Reads request bodies."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.requests import Request

from jaxllm_server.access.ledger import BODIES, REQUESTS, Entry, size_of
from jaxllm_server.generation.calls import LARGE_REQUEST
from jaxllm_server.http.answers import while_connected
from jaxllm_server.http.error_bodies import ClientGone, Refusal, body_too_large
from jaxllm_server.http.guard import CLIENT
from jaxllm_server.http.multipart import Form, boundary_of, read_form
from jaxllm_server.ollama.replies import PATHS as OLLAMA_PATHS
from jaxllm_server.shared import strict_json
from jaxllm_server.shared.options import ServerOptions

if TYPE_CHECKING:
    from jaxllm_server.serving import Serving

Result = TypeVar("Result")
DEAD = ("dead", "stopped")  # engine states without answers


class BodyReader:
    """Reads bodies of JSON, and forms."""

    def __init__(self, serving: Serving, options: ServerOptions) -> None:
        self._serving = serving
        self._options = options

    async def json(self, request: Request) -> dict[str, Any]:
        return await self.read(request, lambda body: body)

    async def read(self, request: Request, make: Callable[[dict[str, Any]], Result]) -> Result:
        """Return `make` of a request's JSON; large bodies are parsed in a thread."""
        media, _, parameters = request.headers.get("content-type", "").partition(";")
        charset = parameters.replace(" ", "").lower()
        is_json = media.strip().lower() == "application/json" and charset in ("", 'charset="utf-8"', "charset=utf-8")
        # Ollama ignores the media type: `curl -d` sends a form's, LiteLLM none. `Guard` refuses other origins.
        if not is_json and not request.url.path.endswith(OLLAMA_PATHS):
            raise Refusal(415, "The body must be application/json in UTF-8.", "CONTENT_TYPE", closes=True)
        _check_encoding(request)
        client = request.scope[CLIENT]
        entry: Entry = request.scope["jaxllm"]["entry"]
        body = await self._receive(request, entry)
        is_large = len(body) > LARGE_REQUEST

        def parse() -> tuple[int, Result]:
            document = strict_json.read(body, self._options.max_json_depth, in_thread=is_large)
            return size_of(document), make(document)

        parsing = self.run(parse, is_large, client)
        num_bytes, result = await (while_connected(request.receive, parsing) if is_large else parsing)
        entry.charge(REQUESTS, num_bytes)
        entry.release(BODIES)
        return result

    async def form(self, request: Request, make: Callable[[Form], Result]) -> Result:
        """Return `make` of a request's form, made in a thread."""
        boundary = boundary_of(request.headers.get("content-type", ""))
        if boundary is None:
            raise Refusal(415, "The body must be multipart/form-data with a boundary.", "CONTENT_TYPE", closes=True)
        _check_encoding(request)
        entry: Entry = request.scope["jaxllm"]["entry"]
        body = await self._receive(request, entry)
        parsing = self.run(lambda: make(read_form(body, boundary)), True, request.scope[CLIENT])
        result = await while_connected(request.receive, parsing)
        entry.charge(REQUESTS, len(body))
        entry.release(BODIES)
        return result

    async def _receive(self, request: Request, entry: Entry) -> bytearray:
        body, most = bytearray(), self._options.body_limit(request.url.path)
        try:
            async with asyncio.timeout(self._options.stall_timeout or None):
                while True:
                    message = await request.receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGone
                    piece = message.get("body", b"")
                    if len(body) + len(piece) > most:
                        raise body_too_large(most)
                    entry.charge(BODIES, len(piece))
                    body += piece
                    if not message.get("more_body", False):
                        request.scope["jaxllm"]["body_bytes"] = len(body)
                        return body
        except TimeoutError as error:
            text = f"The body was not received within {self._options.stall_timeout:g} seconds."
            raise Refusal(408, text, "REQUEST_TIMEOUT", "timeout", closes=True) from error

    async def run(self, function: Callable[[], Result], is_long: bool, client: str) -> Result:
        if is_long and self._serving.engine.state not in DEAD:
            return await self._serving.engine.off_loop(function, client=client)
        return function()


def _check_encoding(request: Request) -> None:
    if request.headers.get("content-encoding", "identity") != "identity":
        raise Refusal(415, "Compressed bodies are not accepted.", "CONTENT_ENCODING", closes=True)
