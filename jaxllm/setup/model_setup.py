"""Choose devices, types, sizes, kernels and their memory."""

from __future__ import annotations

import importlib.metadata
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import psutil

import pallas_kernels
from jaxllm import combinations
from jaxllm.checkpoints import weights
from jaxllm.checkpoints.described import Described, describe
from jaxllm.compiling import aot_manifest
from jaxllm.compiling.program_digest import cpu_name
from jaxllm.config import EngineConfig
from jaxllm.errors import UserError
from jaxllm.families.family import Encoder, Family, Images
from jaxllm.families.stored_formats import StoredFormat
from jaxllm.media.processor import Processor
from jaxllm.model import lora, quantized, spectrogram, stages
from jaxllm.model.decoder import Params, RowWeights, declare
from jaxllm.model.head import Head
from jaxllm.model.lora_linear import AdapterWeights
from jaxllm.model.parameters import Scheme, Weight
from jaxllm.model.sharding import Layout, make_layout
from jaxllm.model.spec import Spec, heads_per_shard
from jaxllm.sampling.logits_processors import processor_name
from jaxllm.sampling.sampler import Extras
from jaxllm.sampling.vocab_parallel import MOST_TOKENS
from jaxllm.scheduler import windowed
from jaxllm.setup import draft_setup, kv_cache, memory_plan
from jaxllm.setup.draft_setup import DraftFolder, Drafting
from jaxllm.setup.memory_plan import MemoryPlan
from jaxllm.version import __version__
from pallas_kernels import Choice, Site

OPERATIONS = (
    *("write_kv", "paged_decode", "paged_prefill", "sample", "linear"),
    *("fused_linear", "fused_topk", "fused_experts"),
)
GPU_SHARE = 0.97  # of the remaining memory; the rest is for code and autotuning
PINNED = 32.0  # GiB of pinned memory that fit into XLA's limit of 64
CPU_SHARE = 0.25  # of the free memory, for KV blocks; the rest is for other programs
TOKEN_COST = {"cpu": 120, "gpu": 4}  # see `Limits`; by benchmarks/verifying.py, on no GPU yet
CACHE_DTYPES = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2", "int8": "int8"}
MEDIA_UNIT = 64  # embeddings of images
USUAL_UNITS = 20  # of an image of a million pixels
CPU_CEILING = 2 << 30  # bytes of KV blocks: 87,000 tokens of a 0.5B model in float32


