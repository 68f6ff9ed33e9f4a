"""Whom a benchmark asks, and how: address, model, and the fields of every request. Plain data, sent to each process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Backend = Literal["openai", "openai-chat", "openai-embeddings", "grpc"]


@dataclass(frozen=True, kw_only=True)
class Target:
    """A server and what each request to it says beside its prompt.

    `base` is the URL without a path; with gRPC host:port or unix:/path. `fields` are sampling parameters by their
    usual names; `extra` goes into every request as it is, and takes out what it maps to None. `headers` are gRPC's
    metadata, too.
    """

    backend: Backend
    base: str
    endpoint: str = ""  # of HTTP
    model: str = ""
    fields: Mapping[str, Any] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    request_id_prefix: str = ""
    is_insecure: bool = False  # certificates are not checked
    embeds: bool = False  # jobs are texts to embed

    @property
    def is_grpc(self) -> bool:
        """Whether it is asked over gRPC."""
        return self.backend == "grpc"
