"""Drafts for prompts with images or sound: outputs equal to transformers', and to those without drafts.

After images of Qwen2.5-VL and Qwen3-VL rotary positions differ from places, of which the host has only bounds.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxllm import LLM, SamplingParams
from jaxllm.setup import draft_setup, model_setup
from tests.model.test_eagle import tensors_of
from tests.support import sound_models, vision_models
from tests.support.checkpoints import write_checkpoint
from tests.support.paths import ROOT
from tests.support.sizes import FEW_BLOCKS, SHORT_BLOCKS, SLOTS
from tests.support.vision_models import ANY_SIZE, PLACEHOLDER

GOLDEN: Any = {
    kind: own["tokens"]
    for name in ("images", "sounds")
    for kind, own in json.loads((ROOT / "tests" / f"golden_{name}.json").read_text()).items()
}
KINDS = ("siglip", *ANY_SIZE, "gemma3", *sound_models.KINDS)
METHODS = ("ngram", "draft_model", "eagle3")
ENGINES: dict[str, dict[str, Any]] = {
    "usual": SLOTS,
    "preempted": FEW_BLOCKS | {"num_kv_blocks": 14},
    "small blocks": SHORT_BLOCKS,
    "one block": SLOTS | {"block_size": 256},
    "small steps": SLOTS | {"max_num_batched_tokens": 24},
    "two devices": SLOTS | {"tensor_parallel_size": 2},
    "in order": SLOTS | {"async_scheduling": False, "enable_prefix_caching": False},
    "deterministic": {"deterministic": True},
    "two stages": SLOTS | {"pipeline_parallel_size": 2},
}
FEWER = {("gemma3", "preempted"): {"block_size": 4, "max_num_batched_tokens": 24, "num_kv_blocks": 44}}
REFUSED = {("gemma3", "deterministic"), *((kind, "two stages") for kind in (*ANY_SIZE, "gemma3"))}
USUAL = {
    ("qwen2_5_vl", "draft_model", "one block"),
    ("qwen3_vl", "eagle3", "small steps"),
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)


def write_model(folder: Path, kind: str) -> Path:
    write = sound_models.write_sound_model if kind in sound_models.KINDS else vision_models.write_model
    return write(folder, kind)


def prompts(kind: str) -> list[Any]:
    return (sound_models if kind in sound_models.KINDS else vision_models).prompts(kind)


def write_head(folder: Path, model: Path) -> Path:
    """Write an EAGLE-3 head that passes on the model's last hidden states: its drafts repeat the last token."""
    given = json.loads((model / "config.json").read_text())["text_config"]
    config = {
        **{"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_act": "silu", "hidden_size": 48},
        **{"intermediate_size": 64, "max_position_embeddings": 512, "num_hidden_layers": 1, "head_dim": 12},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": PLACEHOLDER + 4, "rms_norm_eps": 1e-6},
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]},
    }
    if "mrope_section" in given.get("rope_scaling", {}):
        config["rope_scaling"] = given["rope_scaling"]
    own = load_file(model / "model.safetensors")
    own = {name.rpartition("model.")[2]: value for name, value in own.items() if "vision" not in name}
    tensors = tensors_of(config | {"eagle_aux_hidden_state_layer_ids": [0] * 3}, (), "midlayer.")
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        tensors[f"midlayer.{name}.weight"] *= 0.1
    tensors["fc.weight"] = np.eye(48, 3 * 48, k=2 * 48, dtype=np.float32)
    tensors["norm.weight"] = own["norm.weight"] + (given["model_type"] == "gemma3_text")
    head = next((value for name, value in own.items() if name.endswith("lm_head.weight")), None)
    tensors["lm_head.weight"] = own["embed_tokens.weight"] if head is None else head
    return write_checkpoint(folder, config, tensors)


def asked(kind: str) -> tuple[list[Any], list[SamplingParams]]:
    """Return greedy requests, then sampled ones of two outputs each."""
    given = prompts(kind)
    sampled = [replace(GREEDY, temperature=0.5, n=2, seed=seed, max_tokens=24) for seed in range(len(given))]
    return given + given, [GREEDY] * len(given) + sampled


