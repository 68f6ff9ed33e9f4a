"""The Triton kernels compiled for A100, H200 and B200: nothing spills, prompts use wgmma on Hopper, a table holds it.

`python -m tests.gpu.resources --write` makes the table again, with the versions that `make gpu-aot` installs.
"""

from __future__ import annotations

import json

import pytest

pytest.importorskip("triton")

from pallas_kernels import tuning
from pallas_kernels.tuning import Prefill, Tuning
from tests.gpu import resources


@pytest.fixture(scope="module")
def found():
    return resources.everything()


def test_no_kernel_spills_registers(found):
    assert not [name for name, kernel in found.items() if kernel["stack"]]
    most = {80: 163, 90: 227, 100: 227}  # KiB of shared memory that a program can have
    assert not [name for name, kernel in found.items() if kernel["shared"] > most[int(name[3:].split()[0])] << 10]


def test_prompts_are_multiplied_with_wgmma_on_hopper(found):
    prompts = {
        name: kernel["wgmma"] for name, kernel in found.items() if name.startswith("sm_90 attend: paged_prefill")
    }
    narrow = [has for name, has in prompts.items() if "float32" not in name]  # there is no wgmma of whole float32
    assert len(narrow) == 10 and all(narrow)


def test_resources_are_those_of_the_table(found):
    """Registers may change with a version of the assembler, a little; a kernel that needs more is seen."""
    table = json.loads(resources.TABLE.read_text())
    assert found.keys() == table.keys()
    for name, kernel in found.items():
        assert abs(kernel["registers"] - table[name]["registers"]) <= 8, name
        assert {key: kernel[key] for key in ("stack", "shared", "wgmma")} == {
            key: table[name][key] for key in ("stack", "shared", "wgmma")
        }, name


def test_a_tile_that_spills_is_seen(monkeypatch):
    monkeypatch.setattr(tuning, "of_prefill", lambda *_: Prefill(128, 128, Tuning(4, 3)))
    name = "paged_prefill, 8B, bfloat16 cache"
    measured = resources.measure(*resources.calls()[name], 90)
    assert measured["attend"]["stack"] > 0
