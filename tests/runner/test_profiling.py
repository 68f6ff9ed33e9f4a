"""Traces of an engine's steps, and the division of their time by `bench explain`."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxllm import LLM, SamplingParams, UserError
from jaxllm.bench.explain import DEVICE, explain, parts_of, programs_in, read_trace, report
from jaxllm.runner.profiling import Profile, profiled
from tests.support import paths
from tests.support.sizes import SLOTS, flags

HALVES = ("ragged_64_forward", "decode_8_forward", "sample_8_full")
SPANS = {"plan", "pack", "dispatch", "wait", "commit", "output"}  # of a step
STORIES = str(paths.STORIES)
PROMPTS = ["Once upon a time", "Tom had a dog"]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with LLM(STORIES, **SLOTS) as llm:
        yield llm
        profile = llm.engine.start_profile(tmp_path_factory.mktemp("last"))
    assert profile.path is not None and profile.path.is_file()  # closing an engine ends its trace


def generate(llm: LLM, num_tokens: int) -> None:
    llm.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True), use_tqdm=False)


@pytest.mark.ci
def test_a_trace_holds_the_hosts_spans_and_the_models_parts(
    llm: LLM, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with profiled(llm.engine, str(tmp_path / "new"), 5):
        generate(llm, 12)
    (path,) = tmp_path.glob("new/plugins/profile/*/perfetto_trace.json.gz")
    assert str(path) in capsys.readouterr().err
    events = read_trace(path)
    count = Counter(event["name"] for event in events)
    assert count["step"] == 5  # of more than ten
    assert set(count) >= SPANS
    names = programs_in(events)
    assert names <= {*HALVES, "patch", "patch_extras"} and names >= {"decode_8_forward", "sample_8_full"}

    texts = llm.engine.runner.program_texts(names)
    layers = llm.engine.runner.setup.spec.num_layers
    text = texts["decode_8_forward"] + texts["sample_8_full"]
    for layer in range(layers):
        # A product has a form for CPUs and one for other devices, and the program contains the CPU's, or it is in C++.
        # JAX traces these functions once for all layers.
        product = r"(jit\(\w+\)/)*(cond/branch_0_fun/)?(dot_general|ffi_call)"
        for part in ("attention/cache_write", "attention/attend", f"attention/{product}", f"mlp/{product}"):
            assert re.search(f"/layer_{layer:02}/{part}", text)
    assert "/sampling/" in text and "/logits/" in text and "/embedding/" in text

    explanation = explain(events, texts)
    assert explanation.num_steps == 5
    whole = explanation.step_ms
    assert math.isclose(sum((*explanation.device_ms.values(), *explanation.idle_ms.values())), whole, rel_tol=1e-6)
    assert math.isclose(sum(explanation.host_ms.values()), whole, rel_tol=1e-6)
    assert min(explanation.device_ms[part] for part in ("matmul", "attention", "sampling", "cache write")) > 0.0
    assert explanation.unknown_ms == 0.0  # every operation is found in its program
    assert explain(events, {}).unknown_ms == pytest.approx(sum(explanation.device_ms.values()))
    assert "matmul" in report(explanation)


@pytest.mark.ci
def test_generate_writes_a_trace(run_jaxllm: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    code, out, err = run_jaxllm(
        "generate", PROMPTS[0], "--max-tokens", "12", "--ignore-eos", "--profile-steps", "3",
        "--profile", str(tmp_path), "--model", STORIES, *flags(SLOTS),
    )  # fmt: skip
    (path,) = tmp_path.glob("plugins/profile/*/perfetto_trace.json.gz")
    assert code == 0 and out and f"trace: {path} (open it at" in err
    events = read_trace(path)
    count = Counter(event["name"] for event in events)
    assert count["step"] == 3 and set(count) >= SPANS and "decode_8_forward" in programs_in(events)


def test_one_trace_at_a_time_and_none_without_steps(llm: LLM, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="num_steps must be at least 1"):
        llm.engine.start_profile(tmp_path, 0)
    profile = llm.engine.start_profile(tmp_path)
    with pytest.raises(UserError, match="a trace is running already"):
        Profile(tmp_path)
    assert profile.path is None
    assert profile.stop() == profile.stop()  # stops before its steps are complete
    generate(llm, 2)


HLO = """
HloModule jit_decode_1_greedy, is_scheduled=true

