"""Encoder-decoder models: outputs equal to transformers', sources by content, prompts' forms, and refusals."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxllm import LLM, BeamSearchParams, SamplingParams
from jaxllm.errors import UserError
from tests.support.paths import ROOT
from tests.support.seq2seq_models import KINDS, NUM_FRAMES, START, prompts, write_seq2seq
from tests.support.sizes import FEW_BLOCKS, SHORT_BLOCKS, SLOTS

GOLDEN: Any = json.loads((ROOT / "tests" / "golden_seq2seq.json").read_text())
GREEDY = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)
BEAMS = BeamSearchParams(beam_width=3, max_tokens=12, include_stop_str_in_output=True)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with LLM(str(write_seq2seq(tmp_path_factory.mktemp("bart"))), **SLOTS) as llm:
        yield llm


def tokens(outputs: Any) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def check(llm: LLM, kind: str) -> None:
    """Compare outputs with those of transformers."""
    given = prompts(kind)
    assert tokens(llm.generate(given, GREEDY, use_tqdm=False)) == GOLDEN[kind]["tokens"]
    for prompt, own, (due, scores) in zip(given, llm.beam_search(given, BEAMS), GOLDEN[kind]["beams"], strict=True):
        first = 1 + len(prompt.get("decoder_prompt", {}).get("prompt_token_ids", ()))
        assert [each.tokens[first:] for each in own.sequences] == due
        np.testing.assert_allclose([each.score for each in own.sequences], scores, atol=1e-4)
    assert llm.engine.metrics.compilations_after_ready == 0


def test_outputs_and_beams_equal_those_of_transformers(llm: LLM) -> None:
    """Test sources of one token to the longest in one batch; the beams hit the sources of the greedy outputs."""
    llm.reset_prefix_cache()
    before = llm.engine.metrics.sources_encoded
    check(llm, "bart")
    assert llm.engine.metrics.sources_encoded == before + len(prompts())


SIZES: dict[str, dict[str, Any]] = {
    "preempted": FEW_BLOCKS | {"num_kv_blocks": 12},
    "small blocks": SHORT_BLOCKS,
    "small steps": SLOTS | {"max_num_batched_tokens": 8},
    "in order": SLOTS | {"async_scheduling": False, "enable_prefix_caching": False},
    "deterministic": SLOTS | {"deterministic": True},
    "two devices": SLOTS | {"tensor_parallel_size": 2},
}


@pytest.mark.ci
@pytest.mark.parametrize(("kind", "name"), [*((kind, "") for kind in KINDS), *product(("bart", "t5"), SIZES)])
def test_outputs_are_equal_in_other_engines(kind: str, name: str, tmp_path: Path) -> None:
    """Test all kinds of models, pools that preempt, chunks of decoder prompts, modes and devices."""
    with LLM(str(write_seq2seq(tmp_path, kind)), **SIZES.get(name, SLOTS)) as llm:
        for _ in range(2):
            check(llm, kind)
        assert llm.engine.metrics.preemptions or name != "preempted"


def test_outputs_of_a_request_and_later_requests_share_a_source(llm: LLM) -> None:
    llm.reset_prefix_cache()
    metrics, prompt = llm.engine.metrics, prompts()[4]
    before = metrics.sources_encoded
    params = SamplingParams(n=3, temperature=1.0, seed=1, max_tokens=8, ignore_eos=True)
    (output,) = llm.generate([prompt], params, use_tqdm=False)
    assert metrics.sources_encoded == before + 1
    assert len({tuple(each.token_ids) for each in output.outputs}) == 3
    for index, each in enumerate(output.outputs):
        own = SamplingParams(temperature=1.0, seed=1 + index, max_tokens=8, ignore_eos=True)
        assert tokens(llm.generate([prompt], own, use_tqdm=False)) == [each.token_ids]
    assert metrics.sources_encoded == before + 1
    salted = prompt | {"cache_salt": "other"}
    assert tokens(llm.generate([salted], GREEDY, use_tqdm=False)) == [GOLDEN["bart"]["tokens"][4]]
    assert metrics.sources_encoded == before + 2


def test_decoder_prompts_of_different_sources_share_no_blocks(llm: LLM) -> None:
    llm.reset_prefix_cache()
    decoder = {"prompt_token_ids": list(range(4, 44))}
    both = [
        {"encoder_prompt": {"prompt_token_ids": list(range(seed, 90, seed))}, "decoder_prompt": decoder}
        for seed in (7, 8)
    ]
    together = llm.generate(both, GREEDY, use_tqdm=False)
    assert tokens(together)[0] != tokens(together)[1]
    assert [output.num_cached_tokens for output in together] == [0, 0]
    again = llm.generate(both, GREEDY, use_tqdm=False)
    assert tokens(again) == tokens(together) and [output.num_cached_tokens for output in again] == [32, 32]


def test_a_plain_prompt_is_the_encoders(llm: LLM) -> None:
    text = "Once upon a time"
    ids = llm.engine.model.tokenizer.encode(text)
    forms: list[Any] = [text, {"prompt": text}, ids, {"prompt_token_ids": ids}, {"encoder_prompt": text}]
    forms.append({"encoder_prompt": {"prompt": text}, "decoder_prompt": None})
    forms.append({"encoder_prompt": ids, "decoder_prompt": [START]})
    outputs = llm.generate(forms, GREEDY, use_tqdm=False)
    assert len({tuple(each) for each in tokens(outputs)}) == 1
    assert all(list(output.encoder_prompt_token_ids or ()) == ids for output in outputs)
    assert all(list(output.prompt_token_ids) == [START] for output in outputs)
    assert [output.encoder_prompt for output in outputs[:3]] == [text, text, None]
    (output,) = llm.generate([{"encoder_prompt": text, "decoder_prompt": " there was"}], GREEDY, use_tqdm=False)
    encoded = llm.engine.model.tokenizer.encode(" there was", add_special_tokens=False)
    assert output.prompt == " there was" and list(output.prompt_token_ids) == [START, *encoded]


def test_grammars_and_scores_hold(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=8, structured_outputs={"regex": "[a-z]{4}"})
    assert len(llm.generate(["A cat."], params, use_tqdm=False)[0].outputs[0].text) == 4
    scored = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
    given = [{"encoder_prompt": text, "decoder_prompt": [5, 6, 7]} for text in ("A cat.", "A cat.", "A dog.")]
    found = [output.prompt_logprobs for output in llm.generate(given, scored, use_tqdm=False)]
    assert found[0] == found[1] != found[2] and len(found[0] or ()) == 4


def test_a_decoder_begins_with_the_token_that_is_forced(tmp_path: Path) -> None:
    """Test that forced_bos_token_id is the first token unless there is a decoder prompt, as in transformers."""
    with LLM(str(write_seq2seq(tmp_path, forced_bos_token_id=7)), **SLOTS) as llm:
        given: list[Any] = ["A cat.", {"encoder_prompt": "A cat.", "decoder_prompt": [9]}]
        outputs = llm.generate(given, GREEDY, use_tqdm=False)
        assert [list(output.prompt_token_ids) for output in outputs] == [[START, 7], [START, 9]]


@pytest.mark.parametrize(
    ("prompt", "params", "why"),
    [
        ([5] * 97, {}, "97 tokens, and the encoder reads at most 96"),
        ("a " * 999, {}, "maximum context"),
        ([], {}, "cannot be empty"),
        ({"encoder_prompt": {"prompt_token_ids": []}}, {}, "cannot be empty"),
        ({"encoder_prompt": 5}, {}, "text or a list"),
        ({"encoder_prompt": "a", "decoder_prompt": 5}, {}, "text or a list"),
        ({"encoder_prompt": "a", "decoder_prompt": [5] * 96}, {}, "maximum context"),
        ({"encoder_prompt": "a", "decoder_prompt": [1536]}, {}, "out of vocabulary"),
        ({"encoder_prompt": [1536]}, {}, "out of vocabulary"),
        ({"encoder_prompt": "a", "other": 1}, {}, "no field 'other'"),
        ({"encoder_prompt": "a", "prompt": "b"}, {}, "has its text in decoder_prompt"),
        ({"encoder_prompt": "a", "prompt": "b", "prompt_token_ids": None}, {}, "has its text in decoder_prompt"),
        ({"decoder_prompt": "a"}, {}, "no field 'decoder_prompt'"),
        ({"encoder_prompt": "a", "multi_modal_data": {"image": 1}}, {}, "reads no images"),
        ("a", {"truncate_prompt_tokens": 4}, "truncate_prompt_tokens is not supported"),
    ],
)
def test_bad_prompts_are_refused(llm: LLM, prompt: Any, params: dict[str, Any], why: str) -> None:
    with pytest.raises(UserError, match=why):
        llm.generate([prompt], SamplingParams(max_tokens=1, **params), use_tqdm=False)


SAMPLES = np.zeros(1000, np.float32)


@pytest.mark.ci
def test_an_encoder_of_sound_reads_arrays_and_refuses_others(tmp_path: Path) -> None:
    with LLM(str(write_seq2seq(tmp_path, "whisper")), **SLOTS) as llm:
        sound = np.sin(np.arange(8000) / 9).astype(np.float32)
        decoder, before = {"prompt_token_ids": [START, 9]}, llm.engine.metrics.sources_encoded
        forms: list[Any] = [
            {
                "encoder_prompt": {"prompt": "", "multi_modal_data": {"audio": (sound, 16000)}},
                "decoder_prompt": decoder,
            },
            {"multi_modal_data": {"audio": [sound]}, **decoder},
        ]
        outputs = llm.generate(forms, GREEDY, use_tqdm=False)
        assert tokens(outputs)[0] == tokens(outputs)[1] and llm.engine.metrics.sources_encoded == before + 1
        assert list(outputs[0].prompt_token_ids) == [START, 9] and outputs[0].encoder_prompt_token_ids == []
        for sound_given, why in (
            (np.zeros(160 * NUM_FRAMES + 1, np.float32), "encoder reads at most"),
            (np.zeros((2, 9), np.float32), "average the channels"),
            (np.zeros(9, np.int16), "floats"),
            (SAMPLES + np.nan, "finite"),
            ((SAMPLES, 0), "sampling rate"),
            ((np.zeros(1_000_000, np.float32), 1), "1000000.0 s"),  # 64 GB at 16 kHz
            ("a.wav", "array of samples"),
        ):
            with pytest.raises(UserError, match=why):
                llm.generate([{"multi_modal_data": {"audio": sound_given}}], GREEDY)
        for prompt, why in (
            ("a text", "encoder reads sound"),
            ({"multi_modal_data": {"image": SAMPLES}}, "encoder reads sound"),
            ({"encoder_prompt": {"prompt": "a", "multi_modal_data": {"audio": SAMPLES}}}, "has no text"),
        ):
            with pytest.raises(UserError, match=why):
                llm.generate([prompt], GREEDY)


@pytest.mark.parametrize(
    "settings",
    [
        {"enable_lora": True},
        {"enable_sleep_mode": True},
        {"kv_offloading_size": 0.1},
        {"enable_kv_cache_events": True},
        {"quantization": "int8"},
    ],
)
def test_settings_without_support_are_refused(settings: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"{next(iter(settings))} is not supported with an encoder-decoder model"):
        LLM(str(write_seq2seq(tmp_path)), **SLOTS, **settings)


def test_a_bias_of_logits_is_refused(tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    folder = write_seq2seq(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors["final_logits_bias"] += 1
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(UserError, match="final_logits_bias is not zero"):
        LLM(str(folder), **SLOTS)
