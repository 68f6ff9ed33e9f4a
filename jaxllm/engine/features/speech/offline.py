"""Runs transcriptions on an engine of this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from jaxllm.engine.features.speech.transcription import Request, Transcription
from jaxllm.engine.prompts import Prompt
from jaxllm.errors import RequestFailedError
from jaxllm.outputs import RequestOutput
from jaxllm.request_params import RequestParams


class Engine(Protocol):
    """The part of `LLMEngine` in use."""

    def add_request(
        self, request_id: str, prompt: Prompt, params: RequestParams | None = None, priority: int = 0, **options: Any
    ) -> None: ...

    def step(self) -> list[RequestOutput]: ...


def run(
    engine: Engine, transcriptions: Sequence[Transcription], progress: Callable[[], None] | None = None
) -> dict[int, RequestFailedError]:
    """Write all recordings down, one window of each at a time; return the failures by index.

    `progress` is called after each window.
    """
    failures: dict[int, RequestFailedError] = {}
    running = {str(index): each.requests() for index, each in enumerate(transcriptions)}
    for name, requests in [*running.items()]:
        first = next(requests, None)
        if first is None:
            del running[name]
        else:
            _add(engine, name, first)
    while running:
        for output in engine.step():
            if not output.finished:
                continue
            try:
                request = running[output.request_id].send(output.outputs[0])
            except StopIteration:
                del running[output.request_id]
            except RequestFailedError as error:
                failures[int(output.request_id)] = error
                del running[output.request_id]
            else:
                _add(engine, output.request_id, request)
            if progress is not None:
                progress()
    return failures


def _add(engine: Engine, name: str, request: Request) -> None:
    options: dict[str, Any] = {} if request.speech is None else {"speech": request.speech}
    engine.add_request(name, request.prompt, request.params, **options)
