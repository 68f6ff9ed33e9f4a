"""The engine's compiled H200 programs have the expected structure, and planted mistakes are found: `make gpu-aot`.

Checked: CUDA graphs, copies, memory, launches, sums over devices. Nothing runs, so speed is not.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

pytest.importorskip("triton")
pytest.importorskip("jax_cuda13_plugin")

import pallas_kernels
from benchmarks.shapes import SHAPES
from jaxllm.embedded import MODEL_DIR
from jaxllm.families.families import read_spec
from jaxllm.model import decoder, moe
from jaxllm.model.parameters import Scheme
from jaxllm.sampling.sampler import Variant
from jaxllm.setup.draft_setup import Drafting
from pallas_kernels import Choice, tuning
from pallas_kernels.attention import division
from tests.families.test_moe_families import DEEPSEEK_V2_LITE
from tests.gpu import aot

MIB = 1 << 20
MODELS: dict[str, dict[str, Any]] = {
    "embedded": json.loads((MODEL_DIR / "config.json").read_text()),
    "qwen2.5-0.5b": SHAPES["qwen2.5-0.5b"],
    "llama-3.1-8b": SHAPES["llama-3.1-8b"],
}
SPLIT = {"num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64}  # heads that four devices divide
KERNELS_A_LAYER = 7  # four products, cache write, attention, and combination
NORMS = 2  # further kernels per layer of more than `tuning.NORMED_INSIDE` rows
UNFUSED = 13  # per layer, with separate kernels for norms, residuals and activations
KERNELS_BESIDE = 16  # the batch, embedding, rotation, tables, the division of keys, final norm, head, sampling
EXPERT_KERNELS_A_LAYER = 15  # of four layers, with 16 others, so that one more per layer is detected; 14 is the goal
# Temporary memory, MiB, a quarter above the observed: of 64 decode rows mostly logits, of prompts activations.
DECODE_MIB = {2: 4, 16: 20, 64: 60}
RAGGED_MIB = {
    "embedded": {512: 6, 2048: 20},
    "qwen2.5-0.5b": {512: 60, 2048: 240},
    "llama-3.1-8b": {512: 260, 2048: 1040},
}


@pytest.mark.parametrize("rows", DECODE_MIB)
@pytest.mark.parametrize("model", MODELS)
def test_a_decode_step_is_one_graph(model, rows):
    program = aot.compile_step(MODELS[model], rows=rows)
    layers = MODELS[model]["num_hidden_layers"]
    most = (KERNELS_A_LAYER + NORMS * (rows > tuning.NORMED_INSIDE)) * layers + KERNELS_BESIDE
    print(f"{program.kernels / layers:.1f} kernels a layer, {program.temporary_bytes / MIB:.1f} MiB")
    assert not program.violations(True, DECODE_MIB[rows] * MIB, most)
    assert not program.all_reduces


def test_norms_and_residuals_that_are_kernels_of_their_own_are_seen():
    config = MODELS["llama-3.1-8b"] | {"num_hidden_layers": 2}
    compiled = partial(aot.compile_step, config, rows=2)
    most = KERNELS_A_LAYER * 2 + KERNELS_BESIDE
    assert not compiled().violations(True, 1 << 40, most)
    (found,) = compiled(kernels={"fused_linear": "xla"}).violations(True, 1 << 40, most)
    assert found.endswith(f"kernels, more than {most}")


@pytest.mark.parametrize("variant", [Variant.RANDOM, Variant.FILTERED, Variant.FULL])
def test_sampling_stays_in_the_graph(variant):
    program = aot.compile_step(MODELS["qwen2.5-0.5b"], rows=64, variant=variant)
    print(f"{program.kernels} kernels, {program.temporary_bytes / MIB:.1f} MiB")
    assert not program.violations(True, 320 * MIB)
    launched = re.findall(r'custom_call_target="triton_kernel_call_ffi".*/sampling/', program.text)
    assert len(launched) == (2 if variant is Variant.RANDOM else 6)
    assert not re.findall(r"= s32\[64,1024\]\S* copy", program.text), "bins are filled in place"


@pytest.mark.parametrize(
    ("model", "tokens"),
    [
        *((model, 512) for model in MODELS),
        *(pytest.param(model, 2048, marks=[pytest.mark.slow] * (model != "llama-3.1-8b")) for model in MODELS),
    ],
)
def test_a_ragged_step_copies_nothing(model, tokens):
    program = aot.compile_step(MODELS[model], tokens=tokens)
    print(f"{program.outside}, {program.temporary_bytes / MIB:.1f} MiB")
    assert not program.violations(False, RAGGED_MIB[model][tokens] * MIB)


@pytest.mark.parametrize(
    ("rows", "adapters", "devices"), [pytest.param(64, 1, 1, marks=pytest.mark.slow), (64, 8, 1), (16, 4, 4)]
)
def test_a_step_with_adapters_is_one_graph_without_further_sums(rows, adapters, devices):
    program = aot.compile_step(MODELS["qwen2.5-0.5b"] | SPLIT, rows=rows, adapters=adapters, devices=devices)
    print(f"{program.kernels / 24:.1f} kernels a layer, {program.temporary_bytes / MIB:.1f} MiB")
    assert not program.violations(True, 200 * MIB)
    assert program.all_reduces == (0 if devices == 1 else 2 * 24 + 1)


@pytest.mark.parametrize("rows", [1, 64])
def test_a_step_that_verifies_drafts_is_one_graph(rows):
    program = aot.compile_step(MODELS["llama-3.1-8b"], rows=rows, drafting=Drafting(4, 2, 5))
    print(f"{program.kernels / 32:.1f} kernels a layer, {program.temporary_bytes / MIB:.1f} MiB")
    assert not program.violations(True, 5 * DECODE_MIB[64] * MIB)


@pytest.mark.parametrize("size", [{"rows": 16}, {"rows": 16, "devices": 4}, {"tokens": 512}], ids=str)
@pytest.mark.parametrize("cache", ["float8_e4m3fn", "int8"])
def test_an_8_bit_cache_is_written_and_read_in_place(cache, size):
    """Neither it nor its scales are copied, and none of its blocks become floats outside the kernels."""
    config = MODELS["llama-3.1-8b"] | {"num_hidden_layers": 4}
    program = aot.compile_step(config, cache=cache, **size)
    print(f"{program.kernels} kernels, {program.temporary_bytes / MIB:.1f} MiB")
    most = DECODE_MIB[16] if "rows" in size else RAGGED_MIB["llama-3.1-8b"][512]
    assert not program.violations("rows" in size, most * MIB)
    blocks, heads, tokens, width = program.block_shape
    assert not re.findall(rf"= f32\[{blocks},{heads},{tokens}\]\S* (?:copy|copy-start)\(", program.text)
    assert not re.findall(rf"= (?:bf16|f16|f32)\[{blocks},{heads},{tokens},{width}\].*", program.text)


# DeepSeek-V2-Lite with one dense layer and one with experts: up to 256 tokens all experts are multiplied, in the graph.
LATENT = DEEPSEEK_V2_LITE | {"num_hidden_layers": 2}
KERNELS_OF_LATENTS = 16  # per dense layer; one with experts has 9 more
LATENT_RAGGED_MIB = {512: 85, 2048: 340}


@pytest.mark.parametrize(
    ("rows", "devices"),
    [(16, 1), (16, 4), *(pytest.param(rows, 1, marks=pytest.mark.slow) for rows in (2, 64))],
)
def test_latent_attention_is_in_the_graph(rows, devices):
    """The heads are divided among the devices, and each has all latents."""
    program = aot.compile_step(LATENT, rows=rows, devices=devices)
    print(f"{program.kernels} kernels, {program.temporary_bytes / MIB:.1f} MiB")
    most = 2 * KERNELS_OF_LATENTS + 9 + KERNELS_BESIDE if devices == 1 else None
    assert not program.violations(True, DECODE_MIB[rows] * MIB, most)
    assert program.block_shape[1] == 1 and program.all_reduces == (0 if devices == 1 else 2 * 2 + 1)


@pytest.mark.parametrize(
    ("tokens", "cache"),
    [(512, None), *(pytest.param(*one, marks=pytest.mark.slow) for one in ((2048, None), (512, "int8")))],
)
def test_a_ragged_step_attends_to_latents_without_a_loop(tokens, cache):
    """With dense layers, because experts have a loop for this number of tokens."""
    program = aot.compile_step(LATENT | {"first_k_dense_replace": 2}, tokens=tokens, cache=cache)
    print(f"{program.outside}, {program.temporary_bytes / MIB:.1f} MiB")
    assert not program.violations(False, LATENT_RAGGED_MIB[tokens] * MIB)
    assert " while(" not in program.text and not program.thunks["kWhile"]


def test_a_step_in_which_a_model_drafts_is_one_graph():
    spec, _ = read_spec(dict(MODELS["llama-3.1-8b"] | {"num_hidden_layers": 4}))
    drafting = Drafting(4, spec=spec, kernels=aot.kernels_of(spec, aot.layout(), "bfloat16", None))
    program = aot.compile_step(MODELS["llama-3.1-8b"], rows=16, drafting=drafting)
    print(f"{program.kernels} kernels, {program.temporary_bytes / MIB:.1f} MiB")
    assert not program.violations(True, 5 * DECODE_MIB[64] * MIB)


# Qwen3-30B-A3B, 4 of its 48 layers.
EXPERTS = SHAPES["llama-3.1-8b"] | {
    **{"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048},
    **{"num_attention_heads": 32, "num_key_value_heads": 4, "num_hidden_layers": 4, "vocab_size": 151936},
    **{"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True},
    **{"decoder_sparse_step": 1, "mlp_only_layers": []},
}
EXPERTS_MIB = {16: 12, 64: 48, 2048: 192}  # of temporary memory on one device


def loops_and_copies(program: aot.Program, devices: int) -> list[str]:
    """Return loops, and arrays of the size of all experts: copies of a layer's weights, or others."""
    inner = 768 // devices
    sizes = "|".join(f"128,{one},{other}" for one, other in ((2 * inner, 2048), (2048, inner), (inner, 2048)))
    made = rf"= \w+\[(?:{sizes})\]\S* (?!parameter|get-tuple-element|bitcast)[\w-]+\(.*"
    return re.findall(r"= .* while\(.*", program.text) + re.findall(made, program.text)


