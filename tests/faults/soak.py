"""Many short requests over both protocols, five in a hundred of them faults, against one process.

    python -m tests.faults.soak [number of requests]

The memory of the process must not grow, and its counters must equal the clients', to the token. With large requests in
flight its memory must have grown by the ledger's sum. Prints a line, and exits with 1 if a bound is broken.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import grpc
import grpc.aio
import httpx

from jaxllm.v1 import control_pb2, control_pb2_grpc, inference_pb2, inference_pb2_grpc, types_pb2
from tests.faults.breakable import NAN, UNTOLD
from tests.faults.overload import until_idle
from tests.support.serving_process import QUICK, ServingProcess

MOST_BYTES = 100.0  # largest growth of memory per request
AT_ONCE = 32
NUM_SAMPLES = 25
JSON = {"content-type": "application/json"}
MOST_UNCOUNTED = 0.1  # fraction of the process's growth
NUM_LARGE = 16  # requests, of each of a few kinds
ENDLESS = 480  # tokens of a request that the client cancels
FINISH = {
    types_pb2.FINISH_REASON_STOP: "stop",
    types_pb2.FINISH_REASON_LENGTH: "length",
    types_pb2.FINISH_REASON_CONTEXT: "length",
    types_pb2.FINISH_REASON_ABORTED: "abort",
    types_pb2.FINISH_REASON_TIME_LIMIT: "time_limit",
}


@dataclass
class Books:
    """The clients' counts."""

    ends: Counter[str] = field(default_factory=Counter)  # by the finish reasons in the engine's metrics
    refused: int = 0  # invalid requests
    prompt_tokens: int = 0  # of requests that the client read to the end
    completion_tokens: int = 0  # of the same requests
    begun_tokens: int = 0  # of the prompts of all started requests …
    unsure_tokens: int = 0  # … and of those that timed out before a token; some of them never started
    surprises: Counter[str] = field(default_factory=Counter)

    def note(self, reason: str, num_prompt: int, num_completion: int) -> None:
        self.ends[reason] += 1
        self.prompt_tokens += num_prompt
        self.completion_tokens += num_completion
        self.begun_tokens += num_prompt
        self.unsure_tokens += num_prompt if reason == "time_limit" and not num_completion else 0

    def note_gone(self, num_prompt: int) -> None:
        """Count a request that the client cancelled."""
        self.ends["abort"] += 1
        self.begun_tokens += num_prompt


class Summary(NamedTuple):
    """Results of a soak."""

    requests: int
    seconds: float
    bytes_per_request: float
    held: list[dict[str, int]]
    books: Books
    differences: dict[str, tuple[float, float]]  # counts of the clients and of the server


