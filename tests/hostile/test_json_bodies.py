"""Bodies that are not JSON, in hundreds of forms: each is answered 400 at once, and none is kept."""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Callable

import httpx
import pytest

from tests.hostile.machine import resident_bytes
from tests.support.failures import over_http
from tests.support.serving_process import ServingProcess

GOOD = json.dumps(
    {
        **{"model": "fake", "prompt": 'Once upon a time, é 😀 \\ " \u2028', "max_tokens": 4, "temperature": 0.5},
        **{"stop": ["a", "b"], "logit_bias": {"5": -1.5e0}, "stream": False, "user": None},
    }
).encode()
JSON = {"content-type": "application/json"}


def cases() -> list[bytes]:
    """Return the bodies, drawn from a seed."""
    rng = random.Random(7)
    found = [GOOD[:cut] for cut in rng.sample(range(len(GOOD)), 60)]  # truncated
    found += [
        GOOD + tail for tail in (b"x", b"{}", b",", b"]", b"}", b"\0", b"null", b"\xff", b"//", b"/**/", b"#", b'"')
    ]
    for name in ("model", "prompt", "max_tokens", "temperature", "user", "x" * 1000):  # duplicate keys
        found += [
            GOOD[:-1] + b"," + json.dumps(name).encode() + b":1," + json.dumps(name).encode() + b":2}",
            b'{"prompt":"a","metadata":{"%s":1,"%s":1}}' % (name.encode(), name.encode()),
            b'{"prompt":"a","metadata":[{"a":{"%s":1,"%s":{}}}]}' % (name.encode(), name.encode()),
        ]
    found.append(b'{"prompt":"a","metadata":{"a":1,"\\u0061":1}}')  # the same key, escaped
    for depth in (65, 100, 1000, 10_000, 100_000):
        for opening, closing in ((b"[", b"]"), (b'{"a":', b"}"), (b'[{"a":', b"}]"), (b"[[],", b"]")):
            found += [
                b'{"prompt":"a","metadata":' + opening * depth + b"1" + closing * depth + b"}",
                b'{"prompt":"a","metadata":' + opening * depth,
                opening * depth,
            ]
    for number in (
        *("1e400", "-1e400", "1e99999999999", "NaN", "Infinity", "-Infinity", "nan", "-nan", "inf", "1.", ".5", "+1"),
        *("01", "-01", "--1", "0x10", "1_000", "1e", "1e+", "0b1", "1,5", "١", "9" * 5000, "1." + "9" * 9000 + "e999"),
    ):
        for name in ("temperature", "max_tokens", "seed", "metadata"):
            found.append(b'{"prompt":"a","%s":%s}' % (name.encode(), number.encode()))
    text = '{"prompt": "a"}'
    found += [text.encode(coding) for coding in ("utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-8-sig", "utf-7")][
        :-1
    ]
    found += [b"\xfe\xff" + text.encode(), b"\0" + text.encode(), b"\x0c" + text.encode(), b"\xa0" + text.encode()]
    broken = (
        *(b"\xff", b"\xc0\xaf", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xe2\x82", b"\x80", b"\0", b"\n"),
        *(b"\t", b"\x1f"),
    )
    found += [b'{"prompt":"%s"}' % letter for letter in broken]
    found += [
        b'{"prompt":"\\%s"}' % escape for escape in (b"x41", b"u12", b"u+041", b"ud800", b"udc00\\ud800", b"'", b"0")
    ]
    found += [
        *(b"", b" ", b"null", b"true", b"1", b'"a"', b"[]", b"[{}]", b"{]", b"{'prompt':'a'}", b'{prompt:"a"}', b"{,}"),
    ]
    found += [
        *(b'{"prompt":"a",}', b'{"prompt":["a",]}', b'{"prompt"}', b'{"prompt":}', b'{"prompt" "a"}', b"\x1f\x8b\x08"),
    ]
    found += [b"prompt=a", b"<prompt>a</prompt>", b"prompt: a", b"\x81\xa6prompt\xa1a", b"{" * 50_000, b'"' * 50_001]
    found += [b'{"prompt":"' + b"\\" * 100_001, b'{"a":' * 20_000, b"[1," * 100_000, b"-" * 100_000]
    while len(found) < 310:  # one byte changed
        at = rng.randrange(len(GOOD))
        changed = GOOD[:at] + bytes([rng.choice(b'"\\{}[],:\xff\0')]) + GOOD[at + 1 :]
        if not is_json(changed):
            found.append(changed)
    return found


def is_json(raw: bytes) -> bool:
    try:
        json.loads(raw)
    except ValueError:
        return False
    return True


def refusals(fake: ServingProcess, bodies: list[bytes], path: str) -> list[float]:
    """Send each body; return the seconds of each refusal."""
    times = []
    with httpx.Client(base_url=fake.http, timeout=20) as http:
        for body in bodies:
            began = time.perf_counter()
            response = http.post(path, content=body, headers=JSON)
            times.append(time.perf_counter() - began)
            assert over_http(response) == (400, "invalid_parameter", "invalid_request_error"), body[:200]
            assert len(response.content) < 500
    return times


@pytest.mark.ci
def test_three_hundred_bodies_that_are_no_json(fake: ServingProcess) -> None:
    bodies = cases()
    assert len(bodies) >= 300
    refusals(fake, bodies, "/v1/completions")  # excludes one-time growth of a process
    before = resident_bytes(fake.process.pid)
    times = refusals(fake, bodies, "/v1/chat/completions") + refusals(fake, bodies, "/tokenize")
    times.sort()
    grown = resident_bytes(fake.process.pid) - before
    print(
        f"median {1e3 * statistics.median(times):.2f} ms, most {1e3 * times[-1]:.1f} ms, {grown / 2**20:.1f} MiB more"
    )
    assert statistics.median(times) < 0.05 and times[int(0.99 * len(times))] < 2.0
    assert grown < 10 << 20


@pytest.mark.ci
@pytest.mark.parametrize(
    ("make", "parameter"),
    [
        (lambda: {"prompt": "a", "n": 10**6}, "n"),
        (lambda: {"prompt": "a", "n": 129}, "n"),
        (lambda: {"prompt": "a", "best_of": 10**6}, "best_of"),
        (lambda: {"prompt": ["a"] * 10_000}, "prompt"),
        (lambda: {"prompt": ["a"] * 2049}, "prompt"),
        (lambda: {"prompt": [[1]] * 10_000}, "prompt"),
        (lambda: {"prompt": ["a"] * 2048, "n": 2}, "n"),
        (lambda: {"prompt": ["a"] * 100, "n": 10**9}, "n"),
        (lambda: {"prompt": "a", "stop": ["a"] * 10_000}, "stop"),
        (lambda: {"prompt": "a", "stop_token_ids": list(range(10_000))}, "stop_token_ids"),
        (lambda: {"prompt": "a", "allowed_token_ids": [1] * 10_000}, "allowed_token_ids"),
        (lambda: {"prompt": "a", "allowed_token_ids": ["1"] * 10_000}, "allowed_token_ids"),
        (lambda: {"prompt": "a", "logprob_token_ids": [1] * 10_000}, "logprob_token_ids"),
        (lambda: {"prompt": "a", "bad_words": ["a"] * 10_000}, "bad_words"),
        (lambda: {"prompt": "a", "vllm_xargs": {str(i): 1 for i in range(10_000)}}, "vllm_xargs"),
        (lambda: {"prompt": "a", "logit_bias": {str(i): 1 for i in range(10_000)}}, "logit_bias"),
        (lambda: {"prompt": "a", "logprobs": 10**9}, "logprobs"),
        (lambda: {"prompt": "a", "request_id": "a" * 90_000}, "request_id"),
        (lambda: {"prompt": "a", "cache_salt": "a" * 90_000}, "cache_salt"),
        (lambda: {"prompt": "a", **{f"field{i}": i for i in range(5_000)}}, "field16"),  # this many are ignored
    ],
)
def test_a_small_body_that_asks_for_much_is_refused_before_anything_is_made(
    server: ServingProcess, make: Callable[[], dict[str, object]], parameter: str
) -> None:
    body = json.dumps(make()).encode()
    pid = server.process.pid
    with httpx.Client(base_url=server.http, timeout=20) as http:
        times = []
        for number in range(6):
            began = time.perf_counter()
            response = http.post("/v1/completions", content=body, headers=JSON)
            times.append(time.perf_counter() - began)
            assert response.status_code == 400, response.text[:300]
            assert response.json()["error"]["param"] == parameter
            if not number:
                before = resident_bytes(pid)
    assert min(times) < 0.05  # other processes of this machine can only lengthen a turn
    assert resident_bytes(pid) - before < 5 << 20
