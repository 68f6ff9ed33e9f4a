"""A `Serving` that replays a script, behind a real HTTP server, to test the front end alone.

The model "fake" answers with the words of `script`, one per token; token ids are positions in the script.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from zlib import crc32

import numpy as np

from jaxllm.engine.features.adapters.store import Known
from jaxllm.errors import NotFoundError, OverloadedError, UserError
from jaxllm.lora_request import LoRARequest
from jaxllm.metrics import Load
from jaxllm.model.pooler import Pooler
from jaxllm.outputs import Logprob
from jaxllm.sampling_params import SamplingParams
from jaxllm_server.access.ledger import Ledger
from jaxllm_server.adapters import ServedAdapters
from jaxllm_server.generation.calls import Chunk, Part, PromptInfo, TokenUsage
from jaxllm_server.http.app import make_app
from jaxllm_server.http.protocol import server_config
from jaxllm_server.http.server import HttpServer
from jaxllm_server.pooling.pool_calls import PoolCall, PoolResult
from jaxllm_server.shared.options import ServerOptions

SCRIPT = ["Once", " upon", " a", " time", " there", " was", " a", " fox", "."]


LABELS = ("dull", "witty")


def pooled(index: int, call: PoolCall, width: int) -> np.ndarray:
    """Return numbers that depend on an input and its pair, as a model would."""
    seed = crc32(repr((call.inputs[index], call.pairs and call.pairs[index])).encode())
    return np.random.default_rng(seed).normal(size=1 if call.task == "score" else width).astype(np.float32)


class FakeAdapters:
    """The adapter methods of an engine; folders named "bad…" cannot be read."""

    def __init__(self) -> None:
        self.known_requests: dict[int, LoRARequest] = {}

    def read_adapter(self, request: LoRARequest) -> bool:
        if Path(request.lora_path).name.startswith("bad"):
            raise UserError(f"adapter {request.lora_name!r}: {request.lora_path} is bad.", "lora_request")
        self.known_requests[request.lora_int_id] = request
        return True

    def forget_adapter(self, number: int) -> bool:
        return self.known_requests.pop(number, None) is not None

    def known_adapter(self, request: LoRARequest) -> Known | None:
        return Known(b"", request.lora_int_id, 8, frozenset({2}), True)


class FakeServing:
    """Answers each call with the script, or with drawn numbers; `failure` is raised before output `fails_at`."""

    def __init__(self, script: list[str] | None = None, options: ServerOptions | None = None) -> None:
        self.names = ("fake", "org/alias")
        self.root = "/models/fake"
        self.options = ServerOptions() if options is None else options
        self.script = SCRIPT if script is None else script
        own = FakeAdapters()
        self.engine = SimpleNamespace(
            state="serving",
            drains_replicas=False,
            engines=(None,),
            read_adapter=own.read_adapter,
            forget_adapter=own.forget_adapter,
            known_adapter=own.known_adapter,
            config=SimpleNamespace(enable_lora=self.options.lora_root is not None, enable_sleep_mode=False),
            check_health=self._check_health,
            model=SimpleNamespace(
                max_model_len=64,
                pooler=Pooler("cls", labels=LABELS),
                tokenizer=SimpleNamespace(token=lambda token: self.script[token % len(self.script)]),
            ),
            get_load=lambda: Load(running=1, waiting=2),
            off_loop=self._off_loop,
        )
        self.ledger = Ledger(self.options)
        self.adapters = ServedAdapters(self.engine, self.options, self.names)  # type: ignore[arg-type]
        self.pooling = SimpleNamespace(pool=self.pool)
        self.speech = SimpleNamespace(check_kind=lambda: None)
        self.failure: BaseException | None = None
        self.fails_at = 0
        self.delay = 0.0  # seconds before each output
        self.reasoning = ""
        self.tool_calls: list = []
        self.calls: list = []
        self.num_live = 0
        self.num_closed_early = 0
        self.num_off_loop = 0
        self.num_tokens = 3  # of every tokenized text
        self.askers: list[str] = []  # callers that requested room
        self.is_full = False
        self.width = 2  # numbers of a result
        self.tasks: tuple[str, ...] = ("generate",)

    async def off_loop(self, client, function, *arguments, language=None):
        return await self._off_loop(function, *arguments)

    async def _off_loop(self, function, *arguments, client=None, language=None):
        self.num_off_loop += 1
        return await asyncio.to_thread(function, *arguments)

    async def _check_health(self):
        pass

    def check_room(self, client, pools=None):
        self.askers.append(client)
        if self.is_full:
            raise OverloadedError("The queue is full.", retry_after=1.0)

    async def completed(self, call):
        return self.params_of(call)

    def check_calls(self, calls, params):
        pass

    def check_text(self, name, value):
        pass

    def check_model(self, name, adapter=""):
        if adapter:
            return self.adapters.find(adapter).name
        if name and name not in self.names and name not in self.adapters:
            raise NotFoundError(f"The model `{name}` does not exist.", "model")
        return name if name in self.adapters else self.names[0]

    def params_of(self, call):
        return SamplingParams(**{"max_tokens": call.default_max_tokens, "temperature": 1.0, **call.sampling})

    async def generate(self, call, params=None):
        self.check_model(call.model)
        self.calls.append(call)
        params = self.params_of(call)
        words = self.script[: params.max_tokens]
        is_through = False
        self.num_live += 1
        try:
            steps = [[word] for word in words] if call.stream else [words]
            for number, texts in enumerate(steps):
                if self.failure is not None and number == self.fails_at:
                    raise self.failure
                await asyncio.sleep(self.delay)
                yield self._chunk(call, params, number, texts, is_last=number == len(steps) - 1)
            is_through = True
        finally:
            self.num_live -= 1
            self.num_closed_early += not is_through

    def _chunk(self, call, params, number, texts, is_last):
        ids = list(range(number, number + len(texts)))
        logprobs = None
        if params.logprobs is not None:
            others = {100 + rank: Logprob(-1.0 - rank, rank + 1, f"<{rank}>") for rank in range(1, params.logprobs)}
            logprobs = [{i: Logprob(-0.5, 1, text), **others} for i, text in zip(ids, texts, strict=True)]
        ends = None
        if is_last:
            ends = "tool_calls" if self.tool_calls else "length" if len(self.script) > number + len(texts) else "stop"
        parts = [
            Part(
                index=index,
                text="".join(texts),
                reasoning=self.reasoning if number == 0 else "",
                tool_calls=self.tool_calls if is_last else [],
                token_ids=ids,
                logprobs=logprobs,
                finish_reason=ends,
                stop_reason=None,
                seed=None,
            )
            for index in range(params.n)
        ]
        usage = TokenUsage(3, params.n * (number + len(texts)), 1, 0)
        prompt = PromptInfo([7, 8, 9], 1) if number == 0 else None
        return Chunk(call.request_id, parts, prompt, usage, None, is_last)

    async def pool(self, call):
        self.check_model(call.model)
        self.calls.append(call)
        self.num_live += 1
        try:
            for index in reversed(range(len(call.inputs))):
                if self.failure is not None:
                    raise self.failure
                await asyncio.sleep(self.delay)
                yield PoolResult(index, pooled(index, call, self.width)[: call.dimensions], 3)
        finally:
            self.num_live -= 1

    async def tokenize(self, call):
        self.check_model(call.model)
        return list(range(self.num_tokens))

    async def tokenizer_of(self, name, client):
        return self.engine.model.tokenizer

    async def tokenizer_info(self, client):
        return {"tokenizer_class": "PreTrainedTokenizerFast"}

    async def echo(self, prompt, client, model):
        return prompt if isinstance(prompt, str) else await self.detokenize(prompt, client, model)

    async def detokenize(self, ids, client, model):
        self.check_model(model)
        if any(token >= len(self.script) for token in ids):
            raise UserError("tokens must be integers of the vocabulary.", "tokens")
        return "".join(self.script[token] for token in ids)


@contextmanager
def http_server(serving, options: ServerOptions | None = None, observer=None) -> Iterator[int]:
    """Run the front end in a thread as `jaxllm serve` does; yield its port."""
    options = options or ServerOptions()
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    config = server_config(make_app(serving, options, observer, None), options, loop="uvloop")
    server = HttpServer(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    while not server.started:
        time.sleep(0.005)
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(10)
        listener.close()
        assert not thread.is_alive()


def raw_exchange(port: int, request: bytes, timeout: float = 5.0) -> bytes:
    """Send bytes; read until the server closes the connection or sends nothing for `timeout` seconds."""
    with socket.create_connection(("127.0.0.1", port), timeout=timeout) as connection:
        answer = b""
        try:
            connection.sendall(request)
            while piece := connection.recv(65536):
                answer += piece
        except (TimeoutError, ConnectionError):
            pass
        return answer
