"""Kernels called through jax-triton equal those of our calls: the same PTX, and the same program on an H200.

Needs jax-triton 0.4 and Triton 3.7, which `make gpu-aot` installs separately.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import pytest

pytest.importorskip("jax_triton", exc_type=ImportError)
pytest.importorskip("jax_cuda13_plugin")

from jax_triton import triton_lib

from pallas_kernels import Choice, triton_bridge
from tests.gpu import aot, resources
from tests.gpu.test_steps import MODELS

EVERY = 9  # of the calls in `resources`: at least one per kernel


def ptx(name: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Lower a call for an H200; return the PTX of each kernel by name."""
    found: dict[str, str] = {}
    own, theirs = triton_bridge.compile_kernel, triton_lib.compile_ttir_inplace

    def note_own(kernel: Any, *given: Any) -> Any:
        compiled = own(kernel, *given)
        found[kernel.__name__] = compiled.asm["ptx"]
        return compiled

    def note_theirs(*given: Any) -> Any:
        compiled = theirs(*given)
        found[compiled.name] = compiled.binary
        return compiled

    call, arrays = resources.calls()[name]
    with monkeypatch.context() as patch:
        patch.setattr(triton_bridge, "compile_kernel", note_own)
        patch.setattr(triton_lib, "compile_ttir_inplace", note_theirs)
        jax.jit(partial(call, Choice("triton", 90))).trace(*arrays).lower(lowering_platforms=("cuda",))
    return found


@pytest.fixture
def by_ourselves(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that switches to our calls."""
    return lambda: monkeypatch.setattr(triton_bridge, "find_jax_triton", lambda: None)


def test_the_ptx_is_the_same_and_has_no_lines_for_a_debugger(monkeypatch, by_ourselves):
    further = ("256 tokens, gpt", "sample of 1 rows of 32000, filtered", "sample of 1 rows of 32000, greedy")
    wanted = (name for name in resources.calls() if any(part in name for part in further))
    names = dict.fromkeys([*list(resources.calls())[::EVERY], *wanted])
    theirs = {name: ptx(name, monkeypatch) for name in names}
    kernels = {kernel for found in theirs.values() for kernel in found}
    assert {
        "attend",
        "attend_piece",
        "combine",
        "rotate_and_store",
        "multiply",
        "multiply_fused",
        "survey",
        "finish",
    } <= kernels
    assert {"plan", "multiply_up", "multiply_down", "measure", "frame", "fill", "cut", "pick", "settle"} <= kernels
    by_ourselves()
    assert theirs == {name: ptx(name, monkeypatch) for name in names}
    assert not any(mark in text for found in theirs.values() for text in found.values() for mark in (".loc", ".debug"))


def test_a_step_is_the_same_graph(by_ourselves):
    config = MODELS["qwen2.5-0.5b"] | {"num_hidden_layers": 2}
    theirs = aot.compile_step(config, rows=16)
    by_ourselves()
    own = aot.compile_step(config, rows=16)
    assert theirs.thunks == own.thunks and theirs.outside == own.outside == {"kCommandBuffer": 1}
    assert theirs.temporary_bytes == own.temporary_bytes and theirs.aliased_bytes == own.aliased_bytes
