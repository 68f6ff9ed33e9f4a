"""Triton's products with quantized weights, in Triton's interpreter, against exact sums of the dequantized numbers.

In float32 and float16, the types that the interpreter supports.
"""

from __future__ import annotations

import itertools
import os
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import pallas_kernels
from jaxllm import LLM, SamplingParams
from jaxllm.errors import UserError
from jaxllm.model import layers
from jaxllm.model.parameters import Scheme
from jaxllm.model.quantized import Quantized
from pallas_kernels import Choice, Site, tuning
from pallas_kernels.linear.numbers import PACKED, Kind, dequantized, packed
from tests.support import paths

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1", allow_module_level=True)
pytest.importorskip("triton")

from pallas_kernels.linear import triton_kernels

TRITON = Choice("triton")
KINDS: tuple[Kind, ...] = ("int8", "float8", "int4", "float4")
TOKENS, ROWS, PIECES = (1, 2, 15, 16, 17, 33, 64, 70), (1, 48, 64, 70), (1, 3, 5)


def random_weight(rng: Any, kind: Kind, rows: int, columns: int) -> np.ndarray:
    """Draw a weight of any numbers of its kind."""
    if kind in PACKED:
        return packed(rng.integers(0, 16, (rows, columns)), np)
    codes = rng.integers(-128, 128, (rows, columns)).astype(np.int8)
    if kind == "int8":
        return codes
    return np.where(codes & 127 == 127, 0, codes).astype(np.int8).view(ml_dtypes.float8_e4m3fn)  # no NaN


@pytest.mark.parametrize("has_zeros", [False, True])
@pytest.mark.parametrize("group", [32, 64, 128, 50, None])
@pytest.mark.parametrize("kind", KINDS)
def test_products_are_exact_sums(kind: Kind, group: int | None, has_zeros: bool):
    rng = np.random.default_rng([KINDS.index(kind), group or 0, has_zeros])
    tokens, rows, pieces = (int(rng.choice(each)) for each in (TOKENS, ROWS, PIECES))
    dtype = np.dtype(rng.choice(["float32", "float16"]))
    groups, columns = (1, 116 * pieces) if group is None else (pieces, group * pieces)
    weight = random_weight(rng, kind, rows, columns)
    scales = rng.uniform(0.001, 0.02, (groups, rows)).astype(np.float32)
    zeros = rng.integers(-8, 8, (groups, rows)).astype(np.int8 if kind in PACKED else np.int16) if has_zeros else None
    x = rng.standard_normal((tokens, columns)).astype(dtype)
    exact = dequantized(weight, scales, zeros, kind, np.float64, np)
    arrays = jax.tree.map(jnp.asarray, (x, weight, scales, zeros))
    found = np.asarray(pallas_kernels.linear(*arrays, kind=kind, implementation=TRITON))
    wide = x.astype(np.float64)
    # float16 cannot hold all bits of a float8 minus a zero point.
    share = 2**-10 if kind == "float8" and has_zeros and dtype == np.float16 else 1e-6
    assert (np.abs(found - wide @ exact.T) <= share * (np.abs(wide) @ np.abs(exact).T) + 1e-9).all()


