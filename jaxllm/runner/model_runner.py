"""The device's data: weights, the donated state, and the programs that compute the next state."""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.checkpoints import weights
from jaxllm.compiling import aot_manifest
from jaxllm.compiling.compilation_cache import use_compilation_cache
from jaxllm.compiling.kept_programs import KeptPrograms
from jaxllm.compiling.program_digest import digest, digest_compiler, digest_source
from jaxllm.compiling.startup_timing import Compilations, Phases
from jaxllm.config import EngineConfig
from jaxllm.metrics import DeviceReport, Metrics
from jaxllm.model import decoder, stages
from jaxllm.runner import batch, device_state, host_tier, results, scoring, small_programs, step, ticks, timestamps
from jaxllm.runner.batch import Shape
from jaxllm.runner.compiled_programs import VARIANTS, Key, ProgramKeys, Programs
from jaxllm.runner.disk_store import DiskStore
from jaxllm.runner.disk_tier import BlockSource, DiskTier
from jaxllm.runner.host_tier import HostTier, ThreadedCopies
from jaxllm.runner.media import ImageEncoder
from jaxllm.runner.profiling import span
from jaxllm.runner.residence import Residence
from jaxllm.runner.resident_adapters import ResidentAdapters, Weights
from jaxllm.runner.results import Scored, StepOutput
from jaxllm.runner.row_layout import Row, RowLayout
from jaxllm.runner.small_programs import SmallPrograms
from jaxllm.runner.source_encoder import SourceEncoder
from jaxllm.runner.step_input import PackedStep, StepInput
from jaxllm.runner.step_model import Leaves, StepModel
from jaxllm.runner.ticks import Ticks
from jaxllm.sampling.logits_processors import load_processors
from jaxllm.sampling.sampler import ROW_WIDTH, Variant
from jaxllm.scheduler.host_tier import Landed
from jaxllm.scheduler.state import Limits, Plan
from jaxllm.setup import draft_setup, memory_plan
from jaxllm.setup.kv_cache import Geometry, leaves_by_group, most_stores
from jaxllm.setup.kv_fingerprint import fingerprint
from jaxllm.setup.memory_plan import MemoryPlan
from jaxllm.setup.model_setup import (
    Setup,
    cache_window,
    describe_adapters,
    describe_memory,
    describe_programs,
    describe_weights,
    extras_of,
    free_bytes,
    kernel_reasons,
    plan_memory,
)

MOST_VERIFIED = 256  # tokens of a step that verifies drafts, or one per slot: each has logits
_log = logging.getLogger(__name__)


