"""Images in prompts: outputs equal to transformers', blocks and encoder outputs by content, and refusals."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from jaxllm import LLM, BeamSearchParams, RequestOutput, SamplingParams
from jaxllm.errors import UserError
from tests.support.paths import ROOT
from tests.support.sizes import FEW_BLOCKS, SHORT_BLOCKS, SLOTS
from tests.support.vision_models import (
    ANY_SIZE,
    AROUND,
    PLACEHOLDER,
    TOWERS,
    VIDEO,
    image,
    prompts,
    write_any_size,
    write_gemma,
    write_llava,
    write_model,
)

GOLDEN: Any = json.loads((ROOT / "tests" / "golden_images.json").read_text())
GREEDY = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llava(tmp_path_factory.mktemp("llava"))


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), limit_mm_per_prompt={"image": 4}, **SLOTS) as llm:
        yield llm


def tokens(outputs: Any) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def with_images(*seeds: int, text: str = "") -> dict[str, Any]:
    ids = [5, 6, 7, *[PLACEHOLDER] * len(seeds), *map(int, text.split()), 8]
    return {"prompt_token_ids": ids, "multi_modal_data": {"image": [image(seed) for seed in seeds]}}


def check_logits(outputs: list[RequestOutput], kind: str, atol: float = 1e-3) -> None:
    """Compare logits of the first eight tokens, after the prompt and in the last decode step."""
    for at, output in enumerate(outputs):
        for place, name in ((0, "logits"), (-1, "last")):
            logprobs: Any = output.outputs[0].logprobs
            found = np.array([logprobs[place][token].logprob for token in range(8)])
            due = np.array(GOLDEN[kind][name][at])
            np.testing.assert_allclose(found - found[0], due - due[0], atol=atol)


def test_outputs_equal_those_of_transformers(llm: LLM) -> None:
    """Test prompts with no image to four in one batch, by recorded tokens."""
    assert tokens(llm.generate(prompts(), GREEDY, use_tqdm=False)) == GOLDEN["clip"]["tokens"]
    assert llm.engine.metrics.compilations_after_ready == 0


@pytest.mark.parametrize("kind", ["qwen2_5_vl", pytest.param("qwen3_vl", marks=pytest.mark.ci)])
def test_images_of_any_size_have_their_own_positions(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test recorded tokens, blocks that are hit behind images, images of equal sizes, all programs, and refusals."""
    monkeypatch.setattr("jaxllm.model.patch_vision.SMALLEST", 8)  # 8 to 24 tokens: several programs
    with LLM(str(write_any_size(tmp_path, kind)), limit_mm_per_prompt={"image": 4, "video": 0}, **SLOTS) as llm:
        metrics = llm.engine.metrics
        for _ in range(2):  # the second time nothing is encoded, and most blocks are hit
            outputs = llm.generate(prompts(kind), GREEDY, use_tqdm=False)
            assert tokens(outputs) == GOLDEN[kind]["tokens"]
        assert metrics.images_encoded == 9  # of different content
        assert sum(output.num_cached_tokens for output in outputs) > 100
        chosen = replace(GREEDY, logprob_token_ids=list(range(8)))
        check_logits(llm.generate(prompts(kind), chosen, use_tqdm=False), kind)
        picture, scored = image(3).resize((84, 28)), replace(GREEDY, logprobs=1)

        def ask(given: Image.Image) -> RequestOutput:
            ids = [5, 6, AROUND[0], PLACEHOLDER, AROUND[1], *[9] * 40]
            prompt = {"prompt_token_ids": ids, "multi_modal_data": {"image": given}}
            (output,) = llm.generate([prompt], scored, use_tqdm=False)
            return output

        first, again = ask(picture), ask(picture)
        assert first.num_cached_tokens == 0 and again.num_cached_tokens == 48
        assert tokens([first]) == tokens([again]) and metrics.images_encoded == 10
        others = [ask(image(4).resize((84, 28))), ask(picture.transpose(Image.Transpose.ROTATE_90))]
        assert [len(other.prompt_token_ids) for other in others] == [len(first.prompt_token_ids)] * 2
        assert not any(other.num_cached_tokens for other in others) and metrics.images_encoded == 12
        scores = [output.outputs[0].cumulative_logprob for output in (first, again, *others)]
        assert abs(scores[0] - scores[1]) < 1e-3
        assert all(abs(one - other) > 1e-2 for one, other in combinations(scores[1:], 2))
        messages = [{"role": "user", "content": [{"type": "image", "image": picture}, {"type": "text", "text": "a"}]}]
        ids = llm.chat_prompt(messages)["prompt_token_ids"]
        at = ids.index(AROUND[0])
        assert ids[at : at + 14] == [AROUND[0], *[PLACEHOLDER] * 12, AROUND[1]]
        assert metrics.compilations_after_ready == 0
        for wrong, why in (
            ({"prompt_token_ids": [5, VIDEO]}, "video placeholder"),
            ({"prompt": "a", "multi_modal_data": {"video": [picture]}}, "has video"),
        ):
            with pytest.raises(UserError, match=why):
                llm.generate([wrong], GREEDY, use_tqdm=False)
        with pytest.raises(UserError, match="video"):
            llm.chat([{"role": "user", "content": [{"type": "video_url", "video_url": {"url": "a"}}]}], use_tqdm=False)
    small = SLOTS | {"max_model_len": 16, "mm_processor_kwargs": {"max_pixels": 14 * 14 * 30}}
    with LLM(str(tmp_path), **small) as llm, pytest.raises(UserError, match=r"has 30 tokens, and an image may have 16"):
        llm.generate([{"prompt": "<image>", "multi_modal_data": {"image": image(3).resize((84, 70))}}], use_tqdm=False)


