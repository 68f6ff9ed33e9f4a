"""The three interfaces to the engine without sockets and device: Python, HTTP bodies, gRPC messages.

All code is the product's from the bytes to the queue: parsing, mapping, `Serving` with its limits, `AsyncLLM`,
`LLMEngine.accept`, and packing for the device. Queued requests are answered at once, so that replies are written too.
"""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from google.protobuf.message import DecodeError, Message

from jaxllm.client.errors import read_error
from jaxllm.client.requests import generate_request
from jaxllm.config import EngineConfig
from jaxllm.embedded import MODEL_DIR
from jaxllm.engine.accepted import Accepted
from jaxllm.engine.async_llm import AsyncLLM
from jaxllm.engine.language import Language
from jaxllm.engine.llm_engine import LLMEngine
from jaxllm.engine.loader import Parts
from jaxllm.engine.model_info import ModelInfo
from jaxllm.errors import UserError
from jaxllm.metrics import Metrics
from jaxllm.outputs import CompletionOutput, RequestMetrics, RequestOutput
from jaxllm.sampling.sampler import Extras
from jaxllm.sampling_params import RequestOutputKind, SamplingParams
from jaxllm.scheduler.state import Limits
from jaxllm.structured_output.grammars import Grammars
from jaxllm.text.tokenizer import Tokenizer, load_tokenizer
from jaxllm.v1 import inference_pb2
from jaxllm_server.generation.calls import Call, Chunk
from jaxllm_server.grpc import reading, replies
from jaxllm_server.grpc.error_details import failure_of
from jaxllm_server.openai.chat import ChatReply
from jaxllm_server.openai.completions import CompletionReply
from jaxllm_server.openai.tokens import detokenize_request_of, tokenize_call_of
from jaxllm_server.serving import Serving
from jaxllm_server.shared import strict_json
from jaxllm_server.shared.options import ServerOptions
from tests.support import inspection

VOCABULARY = 1536
CONTEXT = 512
OPTIONS = ServerOptions(tool_call_parser="hermes", reasoning_parser="qwen3", request_timeout=0)
MOST_DEPTH = 64
Verdict = str | None  # "accepted", or the parameter that the refusal names; None for the request as a whole
ACCEPTED = "accepted"


@functools.cache
def tokenizer() -> Tokenizer:
    """Return the embedded model's tokenizer."""
    return load_tokenizer(MODEL_DIR)


