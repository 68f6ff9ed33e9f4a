"""Mixtures of experts: the router and each way of multiplying against loops in float64, and their costs."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import pallas_kernels
from jaxllm.checkpoints import weights
from jaxllm.families.families import read_spec
from jaxllm.model import decoder, moe, sharding
from jaxllm.model.spec import Experts, Spec
from pallas_kernels import Choice
from tests.parity.driver import Driver
from tests.support.paths import GOLDEN

ROUTED = sorted(
    folder.parent.name
    for folder in GOLDEN.glob("*/config.json")
    if read_spec(weights.read_config(folder.parent))[0].experts
)
WAYS = {
    "tiles, the real ones": partial(moe.by_tiles, skips=True),
    "tiles, the worst case": partial(moe.by_tiles, skips=False),
    "gathering": moe.by_gathering,
    "all": moe.by_all,
}


def _spec(**own) -> tuple[Spec, Experts]:
    mixture = Experts(**({"layers": (True,), "count": 8, "per_token": 3, "ffn_width": 12} | own))
    sizes = {"num_layers": 1, "width": 20, "num_heads": 1, "num_kv_heads": 1, "head_size": 8, "ffn_width": 48}
    other = {"vocab_size": 64, "max_position": 64, "windows": (None,), "ropes": (None,), "attention_scale": 1.0}
    return Spec(experts=mixture, **sizes, **other), mixture


def _arrays(spec: Spec, mixture: Experts, seed: int = 0) -> dict[str, jax.Array]:
    rng = np.random.default_rng(seed)
    declared = moe.declare(spec, mixture)
    return {name: jnp.asarray(rng.standard_normal(one.shape, np.float32)) for name, one in declared.items()}


def _expert_in_float64(mixture: Experts, arrays: dict[str, jax.Array], number: int, x: np.ndarray) -> np.ndarray:
    own = {name: np.asarray(arrays[name][number], np.float64) for name in arrays if name.startswith("expert_")}
    gate, up = np.split(own["expert_up"] @ x + own.get("expert_up_bias", 0.0), 2)
    if mixture.clamp is None:
        inner = gate / (1 + np.exp(-gate)) * up
    else:
        gate, up = np.minimum(gate, mixture.clamp), np.clip(up, -mixture.clamp, mixture.clamp)
        inner = gate / (1 + np.exp(-1.702 * gate)) * (up + 1)
    return own["expert_down"] @ inner


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("own", [{}, {"bias": True, "clamp": 2.0, "router_bias": True}], ids=["plain", "clamped"])
@pytest.mark.parametrize("tokens", [*(pytest.param(count, marks=pytest.mark.ci) for count in (1, 2)), 70])
def test_each_way_of_multiplying_matches_a_loop_over_tokens(tokens, own, way):
    spec, mixture = _spec(**own)
    arrays = _arrays(spec, mixture)
    rng = np.random.default_rng(tokens)
    x = rng.standard_normal((tokens, spec.width)).astype(np.float32)
    chosen = np.argsort(rng.random((tokens, mixture.count)), axis=1)[:, : mixture.per_token].astype(np.int32)
    chosen[tokens // 2 :] = [5, 0, 7]  # some experts get several tiles, others nothing
    gates = rng.random(chosen.shape).astype(np.float32)
    routed = {name: array for name, array in arrays.items() if name.startswith("expert_")}
    out = jax.jit(partial(WAYS[way], spec, mixture))(routed, x, chosen, gates)
    expected = [
        sum(
            gate * _expert_in_float64(mixture, arrays, number, row)
            for number, gate in zip(numbers, weight, strict=True)
        )
        for row, numbers, weight in zip(x.astype(np.float64), chosen, gates.astype(np.float64), strict=True)
    ]
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(out, np.asarray(expected), rtol=0, atol=2e-4)


@pytest.mark.parametrize("way", [*WAYS, "kernel"])
@pytest.mark.parametrize("tokens", [2, pytest.param(70, marks=pytest.mark.ci)])
@pytest.mark.parametrize("ranks", [1, 2])
def test_shards_of_whole_experts_add_up_to_all(ranks, tokens, way, monkeypatch):
    """Four shards with two experts each, of one rank or two; some have no assignment, and a row of NaN spoils no
    other.
    """
    spec, mixture = _spec(bias=True, clamp=2.0)
    arrays = _arrays(spec, mixture)
    rng = np.random.default_rng(tokens)
    x = rng.standard_normal((tokens, spec.width)).astype(np.float32)
    chosen = np.argsort(rng.random((tokens, mixture.count)), axis=1)[:, : mixture.per_token].astype(np.int32)
    chosen[tokens // 2 :] = [5, 0, 7]
    gates = rng.random(chosen.shape).astype(np.float32)
    monkeypatch.setattr(moe, "route", lambda *_: (jnp.asarray(chosen), jnp.asarray(gates)))
    if way != "kernel":
        monkeypatch.setattr(moe, "by_tiles", lambda *given, skips: WAYS[way](*given))  # a CPU's way
    layout = sharding.make_layout(jax.devices(), 4 // ranks, divides_experts=True, num_ranks=ranks)
    specs = {name: layout.spec(*one.axes) for name, one in moe.declare(spec, mixture).items()}
    assert layout.sharding(*moe.declare(spec, mixture)["expert_up"].axes).shard_shape((8, 24, 20)) == (2, 24, 20)

    def run(layout: sharding.Layout, arrays: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        with pallas_kernels.fused_experts_by(Choice("xla") if way == "kernel" else None):
            return layout.total(moe.mix.__wrapped__(spec, mixture, arrays, x, layout), "feed_forward")

    own = layout.spec("ranks")
    divided = jax.jit(layout.shard_map(partial(run, layout), (specs, own), own))
    out, expected = divided(arrays, x), run(sharding.UNDIVIDED, arrays, jnp.asarray(x))
    np.testing.assert_allclose(out, expected, rtol=0, atol=1e-4)
    x[1] = np.nan
    out, rest = np.asarray(divided(arrays, x)), np.arange(tokens) != 1
    np.testing.assert_allclose(out[rest], expected[rest], rtol=0, atol=1e-4)
    assert np.isnan(out[1]).all()


def test_a_token_is_not_touched_by_its_neighbours():
    """Padding rows of a batch are routed too; even NaN in one does not affect others."""
    spec, mixture = _spec()
    arrays = _arrays(spec, mixture)
    x = np.random.default_rng(1).standard_normal((9, spec.width)).astype(np.float32)
    dirty = x.copy()
    dirty[2], dirty[8] = np.nan, 1e6
    mix = jax.jit(partial(moe.mix, spec, mixture, layout=sharding.UNDIVIDED))
    clean, spoilt = np.asarray(mix(arrays, x)), np.asarray(mix(arrays, dirty))
    others = [0, 1, 3, 4, 5, 6, 7]
    np.testing.assert_allclose(spoilt[others], clean[others], rtol=0, atol=1e-5)
    assert np.isnan(spoilt[2]).all()


@pytest.mark.ci
def test_the_shared_feed_forward_is_added_and_gated():
    spec, mixture = _spec(shared_width=6, shared_gate=True, per_token=1, scale=0.0)
    arrays = _arrays(spec, mixture)
    x = np.random.default_rng(2).standard_normal((5, spec.width))
    out = partial(moe.mix, spec, mixture, layout=sharding.UNDIVIDED)(arrays, x.astype(np.float32))
    up, down, gate = (np.asarray(arrays[name], np.float64) for name in ("shared_up", "shared_down", "shared_weight"))
    first, second = np.split(x @ up.T, 2, axis=1)
    expected = first / (1 + np.exp(-first)) * second @ down.T / (1 + np.exp(-x @ gate.T))
    np.testing.assert_allclose(out, expected, atol=1e-4)


@pytest.mark.parametrize(
    "own",
    [
        {},
        {"is_normalised": True, "scale": 2.5},
        {"router_bias": True, "is_normalised": True},
        {"groups": 4, "groups_per_token": 2, "scale": 1.5},
        {"scores": "sigmoid", "choice_bias": True, "groups": 4, "groups_per_token": 2, "group_best": 2},
    ],
    ids=str,
)
def test_the_router_chooses_and_weighs_as_a_loop_does(own):
    spec, mixture = _spec(**own)
    arrays = _arrays(spec, mixture)
    x = np.random.default_rng(3).standard_normal((40, spec.width))
    chosen, gates = map(np.asarray, moe.route(mixture, arrays, jnp.asarray(x, jnp.float32)))
    differs = 0
    for token, row in enumerate(x):
        scores = np.asarray(arrays["router"], np.float64) @ row + np.asarray(arrays.get("router_bias", 0.0))
        scores = 1 / (1 + np.exp(-scores)) if mixture.scores == "sigmoid" else np.exp(scores) / np.exp(scores).sum()
        worth = scores + np.asarray(arrays.get("choice_bias", 0.0))
        size = mixture.count // mixture.groups
        groups = worth.reshape(-1, size)
        best = np.argsort(-np.sort(groups)[:, ::-1][:, : mixture.group_best].sum(1))[: mixture.groups_per_token]
        open_ones = [number for number in np.argsort(-worth) if number // size in best][: mixture.per_token]
        expected = scores[open_ones]
        expected = mixture.scale * (expected / expected.sum() if mixture.is_normalised else expected)
        assert chosen[token].tolist() == open_ones
        np.testing.assert_allclose(gates[token], expected, rtol=1e-5)
        differs += set(open_ones) != set(np.argsort(-scores)[: mixture.per_token])
    assert (differs > 0) == (mixture.groups > 1)


@pytest.mark.slow
@pytest.mark.parametrize("case", ROUTED)
def test_golden_prompts_reach_every_expert(case, monkeypatch):
    """Otherwise swapped weights of an expert could be missed."""
    spec, family = read_spec(weights.read_config(GOLDEN / case))
    assert spec.experts is not None
    seen: list[np.ndarray] = []
    plain = moe.route

    def listening(*arguments):
        chosen, gates = plain(*arguments)
        jax.debug.callback(lambda numbers: seen.append(np.asarray(numbers)), chosen)
        return chosen, gates

    monkeypatch.setattr(moe, "route", listening)
    layout = sharding.make_layout(jax.devices("cpu"), 1)
    params = weights.load(GOLDEN / case, spec, family, layout, "float32")
    with np.load(GOLDEN / case / "golden.npz") as stored:
        prompt = stored["prompt"].tolist()
    Driver(spec, params, layout, len(prompt), None).run(prompt)
    jax.effects_barrier()
    assert len(seen) == sum(spec.experts.layers)
    for chosen in seen:
        counts = np.bincount(chosen.ravel(), minlength=spec.experts.count)
        assert counts.min() > 0
        assert len({tuple(sorted(row)) for row in chosen.tolist()}) > 5


@pytest.mark.parametrize("tokens", [1, 64])
def test_a_cpu_multiplies_and_copies_only_chosen_experts(tokens):
    """On a CPU `lax.ragged_dot` multiplies with all 64 experts, after copying their weights."""
    spec, mixture = _spec(count=64, per_token=4, ffn_width=96)
    spec = dataclasses.replace(spec, width=192)
    arrays = {
        name: jax.ShapeDtypeStruct(one.shape, jnp.float32)
        for name, one in moe.declare(spec, mixture).items()
        if name.startswith("expert_")
    }
    chosen = jax.ShapeDtypeStruct((tokens, 4), jnp.int32)
    arguments = arrays, jax.ShapeDtypeStruct((tokens, 192), jnp.float32), chosen
    gates = jax.ShapeDtypeStruct((tokens, 4), jnp.float32)
    multiply = jax.jit(partial(moe.by_tiles, spec, mixture, skips=True))
    program = multiply.lower(*arguments, gates).compile()
    one_expert = 4 * 3 * 96 * 192
    rows = 4 * tokens * 4 * 192
    assert program.memory_analysis().temp_size_in_bytes < 2 * one_expert + 8 * rows + 65536
    # XLA counts a loop's body once: one tile of one expert, 8 rows at most.
    assert program.cost_analysis()["flops"] < 1.5 * 2 * min(tokens, 8) * 3 * 96 * 192 + 1000 * tokens


def test_one_all_reduce_after_the_experts():
    """Two per layer and one for the embedding, also with a shared feed-forward and biases."""
    for case in ("gpt-oss", "deepseek-v3", "qwen2-moe"):
        spec, _ = read_spec(weights.read_config(GOLDEN / case))
        layout = sharding.make_layout(jax.devices(), 2)
        params = weights.abstract(spec, layout, "float32")
        rank = spec.latent.rank if spec.latent else None

        def hidden(params, tokens, spec=spec, rank=rank, layout=layout):
            count = spec.num_heads // 2
            context = decoder.Context(tokens, lambda _, heads, *__: heads.qkv[:, :count, :rank], layout=layout)
            return decoder.forward(spec, params, tokens, context)

        specs = jax.tree.map(lambda leaf: leaf.sharding.spec, params)
        whole = PartitionSpec()
        step = layout.shard_map(hidden, (specs, whole), whole)
        lowered = jax.jit(step).lower(params, jax.ShapeDtypeStruct((6,), jnp.int32)).as_text()
        assert lowered.count("stablehlo.all_reduce") == 2 * spec.num_layers + 1
