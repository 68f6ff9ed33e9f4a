"""Videos equal transformers: preprocessing, choice of frames, tower, logits, greedy tokens.

Needs torch and torchvision: `make parity`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm import LLM
from jaxllm.checkpoints import weights
from jaxllm.checkpoints.described import describe
from jaxllm.checkpoints.sources import open_sources
from jaxllm.media.films import film_of
from jaxllm.media.patches import video_processor
from jaxllm.media.resizing import resized
from jaxllm.media.videos import PreparedVideo, Sampling, paired_indices, read_videos, stamped_indices
from jaxllm.model.sharding import make_layout
from tests.parity.make_videos import VideoPeer
from tests.parity.media_peer import check_outputs
from tests.support.sizes import SLOTS
from tests.support.vision_models import ANY_SIZE, video, video_prompts, write_any_size

pytestmark = pytest.mark.parity


def patches_of(prepared: PreparedVideo) -> np.ndarray:
    """Return float32[patches, values] in transformers' order: channel, frame, pixel."""
    found = [pair.pixels.reshape(2, pair.pixels.shape[1], 3, -1).transpose(1, 2, 0, 3) for pair in prepared.pairs]
    return np.concatenate(found).reshape(sum(map(len, found)), -1)


@pytest.mark.parametrize("kind", ANY_SIZE)
def test_a_model_equals_transformers(kind: str, tmp_path: Path) -> None:
    """Test preprocessing and tower of 12 videos, and logits and greedy tokens of a batch of prompts."""
    folder = write_any_size(tmp_path, kind)
    peer = VideoPeer(folder)
    described = describe(folder, most_videos=1)
    images, processor = described.images, video_processor(described.processor)
    assert images is not None and processor is not None
    declared = images.spec.declare()
    params = weights.read(
        declared, open_sources(folder, declared, images.tensors, None), make_layout(jax.devices(), 1), np.float32
    )
    (size, *_) = images.spec.sizes(processor.most_tokens)
    encode = jax.jit(images.spec.encode)
    for seed in range(100, 112):
        film = (video(seed), {"fps": 2.0 + seed % 3})
        own, read = processor.prepare(film_of(film, "it", "it"), {}, "it", "it"), peer.read_videos([film])
        metadata = read.pop("video_metadata")
        np.testing.assert_allclose(patches_of(own), read["pixel_values_videos"].numpy(), atol=1e-5)
        rows, columns = own.pairs[0].grid or (0, 0)
        assert [[len(own.pairs), 2 * rows, 2 * columns]] == read["video_grid_thw"].tolist()
        assert own.step == pytest.approx(processor.rate * 2 / metadata[0].sampled_fps, rel=1e-6)
        with peer.torch.no_grad():
            features = peer.model.model.get_video_features(**read, return_dict=True)
        deep = getattr(features, "deepstack_features", None) or ()
        projected = peer.torch.cat([each[0] for each in (features.pooler_output, *deep)], dim=-1).numpy()
        for at, pair in enumerate(own.pairs):
            arrays, order = images.spec.arrange(pair, size)
            found = np.asarray(encode(params, *map(jnp.asarray, arrays)))[: pair.num_tokens]
            due = projected[at * pair.num_tokens :][: pair.num_tokens]
            np.testing.assert_allclose(found, due if order is None else due[order], atol=1e-4, rtol=1e-4)

    given = video_prompts()
    # Of videos whose time is not longer than their sides, both have the same positions.
    short: Any = {**given[1], "multi_modal_data": {**given[1]["multi_modal_data"]}}
    short["multi_modal_data"]["video"] = [(film, {"fps": 48.0}) for film, _ in short["multi_modal_data"]["video"]]
    plain = VideoPeer(folder, as_trained=False)
    with LLM(str(folder), max_logprobs=-1, **SLOTS) as llm:
        check_outputs(llm, [*((peer, prompt) for prompt in given), (plain, short)])


