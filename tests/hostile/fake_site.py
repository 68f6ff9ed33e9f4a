"""Both front ends of `jaxllm serve` in a process without a model, over a `Serving` controlled by the prompt.

Its memory, processor time and delays are the front ends' alone. A prompt "COUNT SIZE SECONDS" gives COUNT chunks of
SIZE characters, each after a pause of SECONDS; others get a short answer.

    python -m tests.hostile.fake_site --stall-timeout 2
"""

from __future__ import annotations

import argparse
import asyncio
import sys

import uvloop

from jaxllm.config import EngineConfig
from jaxllm.errors import UserError
from jaxllm_server.http.guard import is_request_id
from jaxllm_server.launch import Server, configure_logging
from jaxllm_server.pooling import pool_stream
from jaxllm_server.shared.options import ServerOptions
from tests.support.fake_serving import SCRIPT, FakeServing


class Ordered(FakeServing):
    """Answers with the chunks that the prompt specifies."""

    def __init__(self):
        super().__init__()
        self.pooling.stream = self._pool_stream

    async def generate(self, call, params=None):
        self.check_model(call.model)
        if not is_request_id(call.request_id, ServerOptions()):
            raise UserError("request_id must be short and plain.", "request_id")
        count, size, seconds = len(SCRIPT), 4, 0.0
        if isinstance(call.prompt, str) and call.prompt.count(" ") == 2 and call.prompt[0].isdigit():
            words = call.prompt.split(" ")
            count, size, seconds = int(words[0]), int(words[1]), float(words[2])
        params = self.params_of(call)
        text = "x" * size
        for number in range(count):
            await asyncio.sleep(seconds)
            if call.stream:
                yield self._chunk(call, params, number, [text], is_last=number == count - 1)
        if not call.stream:
            yield self._chunk(call, params, 0, [text] * count, is_last=True)

    async def _pool_stream(self, *asked):
        return pool_stream.answers(self, self.pool, *asked)  # type: ignore[arg-type]


async def run(options: ServerOptions) -> None:
    server = Server(EngineConfig(model="fake"), options)
    server.serving = Ordered()  # type: ignore[assignment]
    await server.open()
    assert server.grpc is not None
    await server.grpc.set_state("serving")
    print("ready after 0 s", file=sys.stderr, flush=True)
    await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--stall-timeout", type=float, default=30.0)
    parser.add_argument("--max-body-bytes", type=int, default=8 << 20)
    parser.add_argument("--api-key", action="append", default=[])
    parser.add_argument("--admin-api-key", action="append", default=[])
    own = vars(parser.parse_args())
    configure_logging()
    keys = {name: tuple(own.pop(name)) for name in ("api_key", "admin_api_key")}
    uvloop.run(run(ServerOptions(port=0, grpc_port=0, **own, **keys)))


if __name__ == "__main__":
    main()
