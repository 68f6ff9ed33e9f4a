"""Engine settings, validated on creation, with vLLM's names and defaults."""

from __future__ import annotations

import difflib
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args

from jaxllm import kv_transfer_config, speculative_config
from jaxllm.embedded import MODEL_DIR
from jaxllm.errors import UserError
from jaxllm.kv_transfer_config import KvTransferConfig
from jaxllm.setting import setting
from jaxllm.speculative_config import SpeculativeConfig

Dtype = Literal["auto", "bfloat16", "float16", "float32"]
Device = Literal["auto", "cpu", "gpu"]
SchedulingPolicy = Literal["fcfs", "priority"]
Precompile = Literal["auto", "covering", "background", "all"]
LoadFormat = Literal["auto", "dummy"]
Quantization = Literal["int8", "fp8", "int4"]
KvCacheDtype = Literal["auto", "fp8", "fp8_e4m3", "fp8_e5m2", "int8"]
PreemptionMode = Literal["recompute", "swap"]
RunnerKind = Literal["auto", "generate", "pooling"]
MEDIA = "image", "audio", "video"
MOST_MEDIA = 16  # of each kind
MOST_VIDEOS = 4
PoolingType = Literal["CLS", "LAST", "MEAN"]


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Settings of an engine. `None`: chosen at start from model and device (see `jaxllm doctor`)."""

    model: str  # folder or hub id
    tokenizer: str | None = setting(None, "folder or hub id of the tokenizer (default: the model's)", "PATH")
    skip_tokenizer_init: bool = setting(False, "load no tokenizer: prompts are token ids, and every text is empty")
    revision: str | None = setting(None, "branch, tag or commit of the hub repository")
    dtype: Dtype = setting(
        "auto", "data type of weights and computation; auto: the checkpoint's on a GPU, float32 on a CPU"
    )
    # Of matrices, at load time; not needed for quantized checkpoints.
    quantization: Quantization | None = setting(
        None,
        "quantize weight matrices at load: int8 (on a CPU activations too), fp8 or int4",
    )
    # fp8 is e4m3. Each vector has a scale, without calibration.
    kv_cache_dtype: KvCacheDtype = setting(
        "auto", "data type of the KV cache: 8 bits hold twice the tokens of bfloat16; auto: that of computation"
    )
    device: Device = setting("auto", "device to run on; auto: a GPU if JAX finds one")
    seed: int = setting(0, "seed for drawing the seeds of requests without one; with --deterministic, their seed")
    max_model_len: int | None = setting(
        None,
        "maximum tokens of prompt and output, such as 4096, 4k or auto (default: the model's, or what fits)",
        "TOKENS",
    )
    block_size: int = setting(16, "tokens per KV block")
    enable_prefix_caching: bool = setting(True, "reuse the KV blocks of prompts with a common prefix")
    max_num_batched_tokens: int | None = setting(
        None,
        "maximum tokens of a step (default: 160 on a CPU, 8192 on a GPU; with --deterministic 32 and 256; "
        "at least twice --max-num-seqs)",
        "TOKENS",
    )
    max_num_seqs: int | None = setting(
        None, "maximum concurrent requests (default: 64 on a CPU, 256 on a GPU; with --deterministic 16 and 128)"
    )
    tensor_parallel_size: int = setting(1, "devices that share the model")
    pipeline_parallel_size: int = setting(1, "stages, each of tensor-parallel-size devices with a part of the layers")
    enable_expert_parallel: bool = setting(
        False, "give each of the devices that share the model whole experts, instead of a part of each"
    )
    # For front ends (`LLM`, `FleetLLM`, `jaxllm serve`); an engine is one of the group, or see `shares_experts`.
    data_parallel_size: int = setting(
        1,
        "engines that share the requests, each with its own process and devices; with --enable-expert-parallel ranks "
        "of one engine, which divide the experts",
    )
    # Engines of a fleet; `data_parallel_size` is their sum.
    prefill_replicas: int = setting(0, "engines that compute prompts, for others that continue them")
    decode_replicas: int = setting(
        0, "engines that continue the prompts of --prefill-replicas; need --kv-offloading-size"
    )
    gpu_memory_utilization: float = setting(0.92, "share of a GPU's memory to use", "SHARE")
    kv_cache_memory_bytes: int | None = setting(
        None, "bytes for KV blocks, instead of --gpu-memory-utilization", "BYTES"
    )
    num_kv_blocks: int | None = setting(None, "number of KV blocks, instead of a size in memory")
    kv_offloading_size: float = setting(
        0.0, "host memory for KV blocks evicted from the device, in GiB; 0: none", "GIB"
    )
    kv_offloading_disk: str | None = setting(
        None,
        "folder on a local disk for copies of the host's KV blocks, which engines share and a restart keeps",
        "PATH",
    )
    kv_offloading_disk_size: float = setting(16.0, "maximum size of that folder", "GIB")
    preemption_mode: PreemptionMode | None = setting(
        None,
        "swap: keep the KV blocks of a preempted request in the host's memory until it runs again, within "
        "--kv-offloading-size; recompute, the default: treat them like other cached blocks",
    )
    enable_sleep_mode: bool = setting(
        False, "let the engine sleep and take in other weights; every output then has the versions of its weights"
    )
    kv_transfer_config: Mapping[str, Any] | KvTransferConfig | None = setting(
        None, 'send or receive the KV blocks of prompts, as \'{"kv_role": "kv_producer"}\'', "JSON"
    )
    scheduling_policy: SchedulingPolicy = setting("fcfs", "order of waiting requests")
    async_scheduling: bool = setting(True, "plan and start a step before the tokens of the one before it are read")
    # Results are bit-identical under any load: every step runs one program, in which tokens attend separately. A step
    # always costs the same, so defaults are smaller: 32 tokens and 16 requests on a CPU, 256 and 128 on a GPU.
    deterministic: bool = setting(
        False, "bitwise equal output for equal requests under any load; every step takes as long as a full one"
    )
    enable_kv_cache_events: bool = setting(
        False, "report blocks added to and removed from the prefix cache (StreamKvEvents)"
    )
    enable_lora: bool = setting(False, "let requests use LoRA adapters")
    max_loras: int = setting(1, "maximum adapters on the device, for the requests of one step")
    max_lora_rank: int = setting(16, "maximum rank of an adapter; each takes the memory of this rank")
    max_cpu_loras: int | None = setting(
        None, "maximum adapters in the host's memory while no request uses them (default: --max-loras)"
    )
    limit_mm_per_prompt: Mapping[str, int] | None = setting(
        None,
        'maximum images, videos or sounds of a request, as \'{"image": 4, "video": 0}\' (default: 16, videos 4)',
        "JSON",
    )
    mm_processor_kwargs: Mapping[str, Any] | None = setting(
        None, "replacements of settings in preprocessor_config.json, as '{\"max_pixels\": 1003520}'", "JSON"
    )
    allowed_media_domains: Sequence[str] = setting(
        (),
        "host from which images and sounds of messages are fetched; may be repeated (default: data: URLs only)",
        "HOST",
    )
    allowed_local_media_path: str | None = setting(
        None, "folder of files that messages may name as file: URLs (default: none)", "PATH"
    )
    max_logprobs: int = setting(20, "maximum log-probabilities that a request may ask for; -1: the whole vocabulary")
    # Functions, or "package.module:function", that requests select in extra_args.
    logits_processors: Sequence[Callable[..., Any] | str] = setting(
        (), "logits processor that requests may name, as package.module:function; may be repeated", "FUNCTION"
    )
    runner: RunnerKind = setting("auto", "task of the engine; auto: by the model's architecture")
    # "pooling_type", "normalize", and "is_matryoshka" (requests may cut embeddings); defaults are the model's.
    pooler_config: Mapping[str, Any] | None = setting(
        None, 'how a model pools, as \'{"pooling_type": "MEAN", "normalize": true}\'', "JSON"
    )
    speculative_config: Mapping[str, Any] | SpeculativeConfig | None = setting(
        None, 'draft tokens and verify them, as \'{"method": "ngram", "num_speculative_tokens": 4}\'', "JSON"
    )
    kernels: Sequence[str] = setting(
        (),
        "implementation of an operation, as paged_decode=xla; may be repeated (default: see jaxllm doctor)",
        "OPERATION=NAME",
    )
    load_format: LoadFormat = setting("auto", "auto: load the checkpoint; dummy: use random weights")
    precompile: Precompile = setting(
        "auto", "which programs are compiled before the first request; auto: all on a GPU, background on a CPU"
    )
    compilation_cache_dir: str | None = setting(
        None, "folder of compiled programs (default: $JAXLLM_CACHE_DIR or the user's cache folder)", "PATH"
    )
    compilation_cache_bytes: int | None = setting(
        None,
        "maximum bytes of complete programs in that folder, which a start loads without tracing; 0: none "
        "(default: $JAXLLM_CACHE_BYTES or 4G)",
        "BYTES",
    )

    def __post_init__(self) -> None:
        if isinstance(self.dtype, str):
            object.__setattr__(self, "dtype", DTYPE_NAMES.get(self.dtype, self.dtype))
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed and (name, getattr(self, name)) not in _UNSET:
                raise UserError(f"{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}.", name)
        for name, (low, high) in _RANGES.items():
            value = getattr(self, name)
            if value is None and name in _OPTIONAL:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
                raise UserError(f"{name} must be an integer from {low} to {high}, got {value!r}.", name)
        for name in _SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise UserError(f"{name} must be true or false, got {getattr(self, name)!r}.", name)
        for name in ("logits_processors", "kernels", "allowed_media_domains"):
            value = getattr(self, name)
            if isinstance(value, str) or not isinstance(value, Sequence):
                raise UserError(f"{name} must be a list, got {value!r:.80}.", name)
            object.__setattr__(self, name, tuple(value))
        if self.limit_mm_per_prompt is not None:
            _check_media_limits(self.limit_mm_per_prompt)
        if not isinstance(self.mm_processor_kwargs, Mapping | None):
            raise UserError(
                f"mm_processor_kwargs must be an object, got {self.mm_processor_kwargs!r:.80}.", "mm_processor_kwargs"
            )
        if self.pooler_config is not None:
            _check_pooler_config(self.pooler_config)
        if self.speculative_config is not None:
            object.__setattr__(self, "speculative_config", speculative_config.read(self.speculative_config))
        if self.max_cpu_loras is not None and self.max_cpu_loras < self.max_loras:
            raise UserError(
                f"max_cpu_loras ({self.max_cpu_loras}) must be at least max_loras ({self.max_loras}).", "max_cpu_loras"
            )
        share = self.gpu_memory_utilization
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0.0 < share <= 1.0:
            raise UserError(f"gpu_memory_utilization must be in (0, 1], got {share!r}.", "gpu_memory_utilization")
        size = self.kv_offloading_size
        if isinstance(size, bool) or not isinstance(size, int | float) or not 0 <= size <= 2**20:
            raise UserError(f"kv_offloading_size must be from 0 to {2**20} GiB, got {size!r}.", "kv_offloading_size")
        if self.preemption_mode == "swap" and not size:
            raise UserError("preemption_mode 'swap' needs kv_offloading_size.", "preemption_mode")
        if size and not self.enable_prefix_caching and self.preemption_mode != "swap":
            raise UserError(
                "kv_offloading_size needs enable_prefix_caching, or preemption_mode 'swap'.", "kv_offloading_size"
            )
        if self.prefill_replicas or self.decode_replicas:
            self._check_replicas()
        if self.kv_transfer_config is not None:
            object.__setattr__(self, "kv_transfer_config", self._transfer())
        disk = self.kv_offloading_disk_size
        if isinstance(disk, bool) or not isinstance(disk, int | float) or not 0 < disk <= 2**20:
            raise UserError(
                f"kv_offloading_disk_size must be above 0 and at most {2**20} GiB, got {disk!r}.",
                "kv_offloading_disk_size",
            )
        if self.kv_offloading_disk is not None and not size:
            raise UserError("kv_offloading_disk needs kv_offloading_size.", "kv_offloading_disk")
        if (
            self.max_num_batched_tokens is not None
            and self.max_num_seqs is not None
            and self.max_num_batched_tokens < self.max_num_seqs
        ):
            raise UserError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}): every running request needs a token a step.",
                "max_num_batched_tokens",
            )

    def _check_replicas(self) -> None:
        count = self.prefill_replicas + self.decode_replicas
        if not self.prefill_replicas or not self.decode_replicas:
            raise UserError("prefill_replicas and decode_replicas need each other.", "prefill_replicas")
        if self.data_parallel_size not in (1, count):
            raise UserError(
                f"data_parallel_size is {self.data_parallel_size}, and the sum of prefill_replicas and decode_replicas "
                f"is {count}; leave it out.",
                "data_parallel_size",
            )
        if not self.kv_offloading_size or not self.enable_prefix_caching:
            raise UserError(
                "decode_replicas need kv_offloading_size and enable_prefix_caching: blocks arrive in the host's tier.",
                "kv_offloading_size",
            )
        object.__setattr__(self, "data_parallel_size", count)

    def _transfer(self) -> KvTransferConfig:
        transfer = kv_transfer_config.read(self.kv_transfer_config)
        if not self.enable_prefix_caching:
            raise UserError("kv_transfer_config needs enable_prefix_caching.", "kv_transfer_config")
        if transfer.consumes and not self.kv_offloading_size:
            raise UserError(
                f"kv_transfer_config with {transfer.kv_role} needs kv_offloading_size: blocks arrive in the host's "
                "memory.",
                "kv_transfer_config",
            )
        return transfer

    @property
    def shares_experts(self) -> bool:
        """Whether one engine has `data_parallel_size` ranks, see engine/ranks.py."""
        return self.enable_expert_parallel and self.data_parallel_size > 1 and not self.prefill_replicas

    @property
    def is_fleet(self) -> bool:
        return self.data_parallel_size > 1 and not self.shares_experts

    def most_media(self, kind: str) -> int:
        """Return the most images or sounds of a request; `kind` is of `MEDIA`."""
        return (self.limit_mm_per_prompt or {}).get(kind, MOST_MEDIA)

    @property
    def most_videos(self) -> int:
        return (self.limit_mm_per_prompt or {}).get("video", MOST_VIDEOS)

    def cache_dir(self) -> Path:
        """Return the folder of compiled programs: the setting, `$JAXLLM_CACHE_DIR`, or the user's cache folder."""
        if self.compilation_cache_dir is not None:
            return Path(self.compilation_cache_dir).expanduser()
        if "JAXLLM_CACHE_DIR" in os.environ:
            return Path(os.environ["JAXLLM_CACHE_DIR"]).expanduser()
        return Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "jaxllm"

    def cache_bytes(self) -> int:
        """Return the maximal bytes of cached programs: the setting, `$JAXLLM_CACHE_BYTES`, or 4 GiB."""
        if self.compilation_cache_bytes is not None:
            return self.compilation_cache_bytes
        text = os.environ.get("JAXLLM_CACHE_BYTES", str(4 << 30))
        if not text.isdecimal():
            raise UserError(f"JAXLLM_CACHE_BYTES must be a number of bytes, got {text!r:.80}.", "JAXLLM_CACHE_BYTES")
        return int(text)


