"""FlashInfer's decode kernel in the engine's compiled H200 steps: `make flashinfer`, which needs nvcc.

Asserts the structure, and that XLA's call passes the kernel's arguments. Nothing runs, so no results are compared.
"""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("triton")
pytest.importorskip("jax_cuda13_plugin")

from benchmarks.shapes import SHAPES
from pallas_kernels import Site
from pallas_kernels.attention.arguments import AttentionArgs
from pallas_kernels.native import flashinfer
from tests.gpu import aot
from tests.gpu.test_steps import DECODE_MIB, KERNELS_A_LAYER, KERNELS_BESIDE, MIB

SITE = Site("gpu", aot.CAPABILITY, "bfloat16", "bfloat16", heads=32, kv_heads=8, head_size=128)
pytestmark = pytest.mark.slow
LLAMA = SHAPES["llama-3.1-8b"] | {"num_hidden_layers": 4}


def calls(text: str) -> list[str]:
    return re.findall(r"= (.*) custom-call\(.*custom_call_target=\"jaxllm_xqa-", text)


@pytest.mark.parametrize("devices", [1, 4])
@pytest.mark.parametrize("rows", [2, 16, 64])
def test_a_decode_step_is_one_graph_that_copies_nothing(rows: int, devices: int) -> None:
    program = aot.compile_step(LLAMA, rows=rows, devices=devices, kernels={"paged_decode": "flashinfer"})
    print(f"{program.kernels} kernels, {program.temporary_bytes / MIB:.1f} MiB, {calls(program.text)[0]}")
    most = KERNELS_A_LAYER * 4 + KERNELS_BESIDE if devices == 1 else None
    assert not program.violations(True, (DECODE_MIB[rows] if devices == 1 else 100) * MIB, most)
    assert len(calls(program.text)) == 4


def test_a_window_and_heads_of_another_size_stay_in_the_graph() -> None:
    window = {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 1024}
    config = SHAPES["llama-3.1-8b"] | window | {"num_hidden_layers": 2, "num_attention_heads": 64, "head_dim": 64}
    config.pop("rope_scaling", None)
    program = aot.compile_step(config, rows=16, dtype="float16", kernels={"paged_decode": "flashinfer"})
    assert not program.violations(True, DECODE_MIB[16] * MIB)
    assert program.text.count("window = 1024 : i32") == len(calls(program.text)) == 2


def test_a_ragged_step_decodes_with_it_too() -> None:
    program = aot.compile_step(LLAMA, tokens=512, kernels={"paged_decode": "flashinfer"})
    assert not program.violations(False, 260 * MIB) and len(calls(program.text)) == 4


@pytest.mark.parametrize(("rows", "pieces"), [(1, 16), (2, 8), (5, 3), (16, 1), (300, 1)])
def test_the_workspace_has_room_for_what_the_kernel_puts_there(rows: int, pieces: int) -> None:
    """By FlashInfer's layout, computed here: counters; largest scores and sums of 16 heads; then 4 heads of 128."""
    text = lowered(rows, 256).as_text()
    (size,) = map(int, re.findall(r"tensor<(\d+)xui8>", text.split("custom_call")[1]))
    tiles, statistics, sums = rows * 8, 2 * 16 * 4, 4 * 128 * 2
    counters = -(-tiles * 4 // 128) * 128
    start = -(-tiles * pieces * statistics // sums) * sums  # of the sums, after the counters
    if pieces == 1:
        assert size == 0
    else:
        assert counters + start + tiles * pieces * sums <= size < 1.3 * (counters + tiles * pieces * sums) + 4096


@pytest.mark.parametrize("is_wrong", [False, True])
def test_the_call_gives_the_kernel_what_it_takes(is_wrong: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run without a GPU, XLA decodes all arguments, and then fails only for want of a GPU's stream."""
    name, library = flashinfer.load_library(SITE)
    jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(library.jaxllm_xqa), platform="cpu")
    if is_wrong:  # a setting of another type
        monkeypatch.setattr(np, "float32", np.float64)
    with pytest.raises(jax.errors.JaxRuntimeError, match="platform stream") as raised:
        lowered(2, 4).compile()(*arrays(2, 4))
    (bad,) = re.findall(r"bad operands at: ([\d, ]*)", str(raised.value))
    assert (bad == "0") is not is_wrong


def arrays(rows: int, blocks: int) -> tuple[jax.Array, ...]:
    q, cache = jnp.zeros((rows, 32, 128), jnp.bfloat16), jnp.zeros((blocks, 8, 16, 128), jnp.bfloat16)
    return q, cache, cache, jnp.zeros((rows, blocks), jnp.int32), jnp.zeros(rows, jnp.int32)


def lowered(rows: int, blocks: int) -> Any:
    def attend(q: Any, k: Any, v: Any, tables: Any, lengths: Any) -> Any:
        args = AttentionArgs(k_cache=k, v_cache=v, tables=tables, scale=0.1)
        return flashinfer.paged_decode(q, lengths, args, capability=90)

    return jax.jit(attend).lower(*arrays(rows, blocks))