def tokens(outputs: Any) -> list[list[list[int]]]:
    return [[own.token_ids for own in output.outputs] for output in outputs]


@cache
def due(kind: str, folder: Path) -> list[list[list[int]]]:
    """Return the tokens without drafts."""
    with LLM(str(folder), **SLOTS) as llm:
        found = tokens(llm.generate(*asked(kind), use_tqdm=False))
    assert [own for (own,) in found[: len(GOLDEN[kind])]] == GOLDEN[kind]
    assert any(one != other for one, other in found[len(GOLDEN[kind]) :])
    return found


@cache
def folder_of(kind: str, root: Path) -> Path:
    return write_model(root / kind, kind)


@pytest.fixture(autouse=True)
def drafts_are_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set no cost of drafts: in a full batch, and from a model as large as the target, they would not pay."""
    monkeypatch.setattr(draft_setup, "with_cost", lambda drafting, described: drafting)
    monkeypatch.setattr(model_setup, "TOKEN_COST", {"cpu": 0})


def drafting(method: str, folder: Path, root: Path) -> dict[str, Any]:
    own: dict[str, Any] = {"method": method, "num_speculative_tokens": 3}
    if method == "ngram":
        return own | {"prompt_lookup_min": 1, "prompt_lookup_max": 4}
    return own | {"model": str(folder if method == "draft_model" else write_head(root / "head", folder))}


@pytest.mark.ci
@pytest.mark.parametrize(
    ("kind", "method", "engine"),
    [
        pytest.param(*case, marks=() if case in USUAL else pytest.mark.slow)
        for kind in KINDS
        for method in METHODS
        for engine in ENGINES
        if (kind, engine) not in REFUSED
        for case in [(kind, method, engine)]
    ],
)
def test_a_request_gets_with_drafts_what_it_gets_without(
    kind: str, method: str, engine: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Test images, sounds and texts in one batch, then one request twice, which hits its blocks and encodes nothing."""
    folder = folder_of(kind, tmp_path_factory.getbasetemp())
    sizes = ENGINES[engine] | FEWER.get((kind, engine), {})
    expected = due(kind, folder)
    with LLM(str(folder), speculative_config=drafting(method, folder, tmp_path), **sizes) as llm:
        metrics = llm.engine.metrics
        assert tokens(llm.generate(*asked(kind), use_tqdm=False)) == expected
        for _ in range(2):
            encoded = metrics.images_encoded + metrics.sounds_encoded
            (again,) = llm.generate(prompts(kind)[-1:], GREEDY, use_tqdm=False)
            assert again.outputs[0].token_ids == GOLDEN[kind][-1]
        assert metrics.images_encoded + metrics.sounds_encoded == encoded > 0
        has_hits = engine not in ("in order", "one block") and (kind, engine) not in FEWER
        assert again.num_cached_tokens or not has_hits
        assert metrics.draft_tokens > sum(metrics.accepted_tokens) > 0
        assert metrics.preemptions or "num_kv_blocks" not in sizes
        assert metrics.compilations_after_ready == 0


@pytest.mark.ci
@pytest.mark.parametrize("kind", [ANY_SIZE[0], pytest.param(ANY_SIZE[1], marks=pytest.mark.slow)])
def test_a_draft_model_turns_positions_after_images_as_its_target_does(kind: str, tmp_path: Path) -> None:
    """Test that all drafts of a model equal to its target are kept, where images have the embedding of placeholders.

    A request has one block, because a row drafts within its blocks.
    """
    folder = write_model(tmp_path / "model", kind)
    tensors = load_file(folder / "model.safetensors")
    for name, value in tensors.items():
        if "visual." in name:
            value[:] = 0.0
        elif name.endswith("embed_tokens.weight"):
            value[PLACEHOLDER] = 0.0
    save_file(tensors, folder / "model.safetensors")
    sizes = ENGINES["one block"] | {"async_scheduling": False}
    with LLM(str(folder), speculative_config=drafting("draft_model", folder, tmp_path), **sizes) as llm:
        llm.generate(prompts(kind), GREEDY, use_tqdm=False)
        metrics = llm.engine.metrics
        assert sum(metrics.accepted_tokens) == metrics.draft_tokens > 100