OTHER_ENGINES: dict[str, dict[str, Any]] = {
    "preempted": FEW_BLOCKS | {"num_kv_blocks": 12},
    "small blocks": SHORT_BLOCKS,
    "small steps": SLOTS | {"max_num_batched_tokens": 8},
    "in order": SLOTS | {"async_scheduling": False, "enable_prefix_caching": False},
    "deterministic": {"deterministic": True},
    "two devices": SLOTS | {"tensor_parallel_size": 2},
    "two stages": SLOTS | {"pipeline_parallel_size": 2},
}


@pytest.mark.ci
@pytest.mark.parametrize(
    ("kind", "engine"),
    [(kind, name) for name in OTHER_ENGINES for kind in (*TOWERS, *ANY_SIZE) if name != "two stages" or kind in TOWERS],
)
def test_outputs_are_equal_in_other_engines(kind: str, engine: str, tmp_path: Path) -> None:
    """Test pools that preempt, chunks that split images, modes and devices."""
    sizes = OTHER_ENGINES[engine]
    with LLM(str(write_model(tmp_path, kind)), **sizes) as llm:
        for _ in range(2):
            assert tokens(llm.generate(prompts(kind), GREEDY, use_tqdm=False)) == GOLDEN[kind]["tokens"]
        assert llm.engine.metrics.preemptions or sizes.get("num_kv_blocks") is None
        assert llm.engine.metrics.compilations_after_ready == 0


@pytest.mark.ci
def test_tokens_of_an_image_see_all_of_it(tmp_path: Path) -> None:
    """Test recorded tokens and logits, prefix hits, an equal image that is not encoded again, texts, and refusals."""
    with LLM(str(write_gemma(tmp_path, "gemma3")), limit_mm_per_prompt={"image": 4}, **SLOTS) as llm:
        metrics, kind = llm.engine.metrics, "gemma3"
        for _ in range(2):  # the second time nothing is encoded, and most blocks are hit
            outputs = llm.generate(prompts(kind), replace(GREEDY, logprob_token_ids=list(range(8))), use_tqdm=False)
            assert tokens(outputs) == GOLDEN[kind]["tokens"]
        assert sum(output.num_cached_tokens for output in outputs) > 64
        check_logits(outputs, kind, atol=2e-4)
        (moved,) = llm.generate([with_images(2, text="9 9 9")], GREEDY, use_tqdm=False)
        before = metrics.images_encoded
        (again,) = llm.generate([with_images(2, text="9 9 8")], GREEDY, use_tqdm=False)
        assert moved.num_cached_tokens == again.num_cached_tokens == 0  # the common block ends inside the image
        assert metrics.images_encoded == before
        content = [{"type": "text", "text": "a <|image_start|>\n"}, {"type": "image", "image": image(3)}]
        ids = llm.chat_prompt([{"role": "user", "content": content}])["prompt_token_ids"]
        at, encode = ids.index(AROUND[0]), llm.engine.model.tokenizer.encode
        assert ids[at:].count(PLACEHOLDER) == 16 and ids[at + 17] == AROUND[1] and ids.count(AROUND[0]) == 1
        shown = [llm.engine.model.tokenizer.decode(each) for each in (ids[:at], ids[at + 18 :])]
        assert shown[0].endswith("a <|image_start|>\n\n\n") and shown[1].startswith("\n\n")
        written = "a\n\n<|image_start|><image><|image_end|>\n\n b"
        for text in ("a<|image_start|> b", written):
            prompt = {"prompt": text, "multi_modal_data": {"image": image(3)}}
            (output,) = llm.generate([prompt], GREEDY, use_tqdm=False)
            found = [token for token in output.prompt_token_ids if token != PLACEHOLDER]
            assert found == [token for token in encode(written) if token != PLACEHOLDER]
            assert len(output.prompt_token_ids) == len(found) + 16
        assert metrics.compilations_after_ready == 0
    for wrong, why in (
        (OTHER_ENGINES["two stages"], "is not supported with a model with attention in both directions"),
        ({"deterministic": True}, "is not supported with a model with attention in both directions"),
        (SLOTS | {"max_num_batched_tokens": 23}, r"max_num_batched_tokens \(23\) must be at least 24"),
        ({"kernels": ["paged_prefill=native"]}, "sees? no keys after them"),
        ({"mm_processor_kwargs": {"do_pan_and_scan": True}}, "do_pan_and_scan = True is not supported"),
        ({"mm_processor_kwargs": {"do_center_crop": True}}, "do_center_crop = True is not supported"),
    ):
        with pytest.raises(UserError, match=why):
            LLM(str(tmp_path), **wrong)


