"""The C++ products against XLA's, for generated shapes and kinds; building, caching and refusing the library."""

from __future__ import annotations

import concurrent.futures
import hashlib
import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import get_args

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pallas_kernels
from jaxllm import LLM, SamplingParams
from pallas_kernels.linear.numbers import Kind, packed
from pallas_kernels.native import build
from pallas_kernels.native import linear as native
from tests.support.paths import ROOT, STORIES

needs_compiler = pytest.mark.skipif(bool(build.refusal()), reason=str(build.refusal()))
REPEAT = settings(max_examples=40, deadline=None, derandomize=True, database=None)


def weight_of(rng: np.random.Generator, kind: str, shape: tuple[int, int], dtype: str) -> np.ndarray:
    if kind == "float":
        return rng.standard_normal(shape).astype(jnp.dtype(dtype))
    if kind == "int8":
        return rng.integers(-128, 128, shape).astype(np.int8)
    if kind == "float8":
        return (4 * rng.standard_normal(shape)).astype(ml_dtypes.float8_e4m3fn)
    return packed(rng.integers(0, 16, shape), np)


@pytest.mark.ci
@needs_compiler
@REPEAT
@given(st.data())
def test_products_are_those_of_xla(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(get_args(Kind)))
    rounds = kind == "int8" and data.draw(st.booleans())
    dtype = data.draw(st.sampled_from(["float32", "bfloat16"]))
    most = native.MOST_ROWS[dtype if kind == "float" else "quantized"]
    # XLA of jax 0.10 multiplies a product of one row of weights with its scales in another order.
    tokens, rows = data.draw(st.integers(1, 20) | st.integers(1, most + 1)), data.draw(st.integers(1 + rounds, 40))
    groups = 1 if kind == "float" or rounds else data.draw(st.integers(1, 3))
    step = 32 if kind.endswith("4") else 16 if groups > 1 else 1
    columns = groups * step * data.draw(st.integers(1, 8 if step > 1 else 300))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    x = jnp.asarray(rng.standard_normal((tokens, columns)), dtype)
    weight = jnp.asarray(weight_of(rng, kind, (rows, columns), dtype))
    scales = None if kind == "float" else jnp.asarray(rng.random((groups, rows)) + 0.5, jnp.float32)
    has_zeros = kind in ("int8", "int4") and not rounds and data.draw(st.booleans())
    zeros = jnp.asarray(rng.integers(-3, 4, (groups, rows)), jnp.int8) if has_zeros else None

    assert native.takes(x, weight, scales, zeros, kind) == (tokens <= most)
    by, other = (
        np.asarray(
            jax.jit(partial(pallas_kernels.linear, kind=kind, rounds_rows=rounds, implementation=name))(
                x, weight, scales, zeros
            )
        )
        for name in ("native", "xla")
    )
    if rounds:
        np.testing.assert_array_equal(by, other)
    else:
        # Both sum in float32, of terms that are equal to the last bit.
        largest = np.abs(np.asarray(x, np.float32)).sum(axis=1).max() * np.abs(other).max()
        np.testing.assert_allclose(by, other, rtol=0, atol=1e-6 * max(largest, 1.0))
    alone = jax.jit(partial(pallas_kernels.linear, kind=kind, rounds_rows=rounds, implementation="native"))
    if tokens <= most:  # a row's bits do not depend on other rows
        np.testing.assert_array_equal(np.asarray(alone(x[-1:], weight, scales, zeros)), by[-1:])


@needs_compiler
@pytest.mark.parametrize("kind", ["float", "int8"])
def test_what_is_not_finite_shows(kind: Kind) -> None:
    x = np.ones((3, 40), np.float32)
    x[1, 39], x[2, 3] = np.nan, np.inf
    weight = np.ones((5, 40), np.float32 if kind == "float" else np.int8)
    scales = None if kind == "float" else np.ones((1, 5), np.float32)
    multiply = partial(pallas_kernels.linear, kind=kind, rounds_rows=kind == "int8", implementation="native")
    found = np.isfinite(np.asarray(jax.jit(multiply)(x, weight, scales)))
    assert found[0].all() and not found[1:].any()