class StepInFlight(NamedTuple):
    """A dispatched step."""

    joined: jax.Array | np.ndarray
    plan: Plan
    has_drafts: bool
    num_logprobs: int
    width: int  # of the results, at the start of a flat `joined`
    scores: Sequence[
        tuple[Sequence[Scored], jax.Array | np.ndarray]
    ]  # each batch has one kind: whole rows, or single log-probabilities

    def result(self) -> StepOutput:
        """Wait for the step's result; raise its failure on the device, as every later step does."""
        joined = np.asarray(self.joined)
        if joined.ndim == 1:
            joined = joined[: len(joined) // self.width * self.width].reshape(-1, self.width)
        if self.has_drafts:
            result = results.read_verified(joined, self.plan, self.num_logprobs)
        else:
            result = results.read(joined, len(self.plan.slots), self.num_logprobs)
        if not self.scores:
            return result
        result.side["scored"] = [score for of, found in self.scores for score in scoring.read_scores(of, found)]
        return result


class PendingResult(Protocol):
    """A dispatched step, sampling included."""

    def result(self) -> StepOutput: ...


class HeldStep(NamedTuple):
    """The dispatched first half of a step, to be sampled."""

    plan: Plan
    key: Key  # of the second half
    buffer: np.ndarray  # of the first half
    logits: jax.Array
    scores: Sequence[tuple[Sequence[Scored], jax.Array | np.ndarray]]


Flight = PendingResult | HeldStep


class Runner(Residence):
    """Runs plans on the device. Not thread-safe: one thread calls `dispatch`."""

    encoder: ImageEncoder | None = None
    sources: SourceEncoder | None = None
    ticks: Ticks | None = None  # of an engine with batches in flight

    def __init__(
        self,
        config: EngineConfig,
        setup: Setup,
        metrics: Metrics,
        progress: bool = False,
        needs_weights: bool = True,
        phases: Phases | None = None,
    ) -> None:
        """Load the weights, unless not needed, and compile, adding the times to `phases`."""
        phases = Phases() if phases is None else phases
        self.setup = setup
        self.metrics = metrics
        self._config = config
        self._options = step.compiler_options(setup.platform, config.deterministic)
        with phases.phase("plan"):
            self._processors = load_processors(config.logits_processors, setup.spec.vocab_size)
            self.extras = extras_of(config, setup.spec)
            self.num_logprobs = results.num_logprobs(config.max_logprobs, setup.spec.vocab_size)
            self._params_shapes = describe_weights(config, setup)
            self.drafting = draft_setup.with_cost(setup.drafting, self._params_shapes)
            self._row_weights = describe_adapters(config, setup)
            self._adapter_shapes = () if self._row_weights is None else self._row_weights.described
            self.adapters = ResidentAdapters(self._adapter_shapes)
            self.encoder = None if setup.images is None else ImageEncoder(setup)
            self.sources = None if setup.encoder is None else SourceEncoder(setup)
            free = free_bytes(setup)
            plan = plan_memory(config, setup, free)
            if needs_weights and config.load_format != "dummy":
                weights.check(setup.folder, setup.spec, setup.family, setup.layout, setup.head)
                draft_setup.check(setup.drafting, setup.draft, setup.layout.unstaged)
                for encoder in self._encoders:
                    encoder.check()
        self._params: Leaves = ()
        self._state: Leaves = ()
        self._host: HostTier | None = None
        self._away, self._is_mixed = [], False
        self._can_read, self._folder = True, None if config.load_format == "dummy" else setup.folder
        self._disk: DiskTier | None = None
        self._running_thread: int | None = None
        compilations = Compilations()
        compilations.begin()
        self._start_programs(plan)
        try:
            if needs_weights:
                self._disk = self._open_disk()
                with phases.phase("weights") as causes:
                    started = time.perf_counter()
                    self._params = tuple(jax.tree.leaves(self._load(self._folder, progress)))
                    for encoder in self._encoders:
                        is_random = config.load_format == "dummy"
                        encoder.load(progress, config.seed % 2**32 if is_random else None)
                    num_bytes = sum(leaf.nbytes for leaf in self._params)
                    speed = memory_plan.size(int(num_bytes / (time.perf_counter() - started)))
                    source = "random" if config.load_format == "dummy" else f"from {setup.folder}"
                    causes.append(f"{memory_plan.size(num_bytes)} ({speed}/s) {source}")
            with phases.phase("programs") as causes:
                self._finish_programs(free, progress)
                num_read, num_made = self._kept.num_read, compilations.num_compiled
                how = "traced and compiled" if num_made else "traced, and found in the cache"
                causes.append(f"{num_read} read whole" if num_read and not metrics.trace_seconds else how)
        except BaseException:
            self.programs.close()
            if self._disk is not None:
                self._disk.close()
            raise
        finally:
            compilations.end()
        if self._kept.num_read:
            phases.note_beside("reading", self._kept.seconds, f"{self._kept.num_read} programs that were kept whole")
        phases.note_beside("tracing", metrics.trace_seconds, f"{len(self.programs)} covering programs")
        phases.note_beside("compiling", compilations.seconds, str(compilations))
        with phases.phase("memory") as causes:
            self.renew()
            causes.append(memory_plan.size(sum(leaf.nbytes for leaf in self._state)))
            causes.append("KV blocks and slots")
        if config.kv_offloading_size:
            leaves = host_tier.leaves_of(setup.stage_spec, self.geometry, self._state_shapes)
            copies = ThreadedCopies(None if self._disk is None else self._disk.copied)
            self._host = HostTier(self._small.programs, leaves, self.geometry, copies, metrics)
        self._listener = _listener(weakref.ref(self))
        jax.monitoring.register_event_duration_secs_listener(self._listener)
        weakref.finalize(self, jax.monitoring.unregister_event_duration_listener, self._listener)
        # On a GPU loading a program makes XLA rebuild the CUDA graphs of all others.
        on_cpu = setup.platform == "cpu"
        when = config.precompile if config.precompile != "auto" else "background" if on_cpu else "all"
        if when == "background":
            if not on_cpu:
                with phases.phase("kept programs"):
                    self.programs.begin_kept(os.cpu_count() or 2)
                    self.programs.wait()
            self.programs.follow(max(1, (os.cpu_count() or 2) // 2), only_when_idle=not on_cpu)
        elif when == "all":
            with phases.phase("all programs") as causes:
                self.programs.begin(self.programs.rest, os.cpu_count() or 2)
                self.programs.wait(progress)
                causes.append(f"{self.programs.num_all} (precompile is '{config.precompile}')")

    @property
    def limits(self) -> Limits:
        return Limits(
            num_slots=self.geometry.num_slots,
            num_blocks=self.geometry.num_blocks,
            block_size=self.geometry.block_size,
            max_step_tokens=self.setup.max_num_batched_tokens,
            max_step_chunks=self.geometry.num_slots  # without tiles, short chunks have no padding
            if self._config.deterministic
            else batch.max_chunks(self.setup.max_num_batched_tokens, self.geometry.num_slots),
            records_blocks=self._config.enable_kv_cache_events,
            max_adapters=self._config.max_loras if self._config.enable_lora else 0,
            max_drafts=0 if self.drafting is None else self.drafting.most,
            max_verified=self._max_verified if self.drafting is not None else 0,
            token_cost=self.setup.token_cost if self.drafting is not None else 0,
            draft_cost=self.drafting.cost if self.drafting is not None else 0,
            window=self.geometry.window,
            num_window_blocks=self.geometry.num_window_blocks,
            num_ticks=1 if self.ticks is None else self.ticks.count,
            **self._host_limits,
            **self._media_limits,
            **self._source_limits,
        )

    @property
    def _encoders(self) -> Sequence[ImageEncoder | SourceEncoder]:
        return [each for each in (self.encoder, self.sources) if each is not None]

    @property
    def _host_limits(self) -> dict[str, Any]:
        if not self._config.kv_offloading_size:
            return {}
        full, windowed = self.memory_plan.host_blocks
        return {
            "num_host_blocks": full,
            "num_host_window_blocks": windowed,
            "max_stores": most_stores(self.setup.max_num_batched_tokens, self.geometry.block_size),
            "swaps": self._config.preemption_mode == "swap",
            "stores_prompts": self._config.kv_offloading_disk is not None,
        }

    @property
    def block_source(self) -> BlockSource | None:
        return self._disk

    def _open_disk(self) -> DiskTier | None:
        config = self._config
        if config.kv_offloading_disk is None:
            return None
        rows = host_tier.row_shapes(self._step_model)
        name = fingerprint(config, self.setup, rows)
        size = int(config.kv_offloading_disk_size * (1 << 30))
        store = DiskStore(Path(config.kv_offloading_disk).expanduser(), size, name)
        _log.info("KV blocks are shared through %s", store.folder)
        return DiskTier(store, rows, self.metrics)

    @property
    def _media_limits(self) -> dict[str, Any]:
        own = self.encoder
        if own is None:
            return {}
        sizes = {"num_media_units": own.num_units, "media_unit": own.unit, "max_encoded": own.budget}
        return sizes | {"whole_image": own.whole_image}

    @property
    def _source_limits(self) -> dict[str, Any]:
        own = self.sources
        return {} if own is None else {"max_source": own.max_tokens, "max_encoded": own.budget}

    @property
    def _max_verified(self) -> int:
        slots, drafts = self.geometry.num_slots, 0 if self.drafting is None else self.drafting.most
        most = max(slots, min(slots * (1 + drafts), MOST_VERIFIED))
        return min(most, self.setup.max_num_batched_tokens)

    @property
    def _keeps_batch(self) -> bool:
        """Whether the state stores batches: CUDA graphs need a fixed address."""
        return self.setup.platform == "gpu"

    @property
    def reads_ahead(self) -> bool:
        """Whether the device needs the token after each prompt chunk."""
        return self.drafting is not None and self.drafting.head is not None

    def dispatch(self, given: StepInput) -> Flight:
        """Dispatch one step without waiting; it runs after the previous one.

        For a held step this is the first half, and `sample` must precede the next step. `given.side` may have "scored",
        a list of `Scored` positions, which need the widest variant, and "adapters", int64[R], numbers in
        `hold_adapters` or 0. After an exception the state may be lost: call `renew`, and recompute all running
        requests.
        """
        with self._compilations_counted():
            with span("pack"):
                if self.ticks is None:
                    packed = self.pack(given)
                else:
                    given, packed = self._pack_tick(self.ticks, given)
            started = self.run(packed)
        if given.is_held:
            assert isinstance(started, HeldStep)
            return started
        return self.sample(started) if isinstance(started, HeldStep) else started

    @property
    def carried(self) -> Plan | None:
        """The newest plan in flight that needs a dispatch, of another plan or of one without rows, to go on."""
        return None if self.ticks is None else self.ticks.carried

    def sampled_in(self, plan: Plan) -> Plan:
        """Return the plan with the results of the dispatch of `plan`."""
        return plan if self.ticks is None else self.ticks.steps[-1].plan

    def drop_batches(self) -> None:
        if self.ticks is not None:
            self.ticks.clear()

    def landed(self) -> Sequence[Landed]:
        return () if self._host is None else self._host.landed()

    def read_blocks(self, group: int, blocks: Sequence[int]) -> list[Row]:
        """Copy blocks, as they are after all dispatched steps, to the host's memory."""
        own = host_tier.leaves_of(self.setup.stage_spec, self.geometry, self._state_shapes)[group]
        program = self._small.programs[host_tier.STORE_PROGRAMS[group]]
        return host_tier.read_blocks(program, tuple(self._state[at] for at in own), blocks)

    def row_layouts(self) -> list[RowLayout]:
        shapes = self._state_shapes
        leaves, own = jax.tree.leaves(shapes), leaves_by_group(self.setup.stage_spec, self.geometry, shapes.kv)
        groups = host_tier.leaves_of(self.setup.stage_spec, self.geometry, shapes)
        layouts = zip(groups, own, strict=True)
        return [RowLayout(*host_tier.row_layout([leaves[at] for at in each]), len(model)) for each, model in layouts]

    def receive(self, group: int, there: int, row: Row) -> None:
        """Put content from another engine into a host block, before the next dispatch."""
        assert self._host is not None
        self._host.receive(group, there, row)

    def hold_adapters(self, numbers: tuple[int, ...], weights: Weights) -> None:
        """Keep exactly the adapters `numbers` on the devices; steps in flight keep theirs."""
        layout = self.setup.layout
        self.metrics.adapter_loads += self.adapters.hold(
            numbers, lambda number: stages.join_on_host(weights(number), layout)
        )

    def sample(
        self, held: HeldStep, masks: np.ndarray | None = None, is_masked: np.ndarray | None = None
    ) -> StepInFlight:
        """Dispatch the second half of a step.

        `masks` is int32[R, V / 32], one bit per token that a row may sample, for the rows of `is_masked`, bool[R], or
        for a speech model int[R], the kinds of timestamps.py.
        """
        plan, key = held.plan, held.key
        num_rows, num_words = len(plan.slots), -(-self.setup.spec.vocab_size // 32)
        if masks is None or is_masked is None:
            masks, is_masked = np.zeros((num_rows, num_words), np.int32), np.zeros(num_rows, np.bool_)
        shape = key.shape
        with self._compilations_counted(), span("dispatch"):
            packed = batch.pack_masks(plan, shape.sampled, self.geometry.num_slots, masks, is_masked, shape.drafts > 0)
            if key.part == "finish":
                program, buffer = self.programs[key], self._with_room(held.buffer, key)
                self._state, joined = program(self._params, self._state, buffer, held.logits, packed)
            else:
                leaves = list(self._state)
                tokens_at, sampling_at, extras_at = self._sampled_leaves
                arrays = leaves[tokens_at], leaves[sampling_at], leaves[extras_at]
                leaves[tokens_at], joined = self.programs[key](*arrays, held.logits, packed)
                self._state = tuple(leaves)
            joined.copy_to_host_async()
        return self._in_flight(joined, plan, key, held.scores)

    def pack(self, given: StepInput) -> PackedStep:
        """Choose a step's program and pack its inputs, without reading from a device."""
        rows = given.side.get("adapters")
        adapters = () if rows is None else self.adapters.of_rows(rows)
        return self.pack_for(self.programs.choose(given.plan, given.variant, given.is_held, len(adapters)), given)

    def pack_for(self, way: ProgramKeys, given: StepInput) -> PackedStep:
        plan, rows, shape = given.plan, given.side.get("adapters"), way[0].shape
        adapters = () if rows is None else self.adapters.of_rows(rows)
        which = self.adapters.places(rows, adapters, shape.adapters)
        own = given.side.get("media"), self._turned(given), given.side.get("last_seen")
        buffer = batch.pack(plan, shape, self.geometry.num_slots, given.chunks, given.sampling, which, *own)
        return PackedStep(
            plan=plan,
            way=way,
            buffer=buffer if self.ticks is not None else self._with_room(buffer, way[0]),
            table=plan.table[shape.entries :],
            tokens=np.asarray(given.tokens, np.int32) if given.tokens else None,
            extras=given.extras,
            moves=plan.moves,
            adapters=adapters,
            scored=given.side.get("scored", ()),
            encodes=given.side.get("encodes", ()),
            sources=given.side.get("sources"),
        )

    def _turned(self, given: StepInput) -> np.ndarray | None:
        """Return rotary positions for `batch.pack`.

        A device that drafts adds them to its positions, of which the host's are bounds.
        """
        turned = given.side.get("turned")
        if self.drafting is None or not self.setup.spec.has_axes:
            return turned
        if turned is None:
            return np.zeros((1, given.plan.num_tokens), np.int32)
        return turned - batch.token_places(given.plan)

    def _pack_tick(self, own: Ticks, given: StepInput) -> tuple[StepInput, PackedStep]:
        """Pack the batches of a tick; return the input of the one that leaves, and the tick's."""
        leaving = own.enter(given)
        way = self.programs.choose_for(own.extent(), leaving.variant, leaving.is_held)
        joined = own.join(way, self.pack_for)
        return leaving, replace(joined, buffer=self._with_room(joined.buffer, way[0]))

    def move(self, plan: Plan) -> None:
        """Dispatch the moves of a plan without rows."""
        if self._host is not None:
            self._state = self._host.move(self._state, plan.moves, plan.number)
        self._state = self._small.move(self._state, plan.moves)

    def run(self, packed: PackedStep) -> StepInFlight | HeldStep:
        plan, way = packed.plan, packed.way
        key, small = way[0], self._small
        with span("dispatch"):
            if len(packed.table) or packed.tokens is not None:
                self._state = small.patch(self._state, packed.table, packed.tokens)
            if packed.extras:
                self._state = small.patch_extras(self._state, packed.extras)
            if packed.encodes and self.encoder is not None:
                self._state = self.encoder.encode(self._state, packed.encodes)
                self.encoder.count(self.metrics, len(packed.encodes))
            if len(packed.moves):
                if self._host is not None:
                    self._state = self._host.move(self._state, packed.moves, plan.number)
                self._state = small.move(self._state, packed.moves)
            self._prepare_sources(packed)  # after moves, which may read blocks that they reuse
            own = self.adapters.arguments(packed.adapters, key.shape.adapters)
            self._state, returned = self.programs[key](self._params, self._state, packed.buffer, *own)
            if len(way) == 1:
                returned.copy_to_host_async()
            scores = small.score(self._params, self._state, packed.scored) if packed.scored else ()
        self.metrics.steps += 1
        self.metrics.padded_tokens += key.shape.tokens
        self.metrics.computed_tokens += plan.num_tokens
        if len(way) > 1:
            return HeldStep(plan, way[1], packed.buffer, returned, scores)
        return self._in_flight(returned, plan, key, scores)

    def _prepare_sources(self, packed: PackedStep) -> None:
        if packed.sources is not None and self.sources is not None:
            self._state = self.sources.prepare(self._params, self._state, packed.sources)

    def source_weights(self, tokens: Sequence[int], blocks: Sequence[int]) -> np.ndarray:
        """Return the attention of tokens to the source in `blocks`; see `Aligner.weights`."""
        assert self.sources is not None
        return self.sources.weights(self._params, self._state, tokens, blocks)

    def _in_flight(self, joined: jax.Array, plan: Plan, key: Key, scores: Sequence[Any]) -> StepInFlight:
        assert key.variant is not None
        has_drafts = key.shape.drafts > 0
        width = results.result_width(key.variant, self.num_logprobs, has_drafts)
        return StepInFlight(joined, plan, has_drafts, self.num_logprobs, width, scores)

    def _with_room(self, buffer: np.ndarray, key: Key) -> np.ndarray:
        """Extend a packed batch for results returned in it, on a GPU."""
        if self._state_shapes.batch is None:
            return buffer
        size = step.sent_size(self._step_model, key.shape, key.variant)
        if size == len(buffer):
            return buffer
        longer = np.zeros(size, np.int32)
        longer[: len(buffer)] = buffer
        return longer

    @contextmanager
    def _compilations_counted(self) -> Iterator[None]:
        """Count this thread's compilations within the context."""
        self._running_thread = threading.get_ident()
        try:
            yield
        finally:
            self._running_thread = None

    def program_texts(self, names: Collection[str]) -> dict[str, str]:
        named = {key.name: program for key, program in self.programs.ready().items()}
        named |= self._small.programs
        return {name: program.as_text() for name, program in named.items() if name in names}

    def report(self) -> DeviceReport:
        memory = {str(device.id): device.memory_stats() or {} for device in self.setup.local_devices}
        programs = self.programs
        return DeviceReport(len(programs), programs.num_compiling, programs.num_all, memory)

    def renew(self) -> None:
        if self._disk is not None:
            self._disk.drop_expected()
        self._state = ()
        self._state = jax.block_until_ready(self._allocate_program())

    def close(self) -> None:
        """Stop compiling, wait for steps in flight, and free the device's memory."""
        self.programs.close()
        if self._host is not None:
            self._host.close()
        if self._disk is not None:
            self._disk.close()
        with suppress(Exception):  # a failed step
            # XLA aborts a process that exits while its threads compute.
            jax.block_until_ready(self._state)
        self._drop_state()
        self._params = ()
        self._away = []
        for encoder in self._encoders:
            encoder.close()

    def _drop_state(self) -> None:
        self._state = ()
        self.adapters.forget()

    def _load(self, folder: Path | None, progress: bool) -> decoder.Params[jax.Array]:
        setup, config = self.setup, self._config
        options = config.quantization, setup.head
        if folder is None:
            seed = config.seed % 2**32 if config.load_format == "dummy" else 0
            params = weights.load_random(setup.spec, setup.layout, setup.dtype, seed, *options, setup.family)
        else:
            params = weights.load(folder, setup.spec, setup.family, setup.layout, setup.dtype, progress, *options)
        return replace(params, draft=self._load_draft(progress))

    def _load_draft(self, progress: bool) -> Any:
        setup, config = self.setup, self._config
        seed = config.seed % 2**32 if config.load_format == "dummy" else None
        return draft_setup.load(setup.drafting, setup.draft, setup.layout.unstaged, setup.dtype, progress, seed)

    def _start_programs(self, plan: MemoryPlan) -> None:
        setup = self.setup
        self.memory_plan = plan
        self.geometry = geometry = Geometry(
            num_slots=setup.max_num_seqs,
            num_blocks=plan.num_blocks,
            block_size=plan.need.block_size,
            max_model_len=plan.max_model_len,
            float8=setup.float8,
            window=cache_window(setup),
            num_window_blocks=plan.num_window_blocks,
        )
        self.programs = self._list_programs()
        self._state_shapes = self._describe_state()
        if setup.num_ticks > 1:
            num_blocks = [geometry.array_blocks(group) for group in range(geometry.num_groups)]
            self.ticks = Ticks(setup.num_ticks, geometry.num_slots, num_blocks)
        self._step_model = StepModel(
            spec=setup.stage_spec,
            geometry=geometry,
            num_logprobs=self.num_logprobs,
            extras=self.extras,
            processors=tuple(self._processors.values()),
            layout=setup.layout,
            params=self._params_shapes,
            state=self._state_shapes,
            kernels=setup.kernels,
            head=setup.head,
            adapters=self._row_weights,
            drafting=self.drafting,
            encoder=None if setup.encoder is None else setup.encoder.spec,
            num_ticks=setup.num_ticks,
            first_timestamp=None
            if setup.encoder is None or not setup.encoder.num_mels
            else timestamps.first_timestamp(setup.generation_config, setup.spec.vocab_size),
        )
        self.programs.platform = setup.platform
        self.programs.kept = self._kept = KeptPrograms(
            self._config.cache_dir() / "whole",
            self._config.cache_bytes(),
            self._digest,
            setup.layout.devices,
        )
        # Programs from JAX's cache cannot be serialized again.
        use_compilation_cache(self._config.cache_dir() / ("small" if self._kept.is_on else ""))
        text = describe_memory(plan, setup)
        differs = aot_manifest.difference(setup.prepared, describe_programs(self._config, setup, plan))
        if differs:
            _log.warning("not all prepared programs in %s can be used: %s", self._config.cache_dir(), differs)
        start = (
            f"{len(self.programs.covering)} of {self.programs.num_all} programs before the first request; compiled for "
            "this machine, or found in its cache\n"
            + (
                f"deterministic: every step computes {setup.max_num_batched_tokens} tokens\n"
                if self._config.deterministic
                else ""
            )
            + "kernels: "
            + ", ".join(
                f"{operation}={setup.kernels[operation]} ({why})"
                for operation, why in kernel_reasons(self._config, setup.platform, setup.kernels).items()
            )
        )
        _log.info("%s\n%s", text, start)
        self.programs.begin(self.programs.covering, os.cpu_count() or 2)

    def _digest(self) -> tuple[str, str]:
        """Return digests of the inputs of tracing except shapes, and of the compiler with its options."""
        compiler = digest(digest_compiler(tuple(self.setup.layout.devices)), self._options)
        return digest(digest_source(), self._step_model), compiler

    @cached_property
    def _sampled_leaves(self) -> list[int]:
        return [device_state.leaf_index(self._state_shapes, name) for name in ("tokens", "sampling", "extras")]

    def _describe_state(self) -> Any:
        setup = self.setup
        sizes = self.geometry, setup.max_num_batched_tokens, self.extras
        own = setup.layout, setup.dtype, self.drafting, setup.cache_dtype
        batch_size = 0
        if self._keeps_batch:
            keys = *self.programs.covering, *self.programs.rest
            batch_size = max(batch.sent_size(key.shape, setup.num_ticks) for key in keys)
        source_blocks = -(-setup.max_source // self.geometry.block_size)
        own_sizes = batch_size, setup.media_rows, source_blocks, setup.num_ticks
        return device_state.abstract(setup.stage_spec, *sizes, *own, *own_sizes)

    def _list_programs(self) -> Programs:
        setup, geometry = self.setup, self.geometry
        sizes = setup.max_num_batched_tokens, geometry.num_slots, geometry.block_size, ROW_WIDTH
        most = self.limits.max_adapters
        drafts = 0 if self.drafting is None else self.drafting.most
        further: dict[str, Any] = {"max_adapters": most, "drafts": drafts > 0}
        if self._config.deterministic:
            uniform = self._with_media([batch.uniform_shape(*sizes, drafts)])
            if geometry.num_groups > 1:
                uniform = batch.of_two_groups(uniform)
            return Programs([], uniform, self._lower, self.metrics, (), **further)
        is_quantized = self._config.quantization is not None or setup.family.stored is not None
        is_narrow = setup.dtype != jnp.float32 or is_quantized
        # For one row XLA's CPU back end converts all 8 and 16-bit weights, and on a GPU a norm is two kernels.
        on_cpu = setup.platform == "cpu"
        smallest = 1 if on_cpu and not is_narrow else 2
        decode = self._with_axes(batch.decode_shapes(geometry.num_slots, smallest, setup.platform), 1)
        ragged = self._with_media(batch.ragged_shapes(*sizes, setup.platform))
        verifying = batch.verifying_shapes(self._max_verified, geometry.num_slots, drafts) if drafts else []
        verifying = self._with_axes(verifying, 1)
        if geometry.num_groups > 1:
            decode, ragged, verifying = map(batch.of_two_groups, (decode, ragged, verifying))
        # On a GPU each program delays the start, and noise for greedy rows takes 10 us.
        variants = VARIANTS if on_cpu else VARIANTS[1:]
        further |= {"verifying": verifying, "coarse_factor": 2 if on_cpu else 4}
        return Programs(decode, ragged, self._lower, self.metrics, variants, **further)

    def _with_media(self, shapes: list[Shape]) -> list[Shape]:
        if self.encoder is None:
            return shapes
        own = {"media": self.encoder.num_rows, "looks_ahead": self.encoder.whole_image > 0}
        return [replace(shape, **own) for shape in self._with_axes(shapes, 3)]

    def _with_axes(self, shapes: list[Shape], count: int) -> list[Shape]:
        """Give shapes positions in `count` dimensions, if the model has several."""
        return [replace(shape, axes=count) for shape in shapes] if self.setup.spec.has_axes else shapes

    def _finish_programs(self, free: int | None, progress: bool) -> None:
        """Wait for the covering programs; compile them for fewer blocks if they need more memory than estimated."""
        while True:
            self._allocate_program = self._kept.make(
                "allocate", self._state_shapes, partial(device_state.lower_allocation, self._state_shapes)
            )
            self._compile_small()
            self.programs.wait(progress)
            temporaries = max(self._temporary_bytes(key) for key in self.programs.covering)
            temporaries = max(temporaries, *(each.temporary_bytes for each in self._encoders), 0)
            fitting = plan_memory(self._config, self.setup, free, temporaries)
            if fitting.num_blocks >= self.geometry.num_blocks:
                return
            self._start_programs(fitting)

    def _temporary_bytes(self, key: Key) -> int:
        memory = self.programs[key].memory_analysis()
        own = memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
        is_second = key.part in ("sample", "finish")
        logits = 4 * key.shape.sampled * self._num_columns // self.setup.layout.shards("vocab") if is_second else 0
        return own + logits

    @property
    def _num_columns(self) -> int:
        return self.setup.layout.padded("vocab", self.setup.spec.vocab_size)

    def _compile_small(self) -> None:
        def make(name: str, run: Callable[..., Any], donated: Sequence[int], *described: Any) -> Any:
            options = self._options if name.startswith("score") else None
            jitted = jax.jit(run, donate_argnums=donated, compiler_options=options)
            return self._kept.make(name, described, lambda: jitted.lower(*described))

        programs = small_programs.compile_all(self._step_model, make)
        if self._config.kv_offloading_size or self._config.kv_transfer_config is not None:
            programs |= host_tier.compile_moves(self._step_model, make)
        shapes, spec = self._state_shapes, self.setup.stage_spec
        kv = leaves_by_group(spec, self.geometry, shapes.kv)
        self._small = SmallPrograms(programs, shapes, self.geometry, kv, spec.vocab_size)
        if self.encoder is not None:
            self.encoder.compile(make, shapes)
        if self.sources is not None:
            self.sources.compile(make, self._step_model)

    def _lower(self, key: Key) -> jax.stages.Lowered:
        model, layout = self._step_model, self.setup.layout
        if key.part == "sample":
            assert key.variant is not None
            return self._lower_sample(key.shape.rows, key.variant)
        steps = step if model.num_ticks == 1 else ticks
        if key.variant is None:
            run = steps.build_forward(model, key.shape)
        else:
            run = steps.build(model, key.shape, key.variant)
        size, donated = step.sent_size(model, key.shape, key.variant), step.donated(model, key.variant)
        buffer = layout.ranked(jax.ShapeDtypeStruct((size,), jnp.int32, sharding=layout.sharding()))
        params, state = (tuple(jax.tree.leaves(tree)) for tree in (self._params_shapes, self._state_shapes))
        if key.part == "finish" and key.variant is not None:
            run = step.build_finish(model, key.shape, key.variant)
            further = self._describe_second(key.shape.sampled)
        else:
            further = (tuple(jax.tree.leaves(self._adapter_shapes)),) * key.shape.adapters
        compiled = jax.jit(run, donate_argnums=donated, compiler_options=self._options)
        return compiled.lower(params, state, buffer, *further)

    def _lower_sample(self, rows: int, variant: Variant) -> jax.stages.Lowered:
        shapes = self._state_shapes
        run = step.build_sample(self._step_model, rows, variant)
        return jax.jit(run, donate_argnums=(0,), compiler_options=self._options).lower(
            shapes.tokens, shapes.sampling, shapes.extras, *self._describe_second(rows)
        )

    def _describe_second(self, num_places: int) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
        width = len(batch.MASK_COLUMNS) + -(-self.setup.spec.vocab_size // 32)
        layout = self.setup.layout
        masks = jax.ShapeDtypeStruct((num_places, width), jnp.int32, sharding=layout.sharding())
        columns = layout.sharding(None, "vocab")
        logits = jax.ShapeDtypeStruct((num_places, self._num_columns), jnp.float32, sharding=columns)
        return layout.ranked((logits, masks))

    def note_compilation(self) -> None:
        if threading.get_ident() == self._running_thread:
            self.metrics.compilations_after_ready += 1


def _listener(runner: weakref.ref[Runner]) -> Callable[..., None]:
    """Return a listener that counts compilations, without keeping the runner alive."""

    def listen(event: str, duration_secs: float, **_: str | int) -> None:
        alive = runner()
        if event == "/jax/core/compile/backend_compile_duration" and alive is not None:
            alive.note_compilation()

    return listen
