"""`/v1/responses/compact`: returns user messages and a summary. Pure.

Unlike OpenAI's, the summary is in base64, not encrypted: any server can continue from it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from jaxllm.errors import UserError
from jaxllm_server.generation.calls import Call, Chunk
from jaxllm_server.requests.fields import Body
from jaxllm_server.requests.shared_fields import given
from jaxllm_server.responses.items import Item, has_media, item_id, packed
from jaxllm_server.responses.reply import ResponseReply
from jaxllm_server.shared.options import ServerOptions

_MOST_TOKENS = 1024  # at most a quarter of the context
_ASKED = (
    "Sum up this conversation for someone who goes on with it and has not read it: what is wanted, what was done and "
    "found out, what was decided, and what is left to do. Write the summary and nothing else."
)
_FIELDS = frozenset(
    (
        *("model", "input", "instructions", "previous_response_id", "request_id", "priority", "cache_salt"),
        *("service_tier", "prompt_cache_key", "prompt_cache_retention", "mm_processor_kwargs"),
    )
)


class CompactionReply(ResponseReply):
    """Reads a request of `/v1/responses/compact` and builds the response."""

    fields, unbuilt = _FIELDS, MappingProxyType({})

    def __init__(
        self,
        body: Body,
        options: ServerOptions,
        request_id: str,
        history: Sequence[Item] = (),
        kept: Mapping[str, Item] = MappingProxyType({}),
    ) -> None:
        ignored: list[str] = []
        fields = given(body, _FIELDS, {}, options.unknown_fields, ignored)
        if "model" not in fields:
            raise UserError("model is missing: give the model that writes the summary.", "model")
        own = fields.get("input", [])
        items = [{"role": "user", "content": own}] if isinstance(own, str) else own
        if not history and items == []:
            raise UserError("There is nothing to compact: give input or previous_response_id.", "input")
        asked = {"role": "user", "content": _ASKED}
        told = {"input": [*items, asked] if isinstance(items, list) else items, "store": False, "temperature": 0}
        told |= {"truncation": "auto", "enable_thinking": False}
        super().__init__({**fields, **told}, options, request_id, history, kept)
        self.ignored = ignored
        self._window = [*history, *self.items[:-1]]
        if has_media(self._window):  # a part of one could be cut off
            (call,) = self.calls
            sampling = {name: value for name, value in call.sampling.items() if name != "truncate_prompt_tokens"}
            self.calls: Sequence[Call] = [replace(call, sampling=sampling)]

    def bound(self, max_model_len: int) -> None:
        """Limit the summary's `max_tokens`, to leave context to the conversation."""
        (call,) = self.calls
        most = max(1, min(_MOST_TOKENS, max_model_len // 4))
        self.calls = [replace(call, sampling={**call.sampling, "max_tokens": most})]

    def response(self, chunks: Sequence[Chunk]) -> dict[str, Any]:
        made = super().response(chunks)
        said = [part["text"] for item in made["output"] if item["type"] == "message" for part in item["content"]]
        compaction = {
            "id": item_id("cmp", self.request_id, "0"),
            "type": "compaction",
            "encrypted_content": packed("".join(said).strip()),
        }
        users = [item for item in self._window if item["type"] == "message" and item["role"] == "user"]
        head = {"id": made["id"], "object": "response.compaction", "created_at": made["created_at"]}
        return {**head, "output": [*users, compaction], "usage": made["usage"]}
