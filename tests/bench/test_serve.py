"""`bench serve` against a fake server with the behaviour of other engines, and complete runs of the command.

Runs against jaxllm are in tests/server/test_serve.py.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxllm.bench import discovery
from jaxllm.bench.clients import ClientProcess, Share, send_one
from jaxllm.bench.openai_client import request_body
from jaxllm.bench.outcome import Outcome
from jaxllm.bench.target import Backend, Target
from jaxllm.bench.workload import Job
from jaxllm.commands import bench_serve_flags, cli
from jaxllm.embedded import MODEL_DIR
from jaxllm.errors import EngineError
from jaxllm.text.tokenizer import load_tokenizer
from tests.support.fake_openai import WORD, FakeOpenAI
from tests.support.serving_process import ROOT


@pytest.fixture(scope="module")
def server() -> Iterator[FakeOpenAI]:
    with FakeOpenAI() as fake:
        yield fake


@pytest.fixture(autouse=True)
def no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPENAI_API_KEY", "JAXLLM_API_KEY"):
        monkeypatch.delenv(name, raising=False)


def target(server: FakeOpenAI, model: str, **others: Any) -> Target:
    return Target(**{"backend": "openai", "base": server.url, "endpoint": "/v1/completions", "model": model, **others})


def ask(server: FakeOpenAI, model: str, max_tokens: int = 5, **others: Any) -> Outcome:
    return asyncio.run(send_one(target(server, model, **others), Job("a cat", 2, max_tokens)))


# ---- the habits of servers


def test_a_plain_answer(server: FakeOpenAI) -> None:
    got = ask(server, "plain", fields={"temperature": 0.0, "ignore_eos": True}, headers={"X-Own": "1"})
    assert (got.error, got.text, got.output_tokens, got.seen_prompt_tokens) == ("", WORD * 5, 5, 7)
    assert got.sent_at < got.message_times[0] <= got.message_times[-1] <= got.ended_at
    assert server.bodies[-1] == {
        "model": "plain", "prompt": "a cat", "max_tokens": 5, "stream": True, "stream_options": {"include_usage": True},
        "temperature": 0.0, "ignore_eos": True,
    }  # fmt: skip
    assert server.headers[-1]["x-own"] == "1" and server.headers[-1]["x-request-id"] == "test"


def test_a_chat_waits_for_its_first_word(server: FakeOpenAI) -> None:
    got = ask(server, "plain", backend="openai-chat", endpoint="/v1/chat/completions")
    assert (got.error, got.text, len(got.message_times)) == ("", WORD * 5, 5)
    assert got.ttft > 0.045, "the role came 50 ms before the first word"
    assert server.bodies[-1]["messages"] == [{"role": "user", "content": "a cat"}]


def test_a_server_without_usage_that_knows_no_ignore_eos(server: FakeOpenAI) -> None:
    got = ask(server, "llama-cpp")
    assert (got.error, got.text, got.output_tokens, got.seen_prompt_tokens) == ("", WORD * 3, None, None)
    assert ask(server, "undone").error == ""


def test_a_slow_server_is_timed(server: FakeOpenAI) -> None:
    got = ask(server, "slow", 3)
    assert got.ttft >= 0.05 and got.latency >= 0.15 and len(got.itls) == 2


@pytest.mark.parametrize(
    ("model", "error", "num_messages"),
    [
        ("refusing", " is not wanted", 0),
        ("broken", "HTTP 502: <h1>oops</h1>", 0),
        ("truncated", "the stream ended before the answer did", 2),
        ("failing", "the stream failed: out of memory", 2),
        ("dropping", "ClientPayloadError", 2),
    ],
)
def test_failures_are_outcomes(model: str, error: str, num_messages: int, server: FakeOpenAI) -> None:
    got = ask(server, model)
    assert error in got.error and "\n" not in got.error and len(got.message_times) == num_messages
    assert got.ended_at >= got.sent_at > 0


def test_a_server_that_is_not_there() -> None:
    got = asyncio.run(send_one(Target(backend="openai", base="http://127.0.0.1:1", endpoint="/"), Job("a", 1, 1)))
    assert got.error.startswith("ClientConnectorError: Cannot connect")


def test_extra_fields_replace_and_take_out() -> None:
    asked = Target(
        backend="openai",
        base="",
        model="m",
        fields={"top_p": 0.5},
        extra={"stream_options": None, "top_p": 0.1, "x": []},
    )
    body = request_body(asked, Job((1, 2), 2, 4))
    assert body == {"model": "m", "prompt": (1, 2), "max_tokens": 4, "stream": True, "top_p": 0.1, "x": []}


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("plain", ("", 2, 14)),
        ("untold", ("", 2, None)),
        ("few", ("the answer has 1 embeddings of 2 texts", 1, 7)),
        ("wordy", ("the answer holds no embeddings: <h1>oops</h1>", 0, None)),
        ("refusing", ("HTTP 400: too long", 0, None)),
    ],
)
def test_embeddings(model: str, expected: tuple[str, int, int | None], server: FakeOpenAI) -> None:
    asked = target(server, model, backend="openai-embeddings", endpoint="/v1/embeddings", embeds=True)
    got = asyncio.run(send_one(asked, Job("a", 1, 0, others=("b",))))
    assert (got.error, got.num_vectors, got.seen_prompt_tokens) == expected
    assert got.ended_at >= got.sent_at > 0 and (got.latency > 0) == (model != "refusing")
    assert server.bodies[-1] == {"model": model, "input": ["a", "b"], "encoding_format": "base64"}


# ---- the command


def bench(*arguments: str) -> int:
    return cli.main(["bench", "serve", "--tokenizer", str(MODEL_DIR), *arguments])


def test_a_whole_run(server: FakeOpenAI, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server.bodies.clear()
    code = bench(
        *("--base-url", server.url, "--num-prompts", "12", "--input-len", "20", "--output-len", "4"),
        *("--request-rate", "40", "--num-warmups", "2", "--num-processes", "2", "--max-concurrency", "6"),
        *("--ready-check-timeout-sec", "5", "--goodput", "ttft:60000", "--metadata", "owner=me", "--temperature", "0"),
        *("--save-detailed", "--result-dir", str(tmp_path / "new"), "--percentile-metrics", "ttft,e2el"),
        *("--metric-percentiles", "50,90", "--plot", str(tmp_path / "run.html")),
    )
    out, err = capsys.readouterr()
    assert code == 0, err
    assert out.startswith("=" * 12 + " Serving Benchmark Result ") and "P90 E2EL (ms):" in out
    assert "client: 2 process(es)" in err and f"wrote {tmp_path / 'run.html'}\n" in err
    [path] = (tmp_path / "new").iterdir()
    result = json.loads(path.read_text())
    assert path.name == f"openai-40.0qps-concurrency6-plain-{result['date']}.json"
    assert (result["model_id"], result["owner"], result["completed"], result["failed"]) == ("plain", "me", 12, 0)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (240, 48)
    assert result["request_goodput"] == result["request_throughput"] and "p50_ttft_ms" in result
    assert result["duration"] >= 12 / 40, "arrivals take as long as the rate says"
    assert result["client"]["messages"] == 48 and len(result["client"]["core_shares"]) == 2
    assert all(len(result[name]) == 12 for name in ("ttfts", "itls", "start_times", "input_lens", "errors"))
    assert all(0 <= sent <= result["duration"] for sent in result["start_times"])
    assert result["start_times"][-1] >= 12 / 40
    assert result["timeline"]["running"][0] == 3.0 and result["timeline"]["generated_tokens"][0] == 0.0
    assert result["environment"]["cpus"] >= 1
    assert any("prompt tokens" in warning for warning in result["warnings"]), "the fake counts 7 of each"
    first, *bodies = server.bodies
    assert first["max_tokens"] == 1 and first["ignore_eos"] is True, "whether the server knows the field"
    assert len(bodies) == 1 + 2 + 12, "a test request, warm-ups, and those that are measured"
    assert all(body["ignore_eos"] is True and body["max_tokens"] == 4 for body in bodies)
    prompts = [body["prompt"] for body in bodies]
    assert len({*prompts[3:]}) == 12 and not {*prompts[:3]} & {*prompts[3:]}


@pytest.mark.parametrize("flags", [("--endpoint", "embeddings"), ("--backend", "openai-embeddings")])
def test_a_run_of_embeddings(
    flags: tuple[str, ...], server: FakeOpenAI, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.bodies.clear()
    saved = tmp_path / "result.json"
    code = bench(
        *("--base-url", server.url, *flags, "--num-prompts", "11", "--random-input-len", "7", "--num-warmups", "2"),
        *("--embed-batch-size", "4", "--goodput", "e2el:60000", "--save-detailed", "--result-filename", str(saved)),
        *("--plot", str(tmp_path / "run.html"), "--ready-check-timeout-sec", "5"),
    )
    out, err = capsys.readouterr()
    assert code == 0, err
    for line in ("Total texts:                             11", "P99 E2EL (ms):", "Text throughput (texts/s):"):
        assert line in out
    assert "TTFT" not in out and "generated" not in out and "warning: no timeline" not in err
    assert [len(body["input"]) for body in server.bodies] == [2, 2, 4, 4, 3]
    assert all(set(body) == {"model", "input", "encoding_format"} for body in server.bodies)
    result = json.loads(saved.read_text())
    assert (result["completed"], result["total_texts"], result["total_input_tokens"]) == (3, 11, 77)
    assert (result["backend"], result["embed_batch_size"]) == ("openai-embeddings", 4)
    assert result["text_throughput"] == pytest.approx(11 / 3 * result["request_throughput"])
    assert len(result["e2els"]) == 3 and "ttfts" not in result and "total_output_tokens" not in result
    assert "End-to-end latency (ms)" in (tmp_path / "run.html").read_text()
    assert cli.main(["bench", "compare", "--a", str(saved), "--b", str(saved)]) == 0
    compared = capsys.readouterr().out
    (mean,) = [line for line in compared.splitlines() if line.startswith("mean_e2el_ms")]
    assert "text_throughput" in compared and mean.endswith("lower: no difference shown")


def test_failures_are_shown_by_kind_and_results_appended(
    server: FakeOpenAI, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = tmp_path / "own.jsonl"
    own.write_text('{"prompt": "The cat", "output_tokens": 6}\n')
    (tmp_path / "all.jsonl").write_text('{"of": "vLLM"}')
    for model, expected in (("refusing", 1), ("llama-cpp", 0)):
        code = bench(
            *("--base-url", server.url, "--model", model, "--dataset-name", "custom", "--dataset-path", str(own)),
            *("--num-prompts", "3", "--ignore-eos", "--save-result", "--append-result"),
            *("--result-filename", str(tmp_path / "all.jsonl")),
        )
        assert code == expected
    err = capsys.readouterr().err
    assert "3 failed: HTTP 400: request" in err
    assert "3 of 3 answers are shorter than requested" in err and "no usage for 3 of 3" in err
    text = (tmp_path / "all.jsonl").read_text()
    _, refused, short = (json.loads(line) for line in text.splitlines())
    assert text.endswith("}\n")
    assert (refused["completed"], refused["failed"], refused["error_kinds"][0]["count"]) == (0, 3, 3)
    assert (short["completed"], short["request_rate"], short["mean_ttft_ms"] > 0) == (3, "inf", True)
    assert short["total_output_tokens"] > 0 and "ttfts" not in short and "timeline" not in short


@pytest.mark.ci
@pytest.mark.parametrize("prompts", ["text", "ids"])
def test_a_model_whose_files_are_elsewhere_is_tokenized_by_its_server(
    prompts: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = load_tokenizer(MODEL_DIR)
    own = ("--num-prompts", "3", "--input-len", "40", "--output-len", "2", "--prompts", prompts)
    for has_files in (True, False):
        root = str(MODEL_DIR) if has_files else "/no/model"
        with FakeOpenAI(root=root, tokenizer=tokenizer) as fake:
            out = str(tmp_path / "a.json")
            code = cli.main(["bench", "serve", "--base-url", fake.url, *own, "--save-result", "--result-filename", out])
            assert code == 0, capsys.readouterr().err
            used = json.loads(Path(out).read_text())["tokenizer_id"]
            assert used == (str(MODEL_DIR) if has_files else f"{fake.url}/tokenize")
            sent = [body["prompt"] for body in fake.bodies[-3:]]
            lengths = {len(tokenizer.encode(prompt)) if prompts == "text" else len(prompt) for prompt in sent}
            assert lengths == {40} and len(set(map(str, sent))) == 3
    with FakeOpenAI(root="/no/model") as fake:
        assert cli.main(["bench", "serve", "--base-url", fake.url, *own]) == 1
    assert "there is none for '/no/model': name a folder or a hub id with --tokenizer" in capsys.readouterr().err


def test_a_command_line_of_vllms(server: FakeOpenAI, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = cli.main([
        *("bench", "serve", "--backend", "vllm", "--base-url", server.url, "--model", str(MODEL_DIR)),
        *("--served-model-name", "plain", "--trust-remote-code", "--disable-tqdm", "--dataset-name", "random"),
        *("--random-input-len", "5", "--random-output-len", "2", "--num-prompts", "2", "--save-result"),
        *("--result-filename", str(tmp_path / "a.json")),
    ])  # fmt: skip
    assert code == 0, capsys.readouterr().err
    result = json.loads((tmp_path / "a.json").read_text())
    assert (result["backend"], result["model_id"], result["tokenizer_id"]) == ("openai", "plain", str(MODEL_DIR))
    assert server.bodies[-1]["model"] == "plain"


def test_a_full_queue_is_told_with_its_cure(server: FakeOpenAI, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("--base-url", server.url, "--model", "full", "--num-prompts", "2", "--input-len", "5") == 1
    assert (
        "2 failed: HTTP 429: The queue is full: 4 requests wait. "
        "(limit with --max-concurrency, or serve with --max-queued-requests)\n"
    ) in capsys.readouterr().err


@pytest.mark.ci
def test_a_server_that_refuses_ignore_eos_is_asked_without(
    server: FakeOpenAI, capsys: pytest.CaptureFixture[str]
) -> None:
    own = ("--base-url", server.url, "--model", "strict", "--num-prompts", "2", "--output-len", "3")
    assert bench(*own) == 0
    assert "warning: this server refuses ignore_eos" in capsys.readouterr().err
    assert bench(*own, "--ignore-eos") == 1, "asked for, it is not left out"
    assert "2 failed: HTTP 422: " in capsys.readouterr().err


@pytest.mark.ci
def test_lengths_that_the_server_cannot_hold_are_refused_before_they_are_sent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = tmp_path / "own.jsonl"
    own.write_text('{"prompt": "The cat", "output_tokens": 60}\n')
    with FakeOpenAI(context=48) as fake:
        lengths = ("--base-url", fake.url, "--num-prompts", "2", "--input-len", "40", "--output-len")
        assert bench(*lengths, "9") == 1 and not fake.bodies
        assert capsys.readouterr().err == (
            "jaxllm: error: a prompt of 40 tokens with an output of 9 is longer than the server's context of 48; "
            "lower --input-len or --output-len.\n"
        )
        assert bench(*lengths, "8") == 0
        assert bench(*lengths, "9", "--model", "slow") == 0, "of that one, the server does not say"
        assert bench(*lengths, "9", "--extra-body", '{"max_tokens": 2}') == 0
        file = ("--dataset-name", "custom", "--dataset-path", str(own))
        assert bench("--base-url", fake.url, *file, "--num-prompts", "1") == 0, "a file's lengths are its own"


@pytest.mark.ci
@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_an_interrupt_reports_what_has_finished(server: FakeOpenAI, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "jaxllm", "bench", "serve", "--base-url", server.url, "--model", "plain"]
    command += ["--tokenizer", str(MODEL_DIR), "--num-prompts", "500", "--request-rate", "25", "--input-len", "5"]
    command += ["--output-len", "2", "--save-result", "--result-filename", str(tmp_path / "a.json")]
    server.bodies.clear()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, start_new_session=True,
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'server'}"},
    )  # fmt: skip
    end = time.monotonic() + 30
    while len(server.bodies) < 10 and time.monotonic() < end:
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does, to all processes
    out, err = process.communicate(timeout=20)
    assert process.returncode == 130, err
    result = json.loads((tmp_path / "a.json").read_text())
    assert 1 <= result["completed"] < 500 and result["failed"] == 0 and result["was_interrupted"]
    assert f"Successful requests:                     {result['completed']}" in out
    assert "interrupted" in err and "Traceback" not in err


def test_warmups_that_fail_end_it(server: FakeOpenAI, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("--base-url", server.url, "--model", "broken", "--num-prompts", "1", "--num-warmups", "2") == 1
    assert capsys.readouterr().err == "jaxllm: error: 2 warm-up requests failed: HTTP 502: <h1>oops</h1>\n"


def test_a_process_that_ends_before_the_run_is_told(server: FakeOpenAI, capfd: pytest.CaptureFixture[str]) -> None:
    process = ClientProcess(Share(target(server, "plain"), (), (), max_concurrency=-1))  # an invalid semaphore
    with pytest.raises(EngineError, match="a client process exited before the run; its output is above"):
        process.wait_ready()
    process.close()
    assert "ValueError: Semaphore initial value must be >= 0" in capfd.readouterr().err


def test_a_server_that_lists_no_model_or_has_no_tokenizer(capsys: pytest.CaptureFixture[str]) -> None:
    with FakeOpenAI(models=False) as fake:
        assert bench("--base-url", fake.url) == 1
    assert "/v1/models answers HTTP 404: give the model with --model." in capsys.readouterr().err
    assert bench("--port", "1") == 1
    assert "http://127.0.0.1:1 does not answer" in capsys.readouterr().err
    assert cli.main(["bench", "serve", "--model", "/no/model", "--num-prompts", "1"]) == 1
    assert "there is none for '/no/model': name a folder or a hub id with --tokenizer" in capsys.readouterr().err


@pytest.mark.parametrize("key", [None, "wrong"])
def test_a_server_that_wants_a_key(
    key: str | None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if key is not None:
        monkeypatch.setenv("OPENAI_API_KEY", key)
    with FakeOpenAI(key="right") as fake:
        assert bench("--base-url", fake.url, "--ready-check-timeout-sec", "60") == 1, "waiting brings no key"
    err = capsys.readouterr().err
    assert "/v1/models answers HTTP 401: the server requires a key: set OPENAI_API_KEY, or --header " in err
    assert err.count("\n") == 1 and "wrong" not in err


@pytest.mark.parametrize("backend", ["grpc", "openai"])
def test_metrics_are_asked_for_with_the_key(backend: Backend) -> None:
    with FakeOpenAI(key="right") as fake:
        asked = Target(backend=backend, base=fake.url, headers={"Authorization": "Bearer right"})
        assert discovery.metrics_fetcher(f"{fake.url}/metrics", asked)() == fake.metrics


def test_a_server_that_comes_late_is_waited_for() -> None:
    fake = FakeOpenAI()
    with fake:
        port = fake.port
    late = FakeOpenAI()
    late.server.config.port = port
    timer = threading.Timer(0.5, late.thread.start)
    timer.start()
    try:
        asked = Target(backend="openai", base=f"http://127.0.0.1:{port}")
        assert discovery.wait_for(lambda: discovery.find_model(asked), 10.0) == ("plain", "plain")
    finally:
        timer.join()
        late.__exit__()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ramp-up-strategy", "linear"], "must be given together"),
        (["--request-rate", "0"], "--request-rate must be above 0"),
        (
            ["--request-rate", "1", "--ramp-up-strategy=linear", "--ramp-up-start-rps=1", "--ramp-up-end-rps=2"],
            "not allowed with --ramp-up-strategy",
        ),
        (
            ["--dataset-name", "timed_trace", "--dataset-path", "x", "--request-rate", "1"],
            "timed_trace sets the arrival times",
        ),
        (["--max-concurrency", "0"], "--max-concurrency must be at least 1"),
        (["--num-processes", "0"], "expected a whole number above 0 or auto"),
        (["--goodput", "itl:3"], "expected ttft|tpot|e2el:MILLISECONDS"),
        (["--percentile-metrics", "ttft,x"], "unknown metric x; choose from ttft,"),
        (["--metric-percentiles", "101"], "expected numbers from 0 to 100"),
        (["--header", "Bearer SECRET"], "expected KEY=VALUE"),
        (["--extra-body", "[]"], "expected a JSON object"),
        (["--backend", "openai-chat", "--prompts", "ids"], "not allowed with --backend openai-chat"),
        (["--backend", "grpc", "--insecure"], "--insecure applies to HTTP only"),
        (["--base-url", "localhost:1"], "--base-url must begin with http"),
        (["--embed-batch-size", "2"], "--embed-batch-size requires --endpoint embeddings"),
        (["--endpoint", "embeddings", "--embed-batch-size", "0"], "--embed-batch-size must be at least 1"),
        (["--endpoint", "embeddings", "--backend", "openai-chat"], "--backend openai-chat is not allowed"),
        (["--endpoint", "embeddings", "--top-p", "0.5"], "--top-p is not allowed with --endpoint embeddings"),
        (["--endpoint", "embeddings", "--goodput", "ttft:1"], "no metric ttft; choose from e2el, client_queue_time"),
        (["--backend", "openai-embeddings", "--percentile-metrics", "itl"], "no metric itl; choose from e2el"),
        (["--append-result"], "--append-result needs --save-result"),
        (["--num-prompt", "3"], "unknown argument --num-prompt; did you mean --num-prompts?"),
    ],
)
def test_wrong_flags_are_told_in_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(*arguments) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1 and "SECRET" not in err


def test_keys_come_from_the_environment_unless_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    assert bench_serve_flags.headers_of({"header": [("a", "b")]}) == {"Authorization": "Bearer k", "a": "b"}
    assert bench_serve_flags.headers_of({"header": [("authorization", "x")]}) == {"authorization": "x"}
