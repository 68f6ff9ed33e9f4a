"""A route's handler and description."""

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
FORM = "multipart/form-data"


class Body(NamedTuple):
    """A route's request body."""

    name: str
    summary: str
    fields: Collection[str]
    required: tuple[str, ...]
    example: Mapping[str, Any]
    unbuilt: Mapping[str, tuple[Any, ...]] = {}  # with accepted values
    streams: bool = False
    shapes: Mapping[str, Schema] = {}  # schemas of fields that `SHAPES` lacks or that differ from it
    media: str = JSON

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
        return cls(name, summary, reply.fields, required, example, reply.unbuilt, **own)


class Invoked(NamedTuple):
    """The functions that answer a body on `/invocations`."""

    make_reply: Callable[..., Any]
    write: Callable[[Request, Any], ASGIApp]


@dataclass(frozen=True)
class ApiRoute:
    """An HTTP route."""

    path: str
    run: Run
    methods: Sequence[str] = ("POST",)
    bodies: Sequence[Body] = ()  # alternatives
    media: Sequence[str] = (JSON,)
    pools: bool | None = None  # False: for generating models
    is_offered: bool = True
    is_bounded: bool = True  # counted against `max_rpcs`
    label: str = ""  # in metrics; "": `name`
    invoked: Invoked | None = None

    @property
    def name(self) -> str:
        return self.path.replace(":path", "")
