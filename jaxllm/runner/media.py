"""The tower on the devices: a program encodes one image or sound, before the step that reads its embeddings."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.media.processor import Prepared, Processor
from jaxllm.metrics import Metrics
from jaxllm.runner.device_state import leaf_index
from jaxllm.runner.encoder_weights import EncoderWeights
from jaxllm.runner.step_model import Leaves
from jaxllm.setup.model_setup import MEDIA_UNIT, Setup, describe_tower


class ImageEncoder(EncoderWeights):
    """Encodes images into the state's rows; units are those of scheduler/media.py."""

    unit = MEDIA_UNIT

    def __init__(self, setup: Setup) -> None:
        assert setup.images is not None and setup.processor is not None
        self._spec = setup.images.spec
        super().__init__(setup, self._spec.declare(), setup.images.tensors)
        self.processor: Processor = setup.processor
        self.num_units = setup.media_units
        self.whole_image = setup.whole_image
        self._sizes = self._spec.sizes(self.processor.most_tokens)
        # More than a step's tokens would delay other requests.
        self.budget = max(setup.max_num_batched_tokens, self._sizes[0])
        self._programs: dict[int, Any] = {}
        self._at = 0

    @property
    def num_rows(self) -> int:
        return self.unit * self.num_units

    def compile(self, make: Callable[..., Any], state: Any) -> None:
        """Compile programs with `make` (name, function, donated, shapes); `state` describes the device's state."""
        layout, spec, tree = self._setup.layout, self._spec, describe_tower(self._setup)
        structure = jax.tree.structure(tree)
        self._at = leaf_index(state, "media")
        # Programs are kept by name and shapes, which do not determine a tower.
        kind = f"encode_{self.processor.kind}"
        name = f"{kind}_{sha256(repr(spec).encode()).hexdigest()[:8]}"

        def run(leaves: Leaves, rows: jax.Array, chosen: jax.Array, *arrays: jax.Array) -> jax.Array:
            embeddings = spec.encode(jax.tree.unflatten(structure, leaves), *arrays)
            return rows.at[chosen].set(embeddings.astype(rows.dtype), mode="drop")

        def described(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, dtype, sharding=layout.sharding())

        whole, leaves = layout.spec(), tuple(jax.tree.leaves(tree))

        def program(size: int) -> Any:
            arrays = [described(*each) for each in spec.inputs(size)]
            mapped = layout.shard_map(run, (whole,) * (3 + len(arrays)), whole)
            mapped.__name__ = kind if len(self._sizes) == 1 else f"{kind}_{size}"
            shapes = leaves, state.media, described((size,), jnp.int32), *arrays
            return make(f"{name}_{size}", mapped, (1,), *shapes)

        with ThreadPoolExecutor(min(len(self._sizes), os.cpu_count() or 2)) as pool:
            self._programs = dict(zip(self._sizes, pool.map(program, self._sizes), strict=True))

    def count(self, metrics: Metrics, num_encoded: int) -> None:
        if self.processor.kind == "audio":
            metrics.sounds_encoded += num_encoded
        else:
            metrics.images_encoded += num_encoded

    @property
    def temporary_bytes(self) -> int:
        return max(each.memory_analysis().temp_size_in_bytes for each in self._programs.values())

    def encode(self, state: Leaves, images: Sequence[tuple[Prepared, np.ndarray]]) -> Leaves:
        """Dispatch the encoding of images, each with the rows of its tokens, and return the next state."""
        leaves, sharding = list(state), self._setup.layout.sharding()
        for image, rows in images:
            size = next(size for size in self._sizes if size >= len(rows))
            arrays, order = self._spec.arrange(image, size)
            chosen = np.full(size, self.num_rows, np.int32)  # dropped
            chosen[: len(rows)] = rows if order is None else rows[order]
            # Both frames of an image are one array, sent once.
            sent = {id(each): jax.device_put(each, sharding) for each in arrays}
            given = (sent[id(each)] for each in arrays)
            leaves[self._at] = self._programs[size](self._params, leaves[self._at], chosen, *given)
        return tuple(leaves)
