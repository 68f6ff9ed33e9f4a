"""The machine code of the Triton kernels for H200: keys and values are read by wide loads, nothing is serialized."""

from __future__ import annotations

import re

import jax
import numpy as np
import pytest

pytest.importorskip("triton")

from benchmarks.shapes import SHAPES
from jaxllm.families.families import read_spec
from pallas_kernels.tuning import Decode, Tuning
from tests.gpu import measured_steps, resources, sass, step_costs

# On the worker that compiles them for test_compiled, if that runs.
pytestmark = pytest.mark.xdist_group("sm_90")
FEW = r"8B, (bfloat16|float8)|linear of 16|256 tokens, int4|^sample of 1 rows of 32000, filtered"
LEAST_ASKED = 32 << 10  # bytes per multiprocessor, by Little's law: 4.8 TB/s over 132 of them, for 0.9 us
ATTENDS = [name for name in resources.calls() if name.startswith("paged_") and "float32" not in name]
ATTENDS = [name for name in ATTENDS if name not in resources.latent_calls()]
IS_FEW = re.compile(FEW).search


def narrow(one: sass.Launched, loop: sass.Loop) -> list[str]:
    """Return the narrow loads of a loop: keys and values need 16 bytes a thread (8-bit ones 8), others 4."""
    size = np.dtype(one.constants["KEYS"]).itemsize
    least = 16 if size > 1 else 8
    wanted = one.constants["BN"] * (one.constants["C"] + one.constants["V"]) * size
    wide = sum(num_bytes for width, num_bytes in loop.loaded.items() if width >= least)
    found = [f"{wide} bytes in loads of {least} and more, and keys and values have {wanted}"] * (wide != wanted)
    return found + [f"loads of {width}" for width in loop.loaded if width < 4]


def attending(call, arrays) -> tuple[sass.Launched, list[sass.Loop]]:
    (one,) = (one for one in sass.launches(call, arrays, 90) if one.name in ("attend", "attend_piece"))
    one = one._replace(constants=one.constants | {"KEYS": arrays[1].dtype})
    found = sass.loops(sass.instructions(one.compiled), 32 * one.tuning.warps)
    return one, [loop for loop in found if loop.multiplies]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (not IS_FEW(name))) for name in ATTENDS]
)
def test_keys_and_values_come_in_wide_loads(name):
    one, loops = attending(*resources.calls()[name])
    is_prompt = one.name == "attend" and one.constants["WINDOW"] is None
    assert len(loops) == (2 if is_prompt else 1), "without masks, and with them"
    assert not [each for loop in loops for each in narrow(one, loop)]
    if name.startswith("paged_decode") and "bfloat16 cache" in name:
        taken = resources.read(one.compiled)
        held = sass.at_once(int(taken["registers"]), int(taken["shared"]), one.tuning.warps, 90)
        # A program of two stages loads, waits and multiplies; the other programs' loads are then in flight.
        others = (held - 1) * sum(loops[0].loaded.values())
        assert max(held * loops[0].under_way, others) >= LEAST_ASKED


def test_nothing_moves_registers_through_memory():
    found = sass.everything(90, FEW)
    assert found and not [name for name, row in found.items() if row["spills"]]


WGMMA = [name for name in resources.calls() if name.startswith(("paged_prefill", "linear")) and "float32" not in name]


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (not IS_FEW(name))) for name in WGMMA])
def test_wgmma_is_not_serialized(name):
    (one,) = sass.launches(*resources.calls()[name], 90)
    assert "wgmma.mma_async" in one.compiled.asm["ptx"]
    assert not sass.complaints(one.compiled.asm["ptx"])


def test_programs_at_once_are_what_registers_and_shared_memory_leave():
    assert sass.at_once(155, 39424, 4, 90) == 3 and sass.at_once(128, 39424, 4, 90) == 4
    assert sass.at_once(194, 98816, 8, 90) == 1, "registers"
    assert sass.at_once(96, 98816, 8, 90) == 2 and sass.at_once(96, 98816, 8, 80) == 1, "shared memory"
    assert sass.at_once(18, 0, 1, 90) == 32 and sass.at_once(32, 0, 16, 90) == 4, "programs, threads"
    assert sass.waves(512, 3, 90) == pytest.approx(512 / 396)


def test_what_a_step_costs():
    """Programs start in order as places become free; the longest row sets the end."""
    assert step_costs.makespan([3, 1, 1, 1, 4], 2) == 7
    chosen = Decode(keys=64, programs=4, splits=1, least_keys=256, tuning=Tuning(4, 3))
    pieces = measured_steps.pieces
    assert pieces([1024], chosen) == [[256] * 4] and pieces([300, 0], chosen) == [[192, 108], [0]]
    assert step_costs.visits([300, 0, 64], 2, chosen) == [3, 2, 1] * 2
    spec, _ = read_spec(dict(SHAPES["llama-3.1-8b"]))
    even = step_costs.cost(spec, [1024] * 64, 315, step_costs.Attention(1.29, 32))
    assert even.floor == pytest.approx(1e3 * even.num_bytes / measured_steps.READING)
    skewed = step_costs.cost(spec, [32768] + [512] * 63, 315, step_costs.Attention(1.29, 520))
    assert skewed.milliseconds > 2 * skewed.floor, "the longest program is"


def test_narrow_loads_are_seen():
    """Heads of 100 numbers begin at multiples of 8 bytes."""
    call, arrays = resources.calls()["paged_decode of 64 rows, 8B, bfloat16 cache"]
    cut = [jax.ShapeDtypeStruct((*one.shape[:-1], 100), one.dtype) for one in arrays[:3]]
    one, loops = attending(call, (*cut, *arrays[3:]))
    assert loops[0].loaded[8]
    assert narrow(one, loops[0]) == ["0 bytes in loads of 16 and more, and keys and values have 25600"]


def test_serialized_wgmma_is_seen():
    """With a branch on a sum between two products of a group."""
    (one,) = sass.launches(*resources.calls()["paged_prefill, 8B, bfloat16 cache"], 90)
    ptx = one.compiled.asm["ptx"]
    assert not sass.complaints(ptx)
    before, first, second, after = re.split(r"(?=wgmma\.mma_async)", ptx, maxsplit=3)
    (register,) = re.findall(r"mma_async\S*\s*\{(%r\d+)", first)
    end = "// end inline asm"
    first = first.replace(end, f"{end}\nsetp.gt.s32 %p1, {register}, 3;\n@%p1 bra $AROUND;", 1)
    second = second.replace(end, f"{end}\n$AROUND:", 1)
    found = sass.complaints(before + first + second + after)
    assert any("instructions are serialized" in each for each in found)
    assert any("warpgroup.wait is injected" in each for each in found)
