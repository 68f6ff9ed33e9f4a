"""Sounds in prompts: outputs equal to transformers', blocks and encoder outputs by content, and refusals."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxllm import LLM, BeamSearchParams, SamplingParams
from jaxllm.errors import UserError
from jaxllm.media.sound import RATE
from tests.support.paths import ROOT
from tests.support.sizes import FEW_BLOCKS, SHORT_BLOCKS, SLOTS
from tests.support.sound_models import AROUND, KINDS, PLACEHOLDER, SECONDS, prompts, sound, wav, write_sound_model

GOLDEN: Any = json.loads((ROOT / "tests" / "golden_sounds.json").read_text())
GREEDY = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)
LONG = 15000  # samples of a sound of 23 tokens


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jaxllm.model.sound_tower.SMALLEST", 32)  # several programs
        folder = write_sound_model(tmp_path_factory.mktemp("sound"))
        with LLM(str(folder), limit_mm_per_prompt={"audio": 3}, **SLOTS) as llm:
            yield llm


def tokens(outputs: Any) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def asked(seed: int, text: str = "9 " * 23) -> dict[str, Any]:
    ids = [5, 6, AROUND[0], PLACEHOLDER, AROUND[1], *map(int, text.split()), 8]
    samples = np.resize(sound(seed), LONG)
    return {"prompt_token_ids": ids, "multi_modal_data": {"audio": (samples, RATE)}}


def test_outputs_equal_those_of_transformers(llm: LLM) -> None:
    """Test prompts with no sound to three in one batch, by recorded tokens and logits, and again by the caches."""
    metrics = llm.engine.metrics
    for _ in range(2):
        outputs = llm.generate(prompts(), replace(GREEDY, logprob_token_ids=list(range(8))), use_tqdm=False)
        assert tokens(outputs) == GOLDEN["qwen2_audio"]["tokens"]
    assert metrics.sounds_encoded == 7 and not metrics.images_encoded  # of different content
    assert sum(output.num_cached_tokens or 0 for output in outputs) > 100
    for due, output in zip(GOLDEN["qwen2_audio"]["logits"], outputs, strict=True):
        logprobs: Any = output.outputs[0].logprobs
        found = np.array([logprobs[0][token].logprob for token in range(8)])
        np.testing.assert_allclose(found - found[0], np.array(due) - due[0], atol=1e-3)
    assert metrics.compilations_after_ready == 0


def test_an_equal_sound_is_neither_encoded_nor_computed_again(llm: LLM) -> None:
    metrics = llm.engine.metrics
    llm.reset_prefix_cache()
    (first,) = llm.generate([asked(20)], GREEDY, use_tqdm=False)
    before = metrics.sounds_encoded
    (again,) = llm.generate([asked(20)], GREEDY, use_tqdm=False)
    assert metrics.sounds_encoded == before and again.num_cached_tokens == 48  # 51 tokens in blocks of 16
    assert tokens([again]) == tokens([first])
    (other,) = llm.generate([asked(21)], GREEDY, use_tqdm=False)
    assert metrics.sounds_encoded == before + 1 and other.num_cached_tokens == 0
    assert len(other.prompt_token_ids) == len(first.prompt_token_ids) and tokens([other]) != tokens([first])
    (moved,) = llm.generate([asked(20, "7 7 7")], GREEDY, use_tqdm=False)
    assert metrics.sounds_encoded == before + 1 and moved.num_cached_tokens == 0  # the common block ends in the sound
    llm.reset_prefix_cache()
    assert tokens(llm.generate([asked(20), asked(21)], GREEDY, use_tqdm=False)) == tokens([first, other])
    assert metrics.compilations_after_ready == 0


def test_samples_share_a_sound(llm: LLM) -> None:
    llm.reset_prefix_cache()
    before = llm.engine.metrics.sounds_encoded
    params = SamplingParams(n=3, temperature=1.0, seed=1, max_tokens=8, ignore_eos=True)
    (output,) = llm.generate([asked(30)], params, use_tqdm=False)
    assert llm.engine.metrics.sounds_encoded == before + 1
    for index, each in enumerate(output.outputs):
        own = SamplingParams(temperature=1.0, seed=1 + index, max_tokens=8, ignore_eos=True)
        assert tokens(llm.generate([asked(30)], own, use_tqdm=False)) == [each.token_ids]


def test_a_chat_with_sounds_between_turns_equals_its_prompt(llm: LLM) -> None:
    """Test files and samples in parts, other rates, and text that spells a placeholder."""
    slow = np.repeat(sound(4)[:8001], 1)
    messages = [
        {"role": "user", "content": [{"type": "audio", "audio": wav(3)}, {"type": "text", "text": "One <image>?"}]},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": [{"type": "text", "text": "And "}, {"type": "audio", "audio": (slow, 8000)}]},
    ]
    prompt = llm.chat_prompt(messages)
    first, second = prompt["multi_modal_data"]["audio"]
    assert prompt["prompt_token_ids"].count(PLACEHOLDER) == first.num_tokens + second.num_tokens
    assert second.num_tokens == 25 and "One <image>?" in prompt["prompt"]  # 1.0 s at 8 kHz
    (chat,) = llm.chat(messages, GREEDY, use_tqdm=False)
    stored = (np.round(sound(3) * 32767 - 0.5 * (sound(3) < 0)) * 0 + (sound(3) * 32767).astype("<i2")) / 32768
    given = {"audio": [stored.astype(np.float32), (slow, 8000)]}
    ids = prompt["prompt_token_ids"]
    (same,) = llm.generate([{"prompt_token_ids": ids, "multi_modal_data": given}], GREEDY, use_tqdm=False)
    assert tokens([same]) == tokens([chat])
    text = prompt["prompt"].replace("One <image>?", "One?")
    (plain,) = llm.generate([{"prompt": text, "multi_modal_data": given}], GREEDY, use_tqdm=False)
    assert plain.prompt_token_ids.count(PLACEHOLDER) == ids.count(PLACEHOLDER)
    with pytest.raises(UserError, match="'image_url', which this model does not read"):
        llm.chat([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a"}}]}], use_tqdm=False)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"audio": sound(1)[:320]}, "must have at least 0.020 s"),
        ({"audio": np.zeros(2 * RATE + 1)}, "has 2.0 s, and the model reads at most 2 s"),
        ({"audio": [sound(1)] * 4}, "3 sounds"),
        ({"audio": [sound(1)] * 2}, "1 sound placeholders"),
        ({"audio": np.zeros((2, 999))}, "average the channels"),
        ({"audio": (sound(1), 0)}, "sampling rate"),
        ({"audio": np.full(999, np.nan)}, "finite"),
        ({"audio": "a.wav"}, "multi_modal_data: Sound must be an array"),
        ({"image": sound(1)}, "has image, and only 'audio' is supported"),
        ([sound(1)], "one sound or a list"),
        ({}, "has no sounds"),
    ],
)
def test_a_wrong_sound_is_refused_and_others_run(llm: LLM, given: Any, why: str) -> None:
    with pytest.raises(UserError, match=why):
        llm.generate([{"prompt": "<image>", "multi_modal_data": given}, [5, 6]], GREEDY, use_tqdm=False)
    assert tokens(llm.generate([prompts()[2]], GREEDY, use_tqdm=False)) == GOLDEN["qwen2_audio"]["tokens"][2:3]


def test_what_sounds_do_not_go_with_is_refused(llm: LLM) -> None:
    with pytest.raises(UserError, match="beam_width"):
        llm.beam_search([asked(1)], BeamSearchParams(beam_width=2, max_tokens=4))
    with pytest.raises(UserError, match="truncate_prompt_tokens"):
        llm.generate([asked(1)], SamplingParams(truncate_prompt_tokens=4), use_tqdm=False)
    with pytest.raises(UserError, match="a model with images or sound"):
        LLM(llm.engine.config.model, enable_sleep_mode=True)


@pytest.mark.ci
def test_windows_of_a_long_sound_are_separate(tmp_path: Path) -> None:
    """Test recorded tokens of sounds of up to three windows, of which later ones hit the cache, and the bound."""
    with LLM(str(write_sound_model(tmp_path, "voxtral")), limit_mm_per_prompt={"audio": 3}, **SLOTS) as llm:
        for _ in range(2):
            assert tokens(llm.generate(prompts("voxtral"), GREEDY, use_tqdm=False)) == GOLDEN["voxtral"]["tokens"]
        metrics, rng = llm.engine.metrics, np.random.default_rng(0)
        whole = rng.uniform(-0.5, 0.5, 3 * SECONDS * RATE)
        other = np.concatenate([whole[: -RATE // 2], 0.9 * whole[-RATE // 2 :]])
        before, cached = metrics.sounds_encoded, []
        for given in (whole, other, other):
            prompt = {"prompt_token_ids": [5, PLACEHOLDER, *[6] * 20], "multi_modal_data": {"audio": given}}
            (output,) = llm.generate([prompt], GREEDY, use_tqdm=False)
            assert output.prompt_token_ids.count(PLACEHOLDER) == 75
            cached.append(output.num_cached_tokens)
        assert metrics.sounds_encoded == before + 4 and metrics.compilations_after_ready == 0
        assert cached == [0, 0, 80]  # of 96: no match ends inside a window
        with pytest.raises(UserError, match=r"the model reads at most 40 s"):  # 20 windows of 25 tokens in 512
            llm.generate([{"prompt": "<image>", "multi_modal_data": {"audio": np.zeros(41 * RATE)}}], use_tqdm=False)


OTHER_ENGINES: dict[str, dict[str, Any]] = {
    "preempted": FEW_BLOCKS | {"num_kv_blocks": 14},
    "small blocks": SHORT_BLOCKS,
    "small steps": SLOTS | {"max_num_batched_tokens": 8},
    "two devices": SLOTS | {"tensor_parallel_size": 2},
    "in order": SLOTS | {"async_scheduling": False, "enable_prefix_caching": False},
    "deterministic": {"deterministic": True},
    "two stages": SLOTS | {"pipeline_parallel_size": 2},
}
USUAL = {("qwen2_audio", "preempted"), ("voxtral", "small steps"), ("qwen2_audio", "two devices")}


@pytest.mark.parametrize(
    ("kind", "engine"),
    [
        pytest.param(kind, name, marks=pytest.mark.ci if (kind, name) in USUAL else pytest.mark.slow)
        for name in OTHER_ENGINES
        for kind in KINDS
    ],
)
def test_outputs_are_equal_in_other_engines(kind: str, engine: str, tmp_path: Path) -> None:
    """Test pools that preempt, chunks that split sounds, modes and devices."""
    sizes = OTHER_ENGINES[engine]
    with LLM(str(write_sound_model(tmp_path, kind)), **sizes) as llm:
        for _ in range(2):
            assert tokens(llm.generate(prompts(kind), GREEDY, use_tqdm=False)) == GOLDEN[kind]["tokens"]
        assert llm.engine.metrics.preemptions or sizes.get("num_kv_blocks") is None
        assert llm.engine.metrics.compilations_after_ready == 0