def _check_media_limits(given: Any) -> None:
    if not isinstance(given, Mapping) or given.keys() - {*MEDIA}:
        raise UserError(
            f"limit_mm_per_prompt must be {{'image', 'video' or 'audio': a number}}, got {given!r:.80}.",
            "limit_mm_per_prompt",
        )
    for kind, most in given.items():
        if type(most) is not int or not 0 <= most <= 999:
            raise UserError(
                f"limit_mm_per_prompt: {kind} must be from 0 to 999, got {most!r:.80}.", "limit_mm_per_prompt"
            )


def _check_pooler_config(given: Mapping[str, Any]) -> None:
    known: dict[str, tuple[Any, ...]] = {
        "pooling_type": get_args(PoolingType),
        **dict.fromkeys(("normalize", "is_matryoshka"), (True, False)),
    }
    if not isinstance(given, Mapping):
        raise UserError(f"pooler_config must be an object, got {given!r:.80}.", "pooler_config")
    for name, value in given.items():
        if name not in known:
            raise UserError(f"pooler_config has no {name!r:.80}, only {', '.join(known)}.", "pooler_config")
        if value not in known[name]:
            choices = ", ".join(map(str, known[name]))
            raise UserError(f"pooler_config: {name} must be one of {choices}, got {value!r:.80}.", "pooler_config")


