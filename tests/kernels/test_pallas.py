"""The Pallas kernels, interpreted on a CPU with the cases of test_attention, and lowered for a GPU.

Running on a GPU is not tested here; lowering needs no GPU.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels import Site
from tests.kernels import test_attention
from tests.kernels.test_attention import EACH, WRITES, Case, Pool


@pytest.mark.ci
@pytest.mark.parametrize("case", EACH)
def test_decode(case):
    test_attention.test_decode_matches_the_naive_loop(case, "pallas")


@pytest.mark.ci
def test_decode_in_bfloat16_is_accumulated_in_float32():
    test_attention.test_bfloat16_caches_are_accumulated_in_float32("pallas")


@pytest.mark.ci
@pytest.mark.parametrize("dtype", ["int8", pytest.param("float8_e4m3fn", marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", EACH[4:])
def test_decode_of_caches_with_scales(case, dtype):
    """Compare with the reference; the scale of a place where nothing was stored is NaN."""
    pool, lengths = Pool(case, num_blocks=200 // case.block_tokens + 8), [1, 40, 99]
    sequences = [pool.add(length) for length in lengths]
    tables, q, sinks = pool.tables(sequences, max(map(len, sequences)) + 1), pool.queries(3), pool.sinks()
    is_written = np.isfinite(pool.k[..., 0])
    stored: list = []
    for cache in pool.caches:
        if cache is None:
            stored.append((None, None))
        else:
            numbers, scales = pallas_kernels.quantize(jnp.asarray(np.nan_to_num(cache)), jnp.dtype(dtype))
            stored.append((numbers, jnp.where(is_written, scales, jnp.nan)))
    (k, k_scales), (v, v_scales) = stored
    given = {"sinks": sinks, "k_scales": k_scales, "v_scales": v_scales}
    expected, got = (
        jax.jit(partial(pallas_kernels.paged_decode, **case.options, implementation=implementation))(
            q, k, v, tables, np.asarray(lengths, np.int32), **given
        )
        for implementation in ("xla", "pallas")
    )
    assert np.isfinite(expected).all()
    np.testing.assert_allclose(got, expected, rtol=0, atol=3e-6)


def test_decode_reads_no_block_behind_a_sequence():
    """Table entries after a sequence may be out of bounds."""
    pool = Pool(Case(16, 16, 2, 4), num_blocks=8)
    sequences = [pool.add(length) for length in (0, 16, 40)]
    lengths = np.asarray([0, 16, 40], np.int32)
    q, tables = pool.queries(3), pool.tables(sequences, 5)
    decode = jax.jit(partial(pallas_kernels.paged_decode, scale=0.25, implementation="pallas"))
    expected = decode(q, pool.k, pool.v, tables, lengths)
    for number in (len(pool.k), 2**31 - 1, -1, -(2**31)):
        for row, blocks in zip(tables, sequences, strict=True):
            row[len(blocks) :] = number
        np.testing.assert_array_equal(decode(q, pool.k, pool.v, tables, lengths), expected)


@pytest.mark.parametrize(
    "dtype",
    [
        pytest.param("int8", marks=pytest.mark.ci),
        pytest.param("bfloat16", marks=pytest.mark.slow),
        pytest.param("float32", marks=pytest.mark.slow),
        pytest.param("float8_e4m3fn", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("write", WRITES, ids=str)
def test_write_kv_is_what_the_reference_is(write, dtype):
    test_attention.check_write_beside_the_reference(write, dtype, "pallas")


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("has_values", [True, False])
def test_write_kv_is_in_place_when_the_caches_are_donated(has_values, dtype):
    cache = jax.ShapeDtypeStruct((256, 2, 16, 64), dtype)
    scales = jax.ShapeDtypeStruct(cache.shape[:3], jnp.float32) if dtype == "int8" else None
    changed = {"k_cache": cache, "v_cache": cache, "k_scales": scales, "v_scales": scales}
    if not has_values:
        changed |= {"v_cache": None, "v_scales": None}
    qkv, place = jax.ShapeDtypeStruct((4, 8 if has_values else 6, 64), jnp.float32), jax.ShapeDtypeStruct((4,), "int32")
    write = jax.jit(partial(pallas_kernels.write_kv, implementation="pallas"), donate_argnames=tuple(changed))
    memory = write.lower(qkv, blocks=place, offsets=place, **changed).compile().memory_analysis()
    given = [one for one in changed.values() if one is not None]
    assert memory is not None
    assert memory.alias_size_in_bytes == sum(one.size * one.dtype.itemsize for one in given)
    assert memory.temp_size_in_bytes < 64 * 1024


def test_where_it_runs():
    hopper = Site("gpu", 90, "bfloat16", "bfloat16", heads=32, kv_heads=8, head_size=128)
    for operation in ("write_kv", "paged_decode"):
        assert pallas_kernels.refusal(operation, "pallas", Site("cpu", heads=7, head_size=40)) is None
        assert pallas_kernels.refusal(operation, "pallas", hopper) is None
        for refused, reason in (
            (Site("tpu"), "NVIDIA"),
            (Site("gpu"), "capability 8.0"),
            (Site("gpu", 75), "capability 8.0"),
            (Site("gpu", 90, head_size=40), "deprecated since JAX 0.11, needs powers of two; the size of a head is 40"),
            (Site("gpu", 80, cache_dtype="float8_e4m3fn"), "capability 8.9"),
        ):
            assert reason in (pallas_kernels.refusal(operation, "pallas", refused) or "")
        for site in (hopper, Site("cpu")):
            assert pallas_kernels.resolve(operation, site).name != "pallas", "only who names it gets it"
    grouped = Site("gpu", 90, heads=14, kv_heads=2)
    assert pallas_kernels.refusal("write_kv", "pallas", grouped) is None
    with pytest.raises(ValueError, match=r"paged_decode=pallas: .* query heads per key-value head is 7"):
        pallas_kernels.resolve("paged_decode", grouped, "pallas")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "float8_e4m3fn"])
@pytest.mark.filterwarnings("ignore:.*Triton:DeprecationWarning")
def test_it_can_be_lowered_for_a_gpu_that_is_not_there(dtype):
    """JAX needs an abstract device to lower for a GPU."""
    device = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")
    mesh = jax.sharding.AbstractMesh((1,), ("x",), abstract_device=device)
    shape = jax.ShapeDtypeStruct
    own = "float32" if dtype == "float32" else "bfloat16"
    cache, places, tables = shape((256, 2, 16, 64), dtype), shape((4,), "int32"), shape((4, 16), "int32")
    scales = shape(cache.shape[:3], "float32") if dtype in ("int8", "float8_e4m3fn") else None
    turn = (shape((4, 16), "float32"),) * 2
    write = partial(pallas_kernels.write_kv, implementation="pallas")
    options = {"scale": 0.125, "window": 40, "softcap": 2.0, "implementation": "pallas"}
    decode = partial(pallas_kernels.paged_decode, **options)
    with jax.sharding.use_abstract_mesh(mesh):
        for kernel, arrays, named in (
            (write, (shape((4, 12, 64), own), cache, cache, places, places), {"turn": turn}),
            (decode, (shape((4, 8, 64), own), cache, cache, tables, places), {"sinks": shape((8,), own)}),
        ):
            traced = jax.jit(kernel).trace(*arrays, **named, k_scales=scales, v_scales=scales)
            text = traced.lower(lowering_platforms=("cuda",)).as_text()
            assert text.count("custom_call @__gpu$xla.gpu.triton") == 1, "one kernel, and not the interpreted one"
            assert "stablehlo.while" not in text
