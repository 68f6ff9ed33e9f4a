"""8-bit quantization: exact sums, the bytes of each device, no converted weights in a step, the same answers."""

from __future__ import annotations

import json
import math
import re
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxllm import LLM, SamplingParams
from jaxllm.checkpoints import weights
from jaxllm.commands import cli
from jaxllm.commands.conversion import convert
from jaxllm.compiling.aot_manifest import difference
from jaxllm.config import EngineArgs, EngineConfig
from jaxllm.embedded import MODEL_DIR
from jaxllm.errors import UserError
from jaxllm.families.families import read_spec
from jaxllm.model import decoder, layers, sharding
from jaxllm.model.parameters import Scheme
from jaxllm.model.quantized import Quantized
from jaxllm.runner import batch, device_state, step
from jaxllm.runner.step_model import StepModel
from jaxllm.sampling.sampler import Extras, Variant
from jaxllm.setup import kv_cache
from jaxllm.setup.model_setup import OPERATIONS, describe_programs, free_bytes, plan_memory, prepare
from jaxllm.text.tokenizer import load_tokenizer
from pallas_kernels import Choice, by_row
from tests.support.checkpoints import CONFIG, load, random_tensors, write_checkpoint
from tests.support.heads import apart
from tests.support.paths import GOLDEN
from training.questions import held_out_questions

_load = partial(load, quantization="int8")


def _int8(values: Any, scales: Any) -> Quantized:
    return Quantized(jnp.asarray(values), jnp.asarray(scales), scheme=Scheme("int8", rounds_rows=True))


def _matrices(params: Any) -> dict[str, Quantized]:
    named = {f"{number}.{name}": leaf for number, layer in enumerate(params.layers) for name, leaf in layer.items()}
    return {name: leaf for name, leaf in (params.top | named).items() if isinstance(leaf, Quantized)}


@pytest.mark.parametrize("rows", [1, 2, 5])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_linear_sums_integers_exactly(rows, dtype):
    rng = np.random.default_rng(0)
    x = (rng.standard_normal((rows, 300)) * [[10.0**-number] for number in range(rows)]).astype(dtype)
    weight = rng.integers(-127, 128, (40, 300)).astype(np.int8)
    scales, bias = rng.random((1, 40), np.float32), rng.standard_normal(40).astype(dtype)
    out = layers.linear(jnp.asarray(x), _int8(jnp.asarray(weight), jnp.asarray(scales)), jnp.asarray(bias))
    assert out.dtype == jnp.float32

    wide = x.astype(np.float32)  # float64 could round a half step in the other direction
    steps = np.abs(wide).max(1, keepdims=True) * np.float32(1 / 127)
    sums = np.rint(wide / steps).astype(np.int64) @ weight.T.astype(np.int64)
    np.testing.assert_allclose(out, sums * steps * scales + bias.astype(np.float64), rtol=1e-5, atol=1e-5 * steps.max())
    # Rounding the row costs at most half a step per value.
    exact = x.astype(np.float64) @ weight.T.astype(np.float64) * scales
    bound = np.abs(weight.astype(np.float64)).sum(1) * steps / 2 * scales
    assert np.all(np.abs(out - bias.astype(np.float64) - exact) <= bound + 1e-3 * steps)


def test_long_sums_keep_every_unit():
    """100,000 products of 127 by 127 and a difference of 127, more than float32 or 16-bit sums can resolve."""
    weight = np.full((2, 100_000), 127, np.int8)
    weight[1, 0] = 126
    rows = jnp.full((2, 100_000), 127.0)  # rounded to 127 steps of one
    out = layers.linear(rows, _int8(jnp.asarray(weight), jnp.ones((1, 2), jnp.float32)))
    both = np.asarray([127 * 127 * 100_000, 127 * 127 * 100_000 - 127], np.float32)
    np.testing.assert_array_equal(out, np.stack([both, both]))


