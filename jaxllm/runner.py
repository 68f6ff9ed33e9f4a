"""Owns what is on the device: weights, the donated state, and the programs that turn one state into the next.

Chooses devices, types and sizes from the configuration and the model, and says what it chose. Knows plans and buffers;
knows no requests, no text and no queue.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import psutil
from tqdm import tqdm

import pallas_kernels
from jaxllm import batch, cache, sharding, step
from jaxllm.cache import Geometry
from jaxllm.config import EngineConfig
from jaxllm.errors import UserError
from jaxllm.metrics import Metrics
from jaxllm.model import decoder, weights
from jaxllm.model.families import Family, read_spec
from jaxllm.model.spec import Spec
from jaxllm.programs import Key, Programs
from jaxllm.sampling import BIAS_SHAPE, ROW_WIDTH, Variant
from jaxllm.state import Limits, Plan
from jaxllm.step import Result

PATCH_ENTRIES = 1024  # changes that one call of `step.patch` takes
PATCH_BIASES = 8  # requests' biases that one call of `step.patch_bias` takes, 19 kB
_BIAS_WIDTH = 1 + BIAS_SHAPE[0] * BIAS_SHAPE[1]
GPU_SHARE = 0.97  # of what is left: the rest is for programs' code and for the tuning of those compiled later
CPU_SHARE = 0.25  # of the free memory, for KV blocks: a laptop has other work to do …
CPU_CEILING = 2 << 30  # … and two gigabytes hold 87,000 tokens of a 0.5B model in float32


@dataclass(frozen=True)
class Setup:
    """What was chosen from configuration, model and device, before anything large is allocated."""

    folder: Path
    spec: Spec
    family: Family
    generation_config: dict[str, Any]
    platform: str
    devices: tuple[jax.Device, ...]  # pyright: ignore[reportInvalidTypeForm]
    dtype: jnp.dtype
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    kernels: dict[str, str]


def choose_devices(config: EngineConfig) -> tuple[jax.Device, ...]:  # pyright: ignore[reportInvalidTypeForm]
    """Return the devices to run on; asking for a GPU that JAX does not see is a UserError."""
    # Read when the back end starts: XLA would take 75 % of a GPU, whatever share the user asked for.
    if not {"XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"} & os.environ.keys():
        os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] = str(config.gpu_memory_utilization)
    if config.device == "auto":
        return tuple(jax.devices())
    try:
        return tuple(jax.devices(config.device))
    except RuntimeError as error:
        raise UserError(
            "device is 'gpu' but JAX sees none: install jaxllm[cuda12] or jaxllm[cuda13], and check `nvidia-smi`.",
            "device",
        ) from error


def choose_dtype(config: EngineConfig, checkpoint: dict[str, Any], platform: str) -> jnp.dtype:
    """Return the type of weights, activations and cache.

    "auto" is float32 on a CPU (without 16-bit instructions it is the fastest as well as the most exact); on a GPU it is
    the checkpoint's own type, and bfloat16 for a float32 checkpoint.
    """
    if config.dtype != "auto":
        return jnp.dtype(config.dtype)
    if platform == "cpu":
        return jnp.dtype(jnp.float32)
    stored = checkpoint.get("dtype") or checkpoint.get("torch_dtype") or "bfloat16"
    return jnp.dtype(jnp.bfloat16 if stored == "float32" else stored)


def prepare(config: EngineConfig, needs_weights: bool = True) -> Setup:
    """Choose everything that can be chosen without loading weights; `jaxllm doctor` prints it."""
    folder = weights.resolve(config.model, config.revision, tokenizer_only=not needs_weights)
    checkpoint = weights.read_config(folder)
    spec, family = read_spec(checkpoint)
    devices = choose_devices(config)
    platform = devices[0].platform
    if config.max_model_len is not None and config.max_model_len > spec.max_position:
        raise UserError(
            f"max_model_len ({config.max_model_len}) is greater than what the model was made for "
            f"({spec.max_position} positions); lower it.",
            "max_model_len",
        )
    is_cpu = platform == "cpu"
    tokens = config.max_num_batched_tokens or max(512 if is_cpu else 8192, config.max_num_seqs or 0)
    return Setup(
        folder=folder,
        spec=spec,
        family=family,
        # Older checkpoints name the end of a text in config.json only.
        generation_config={"eos_token_id": checkpoint.get("eos_token_id")} | weights.read_generation_config(folder),
        platform=platform,
        devices=devices,
        dtype=choose_dtype(config, checkpoint, platform),
        max_model_len=config.max_model_len or spec.max_position,
        max_num_seqs=config.max_num_seqs or min(64 if is_cpu else 256, tokens),
        max_num_batched_tokens=tokens,
        kernels={name: pallas_kernels.resolve(name, platform) for name in ("paged_decode", "paged_prefill")},
    )


class StepInFlight(NamedTuple):
    """A step that the device was given."""

    joined: jax.Array
    num_rows: int

    def result(self) -> Result:
        """Wait for what the step sampled. What failed on the device is raised here, and by every step behind it."""
        return step.read(np.asarray(self.joined), self.num_rows)


class Runner:
    """Runs plans on the device. Not thread-safe: one thread calls `dispatch`."""

    def __init__(self, config: EngineConfig, setup: Setup, metrics: Metrics, progress: bool = False) -> None:
        use_compilation_cache(config.cache_dir())
        self.setup = setup
        self.metrics = metrics
        self._config = config
        self._mesh = sharding.make_mesh(setup.devices, config.tensor_parallel_size)
        self._params_shapes = weights.abstract(setup.spec, self._mesh, setup.dtype)
        leaves = jax.tree.leaves(self._params_shapes)
        free = free_bytes(config, setup) - sum(leaf.size * leaf.dtype.itemsize for leaf in leaves) // self._mesh.size
        if config.load_format != "dummy":
            weights.check(setup.folder, setup.spec, setup.family, self._mesh.size)
        self._state: step.Leaves = ()
        self._running_thread: int | None = None
        self._start_programs(choose_geometry(config, setup, self._mesh.size, free))
        try:
            if progress:
                tqdm.write("compiling for this machine; the next start finds the programs in its cache", sys.stderr)
            self._params = tuple(jax.tree.leaves(self._load(config, progress)))
            self._finish_programs(free)
        except BaseException:
            self.programs.close()
            raise
        self.renew()
        self._listener = _listener(weakref.ref(self))
        jax.monitoring.register_event_duration_secs_listener(self._listener)
        weakref.finalize(self, jax.monitoring.unregister_event_duration_listener, self._listener)
        if config.precompile == "background":
            self.programs.begin(self.programs.rest, max(1, (os.cpu_count() or 2) // 2), in_background=True)
        elif config.precompile == "all":
            self.programs.begin(self.programs.rest, os.cpu_count() or 2)
            self.programs.wait()

    @property
    def limits(self) -> Limits:
        """The budgets that plans for this runner must keep."""
        return Limits(
            num_slots=self.geometry.num_slots,
            num_blocks=self.geometry.num_blocks,
            block_size=self.geometry.block_size,
            max_step_tokens=self.setup.max_num_batched_tokens,
            max_step_chunks=batch.max_chunks(self.setup.max_num_batched_tokens, self.geometry.num_slots),
            records_blocks=self._config.enable_kv_cache_events,
        )

    def dispatch(
        self,
        plan: Plan,
        chunks: Sequence[np.ndarray],
        sampling: np.ndarray,
        variant: Variant,
        history: np.ndarray | None = None,
        biases: Sequence[tuple[int, np.ndarray]] = (),
    ) -> StepInFlight:
        """Give the device one step, which begins when the one before it has ended; wait for nothing.

        `chunks` are the token ids of the plan's rows after its decode rows; `sampling` is int32[S, F]; `history` is
        int32[·, 3] of (slot, position, token) that the device must know beforehand and will not compute; `biases` are
        the slots of newly admitted requests that have a logit_bias, each with its `sampling.pack_bias`.
        After an exception the state may be gone: call `renew`, and compute every running request again.
        """
        self._running_thread = threading.get_ident()
        try:
            key = self.programs.choose(plan, variant)
            ahead = plan.table[key.shape.entries :]
            if len(ahead) or history is not None:
                self._patch(ahead, history)
            if biases:
                self._patch_biases(biases)
            buffer = batch.pack(plan, key.shape, self.geometry.num_slots, chunks, sampling)
            self._state, joined = self.programs[key](self._params, self._state, buffer)
            joined.copy_to_host_async()
        finally:
            self._running_thread = None
        self.metrics.steps += 1
        self.metrics.padded_tokens += key.shape.tokens
        self.metrics.computed_tokens += plan.num_tokens
        return StepInFlight(joined, len(plan.slots))

    def renew(self) -> None:
        """Give up whatever state there is and allocate an empty one."""
        self._state = ()
        self._state = tuple(jax.tree.leaves(cache.allocate(self._state_shapes)))

    def close(self) -> None:
        """Stop compiling and let go of the device's memory."""
        self.programs.close()
        self._state = ()
        self._params = ()

    def _load(self, config: EngineConfig, progress: bool) -> decoder.Params[jax.Array]:
        if config.load_format == "dummy":
            return weights.load_random(self.setup.spec, self._mesh, self.setup.dtype, config.seed % 2**32)
        setup = self.setup
        return weights.load(setup.folder, setup.spec, setup.family, self._mesh, setup.dtype, progress)

    def _start_programs(self, geometry: Geometry) -> None:
        """Begin to compile the covering programs for `geometry`, while the weights are being read."""
        self.geometry = geometry
        setup = self.setup
        self._state_shapes = cache.abstract(setup.spec, geometry, self._mesh, setup.dtype)
        self.programs = Programs(
            # XLA's CPU back end converts all 16-bit weights in a one-row product (reference/kernels.md §6).
            batch.decode_shapes(geometry.num_slots, 2 if setup.platform == "cpu" and setup.dtype != jnp.float32 else 1),
            batch.ragged_shapes(setup.max_num_batched_tokens, geometry.num_slots, geometry.block_size, ROW_WIDTH),
            self._compile,
            self.metrics,
        )
        self.programs.begin(self.programs.covering, os.cpu_count() or 2)

    def _finish_programs(self, free: int) -> None:
        """Wait for the covering programs; if they need more memory than guessed, compile them for fewer blocks."""
        while True:
            self.programs.wait()
            temporary = max(self.programs[key].memory_analysis().temp_size_in_bytes for key in self.programs.covering)
            fitting = choose_geometry(self._config, self.setup, self._mesh.size, free, temporary)
            if fitting.num_blocks >= self.geometry.num_blocks:
                break
            self._start_programs(fitting)
        shapes, everywhere = self._state_shapes, sharding.replicated(self._mesh)
        changes = jax.ShapeDtypeStruct((2, PATCH_ENTRIES, 3), jnp.int32, sharding=everywhere)
        patch = jax.jit(step.patch, donate_argnums=(0, 1))
        self._patch_program = patch.lower(shapes.tables, shapes.tokens, changes).compile()
        changes = jax.ShapeDtypeStruct((PATCH_BIASES, _BIAS_WIDTH), jnp.int32, sharding=everywhere)
        self._patch_bias_program = jax.jit(step.patch_bias, donate_argnums=0).lower(shapes.bias, changes).compile()

    def _compile(self, key: Key) -> Any:
        """Compile one program ahead of time."""
        run = step.build(
            self.setup.spec,
            self.geometry,
            key.shape,
            key.variant,
            min(self._config.max_logprobs, self.setup.spec.vocab_size),
            self._mesh,
            self._params_shapes,
            self._state_shapes,
            self.setup.kernels,
        )
        buffer = jax.ShapeDtypeStruct(
            (batch.buffer_size(key.shape),), jnp.int32, sharding=sharding.replicated(self._mesh)
        )
        params, state = (tuple(jax.tree.leaves(tree)) for tree in (self._params_shapes, self._state_shapes))
        return jax.jit(run, donate_argnums=(1,)).lower(params, state, buffer).compile()

    def _patch(self, table: np.ndarray, history: np.ndarray | None) -> None:
        """Write block-table entries and tokens into the state before a step."""
        parts = [table, np.zeros((0, 3), np.int32) if history is None else history]
        for start in range(0, max(map(len, parts)), PATCH_ENTRIES):
            changes = np.full((2, PATCH_ENTRIES, 3), self.geometry.num_slots, np.int32)
            for target, part in zip(changes, parts, strict=True):
                piece = part[start : start + PATCH_ENTRIES]
                target[: len(piece)] = piece
            state = jax.tree.unflatten(jax.tree.structure(self._state_shapes), self._state)
            tables, tokens = self._patch_program(state.tables, state.tokens, changes)
            self._state = tuple(jax.tree.leaves(state.replace(tables=tables, tokens=tokens)))

    def _patch_biases(self, biases: Sequence[tuple[int, np.ndarray]]) -> None:
        """Write the biases of newly admitted requests into the state before a step."""
        for start in range(0, len(biases), PATCH_BIASES):
            changes = np.full((PATCH_BIASES, _BIAS_WIDTH), self.geometry.num_slots, np.int32)
            for target, (slot, packed) in zip(changes, biases[start : start + PATCH_BIASES], strict=False):
                target[0], target[1:] = slot, packed.ravel()
            state = jax.tree.unflatten(jax.tree.structure(self._state_shapes), self._state)
            bias = self._patch_bias_program(state.bias, changes)
            self._state = tuple(jax.tree.leaves(state.replace(bias=bias)))

    def note_compilation(self) -> None:
        """Count a compilation that somebody waits for: one on the thread that is starting a step."""
        if threading.get_ident() == self._running_thread:
            self.metrics.compilations_after_ready += 1


