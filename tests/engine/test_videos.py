"""Videos in prompts: outputs equal to transformers', pairs of frames cached by content, and refusals."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from jaxllm import LLM, RequestOutput, SamplingParams
from jaxllm.checkpoints.described import describe
from jaxllm.errors import UserError
from tests.support.paths import ROOT
from tests.support.sizes import FEW_BLOCKS, SHORT_BLOCKS, SLOTS
from tests.support.videos import animation, url
from tests.support.vision_models import ANY_SIZE, AROUND, PLACEHOLDER, VIDEO, video, video_prompts, write_any_size

GOLDEN: Any = json.loads((ROOT / "tests" / "golden_videos.json").read_text())
GREEDY = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def check_logits(outputs: list[RequestOutput], kind: str) -> None:
    """Compare logits of the first eight tokens, after the prompt and in the last decode step."""
    for at, output in enumerate(outputs):
        for place, name in ((0, "logits"), (-1, "last")):
            logprobs: Any = output.outputs[0].logprobs
            found = np.array([logprobs[place][token].logprob for token in range(8)])
            due = np.array(GOLDEN[kind][name][at])
            np.testing.assert_allclose(found - found[0], due - due[0], atol=1e-3)


def ask(llm: LLM, given: Any, **options: Any) -> RequestOutput:
    ids = [5, 6, AROUND[0], VIDEO, AROUND[1], *[9] * 40]
    prompt = {"prompt_token_ids": ids, "multi_modal_data": {"video": given}, **options}
    (output,) = llm.generate([prompt], replace(GREEDY, max_tokens=4), use_tqdm=False)
    return output


@pytest.mark.parametrize("kind", ["qwen3_vl", pytest.param("qwen2_5_vl", marks=pytest.mark.ci)])
def test_outputs_equal_those_of_transformers(kind: str, tmp_path: Path) -> None:
    """Test videos, images and texts in one batch, twice; videos that are equal, or equal in size; and refusals."""
    with LLM(str(write_any_size(tmp_path, kind)), limit_mm_per_prompt={"video": 2}, **SLOTS) as llm:
        metrics = llm.engine.metrics
        chosen = replace(GREEDY, logprob_token_ids=list(range(8)))
        outputs = llm.generate(video_prompts(), chosen, use_tqdm=False)
        assert tokens(outputs) == GOLDEN[kind]["tokens"]
        check_logits(outputs, kind)
        encoded = metrics.images_encoded
        again = llm.generate(video_prompts(), GREEDY, use_tqdm=False)
        assert tokens(again) == GOLDEN[kind]["tokens"] and metrics.images_encoded == encoded
        assert sum(output.num_cached_tokens or 0 for output in again) >= 64

        film = video(120, frames=6)
        first, same = ask(llm, film), ask(llm, [Image.fromarray(frame) for frame in film])
        assert first.num_cached_tokens == 0 and metrics.images_encoded == encoded + 3
        assert tokens([first]) == tokens([same])
        assert len(first.prompt_token_ids) - (same.num_cached_tokens or 0) <= 16
        other = film.copy()
        other[0, 0, 0] ^= 255  # a pixel of the first pair
        assert ask(llm, other).num_cached_tokens == 0
        assert metrics.images_encoded == encoded + 4
        # Another rate is another time.
        slow = ask(llm, (film, {"fps": 0.5}))
        assert (slow.num_cached_tokens == 0) and len(slow.prompt_token_ids) >= len(first.prompt_token_ids)
        half = ask(llm, film, mm_processor_kwargs={"num_frames": 4, "do_sample_frames": True})
        assert len(half.prompt_token_ids) < len(first.prompt_token_ids)
        messages = [{"role": "user", "content": [{"type": "video", "video": film}, {"type": "text", "text": "a"}]}]
        prompt = llm.chat_prompt(messages, mm_processor_kwargs={"fps": 1.0})
        count = prompt["prompt_token_ids"].count(VIDEO)
        assert count == first.prompt_token_ids.count(VIDEO) and PLACEHOLDER not in prompt["prompt_token_ids"]
        if kind == "qwen3_vl":
            text = llm.engine.model.tokenizer.decode(prompt["prompt_token_ids"], skip_special_tokens=False)
            assert "<|vision_start|><0.5 seconds><|vision_start|>" in text and "<4.5 seconds>" in text
        (chat,) = llm.chat(messages, GREEDY, mm_processor_kwargs={"fps": 1.0}, use_tqdm=False)
        assert list(chat.prompt_token_ids) == prompt["prompt_token_ids"]
        data = animation(film, "GIF")
        prompts = [
            llm.chat_prompt([{"role": "user", "content": [{"type": name, name: given}]}])
            for name, given in (("video", data), ("video_url", {"url": url(data, "image/gif")}))
        ]
        assert prompts[0]["prompt_token_ids"] == prompts[1]["prompt_token_ids"]
        pairs = [[pair.digest for pair in each["multi_modal_data"]["video"][0].pairs] for each in prompts]
        assert pairs[0] == pairs[1] and len(pairs[0]) == 2
        assert metrics.compilations_after_ready == 0
        for wrong, why in (
            ({"prompt_token_ids": [5, VIDEO]}, "video placeholder"),
            ({"prompt": "a", "multi_modal_data": {"video": [film]}}, "0 video placeholders"),
            ({"prompt_token_ids": [5, VIDEO], "multi_modal_data": {"video": [film] * 3}}, "2 videos"),
            ({"prompt_token_ids": [5, VIDEO], "multi_modal_data": {"video": "a.mp4"}}, "uint8 array of frames"),
            ({"prompt_token_ids": [5, VIDEO], "multi_modal_data": {"video": video(1, 400)}}, "context"),
            ({"prompt_token_ids": [5, VIDEO], "multi_modal_data": {"video": b"GIF89a"}}, "not a video"),
        ):
            with pytest.raises(UserError, match=why):
                llm.generate([wrong], GREEDY, use_tqdm=False)
        with pytest.raises(UserError, match="not 'size'"):
            ask(llm, film, mm_processor_kwargs={"size": 3})


@pytest.mark.ci
def test_videos_can_be_off(tmp_path: Path) -> None:
    """Test that the tower's programs then take one frame, and that videos are refused."""
    with LLM(str(write_any_size(tmp_path, "qwen3_vl")), limit_mm_per_prompt={"video": 0}, **SLOTS) as llm:
        for most, count in ((0, 2), (1, 3)):
            images = describe(tmp_path, most_videos=most).images
            assert images is not None and len(images.spec.inputs(64)) == count
        for given, why in ((video(1), "only 'image' is supported"), (None, "may have none here")):
            prompt: dict[str, Any] = {"prompt_token_ids": [5, VIDEO]}
            prompt |= {} if given is None else {"multi_modal_data": {"video": given}}
            with pytest.raises(UserError, match=why):
                llm.generate([prompt], GREEDY, use_tqdm=False)