BOUNDS = {"shortest_edge": 4 * 32**2, "longest_edge": 40 * 32**2}
CHANGES: list[dict[str, Any]] = [
    {},
    {"size": BOUNDS},
    {"size": BOUNDS, "cap_pixels_per_frame": True, "max_video_tokens": 30},
    {"size": BOUNDS, "resample": 2, "do_normalize": False},
]


@pytest.mark.parametrize("is_stamped", [False, True])
@pytest.mark.parametrize("changes", CHANGES)
def test_videos_are_preprocessed_as_in_transformers(changes: dict[str, Any], is_stamped: bool) -> None:
    """Test random sizes, numbers of frames and rates, with frames chosen as the class does."""
    from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

    kind: Any = Qwen3VLVideoProcessor if is_stamped else Qwen2VLVideoProcessor
    patch = 16 if is_stamped else 14
    given: dict[str, Any] = {"placeholder": 1, "around": (2, 3), "is_stamped": is_stamped, "patch": patch, "merge": 2}
    own, peer, rng = read_videos(changes, rate=2.0, **given), kind(**changes), np.random.default_rng(0)
    for _ in range(8):
        count, height, width = rng.integers(2, 24 if changes else 6), *rng.integers(1, 150, 2)
        fps = float(rng.choice([1, 2, 24, 29.97]))
        film = rng.integers(0, 256, (count, height, width, 3), np.uint8)
        options: Any = {"return_tensors": "pt", "return_metadata": True, "input_data_format": "channels_last"}
        metadata = [{"fps": fps, "total_num_frames": int(count), "frames_indices": list(range(count))}]
        due = peer(film, video_metadata=metadata, **options)
        found = own.prepare(film_of((film, {"fps": fps}), "it", "it"), {}, "it", "it")
        np.testing.assert_allclose(patches_of(found), due["pixel_values_videos"].numpy(), atol=1e-5)
        indices = list(due["video_metadata"][0].frames_indices)
        if is_stamped:
            indices += indices[-1:] * (len(indices) % 2)
            np.testing.assert_allclose(found.seconds, np.reshape(indices, (-1, 2)).mean(axis=1) / fps)
        assert max(pair.num_tokens for pair in found.pairs) <= own.most_tokens


@pytest.mark.parametrize("is_stamped", [False, True])
def test_frames_are_chosen_as_in_transformers(is_stamped: bool) -> None:
    from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor
    from transformers.video_utils import VideoMetadata

    peer: Any = (Qwen3VLVideoProcessor if is_stamped else Qwen2VLVideoProcessor)()
    choose = stamped_indices if is_stamped else paired_indices
    for total in range(2, 2000, 13):
        for fps in (24.0, 29.97, 12.5):
            for asked in ({"fps": 2}, {"fps": 1.5}, {"num_frames": 8}, {"num_frames": 13}):
                if not is_stamped and asked.get("num_frames", 0) + 1 > total:
                    continue
                fields: Any = {"fps": None, "num_frames": None, "min_frames": 4, "max_frames": 768, **asked}
                due = peer.sample_frames(metadata=VideoMetadata(total_num_frames=total, fps=fps), **asked)
                assert choose(total, fps, Sampling(do_sample_frames=True, **fields)) == np.asarray(due).tolist()


def test_frames_are_resized_as_in_torchvision() -> None:
    """Test random sizes with noise and edges, larger and smaller, to the last bit."""
    import torch
    from torchvision.transforms import InterpolationMode
    from torchvision.transforms.v2 import functional

    rng = np.random.default_rng(0)
    for at in range(100):
        rows, columns, height, width = (int(each) for each in rng.integers(1, 200, 4))
        frame = rng.integers(0, 256, (rows, columns, 3), np.uint8)
        frame = frame if at % 2 else (frame > 127).astype(np.uint8) * np.uint8(255)
        filters = {2: InterpolationMode.BILINEAR, 3: InterpolationMode.BICUBIC}
        number = 2 + at % 3 // 2
        tensor = torch.from_numpy(frame).permute(2, 0, 1)[None]
        due = functional.resize(tensor, [height, width], interpolation=filters[number], antialias=True)
        np.testing.assert_array_equal(resized(frame, height, width, number), due[0].permute(1, 2, 0).numpy())