def test_numbers_behind_others_bits_are_exact():
    """The method of `_integers`, also in a type that the interpreter lacks."""
    for codes, bits, dtype, before in ((16, 0x4300, ml_dtypes.bfloat16, 128), (256, 0x6400, np.float16, 1024)):
        numbers = (np.arange(codes, dtype=np.uint16) | np.uint16(bits)).view(dtype) - dtype(before + codes // 2)
        assert numbers.dtype == dtype
        np.testing.assert_array_equal(numbers.astype(np.float64), np.arange(codes) - codes // 2)


def test_columns_are_divided_where_rows_do_not_fill_a_device():
    assert tuning.of_linear(90, 16, 4096, 4096, "int4", "bfloat16").splits == 8, "64 programs for 132 processors"
    assert tuning.of_linear(90, 16, 128256, 4096, "float8", "bfloat16").splits == 1
    assert tuning.of_linear(90, 1, 64, 256, "int8", "bfloat16").splits == 1, "too few columns"


def test_sums_of_divided_columns_are_added_in_order(monkeypatch: pytest.MonkeyPatch):
    """Each part of the sum rounds differently in another order, as with atomics."""
    rng = np.random.default_rng(1)
    weight, scales = random_weight(rng, "int8", 64, 1024), np.ones((1, 64), np.float32)
    x = rng.standard_normal((3, 1024)).astype(np.float32)
    parts = []
    call = triton_kernels.call
    monkeypatch.setattr(triton_kernels, "call", lambda *given, **own: parts.append(call(*given, **own)) or parts[-1])
    found = np.asarray(
        pallas_kernels.linear(*map(jnp.asarray, (x, weight, scales)), kind="int8", implementation=TRITON)
    )
    ((each,),) = parts
    assert each.shape[1] > 1
    expected = np.zeros((3, 64), np.float32)
    for split in range(each.shape[1]):
        expected = expected + np.asarray(each[:, split])
    np.testing.assert_array_equal(found, expected)


def test_what_is_not_its_to_multiply_stays_with_xla(monkeypatch: pytest.MonkeyPatch):
    """Inside `linear_by` each product runs where it is supported, for example that of a head that is not quantized."""
    ran = []
    for name in ("xla", "triton_kernels"):
        module = pallas_kernels.choice.module("linear", name.removesuffix("_kernels"))
        own = module.linear
        monkeypatch.setattr(
            module, "linear", lambda *given, own=own, name=name, **of: ran.append(name) or own(*given, **of)
        )
    x, weight, scales = jnp.ones((2, 32)), jnp.ones((4, 32), jnp.int8), jnp.ones((1, 4))
    schemes = Scheme("int8"), Scheme("int8", rounds_rows=True)
    with pallas_kernels.linear_by(TRITON):
        for one in (*(Quantized(weight, scales, scheme=scheme) for scheme in schemes), weight.astype(jnp.float32)):
            np.testing.assert_allclose(layers.linear(x, one), 32, rtol=1e-5)
    assert ran == ["triton_kernels", "xla", "xla"]
    layers.linear(x, Quantized(weight, scales, scheme=schemes[0]))
    assert ran[3:] == ["xla"], "what was traced inside is not used outside"
    site = Site("gpu", 90, dtype="bfloat16", kind="int4")
    assert pallas_kernels.resolve("linear", site).name == "triton"
    assert pallas_kernels.resolve("linear", Site("gpu", 90)).name == "xla"


def test_an_engine_with_these_products_says_the_same(monkeypatch: pytest.MonkeyPatch):
    """The whole step, compared with XLA's products."""
    settings = {"max_num_seqs": 2, "max_num_batched_tokens": 8, "max_model_len": 32, "num_kv_blocks": 9}
    settings |= {"precompile": "covering", "quantization": "fp8"}
    params = SamplingParams(temperature=0.0, max_tokens=3, logprobs=1)
    said, ran, call = [], itertools.count(), triton_kernels.call
    monkeypatch.setattr(triton_kernels, "call", lambda *given, **own: (next(ran), call(*given, **own))[1])
    for name in ("xla", "triton"):
        with LLM(str(paths.STORIES), kernels=[f"linear={name}"], **settings) as llm:
            (output,) = llm.generate(["Once upon a time"], params, use_tqdm=False)
        said.append(output.outputs[0])
    assert next(ran) >= 5, "traced for each matrix of a layer, and the head"
    assert said[0].token_ids == said[1].token_ids
    found = ([next(iter(each.values())).logprob for each in one.logprobs] for one in said)
    np.testing.assert_allclose(*found, rtol=0, atol=1e-4)
    with pytest.raises(UserError, match="linear=triton: weights that are floats are XLA's to multiply"):
        LLM(str(paths.STORIES), kernels=["linear=triton"])
