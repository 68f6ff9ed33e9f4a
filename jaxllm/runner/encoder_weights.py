"""Weights of a vision tower or of an encoder-decoder model's encoder."""

from __future__ import annotations

import jax

from jaxllm.checkpoints import weights
from jaxllm.checkpoints.sources import open_sources
from jaxllm.families.family import Family
from jaxllm.model.decoder import Params
from jaxllm.model.parameters import Weight
from jaxllm.runner.step_model import Leaves
from jaxllm.setup.model_setup import Setup


class EncoderWeights:
    """Reads and holds the weights."""

    def __init__(self, setup: Setup, declared: Params[Weight], tensors: Family) -> None:
        self._setup = setup
        self._declared = declared
        self._tensors = tensors
        self._params: Leaves = ()

    def check(self) -> None:
        """Raise UserError if the files lack weights; reads headers only."""
        open_sources(self._setup.folder, self._declared, self._tensors, None)

    def load(self, progress: bool, seed: int | None) -> None:
        layout, dtype = self._setup.layout.unstaged, self._setup.dtype
        if seed is not None:
            params = weights.draw(self._declared, layout, dtype, seed)
        else:
            sources = open_sources(self._setup.folder, self._declared, self._tensors, None)
            params = weights.read(self._declared, sources, layout, dtype, progress)
        self._params = tuple(jax.tree.leaves(params))

    def close(self) -> None:
        self._params = ()
