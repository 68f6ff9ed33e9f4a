"""What drafts in an engine: chosen from `speculative_config` before anything large is allocated, then read.

Knows no program and no request.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import jax
import jax.numpy as jnp

from jaxllm.checkpoints import eagle_files, weights
from jaxllm.checkpoints.stored_head import with_stored_head
from jaxllm.config import EngineConfig
from jaxllm.embedded import HEADS
from jaxllm.errors import UserError
from jaxllm.families.families import Family, read_spec
from jaxllm.model import draft_model, eagle
from jaxllm.model.decoder import Params
from jaxllm.model.eagle import Head
from jaxllm.model.sharding import Layout
from jaxllm.model.spec import Spec
from jaxllm.speculative_config import SpeculativeConfig
from pallas_kernels import Choice


@dataclass(frozen=True)
class Drafting:
    """How an engine drafts: by prompt lookup, or with a model."""

    most: int  # K
    min_match: int = 1  # of prompt lookup: tokens
    max_match: int = 1
    spec: Spec | None = None  # of the draft model, or of the head's layer
    head: Head | None = None
    kernels: Mapping[str, Choice] = field(default_factory=dict, hash=False)  # by operation, of the draft model
    cost: int = 0  # see `Limits.draft_cost`


@dataclass(frozen=True)
class DraftFolder:
    """Where a draft model or an EAGLE-3 head comes from."""

    folder: Path
    family: Family | None  # None: of a head


def choose(
    config: EngineConfig, target: Spec, longest: int, kernels_of: Callable[[Spec], Mapping[str, Choice]]
) -> tuple[Drafting | None, DraftFolder | None]:
    """Say how an engine drafts whose requests have at most `longest` tokens, and what it reads for it."""
    own = config.speculative_config
    if not isinstance(own, SpeculativeConfig):
        return None, None
    if own.model is None:
        return by_lookup(own), None
    folder = HEADS.get(own.model) or weights.resolve(own.model)
    if own.method == "eagle3":
        head = eagle_files.read(folder, target)
        drafting = Drafting(own.num_speculative_tokens, spec=head.spec, head=head, kernels=kernels_of(head.spec))
        return drafting, DraftFolder(folder, None)
    spec, family = read_spec(weights.read_config(folder), longest)
    spec = with_stored_head(folder, spec, family)
    if family.stored is not None:
        raise UserError(f"{own.model} is quantized, which a draft model cannot be.", "speculative_config")
    draft_model.check(spec, target)
    if spec.max_position < longest:
        raise UserError(
            f"{own.model} was made for {spec.max_position} positions; set max_model_len to that, or less.",
            "speculative_config",
        )
    drafting = Drafting(own.num_speculative_tokens, spec=spec, kernels=kernels_of(spec))
    return drafting, DraftFolder(folder, family)


def by_lookup(own: SpeculativeConfig) -> Drafting:
    """Say how an engine drafts that needs no model for it."""
    return Drafting(own.num_speculative_tokens, own.prompt_lookup_min, own.prompt_lookup_max)


def with_cost(drafting: Drafting | None, described: Params[jax.ShapeDtypeStruct]) -> Drafting | None:
    """Note what drafting a token takes: a pass reads the draft model's weights, as a step does those of its model."""
    if drafting is None or described.draft is None:
        return drafting
    whole = weights.num_bytes(replace(described, draft=None))
    return replace(drafting, cost=1000 * weights.num_bytes(described.draft) // whole)


def abstract(drafting: Drafting | None, layout: Layout, dtype: jnp.dtype) -> Params[jax.ShapeDtypeStruct] | None:
    """Describe the weights of what drafts; None if it has none."""
    if drafting is None or drafting.spec is None:
        return None
    if drafting.head is not None:
        return eagle.abstract(drafting.head, layout, dtype)
    return weights.abstract(drafting.spec, layout, dtype)


def check(drafting: Drafting | None, source: DraftFolder | None, layout: Layout) -> None:
    """Refuse files that are broken or do not hold the weights; reads headers only."""
    if drafting is None or drafting.spec is None or source is None:
        return
    if drafting.head is not None:
        eagle_files.check(source.folder, drafting.head, layout)
    elif source.family is not None:
        weights.check(source.folder, drafting.spec, source.family, layout)


def load(
    drafting: Drafting | None,
    source: DraftFolder | None,
    layout: Layout,
    dtype: jnp.dtype,
    progress: bool,
    seed: int | None,
) -> Params[jax.Array] | None:
    """Read the weights of what drafts; with a `seed` make random ones instead."""
    if drafting is None or drafting.spec is None or source is None:
        return None
    if drafting.head is not None:
        if seed is not None:
            return eagle_files.load_random(drafting.head, layout, dtype, seed)
        return eagle_files.load(source.folder, drafting.head, layout, dtype, progress)
    if seed is not None or source.family is None:
        return weights.load_random(drafting.spec, layout, dtype, seed or 0)
    return weights.load(source.folder, drafting.spec, source.family, layout, dtype, progress)
