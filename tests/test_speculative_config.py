"""`speculative_config`: accepted values, and values refused in one clear line."""

from __future__ import annotations

from typing import Any

import pytest

from jaxllm import EngineArgs
from jaxllm.errors import UserError
from jaxllm.speculative_config import SpeculativeConfig, read

NGRAM = {"method": "ngram", "num_speculative_tokens": 4}


@pytest.mark.parametrize(
    ("given", "due"),
    [
        (NGRAM, (5, 5)),
        (NGRAM | {"prompt_lookup_max": 3}, (3, 3)),
        (NGRAM | {"prompt_lookup_min": 2}, (2, 2)),
        (NGRAM | {"prompt_lookup_min": 2, "prompt_lookup_max": 4}, (2, 4)),
        ({"model": "[ngram]", "num_speculative_tokens": 4, "draft_tensor_parallel_size": 1}, (5, 5)),
    ],
)
def test_vllms_names_are_understood(given: dict[str, Any], due: tuple[int, int]) -> None:
    own = EngineArgs("m", speculative_config=given).speculative_config
    assert isinstance(own, SpeculativeConfig) and own == read(own)
    assert (own.method, own.model, own.num_speculative_tokens) == ("ngram", None, 4)
    assert (own.prompt_lookup_min, own.prompt_lookup_max) == due


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("ngram", "it must be an object"),
        ({"num_speculative_tokens": 4}, "method is missing"),
        ({"method": "ngram"}, "num_speculative_tokens is missing"),
        ({"method": "medusa", "num_speculative_tokens": 4}, "method must be one of ngram, draft_model, eagle3"),
        (NGRAM | {"num_speculative_tokens": 0}, "num_speculative_tokens must be an integer from 1 to 16"),
        (NGRAM | {"num_speculative_tokens": True}, "num_speculative_tokens must be an integer"),
        (NGRAM | {"prompt_lookup_min": 4, "prompt_lookup_max": 3}, "prompt_lookup_min is 4, and prompt_lookup_max 3"),
        (NGRAM | {"model": "some/model"}, "ngram needs no model"),
        (NGRAM | {"quality": "high"}, "it has no 'quality'"),
        ({"method": "eagle3", "num_speculative_tokens": 4}, "eagle3 needs a model"),
    ],
)
def test_what_is_wrong_is_said(given: Any, message: str) -> None:
    with pytest.raises(UserError, match="speculative_config: ") as failure:
        EngineArgs("m", speculative_config=given)
    assert message in str(failure.value) and "\n" not in str(failure.value)
