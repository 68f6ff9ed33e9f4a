"""The server under test."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Backend = Literal["openai", "openai-chat", "openai-embeddings", "grpc"]


@dataclass(frozen=True, kw_only=True)
class Target:
    """A server and the request fields common to all jobs.

    `base` is a URL without path, for gRPC host:port or unix:/path. `fields` are sampling parameters; `extra` overrides
    them, None removes a field. `headers` are gRPC metadata too.
    """

    backend: Backend
    base: str
    endpoint: str = ""  # HTTP path
    model: str = ""
    fields: Mapping[str, Any] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    request_id_prefix: str = ""
    is_insecure: bool = False
    embeds: bool = False

    @property
    def is_grpc(self) -> bool:
        return self.backend == "grpc"
