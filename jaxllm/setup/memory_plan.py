"""Divide a device's memory among weights, temporaries of programs, slots and KV blocks."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import Literal

from jaxllm.errors import UserError

EXPECTED = 2048  # tokens of an average request, unless its window is larger
Knob = Literal["gpu_memory_utilization", "kv_cache_memory_bytes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """The memory of one device."""

    free: int | None  # bytes before the engine allocates; None if not reported
    share: float  # of the memory left by weights and programs, for KV blocks
    ceiling: int | None = None  # bytes of KV blocks, unless the user set a number
    knob: Knob = "gpu_memory_utilization"  # the argument that increases KV blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class Windowed:
    """Windowed layers with a separate pool (scheduler/windowed.py)."""

    window: int  # tokens
    block: int  # bytes of one block of all these layers
    most: int  # blocks per request
    chunks: int  # blocks that the prompts of one step fill before freeing them


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """The memory that a model needs on each device, in bytes unless noted."""

    weights: int
    temporaries: int  # of the largest program
    is_measured: bool  # read from programs; else a high estimate
    slots: int  # block tables, tokens and sampling numbers
    block: int  # all layers, or all without windows
    block_size: int  # tokens
    num_slots: int
    model_len: int  # the model's limit
    adapters: int = 0  # on the device, and of steps in flight
    windowed: Windowed | None = None
    moving: int = 0  # to and from the host's tier
    host: int = 0  # this device's part of that tier
    source_len: int = 0  # most tokens of an encoder's input, which has separate blocks

    def window_blocks(self, num_blocks: int) -> int:
        """Return the number of blocks of windowed layers for `num_blocks` of the others.

        They suffice for the requests that the others hold at the expected length and, as far as cheap, for a step's
        prompts. Requests no longer than the window need equally many of both.
        """
        if self.windowed is None:
            return 0
        expected = min(self.model_len, max(EXPECTED, 2 * self.windowed.window))
        requests = min(self.num_slots, -(-num_blocks * self.block_size // expected))
        chunks = min(self.windowed.chunks, max(self.windowed.most, num_blocks // 64))
        return min(num_blocks, requests * self.windowed.most + chunks)

    def kv_bytes(self, num_blocks: int) -> int:
        if self.windowed is None:
            return num_blocks * self.block
        return num_blocks * self.block + (self.window_blocks(num_blocks) + 1) * self.windowed.block

    def blocks_within(self, num_bytes: int) -> int:
        most = num_bytes // self.block
        if self.windowed is None:
            return most
        return bisect_right(range(1, most + 1), num_bytes, key=self.kv_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Numbers set by the user; None: chosen by the plan."""

    max_model_len: int | None = None
    kv_bytes: int | None = None
    num_blocks: int | None = None
    # From the manifest of prepared programs: used if it fits.
    prepared_blocks: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """The division of a device's memory."""

    device: Device
    need: Need
    num_blocks: int
    max_model_len: int  # limited by the blocks unless the user set it

    @property
    def kv_bytes(self) -> int:
        return self.need.kv_bytes(self.num_blocks)

    @property
    def num_window_blocks(self) -> int:
        return self.need.window_blocks(self.num_blocks)

    @property
    def host_blocks(self) -> tuple[int, int]:
        """Blocks of the host's tier, by group of layers, in the proportion of the device's."""
        need, windowed = self.need, self.need.windowed
        if windowed is None:
            return need.host // need.block, 0
        each = self.num_blocks * need.block + self.num_window_blocks * windowed.block
        return need.host * self.num_blocks // each, need.host * self.num_window_blocks // each


def share_out(device: Device, need: Need, asked: Asked) -> MemoryPlan:
    """Plan a device's memory: KV blocks get the user's number, else a share of the rest.

    Raises UserError, with the missing bytes and a remedy, if the weights do not fit, or the blocks cannot hold the
    user's `max_model_len`. By default the length is the model's, or as much as the blocks hold.
    """
    _check_weights(device, need)
    room = None
    if device.free is not None:
        room = device.free - need.weights - need.adapters - need.slots - need.temporaries - need.moving
    # An estimate is no reason to refuse a number of the user.
    most = None if room is None else room + (0 if need.is_measured else need.temporaries)
    longest = _blocks_of(asked.max_model_len or need.model_len, need) + _blocks_of(need.source_len, need)
    if asked.num_blocks is not None:
        num_blocks = asked.num_blocks
        _check_pool(device, need, num_blocks, most, "num_kv_blocks")
    elif asked.kv_bytes is not None:
        num_blocks = min(need.blocks_within(asked.kv_bytes), need.num_slots * longest)
        _check_pool(device, need, num_blocks, most, "kv_cache_memory_bytes")
        num_blocks = _rounded(num_blocks, longest, asked)
    elif room is None or most is None:
        raise UserError("the device does not report its memory; set kv_cache_memory_bytes.", "kv_cache_memory_bytes")
    elif asked.prepared_blocks is not None and need.kv_bytes(asked.prepared_blocks) <= most:
        num_blocks = asked.prepared_blocks
    else:
        share = int(device.share * room) if device.ceiling is None else min(int(device.share * room), device.ceiling)
        num_blocks = min(need.blocks_within(max(0, share)), need.num_slots * longest)
        num_blocks = _rounded(num_blocks, longest, asked)
    return MemoryPlan(
        device=device,
        need=need,
        num_blocks=num_blocks,
        max_model_len=_length(device, need, asked, max(0, num_blocks - _blocks_of(need.source_len, need))),
    )


