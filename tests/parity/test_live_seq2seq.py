"""Encoder-decoder models equal transformers: logits, greedy tokens, beams, tokens that are forced.

Needs torch: `make parity`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxllm import LLM, BeamSearchParams, SamplingParams
from tests.parity.make_seq2seq import NUM_BEAM_TOKENS, NUM_TOKENS, Peer
from tests.support.seq2seq_models import KINDS, START, prompts, write_seq2seq
from tests.support.sizes import SLOTS

pytestmark = pytest.mark.parity
CHANGES: list[dict[str, Any]] = [
    {},
    {"activation_function": "relu", "scale_embedding": True},
    {"encoder_attention_heads": 6, "decoder_attention_heads": 2},
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("changes", CHANGES, ids=["usual", "relu", "other heads"])
def test_a_model_equals_transformers(kind: str, changes: dict[str, Any], tmp_path: Path) -> None:
    peer = Peer(write_seq2seq(tmp_path, kind, **changes))
    greedy = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    scored = SamplingParams(temperature=0.0, max_tokens=1, logprobs=-1)
    with LLM(str(tmp_path), max_logprobs=-1, **SLOTS) as llm:
        outputs = llm.generate(prompts(), greedy, use_tqdm=False)
        assert [output.outputs[0].token_ids for output in outputs] == [peer.greedy(prompt) for prompt in prompts()]
        for prompt, output in zip(prompts(), llm.generate(prompts(), scored, use_tqdm=False), strict=True):
            logprobs: Any = output.outputs[0].logprobs
            found = np.array([logprobs[0][token].logprob for token in range(llm.engine.model.vocab_size)])
            logits = peer.logits(prompt)[-1].astype(np.float64)
            np.testing.assert_allclose(found, logits - np.logaddexp.reduce(logits), atol=2e-4)
        for width in (2, 4):
            params = BeamSearchParams(beam_width=width, max_tokens=NUM_BEAM_TOKENS, include_stop_str_in_output=True)
            for prompt, own in zip(prompts(), llm.beam_search(prompts(), params), strict=True):
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
