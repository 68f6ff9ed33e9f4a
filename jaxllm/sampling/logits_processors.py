"""Custom logits processors, registered at engine start and selected by name; see `sampler.processed`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from importlib import import_module

import jax
import jax.numpy as jnp

from jaxllm.errors import UserError
from jaxllm.sampling.sampler import Processor
from jaxllm.sampling_params import MAX_PROCESSOR_ARGUMENTS, MAX_PROCESSORS


def processor_name(given: Processor | str) -> str:
    if isinstance(given, str):
        return given.rpartition(":")[2].rpartition(".")[2]
    return getattr(given, "__name__", "")


def load_processors(given: Sequence[Processor | str], vocab_size: int) -> dict[str, Processor]:
    """Return processors by name; a string is imported as "package.module:function".

    Raises UserError for too many, equal names, or one that changes the logits' shape.
    """
    found: dict[str, Processor] = {}
    if len(given) > MAX_PROCESSORS:
        raise UserError(f"logits_processors may hold {MAX_PROCESSORS} at most, got {len(given)}.", "logits_processors")
    for one in given:
        name = processor_name(one)
        processor = _imported(one) if isinstance(one, str) else one
        if not callable(processor) or not name.isidentifier():
            raise UserError(f"logits_processors must hold named functions, got {one!r:.80}.", "logits_processors")
        if name in found:
            raise UserError(f"logits_processors has two functions that are called {name!r}.", "logits_processors")
        _check(name, processor, vocab_size)
        found[name] = partial(processor)  # new per engine: JAX caches traces by function
    return found


def _imported(path: str) -> Processor:
    module, _, name = path.partition(":")
    try:
        processor = import_module(module)
        for part in name.split("."):
            processor = getattr(processor, part)
    except (ImportError, AttributeError, ValueError) as error:
        message = f"logits_processors: {path!r} cannot be imported as package.module:function: {error}"
        raise UserError(message, "logits_processors") from error
    return processor  # pyright: ignore[reportReturnType]


def _check(name: str, processor: Processor, vocab_size: int) -> None:
    logits = jax.ShapeDtypeStruct((2, vocab_size), jnp.float32)
    arguments = jax.ShapeDtypeStruct((2, MAX_PROCESSOR_ARGUMENTS), jnp.float32)
    positions = jax.ShapeDtypeStruct((2,), jnp.int32)
    try:
        result = jax.eval_shape(processor, logits, arguments, positions)
    except Exception as error:
        said = (str(error).splitlines() or [type(error).__name__])[0]
        message = f"logits_processors: {name} cannot be traced by JAX: {said}"
        raise UserError(message, "logits_processors") from error
    if getattr(result, "shape", None) != logits.shape or not jnp.issubdtype(result.dtype, jnp.floating):
        raise UserError(
            f"logits_processors: {name} must return floats of the logits' shape, not {result}.", "logits_processors"
        )
