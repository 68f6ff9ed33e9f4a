"""What a decoder can be: sizes, norms, positions, attention, feed-forward. Optional features default to off.

Holds plain, hashable values, so that a Spec can be a static argument of a compiled program. Knows no family of models,
no tokenizer (end-of-sequence ids do not belong here), no device and no JAX.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

NormKind = Literal["rms", "rms+1", "layer"]
NormPlace = Literal["pre", "sandwich"]
PositionKind = Literal["rope", "learned"]
Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]


@dataclass(frozen=True)
class LinearScaling:
    """Positions divided by `factor` (Chen et al. 2023, "Position Interpolation")."""

    factor: float


@dataclass(frozen=True)
class BandScaling:
    """Long wavelengths divided by `factor`, short ones kept, a linear blend between (Llama 3.1).

    A wavelength is long above `original_max_position / low_frequency_factor` tokens and short below
    `original_max_position / high_frequency_factor`.
    """

    factor: float
    low_frequency_factor: float
    high_frequency_factor: float
    original_max_position: int


@dataclass(frozen=True)
class Spec:
    """One decoder. Lengths are in tokens; `windows` has one entry per layer, None where a layer sees everything."""

    num_layers: int
    width: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    ffn_width: int
    vocab_size: int
    max_position: int  # the context length
    windows: tuple[int | None, ...]  # a query at p sees the keys at p - window + 1 .. p
    attention_scale: float  # of the scores, before the soft cap
    norm: NormKind = "rms"  # "rms+1": the stored weight is the distance from one
    norm_eps: float = 1e-6
    norm_place: NormPlace = "pre"  # "sandwich": also after attention and after the feed-forward, before the residual
    qk_norm: bool = False  # an RMS norm over each head of q and k, before the rotation
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    position: PositionKind = "rope"
    position_offset: int = 0  # rows of a learned table before that of position 0
    rope_theta: float = 10000.0
    rope_scaling: LinearScaling | BandScaling | None = None
    attention_softcap: float | None = None  # scores become cap · tanh(score / cap)
    logit_softcap: float | None = None
    mlp_gated: bool = True  # activation(gate) · up, else activation(up)
    activation: Activation = "silu"
    embed_scale: float = 1.0
    tie_embeddings: bool = False  # the output head is the token embedding


def heads_per_shard(spec: Spec, shards: int) -> tuple[int, int]:
    """Count the query heads and the key-value heads that one of `shards` devices holds.

    With more shards than key-value heads, neighbouring shards hold copies of one head: the cache then has
    `shards` heads in all. `weights.check_shards` says whether a model can be divided at all.
    """
    return spec.num_heads // shards, max(1, spec.num_kv_heads // shards)
