"""Measure goodput and latencies of an overloaded server, with calls at a steady rate that wait for no answer.

    python -m tests.faults.overload [seconds of each load]

Prints a row for each load, one for a burst of 2,000 calls in a second, and a line with the two aims of row 35 of the
acceptance tests; exits with 1 if one is missed. Every fiftieth prompt is long. The server runs in another process.
This process makes the calls, half of them over each protocol. A third process measures how long a refusal and a health
check take, which excludes the queue of this process.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import statistics
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import aiohttp
import grpc
import grpc.aio
import psutil

from jaxllm.v1 import inference_pb2, inference_pb2_grpc
from tests.support.serving_process import ROOT, ServingProcess
from tests.support.sizes import SLOTS, flags

LOADS = (1, 2, 5, 10)  # multiples of capacity
SERVER = (*flags(SLOTS), "--max-queued-requests", "32")  # four per slot: the default queue would hold the whole load
PROMPT = [20, 30, 40, 50, 60, 70, 80, 90]
LONG_PROMPT = PROMPT * 50
BURST = 2000  # calls in one second
LEAST_SHARE, MOST_REFUSAL_MS = 0.9, 20.0  # share of the peak at the highest load; median
TOKENS = 64  # tokens of an answer
TITLE = (
    "load  offered/s answered/s  of peak  refused  refusal ms p50/p99  health ms p50/p99  answer ms"
    "  waiting  server  client  late ms"
)
REFUSALS = ("429", "RESOURCE_EXHAUSTED")


class Row(NamedTuple):
    """Results of one load."""

    load: float  # multiple of capacity; 0: closed loop
    offered: float  # calls per second
    goodput: float  # answered calls per second
    ends: Counter[str]
    refusal_ms: list[float]  # measured by the third process
    health_ms: list[float]
    answer_ms: float  # median of the answered calls
    server_busy: float  # processors in use
    client_busy: float
    late_ms: float  # largest delay of a call after its planned time
    most_waiting: int


@dataclass
class Calls:
    """Ends of the calls, and when they were answered."""

    ends: Counter[str] = field(default_factory=Counter)
    answered: list[tuple[float, float]] = field(default_factory=list)  # time of the answer, and latency in seconds


class Caller:
    """Make calls to one server over both protocols."""

    def __init__(self, http: aiohttp.ClientSession, channel: grpc.aio.Channel) -> None:
        self.http = http
        self._inference: Any = inference_pb2_grpc.InferenceServiceStub(channel)

    async def one(self, number: int, calls: Calls) -> None:
        began = time.monotonic()
        end = await (self._over_grpc(number) if number % 2 else self._over_http(number))
        calls.ends[end] += 1
        if end == "OK":
            now = time.monotonic()
            calls.answered.append((now, now - began))

    async def _over_http(self, number: int) -> str:
        body = {"prompt": prompt_of(number), "max_tokens": TOKENS, "ignore_eos": True, "seed": number}
        try:
            async with self.http.post("/v1/completions", json=body) as answer:
                await answer.read()
                return "OK" if answer.status == 200 else str(answer.status)
        except aiohttp.ClientError as error:
            return type(error).__name__

    async def _over_grpc(self, number: int) -> str:
        request = inference_pb2.GenerateRequest(
            token_ids={"ids": prompt_of(number)},
            stop={"max_tokens": TOKENS, "ignore_eos": True},
            sampling={"seed": number},
        )
        try:
            await self._inference.Generate(request)
            return "OK"
        except grpc.aio.AioRpcError as error:
            return error.code().name


async def load_of(http: aiohttp.ClientSession) -> dict[str, Any]:
    async with http.get("/load") as answer:
        return await answer.json()


def prompt_of(number: int) -> list[int]:
    return PROMPT if number % 50 else LONG_PROMPT


async def closed_loop(caller: Caller, seconds: float) -> float:
    """Return the calls per second for 16 callers that wait for their answers."""
    calls, end = Calls(), time.monotonic() + seconds

    async def work(number: int) -> None:
        while time.monotonic() < end:
            await caller.one(number, calls)

    await asyncio.gather(*(work(number) for number in range(16)))
    return sum(when <= end for when, _ in calls.answered) / seconds


async def open_loop(caller: Caller, rate: float, seconds: float, load: float, server: ServingProcess) -> Row:
    """Make calls at a steady rate without waiting for answers."""
    await until_idle(caller.http)
    calls, tasks, late, most_waiting = Calls(), set[asyncio.Task[None]](), 0.0, 0
    process, own = psutil.Process(server.process.pid), psutil.Process()
    warm = min(1.0, seconds / 4)
    prober = subprocess.Popen(
        [sys.executable, __file__, "--probe", server.http, str(seconds)], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    began = time.monotonic()
    used = {each: sum(each.cpu_times()[:2]) for each in (process, own)}
    number = 0
    while (now := time.monotonic()) < began + seconds:
        due = began + number / rate
        if due > now:
            await asyncio.sleep(due - now)
            continue
        late = max(late, now - due)
        task = asyncio.ensure_future(caller.one(number, calls))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        number += 1
        if number % 20 == 0:
            await asyncio.sleep(0)
            if number % 200 == 0:
                most_waiting = max(most_waiting, (await load_of(caller.http))["waiting"])
    ended = time.monotonic()
    busy = {each: (sum(each.cpu_times()[:2]) - used[each]) / (ended - began) for each in used}
    await asyncio.gather(*tasks)
    probed = json.loads((await asyncio.to_thread(prober.communicate))[0])
    counted = [seconds for when, seconds in calls.answered if began + warm <= when <= ended]
    return Row(
        load=load,
        offered=number / (ended - began),
        goodput=len(counted) / (ended - began - warm),
        ends=calls.ends,
        refusal_ms=sorted(probed["refusal"]),
        health_ms=sorted(probed["health"]),
        answer_ms=1000 * statistics.median(counted) if counted else float("nan"),
        server_busy=busy[process],
        client_busy=busy[own],
        late_ms=1000 * late,
        most_waiting=most_waiting,
    )


async def until_idle(http: aiohttp.ClientSession) -> None:
    async with asyncio.timeout(30.0):
        while (load := await load_of(http))["running"] or load["waiting"] or load["kv_blocks_used"]:
            await asyncio.sleep(0.01)


def probe(address: str, seconds: float) -> None:
    """Measure refusals and health checks in this process; print their times in milliseconds as JSON."""
    host, _, port = address.removeprefix("http://").rpartition(":")
    body = "{}"  # invalid, but a full server refuses the call before it reads the body, so it never waits
    connection = http.client.HTTPConnection(host, int(port), timeout=30)
    times: dict[str, list[float]] = {"refusal": [], "health": []}
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for name, call in (
            ("refusal", ("POST", "/v1/completions", body, {"content-type": "application/json"})),
            ("health", ("GET", "/health")),
        ):
            began = time.perf_counter()
            connection.request(*call)
            answer = connection.getresponse()
            answer.read()
            if answer.status == 429 or name == "health":
                times[name].append(1000 * (time.perf_counter() - began))
        time.sleep(0.02)
    print(json.dumps(times))


async def measure(server: ServingProcess, seconds: float, loads: tuple[float, ...] = LOADS) -> tuple[float, list[Row]]:
    """Return the capacity in calls per second, a row for each load, and one for the burst."""
    async with (
        aiohttp.ClientSession(server.http, connector=aiohttp.TCPConnector(limit=0)) as session,
        grpc.aio.insecure_channel(server.grpc) as channel,
    ):
        caller = Caller(session, channel)
        await closed_loop(caller, 1.0)
        capacity = await closed_loop(caller, seconds)
        rows = [await open_loop(caller, load * capacity, seconds, load, server) for load in loads]
        rows.append(await open_loop(caller, BURST, 1.0, BURST / capacity, server))
        return capacity, rows


def quantile(times: list[float], share: float) -> float:
    return times[min(len(times) - 1, int(share * len(times)))] if times else float("nan")


def main() -> None:
    if sys.argv[1:2] == ["--probe"]:
        probe(sys.argv[2], float(sys.argv[3]))
        return
    with ServingProcess(*SERVER) as server:
        capacity, rows = asyncio.run(measure(server, float(sys.argv[1]) if len(sys.argv) > 1 else 60.0))
    peak = max(row.goodput for row in rows[:-1])
    print(f"capacity, closed loop: {capacity:.1f} calls a second of {TOKENS} tokens")
    print(TITLE)
    for row in rows:
        refused = sum(row.ends[name] for name in REFUSALS)
        print(
            f"{row.load:4g}x {row.offered:9.0f} {row.goodput:11.1f} {row.goodput / peak:8.0%} {refused:8d}"
            f" {quantile(row.refusal_ms, 0.5):11.1f}/{quantile(row.refusal_ms, 0.99):6.1f}"
            f" {quantile(row.health_ms, 0.5):11.1f}/{quantile(row.health_ms, 0.99):6.1f} {row.answer_ms:10.0f}"
            f" {row.most_waiting:8d} {row.server_busy:7.2f} {row.client_busy:7.2f} {row.late_ms:8.0f}"
            f"  {dict(row.ends)}"
        )
    worst = rows[len(LOADS) - 1]
    share, refusal = worst.goodput / peak, quantile(worst.refusal_ms, 0.5)
    print(
        f"overload: at {worst.load:g} times the capacity {share:.0%} of the peak is answered (aim: {LEAST_SHARE:.0%}),"
        f" a refusal takes {refusal:.1f} ms (aim: {MOST_REFUSAL_MS:g})"
    )
    if not (share >= LEAST_SHARE and refusal < MOST_REFUSAL_MS):
        sys.exit(1)


if __name__ == "__main__":
    main()