class Soak:
    """The clients of one server."""

    def __init__(self, server: ServingProcess, http: aiohttp.ClientSession, channel: grpc.aio.Channel) -> None:
        self._server = server
        self._http = http
        self._inference: Any = inference_pb2_grpc.InferenceServiceStub(channel)
        self._control: Any = control_pb2_grpc.ControlServiceStub(channel)
        self.books = Books()

    async def one(self, number: int) -> None:
        """Make one call; five in a hundred are faults."""
        rng = random.Random(number)
        ids = [rng.randrange(20, 900) for _ in range(rng.choice([1, 3, 8, 15, 16, 17, 40]))]
        most = rng.choice([1, 2, 4, 6])
        chance = rng.random()
        try:
            if chance < 0.01:
                await self._leave(ids, over_http=number % 2 == 0)
            elif chance < 0.02:
                await self._ask_wrongly(over_http=number % 2 == 0)
            elif chance < 0.03:
                await self._abort(ids, f"soak-{number}")
            elif chance < 0.04:
                await self._over_grpc(ids, ENDLESS - len(ids), time_limit=rng.choice([0.15, 0.3]))
            elif chance < 0.05:
                await self._fail(rng.choice([NAN, UNTOLD]), ids, over_http=number % 2 == 0)
            elif number % 2:
                await self._over_grpc(ids, most)
            else:
                await self._over_http(ids, most, stream=number % 4 == 0)
        except (aiohttp.ClientError, grpc.aio.AioRpcError, TimeoutError) as error:
            code = error.code().name if isinstance(error, grpc.aio.AioRpcError) else type(error).__name__
            self.books.surprises[code] += 1

    async def fill(self, server: ServingProcess, report: Path, bodies: Sequence[bytes]) -> tuple[int, int]:
        """Hold large requests while a step hangs, then end them; return the growth of the ledger and of the process."""
        before = await self._ledger(), await _report(server, report)
        server.signal(signal.SIGUSR2)
        begun = []
        for body in bodies:
            async with self._http.post("/v1/responses", data=body, headers=JSON) as answer:
                assert answer.status == 200, await answer.text()
                begun.append((await answer.json())["id"])
        after = await self._ledger(), await _report(server, report)
        server.signal(signal.SIGUSR2)
        for response_id in begun:
            async with self._http.delete(f"/v1/responses/{response_id}") as answer:
                assert answer.status == 200, await answer.text()
        assert await self._ledger() == before[0]
        return after[0] - before[0], after[1] - before[1]

    async def _ledger(self) -> int:
        async with self._http.get("/metrics") as answer:
            return int(sum(map(float, re.findall(r"^jaxllm:held_bytes{.*} (\S+)$", await answer.text(), re.M))))

    async def _over_http(self, ids: list[int], most: int, stream: bool) -> None:
        body = {"prompt": ids, "max_tokens": most, "stream": stream, "seed": 1}
        if stream:
            body["stream_options"] = {"include_usage": True}
        async with self._http.post("/v1/completions", json=body) as answer:
            text = await answer.text()
        if answer.status != 200:
            self.books.surprises[str(answer.status)] += 1
            return
        if not stream:
            told = json.loads(text)
            reason = told["choices"][0]["finish_reason"]
        else:
            *events, done = [line.removeprefix("data: ") for line in text.splitlines() if line]
            if done != "[DONE]" or '"error"' in events[-1]:
                self.books.surprises["broken stream"] += 1
                return
            told = json.loads(events[-1])
            reason = json.loads(events[-2])["choices"][0]["finish_reason"]
        self.books.note(reason, told["usage"]["prompt_tokens"], told["usage"]["completion_tokens"])

    async def _over_grpc(self, ids: list[int], most: int, time_limit: float | None = None) -> None:
        request = _request(ids, most)
        if time_limit is not None:
            request.stop.ignore_eos = True
            request.stop.time_limit.FromMilliseconds(int(1000 * time_limit))
        reply = await self._inference.Generate(request)
        usage = reply.usage
        self.books.note(FINISH[reply.outputs[0].finish_reason], usage.prompt_tokens, usage.completion_tokens)

    async def _leave(self, ids: list[int], over_http: bool) -> None:
        """Read the start of a stream, and disconnect."""
        if over_http:
            body = {"prompt": ids, "max_tokens": ENDLESS - len(ids), "ignore_eos": True, "stream": True}
            async with self._http.post("/v1/completions", json=body) as answer:
                await answer.content.readline()
                answer.close()
        else:
            call = self._inference.StreamGenerate(_request(ids, ENDLESS - len(ids), ignore_eos=True))
            await call.read()
            call.cancel()
        self.books.note_gone(len(ids))

    async def _abort(self, ids: list[int], name: str) -> None:
        request = _request(ids, ENDLESS - len(ids), ignore_eos=True)
        request.request_id = name
        reason, num_completion = 0, 0
        async for message in self._inference.StreamGenerate(request):
            if not num_completion:
                await self._control.Abort(control_pb2.AbortRequest(request_ids=[name]))
            num_completion += sum(len(delta.token_ids) for delta in message.deltas)
            reason = message.deltas[0].finish_reason or reason
        self.books.note(FINISH[reason], len(ids), num_completion)

    async def _ask_wrongly(self, over_http: bool) -> None:
        if over_http:
            async with self._http.post("/v1/completions", json={"prompt": [10**6], "top_p": 7}) as answer:
                assert answer.status == 400
        else:
            try:
                await self._inference.Generate(_request([], 1))
            except grpc.aio.AioRpcError as error:
                assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        self.books.refused += 1

    async def _fail(self, mark: int, ids: list[int], over_http: bool) -> None:
        """Send a prompt that makes the engine fail: its logits are not numbers, or its output cannot be detokenized."""
        ids = [mark, *ids]
        if over_http:
            async with self._http.post("/v1/completions", json={"prompt": ids, "max_tokens": 4}) as answer:
                assert answer.status == 500, answer.status
        else:
            try:
                await self._inference.Generate(_request(ids, 4))
            except grpc.aio.AioRpcError as error:
                assert error.code() is grpc.StatusCode.INTERNAL, error.code()
        self.books.note("error", len(ids), 1 if mark == UNTOLD else 0)


