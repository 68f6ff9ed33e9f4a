"""A killed process leaves a folder, which the next one deletes; folders of others stay."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pallas_kernels.own_folders import OwnFolder
from tests.support.paths import ROOT

_MAKES = """
import sys
from own_folders import OwnFolder
folder = OwnFolder(sys.argv[1])
(folder.path / "in it").mkdir()
print(folder.path, flush=True)
input()
"""


def _other(parent: Path) -> tuple[subprocess.Popen[str], Path]:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    process = subprocess.Popen(
        [sys.executable, "-c", _MAKES, str(parent)], text=True, cwd=ROOT / "pallas_kernels", **pipes
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_what_a_killed_process_leaves_is_deleted_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "jaxllm-run-link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "jaxllm-run-file").touch()
    killed, abandoned = _other(tmp_path)
    living, kept = _other(tmp_path)
    killed.kill()
    killed.wait()
    assert (abandoned / "in it").is_dir() and (kept / "in it").is_dir()
    with OwnFolder(tmp_path) as own:
        assert own.is_dir() and (kept / "in it").is_dir() and not abandoned.exists()
        forked = OwnFolder(tmp_path)
        with monkeypatch.context() as patched:
            patched.setattr(os, "getpid", lambda: 1)
            forked.remove()
        assert forked.path.is_dir(), "a forked process deletes nothing"
        forked.remove()
        with OwnFolder(tmp_path) as second:
            assert own.is_dir() and second.is_dir()
    assert not own.exists() and not second.exists()
    living.communicate("\n")
    assert not kept.exists(), "one that ends by itself leaves nothing"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["elsewhere", "jaxllm-run-file", "jaxllm-run-link"]
