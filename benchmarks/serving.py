"""The cost of the front ends: streams through a server, against the same requests offline.

`python -m benchmarks.serving`: 200 streams of 64 tokens of the embedded model. With `--model qwen2.5-0.5b
--streams 64 --tokens 16 --limit 0.15`, at a real model's size. Server, clients and engine share the machine's cores.
Rounds begin once all programs are compiled, and alternate, so that other load affects all alike; medians are compared.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import statistics
import subprocess
import sys
import time
import urllib.request
from typing import Any

import grpc

from benchmarks import shapes
from benchmarks.aims import require
from jaxllm.v1 import inference_pb2, inference_pb2_grpc
from tests.support.serving_process import ROOT, ServingProcess

PROMPT = 16  # tokens
OFFLINE = """
import sys, time
from jaxllm import LLM, SamplingParams
model, streams, prompt, tokens = sys.argv[1], *map(int, sys.argv[2:])
prompts = [[3 + number % 200] * prompt for number in range(streams)]
params = [SamplingParams(seed=number, max_tokens=tokens, ignore_eos=True) for number in range(streams)]
with LLM(model) as llm:
    programs = llm.engine.runner.programs
    print("ready", flush=True)
    for line in sys.stdin:
        before, began = len(programs), time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        llm.reset_prefix_cache()
        seconds = time.perf_counter() - began
        programs.wait()
        print(seconds, len(programs) > before, flush=True)
"""


async def over_grpc(target: str, streams: int, prompt: int, tokens: int) -> int:
    async with grpc.aio.insecure_channel(target) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)

        async def one(number: int) -> int:
            request = inference_pb2.GenerateRequest(
                token_ids={"ids": [3 + number % 200] * prompt},
                sampling={"seed": number},
                stop={"max_tokens": tokens, "ignore_eos": True},
                output={"token_ids": True},
            )
            count = 0
            async for message in stub.StreamGenerate(request):
                count += sum(len(delta.token_ids) for delta in message.deltas)
            return count

        counts = await asyncio.gather(*(one(number) for number in range(streams)))
    assert counts == [tokens] * streams, "a stream lost tokens"
    return sum(counts)


async def over_http(url: str, streams: int, prompt: int, tokens: int) -> int:
    """Use bare sockets: a Python HTTP library costs as much of the shared cores as the server."""
    host, _, port = url.removeprefix("http://").partition(":")

    async def one(number: int) -> int:
        body = json.dumps(
            {
                "prompt": [3 + number % 200] * prompt,
                "seed": number,
                "max_tokens": tokens,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        )
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(f"{head}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
        received = (await reader.read()).decode()
        writer.close()
        assert received.endswith("data: [DONE]\n\n\r\n0\r\n\r\n"), received[-200:]
        # Each event is a separate chunk; the last one has the usage.
        last, _ = json.JSONDecoder().raw_decode(received, received.rindex('{"object"'))
        return last["usage"]["completion_tokens"]

    counts = await asyncio.gather(*(one(number) for number in range(streams)))
    assert counts == [tokens] * streams, "a stream lost tokens"
    return sum(counts)


def settled(url: str) -> int:
    """Wait until a server compiles nothing; return its number of programs."""
    while True:
        with urllib.request.urlopen(f"{url}/metrics") as answer:
            values = dict(re.findall(r"^jaxllm:programs_(\w+)\{.*\} (\S+)$", answer.read().decode(), re.MULTILINE))
        if float(values["compiling"]) == 0.0:
            return int(float(values["ready"]))
        time.sleep(0.2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="embedded", choices=("embedded", *shapes.SHAPES))
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--limit", type=float, default=0.35, help="the share that the front ends may cost")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    model, size = str(shapes.folder_of(options.model, "float32")), (options.streams, PROMPT, options.tokens)
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'server'}"}
    offline = subprocess.Popen(
        [sys.executable, "-c", OFFLINE, model, *map(str, size)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    assert offline.stdin is not None and offline.stdout is not None
    offline.stdout.readline()

    def run_offline() -> tuple[float, bool]:
        assert offline.stdin is not None and offline.stdout is not None
        offline.stdin.write("go\n")
        offline.stdin.flush()
        taken, has_compiled = offline.stdout.readline().split()
        return float(taken), has_compiled == "True"

    while run_offline()[1]:  # compiles programs, which the server then loads
        pass
    seconds: dict[str, list[float]] = {"offline": [], "gRPC": [], "HTTP": []}
    with ServingProcess(model, ready=False) as server:
        server.wait_for(r"(ready) after", 1200.0)

        def reset() -> None:
            channel = grpc.insecure_channel(server.grpc)
            from jaxllm.v1 import control_pb2, control_pb2_grpc

            control_pb2_grpc.ControlServiceStub(channel).ResetPrefixCache(control_pb2.ResetPrefixCacheRequest())
            channel.close()

        def measure(run: Any) -> float:
            began = time.perf_counter()
            asyncio.run(run)
            taken = time.perf_counter() - began
            reset()
            return taken

        num_programs = -1
        while num_programs != (num_programs := settled(server.http)):
            measure(over_grpc(server.grpc, *size))
            measure(over_http(server.http, *size))
        for _ in range(options.rounds):
            seconds["offline"].append(run_offline()[0])
            seconds["gRPC"].append(measure(over_grpc(server.grpc, *size)))
            seconds["HTTP"].append(measure(over_http(server.http, *size)))
    offline.kill()
    speeds = {name: options.streams * options.tokens / statistics.median(values) for name, values in seconds.items()}
    print(f"{options.model}: {options.streams} streams of {options.tokens} tokens, median of {options.rounds} rounds")
    for name, speed in speeds.items():
        cost = 1 - speed / speeds["offline"]
        print(f"  {name:8} {speed:8.0f} tokens/s" + ("" if name == "offline" else f"   cost {cost:6.1%}"))
    worst = 1 - min(speeds.values()) / speeds["offline"]
    require(worst <= options.limit, f"the front ends cost {worst:.0%}, more than {options.limit:.0%}")


if __name__ == "__main__":
    main()