def _request(ids: list[int], most: int, ignore_eos: bool = False) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(
        token_ids={"ids": ids}, stop={"max_tokens": most, "ignore_eos": ignore_eos}, sampling={"seed": 1}
    )


def soak(num_requests: int) -> Summary:
    """Serve `num_requests` requests from another process."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report"
        arguments = [*QUICK, "--max-queued-requests", "256"]
        with ServingProcess(*arguments, module="tests.faults.breakable", env={"SOAK_REPORT": str(report)}) as server:
            began = time.monotonic()
            books, seconds = asyncio.run(_serve(server, num_requests, report)), time.monotonic() - began
            differences = _differences(server.http, books)
            server.signal(signal.SIGTERM)
            if server.wait(40.0) != 0:
                books.surprises["exit code"] += 1
            held = [json.loads(line) for line in report.read_text().splitlines()]
    every = num_requests / NUM_SAMPLES
    return Summary(num_requests, seconds, slope([each["bytes"] for each in held], every), held, books, differences)


async def _serve(server: ServingProcess, num_requests: int, report: Path) -> Books:
    connector = aiohttp.TCPConnector(limit=0)
    async with (
        aiohttp.ClientSession(server.http, connector=connector) as http,
        grpc.aio.insecure_channel(server.grpc) as channel,
    ):
        own = Soak(server, http, channel)
        for sample in range(1, NUM_SAMPLES + 1):
            first, end = (num_requests * part // NUM_SAMPLES for part in (sample - 1, sample))
            numbers = iter(range(first, end))

            async def work(numbers: Iterator[int]) -> None:
                for number in numbers:
                    await own.one(number)

            await asyncio.gather(*(work(numbers) for _ in range(AT_ONCE)))
            await until_idle(http)
            await _report(server, report)
    return own.books


def measure_ledger() -> tuple[int, int]:
    """Return the growth of a server's ledger with large requests in flight, and that of its process."""

    async def measure() -> tuple[int, int]:
        async with aiohttp.ClientSession(server.http) as http, grpc.aio.insecure_channel(server.grpc) as channel:
            own, bodies = Soak(server, http, channel), list(_large_requests())
            for number in range(200):
                await own.one(number)
            await own.fill(server, report, bodies[:8])  # the allocator keeps some freed memory
            return await own.fill(server, report, bodies)

    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report"
        arguments = [*QUICK, "--max-queued-requests", "256", "--hang-timeout", "60"]
        with ServingProcess(*arguments, module="tests.faults.breakable", env={"SOAK_REPORT": str(report)}) as server:
            return asyncio.run(measure())


async def _report(server: ServingProcess, report: Path) -> int:
    """Return the memory and table sizes that the process reports now."""
    before = report.read_text() if report.exists() else ""
    server.signal(signal.SIGHUP)
    while not report.exists() or report.read_text() == before:
        await asyncio.sleep(0.02)
    return json.loads(report.read_text().splitlines()[-1])["bytes"]


