"""A step's program without a feature is the same whether or not the feature exists.

`python -m tests.model.hlo_texts --against COMMIT` compares the texts of all programs with those of another commit.
"""

from __future__ import annotations

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from jaxllm.checkpoints import weights
from jaxllm.families.families import read_spec
from jaxllm.model import lora, sharding
from jaxllm.model.lora_linear import AdapterWeights
from jaxllm.runner import batch, device_state, step
from jaxllm.runner.step_model import StepModel
from jaxllm.sampling.sampler import ROW_WIDTH, Extras, Variant
from jaxllm.setup import kv_cache
from jaxllm.setup.model_setup import OPERATIONS
from pallas_kernels import Choice
from tests.support.paths import GOLDEN

FAMILIES = ("stories260K", "gemma2", "gpt2", "qwen3")
QUICK = 1
SLOTS, TOKENS, SIZE = 4, 32, 16


def plain_model(family: str) -> StepModel:
    """Describe a family's golden model in an engine without any feature."""
    spec, _ = read_spec(json.loads((GOLDEN / family / "config.json").read_text()))
    layout, dtype = sharding.make_layout(jax.devices(), 1), jnp.dtype(jnp.float32)
    geometry = kv_cache.Geometry(num_slots=SLOTS, num_blocks=16, block_size=SIZE, max_model_len=64)
    extras = Extras(spec.vocab_size)
    return StepModel(
        spec=spec,
        geometry=geometry,
        num_logprobs=2,
        extras=extras,
        processors=(),
        layout=layout,
        params=weights.abstract(spec, layout, dtype, None),
        state=device_state.abstract(spec, geometry, TOKENS, extras, layout, dtype),
        kernels={operation: Choice("xla") for operation in OPERATIONS},
    )


def texts(model: StepModel) -> dict[str, str]:
    """Return the text of the largest decode step and the largest step with prompts, in each variant."""
    leaves = [tuple(jax.tree.leaves(tree)) for tree in (model.params, model.state)]
    found = {}
    shapes = batch.decode_shapes(SLOTS)[-1], batch.ragged_shapes(TOKENS, SLOTS, SIZE, ROW_WIDTH)[-1]
    for shape in shapes:
        place = model.layout.sharding()
        buffer = jax.ShapeDtypeStruct((batch.buffer_size(shape),), jnp.int32, sharding=place)
        for variant in Variant:
            lowered = jax.jit(step.build(model, shape, variant), donate_argnums=(1,)).lower(*leaves, buffer)
            found[step.program_name(shape, variant)] = lowered.as_text()
    return found


@pytest.mark.parametrize(
    "family", [*FAMILIES[:QUICK], *(pytest.param(one, marks=pytest.mark.ci) for one in FAMILIES[QUICK:])]
)
def test_programs_without_adapters_are_those_of_an_engine_without(family: str):
    plain = plain_model(family)
    adapter = lora.abstract(plain.spec, plain.layout, jnp.float32, 8)
    assert texts(replace(plain, adapters=AdapterWeights(adapter, joins=True))) == texts(plain)