class _Answering:
    """Replaces the inbox: processes a request as the engine's thread would, and answers with one token."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm

    def add(self, accepted: Accepted) -> None:
        engine = self._llm.engine
        group, _ = engine.inputs.make_group(accepted, 0.0)
        engine.inputs.pack(accepted, group)
        for sequence in group.sequences:
            sequence.tokens.append(5)
            sequence.advance(engine.model.tokenizer, 1, "length")
        outputs = [CompletionOutput(index, "x", [5], None, None, "length") for index in range(accepted.params.n)]
        metrics = RequestMetrics(0.0)
        ids = list(accepted.prompt_token_ids)
        output = RequestOutput(accepted.request_id, None, ids, outputs, True, metrics, 0)
        output.internal_id = accepted.internal_id
        inspection.deliver(self._llm, [output])

    def abort(self, *_: object) -> None:
        pass

    def counts(self) -> tuple[int, int]:
        return 0, 0


class Doors:
    """An `AsyncLLM` and a `Serving` for a model that has only a tokenizer."""

    def __init__(self) -> None:
        config = EngineConfig(model=str(MODEL_DIR))
        limits = Limits(num_slots=4, num_blocks=64, block_size=16, max_step_tokens=64, max_step_chunks=4)
        extras = Extras(VOCABULARY, ("no_change", "no_change_either"))
        runner: Any = SimpleNamespace(limits=limits, extras=extras, num_logprobs=20, block_source=None, encoder=None)
        model = ModelInfo(
            tokenizer=tokenizer(),
            generation_config={},
            default_params=SamplingParams(max_tokens=None),
            eos_ids=frozenset({2}),
            vocab_size=VOCABULARY,
            max_model_len=CONTEXT,
        )
        grammars = Grammars(tokenizer(), VOCABULARY, model.eos_ids)
        parts = Parts(model=model, runner=runner, language=Language(model=model, grammars=grammars))
        self.llm = AsyncLLM(str(MODEL_DIR), max_queued_requests=10**6)
        engine = LLMEngine(config, metrics=Metrics(), parts=parts)
        inspection.serve_without_a_device(self.llm, engine, _Answering(self.llm))
        self.serving = Serving(self.llm, OPTIONS)
        self._runner = asyncio.Runner()

    def _run(self, coroutine: Any) -> Any:
        inspection.set_loop(self.llm, self._runner.get_loop())
        return self._runner.run(coroutine)

    async def _chunks(self, call: Call) -> list[Chunk]:
        return [chunk async for chunk in self.serving.generate(call)]

    # Network input as bytes; UserErrors propagate.

    def http(self, route: str, body: bytes) -> None:
        """Answer a body as the route does."""
        document = strict_json.read(body, MOST_DEPTH)
        if route == "tokenize":
            call, _ = tokenize_call_of(document)
            self._run(self.serving.tokenize(call))
        elif route == "detokenize":
            model, ids = detokenize_request_of(document)
            self.serving.check_model(model)
            self._run(self.serving.detokenize(ids))
        else:
            reply = (CompletionReply if route == "completions" else ChatReply)(document, OPTIONS, "id")
            if isinstance(reply, CompletionReply):
                for prompt in reply.echo_of:
                    text = prompt if isinstance(prompt, str) else self._run(self.serving.detokenize(prompt))
                    reply.prompt_texts.append(text)
            chunks = [self._run(self._chunks(call))[-1] for call in reply.calls]
            told = [event for number, chunk in enumerate(chunks) for event in reply.events(number, chunk)]
            json.dumps([reply.response(chunks), told, reply.last_event()], allow_nan=False).encode()

    def grpc(self, kind: type[Message], raw: bytes, stream: bool = False) -> None:
        """Answer a message as its method does."""
        try:
            message: Any = kind.FromString(raw)
        except DecodeError as error:  # as in the gate
            raise UserError("The request is not a message of this method.") from error
        try:
            self._answer_message(kind, message, stream)
        except UserError as error:
            told = failure_of(error, message, "id")
            raise read_error(told.code, told.status.message, told.status.SerializeToString(), "here") from error

    def _answer_message(self, kind: type[Message], message: Any, stream: bool) -> None:
        if kind is inference_pb2.TokenizeRequest:
            self._run(self.serving.tokenize(reading.tokenize_call_of(message, max_json_depth=MOST_DEPTH)))
        elif kind is inference_pb2.DetokenizeRequest:
            self._run(self.serving.detokenize(reading.detokenize_ids_of(message)))
        else:
            call = reading.call_of(message, message.request_id or "id", stream=stream, max_json_depth=MOST_DEPTH)
            chunks = self._run(self._chunks(call))
            reply = replies.reply_of(message, self.serving.check_model(message.model))
            reply.response(chunks[-1]).SerializeToString()

    # The same fields through each interface.

    def python_verdict(self, fields: Mapping[str, Any]) -> Verdict:
        own = dict(fields)
        prompt, priority, limit = own.pop("prompt", None), own.pop("priority", 0), own.pop("time_limit", None)
        if "cache_salt" in own:
            key = "prompt_token_ids" if isinstance(prompt, list) else "prompt"
            prompt = {key: prompt, "cache_salt": own.pop("cache_salt")}

        async def ask() -> None:
            params = SamplingParams(**own, output_kind=RequestOutputKind.FINAL_ONLY)
            async for _ in self.llm.generate(prompt, params, priority=priority, time_limit=limit):
                pass

        return _verdict(lambda: self._run(ask()))

    def http_verdict(self, fields: Mapping[str, Any]) -> Verdict:
        body = {"vllm_xargs" if name == "extra_args" else name: value for name, value in fields.items()}
        return _verdict(lambda: self.http("completions", json.dumps(body).encode()))

    def grpc_verdict(self, fields: Mapping[str, Any]) -> Verdict:
        own = dict(fields)

        def ask() -> None:
            stream = "stream_interval" in own
            message = generate_request(own.pop("prompt", None), own, is_stream=stream)
            self.grpc(inference_pb2.GenerateRequest, message.SerializeToString(), stream)

        return _verdict(ask)


def _verdict(ask: Any) -> Verdict:
    try:
        ask()
    except UserError as error:
        if str(MODEL_DIR) in str(error) or " object at 0x" in str(error):
            raise AssertionError(f"a client reads: {error}") from error
        return error.parameter
    return ACCEPTED


@functools.cache
def doors() -> Doors:
    """Return the process's only instance."""
    return Doors()
