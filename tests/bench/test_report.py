"""What `bench serve` makes of outcomes: figures and text by hand, events, doubts. No network."""

from __future__ import annotations

import time
from typing import Any

import pytest

from jaxllm.bench import report, serve
from jaxllm.bench.clients import Cost, deal
from jaxllm.bench.compare import differences
from jaxllm.bench.outcome import Outcome
from jaxllm.bench.polling import Poller, read_metrics
from jaxllm.bench.sse import AnswerReader, EventReader, error_message
from jaxllm.bench.target import Target
from jaxllm.bench.workload import Job
from tests.support.failures import eventually


def outcome(sent: float, times: list[float], tokens: int, **others: Any) -> Outcome:
    return Outcome(
        number=0, prompt_tokens=10, max_tokens=3, due_at=sent, sent_at=sent, message_times=times, output_tokens=tokens,
        **others,
    )  # fmt: skip


# The first has a token a message, the second four tokens in two messages, the third failed after one.
OUTCOMES = [
    outcome(100.0, [100.1, 100.2, 100.4], 3),
    outcome(100.25, [100.55, 101.35], 4),
    outcome(100.3, [100.4], 1, error="gone"),
]
REPORT = """\
============ Serving Benchmark Result ============
Successful requests:                     2         
Failed requests:                         1         
Maximum request concurrency:             8         
Request rate configured (RPS):           2.50      
Benchmark duration (s):                  2.00      
Total input tokens:                      20        
Total generated tokens:                  7         
Request throughput (req/s):              1.00      
Request goodput (req/s):                 0.50      
Output token throughput (tok/s):         3.50      
Peak output token throughput (tok/s):    5.00      
Peak concurrent requests:                2.00      
Total token throughput (tok/s):          13.50     
---------------Time to First Token----------------
Mean TTFT (ms):                          200.00    
Median TTFT (ms):                        200.00    
P50 TTFT (ms):                           200.00    
P99.9 TTFT (ms):                         299.80    
-----Time per Output Token (excl. 1st token)------
Mean TPOT (ms):                          208.33    
Median TPOT (ms):                        208.33    
P50 TPOT (ms):                           208.33    
P99.9 TPOT (ms):                         266.55    
---------------Inter-token Latency----------------
Mean ITL (ms):                           366.67    
Median ITL (ms):                         200.00    
P50 ITL (ms):                            200.00    
P99.9 ITL (ms):                          798.80    
----------------End-to-end Latency----------------
Mean E2EL (ms):                          750.00    
Median E2EL (ms):                        750.00    
P50 E2EL (ms):                           750.00    
P99.9 E2EL (ms):                         1099.30   
=================================================="""


def test_the_report_is_vllms_to_the_letter() -> None:
    metrics, percentiles = ("ttft", "tpot", "itl", "e2el"), (50.0, 99.9)
    figures = report.summarize(OUTCOMES, 2.0, metrics, percentiles, {"ttft": 150.0, "e2el": 1000.0})
    assert report.render({"max_concurrency": 8, "request_rate": 2.5, **figures}, metrics, percentiles) == REPORT
    assert figures["std_ttft_ms"] == pytest.approx(100.0) and figures["p99.9_ttft_ms"] == pytest.approx(299.8)


def test_lines_that_are_there_only_when_asked_for() -> None:
    figures = report.summarize(OUTCOMES, 2.0, ("ttft",))
    text = report.render({"max_concurrency": None, "request_rate": "inf", **figures}, ("ttft",), (99.0,))
    assert figures["request_goodput"] is None and "mean_tpot_ms" not in figures
    assert not [word for word in ("goodput", "concurrency", "configured", "TPOT") if word in text]


def test_nothing_that_went_well_is_no_crash() -> None:
    figures = report.summarize([OUTCOMES[2]], 2.0)
    assert (figures["completed"], figures["failed"], figures["mean_ttft_ms"], figures["output_throughput"]) == (
        0,
        1,
        0,
        0,
    )
    assert report.summarize([], 1.0)["max_concurrent_requests"] == 0


@pytest.mark.parametrize(
    ("goodput", "count"),
    [({"ttft": 100.5}, 1), ({"ttft": 300.5}, 2), ({"ttft": 300.5, "tpot": 200.0}, 1), ({"tpot": 1.0}, 0), ({}, None)],
)
def test_goodput_counts_requests_that_meet_every_bound(goodput: dict[str, float], count: int | None) -> None:
    got = report.summarize(OUTCOMES, 4.0, goodput=goodput)["request_goodput"]
    assert got == (None if count is None else count / 4.0)


def test_a_peak_is_at_least_the_mean() -> None:
    figures = report.summarize([outcome(100.0, [100.1, 100.2], 50)], 0.25)
    assert figures["max_output_tokens_per_s"] == figures["output_throughput"] == 200.0
    assert report.summarize(OUTCOMES, 2.0)["max_output_tokens_per_s"] == 5.0, "of the first second"