def test_rows_of_zeros_stay_zero_and_what_is_not_finite_stays_so():
    rows = np.asarray([[0.0] * 8, [np.nan] + [1.0] * 7, [np.inf] + [1.0] * 7, [-1e-38] * 8, [3e38] * 8], np.float32)
    weight = _int8(jnp.full((3, 8), 2, jnp.int8), jnp.ones((1, 3), jnp.float32))
    out = np.asarray(layers.linear(jnp.asarray(rows), weight))
    assert np.all(out[0] == 0) and np.all(np.abs(out[3]) < 1e-29)
    assert not np.isfinite(out[1:3]).any() and not np.isfinite(out[4]).any()  # 3e38 * 16 overflows float32


def test_both_namespaces_make_the_same_bits():
    x = np.random.default_rng(1).standard_normal((500, 77)).astype(np.float32)
    for here, there in zip(by_row(x, np), jax.jit(by_row)(x), strict=True):
        np.testing.assert_array_equal(here, there, strict=True)


@pytest.mark.parametrize("shards", [1, 2, 4])
def test_each_device_quantizes_its_own_piece(tmp_path, shards):
    """Every value is within half a step of the stored one, and each channel's largest uses all steps."""
    config = CONFIG | {"tie_word_embeddings": True, "vocab_size": 98}
    folder = write_checkpoint(tmp_path, config)
    plain, quantized = _load(folder, shards, quantization=None), _load(folder, shards)
    every = plain.top | {f"{n}.{name}": leaf for n, layer in enumerate(plain.layers) for name, leaf in layer.items()}
    matrices = _matrices(quantized)
    assert set(matrices) == {"embed", *(f"{layer}.{name}" for layer in (0, 1) for name in ("qkv", "out", "up", "down"))}
    for name, matrix in matrices.items():
        assert (matrix.values.dtype, matrix.scales.dtype) == (jnp.int8, jnp.float32)
        pieces = zip(
            every[name].addressable_shards,
            matrix.values.addressable_shards,
            matrix.scales.addressable_shards,
            strict=True,
        )
        for stored, values, scales in pieces:
            assert stored.device == values.device == scales.device
            stored, values, steps = np.asarray(stored.data), np.asarray(values.data, int), np.asarray(scales.data).T
            is_real = np.any(stored != 0, axis=1)  # the last rows of the vocabulary may be padding
            np.testing.assert_array_equal(np.abs(values).max(1), np.where(is_real, 127, 0))
            assert np.all(np.abs(values * steps - stored) <= 0.5001 * steps)
    others = [(every[name], leaf) for name, leaf in quantized.top.items() if name != "embed"]
    assert others and all(np.array_equal(stored, leaf) for stored, leaf in others)


@pytest.mark.parametrize("shards", [1, 4])
@pytest.mark.parametrize("stored", [np.float32, np.float16])
def test_a_converted_checkpoint_gives_the_same_bits(tmp_path, shards, stored):
    """Of an untied model with padding rows, in a narrower type; its embedding is not quantized."""
    tensors = {name: value.astype(stored) for name, value in random_tensors(CONFIG).items()}
    folder = write_checkpoint(tmp_path / "source", tensors=tensors)
    params = _load(folder, shards, "bfloat16")
    assert params.top["embed"].dtype == jnp.bfloat16 and isinstance(params.top["head"], Quantized)
    spec, _ = read_spec(CONFIG)
    described = weights.abstract(spec, sharding.make_layout(jax.devices(), shards), "bfloat16", "int8")
    others = [_load(convert(str(folder), tmp_path / "target"), shards, "bfloat16"), described]
    for other in others:
        assert jax.tree.structure(params) == jax.tree.structure(other)
        for leaf, same in zip(jax.tree.leaves(params), jax.tree.leaves(other), strict=True):
            assert (leaf.shape, leaf.dtype, leaf.sharding) == (same.shape, same.dtype, same.sharding)
    for leaf, same in zip(jax.tree.leaves(params), jax.tree.leaves(others[0]), strict=True):
        np.testing.assert_array_equal(leaf, same, strict=True)


