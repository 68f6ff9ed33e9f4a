"""Beam search equals transformers': fifty prompts of five families, widths, length penalties, early stopping."""

from __future__ import annotations

import json
from itertools import product

import numpy as np
import pytest

from jaxllm import LLM, BeamSearchParams
from tests.parity import make_golden

pytestmark = pytest.mark.parity

FAMILIES = ("llama", "gemma2", "gpt2", "qwen3-moe", "deepseek-v3")
LENGTHS, PROMPTS_EACH = (3, 8, 17, 24, 31), 10  # tokens of a prompt; also around a block's end
MOST_TOKENS = 20
TIE, TOLERANCE = 1e-5, 1e-4
SEED = 3


@pytest.mark.slow  # transformers takes one to several minutes each
@pytest.mark.parametrize("case", FAMILIES)
@pytest.mark.parametrize(
    ("lengths", "count"),
    [((3, 17), 2), (LENGTHS, PROMPTS_EACH)],
    ids=["few", "all"],
)
def test_beams_are_those_of_transformers(case, lengths, count, tmp_path):
    """Sequences are equal, unless two scores differ by less than 1e-5; scores agree within 1e-4."""
    model = make_golden.make_model(case, SEED)
    rng = np.random.default_rng(SEED)
    prompts = [rng.integers(1, model.config.vocab_size, (count, length)).tolist() for length in lengths]
    stop = _often_generated(model, prompts[0])
    make_golden.save(model, tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": stop}))
    num_stopped = num_ties = 0
    with LLM(str(tmp_path), max_num_seqs=64, block_size=8, skip_tokenizer_init=True) as llm:
        for width, penalty, stopping in product((2, 4, 8), (-1.0, 0.0, 1.0, 2.0), (True, False, "never")):
            params = BeamSearchParams(
                beam_width=width,
                max_tokens=MOST_TOKENS,
                length_penalty=penalty,
                early_stopping=stopping,
                include_stop_str_in_output=True,
            )
            found = llm.beam_search([{"prompt_token_ids": ids} for same in prompts for ids in same], params)
            due = [each for same in prompts for each in _beams(model, same, width, penalty, stopping, stop)]
            for own, (tokens, scores) in zip(found, due, strict=True):
                np.testing.assert_allclose([each.score for each in own.sequences], scores, rtol=0, atol=TOLERANCE)
                for at, each in enumerate(own.sequences):
                    if each.tokens != tokens[at]:
                        others = np.abs(np.delete(scores, at) - scores[at])
                        assert others.min() < TIE, (width, penalty, stopping, own.sequences, tokens, scores)
                        num_ties += 1
                num_stopped += sum(each.finish_reason == "stop" for each in own.sequences)
    print(f"{case}: {num_stopped} outputs were ended by a token, {num_ties} differ where scores tie")
    assert num_stopped > 20, "the tokens that end outputs do"
    assert num_ties < 20, "that is what rounding may do"


def _often_generated(model, prompts):
    """Return a token that is frequent in greedy outputs."""
    import torch

    made = model.generate(
        torch.tensor(prompts), do_sample=False, max_new_tokens=MOST_TOKENS, eos_token_id=None, pad_token_id=0
    )
    counts = np.bincount(made[:, len(prompts[0]) :].numpy().ravel())
    return int(np.argsort(-counts)[2])


def _beams(model, prompts, width, penalty, stopping, stop):
    """Return for each prompt the sequences that transformers finds, and their scores."""
    import torch

    made = model.generate(
        torch.tensor(prompts),
        num_beams=width,
        num_return_sequences=width,
        do_sample=False,
        max_new_tokens=MOST_TOKENS,
        length_penalty=penalty,
        early_stopping=stopping,
        eos_token_id=stop,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    sequences = [_until(sequence, len(prompts[0]), stop) for sequence in made.sequences.tolist()]
    scores = made.sequences_scores.numpy()
    return [(sequences[at : at + width], scores[at : at + width]) for at in range(0, width * len(prompts), width)]


def _until(sequence, num_prompt, stop):
    """Remove the padding after a sequence's stop token."""
    output = sequence[num_prompt:]
    return sequence[:num_prompt] + (output[: output.index(stop) + 1] if stop in output else output)
