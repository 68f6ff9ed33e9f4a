"""Triton's mixture-of-experts kernels in Triton's interpreter, against jaxllm's own, and their tiles.

In float32; the implementations in `moe.py` are compared with a float64 loop in `tests/model/test_moe.py`.
"""

from __future__ import annotations

import itertools
import os
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from jaxllm import LLM, SamplingParams
from jaxllm.model import moe
from jaxllm.model.parameters import Scheme
from jaxllm.model.quantized import Quantized
from jaxllm.model.sharding import UNDIVIDED
from jaxllm.model.spec import Experts, Spec
from pallas_kernels import Choice, Site, tuning
from tests.support import paths

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1", allow_module_level=True)
pytest.importorskip("triton")

from pallas_kernels.experts import triton_kernels
from pallas_kernels.triton_bridge import call
from pallas_kernels.tuning import Tuning

TRITON = Choice("triton")
ROUTINGS = ("random", "all to one", "none to some", "in order")
FORMS = {"tiles": partial(moe.by_tiles, skips=False), "all": moe.by_all}


def routing(rng: np.random.Generator, kind: str, tokens: int, count: int, per_token: int) -> np.ndarray:
    """Choose distinct experts for each token."""
    if kind == "all to one":
        return np.tile(rng.permutation(count)[:per_token], (tokens, 1)).astype(np.int32)
    if kind == "in order":
        return (np.arange(tokens)[:, None] + np.arange(per_token)).astype(np.int32) % count
    most = count if kind == "random" else min(per_token + 1, count)
    return np.argsort(rng.random((tokens, most)), axis=1)[:, :per_token].astype(np.int32)


def mixture(seed: int, **own: Any) -> tuple[Spec, Experts, dict[str, jax.Array]]:
    """Draw a layer's experts."""
    experts = Experts(layers=(True,), **own.pop("experts"))
    sizes = {"num_layers": 1, "num_heads": 1, "num_kv_heads": 1, "head_size": 8, "ffn_width": 48, "vocab_size": 64}
    spec = Spec(**sizes, max_position=64, windows=(None,), ropes=(None,), attention_scale=1.0, experts=experts, **own)
    rng = np.random.default_rng(seed)
    arrays = {
        name: jnp.asarray(0.3 * rng.standard_normal(one.shape, np.float32))
        for name, one in moe.declare(spec, experts).items()
        if name.startswith("expert_")
    }
    return spec, experts, arrays


@pytest.mark.parametrize("seed", range(10))
def test_tiles_of_every_routing_are_what_the_loop_gives(seed: int, monkeypatch: pytest.MonkeyPatch):
    """Sizes without common divisors, every number of assignments in a tile, with halves and without."""
    rng = np.random.default_rng(seed)
    count, tokens = int(rng.choice([1, 4, 5, 9])), int(rng.choice([1, 2, 15, 33, 70]))
    per_token = min(int(rng.choice([1, 2, 3])), count)
    has_bias, has_clamp = bool(rng.integers(2)), bool(rng.integers(2))
    own = {"count": count, "per_token": per_token, "ffn_width": int(rng.choice([12, 40])), "bias": has_bias}
    own["clamp"] = 0.5 if has_clamp else None
    spec, experts, arrays = mixture(
        seed, experts=own, width=int(rng.choice([20, 64])), activation=str(rng.choice(["silu", "gelu", "gelu_tanh"]))
    )
    size, has_halves = int(rng.choice([16, 32])), bool(rng.integers(2))
    tile = tuning.Experts(size, has_halves, int(rng.choice([32, 64])), 32, Tuning(4, 2))
    monkeypatch.setattr(tuning, "of_experts", lambda *_: tile)
    x = jnp.asarray(rng.standard_normal((tokens, spec.width), np.float32))
    chosen = jnp.asarray(routing(rng, ROUTINGS[seed % 4], tokens, count, per_token))
    gates = jnp.asarray(rng.random(chosen.shape, np.float32))
    form = FORMS[str(rng.choice(list(FORMS)))]
    expected = np.asarray(form(spec, experts, arrays, x, chosen, gates))
    if has_bias:
        expected = expected + np.asarray(moe.spread(experts.count, chosen, gates) @ arrays["expert_down_bias"])
    biases = {name: arrays.get(f"expert_{name}") for name in ("up_bias", "down_bias")}
    settings = {"activation": spec.activation, "clamp": experts.clamp} | biases
    given = (x, arrays["expert_up"], arrays["expert_down"], chosen, gates)
    for implementation in ("xla", TRITON):
        found = pallas_kernels.fused_experts(*given, **settings, implementation=implementation)
        assert found.dtype == jnp.float32
        np.testing.assert_allclose(np.asarray(found), expected, rtol=2e-6, atol=2e-5)


