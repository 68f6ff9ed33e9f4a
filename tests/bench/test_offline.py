"""`bench latency` and `bench throughput`: vLLM's wording and keys, exact lengths, and missing measurements."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import jaxllm.runner.model_runner  # noqa: F401 - so that conftest watches it
from jaxllm import LLM
from jaxllm.bench import huggingface, latency, throughput, timeline
from jaxllm.bench.workload import Job
from jaxllm.errors import EngineError, UserError
from jaxllm.metrics import Load, Metrics
from jaxllm.outputs import CompletionOutput, RequestOutput
from jaxllm.structured_outputs_params import StructuredOutputsParams
from tests.support.sizes import FEW_SLOTS, flags

Run = Callable[..., tuple[int, str, str]]
QUICK = flags(FEW_SLOTS)
SWEEP, LATENCY = ("sweep", "--out", "out"), ("--", "latency")
JOBS = [Job((5, 6, 7), 3, 6), Job((8, 9), 2, 3), Job((5, 6, 7, 8), 4, 1)]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(**FEW_SLOTS) as llm:
        yield llm


def test_vllms_lines_of_a_throughput_by_hand() -> None:
    text, figures = throughput.report("jaxllm", JOBS, throughput.Served(4.0, 10))
    assert text == (
        "Throughput: 0.75 requests/s, 4.75 total tokens/s, 2.50 output tokens/s\n"
        "Total num prompt tokens:  9\nTotal num output tokens:  10"
    )
    wanted = {"elapsed_time": 4.0, "num_requests": 3, "total_num_tokens": 19, "requests_per_second": 0.75}
    assert {**figures, **wanted, "tokens_per_second": 4.75} == figures


def test_vllms_lines_of_a_latency_by_hand() -> None:
    text, figures = latency.report(np.array([4.0, 1.0, 3.0, 2.0, 5.0]))
    assert text.splitlines()[:3] == [
        "Avg latency: 3.0 seconds", "Std latency: 1.414214 seconds", "10% percentile latency: 1.4 seconds",
    ]  # fmt: skip
    assert figures["percentiles"] == pytest.approx({"10": 1.4, "25": 2, "50": 3, "75": 4, "90": 4.6, "99": 4.96})
    assert (figures["avg_latency"], figures["latencies"]) == (3.0, [4.0, 1.0, 3.0, 2.0, 5.0])


@pytest.mark.ci
@pytest.mark.parametrize("n", [1, 2])
def test_every_job_gets_its_length_and_the_warm_up_leaves_nothing(llm: LLM, n: int) -> None:
    before = llm.engine.metrics.generated_tokens
    served = throughput.run(llm, JOBS, n=n, num_warmups=2)
    warm = n * (throughput.WARM_UP_TOKENS + 3)
    assert served.output_tokens == n * 10 == llm.engine.metrics.generated_tokens - before - warm
    assert served.timeline is not None and served.timeline["generated_tokens"][-1] == n * 10
    assert served.timeline["running"][-1] == 0 and len(set(map(len, served.timeline.values()))) == 1
    firsts, ends = served.samples["ttft_ms"], served.samples["e2el_ms"]
    assert len(firsts) == 3 and all(
        0 < first <= end <= 1e3 * served.seconds for first, end in zip(firsts, ends, strict=True)
    )
    # TPOT = time after the first token / number of later tokens; undefined for one token.
    by_hand = [(ends[row] - firsts[row]) / (JOBS[row].max_tokens - 1) for row in (0, 1)]
    assert served.samples.get("tpot_ms", []) == pytest.approx(by_hand if n == 1 else [])


@pytest.mark.ci
def test_through_the_asynchronous_engine_it_is_the_same_work() -> None:
    served = throughput.run_async(FEW_SLOTS, JOBS * 6, num_warmups=1)  # more than the slots and the queue hold
    assert served.output_tokens == 60 and len(served.samples["ttft_ms"]) == 18
    assert served.timeline is not None and served.timeline["generated_tokens"][-1] == 60


def test_an_output_of_another_length_is_an_error() -> None:
    short = [RequestOutput("0", None, (1,), [CompletionOutput(0, "", (1, 2))])]
    assert throughput.check_lengths(short, [Job((1,), 1, 2)], 1) == 2
    with pytest.raises(EngineError, match=r"request 0 gave \[2\] tokens, 1 times 3"):
        throughput.check_lengths(short, [Job((1,), 1, 3)], 1)


def test_outputs_with_a_constraint_end_where_it_does() -> None:
    constraint = StructuredOutputsParams(json={})
    job = Job((1,), 1, 3, structured_outputs=constraint)
    params = throughput.sampling_params(job, 1, True)
    assert (params.structured_outputs, params.ignore_eos, params.max_tokens) == (constraint, False, 3)
    short = [RequestOutput("0", None, (1,), [CompletionOutput(0, "", (1, 2))])]
    assert throughput.check_lengths(short, [job], 1) == 2
    assert throughput.warm_up_jobs([job], 1)[0].structured_outputs == constraint


def test_a_long_run_keeps_few_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(100_000))
    monkeypatch.setattr(timeline.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(timeline, "MOST_SAMPLES", 10)
    metrics = Metrics(generated_tokens=100)
    line = timeline.Timeline(metrics, interval=1.0)
    for _ in range(1000):
        metrics.generated_tokens += 1
        if line.is_due():
            line.add(Load(running=1, kv_blocks_used=1, kv_blocks_total=4))
    lists = line.lists()
    assert 5 <= len(lists["seconds"]) <= 10 and lists["seconds"] == sorted(lists["seconds"])
    assert lists["generated_tokens"][0] == 1 and set(lists["kv_usage"]) == {0.25}


@pytest.mark.ci
def test_the_commands(run_jaxllm: Run, tmp_path: Path) -> None:
    target = tmp_path / "result.json"
    code, out, err = run_jaxllm(
        "bench", "throughput", "--num-prompts", "5", "--input-len", "8", "--output-len", "3", "--n", "2", *QUICK,
        "--output-json", str(target),
    )  # fmt: skip
    assert code == 0 and "--dataset-name random" in err
    assert re.match(r"Throughput: [\d.]+ requests/s, [\d.]+ total tokens/s, [\d.]+ output tokens/s\n", out)
    assert "Total num prompt tokens:  40\nTotal num output tokens:  30\n" in out
    result = json.loads(target.read_text())
    assert result["total_num_tokens"] == 70 and result["environment"]["python"]
    assert result["tokens_per_second"] == pytest.approx(70 / result["elapsed_time"])
    code, out, _ = run_jaxllm(
        "bench", "latency", "--num-iters", "3", "--num-iters-warmup", "1", "--output-len", "4", "--batch-size", "2",
        *QUICK, "--output-json", str(target),
    )  # fmt: skip
    assert code == 0 and out.startswith("Avg latency: ") and "99% percentile latency: " in out
    assert len(json.loads(target.read_text())["latencies"]) == 3


@pytest.mark.parametrize(
    ("benchmark", "shown"),
    [
        ("latency", "background on a CPU (default: all)"),
        ("throughput", "background on a CPU (default: all)"),
        ("explain", "background on a CPU (default: all)"),
        ("latency", "KV blocks of prompts with a common prefix (default: false)"),
        ("throughput", "KV blocks of prompts with a common prefix (default: true)"),
        ("scheduler", "--num-requests N [N ...] numbers of running requests (default: 64 256 1000 4096)"),
    ],
)
def test_the_help_shows_the_defaults_of_the_command(run_jaxllm: Run, benchmark: str, shown: str) -> None:
    code, out, _ = run_jaxllm("bench", benchmark, "--help")
    assert code == 0 and shown in " ".join(out.split())


class FakeNetwork:
    """Records the arguments of `generate` and returns that number of tokens, less those `missing`."""

    def __init__(self, torch: Any) -> None:
        self.torch = torch
        self.asked: list[dict[str, Any]] = []
        self.missing = 0

    def generate(self, **asked: Any) -> Any:
        self.asked.append(asked)
        rows, width = asked["input_ids"].shape
        num_tokens = width + asked["max_new_tokens"] - self.missing
        return self.torch.zeros((rows * asked["num_return_sequences"], num_tokens))


def test_transformers_gets_the_same_prompts_padded_in_batches() -> None:
    torch = pytest.importorskip("torch", reason="make parity has it")
    model = huggingface.HuggingFace.__new__(huggingface.HuggingFace)
    network = FakeNetwork(torch)
    model.torch, model.network, model.device, model.max_model_len = torch, network, "cpu", 9
    served = model.run(JOBS, n=2, max_batch_size=2)
    assert served.output_tokens == 20 and len(network.asked) == 2
    assert network.asked[0]["input_ids"].tolist() == [[5, 6, 7], [0, 8, 9]]
    assert network.asked[0]["attention_mask"].tolist() == [[1, 1, 1], [0, 1, 1]]
    assert [asked["max_new_tokens"] for asked in network.asked] == [6, 1]
    with pytest.raises(UserError, match="10 tokens is longer than the model's context of 9"):
        model.run([Job((1,) * 9, 9, 1)], n=1, max_batch_size=1)
    network.missing = 1
    with pytest.raises(EngineError, match="were requested"):
        model.run(JOBS, n=1, max_batch_size=2)


def test_without_torch_it_says_what_to_install(run_jaxllm: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", ModuleType("transformers"))
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(UserError):
        huggingface.check()
    code, _, err = run_jaxllm("bench", "throughput", "--backend", "hf", "--hf-max-batch-size", "2")
    assert (code, err) == (1, "jaxllm: error: --backend hf needs torch: pip install torch transformers\n")


@pytest.mark.parametrize(
    "wrong",
    [
        ("throughput", "--hf-max-batch-size", "3"),
        ("throughput", "--backend", "hf"),
        ("throughput", "--backend", "hf", "--hf-max-batch-size", "3", "--async-engine"),
        ("throughput", "--backend", "hf", "--hf-max-batch-size", "3", "--block-size", "8"),
        ("throughput", "--dataset-path", "/no/such/file.json"),
        ("throughput", "--input-len", "600", "--output-len", "1"),
        ("throughput", "--n", "0"),
        ("latency", "--batch-size", "0"),
        ("latency", "--input-len", "600"),
        ("latency", "--plot", "x.gif"),
        *(("kernels", *own) for own in (("--decode", "16"), ("--decode", "0x4"), ("--dtype", "int8"))),
        *(("kernels", "--num-iters", "0"), ("scheduler", "--num-requests", "0"), ("scheduler", "--load", "idle")),
        *(("scheduler", "--output-json", "no/such/x.json"), ("scheduler", "--plot", "x.pdf"), SWEEP),
        *((*SWEEP, "--", "compare", "a.json", "b.json"), (*SWEEP, "--", "nothing"), (*SWEEP, "--vary", "x", *LATENCY)),
        *((*SWEEP, "--vary", "x=1,,2", *LATENCY), (*SWEEP, "--vary", "x=1", "--vary", "x=2", *LATENCY)),
        (*SWEEP, "--bench-params", "/no/such/file", *LATENCY),
    ],
)
def test_what_is_wrong_is_said_in_a_line_before_a_model_is_loaded(
    run_jaxllm: Run, wrong: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("jaxllm.engine.loader.Runner", None)
    monkeypatch.chdir(tmp_path)
    code, out, err = run_jaxllm("bench", *wrong)
    lines = [line for line in err.splitlines() if not line.startswith("No --dataset-path")]
    assert code in (1, 2) and not out and len(lines) == 1 and lines[0].startswith("jaxllm: error: ")
    assert "NoneType" not in lines[0]
