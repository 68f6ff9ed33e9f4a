"""The decoder against `transformers`: logits within 1e-4 and the same greedy tokens, for every family.

The golden files hold random two-layer models and their outputs (see parity/make_golden.py); torch is not needed.
Tolerances are absolute: the logits' standard deviation is between 0.7 and 2, in the trained model about 5.
"""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from jaxllm.checkpoints import weights
from jaxllm.checkpoints.pooler_files import GENERATING
from jaxllm.families.audio_families import WITH_SOUND
from jaxllm.families.families import FAMILIES, read_spec
from jaxllm.families.gemma_vl_families import GEMMA
from jaxllm.families.qwen_vl_families import OF_ANY_SIZE
from jaxllm.families.seq2seq_families import SEQ2SEQ
from jaxllm.families.vision_families import WITH_IMAGES
from jaxllm.model import decoder, sharding
from jaxllm.model.spec import PairScaling, Rope, YarnScaling
from tests.parity.driver import Driver, decode_greedily, generate
from tests.support.paths import GOLDEN

CASES = sorted(folder.name for folder in GOLDEN.iterdir() if (folder / "golden.npz").exists())
TOLERANCE = 1e-4


def _golden(case: str) -> tuple[list[int], list[int], np.ndarray]:
    with np.load(GOLDEN / case / "golden.npz") as stored:
        return stored["prompt"].tolist(), stored["tokens"].tolist(), stored["logits"]


# Two by default, one of each kind of layer in CI, all in `make test-slow`; `make parity` compares with torch live.
QUICK = {"gemma3", "llama-3.1"}
CI = {"cohere2", "deepseek-v3", "gemma3", "gpt-oss", "gpt_neox", "llama-3.1", "opt", "phi3-long", "qwen2-moe"}


def marks_of(case: str) -> list[pytest.MarkDecorator]:
    return [] if case in QUICK else [pytest.mark.ci if case in CI else pytest.mark.slow]


@pytest.mark.parametrize("case", [pytest.param(case, marks=marks_of(case)) for case in CASES])
def test_logits_and_greedy_tokens_are_those_of_transformers(case):
    prompt, expected_tokens, expected_logits = _golden(case)
    assert len(expected_tokens) >= 32
    logits, tokens = generate(GOLDEN / case, prompt, len(expected_tokens))
    np.testing.assert_allclose(logits, expected_logits, rtol=0, atol=TOLERANCE)
    assert tokens == expected_tokens


def test_every_family_has_a_golden_case():
    covered = {name for case in CASES for name in weights.read_config(GOLDEN / case)["architectures"]}
    others = *WITH_IMAGES, GEMMA, *OF_ANY_SIZE, *SEQ2SEQ, *WITH_SOUND  # tested in tests/parity
    texts = [family for family in FAMILIES if family not in others]
    assert covered == {name for family in texts for name in family.architectures if name.endswith(GENERATING)}


@pytest.mark.parametrize("case", ["gemma2", pytest.param("mistral", marks=pytest.mark.ci)])
def test_the_reference_of_attention_agrees_too(case):
    prompt, _, expected_logits = _golden(case)
    logits, _ = generate(GOLDEN / case, prompt, 2, implementation="xla")
    np.testing.assert_allclose(logits, expected_logits[: len(logits)], rtol=0, atol=TOLERANCE)


# Fields of the Spec, each with a case in which it changes the logits.
CHANGES = [
    ("llama-3.1", {"ropes": (Rope(8, 500.0),) * 2}),
    ("mistral", {"windows": (12, 12)}),
    ("gemma2", {"windows": (None, 10)}),
    ("gemma2", {"attention_softcap": None}),
    ("gemma2", {"activation": "gelu"}),
    ("opt", {"position_offset": 1}),
    ("qwen2-yarn", {"ropes": (Rope(8, 500.0, YarnScaling(4.0, 32, 8.0)),) * 2}),
    ("gemma3", {"ropes": (Rope(12, 50.0),) * 2}),
    ("phi3-long", {"ropes": (Rope(6, 500.0, PairScaling((1.0, 1.5, 2.0)), 1.1832160),) * 2}),
    ("phi3", {"ropes": (Rope(6, 500.0),) * 2}),
    ("granite", {"residual_scale": 1.0}),
    ("granite", {"logit_scale": 1.0}),
    ("smollm3", {"ropes": (Rope(8, 2e6),) * 2}),
    ("gpt_neox", {"residual": "serial"}),
    ("cohere", {"logit_scale": 1.0}),
    ("glm", {"ropes": (Rope(8),) * 2}),
    ("mixtral", {"experts": {"is_normalised": False}}),
    ("mixtral", {"experts": {"per_token": 2}}),
    ("qwen2-moe", {"experts": {"is_normalised": True}}),
    ("gpt-oss", {"sinks": False}),
    ("gpt-oss", {"experts": {"clamp": 2.0}}),
    ("granite-moe", {"residual_scale": 1.0}),
    ("deepseek-v2", {"experts": {"groups_per_token": 3}}),
    ("deepseek-v2", {"experts": {"scale": 1.0}}),
    ("deepseek-v3", {"experts": {"choice_bias": False}}),
    ("deepseek-v3", {"experts": {"group_best": 1}}),
]


@pytest.mark.ci
@pytest.mark.parametrize(("case", "change"), [pytest.param(*each, marks=marks_of(each[0])) for each in CHANGES])
def test_each_feature_matters_in_its_golden_case(case, change):
    """If a field of the Spec were ignored, the comparison above would fail."""
    prompt, _, expected = _golden(case)
    spec, family = read_spec(weights.read_config(GOLDEN / case))
    layout = sharding.make_layout(jax.devices("cpu"), 1)
    params = weights.load(GOLDEN / case, spec, family, layout, "float32")
    change = {
        name: dataclasses.replace(getattr(spec, name), **inner) if isinstance(inner, dict) else inner
        for name, inner in change.items()
    }
    changed = dataclasses.replace(spec, **change)
    used = zip(decoder.declare(changed).layers, params.layers, strict=True)
    params = decoder.Params(params.top, tuple({name: layer[name] for name in names} for names, layer in used))
    logits, _ = decode_greedily(Driver(changed, params, layout, len(prompt), "xla"), prompt, 1)
    assert np.abs(logits - expected[: len(prompt)]).max() > 10 * TOLERANCE
