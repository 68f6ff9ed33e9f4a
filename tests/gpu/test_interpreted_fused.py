"""Triton's products fused with norm, residual and activation, in its interpreter, against float64 sums.

In float32: the interpreter's bfloat16 products are wrong.
"""

from __future__ import annotations

import itertools
import math
import os
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from jaxllm import LLM, SamplingParams
from jaxllm.errors import UserError
from pallas_kernels import Choice, Norm, Site, tuning
from pallas_kernels.activations import ACTIVATIONS
from tests.support import paths

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1", allow_module_level=True)
pytest.importorskip("triton")

from pallas_kernels.linear import fused_triton

TOKENS, ROWS, COLUMNS = (1, 2, 7, 8, 9, 16, 17, 33, 63, 64), (1, 16, 40, 64, 70, 130), (16, 24, 100, 256, 320, 777)
LITTLE = 33 << 10  # bytes in flight per multiprocessor that saturate an H200's memory: 4.3 TB/s for 1 us
# The products of a layer: rows, columns, and whether a second matrix exists.
PRODUCTS = {
    "8B": ((6144, 4096, False), (4096, 4096, False), (14336, 4096, True), (4096, 14336, False)),
    "0.5B": ((1152, 896, False), (896, 896, False), (4864, 896, True), (896, 4864, False)),
}
NORMED = (0, 2)


def exact(x: Any, weight: Any, bias: Any, gain: Any, residual: Any, activation: str | None, eps: float) -> np.ndarray:
    """Compute the same in float64, one operation after another; `gain` is the complete factor."""
    x, weight = x.astype(np.float64), weight.astype(np.float64)
    if gain is not None:
        x = x / np.sqrt(np.mean(x**2, axis=1, keepdims=True) + eps) * gain
    out = np.einsum("td,od->to", x, weight) + (0 if bias is None else bias)
    if activation is not None:
        gate, up = out[:, : len(weight) // 2], out[:, len(weight) // 2 :]
        out = np.vectorize(FUNCTIONS[activation])(gate) * up
    return out if residual is None else out + residual


FUNCTIONS = {
    "silu": lambda y: y / (1 + math.exp(-y)),
    "gelu": lambda y: y * 0.5 * math.erfc(-y / math.sqrt(2)),
    "gelu_tanh": lambda y: 0.5 * y * (1 + math.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y**3))),
    "relu": lambda y: max(y, 0.0),
}


