"""`/api/embed`: bodies to calls, vectors to answers, as in Ollama's docs/api.md. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxllm_server.ollama.models import model_name
from jaxllm_server.openai.pooling import PoolReply, numbers_text
from jaxllm_server.pooling.pool_calls import PoolResult
from jaxllm_server.requests.fields import Body, flag, prompts_of
from jaxllm_server.shared.options import ServerOptions


class OllamaEmbedReply(PoolReply):
    """The reply of `/api/embed`."""

    id_prefix = "embed-"
    list_name = "embeddings"
    names: Mapping[str, str] = {"inputs": "input", "prompt": "input"}
    fields = frozenset({"model", "input", "truncate", "options", "keep_alive", "dimensions"})
    unbuilt: Mapping[str, tuple[Any, ...]] = {}

    def __init__(self, body: Body, options: ServerOptions, request_id: str) -> None:
        fields = self._given(body, options)
        cut = {"truncate_prompt_tokens": -1} if flag(fields, "truncate", True) else {}
        inputs = prompts_of(fields, "input", options.max_pooling_inputs)
        own = {"task": "embed", "inputs": inputs, "dimensions": fields.get("dimensions"), "add_special_tokens": True}
        super().__init__({"model": model_name(fields), **cut}, request_id, **own)

    def tail(self, results: Sequence[PoolResult]) -> dict[str, Any]:
        return {"prompt_eval_count": sum(result.prompt_tokens for result in results)}

    def _item(self, result: PoolResult, labels: Sequence[str]) -> str:
        return numbers_text(result.values)
