"""A feature that a step does not use leaves its program as it was: digests of program texts, kept per version of JAX.

Of the table's families, each mixer, expert and norm once. To write the digests anew, after a change that is meant to
change programs: `python -m tests.runner.test_program_texts` with each version of JAX that the file names.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jaxllm.model import sharding, weights
from jaxllm.model.families import read_spec
from jaxllm.runner import batch, device_state, kv_cache, step
from jaxllm.runner.model_setup import OPERATIONS
from jaxllm.runner.step_model import StepModel
from jaxllm.sampling.sampler import ROW_WIDTH, Extras, Variant
from pallas_kernels import Choice
from tests.support.paths import GOLDEN

STORED = Path(__file__).with_name("program_texts.json")
FAMILIES = ("deepseek-v3", "stories260K", "gemma2", "gpt2", "gpt-oss", "qwen3")
QUICK = 2
SLOTS, TOKENS, SIZE = 4, 32, 16


def digests(family: str) -> dict[str, str]:
    """Return the digest of each program's text of a family's golden model."""
    spec, _ = read_spec(json.loads((GOLDEN / family / "config.json").read_text()))
    mesh, dtype = sharding.make_mesh(jax.devices(), 1), jnp.dtype(jnp.float32)
    geometry = kv_cache.Geometry(num_slots=SLOTS, num_blocks=16, block_size=SIZE, max_model_len=64)
    extras = Extras(spec.vocab_size)
    model = StepModel(
        spec=spec,
        geometry=geometry,
        num_logprobs=2,
        extras=extras,
        processors=(),
        mesh=mesh,
        params=weights.abstract(spec, mesh, dtype, None),
        state=device_state.abstract(spec, geometry, TOKENS, extras, mesh, dtype),
        kernels={operation: Choice("xla") for operation in OPERATIONS},
    )
    leaves = [tuple(jax.tree.leaves(tree)) for tree in (model.params, model.state)]
    found = {}
    shapes = batch.decode_shapes(SLOTS)[-1], batch.ragged_shapes(TOKENS, SLOTS, SIZE, ROW_WIDTH)[-1]
    for shape in shapes:
        buffer = jax.ShapeDtypeStruct((batch.buffer_size(shape),), jnp.int32, sharding=sharding.replicated(mesh))
        for variant in Variant:
            lowered = jax.jit(step.build(model, shape, variant), donate_argnums=(1,)).lower(*leaves, buffer)
            text = lowered.as_text().encode()
            found[step.program_name(shape, variant)] = hashlib.sha256(text).hexdigest()[:16]
    return found


@pytest.mark.parametrize(
    "family", [*FAMILIES[:QUICK], *(pytest.param(one, marks=pytest.mark.ci) for one in FAMILIES[QUICK:])]
)
def test_programs_are_as_they_were(family: str):
    stored = json.loads(STORED.read_text())
    if jax.__version__ not in stored:
        pytest.skip(f"no digests are kept for jax {jax.__version__}")
    assert digests(family) == stored[jax.__version__][family]


if __name__ == "__main__":
    kept = json.loads(STORED.read_text()) if STORED.exists() else {}
    kept[jax.__version__] = {family: digests(family) for family in FAMILIES}
    STORED.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n")
