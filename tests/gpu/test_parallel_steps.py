"""Large models on eight H200: their steps compile, fit the memory, and exchange as docs/scaling.md states.

Few layers are compiled; the memory plan is for all.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import pytest

pytest.importorskip("triton")
pytest.importorskip("jax_cuda13_plugin")

from jaxllm.config import EngineConfig
from jaxllm.families.families import read_spec
from jaxllm.model import stages
from jaxllm.sampling.sampler import Variant
from jaxllm.setup.memory_plan import MemoryPlan
from jaxllm.setup.model_setup import Setup, plan_memory
from tests.families.released import DEEPSEEK_V3, LLAMA_31_8B, QWEN_3_30B_A3B
from tests.gpu import aot

DEVICES = 8
FREE = int(0.92 * 141e9)  # bytes of an H200 that an engine uses by default
QWEN = {"hidden_size": 4096, "num_hidden_layers": 94, "num_attention_heads": 64, "moe_intermediate_size": 1536}
# Bytes of the matrices outside of experts, which each rank has: attention, embedding and head.
QWEN_OUTSIDE = 2 * (94 * 2 * 4096 * (64 + 4) * 128 + 2 * 151936 * 4096)
LLAMA = {"hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "intermediate_size": 28672}
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


class Large(NamedTuple):
    """A published model."""

    config: dict[str, Any]
    few: dict[str, Any]  # changes of config.json for the compiled program
    num_bytes: float  # its published number of parameters, times the bytes of one
    caches: int  # tokens at least
    stages: int = 1
    ranks: int = 1


MODELS = {
    "Llama-3.1-70B": Large(LLAMA_31_8B | LLAMA, {"num_hidden_layers": 4}, 70.6e9 * 2, 2_000_000),
    "Llama-3.1-70B, two stages": Large(LLAMA_31_8B | LLAMA, {"num_hidden_layers": 4}, 70.6e9 * 2, 2_000_000, 2),
    "Qwen3-235B-A22B": Large(QWEN_3_30B_A3B | QWEN, {"num_hidden_layers": 4}, 235.1e9 * 2, 1_000_000),
    "Qwen3-235B-A22B, two ranks": Large(
        QWEN_3_30B_A3B | QWEN, {"num_hidden_layers": 4}, 235.1e9 * 2 + QWEN_OUTSIDE, 500_000, ranks=2
    ),
    "DeepSeek-V3": Large(
        DEEPSEEK_V3 | {"quantization_config": FP8},
        {"num_hidden_layers": 6, "first_k_dense_replace": 2},
        671.0e9 * (1 + 4 / 128),  # with a scale for 128 numbers
        400_000,
    ),
}
OF_SAMPLING = {Variant.GREEDY: 0, Variant.RANDOM: 0, Variant.FILTERED: 19, Variant.FULL: 19}  # all-reduces
LARGEST = {"tokens": 8192}


def compiled(name: str, **step: Any) -> aot.Program:
    own = MODELS[name]
    further = {"divides_experts": _has_experts(name), "num_stages": own.stages, "num_ranks": own.ranks}
    return aot.compile_step(own.config | own.few, devices=DEVICES, **further, **step)


def _has_experts(name: str) -> bool:
    return "num_experts_per_tok" in MODELS[name].config


def plan(name: str, config: dict[str, Any], temporary_bytes: int) -> MemoryPlan:
    """Divide a device's memory as an engine does."""
    num_stages, num_ranks = MODELS[name].stages, MODELS[name].ranks
    engine = EngineConfig(
        model=name,
        tensor_parallel_size=DEVICES // num_stages // num_ranks,
        data_parallel_size=num_ranks,
        pipeline_parallel_size=num_stages,
        enable_expert_parallel=_has_experts(name),
    )
    spec, family = read_spec(dict(config))
    layout = aot.layout(DEVICES, engine.enable_expert_parallel, stages.divide(spec, num_stages), num_ranks)
    dtype = jnp.dtype(jnp.bfloat16)
    setup = Setup(
        folder=Path(),
        spec=spec,
        family=family,
        head=None,
        generation_config={},
        platform="gpu",
        devices=tuple(layout.devices),
        layout=layout,
        dtype=dtype,
        cache_dtype=dtype,
        float8=None,
        max_model_len=32768,
        max_num_seqs=256,
        max_num_batched_tokens=LARGEST["tokens"],
        kernels={},
        drafting=None,
        draft=None,
        token_cost=4,
        prepared={},
        num_ticks=num_stages,
    )
    return plan_memory(engine, setup, FREE, temporary_bytes)


@pytest.mark.parametrize("name", MODELS)
def test_all_layers_fit_eight_devices(name: str) -> None:
    """The plan of all layers, with the temporary memory that XLA finds for the largest step of few."""
    own, program = MODELS[name], compiled(name, **LARGEST)
    whole, few = (plan(name, config, program.temporary_bytes) for config in (own.config, own.config | own.few))
    gib = [each / 2**30 for each in (whole.need.weights, program.temporary_bytes, whole.kv_bytes)]
    print("{:.1f} GiB of weights, {:.2f} temporary, {:.1f} of cache".format(*gib), f"{whole.num_blocks} blocks")
    assert whole.need.weights == pytest.approx(own.num_bytes / DEVICES, rel=0.03)
    assert whole.num_blocks * whole.need.block_size > own.caches
    # The plan counts the same weights as XLA, in a program of few layers; the rest are slots.
    others = program.argument_bytes - few.need.weights - program.cache_bytes
    assert 0 <= others < (256 + 128 * (own.stages > 1)) << 20  # with the residual stream between stages
    assert not program.violations(False, whole.need.temporaries)


@pytest.mark.parametrize(
    ("name", "variant"),
    [
        *((name, Variant.GREEDY) for name in MODELS),
        *(pytest.param("Qwen3-235B-A22B", one, marks=pytest.mark.slow) for one in (Variant.RANDOM, Variant.FILTERED)),
        ("Qwen3-235B-A22B", Variant.FULL),
    ],
)
def test_a_decode_step_is_one_graph_with_two_sums_a_layer(name: str, variant: Variant) -> None:
    """One more is for the embedding; sampling has an all-gather, with filters two, and 19 sums.

    With stages the program is a tick: each passes the residual stream on, the last one to all by a sum. With ranks a
    layer of experts also gathers the tokens of all, and scatters the sums.
    """
    program = compiled(name, rows=64, variant=variant)
    layers = (MODELS[name].config | MODELS[name].few)["num_hidden_layers"]
    print(f"{program.kernels} kernels, {program.temporary_bytes / 2**20:.0f} MiB, {program.thunks}")
    assert program.outside == {"kCommandBuffer": 1}
    has_stages, exchanges = MODELS[name].stages > 1, layers * (MODELS[name].ranks > 1)
    assert program.all_reduces == 2 * layers // MODELS[name].stages + 1 + has_stages + OF_SAMPLING[variant]
    assert program.thunks["kCollectivePermute"] == has_stages
    assert program.thunks["kAllGather"] == (2 if OF_SAMPLING[variant] else 1) + exchanges
    assert program.thunks["kReduceScatter"] == exchanges
    others = {kind for kind in program.thunks if "All" in kind or "Collective" in kind or "Scatter" in kind}
    assert others - {"kCollectivePermute", "kReduceScatter"} == {"kAllReduce", "kAllGather"}
