"""Vision towers for images of any size (Qwen2.5-VL, Bai et al. 2025; Qwen3-VL).

A token is a square of merged patches. Some layers attend within square windows of tokens: patches are in the order of
windows, and each block of them attends to itself and both neighbors, which hold the rest of its windows. The last
patches are padding, in no window. N patches, D width of the tower, E width of the decoder.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax, named_scope
from jaxtyping import Float, Int

from jaxllm.media.processor import Prepared
from jaxllm.model import layers
from jaxllm.model.decoder import Params
from jaxllm.model.parameters import Part, Weight
from jaxllm.model.spec import NormKind
from jaxllm.model.tower import Arranged
from jaxllm.model.vision import Activation, activated, linear, matrix_weights, norm_weights, vector_weight
from pallas_kernels import rotate

SMALLEST = 64  # tokens of the smallest program
_NOWHERE = -1  # window of padding
_SCORES = 1 << 26  # most of attention at once: 256 MB


@dataclass(frozen=True)
class PatchVisionSpec:
    """A tower and its projector."""

    patch: int  # pixels of a patch's side
    frames: int  # of a patch; an image is repeated
    merge: int  # patches of a token's side
    width: int
    num_heads: int
    num_layers: int
    ffn_width: int
    out_width: int
    norm: NormKind
    norm_eps: float
    activation: Activation
    is_gated: bool
    patch_bias: bool
    theta: float = 10000.0
    window: int = 0  # tokens of a window's side; 0: the whole image
    full_layers: tuple[int, ...] = ()
    positions: int = 0  # side of the grid of learned positions; 0: none
    deep_layers: tuple[int, ...] = ()  # after which further embeddings are taken (DeepStack)
    reads_videos: bool = False  # programs take each of a patch's frames

    @property
    def row_width(self) -> int:
        return self.out_width * (1 + len(self.deep_layers))

    @property
    def merged(self) -> int:
        return self.merge**2

    @property
    def block(self) -> int:
        return self.window**2 * self.merged

    def sizes(self, most: int) -> tuple[int, ...]:
        """Return multiples of `SMALLEST` and of a window, doubling, with two per doubling from 256 to 2,048."""
        found, size, unit = set(), SMALLEST, math.lcm(SMALLEST, max(1, self.window**2))
        while size < most:
            found |= {size, size + size // 2} if 256 <= size < 2048 else {size}
            size *= 2
        smaller = {each for each in found if each < most}
        return tuple(sorted({-(-each // unit) * unit for each in smaller | {most}}))

    def inputs(self, size: int) -> tuple[tuple[tuple[int, ...], type], ...]:
        patches = size * self.merged
        frame = ((patches, 3 * self.patch**2), np.float32)
        return (*(frame,) * (self.frames if self.reads_videos else 1), ((patches, 3), np.int32))

    def arrange(self, image: Prepared, size: int) -> Arranged:
        assert image.grid is not None
        order, patches_order, places = _order(*image.grid, self.window, self.merge)
        *frames, (places_shape, _) = self.inputs(size)
        laid = np.zeros(places_shape, np.int32)
        laid[: len(places)], laid[len(places) :, 2] = places, _NOWHERE
        given = image.pixels[None] if image.pixels.ndim == 2 else image.pixels  # an image is repeated
        patches = np.zeros((len(given), *frames[0][0]), np.float32)
        for own, pixels in zip(patches, given, strict=True):
            np.take(pixels, patches_order, axis=0, out=own[: len(patches_order)])
        return Arranged((*(patches[min(at, len(given) - 1)] for at in range(len(frames))), laid), order)

    def declare(self) -> Params[Weight]:
        width, has_bias, inner = self.width, self.norm == "layer", self.width * self.merged
        shape = (width, 3, self.frames, self.patch, self.patch)
        top = {"patches": Weight(shape, (None,) * 5, (Part("patches", width),))}
        if self.patch_bias:
            top["patches_bias"] = vector_weight("patches_bias", width, "zeros")
        if self.positions:
            top["positions"] = Weight((self.positions**2, width), (None, None), (Part("positions", self.positions**2),))
        top |= norm_weights("merge_norm", width, has_bias)
        names = ("merge", *(f"deep_{number}" for number in range(len(self.deep_layers))))
        for name in names[1:]:
            top |= norm_weights(f"{name}_norm", inner, has_bias)
        for name in names:
            top |= matrix_weights(f"{name}_up", inner, inner) | matrix_weights(f"{name}_down", self.out_width, inner)
        each = norm_weights("attn_norm", width, has_bias) | norm_weights("mlp_norm", width, has_bias)
        each |= matrix_weights("qkv", 3 * width, width) | matrix_weights("out", width, width)
        for name in ("gate", "up") if self.is_gated else ("up",):
            each |= matrix_weights(name, self.ffn_width, width)
        return Params(top, (each | matrix_weights("down", width, self.ffn_width),) * self.num_layers)

    def encode(self, params: Params[Array], *arrays: Array) -> Array:
        *frames, places = arrays
        return encode(self, params, places, *frames)


@lru_cache(maxsize=64)
def _order(rows: int, columns: int, window: int, merge: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return tokens and patches in the order of windows, and each patch's row, column and window, int32[·, 3]."""
    row, column = (each.ravel() for each in np.indices((rows, columns)))
    within = np.zeros(rows * columns, np.intp)
    if window:
        within = row // window * -(-columns // window) + column // window
    order = np.argsort(within, kind="stable")
    each = np.arange(merge**2)
    patches = (order[:, None] * merge**2 + each).ravel()
    places = np.stack(
        [
            (row[order, None] * merge + each // merge).ravel(),
            (column[order, None] * merge + each % merge).ravel(),
            np.repeat(within[order], merge**2),
        ],
        axis=1,
    ).astype(np.int32)
    return order, patches, places


def encode(
    spec: PatchVisionSpec, params: Params[Array], places: Int[Array, "N 3"], *frames: Float[Array, "N F"]
) -> Float[Array, "T W"]:
    """Return the rows of an image's tokens in the order of windows: embeddings, then those for the first layers.

    `places`: each patch's row, column and window; `frames`: its pixels in each frame, or in one for all.
    """
    top, deep = params.top, []
    dtype = top["merge_norm"].dtype
    with named_scope("vision_tower"):
        stored, patches = top["patches"].astype(jnp.float32), frames[0]
        if len(frames) == 1:
            stored = stored.sum(axis=2)
        else:
            stored, patches = jnp.moveaxis(stored, 2, 1), jnp.concatenate(frames, axis=1)
        weight = stored.reshape(spec.width, -1).astype(dtype)
        x = layers.linear(patches.astype(dtype), weight, top.get("patches_bias")).astype(dtype)
        if spec.positions:
            x = x + _interpolated(spec, top["positions"], places).astype(dtype)
        turn = _turn(spec, places)
        for number, weights in enumerate(params.layers):
            is_full = not spec.window or number in spec.full_layers
            x = _layer(spec, is_full, weights, x, turn, places[:, 2])
            if number in spec.deep_layers:
                name = f"deep_{spec.deep_layers.index(number)}"
                deep.append(_merged(spec, top, name, _normed(spec, top, f"{name}_norm", _joined(spec, x))))
    with named_scope("projector"):
        found = _merged(spec, top, "merge", _joined(spec, _normed(spec, top, "merge_norm", x)))
        return jnp.concatenate([found, *deep], axis=-1)


def _joined(spec: PatchVisionSpec, x: Array) -> Array:
    return x.reshape(-1, spec.merged * spec.width)


def _merged(spec: PatchVisionSpec, top: dict[str, Any], name: str, x: Array) -> Array:
    return linear(top, f"{name}_down", activated(linear(top, f"{name}_up", x), "gelu"))


def _interpolated(spec: PatchVisionSpec, table: Array, places: Array) -> Array:
    """Return learned positions, interpolated linearly from a grid with the corners of the image."""
    side, axes = spec.positions, []
    for place in (places[:, 0], places[:, 1]):
        at = place.astype(jnp.float32) * (side - 1) / jnp.maximum(place.max(), 1)  # padding is at 0
        low = jnp.floor(at)
        index = low.astype(jnp.int32)
        axes.append(((index, 1 - (at - low)), (jnp.minimum(index + 1, side - 1), at - low)))
    total: Any = 0
    for row, row_share in axes[0]:
        for column, share in axes[1]:
            total = total + table[row * side + column].astype(jnp.float32) * (row_share * share)[:, None]
    return total


def _turn(spec: PatchVisionSpec, places: Array) -> tuple[Array, Array]:
    """Return cosine and sine, each float32[N, C / 2]: half of the pairs turn by row, half by column."""
    size = spec.width // spec.num_heads // 2
    frequencies = (spec.theta ** -(np.arange(0, size, 2, dtype=np.float64) / size)).astype(np.float32)
    angles = (places[:, :2].astype(jnp.float32)[:, :, None] * frequencies).reshape(len(places), -1)
    return jnp.cos(angles), jnp.sin(angles)


@partial(jax.jit, static_argnames=("spec", "is_full"))
def _layer(
    spec: PatchVisionSpec,
    is_full: bool,
    weights: dict[str, Array],
    x: Array,
    turn: tuple[Array, Array],
    windows: Array,
) -> Array:
    qkv = linear(weights, "qkv", _normed(spec, weights, "attn_norm", x))
    q, k, v = jnp.moveaxis(qkv.reshape(len(x), 3, spec.num_heads, -1), 1, 0)  # [N, H, C] each
    q, k = rotate(q, *turn, False), rotate(k, *turn, False)
    attend = _attend_to_all if is_full else partial(_attend_in_windows, spec.block)
    x = x + linear(weights, "out", attend(q, k, v, windows).reshape(x.shape))
    normed = _normed(spec, weights, "mlp_norm", x)
    inner = activated(linear(weights, "gate" if spec.is_gated else "up", normed), spec.activation)
    if spec.is_gated:
        inner = inner * linear(weights, "up", normed)
    return x + linear(weights, "down", inner)


def _attend_to_all(q: Array, k: Array, v: Array, windows: Array) -> Array:
    """Attend to all patches but padding, in parts of the queries."""
    count, heads, size = q.shape
    most = max(1, _SCORES // (heads * count))
    step = next(each for each in range(min(most, count), 0, -1) if count % each == 0)
    is_real = windows != _NOWHERE

    def attend(some: Array) -> Array:
        return _mixed(some[None], k[None], v[None], is_real[None, None])[0]

    if step == count:
        return attend(q)
    return lax.map(attend, q.reshape(-1, step, heads, size)).reshape(q.shape)


def _attend_in_windows(block: int, q: Array, k: Array, v: Array, windows: Array) -> Array:
    """Attend within windows, which are contiguous and have at most `block` patches."""

    def blocks(values: Array) -> Array:
        return values.reshape(-1, block, *values.shape[1:])

    def near(values: Array, edge: int = 0) -> Array:
        """Return each block between both neighbors."""
        first = jnp.full_like(values[:block], edge)
        return jnp.concatenate([blocks(jnp.concatenate(each)) for each in _neighbors(values, first, block)], axis=1)

    is_same = blocks(windows)[:, :, None] == near(windows, _NOWHERE - 1)[:, None, :]
    return _mixed(blocks(q), near(k), near(v), is_same).reshape(q.shape)


def _neighbors(values: Array, edge: Array, block: int) -> tuple[tuple[Array, ...], ...]:
    """Return the pieces of the values before, at and after each place, a block away."""
    return (edge, values[:-block]), (values,), (values[block:], edge)


def _mixed(q: Array, k: Array, v: Array, sees: Array) -> Array:
    """Return the mixed values of queries [B, q, H, C] over keys [B, k, H, C]; `sees` is bool[B, q or 1, k]."""
    scores = jnp.einsum("bqhc,bkhc->bhqk", q, k, preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5
    shares = jax.nn.softmax(jnp.where(sees[:, None], scores, -jnp.inf), axis=-1).astype(v.dtype)
    return jnp.einsum("bhqk,bkhc->bqhc", shares, v, preferred_element_type=jnp.float32).astype(v.dtype)


def _normed(spec: PatchVisionSpec, weights: dict[str, Any], name: str, x: Array) -> Array:
    return layers.norm(x, weights[name], weights.get(f"{name}_bias"), spec.norm, spec.norm_eps)
