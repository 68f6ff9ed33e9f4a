"""HTTP routes that write recordings down, with forms as OpenAI's clients send them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace

from starlette.requests import Request
from starlette.types import ASGIApp, Scope, Send

from jaxllm_server.access.ledger import ANSWERS
from jaxllm_server.http.answering import Answering
from jaxllm_server.http.answers import STREAM_HEADERS, Answer, send_whole
from jaxllm_server.http.error_bodies import log_failure
from jaxllm_server.http.guard import CLIENT
from jaxllm_server.http.multipart import Form
from jaxllm_server.http.protocol import transport_of
from jaxllm_server.http.routes import FORM, JSON, PLAIN, ApiRoute, Body
from jaxllm_server.http.schemas import FILE, FLAG, INTEGER, NUMBER, TEXT, Schema
from jaxllm_server.http.sse import dumps, event
from jaxllm_server.openai.audio import FORMATS, GRANULARITIES, TranscriptionReply, TranslationReply, values_of
from jaxllm_server.openai.replies import error_body_of
from jaxllm_server.shared.options import AUDIO_PATHS

_SHAPES: Mapping[str, Schema] = {
    **dict.fromkeys(("language", "prompt", "request_id", "model"), TEXT),
    **{"file": FILE, "temperature": NUMBER, "seed": INTEGER, "priority": INTEGER, "stream": FLAG},
    "response_format": {"type": "string", "enum": list(FORMATS)},
    "timestamp_granularities": {"type": "array", "items": {"type": "string", "enum": list(GRANULARITIES)}},
}
_EXAMPLE = {"file": "speech.wav", "response_format": "verbose_json"}
_REPLIES: Mapping[str, type[TranscriptionReply]] = dict(
    zip(AUDIO_PATHS, (TranscriptionReply, TranslationReply), strict=True)
)
_SUMMARIES = ("Write the words of a recording.", "Write the words of a recording in English.")


def routes(answering: Answering) -> list[ApiRoute]:
    def route(path: str, reply_type: type[TranscriptionReply], summary: str) -> ApiRoute:
        name = reply_type.__name__.removesuffix("Reply")
        body = Body.of(reply_type, name, summary, ("file",), _EXAMPLE, streams=True, shapes=_SHAPES, media=FORM)

        async def run(request: Request) -> ASGIApp:
            answering.serving.check_room(request.scope[CLIENT])
            answering.serving.speech.check_kind()
            own_id = request.scope["jaxllm"]["request_id"]

            def make(form: Form) -> TranscriptionReply:
                return reply_type(values_of(form.texts, form.files), answering.options, own_id)

            reply = await answering.bodies.form(request, make)
            return AudioAnswer(**answering.parts(request, reply))

        return ApiRoute(path, run, bodies=(body,), pools=False, media=(JSON, PLAIN))

    return [
        route(path, reply_type, summary)
        for (path, reply_type), summary in zip(_REPLIES.items(), _SUMMARIES, strict=True)
    ]


@dataclass(frozen=True)
class AudioAnswer(Answer[TranscriptionReply]):
    """The answer to a request for a transcription."""

    async def _work(self, scope: Scope, send: Send) -> None:
        (call,) = self.reply.calls
        call = replace(call, client=self.client)
        async with aclosing(self.serving.speech.transcribe(call, self.entry)) as steps:
            progress = await anext(steps)
            if self.reply.is_stream:
                await send({"type": "http.response.start", "status": 200, "headers": _EVENTS})
                try:
                    while True:
                        for each in self.reply.events(progress):
                            await send({"type": "http.response.body", "body": event(each), "more_body": True})
                        if progress.is_last:
                            break
                        progress = await anext(steps)
                except Exception as error:
                    log_failure(self.name, error)
                    await send({"type": "http.response.body", "body": event(error_body_of(error))})
                    if (transport := transport_of(scope)) is not None:
                        transport.close()
                    return
                await send({"type": "http.response.body", "body": b""})
                return
        made = self.reply.response(progress.transcription)
        content = made.encode() if isinstance(made, str) else dumps(made)
        self.entry.charge(ANSWERS, len(content))
        await send_whole(send, content, self.reply.media_type)


_EVENTS = [(b"content-type", b"text/event-stream; charset=utf-8"), *STREAM_HEADERS]