@pytest.mark.parametrize("devices", [1, 4])
@pytest.mark.parametrize("rows", [16, pytest.param(64, marks=pytest.mark.slow)])
def test_a_decode_step_with_experts_is_one_graph(rows, devices):
    """Fewer than fifteen launches a layer: attention's, with three for norms of queries and keys, and the experts'."""
    program = aot.compile_step(EXPERTS, rows=rows, devices=devices)
    layers, sums = EXPERTS["num_hidden_layers"], program.all_reduces
    print(f"{(program.kernels - KERNELS_BESIDE) / layers:.1f} kernels, {program.temporary_bytes / MIB:.1f} MiB")
    most = EXPERT_KERNELS_A_LAYER * layers + KERNELS_BESIDE if devices == 1 else None
    assert not program.violations(True, EXPERTS_MIB[rows] * MIB, most)
    assert not loops_and_copies(program, devices)
    assert sums == (0 if devices == 1 else 2 * layers + 1)
    found = program.text.count('custom_call_target="triton_kernel_call_ffi"')
    assert found == (9 * layers + 2 if devices == 1 else 8 * layers)


def test_a_ragged_step_with_experts_has_no_loop():
    program = aot.compile_step(EXPERTS, tokens=2048)
    print(f"{program.outside}, {program.temporary_bytes / MIB:.1f} MiB")
    assert not program.violations(False, EXPERTS_MIB[2048] * MIB)
    assert not loops_and_copies(program, 1)


