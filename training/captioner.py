"""The network that answers questions about pictures, in flax.nnx: a SigLIP tower, LLaVA's projector and a Llama.

It has the conventions and names of Hugging Face's LLaVA. The engine does not use this module.
"""

import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from training import network
from training.encoder import Linear, Norm
from training.network import Llama
from training.scenes import COLOURS, KINDS, PLACES

# The heads of a patch: the kind of the shape with its center there, or none; its colour, its place, and its center.
HEADS: tuple[int, ...] = (1 + len(KINDS), len(COLOURS), len(PLACES), 2)


class Shape(NamedTuple):
    """The sizes of the tower; with the defaults it has 1.5 million parameters. A patch is one of the nine places."""

    side: int = 48
    patch: int = 16
    width: int = 192
    layers: int = 3
    heads: int = 4
    inner: int = 768
    epsilon: float = 1e-6

    @property
    def patches(self) -> int:
        return (self.side // self.patch) ** 2


class TowerLayer(nnx.Module):
    """Attention among all patches of a picture, then the feed-forward layer, each on a normalised copy and added."""

    def __init__(self, shape: Shape, rngs: nnx.Rngs) -> None:
        width, self.shape = shape.width, shape
        self.q, self.k, self.v, self.out = (Linear(width, width, rngs) for _ in range(4))
        self.fc1, self.fc2 = Linear(width, shape.inner, rngs), Linear(shape.inner, width, rngs)
        self.norm1, self.norm2 = Norm(width, shape.epsilon), Norm(width, shape.epsilon)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return x [pictures * patches, width] after this layer."""
        s, normed = self.shape, self.norm1(x)

        def heads_first(x: jax.Array) -> jax.Array:
            return x.reshape(-1, s.patches, s.heads, s.width // s.heads).swapaxes(1, 2)

        q, k, v = (heads_first(linear(normed)) for linear in (self.q, self.k, self.v))
        weights = jax.nn.softmax(q @ k.swapaxes(-1, -2) * q.shape[-1] ** -0.5, axis=-1)
        x = x + self.out((weights @ v).swapaxes(1, 2).reshape(x.shape))
        return x + self.fc2(jax.nn.gelu(self.fc1(self.norm2(x)), approximate=True))


class Vision(nnx.Module):
    """The vision transformer and the projector to the decoder's width.

    Heads on its output, for its training alone, make all that questions ask about a shape linear in the embedding of
    the patch that has the shape's center.
    """

    def __init__(self, shape: Shape, out_width: int, rngs: nnx.Rngs) -> None:
        self.shape = shape
        self.patches = Linear(3 * shape.patch**2, shape.width, rngs)
        self.embed_positions = nnx.Param(jax.random.normal(rngs.params(), (shape.patches, shape.width)) * 0.5)
        self.layers = nnx.List([TowerLayer(shape, rngs) for _ in range(shape.layers)])
        self.project_1, self.project_2 = Linear(shape.width, out_width, rngs), Linear(out_width, out_width, rngs)
        self.heads_norm, self.heads = Norm(out_width, shape.epsilon), Linear(out_width, sum(HEADS), rngs)

    def __call__(self, pixels: jax.Array) -> jax.Array:
        """Return embeddings [pictures, patches, out_width] of pixels [pictures, 3, side, side]."""
        s, count = self.shape, self.shape.side // self.shape.patch
        cut = pixels.reshape(-1, 3, count, s.patch, count, s.patch).transpose(0, 2, 4, 1, 3, 5)
        x = self.patches(cut.reshape(-1, s.patches, 3 * s.patch**2)) + self.embed_positions[...]
        x = x.reshape(-1, s.width)
        for layer in self.layers:
            x = layer(x)
        embeddings = self.project_2(jax.nn.gelu(self.project_1(x), approximate=False))
        return embeddings.reshape(-1, s.patches, embeddings.shape[-1])

    def named(self, embeddings: jax.Array) -> list[jax.Array]:
        """Return the outputs [pictures, patches, size] of the heads."""
        return jnp.split(self.heads(self.heads_norm(embeddings)), list(itertools.accumulate(HEADS))[:-1], axis=-1)


class Captioner(NamedTuple):
    """The whole network."""

    vision: Vision
    decoder: Llama


def read_pictures(decoder: Llama, prefix: jax.Array, embeddings: jax.Array, repeats: int, room: int) -> network.Cache:
    """Return the cache after the tokens `prefix` and each picture, `repeats` times, with room for more tokens.

    Pictures have embeddings [pictures, patches, width].
    """
    before = decoder.embed_tokens[...][prefix]
    before = jnp.broadcast_to(before, (len(embeddings), *before.shape))
    x = jnp.concatenate([before, embeddings], axis=1)
    _, cache = decoder.states(x.reshape(-1, decoder.shape.width), jnp.arange(x.shape[1]))
    added = ((0, 0), (0, 0), (0, room), (0, 0))
    return [(jnp.pad(k, added).repeat(repeats, 0), jnp.pad(v, added).repeat(repeats, 0)) for k, v in cache]


_LAYER_NAMES = {
    **{name: f"self_attn.{name}_proj" for name in ("q", "k", "v", "out")},
    **{"fc1": "mlp.fc1", "fc2": "mlp.fc2", "norm1": "layer_norm1", "norm2": "layer_norm2"},
}


def hugging_face_weights(model: Captioner) -> dict[str, jax.Array]:
    """Return the weights under Hugging Face's names; matrices are turned to [out, in]."""
    tower, shape, stem = model.vision, model.vision.shape, "vision_tower.vision_model."
    weights = {f"language_model.{name}": value for name, value in network.hugging_face_weights(model.decoder).items()}
    modules = {f"multi_modal_projector.linear_{i}": part for i, part in ((1, tower.project_1), (2, tower.project_2))}
    for number, layer in enumerate(tower.layers):
        modules |= {f"{stem}encoder.layers.{number}.{to}": getattr(layer, name) for name, to in _LAYER_NAMES.items()}
    for name, module in modules.items():
        weights[f"{name}.weight"], weights[f"{name}.bias"] = module.weight[...].T, module.bias[...]
    patches = tower.patches.weight[...].T.reshape(shape.width, 3, shape.patch, shape.patch)
    return weights | {
        f"{stem}embeddings.patch_embedding.weight": patches,
        f"{stem}embeddings.patch_embedding.bias": tower.patches.bias[...],
        f"{stem}embeddings.position_embedding.weight": tower.embed_positions[...],
        # The norm after the last layer, which LLaVA's models do not use.
        f"{stem}post_layernorm.weight": jnp.ones(shape.width),
        f"{stem}post_layernorm.bias": jnp.zeros(shape.width),
    }
