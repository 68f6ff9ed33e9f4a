"""Layers with fused norms, residuals and activations return the same as unfused ones."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import pallas_kernels
from jaxllm import LLM, SamplingParams
from jaxllm.checkpoints.weights import read_config
from jaxllm.families.families import read_spec
from jaxllm.model import fused
from jaxllm.model.quantized import Quantized
from pallas_kernels import Choice
from tests.support.paths import GOLDEN

SETTINGS = {"max_num_seqs": 2, "max_num_batched_tokens": 8, "max_model_len": 32, "num_kv_blocks": 9}
SETTINGS |= {"precompile": "covering", "skip_tokenizer_init": True}
# Whether the first layer's attention and its feed-forward are fused; the comment has the family's deciding trait.
FAMILIES = {
    "qwen2": (True, True),  # biases
    "gemma": (True, True),  # gains as distances from one, another activation
    "qwen3": (True, True),  # norms of heads in between
    "qwen3-moe": (True, True),  # further layers have experts
    "olmo2": (False, False),  # norms after the products
    "cohere": (False, False),  # parallel attention and feed-forward
    "granite": (False, False),  # scaled residuals
    "deepseek-v3": (False, True),  # latent attention; further layers have experts
}


def say(
    folder: str, monkeypatch: pytest.MonkeyPatch, is_fused: bool, **settings: int
) -> tuple[list[int], list[float], int]:
    """Generate; return tokens, their log-probabilities, and the number of fused products that were traced."""
    ran, own = [], pallas_kernels.fused_linear
    with monkeypatch.context() as patched:
        patched.setattr(fused, "chosen", lambda _: Choice("xla") if is_fused else None)
        patched.setattr(pallas_kernels, "fused_linear", lambda *given, **of: ran.append(of) or own(*given, **of))
        jax.clear_caches()
        with LLM(folder, **SETTINGS, **settings) as llm:
            prompt = [{"prompt_token_ids": [1, 5, 9, 13, 7]}]
            (output,) = llm.generate(prompt, SamplingParams(temperature=0.0, max_tokens=4, logprobs=1), use_tqdm=False)
    said = output.outputs[0]
    assert said.logprobs is not None
    return list(said.token_ids), [next(iter(each.values())).logprob for each in said.logprobs], len(ran)


@pytest.mark.ci  # clears JAX's caches, so that all tests after it trace again
@pytest.mark.parametrize(("family", "devices"), [("qwen2", 2), *((family, 1) for family in FAMILIES)])
def test_layers_say_the_same(family: str, devices: int, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = str(GOLDEN / family)
    tokens, found, count = say(folder, monkeypatch, True, tensor_parallel_size=devices)
    wanted, expected, none = say(folder, monkeypatch, False, tensor_parallel_size=devices)
    assert tokens == wanted and none == 0
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5)
    assert bool(count) == any(FAMILIES[family])


@pytest.mark.parametrize("family", FAMILIES)
def test_which_halves_of_a_layer_take_something_in(family: str) -> None:
    spec, _ = read_spec(read_config(GOLDEN / family))
    weights = {"attn_norm": 0, "mlp_norm": 0}
    choice = Choice("triton", sizes=((2, "xla"), (64, "triton")))
    assert fused.halves(spec, weights, 0, choice, 64) == FAMILIES[family]
    for tokens in (2, 65):
        assert fused.halves(spec, weights, 0, choice, tokens) == (False, False), "XLA's are chosen for these"
    assert fused.halves(spec, {"mlp_norm": 0}, 0, choice, 64) == (False, FAMILIES[family][1]), (
        "embeddings are normed already"
    )
    if spec.experts is not None:
        assert fused.halves(spec, weights, spec.num_layers - 1, choice, 64) == (FAMILIES[family][0], False)
    quantized = Quantized(np.zeros((2, 2)), np.zeros((1, 2)))
    assert fused.halves(spec, weights | {"up": quantized}, 0, choice, 64) == (False, False)
