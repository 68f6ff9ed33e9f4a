"""Kernels for serving language models with JAX."""

from pallas_kernels.api import (
    SCALED,
    Norm,
    Written,
    copy_blocks,
    fused_experts,
    fused_experts_by,
    fused_linear,
    fused_topk,
    fused_topk_by,
    linear,
    linear_by,
    paged_decode,
    paged_prefill,
    sample,
    write_kv,
)
from pallas_kernels.choice import Choice, Site, capability_of, implementations, refusal, resolve
from pallas_kernels.kv_cache.xla import quantize, rotate
from pallas_kernels.linear.numbers import Kind, by_row
from pallas_kernels.linear.xla import is_turned_on_a_cpu

__all__ = [
    "SCALED",
    "Choice",
    "Kind",
    "Norm",
    "Site",
    "Written",
    "by_row",
    "capability_of",
    "copy_blocks",
    "fused_experts",
    "fused_experts_by",
    "fused_linear",
    "fused_topk",
    "fused_topk_by",
    "implementations",
    "is_turned_on_a_cpu",
    "linear",
    "linear_by",
    "paged_decode",
    "paged_prefill",
    "quantize",
    "refusal",
    "resolve",
    "rotate",
    "sample",
    "write_kv",
]