class EngineArgs(EngineConfig):
    """`EngineConfig` with vLLM's signature; `model` defaults to the embedded one.

    Accepts `NOT_BUILT` and `WITHOUT_EFFECT` arguments; other unknown names raise `UserError` with a suggestion.
    """

    def __init__(self, model: str | os.PathLike[str] | None = None, **settings: Any) -> None:
        super().__init__(model=str(MODEL_DIR if model is None else model), **_understood(settings))


AsyncEngineArgs = EngineArgs


def config_of(engine_args: str | os.PathLike[str] | EngineConfig | None, settings: Mapping[str, Any]) -> EngineConfig:
    if isinstance(engine_args, EngineConfig):
        return replace(engine_args, **_understood(settings))
    return EngineArgs(engine_args, **settings)


def no_effect(names: Iterable[str]) -> str:
    return f"{', '.join(names)}: accepted for compatibility with vLLM, without effect in jaxllm"


def _understood(settings: Mapping[str, Any]) -> dict[str, Any]:
    names = [field.name for field in fields(EngineConfig)]
    idle = [name for name in settings if name in WITHOUT_EFFECT]
    for name, value in settings.items():
        taken = NOT_BUILT.get(name)
        if taken is not None and value not in taken:
            raise UserError(f"{name} is not supported by jaxllm yet; leave it at {taken[0]!r}.", name)
        if taken is None and name not in names and name not in idle:
            near = difflib.get_close_matches(name, names, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise UserError(f"{name!r} is not an engine argument of jaxllm.{hint}", name)
    if idle:
        warnings.warn(no_effect(idle), stacklevel=3)
    return {name: value for name, value in settings.items() if name in names}


DTYPE_NAMES = {"half": "float16", "float": "float32"}  # vLLM's aliases
# vLLM arguments that affect results or capacity, with accepted values, default first.
NOT_BUILT: dict[str, tuple[Any, ...]] = {
    "tokenizer_mode": ("auto",),
    "cpu_offload_gb": (0,),
    "hf_overrides": (None,),
    "task": ("auto", "generate"),
    "convert": ("auto", "none"),
}
# vLLM arguments, current and former, without effect here, with defaults: any value is accepted, with one warning.
WITHOUT_EFFECT: dict[str, Any] = {
    "trust_remote_code": False,  # a model's code is never run
    "enforce_eager": False,
    "compilation_config": None,
    "cudagraph_capture_sizes": None,
    "max_seq_len_to_capture": 8192,
    "enable_chunked_prefill": True,  # always on
    "num_scheduler_steps": 1,
    "use_v2_block_manager": True,
    "swap_space": 4,  # host's memory: `kv_offloading_size`
    "max_parallel_loading_workers": None,
    "distributed_executor_backend": None,
    "worker_use_ray": False,
    "disable_custom_all_reduce": False,
    "disable_cascade_attn": False,
    "guided_decoding_backend": "auto",
    "disable_log_stats": False,
    "disable_log_requests": False,
}
_CHOICES: dict[str, tuple[str, ...]] = {
    "dtype": get_args(Dtype),
    "quantization": get_args(Quantization),
    "kv_cache_dtype": get_args(KvCacheDtype),
    "device": get_args(Device),
    "scheduling_policy": get_args(SchedulingPolicy),
    "precompile": get_args(Precompile),
    "preemption_mode": get_args(PreemptionMode),
    "runner": get_args(RunnerKind),
    "load_format": get_args(LoadFormat),
}
_UNSET = (("quantization", None), ("preemption_mode", None))
_RANGES: dict[str, tuple[int, int]] = {
    "seed": (-(2**63), 2**63 - 1),
    "max_model_len": (1, 2**24),
    "block_size": (1, 256),
    "max_num_batched_tokens": (1, 2**20),
    "max_num_seqs": (1, 2**14),
    "tensor_parallel_size": (1, 1024),
    "pipeline_parallel_size": (1, 1024),
    "data_parallel_size": (1, 256),
    "prefill_replicas": (0, 128),
    "decode_replicas": (0, 128),
    "kv_cache_memory_bytes": (1, 2**50),
    "num_kv_blocks": (1, 2**31 - 1),
    "compilation_cache_bytes": (0, 2**50),
    "max_loras": (1, 64),
    "max_lora_rank": (1, 1024),
    "max_cpu_loras": (1, 2**20),
    "max_logprobs": (-1, 2**31 - 1),
}
_SWITCHES = (
    *("skip_tokenizer_init", "enable_prefix_caching", "async_scheduling", "deterministic"),
    *("enable_kv_cache_events", "enable_lora", "enable_sleep_mode", "enable_expert_parallel"),
)
_OPTIONAL = {"max_model_len", "max_num_batched_tokens", "max_num_seqs", "kv_cache_memory_bytes", "num_kv_blocks"} | {
    *("max_cpu_loras", "compilation_cache_bytes")
}
