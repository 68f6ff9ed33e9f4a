"""Encoder-decoder models equal transformers: logits, greedy tokens, beams, tokens that are forced.

Needs torch: `make parity`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxllm import LLM, BeamSearchParams, SamplingParams
from jaxllm.media.sound import LogMel
from tests.parity.make_seq2seq import NUM_BEAM_TOKENS, NUM_TOKENS, Peer
from tests.support.seq2seq_models import KINDS, NUM_MELS, START, prompts, write_seq2seq
from tests.support.sizes import SLOTS

pytestmark = pytest.mark.parity
CASES: list[tuple[str, dict[str, Any]]] = [
    *((kind, {}) for kind in KINDS),
    ("bart", {"activation_function": "relu", "scale_embedding": True}),
    ("mbart", {"encoder_attention_heads": 6, "decoder_attention_heads": 2}),
    ("t5", {"relative_attention_num_buckets": 32, "relative_attention_max_distance": 128}),
    ("whisper", {"num_mel_bins": NUM_MELS, "activation_function": "relu"}),
]


@pytest.mark.parametrize(("kind", "changes"), CASES)
def test_a_model_equals_transformers(kind: str, changes: dict[str, Any], tmp_path: Path) -> None:
    peer = Peer(write_seq2seq(tmp_path, kind, **changes))
    given = prompts(kind)
    greedy = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    scored = SamplingParams(temperature=0.0, max_tokens=1, logprobs=-1)
    with LLM(str(tmp_path), max_logprobs=-1, **SLOTS) as llm:
        outputs = llm.generate(given, greedy, use_tqdm=False)
        assert [output.outputs[0].token_ids for output in outputs] == [peer.greedy(prompt) for prompt in given]
        for prompt, output in zip(given, llm.generate(given, scored, use_tqdm=False), strict=True):
            logprobs: Any = output.outputs[0].logprobs
            found = np.array([logprobs[0][token].logprob for token in range(llm.engine.model.vocab_size)])
            logits = peer.logits(prompt)[-1].astype(np.float64)
            np.testing.assert_allclose(found, logits - np.logaddexp.reduce(logits), atol=1e-4)
        for width in (2, 4):
            params = BeamSearchParams(beam_width=width, max_tokens=NUM_BEAM_TOKENS, include_stop_str_in_output=True)
            for prompt, own in zip(given, llm.beam_search(given, params), strict=True):
                due, scores = peer.beams(prompt, width)
                np.testing.assert_allclose([each.score for each in own.sequences], scores, atol=1e-4)
                first = 1 + len(prompt.get("decoder_prompt", {}).get("prompt_token_ids", ()))
                assert [each.tokens[first:] for each in own.sequences] == due


def test_a_forced_token_equals_transformers(tmp_path: Path) -> None:
    """Test that what transformers forces as the first output is part of the decoder's prompt here."""
    peer = Peer(write_seq2seq(tmp_path, forced_bos_token_id=7))
    plain = [{"encoder_prompt": prompt["encoder_prompt"]} for prompt in prompts()]
    greedy = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS - 1, ignore_eos=True)
    with LLM(str(tmp_path), **SLOTS) as llm:
        for prompt, output in zip(plain, llm.generate(plain, greedy, use_tqdm=False), strict=True):
            due = peer.generate(prompt, NUM_TOKENS, forced_bos_token_id=7)[0][0]
            assert [START, *due] == [*output.prompt_token_ids, *output.outputs[0].token_ids]


@pytest.mark.parametrize("num_mels", [80, 128])
def test_spectrograms_equal_transformers(num_mels: int) -> None:
    from transformers import WhisperFeatureExtractor

    peer: Any = WhisperFeatureExtractor(feature_size=num_mels, chunk_length=2)
    rng, own = np.random.default_rng(num_mels), LogMel(num_mels, 200)
    for count in (1, 159, 1000, 16001, 31999, 32000):
        samples = (0.1 * rng.standard_normal(count) + 0.3 * np.sin(np.arange(count) / 20)).astype(np.float32)
        padded = np.pad(samples, (0, 32000 - count))
        due = peer._np_extract_fbank_features(padded[None], "cpu")[0]  # torch's differs from it by 2.4e-5
        np.testing.assert_allclose(own.spectrogram(samples), due, atol=1e-6)
