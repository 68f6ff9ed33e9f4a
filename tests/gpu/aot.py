"""Compile the engine's steps for an NVIDIA H200 without a GPU, and read XLA's output.

XLA's GPU compiler needs a description of the device (h200_target.txtpb), the CUDA plugin's wheels and an assembler, but
no driver. Nothing runs and nothing is tuned: products are the compiler's default choice, so tests assert only the
structure of a program.
"""

from __future__ import annotations

import functools
import re
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import topologies

import pallas_kernels
from jaxllm.checkpoints import weights
from jaxllm.families.families import Family, read_images, read_spec
from jaxllm.families.family import Images
from jaxllm.model import decoder, lora, quantized, stages
from jaxllm.model.decoder import Params
from jaxllm.model.lora_linear import AdapterWeights
from jaxllm.model.parameters import Scheme, Weight
from jaxllm.model.sharding import NO_STAGES, Division, Layout, make_layout
from jaxllm.model.spec import Spec, heads_per_shard
from jaxllm.runner import batch, device_state, step, ticks
from jaxllm.runner.batch import Shape
from jaxllm.runner.step_model import StepModel
from jaxllm.sampling.sampler import ROW_WIDTH, Extras, Variant
from jaxllm.setup import draft_setup
from jaxllm.setup.draft_setup import Drafting
from jaxllm.setup.kv_cache import Geometry
from jaxllm.setup.model_setup import OPERATIONS
from pallas_kernels import Choice, Site
from tests.gpu import buffers
from tests.gpu.buffers import Buffers

TARGET = Path(__file__).with_name("h200_target.txtpb")
CAPABILITY = 90
RANK = 16  # of adapters
# On a GPU the tuner decides whether to split a product along its sum; without one a heuristic would split it.
FIXED = {"xla_gpu_experimental_force_split_k": 1}
# Of an executable, per launched kernel; 7 to 18 are observed.
KERNEL_KIB = 24
_LAUNCHED = "kCustomKernel kKernel kCustomCall kCublasLtMatmul kGemm kCopy kMemset32BitValue kMemzero".split()


class Misaligned(AssertionError):
    """A program that fails on a GPU: an operand of a Triton call begins at an unaligned address."""


@dataclass(frozen=True)
class Program:
    """A compiled step."""

    thunks: Counter[str]  # by kind, also inside command buffers
    outside: Counter[str]  # outside of command buffers, including these
    text: str  # the optimized HLO
    temporary_bytes: int
    argument_bytes: int  # of weights, state and batch
    aliased_bytes: int  # outputs that are inputs
    cache_bytes: int  # of one device
    block_shape: tuple[int, ...]  # of a layer's keys on one device, [N, K, P, C]
    serialized_bytes: int  # of the executable, in the compilation cache
    dumps: tuple[str, str]  # from XLA: the buffer assignment, and the optimized HLO with its names

    @functools.cached_property
    def buffers(self) -> Buffers:
        """The buffers that the program's commands use."""
        return buffers.read(*self.dumps)

    @functools.cached_property
    def payloads(self) -> list[bytes]:
        """The payload of each Triton call."""
        return list(buffers.payloads(self.dumps[1]))

    @property
    def kernels(self) -> int:
        """The number of launches, in a graph or outside."""
        return sum(self.thunks[kind] for kind in _LAUNCHED)

    @property
    def all_reduces(self) -> int:
        """The number of sums over devices."""
        return self.thunks["kAllReduce"]

    def violations(self, decodes: bool, temporary_bytes: int, kernels: float | None = None) -> list[str]:
        """Return the deviations of the program from its expected structure; `kernels`: most launches allowed."""
        found = []
        if decodes and self.outside != Counter(kCommandBuffer=1):
            found.append(f"a decode step is one CUDA graph and nothing else, this is {dict(self.outside)}")
        sizes = ",".join(map(str, self.block_shape))
        copies = len(re.findall(rf"= \w+\[{sizes}\]\S* (?:copy|copy-start)\(", self.text))
        if copies:
            found.append(f"{copies} copies of a layer's keys or values, [{sizes}]")
        if self.aliased_bytes < self.cache_bytes:
            found.append(f"{self.aliased_bytes} bytes are changed in place, and the cache has {self.cache_bytes}")
        if self.temporary_bytes > temporary_bytes:
            found.append(f"{self.temporary_bytes} bytes of temporary memory, more than {temporary_bytes}")
        if kernels is not None and self.kernels > kernels:
            found.append(f"{self.kernels} kernels, more than {kernels}")
        if self.serialized_bytes > KERNEL_KIB * 1024 * self.kernels:
            found.append(f"an executable of {self.serialized_bytes} bytes for {self.kernels} kernels")
        return found


