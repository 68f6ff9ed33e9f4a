"""`examples/ray_batch.py`: after its driver or an actor is killed midway, no prompt is processed twice."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ray.conftest import Cluster, wait
from tests.support.paths import ROOT
from tests.support.sizes import SLOTS

pytest.importorskip("ray")
pytestmark = pytest.mark.slow

NUM_PROMPTS = 240


def start(cluster: Cluster, source: Path, folder: Path) -> subprocess.Popen[str]:
    """Start the job with its documented command."""
    command = [sys.executable, str(ROOT / "examples" / "ray_batch.py"), str(source), str(folder)]
    command += ["--actors", "2", "--batch-size", "8", "--address", cluster.address]
    command += ["--engine", json.dumps(SLOTS), "--sampling", json.dumps({"temperature": 0, "max_tokens": 64})]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def files_in(folder: Path) -> dict[str, tuple[int, int]]:
    """Return the files in a folder, each with its inode and time, which change if it is rewritten."""
    return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in folder.glob("*.parquet")}


def engine_pids() -> list[int]:
    """Return the processes of Ray's actors that map batches."""
    import psutil

    found = []
    for process in psutil.Process().children(recursive=True):
        if "MapWorker" in process.name() or any("MapWorker" in word for word in process.cmdline()):
            found.append(process.pid)
    return found


def test_a_job_killed_in_its_middle_does_no_prompt_twice(cluster: Cluster, tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    from jaxllm import LLM, SamplingParams

    draw = random.Random(0)
    words = "the a cat dog sun moon ran sat saw big red little".split()
    prompts = {f"p{i}": f"Story {i}: " + " ".join(draw.choices(words, k=8)) for i in range(NUM_PROMPTS)}
    source, folder = tmp_path / "prompts.jsonl", tmp_path / "answers"
    source.write_text("".join(json.dumps({"id": key, "prompt": prompt}) + "\n" for key, prompt in prompts.items()))

    first = start(cluster, source, folder)
    wait(lambda: len(files_in(folder)) >= 8 or first.poll() is not None, 120.0)
    first.send_signal(signal.SIGKILL)
    _, told = first.communicate()
    assert first.returncode == -signal.SIGKILL, told[-4000:]
    wait(lambda: not engine_pids(), 60.0)  # Ray ends the actors of a dead driver
    kept = files_in(folder)
    num_kept = sum(pq.read_metadata(folder / name).num_rows for name in kept)
    assert 0 < num_kept < NUM_PROMPTS / 2

    second = start(cluster, source, folder)
    wait(lambda: len(files_in(folder)) >= len(kept) + 4 or second.poll() is not None, 120.0)
    (victim, *_) = engine_pids()
    os.kill(victim, signal.SIGKILL)  # an actor of the running job: Ray reassigns its batches
    said, told = second.communicate(timeout=180.0)
    assert second.returncode == 0, told[-4000:]
    assert files_in(folder).items() >= kept.items(), "an answer that was there was written again"
    assert f"{num_kept} answers existed, " in said
    rows = [row for name in files_in(folder) for row in pq.read_table(folder / name).to_pylist()]
    assert sorted(row["id"] for row in rows) == sorted(prompts), "each prompt once"
    print(f"{num_kept} answers were there of {len(kept)} files when the driver was killed; {said.strip()}")

    some = random.Random(1).sample(rows, 16)
    with LLM(**SLOTS) as llm:
        alone = llm.generate(
            [prompts[row["id"]] for row in some], SamplingParams(temperature=0, max_tokens=64), use_tqdm=False
        )
    assert [row["text"] for row in some] == [output.outputs[0].text for output in alone]

    third = start(cluster, source, folder)  # nothing is left to do
    said, told = third.communicate(timeout=120.0)
    assert f"{NUM_PROMPTS} answers existed, 0 were generated" in said, told[-4000:]