def _listener(runner: weakref.ref[Runner]) -> Callable[..., None]:
    """Return a listener to JAX's events that does not keep the runner alive."""

    def listen(event: str, duration_secs: float, **_: str | int) -> None:
        alive = runner()
        if event == "/jax/core/compile/backend_compile_duration" and alive is not None:
            alive.note_compilation()

    return listen


def free_bytes(config: EngineConfig, setup: Setup) -> int:
    """Return the memory of a device that is free for weights, programs and KV blocks, before any of them is there."""
    if setup.platform == "cpu":
        return psutil.virtual_memory().available
    if config.num_kv_blocks is not None or config.kv_cache_memory_bytes is not None:
        return 0  # nobody asks
    stats = setup.devices[0].memory_stats()
    if not stats or "bytes_limit" not in stats:
        raise UserError(
            f"{setup.devices[0]} does not say how much memory it has; set kv_cache_memory_bytes.",
            "kv_cache_memory_bytes",
        )
    return stats["bytes_limit"] - stats.get("bytes_in_use", 0)


def choose_geometry(
    config: EngineConfig, setup: Setup, shards: int, free: int, temporary_bytes: int | None = None
) -> Geometry:
    """Size the KV pool: what was asked for, else what the memory holds beside the weights and the programs.

    `free` are the bytes that the weights leave on one device; `temporary_bytes` are what its largest program needs
    while it runs, None while none is compiled yet. A pool too small for one sequence shortens a context length that
    nobody asked for, and is a UserError otherwise.
    """
    size = cache.block_bytes(setup.spec, config.block_size, setup.dtype, shards)
    longest = -(-setup.max_model_len // config.block_size)
    if config.num_kv_blocks is not None:
        num_blocks = config.num_kv_blocks
    else:
        room = config.kv_cache_memory_bytes
        if room is None:
            # Tables, tokens and bias of every slot, see cache.DeviceState.
            slots = 4 * setup.max_num_seqs * (longest + setup.max_model_len + _BIAS_WIDTH)
            room = free - slots - (_guess(setup) if temporary_bytes is None else temporary_bytes)
            room = min(int(CPU_SHARE * room), CPU_CEILING) if setup.platform == "cpu" else int(GPU_SHARE * room)
        wanted = min(max(0, room) // size, setup.max_num_seqs * longest)
        num_blocks = max(cache.coarse(wanted), min(wanted, longest))
    max_model_len = setup.max_model_len
    if num_blocks < longest and config.num_kv_blocks is None:
        if config.max_model_len is not None or num_blocks == 0:
            raise UserError(
                f"A sequence of max_model_len {max_model_len} tokens needs {longest * size / 2**20:.1f} MiB of KV "
                f"blocks, but there is room for {num_blocks * size / 2**20:.1f} MiB. Lower max_model_len, or raise "
                f"{'kv_cache_memory_bytes' if setup.platform == 'cpu' else 'gpu_memory_utilization'}.",
                "max_model_len",
            )
        max_model_len = num_blocks * config.block_size
    return Geometry(
        num_slots=setup.max_num_seqs, num_blocks=num_blocks, block_size=config.block_size, max_model_len=max_model_len
    )


def _guess(setup: Setup) -> int:
    """Guess what the largest program needs while it runs, on the high side: it is checked once one is compiled."""
    spec = setup.spec
    widest = max(2 * spec.ffn_width, (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_size, spec.width)
    return 4 * (8 * setup.max_num_batched_tokens * widest + 8 * setup.max_num_seqs * spec.vocab_size)


def use_compilation_cache(folder: Path) -> None:
    """Keep compiled programs in `folder`, whatever time they took to compile, for this and later processes."""
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