def test_a_single_token_has_no_time_per_token_and_is_good() -> None:
    figures = report.summarize([outcome(0.0, [0.2], 1)], 1.0, goodput={"tpot": 1.0})
    assert (figures["request_goodput"], figures["mean_tpot_ms"]) == (1.0, 0.0)


def test_waiting_in_the_client_is_no_latency() -> None:
    late = outcome(5.0, [5.5], 1)
    late.due_at = 2.0
    figures = report.summarize([late], 10.0, ("e2el", "client_queue_time"))
    assert (figures["mean_e2el_ms"], figures["mean_client_queue_time_ms"]) == (500.0, 3000.0)


def test_details_are_by_request_and_from_the_start() -> None:
    detailed = report.details(OUTCOMES, 100.0)
    assert detailed["start_times"] == pytest.approx([0.0, 0.25, 0.3])
    assert detailed["output_lens"] == [3, 4, 1] and detailed["errors"] == ["", "", "gone"]
    assert detailed["itls"][0] == pytest.approx([0.1, 0.2]) and detailed["ttfts"][1] == pytest.approx(0.3)


def test_errors_are_grouped_by_kind() -> None:
    errors = ["HTTP 503: request 12 waits", "no", "HTTP 503: request 7af3-2 waits", ""]
    kinds = report.error_kinds(outcome(0.0, [], 0, error=error) for error in errors)
    assert kinds == [(2, "HTTP 503: request 12 waits"), (1, "no")]


# ---- events


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_events_are_found_however_they_are_cut(size: int, end: bytes) -> None:
    stream = end.join([b": ping", b"", b'data: {"a": "\xc3\xa4"}', b"", b"event: x", b"data:[DONE]", b"", b""])
    reader = EventReader()
    found = [payload for start in range(0, len(stream), size) for payload in reader.feed(stream[start : start + size])]
    assert found == [b'{"a": "\xc3\xa4"}', b"[DONE]"]


def read(*payloads: bytes, is_chat: bool = False) -> Outcome:
    result = Outcome(0, 10, 3)
    answer = AnswerReader(result, is_chat)
    for number, payload in enumerate(payloads):
        answer.take([payload], float(number))
    answer.finish()
    return result


def test_a_completion_counts_tokens_without_a_text_and_not_its_end() -> None:
    got = read(
        b'{"choices": [{"text": "a", "finish_reason": null}]}',
        b'{"choices": [{"text": "", "finish_reason": null}]}',
        b'{"choices": [{"text": "", "finish_reason": "length"}], "usage": null}',
        b'{"choices": [], "usage": {"completion_tokens": 2, "prompt_tokens": 9}}',
        b"[DONE]",
    )
    assert (got.message_times, got.text, got.output_tokens, got.seen_prompt_tokens, got.error) == (
        [0, 1],
        "a",
        2,
        9,
        "",
    )


def test_a_chats_first_token_is_no_role() -> None:
    got = read(
        b'{"choices": [{"delta": {"role": "assistant", "content": ""}}]}',
        b'{"choices": [{"delta": {"reasoning_content": "hm"}}]}',
        b'{"choices": [{"delta": {"content": "a"}, "finish_reason": "stop"}]}',
        is_chat=True,
    )
    assert (got.message_times, got.text, got.output_tokens, got.error) == ([1, 2], "a", None, "")


@pytest.mark.parametrize(
    ("payloads", "error"),
    [
        ([b'{"choices": [{"text": "a", "finish_reason": null}]}'], "the stream ended before the answer did"),
        ([b"[DONE]"], "the answer has no token"),
        ([b"{", b"[DONE]"], "an event is not valid JSON: {"),
        ([b'{"error": {"message": "no\\nmemory"}}', b"[DONE]"], "the stream failed: no memory"),
        ([b"[1]"], "the stream failed: [1]"),
    ],
)
def test_answers_that_are_none(payloads: list[bytes], error: str) -> None:
    assert read(*payloads).error == error


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"error": {"message": "a"}}, "a"),
        ({"error": "b"}, "b"),
        ({"detail": [{"loc": "c"}]}, '[{"loc": "c"}]'),
        ({"message": "d"}, "d"),
        ("e" * 999, "e" * 199 + "…"),
    ],
)
def test_messages_of_errors_in_every_form(body: Any, message: str) -> None:
    assert error_message(body) == message


# ---- a run


