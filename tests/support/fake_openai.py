"""A server of the OpenAI API in a thread, with the habits of other servers by model name."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from jaxllm.text.tokenizer import Tokenizer

WORD = " cat"


class FakeOpenAI:
    """Answers " cat" `max_tokens` times, with deviations by model name; records request bodies."""

    def __init__(
        self,
        models: bool = True,
        context: int | None = None,
        key: str | None = None,
        root: str | None = None,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        routes = [
            Route(f"/v1/{path}", self._generate, methods=["POST"]) for path in ("completions", "chat/completions")
        ]
        routes.append(Route("/v1/embeddings", self._embed, methods=["POST"]))
        routes.append(Route("/metrics", self._show_metrics))
        if models:
            card = {"id": "plain", "root": root} | ({} if context is None else {"max_model_len": context})
            routes.append(Route("/v1/models", lambda request: self._locked(request, JSONResponse({"data": [card]}))))
        if tokenizer is not None:
            self._tokenizer = tokenizer
            routes += [Route("/tokenize", self._tokenize, methods=["POST"])]
            routes += [Route("/detokenize", self._detokenize, methods=["POST"])]
        self._key = key  # of endpoints other than requests
        self.metrics = 'vllm:num_requests_running{engine="0"} 3.0\nvllm:generation_tokens_total{engine="0"} 70.0\n'
        config = uvicorn.Config(Starlette(routes=routes), port=0, log_config=None, log_level="critical", lifespan="off")
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.server.run, daemon=True)

    def __enter__(self) -> FakeOpenAI:
        self.thread.start()
        end = time.monotonic() + 10
        while not self.server.started and time.monotonic() < end:
            time.sleep(0.01)
        self.port = self.server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        return self

    def __exit__(self, *_: object) -> None:
        self.server.should_exit = True
        self.thread.join(10)

    def _show_metrics(self, request: Request) -> Response:
        return self._locked(request, PlainTextResponse(self.metrics))

    def _locked(self, request: Request, response: Response) -> Response:
        """Return the response if the request has the key or no key is set."""
        is_open = self._key is None or request.headers.get("authorization") == f"Bearer {self._key}"
        return response if is_open else JSONResponse({"error": {"message": "no key"}}, status_code=401)

    async def _tokenize(self, request: Request) -> Response:
        body = await request.json()
        ids = self._tokenizer.encode(body["prompt"], body["add_special_tokens"])
        return JSONResponse({"count": len(ids), "tokens": ids})

    async def _detokenize(self, request: Request) -> Response:
        return JSONResponse({"prompt": self._tokenizer.decode((await request.json())["tokens"], False)})

    async def _embed(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        habit = body["model"]
        if habit == "wordy":
            return PlainTextResponse("<h1>oops</h1>")
        if habit == "refusing":
            return JSONResponse({"error": {"message": "too long"}}, status_code=400)
        vectors = [{"embedding": "AAAA"} for _ in body["input"]][habit == "few" :]
        usage = {} if habit == "untold" else {"usage": {"prompt_tokens": 7 * len(vectors)}}
        return JSONResponse({"data": vectors, **usage})

    async def _generate(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        if body["model"] == "refusing":
            error = {"message": f"request {len(self.bodies)} is\nnot wanted", "type": "bad"}
            return JSONResponse({"error": error}, status_code=400)
        if body["model"] == "full":
            return JSONResponse({"error": {"message": "The queue is full: 4 requests wait."}}, status_code=429)
        if body["model"] == "strict" and "ignore_eos" in body:
            return JSONResponse({"detail": "Unexpected fields in the request: {'ignore_eos'}"}, status_code=422)
        if body["model"] == "broken":
            return PlainTextResponse("<h1>oops</h1>", status_code=502)
        return StreamingResponse(self._events(body, "messages" in body), media_type="text/event-stream")

    async def _events(self, body: dict[str, Any], is_chat: bool) -> AsyncIterator[str]:
        """Stream the events of the server with that model name."""
        habit, end = body["model"], "\n\n"
        count = body["max_tokens"]
        if habit == "llama-cpp":  # sse-starlette's line ends and pings; no usage; ends after 3 tokens
            end, count = "\r\n\r\n", min(count, 3)
            yield ": ping\r\n\r\n"

        def event(choice: dict[str, Any] | None, **others: Any) -> str:
            return f"data: {json.dumps({'choices': [choice] if choice else [], **others})}{end}"

        def text(word: str) -> dict[str, Any]:
            return {"delta": {"content": word}} if is_chat else {"text": word}

        if is_chat:
            yield event({"delta": {"role": "assistant", "content": ""}, "finish_reason": None})
        for number in range(count):
            # 50 ms at least: uvloop counts whole milliseconds and may wake one early.
            await asyncio.sleep(0.052 if habit == "slow" or (is_chat and number == 0) else 0)
            yield event({**text(WORD), "finish_reason": None})
            if number == 1 and habit == "truncated":
                return
            if number == 1 and habit == "failing":
                yield f"data: {json.dumps({'error': {'message': 'out of memory'}})}{end}"
                return
            if number == 1 and habit == "dropping":
                raise ConnectionError
        yield event({**text(""), "finish_reason": "length"})
        if habit != "llama-cpp":
            yield event(None, usage={"prompt_tokens": 7, "completion_tokens": count})
        if habit != "undone":
            yield f"data: [DONE]{end}"
