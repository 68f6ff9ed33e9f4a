"""HTTP routes that embed, classify and score."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp, Scope, Send

from jaxllm.pooling_params import TASKS
from jaxllm_server.http.answering import Answering
from jaxllm_server.http.answers import Answer, send_json
from jaxllm_server.http.routes import ApiRoute, Body
from jaxllm_server.http.schemas import FLAG, INTEGER, OBJECT, PROMPTS, TEXT, Schema
from jaxllm_server.http.sse import dumps
from jaxllm_server.ollama.pooling import OllamaEmbedReply
from jaxllm_server.openai.pooling import REPLIES, PoolReply
from jaxllm_server.pooling.pool_calls import PoolResult

_MANY_NUMBERS = 1 << 16  # 13 ms to serialize (measured); more take a thread
_REPLIES = {**REPLIES, "/api/embed": OllamaEmbedReply}
_DOCUMENTS: Schema = {"anyOf": [TEXT, OBJECT, {"type": "array", "items": {"anyOf": [TEXT, OBJECT]}}]}
_SHAPES: Mapping[str, Schema] = {
    "input": PROMPTS,
    **dict.fromkeys(("text_1", "text_2", "queries", "documents", "items", "data_1", "data_2", "query"), _DOCUMENTS),
    **dict.fromkeys(("normalize", "use_activation", "return_documents"), FLAG),
    **dict.fromkeys(("dimensions", "top_n"), INTEGER),
    "encoding_format": {"type": "string", "enum": ["float", "base64"]},
    "task": {"type": "string", "enum": list(TASKS)},
}
_TEXTS = {"input": ["Who keeps bees?", "Anna is a beekeeper."]}
_PAIRS = {"text_1": "Who keeps bees?", "text_2": ["Anna is a beekeeper.", "Ben bakes bread."]}
_RANKED = {"query": "Which animal barks?", "documents": ["A banana is yellow.", "A dog barks."]}
_SCORE = "Score one text with each of others, or each with the one in its place."
_RERANK = "Order documents by how well they belong to a query."
_BODIES: Mapping[str, Body] = {
    path: Body.of(_REPLIES[path], name, summary, required, example, shapes=_SHAPES)
    for paths, name, summary, required, example in (
        (("/v1/embeddings",), "Embedding", "Return the vectors of texts.", ("input",), _TEXTS),
        (("/pooling",), "Pooling", "Do what the model does with texts, or what `task` says.", ("input",), _TEXTS),
        (("/classify",), "Classification", "Classify texts.", ("input",), _TEXTS),
        (("/score", "/v1/score"), "Score", _SCORE, (), _PAIRS),
        (("/rerank", "/v1/rerank", "/v2/rerank"), "Rerank", _RERANK, ("query", "documents"), _RANKED),
        (("/api/embed",), "OllamaEmbed", "Return the vectors of texts, in Ollama's form.", ("input",), _TEXTS),
    )
    for path in paths
}


def routes(answering: Answering) -> list[ApiRoute]:
    def write(request: Request, reply: PoolReply) -> ASGIApp:
        return PoolAnswer(**answering.parts(request, reply), head=answering.head(reply))

    return [
        answering.route(path, _BODIES[path], make_reply, write, pools=True, is_invoked=path in REPLIES)
        for path, make_reply in _REPLIES.items()
    ]


@dataclass(frozen=True)
class PoolAnswer(Answer[PoolReply]):
    """A pooling request's answer."""

    head: Mapping[str, Any]

    async def _work(self, scope: Scope, send: Send) -> None:
        (call,) = self.reply.calls
        async with aclosing(self.serving.pooling.pool(replace(call, client=self.client))) as results:
            found = sorted([result async for result in results], key=lambda result: result.index)
        if sum(len(result.values) for result in found) > _MANY_NUMBERS:
            content = await self.serving.engine.off_loop(self._write, found, client=self.client)
        else:
            content = self._write(found)
        await send_json(send, content)

    def _write(self, results: Sequence[PoolResult]) -> bytes:
        """Serialize by item, so that other threads can run."""
        pooler = self.serving.engine.model.pooler
        head = dumps({**self.head, "object": "list", **self.reply.tail(results)})
        items = ",".join(self.reply.items(results, () if pooler is None else pooler.labels))
        return b'%b,"%b":[%b]}' % (head[:-1], self.reply.list_name.encode(), items.encode())