@functools.cache
def layout(
    devices: int = 1, divides_experts: bool = False, division: Division = NO_STAGES, num_ranks: int = 1
) -> Layout:
    """Describe a mesh of `devices` H200."""
    described = topologies.get_topology_desc(
        platform="cuda", target_config=TARGET.read_text(), topology=f"1x1x{devices}"
    )
    size = devices // max(1, len(division.bounds) - 1) // num_ranks
    return make_layout(described.devices, size, divides_experts, division, num_ranks)


def kernels_of(
    spec: Spec,
    over: Layout,
    dtype: str,
    asked: Mapping[str, str] | None = None,
    scheme: Scheme | None = None,
    cache: str | None = None,
    is_deterministic: bool = False,
) -> dict[str, Choice]:
    """Choose kernels as an engine on H200 does; `asked`: names by operation, `cache`: type of keys and values."""
    heads, kv_heads = heads_per_shard(spec, over.shards("heads"))
    site = Site("gpu", CAPABILITY, dtype, cache or dtype, heads, kv_heads, spec.head_size, shards=over.shards("vocab"))
    site = replace(site, kind=scheme.kind if scheme else "float", value_size=spec.latent and spec.latent.rank)
    site = replace(site, is_deterministic=is_deterministic)
    return {
        operation: pallas_kernels.resolve(operation, site, (asked or {}).get(operation)) for operation in OPERATIONS
    }


def compile_step(
    config: Mapping[str, Any],
    *,
    rows: int | None = None,
    tokens: int | None = None,
    devices: int = 1,
    variant: Variant = Variant.GREEDY,
    dtype: str = "bfloat16",
    kernels: Mapping[str, str] | None = None,
    context: int = 4096,
    donates: bool = True,
    stays: bool = True,
    flags: Mapping[str, Any] | None = None,
    is_deterministic: bool = False,
    adapters: int = 0,
    drafting: Drafting | None = None,
    scheme: Scheme | None = None,
    cache: str | None = None,
    divides_experts: bool = False,
    num_stages: int = 1,
    media: int = 0,
    num_ranks: int = 1,
) -> Program:
    """Compile a decode step of `rows`, or a ragged one of `tokens`, of a model given by config.json.

    With `drafting` each row verifies and drafts the maximal number of drafts. With a `scheme` the layers' matrices are
    quantized, not the head; without one as config.json describes. `cache` is the type of keys and values, default
    `dtype`. `stays`: the state includes the batch. `divides_experts`: expert parallelism. `num_stages` share the
    devices, with batches in flight unless rows draft or have adapters, or `num_ranks` with `rows` or `tokens` each.
    `media`: rows of images' embeddings, which a ragged step reads.
    """
    spec, family = read_spec(dict(config))
    slots = max(64, rows or 0)
    geometry = Geometry(num_slots=slots, num_blocks=8192, block_size=16, max_model_len=context)
    if is_deterministic:
        shapes = [batch.uniform_shape(tokens, slots, geometry.block_size, ROW_WIDTH)]
    elif rows and drafting is not None:
        tokens = rows * (1 + drafting.most)
        shapes = [one for one in batch.verifying_shapes(tokens, slots, drafting.most) if one.rows == rows]
    elif rows:
        shapes = batch.decode_shapes(slots, 2, "gpu")
    else:
        shapes = batch.ragged_shapes(8192, slots, geometry.block_size, ROW_WIDTH, "gpu")
    axes = (1 if rows else 3) if spec.has_axes else 0
    own = {"adapters": adapters, "media": media, "axes": axes}
    (shape,) = (replace(one, **own) for one in shapes if one.tokens == (tokens or rows))
    options = {**step.compiler_options("gpu", is_deterministic), **({} if is_deterministic else FIXED), **(flags or {})}
    return compile_shape(
        spec,
        geometry,
        shape,
        devices,
        variant,
        dtype,
        kernels,
        donates,
        stays,
        options,
        drafting,
        scheme,
        cache,
        is_deterministic,
        family,
        divides_experts,
        num_stages,
        read_images(dict(config), spec, family) if media else None,
        num_ranks,
    )


