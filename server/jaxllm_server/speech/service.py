"""`Speech`, the part of `Serving` that writes recordings down. A window of 30 s is a request of the engine."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from jaxllm.engine.features.speech.rules import SpeechRules, rules_of
from jaxllm.engine.features.speech.transcription import Asked, Request, Transcription, text_before
from jaxllm.errors import FeatureDisabledError, OverloadedError, late
from jaxllm.media.sound import RATE, Recording
from jaxllm.media.sound_files import read_sound, seconds_of
from jaxllm.outputs import CompletionOutput
from jaxllm.sampling_params import RequestOutputKind
from jaxllm_server.access.ledger import REQUESTS, Entry
from jaxllm_server.observability.tracing import REQUEST_SPAN, current_span
from jaxllm_server.pooling.pool_site import PoolSite
from jaxllm_server.pooling.pooling import FULL_SECONDS

_log = logging.getLogger("jaxllm.server")
_FRAMES_A_SECOND = 100


@dataclass(frozen=True, kw_only=True)
class SpeechCall:
    """A client's recording, unchecked."""

    client: str = ""  # from `client_quota.client_of`
    model: str = ""  # "": the served model
    sound: bytes
    asked: Asked
    before: str = ""  # a text that precedes the recording
    stream: bool = False
    request_id: str | None = None  # unique among unfinished requests
    client_id: str | None = None  # X-Request-Id, for logs; may repeat
    priority: int = 0


class Progress(NamedTuple):
    """A transcription so far."""

    text: str
    transcription: Transcription
    is_last: bool


class Speech:
    """Writes recordings down, if the model reads sound."""

    def __init__(self, site: PoolSite) -> None:
        self._site = site
        self._rules: SpeechRules | None = None

    def check_kind(self) -> SpeechRules:
        """Return the model's rules; raise FeatureDisabledError if it reads no sound."""
        if self._rules is None:
            self._rules = rules_of(self._site.engine.model)
        if self._rules is None:
            name = self._site.names[0]
            raise FeatureDisabledError(f"The model {name} reads no sound; serve one such as Whisper.", "model")
        return self._rules

    async def transcribe(self, call: SpeechCall, entry: Entry) -> AsyncGenerator[Progress]:
        """Yield the text as it grows, if `call.stream`, and the end; closing the iterator aborts the work."""
        site, engine = self._site, self._site.engine
        name = site.check_model(call.model)
        site.check_text("request_id", call.request_id)
        await engine.check_health()
        rules, arrival = self.check_kind(), time.monotonic()
        with site.shares.place(call.client, 1), site.priority_of(call.client, call.priority, 1) as priority:
            call = replace(call, priority=priority)
            with engine.preparing(1):
                recording = await self._recording(call, entry)
                before = await site.off_loop(call.client, text_before, engine.model, call.before)
            own = Transcription(engine.model, rules, recording, replace(call.asked, before=before))
            if site.options.enable_log_requests:
                _log.info("request %s: %s %.1f s of sound", call.request_id, call.asked.task, own.seconds)
            requests, output, number = own.requests(), None, 0
            while True:
                if call.asked.words and output is not None:  # computes their times
                    request = await site.off_loop(call.client, _next, requests, output)
                else:
                    request = _next(requests, output)
                if request is None:
                    break
                async with aclosing(self._outputs(call, request, number, arrival)) as outputs:
                    async for output in outputs:
                        if call.stream and request.speech is not None and not output.finished():
                            yield Progress(own.text_with(output.token_ids), own, False)
                number += 1
            facts = {"gen_ai.response.model": name, "gen_ai.request.id": call.request_id}
            counts = {"gen_ai.usage.prompt_tokens": own.num_prompt_tokens}
            counts["gen_ai.usage.completion_tokens"] = own.num_output_tokens
            current_span().set({**facts, **counts}, name=REQUEST_SPAN)
            yield Progress(own.text, own, True)

    async def _recording(self, call: SpeechCall, entry: Entry) -> Recording:
        """Charge the memory of the spectrogram, then decode the file."""
        site, most = self._site, self._site.options.max_audio_seconds or None
        sources = site.engine.model.sources
        assert sources is not None and sources.sound is not None
        sound = sources.sound
        seconds = await site.off_loop(call.client, seconds_of, call.sound, most)
        entry.charge(REQUESTS, int(4 * seconds * (RATE + sound.num_mels * _FRAMES_A_SECOND)))

        def read() -> Recording:
            return sound.recording(read_sound(call.sound, most))

        return await site.off_loop(call.client, read)

    async def _outputs(
        self, call: SpeechCall, request: Request, number: int, arrival: float
    ) -> AsyncGenerator[CompletionOutput]:
        """Yield the outputs of a window; after the first window, wait for a place in the queue."""
        site, timeout = self._site, self._site.options.request_timeout or None
        request_id = f"{call.request_id or uuid.uuid4().hex}-{number}"
        kind = RequestOutputKind.CUMULATIVE if call.stream else RequestOutputKind.FINAL_ONLY
        options: dict[str, Any] = {} if request.speech is None else {"speech": request.speech}
        while True:
            outputs = site.engine.generate(
                {**request.prompt, **site.salt_of(call.client, None)},
                replace(request.params, output_kind=kind),
                request_id,
                owner=site.owner_of(call.client),
                client=call.client,
                priority=call.priority,
                timeout=timeout,
                arrival=arrival,
                name=f"{request_id} ({call.client_id})" if call.client_id else None,
                **options,
            )
            try:
                async with aclosing(outputs):
                    async for output in outputs:
                        yield output.outputs[0]
                return
            except OverloadedError:
                if not number:
                    raise
                if timeout is not None and time.monotonic() > arrival + timeout:
                    raise late(timeout) from None
                await asyncio.sleep(FULL_SECONDS)


def _next(requests: Any, output: CompletionOutput | None) -> Request | None:
    try:
        return requests.send(output)
    except StopIteration:
        return None
