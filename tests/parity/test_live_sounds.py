"""Models that read sound equal transformers: spectrograms, tower, projector, logits, greedy tokens.

Needs torch: `make parity`.
"""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm import LLM
from jaxllm.checkpoints import weights
from jaxllm.checkpoints.described import describe
from jaxllm.checkpoints.sources import open_sources
from jaxllm.media.sounds import read_sounds
from jaxllm.model import sound_tower
from jaxllm.model.sharding import make_layout
from tests.parity.make_sounds import Peer, exact
from tests.parity.media_peer import check_outputs
from tests.support.sizes import SLOTS
from tests.support.sound_models import KINDS, SECONDS, prompts, sound, write_sound_model

pytestmark = pytest.mark.parity


@pytest.mark.parametrize(
    ("kind", "older_names"),
    [*((kind, True) for kind in KINDS), pytest.param(KINDS[0], False, marks=pytest.mark.slow)],
)
def test_a_model_equals_transformers(
    kind: str, older_names: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test spectrograms, tower and projector of 20 sounds, and logits and greedy tokens of a batch of prompts."""
    monkeypatch.setattr(sound_tower, "SMALLEST", 32)  # several programs
    folder = write_sound_model(tmp_path, kind)
    peer = Peer(folder, kind)
    if not older_names:
        folder = write_sound_model(tmp_path / "newer", kind, older_names=False)
    described = describe(folder)
    images, processor = described.images, described.processor
    assert images is not None and processor is not None
    declared = images.spec.declare()
    params = weights.read(
        declared, open_sources(folder, declared, images.tensors, None), make_layout(jax.devices(), 1), np.float32
    )
    sizes, used = images.spec.sizes(processor.most_tokens), set()
    encode = jax.jit(images.spec.encode)
    for seed in range(20):
        given = sound(seed, 2.5 * SECONDS if kind == "voxtral" else SECONDS)
        (own,), (read, (length,)) = processor.prepare([given]), peer.read([given])
        due = read["input_features"].numpy()
        assert own.num_tokens == length
        if kind == "voxtral":
            assert not own.pixels[..., -1].any()
            np.testing.assert_allclose(own.pixels[..., :-1], due, atol=1e-5)
        else:
            frames = min(own.pixels.shape[1], due.shape[2])
            assert (own.pixels.shape[1] - 1) // 2 == -(-int(read["feature_attention_mask"].sum()) // 2)
            np.testing.assert_allclose(own.pixels[:, :frames], due[0, :, :frames], atol=1e-5)
        rows, projected = np.zeros((length, images.spec.row_width), np.float32), peer.embeddings(given)
        for first, piece in processor.pieces(own):
            size = next(size for size in sizes if size >= piece.num_tokens)
            used.add(size)
            arrays, order = images.spec.arrange(piece, size)
            found = np.asarray(encode(params, *map(jnp.asarray, arrays)))
            assert order is None and len(found) == size
            rows[first : first + piece.num_tokens] = found[: piece.num_tokens]
        np.testing.assert_allclose(rows, projected, atol=1e-4, rtol=1e-4)
    assert len(used) == len(sizes) and (len(sizes) > 3 or kind == "voxtral")

    with LLM(str(folder), max_logprobs=-1, **SLOTS) as llm:
        check_outputs(llm, [(peer, prompt) for prompt in prompts(kind)])
        assert llm.engine.metrics.compilations_after_ready == 0


@pytest.mark.parametrize("reads_silence", [False, True])
def test_spectrograms_of_published_sizes_equal_transformers(reads_silence: bool) -> None:
    """Test lengths around windows, frames and states, up to more than a window."""
    from transformers import WhisperFeatureExtractor

    peer = exact(WhisperFeatureExtractor(feature_size=128))
    processor = read_sounds({"feature_size": 128}, 9, 128, 1500, 4 if reads_silence else 2, reads_silence)
    rng, window = np.random.default_rng(0), 480000
    for count in (641, 799, 800, 801, 16000, 160001, window - 161, window - 1, window, window + 1, window + 99999):
        given = (0.1 * rng.standard_normal(count)).astype(np.float32)
        if reads_silence:
            due = peer(given, sampling_rate=16000, truncation=False, padding=True, pad_to_multiple_of=window)
            (own,) = processor.prepare([given])
            bands = np.asarray(due["input_features"]).reshape(128, -1, 3000).transpose(1, 0, 2)
            np.testing.assert_allclose(own.pixels[..., :-1], bands, atol=1e-5)
        elif count <= window:
            (own,) = processor.prepare([given])
            bands = np.asarray(peer(given, sampling_rate=16000)["input_features"])[0]
            found, frames = own.pixels, min(own.pixels.shape[1], 3000)
            np.testing.assert_allclose(found[:, :frames], bands[:, :frames], atol=1e-5)
            assert not found[:, frames:].any()
