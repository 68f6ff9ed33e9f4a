"""The division of memory, refused settings, and the flags that messages name, with made-up numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jaxllm.errors import UserError
from jaxllm.setup.memory_plan import Asked, Device, Need, Windowed, coarse, describe, share_out

GIB = 2**30
# An 8B model in bfloat16 on a GPU of 80 GB, 92 % of it usable.
GPU = Device(free=int(73.6 * GIB), share=0.97)
NEED = Need(
    weights=15 * GIB,
    temporaries=8 * GIB,
    is_measured=False,
    slots=GIB // 4,
    block=2 * 2**20,
    block_size=16,
    num_slots=256,
    model_len=131072,
)
LAPTOP = Device(free=12 * GIB, share=0.25, ceiling=2 * GIB, knob="kv_cache_memory_bytes")


def test_blocks_get_what_weights_and_programs_leave() -> None:
    plan = share_out(GPU, NEED, Asked())
    room = int(73.6 * GIB) - (15 + 8) * GIB - GIB // 4
    assert plan.num_blocks == coarse(int(0.97 * room) // (2 * 2**20)) == 24576
    assert plan.kv_bytes == 48 * GIB and plan.max_model_len == 131072
    few = share_out(GPU, replace(NEED, num_slots=2), Asked())
    assert few.num_blocks == 2 * 131072 // 16, "no more than all requests could use"


def test_a_length_that_nobody_asked_for_is_what_fits() -> None:
    small = replace(GPU, free=26 * GIB)
    plan = share_out(small, NEED, Asked())
    blocks = int(0.97 * (26 - 23.25) * GIB) // (2 * 2**20)
    assert plan.num_blocks == coarse(blocks) == 1280 and plan.max_model_len == 1280 * 16
    assert "cut from 131072" in describe(plan, "a GPU", "")
    assert share_out(GPU, NEED, Asked(num_blocks=100)).max_model_len == 1600
    assert share_out(GPU, NEED, Asked(num_blocks=100, max_model_len=1600)).max_model_len == 1600
    assert share_out(small, NEED, Asked(max_model_len=20480)).max_model_len == 20480


def test_a_pool_is_not_rounded_below_the_length_that_was_asked_for() -> None:
    plan = share_out(replace(GPU, free=26 * GIB), NEED, Asked(max_model_len=1350 * 16))
    assert plan.num_blocks == 1350 > coarse(1350)


# A model of 48 layers, five of six with a window of 1,024 tokens.
SIX = replace(NEED, block=6 * 2**20, model_len=8192)
WINDOWED = replace(SIX, block=2**20, windowed=Windowed(window=1024, block=5 * 2**20, most=66, chunks=512))


@pytest.mark.parametrize("length", [2048, 8192, 131072])
@pytest.mark.parametrize("num_slots", [4, 256])
def test_windowed_layers_get_blocks_for_as_many_requests(length: int, num_slots: int) -> None:
    need = replace(WINDOWED, model_len=length, num_slots=num_slots)
    plan = share_out(GPU, need, Asked(kv_bytes=30 * GIB))
    one = share_out(GPU, replace(SIX, model_len=length, num_slots=num_slots), Asked(kv_bytes=30 * GIB))
    assert plan.kv_bytes == plan.num_blocks * 2**20 + (plan.num_window_blocks + 1) * 5 * 2**20 <= 30 * GIB
    assert plan.num_blocks >= one.num_blocks and plan.num_window_blocks <= plan.num_blocks
    expected = min(length, 2048)
    requests = min(num_slots, plan.num_blocks * 16 / expected)
    assert plan.num_window_blocks >= min(plan.num_blocks, requests * 66)


def test_five_windows_of_six_hold_more_tokens_in_the_same_memory() -> None:
    before, after = (share_out(GPU, need, Asked(kv_bytes=30 * GIB)) for need in (SIX, WINDOWED))
    assert after.num_blocks >= 1.6 * before.num_blocks
    assert after.num_window_blocks >= 0.85 * before.num_blocks, "short requests have nearly as much room as before"
    lines = describe(after, "a GPU", "").splitlines()
    assert f"and {after.num_window_blocks} of windowed layers" in lines[5]
    asked = share_out(GPU, WINDOWED, Asked(num_blocks=9000))
    assert asked.num_blocks == 9000 and asked.kv_bytes < 9000 * 6 * 2**20


def test_a_laptop_keeps_most_of_its_memory() -> None:
    need = replace(NEED, weights=2 * GIB, temporaries=GIB, num_slots=64, model_len=4096)
    assert share_out(LAPTOP, need, Asked()).kv_bytes == 2 * GIB
    assert share_out(replace(LAPTOP, free=7 * GIB), need, Asked()).kv_bytes == 480 * 2 * 2**20


def test_prepared_blocks_are_taken_if_they_fit() -> None:
    assert share_out(GPU, NEED, Asked(prepared_blocks=17)).num_blocks == 17
    assert share_out(GPU, NEED, Asked(prepared_blocks=10**6)).num_blocks == 24576


@pytest.mark.parametrize(
    ("device", "need", "asked", "parameter", "words"),
    [
        (replace(GPU, free=14 * GIB), NEED, Asked(), "model", ["1.0 GiB more", "tensor_parallel_size", "dtype"]),
        (
            replace(GPU, free=26 * GIB),
            NEED,
            Asked(max_model_len=131072),
            "max_model_len",
            ["needs 16.0 GiB", "room for 2.7 GiB", "Lower max_model_len to 21840", "gpu_memory_utilization"],
        ),
        (replace(GPU, free=16 * GIB), NEED, Asked(), "gpu_memory_utilization", ["15.0 GiB", "max_num_batched_tokens"]),
        (LAPTOP, replace(NEED, weights=13 * GIB), Asked(), "model", ["1.0 GiB more than the 12.0 GiB"]),
        (
            GPU,
            NEED,
            Asked(kv_bytes=GIB, max_model_len=131072),
            "max_model_len",
            ["Lower max_model_len to 8192", "raise kv_cache_memory_bytes"],
        ),
        (
            GPU,
            NEED,
            Asked(num_blocks=3, max_model_len=512),
            "max_model_len",
            ["needs 64.0 MiB", "room for 6.0 MiB", "Lower max_model_len to 48", "raise num_kv_blocks to 32"],
        ),
        (
            GPU,
            NEED,
            Asked(kv_bytes=1),
            "kv_cache_memory_bytes",
            ["Nothing is left", "Raise kv_cache_memory_bytes"],
        ),
        (GPU, NEED, Asked(kv_bytes=70 * GIB), "kv_cache_memory_bytes", ["70.0 GiB", "Lower kv_cache_memory_bytes"]),
        (GPU, NEED, Asked(num_blocks=35 * 1024), "num_kv_blocks", ["70.0 GiB", "58.3 GiB", "Lower num_kv_blocks"]),
        (replace(GPU, free=None), NEED, Asked(), "kv_cache_memory_bytes", ["set kv_cache_memory_bytes"]),
    ],
)
def test_what_does_not_fit_is_refused_by_name(
    device: Device, need: Need, asked: Asked, parameter: str, words: list[str]
) -> None:
    with pytest.raises(UserError) as refused:
        share_out(device, need, asked)
    assert refused.value.parameter == parameter
    for word in words:
        assert word in str(refused.value), refused.value
    assert "\n" not in str(refused.value)


def test_a_guess_refuses_nothing_that_was_asked_for() -> None:
    asked = Asked(num_blocks=29000)  # 56.6 GiB: too much with 8 GiB of temporaries, not without
    assert share_out(GPU, NEED, asked).num_blocks == 29000
    with pytest.raises(UserError, match="Lower num_kv_blocks"):
        share_out(GPU, replace(NEED, is_measured=True), asked)
    assert share_out(replace(GPU, free=None), NEED, Asked(num_blocks=9)).num_blocks == 9


def test_the_table() -> None:
    lines = describe(share_out(GPU, NEED, Asked()), "each of 2 devices (H)", "1.0 GiB in use").splitlines()
    assert lines[0] == "memory of each of 2 devices (H):"
    assert [line.split()[0] for line in lines[1:]] == ["weights", "temporaries", "slots", "KV", "left", "host"]
    assert "15.0 GiB" in lines[1] and "at most" in lines[2]
    assert "24576 of 16 tokens: 3.00 requests of max_model_len 131072" in lines[4]
    assert "2.3 GiB" in lines[5] and "of 73.6 GiB" in lines[5]
