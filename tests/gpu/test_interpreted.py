"""The Triton kernels in Triton's interpreter, in float32, against the naive loop with the shapes of test_attention.

Needs Triton and TRITON_INTERPRET=1, as set by `make gpu-aot`, which is read when a kernel is imported.
"""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from jaxllm import LLM, SamplingParams
from jaxllm.setup.model_setup import OPERATIONS
from pallas_kernels import Choice, Site, tuning
from pallas_kernels.tuning import Latent, Tuning
from tests.kernels import test_attention
from tests.kernels.test_attention import CASES, WRITES, Case
from tests.support import paths

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1", allow_module_level=True)
pytest.importorskip("triton")

TRITON = Choice("triton", 90)
STORIES = str(paths.STORIES)


@pytest.mark.parametrize("least_keys", [tuning.LEAST_KEYS, 256])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_decode(case, least_keys, monkeypatch):
    """With a context for one program, and with one divided among several."""
    monkeypatch.setattr(tuning, "LEAST_KEYS", least_keys)
    test_attention.test_decode_matches_the_naive_loop(case, TRITON)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_prefill(case):
    test_attention.test_ragged_prefill_matches_the_naive_loop(case, TRITON)


@pytest.mark.parametrize("window", [None, 5, 30])
def test_prefill_of_images(window):
    test_attention.test_queries_of_images_see_keys_after_them(window, TRITON)


def test_as_many_programs_share_the_keys_as_run_at_once():
    def chosen(rows: int, kv_heads: int, context: int) -> tuning.Decode:
        return tuning.of_decode(90, rows, kv_heads, 128, "bfloat16", "bfloat16", context)

    assert chosen(64, 8, 8192).programs == 4 * 132 // 8
    assert chosen(1, 8, 8192).programs == 2 * 132 // 8 and 2 * chosen(1, 8, 8192).keys == chosen(64, 8, 8192).keys
    assert (chosen(1, 2, 8192).splits, chosen(64, 8, 8192).splits, chosen(1, 2, 200).splits) == (32, 1, 8)


@pytest.mark.parametrize("batch_invariant", [True, False])
def test_a_row_has_the_same_bits_whatever_its_neighbours_are(batch_invariant, monkeypatch):
    """Only if batch-invariant: otherwise another row's length may move the cuts between pieces, and with them last
    bits.
    """
    monkeypatch.setattr(tuning, "LEAST_KEYS", 16)
    monkeypatch.setitem(tuning.PROCESSORS, 90, 12)  # 24 programs for each head: 16 and 48 keys a piece
    pool = test_attention.Pool(CASES[3], num_blocks=80)
    sequences = [pool.add(length) for length in (100, 7, 900)]
    tables, q = pool.tables(sequences, max(map(len, sequences)) + 1), pool.queries(3)
    caches = [jnp.asarray(np.nan_to_num(cache)) for cache in (pool.k, pool.v)]

    def decode(*lengths: int) -> np.ndarray:
        arrays = (q, *caches, tables, np.asarray(lengths, np.int32))
        options = {**CASES[3].options, "batch_invariant": batch_invariant, "implementation": TRITON}
        return np.asarray(pallas_kernels.paged_decode(*map(jnp.asarray, arrays), **options))[0]

    alone, beside = decode(100, 0, 0), decode(100, 7, 900)
    np.testing.assert_allclose(beside, alone, rtol=0, atol=3e-6)
    assert np.array_equal(beside, alone) == batch_invariant


@pytest.mark.parametrize(
    ("rows", "case"), [(16, Case(16, 576, 1, 16, value_size=512)), (64, Case(8, 96, 1, 20, value_size=64))], ids=str
)
def test_tiles_and_pieces_of_latents(rows, case, monkeypatch):
    """As with 16-bit caches: heads of several tokens in a tile, contexts in several pieces."""
    monkeypatch.setattr(tuning, "of_latent", lambda *_: Latent(rows, 32, rows < 64, 2, Tuning(8, 3)))
    monkeypatch.setattr(tuning, "LEAST_LATENTS", 16)
    monkeypatch.setattr(tuning, "LATENTS_OF_A_ROW", 0)
    monkeypatch.setattr(tuning, "JOINED_NUMBERS", 1)  # two pieces at once
    monkeypatch.setattr(tuning, "JOINED_PROGRAMS", rows)  # several heads in a program
    test_attention.test_decode_matches_the_naive_loop(case, TRITON)
    test_attention.test_ragged_prefill_matches_the_naive_loop(case, TRITON)


