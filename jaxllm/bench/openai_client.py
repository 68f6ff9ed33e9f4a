"""A benchmark client for the OpenAI API on aiohttp."""

from __future__ import annotations

import json
import time
from typing import Any, Self

import aiohttp

from jaxllm.bench.outcome import Outcome
from jaxllm.bench.sse import AnswerReader, EventReader, error_message
from jaxllm.bench.target import Target
from jaxllm.bench.workload import Job


class OpenAIClient:
    """An HTTP client with a connection per open request."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._url = target.base + target.endpoint
        self._is_chat = target.backend == "openai-chat"

    async def __aenter__(self) -> Self:
        # A limit would queue requests, a timeout cut responses.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=not self._target.is_insecure),
            timeout=aiohttp.ClientTimeout(total=None),
            headers={"Accept-Encoding": "identity", **self._target.headers},
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def send(self, name: str, job: Job, outcome: Outcome) -> None:
        body = json.dumps(request_body(self._target, job)).encode()
        headers = {"Content-Type": "application/json", "x-request-id": f"{self._target.request_id_prefix}{name}"}
        reader, answer = EventReader(), AnswerReader(outcome, self._is_chat)
        outcome.sent_at = time.perf_counter()
        try:
            async with self._session.post(self._url, data=body, headers=headers) as response:
                if response.status != 200:
                    outcome.error = f"HTTP {response.status}: {_message(await response.read())}"
                    return
                if self._target.embeds:
                    _take_embeddings(await response.read(), job, outcome)
                    return
                async for received in response.content.iter_any():
                    answer.take(reader.feed(received), time.perf_counter())
            answer.take(reader.feed(b"\n"), time.perf_counter())  # a last line without newline
            answer.finish()
        except (aiohttp.ClientError, OSError) as error:
            outcome.error = f"{type(error).__name__}: {' '.join(str(error).split())}"
        finally:
            outcome.ended_at = time.perf_counter()


def request_body(target: Target, job: Job) -> dict[str, Any]:
    model = job.model or target.model
    body: dict[str, Any] = {"model": model} if model else {}
    if target.embeds:
        body |= {"input": [job.prompt, *job.others], "encoding_format": "base64", **target.fields, **target.extra}
        return {name: value for name, value in body.items() if value is not None}
    if target.backend == "openai-chat":
        body["messages"] = [{"role": "user", "content": job.prompt}]
    else:
        body["prompt"] = job.prompt
    body |= {"max_tokens": job.max_tokens, "stream": True, "stream_options": {"include_usage": True}}
    body |= {**target.fields, **target.extra}
    return {name: value for name, value in body.items() if value is not None}


def _take_embeddings(content: bytes, job: Job, outcome: Outcome) -> None:
    outcome.message_times.append(time.perf_counter())
    outcome.output_tokens = 0
    try:
        answer = json.loads(content)
        outcome.num_vectors = len(answer["data"])
        outcome.seen_prompt_tokens = (answer.get("usage") or {}).get("prompt_tokens")
    except (ValueError, LookupError, TypeError, AttributeError):
        outcome.error = f"the answer holds no embeddings: {_message(content)}"
        return
    if outcome.num_vectors != 1 + len(job.others):
        outcome.error = f"the answer has {outcome.num_vectors} embeddings of {1 + len(job.others)} texts"


def _message(content: bytes) -> str:
    try:
        return error_message(json.loads(content))
    except ValueError:
        return error_message(content.decode(errors="replace"))
