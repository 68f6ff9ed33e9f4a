"""With a folder from `jaxllm compile`, a start compiles nothing, or logs one line with the reason."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from jaxllm import LLM
from jaxllm.compiling import aot_manifest, program_digest
from jaxllm.config import EngineConfig
from jaxllm.errors import UserError
from jaxllm.families.families import read_spec
from jaxllm.setup.model_setup import describe_programs, plan_memory, prepare
from tests.support import paths
from tests.support.checkpoints import CONFIG, write_checkpoint
from tests.support.paths import GOLDEN

SIZES = ("--max-num-seqs", "1", "--max-num-batched-tokens", "8", "--num-kv-blocks", "37")
STORIES = str(GOLDEN / "stories260K")
START = """
import collections, json, sys
import jax
seen = collections.Counter()
jax.monitoring.register_event_listener(lambda event, **_: seen.update([event]))
from jaxllm import LLM, SamplingParams
llm = LLM(sys.argv[1], tokenizer=sys.argv[2], compilation_cache_dir=sys.argv[3], precompile="all")
params = SamplingParams(max_tokens=3, frequency_penalty=0.1, logit_bias={7: 1.0})
llm.generate([[5, 6, 7] * 9, [8]], [params, SamplingParams(temperature=0, max_tokens=9)], use_tqdm=False)
runner = llm.engine.runner
print(json.dumps({
    "asked": seen["/jax/compilation_cache/compile_requests_use_cache"],
    "found": seen["/jax/compilation_cache/cache_hits"],
    "blocks": runner.geometry.num_blocks,
    "seqs": runner.setup.max_num_seqs,
    "read": runner._kept.num_read,
    "traced": llm.engine.metrics.trace_seconds,
    "late": llm.engine.metrics.compilations_after_ready,
}))
llm.close()
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_checkpoint(tmp_path_factory.mktemp("model"), {**CONFIG, "num_hidden_layers": 1}))


@pytest.fixture(scope="module")
def folder(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compile the programs of the smallest model with the command, and move them to another folder."""
    made = tmp_path_factory.mktemp("made") / "programs"
    run(sys.executable, "-m", "jaxllm", "compile", model, "--out", str(made), *SIZES)
    return Path(shutil.move(made, tmp_path_factory.mktemp("moved")))


def run(*command: str) -> subprocess.CompletedProcess[str]:
    root = str(paths.ROOT)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([root, os.path.join(root, "server")])}
    environment.pop("JAXLLM_CACHE_DIR", None)
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True)


@pytest.mark.slow
@pytest.mark.parametrize("is_whole", [False, True])
def test_a_start_with_prepared_programs_compiles_nothing(
    model: str, folder: Path, is_whole: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_whole:
        monkeypatch.setenv("JAXLLM_CACHE_BYTES", str(1 << 30))
        folder = tmp_path / "whole"
        run(sys.executable, "-m", "jaxllm", "compile", model, "--out", str(folder), *SIZES)
        folder = folder.rename(tmp_path / "moved")
    ended = run(sys.executable, "-c", START, model, STORIES, str(folder))
    seen = json.loads(ended.stdout)
    assert (seen["blocks"], seen["seqs"], seen["late"]) == (37, 1, 0), "the sizes are those that were compiled for"
    assert seen["asked"] == seen["found"] and seen["read" if is_whole else "found"] > 8
    assert (seen["traced"] == 0) is is_whole
    assert "prepared" not in ended.stderr


@pytest.mark.slow
def test_what_differs_is_said_in_one_line(model: str, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    spec, _ = read_spec({**CONFIG, "num_hidden_layers": 1})
    (tmp := folder / "copy").mkdir()
    aot_manifest.write(tmp, spec, aot_manifest.read(folder, spec) | {"jax": "0.1"})
    with LLM(model, tokenizer=STORIES, precompile="covering", compilation_cache_dir=str(tmp), num_kv_blocks=40) as llm:
        assert llm.engine.runner.geometry.num_blocks == 40 and llm.engine.runner.setup.max_num_seqs == 1
    (line,) = [record.getMessage() for record in caplog.records if "prepared" in record.getMessage()]
    assert "jax is " in line and "not '0.1'; num_kv_blocks is 40, not 37" in line


def test_another_processor_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(model=STORIES, num_kv_blocks=8)
    setup = prepare(config)
    plan = plan_memory(config, setup, None)
    recorded = describe_programs(config, setup, plan)
    monkeypatch.setattr(program_digest, "host", lambda: ([], "model name\t: A chip\nFeatures\t: fp", 96))
    told = aot_manifest.difference(recorded, describe_programs(config, setup, plan))
    assert told.startswith("processor is 'A chip, 96 cores', not '") and ";" not in told


def test_a_record_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    spec, _ = read_spec(CONFIG)
    assert aot_manifest.read(tmp_path, spec) == aot_manifest.read(tmp_path / "nowhere", spec) == {}
    file = aot_manifest.write(tmp_path, spec, {"jax": "1", "num_kv_blocks": 3})
    assert aot_manifest.read(tmp_path, spec) == {"jax": "1", "num_kv_blocks": 3}
    other, _ = read_spec({**CONFIG, "num_hidden_layers": 3})
    assert aot_manifest.read(tmp_path, other) == {}, "another model"
    file.write_text("{")
    with pytest.raises(UserError, match=f"{file.name} is not valid JSON"):
        aot_manifest.read(tmp_path, spec)


def test_what_cannot_be_compiled_is_told_by_flags(
    run_jaxllm: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    code, out, err = run_jaxllm("compile", "--out", str(tmp_path / "programs"), "--max-model-len", "1m")
    assert (code, out) == (2, "") and "--max-model-len (1000000) is greater than what the model was made for" in err
    assert not (tmp_path / "programs").exists()
