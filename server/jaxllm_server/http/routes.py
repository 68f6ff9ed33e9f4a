"""`ApiRoute` and `Body`: a route's handler and description, as values."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from starlette.requests import Request
from starlette.types import ASGIApp

from jaxllm_server.http.schemas import Schema

Run: TypeAlias = Callable[[Request], Awaitable[ASGIApp]]
GET = ("GET",)
JSON, LINES, HTML, PLAIN = "application/json", "application/x-ndjson", "text/html", "text/plain"


class Body(NamedTuple):
    """The body of a route's requests."""

    name: str  # schema name
    summary: str
    fields: Collection[str]
    required: tuple[str, ...]
    example: Mapping[str, Any]
    unbuilt: Mapping[str, tuple[Any, ...]] = {}  # fields without effect -> accepted values
    streams: bool = False
    shapes: Mapping[str, Schema] = {}  # schemas that `SHAPES` lacks, or has otherwise

    @classmethod
    def of(
        cls,
        reply: type[Any],
        name: str,
        summary: str,
        required: tuple[str, ...],
        example: Mapping[str, Any],
        **own: Any,
    ) -> Body:
        """Return the body that a class of replies reads."""
        return cls(name, summary, reply.fields, required, example, reply.unbuilt, **own)


class Invoked(NamedTuple):
    """The functions by which `/invocations` answers a body of a route."""

    make_reply: Callable[..., Any]  # from a body, the options and the request id
    write: Callable[[Request, Any], ASGIApp]


@dataclass(frozen=True)
class ApiRoute:
    """A route of the front end."""

    path: str  # in Starlette's form
    run: Run
    methods: Sequence[str] = ("POST",)
    bodies: Sequence[Body] = ()  # alternatives
    media: Sequence[str] = (JSON,)  # types of answers, except event streams
    pools: bool | None = None  # True: pooling models only, False: generating ones
    is_offered: bool = True  # shown on this server's pages
    is_bounded: bool = True  # counted against `max_rpcs`
    label: str = ""  # in metrics; "": `name`
    invoked: Invoked | None = None

    @property
    def name(self) -> str:
        """In OpenAPI's form."""
        return self.path.replace(":path", "")