def coarse(num_blocks: int) -> int:
    """Round down to a multiple of an eighth of a power of two.

    Programs' shapes have the number of blocks: variation with free memory would miss the compilation cache.
    """
    step = 1 << max(0, num_blocks.bit_length() - 4)
    return num_blocks // step * step


def _rounded(num_blocks: int, longest: int, asked: Asked) -> int:
    """Round down to four binary digits, but if possible not below `longest`, the blocks of one sequence."""
    if num_blocks < longest and asked.max_model_len is None:
        return coarse(num_blocks)
    return max(coarse(num_blocks), min(num_blocks, longest))


def describe(plan: MemoryPlan, where: str, host: str) -> str:
    """Return a plan as a small table; `where` names the devices, `host` describes the host's memory."""
    need = plan.need
    cut = f", cut from {need.model_len}" if plan.max_model_len < need.model_len else ""
    rows = [
        ("weights", size(need.weights), ""),
        *([("adapters", size(need.adapters), "")] if need.adapters else []),
        ("temporaries", size(need.temporaries), "of the largest program" + ("" if need.is_measured else ", at most")),
        ("slots", size(need.slots), f"of {need.num_slots} requests at once"),
        (
            "KV blocks",
            size(plan.kv_bytes),
            f"{plan.num_blocks} of {need.block_size} tokens: {_requests(plan):.2f} requests of "
            f"max_model_len {plan.max_model_len}{cut}",
        ),
        *([("", "", f"and {plan.num_window_blocks} of windowed layers")] if need.windowed else []),
        *([("", size(need.moving), "in transit to and from the host")] if need.host else []),
    ]
    if plan.device.free is not None:
        used = need.weights + need.adapters + need.temporaries + need.slots + need.moving + plan.kv_bytes
        rows.append(("left", size(plan.device.free - used), f"of {size(plan.device.free)}"))
    if need.host:
        blocks, windowed = plan.host_blocks
        more = f", {windowed} of windowed layers" if windowed else ""
        rows.append(("host tier", size(need.host), f"of the host's memory: {blocks} of {need.block_size} tokens{more}"))
    lines = [f"  {name:<12} {amount:>10}  {text}".rstrip() for name, amount, text in rows]
    return "\n".join([f"memory of {where}:", *lines, f"  {'host':<12} {host}"])


def _requests(plan: MemoryPlan) -> float:
    need = plan.need
    count = plan.num_blocks * need.block_size / plan.max_model_len
    if need.windowed is None:
        return count
    return min(count, plan.num_window_blocks / min(need.windowed.most, _blocks_of(plan.max_model_len, need)))


def size(count: int) -> str:
    """Return a number of bytes with a unit.

    >>> size(1536)
    '1.5 KiB'
    """
    amount, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if abs(amount) < 1024:
            break
        amount, unit = amount / 1024, larger
    return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"


def _blocks_of(tokens: int, need: Need) -> int:
    return -(-tokens // need.block_size)


def _check_weights(device: Device, need: Need) -> None:
    if device.free is None or need.weights <= device.free:
        return
    more = ", or raise gpu_memory_utilization" if device.knob == "gpu_memory_utilization" else ""
    raise UserError(
        f"The weights need {size(need.weights)} on each device, {size(need.weights - device.free)} more than the "
        f"{size(device.free)} that are free. Raise tensor_parallel_size, set dtype to 'bfloat16' if it is float32, "
        f"take a smaller model{more}.",
        "model",
    )


def _check_pool(device: Device, need: Need, num_blocks: int, most: int | None, parameter: str) -> None:
    if most is not None and need.kv_bytes(num_blocks) > most:
        programs = need.slots + (need.temporaries if need.is_measured else 0)
        raise UserError(
            f"{num_blocks} KV blocks need {size(need.kv_bytes(num_blocks))}, but beside the weights "
            f"({size(need.weights)}) and the programs ({size(programs)}) only "
            f"{size(max(0, most))} of the device's {size(device.free or 0)} are left. Lower {parameter}.",
            parameter,
        )


def _length(device: Device, need: Need, asked: Asked, num_blocks: int) -> int:
    """Return the longest sequence served; raise UserError if 0 or below the user's `max_model_len`."""
    wanted = asked.max_model_len or need.model_len
    holds = num_blocks * need.block_size
    if holds >= wanted:
        return wanted
    if holds == 0:
        programs = need.temporaries + need.slots
        knob = device.knob if asked.kv_bytes is None else "kv_cache_memory_bytes"
        raise UserError(
            f"Nothing is left for KV blocks beside the weights ({size(need.weights)}) and the programs "
            f"({size(programs)}){'' if device.free is None else f' in {size(device.free)}'}. Raise {knob}, or "
            "lower max_num_batched_tokens, max_num_seqs or max_model_len.",
            knob,
        )
    if asked.max_model_len is not None:
        needed = _blocks_of(wanted, need) + _blocks_of(need.source_len, need)
        room = size(need.kv_bytes(num_blocks))
        if asked.num_blocks is not None:
            more = f"num_kv_blocks to {needed}"
        else:
            more = device.knob if asked.kv_bytes is None else "kv_cache_memory_bytes"
        raise UserError(
            f"One request of max_model_len {wanted} tokens needs {size(need.kv_bytes(needed))} of KV blocks, but there "
            f"is room for {room}. Lower max_model_len to {holds} at most (auto takes what fits), or raise {more}.",
            "max_model_len",
        )
    return holds
