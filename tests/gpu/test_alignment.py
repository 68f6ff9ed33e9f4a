"""Operands of Triton calls are aligned at a GPU's default sizes, and a misaligned layout is detected.

Also, the ceilings of `make gpu-check` read their arrays once per turn. Every other program that `make gpu-aot` compiles
is checked in `aot.read`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

pytest.importorskip("triton")
pytest.importorskip("jax_cuda13_plugin")

from benchmarks.shapes import SHAPES
from jaxllm.families.families import read_spec
from jaxllm.runner import batch, step
from jaxllm.runner.batch import Shape
from jaxllm.sampling.sampler import ROW_WIDTH, Variant
from jaxllm.setup.kv_cache import Geometry
from tests.gpu import aot, buffers
from tests.gpu_check import machine

SLOTS, TOKENS = 256, 8192  # of an engine with default options on a GPU
GEOMETRY = Geometry(num_slots=SLOTS, num_blocks=8192, block_size=16, max_model_len=8448)
DEFAULT = [*batch.decode_shapes(SLOTS, 2, "gpu"), *batch.ragged_shapes(TOKENS, SLOTS, 16, ROW_WIDTH, "gpu")]
FEW = (64, 8192)  # tokens of the shapes that are always compiled


def compiled(shape: Shape, variant: Variant | None) -> aot.Program:
    """Compile a step of one layer of the 8B shape: all layers read the same fields of the buffer."""
    spec, _ = read_spec(dict(SHAPES["llama-3.1-8b"] | {"num_hidden_layers": 1}))
    options = {**step.compiler_options("gpu"), **aot.FIXED}
    return aot.compile_shape(spec, GEOMETRY, shape, 1, variant, "bfloat16", None, True, True, options)


@pytest.mark.parametrize(
    "shape",
    [pytest.param(shape, marks=[pytest.mark.slow] * (shape.tokens not in FEW)) for shape in DEFAULT],
    ids=str,
)
@pytest.mark.parametrize("variant", [None, Variant.RANDOM, pytest.param(Variant.FULL, marks=pytest.mark.slow)])
def test_operands_begin_where_calls_allow_at_default_sizes(shape, variant):
    assert compiled(shape, variant).text.count('custom_call_target="triton_kernel_call_ffi"') >= 3


@pytest.mark.parametrize("variant", [None, Variant.RANDOM])
def test_a_field_that_is_not_aligned_is_seen(monkeypatch, variant):
    """In the old layout a single int32 precedes all other fields."""
    monkeypatch.setattr(batch, "ALIGNMENT", 1)
    for kept in (batch.fields, batch.buffer_size):
        kept.cache_clear()
    try:
        with pytest.raises(aot.Misaligned, match="in dynamic-slice-fusion") as found:
            compiled(DEFAULT[-1], variant)
    finally:
        for kept in (batch.fields, batch.buffer_size):
            kept.cache_clear()
    assert [line.split(" of ")[0] for line in str(found.value).split("; ")] == ["operand 4", "operand 5", "operand 6"]


def program(ceiling: machine.Ceiling) -> str:
    """Compile a ceiling's program for an H200, of its full size."""
    replicated = aot.layout().sharding()
    shapes = jax.eval_shape(ceiling.arrays)
    arrays = tuple(jax.ShapeDtypeStruct(one.shape, one.dtype, sharding=replicated) for one in shapes)
    turn = jax.ShapeDtypeStruct((), jnp.float32, sharding=replicated)
    return machine.program(ceiling, arrays, turn).compile().as_text()


@pytest.mark.parametrize("name", ["read", "copy", "product"])
def test_a_ceiling_reads_its_array_once_in_a_turn(name):
    ceiling = machine.ceilings(is_dry=False)[name]
    assert machine.times_read(program(ceiling)) == ceiling.turns == 1


def test_ceilings_that_fold_are_seen():
    """The former ceilings: the maximum of the array and a number, and a chain of additions, eight turns each."""
    right = machine.ceilings(is_dry=False)["read"]

    def largest(turn, array):
        return [jnp.max(array + (turn + number).astype(array.dtype)) for number in range(8)]

    def chain(turn, array):
        for number in range(8):
            array = array + (turn + number).astype(array.dtype)
        return array

    for folding in (largest, chain):
        assert machine.times_read(program(right._replace(run=folding, turns=8))) < 8


OFFSETS = """
%fused (p0: s32[64], p1: bf16[8,128]) -> f32[4] {
  %p0 = s32[64]{0} parameter(0)
  %p1 = bf16[8,128]{1,0} parameter(1)
  %slice.1 = s32[8]{0} slice(%p0), slice={[8:16]}
  %bitcast.1 = s32[2,4]{1,0} bitcast(%slice.1)
  %slice.2 = s32[1,4]{1,0} slice(%bitcast.1), slice={[1:2], [0:4]}
  %slice.3 = bf16[2,128]{1,0} slice(%p1), slice={[3:5], [0:128]}
  ROOT %call.1 = f32[4]{0} custom-call(%slice.2, /*index=1*/%slice.3, %p0), custom_call_target="triton_kernel_call_ffi"
}

ENTRY %main (a: s32[80], b: bf16[128,8]) -> f32[4] {
  %a = s32[80]{0} parameter(0)
  %b = bf16[8,128]{1,0} parameter(1)
  %moved = s32[64]{0} slice(%a), slice={[4:68]}
  ROOT %fusion = f32[4]{0} fusion(%moved, %b), kind=kCustom, calls=%fused
}
"""


def test_offsets_are_added_up_through_views_and_computations():
    assert not buffers.misaligned(OFFSETS)
    assert buffers.misaligned(OFFSETS.replace("{[8:16]}", "{[9:17]}")) == [
        "operand 0 of call.1 in fused begins at byte 68 of its buffer"
    ]
    moved = buffers.misaligned(OFFSETS.replace("{[4:68]}", "{[1:65]}"))
    assert moved == [f"operand {number} of call.1 in fused begins at byte {place} of its buffer"
                     for number, place in ((0, 52), (2, 4))]  # fmt: skip
    turned = OFFSETS.replace("%p1 = bf16[8,128]{1,0}", "%p1 = bf16[8,128]{0,1}")
    assert buffers.misaligned(turned) == ["operand 1 of call.1 in fused begins at byte 6 of its buffer"]
    dynamic = OFFSETS.replace("slice(%p0), slice={[8:16]}", "dynamic-slice(%p0, %at), dynamic_slice_sizes={8}")
    assert "only the device knows" in buffers.misaligned(dynamic)[0]