def test_jobs_and_the_cap_are_dealt_to_processes() -> None:
    jobs = [(number, Job("a", 1, 1), 0.0) for number in range(7)]
    shares = deal(Target(backend="openai", base=""), jobs, [Job("w", 1, 1)] * 2, 5, 3)
    assert [[number for number, _, _ in share.jobs] for share in shares] == [[0, 3, 6], [1, 4], [2, 5]]
    assert [share.max_concurrency for share in shares] == [2, 2, 1]
    assert [[number for number, _ in share.warmups] for share in shares] == [[0], [1], []]
    assert len(deal(Target(backend="openai", base=""), jobs, [], 2, 8)) == 2
    assert len(deal(Target(backend="openai", base=""), jobs, [], None, 8)) == 7


def test_doubts_are_told() -> None:
    good = [outcome(0.0, [0.1], 3, seen_prompt_tokens=10), outcome(0.0, [0.1], 3, seen_prompt_tokens=10)]
    calm, busy = (serve.client_cost([Cost(share, 1.0, 100), Cost(0.1, 1.0, 50)], 300) for share in (0.2, 0.71))
    asked = {"ignores_eos": True, "compares_prompts": True, "num_counted": 0}
    assert list(serve.doubts(good, calm, **asked)) == []
    assert "--num-processes above 2" in next(serve.doubts(good, busy, **asked))
    assert busy["microseconds_per_message"] == pytest.approx(5400.0) and busy["tokens_per_message"] == 2.0
    short, long = outcome(0.0, [0.1], 2), outcome(0.0, [0.1], 4)
    assert "1 of 2 answers are shorter" in next(serve.doubts([good[0], short], calm, **asked))
    assert list(serve.doubts([good[0], short], calm, **{**asked, "ignores_eos": False})) == []
    assert "1 of 1 answers are longer" in next(serve.doubts([long], calm, **asked))
    good[1].seen_prompt_tokens = 12
    assert "22 prompt tokens, the tokenizer 20" in next(serve.doubts(good, calm, **asked))
    assert list(serve.doubts(good, calm, **{**asked, "compares_prompts": False})) == []
    assert "no usage for 1 of 2" in next(
        serve.doubts(good, calm, **{**asked, "num_counted": 1, "compares_prompts": False})
    )


def test_metrics_of_jaxllm_and_of_vllm_are_read() -> None:
    page = (
        "# HELP jaxllm:num_requests_running Requests.\n"
        'jaxllm:num_requests_running{model_name="a b",engine="0"} 3.0\n'
        'jaxllm:kv_cache_usage_perc{engine="0"} 0.25\n'
        'jaxllm:programs_compiled_total{engine="0"} 4.0\njaxllm:compilations_after_ready_total 1.0\n'
        "process_cpu_seconds_total 9.0\n"
    )
    expected = {"running": 3.0, "waiting": 0.0, "kv_usage": 0.25, "generated_tokens": 0.0, "compilations": 5.0}
    expected |= {"prompt_tokens": 0.0, "cached_prompt_tokens": 0.0}
    assert read_metrics(page) == expected
    assert read_metrics(page.replace("jaxllm:", "vllm:")) == expected
    assert read_metrics("process_cpu_seconds_total 9.0\n") is None


def test_a_poller_has_a_value_from_before_and_one_from_after() -> None:
    pages = iter(range(5, 1000))
    start = time.perf_counter()
    with Poller(lambda: f"jaxllm:generation_tokens_total {next(pages)}.0\n", start) as poller:
        eventually(poller.timeline)
    seen = poller.timeline()
    assert seen is not None and seen["generated_tokens"] == [0.0, 1.0] and 0 <= seen["seconds"][0] < seen["seconds"][1]


def test_prompts_that_were_cached_are_told() -> None:
    queries, hits = iter((100, *[300] * 1000)), iter((7, *[71] * 1000))
    page = "vllm:num_requests_running 1.0\nvllm:prefix_cache_queries_total {}\nvllm:prefix_cache_hits_total {}\n"
    with Poller(lambda: page.format(next(queries), next(hits)), time.perf_counter()) as poller:
        eventually(poller.timeline)
    assert poller.counted() == {"prompt_tokens": 200.0, "cached_prompt_tokens": 64.0}
    assert "cached_prompt_tokens" not in (poller.timeline() or {})
    (doubt,) = serve.cache_doubt(poller.counted())
    assert doubt.startswith("64 of 200 prompt tokens came from the prefix cache: change --seed")
    for counted in ({}, {"prompt_tokens": 200.0, "cached_prompt_tokens": 4.0}, dict.fromkeys(poller.counted(), 0.0)):
        assert list(serve.cache_doubt(counted)) == []


def test_what_a_client_cost_is_no_setting() -> None:
    one, other = ({"client": {"processes": count, "cpu_seconds": count / 7}} for count in (1, 2))
    assert differences([one], [one]) == [] and differences([one], [other]) == ["client.processes: 1 in A, 2 in B"]
