"""AIPerf: a load of streams; it counts their tokens with the model's tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

from tests.clients.common import Site, aiperf
from tests.support.paths import ROOT

REQUESTS = 8


def check(kind: str, site: Site, folder: Path, *more: str) -> None:
    aiperf(
        *("profile", "--model", site.model, "--url", site.http, "--endpoint-type", kind, *more),
        *("--tokenizer", str(ROOT / "jaxllm" / "embedded" / "model"), "--output-artifact-dir", str(folder)),
        *("--request-count", str(REQUESTS), "--concurrency", "2", "--workers-max", "1", "--ui", "none"),
        *("--no-gpu-telemetry", "--no-server-metrics", "--record-processor-service-count", "1"),
        *("--prompt-input-tokens-mean", "64"),
    )
    (report,) = folder.glob("**/profile_export_aiperf.json")
    told = json.loads(report.read_text())
    assert told["request_count"]["avg"] == REQUESTS and not told.get("error_summary")
    assert "--streaming" not in more or told["time_to_first_token"]["avg"] > 0


def test_chat(site: Site, tmp_path: Path) -> None:
    check("chat", site, tmp_path, "--prompt-output-tokens-mean", "16")


def test_stream(site: Site, tmp_path: Path) -> None:
    check(
        "chat", site, tmp_path, "--streaming", "--prompt-output-tokens-mean", "16", "--extra-inputs", "ignore_eos:true"
    )


def test_embeddings(embedder: Site, tmp_path: Path) -> None:
    check("embeddings", embedder, tmp_path)


def test_responses(site: Site, tmp_path: Path) -> None:
    check("responses", site, tmp_path, "--streaming", "--prompt-output-tokens-mean", "16")


def test_messages(site: Site, tmp_path: Path) -> None:
    check("messages", site, tmp_path, "--streaming", "--prompt-output-tokens-mean", "16")