%fused (p: f32[2,2]) -> f32[2,2] {
  %dot.9 = f32[2,2]{1,0} dot(%p, %p), metadata={op_name="jit(s)/layer_00/mlp/dot_general"}
  ROOT %tanh.1 = f32[2,2]{1,0} tanh(%dot.9), metadata={op_name="jit(s)/layer_00/mlp/tanh"}
}

ENTRY %main.1 (x: f32[2,2]) -> f32[2,2] {
  %up = f32[2,2]{1,0} fusion(%x), kind=kCustom, calls=%fused, metadata={op_name="jit(s)/layer_00/mlp/tanh"}
  %qk.2 = f32[2,2]{1,0} dot(%up, %up), metadata={op_name="jit(s)/layer_00/attention/attend/dot_general"}
  %top = (f32[2,1]{1,0}, s32[2,1]{1,0}) custom-call(%qk.2), custom_call_target="TopK", metadata={op_name="jit(s)/sampling/top_k"}
  %gemm = (f32[2,2]{1,0}, s8[4]{0}) custom-call(%qk.2), custom_call_target="__cublas$gemm", metadata={op_name="jit(s)/logits/dot_general"}
  %sum.3 = f32[2,2]{1,0} all-reduce(%qk.2), to_apply=%add, metadata={op_name="jit(s)/layer_00/mlp/psum"}
  ROOT %copy.7 = f32[2,2]{1,0} copy(%qk.2)
}
"""  # noqa: E501


def test_an_operations_part_is_read_from_its_program() -> None:
    parts = parts_of(HLO)
    assert {name: parts[name] for name in ("up", "qk.2", "top", "gemm", "sum.3", "copy.7")} == {
        "up": "matmul",  # a product fused with other operations
        "qk.2": "attention",
        "top": "sampling",
        "gemm": "matmul",
        "sum.3": "collectives",
        "copy.7": "other on the device",
    }


def event(name: str, start: float, end: float, thread: int, op: str | None = None) -> dict[str, Any]:
    arguments = (
        {} if op is None else {"hlo_module": "jit_decode_1_greedy", "hlo_op": op, "run_id": str(int(start) // 100)}
    )
    return {"name": name, "ph": "X", "pid": 1, "tid": thread, "ts": start, "dur": end - start, "args": arguments}


def test_every_moment_is_counted_once() -> None:
    steps = [
        *(event("step", 0, 80, 1), event("plan", 0, 10, 1), event("dispatch", 10, 15, 1), event("wait", 20, 70, 1)),
        *(event("step", 100, 200, 1), event("plan", 100, 130, 1), event("wait", 130, 190, 1)),
        event("plan", 0, 200, 9),  # another thread
        *(event("up", 12, 40, 2, "up"), event("qk.2", 30, 40, 3, "qk.2")),  # concurrent from 30 to 40
        *(event("top", 110, 150, 2, "top"), event("inner", 120, 130, 2, "copy.7")),  # nested
    ]
    found = explain(steps, {"decode_1_greedy": HLO})
    assert found.num_steps == 2 and found.step_ms == pytest.approx(0.1)
    assert found.programs == {"decode_1_greedy": 2} and found.unknown_ms == 0.0
    assert found.device_ms == pytest.approx(
        dict.fromkeys(DEVICE, 0.0)
        | {"matmul": 0.0115, "attention": 0.0025, "sampling": 0.015, "other on the device": 0.005}
    )
    nothing = {"pack": 0.0, "commit": 0.0, "output": 0.0}
    # plan: 0 to 10 and 100 to 110; other: 70 to 80 and 190 to 200
    assert found.idle_ms == pytest.approx(
        nothing | {"plan": 0.01, "dispatch": 0.001, "other": 0.01, "between steps": 0.01, "wait": 0.035}
    )
    assert found.host_ms == pytest.approx(
        nothing | {"plan": 0.02, "dispatch": 0.0025, "other": 0.0125, "between steps": 0.01, "wait": 0.055}
    )
    with pytest.raises(ValueError, match="no step"):
        explain([event("plan", 0, 1, 1)], {})
