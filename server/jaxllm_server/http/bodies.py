"""Reads the bodies of requests: bounded in size, all together and by client, and parsed where nothing waits for it.

Knows nothing of what bodies mean.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.requests import Request

from jaxllm.errors import OverloadedError
from jaxllm_server.http.answers import while_connected
from jaxllm_server.http.error_bodies import ClientGone, Refusal, body_too_large
from jaxllm_server.http.guard import CLIENT
from jaxllm_server.ollama.replies import PATHS as OLLAMA_PATHS
from jaxllm_server.shared import strict_json
from jaxllm_server.shared.calls import LARGE_REQUEST
from jaxllm_server.shared.client_quota import Bound
from jaxllm_server.shared.options import ServerOptions

if TYPE_CHECKING:
    from jaxllm_server.shared.serving import Serving

Result = TypeVar("Result")
DEAD = ("dead", "stopped")  # states of an engine that answers nothing any more
_FREE_BYTES = 64 << 10  # of a body that are not counted: as many bodies as there may be requests hold 128 MiB of them


class Bodies:
    """Bounds the bytes of bodies that are being received, all together, and of one client to half of them.

    A small body has room whatever others hold.
    """

    def __init__(self, most: int, max_body_bytes: int) -> None:
        self._bound = Bound(most, max(most // 2, max_body_bytes))

    @contextmanager
    def place(self, client: str) -> Iterator[Callable[[int], None]]:
        """Count one body while the block runs; call what it yields with the length of each piece.

        Raises:
            OverloadedError: by that call, if there is no room for the piece.
        """
        received = held = 0

        def grow(num_bytes: int) -> None:
            nonlocal received, held
            received += num_bytes
            num_bytes = max(0, received - _FREE_BYTES) - held
            if num_bytes == 0:
                return
            if not self._bound.has_room(client, num_bytes):
                raise OverloadedError("The server is receiving too many large bodies.", retry_after=1.0)
            self._bound.add(client, num_bytes)
            held += num_bytes

        try:
            yield grow
        finally:
            self._bound.add(client, -held)

    @contextmanager
    def kept(self, client: str, num_bytes: int) -> Iterator[None]:
        """Count what was made of a body, and is held without a connection, while the block runs.

        Raises:
            OverloadedError: if there is no room for it.
        """
        with self.place(client) as grow:
            grow(num_bytes)
            yield


class BodyReader:
    """Reads bodies of JSON."""

    def __init__(self, serving: Serving, options: ServerOptions) -> None:
        self._serving = serving
        self._options = options
        self._bodies = Bodies(options.most_receiving_bytes, options.max_body_bytes)
        self.background = Bodies(options.most_receiving_bytes, options.max_body_bytes)  # of responses being made

    async def json(self, request: Request) -> dict[str, Any]:
        """Read a request's JSON, up to the bound of its size."""
        return await self.read(request, lambda body: body)

    async def read(self, request: Request, make: Callable[[dict[str, Any]], Result]) -> Result:
        """Read a request's JSON and make something of it; of a large one where the event loop does not wait for it."""
        media, _, parameters = request.headers.get("content-type", "").partition(";")
        charset = parameters.replace(" ", "").lower()
        is_json = media.strip().lower() == "application/json" and charset in ("", 'charset="utf-8"', "charset=utf-8")
        # Ollama does not look at the type, and its users' `curl -d` says that it is a form, LiteLLM nothing. Pages of
        # other origins, which the type would keep out as well, have been refused by their Origin.
        if not is_json and not request.url.path.endswith(OLLAMA_PATHS):
            raise Refusal(415, "The body must be application/json in UTF-8.", "CONTENT_TYPE", closes=True)
        if request.headers.get("content-encoding", "identity") != "identity":
            raise Refusal(415, "Compressed bodies are not accepted.", "CONTENT_ENCODING", closes=True)
        client = request.scope[CLIENT]
        with self._bodies.place(client) as grow:
            body = await self._receive(request, grow)
            request.scope["jaxllm"]["body_bytes"] = len(body)
            is_large = len(body) > LARGE_REQUEST

            def parse() -> Result:
                return make(strict_json.read(body, self._options.max_json_depth, in_thread=is_large))

            parsing = self.run(parse, is_large, client)
            return await (while_connected(request.receive, parsing) if is_large else parsing)

    async def _receive(self, request: Request, grow: Callable[[int], None]) -> bytearray:
        """Read a body; `grow` is called with each piece's length before it is kept, and may raise."""
        body = bytearray()
        try:
            async with asyncio.timeout(self._options.stall_timeout or None):
                while True:
                    message = await request.receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGone
                    piece = message.get("body", b"")
                    if len(body) + len(piece) > self._options.max_body_bytes:
                        raise body_too_large(self._options.max_body_bytes)
                    grow(len(piece))
                    body += piece
                    if not message.get("more_body", False):
                        return body
        except TimeoutError as error:
            text = f"The body did not come within {self._options.stall_timeout:g} seconds."
            raise Refusal(408, text, "REQUEST_TIMEOUT", "timeout", closes=True) from error

    async def run(self, function: Callable[[], Result], is_long: bool, client: str) -> Result:
        """Call a function; in one of the engine's threads if it takes long and there still are any."""
        if is_long and self._serving.engine.state not in DEAD:
            return await self._serving.engine.off_loop(function, client=client)
        return function()
