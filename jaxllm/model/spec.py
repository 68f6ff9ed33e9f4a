"""The sizes and options of a decoder. Hashable."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

NormKind = Literal["rms", "rms+1", "layer"]
NormPlace = Literal["pre", "post", "sandwich", "after"]
Residual = Literal["serial", "parallel", "parallel, one norm"]
QkNorm = Literal["each head", "own per head", "all heads"]
Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]


@dataclass(frozen=True)
class LinearScaling:
    """Positions divided by `factor` (Chen et al. 2023, "Position Interpolation")."""

    factor: float


@dataclass(frozen=True)
class BandScaling:
    """Long wavelengths divided by `factor`, short ones kept, blended linearly between (Llama 3.1).

    Long: above `original_max_position / low_frequency_factor` tokens; short: below `original_max_position /
    high_frequency_factor`.
    """

    factor: float
    low_frequency_factor: float
    high_frequency_factor: float
    original_max_position: int


@dataclass(frozen=True)
class YarnScaling:
    """YaRN (Peng et al. 2023): fast coordinates kept, slow ones divided by `factor`.

    Fast is `fast` or more turns in `original_max_position` tokens, slow is `slow` or fewer; a linear ramp between, with
    integer ends if `is_truncated`.
    """

    factor: float
    original_max_position: int
    fast: float = 32.0
    slow: float = 1.0
    is_truncated: bool = True


@dataclass(frozen=True)
class PairScaling:
    """A divisor per frequency (Ding et al. 2024, "LongRoPE")."""

    factors: tuple[float, ...]


@dataclass(frozen=True)
class Rope:
    """Rotary positions (Su et al. 2021) of the first `size` coordinates of each head."""

    size: int
    theta: float = 10000.0
    scaling: LinearScaling | BandScaling | YarnScaling | PairScaling | None = None
    amplitude: float = 1.0  # of cosine and sine
    is_interleaved: bool = False  # pairs are (2i, 2i + 1), not (i, i + size / 2)
    axes: tuple[int, ...] = ()  # each pair's dimension of positions (Wang et al. 2024, M-RoPE)


@dataclass(frozen=True)
class Experts:
    """A mixture of experts: each token uses its `per_token` best-scored experts, weighted by score."""

    layers: tuple[bool, ...]  # others are dense
    count: int  # E
    per_token: int
    ffn_width: int
    scores: Literal["softmax", "sigmoid"] = "softmax"
    is_normalised: bool = False  # chosen scores are divided by their sum
    scale: float = 1.0
    router_bias: bool = False
    choice_bias: bool = False  # a bias per expert, for the choice only
    groups: int = 1  # of adjacent experts; experts are chosen from the best groups
    groups_per_token: int = 1
    group_best: int = 1  # a group's score is the sum of this many best experts
    bias: bool = False
    clamp: float | None = None  # gate <= clamp, |up| <= clamp, then gate · σ(α gate) · (up + 1)
    clamp_slope: float = 1.702  # α
    shared_width: int = 0  # of a feed-forward used by every token
    shared_gate: bool = False


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (DeepSeek-AI 2024, §2.1).

    The cache holds the latent and one rotated key part common to all heads: `num_kv_heads` is 1, `head_size` is `rank +
    rope_size`.
    """

    rank: int
    q_rank: int | None  # None: a single product
    plain_size: int  # unrotated, per head
    rope_size: int
    value_size: int


@dataclass(frozen=True)
class Spec:
    """A decoder. Lengths are in tokens."""

    num_layers: int
    width: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    ffn_width: int
    vocab_size: int
    max_position: int
    windows: tuple[int | None, ...]  # None: full; a query at p attends to p - window + 1 .. p
    ropes: tuple[Rope | None, ...]  # None: not rotated
    attention_scale: float  # before the soft cap
    norm: NormKind = "rms"  # "rms+1": weights are stored minus one
    norm_bias: bool = False
    norm_eps: float = 1e-6
    # "post": before the residual addition; "sandwich": both; "after": after it
    norm_place: NormPlace = "pre"
    residual: Residual = "serial"  # "parallel": attention and feed-forward read the same input
    residual_scale: float = 1.0
    qk_norm: QkNorm | None = None  # before rotation; "own per head": separate weights
    qkv_bias: bool = False
    key_bias: bool = True
    out_bias: bool = False
    mlp_bias: bool = False
    learned_positions: bool = False
    position_offset: int = 0  # rows of the position table before position 0
    sinks: bool = False  # a learned logit per head in the softmax, without value
    latent: Latent | None = None
    attention_softcap: float | None = None  # cap · tanh(score / cap)
    logit_scale: float = 1.0
    logit_softcap: float | None = None  # after logit_scale
    mlp_gated: bool = True  # activation(gate) · up, else activation(up)
    activation: Activation = "silu"
    experts: Experts | None = None
    embed_scale: float = 1.0
    tie_embeddings: bool = False
    is_causal: bool = True  # False: bidirectional, with windows to both sides
    embed_norm: bool = False  # with "pre", replaces the first attention norm
    final_norm: bool = True
    token_types: int = 0  # rows of the segment embedding
    keeps_first_norm: bool = False  # the first layer has its attention norm despite `embed_norm`
    cross: bool = False
    relative_buckets: int = 0  # T5's relative position biases
    relative_distance: int = 128  # distances beyond share a bucket

    @property
    def has_axes(self) -> bool:
        return any(rope is not None and rope.axes for rope in self.ropes)


def heads_per_shard(spec: Spec, shards: int) -> tuple[int, int]:
    """Return the query heads and KV heads per device; with more shards than KV heads, adjacent shards hold copies."""
    return spec.num_heads // shards, max(1, spec.num_kv_heads // shards)
