"""Log lines that any client can repeat are rate-limited."""

from __future__ import annotations

import logging

from jaxllm_server.observability.log_limit import SECONDS, RateLimitFilter


def test_a_line_comes_once_in_ten_seconds_and_says_how_many_did_not() -> None:
    now, seldom = 100.0, RateLimitFilter("one", "jaxllm", clock=lambda: now)
    shown: list[str] = []

    def log(message: str, *arguments: object, name: str = "jaxllm") -> None:
        record = logging.LogRecord(name, logging.WARNING, "", 0, message, arguments, None)
        if seldom.filter(record):
            shown.append(record.getMessage())

    for _ in range(3):
        log("Invalid HTTP request received.")
    for number in range(200):  # distinct lines are all shown
        log("request %s failed", number)
    assert len(shown) == 201 and shown[:2] == ["Invalid HTTP request received.", "request 0 failed"]
    for name in ("jaxllm", "jaxllm", "another", "another"):
        log("bad %d%%", 5, name=name)
    assert len(shown) == 204, "another logger's lines are all shown"
    now += SECONDS
    log("bad %d%%", 5)
    assert shown[-1] == "bad 5% (repetitions not shown: 1)"
