"""What a decoder can be: sizes, norms, positions, attention, feed-forward. Optional features default to off.

Holds plain, hashable values, so that a Spec can be a static argument of a compiled program. Knows no family of models,
no tokenizer (end-of-sequence ids do not belong here), no device and no JAX.
"""

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
    """Long wavelengths divided by `factor`, short ones kept, a linear blend between (Llama 3.1).

    A wavelength is long above `original_max_position / low_frequency_factor` tokens and short below
    `original_max_position / high_frequency_factor`.
    """

    factor: float
    low_frequency_factor: float
    high_frequency_factor: float
    original_max_position: int


@dataclass(frozen=True)
class YarnScaling:
    """Coordinates that turn often kept, those that turn seldom slowed down by `factor` (Peng et al. 2023, "YaRN").

    Often is `fast` turns or more within `original_max_position` tokens, seldom is `slow` or fewer; between, a ramp over
    the coordinates, whose ends are whole numbers where `is_truncated`.
    """

    factor: float
    original_max_position: int
    fast: float = 32.0
    slow: float = 1.0
    is_truncated: bool = True


@dataclass(frozen=True)
class PairScaling:
    """Each pair's frequency divided by a factor of its own (Ding et al. 2024, "LongRoPE")."""

    factors: tuple[float, ...]


@dataclass(frozen=True)
class Rope:
    """Rotary positions (Su et al. 2021): the first `size` coordinates of each head are turned, pair by pair."""

    size: int
    theta: float = 10000.0
    scaling: LinearScaling | BandScaling | YarnScaling | PairScaling | None = None
    amplitude: float = 1.0  # of cosine and sine: some scalings sharpen the scores
    is_interleaved: bool = False  # coordinate 2i is paired with 2i + 1, not i with i + size / 2


@dataclass(frozen=True)
class Experts:
    """A feed-forward in parts, of which each token uses the `per_token` that its router scores highest.

    What the chosen ones give is weighted by their scores and summed.
    """

    layers: tuple[bool, ...]  # which layers have experts; the others have the plain feed-forward
    count: int  # E
    per_token: int
    ffn_width: int  # of one expert
    scores: Literal["softmax", "sigmoid"] = "softmax"
    is_normalised: bool = False  # the chosen scores are divided by their sum
    scale: float = 1.0  # of the chosen scores
    router_bias: bool = False
    choice_bias: bool = False  # a stored number per expert is added to its score, but for the choice alone
    groups: int = 1  # neighbouring experts form groups, and only those of the best groups can be chosen:
    groups_per_token: int = 1
    group_best: int = 1  # … a group is as good as the sum of its so many best experts
    bias: bool = False
    clamp: float | None = None  # gate at most this, up between minus this and this, then gate · σ(α gate) · (up + 1)
    clamp_slope: float = 1.702  # α
    shared_width: int = 0  # of a feed-forward that every token uses as well
    shared_gate: bool = False  # which is weighted by the sigmoid of a product with the token


@dataclass(frozen=True)
class Latent:
    """Attention whose keys and values are products of one short vector per token (DeepSeek-AI 2024, §2.1).

    The cache holds that vector and one key part that is rotated, the same for all heads: `num_kv_heads` is 1 and
    `head_size` is `rank + rope_size`.
    """

    rank: int
    q_rank: int | None  # of the queries' own short vector; None where they are made in one product
    plain_size: int  # coordinates of a head that are not rotated
    rope_size: int  # those that are
    value_size: int


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
    ropes: tuple[Rope | None, ...]  # one entry per layer, None where heads are not turned
    attention_scale: float  # of the scores, before the soft cap
    norm: NormKind = "rms"  # "rms+1": the stored weight is the distance from one
    norm_bias: bool = False
    norm_eps: float = 1e-6
    # Of attention and of the feed-forward. "post": before the residual; "sandwich": both; "after": of the sum with it.
    norm_place: NormPlace = "pre"
    residual: Residual = "serial"  # "parallel": attention and feed-forward read the same hidden states
    residual_scale: float = 1.0  # of what attention and feed-forward add
    qk_norm: QkNorm | None = None  # of q and k before the rotation; "own per head": each head has its own weights
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    learned_positions: bool = False
    position_offset: int = 0  # rows of a learned table before that of position 0
    sinks: bool = False  # a stored logit per head takes part in the softmax and carries no value
    latent: Latent | None = None
    attention_softcap: float | None = None  # scores become cap · tanh(score / cap)
    logit_scale: float = 1.0
    logit_softcap: float | None = None  # after the scale
    mlp_gated: bool = True  # activation(gate) · up, else activation(up)
    activation: Activation = "silu"
    experts: Experts | None = None
    embed_scale: float = 1.0
    tie_embeddings: bool = False  # the output head is the token embedding
    is_causal: bool = True  # False: a token sees those behind it too; a window is then how far it sees to both sides
    embed_norm: bool = False  # … and with it, where norms are before, none before the first layer's attention
    final_norm: bool = True
    token_types: int = 0  # rows of a learned table that is added to embeddings: the first text of a pair, the second
    relative_buckets: int = 0  # a stored number per head for each bucket of distances is added to scores (T5's)
    relative_distance: int = 128  # … from which on all distances are in one bucket


def heads_per_shard(spec: Spec, shards: int) -> tuple[int, int]:
    """Count the query heads and the key-value heads that one of `shards` devices holds.

    With more shards than key-value heads, neighbouring shards hold copies of one head: the cache then has
    `shards` heads in all. `decoder.check_shards` says whether a model can be divided at all.
    """
    return spec.num_heads // shards, max(1, spec.num_kv_heads // shards)