@dataclass(frozen=True)
class Setup:
    """The choices from configuration, model and device."""

    folder: Path
    spec: Spec
    family: Family
    head: Head | None  # None: it generates
    generation_config: dict[str, Any]
    platform: str
    devices: tuple[jax.Device, ...]  # pyright: ignore[reportInvalidTypeForm]
    layout: Layout  # over the first devices
    dtype: jnp.dtype
    cache_dtype: jnp.dtype
    float8: str | None  # see `Geometry`
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    kernels: Mapping[str, Choice]
    drafting: Drafting | None
    draft: DraftFolder | None
    token_cost: int  # see `Limits`
    prepared: Mapping[str, Any]  # the manifest by `jaxllm compile`
    images: Images | None = None
    processor: Processor | None = None
    encoder: Encoder | None = None
    decoder_start: tuple[int, ...] = ()  # tokens
    num_ticks: int = 1  # of a step: the pipeline stages if each computes another batch, see `choose_ticks`

    @property
    def stage_spec(self) -> Spec:
        return stages.of_one(self.spec, self.layout)

    @property
    def max_source(self) -> int:
        """Most tokens of an encoder's input; 0: no encoder."""
        if self.encoder is None or self.encoder.num_mels:
            return 0 if self.encoder is None else self.encoder.spec.max_position
        return min(self.encoder.spec.max_position, self.max_model_len)

    @property
    def whole_image(self) -> int:
        """Tokens of the longest image, if the tokens of an image attend to each other, and steps compute it whole."""
        if self.processor is None or self.images is None or not self.images.is_bidirectional:
            return 0
        return self.processor.most_tokens

    @property
    def media_units(self) -> int:
        """Most units of `MEDIA_UNIT` embeddings that eight images of usual size, two of any, or two steps have."""
        if self.processor is None:
            return 0
        each = -(-self.processor.most_tokens // MEDIA_UNIT)
        return max(8 * min(each, USUAL_UNITS), 2 * each, -(-2 * self.max_num_batched_tokens // MEDIA_UNIT))

    @property
    def media_rows(self) -> tuple[int, int]:
        return self.media_units * MEDIA_UNIT, 0 if self.images is None else self.images.spec.row_width

    @property
    def local_devices(self) -> list[jax.Device]:  # pyright: ignore[reportInvalidTypeForm]
        return [device for device in self.devices if device.process_index == jax.process_index()]


def choose_devices(config: EngineConfig) -> tuple[jax.Device, ...]:  # pyright: ignore[reportInvalidTypeForm]
    # Read when the back end starts; without it XLA takes 75 % of a GPU.
    if not {"XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"} & os.environ.keys():
        os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] = str(config.gpu_memory_utilization)
    if config.kv_offloading_size > PINNED:
        os.environ.setdefault("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", str(math.ceil(2 * config.kv_offloading_size)))
    try:
        devices = jax.devices() if config.device == "auto" else jax.devices(config.device)
        count = config.tensor_parallel_size * config.pipeline_parallel_size
        return tuple(devices if jax.process_count() == 1 else of_each_host(devices, count))
    except RuntimeError as error:
        raise UserError(
            "device is 'gpu' but JAX sees none: install jaxllm[cuda12] or jaxllm[cuda13], and check `nvidia-smi`.",
            "device",
        ) from error


def of_each_host(devices: Sequence[Any], count: int) -> list[Any]:
    """Return `count` devices, equally many of each process; raise UserError if that is impossible."""
    by_process: dict[int, list[Any]] = {}
    for device in devices:
        by_process.setdefault(device.process_index, []).append(device)
    each, fewest = count // len(by_process), min(map(len, by_process.values()))
    if count % len(by_process) or each > fewest:
        raise UserError(
            f"tensor_parallel_size is {count} (times pipeline_parallel_size), but the {len(by_process)} hosts have "
            f"{fewest} devices each or more; use a multiple of {len(by_process)}, at most {len(by_process) * fewest}.",
            "tensor_parallel_size",
        )
    return [device for _, own in sorted(by_process.items()) for device in own[:each]]


def choose_dtype(config: EngineConfig, checkpoint: Mapping[str, Any], platform: str) -> jnp.dtype:
    """Return the type of weights and activations, also the cache's default.

    "auto" is float32 on a CPU (the fastest without 16-bit instructions); on a GPU the checkpoint's type, with bfloat16
    for float32.
    """
    if config.dtype != "auto":
        return jnp.dtype(config.dtype)
    if platform == "cpu":
        return jnp.dtype(jnp.float32)
    stored = checkpoint.get("dtype") or checkpoint.get("torch_dtype") or "bfloat16"
    if stored not in ("bfloat16", "float16", "float32"):
        raise UserError(f"config.json: dtype {stored!r:.80} is not supported; set dtype.", "dtype")
    return jnp.dtype(jnp.bfloat16 if stored == "float32" else stored)


def choose_cache_dtype(config: EngineConfig, dtype: jnp.dtype, is_cpu: bool) -> tuple[jnp.dtype, str | None]:
    """Return the type of the cache's arrays, and of 8-bit floats that they store as bytes, if any.

    On a CPU XLA would convert the whole pool of 8-bit floats in every layer: 72 MiB of temporaries for a pool of 32
    (jax 0.12).
    """
    if config.kv_cache_dtype == "auto":
        return dtype, None
    name = CACHE_DTYPES[config.kv_cache_dtype]
    if is_cpu and name != "int8":
        return jnp.dtype(jnp.uint8), name
    return jnp.dtype(name), None


def choose_kernels(
    config: EngineConfig,
    spec: Spec,
    layout: Layout,
    dtype: jnp.dtype,
    cache_dtype: jnp.dtype,
    scheme: Scheme | None,
    looks_ahead: bool = False,
) -> dict[str, Choice]:
    """Return an implementation for each operation: the configured one, or the best available.

    `scheme` is that of quantized matrices; `looks_ahead`: tokens of an image attend to each other. Raises UserError if
    a configured one cannot run here.
    """
    device = layout.devices[0]
    heads, kv_heads = heads_per_shard(spec, layout.shards("heads"))
    site = Site(
        platform=device.platform,
        capability=pallas_kernels.capability_of(device),
        dtype=dtype.name,
        cache_dtype=cache_dtype.name,
        heads=heads,
        kv_heads=kv_heads,
        head_size=spec.head_size if spec.latent is None else spec.latent.rank + spec.latent.rope_size,
        value_size=spec.latent.rank if spec.latent else None,
        block_tokens=config.block_size,
        has_softcap=spec.attention_softcap is not None,
        has_bias=spec.relative_buckets > 0,
        looks_ahead=looks_ahead,
        shards=layout.shards("vocab"),
        kind="float" if scheme is None else scheme.kind,
        rounds_rows=scheme is not None and scheme.rounds_rows,
        is_deterministic=config.deterministic,
    )
    asked = {}
    for text in config.kernels:
        operation, is_named, name = str(text).partition("=")
        if not is_named or operation not in OPERATIONS:
            known = ", ".join(OPERATIONS)
            raise UserError(f"kernels: {text!r} is not operation=implementation; operations are {known}.", "kernels")
        asked[operation] = name
    try:
        return {operation: pallas_kernels.resolve(operation, site, asked.get(operation)) for operation in OPERATIONS}
    except ValueError as error:
        raise UserError(f"kernels: {error}.", "kernels") from error


def kernel_reasons(config: EngineConfig, platform: str, kernels: Mapping[str, Choice]) -> dict[str, str]:
    return {
        operation: "asked for"
        if f"{operation}={chosen.name}" in config.kernels
        else chosen.reason or f"best on {platform}"
        for operation, chosen in kernels.items()
    }


def prepare(config: EngineConfig, needs_weights: bool = True) -> Setup:
    """Return all choices that need no weights, which are downloaded only if `needs_weights`."""
    folder = weights.resolve(config.model, config.revision, tokenizer_only=not needs_weights)
    given = config.max_model_len, config.runner, config.pooler_config, config.mm_processor_kwargs, config.most_videos
    described = describe(folder, *given)
    checkpoint, spec, family, head = described.config, described.spec, described.family, described.head
    devices = choose_devices(config)
    platform = devices[0].platform
    if config.kv_offloading_size:
        kv_cache.host_memory_kind(devices[0])
    if config.kv_offloading_disk is not None and not config.enable_prefix_caching:
        raise UserError("kv_offloading_disk needs enable_prefix_caching: only it finds blocks.", "kv_offloading_disk")
    if spec.vocab_size > MOST_TOKENS:
        raise UserError(f"config.json: vocab_size must be at most {MOST_TOKENS}, got {spec.vocab_size}.", "vocab_size")
    if config.max_model_len is not None and config.max_model_len > spec.max_position:
        raise UserError(
            f"max_model_len ({config.max_model_len}) is greater than what the model was made for "
            f"({spec.max_position} positions); lower it.",
            "max_model_len",
        )
    if family.stored is not None:
        _check_stored(config, family.stored)
    is_cpu = platform == "cpu"
    _check_combinations(config, described, family.stored is None, is_cpu)
    dtype = choose_dtype(config, checkpoint, platform)
    cache_dtype, float8 = choose_cache_dtype(config, dtype, is_cpu)
    scheme = weights.at_load(config.quantization, is_cpu) if family.stored is None else family.stored.scheme
    recorded = aot_manifest.read(config.cache_dir(), spec)
    if config.deterministic and any(str(text).startswith("paged_prefill") for text in config.kernels):
        raise UserError(
            "kernels: paged_prefill does nothing in deterministic mode, where every token attends by paged_decode.",
            "kernels",
        )
    most = described.most_tokens
    longest = config.max_model_len or recorded.get("max_model_len") or most
    slots, tokens = step_sizes(config, recorded, is_cpu, head is not None)
    if not spec.is_causal and tokens < longest:  # prompts are computed whole
        if config.max_num_batched_tokens is not None:
            raise UserError(
                f"max_num_batched_tokens ({tokens}) must be at least max_model_len ({longest}), because "
                f"{family.architectures[0]} reads whole prompts. Raise it, or lower max_model_len.",
                "max_num_batched_tokens",
            )
        tokens = longest
    is_bidirectional = described.images is not None and described.images.is_bidirectional
    whole_image = 0 if described.processor is None or not is_bidirectional else described.processor.most_tokens
    if whole_image and tokens < slots + whole_image:
        if config.max_num_batched_tokens is not None:
            raise UserError(
                f"max_num_batched_tokens ({tokens}) must be at least {slots + whole_image}: the {whole_image} tokens "
                f"of an image, which are computed in one step, and one token of each of {slots} requests. Raise it, or "
                "lower max_num_seqs.",
                "max_num_batched_tokens",
            )
        tokens = slots + whole_image

    division = stages.divide(spec, config.pipeline_parallel_size)
    ranks = config.data_parallel_size if config.shares_experts else 1
    layout = make_layout(devices, config.tensor_parallel_size, config.enable_expert_parallel, division, ranks)
    generation_config = weights.read_generation_config(folder)

    def kernels_of(own: Spec) -> dict[str, Choice]:
        return choose_kernels(config, own, layout, dtype, cache_dtype, scheme, whole_image > 0)

    how, draft = draft_setup.choose(config, spec, longest, kernels_of)
    return Setup(
        folder=folder,
        spec=spec,
        family=family,
        head=head,
        # Older checkpoints have the end token in config.json only.
        generation_config={"eos_token_id": checkpoint.get("eos_token_id")} | generation_config,
        platform=platform,
        devices=devices,
        layout=layout,
        dtype=dtype,
        cache_dtype=cache_dtype,
        float8=float8,
        max_model_len=longest,
        max_num_seqs=slots,
        max_num_batched_tokens=tokens,
        kernels=kernels_of(spec),
        drafting=how,
        draft=draft,
        token_cost=0 if config.deterministic else TOKEN_COST[platform],
        prepared=recorded,
        images=described.images,
        processor=None if described.processor is None else described.processor.within(longest),
        encoder=described.encoder,
        decoder_start=() if described.encoder is None else decoder_start({**checkpoint, **generation_config}),
        num_ticks=choose_ticks(config, layout, how, described.images),
    )


def choose_ticks(config: EngineConfig, layout: Layout, drafting: Drafting | None, images: Images | None) -> int:
    """Return the ticks of a step: one for each stage, with a batch in each; or 1, a program that runs all stages.

    Drafts, adapters, images, KV offloading and several hosts need one batch in a program.
    """
    needs_one = drafting, images, config.enable_lora, config.kv_offloading_size, layout.spans_processes
    return 1 if any(needs_one) else layout.stages


def decoder_start(settings: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the tokens with which a decoder without a prompt begins; raise UserError for others than ids.

    `settings` are those of config.json and generation_config.json.
    """
    first = settings.get("decoder_start_token_id")
    found = settings.get("bos_token_id") if first is None else first, settings.get("forced_bos_token_id")
    if any(token is not None and (type(token) is not int or token < 0) for token in found):
        raise UserError(f"decoder_start_token_id or forced_bos_token_id is no token id: {found!r:.80}.", "model")
    return tuple(token for token in found if token is not None)


def _check_stored(config: EngineConfig, stored: StoredFormat) -> None:
    kinds = {"int8": "int8", "fp8": "float8", "int4": "int4"}
    if config.quantization is not None and kinds[config.quantization] != stored.scheme.kind:
        raise UserError(
            f"quantization {config.quantization} is not possible: the checkpoint is quantized already "
            f"({stored.method}, {stored.scheme.kind}); leave it out.",
            "quantization",
        )


def _check_combinations(config: EngineConfig, described: Described, rounds: bool, is_cpu: bool) -> None:
    """Raise UserError for incompatible settings; `rounds`: this engine would quantize the weights."""
    asked = {
        "speculative_config": config.speculative_config is not None,
        "enable_lora": config.enable_lora,
        "deterministic": config.deterministic,
        "pipeline_parallel_size": config.pipeline_parallel_size > 1,
        "enable_expert_parallel": config.enable_expert_parallel,
        "kv_offloading_size": config.kv_offloading_size > 0,
        "kv_transfer_config": config.kv_transfer_config is not None,
        "enable_sleep_mode": config.enable_sleep_mode,
        "enable_kv_cache_events": config.enable_kv_cache_events,
        "data_parallel_size": config.data_parallel_size > 1,
        combinations.RANKS: config.shares_experts,
        "kv_cache_dtype": config.kv_cache_dtype != "auto",
        "quantization": config.quantization is not None and rounds,
    }
    spec = described.spec
    present = {
        combinations.POOLS: described.head is not None,
        combinations.IMAGES: described.images is not None,
        combinations.ANY_SIZE: spec.has_axes,
        combinations.WHOLE_IMAGES: described.images is not None and described.images.is_bidirectional,
        combinations.SEQ2SEQ: described.encoder is not None,
        combinations.WHOLE_PROMPTS: not spec.is_causal,
        combinations.LATENT: spec.latent is not None,
        combinations.EXPERTS: bool(spec.experts),
        "kv_offloading_disk": config.kv_offloading_disk is not None,
        "kv_transfer_config": config.kv_transfer_config is not None,
        combinations.NO_EXPERTS: spec.experts is None,
        # A ring all-reduce sums each piece in another order, except with two devices.
        combinations.MANY_GPUS: not is_cpu and config.tensor_parallel_size > 2,
        combinations.RANKS: config.shares_experts,
    }
    combinations.check(*([name for name, holds in own.items() if holds] for own in (asked, present)))


def step_sizes(config: EngineConfig, recorded: Mapping[str, Any], is_cpu: bool, pools: bool = False) -> tuple[int, int]:
    """Return the number of slots and the tokens of a step.

    The user's numbers take precedence over the manifest's, `recorded`, which is ignored if only one of the two is
    deterministic. A deterministic step always computes its full size, which is therefore small.
    """
    if recorded.get("deterministic", False) != config.deterministic:
        recorded = {}
    slots = config.max_num_seqs or recorded.get("max_num_seqs")
    tokens = config.max_num_batched_tokens or recorded.get("max_num_batched_tokens")
    if config.deterministic:
        usual_slots, usual_tokens = (16, 32) if is_cpu else (128, 256)
    elif pools:  # a prompt takes few steps
        usual_slots, usual_tokens = (256, 2048) if is_cpu else (1024, 16384)
    else:
        usual_slots, usual_tokens = (64, 160) if is_cpu else (256, 8192)
    tokens = tokens or max(usual_tokens, 2 * (slots or 0))  # at least half of a step for prompts
    return slots or min(usual_slots, tokens), tokens


def free_bytes(setup: Setup) -> int | None:
    """Return the free bytes of one device, measured before any allocation; None if not reported."""
    if setup.platform == "cpu":
        count = min(len(setup.local_devices), len(setup.layout.devices))
        return psutil.virtual_memory().available // count  # virtual devices share the host's
    stats = setup.local_devices[0].memory_stats()
    if not stats or "bytes_limit" not in stats:
        return None
    return stats["bytes_limit"] - stats.get("bytes_in_use", 0)


def plan_memory(config: EngineConfig, setup: Setup, free: int | None, temporaries: int | None = None) -> MemoryPlan:
    """Divide the memory of one device; raise UserError if a part does not fit.

    `free`: bytes before any allocation; `temporaries`: of the largest program, None before compilation.
    """
    spec = setup.spec
    longest = -(-setup.max_model_len // config.block_size)
    head = None if setup.drafting is None else setup.drafting.head
    num_aux = 0 if head is None else len(head.aux_layers)
    is_cpu = setup.platform == "cpu"
    described = describe_weights(config, setup)
    adapters = describe_adapters(config, setup)
    host = int(config.kv_offloading_size * (1 << 30))
    if temporaries is None and host > psutil.virtual_memory().available:
        raise UserError(
            f"kv_offloading_size is {memory_plan.size(host)}, and "
            f"{memory_plan.size(psutil.virtual_memory().available)} of the host's memory are free.",
            "kv_offloading_size",
        )
    device = memory_plan.Device(
        free=free if free is None or not is_cpu else free - host // len(setup.layout.devices),
        share=CPU_SHARE if is_cpu else GPU_SHARE,
        ceiling=CPU_CEILING if is_cpu else None,
        knob="kv_cache_memory_bytes" if is_cpu else "gpu_memory_utilization",
    )
    own_window = cache_window(setup)
    block, own_windowed = _block_bytes(config, setup), _windowed(config, setup) if own_window else None
    stores = kv_cache.most_stores(setup.max_num_batched_tokens, config.block_size)
    moving = (stores + kv_cache.MOST_LOADED) * (block + (own_windowed.block if own_windowed else 0))
    need = memory_plan.Need(
        weights=sum(map(_bytes_on_one, (described, describe_tower(setup), describe_encoder(setup)))),
        # A step adds at most one, and two steps in flight may read removed ones.
        adapters=0 if adapters is None else (config.max_loras + 2) * _bytes_on_one(adapters.described),
        temporaries=_guess(setup) if temporaries is None else temporaries,
        # See DeviceState.
        slots=4
        * setup.max_num_seqs
        * ((2 if own_window else 1) * longest + setup.max_model_len + extras_of(config, spec).width)
        + setup.max_num_batched_tokens * spec.width * setup.dtype.itemsize * (1 + num_aux)
        + setup.max_num_batched_tokens * spec.width * setup.dtype.itemsize * (setup.num_ticks > 1)
        + math.prod(setup.media_rows) * setup.dtype.itemsize
        + 4 * setup.max_num_seqs * -(-setup.max_source // config.block_size),
        block=block,
        windowed=own_windowed,
        moving=moving if host else 0,
        host=host // len(setup.layout.devices),
        block_size=config.block_size if spec.is_causal else setup.max_model_len,
        num_slots=setup.max_num_seqs,
        is_measured=temporaries is not None,
        model_len=setup.max_model_len,
        source_len=setup.max_source,
    )
    asked = memory_plan.Asked(
        max_model_len=config.max_model_len,
        kv_bytes=config.kv_cache_memory_bytes,
        # Without a cache a block is only a number: one per request, and one that each admission leaves free.
        num_blocks=config.num_kv_blocks if spec.is_causal else 2 * setup.max_num_seqs,
        prepared_blocks=setup.prepared.get("num_kv_blocks"),
    )
    plan = memory_plan.share_out(device, need, asked)
    if host and 0 in plan.host_blocks[: 2 if own_window else 1]:
        raise UserError(f"kv_offloading_size is {memory_plan.size(host)}: no KV block fits.", "kv_offloading_size")
    return plan


def describe_weights(config: EngineConfig, setup: Setup) -> Params[jax.ShapeDtypeStruct]:
    described = weights.abstract(setup.spec, setup.layout, setup.dtype, config.quantization, setup.head, setup.family)
    return replace(described, draft=draft_setup.abstract(setup.drafting, setup.layout.unstaged, setup.dtype))


def describe_tower(setup: Setup) -> Any:
    if setup.images is None:
        return ()
    declared = setup.images.spec.declare()
    return jax.tree.map(lambda weight: quantized.describe(weight, setup.layout, setup.dtype), declared)


def declare_encoder(setup: Setup) -> Params[Weight]:
    """Return the weights of an encoder, without the embedding, which is the decoder's."""
    assert setup.encoder is not None
    spec, num_mels = setup.encoder.spec, setup.encoder.num_mels
    declared = declare(spec, setup.layout)
    top = {name: own for name, own in declared.top.items() if name not in ("embed", "head")}
    return replace(declared, top=top | (spectrogram.declare(spec.width, num_mels) if num_mels else {}))


def describe_encoder(setup: Setup) -> Any:
    if setup.encoder is None:
        return ()
    return jax.tree.map(lambda weight: quantized.describe(weight, setup.layout, setup.dtype), declare_encoder(setup))


def describe_adapters(config: EngineConfig, setup: Setup) -> RowWeights | None:
    if not config.enable_lora:
        return None
    described = lora.abstract(setup.spec, setup.layout, setup.dtype, config.max_lora_rank)
    return AdapterWeights(described, joins=setup.platform != "cpu")


def cache_window(setup: Setup) -> int:
    """Return the most tokens to which layers of the second group attend; 0 if one group exists."""
    return kv_cache.window_of(setup.spec, setup.max_model_len) if setup.head is None else 0


def _block_bytes(config: EngineConfig, setup: Setup) -> int:
    """Return a block's bytes on one device, with the draft model's cache, without windowed layers."""
    if not setup.spec.is_causal:
        return 0
    own = setup.stage_spec
    layers = [(own, own.windows.count(None) if cache_window(setup) else own.num_layers)]
    if setup.drafting is not None and setup.drafting.spec is not None:
        layers.append((setup.drafting.spec, setup.drafting.spec.num_layers))
    sizes = config.block_size, setup.cache_dtype, setup.layout.shards("kv_heads")
    return sum(kv_cache.block_bytes(spec, count, *sizes) for spec, count in layers)


def _windowed(config: EngineConfig, setup: Setup) -> memory_plan.Windowed:
    spec, window, size = setup.stage_spec, cache_window(setup), config.block_size
    num_layers = spec.num_layers - spec.windows.count(None)
    return memory_plan.Windowed(
        window=window,
        block=kv_cache.block_bytes(spec, num_layers, size, setup.cache_dtype, setup.layout.shards("kv_heads")),
        most=windowed.most(window, size, setup.whole_image),
        chunks=-(-setup.max_num_batched_tokens // size),
    )


def _bytes_on_one(described: Any) -> int:
    leaves = jax.tree.leaves(described)
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)


def extras_of(config: EngineConfig, spec: Spec) -> Extras:
    return Extras(spec.vocab_size, tuple(map(processor_name, config.logits_processors)))


def describe_memory(plan: MemoryPlan, setup: Setup) -> str:
    host = psutil.virtual_memory()
    own = psutil.Process().memory_info().rss
    where = "the host" if setup.platform == "cpu" else setup.devices[0].device_kind
    if len(setup.layout.devices) > 1:
        where = f"each of {len(setup.layout.devices)} devices ({where})"
    used, free, total = (memory_plan.size(number) for number in (own, host.available, host.total))
    text = f"{used} in use by this process, {free} of {total} free"
    return memory_plan.describe(plan, where, text)


def describe_programs(config: EngineConfig, setup: Setup, plan: MemoryPlan) -> dict[str, Any]:
    """Return the manifest: the inputs of programs besides the model's shapes."""
    return {
        "jaxllm": __version__,
        "jax": jax.__version__,
        "jaxlib": importlib.metadata.version("jaxlib"),
        "device": setup.devices[0].device_kind,
        "processor": cpu_name() if setup.platform == "cpu" else "",
        "num_devices": len(setup.devices),
        "XLA_FLAGS": os.environ.get("XLA_FLAGS", ""),
        "kernels": {operation: str(chosen) for operation, chosen in setup.kernels.items()},
        "dtype": setup.dtype.name,
        "quantization": config.quantization if setup.family.stored is None else repr(setup.family.stored),
        "kv_cache_dtype": setup.float8 or setup.cache_dtype.name,
        "adapters": [config.max_loras, config.max_lora_rank] if config.enable_lora else None,
        "deterministic": config.deterministic,
        "speculative": repr(setup.drafting),
        "tensor_parallel_size": config.tensor_parallel_size,
        "pipeline_parallel_size": config.pipeline_parallel_size,
        "enable_expert_parallel": config.enable_expert_parallel,
        "ranks": setup.layout.ranks,
        "pools": setup.head is not None,
        "images": [repr(setup.images.spec), setup.media_units] if setup.images else None,
        "encoder": repr(setup.encoder.spec) if setup.encoder else None,
        "block_size": config.block_size,
        "num_kv_blocks": plan.num_blocks,
        "max_model_len": plan.max_model_len,
        "max_num_seqs": setup.max_num_seqs,
        "max_num_batched_tokens": setup.max_num_batched_tokens,
        "max_logprobs": config.max_logprobs,
        "logits_processors": list(map(processor_name, config.logits_processors)),
    }


def _guess(setup: Setup) -> int:
    """Return a high estimate of the largest program's temporaries."""
    spec = setup.spec
    widest = max(2 * spec.ffn_width, (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_size, spec.width)
    if spec.experts is not None:  # outputs of each token's experts, twice
        widest = max(widest, 2 * spec.experts.per_token * spec.width * setup.layout.ranks)
    return 4 * (8 * setup.max_num_batched_tokens * widest + 8 * setup.max_num_seqs * spec.vocab_size)