def test_as_many_programs_share_latents_as_run_at_once():
    lite, large = (tuning.of_latent(90, heads, "bfloat16", "bfloat16") for heads in (16, 128))
    assert tuning.of_latent_decode(90, 64, 16, 4096, lite).programs == 2 * 132
    assert tuning.of_latent_decode(90, 64, 128, 4096, large).programs == 132 // 2
    assert tuning.of_latent_decode(90, 64, 128, 4096, large).least_keys == 256


def test_latents_are_chosen_and_other_long_heads_are_not():
    site = Site("gpu", 90, "bfloat16", "bfloat16", 16, 1, 576, value_size=512)
    for operation in ("paged_decode", "paged_prefill"):
        assert pallas_kernels.resolve(operation, site).name == "triton"
        for other in ({"value_size": None}, {"kv_heads": 2}, {"value_size": 384}, {"head_size": 1088}):
            found = pallas_kernels.resolve(operation, replace(site, **other))
            assert found.name == "xla" and "up to 256 do, and one head of keys" in found.reason
        old = replace(site, capability=80, cache_dtype="float8_e5m2")
        assert pallas_kernels.refusal(operation, "triton", old) == "latents of float8_e5m2 need compute capability 9.0"


@pytest.mark.parametrize("option", [{"window": 5}, {"softcap": 2.0}, {"sinks": jnp.zeros(4)}], ids=str)
def test_what_latents_are_not_attended_with_is_said(option):
    arrays = (jnp.zeros((1, 4, 576)), jnp.zeros((2, 1, 4, 576)), None, jnp.zeros((1, 1), int), jnp.zeros(1, int))
    with pytest.raises(ValueError, match=f"latent heads of 576 attend without {next(iter(option))}"):
        pallas_kernels.paged_decode(*arrays, scale=1.0, value_size=512, implementation=TRITON, **option)


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
@pytest.mark.parametrize("write", WRITES, ids=str)
def test_write_kv_is_what_the_reference_is(write, dtype):
    test_attention.check_write_beside_the_reference(write, dtype, TRITON)


SCALED = [*CASES[2:9], CASES[12]]


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] * (at % 3 > 0)) for at, case in enumerate(SCALED)], ids=str
)
def test_caches_with_scales(case):
    """A cache with scales gives the reference's results, which are near the exact ones.

    With 8-bit integers: Triton's interpreter lacks 8-bit floats, which are only compiled, in test_compiled.py.
    """
    pool = test_attention.Pool(case, num_blocks=200 // case.block_tokens + 8)
    sequences = [pool.add(length) for length in (1, 40, 99)]
    tables, q, sinks = pool.tables(sequences, max(map(len, sequences)) + 1), pool.queries(3), pool.sinks()
    exact = (jnp.asarray(np.nan_to_num(cache)) for cache in (pool.k, pool.v))
    (k, k_scales), (v, v_scales) = (pallas_kernels.quantize(cache, jnp.dtype(jnp.int8)) for cache in exact)
    own = {"sinks": None if sinks is None else jnp.asarray(sinks), "k_scales": k_scales, "v_scales": v_scales}
    if case.value_size is not None:
        v, own = None, own | {"v_scales": None}
    arrays = (q, k, v, tables, np.asarray([1, 40, 99], np.int32))
    options = {**case.options, **own}
    decode = partial(pallas_kernels.paged_decode, *jax.tree.map(jnp.asarray, arrays), **options)
    expected = np.asarray(decode(implementation="xla"))
    np.testing.assert_allclose(np.asarray(decode(implementation=TRITON)), expected, rtol=0, atol=3e-6)
    naive = pool.attend(q[2], sequences[2], 98, sinks)
    np.testing.assert_allclose(expected[2], naive, rtol=0, atol=0.05)


def test_an_engine_with_these_kernels_says_the_same():
    """Chunks of prompts, decoding, reused blocks: a whole step with a GPU's kernels."""
    settings = {"max_num_seqs": 2, "max_num_batched_tokens": 16, "max_model_len": 64, "precompile": "covering"}
    params = SamplingParams(temperature=0.0, max_tokens=6, logprobs=1)
    prompts = ["Once upon a time there was a little dog", "Tim"]
    said = []
    for kernels in ([], [f"{operation}=triton" for operation in OPERATIONS if operation != "linear"]):
        with LLM(STORIES, kernels=kernels, num_kv_blocks=9, **settings) as llm:
            said.append(llm.generate(prompts, params, use_tqdm=False))
    for one, other in zip(*said, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        found = ([next(iter(each.values())).logprob for each in output.outputs[0].logprobs] for output in (one, other))
        np.testing.assert_allclose(*found, rtol=0, atol=1e-5)