@pytest.mark.parametrize("by", ["triton", "xla"])
@pytest.mark.parametrize("norm", [None, "rms", "rms+1"])
@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
def test_a_product_is_what_one_after_another_gives(activation: Any, norm: str | None, by: str):
    for seed in range(3):
        rng = np.random.default_rng([seed, len(activation or ""), len(norm or "")])
        tokens, rows, columns = (int(rng.choice(each)) for each in (TOKENS, ROWS, COLUMNS))

        def drawn(*shape: int, rng: Any = rng) -> np.ndarray:
            return rng.standard_normal(shape).astype(np.float32)

        stored = rows * (2 if activation else 1)
        x, weight = drawn(tokens, columns) * 3, drawn(stored, columns) / math.sqrt(columns)
        bias = drawn(stored) if rng.random() < 0.5 else None
        residual = drawn(tokens, rows) if rng.random() < 0.5 else None
        gain = drawn(columns) if norm else None
        whole = gain + 1 if gain is not None and norm == "rms+1" else gain
        found = pallas_kernels.fused_linear(
            *(None if one is None else jnp.asarray(one) for one in (x, weight, bias)),
            norm=None if gain is None else Norm(jnp.asarray(gain), 1e-3, norm == "rms+1"),
            residual=None if residual is None else jnp.asarray(residual),
            activation=activation,
            implementation=Choice(by),
        )
        assert found.dtype == jnp.float32
        wanted = exact(x, weight, bias, whole, residual, activation, 1e-3)
        np.testing.assert_allclose(np.asarray(found), wanted, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_what_is_no_number_stays_none(activation: Any):
    """So that a step can report non-finite logits."""
    x = jnp.asarray([[1.0] * 16, [math.nan] * 16], jnp.float32)
    found = pallas_kernels.fused_linear(x, jnp.ones((8, 16)), activation=activation, implementation=Choice("triton"))
    assert np.isfinite(found[0]).all() and np.isnan(found[1]).all()


def test_a_token_has_the_same_bits_wherever_it_is():
    rng = np.random.default_rng(0)
    x, weight, gain = (jnp.asarray(rng.standard_normal(size), jnp.float32) for size in ((16, 96), (80, 96), (96,)))
    product = {"norm": Norm(gain, 1e-5), "activation": "silu", "implementation": Choice("triton")}
    found = np.asarray(pallas_kernels.fused_linear(x, weight, **product))
    turned = np.asarray(pallas_kernels.fused_linear(x[::-1], weight, **product))
    np.testing.assert_array_equal(found, turned[::-1])


def resident(rows: int, matrices: int, own: tuning.Linear) -> tuple[float, int]:
    """Return the programs that a multiprocessor of an H200 runs at once, and the bytes of weights that each has in
    flight.

    The products read one buffer while the others are filled. With wgmma, which multiplies at least 64 rows, each stage
    has a buffer, else one fewer: their shared memory shows it.
    """
    buffers = own.tuning.stages - (own.rows * matrices < 64)
    stage = own.rows * matrices * own.columns * 2
    shared = buffers * (stage + own.tokens * own.columns * 2 + own.columns * 2) + 1024
    fit = min((227 << 10) // shared, 2048 // (32 * own.tuning.warps), 65536 // (168 * 32 * own.tuning.warps))
    return min(fit, -(-rows // own.rows) / tuning.PROCESSORS[90]), (buffers - 1) * stage


@pytest.mark.parametrize("tokens", [1, 16, 64])
def test_an_8b_model_has_enough_under_way(tokens: int):
    for number, (rows, columns, is_gated) in enumerate(PRODUCTS["8B"]):
        own = tuning.of_fused_linear(90, tokens, rows, columns, is_gated, number in NORMED)
        programs, each = resident(rows, 1 + is_gated, own)
        print(f"{tokens} tokens, {rows} x {columns}: {own}, {programs:.2f} programs, {programs * each / 1024:.0f} KB")
        assert programs * each >= LITTLE
    poor = own._replace(tuning=tuning.Tuning(8, 3))
    programs, each = resident(rows, 1, poor)
    assert programs * each < LITTLE, "too few stages would be seen"


def test_small_matrices_are_divided_among_more_programs():
    for tokens in (1, 16, 64):
        rows = [
            tuning.of_fused_linear(90, tokens, *product, number in NORMED).rows
            for number, product in enumerate(PRODUCTS["0.5B"])
        ]
        assert rows[1] == rows[3] == 16, "56 programs"


def test_what_it_is_not_for_is_refused():
    site = Site("gpu", 90, dtype="bfloat16")
    assert pallas_kernels.resolve("fused_linear", site).name == "triton"
    for change, reason in (
        ({"kind": "int4"}, "quantized weights are for `linear` to multiply"),
        ({"is_deterministic": True}, "deterministic mode has products of its own"),
        ({"dtype": "float16"}, "it is for bfloat16, not float16"),
        ({"capability": 75}, "it needs compute capability 8.0"),
    ):
        own = {"platform": "gpu", "capability": 90, "dtype": "bfloat16"} | change
        assert reason in (pallas_kernels.refusal("fused_linear", "triton", Site(**own)) or "")
    with pytest.raises(UserError, match="fused_linear=triton: deterministic mode has products of its own"):
        LLM(str(paths.STORIES), kernels=["fused_linear=triton"], deterministic=True)
    x, weight = jnp.ones((2, 16)), jnp.ones((6, 16))
    for wrong in ({"residual": jnp.ones((2, 5))}, {"norm": Norm(jnp.ones(6), 0.1)}):
        with pytest.raises(ValueError, match="does not fit, it should be"):
            pallas_kernels.fused_linear(x, weight, **wrong)
    with pytest.raises(ValueError, match="does not go with 7 rows of two weights"):
        pallas_kernels.fused_linear(x, jnp.ones((7, 16)), activation="silu")


@pytest.mark.parametrize(
    "family", ["qwen2", *(pytest.param(one, marks=pytest.mark.slow) for one in ("qwen3", "gemma"))]
)
def test_an_engine_with_these_products_says_the_same(family: str, monkeypatch: pytest.MonkeyPatch):
    """The whole step, compared with unfused products; also with biases and with norms of heads.

    The interpreter does not run in two threads, so several devices are tested in tests/model/test_fused.py.
    """
    settings = {"max_num_seqs": 2, "max_num_batched_tokens": 8, "max_model_len": 32, "num_kv_blocks": 9}
    settings |= {"precompile": "covering", "skip_tokenizer_init": True}
    params = SamplingParams(temperature=0.0, max_tokens=4, logprobs=1, ignore_eos=True)
    said, ran, call = [], itertools.count(), fused_triton.call
    monkeypatch.setattr(fused_triton, "call", lambda *given, **own: (next(ran), call(*given, **own))[1])
    for name in ("xla", "triton"):
        with LLM(str(paths.GOLDEN / family), kernels=[f"fused_linear={name}"], **settings) as llm:
            (output,) = llm.generate([{"prompt_token_ids": [1, 5, 9, 13, 7]}], params, use_tqdm=False)
        said.append(output.outputs[0])
    assert next(ran) >= 8, "four products of each program that was traced"
    assert said[0].token_ids == said[1].token_ids
    found = ([next(iter(each.values())).logprob for each in one.logprobs] for one in said)
    np.testing.assert_allclose(*found, rtol=0, atol=1e-4)
