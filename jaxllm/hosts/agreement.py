"""The agreement of processes before they load a model."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxllm import combinations
from jaxllm.config import EngineConfig, Precompile
from jaxllm.errors import UserError
from jaxllm.hosts.settings import HostSettings
from jaxllm.model.sharding import Layout
from jaxllm.runner.model_runner import Runner
from jaxllm.setup.model_files import identity
from jaxllm.setup.model_setup import choose_devices, describe_programs, free_bytes, plan_memory, prepare

_OWN = {  # may differ between hosts
    *("model", "tokenizer", "revision", "skip_tokenizer_init", "compilation_cache_dir", "compilation_cache_bytes"),
    *("kv_cache_memory_bytes", "gpu_memory_utilization", "num_kv_blocks", "max_model_len"),  # the least is agreed
    *("logits_processors", "kernels", "enable_kv_cache_events"),  # `describe_programs` compares the first two
}
MOST_SECONDS = 100  # without a heartbeat, before JAX ends a process


@dataclass(frozen=True, slots=True)
class Offer:
    """A process's choices: `shared` must be equal; the least of each number is used."""

    shared: Mapping[str, str]
    num_blocks: int
    max_model_len: int

    def packed(self) -> list[Any]:
        return [dict(self.shared), self.num_blocks, self.max_model_len]


def check(config: EngineConfig) -> None:
    """Raise UserError for unsupported settings."""
    asked = {
        "enable_lora": config.enable_lora,
        "kv_offloading_size": config.kv_offloading_size > 0,
        "kv_transfer_config": config.kv_transfer_config is not None,
        "enable_sleep_mode": config.enable_sleep_mode,
        "data_parallel_size": config.data_parallel_size > 1,
        "speculative_config": config.speculative_config is not None,
    }
    combinations.check([name for name, is_set in asked.items() if is_set], [combinations.HOSTS])
    if config.precompile == "background":
        raise UserError(
            "precompile 'background' is not possible with num_hosts above 1: hosts must choose the same programs; use "
            "'covering' or 'all'.",
            "precompile",
        )


def start_devices(config: EngineConfig, settings: HostSettings) -> None:
    """Join JAX's processes, before anything uses a device; raise UserError if that fails.

    Until they have agreed no process waits for another, so any may refuse.
    """
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM
    address = f"[{settings.host}]" if ":" in settings.host else settings.host
    try:
        jax.distributed.initialize(
            coordinator_address=f"{address}:{settings.port + 1}",
            num_processes=settings.num_hosts,
            process_id=settings.rank,
            coordinator_bind_address=f"{address}:{settings.port + 1}" if settings.rank == 0 else None,
            initialization_timeout=60,
            heartbeat_timeout_seconds=MOST_SECONDS,
        )
    except RuntimeError as error:
        raise UserError(
            f"JAX's processes do not find each other at {address}:{settings.port + 1}, the port after that of "
            f"coordinator: {error}",
            "coordinator",
        ) from error
    choose_devices(config)


def own_config(config: EngineConfig, settings: HostSettings) -> EngineConfig:
    """Return a process's configuration, with a separate folder of compiled programs."""
    folder = config.cache_dir() / f"host-{settings.rank}-of-{settings.num_hosts}"
    folder.mkdir(parents=True, exist_ok=True)
    return replace(config, compilation_cache_dir=str(folder))


def offer(config: EngineConfig) -> Offer:
    """Choose as if alone; raise UserError for unsupported models."""
    setup = prepare(config)
    if setup.head is not None:
        raise combinations.refusal("num_hosts", combinations.POOLS)
    if setup.images is not None:
        raise combinations.refusal("num_hosts", combinations.IMAGES)
    if setup.encoder is not None:
        raise combinations.refusal("num_hosts", combinations.SEQ2SEQ)
    plan = plan_memory(config, setup, free_bytes(setup))
    told = describe_programs(config, setup, plan)
    told |= {each.name: getattr(config, each.name) for each in fields(config) if each.name not in _OWN}
    weights = f"random, seed {config.seed}" if config.load_format == "dummy" else identity(Path(setup.folder))
    told |= {"model": _digest(repr(setup.spec)), "weights": weights}
    for agreed in ("num_kv_blocks", "max_model_len"):
        told.pop(agreed, None)
    return Offer({name: repr(value) for name, value in told.items()}, plan.num_blocks, plan.max_model_len)


def agreed(config: EngineConfig, num_blocks: int, max_model_len: int, precompile: Precompile) -> EngineConfig:
    return replace(
        config, num_kv_blocks=num_blocks, kv_cache_memory_bytes=None, max_model_len=max_model_len, precompile=precompile
    )


def precompiled(config: EngineConfig) -> Precompile:
    """Return when programs are compiled: before the first request, for the same ones on all hosts."""
    if config.precompile != "auto":
        return config.precompile
    return "covering" if jax.default_backend() == "cpu" else "all"


def least(offers: Sequence[Offer]) -> tuple[int, int]:
    """Return the blocks and the length that all hold; raise UserError if the offers differ otherwise."""
    first = offers[0]
    for rank, other in enumerate(offers):
        names = sorted(first.shared.keys() | other.shared.keys())
        different = [name for name in names if first.shared.get(name) != other.shared.get(name)]
        if different:
            values = [(name, *(each.shared.get(name) for each in (other, first))) for name in different]
            pairs = "; ".join(f"{name} is {own!s:.60}, not {leaders!s:.60}" for name, own, leaders in values)
            raise UserError(f"host {rank} differs from host 0: {pairs}. Make them the same on every host.")
    return min(each.num_blocks for each in offers), min(each.max_model_len for each in offers)


def settled(runner: Runner) -> dict[str, str]:
    """Describe a loaded runner; equal descriptions give the same plans and programs."""
    programs = runner.programs
    ready = [str(key) for key in keys_of(runner) if key in programs.ready()]
    told = {"limits": asdict(runner.limits) | {"records_blocks": False}, "programs": _digest(repr(ready))}
    return {name: repr(value) for name, value in told.items()}


def keys_of(runner: Runner) -> list[Any]:
    return [*runner.programs.covering, *runner.programs.rest]


def meet(layout: Layout) -> None:
    """Sum over all devices: the first collective, which connects the processes."""
    sharding = layout.sharding("heads")
    ones = jax.make_array_from_callback((layout.shards("heads"),), sharding, lambda index: jnp.ones(1, jnp.int32))
    total = jax.jit(jnp.sum, out_shardings=layout.sharding())(ones)
    if int(total) != layout.shards("heads"):
        raise RuntimeError(f"a sum over {layout.shards('heads')} devices is {int(total)}")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]