@pytest.mark.parametrize("kind", ROUTINGS)
def test_devices_with_whole_experts_add_up(kind: str):
    """Three devices with two experts each; rows that no program writes hold NaN, as memory may."""
    spec, _, arrays = mixture(5, experts={"count": 6, "per_token": 2, "ffn_width": 40, "bias": True}, width=64)
    rng = np.random.default_rng(5)
    x = jnp.asarray(rng.standard_normal((33, spec.width), np.float32))
    chosen = jnp.asarray(routing(rng, kind, 33, 6, 2))
    gates = jnp.asarray(rng.random(chosen.shape, np.float32))
    names = "expert_up", "expert_down", "expert_up_bias", "expert_down_bias"
    up, down, *biases = (arrays[name] for name in names)
    expected = pallas_kernels.fused_experts(x, up, down, chosen, gates, *biases, implementation="xla")
    for implementation in ("xla", TRITON):
        total = jnp.zeros_like(expected)
        for first in (0, 2, 4):
            own = [arrays[name][first : first + 2] for name in names]
            here = jnp.where((chosen >= first) & (chosen < first + 2), chosen - first, 2)
            total += pallas_kernels.fused_experts(
                x, *own[:2], here, gates, *own[2:], num_experts=6, implementation=implementation
            )
        np.testing.assert_allclose(np.asarray(total), np.asarray(expected), rtol=2e-6, atol=2e-5)
    with pytest.raises(ValueError, match="1 experts of all devices are fewer than the 6 of this one"):
        pallas_kernels.fused_experts(x, up, down, chosen, gates, num_experts=1)


