"""`jaxllm doctor`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.fake_llm import Run


def test_doctor_explains_what_would_be_used(run: Run, tmp_path: Path) -> None:
    (tmp_path / "cache" / "deep").mkdir(parents=True)
    (tmp_path / "cache" / "deep" / "jit_run-1-cache").write_bytes(b"x" * 1536)
    (tmp_path / "cache" / "jit_run-1-atime").write_bytes(b"")
    (tmp_path / "cache" / "whole").mkdir()
    (tmp_path / "cache" / "whole" / "decode_1_greedy-1.program").write_bytes(b"x" * 512)
    arguments = ["doctor", "--compilation-cache-dir", str(tmp_path / "cache"), "--max-num-seqs", "4"]
    arguments += ["--kernels", "linear=xla"]
    code, out, _ = run(*arguments, "--json")
    report = json.loads(out)
    assert code == 0 and report["usable"] and report["problems"] == []
    assert report["versions"]["jax"] and report["versions"]["python"].startswith("3.")
    assert report["devices"][0]["platform"] == "cpu"
    assert report["host"]["memory_bytes"] > report["host"]["free_bytes"] > 0
    assert report["cache"] == {
        "folder": str(tmp_path / "cache"), "programs": 2, "bytes": 2048, "is_writable": True
    }  # fmt: skip
    model = report["model"]
    assert model["max_num_seqs"] == {"value": 4, "why": "asked for"}
    assert model["dtype"] == {"value": "float32", "why": "the default on a CPU"}
    assert model["kernel linear"] == {"value": "xla", "why": "asked for"}
    assert model["kernel write_kv"] == {"value": "xla", "why": "best on cpu"}
    assert model["parameters"]["value"] > 1_000_000 and model["num_kv_blocks"]["value"] > 0
    code, out, _ = run(*arguments)
    assert code == 0
    assert "max_num_seqs: 4 (asked for)" in out and "2 programs, 2.0 KiB" in out and "the model can run" in out


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["-m", "/no/such"], "/no/such"),
        (["--device", "gpu"], "JAX sees none"),
        (["--max-model-len", "1m"], "--max-model-len (1000000) is greater"),
        (["--tensor-parallel-size", "512"], "--tensor-parallel-size is 512"),
    ],
)
def test_doctor_names_what_keeps_a_model_from_running(arguments: list[str], problem: str, run: Run) -> None:
    code, out, _ = run("doctor", "--json", *arguments)
    report = json.loads(out)
    assert (code, report["usable"]) == (1, False)
    assert len(report["problems"]) == 1 and problem in report["problems"][0]


def test_doctor_says_when_programs_cannot_be_kept(run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    _, out, _ = run("doctor", "--json", "--compilation-cache-dir", str(tmp_path / "file" / "cache"))
    assert "every start compiles all programs" in json.loads(out)["advice"][0]


def test_doctor_advises_on_a_gpu_that_jax_does_not_see(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from jaxllm.commands import doctor_report

    for is_there in (True, False):
        monkeypatch.setattr(doctor_report, "has_nvidia_gpu", lambda is_there=is_there: is_there)
        _, out, _ = run("doctor", "--json")
        assert ("install jaxllm[cuda12]" in out) == is_there