def compile_shape(
    spec: Spec,
    geometry: Geometry,
    shape: Shape,
    devices: int,
    variant: Variant | None,
    dtype: str,
    kernels: Mapping[str, str] | None,
    donates: bool,
    stays: bool,
    options: Mapping[str, Any],
    drafting: Drafting | None = None,
    scheme: Scheme | None = None,
    cache: str | None = None,
    is_deterministic: bool = False,
    family: Family | None = None,
    divides_experts: bool = False,
    num_stages: int = 1,
    images: Images | None = None,
    num_ranks: int = 1,
) -> Program:
    """Compile one program; without a variant, the forward part of a step."""
    over = layout(devices, divides_experts, stages.divide(spec, num_stages), num_ranks)
    if scheme is None:
        params = weights.abstract(spec, over, dtype, family=family)
        scheme = family.stored.scheme if family is not None and family.stored is not None else None
    else:
        params = _quantized(spec, over, dtype, scheme)
    adapter = lora.abstract(spec, over, dtype, RANK) if shape.adapters else ()
    spec = stages.of_one(spec, over)
    params = replace(params, draft=draft_setup.abstract(drafting, over, jnp.dtype(dtype)))
    extras = Extras(spec.vocab_size)
    stored = jnp.dtype(cache or dtype)
    own = over, jnp.dtype(dtype), drafting, stored
    rows = (0, 0) if images is None else (shape.media, images.spec.row_width)
    num_ticks = 1 if drafting or shape.adapters else num_stages
    size = 2 * batch.sent_size(shape, num_ticks) * stays
    state = device_state.abstract(spec, geometry, shape.tokens, extras, *own, size, rows, num_ticks=num_ticks)
    chosen = kernels_of(spec, over, dtype, kernels, scheme, cache, is_deterministic)
    model = StepModel(
        spec=spec,
        geometry=geometry,
        num_logprobs=0,
        extras=extras,
        processors=(),
        layout=over,
        params=params,
        state=state,
        kernels=chosen,
        adapters=AdapterWeights(adapter, joins=True),
        drafting=drafting,
        num_ticks=num_ticks,
    )
    of = step if num_ticks == 1 else ticks
    run = of.build_forward(model, shape) if variant is None else of.build(model, shape, variant)
    size = step.sent_size(model, shape, variant)
    buffer = over.ranked(jax.ShapeDtypeStruct((size,), jnp.int32, sharding=over.sharding()))
    leaves = (tuple(jax.tree.leaves(tree)) for tree in (params, state))
    adapters = (tuple(jax.tree.leaves(adapter)),) * shape.adapters
    donated = step.donated(model, variant) if donates else ()
    lowered = jax.jit(run, donate_argnums=donated).lower(*leaves, buffer, *adapters)
    block = state.kv[0][0].sharding.shard_shape(state.kv[0][0].shape)
    drafted = () if state.drafted is None else state.drafted.kv
    return read(lowered, weights.num_bytes((state.kv, drafted)) // devices, block, options)


def _quantized(spec: Spec, over: Layout, dtype: str, scheme: Scheme) -> Params[Any]:
    """Describe a model's weights, the layers' matrices quantized."""
    declared = decoder.declare(spec, over)
    layers = [
        {name: replace(weight, scheme=scheme) if weight.is_product else weight for name, weight in layer.items()}
        for layer in declared.layers
    ]
    described = replace(declared, layers=tuple(layers))
    return jax.tree.map(
        lambda one: quantized.describe(one, over, dtype), described, is_leaf=lambda one: isinstance(one, Weight)
    )


def read(
    lowered: Any, cache_bytes: int, block_shape: tuple[int, ...], options: Mapping[str, Any] | None = None
) -> Program:
    """Compile a lowered program with `options` (default: a step's) and read its dumps; raise `Misaligned`."""
    options = {**step.compiler_options("gpu"), **FIXED} if options is None else options
    with tempfile.TemporaryDirectory() as folder:
        compiled = lowered.compile(compiler_options={"xla_dump_to": folder, "xla_dump_hlo_as_text": True, **options})
        found = sorted(Path(folder).glob("*thunk_sequence*.txt"))
        final = [path for path in found if "after_thunk_passes" in path.name] or found
        lines = final[-1].read_text().splitlines()
        ends = "after_optimizations-buffer-assignment.txt", "gpu_after_optimizations.txt"
        assignment, optimized = (next(Path(folder).glob(f"*{end}")).read_text() for end in ends)
    if misaligned := buffers.misaligned(optimized):
        raise Misaligned("; ".join(misaligned))
    kinds = [(line[:1].isspace(), re.sub(r"^[\s\d:]*", "", line).split()[0]) for line in lines if line.strip()]
    memory = compiled.memory_analysis()
    return Program(
        thunks=Counter(kind for _, kind in kinds),
        outside=Counter(kind for is_inside, kind in kinds if not is_inside),
        text=compiled.as_text(),
        temporary_bytes=memory.temp_size_in_bytes,
        argument_bytes=memory.argument_size_in_bytes,
        aliased_bytes=memory.alias_size_in_bytes,
        cache_bytes=cache_bytes,
        block_shape=block_shape,
        serialized_bytes=len(compiled.runtime_executable().serialize()),
        dumps=(assignment, optimized),
    )
