"""Models that read images equal transformers: preprocessing, tower, projector, logits, greedy tokens.

Needs torch: `make parity`.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm import LLM, SamplingParams
from jaxllm.checkpoints import weights
from jaxllm.checkpoints.described import describe
from jaxllm.checkpoints.sources import open_sources
from jaxllm.embedded import SHAPES_DIR
from jaxllm.media.processor import read_processor
from jaxllm.model import vision
from jaxllm.model.sharding import make_layout
from tests.parity.make_images import NUM_TOKENS, Peer
from tests.support.sizes import SLOTS
from tests.support.vision_models import SIDE, TOWERS, image, processor_settings, prompts, write_llava
from training.picture_questions import held_out_questions
from training.talks import IMAGE_ID

pytestmark = pytest.mark.parity
MODELS = [("clip", "llama", False), ("siglip", "llama", False), ("clip", "mistral", True), ("siglip", "qwen2", True)]


@pytest.mark.parametrize(("tower", "text", "older_names"), MODELS)
def test_a_model_equals_transformers(tower: str, text: str, older_names: bool, tmp_path: Path) -> None:
    folder = write_llava(tmp_path, tower, text, older_names)
    peer = Peer(folder)
    described = describe(folder)
    images, processor = described.images, described.processor
    assert images is not None and processor is not None
    declared = vision.declare(images.spec)
    params = weights.read(
        declared, open_sources(folder, declared, images.tensors, None), make_layout(jax.devices(), 1), np.float32
    )
    pixels = np.stack([processor.pixels(image(seed)) for seed in range(20)])
    due = peer.pixels([image(seed) for seed in range(20)])
    np.testing.assert_allclose(pixels, due.numpy(), atol=1e-5)
    with peer.torch.no_grad():
        features = peer.model.get_image_features(pixel_values=due, return_dict=True)
    for own, projected in zip(pixels, features.pooler_output, strict=True):
        found = vision.encode(images.spec, params, jnp.asarray(own))
        np.testing.assert_allclose(found, projected.numpy(), atol=1e-4, rtol=1e-4)

    greedy = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    scored = SamplingParams(temperature=0.0, max_tokens=1, logprobs=-1)
    with LLM(str(folder), max_logprobs=-1, **SLOTS) as llm:
        outputs = llm.generate(prompts(), greedy, use_tqdm=False)
        assert [output.outputs[0].token_ids for output in outputs] == [peer.greedy(prompt) for prompt in prompts()]
        for prompt, output in zip(prompts(), llm.generate(prompts(), scored, use_tqdm=False), strict=True):
            logprobs: Any = output.outputs[0].logprobs
            found = np.array([logprobs[0][token].logprob for token in range(llm.engine.model.vocab_size)])
            logits = peer.logits(prompt)[-1].astype(np.float64)
            np.testing.assert_allclose(found, logits - np.logaddexp.reduce(logits), atol=1e-4)


def test_the_included_model_equals_transformers() -> None:
    """Test questions about held-out pictures, with the preprocessing."""
    peer, greedy = Peer(SHAPES_DIR), SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    asked = [each for each in held_out_questions(2, 4) if each.image is not None]
    with LLM(str(SHAPES_DIR), **SLOTS) as llm:
        found = llm.chat([each.messages() for each in asked], greedy, use_tqdm=False)
        for each, output in zip(asked, found, strict=True):
            tokens = list(output.prompt_token_ids)
            first = tokens.index(IMAGE_ID)
            ids = tokens[: first + 1] + tokens[first + tokens.count(IMAGE_ID) :]
            due = peer.greedy({"prompt_token_ids": ids, "multi_modal_data": {"image": [each.image]}})
            assert output.outputs[0].token_ids == due


CHANGES: list[dict[str, Any]] = [{}, {"do_pad": True}, {"resample": 2}]
CROP = {"crop_size": {"height": 41, "width": 28}}  # SigLIP's processor does not crop


@pytest.mark.parametrize(("tower", "changes"), [*product(TOWERS, CHANGES), ("clip", CROP)])
def test_preprocessing_equals_transformers(tower: str, changes: dict[str, Any]) -> None:
    """Test images of odd sizes and modes, with crops larger than the image, padding to squares, and another filter."""
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
    from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
    from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

    settings, kinds = (
        processor_settings(tower) | changes,
        {"clip": CLIPImageProcessorPil, "siglip": SiglipImageProcessorPil},
    )
    kind: Any = kinds[tower]
    if "do_pad" in changes:
        kind, settings = LlavaImageProcessorPil, settings | {"image_processor_type": "LlavaImageProcessor"}
        settings |= {"crop_size": {"height": SIDE, "width": SIDE}, "size": {"shortest_edge": SIDE}}
    own = {key: value for key, value in settings.items() if key != "image_processor_type"}
    if "crop_size" in changes:  # not that of any model: read for a square, and changed
        settings |= {"crop_size": {"height": SIDE, "width": SIDE}}
    processor = read_processor(settings, 0, 16, SIDE)
    if "crop_size" in changes:
        object.__setattr__(processor, "crop", (41, 28))
    for mode in ("RGB", "L", "P", "RGBA", "CMYK"):
        given = [image(seed).convert(mode) for seed in range(8)]
        due = kind(**own)(given, return_tensors="np")["pixel_values"]
        found = [each.pixels for each in processor.prepare(given)]
        np.testing.assert_allclose(np.stack(found), due, atol=1e-5)