OTHER_ENGINES: dict[str, dict[str, Any]] = {
    "preempted": FEW_BLOCKS | {"num_kv_blocks": 12},
    "small steps": SLOTS | {"max_num_batched_tokens": 8},
    "small blocks": SHORT_BLOCKS,
    "two devices": SLOTS | {"tensor_parallel_size": 2},
    "deterministic": {"deterministic": True},
}


@pytest.mark.parametrize(
    ("engine", "kind"),
    [
        pytest.param(engine, kind, marks=pytest.mark.ci if at < 2 else pytest.mark.slow)
        for at, engine in enumerate(OTHER_ENGINES)
        for kind in ANY_SIZE
    ],
)
def test_outputs_are_equal_in_other_engines(engine: str, kind: str, tmp_path: Path) -> None:
    """Test pools that preempt, and chunks that split videos and pairs."""
    sizes = OTHER_ENGINES[engine]
    with LLM(str(write_any_size(tmp_path, kind)), **sizes) as llm:
        for _ in range(2):
            assert tokens(llm.generate(video_prompts(), GREEDY, use_tqdm=False)) == GOLDEN[kind]["tokens"]
        assert llm.engine.metrics.preemptions or sizes.get("num_kv_blocks") is None
        assert llm.engine.metrics.compilations_after_ready == 0