def test_a_deterministic_step_with_experts_is_one_graph():
    config = EXPERTS | {"num_hidden_layers": 1}
    program = aot.compile_step(config, tokens=256, variant=Variant.FULL, is_deterministic=True)
    assert not program.violations(True, 600 * MIB)
    assert not loops_and_copies(program, 1)


def test_a_loop_over_experts_and_a_weight_that_is_made_are_seen(monkeypatch):
    config = EXPERTS | {"num_hidden_layers": 1}
    program = aot.compile_step(config, tokens=2048, kernels={"fused_experts": "xla"})
    assert any(" while(" in one for one in loops_and_copies(program, 1))
    by_kernel = moe.by_kernel

    def doubling(spec, experts, weights, *given):
        return by_kernel(spec, experts, weights | {"expert_down": 2 * weights["expert_down"]}, *given)

    monkeypatch.setattr(moe, "by_kernel", doubling)
    found = loops_and_copies(aot.compile_step(config, rows=16), 1)
    assert any(one.startswith("= bf16[128,2048,768]") for one in found)


@pytest.mark.parametrize(
    ("model", "size"),
    [
        *(("llama-3.1-8b", size) for size in ({"rows": 2}, {"rows": 64}, {"tokens": 512})),
        *(("embedded", size) for size in ({"rows": 64}, {"tokens": 512})),
    ],
    ids=str,
)
def test_four_devices_sum_twice_a_layer_inside_the_graph(model, size):
    program = aot.compile_step(MODELS[model], devices=4, **size)
    layers = MODELS[model]["num_hidden_layers"]
    print(f"{program.kernels / layers:.1f} kernels a layer, {program.temporary_bytes / MIB:.1f} MiB")
    assert not program.violations("rows" in size, 100 * MIB)
    assert program.all_reduces == 2 * layers + 1, "two a layer and one for the embedding"