SMALL = {"block_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 24, "precompile": "covering"}
WHOLE_IMAGES: dict[str, tuple[str, dict[str, Any]]] = {
    "preempted": ("gemma3", SMALL | {"num_kv_blocks": 44}),
    "two devices": ("gemma3", OTHER_ENGINES["two devices"]),
    "six layers": ("gemma3_deep", SMALL),
    "in order": ("gemma3", OTHER_ENGINES["in order"]),
    "one block": ("gemma3", SLOTS | {"block_size": 256}),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.ci if at < 2 else pytest.mark.slow) for at, name in enumerate(WHOLE_IMAGES)],
)
def test_images_are_whole_in_other_engines(name: str, tmp_path: Path) -> None:
    """Test the smallest steps that hold an image, and pools that preempt."""
    kind, sizes = WHOLE_IMAGES[name]
    with LLM(str(write_gemma(tmp_path, kind)), **sizes) as llm:
        for _ in range(2):
            assert tokens(llm.generate(prompts(kind), GREEDY, use_tqdm=False)) == GOLDEN[kind]["tokens"]
        assert llm.engine.metrics.preemptions or "num_kv_blocks" not in sizes
        assert llm.engine.metrics.compilations_after_ready == 0


def test_stages_refuse_images_of_any_size(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not supported with a model with images of any size"):
        LLM(str(write_model(tmp_path, "qwen2_5_vl")), **OTHER_ENGINES["two stages"])


def test_an_equal_image_is_neither_encoded_nor_computed_again(llm: LLM) -> None:
    metrics = llm.engine.metrics
    llm.reset_prefix_cache()
    (first,) = llm.generate([with_images(20, text="9 " * 20)], GREEDY, use_tqdm=False)
    before = metrics.images_encoded
    (again,) = llm.generate([with_images(20, text="9 " * 20)], GREEDY, use_tqdm=False)
    assert metrics.images_encoded == before and again.num_cached_tokens == 32  # 3 + 16 + 21 tokens in blocks of 16
    assert again.outputs[0].token_ids == first.outputs[0].token_ids
    (other,) = llm.generate([with_images(21, text="9 " * 20)], GREEDY, use_tqdm=False)
    assert metrics.images_encoded == before + 1 and other.num_cached_tokens == 0
    (moved,) = llm.generate([with_images(20, text="9 9 9")], GREEDY, use_tqdm=False)
    assert metrics.images_encoded == before + 1  # known, though its second block differs
    assert moved.num_cached_tokens == 0  # the common block ends inside the image
    (twice,) = llm.generate([with_images(20, 21)], GREEDY, use_tqdm=False)
    assert metrics.images_encoded == before + 1 and twice.outputs[0].token_ids


def test_prompts_that_differ_in_their_images_share_nothing(llm: LLM) -> None:
    """Test two prompts of equal tokens that are queued together."""
    llm.reset_prefix_cache()
    both = [with_images(40, text="9 " * 20), with_images(41, text="9 " * 20)]
    together = tokens(llm.generate(both, GREEDY, use_tqdm=False))
    llm.reset_prefix_cache()
    assert together == [tokens(llm.generate([prompt], GREEDY, use_tqdm=False))[0] for prompt in both]
    assert together[0] != together[1]


def test_samples_share_an_image(llm: LLM) -> None:
    llm.reset_prefix_cache()
    before = llm.engine.metrics.images_encoded
    params = SamplingParams(n=3, temperature=1.0, seed=1, max_tokens=8, ignore_eos=True)
    (output,) = llm.generate([with_images(30)], params, use_tqdm=False)
    assert llm.engine.metrics.images_encoded == before + 1
    assert len({tuple(each.token_ids) for each in output.outputs}) == 3
    for index, each in enumerate(output.outputs):
        own = SamplingParams(temperature=1.0, seed=1 + index, max_tokens=8, ignore_eos=True)
        assert tokens(llm.generate([with_images(30)], own, use_tqdm=False)) == [each.token_ids]


def test_a_chat_with_images_between_turns_equals_its_prompt(llm: LLM) -> None:
    """Test that text does not become a placeholder, and that `grammars` hold with images."""
    messages = [
        {"role": "user", "content": [{"type": "image", "image": image(3)}, {"type": "text", "text": "One <image>?"}]},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": [{"type": "text", "text": "And "}, {"type": "image", "image": image(4)}]},
    ]
    prompt = llm.chat_prompt(messages)
    assert prompt["prompt_token_ids"].count(PLACEHOLDER) == 2 * 16 and "One <image>?" in prompt["prompt"]
    (chat,) = llm.chat(messages, GREEDY, use_tqdm=False)
    text = prompt["prompt"].replace("One <image>?", "One picture?")
    images = {"image": [image(3), image(4)]}
    (plain,) = llm.generate([{"prompt": text, "multi_modal_data": images}], GREEDY, use_tqdm=False)
    assert len(chat.prompt_token_ids) > 32 and len(plain.prompt_token_ids) > 32
    (same,) = llm.generate([{"prompt_token_ids": list(chat.prompt_token_ids), "multi_modal_data": images}], GREEDY)
    assert tokens([same]) == tokens([chat])


def test_grammars_and_scores_hold_with_images(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=8, structured_outputs={"regex": "[a-z]{4}"})
    (constrained,) = llm.generate([with_images(50)], params, use_tqdm=False)
    assert re.fullmatch("[a-z]{4}", constrained.outputs[0].text)
    scored = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
    found = [llm.generate([with_images(seed)], scored, use_tqdm=False)[0].prompt_logprobs for seed in (50, 50, 51)]
    assert found[0] == found[1] != found[2] and len(found[0] or ()) == 20


@pytest.mark.parametrize(
    ("prompt", "why"),
    [
        ({"prompt_token_ids": [5, PLACEHOLDER]}, "placeholders"),
        ({"prompt_token_ids": [5], "multi_modal_data": {"image": image(1)}}, "0 image placeholders"),
        ({"prompt": "a <image><image>", "multi_modal_data": {"image": image(1)}}, "2 image placeholders"),
        (with_images(1, 2, 3, 4, 5), "4 images"),
        ({"prompt": "<image>", "multi_modal_data": {"video": image(1)}}, "multi_modal_data"),
        ({"prompt": "<image>", "multi_modal_data": {"image": "a.png"}}, "PIL image"),
        ({"prompt": "<image>", "multi_modal_data": [image(1)]}, "multi_modal_data"),
        ({"prompt": "<image>" + "a " * 9999, "multi_modal_data": {"image": image(1)}}, "maximum context"),
    ],
)
def test_a_wrong_prompt_is_refused_and_others_run(llm: LLM, prompt: Any, why: str) -> None:
    with pytest.raises(UserError, match=why):
        llm.generate([prompt, [5, 6]], GREEDY, use_tqdm=False)
    assert tokens(llm.generate([prompts()[0]], GREEDY, use_tqdm=False)) == GOLDEN["clip"]["tokens"][:1]


def test_what_images_do_not_go_with_is_refused(llm: LLM) -> None:
    with pytest.raises(UserError, match="beam_width"):
        llm.beam_search([with_images(1)], BeamSearchParams(beam_width=2, max_tokens=4))
    with pytest.raises(UserError, match="truncate_prompt_tokens"):
        llm.generate([with_images(1)], SamplingParams(truncate_prompt_tokens=4), use_tqdm=False)


@pytest.mark.ci
def test_a_model_of_text_refuses_images() -> None:
    with LLM(**SLOTS) as text_only, pytest.raises(UserError, match="reads no images"):
        text_only.generate([{"prompt": "a", "multi_modal_data": {"image": image(1)}}], use_tqdm=False)
