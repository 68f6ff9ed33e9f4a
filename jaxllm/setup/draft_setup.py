"""The draft model of `speculative_config`, and its weights."""

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
    """The drafting method of an engine: prompt lookup or a draft model."""

    most: int  # K per row
    min_match: int = 1  # tokens that prompt lookup matches
    max_match: int = 1
    spec: Spec | None = None  # of the draft model, or of the EAGLE-3 head's layer
    head: Head | None = None
    kernels: Mapping[str, Choice] = field(default_factory=dict, hash=False)
    cost: int = 0  # see `Limits.draft_cost`


@dataclass(frozen=True)
class DraftFolder:
    """The files of a draft model or EAGLE-3 head."""

    folder: Path
    family: Family | None  # None: a head


def choose(
    config: EngineConfig, target: Spec, longest: int, kernels_of: Callable[[Spec], Mapping[str, Choice]]
) -> tuple[Drafting | None, DraftFolder | None]:
    """Return the drafting method for requests of at most `longest` tokens, and its files."""
    speculative = config.speculative_config
    if not isinstance(speculative, SpeculativeConfig):
        return None, None
    if speculative.model is None:
        return by_lookup(speculative), None
    folder = HEADS.get(speculative.model) or weights.resolve(speculative.model)
    if speculative.method == "eagle3":
        head = eagle_files.read(folder, target)
        drafting = Drafting(
            speculative.num_speculative_tokens, spec=head.spec, head=head, kernels=kernels_of(head.spec)
        )
        return drafting, DraftFolder(folder, None)
    spec, family = read_spec(weights.read_config(folder), longest)
    spec = with_stored_head(folder, spec, family)
    if family.stored is not None:
        raise UserError(f"{speculative.model} is quantized, which a draft model cannot be.", "speculative_config")
    draft_model.check(spec, target)
    if spec.max_position < longest:
        raise UserError(
            f"{speculative.model} was made for {spec.max_position} positions; set max_model_len to that, or less.",
            "speculative_config",
        )
    drafting = Drafting(speculative.num_speculative_tokens, spec=spec, kernels=kernels_of(spec))
    return drafting, DraftFolder(folder, family)


def by_lookup(own: SpeculativeConfig) -> Drafting:
    return Drafting(own.num_speculative_tokens, own.prompt_lookup_min, own.prompt_lookup_max)


def with_cost(drafting: Drafting | None, described: Params[jax.ShapeDtypeStruct]) -> Drafting | None:
    """Set the cost of drafting: bytes of the draft model per 1,000 bytes of the target."""
    if drafting is None or described.draft is None:
        return drafting
    whole = weights.num_bytes(replace(described, draft=None))
    return replace(drafting, cost=1000 * weights.num_bytes(described.draft) // whole)


def abstract(drafting: Drafting | None, layout: Layout, dtype: jnp.dtype) -> Params[jax.ShapeDtypeStruct] | None:
    if drafting is None or drafting.spec is None:
        return None
    if drafting.head is not None:
        return eagle.abstract(drafting.head, layout, dtype)
    return weights.abstract(drafting.spec, layout, dtype)


def check(drafting: Drafting | None, source: DraftFolder | None, layout: Layout) -> None:
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
    if drafting is None or drafting.spec is None or source is None:
        return None
    if drafting.head is not None:
        if seed is not None:
            return eagle_files.load_random(drafting.head, layout, dtype, seed)
        return eagle_files.load(source.folder, drafting.head, layout, dtype, progress)
    if seed is not None or source.family is None:
        return weights.load_random(drafting.spec, layout, dtype, seed or 0)
    return weights.load(source.folder, drafting.spec, source.family, layout, dtype, progress)
