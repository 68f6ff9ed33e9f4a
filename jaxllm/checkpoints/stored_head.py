"""Detect output heads that differ from the tied embedding; they are used, as in transformers."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from jaxllm.checkpoints import orbax_checkpoint
from jaxllm.checkpoints.checkpoint import INDEX, SINGLE, Tensor, open_tensors
from jaxllm.families.family import Family
from jaxllm.model.spec import Spec

_log = logging.getLogger("jaxllm")
_ROWS = 4096  # compared at once


def with_stored_head(folder: Path, spec: Spec, family: Family) -> Spec:
    if not spec.tie_embeddings:
        return spec
    if orbax_checkpoint.is_here(folder):
        return replace(spec, tie_embeddings=not orbax_checkpoint.has_head(folder))
    if not (folder / INDEX).is_file() and not (folder / SINGLE).is_file():
        return spec
    tensors = {family.usual(name): tensor for name, tensor in open_tensors(folder).items()}
    head, embedding = (family.tensors[name] for name in ("head", "embed"))
    if not _differs(tensors, head, embedding):
        return spec
    _log.warning("%s differs from %s, which config.json ties it to: it is read as the head", head, embedding)
    return replace(spec, tie_embeddings=False)


def _differs(tensors: Mapping[str, Tensor], head: str, embedding: str) -> bool:
    if embedding not in tensors:
        return False  # reported when weights are looked up
    if head not in tensors:
        stem = head.removesuffix("weight")
        return any(name.startswith(stem) and not name.endswith("bias") for name in tensors)  # a quantized head
    head_tensor, tied = tensors[head], tensors[embedding]
    if head_tensor.shape != tied.shape or head_tensor.dtype != tied.dtype:
        return True
    head_bytes, tied_bytes = head_tensor.raw(), tied.raw()
    step = max(1, len(head_bytes) // max(1, head_tensor.shape[0]) * _ROWS)
    is_same = all(
        np.array_equal(head_bytes[at : at + step], tied_bytes[at : at + step]) for at in range(0, len(head_bytes), step)
    )
    head_tensor.release()
    tied.release()
    return not is_same
