"""The vision tower on the devices: one program encodes one image, before the step that reads its embeddings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.checkpoints import weights
from jaxllm.checkpoints.sources import open_sources
from jaxllm.media.processor import ImageProcessor
from jaxllm.model import vision
from jaxllm.runner.device_state import leaf_index
from jaxllm.runner.step_model import Leaves
from jaxllm.setup.model_setup import MEDIA_UNIT, Setup, describe_tower

NAME = "encode_image"


class ImageEncoder:
    """Encodes images into the state's rows. Its units are those of scheduler/media.py."""

    unit = MEDIA_UNIT

    def __init__(self, setup: Setup) -> None:
        assert setup.images is not None and setup.processor is not None
        self._setup = setup
        self._spec = setup.images.spec
        self.processor: ImageProcessor = setup.processor
        self.num_units = setup.media_units
        # One image more than a step's tokens would delay the rows of other requests.
        self.budget = max(setup.max_num_batched_tokens, self._spec.num_tokens)
        self._params: Leaves = ()
        self._program: Any = None
        self._at = 0

    @property
    def num_rows(self) -> int:
        return self.unit * self.num_units

    def check(self) -> None:
        """Raise UserError if the files lack the tower's weights; reads headers only."""
        self._open()

    def load(self, progress: bool, seed: int | None) -> None:
        """Read the weights, or make random ones with a seed."""
        setup = self._setup
        declared = vision.declare(self._spec)
        if seed is not None:
            params = weights.draw(declared, setup.layout.unstaged, setup.dtype, seed)
        else:
            params = weights.read(declared, self._open(), setup.layout.unstaged, setup.dtype, progress)
        self._params = tuple(jax.tree.leaves(params))

    def compile(self, make: Callable[..., Any], state: Any) -> None:
        """Compile the program with `make` (name, function, donated, shapes); `state` describes the device's state."""
        layout, spec, tree = self._setup.layout, self._spec, describe_tower(self._setup)
        structure = jax.tree.structure(tree)
        self._at = leaf_index(state, "media")

        def run(leaves: Leaves, rows: jax.Array, pixels: jax.Array, chosen: jax.Array) -> jax.Array:
            embeddings = vision.encode(spec, jax.tree.unflatten(structure, leaves), pixels)
            return rows.at[chosen].set(embeddings.astype(rows.dtype), mode="drop")

        whole = layout.spec()
        mapped = layout.shard_map(run, (whole, whole, whole, whole), whole)
        mapped.__name__ = NAME
        described = (
            jax.ShapeDtypeStruct((3, spec.side, spec.side), jnp.float32, sharding=layout.sharding()),
            jax.ShapeDtypeStruct((spec.num_tokens,), jnp.int32, sharding=layout.sharding()),
        )
        self._program = make(NAME, mapped, (1,), tuple(jax.tree.leaves(tree)), state.media, *described)

    @property
    def temporary_bytes(self) -> int:
        return self._program.memory_analysis().temp_size_in_bytes

    def encode(self, state: Leaves, images: Sequence[tuple[np.ndarray, np.ndarray]]) -> Leaves:
        """Dispatch the encoding of images, (pixels, rows) each, and return the next state."""
        leaves = list(state)
        for pixels, rows in images:
            leaves[self._at] = self._program(self._params, leaves[self._at], pixels, rows)
        return tuple(leaves)

    def close(self) -> None:
        self._params = ()

    def _open(self) -> Any:
        images = self._setup.images
        assert images is not None
        return open_sources(self._setup.folder, vision.declare(self._spec), images.tensors, None)