def _large_requests() -> Iterator[bytes]:
    """Yield bodies of background responses of some megabytes: texts, numbers, short texts, objects."""
    rng = random.Random(5)
    for number in range(NUM_LARGE):
        for values in (
            {"type": "string", "description": "aé日😀"[number % 4] * 1_000_000},
            {"enum": [rng.random() for _ in range(60_000)]},
            {"enum": [f"{number}-{index}" for index in range(20_000)]},
            {"properties": {f"{index}": {"type": "string"} for index in range(8_000)}},
        ):
            tool = {"type": "function", "name": "f", "parameters": {"type": "object", **values}}
            own = {"input": "a", "max_output_tokens": ENDLESS, "ignore_eos": True, "stream": False}
            body = {**own, "tools": [tool], "tool_choice": "none", "background": True}
            yield json.dumps(body, ensure_ascii=False).encode()


def _differences(http: str, books: Books) -> dict[str, tuple[float, float]]:
    """Compare the clients' counts with the server's metrics."""
    text = httpx.get(f"{http}/metrics").text

    def read(name: str) -> float:
        return sum(float(value) for value in re.findall(rf"^jaxllm:{name}(?:{{[^}}]*}})? (\S+)$", text, re.M))

    pairs = {
        f"ended: {reason}": (
            float(books.ends[reason]),
            sum(float(value) for value in re.findall(rf'request_success_total{{.*"{reason}".*}} (\S+)', text)),
        )
        for reason in ("stop", "length", "abort", "time_limit", "error", "repetition")
    }
    begun = read("prompt_tokens_total")
    if not books.begun_tokens - books.unsure_tokens <= begun <= books.begun_tokens:
        pairs["prompt tokens of requests that began"] = float(books.begun_tokens), begun
    pairs["prompt tokens told"] = float(books.prompt_tokens), read("request_prompt_tokens_sum")
    pairs["generated tokens told"] = float(books.completion_tokens), read("request_generation_tokens_sum")
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def slope(values: list[int], every: float) -> float:
    """Return the median slope of all pairs (Theil and Sen), without the first fifth, in which pools fill."""
    settled = list(enumerate(values))[len(values) // 5 :]
    return statistics.median((b - a) / ((j - i) * every) for (i, a), (j, b) in combinations(settled, 2))


def faults_of(summary: Summary, most_bytes: float = MOST_BYTES) -> list[str]:
    """List the broken bounds."""
    found = [f"{name}: clients {ours:g}, server {theirs:g}" for name, (ours, theirs) in summary.differences.items()]
    found += [f"surprise: {name} × {count}" for name, count in summary.books.surprises.items()]
    if summary.bytes_per_request > most_bytes:
        found.append(f"{summary.bytes_per_request:.0f} bytes a request")
    settled = summary.held[len(summary.held) // 5 :]
    for name, slack in (("descriptors", 4), ("threads", 2), ("tasks", 4), ("device_bytes", 1 << 16)):
        values = [each[name] for each in settled]
        if values[-1] > min(values) + slack:
            found.append(f"{name} grew from {min(values)} to {values[-1]}")
    return found


def main() -> int:
    summary, (counted, grown) = soak(int(sys.argv[1]) if len(sys.argv) > 1 else 100_000), measure_ledger()
    last, faults = summary.held[-1], faults_of(summary)
    if abs(counted - grown) > MOST_UNCOUNTED * grown:
        faults.append(f"the process grew by {grown} bytes, its ledger by {counted}")
    print(
        f"soak: {summary.requests} requests in {summary.seconds:.0f} s, {sum(summary.books.ends.values())} ended as "
        f"{dict(sorted(summary.books.ends.items()))}, {summary.books.refused} refused; "
        f"{summary.bytes_per_request:.1f} bytes a request, {last['bytes'] / 2**20:.0f} MiB, "
        f"{last['descriptors']} descriptors, {last['threads']} threads, {last['tasks']} tasks; "
        f"{'; '.join(faults) if faults else 'books equal, nothing grew'}"
    )
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
