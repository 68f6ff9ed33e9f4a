"""Query a server before a benchmark: its model, context length and tokenizer."""

from __future__ import annotations

import asyncio
import json
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from jaxllm.bench.clients import send_one
from jaxllm.bench.server_tokenizer import ServerTokenizer
from jaxllm.bench.sse import shorten
from jaxllm.bench.target import Target
from jaxllm.bench.workload import Job
from jaxllm.errors import EngineError, UnavailableError, UserError

if TYPE_CHECKING:
    from jaxllm.bench.datasets import Coder

_PATIENCE = 10.0  # seconds per response
_PAUSE = 1.0  # seconds between attempts
_EMBEDDED = "jaxllm-embedded"

Result = TypeVar("Result")


def fetch(url: str, headers: Mapping[str, str], is_insecure: bool, body: Mapping[str, Any] | None = None) -> str:
    """Return the response to GET, or to POST with `body`; raise `OSError` on failure."""
    context = ssl._create_unverified_context() if is_insecure and url.startswith("https") else None
    sent = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, sent, {**headers, "Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=_PATIENCE, context=context) as response:
        return response.read().decode()


def find_model(target: Target) -> tuple[str, str]:
    """Return the first served model's name, and where its files may be.

    Raises `EngineError` without a model, `UserError` without a required API key.
    """
    if target.is_grpc:
        from jaxllm.bench.grpc_client import first_model

        name = first_model(target, _PATIENCE)
        return name, name
    url = _models_url(target)
    try:
        models = _model_cards(target)
        return str(models[0]["id"]), str(models[0].get("root") or models[0]["id"])
    except urllib.error.HTTPError as error:
        if error.code == 401:
            raise UserError(
                f"{url} answers HTTP 401: the server requires a key: set OPENAI_API_KEY, or --header "
                "'Authorization=Bearer KEY'."
            ) from error
        raise EngineError(f"{url} answers HTTP {error.code}: give the model with --model.") from error
    except OSError as error:
        reason = getattr(error, "reason", error)
        raise UnavailableError(f"{target.base} does not answer: {shorten(str(reason))}") from error
    except (ValueError, LookupError, TypeError) as error:
        raise EngineError(f"{url} lists no model: give one with --model.") from error


def find_context(target: Target) -> int | None:
    try:
        if target.is_grpc:
            from jaxllm.bench.grpc_client import context_of

            return context_of(target, _PATIENCE)
        card = next(card for card in _model_cards(target) if card["id"] == target.model)
        return int(card["max_model_len"])
    except (EngineError, UserError, OSError, ValueError, LookupError, TypeError, StopIteration):
        return None


def wait_for(attempt: Callable[[], Result], seconds: float) -> Result:
    end = time.monotonic() + seconds
    while True:
        try:
            return attempt()
        except EngineError:
            if time.monotonic() + _PAUSE > end:
                raise
            time.sleep(_PAUSE)


def check_answers(target: Target, job: Job) -> None:
    outcome = asyncio.run(send_one(target, job))
    if outcome.error:
        raise EngineError(f"a test request failed: {outcome.error}")


def refuses(target: Target, field: str) -> bool:
    """Return whether the server refuses requests because of `field`, by sending one."""
    return field in asyncio.run(send_one(target, Job("The", 1, 1))).error


def find_tokenizer(asked: str | None, target: Target, root: str) -> tuple[Coder, str]:
    """Return the requested tokenizer, or the model's (embedded, local, hub id, or the server's), and its source."""
    from jaxllm.embedded import MODEL_DIR
    from jaxllm.text.tokenizer import load_tokenizer

    if asked is not None:
        return load_tokenizer(asked), asked
    if _EMBEDDED in (target.model, root):
        return load_tokenizer(MODEL_DIR), _EMBEDDED
    try:
        return load_tokenizer(root), root
    except Exception as error:
        with suppress(EngineError, UserError, OSError, ValueError, LookupError, TypeError):
            return _server_tokenizer(target), f"{target.base}/tokenize"
        raise UserError(
            f"prompts are made and counted with the model's tokenizer, and there is none for {root!r}: "
            f"name a folder or a hub id with --tokenizer ({shorten(str(error))})"
        ) from error


def _server_tokenizer(target: Target) -> ServerTokenizer:
    if target.is_grpc:
        from jaxllm.bench.grpc_client import coding_of

        return ServerTokenizer(*coding_of(target, _PATIENCE))

    def ask(path: str, **body: Any) -> dict[str, Any]:
        url = f"{target.base}{path}"
        return json.loads(fetch(url, target.headers, target.is_insecure, {"model": target.model, **body}))

    return ServerTokenizer(
        lambda text, add: ask("/tokenize", prompt=text, add_special_tokens=add)["tokens"],
        lambda ids: ask("/detokenize", tokens=list(ids))["prompt"],
    )


def _models_url(target: Target) -> str:
    return f"{target.base}/v1/models"


def _model_cards(target: Target) -> Any:
    return json.loads(fetch(_models_url(target), target.headers, target.is_insecure))["data"]


def metrics_fetcher(url: str, target: Target) -> Callable[[], str]:
    return lambda: fetch(url, target.headers, target.is_insecure)
