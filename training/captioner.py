"""The network that answers questions about pictures, in flax.nnx: a SigLIP tower, LLaVA's projector and a Llama.

It has the conventions and names of Hugging Face's LLaVA. The engine does not use this module.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from training import network
from training.encoder import Linear, Norm
from training.network import Llama
from training.scenes import COLOURS, KINDS

CLASSES = 1 + len(COLOURS) * len(KINDS)  # of a patch: background, or a shape's colour and kind


class Shape(NamedTuple):
    """The sizes of the tower; with the defaults it has 0.4 million parameters."""

    side: int = 64
    patch: int = 8
    width: int = 128
    layers: int = 3
    heads: int = 4
    inner: int = 256
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


class Tower(nnx.Module):
    """The vision transformer, with two heads for its training that name the shape at each patch.

    The first head names the shape that covers a patch's middle, the second the shape with its center in the patch.
    """

    def __init__(self, shape: Shape, rngs: nnx.Rngs) -> None:
        self.shape = shape
        self.patches = Linear(3 * shape.patch**2, shape.width, rngs)
        self.embed_positions = nnx.Param(jax.random.normal(rngs.params(), (shape.patches, shape.width)) * 0.5)
        self.layers = nnx.List([TowerLayer(shape, rngs) for _ in range(shape.layers)])
        self.heads, self.heads_norm = Linear(shape.width, 2 * CLASSES, rngs), Norm(shape.width, shape.epsilon)

    def __call__(self, pixels: jax.Array) -> jax.Array:
        """Return states [pictures * patches, width] of pixels [pictures, 3, side, side]."""
        s, count = self.shape, self.shape.side // self.shape.patch
        cut = pixels.reshape(-1, 3, count, s.patch, count, s.patch).transpose(0, 2, 4, 1, 3, 5)
        x = self.patches(cut.reshape(-1, s.patches, 3 * s.patch**2)) + self.embed_positions[...]
        x = x.reshape(-1, s.width)
        for layer in self.layers:
            x = layer(x)
        return x

    def classes(self, states: jax.Array) -> jax.Array:
        """Return the logits [pictures, patches, 2, CLASSES] of the heads."""
        return self.heads(self.heads_norm(states)).reshape(-1, self.shape.patches, 2, CLASSES)


class Captioner(nnx.Module):
    """The whole network."""

    def __init__(self, tower: Shape, decoder: network.Shape, rngs: nnx.Rngs) -> None:
        self.tower = Tower(tower, rngs)
        self.project_1 = Linear(tower.width, decoder.width, rngs)
        self.project_2 = Linear(decoder.width, decoder.width, rngs)
        self.decoder = Llama(decoder, rngs)

    def project(self, states: jax.Array) -> jax.Array:
        """Return a picture's embeddings for the decoder from the states of its patches."""
        return self.project_2(jax.nn.gelu(self.project_1(states), approximate=False))

    def read(self, prefix: jax.Array, states: jax.Array, repeats: int, room: int) -> network.Cache:
        """Return the cache after the tokens `prefix` and each picture, `repeats` times, with room for more tokens."""
        patches, decoder = self.tower.shape.patches, self.decoder
        seen = self.project(states).reshape(-1, patches, decoder.shape.width)
        before = jnp.broadcast_to(decoder.embed_tokens[...][prefix], (len(seen), len(prefix), decoder.shape.width))
        x = jnp.concatenate([before, seen], axis=1)
        _, cache = decoder.states(x.reshape(-1, decoder.shape.width), jnp.arange(x.shape[1]))
        added = ((0, 0), (0, 0), (0, room), (0, 0))
        return [(jnp.pad(k, added).repeat(repeats, 0), jnp.pad(v, added).repeat(repeats, 0)) for k, v in cache]


_LAYER_NAMES = {
    **{name: f"self_attn.{name}_proj" for name in ("q", "k", "v", "out")},
    **{"fc1": "mlp.fc1", "fc2": "mlp.fc2", "norm1": "layer_norm1", "norm2": "layer_norm2"},
}


def hugging_face_weights(model: Captioner) -> dict[str, jax.Array]:
    """Return the weights under Hugging Face's names; matrices are turned to [out, in]."""
    tower, shape, stem = model.tower, model.tower.shape, "vision_tower.vision_model."
    weights = {f"language_model.{name}": value for name, value in network.hugging_face_weights(model.decoder).items()}
    modules = {f"multi_modal_projector.linear_{i}": part for i, part in ((1, model.project_1), (2, model.project_2))}
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