SCHEMES = {
    "w8a16 of int8": Scheme("int8"),
    "w8a16 of fp8": Scheme("float8"),
    "w4a16": Scheme("int4", group=128),
}


def floats_of_weights(program: aot.Program, devices: int) -> list[str]:
    """Return floats with the shape of a quantized matrix on one device, or of its transpose: a dequantized weight."""
    wide = [(6144 // devices, 4096), (4096, 4096 // devices), (28672 // devices, 4096), (4096, 14336 // devices)]
    shapes = "|".join(f"{one},{other}" for size in wide for one, other in (size, size[::-1]))
    return re.findall(rf"= (?:bf16|f16|f32)\[(?:{shapes})\].*", program.text)


@pytest.mark.parametrize("devices", [1, 4])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_step_with_quantized_weights_makes_none_of_them_whole(scheme, devices):
    """Two layers suffice to detect one. The smallest matrix has 32 MiB as bfloat16, and 8 on each of four devices."""
    config = MODELS["llama-3.1-8b"] | {"num_hidden_layers": 2}
    program = aot.compile_step(config, rows=16, devices=devices, scheme=SCHEMES[scheme])
    print(f"{program.kernels} kernels, {program.temporary_bytes / MIB:.1f} MiB")
    most = UNFUSED * 2 + KERNELS_BESIDE if devices == 1 else None
    assert not program.violations(True, DECODE_MIB[16] * MIB // devices, most)
    assert not floats_of_weights(program, devices)
    assert program.text.count('custom_call_target="triton_kernel_call_ffi"') >= (3 + 4) * 2


def test_a_weight_that_is_made_whole_is_seen():
    config = MODELS["llama-3.1-8b"] | {"num_hidden_layers": 1}
    program = aot.compile_step(config, rows=16, scheme=SCHEMES["w4a16"], kernels={"linear": "xla"})
    assert floats_of_weights(program, 1)


def test_a_deterministic_step_is_one_graph_in_which_no_sum_is_split(monkeypatch):
    """Each product sums every row from first to last, in a kernel of XLA, so that all rows are alike.

    Attention divides a row by the row's length alone.
    """
    monkeypatch.setattr(division, "evenly", None)
    config = MODELS["qwen2.5-0.5b"] | {"num_hidden_layers": 2}
    compiled = partial(aot.compile_step, config, tokens=256, variant=Variant.FULL, is_deterministic=True)
    program = compiled()
    assert not program.violations(True, 600 * MIB)
    products, split = re.findall(r" dot\(", program.text), re.findall(r"= f32\[\d+,\d+,\d+\]\S* dot\(", program.text)
    assert len(products) == 4 * 2 + 1 and not split
    assert not program.thunks["kGemm"] + program.thunks["kCublasLtMatmul"]
    # A layer writes and attends, one kernel each for all tokens; sampling with filters has six.
    assert program.text.count('custom_call_target="triton_kernel_call_ffi"') == 2 * 2 + 6
    calls = re.findall(r'"triton_kernel_call_ffi".*?/attend/jit\((\w+)\)', program.text)
    assert calls == ["paged_decode"] * 2
    by_rule_of_thumb = compiled(flags={"xla_gpu_experimental_force_split_k": "0"}).text
    assert re.search(r"= f32\[\d+,\d+,\d+\]\S* dot\(", by_rule_of_thumb), "what is looked for would be seen"


def test_a_cache_that_is_not_donated_is_seen():
    found = aot.compile_step(MODELS["embedded"], rows=16, donates=False).violations(True, 1 << 40)
    assert any("bytes are changed in place" in one for one in found)


def test_a_branch_in_the_step_is_seen(monkeypatch):
    """A condition on data, and a loop that ends by data, such as the page loop instead of the kernel."""
    forward = decoder.forward

    def branching(spec, params, tokens, *given):
        x = forward(spec, params, tokens, *given)
        return lax.cond(tokens[0] > 5, lambda: jnp.sin(x), lambda: lax.sort(x))

    monkeypatch.setattr(decoder, "forward", branching)
    compiled = partial(aot.compile_step, MODELS["embedded"], rows=16)
    (found,) = compiled(flags={"xla_gpu_enable_command_buffer": "FUSION,CUSTOM_CALL"}).violations(True, 1 << 40)
    assert "one CUDA graph" in found
    monkeypatch.undo()
    assert "one CUDA graph" in compiled(kernels={"paged_decode": "xla"}).violations(True, 1 << 40)[0]
    pages = aot.compile_step(LATENT | {"num_hidden_layers": 1}, rows=2, kernels={"paged_decode": "xla"})
    assert "one CUDA graph" in pages.violations(True, 1 << 40)[0] and pages.thunks["kWhile"]


def test_a_kernel_on_a_sharded_cache_outside_shard_map_is_seen():
    over = aot.layout(4)
    heads, whole = over.sharding("blocks", "kv_heads"), over.sharding()
    cache = jax.ShapeDtypeStruct((1024, 8, 16, 64), jnp.bfloat16, sharding=heads)
    qkv = jax.ShapeDtypeStruct((16, 24, 64), jnp.bfloat16, sharding=whole)
    places = jax.ShapeDtypeStruct((16,), jnp.int32, sharding=whole)

    def write(caches, qkv, blocks, offsets):
        written = pallas_kernels.write_kv(qkv, *caches, blocks, offsets, implementation=Choice("triton", 90))
        return written.k_cache, written.v_cache

    lowered = jax.jit(write, donate_argnums=0).lower((cache, cache), qkv, places, places)
    own = 2 * 1024 * 2 * 16 * 64 * 2
    found = aot.read(lowered, own, (1024, 2, 16, 64)).violations(False, own // 8)
    assert any("bytes of temporary memory" in one for one in found)


def test_what_a_decode_step_of_8b_weighs_and_how_much_of_it_changes_its_address():
    """Triton calls with new buffer addresses at each step are recorded into the graph again."""
    program = aot.compile_step(MODELS["llama-3.1-8b"], rows=64)
    distinct = set(program.payloads)
    print(f"{program.serialized_bytes} bytes, {[len(each) for each in distinct]} of PTX, {program.buffers}")
    assert len(program.payloads) == program.text.count('custom_call_target="triton_kernel_call_ffi"') == 7 * 32 + 2
    assert len(distinct) == 9, "to write, to attend, to combine, four products, to look at the logits and to choose"
    assert max(map(len, distinct)) < 100 << 10 and sum(map(len, program.payloads)) < 7 * MIB
    assert program.serialized_bytes < 5 * MIB
    assert program.buffers.allocations["temporary"] == program.buffers.allocations["sent"] == 1
    assert not program.buffers.allocations["returned"], "results are returned in the batch that was sent"
    assert program.buffers.changing == (2, 0)


CHANGING = {
    "decode": {"rows": 2},
    "log-probabilities": {"rows": 16, "variant": Variant.FILTERED},
    "extras": {"rows": 16, "variant": Variant.FULL},
    "ragged": {"tokens": 512, "variant": Variant.RANDOM},
    "drafts": {"rows": 4, "drafting": Drafting(4, 2, 5)},
    "adapters": {"rows": 16, "adapters": 2},
    "four devices": {"rows": 16, "devices": 4},
    "deterministic": {"tokens": 128, "variant": Variant.FULL, "is_deterministic": True},
}


@pytest.mark.parametrize("form", CHANGING)
def test_two_commands_of_a_step_see_what_moves(form):
    """One command reads the batch, one writes the results; in the old form each layer's attention read it too."""
    config = MODELS["qwen2.5-0.5b"] | SPLIT | {"num_hidden_layers": 2}
    buffers = aot.compile_step(config, **CHANGING[form]).buffers
    print(buffers)
    assert buffers.allocations["sent"] == 1 and not buffers.allocations["returned"]
    commands, calls = buffers.changing
    assert commands <= 3 and not calls


@pytest.mark.parametrize("size", [{"rows": 64}, {"tokens": 512}], ids=str)
def test_a_step_that_reads_the_batch_where_it_was_sent_is_seen(size):
    config = MODELS["llama-3.1-8b"] | {"num_hidden_layers": 2}
    commands, calls = aot.compile_step(config, stays=False, **size).buffers.changing
    assert commands > 3 and calls >= 2


def test_a_state_whose_address_changes_is_seen():
    commands, calls = aot.compile_step(MODELS["embedded"], rows=16).buffers.changing
    others, other_calls = aot.compile_step(MODELS["embedded"], rows=16, donates=False).buffers.changing
    layers = MODELS["embedded"]["num_hidden_layers"]
    print(f"{commands} commands and {calls} calls, {others} and {other_calls} where nothing is donated")
    assert others >= commands + layers and other_calls >= calls + layers


def test_the_program_of_the_engine_is_the_one_that_is_read():
    """The tests count attention kernels by name; without those names they would pass vacuously."""
    program = aot.compile_step(MODELS["qwen2.5-0.5b"], rows=64)
    assert program.text.count('custom_call_target="triton_kernel_call_ffi"') == 24 * 7 + 2, (
        "in each layer to write, to attend and to combine, and its products; to look at the logits and to choose"
    )
    launched = program.thunks["kCustomCall"] + program.thunks["kCustomKernel"]
    assert launched == 24 * (KERNELS_A_LAYER + NORMS) + KERNELS_BESIDE
    assert program.outside == Counter(kCommandBuffer=1)