def test_random_weights_are_quantized_alike():
    spec, _ = read_spec(CONFIG)
    layout = sharding.make_layout(jax.devices(), 2)
    plain = weights.load_random(spec, layout, "float32", seed=3)
    quantized = weights.load_random(spec, layout, "float32", seed=3, quantization="int8")
    assert set(_matrices(quantized)) == {
        "head",
        *(f"{n}.{name}" for n in (0, 1) for name in ("qkv", "out", "up", "down")),
    }
    down, matrix = np.asarray(plain.layers[1]["down"]), quantized.layers[1]["down"]
    assert matrix.scales.shape == (2, 32)
    restored = np.asarray(matrix.values) * np.repeat(np.asarray(matrix.scales), 32, axis=0).T
    np.testing.assert_allclose(restored, down, rtol=0, atol=0.51 * float(matrix.scales.max()))


def _logits(params: Any, folder: Path, shards: int, tokens: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return the logits [T, V] of concatenated sequences, each starting at position 0, with plain attention."""
    spec, _ = read_spec(weights.read_config(folder))
    layout = sharding.make_layout(jax.devices(), shards)
    sequence = np.cumsum(positions == 0)
    is_seen = (sequence[:, None] == sequence) & (positions[:, None] >= positions)

    def attend(layer, heads, window, sinks):
        q, k, v = apart(heads, spec.num_heads // shards)
        k, v = (jnp.repeat(heads, q.shape[1] // k.shape[1], axis=1) for heads in (k, v))
        scores = jnp.einsum("thc,uhc->htu", q, k) * spec.attention_scale
        return jnp.einsum("htu,uhc->thc", jax.nn.softmax(jnp.where(is_seen, scores, -jnp.inf)), v)

    def on_shard(params, tokens):
        hidden = decoder.forward(spec, params, tokens, decoder.Context(jnp.asarray(positions), attend, layout=layout))
        return decoder.head(spec, params, hidden)

    specs = jax.tree.map(lambda leaf: leaf.sharding.spec, params)
    whole = PartitionSpec()
    run = layout.shard_map(on_shard, (specs, whole), layout.spec(None, "vocab"))
    return np.asarray(jax.jit(run)(params, jnp.asarray(tokens, jnp.int32)))[:, : spec.vocab_size]


@pytest.mark.ci
def test_greedy_tokens_of_held_out_answers():
    """Compare the likeliest token at each position of the correct answers (teacher forced), with and without int8."""
    tokenizer = load_tokenizer(MODEL_DIR)
    tokens, positions, is_asked = [], [], []
    for question in held_out_questions(0)[::30]:
        if question.answer is not None:
            prompt = tokenizer.encode_chat(question.messages)[1]
            answer = [*tokenizer.encode(question.answer, add_special_tokens=False), tokenizer.eos_token_id]
            tokens += prompt + answer
            positions += range(len(prompt) + len(answer))
            is_asked += [False] * (len(prompt) - 1) + [True] * len(answer) + [False]  # predicts an answer's token
    asked = np.flatnonzero(is_asked)
    plain, quantized = (
        _logits(_load(MODEL_DIR, quantization=kind), MODEL_DIR, 1, np.asarray(tokens), np.asarray(positions))[asked]
        for kind in (None, "int8")
    )
    right = np.mean(plain.argmax(1) == np.asarray(tokens)[asked + 1])
    changed = np.mean(plain.argmax(1) != quantized.argmax(1))
    print(f"{changed:.2%} of {len(asked)} greedy tokens changed; without int8 {right:.2%} are those of the answers")
    assert len(asked) > 300 and right > 0.9 and changed <= 0.01
    assert np.abs(plain - quantized).max() > 1e-3, "nothing was quantized"


@pytest.mark.slow
def test_an_engine_on_two_devices_answers_as_the_quantized_decoder(tmp_path):
    """Tokens may differ from those of one device, since each device rounds its part of a row."""
    shards = 2
    folder = write_checkpoint(tmp_path, CONFIG | {"max_position_embeddings": 32})
    settings = {"max_num_seqs": 1, "max_num_batched_tokens": 8, "num_kv_blocks": 5, "precompile": "covering"}
    greedy = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    with LLM(
        str(folder), tokenizer=str(GOLDEN / "stories260K"), quantization="int8", tensor_parallel_size=shards, **settings
    ) as llm:
        (output,) = llm.generate([[5, 6, 7, 8, 9, 10, 11, 12, 13]], greedy, use_tqdm=False)
    tokens = np.asarray([*output.prompt_token_ids, *output.outputs[0].token_ids])
    logits = _logits(_load(folder, shards), folder, shards, tokens, np.arange(len(tokens)))
    exact = _logits(_load(folder, quantization=None), folder, 1, tokens, np.arange(len(tokens)))
    assert 1e-4 < np.sqrt(np.mean((logits - exact) ** 2)) / exact.std() < 0.05
    chosen = logits[np.arange(8, 16), tokens[9:]]
    assert np.all(chosen > logits[8:16].max(1) - 1e-3 * exact.std())


@pytest.mark.ci
@pytest.mark.parametrize("rows", [1, 16])
def test_no_step_converts_a_weight(rows):
    """With a layer and a head of realistic size; XLA would convert the weights for a product with one row."""
    sizes = {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 1, "vocab_size": 8192}
    spec, _ = read_spec(CONFIG | sizes | {"num_attention_heads": 14, "head_dim": 64})
    layout = sharding.make_layout(jax.devices(), 1)
    params = weights.abstract(spec, layout, "float32", "int8")
    geometry = kv_cache.Geometry(num_slots=16, num_blocks=64, block_size=16, max_model_len=64)
    extras = Extras(spec.vocab_size)
    state = device_state.abstract(spec, geometry, 16, extras, layout, jnp.dtype(jnp.float32))
    (shape,) = (shape for shape in batch.decode_shapes(16) if shape.rows == rows)
    model = StepModel(
        spec=spec,
        geometry=geometry,
        num_logprobs=0,
        extras=extras,
        processors=(),
        layout=layout,
        params=params,
        state=state,
        kernels={operation: Choice("xla") for operation in OPERATIONS},
    )
    run = step.build(model, shape, Variant.GREEDY)
    buffer = jax.ShapeDtypeStruct((batch.buffer_size(shape),), jnp.int32, sharding=layout.sharding())
    leaves = (tuple(jax.tree.leaves(tree)) for tree in (params, state))
    program = jax.jit(run, donate_argnums=1).lower(*leaves, buffer).compile()

    counts = [matrix.values.size for matrix in _matrices(params).values()]
    assert len(counts) == 5
    made = re.findall(r"= \w+\[([\d,]+)\]\S* (?:convert|copy|transpose)\(", program.as_text() or "")
    assert made and not [shape for shape in made if math.prod(map(int, shape.split(","))) >= min(counts)]
    assert program.memory_analysis().temp_size_in_bytes < max(counts)


def test_the_memory_plan_and_the_programs_know_it():
    config, plain = (EngineConfig(model=str(MODEL_DIR), quantization=kind, num_kv_blocks=32) for kind in ("int8", None))
    plans = [plan_memory(one, prepare(one), free_bytes(prepare(one))) for one in (config, plain)]
    assert plans[1].need.weights == 4 * 1771200
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(_load(MODEL_DIR)))
    assert held == plans[0].need.weights < 0.26 * plans[1].need.weights
    records = [describe_programs(one, prepare(one), plans[0]) for one in (config, plain)]
    assert difference(*records) == "quantization is None, not 'int8'"


def test_what_cannot_be_quantized_is_refused_by_name(capfd):
    with pytest.raises(UserError, match="quantization must be one of int8, fp8, int4, got 'awq'"):
        EngineArgs(model="any", quantization="awq")
    assert cli.main(["doctor", "--quantization", "int8", "--json"]) == 0
    report = json.loads(capfd.readouterr().out)
    assert report["model"]["quantization"] == {"value": "int8", "why": "asked for"}
    assert report["model"]["parameters"]["value"] == 1771200
    assert cli.main(["doctor", "--model", str(GOLDEN / "mixtral"), "--quantization", "int8"]) == 1
    assert "quantization is not supported with experts" in capfd.readouterr().out
