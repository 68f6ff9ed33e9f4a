"""Every line of the log has its time and level."""

from __future__ import annotations

import io
import logging
import re

from jaxllm.log_lines import LineFormatter


def test_each_line_of_a_message_is_a_record() -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(LineFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    log = logging.Logger("start")
    log.addHandler(handler)
    log.info("ready in %s s:\n  weights  %d MiB\n", 1.5, 7)
    log.info("")
    try:
        raise ValueError("two\nlines")
    except ValueError:
        log.exception("failed")
    lines = stream.getvalue().splitlines()
    texts = ["ready in 1.5 s:", "  weights  7 MiB", "", "failed"]
    assert [re.sub(r"^[-\d]+ [:,\d]+ (INFO|ERROR) start: ", "", line) for line in lines[:4]] == texts
    assert lines[4].startswith("Traceback") and lines[-2:] == ["ValueError: two", "lines"]
