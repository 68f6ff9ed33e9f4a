"""The activations of `activations.py` in Triton; NaN propagates too."""

# pyright: reportMissingImports=false

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def activate(x, KIND: tl.constexpr):
    """Apply an activation elementwise."""
    if KIND == "silu":
        return x * tl.sigmoid(x)
    elif KIND == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif KIND == "gelu_tanh":  # (1 + tanh(z)) / 2 = sigmoid(2 z)
        return x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    else:
        return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def gated(gate, up, KIND: tl.constexpr, CLAMP: tl.constexpr, SLOPE: tl.constexpr):
    """Return activation(`gate`) times `up`; with CLAMP as gpt-oss."""
    if CLAMP is None:
        return activate(gate, KIND) * up
    else:
        gate = tl.minimum(gate, CLAMP, propagate_nan=tl.PropagateNan.ALL)
        up = tl.minimum(up, CLAMP, propagate_nan=tl.PropagateNan.ALL)
        up = tl.maximum(up, -CLAMP, propagate_nan=tl.PropagateNan.ALL)
        return gate * tl.sigmoid(SLOPE * gate) * (up + 1.0)