def test_environments_share_a_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(build, "run_command", lambda command: "version 1")
    monkeypatch.setattr(build, "compile_library", lambda command, sources, place: place)
    commands = [["c++", "-O3", f"-I/home/{each}/include"] for each in "ab"] + [["c++", "-O2", "-I/home/a/include"]]
    places = [build.kept(tmp_path, "kernels", command, [], ["digest"]) for command in commands]
    assert places[0] == places[1] != places[2]


@needs_compiler
@pytest.mark.slow
def test_a_library_that_is_damaged_is_built_again(tmp_path: Path) -> None:
    flags = [*(flag for flag in build.FLAGS if flag != "-O3"), "-O1"]
    with concurrent.futures.ThreadPoolExecutor() as pool:  # two concurrent builds leave one library and no other file
        list(pool.map(lambda _: build.loaded(tmp_path, flags), range(2)))
    (library,) = tmp_path.iterdir()
    whole = library.read_bytes()
    library.unlink()  # else the loaded file would be overwritten
    library.write_bytes(whole[: len(whole) // 2])
    assert build.loaded(tmp_path, flags).jaxllm_check() == 0
    assert build.is_whole(library) and [*tmp_path.iterdir()] == [library]


@needs_compiler
@pytest.mark.ci
def test_the_kernels_of_older_processors_say_the_same(tmp_path: Path) -> None:
    """Run this module's tests in a process with kernels for AVX2 alone."""
    code = (
        "import sys, pytest; from pallas_kernels.native import build;"
        "build.loaded.__defaults__ = (tuple(f.replace('native', 'haswell') for f in build.FLAGS),);"
        "sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider', 'tests/kernels/test_native.py', "
        "'tests/kernels/test_attention.py', '-k', 'products or finite or native', '-m', 'not ci and not slow']))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"COMPILERS": ("no-such-compiler",)}, "no C++ compiler is installed (looked for $CXX, no-such-compiler)"),
        ({"processor": lambda: frozenset({"sse2"})}, "the processor lacks avx2, f16c, fma"),
        ({"FLAGS": ("-no-such-flag",)}, "failed: "),
    ],
)
def test_why_there_are_no_kernels(change: dict, reason: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CXX", raising=False)
    for name, value in change.items():
        if "FLAGS" in change and build.refusal():
            pytest.skip("needs a compiler")
        monkeypatch.setattr(build, name, value)
    with pytest.raises(build.Refused) as raised:
        build.loaded(tmp_path, build.FLAGS)
    assert reason in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.ci
@needs_compiler
def test_an_engine_of_two_devices_says_the_same() -> None:
    """Devices of one process share XLA's threads, which may all be inside a kernel."""
    said = []
    for kernels, size in (((), 2), (("linear=xla", "paged_decode=xla", "paged_prefill=xla"), 1)):
        with LLM(str(STORIES), kernels=kernels, tensor_parallel_size=size, max_num_seqs=4, num_kv_blocks=32) as llm:
            params = SamplingParams(temperature=0.0, max_tokens=12)
            outputs = llm.generate(["Once upon a time", "Tim and Lily went"], params, use_tqdm=False)
            said.append([output.outputs[0].token_ids for output in outputs])
    assert said[0] == said[1]


def test_a_library_that_others_could_have_written_is_not_loaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    built: list[Path] = []

    def compile_library(command: list[str], sources: object, place: Path) -> Path:
        built.append(place)
        content = b"a library"
        place.write_bytes(content + hashlib.sha256(content).digest())
        place.chmod(0o755)
        return place

    monkeypatch.setattr(build, "compile_library", compile_library)
    folder = tmp_path / "native"
    keep = partial(build.kept, folder, "kernels", ["true"], [], [])
    place = keep()
    assert place.parent == folder and keep() == place and len(built) == 1, "it is built once"
    for mode in (0o775, 0o757, 0o777):
        place.chmod(mode)
        keep()
    assert len(built) == 4, "a file that others can write is built anew"
    folder.chmod(0o777)
    keep()
    assert folder.stat().st_mode & 0o777 == 0o700 and len(built) == 4, "our own folder is closed to others"
    if os.getuid() == 0:
        os.chown(folder, 4321, 4321)
    monkeypatch.setattr(build.os, "getuid", lambda: 1234)
    elsewhere = keep()
    assert elsewhere.parent not in (folder, tmp_path) and len(built) == 5, "another user's folder is not used"
    shutil.rmtree(elsewhere.parent)
