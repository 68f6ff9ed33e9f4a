"""Models that read images equal transformers: preprocessing, tower, projector, logits, greedy tokens.

Needs torch: `make parity`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from jaxllm import LLM
from jaxllm.checkpoints import weights
from jaxllm.checkpoints.described import describe
from jaxllm.checkpoints.sources import open_sources
from jaxllm.embedded import SHAPES_DIR
from jaxllm.media.patches import read_patches
from jaxllm.media.processor import read_processor
from jaxllm.model.sharding import make_layout
from tests.parity.make_images import Peer
from tests.parity.media_peer import GREEDY, check_outputs
from tests.support.sizes import SLOTS
from tests.support.vision_models import (
    ANY_SIZE,
    BIDIRECTIONAL,
    SIDE,
    TOWERS,
    image,
    processor_settings,
    prompts,
    write_any_size,
    write_gemma,
    write_llava,
)
from training.picture_questions import held_out_questions
from training.talks import IMAGE_ID

pytestmark = pytest.mark.parity
MODELS = [
    *(
        (tower, partial(write_llava, tower=tower, text=text, older_names=older))
        for tower, text, older in (
            ("clip", "llama", False),
            ("siglip", "llama", False),
            ("clip", "mistral", True),
            ("siglip", "qwen2", True),
        )
    ),
    *((kind, partial(write_any_size, kind=kind)) for kind in ANY_SIZE),
    ("qwen2_5_vl", partial(write_any_size, kind="qwen2_5_vl", is_flat=True)),
    *((kind, partial(write_gemma, kind=kind)) for kind in BIDIRECTIONAL),
    pytest.param("gemma3", partial(write_gemma, kind="gemma3", older_names=False), marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("kind", "write"), MODELS)
def test_a_model_equals_transformers(kind: str, write: Callable[[Path], Path], tmp_path: Path) -> None:
    """Test preprocessing, tower and projector of 20 images, and logits and greedy tokens of a batch of prompts."""
    folder = write(tmp_path)
    peer = Peer(folder)
    described = describe(folder)
    images, processor = described.images, described.processor
    assert images is not None and processor is not None
    declared = images.spec.declare()
    params = weights.read(
        declared, open_sources(folder, declared, images.tensors, None), make_layout(jax.devices(), 1), np.float32
    )
    (size, *_) = images.spec.sizes(processor.most_tokens)
    encode = jax.jit(images.spec.encode)
    for seed in range(20):
        (own,), read = processor.prepare([image(seed)]), peer.read([image(seed)])
        due = read["pixel_values"].numpy()
        if own.grid is None:
            due = due[0]
        else:  # an image is two equal frames
            frames = due.reshape(len(due), 3, 2, -1)
            np.testing.assert_array_equal(frames[:, :, 0], frames[:, :, 1])
            due = frames[:, :, 0].reshape(own.pixels.shape)
            assert [[1, *(2 * each for each in own.grid)]] == read["image_grid_thw"].tolist()
        np.testing.assert_allclose(own.pixels, due, atol=1e-5)
        with peer.torch.no_grad():
            features = peer.model.model.get_image_features(**read, return_dict=True)
        deep = getattr(features, "deepstack_features", None) or ()
        projected = peer.torch.cat([each[0] for each in (features.pooler_output, *deep)], dim=-1).numpy()
        arrays, order = images.spec.arrange(own, size)
        found = np.asarray(encode(params, *map(jnp.asarray, arrays)))[: own.num_tokens]
        np.testing.assert_allclose(found, projected if order is None else projected[order], atol=1e-4, rtol=1e-4)

    with LLM(str(folder), max_logprobs=-1, **SLOTS) as llm:
        check_outputs(llm, [(peer, prompt) for prompt in prompts(kind)])


def test_the_included_model_equals_transformers() -> None:
    """Test questions about held-out pictures, with the preprocessing."""
    peer = Peer(SHAPES_DIR)
    asked = [each for each in held_out_questions(2, 4) if each.image is not None]
    with LLM(str(SHAPES_DIR), **SLOTS) as llm:
        found = llm.chat([each.messages() for each in asked], GREEDY, use_tqdm=False)
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


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"min_pixels": 784, "max_pixels": 784 * 20},
        {"size": {"shortest_edge": 1024, "longest_edge": 1024 * 30}, "patch_size": 16, "image_mean": [0.5] * 3},
        {"resample": 2, "do_normalize": False},
    ],
)
def test_images_of_any_size_are_preprocessed_as_in_transformers(changes: dict[str, Any]) -> None:
    """Test random sizes, among them one pixel and a side 200 times the other."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    processor, peer = (
        read_patches(changes, 1, None, changes.get("patch_size", 14), 2),
        Qwen2VLImageProcessorPil(**changes),
    )
    rng = np.random.default_rng(0)
    for width, height in [(1, 1), (200, 1), (3, 600), *rng.integers(1, 150, (30, 2)).tolist()]:
        given = Image.fromarray(rng.integers(0, 256, (height, width, 3), np.uint8))
        (own,), due = processor.prepare([given]), peer([given], return_tensors="np")
        frames = due["pixel_values"].reshape(len(own.pixels), 3, 2, -1)
        np.testing.assert_allclose(own.pixels, frames[:, :, 0].reshape(own.pixels.shape), atol=1e-5)
        assert own.num_tokens <= processor.most_tokens
