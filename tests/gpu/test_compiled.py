"""The Triton kernels compiled for H200, with ALL=1 for A100 and B200: nothing spills, and Hopper's wgmma is used."""

from __future__ import annotations

import re
from collections import Counter
from functools import partial

import jax
import pytest

pytest.importorskip("triton")

from pallas_kernels import Choice, triton_bridge, tuning
from pallas_kernels.tuning import Prefill, Tuning
from tests.gpu import resources


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(
            capability, marks=[pytest.mark.xdist_group(f"sm_{capability}"), *[pytest.mark.slow] * (capability != 90)]
        )
        for capability in resources.CAPABILITIES
    ],
)
def capability(request):
    return request.param


@pytest.fixture(scope="module")
def found(capability):
    return resources.everything(capability)


def test_no_kernel_spills_registers(found, capability):
    assert not [name for name, kernel in found.items() if kernel["stack"]]
    most = {80: 163, 90: 227, 100: 227}  # KiB of shared memory per program
    assert not [name for name, kernel in found.items() if kernel["shared"] > most[capability] << 10]


def test_prompts_are_multiplied_with_wgmma_on_hopper_alone(found, capability):
    prompts = {name: kernel["wgmma"] for name, kernel in found.items() if "attend: paged_prefill" in name}
    narrow = [has for name, has in prompts.items() if "float32" not in name]  # wgmma has no full float32
    assert len(narrow) == (11 if capability >= 89 else 8)
    assert all(narrow) if capability == 90 else not any(narrow)


def test_tiles_of_latents_are_multiplied_with_wgmma_on_hopper_alone(found, capability):
    """With 64 heads of tokens and 16-bit numbers, for prompts and for one token of V3."""
    tiles = [
        kernel["wgmma"]
        for name, kernel in found.items()
        if re.search("attend_latent: paged_(prefill, V|decode of 1 rows, V3,).*bfloat16", name)
    ]
    assert tiles == [capability == 90] * 4


def test_experts_are_multiplied_with_wgmma_on_hopper(found, capability):
    """Also with few assignments: a weight's rows are the first matrix, so tiles may be narrow."""
    products = [kernel["wgmma"] for name, kernel in found.items() if "fused_experts" in name and "multiply" in name]
    assert len(products) == 2 * 3 * len(resources.EXPERTS)
    assert all(products) if capability == 90 else not any(products)


def loads(width: int, tokens: int, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Return the kinds of loads in products with experts: of 16 bytes into shared memory, or of single numbers."""
    monkeypatch.setitem(resources.EXPERTS, "these", (32, 4, width, width, True))
    monkeypatch.setattr(resources, "read", lambda compiled: compiled.asm["ptx"])
    kernels = resources.measure(*resources.calls()[f"fused_experts of {tokens} tokens, these"], 90)
    text = kernels["multiply_up"] + kernels["multiply_down"]
    copied = re.findall(r"cp\.async\.\w+\.shared\.global [^;]*?\], (0x\w+)", text)
    return {f"copy of {int(size, 16)}" for size in copied} | set(re.findall(r"ld\.global\.[\w.:]*b\d+", text))


@pytest.mark.parametrize("tokens", [16, 2048])
def test_weights_of_experts_are_read_16_bytes_at_once(tokens, monkeypatch):
    """Other loads are of tiles, assignments and biases. Rows of 2,884 numbers are not aligned."""
    assert loads(2880, tokens, monkeypatch) == {"copy of 16", "ld.global.b32", "ld.global.b16"}
    assert "copy of 16" not in loads(2884, tokens, monkeypatch)


def asynchronous_loads(call, arrays, capability, monkeypatch) -> Counter[int]:
    """Count the loads into shared memory in the only kernel of a call, by bytes."""
    found = []
    compile_kernel = triton_bridge.compile_kernel
    with monkeypatch.context() as patched:
        patched.setattr(
            triton_bridge, "compile_kernel", lambda *given: found.append(compile_kernel(*given)) or found[-1]
        )
        jax.eval_shape(partial(call, Choice("triton", capability)), *arrays)
    pattern = r"cp\.async\.c[ag]\.shared\.global \[[^]]*\], \[[^]]*\], (0x\w+)"
    return Counter(int(size, 16) for size in re.findall(pattern, found[0].asm["ptx"]))


def test_weights_of_few_tokens_are_loaded_16_bytes_at_once(capability, monkeypatch):
    """And tokens; of a gain, which is small, each stage may load fewer."""
    for name, call in resources.calls().items():
        if name.startswith("fused_linear") and "8B" in name:
            sizes = asynchronous_loads(*call, capability, monkeypatch)
            has_gain = "qkv" in name or "up" in name
            assert sizes[16] >= 20 and sizes.total() - sizes[16] <= 6 * has_gain, name
    call, (x, weight) = resources.calls()["fused_linear of 16 tokens, 8B out"]
    odd = tuple(jax.ShapeDtypeStruct((len(one), one.shape[1] - 1), one.dtype) for one in (x, weight))
    assert not asynchronous_loads(partial(call.func, set()), odd, capability, monkeypatch)[16], "would be seen"


def test_a_tile_that_spills_is_seen(monkeypatch):
    monkeypatch.setattr(tuning, "of_prefill", lambda *_: Prefill(128, 128, Tuning(4, 3)))
    name = "paged_prefill, 8B, bfloat16 cache"
    measured = resources.measure(*resources.calls()[name], 90)
    assert measured["attend"]["stack"] > 0
