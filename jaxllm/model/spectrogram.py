"""Two convolutions over a spectrogram, the first layers of Whisper's encoder (Radford et al. 2022).

M mel bands, F frames.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array, lax, named_scope
from jaxtyping import Float

from jaxllm.model.parameters import Part, Weight
from pallas_kernels.activations import activate

_TAPS = 3  # frames of a convolution


def declare(width: int, num_mels: int) -> dict[str, Weight]:
    """Return the weights; kernels are [out, in, taps]."""
    weights = {}
    for name, inputs in (("convolution_1", num_mels), ("convolution_2", width)):
        weights[name] = Weight((width, inputs, _TAPS), (None,) * 3, (Part(name, width),))
        bias = f"{name}_bias"
        weights[bias] = Weight((width,), (None,), (Part(bias, width),), "zeros")
    return weights


def embed(top: dict[str, Any], bands: Float[Array, "M F"]) -> Float[Array, "T D"]:
    """Return the states of every second frame, with positions; the last of an odd number of frames has no state."""
    with named_scope("spectrogram"):
        positions, end = top["positions"], 1 - bands.shape[1] % 2
        dtype = positions.dtype
        x = bands.astype(dtype)
        for name, stride, after in (("convolution_1", 1, end), ("convolution_2", 2, 1)):
            pads = [(1, after)]
            x = lax.conv_general_dilated(x[None], top[name], (stride,), pads, preferred_element_type=jnp.float32)[0]
            x = activate(x + top[f"{name}_bias"].astype(jnp.float32)[:, None], "gelu").astype(dtype)
        return x.T + (positions if x.shape[1] == len(positions) else positions[: x.shape[1]])
