"""Plots of benchmark results: their data, and HTML pages without external resources."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from jaxllm.bench.plot import plot
from jaxllm.bench.samples import read_samples
from jaxllm.errors import UserError

SERVED: dict[str, Any] = {
    "model_id": "<m&m>",
    "ttfts": [0.1, 0.2, 0.0],
    "itls": [[0.01, 0.03], [0.02], []],
    "output_lens": [3, 2, 0],
    "errors": ["", "", "refused"],
    "timeline": {
        "seconds": [0.0, 1.0, 2.0],
        "running": [0, 2, 1],
        "waiting": [2, 0, 0],
        "kv_usage": [0.0, 0.5, 0.25],
        "generated_tokens": [0, 64, 80],
        "compilations": [3, 3, 4],
    },
}


def test_samples_are_those_of_the_requests_that_were_answered() -> None:
    assert read_samples(SERVED) == {
        "ttft_ms": [[100.0], [200.0]],
        "tpot_ms": [[20.0], [20.0]],
        "itl_ms": [[10.0, 30.0], [20.0]],
        "e2el_ms": [[140.0], [220.0]],
    }


@pytest.mark.ci
def test_a_page_is_an_svg_without_scripts_or_links(tmp_path: Path) -> None:
    path = tmp_path / "result.html"
    plot(SERVED, str(path))
    page = path.read_text()
    assert "<script" not in page and "<m&m>" not in page
    # The only URLs inside are XML namespaces, and references are by id.
    assert not re.findall(r'(?:src|href)="(?!#)', page)
    ElementTree.fromstring(page[page.index("<svg") : page.index("</html>")])
    for said in ("Time to first token", "Inter-token latency", "tokens a second", "KV blocks in use", "median 150"):
        assert said in page, said
    assert page.count("<!-- a program compiled -->") == 3  # in each panel of the timeline


def test_a_png_of_other_samples(tmp_path: Path) -> None:
    path = tmp_path / "result.png"
    plot({"samples": {"decode_64_us": [1.0, 2.0], "turnover_64_us": [2.0, 0.0]}}, str(path))
    assert path.read_bytes().startswith(b"\x89PNG")


def test_what_cannot_be_drawn_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="neither samples nor a timeline"):
        plot({"elapsed_time": 3.0}, str(tmp_path / "a.png"))
    with pytest.raises(UserError, match=r"\.png or a \.html"):
        plot(SERVED, str(tmp_path / "a.pdf"))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UserError, match=r"pip install 'jaxllm\[bench\]'"):
        plot(SERVED, str(tmp_path / "a.png"))
    assert not list(tmp_path.iterdir())