@pytest.mark.parametrize("seed", range(6))
def test_experts_are_chosen_as_the_router_does(seed: int):
    """Equal and infinite scores too; a row with NaN gets valid experts with NaN weights."""
    rng = np.random.default_rng(seed)
    count, per_token = ((4, 1), (60, 4), (128, 8), (3, 3), (256, 6), (9, 2))[seed]
    scores = np.round(rng.standard_normal((33, count)) * 2, 1).astype(np.float32)
    scores[1], scores[2, : count // 2], scores[3, 0] = 0.5, -np.inf, np.nan
    bias = jnp.asarray(rng.standard_normal(count, np.float32)) if seed % 2 else None
    own = {"per_token": per_token, "kind": "sigmoid" if seed % 2 else "softmax", "is_normalised": seed > 2}
    run = partial(pallas_kernels.fused_topk, jnp.asarray(scores), bias, scale=1.5, **own)
    (chosen, gates), (right, weights) = run(implementation=TRITON), run(implementation="xla")
    assert chosen.dtype == jnp.int32 and gates.dtype == jnp.float32
    others = np.arange(33) != 3
    np.testing.assert_array_equal(chosen[others], right[others])
    np.testing.assert_allclose(gates[others], weights[others], rtol=1e-5, atol=1e-7)
    assert chosen[3, 0] == 0 and len(set(chosen[3].tolist()) & set(range(count))) == per_token
    assert np.isnan(gates[3, 0])


def planned(chosen: np.ndarray, count: int, size: int, visited: int = 256) -> tuple[np.ndarray, np.ndarray]:
    """Return the plan: places in order of experts, and [3, tiles]."""
    flat = jnp.asarray(chosen.reshape(-1))
    tiles = triton_kernels.num_tiles(len(flat), count, size)
    shapes = [jax.ShapeDtypeStruct((len(flat),), jnp.int32), jax.ShapeDtypeStruct((3, tiles), jnp.int32)]
    bins = 1 << count.bit_length()
    sizes = {"N": len(flat), "E": count, "BM": size, "TILES": tiles, "BINS": bins, "BLOCK": visited}
    order, table = call(triton_kernels.plan, (flat,), shapes, (count,), Tuning(4, 1), None, **sizes)
    return np.asarray(order), np.asarray(table)


@pytest.mark.parametrize("kind", ROUTINGS)
def test_a_plan_has_every_assignment_once_in_order(kind: str):
    rng = np.random.default_rng(0)
    for count, tokens, size in ((1, 3, 16), (7, 1, 16), (40, 300, 16), (9, 400, 32)):
        chosen = routing(rng, kind, tokens, count, min(3, count))
        order, (experts, firsts, counts) = planned(chosen, count, size)
        np.testing.assert_array_equal(order, np.argsort(chosen.reshape(-1), kind="stable"))
        used = counts > 0
        assert not used[np.argmin(used) :].any() or used.all(), "those that are used come first"
        assert counts.sum() == chosen.size and counts.max() <= size
        np.testing.assert_array_equal(firsts[used], np.cumsum(counts[used]) - counts[used])
        sorted_ones = chosen.reshape(-1)[order]
        for expert, first, number in zip(experts[used], firsts[used], counts[used], strict=True):
            assert (sorted_ones[first : first + number] == expert).all()


def multiplied(chosen: np.ndarray, count: int) -> tuple[float, float]:
    """Return the multiplied rows as a share of the assignments, and how often a weight is read."""
    tile = tuning.of_experts(90, chosen.size, count, "bfloat16")
    _, (_, _, counts) = planned(chosen, count, tile.assignments, 4096)
    half = tile.assignments // 2
    rows = np.where(counts > half, tile.assignments, np.where(tile.has_halves & (counts > 0), half, 0))
    rows = np.where(counts > 0, np.maximum(rows, half if tile.has_halves else tile.assignments), 0)
    return rows.sum() / chosen.size, np.count_nonzero(counts) / len(np.unique(chosen))


@pytest.mark.parametrize("tokens", [256, 420, 1024, 2048])
def test_few_sums_are_made_for_nothing(tokens: int):
    """128 experts, 8 for each token, at random: Qwen3-30B-A3B with uniform routing."""
    chosen = routing(np.random.default_rng(tokens), "random", tokens, 128, 8)
    share, reads = multiplied(chosen, 128)
    print(f"{tokens} tokens: {share:.2f} times the useful sums, weights read {reads:.2f} times")
    assert share <= 1.3 and reads <= 2.5


def test_wide_tiles_would_make_many(monkeypatch: pytest.MonkeyPatch):
    """The measure above detects tiles of twice an expert's average."""
    monkeypatch.setattr(tuning, "of_experts", lambda *_: tuning.Experts(32, False, 128, 128, Tuning(4, 3)))
    share, reads = multiplied(routing(np.random.default_rng(0), "random", 256, 128, 8), 128)
    assert share > 1.9 and reads < 1.01


def test_a_row_has_the_same_bits_whatever_else_is_there():
    """So a deterministic step, in which one program computes all, may use this kernel.

    Its tiles are whole: half a tile may be multiplied by another instruction, which shows only on a GPU.
    """
    assert pallas_kernels.resolve("fused_experts", Site("gpu", 90, "bfloat16", is_deterministic=True)).is_deterministic
    assert tuning.of_experts(90, 2048, 128, "bfloat16").has_halves
    assert not tuning.of_experts(90, 2048, 128, "bfloat16", True).has_halves
    whole = Choice("triton", is_deterministic=True)
    spec, _, arrays = mixture(3, experts={"count": 6, "per_token": 2, "ffn_width": 40}, width=64)
    rng = np.random.default_rng(3)
    x = rng.standard_normal((48, spec.width)).astype(np.float32)
    chosen, gates = routing(rng, "random", 48, 6, 2), rng.random((48, 2)).astype(np.float32)

    def run(*given: np.ndarray) -> np.ndarray:
        x, chosen, gates = map(jnp.asarray, given)
        weights = arrays["expert_up"], arrays["expert_down"]
        return np.asarray(pallas_kernels.fused_experts(x, *weights, chosen, gates, implementation=whole))

    alone = run(x, chosen, gates)
    places = rng.permutation(48)
    np.testing.assert_array_equal(run(x[places], chosen[places], gates[places]), alone[places])
    others, elsewhere = x.copy(), chosen.copy()
    others[7:], elsewhere[7:, :] = np.nan, chosen[0]
    np.testing.assert_array_equal(run(others, elsewhere, gates)[:7], alone[:7])


def test_what_is_not_its_to_multiply_stays_with_the_other_forms(monkeypatch: pytest.MonkeyPatch):
    site = Site("gpu", 90, dtype="bfloat16")
    assert pallas_kernels.resolve("fused_experts", site).name == "triton"
    monkeypatch.setattr(triton_kernels.triton_bridge, "is_interpreted", lambda: False)
    for own, reason in (
        ({"kind": "float4"}, "experts of float4 are XLA's to multiply"),
        ({"dtype": "float32"}, "experts of float32 are XLA's to multiply"),
    ):
        other = Site("gpu", 90, **{"dtype": "bfloat16"} | own)
        assert pallas_kernels.resolve("fused_experts", other) == Choice("xla", 90, f"not triton: {reason}")
        with pytest.raises(ValueError, match=f"fused_experts=triton: {reason}"):
            pallas_kernels.resolve("fused_experts", other, "triton")
    monkeypatch.undo()
    spec, experts, arrays = mixture(1, experts={"count": 4, "per_token": 2, "ffn_width": 8}, width=16)
    rng = np.random.default_rng(1)
    weights = {"router": jnp.asarray(rng.standard_normal((4, 16), np.float32))}
    for name, one in arrays.items():
        values = jnp.round(one * 50).astype(jnp.int8)
        weights[name] = Quantized(values, jnp.full((4, 1, one.shape[1]), 0.02), scheme=Scheme("int8"))
    x = jnp.asarray(rng.standard_normal((3, 16), np.float32))
    expected = moe.mix(spec, experts, weights, x, UNDIVIDED)
    monkeypatch.setattr(triton_kernels, "call", None)
    with pallas_kernels.fused_experts_by(TRITON):
        np.testing.assert_array_equal(moe.mix(spec, experts, weights, x, UNDIVIDED), expected)


@pytest.mark.parametrize(
    "case",
    ["qwen3-moe", pytest.param("gpt-oss", marks=pytest.mark.slow), pytest.param("mixtral", marks=pytest.mark.slow)],
)
def test_an_engine_with_this_kernel_says_the_same(case: str, monkeypatch: pytest.MonkeyPatch):
    """The whole step of a small random model, compared with XLA's products."""
    settings = {"max_num_seqs": 2, "max_num_batched_tokens": 8, "max_model_len": 32, "num_kv_blocks": 9}
    settings |= {"precompile": "covering", "dtype": "float32", "skip_tokenizer_init": True}
    params = SamplingParams(temperature=0.0, max_tokens=4, logprobs=1, ignore_eos=True)
    said, ran = [], itertools.count()
    own = triton_kernels.call
    monkeypatch.setattr(triton_kernels, "call", lambda *given, **of: (next(ran), own(*given, **of))[1])
    for name in ("xla", "triton"):
        kernels = [f"{operation}={name}" for operation in ("fused_topk", "fused_experts")]
        with LLM(str(paths.GOLDEN / case), kernels=kernels, **settings) as llm:
            prompt = {"prompt_token_ids": [5, 9, 3, 7, 11, 2]}
            (output,) = llm.generate([prompt], params, use_tqdm=False)
        said.append(output.outputs[0])
        assert (next(ran) > 4) == (name == "triton")
    assert said[0].token_ids == said[1].token_ids
    found = ([next(iter(each.values())).logprob for each in one.logprobs] for one in said)
    np.testing.assert_allclose(*found, rtol=0, atol=1e-4)
