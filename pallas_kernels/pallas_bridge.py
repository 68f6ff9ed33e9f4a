"""Call Pallas kernels: compiled on GPUs, interpreted as JAX operations on CPUs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

import jax
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pallas_triton

from pallas_kernels.choice import Site

# Their type selects the back end; JAX's default varies (0.10 to 0.12).
_COMPILED = pallas_triton.CompilerParams(num_warps=4, num_stages=2)


def refusal(site: Site, sizes: Mapping[str, int]) -> str | None:
    """Return why Pallas cannot run a kernel with these array sizes here, or None."""
    if site.cache_dtype == "uint8":
        return "a cache of bytes is for XLA alone"
    if site.platform == "cpu":
        return None
    if site.platform != "gpu":
        return "Pallas kernels run on a CPU, interpreted, and on NVIDIA GPUs"
    if site.capability is None or site.capability < 80:
        return "Pallas' Triton back end needs an NVIDIA GPU of compute capability 8.0"
    if site.cache_dtype == "float8_e4m3fn" and site.capability < 89:
        return f"Pallas' Triton back end needs compute capability 8.9 for a cache of {site.cache_dtype}"
    for name, size in sizes.items():
        if size & (size - 1) != 0:
            return f"Pallas' Triton back end, deprecated since JAX 0.11, needs powers of two; {name} is {size}"
    return None


def call(
    kernel: Callable[..., None],
    arrays: Sequence[Array | None],
    outputs: Sequence[jax.ShapeDtypeStruct],
    grid: tuple[int, ...],
    aliases: Mapping[int, int] | None = None,
) -> tuple[Array, ...]:
    """Run a kernel over `grid`; return its `outputs`.

    Its parameters are `arrays`, then outputs without aliases. `aliases` maps indices of `arrays` to outputs: written in
    place if donated or unused later.
    """
    aliases = dict(aliases or {})
    places = [place for place, array in enumerate(arrays) if array is not None]
    given = [array for array in arrays if array is not None]

    def body(*references: jax.Ref) -> None:
        inputs, results = references[: len(given)], references[len(given) :]
        parameters: list[jax.Ref | None] = [None] * len(arrays)
        for place, reference in zip(places, inputs, strict=True):
            parameters[place] = results[aliases[place]] if place in aliases else reference
        fresh = [result for output, result in enumerate(results) if output not in aliases.values()]
        kernel(*parameters, *fresh)

    build = functools.partial(
        pl.pallas_call,
        body,
        out_shape=tuple(outputs),
        grid=grid,
        input_output_aliases={places.index(place): output for place, output in aliases.items()},
        compiler_params=_COMPILED,
    )
    # The program may run on another backend; lowering keeps one branch.
    return lax.platform_dependent(*given, cpu=build(interpret=True), default=build(interpret=False))
