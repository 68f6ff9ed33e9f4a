"""The HTTP route for token ids."""

from __future__ import annotations

from starlette.requests import Request
from starlette.types import ASGIApp

from jaxllm_server.http.answering import Answering
from jaxllm_server.http.answers import TextAnswer
from jaxllm_server.http.routes import ApiRoute, Body
from jaxllm_server.http.schemas import IDS, OBJECT
from jaxllm_server.http.writers import ChunkWriter
from jaxllm_server.openai.generate import GenerateReply

_BODY = Body.of(
    GenerateReply,
    "Generate",
    "Continue token ids, without text.",
    ("token_ids", "sampling_params"),
    {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 8, "logprobs": 1}},
    streams=True,
    shapes={"token_ids": IDS, "sampling_params": OBJECT, "features": OBJECT, "kv_transfer_params": OBJECT},
)


def routes(answering: Answering) -> list[ApiRoute]:
    def write(request: Request, reply: GenerateReply) -> ASGIApp:
        writer = ChunkWriter(reply, answering.head(reply))
        return TextAnswer(**answering.parts(request, reply), writer=writer)

    return [answering.route("/inference/v1/generate", _BODY, GenerateReply, write, pools=False)]
